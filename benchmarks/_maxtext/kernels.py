"""What the attention kernels compute, for calls that do not say so themselves.

XLA sees a kernel as one foreign call. Forward it multiplies queries by keys and weights by values (two products of
2·S²·D operations a sequence and head); for the queries' gradient it has the scores again, their gradient, and that
times the keys (three products); for the keys' and values' gradients four. Causal kernels leave out blocks that the
mask hides whole.
"""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks._maxtext.decoder import Decoder
from capibara.plan.program import ProgramFacts

__all__ = ["state_kernels", "visible_share"]

_PRODUCTS = {
    "capibara_attention_output": 2,
    "capibara_attention_query": 3,
    "capibara_attention_key_value": 4,
}
_BLOCK = 512


def visible_share(length: int, block: int = _BLOCK) -> float:
    """The share of blocks of scores that a causal mask leaves."""
    blocks = math.ceil(length / block)
    return (blocks + 1) / (2 * blocks)


def state_kernels(facts: ProgramFacts, model: Decoder) -> ProgramFacts:
    """The facts with the operations of the attention kernels on one device.

    Raises:
      ValueError: a kernel that states nothing and is not known here.
    """
    # However many devices share the heads, each of them has that many times the sequences.
    products = 2.0 * model.batch * model.heads * model.length**2 * model.head_dim
    share = visible_share(model.length) if model.causal else 1.0
    kernels = []
    for kernel in facts.kernels:
        if kernel.flops is None:
            known = [n for name, n in _PRODUCTS.items() if kernel.name.startswith(name)]
            if not known:
                raise ValueError(f"the kernel {kernel.name!r} states no operations and is not known here")
            kernel = replace(kernel, flops=int(known[0] * products * share))
        kernels.append(kernel)
    return replace(facts, kernels=tuple(kernels))

"""The cross-entropy from hidden states and a head against the plain form, which has all logits: time and memory.

The large sizes of ``capibara.ops.loss.specs`` in float32 and bfloat16, timed in alternation in one process, forward
and with the gradients of hidden states and head. Memory is what the compiler says its programs need beside their
arguments and results.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

__all__ = ["run"]

PLAIN = "logsumexp of the whole logits"
DTYPES = ("float32", "bfloat16")


def run(rounds: int = 5, dtypes: Sequence[str] = DTYPES, only: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Rows of ratios: time of the peer / time of Capibara, so that above 1 Capibara is the faster.

    Args:
      dtypes: of hidden states and head.
      only: names of specs; none: all large ones.
    """
    import jax
    import jax.numpy as jnp

    from capibara.measure import interleaved
    from capibara.ops import explain
    from capibara.ops.loss import cross_entropy
    from capibara.ops.loss.specs import SPECS, arguments
    from capibara.ops.tagged import tagged

    def plain(hidden: Any, head: Any, labels: Any, layout: str = "fv") -> Any:
        logits = (hidden @ (head if layout == "fv" else head.T)).astype(jnp.float32)
        counted = labels != -100
        chosen = jnp.take_along_axis(logits, jnp.where(counted, labels, 0)[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen, where=counted)

    rows = []
    specs = [spec for spec in tagged(SPECS, "large") if not only or spec.name in only]
    for spec, dtype in itertools.product(specs, dtypes):
        drawn, options = arguments(spec, np.random.default_rng(0))
        arrays = [jnp.asarray(x, jnp.int32 if x.dtype.kind == "i" else dtype) for x in drawn]
        for way in ("forward", "with gradients"):
            sides: dict[str, Any] = {}
            memory = {}
            for name, function in (("capibara", cross_entropy), (PLAIN, plain)):
                loss: Any = partial(function, **options)
                step = loss if way == "forward" else jax.value_and_grad(loss, (0, 1))
                program = jax.jit(step).lower(*arrays).compile()
                analysis: Any = program.memory_analysis()
                memory[name] = analysis.temp_size_in_bytes
                sides[name] = partial(program, *arrays)
            values = [jax.tree.leaves(side())[0] for side in sides.values()]
            # The plain form rounds logits to bfloat16.
            np.testing.assert_allclose(*values, rtol=1e-5 if dtype == "float32" else 1e-3)
            table = interleaved(sides, rounds, warmup=1)
            print(f"{spec.name}, {dtype}, {way}\n{table}\n")
            rows.append(
                {
                    "what": f"cross-entropy ({spec.name}), {dtype}, {way}",
                    "shape": f"{np.prod(spec.batch)} × {spec.features}, vocabulary {spec.vocab}",
                    "implementation": explain(cross_entropy, *arrays, **options).chosen,
                    "ours_ms": 1e3 * statistics.median(table["capibara"].seconds),
                    "peer": PLAIN,
                    "peer_ms": 1e3 * statistics.median(table[PLAIN].seconds),
                    "ratio": table.ratio(PLAIN, "capibara"),
                    "ours_temporary_MiB": memory["capibara"] / 2**20,
                    "peer_temporary_MiB": memory[PLAIN] / 2**20,
                    "logits_MiB": 4 * np.prod(spec.batch) * spec.vocab / 2**20,
                }
            )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=DTYPES, action="append", help="default: both")
    parser.add_argument("--only", action="append", default=[], help="the name of a spec; default: all")
    args = parser.parse_args()
    for row in run(args.rounds, args.dtype or DTYPES, args.only):
        print(row)

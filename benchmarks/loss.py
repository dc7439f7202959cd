"""The cross-entropy from hidden states and a head against the plain form, which has all logits: time and memory.

float32, the large sizes of ``capibara.ops.loss.specs``, timed in alternation in one process, forward and with the
gradients of hidden states and head. Memory is what the compiler says its programs need beside their arguments and
results.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import numpy as np

__all__ = ["run"]

PLAIN = "logsumexp of the whole logits"


def run(rounds: int = 7) -> list[dict[str, Any]]:
    """Rows of ratios: time of the peer / time of Capibara, so that above 1 Capibara is the faster."""
    import jax
    import jax.numpy as jnp

    from capibara.measure import interleaved
    from capibara.ops import explain
    from capibara.ops.loss import cross_entropy
    from capibara.ops.loss.specs import SPECS, arguments
    from capibara.ops.tagged import tagged

    def plain(hidden: Any, head: Any, labels: Any, layout: str = "fv") -> Any:
        logits = hidden @ (head if layout == "fv" else head.T)
        counted = labels != -100
        chosen = jnp.take_along_axis(logits, jnp.where(counted, labels, 0)[..., None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen, where=counted)

    rows = []
    for spec in tagged(SPECS, "large"):
        drawn, options = arguments(spec, np.random.default_rng(0))
        arrays = [jnp.asarray(x, jnp.int32 if x.dtype.kind == "i" else jnp.float32) for x in drawn]
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
            np.testing.assert_allclose(*values, rtol=1e-5)
            table = interleaved(sides, rounds)
            print(f"{spec.name}, {way}\n{table}\n")
            rows.append(
                {
                    "what": f"cross-entropy ({spec.name}), {way}",
                    "shape": f"{np.prod(spec.batch)} × {spec.features}, vocabulary {spec.vocab}",
                    "implementation": explain(cross_entropy, *arrays, **options).chosen,
                    "ours_ms": 1e3 * statistics.median(table["capibara"].seconds),
                    "peer": PLAIN,
                    "peer_ms": 1e3 * statistics.median(table[PLAIN].seconds),
                    "ratio": table.ratio(PLAIN, "capibara"),
                    "ours_temporary_MiB": memory["capibara"] / 2**20,
                    "peer_temporary_MiB": memory[PLAIN] / 2**20,
                }
            )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    for row in run(parser.parse_args().rounds):
        print(row)

"""The nearest code of each vector against the whole table of distances, in JAX and PyTorch: time and memory.

float32, the large sizes of ``capibara.ops.vq.specs``, timed in alternation in one process. ``naive cdist`` is written
with XLA operations as it would be by hand; the memory is what the compiler says its programs need beside their
arguments and results (PyTorch does not say).
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import numpy as np

__all__ = ["run"]

NAIVE, TORCH, PRODUCT = "naive cdist + argmin", "torch.cdist + argmin", "the matrix product alone"


def run(rounds: int = 9) -> list[dict[str, Any]]:
    """Rows of ratios: time of the peer / time of Capibara, so that above 1 Capibara is the faster."""
    import jax
    import jax.numpy as jnp
    import torch  # pyright: ignore[reportMissingImports]

    from capibara.measure import interleaved
    from capibara.ops import explain
    from capibara.ops.tagged import tagged
    from capibara.ops.vq import nearest_code
    from capibara.ops.vq.specs import SPECS

    def naive(x: Any, codebook: Any) -> Any:
        squares = jnp.sum(x * x, 1)[:, None] + jnp.sum(codebook * codebook, 1)
        return jnp.argmin(jnp.sqrt(jnp.maximum(squares - 2 * x @ codebook.T, 0)), 1)

    def product(x: Any, codebook: Any) -> Any:
        # As many multiplications, a piece at a time, and no more: what a search by products cannot be faster than.
        return jax.lax.map(lambda part: jnp.sum(part @ codebook.T), x.reshape(-1, 256, x.shape[1]))

    rows = []
    for spec in tagged(SPECS, "large"):
        rng = np.random.default_rng(0)
        arrays = [rng.normal(size=shape).astype(np.float32) for shape in spec.shapes()]
        x, codebook = (jnp.asarray(a) for a in arrays)
        tensors = [torch.from_numpy(a) for a in arrays]
        programs = {
            name: jax.jit(side).lower(x, codebook).compile()
            for name, side in (("capibara", nearest_code), (NAIVE, naive), (PRODUCT, product))
        }
        memory = {name: program.memory_analysis() for name, program in programs.items()}
        temporary = {name: m.temp_size_in_bytes for name, m in memory.items() if m is not None}

        def in_torch(x: Any, codebook: Any) -> Any:
            with torch.no_grad():
                return torch.cdist(x, codebook).argmin(1)

        found = {name: np.asarray(programs[name](x, codebook)) for name in ("capibara", NAIVE)}
        sides: dict[str, Any] = {name: partial(program, x, codebook) for name, program in programs.items()}
        table = interleaved({**sides, TORCH: partial(in_torch, *tensors)}, rounds)
        print(f"{spec.name}\n{table}\n")
        for peer in (NAIVE, TORCH, PRODUCT):
            row = {
                "what": f"nearest code ({spec.name})",
                "shape": f"{spec.tokens} × {spec.dim}, {spec.codes} codes",
                "implementation": explain(nearest_code, x, codebook).chosen,
                "ours_ms": 1e3 * statistics.median(table["capibara"].seconds),
                "peer": peer,
                "peer_ms": 1e3 * statistics.median(table[peer].seconds),
                "ratio": table.ratio(peer, "capibara"),
            }
            if peer == NAIVE:
                row |= {
                    "ours_temporary_MiB": temporary["capibara"] / 2**20,
                    "peer_temporary_MiB": temporary[NAIVE] / 2**20,
                    "other_indices": int(np.sum(found["capibara"] != found[NAIVE])),
                }
            rows.append(row)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    for row in run(parser.parse_args().rounds):
        print(row)

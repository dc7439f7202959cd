"""Causal attention, forward and forward + backward, against JAX's own and PyTorch's, on this machine's CPU.

float32, the large shapes of ``capibara.ops.attention.specs``, timed in alternation in one process. The peers are
``jax.nn.dot_product_attention`` and ``torch.nn.functional.scaled_dot_product_attention``; each gets its arrays in
the spec's layout and gives its result in it, so that a transpose one of them needs is part of its time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["run"]

JAX, TORCH = "jax.nn.dot_product_attention", "torch scaled_dot_product_attention"


def _jax_pair(function: Callable[..., Any], arrays: list[np.ndarray]) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp

    q, k, v, out_grad = (jnp.asarray(x) for x in arrays)

    def both(q: Any, k: Any, v: Any, out_grad: Any) -> Any:
        out, pull = jax.vjp(function, q, k, v)
        return out, pull(out_grad)

    forward, backward = jax.jit(function), jax.jit(both)
    return {
        "forward": lambda: forward(q, k, v),
        "forward + backward": lambda: backward(q, k, v, out_grad),
    }


def _torch_pair(bhsd: bool, arrays: list[np.ndarray]) -> dict[str, Callable[[], Any]]:
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.functional import scaled_dot_product_attention  # pyright: ignore[reportMissingImports]

    q, k, v, out_grad = (torch.from_numpy(x.copy()) for x in arrays)

    def attend(*x: Any) -> Any:
        if bhsd:
            return scaled_dot_product_attention(*x, is_causal=True)
        out = scaled_dot_product_attention(*(y.transpose(1, 2) for y in x), is_causal=True)
        return out.transpose(1, 2)

    def forward() -> None:
        with torch.no_grad():
            attend(q, k, v)

    def backward() -> None:
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        attend(*inputs).backward(out_grad)

    return {"forward": forward, "forward + backward": backward}


def run(rounds: int = 9) -> list[dict[str, Any]]:
    """Rows of ratios: time of the peer / time of Capibara, so that above 1 Capibara is the faster."""
    import jax
    import jax.numpy as jnp

    from capibara.measure import interleaved
    from capibara.ops import explain
    from capibara.ops.attention import flash_attention
    from capibara.ops.attention.specs import select

    rows = []
    for spec in select("large"):
        bhsd = spec.options.get("layout", "bhsd") == "bhsd"
        shapes = spec.shapes()
        rng = np.random.default_rng(0)
        arrays = [rng.normal(size=shapes[n]).astype(np.float32) for n in ("query", "key", "value", "query")]

        def ours(q: Any, k: Any, v: Any, options: dict[str, Any] = spec.options) -> Any:
            return flash_attention(q, k, v, **options)

        def plain(q: Any, k: Any, v: Any, bhsd: bool = bhsd) -> Any:
            if not bhsd:
                return jax.nn.dot_product_attention(q, k, v, is_causal=True)
            q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
            return jnp.swapaxes(jax.nn.dot_product_attention(q, k, v, is_causal=True), 1, 2)

        sides = {
            "capibara": _jax_pair(ours, arrays),
            JAX: _jax_pair(plain, arrays),
            TORCH: _torch_pair(bhsd, arrays),
        }
        for what in ("forward", "forward + backward"):
            table = interleaved({name: side[what] for name, side in sides.items()}, rounds)
            print(f"{spec.name}, {what}\n{table}\n")
            rows += [
                {
                    "what": f"causal attention, {what} ({spec.name})",
                    "shape": " × ".join(str(n) for n in shapes["query"]),
                    "implementation": explain(flash_attention, *arrays[:3], **spec.options).chosen,
                    "ours_ms": 1e3 * statistics.median(table["capibara"].seconds),
                    "peer": peer,
                    "peer_ms": 1e3 * statistics.median(table[peer].seconds),
                    "ratio": table.ratio(peer, "capibara"),
                }
                for peer in (JAX, TORCH)
            ]
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    for row in run(parser.parse_args().rounds):
        print(row)

"""Causal attention, forward and forward + backward, against JAX's own and PyTorch's, on this machine's CPU.

float32, the large shapes of ``capibara.ops.attention.specs``, timed in alternation in one process. The peers are
``jax.nn.dot_product_attention`` and ``torch.nn.functional.scaled_dot_product_attention``; each gets its arrays in
the spec's layout and gives its result in it, so that a transpose one of them needs is part of its time. The last
row of each compares with what the cores can do: a matrix product with as many operations as the scores that a causal
mask leaves need, two products forward and five backward.

``peak_mib`` is how far the process's resident memory rises during a call, its results included: XLA's own figures
know nothing of what a native kernel or PyTorch allocates. The kernel resets the mark on request, on Linux.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import re
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["run"]

JAX, TORCH = "jax.nn.dot_product_attention", "torch scaled_dot_product_attention"
LIMIT = "a matrix product of as many operations"


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


def _limit_pair(query: tuple[int, ...], bhsd: bool) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp

    batch, heads, length, dim = query if bhsd else (query[0], query[2], query[1], query[3])
    scores = batch * heads * length * (length + 1) // 2
    product, size = jax.jit(jnp.matmul), 1024
    b = jnp.ones((size, size), jnp.float32)
    pair = {}
    for what, products in (("forward", 2), ("forward + backward", 7)):
        a = jnp.ones((max(products * dim * scores // size**2, 1), size), jnp.float32)
        pair[what] = partial(product, a, b)
    return pair


def _resident(name: str) -> float:
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None
    return int(found[1]) / 1024


def _peak(call: Callable[[], Any]) -> float | None:
    """MiB by which resident memory rises during a call; ``None`` where the system does not say."""
    import jax

    marks = Path("/proc/self/clear_refs")
    if not marks.exists():
        return None
    jax.block_until_ready(call())
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for later would hide what a call takes
    marks.write_text("5")
    before = _resident("VmRSS")
    jax.block_until_ready(call())
    return max(_resident("VmHWM") - before, 0.0)


def run(rounds: int = 9) -> list[dict[str, Any]]:
    """Rows of ratios: time of the peer / time of Capibara, so that above 1 Capibara is the faster."""
    import jax
    import jax.numpy as jnp

    from capibara.measure import interleaved
    from capibara.ops import explain
    from capibara.ops.attention import flash_attention
    from capibara.ops.attention.specs import SPECS
    from capibara.ops.tagged import tagged

    rows = []
    for spec in tagged(SPECS, "large"):
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
            LIMIT: _limit_pair(shapes["query"], bhsd),
        }
        for what in ("forward", "forward + backward"):
            table = interleaved({name: side[what] for name, side in sides.items()}, rounds)
            peaks = {name: _peak(side[what]) for name, side in sides.items()}
            print(f"{spec.name}, {what}\n{table}\npeaks in MiB: {peaks}\n")
            rows += [
                {
                    "what": f"causal attention, {what} ({spec.name})",
                    "shape": " × ".join(str(n) for n in shapes["query"]),
                    "implementation": explain(flash_attention, *arrays[:3], **spec.options).chosen,
                    "ours_ms": 1e3 * statistics.median(table["capibara"].seconds),
                    "peer": peer,
                    "peer_ms": 1e3 * statistics.median(table[peer].seconds),
                    "ratio": table.ratio(peer, "capibara"),
                    "peak_mib": peaks["capibara"],
                    "peer_peak_mib": peaks[peer],
                }
                for peer in (JAX, TORCH, LIMIT)
            ]
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    for row in run(parser.parse_args().rounds):
        print(row)

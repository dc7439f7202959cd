"""Every tropical operation against PyTorch: eager tensor operations, in the forms that PyTorch is fastest with.

PyTorch has no max-plus product. Each operation stands against two or more of its own forms, all checked against
Capibara's result; the fastest of them is the peer that counts, and its row says so. Both sides take the same cores;
compiling is not timed on either. ``pool`` is the one operation that PyTorch has a kernel for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["run"]

Case = tuple[str, str, Callable[..., Any], tuple[np.ndarray, ...], dict[str, Callable[..., Any]]]


def _product_forms() -> dict[str, Callable[..., Any]]:
    """``a ⊗ b`` in PyTorch."""
    import torch

    def broadcast(a: Any, b: Any) -> Any:
        return (a[:, :, None] + b[None]).amax(1)

    def transposed(a: Any, b: Any) -> Any:
        return (a[:, None, :] + b.T.contiguous()[None]).amax(-1)

    def rows(a: Any, b: Any) -> Any:
        return torch.stack([(row[:, None] + b).amax(0) for row in a])

    def depth(a: Any, b: Any) -> Any:
        out = a[:, :1] + b[:1]
        for k in range(1, len(b)):
            torch.maximum(out, a[:, k : k + 1] + b[k : k + 1], out=out)
        return out

    return {
        "broadcast": broadcast,
        "broadcast, B transposed": transposed,
        "row by row": rows,
        "by depth": depth,
    }


def _cases() -> list[Case]:
    import jax
    import torch
    from torch.nn import functional

    from capibara.ops import tropical

    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(np.float32)

    products = _product_forms()

    def closure(product: Callable[..., Any]) -> Callable[..., Any]:
        def function(distances: Any) -> Any:
            best = torch.where(
                torch.eye(len(distances), dtype=torch.bool), torch.clamp(-distances, min=0), -distances
            )
            for _ in range((len(distances) - 1).bit_length()):
                best = product(best, best)
            return -best

        return function

    def relaxed(distances: Any) -> Any:
        best = distances.clone().fill_diagonal_(0)
        for k in range(len(best)):
            torch.minimum(best, best[:, k : k + 1] + best[k : k + 1], out=best)
        return best

    def lines(coefficients: Any, x: Any) -> Any:
        return (coefficients + torch.arange(len(coefficients)) * x[:, None]).amax(-1)

    def horner(coefficients: Any, x: Any) -> Any:
        out = coefficients[-1] + torch.zeros_like(x)
        for coefficient in reversed(coefficients[:-1].unbind()):
            out = torch.maximum(out + x, coefficient)
        return out

    def step_by_step(a: Any, b: Any) -> Any:
        out = [b[0]]
        for step, start in zip(a[1:].unbind(), b[1:].unbind(), strict=True):
            out.append(torch.maximum(out[-1] + step, start))
        return torch.stack(out)

    def summed(a: Any, b: Any) -> Any:
        total = a.double().cumsum(0)
        return (total + (b - total).cummax(0).values).float()

    def unfolded(product: Callable[..., Any]) -> Callable[..., Any]:
        def function(x: Any, kernel: Any) -> Any:
            size = x.shape[-1] - kernel.shape[-1] + 1
            windows = functional.unfold(x, kernel.shape[2:])
            columns = windows.transpose(0, 1).reshape(windows.shape[1], -1)
            out = product(kernel.reshape(len(kernel), -1), columns)
            return out.reshape(len(kernel), len(x), -1, size).transpose(0, 1)

        return function

    def taps(x: Any, kernel: Any) -> Any:
        sizes = [have - need + 1 for have, need in zip(x.shape[2:], kernel.shape[2:], strict=True)]
        out = torch.full((len(x), len(kernel), *sizes), -torch.inf)
        for place in np.ndindex(*kernel.shape[2:]):
            view = x[(..., *(slice(p, p + s) for p, s in zip(place, sizes, strict=True)))]
            for channel in range(x.shape[1]):
                values = kernel[(slice(None), channel, *place)].reshape(1, -1, *(1,) * len(sizes))
                torch.maximum(out, view[:, channel, None] + values, out=out)
        return out

    def flat(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, kernel: function(x[:, :, None], kernel[:, :, None])[:, :, 0]

    few = {name: products[name] for name in ("broadcast, B transposed", "row by row", "by depth")}
    graph = np.where(random.random((256, 256)) < 0.1, random.random((256, 256)), np.inf).astype(np.float32)
    jit = jax.jit
    forms = {f"unfold, {name}": unfolded(form) for name, form in few.items()}
    return [
        ("matmul", "512³", jit(tropical.matmul), (normal(512, 512), normal(512, 512)), few),
        (
            "matvec",
            "2048²",
            jit(tropical.matvec),
            (normal(2048, 2048), normal(2048)),
            {"broadcast": lambda a, x: (a + x).amax(-1)},
        ),
        (
            "shortest_paths",
            "256 nodes",
            jit(tropical.shortest_paths),
            (graph,),
            {
                **{f"squaring, {name}": closure(form) for name, form in few.items()},
                "Floyd and Warshall": relaxed,
            },
        ),
        (
            "polyval",
            "degree 63, 100,000 points",
            jit(tropical.polyval),
            (normal(64) * 10, normal(100_000)),
            {"all lines": lines, "Horner": horner},
        ),
        (
            "scan",
            "4096 × 256",
            jit(tropical.scan),
            (normal(4096, 256), normal(4096, 256)),
            {"step by step": step_by_step, "cumsum and cummax": summed},
        ),
        (
            "conv1d",
            "8 × 16 × 1024, 32 kernels of 9",
            jit(tropical.conv1d),
            (normal(8, 16, 1024), normal(32, 16, 9)),
            {"by taps": taps, **{name: flat(form) for name, form in forms.items()}},
        ),
        (
            "conv2d",
            "4 × 8 × 48², 16 kernels of 5²",
            jit(tropical.conv2d),
            (normal(4, 8, 48, 48), normal(16, 8, 5, 5)),
            {"by taps": taps, **forms},
        ),
        (
            "pool",
            "8 × 32 × 64², windows of 2²",
            jit(lambda x: tropical.pool(x, 2)),
            (normal(8, 32, 64, 64),),
            {"max_pool2d": lambda x: functional.max_pool2d(x, 2)},
        ),
    ]


def run(rounds: int = 7) -> list[dict[str, Any]]:
    """Rows of ratios: time of PyTorch / time of Capibara, the fastest form of PyTorch marked."""
    import jax.numpy as jnp
    import torch

    from capibara.measure import interleaved

    rows: list[dict[str, Any]] = []
    for what, shape, ours, arrays, forms in _cases():
        given, tensors = [jnp.asarray(a) for a in arrays], [torch.from_numpy(a) for a in arrays]
        want = np.asarray(ours(*given))
        for name, form in forms.items():
            np.testing.assert_allclose(
                form(*tensors).numpy(), want, rtol=1e-4, atol=1e-3, err_msg=f"{what}, {name}"
            )
        sides: dict[str, Callable[[], Any]] = {"capibara": lambda ours=ours, given=given: ours(*given)}
        for name, form in forms.items():
            sides[f"PyTorch, {name}"] = lambda form=form, tensors=tensors: form(*tensors)
        with torch.no_grad():
            table = interleaved(sides, rounds, 1)
        print(f"{what}, {shape}\n{table}\n")
        peers = [name for name in sides if name != "capibara"]
        fastest = min(peers, key=lambda name: table[name].median)
        rows.extend(
            {
                "what": what,
                "shape": shape,
                "peer": name,
                "ratio": table.ratio(name, "capibara"),
                "fastest of PyTorch": name == fastest,
                "ms": table["capibara"].median * 1e3,
            }
            for name in peers
        )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    for row in run(parser.parse_args().rounds):
        print(row)

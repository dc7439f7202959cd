"""Convolutions: the sum over taps."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from capibara.ops import conv
from fuzz_ops.case import EPS, Arg, Family, Generator, floats, pick

__all__ = ["OPERATIONS"]


def correlate(x: Any, w: Any, strides: Any, pads: Any, dilation: Any, groups: int = 1) -> np.ndarray:
    """``[batch, *sizes, channels]`` with ``[*taps, channels / groups, out]``, padded by ``pads`` on each axis."""
    rank = w.ndim - 2
    # A negative pad crops.
    x = np.pad(x, [(0, 0), *((max(a, 0), max(b, 0)) for a, b in pads), (0, 0)])
    crop = tuple(slice(max(-a, 0), n - max(-b, 0)) for (a, b), n in zip(pads, x.shape[1:-1], strict=True))
    x = x[(slice(None), *crop)]
    taps = w.shape[:rank]
    sizes = [
        max(0, (n - (k - 1) * d - 1) // s + 1) if n > (k - 1) * d else 0
        for n, k, s, d in zip(x.shape[1:-1], taps, strides, dilation, strict=True)
    ]
    out = np.zeros((x.shape[0], *sizes, w.shape[-1]))
    if out.size == 0:
        return out
    per_in, per_out = w.shape[-2], w.shape[-1] // groups
    for tap in itertools.product(*map(range, taps)):
        window = tuple(
            slice(t * d, t * d + (n - 1) * s + 1, s)
            for t, d, n, s in zip(tap, dilation, sizes, strides, strict=True)
        )
        seen = x[(slice(None), *window)]
        for g in range(groups):
            mine = slice(g * per_out, (g + 1) * per_out)
            out[..., mine] += seen[..., g * per_in : (g + 1) * per_in] @ w[tap][:, mine]
    return out


def same_pads(sizes: Any, taps: Any, strides: Any, dilation: Any) -> list[tuple[int, int]]:
    pads = []
    for n, k, s, d in zip(sizes, taps, strides, dilation, strict=True):
        whole = max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0)
        pads.append((whole // 2, whole - whole // 2))
    return pads


def convolve(x: Any, w: Any, strides: Any, padding: Any, dilation: Any, groups: int) -> np.ndarray:
    sizes, taps = x.shape[1:-1], w.shape[:-2]
    if padding == "SAME":
        padding = same_pads(sizes, taps, strides, dilation)
    elif padding == "VALID":
        padding = [(0, 0)] * len(taps)
    return correlate(x, w, strides, padding, dilation, groups)


def transposed(x: Any, w: Any, strides: Any, padding: Any, dilation: Any, groups: int) -> np.ndarray:
    """Inputs spread apart, then correlated; padding leaves outputs out."""
    sizes, taps = x.shape[1:-1], w.shape[:-2]
    spread = np.zeros(
        (x.shape[0], *((n - 1) * s + 1 for n, s in zip(sizes, strides, strict=True)), x.shape[-1])
    )
    spread[(slice(None), *(slice(None, None, s) for s in strides))] = x
    pads = []
    for axis, (k, s, d) in enumerate(zip(taps, strides, dilation, strict=True)):
        wide = (k - 1) * d + 1
        if padding == "SAME":
            whole = wide + s - 2
            before = wide - 1 if s > wide - 1 else -(-whole // 2)
            pads.append((before, whole - before))
        elif padding == "VALID":
            pads.append((wide - 1, wide - 1 + max(s - wide, 0)))
        else:
            pads.append((wide - 1 - padding[axis][0], wide - 1 - padding[axis][1]))
    return correlate(spread, w, (1,) * len(taps), pads, dilation, groups)


def _each(rng: Generator, n: int, value: tuple[int, ...]) -> Any:
    """As one number, where they are equal, or one each."""
    return value[0] if len(set(value)) == 1 and rng.random() < 0.5 else value


def plain(n: int, transpose: bool) -> Any:
    name = f"conv_transpose{n}d" if transpose else f"conv{n}d"
    function = getattr(conv, name)
    definition = transposed if transpose else convolve

    def family(rng: Generator) -> Family:
        groups = pick(rng, 1, 1, 2)
        channels, outs = groups * pick(rng, 1, 2), groups * pick(rng, 1, 2, 3)
        sizes = tuple(pick(rng, 1, 4, 5, 6) for _ in range(n))
        taps = tuple(pick(rng, 1, 2, 3) for _ in range(n))
        strides = tuple(pick(rng, 1, 1, 2, 3) for _ in range(n))
        dilation = tuple(pick(rng, 1, 1, 2) for _ in range(n))
        wide = tuple((k - 1) * d + 1 for k, d in zip(taps, dilation, strict=True))
        pads = tuple((int(rng.integers(0, k)), int(rng.integers(0, k))) for k in wide)
        padding = pick(rng, "SAME", "VALID", pads)
        if not transpose and padding == "VALID":
            sizes = tuple(max(s, k) for s, k in zip(sizes, wide, strict=True))
        elif not transpose and padding is pads:
            sizes = tuple(max(s, k - sum(p)) for s, k, p in zip(sizes, wide, pads, strict=True))
        elif transpose and padding is pads:
            # Something is left: a length of `(n - 1) s + wide` loses the two.
            sizes = tuple(
                max(m, -(-(1 + sum(p) - k) // s) + 1)
                for m, k, s, p in zip(sizes, wide, strides, pads, strict=True)
            )
        batch, dtype = pick(rng, 0, 1, 2, 4), floats(rng)
        options: dict[str, Any] = {
            "strides": _each(rng, n, strides),
            "padding": padding,
            "dilation": _each(rng, n, dilation),
            "groups": groups,
            "precision": pick(rng, None, None, "highest"),
        }
        if n == 1 and padding is pads and rng.random() < 0.5:
            options["padding"] = pads[0]

        def oracle(x: Any, w: Any) -> list[np.ndarray]:
            return [definition(x, w, strides, padding, dilation, groups)]

        return Family(
            f"{name}({(batch, *sizes, channels)}, {(*taps, channels // groups, outs)}, {dtype}, {options})",
            lambda x, w: function(x, w, **options),
            oracle,
            (Arg((batch, *sizes, channels), dtype), Arg((*taps, channels // groups, outs), dtype)),
            moods=("normal", "normal", "zeros", "ties", "large", "small"),
            x64=dtype == "float64",
            tolerance=16 * EPS[dtype],
            magnitude=lambda x, w: oracle(abs(x), abs(w)),
            differentiable=(0, 1),
            twice=dtype in ("float32", "float64"),
            dtypes=(dtype,),
        )

    return family


def winograd(rng: Generator) -> Family:
    name = pick(rng, "auto", "winograd", "winograd", "xla", "reference")
    taps = (3, 3) if name == "winograd" else pick(rng, (3, 3), (3, 3), (1, 1), (2, 3))
    strides = (1, 1) if name == "winograd" else pick(rng, (1, 1), (2, 1))
    padding = pick(rng, "SAME", "VALID", ((1, 1), (1, 1)), ((0, 2), (1, 0)), ((2, 2), (0, 0)))
    sizes = pick(rng, (4, 4), (5, 7), (3, 8), (6, 3))
    batch, channels, outs = pick(rng, 0, 1, 2, 4), pick(rng, 1, 2, 3), pick(rng, 1, 2, 4)
    tile = pick(rng, None, 2, 4, (2, 2), (4, 4), (4, 2))
    dtype = floats(rng)
    options: dict[str, Any] = {
        "strides": strides,
        "padding": padding,
        "tile_size": tile,
        "implementation": name,
    }

    def oracle(x: Any, w: Any) -> list[np.ndarray]:
        return [convolve(x, w, strides, padding, (1, 1), 1)]

    special = name != "reference"  # where a NaN stands is the same for all but what sums over taps on zeros
    return Family(
        f"winograd_conv2d({(batch, *sizes, channels)}, {(*taps, channels, outs)}, {dtype}, {options})",
        lambda x, w: conv.winograd_conv2d(x, w, **options),
        oracle,
        (Arg((batch, *sizes, channels), dtype), Arg((*taps, channels, outs), dtype)),
        moods=("normal", "normal", "normal", "zeros", "ties", "large", "small"),
        x64=dtype == "float64",
        # A tile's transforms mix its elements: the largest one counts, not those of a window.
        tolerance=200 * EPS[dtype],
        magnitude=lambda x, w: [np.max(np.abs(x), initial=0) * np.max(np.abs(w), initial=0) * w[..., 0].size],
        differentiable=(0, 1),
        twice=dtype in ("float32", "float64") and special,
        dtypes=(dtype,),
    )


def causal(rng: Generator) -> Family:
    batch, length, channels, taps = (
        pick(rng, 1, 2, 4),
        pick(rng, 1, 2, 6, 9),
        pick(rng, 1, 3, 4),
        pick(rng, 1, 2, 4),
    )
    bias, state, dtype = bool(rng.random() < 0.5), bool(rng.random() < 0.5), floats(rng)
    name = pick(rng, "auto", "xla", "reference")

    def split(arrays: Any) -> tuple[Any, Any, Any, Any]:
        x, w, *more = arrays
        return x, w, more.pop(0) if bias else None, more.pop(0) if state else None

    def call(*arrays: Any) -> Any:
        x, w, b, s = split(arrays)
        return conv.causal_conv1d(x, w, b, state=s, implementation=name)

    def oracle(*arrays: Any) -> list[np.ndarray]:
        x, w, b, s = split(arrays)
        past = np.concatenate([np.zeros((x.shape[0], taps - 1, channels)) if s is None else s, x], 1)
        y: Any = sum(w[i] * past[:, i : i + length] for i in range(taps))
        return [y if b is None else y + b, past[:, length:]]

    args = [Arg((batch, length, channels), dtype), Arg((taps, channels), dtype)]
    args += [Arg((channels,), dtype)] * bias + [Arg((batch, taps - 1, channels), dtype)] * state
    return Family(
        f"causal_conv1d({[a.shape for a in args]}, {dtype}, bias={bias}, state={state}, {name!r})",
        call,
        oracle,
        tuple(args),
        moods=("normal", "normal", "zeros", "ties", "large", "small"),
        x64=dtype == "float64",
        tolerance=8 * EPS[dtype],
        magnitude=lambda *arrays: oracle(*map(abs, arrays)),
        differentiable=tuple(range(len(args))),
        twice=dtype in ("float32", "float64"),
    )


OPERATIONS = {
    "conv.causal_conv1d": causal,
    "conv.winograd_conv2d": winograd,
    **{f"conv.conv{n}d": plain(n, False) for n in (1, 2, 3)},
    **{f"conv.conv_transpose{n}d": plain(n, True) for n in (1, 2, 3)},
}

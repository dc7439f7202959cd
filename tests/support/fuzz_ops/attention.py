"""Attention from its definition, one query at a time."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_oracle import oracle as definition
from paged_oracle import definition as one_sequence

from capibara.ops import attention
from fuzz_ops.case import EPS, Arg, Family, Generator, dtype_of, floats, pick

__all__ = ["OPERATIONS"]


def flash(rng: Generator) -> Family:
    batch, kv_heads, share = pick(rng, 1, 2, 4), pick(rng, 1, 2), pick(rng, 1, 2)
    heads, q_len, kv_len = kv_heads * share, pick(rng, 1, 3, 4, 8), pick(rng, 1, 4, 6, 8)
    kv_len = q_len if rng.random() < 0.5 else kv_len
    dim, value_dim, dtype = pick(rng, 1, 4, 8), pick(rng, 4, 4, 8, 3), floats(rng)
    name = pick(rng, "auto", "auto", "auto", "native", "cpu", "xla", "xla", "reference")
    if rng.random() < 0.06:
        name = pick(rng, "pallas_tpu", "pallas_gpu")
        value_dim = dim = 8
        dtype = "float32"
    if name == "native" and dtype != "float32":
        name = "auto"
    if name in ("native", "cpu") and dtype == "float64":
        name = "auto"
    layout = pick(rng, "bhsd", "bhsd", "bshd")
    options: dict[str, Any] = {
        "use_causal_mask": bool(rng.random() < 0.4),
        "window": pick(rng, None, None, None, 1, 2, (1, None), (None, 2), (0, 1)),
        "softcap": pick(rng, None, None, None, 2.0),
        "layout": layout,
    }
    if rng.random() < 0.3:
        options["scale"] = pick(rng, 0.3, 1.0)
    calls = {**options, "block_size": pick(rng, None, None, None, 2, 3, 128), "implementation": name}
    # Half of the time precision says what it is anyway.
    calls["precision"] = pick(rng, None, None, "highest")
    biased, segmented = bool(rng.random() < 0.35), bool(rng.random() < 0.3)
    bias_shape = tuple(n if rng.random() < 0.6 else 1 for n in (batch, heads, q_len, kv_len))
    hides = biased and rng.random() < 0.4

    def turned(b: int, h: int, s: int, d: int) -> tuple[int, ...]:
        return (b, s, h, d) if layout == "bshd" else (b, h, s, d)

    args = [
        Arg(turned(batch, heads, q_len, dim), dtype),
        Arg(turned(batch, kv_heads, kv_len, dim), dtype),
        Arg(turned(batch, kv_heads, kv_len, value_dim), dtype),
    ]
    sunk = bool(rng.random() < 0.3)
    args += [Arg((heads,), dtype)] * sunk
    args += [Arg(bias_shape, dtype)] * biased
    args += [Arg((batch, q_len), "int32", range(3)), Arg((batch, kv_len), "int32", range(3))] * segmented

    def fix(arrays: list[np.ndarray], rng: Generator) -> list[np.ndarray]:
        if hides:
            hidden = rng.random(bias_shape) < 0.3
            arrays[3 + sunk] = np.where(hidden, -np.inf, arrays[3 + sunk].astype(np.float64))
        return arrays

    def call(q: Any, k: Any, v: Any, *more: Any) -> Any:
        left = list(more)
        extra: dict[str, Any] = {"sinks": left.pop(0)} if sunk else {}
        if biased:
            extra["bias"] = left.pop(0)
        if segmented:
            extra["segment_ids"] = tuple(left)
        return attention.flash_attention(q, k, v, **calls, **extra)

    def oracle(q: Any, k: Any, v: Any, *more: Any) -> list[np.ndarray]:
        left = list(more)
        arrays = {"query": q, "key": k, "value": v}
        if sunk:
            arrays["sinks"] = left.pop(0)
        if biased:
            arrays["bias"] = left.pop(0)
        return [definition(arrays, {**options, "segment_ids": tuple(left) if segmented else None})]

    return Family(
        f"flash_attention({dtype} {[a.shape for a in args]}, sinks={sunk}, bias={biased}, segments={segmented}, "
        f"{calls})",
        call,
        oracle,
        tuple(args),
        fix=fix,
        moods=("normal", "normal", "normal", "zeros", "ties"),
        x64=dtype == "float64",
        tolerance=8 * EPS[dtype] + 16 * (EPS["float64"] if dtype == "float64" else EPS["float32"]),
        gradient_tolerance=max(40 * EPS[dtype], 2e-4 if dtype == "float32" else 0),
        differentiable=tuple(range(3 + sunk + biased)),
        twice=dtype in ("float32", "float64") and not name.startswith("pallas"),
        dtypes=(dtype,),
    )


def _options(rng: Generator) -> dict[str, Any]:
    return {
        "window": pick(rng, None, None, 1, 3),
        "softcap": pick(rng, None, None, 2.0),
        "scale": pick(rng, None, None, 0.4),
    }


def cached(rng: Generator) -> Family:
    batch, new, slots = pick(rng, 1, 2, 4), pick(rng, 1, 1, 3, 4), pick(rng, 4, 6, 8)
    kv_heads, share, dim, value_dim = pick(rng, 1, 2), pick(rng, 1, 2), pick(rng, 1, 4, 8), pick(rng, 3, 4)
    dtype, name, options = floats(rng), pick(rng, "auto", "auto", "xla", "reference"), _options(rng)
    form = pick(rng, "each", "first", "scalar")
    sunk = bool(rng.random() < 0.3)
    # Slots that were never written may hold anything.
    unwritten = bool(rng.random() < 0.4)
    shape = {"each": (batch, new), "first": (batch, 1), "scalar": ()}[form]

    def positions(given: Any) -> np.ndarray:
        if form == "each":
            return given
        return np.broadcast_to(np.asarray(given).reshape(-1, 1) + np.arange(new), (batch, new))

    def fix(arrays: list[np.ndarray], rng: Generator) -> list[np.ndarray]:
        if not unwritten:
            return arrays
        last = positions(arrays[3]).max(1)
        gone = np.arange(slots) > last[:, None]
        where = gone[..., None, None]
        return [arrays[0], *(np.where(where, np.nan, x.astype(np.float64)) for x in arrays[1:3]), *arrays[3:]]

    def call(q: Any, k: Any, v: Any, given: Any, sinks: Any = None) -> Any:
        return attention.cached_attention(q, k, v, given, sinks=sinks, **options, implementation=name)

    def oracle(q: Any, keys: Any, values: Any, given: Any, sinks: Any = None) -> list[np.ndarray]:
        at = positions(given)
        out = np.zeros((batch, new, kv_heads * share, value_dim))
        for b, t in np.ndindex(batch, new):
            length = int(at[b, t]) + 1
            out[b, t] = one_sequence(
                q[b, t : t + 1], keys[b, :length], values[b, :length], length, sinks=sinks, **options
            )[0]
        return [out]

    last = slots if form == "each" else slots - new + 1
    args = (
        Arg((batch, new, kv_heads * share, dim), dtype),
        Arg((batch, slots, kv_heads, dim), dtype),
        Arg((batch, slots, kv_heads, value_dim), dtype),
        Arg(shape, "int32", range(last)),
        *[Arg((kv_heads * share,), dtype)] * sunk,
    )
    return Family(
        f"cached_attention({dtype} {[a.shape for a in args]}, unwritten={unwritten}, {options}, {name!r})",
        call,
        oracle,
        args,
        fix=fix,
        x64=dtype == "float64",
        tolerance=8 * EPS[dtype] + 16 * (EPS["float64"] if dtype == "float64" else EPS["float32"]),
        gradient_tolerance=max(40 * EPS[dtype], 2e-4 if dtype == "float32" else 0),
        differentiable=(0, 1, 2, 4) if sunk else (0, 1, 2),
        twice=dtype in ("float32", "float64"),
        dtypes=(dtype,),
        together=unwritten,
    )


def _pages(rng: Generator) -> tuple[int, int, int, int]:
    return (
        pick(rng, 1, 2, 4),
        pick(rng, 8, 12),
        pick(rng, 2, 4),
        pick(rng, 2, 3),
    )  # batch, pages, rows, of a sequence


def paged(rng: Generator) -> Family:
    batch, pages, rows, several = _pages(rng)
    new, kv_heads, share = pick(rng, 1, 1, 2), pick(rng, 1, 2), pick(rng, 1, 2)
    dim, value_dim, dtype = pick(rng, 1, 4, 8), pick(rng, 3, 4), floats(rng)
    name = pick(
        rng, "auto", "auto", "xla", "reference", "native" if dtype in ("float32", "bfloat16") else "auto"
    )
    options = _options(rng)
    if rng.random() < 0.05:
        name, dim, value_dim, dtype, options["softcap"] = "pallas_tpu", 128, 128, "float32", None
    spoilt = bool(rng.random() < 0.4)

    def owned(table: Any, lengths: Any) -> np.ndarray:
        """Which rows of which pages are a sequence's."""
        mine = np.zeros((pages, rows), bool)
        for b in range(batch):
            for s in range(int(lengths[b])):
                mine[table[b, s // rows], s % rows] = True
        return mine

    def fix(arrays: list[np.ndarray], rng: Generator) -> list[np.ndarray]:
        q, keys, values, _, lengths = arrays
        # No page is another sequence's; what is past a sequence's end is anything.
        table = (
            rng.permutation(pages)[: batch * several].reshape(batch, several)
            if batch * several <= pages
            else (rng.integers(0, pages, size=(batch, several)))
        )
        table = np.where(np.arange(several) * rows >= lengths[:, None], rng.integers(-3, 2 * pages), table)
        if spoilt:
            gone = ~owned(table, lengths)[..., None, None]
            keys, values = (np.where(gone, np.nan, x.astype(np.float64)) for x in (keys, values))
        return [q, keys, values, table, lengths]

    def oracle(q: Any, keys: Any, values: Any, table: Any, lengths: Any) -> list[np.ndarray]:
        out = np.zeros((batch, new, kv_heads * share, value_dim))
        for b in range(batch):
            n = int(lengths[b])
            at = np.arange(n)
            page = table[b, at // rows]
            out[b] = one_sequence(q[b], keys[page, at % rows], values[page, at % rows], n, **options)
        return [out]

    args = (
        Arg((batch, new, kv_heads * share, dim), dtype),
        Arg((pages, rows, kv_heads, dim), dtype),
        Arg((pages, rows, kv_heads, value_dim), dtype),
        Arg((batch, several), "int32", range(pages)),
        Arg((batch,), "int32", range(several * rows + 1)),
    )
    return Family(
        f"paged_attention({dtype} {[a.shape for a in args]}, unowned NaN={spoilt}, {options}, {name!r})",
        lambda *arrays: attention.paged_attention(*arrays, **options, implementation=name),
        oracle,
        args,
        fix=fix,
        x64=dtype == "float64",
        tolerance=8 * EPS[dtype] + 16 * (EPS["float64"] if dtype == "float64" else EPS["float32"]),
        gradient_tolerance=max(40 * EPS[dtype], 2e-4 if dtype == "float32" else 0),
        differentiable=(0, 1, 2),
        twice=dtype in ("float32", "float64") and name != "pallas_tpu",
        dtypes=(dtype,),
        together=True,
    )


def write(rng: Generator) -> Family:
    batch, pages, rows, several = _pages(rng)
    new, kv_heads, dim, value_dim = pick(rng, 1, 1, 2, 3), pick(rng, 1, 2), pick(rng, 1, 4), pick(rng, 3, 4)
    dtype = floats(rng)

    def fix(arrays: list[np.ndarray], rng: Generator) -> list[np.ndarray]:
        table = rng.permutation(max(pages, batch * several))[: batch * several].reshape(batch, several)
        table = np.where(table >= pages, -1 if rng.random() < 0.5 else table, table)
        return [*arrays[:2], table, *arrays[3:]]

    def oracle(keys: Any, values: Any, table: Any, lengths: Any, key: Any, value: Any) -> list[np.ndarray]:
        keys, values = keys.copy(), values.copy()
        for b, i in np.ndindex(batch, new):
            s = int(lengths[b]) + i
            if s // rows < several and 0 <= table[b, s // rows] < pages:
                keys[table[b, s // rows], s % rows] = key[b, i]
                values[table[b, s // rows], s % rows] = value[b, i]
        return [keys, values]

    args = (
        Arg((pages, rows, kv_heads, dim), dtype),
        Arg((pages, rows, kv_heads, value_dim), dtype),
        Arg((batch, several), "int32", range(pages)),
        Arg((batch,), "int32", range(several * rows + 1)),
        Arg((batch, new, kv_heads, dim), dtype),
        Arg((batch, new, kv_heads, value_dim), dtype),
    )
    return Family(
        f"write_pages({dtype} {[a.shape for a in args]})",
        attention.write_pages,
        oracle,
        args,
        fix=fix,
        moods=("normal", "zeros", "ties", "large"),
        x64=dtype == "float64",
        tolerance=EPS[dtype],
        differentiable=(0, 1, 4, 5),
        twice=dtype in ("float32", "float64"),
        dtypes=(dtype, dtype),
        together=True,
    )


def multihead(rng: Generator) -> Family:
    batch, length, heads, width = pick(rng, 1, 2, 4), pick(rng, 1, 3, 6), pick(rng, 1, 2), pick(rng, 1, 4)
    embed, bias, dtype = heads * width, bool(rng.random() < 0.6), floats(rng)
    options: dict[str, Any] = {
        "use_causal_mask": bool(rng.random() < 0.5),
        "window": pick(rng, None, None, 2),
    }
    rate = pick(rng, 0.0, 0.0, 0.5)
    param = "float64" if dtype == "float64" else "float32"
    args = [
        Arg((batch, length, embed), dtype),
        Arg((embed, 3, heads, width), param),
        Arg((heads, width, embed), param),
    ]
    args += [Arg((3, heads, width), param), Arg((embed,), param)] * bias
    args += [Arg((2,), "uint32", "key")] * bool(rate)

    def call(x: Any, qkv: Any, out: Any, *more: Any) -> Any:
        left, params = list(more), {"qkv_kernel": qkv, "out_kernel": out}
        if bias:
            params["qkv_bias"], params["out_bias"] = left.pop(0), left.pop(0)
        key = jax.random.wrap_key_data(left.pop(0)) if rate else None
        return attention.fused_multihead_attention(x, heads, bias, rate, params=params, key=key, **options)

    def plain(x: Any, qkv: Any, out: Any, *more: Any) -> np.ndarray:
        q, k, v = np.einsum("bse,ethd->tbshd", x, qkv) + (more[0][:, None, None] if bias else 0)
        y = definition({"query": q, "key": k, "value": v}, {**options, "layout": "bshd"})
        return np.einsum("bshd,hde->bse", y, out) + (more[1] if bias else 0)

    def check(arrays: Any, got: Any) -> str | None:
        want = plain(*arrays)
        if got[0].shape != want.shape:
            return f"shape {got[0].shape}"
        size = 1 + np.max(np.abs(want), initial=0)
        kept = np.abs(got[0] - want / (1 - rate)) <= tolerance * 4 * size
        if not np.all(kept | (got[0] == 0)):
            return "neither dropped nor what it is without dropout, scaled"
        if want.size >= 40 and not 0.1 < np.mean(got[0] == 0) < 0.9:
            return f"{np.mean(got[0] == 0):.2f} dropped of {rate}"
        return None

    tolerance = 40 * EPS[dtype] + 32 * (EPS["float64"] if dtype == "float64" else EPS["float32"])
    return Family(
        f"fused_multihead_attention({dtype}{(batch, length, embed)}, {heads}, {bias}, {rate}, {options})",
        call,
        lambda *arrays: [plain(*arrays)],
        tuple(args),
        moods=("normal",) if rate else ("normal", "normal", "zeros"),
        x64=dtype == "float64",
        tolerance=tolerance,
        magnitude=lambda *arrays: [
            1
            + np.max(np.abs(np.einsum("bse,ethd->tbshd", *map(np.abs, arrays[:2]))))
            * np.abs(arrays[2]).sum((0, 1)).max()
        ],
        gradient_tolerance=max(60 * EPS[dtype], 1e-3 if dtype == "float32" else 0),
        differentiable=() if rate else tuple(range(len(args))),
        twice=not rate and dtype in ("float32", "float64"),
        check=check if rate else None,
        dtypes=(dtype,),
    )


def params(rng: Generator) -> Family:
    heads, width = pick(rng, 1, 2, 4), pick(rng, 1, 4, 8)
    embed, bias, dtype = heads * width, bool(rng.random() < 0.5), floats(rng)
    names = ["out_bias", "out_kernel", "qkv_bias", "qkv_kernel"] if bias else ["out_kernel", "qkv_kernel"]
    shapes = {
        "out_bias": (embed,),
        "out_kernel": (heads, width, embed),
        "qkv_bias": (3, heads, width),
        "qkv_kernel": (embed, 3, heads, width),
    }

    def check(arrays: Any, got: Any) -> str | None:
        if len(got) != len(names):
            return f"{len(got)} parameters"
        for name, x in zip(names, got, strict=True):
            if x.shape != shapes[name] or x.dtype.name != dtype:
                return f"{name}: {x.dtype}{x.shape}"
            wide = x.astype(np.float64)
            # Glorot's uniform limit for `embed` numbers to `embed`: the root of 6 / (2 embed).
            limit = (6 / (2 * embed)) ** 0.5 * (1 + 2 * EPS[dtype])
            if name.endswith("bias") and np.any(wide != 0):
                return f"{name} is not 0"
            if np.abs(wide).max() > limit * 1.01:
                return f"{name}: {np.abs(wide).max()} is over {limit}"
            if name.endswith("kernel") and wide.size >= 64 and not 0.4 < wide.std() * 3**0.5 / limit < 1.6:
                return f"{name}: deviation {wide.std()} for a limit of {limit}"
        return None

    return Family(
        f"multihead_attention_params({embed}, {heads}, use_bias={bias}, dtype={dtype})",
        lambda key: attention.multihead_attention_params(
            jax.random.wrap_key_data(key), embed, heads, use_bias=bias, dtype=jnp.dtype(dtype_of(dtype))
        ),
        lambda key: [np.zeros(shapes[name]) for name in names],
        (Arg((2,), "uint32", "key"),),
        x64=dtype == "float64",
        check=check,
    )


OPERATIONS = {
    "attention.flash_attention": flash,
    "attention.cached_attention": cached,
    "attention.paged_attention": paged,
    "attention.write_pages": write,
    "attention.fused_multihead_attention": multihead,
    "attention.multihead_attention_params": params,
}

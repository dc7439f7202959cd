"""Attention of new positions against a paged cache: decoding many sequences of different lengths.

The cache of all sequences is one pool of pages, each with room for ``page_size`` positions. A table lists the pages
of each sequence in order, so a sequence takes only the pages it fills, and two sequences may share the pages of a
common prefix (Kwon et al. 2023, arXiv:2309.06180).
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.attention import paged_gpu, paged_native, paged_specs, paged_tpu
from capibara.ops.attention.pallas_calls import pad, round_up
from capibara.ops.attention.problem import HIDDEN, ROW_FLOOR
from capibara.ops.checks import check_scale, check_sinks, check_softcap
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.explicit import over_explicit_axes
from capibara.ops.one_device import alike, on_platform
from capibara.ops.registry import Implementation, Op, public
from capibara.ops.rows import write_rows
from capibara.ops.tuning import Tuned, Tuning

__all__ = ["code_rows", "over_blocks", "paged_attention", "write_pages"]

# About so many cached positions of each sequence are computed at a time.
BLOCK = 256


@dataclass(frozen=True)
class PagedProblem:
    """What is static of a call. Rows of pools have ``dim`` and ``value_dim`` numbers; ``used`` of them count."""

    batch: int
    new: int
    heads: int
    kv_heads: int
    pages: int
    page_size: int
    table: int
    dim: int
    value_dim: int
    used: tuple[int, int]
    scale: float
    window: int | None
    softcap: float | None
    dtype: str
    pages_dtypes: tuple[str, str]
    coded: bool
    sinks: bool
    implementation: str
    tuned: Tuned | None = None

    @property
    def together(self) -> int:
        """Pages of a block."""
        return max(1, min(self.table, BLOCK // self.page_size))


def _check_pages(
    op: str, key_pages: Any, value_pages: Any, page_table: Any, batch: int, scales: tuple[Any, Any]
) -> bool:
    """Whether pages hold codes."""
    coded = scales[0] is not None or scales[1] is not None
    for name, x in (("key_pages", key_pages), ("value_pages", value_pages)):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise OpTypeError(f"{op}: {name} must be an array, got {type(x).__name__}")
        if len(x.shape) != 4 or 0 in x.shape:
            raise OpShapeError(
                f"{op}: {name} must be [pages, page_size, kv_heads, dim], none of them 0; got shape {tuple(x.shape)}"
            )
        if not coded and not jnp.issubdtype(x.dtype, jnp.floating):
            raise OpTypeError(
                f"{op}: {name} must be floating point, or int8 with key_scales and value_scales; got {x.dtype}"
            )
        if coded and x.dtype != jnp.int8:
            raise OpTypeError(f"{op}: {name} must be int8 where there are scales, got {x.dtype}")
    for name, x in (("key_scales", scales[0]), ("value_scales", scales[1])) if coded else ():
        if (
            x is None
            or getattr(x, "dtype", None) != jnp.float32
            or tuple(x.shape) != tuple(key_pages.shape[:3])
        ):
            raise OpShapeError(
                f"{op}: {name} must be float32 {list(key_pages.shape[:3])}, a number for each row of the pages, got "
                f"{getattr(x, 'dtype', type(x).__name__)} {list(getattr(x, 'shape', ()))}"
            )
    if tuple(key_pages.shape[:3]) != tuple(value_pages.shape[:3]):
        raise OpShapeError(
            f"{op}: key_pages {tuple(key_pages.shape)} and value_pages {tuple(value_pages.shape)} must have the same "
            "pages, page_size and kv_heads"
        )
    if not hasattr(page_table, "dtype") or not jnp.issubdtype(page_table.dtype, jnp.integer):
        kind = getattr(page_table, "dtype", type(page_table).__name__)
        raise OpTypeError(f"{op}: page_table must be an integer array, got {kind}")
    if len(page_table.shape) != 2 or page_table.shape[0] != batch:
        raise OpShapeError(
            f"{op}: page_table must be [batch, pages of a sequence] with batch {batch}, got shape "
            f"{tuple(page_table.shape)}"
        )
    return coded


def _holds(pages: Any, dim: int) -> bool:
    """Whether a pool's rows are ``dim`` long, or that padded to whole tiles of a TPU's memory."""
    return pages.shape[3] in (dim, round_up(dim, paged_tpu.LANES))


def _prepare(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    page_table: Any,
    lengths: Any,
    key_scales: Any = None,
    value_scales: Any = None,
    sinks: Any = None,
    *,
    value_dim: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
) -> tuple[PagedProblem, tuple[Any, ...]]:
    if not hasattr(query, "shape") or not hasattr(query, "dtype"):
        raise OpTypeError(f"paged_attention: query must be an array, got {type(query).__name__}")
    if len(query.shape) != 4 or not jnp.issubdtype(query.dtype, jnp.floating):
        raise OpShapeError(
            "paged_attention: query must be [batch, new, heads, dim] and floating point, got shape "
            f"{tuple(query.shape)} and {query.dtype}"
        )
    batch, new, heads, dim = query.shape
    scales = key_scales, value_scales
    coded = _check_pages("paged_attention", key_pages, value_pages, page_table, batch, scales)
    if not _holds(key_pages, dim) or heads % key_pages.shape[2]:
        raise OpShapeError(
            f"paged_attention: key_pages {tuple(key_pages.shape)} must have the query's dim ({dim}), or that rounded "
            f"up to a multiple of {paged_tpu.LANES}, and a number of heads that divides the query's ({heads})"
        )
    if value_dim is not None:
        if isinstance(value_dim, bool) or not isinstance(value_dim, numbers.Integral):
            raise OpTypeError(f"paged_attention: value_dim must be an int or None, got {value_dim!r}")
        if value_dim < 1 or not _holds(value_pages, int(value_dim)):
            raise OpValueError(
                f"paged_attention: value_dim must be the last size of value_pages {tuple(value_pages.shape)}, or one "
                f"that gives it when rounded up to a multiple of {paged_tpu.LANES}; got {value_dim}"
            )
    if not hasattr(lengths, "dtype") or not jnp.issubdtype(lengths.dtype, jnp.integer):
        kind = getattr(lengths, "dtype", type(lengths).__name__)
        raise OpTypeError(f"paged_attention: lengths must be an integer array, got {kind}")
    if tuple(lengths.shape) != (batch,):
        raise OpShapeError(f"paged_attention: lengths must have shape ({batch},), got {tuple(lengths.shape)}")
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, numbers.Integral):
            raise OpTypeError(f"paged_attention: window must be an int or None, got {window!r}")
        if not 1 <= window < 1 << 31:
            raise OpValueError(f"paged_attention: window must be at least 1 and below 2^31, got {window}")
    check_sinks("paged_attention", sinks, heads)
    softcap, scale = check_softcap("paged_attention", softcap), check_scale("paged_attention", scale)
    problem = PagedProblem(
        batch=batch,
        new=new,
        heads=heads,
        kv_heads=key_pages.shape[2],
        pages=key_pages.shape[0],
        page_size=key_pages.shape[1],
        table=page_table.shape[1],
        dim=key_pages.shape[3],
        value_dim=value_pages.shape[3],
        used=(dim, value_pages.shape[3] if value_dim is None else int(value_dim)),
        scale=1.0 / math.sqrt(dim) if scale is None else scale,
        window=None if window is None else int(window),
        softcap=softcap,
        dtype=str(jax.dtypes.canonicalize_dtype(query.dtype)),
        pages_dtypes=(str(key_pages.dtype), str(value_pages.dtype)),
        coded=coded,
        sinks=sinks is not None,
        implementation=implementation,
    )
    more = (*(scales if coded else ()), *(() if sinks is None else (sinks,)))
    return problem, (query, key_pages, value_pages, page_table, lengths, *more)


def _scores(p: PagedProblem, q: jax.Array, key: jax.Array, slots: jax.Array, lengths: jax.Array) -> jax.Array:
    """Scores [batch, kv_heads, group, new, slots] against positions ``slots`` of each sequence."""
    wide = jnp.float64 if p.dtype == "float64" else jnp.float32
    s = p.scale * jnp.einsum("btkgd,bskd->bkgts", q, key, preferred_element_type=wide)
    if p.softcap is not None:
        s = p.softcap * jnp.tanh(s / p.softcap)
    at = lengths[:, None] - p.new + jnp.arange(p.new, dtype=lengths.dtype)
    # Blocks of pages may reach past the table, and so may a length.
    visible = (slots <= at[:, :, None]) & (slots < p.table * p.page_size)
    if p.window is not None:
        visible &= slots > at[:, :, None] - p.window
    return s + jnp.where(visible, 0.0, HIDDEN).astype(wide)[:, None, None]


def _take(
    p: PagedProblem,
    pages: jax.Array,
    scales: jax.Array | None,
    used: int,
    table: jax.Array,
    slots: jax.Array,
    lengths: jax.Array,
) -> Any:
    """Cached rows [batch, slots, kv_heads, dim]; zeros after the end and in padding, which may hold anything."""
    rows = jnp.take(pages, table, axis=0, mode="clip").reshape(p.batch, -1, *pages.shape[2:])
    if scales is not None:
        of_rows = jnp.take(scales, table, axis=0, mode="clip").reshape(p.batch, -1, p.kv_heads, 1)
        rows = (rows.astype(jnp.float32) * of_rows).astype(p.dtype)
    known = (slots < lengths[:, None])[:, :, None, None]
    if used < rows.shape[3]:
        known &= jnp.arange(rows.shape[3]) < used
    return jnp.where(known, rows, jnp.zeros((), rows.dtype))


def _start(p: PagedProblem, query: jax.Array) -> jax.Array:
    return query.reshape(p.batch, p.new, p.kv_heads, p.heads // p.kv_heads, -1)


def _more(p: PagedProblem, arrays: tuple[jax.Array, ...]) -> tuple[Any, Any, Any]:
    """The scales of keys and of values, and the sinks, of the arrays after the lengths."""
    key_scales, value_scales = arrays[:2] if p.coded else (None, None)
    return key_scales, value_scales, arrays[-1] if p.sinks else None


def _before(p: PagedProblem, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The best score and the total of each row ``[batch, kv_heads, group, new, 1]`` before any key is seen."""
    wide = jnp.float64 if p.dtype == "float64" else jnp.float32
    shape = (p.batch, p.kv_heads, p.heads // p.kv_heads, p.new, 1)
    if sinks is None:
        return jnp.full(shape, ROW_FLOOR, wide), jnp.zeros(shape, wide)
    logits = jnp.broadcast_to(sinks.astype(wide).reshape(1, *shape[1:3], 1, 1), shape)
    best = jnp.maximum(lax.stop_gradient(logits), ROW_FLOOR)
    return best, jnp.exp(logits - best)


def over_blocks(
    p: PagedProblem,
    query: jax.Array,
    block: Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]],
    lengths: jax.Array,
    sinks: jax.Array | None,
    *arrays: Any,
) -> jax.Array:
    """A block of pages of every sequence at a time, as many times as the longest sequence needs.

    Args:
      query: ``[batch, new, heads, dim]``.
      block: ``(number, places)`` → keys ``[batch, places, kv_heads, dim]`` and values of ``value_dim``, finite ones
        after a sequence's end, too. Block ``number`` has ``p.together`` pages, and places ``number * together *
        page_size`` and on.
      arrays: what ``block`` reads.
    """
    wide = jnp.float64 if p.dtype == "float64" else jnp.float32
    q = _start(p, query)
    size = p.together * p.page_size
    steps = jnp.clip(-(-jnp.max(lengths) // size), 0, -(-p.table // p.together)).astype(jnp.int32)

    def step(i: Any, carry: Any) -> Any:
        best, total, acc = carry
        slots = i * size + jnp.arange(size, dtype=jnp.int32)
        keys, values = block(i, slots)
        s = _scores(p, q, keys, slots, lengths)
        new_best = jnp.maximum(best, jnp.max(lax.stop_gradient(s), axis=-1, keepdims=True))
        weights, shrink = jnp.exp(s - new_best), jnp.exp(best - new_best)
        more = jnp.einsum(
            "bkgts,bskd->bkgtd", weights.astype(values.dtype), values, preferred_element_type=wide
        )
        return new_best, total * shrink + jnp.sum(weights, axis=-1, keepdims=True), acc * shrink + more

    best, total = _before(p, sinks)
    carry = best, total, jnp.zeros((*best.shape[:-1], p.value_dim), wide)
    _, total, acc = lax.fori_loop(0, steps, step, alike(carry, query, lengths, sinks, *arrays))
    out = acc / jnp.where(total == 0, 1.0, total)
    return jnp.moveaxis(out, 3, 1).reshape(p.batch, p.new, p.heads, -1).astype(p.dtype)


def _looped(
    p: PagedProblem,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    *more: jax.Array,
) -> jax.Array:
    key_scales, value_scales, sinks = _more(p, more)
    padded = jnp.pad(table, ((0, 0), (0, -p.table % p.together)))

    def block(i: jax.Array, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
        some = lax.dynamic_slice_in_dim(padded, i * p.together, p.together, axis=1)
        keys = _take(p, key, key_scales, p.used[0], some, slots, lengths)
        return keys, _take(p, value, value_scales, p.used[1], some, slots, lengths)

    return over_blocks(p, query, block, lengths, sinks, key, value, table)


def _reference(
    p: PagedProblem,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    table: jax.Array,
    lengths: jax.Array,
    *more: jax.Array,
) -> jax.Array:
    """All pages of every sequence at once."""
    key_scales, value_scales, sinks = _more(p, more)
    wide = jnp.float64 if p.dtype == "float64" else jnp.float32
    slots = jnp.arange(p.table * p.page_size, dtype=jnp.int32)
    keys = _take(p, key, key_scales, p.used[0], table, slots, lengths)
    s = _scores(p, _start(p, query), keys, slots, lengths)
    best, total = _before(p, sinks)
    highest = jnp.maximum(jnp.max(lax.stop_gradient(s), axis=-1, keepdims=True), best)
    weights = jnp.exp(s - highest)
    total = total * jnp.exp(best - highest) + jnp.sum(weights, axis=-1, keepdims=True)
    values = _take(p, value, value_scales, p.used[1], table, slots, lengths)
    weights = (weights / jnp.where(total == 0, 1.0, total)).astype(values.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", weights, values, preferred_element_type=wide)
    return out.reshape(p.batch, p.new, p.heads, -1).astype(p.dtype)


def _tpu_kernel(p: PagedProblem, *arrays: jax.Array) -> jax.Array:
    def work(interpret: bool, *arrays: jax.Array) -> jax.Array:
        from capibara.ops.attention import paged_tpu_kernel

        return paged_tpu_kernel.output(paged_tpu.plan(p, interpret), *arrays)

    return on_platform("tpu", p.implementation, work, partial(_looped, p), *arrays)


def _gpu_kernel(p: PagedProblem, *arrays: jax.Array) -> jax.Array:
    def work(interpret: bool, *arrays: jax.Array) -> jax.Array:
        from capibara.ops.attention import paged_gpu_kernel

        return paged_gpu_kernel.output(paged_gpu.plan(p, interpret), *arrays)

    return on_platform("cuda", p.implementation, work, partial(_looped, p), *arrays)


def _reading(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A form that has a gradient: a loop whose length is known at run time only has none, nor does a kernel.

    That of all pages at once is the same.
    """
    read = jax.custom_vjp(function, nondiff_argnums=(0,))

    def forward(p: PagedProblem, *arrays: jax.Array) -> tuple[jax.Array, Any]:
        return read(p, *arrays), arrays

    def backward(p: PagedProblem, arrays: Any, grad: jax.Array) -> tuple[Any, ...]:
        # Codes and integers have no gradient.
        of = [0] if p.coded else [0, 1, 2]
        of += [len(arrays) - 1] if p.sinks else []

        def whole(*some: jax.Array) -> jax.Array:
            given = list(arrays)
            for place, x in zip(of, some, strict=True):
                given[place] = x
            return _reference(p, *given)

        grads = dict(zip(of, jax.vjp(whole, *(arrays[place] for place in of))[1](grad), strict=True))
        return tuple(grads.get(place) for place in range(len(arrays)))

    read.defvjp(forward, backward)
    return read


OP = Op(
    "paged_attention",
    _prepare,
    [
        Implementation(
            "pallas_tpu", {"forward": _reading(_tpu_kernel)}, platforms=("tpu",), check=paged_tpu.check
        ),
        Implementation(
            "pallas_gpu",
            {"forward": _reading(_gpu_kernel)},
            platforms=(),
            check=paged_gpu.check,
            tuned_on=("cuda",),
        ),
        Implementation(
            "native",
            {"forward": _reading(paged_native.forward)},
            platforms=("cpu",),
            check=paged_native.check,
            portable=False,
        ),
        Implementation("xla", {"forward": _reading(_looped)}),
        Implementation("reference", {"forward": _reference}),
    ],
    Tuning(
        lambda: paged_specs.SPECS, paged_specs.arguments, paged_specs.alike_in_speed, differentiable=False
    ),
)


@public(OP)
@over_explicit_axes(
    "query",
    "key_pages",
    "value_pages",
    "page_table",
    "lengths",
    "key_scales",
    "value_scales",
    "sinks",
    out=lambda query, *_: query[:3],
)
def paged_attention(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    key_scales: jax.Array | None = None,
    value_scales: jax.Array | None = None,
    sinks: jax.Array | None = None,
    *,
    value_dim: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Attention of each sequence's last ``new`` positions against its keys and values, which are stored in pages.

    Position ``s`` of sequence ``b`` is row ``s % page_size`` of page ``page_table[b, s // page_size]``. In plain JAX,
    with the pages gathered::

        keys = key_pages[page_table].reshape(batch, -1, kv_heads, dim)     # and values likewise
        cached_attention(query, keys, values, (lengths - new)[:, None])

    A few pages are read at a time, and only as many as the longest sequence fills, so memory does not grow with the
    table; the gradient gathers all pages. On TPUs a kernel copies each sequence's own pages into on-chip memory while
    it computes on the previous ones; it supports heads of at most 128 elements (a multiple of 8: 64, 80, 96, …; on
    v5p only 128), or with a multiple of 8 key heads (or one in bfloat16) of a multiple of 128, float32 or bfloat16
    throughout. The kernel was compiled for TPUs and tested in interpret mode, but not measured on a TPU. On
    NVIDIA GPUs another kernel reads each sequence's own pages where they lie; it was compiled for an H100 and
    tested in interpret mode, and ``"auto"`` takes it for sizes for which ``capibara tune paged_attention`` found it to
    be faster.

    Make pools of heads of 64, 80 or 96 elements 128 wide on TPUs (``jnp.zeros((pages, page_size, kv_heads, 128))``):
    XLA gives narrower ones a layout with the pages innermost, and copies both whole in each call, for the kernel and
    for its own form. What pads a row is not read, and :func:`write_pages` fills it with zeros.

    Args:
      query: ``[batch, new, heads, dim]``, floating point: positions ``lengths - new … lengths - 1``, whose own keys
        and values are already in the pages (see :func:`write_pages`).
      key_pages: ``[pages, page_size, kv_heads, dim]``; ``kv_heads`` divides ``heads``. ``dim`` may be rounded up to a
        multiple of 128.
      value_pages: ``[pages, page_size, kv_heads, value_dim]``, which may be rounded up likewise.
      page_table: ``int [batch, pages of a sequence]``; entries past a sequence's end may be anything.
      lengths: ``int [batch]``: positions of each sequence, including the new ones. For a length of 0 the output is 0.
      key_scales, value_scales: float32 ``[pages, page_size, kv_heads]`` where pages are int8 codes
        (:func:`code_rows`): what a row's codes are multiplied by. ``"xla"`` and ``"reference"`` take them; there is
        then a gradient for the query and the sinks alone.
      sinks: ``[heads]``, floating point: as for :func:`flash_attention`.
      value_dim: The length of a value where ``value_pages`` has longer rows; ``None`` means their whole length.
      scale: Factor on the scores; ``None`` means ``1 / sqrt(dim)``.
      window: The most positions that a query sees, including its own.
      softcap: Limits scores by ``softcap · tanh(scores / softcap)``.
      implementation: ``"auto"``, ``"pallas_tpu"`` or ``"pallas_gpu"`` (interpreted, slowly, on other platforms),
        ``"native"`` (compiled for CPUs; float32 and bfloat16), ``"xla"`` or ``"reference"`` (all pages gathered at
        once).

    Returns:
      ``[batch, new, heads, value_dim]`` in the query's dtype; scores and sums are float32 (float64 for float64).

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    OP.check_name(implementation)
    problem, arrays = OP.prepare(
        query,
        key_pages,
        value_pages,
        page_table,
        lengths,
        key_scales,
        value_scales,
        sinks,
        value_dim=value_dim,
        scale=scale,
        window=window,
        softcap=softcap,
        implementation=implementation,
    )
    columns = problem.used[1]
    if 0 in (problem.batch, problem.new, problem.heads, problem.table):
        return jnp.zeros((*query.shape[:3], columns), problem.dtype)
    # In the dtype it came in, what is before the first position could be a large number.
    lengths = jnp.asarray(lengths).astype(jnp.int32)
    padded = pad(jnp.asarray(query), 3, problem.dim)
    out = OP.run("forward", problem, padded, *arrays[1:4], lengths, *arrays[5:])
    return out if columns == problem.value_dim else out[..., :columns]


def code_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows as int8 codes: ``x ≈ codes * scales[..., None]``, where the largest of a row's numbers is 127 of its scale.

    Args:
      x: ``[…, dim]``, floating point.

    Returns:
      int8 ``[…, dim]`` and float32 ``[…]``; a row of zeros has the scale 0.
    """
    wide = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=-1) / 127
    codes = jnp.round(wide / jnp.where(scales == 0, 1, scales)[..., None])
    return codes.astype(jnp.int8), scales


@over_explicit_axes(
    "key_pages",
    "value_pages",
    "page_table",
    "lengths",
    "key",
    "value",
    out=lambda keys, values, *_: [keys, values],
)
def write_pages(
    key_pages: jax.Array,
    value_pages: jax.Array,
    page_table: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
    value: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The pages with new positions written after the first ``lengths`` ones of each sequence.

    Equivalent: ``key_pages.at[page_table[b, s // page_size], s % page_size].set(key[b, i])`` with
    ``s = lengths[b] + i``. Under ``jit`` with donated pages this is in place. Positions beyond a sequence's table,
    and invalid page numbers (such as negative ones), are not written. Where a pool's rows are longer, since they are
    padded to a multiple of 128, zeros are written after ``dim``.

    Args:
      key_pages, value_pages, page_table: as for :func:`paged_attention`.
      lengths: ``int [batch]``: positions that each sequence has so far.
      key, value: ``[batch, new, kv_heads, dim]`` and ``[batch, new, kv_heads, value_dim]``.

    Returns:
      The new ``(key_pages, value_pages)``.

    Raises:
      OpShapeError, OpTypeError: an argument is invalid; the message names it.
    """
    batch, new = key.shape[:2]
    _check_pages("write_pages", key_pages, value_pages, page_table, batch, (None, None))
    for name, x, pages in (("key", key, key_pages), ("value", value, value_pages)):
        if tuple(x.shape[:-1]) != (batch, new, pages.shape[2]) or not _holds(pages, x.shape[-1]):
            raise OpShapeError(
                f"write_pages: {name} must have shape {(batch, new, *pages.shape[2:])}, or a last size that gives "
                f"{pages.shape[3]} when rounded up to a multiple of {paged_tpu.LANES}; got {tuple(x.shape)}"
            )
    if tuple(lengths.shape) != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise OpShapeError(
            f"write_pages: lengths must be int [{batch}], got {lengths.dtype} {tuple(lengths.shape)}"
        )
    page_size = key_pages.shape[1]
    page_table, lengths = (jnp.asarray(x).astype(jnp.int32) for x in (page_table, lengths))
    at = lengths[:, None] + jnp.arange(new, dtype=lengths.dtype)
    page = jnp.take_along_axis(page_table, at // page_size, axis=1, mode="fill", fill_value=-1)
    where = (page, at % page_size)
    return (
        write_rows(key_pages, where, pad(key, 3, key_pages.shape[3])),
        write_rows(value_pages, where, pad(value, 3, value_pages.shape[3])),
    )

"""The validated, frozen description of an attention call, and shared handling of axes.

Inside, every implementation sees ``query [batch, heads, q_len, dim]`` and ``key``/``value``
``[batch, kv_heads, kv_len, dim]`` with query head ``h`` reading key/value head ``h // (heads // kv_heads)``.
Visibility is one pair ``(left, right)``: query ``i`` sees key ``j`` when ``i - left <= j <= i + right``
(``None``: no limit on that side). A causal mask is ``right = 0``.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from capibara.errors import did_you_mean
from capibara.ops.checks import check_flag, check_scale, check_sinks, check_softcap
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.tuning import Tuned

__all__ = ["HIDDEN", "ROW_FLOOR", "AttentionProblem", "alike_in_speed", "from_bhsd", "prepare", "to_bhsd"]

# Added to the score of a key that a query may not see. A finite number, so that no row ever computes inf -
# inf.
HIDDEN = -1e30
# A row whose best score lies below this sees no key at all: its output and its gradient are zero.
ROW_FLOOR = -1e29

_LAYOUTS = ("bhsd", "bshd")
_PRECISIONS: dict[str, tuple[str | None, jax.lax.Precision | None]] = {
    "default": (None, jax.lax.Precision.DEFAULT),
    "high": (None, jax.lax.Precision.HIGH),
    "tensorfloat32": (None, jax.lax.Precision.HIGH),
    "highest": (None, jax.lax.Precision.HIGHEST),
    "float32": (None, jax.lax.Precision.HIGHEST),
    "bfloat16": ("bfloat16", None),
    "float16": ("float16", None),
}


@dataclass(frozen=True)
class AttentionProblem:
    """Everything that determines how one attention call is computed; hashable, so that it can be static."""

    batch: int
    heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: str
    layout: str
    left: int | None
    right: int | None
    scale: float
    softcap: float | None
    operand_dtype: str | None
    precision: jax.lax.Precision | str | None
    block_size: int | None
    bias_shape: tuple[int, ...] | None
    has_segments: bool
    implementation: str
    tuned: Tuned | None = None

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def accumulate_dtype(self) -> Any:
        return jnp.float64 if self.dtype == "float64" else jnp.float32


def alike_in_speed(problem: AttentionProblem) -> dict[str, int | str] | None:
    """What determines which block sizes are fast; None if the caller specified them."""
    if problem.block_size is not None:
        return None
    mask = "window" if problem.left is not None else "none" if problem.right is None else "causal"
    more = {
        "bias": problem.bias_shape is not None,
        "segments": problem.has_segments,
        "softcap": problem.softcap is not None,
        "exact": str(problem.precision).lower() in ("highest", "float32"),
    }
    return {
        "batch": problem.batch,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "q_len": problem.q_len,
        "kv_len": problem.kv_len,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "layout": problem.layout,
        "operands": problem.operand_dtype or problem.dtype,
        "mask": mask,
        "more": "+".join(name for name, there in more.items() if there) or "none",
    }


def to_bhsd(x: jax.Array, layout: str) -> jax.Array:
    return x if layout == "bhsd" else jnp.swapaxes(x, 1, 2)


def from_bhsd(x: jax.Array, layout: str) -> jax.Array:
    return x if layout == "bhsd" else jnp.swapaxes(x, 1, 2)


def _check_array(name: str, x: Any, rank: int) -> Any:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise OpTypeError(
            f"flash_attention: {name} must be an array, got {type(x).__name__}. "
            f"Remedy: jax.numpy.asarray({name})."
        )
    if len(x.shape) != rank:
        raise OpShapeError(
            f"flash_attention: {name} must have {rank} axes ([batch, heads, sequence, dim] for "
            f"layout='bhsd'), got shape {tuple(x.shape)}"
        )
    return x


def _check_window(window: Any, causal: bool) -> tuple[int | None, int | None]:
    if window is None:
        return None, (0 if causal else None)
    pair = isinstance(window, tuple) and len(window) == 2
    edges: list[int | None] = []
    for entry in window if pair else (window,):
        if entry is None and pair:
            edges.append(None)
        elif isinstance(entry, numbers.Integral) and not isinstance(entry, bool):
            edges.append(int(entry) if pair else int(entry) - 1)
        else:
            raise OpTypeError(
                "flash_attention: window must be an int (how many keys back, the query's own included) or a "
                f"pair (left, right) of ints or None, got {window!r}"
            )
    if any(edge is not None and edge < 0 for edge in edges):
        raise OpValueError(
            f"flash_attention: window={window!r} leaves a query without its own position; expected an int of "
            "at least 1 (window=128), or a pair of at least 0 (window=(127, 0))"
        )
    return edges[0], (0 if causal else edges[-1])


def _check_precision(precision: Any) -> tuple[str | None, jax.lax.Precision | str | None]:
    if precision is None:
        # Taken down here, so that the backward pass has it too: it is traced when the surrounding
        # jax.default_matmul_precision may be over.
        return None, jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(precision, jax.lax.Precision):
        return None, precision
    if isinstance(precision, str):
        if precision in _PRECISIONS:
            return _PRECISIONS[precision]
        raise OpValueError(
            f"flash_attention: precision={precision!r} is unknown; expected one of {', '.join(_PRECISIONS)}, "
            f"a jax.lax.Precision, or None.{did_you_mean(precision, _PRECISIONS)}"
        )
    raise OpTypeError(
        f"flash_attention: precision must be a string, a jax.lax.Precision or None, got {precision!r} "
        f"of type {type(precision).__name__}"
    )


def _check_segments(segment_ids: Any, batch: int, q_len: int, kv_len: int) -> tuple[Any, Any]:
    if segment_ids is None:
        return None, None
    if isinstance(segment_ids, tuple):
        if len(segment_ids) != 2:
            raise OpShapeError(
                f"flash_attention: segment_ids as a tuple must be (query_ids, key_ids), got "
                f"{len(segment_ids)} entries"
            )
        q_ids, kv_ids = segment_ids
    else:
        if q_len != kv_len:
            raise OpShapeError(
                f"flash_attention: one segment_ids array needs equal lengths, but the query has {q_len} "
                f"positions and the key {kv_len}. Remedy: segment_ids=(query_ids, key_ids)."
            )
        q_ids = kv_ids = segment_ids
    for ids, length, name in ((q_ids, q_len, "query"), (kv_ids, kv_len, "key")):
        if not hasattr(ids, "dtype") or not jnp.issubdtype(ids.dtype, jnp.integer):
            raise OpTypeError(
                f"flash_attention: segment_ids for the {name} must be an integer array, got "
                f"{getattr(ids, 'dtype', type(ids).__name__)}"
            )
        if tuple(ids.shape) != (batch, length):
            raise OpShapeError(
                f"flash_attention: segment_ids for the {name} must have shape {(batch, length)}, "
                f"got {tuple(ids.shape)}"
            )
    return q_ids, kv_ids


def prepare(
    query: Any,
    key: Any,
    value: Any,
    *,
    block_size: int | None = None,
    use_causal_mask: bool = False,
    precision: Any = None,
    bias: Any = None,
    segment_ids: Any = None,
    sinks: Any = None,
    window: Any = None,
    softcap: float | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    implementation: str = "auto",
) -> tuple[AttentionProblem, tuple[Any, ...]]:
    """Check a call of ``flash_attention``; return its problem and its arrays in the caller's layout."""
    if layout not in _LAYOUTS:
        raise OpValueError(
            f"flash_attention: layout={layout!r} is unknown; expected 'bhsd' ([batch, heads, sequence, "
            f"dim]) or 'bshd' ([batch, sequence, heads, dim])"
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        _check_array(name, x, 4)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise OpTypeError(f"flash_attention: {name} must be floating point, got {x.dtype}")
    # NumPy's float64 is float32 in JAX, unless 64 bits are enabled.
    dtypes = [jax.dtypes.canonicalize_dtype(x.dtype) for x in (query, key, value)]
    if not dtypes[0] == dtypes[1] == dtypes[2]:
        raise OpTypeError(
            f"flash_attention: query, key and value must share one dtype, got {query.dtype}, {key.dtype} and "
            f"{value.dtype}. Remedy: cast them with .astype."
        )
    s, h = (2, 1) if layout == "bhsd" else (1, 2)
    batch, heads, q_len, head_dim = query.shape[0], query.shape[h], query.shape[s], query.shape[3]
    kv_heads, kv_len, value_dim = key.shape[h], key.shape[s], value.shape[3]
    if key.shape[0] != batch or value.shape[0] != batch or key.shape[3] != head_dim:
        raise OpShapeError(
            f"flash_attention: query {tuple(query.shape)}, key {tuple(key.shape)} and value "
            f"{tuple(value.shape)} must share the batch axis, and query and key the last axis"
        )
    if (value.shape[h], value.shape[s]) != (kv_heads, kv_len):
        raise OpShapeError(
            f"flash_attention: key {tuple(key.shape)} and value {tuple(value.shape)} must have the same "
            f"heads and sequence (layout={layout!r})"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise OpShapeError(
            f"flash_attention: {heads} query heads cannot be shared out over {kv_heads} key/value heads; "
            f"the first must be a multiple of the second (layout={layout!r})"
        )
    if head_dim == 0 or value_dim == 0:
        raise OpShapeError("flash_attention: the last axis (dim) must not be empty")
    if block_size is not None:
        if isinstance(block_size, bool) or not isinstance(block_size, numbers.Integral):
            raise OpTypeError(f"flash_attention: block_size must be an int or None, got {block_size!r}")
        if block_size < 1:
            raise OpValueError(f"flash_attention: block_size must be at least 1, got {block_size}")
    softcap, scale = check_softcap("flash_attention", softcap), check_scale("flash_attention", scale)
    if bias is not None:
        _check_array("bias", bias, 4)
        full = (batch, heads, q_len, kv_len)
        if any(b not in (1, f) for b, f in zip(bias.shape, full, strict=True)):
            raise OpShapeError(
                f"flash_attention: bias of shape {tuple(bias.shape)} does not broadcast to "
                f"[batch, heads, q_len, kv_len] = {full}"
            )
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise OpTypeError(
                f"flash_attention: bias must be floating point (it is added to the scores), got "
                f"{bias.dtype}. Remedy for a boolean mask: jnp.where(mask, 0.0, -jnp.inf)."
            )
    left, right = _check_window(window, check_flag("flash_attention", "use_causal_mask", use_causal_mask))
    operand_dtype, lax_precision = _check_precision(precision)
    q_ids, kv_ids = _check_segments(segment_ids, batch, q_len, kv_len)
    check_sinks("flash_attention", sinks, heads)
    problem = AttentionProblem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=str(dtypes[0]),
        layout=layout,
        left=left,
        right=right,
        scale=1.0 / math.sqrt(head_dim) if scale is None else scale,
        softcap=softcap,
        operand_dtype=operand_dtype,
        precision=lax_precision,
        block_size=None if block_size is None else int(block_size),
        bias_shape=None if bias is None else tuple(bias.shape),
        has_segments=q_ids is not None,
        implementation=implementation,
    )
    return problem, (query, key, value, bias, q_ids, kv_ids, sinks)

"""A whole attention layer as one function: one product for query, key and value, attention, the output projection."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.attention.api import flash_attention
from capibara.ops.checks import check_flag, check_key
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.explicit import Dims, join_dims, over_explicit_axes
from capibara.ops.registry import remark

__all__ = ["fused_multihead_attention", "multihead_attention_params"]


def _shapes(embed: int, heads: int, use_bias: bool) -> dict[str, tuple[int, ...]]:
    dim = embed // heads
    shapes: dict[str, tuple[int, ...]] = {
        "qkv_kernel": (embed, 3, heads, dim),
        "out_kernel": (heads, dim, embed),
    }
    if use_bias:
        shapes |= {"qkv_bias": (3, heads, dim), "out_bias": (embed,)}
    return shapes


def _check_heads(op: str, embed: int, num_heads: Any, what: str) -> int:
    if isinstance(num_heads, bool) or not isinstance(num_heads, numbers.Integral):
        raise OpTypeError(f"{op}: num_heads must be an int, got {num_heads!r}")
    if num_heads < 1 or embed < 1 or embed % num_heads:
        raise OpValueError(f"{op}: num_heads={num_heads} must divide {what} ({embed}), both above 0")
    return int(num_heads)


def multihead_attention_params(
    key: jax.Array, embed_dim: int, num_heads: int, *, use_bias: bool = True, dtype: Any = jnp.float32
) -> dict[str, jax.Array]:
    """Parameters of :func:`fused_multihead_attention`: kernels uniform by Glorot and Bengio (2010), biases 0.

    Args:
      key: A key of ``jax.random``.
      embed_dim: The last axis of ``x``; a multiple of ``num_heads``.
      num_heads: Heads of ``embed_dim // num_heads`` each.
      use_bias: Whether there are biases.
      dtype: Of the parameters, floating point.

    Raises:
      OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    op = "multihead_attention_params"
    check_key(op, key)
    check_flag(op, "use_bias", use_bias)
    if isinstance(embed_dim, bool) or not isinstance(embed_dim, numbers.Integral):
        raise OpTypeError(f"{op}: embed_dim must be an int, got {embed_dim!r}")
    try:
        floating = jnp.issubdtype(dtype, jnp.floating)
    except TypeError:  # no dtype at all
        floating = False
    if not floating:
        raise OpTypeError(f"{op}: dtype must be floating point, got {dtype!r}")
    heads = _check_heads(op, int(embed_dim), num_heads, "embed_dim")
    shapes = _shapes(int(embed_dim), heads, use_bias)
    bound = math.sqrt(6 / (2 * embed_dim))  # each of the four matrices is [embed_dim, embed_dim]
    keys = dict(zip(("qkv_kernel", "out_kernel"), jax.random.split(key), strict=True))
    return {
        name: jax.random.uniform(keys[name], shape, dtype, -bound, bound)
        if name in keys
        else jnp.zeros(shape, dtype)
        for name, shape in shapes.items()
    }


def _laid_out(x: Dims, params: Mapping[str, Dims], *_: Any) -> Dims:
    """Batch and sequence as those of ``x``, features as what the last product and the last bias give them."""
    found = params or {}
    return (*x[:2], *join_dims(found.get("out_kernel", (None,))[-1:], found.get("out_bias", (None,))))


@over_explicit_axes("x", "params", "key", "options", out=_laid_out)
def fused_multihead_attention(
    x: jax.Array,
    num_heads: int,
    use_bias: bool = True,
    dropout_rate: float = 0.0,
    *,
    params: Mapping[str, jax.Array] | None = None,
    key: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Multi-head self-attention of ``x``: input projections, :func:`flash_attention`, output projection.

    In plain JAX::

        q, k, v = jnp.einsum("bse,ethd->tbshd", x, params["qkv_kernel"]) + params["qkv_bias"][:, None, None]
        y = flash_attention(q, k, v, layout="bshd", **options)
        out = dropout(jnp.einsum("bshd,hde->bse", y, params["out_kernel"]) + params["out_bias"])

    Dropout applies to the layer's output (each element is 0 with probability ``dropout_rate``, the others are divided
    by ``1 - dropout_rate``). Dropping attention weights would need a random number for every pair of positions.

    Args:
      x: ``[batch, sequence, embed]``, floating point.
      num_heads: Divides ``embed``.
      use_bias: Whether the projections have biases.
      dropout_rate: At least 0, below 1. Without ``key`` nothing is dropped and an :class:`OpWarning` is issued: pass
        a key to train, and a rate of 0 to evaluate.
      params: As returned by :func:`multihead_attention_params`; they are cast to the dtype of ``x``. ``None``: new
        ones, generated from ``key`` (``jax.random.key(0)`` by default), the same in every call.
      key: A key of ``jax.random`` for dropout.
      **options: Of :func:`flash_attention`: ``use_causal_mask``, ``window``, ``segment_ids``, ``precision`` …

    Returns:
      ``[batch, sequence, embed]`` in the dtype of ``x``.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise OpTypeError(f"fused_multihead_attention: x must be an array, got {type(x).__name__}")
    if len(x.shape) != 3:
        raise OpShapeError(
            f"fused_multihead_attention: x must be [batch, sequence, embed], got shape {tuple(x.shape)}"
        )
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise OpTypeError(f"fused_multihead_attention: x must be floating point, got {x.dtype}")
    if isinstance(dropout_rate, bool) or not isinstance(dropout_rate, numbers.Real):
        raise OpTypeError(f"fused_multihead_attention: dropout_rate must be a number, got {dropout_rate!r}")
    if not 0 <= dropout_rate < 1:
        raise OpValueError(
            f"fused_multihead_attention: dropout_rate must be at least 0 and below 1, got {dropout_rate!r}"
        )
    check_flag("fused_multihead_attention", "use_bias", use_bias)
    if key is not None:
        check_key("fused_multihead_attention", key)
    if params is not None and not isinstance(params, Mapping):
        raise OpTypeError(
            f"fused_multihead_attention: params must be a dict as multihead_attention_params makes it, got "
            f"{type(params).__name__}"
        )
    if "layout" in options:
        raise OpValueError("fused_multihead_attention: layout is not an option here; remove it")
    if dropout_rate and key is None:
        remark(
            "fused_multihead_attention",
            f"dropout_rate={dropout_rate} has no effect without a key: nothing is dropped. Remedy: "
            "key=jax.random.key(…), another one each step, to train; dropout_rate=0 to evaluate.",
        )
    embed = x.shape[-1]
    heads = _check_heads("fused_multihead_attention", embed, num_heads, "the last axis of x")
    shapes = _shapes(embed, heads, use_bias)
    if params is None:
        first, key = (jax.random.key(0), None) if key is None else jax.random.split(key)
        params = multihead_attention_params(first, embed, num_heads, use_bias=use_bias)
    found = {
        name: tuple(value.shape) if hasattr(value, "shape") else type(value).__name__
        for name, value in params.items()
    }
    if found != shapes:
        raise OpShapeError(
            f"fused_multihead_attention: params must have the shapes {shapes} (num_heads={num_heads}, "
            f"use_bias={use_bias}), got {found}. Remedy: multihead_attention_params(key, {embed}, {num_heads})."
        )
    own = {name: value.astype(x.dtype) for name, value in params.items()}
    qkv = jnp.einsum("bse,ethd->tbshd", x, own["qkv_kernel"])
    if use_bias:
        qkv = qkv + own["qkv_bias"][:, None, None]
    y = flash_attention(qkv[0], qkv[1], qkv[2], layout="bshd", **options)
    out = jnp.einsum("bshd,hde->bse", y, own["out_kernel"])
    if use_bias:
        out = out + own["out_bias"]
    if key is None or dropout_rate == 0:
        return out
    kept = jax.random.bernoulli(key, 1 - dropout_rate, out.shape)
    return jnp.where(kept, out / (1 - dropout_rate), jnp.zeros((), out.dtype))

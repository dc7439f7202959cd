"""Quantisation by several codebooks: of a vector's parts (product), or of successive residuals (residual).

With ``n`` codebooks of ``k`` codes, a vector is one of ``kⁿ`` for the cost of searching ``n · k``. Product
quantisation (Jégou et al. 2011) splits a vector into ``n`` parts and quantises each with its own codebook; residual
quantisation (Gray 1984; for audio codecs Zeghidour et al. 2021, arXiv:2107.03312) quantises the vector, then the
residual, and so on.

The state is that of :func:`vector_quantise` with the codebooks as a first axis: ``initial_codebook_state(key,
codebook_size, dim, codebooks=n)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.errors import did_you_mean
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.explicit import over_explicit_axes
from capibara.ops.vq.quantise import (
    STATE_KEYS,
    check_context,
    check_options,
    check_state,
    check_vectors,
    laid,
    vector_quantise,
)

__all__ = ["dequantise", "product_quantise", "residual_quantise"]

SCHEMES = ("single", "product", "residual")
_Result = tuple[jax.Array, jax.Array, dict[str, jax.Array], dict[str, jax.Array]]


def _keys(key: jax.Array | None, count: int) -> Any:
    return None if key is None else jax.random.split(key, count)


@over_explicit_axes("state", "x", "key", out=laid)
def product_quantise(
    state: Mapping[str, jax.Array],
    x: jax.Array,
    *,
    train: bool,
    decay: float = 0.99,
    epsilon: float = 1e-5,
    commitment_weight: float = 0.25,
    dead_code_threshold: float = 1.0,
    key: jax.Array | None = None,
    metric: str = "euclidean",
    axis_name: str | tuple[str, ...] | None = None,
    implementation: str = "auto",
) -> _Result:
    """Split each vector into parts and quantise each part with its own codebook.

    In plain JAX: :func:`vector_quantise` of ``jnp.split(x, codebooks, -1)`` one by one, followed by ``concatenate``.

    Args:
      state: ``{"codebook": [codebooks, codes, part], "cluster_size": [codebooks, codes], "codebook_sum": like the
        codebook}``, float32.
      x: ``[..., codebooks * part]``, floating point, at least one vector.
      train, decay, epsilon, commitment_weight, dead_code_threshold, key, metric, axis_name, implementation: as in
        :func:`vector_quantise`.

    Returns:
      ``quantized`` like ``x``, with gradients as if it were ``x``; ``indices int32 [..., codebooks]``; metrics as in
      :func:`vector_quantise`, the means over the codebooks; and the new state.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Source: Jégou, Douze and Schmid 2011, "Product quantization for nearest neighbor search".
    """
    op = "product_quantise"
    count, _, part = check_state(op, state, 3)
    check_vectors(op, x, count * part, f"the {count} codebooks' dims together")
    moving = {"decay": decay, "epsilon": epsilon, "dead_code_threshold": dead_code_threshold}
    check_options(op, **moving, commitment_weight=commitment_weight)
    check_context(op, key, axis_name, train)
    x = jnp.asarray(x)
    one = partial(
        vector_quantise,
        train=train,
        commitment_weight=commitment_weight,
        metric=metric,
        axis_name=axis_name,
        implementation=implementation,
        **moving,
    )
    parts = jnp.moveaxis(x.reshape(*x.shape[:-1], count, part), -2, 0)
    own = {name: state[name] for name in STATE_KEYS}
    quantized, indices, metrics, after = jax.vmap(lambda s, v, k: one(s, v, key=k))(
        own, parts, _keys(key, count)
    )
    quantized = jnp.moveaxis(quantized, 0, -2).reshape(x.shape)
    metrics = {name: jnp.mean(value) for name, value in metrics.items()}
    return quantized, jnp.moveaxis(indices, 0, -1), metrics, after if train else own


@over_explicit_axes("state", "x", "key", out=laid)
def residual_quantise(
    state: Mapping[str, jax.Array],
    x: jax.Array,
    *,
    train: bool,
    decay: float = 0.99,
    epsilon: float = 1e-5,
    commitment_weight: float = 0.25,
    dead_code_threshold: float = 1.0,
    key: jax.Array | None = None,
    metric: str = "euclidean",
    axis_name: str | tuple[str, ...] | None = None,
    implementation: str = "auto",
) -> _Result:
    """Quantise each vector, then its residual with the next codebook, and so on; the sum of the codes is the result.

    In plain JAX::

        left = x
        for codebook in codebooks:
            code = codebook[argmin(|left - codebook|²)]
            left = left - stop_gradient(code)
        quantized = x - stop_gradient(left)

    Args:
      state: ``{"codebook": [codebooks, codes, dim], "cluster_size": [codebooks, codes], "codebook_sum": like the
        codebook}``, float32.
      x: ``[..., dim]``, floating point, at least one vector.
      train, decay, epsilon, commitment_weight, dead_code_threshold, key, metric, axis_name, implementation: as in
        :func:`vector_quantise`.

    Returns:
      ``quantized`` like ``x``, with gradients as if it were ``x``; ``indices int32 [..., codebooks]``; metrics:
      ``commitment_loss`` (the sum over the codebooks), ``quantization_error`` of the sum of the codes, ``perplexity``
      and ``usage`` (the means over the codebooks); and the new state.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Source: Zeghidour et al. 2021, arXiv:2107.03312, algorithm 1.
    """
    op = "residual_quantise"
    count, _, dim = check_state(op, state, 3)
    check_vectors(op, x, dim)
    moving = {"decay": decay, "epsilon": epsilon, "dead_code_threshold": dead_code_threshold}
    check_options(op, **moving, commitment_weight=commitment_weight)
    check_context(op, key, axis_name, train)
    x = jnp.asarray(x)
    # What is left is kept wide: each level's codes are smaller than the last one's.
    left = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    keys = _keys(key, count)
    steps: list[_Result] = []
    for i in range(count):
        level = {name: state[name][i] for name in STATE_KEYS}
        step = vector_quantise(
            level,
            left,
            train=train,
            commitment_weight=commitment_weight,
            key=None if keys is None else keys[i],
            metric=metric,
            axis_name=axis_name,
            implementation=implementation,
            **moving,
        )
        left = left - lax.stop_gradient(step[0])
        steps.append(step)
    every = {name: jnp.stack([step[2][name] for step in steps]) for name in steps[0][2]}
    metrics = {
        "commitment_loss": jnp.sum(every["commitment_loss"]),
        "quantization_error": every["quantization_error"][-1],
        "perplexity": jnp.mean(every["perplexity"]),
        "usage": jnp.mean(every["usage"]),
    }
    quantized = x - lax.stop_gradient(left).astype(x.dtype)
    after = {name: state[name] for name in STATE_KEYS}
    if train:
        after = {name: jnp.stack([step[3][name] for step in steps]) for name in STATE_KEYS}
    return quantized, jnp.stack([step[1] for step in steps], -1), metrics, after


@over_explicit_axes(
    "codebook", "indices", out=lambda codebook, indices: indices[: len(indices) - (len(codebook) > 2)]
)
def dequantise(codebook: jax.Array, indices: jax.Array, *, scheme: str = "single") -> jax.Array:
    """Return the vectors for the given indices.

    In plain JAX: ``codebook[indices]``; ``concatenate`` (product) or sum (residual) of ``codebook[i][indices[...,
    i]]`` over the codebooks.

    Args:
      codebook: ``[codes, dim]``, or ``[codebooks, codes, dim]`` for ``"product"`` and ``"residual"``.
      indices: int ``[...]``, or ``[..., codebooks]``. An index outside 0 … codes - 1 gives NaN.
      scheme: ``"single"``, ``"product"`` or ``"residual"``: how the indices were computed.

    Returns:
      ``[..., dim]``, for ``"product"`` ``[..., codebooks * dim]``, in the codebook's dtype.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    op = "dequantise"
    if not isinstance(scheme, str):
        raise OpTypeError(f"{op}: scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}")
    if scheme not in SCHEMES:
        raise OpValueError(
            f"{op}: scheme must be one of {', '.join(SCHEMES)}, got {scheme!r}.{did_you_mean(scheme, SCHEMES)}"
        )
    for name, array, kind in (("codebook", codebook, jnp.floating), ("indices", indices, jnp.integer)):
        if not hasattr(array, "dtype") or not jnp.issubdtype(array.dtype, kind):
            raise OpTypeError(
                f"{op}: {name} must be an array of {'integers' if kind is jnp.integer else 'floating point'}, got "
                f"{getattr(array, 'dtype', type(array).__name__)}"
            )
    layout = "[codes, dim]" if scheme == "single" else "[codebooks, codes, dim]"
    if len(codebook.shape) != (2 if scheme == "single" else 3):
        raise OpShapeError(
            f"{op}: with scheme={scheme!r} codebook must be {layout}, got shape {tuple(codebook.shape)}"
        )
    codebook, indices = jnp.asarray(codebook), jnp.asarray(indices)
    indices = jnp.where(indices < 0, codebook.shape[-2], indices)  # not from the end: out of range
    if scheme == "single":
        return jnp.take(codebook, indices, axis=0, mode="fill")
    if not indices.shape or indices.shape[-1] != codebook.shape[0]:
        raise OpShapeError(
            f"{op}: the last axis of indices {tuple(indices.shape)} must have one for each of the "
            f"{codebook.shape[0]} codebooks"
        )
    codes = jax.vmap(lambda c, i: jnp.take(c, i, axis=0, mode="fill"), (0, -1), -2)(codebook, indices)
    return lax.collapse(codes, codes.ndim - 2) if scheme == "product" else jnp.sum(codes, -2)

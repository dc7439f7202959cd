"""Vector quantisation with a codebook that learns by moving averages instead of by gradients.

Each vector is replaced by its nearest code. The gradient passes straight through to the input (the replacement is
treated as the identity), and a commitment loss pulls the inputs towards their codes. The codes themselves follow the
data: every code is the ratio of two exponential moving averages, the sum and the count of the vectors nearest to it
(van den Oord et al. 2017, arXiv:1711.00937, appendix A.1). A code that hardly any vector chooses is "dead"; it is
moved to a vector of the current batch, so that it is used again.

The state is a plain dict ``{"codebook" [codes, dim], "cluster_size" [codes], "codebook_sum" [codes, dim]}`` that is
passed in and returned. For several codebooks (:mod:`capibara.ops.vq.several`) its arrays have an additional leading
axis.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.checks import check_flag, check_key
from capibara.ops.collective.placement import bound_axis, check_axis_name
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.explicit import Dims, over_explicit_axes
from capibara.ops.vq.api import nearest_code

__all__ = ["initial_codebook_state", "update_codebook", "vector_quantise"]

STATE_KEYS = ("codebook", "cluster_size", "codebook_sum")


def initial_codebook_state(
    key: jax.Array, codebook_size: int, dim: int, *, codebooks: int | None = None
) -> dict[str, jax.Array]:
    """A codebook of standard normal draws, with every count at one so that ``codebook == codebook_sum / count``.

    Args:
      key: A ``jax.random`` key.
      codebook_size: Number of codes, at least 1.
      dim: Length of a code, at least 1.
      codebooks: The number of codebooks, for product and residual quantisation; arrays get it as a leading axis.
        ``None``: one codebook, without that axis.

    Raises:
      OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    check_key("initial_codebook_state", key)
    counts = {"codebook_size": codebook_size, "dim": dim}
    if codebooks is not None:
        counts["codebooks"] = codebooks
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
            raise OpValueError(f"initial_codebook_state: {name} must be an integer from 1, got {value!r}")
    front = () if codebooks is None else (codebooks,)
    codebook = jax.random.normal(key, (*front, codebook_size, dim), jnp.float32)
    # Two arrays, not one twice: a caller may donate the state to a compiled function.
    return {
        "codebook": codebook,
        "cluster_size": jnp.ones((*front, codebook_size), jnp.float32),
        "codebook_sum": jnp.array(codebook, copy=True),
    }


def check_state(op: str, state: Any, axes: int) -> tuple[int, ...]:
    """The shape of the codebook, which has ``axes`` axes; the rest of the state must match it."""
    if not isinstance(state, Mapping) or any(k not in state for k in STATE_KEYS):
        found = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise OpTypeError(
            f"{op}: state must be a dict with the keys {', '.join(STATE_KEYS)}, got {found}. "
            "Remedy: initial_codebook_state(key, codebook_size, dim)."
        )
    for name in STATE_KEYS:
        if not hasattr(state[name], "shape") or not hasattr(state[name], "dtype"):
            raise OpTypeError(f"{op}: state[{name!r}] must be an array, got {type(state[name]).__name__}")
    shape = tuple(state["codebook"].shape)
    if len(shape) != axes or 0 in shape[:-1]:
        raise OpShapeError(
            f"{op}: state['codebook'] must be {'[codebooks, codes, dim]' if axes == 3 else '[codes, dim]'}, got shape "
            f"{shape}. Remedy: initial_codebook_state(key, codebook_size, dim"
            f"{', codebooks=…' if axes == 3 else ''})."
        )
    for name, wanted in {"cluster_size": shape[:-1], "codebook_sum": shape}.items():
        if tuple(state[name].shape) != wanted:
            raise OpShapeError(
                f"{op}: state[{name!r}] must have shape {wanted} to go with the codebook {shape}, got "
                f"{tuple(state[name].shape)}"
            )
    return shape


def check_vectors(op: str, x: Any, dim: int, what: str = "the codebook's dim") -> None:
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        raise OpTypeError(
            f"{op}: x must be a floating-point array, got {getattr(x, 'dtype', type(x).__name__)}"
        )
    if x.ndim < 1 or x.shape[-1] != dim:
        raise OpShapeError(f"{op}: the last axis of x {tuple(x.shape)} must have {what}, {dim}")
    if math.prod(x.shape) == 0:
        raise OpShapeError(f"{op}: x {tuple(x.shape)} holds no vector")


def check_options(op: str, **options: Any) -> None:
    limits = {"decay": 1.0}
    for name, value in options.items():
        high = limits.get(name, math.inf)
        # Numbers of NumPy and JAX, arrays without axes, are numbers too.
        if isinstance(value, bool) or not (
            isinstance(value, numbers.Real) or getattr(value, "shape", None) == ()
        ):
            raise OpTypeError(f"{op}: {name} must be a number, got {value!r}")
        if not 0.0 <= float(value) <= high:
            raise OpValueError(f"{op}: {name} must lie in [0.0, {high}], got {value!r}")


def check_context(op: str, key: Any, axis_name: Any, train: Any = True) -> None:
    """Refuse an invalid ``key``, mesh axes that are not bound here, and a ``train`` that is not a boolean."""
    check_flag(op, "train", train)
    if key is not None:
        check_key(op, key)
    axes = check_axis_name(op, axis_name, "vectors that are not distributed")
    if axes is not None:
        bound_axis(op, axes, needed=True)


def _summed(tree: Any, axis_name: Any) -> Any:
    return tree if axis_name is None else lax.psum(tree, axis_name)


def _state(state: Any) -> dict[str, Dims]:
    return {name: state[name] for name in STATE_KEYS}


def laid(state: Any, x: Dims, _: Dims) -> list[Any]:
    """The sharding of vectors, indices, metrics and the new state over a mesh."""
    return [x, x[:-1], (), _state(state)]


@over_explicit_axes("state", "x", "indices", "key", out=lambda state, *_: _state(state))
def update_codebook(
    state: Mapping[str, jax.Array],
    x: jax.Array,
    indices: jax.Array,
    *,
    decay: float = 0.99,
    epsilon: float = 1e-5,
    dead_code_threshold: float = 1.0,
    key: jax.Array | None = None,
    axis_name: str | tuple[str, ...] | None = None,
) -> dict[str, jax.Array]:
    """Move every code towards the vectors that chose it, by exponential moving averages.

    In plain JAX::

        counts = jnp.zeros(codes).at[indices].add(1)
        sums = jnp.zeros((codes, dim)).at[indices].add(x)
        cluster_size = decay * cluster_size + (1 - decay) * counts
        codebook_sum = decay * codebook_sum + (1 - decay) * sums
        codebook = codebook_sum / cluster_size                       # the counts smoothed by epsilon

    Gradients do not propagate through this function.

    Args:
      state: ``{"codebook": [codes, dim], "cluster_size": [codes], "codebook_sum": [codes, dim]}``, float32.
      x: ``[..., dim]``, floating point, at least one vector.
      indices: int ``[...]``, the code of each vector. As in ``.at[indices].add`` a negative one counts from the end,
        and a vector whose index is outside ``-codes … codes - 1`` is ignored.
      decay: Of the moving averages, in [0, 1].
      epsilon: Added to each count (Laplace smoothing), so that an unused code is not divided by zero.
      dead_code_threshold: A code whose average count of vectors per call falls below this is moved to a random
        vector of ``x``, with twice the threshold as its count, which gives it time to be chosen. 0: never.
      key: The randomness of that draw. Without a key no code is revived.
      axis_name: Mesh axes of the ``jax.shard_map`` around the call, over which the vectors are distributed: counts
        and sums are added over them. State and key must be the same on all devices; the new state is the same, too.

    Returns:
      The new state.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Source: van den Oord et al. 2017, arXiv:1711.00937, appendix A.1.
    """
    op = "update_codebook"
    codes, dim = check_state(op, state, 2)
    check_vectors(op, x, dim)
    check_options(op, decay=decay, epsilon=epsilon, dead_code_threshold=dead_code_threshold)
    check_context(op, key, axis_name)
    if not hasattr(indices, "dtype") or not jnp.issubdtype(indices.dtype, jnp.integer):
        raise OpTypeError(
            f"{op}: indices must be an array of integers, got {getattr(indices, 'dtype', type(indices).__name__)}"
        )
    if tuple(indices.shape) != tuple(x.shape[:-1]):
        raise OpShapeError(
            f"{op}: indices must have shape {tuple(x.shape[:-1])}, one for each vector of x {tuple(x.shape)}, got "
            f"{tuple(indices.shape)}"
        )
    before = {name: lax.stop_gradient(state[name]) for name in STATE_KEYS}
    vectors = lax.stop_gradient(x).reshape(-1, dim).astype(before["codebook"].dtype)
    flat = indices.reshape(-1)
    counts = jnp.zeros((codes,), vectors.dtype).at[flat].add(1.0)
    sums = jnp.zeros((codes, dim), vectors.dtype).at[flat].add(vectors)
    counts, sums = _summed((counts, sums), axis_name)
    cluster_size = decay * before["cluster_size"] + (1.0 - decay) * counts
    codebook_sum = decay * before["codebook_sum"] + (1.0 - decay) * sums
    total = jnp.sum(cluster_size)
    smoothed = (cluster_size + epsilon) / (total + codes * epsilon) * total
    moved = codebook_sum / smoothed[:, None]
    if dead_code_threshold > 0 and key is not None:
        dead = cluster_size < dead_code_threshold
        fresh = vectors[jax.random.randint(key, (codes,), 0, vectors.shape[0])]
        if axis_name is not None:  # from one device's vectors, a device drawn for each code
            chosen = jax.random.randint(jax.random.fold_in(key, 1), (codes,), 0, lax.axis_size(axis_name))
            mine = (chosen == lax.axis_index(axis_name))[:, None]
            fresh = lax.psum(jnp.where(mine, fresh, 0), axis_name)
        count = 2.0 * dead_code_threshold
        moved = jnp.where(dead[:, None], fresh, moved)
        cluster_size = jnp.where(dead, count, cluster_size)
        codebook_sum = jnp.where(dead[:, None], fresh * count, codebook_sum)
    return {"codebook": moved, "cluster_size": cluster_size, "codebook_sum": codebook_sum}


@over_explicit_axes("state", "x", "key", out=laid)
def vector_quantise(
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
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
    """Replace each vector by its nearest code; in training, move the codes towards the vectors.

    In plain JAX: ``indices = argmin(|x - codebook|²)`` and ``quantized = x + stop_gradient(codebook[indices] - x)``.

    Args:
      state: ``{"codebook": [codes, dim], "cluster_size": [codes], "codebook_sum": [codes, dim]}``, float32.
      x: ``[..., dim]``, floating point, at least one vector.
      train: Whether to update the state; otherwise it is returned unchanged.
      decay: Of the moving averages, in [0, 1].
      epsilon: Added to each count (Laplace smoothing), so that an unused code is not divided by zero.
      commitment_weight: Factor on the commitment loss.
      dead_code_threshold: A code whose average count of vectors per call falls below this is moved to a random
        vector of ``x``, with twice the threshold as its count, which gives it time to be chosen. 0: never. Keep
        it well below the number of vectors divided by the number of codes.
      key: The randomness of that draw. Without a key no code is revived.
      metric: How the nearest code is found: ``"euclidean"`` or ``"cosine"``. With both, codes are averages of vectors
        and losses are squared distances; pass unit vectors if only directions matter.
      axis_name: Mesh axes of the ``jax.shard_map`` around the call; see :func:`update_codebook`. All metrics are then
        over all devices, except ``commitment_loss``, which covers the device's own vectors.
      implementation: As for :func:`nearest_code`.

    Returns:
      ``quantized`` like ``x``, with gradients as if it were ``x``; ``indices int32 [...]``; metrics, all scalars in
      float32 (the losses of a float64 ``x`` in float64): ``commitment_loss`` (weighted, differentiable in ``x``;
      add it to the loss),
      ``quantization_error`` (mean squared, no gradient), ``perplexity`` (exp of the entropy of code usage in this
      call: 1 to codes), ``usage`` (fraction of codes used in this call); and the new state.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    op = "vector_quantise"
    codes, dim = check_state(op, state, 2)
    check_vectors(op, x, dim)
    moving = {"decay": decay, "epsilon": epsilon, "dead_code_threshold": dead_code_threshold}
    check_options(op, **moving, commitment_weight=commitment_weight)
    check_context(op, key, axis_name, train)
    x = jnp.asarray(x)
    codebook = lax.stop_gradient(state["codebook"])
    indices = nearest_code(x, codebook, metric=metric, implementation=implementation)
    chosen = jnp.take(codebook, indices, axis=0)
    # The loss is computed wide: squares of bfloat16 differences lose most of their digits.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    error = jnp.mean(jnp.square(x.astype(wide) - chosen.astype(wide)))
    quantized = x + lax.stop_gradient(chosen.astype(x.dtype) - x)
    counts = jnp.zeros((codes,), codebook.dtype).at[indices.reshape(-1)].add(1.0)
    counts = _summed(counts, axis_name)
    share = (counts / jnp.sum(counts)).astype(jnp.float32)
    whole = lax.stop_gradient(error)
    metrics = {
        "commitment_loss": commitment_weight * error,
        "quantization_error": whole if axis_name is None else lax.pmean(whole, axis_name),
        "perplexity": jnp.exp(-jnp.sum(jax.scipy.special.xlogy(share, share))),
        "usage": jnp.mean((counts > 0).astype(jnp.float32)),
    }
    if not train:
        return quantized, indices, metrics, {name: state[name] for name in STATE_KEYS}
    return (
        quantized,
        indices,
        metrics,
        update_codebook(state, x, indices, **moving, key=key, axis_name=axis_name),
    )

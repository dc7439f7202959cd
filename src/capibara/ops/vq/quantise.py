"""Vector quantisation with a codebook that learns by moving averages instead of by gradients.

Each vector is replaced by its nearest code. The gradient passes straight through to the input (the replacement is
treated as the identity), and a commitment loss draws the inputs to their codes. The codes themselves follow the
data: every code is the ratio of two exponential moving averages, the sum and the number of the vectors it was
nearest to (van den Oord et al. 2017, arXiv:1711.00937, appendix A.1). A code that hardly any vector chooses is
"dead"; it is put on a vector of the present batch, where it is of use again.

The state is a plain dict ``{"codebook" [codes, dim], "cluster_size" [codes], "codebook_sum" [codes, dim]}`` that
comes in and goes out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.vq.api import nearest_code

__all__ = ["initial_codebook_state", "vector_quantise"]

STATE_KEYS = ("codebook", "cluster_size", "codebook_sum")


def initial_codebook_state(key: jax.Array, codebook_size: int, dim: int) -> dict[str, jax.Array]:
    """A codebook of standard normal draws, with every count at one so that ``codebook == codebook_sum / count``.

    Args:
      key: A ``jax.random`` key.
      codebook_size: Number of codes, at least 1.
      dim: Length of a code, at least 1.
    """
    for name, value in (("codebook_size", codebook_size), ("dim", dim)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OpValueError(f"initial_codebook_state: {name} must be a whole number from 1, got {value!r}")
    codebook = jax.random.normal(key, (codebook_size, dim), jnp.float32)
    # Two arrays, not one twice: a caller may donate the state to a compiled function.
    return {
        "codebook": codebook,
        "cluster_size": jnp.ones((codebook_size,), jnp.float32),
        "codebook_sum": jnp.array(codebook, copy=True),
    }


def _check(state: Any, x: Any, options: Mapping[str, tuple[float, float, float]]) -> None:
    if not isinstance(state, Mapping) or any(k not in state for k in STATE_KEYS):
        found = sorted(state) if isinstance(state, Mapping) else type(state).__name__
        raise OpTypeError(
            f"vector_quantise: state must be a dict with the keys {', '.join(STATE_KEYS)}, got {found}. "
            "Remedy: initial_codebook_state(key, codebook_size, dim)."
        )
    if not hasattr(x, "dtype") or not jnp.issubdtype(x.dtype, jnp.floating):
        raise OpTypeError(
            f"vector_quantise: x must be a floating-point array, got {getattr(x, 'dtype', type(x).__name__)}"
        )
    codes, dim = state["codebook"].shape
    shapes = {"cluster_size": (codes,), "codebook_sum": (codes, dim)}
    for name, shape in shapes.items():
        if tuple(state[name].shape) != shape:
            raise OpShapeError(
                f"vector_quantise: state[{name!r}] must have shape {shape} to go with the codebook "
                f"{(codes, dim)}, got {tuple(state[name].shape)}"
            )
    if x.ndim < 1 or x.shape[-1] != dim:
        raise OpShapeError(
            f"vector_quantise: the last axis of x {tuple(x.shape)} must have the codebook's dim, {dim}"
        )
    if math.prod(x.shape) == 0:
        raise OpShapeError(f"vector_quantise: x {tuple(x.shape)} holds no vector")
    for name, (value, low, high) in options.items():
        if not low <= value <= high:
            raise OpValueError(f"vector_quantise: {name} must lie in [{low}, {high}], got {value!r}")


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
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
    """Replace each vector by its nearest code; in training, move the codes towards the vectors.

    In plain JAX: ``indices = argmin(|x - codebook|²)`` and ``quantized = x + stop_gradient(codebook[indices] - x)``.

    Args:
      state: ``{"codebook": [codes, dim], "cluster_size": [codes], "codebook_sum": [codes, dim]}``, float32.
      x: ``[..., dim]``, floating point, at least one vector.
      train: Whether to return a moved state; otherwise the state comes back as it was.
      decay: Of the moving averages, in [0, 1].
      epsilon: Added to each count (Laplace smoothing), so that an unused code is not divided by zero.
      commitment_weight: Factor on the commitment loss.
      dead_code_threshold: A code whose averaged count of vectors a call falls below this is put on a random
        vector of ``x``, with twice the threshold as its count, which gives it time to be chosen. 0: never. Keep
        it well below the number of vectors divided by the number of codes.
      key: The randomness of that draw. Without a key no code is revived.
      implementation: Of :func:`nearest_code`.

    Returns:
      ``quantized`` like ``x``, with gradients as if it were ``x``; ``indices int32 [...]``; metrics, all scalars in
      float32 (the losses of a float64 ``x`` in float64): ``commitment_loss`` (weighted, differentiable in ``x``;
      add it to the loss),
      ``quantization_error`` (mean squared, no gradient), ``perplexity`` (exp of the entropy of the codes' use in
      this call: 1 to codes), ``usage`` (fraction of codes used in this call); and the new state.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument does not fit, by name.
    """
    _check(
        state,
        x,
        {
            "decay": (decay, 0.0, 1.0),
            "epsilon": (epsilon, 0.0, math.inf),
            "commitment_weight": (commitment_weight, 0.0, math.inf),
            "dead_code_threshold": (dead_code_threshold, 0.0, math.inf),
        },
    )
    codebook = lax.stop_gradient(state["codebook"])
    codes, dim = codebook.shape
    indices = nearest_code(x, codebook, implementation=implementation)
    chosen = jnp.take(codebook, indices, axis=0)
    # The loss is computed wide: squares of bfloat16 differences lose most of their digits.
    wide = jnp.promote_types(x.dtype, jnp.float32)
    error = jnp.mean(jnp.square(x.astype(wide) - chosen.astype(wide)))
    quantized = x + lax.stop_gradient(chosen.astype(x.dtype) - x)

    vectors = lax.stop_gradient(x).reshape(-1, dim).astype(codebook.dtype)
    flat = indices.reshape(-1)
    counts = jnp.zeros((codes,), codebook.dtype).at[flat].add(1.0)
    share = (counts / flat.size).astype(jnp.float32)
    metrics = {
        "commitment_loss": commitment_weight * error,
        "quantization_error": lax.stop_gradient(error),
        "perplexity": jnp.exp(-jnp.sum(jax.scipy.special.xlogy(share, share))),
        "usage": jnp.mean((counts > 0).astype(jnp.float32)),
    }
    if not train:
        return quantized, indices, metrics, dict(state)

    sums = jnp.zeros((codes, dim), codebook.dtype).at[flat].add(vectors)
    cluster_size = decay * lax.stop_gradient(state["cluster_size"]) + (1.0 - decay) * counts
    codebook_sum = decay * lax.stop_gradient(state["codebook_sum"]) + (1.0 - decay) * sums
    total = jnp.sum(cluster_size)
    smoothed = (cluster_size + epsilon) / (total + codes * epsilon) * total
    moved = codebook_sum / smoothed[:, None]
    if dead_code_threshold > 0 and key is not None:
        dead = cluster_size < dead_code_threshold
        fresh = vectors[jax.random.randint(key, (codes,), 0, vectors.shape[0])]
        count = 2.0 * dead_code_threshold
        moved = jnp.where(dead[:, None], fresh, moved)
        cluster_size = jnp.where(dead, count, cluster_size)
        codebook_sum = jnp.where(dead[:, None], fresh * count, codebook_sum)
    after = {"codebook": moved, "cluster_size": cluster_size, "codebook_sum": codebook_sum}
    return quantized, indices, metrics, after

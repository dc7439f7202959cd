"""A vector-quantisation layer with its codebook.

Calling the layer quantises with the current codebook, and is a pure function of the input: it works inside ``jit``,
``grad`` and ``vmap``. Learning the codebook changes the layer, which is not possible under tracing, so there are two
ways. Outside of traced code ``layer.update(x)`` (or ``layer(x, train=True)``) writes ``layer.state``. Inside,
``layer.apply(state, x, train=True)`` returns the new state instead of writing it.

>>> import jax, jax.numpy as jnp
>>> from capibara.vq.vqbit.vqbit_layer import VQbitLayer
>>> layer = VQbitLayer(codebook_size=8, embedding_dim=4)
>>> quantized, indices, metrics = jax.jit(layer)(jnp.ones((2, 3, 4)))
>>> quantized.shape, indices.shape
((2, 3, 4), (2, 3))
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from capibara.compose.physical.randomness import MAX_SEED
from capibara.vq.errors import TracedUpdateError, VQConfigError, VQInputError
from capibara.vq.functional import vq_apply, vq_init_state

if TYPE_CHECKING:
    from capibara.compose.library import VectorQuantiser

__all__ = ["VQbitLayer"]


def _whole(name: str, value: Any, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise VQInputError(f"VQbitLayer: {name} must be an integer, got {value!r}")
    if value < low:
        raise VQConfigError(f"VQbitLayer: {name} must be at least {low}, got {value}")
    if high is not None and value > high:
        raise VQConfigError(f"VQbitLayer: {name} must be at most {high}, got {value}")
    return int(value)


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise VQInputError(f"VQbitLayer: {name} must be a number, got {value!r}")
    if not low <= value <= high:
        raise VQConfigError(f"VQbitLayer: {name} must lie in [{low}, {high}], got {value!r}")
    return float(value)


def _traced(tree: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(tree))


class VQbitLayer:
    """Replace vectors by the nearest of ``codebook_size`` codes, with straight-through gradients.

    Args:
      codebook_size: Number of codes.
      embedding_dim: Length of a vector.
      use_jax_native: ``True``: takes and returns JAX arrays, and can be traced. ``False``: for callers outside JAX:
        takes anything that NumPy can read and returns NumPy arrays; it then cannot be traced.
      use_tpu_optimizations: ``True``: use the implementation that ``capibara.ops.explain("nearest_code", …)`` names
        for the platform. ``False``: use the plain reference (the whole tokens × codes matrix at once) on every
        platform.
      decay: Of the codebook's moving averages.
      epsilon: Laplace smoothing of the codes' counts.
      commitment_weight: Factor on the commitment loss.
      dead_code_threshold: A code whose average count of vectors per step falls below this is moved to a random input
        vector; 0: never. See :func:`capibara.ops.vq.vector_quantise`.
      seed: For the initial codebook and for reviving dead codes.

    Attributes:
      state: ``{"codebook", "cluster_size", "codebook_sum"}``; replaced, never changed in place, by an update.

    Raises:
      VQConfigError, VQInputError: a setting is out of range or has the wrong type; the message names it.

    Source: van den Oord et al. 2017 (arXiv:1711.00937).
    """

    def __init__(
        self,
        codebook_size: int,
        embedding_dim: int,
        use_jax_native: bool = True,
        use_tpu_optimizations: bool = True,
        *,
        decay: float = 0.99,
        epsilon: float = 1e-5,
        commitment_weight: float = 0.25,
        dead_code_threshold: float = 1.0,
        seed: int = 0,
    ) -> None:
        self.codebook_size = _whole("codebook_size", codebook_size, 1)
        self.embedding_dim = _whole("embedding_dim", embedding_dim, 1)
        for name, flag in (
            ("use_jax_native", use_jax_native),
            ("use_tpu_optimizations", use_tpu_optimizations),
        ):
            if not isinstance(flag, bool):
                raise VQInputError(f"VQbitLayer: {name} must be True or False, got {flag!r}")
        self.use_jax_native = use_jax_native
        self.use_tpu_optimizations = use_tpu_optimizations
        self.decay = _number("decay", decay, 0.0, 1.0)
        self.epsilon = _number("epsilon", epsilon, 0.0, math.inf)
        self.commitment_weight = _number("commitment_weight", commitment_weight, 0.0, math.inf)
        self.dead_code_threshold = _number("dead_code_threshold", dead_code_threshold, 0.0, math.inf)
        self.seed = _whole("seed", seed, 0, MAX_SEED)
        self.updates = 0
        self.state = vq_init_state(jax.random.key(self.seed), self.codebook_size, self.embedding_dim)

    def __repr__(self) -> str:
        return (
            f"VQbitLayer(codebook_size={self.codebook_size}, embedding_dim={self.embedding_dim}, "
            f"use_jax_native={self.use_jax_native}, use_tpu_optimizations={self.use_tpu_optimizations})"
        )

    @property
    def implementation(self) -> str:
        """The implementation of :func:`capibara.ops.vq.nearest_code` that ``use_tpu_optimizations`` selects."""
        return "auto" if self.use_tpu_optimizations else "reference"

    def apply(
        self,
        state: Mapping[str, jax.Array],
        x: jax.Array,
        *,
        train: bool = False,
        key: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
        """The layer as a pure function: ``(quantized, indices, metrics, new_state)``.

        Args:
          state: As ``layer.state``.
          x: ``[..., embedding_dim]``, floating point.
          train: Whether ``new_state`` is updated with ``x``.
          key: For reviving dead codes; without a key none is revived.
        """
        return vq_apply(
            state,
            x,
            train=train,
            decay=self.decay,
            epsilon=self.epsilon,
            commitment_weight=self.commitment_weight,
            dead_code_threshold=self.dead_code_threshold,
            key=key,
            implementation=self.implementation,
        )

    def _input(self, x: Any) -> jax.Array:
        if self.use_jax_native:
            return x if isinstance(x, jax.Array) else jnp.asarray(x)
        if _traced(x):
            raise VQInputError(
                "VQbitLayer: this layer was built with use_jax_native=False, which gives NumPy arrays and cannot be "
                "traced by jit, grad or vmap. Remedy: use_jax_native=True."
            )
        return jnp.asarray(np.asarray(x))

    def __call__(self, x: Any, train: bool = False) -> tuple[Any, Any, dict[str, Any]]:
        """Quantise ``x [..., embedding_dim]``; with ``train=True`` also move the codebook (outside of tracing).

        Returns:
          ``(quantized, indices, metrics)``: like ``x``; ``int32 [...]``; the scalars ``commitment_loss`` (add it to
          the loss), ``quantization_error``, ``perplexity`` and ``usage``. With ``train=True`` they are those of the
          codebook before it moved.

        Raises:
          TracedUpdateError: ``train=True`` while ``x`` (or the layer's state) is traced.
          OpShapeError, OpTypeError: ``x`` does not fit.
        """
        x = self._input(x)
        key = None
        if train:
            if _traced((x, self.state)) or not _eager():
                raise TracedUpdateError(
                    "VQbitLayer: train=True writes layer.state, which cannot happen while jit, grad or vmap traces "
                    "the call: the state would hold tracers.\n"
                    "  Instead of:  quantized, indices, metrics = layer(x, train=True)\n"
                    "  write:       quantized, indices, metrics, state = layer.apply(state, x, train=True, key=key)\n"
                    "with the state an input and an output of the traced function."
                )
            key = jax.random.fold_in(jax.random.key(self.seed), self.updates + 1)
        quantized, indices, metrics, state = self.apply(self.state, x, train=train, key=key)
        if train:
            self.state = state
            self.updates += 1
        if self.use_jax_native:
            return quantized, indices, metrics
        return jax.device_get((quantized, indices, metrics))

    def update(self, x: Any) -> dict[str, Any]:
        """Move the codebook towards ``x``, outside of traced code; return the metrics."""
        return self(x, train=True)[2]

    def as_block(self) -> VectorQuantiser:
        """This layer's settings as a logical model for :mod:`capibara.compose` (with its own state).

        Raises:
          VQConfigError: the layer has a setting that the logical model does not support.
        """
        from capibara.compose.library import VectorQuantiser

        if self.epsilon != 1e-5 or not self.use_tpu_optimizations or not self.use_jax_native:
            raise VQConfigError(
                "VQbitLayer: a logical model always uses epsilon=1e-5, use_tpu_optimizations=True and "
                f"use_jax_native=True, but this layer has epsilon={self.epsilon}, use_tpu_optimizations="
                f"{self.use_tpu_optimizations}, use_jax_native={self.use_jax_native}"
            )
        return VectorQuantiser(
            self.codebook_size,
            self.embedding_dim,
            self.decay,
            self.commitment_weight,
            self.dead_code_threshold,
            self.epsilon,
            self.implementation,
        )


def _eager() -> bool:
    """Whether operations run at once here, rather than being recorded into a program."""
    return not isinstance(jnp.zeros(()) + 0, Tracer)

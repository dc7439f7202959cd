"""Operations that CPUs do better in another form in training.

Where gradients are taken (:func:`capibara.ops.layers.training_kernels`), products of many rows with weights, norms and
gates run in compiled kernels, whose passes over memory are fewer than XLA's. What they do not take, and all else, is as
in :mod:`~capibara.compose.backends.jax_ops`.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from capibara import ops  # not its layers: a start that traces nothing goes without them
from capibara.compose.backends import jax_ops
from capibara.compose.backends.jax_repeat import PRODUCT

__all__ = ["on_cpu"]

Array = jax.Array


def _product(x: Array, weight: Array, accumulate: str) -> Array:
    return _products(x, weight, accumulate=accumulate)[0]


def _products(x: Array, *weights: Array, accumulate: str) -> tuple[Array, ...]:
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    matrices = tuple(w.reshape(w.shape[0], math.prod(w.shape[1:])) for w in weights)
    if not ops.layers.takes_products(flat, matrices, accumulate):
        return jax_ops.products(x, *weights, accumulate=accumulate)
    # Rematerialisation knows products with weights by XLA's operation for them, and these by their name.
    found = (checkpoint_name(out, PRODUCT) for out in ops.layers.products(flat, *matrices))
    return tuple(out.reshape(*x.shape[:-1], *w.shape[1:]) for out, w in zip(found, weights, strict=True))


def _merge(x: Array, weight: Array, accumulate: str) -> Array:
    joined = math.prod(weight.shape[:2])
    flat = x.reshape(*x.shape[:-2], joined)
    return _product(flat, weight.reshape(joined, *weight.shape[2:]), accumulate)


def _unembed(x: Array, table: Array, accumulate: str) -> Array:
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if not ops.layers.takes_products(flat, (table,), accumulate):
        return jax_ops.unembed(x, table, accumulate)
    out = checkpoint_name(ops.layers.product_transposed(flat, table), PRODUCT)
    return out.reshape(*x.shape[:-1], table.shape[0])


def _rms_norm(
    x: Array, scale: Array | None = None, *, epsilon: float, accumulate: str, **options: Any
) -> Array:
    # Other options than the offset say over which parts of a row the mean is.
    if scale is not None and set(options) <= {"offset"} and ops.layers.takes_rms_norm(x, scale, accumulate):
        return ops.layers.rms_norm(x, scale, epsilon, options.get("offset", 0.0))
    return jax_ops.rms_norm(x, scale, epsilon=epsilon, accumulate=accumulate, **options)


def _gated(gate: Array, up: Array) -> Array:
    return ops.layers.gated(gate, up) if ops.layers.takes_gated(gate, up) else jax_ops.gated(gate, up)


def _rotary_table(
    positions: Array, dim: int, theta: float, accumulate: str, *options: Any, **named: Any
) -> Any:
    from capibara.ops.rotary.table import rotary_table

    return rotary_table(positions, dim, theta, accumulate, *options, **named, once=ops.layers.training())


def _rotate(x: Array, cos: Array, sin: Array, interleaved: bool = False, last: bool = False) -> Array:
    if interleaved or last or not ops.layers.takes_rotate(x, cos, sin):
        return jax_ops.rotate(x, cos, sin, interleaved, last)
    return ops.layers.rotate(x, cos, sin)


def on_cpu(module: Any) -> Any:
    """The operations of a module (its ``__all__``), some of them in the form for training on CPUs.

    Args:
        module: :mod:`capibara.compose.backends.jax_ops`.
    """
    replaced = {
        "dense": _product,
        "project": _product,
        "products": _products,
        "merge": _merge,
        "unembed": _unembed,
        "rms_norm": _rms_norm,
        "gated": _gated,
        "rotate": _rotate,
        "rotary_table": _rotary_table,
    }
    same = {name: getattr(module, name) for name in module.__all__}
    return SimpleNamespace(**{**same, **replaced}, __all__=list(module.__all__))

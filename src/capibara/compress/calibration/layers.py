"""The moments of a model's layers, for any framework that its adapter supports."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from capibara.compress.calibration.activations import Moments, collect
from capibara.compress.models.adapters import Adapter, AppliedAdapter, TreeAdapter

__all__ = ["layer_moments"]

_SMALL = 1 << 12  # elements of an entry of a stack
_LEAST = 0.01  # of the mean moment of all entries, what one entry's is at least
_MOST = 1 << 14  # features: their moments take 2 GiB, and as much again what is made of them


def layer_moments(adapter: Adapter, batches: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Settings of calibration, ``hessian`` and ``input_axes``, by the names of a model's weights.

    Args:
      adapter: of a ``torch.nn.Module``, or of JAX arrays and their function; others have no moments.
      batches: the inputs to run it on.

    Returns:
      Moments of weights that have both input and output axes (matrices, convolutions, stacks), with at most 16,384
      inputs that are not all zero. For a stack, those of its entries, a tuple, or if entries have fewer than 4,096
      elements their mean. If JAX cannot trace the function, none, with a warning.
    """
    if adapter.kind == "torch":
        found = collect(adapter.model, batches)
    else:
        found = _watched(adapter, batches)
    forms = adapter.tensors.forms
    out = {}
    for name, moments in found.items():
        some_axes = name in forms and 0 < len(moments.axes) < len(forms[name][1])
        if some_axes and moments.second.shape[-1] <= _MOST and moments.second.any():
            out[name] = _shrunk(_joined(moments, forms[name][1]))
    return out


def _watched(adapter: Adapter, batches: Iterable[Any]) -> dict[str, Moments]:
    """Of a function of arrays."""
    jax = sys.modules.get("jax")
    tree = adapter.tree if isinstance(adapter, AppliedAdapter) else adapter
    if jax is None or not isinstance(tree, TreeAdapter):
        return {}
    if not all(isinstance(a, jax.Array) for a in adapter.arrays.values()):
        return {}
    # Names of one tensor are one leaf, so that it is known by all inputs that it meets.
    own = {name: array for name, array in adapter.arrays.items() if name not in adapter.tied}

    def function(arrays: dict[str, Any], batch: Any) -> Any:
        every = {name: arrays[adapter.tied.get(name, name)] for name in adapter.arrays}
        return adapter.run(tree.with_arrays(every), batch)

    try:
        return collect(function, batches, own)
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:
        warnings.warn(
            f"JAX cannot trace the model ({type(error).__name__}): codecs are chosen without what its layers' inputs "
            "tell. Remedy: jax.numpy in the place of numpy.",
            stacklevel=2,
        )
        return {}


def _shrunk(moments: Moments) -> dict[str, Any]:
    """Moments as settings, drawn towards those of inputs without any structure as far as they are few.

    Directions that few inputs did not happen to take are not worthless: with as many inputs as features, half of what
    is believed is that all directions are alike (as O. Ledoit and M. Wolf, "A well-conditioned estimator for
    large-dimensional covariance matrices", J. Multivariate Anal., 2004, but for the share, which is a fixed one here).
    """
    settings = moments.settings()
    second, features = settings["hessian"], moments.second.shape[-1]
    alike = np.eye(features)
    if isinstance(second, tuple):
        share = features / (features + moments.count / len(second))
        levels = [float(s.diagonal().mean()) for s in second]
        # An entry that met few inputs or none is not worthless either.
        drawn = [
            (1 - share) * s + (share * level + max(_LEAST - level, 0.0)) * alike
            for s, level in zip(second, levels, strict=True)
        ]
        return {**settings, "hessian": tuple(drawn)}
    share = features / (features + moments.count)
    return {**settings, "hessian": (1 - share) * second + share * float(second.diagonal().mean()) * alike}


def _joined(moments: Moments, shape: tuple[int, ...]) -> Moments:
    """One matrix for all entries of a stack that are too small to be coded apart: each has a header and tables."""
    if moments.second.ndim < 3 or math.prod(shape[1:]) >= _SMALL:
        return moments
    return replace(moments, second=moments.second.mean(0))

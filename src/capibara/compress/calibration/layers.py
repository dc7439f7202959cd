"""The moments of a model's layers, for any framework that its adapter supports."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from capibara.compress.calibration.activations import Moments, collect
from capibara.compress.models.adapters import Adapter, AppliedAdapter, TreeAdapter

__all__ = ["layer_moments"]

_MOST = 1 << 14  # features: their moments take 2 GiB, and as much again what is made of them


def layer_moments(adapter: Adapter, batches: Iterable[Any]) -> dict[str, dict[str, Any]]:
    """Settings of calibration, ``hessian`` and ``input_axes``, by the names of a model's weights.

    Args:
      adapter: of a ``torch.nn.Module``, or of JAX arrays and their function; others have no moments.
      batches: the inputs to run it on.

    Returns:
      Moments of weights that have both input and output axes (matrices, convolutions, stacks), with at most 16,384
      inputs that are not all zero. If JAX cannot trace the function, none, with a warning.
    """
    if adapter.kind == "torch":
        found = collect(adapter.model, batches)
    else:
        found = _watched(adapter, batches)
    forms = adapter.tensors.forms
    out = {}
    for name, moments in found.items():
        some_axes = name in forms and 0 < len(moments.axes) < len(forms[name][1])
        if some_axes and len(moments.second) <= _MOST and moments.second.any():
            out[name] = _shrunk(moments)
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
    second = settings["hessian"]
    share = len(second) / (len(second) + moments.count)
    alike = np.eye(len(second)) * (np.trace(second) / len(second))
    return {**settings, "hessian": (1 - share) * second + share * alike}

"""The gradient of a loss with respect to a model's tensors, by name, in any framework."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from capibara.compress.errors import CompressError
from capibara.compress.formats import to_float
from capibara.compress.models.adapters import Adapter, AppliedAdapter, TorchAdapter, TreeAdapter
from capibara.compress.models.numbers import is_array, to_bits

__all__ = ["distance", "gradients"]


def distance(outputs: Any, targets: Any) -> Any:
    """The mean squared difference of arrays of either framework."""
    difference = outputs - targets
    return (difference * difference).mean()


def gradients(
    adapter: Adapter, model: Any, inputs: Any, targets: Any, loss: Callable[[Any, Any], Any]
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and its gradient with respect to each tensor that the model trains, as float32.

    Args:
      adapter: of the original.
      model: from the adapter: a module, or a tree of arrays.
      inputs, targets: a batch.
      loss: a scalar function of the model's outputs and the targets.

    Raises:
      CompressError: the model cannot be run, or has no framework with gradients.
    """
    if isinstance(adapter, TorchAdapter):
        return _torch(adapter, model, inputs, targets, loss)
    tree = adapter.tree if isinstance(adapter, AppliedAdapter) else adapter
    jax = sys.modules.get("jax")
    arrays = list(adapter.arrays.values())
    if jax is None or not isinstance(tree, TreeAdapter) or not any(isinstance(a, jax.Array) for a in arrays):
        raise CompressError(
            "model: expected a torch.nn.Module or arrays of JAX, of which there are gradients. "
            "Remedy: jax.numpy.asarray."
        )
    names = [n for n, (form, _) in adapter.tensors.forms.items() if form.is_float and form.bits > 8]
    values = tree.read_arrays(model)

    def objective(chosen: dict[str, Any]) -> Any:
        return loss(adapter.run(tree.with_arrays({**values, **chosen}), inputs), targets)

    value, slopes = jax.value_and_grad(objective)({n: values[n] for n in names})
    out: dict[str, np.ndarray] = {}
    for name, slope in slopes.items():
        bits, form, shape = to_bits(slope, str(name))
        numbers = to_float(bits, form).astype(np.float32).reshape(shape)
        first = adapter.tied.get(str(name), str(name))
        out[first] = out[first] + numbers if first in out else numbers
    return float(value), out


def _torch(
    adapter: TorchAdapter, model: Any, inputs: Any, targets: Any, loss: Callable[[Any, Any], Any]
) -> tuple[float, dict[str, np.ndarray]]:
    import torch

    model.zero_grad(set_to_none=True)
    with torch.enable_grad():
        value = loss(adapter.call(model, inputs), targets)
        if not is_array(value) or value.numel() != 1:
            raise CompressError(f"loss: got {value!r:.100}, expected a scalar")
        value.backward()
    tensors = model.state_dict(keep_vars=True)
    out = {}
    for name in adapter.arrays:
        slope = tensors[name].grad
        if name not in adapter.tied and slope is not None:
            out[name] = slope.float().cpu().numpy()
    model.zero_grad(set_to_none=True)
    return float(value.detach()), out

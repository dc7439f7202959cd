"""Low-rank adapters of a model's parameters: which are trained, and putting them into the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["adapter_mask", "add_adapters", "is_adapter", "merge_adapters", "only_adapters"]

_DOWN, _UP, _WEIGHT = "lora_a", "lora_b", "weight"


def adapter_mask(params: Mapping[str, Any]) -> dict[str, Any]:
    """A boolean for each parameter, nested like them: whether it is an adapter's."""
    return {
        key: adapter_mask(value) if isinstance(value, Mapping) else key in (_DOWN, _UP)
        for key, value in params.items()
    }


def is_adapter(path: tuple[str, ...]) -> bool:
    """Whether a parameter's path is that of an adapter."""
    return path[-1] in (_DOWN, _UP)


def only_adapters(params: Mapping[str, Any]) -> dict[str, Any]:
    """The adapters among parameters, nested like them."""
    found = {
        key: only_adapters(value) if isinstance(value, Mapping) else value
        for key, value in params.items()
        if isinstance(value, Mapping) or key in (_DOWN, _UP)
    }
    return {key: value for key, value in found.items() if not isinstance(value, Mapping) or value}


def add_adapters(params: Mapping[str, Any], adapters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters, and adapters as :func:`only_adapters` gives them."""
    both = dict(params)
    for key, value in adapters.items():
        both[key] = add_adapters(params[key], value) if isinstance(value, Mapping) else value
    return both


def merge_adapters(params: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """The parameters with ``scale * a @ b`` added to each adapted weight, computed in float32 at least.

    Args:
      params: nested dicts; ``lora_a [*stack, *in, rank]`` and ``lora_b [*stack, rank, *out]`` beside ``weight``.
      scale: ``alpha / rank``.
    """
    import jax.numpy as jnp

    merged = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            merged[key] = merge_adapters(value, scale)
        elif key == _WEIGHT and _DOWN in params:
            wide = jnp.promote_types(value.dtype, jnp.float32)
            change = _product(params[_DOWN].astype(wide), params[_UP].astype(wide), value.ndim)
            merged[key] = (value.astype(wide) + scale * change).astype(value.dtype)
        elif key not in (_DOWN, _UP):
            merged[key] = value
    return merged


def _product(down: Any, up: Any, ndim: int) -> Any:
    """``down @ up`` over the rank; of stacked blocks, of each."""
    import jax
    import jax.numpy as jnp

    if down.ndim + up.ndim - 2 > ndim:
        return jax.vmap(lambda a, b: _product(a, b, ndim - 1))(down, up)
    return jnp.tensordot(down, up, 1, precision="highest")

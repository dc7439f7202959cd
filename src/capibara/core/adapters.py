"""Low-rank adapters of a model's parameters: which are trained, putting them into the weights, and the weights
themselves in eight or four bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from capibara.config.sections import ExpertsSection

__all__ = [
    "adapter_mask",
    "adapter_part",
    "adapter_products",
    "add_adapters",
    "dequantise_base",
    "factor_names",
    "is_adapter",
    "joined",
    "merge_adapters",
    "only_adapters",
    "quantise_base",
]

_DOWN, _UP, _WEIGHT = "lora_a", "lora_b", "weight"
_CODES, _SCALES = "weight_codes", "weight_scales"


def adapter_part(name: str) -> Literal["a", "b"] | None:
    """Which factor of an adapter a parameter of this name is; ``None``: it is not one's.

    Those of a layer's ``weight`` are ``lora_a`` and ``lora_b``; those of a matrix of experts have its name in front:
    ``gate_lora_a``.
    """
    if name == _DOWN or name.endswith(f"_{_DOWN}"):
        return "a"
    return "b" if name == _UP or name.endswith(f"_{_UP}") else None


def factor_names(name: str) -> tuple[str, str]:
    """The names of an adapter's two factors beside the weight of this name."""
    before = "" if name == _WEIGHT else f"{name}_"
    return before + _DOWN, before + _UP


def adapter_mask(params: Mapping[str, Any]) -> dict[str, Any]:
    """A boolean for each parameter, nested like them: whether it is an adapter's."""
    return {
        key: adapter_mask(value) if isinstance(value, Mapping) else adapter_part(key) is not None
        for key, value in params.items()
    }


def is_adapter(path: tuple[str, ...]) -> bool:
    """Whether a parameter's path is that of an adapter."""
    return adapter_part(path[-1]) is not None


def adapter_products(specs: Mapping[tuple[str, ...], Any], experts: ExpertsSection) -> float:
    """Elements of adapters that the products of one token take: of a mixture those of the experts that it uses.

    Args:
      specs: the model's parameters. experts: its settings.
    """
    used = experts.per_token / experts.count if experts.count else 1.0
    total = 0.0
    for path, spec in specs.items():
        if is_adapter(path):
            share = used if "experts" in (spec.axes or ()) else 1.0
            total += share * math.prod(spec.sizes({}, "a parameter"))
    return total


def only_adapters(params: Mapping[str, Any]) -> dict[str, Any]:
    """The adapters among parameters, nested like them."""
    found = {
        key: only_adapters(value) if isinstance(value, Mapping) else value
        for key, value in params.items()
        if isinstance(value, Mapping) or adapter_part(key) is not None
    }
    return {key: value for key, value in found.items() if not isinstance(value, Mapping) or value}


def add_adapters(params: Mapping[str, Any], adapters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters, and adapters as :func:`only_adapters` gives them."""
    both = dict(params)
    for key, value in adapters.items():
        both[key] = add_adapters(params[key], value) if isinstance(value, Mapping) else value
    return both


def joined(part: Any, whole: Any) -> Any:
    """``whole`` with the values of ``part``, which is nested like it, where that is not ``None``."""
    import jax

    return jax.tree.map(
        lambda new, old: old if new is None else new, part, whole, is_leaf=lambda leaf: leaf is None
    )


def merge_adapters(params: Mapping[str, Any], scale: float) -> dict[str, Any]:
    """The parameters with ``scale * a @ b`` added to each adapted weight, computed in float32 at least.

    Args:
      params: nested dicts; ``lora_a [*stack, *in, rank]`` and ``lora_b [*stack, rank, *out]`` beside ``weight``. Those
        of experts (``gate_lora_a`` …) are beside their matrices, and the stack has the experts.
      scale: ``alpha / rank``.
    """
    import jax.numpy as jnp

    merged = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            merged[key] = merge_adapters(value, scale)
        elif (down := factor_names(key)[0]) in params:
            wide = jnp.promote_types(value.dtype, jnp.float32)
            change = _product(
                params[down].astype(wide), params[factor_names(key)[1]].astype(wide), value.ndim
            )
            merged[key] = (value.astype(wide) + scale * change).astype(value.dtype)
        elif adapter_part(key) is None:
            merged[key] = value
    return merged


def _product(down: Any, up: Any, ndim: int) -> Any:
    """``down @ up`` over the rank; of stacked blocks, of each."""
    import jax
    import jax.numpy as jnp

    if down.ndim + up.ndim - 2 > ndim:
        return jax.vmap(lambda a, b: _product(a, b, ndim - 1))(down, up)
    return jnp.tensordot(down, up, 1, precision="highest")


def quantise_base(params: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Parameters whose adapted weights are stored as a model with ``finetune.base`` stores them.

    Args:
      params: of the same model without adapters. model: says which weights, and where they lie on its mesh.
    """
    import jax

    specs = model.compiled.params
    where = None if model.mesh is None else model.compiled.propose_shardings()["params"]
    kind = model.config.finetune.base

    def convert(tree: Mapping[str, Any], path: tuple[str, ...], where: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            own = None if where is None else where.get(key)
            if isinstance(value, Mapping):
                found[key] = convert(value, (*path, key), own)
            elif key == _WEIGHT and (*path, _CODES) in specs:
                spec = specs[*path, _CODES]
                rows = spec.sizes({}, "a parameter")[-2]
                for part, array in zip(
                    (_CODES, _SCALES), _quantising(rows, spec.stack, kind)(value), strict=True
                ):
                    found[part] = array if where is None else jax.device_put(array, where[part])
            else:
                found[key] = value
        return found

    return convert(params, (), where)


def dequantise_base(params: Mapping[str, Any], model: Any, plain: Any) -> dict[str, Any]:
    """The other way: parameters with all weights as numbers, and adapters where there are any.

    Args:
      params: of ``model``. plain: the same model without adapters: says shapes and dtypes of the weights.
    """
    import jax

    specs, kind = plain.compiled.params, model.config.finetune.base
    where = None if plain.mesh is None else plain.compiled.propose_shardings()["params"]

    def convert(tree: Mapping[str, Any], path: tuple[str, ...], where: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in tree.items():
            if isinstance(value, Mapping):
                found[key] = convert(value, (*path, key), None if where is None else where.get(key))
            elif key == _CODES:
                spec = specs[*path, _WEIGHT]
                run = _dequantising(spec.sizes({}, "a parameter"), spec.stack, kind, spec.dtype)
                weight = run(value, tree[_SCALES])
                found[_WEIGHT] = weight if where is None else jax.device_put(weight, where[_WEIGHT])
            elif key != _SCALES:
                found[key] = value
        return found

    return convert(params, (), where)


@functools.lru_cache(maxsize=64)
def _quantising(rows: int, stacked: int, kind: str) -> Any:
    import jax

    from capibara.compose.library.adapters import BASE_GROUP
    from capibara.ops.linalg.quantised import quantise_matrix

    def run(weight: Any) -> Any:
        return quantise_matrix(weight.reshape(-1, rows).T, kind=kind, group=BASE_GROUP)

    for _ in range(stacked):
        run = jax.vmap(run)
    return jax.jit(run)


@functools.lru_cache(maxsize=64)
def _dequantising(shape: tuple[int, ...], stacked: int, kind: str, dtype: str) -> Any:
    import jax
    import jax.numpy as jnp

    from capibara.compose.library.adapters import BASE_GROUP
    from capibara.native.levels import NF4
    from capibara.ops.linalg.quantised import dequantise_matrix

    def run(codes: Any, scales: Any) -> Any:
        levels = jnp.asarray(NF4, jnp.float32) if kind == "nf4" else None
        inner = math.prod(shape[stacked:]) // codes.shape[0]
        matrix = dequantise_matrix(codes, scales, levels, inner=inner, group=BASE_GROUP)
        return matrix.T.reshape(shape[stacked:]).astype(dtype)

    for _ in range(stacked):
        run = jax.vmap(run)
    return jax.jit(run)

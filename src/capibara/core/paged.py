"""Decoding of many sequences in one step, whose keys, values and states lie in pools.

A step (:class:`StepShape`) has one token of each of some sequences and pieces of the prompts of others, in one program:
products with weights read them once for all tokens. :meth:`capibara.core.ModularCapibaraModel.init_pages` makes the
pools, and :meth:`~capibara.core.ModularCapibaraModel.decode_pages` computes a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.compose import CompiledModel
from capibara.compose.errors import InputError
from capibara.compose.primitives.paged import StepShape

__all__ = [
    "StepShape",
    "check_step",
    "empty_pages",
    "has_codes",
    "is_coded_dtype",
    "kept_in_place",
    "page_width",
]

_LANES = 128  # of a TPU's registers


def page_width(head_dim: int, platform: str) -> int | None:
    """The size of a page's row where it is not ``head_dim``: see :func:`capibara.ops.attention.paged_attention`."""
    if platform != "tpu" or head_dim % _LANES == 0:
        return None
    return -(-head_dim // _LANES) * _LANES


def empty_pages(form: CompiledModel, pages: int, page_size: int, slots: int, dtype: Any) -> dict[str, Any]:
    """The pools of a paged form: all zeros.

    Raises:
        InputError: a number is out of range, or the dtype is none of floats.
    """
    for name, value in (("pages", pages), ("page_size", page_size), ("slots", slots)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name}={value!r} must be an integer of at least 1")
    sizes = {"pages": pages, "page_size": page_size, "states": slots}
    free = {n for s in form.states.values() for n in s.shape or () if isinstance(n, str)}
    cache = form.init_state(**{key: value for key, value in sizes.items() if key in free})
    if dtype is None:
        return cache
    import jax
    import jax.numpy as jnp

    try:
        real = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        real = False
    if not real:
        raise InputError(
            f"dtype={dtype!r} must be 'int8', for codes with scales, or one of floats, such as 'bfloat16'"
        )

    def of(path: Any, array: Any) -> Any:
        pool = str(getattr(path[-1], "key", "")).endswith("pages")
        return jnp.zeros_like(array, dtype=dtype) if pool else array

    return jax.tree_util.tree_map_with_path(of, cache)


def is_coded_dtype(dtype: Any) -> bool:
    """Whether pages of a dtype are codes with scales."""
    import jax.numpy as jnp

    try:
        return dtype is not None and jnp.dtype(dtype) == jnp.int8
    except TypeError:
        return False


def has_codes(cache: Mapping[str, Any]) -> bool:
    """Whether the pages of a cache are codes with scales."""
    return any(
        key == "key_scales" or (isinstance(value, Mapping) and has_codes(value))
        for key, value in cache.items()
    )


def kept_in_place(form: CompiledModel, cache: dict[str, Any]) -> dict[str, Any]:
    """The pools after a step, over the mesh as :func:`empty_pages` makes them.

    Otherwise the compiler chooses, and what is sharded otherwise than what came in is no place for the next step.
    """
    if (mesh := form.backend.mesh) is None:
        return cache
    import jax

    def one(path: Any, array: Any) -> Any:
        axes = form.states[tuple(step.key for step in path)].axes
        sharding = jax.sharding.NamedSharding(
            mesh, form.backend.rules.spec(axes or (None,) * array.ndim, mesh, array.shape)
        )
        return jax.lax.with_sharding_constraint(array, sharding)

    return jax.tree_util.tree_map_with_path(one, cache)


def check_step(inputs: Mapping[str, Any], shape: StepShape, wanted: tuple[str, ...]) -> dict[str, Any]:
    """The arrays that a paged form takes, in its order.

    Args:
        inputs: as for ``decode_pages``. wanted: the names of the form's inputs.

    Raises:
        InputError: one is missing or has another shape.
    """
    of = shape.sequences
    ranks = {
        "tokens": (shape.tokens,),
        "page_table": (of, None),
        "starts": (of,),
        "counts": (of,),
        "slots": (of,),
        "outputs": (None,),
    }
    found = {}
    for name in wanted:
        if name not in inputs:
            raise InputError(f"inputs has no {name!r}: a step needs {', '.join(wanted)}")
        array, rank = inputs[name], ranks[name]
        given = tuple(array.shape)
        if len(given) != len(rank) or any(n not in (None, m) for n, m in zip(rank, given, strict=True)):
            said = ", ".join("any" if n is None else str(n) for n in rank)
            raise InputError(f"{name} has shape {given}, a step of {shape} needs ({said})")
        found[name] = array
    found["tokens"] = found["tokens"][None]
    return found

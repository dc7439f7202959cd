"""Operations that TPUs do better in another form than CPUs.

Products of activations with a weight keep the activations' axes. On a CPU two axes are faster
(:mod:`~capibara.compose.backends.jax_ops.language`); XLA's TPU compiler sees through such reshapes only in part, and
does not fuse elementwise operations into a product across one: an activation function between two products then is a
pass over memory of its own.

Norms read arrays whose features are innermost. For the sum over them XLA would choose the positions instead, keep the
residual stream in that order, and copy it back for the backward pass. Not where a mesh may divide the features or the
positions: there XLA gathers the rows of all devices for an array whose order is given. It does so with the results of
products where a mesh divides only rows, too, so that each device gives the order of its own rows.

The exact GELU of 16-bit numbers is computed with ``erf``, as PyTorch does. ``jax.nn.gelu`` has ``erfc``, which stays
accurate where the result is below 1e-6, at several times the operations: XLA repeats them in the product that reads the
activations, which then waits for them.

Few positions, as in decoding, are computed in the form for CPUs: each would be a tile of its own.

Which form of products a GPU takes, and what devices exchange of gradients, is chosen here, too
(:func:`returning_half_width`); what CPUs do better in another form is in
:mod:`~capibara.compose.backends.jax_cpu`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer

from capibara.compose.backends import jax_ops
from capibara.compose.backends.jax_cpu import on_cpu
from capibara.compose.backends.jax_ops.language import each_product
from capibara.compose.backends.meshes import free_axes
from capibara.ops.registry import is_portable

if TYPE_CHECKING:
    from capibara.compose.backends.jax_backend import JaxBackend
    from capibara.config.axes import AxisRules

__all__ = ["choose_forms", "on_tpu", "returning_half_width"]

Array = jax.Array

_GPUS = ("gpu", "cuda", "rocm")
# Positions of a sequence, for which the forms here are the better ones.
_FEWEST = 128


def _few(positions: Any) -> bool:
    return not isinstance(positions, int) or positions < _FEWEST  # a symbol, of a program that is exported


def _dense(x: Array, weight: Array, accumulate: str) -> Array:
    if x.ndim < 3 or _few(x.shape[-2]):
        return jax_ops.dense(x, weight, accumulate)
    contracted = (((x.ndim - 1,), (0,)), ((), ()))
    out = lax.dot_general(x, weight, contracted, preferred_element_type=jnp.dtype(accumulate))
    return out.astype(jnp.result_type(x, weight))


def _project(x: Array, weight: Array, accumulate: str) -> Array:
    flat = weight.reshape(weight.shape[0], math.prod(weight.shape[1:]))
    return _dense(x, flat, accumulate).reshape(*x.shape[:-1], *weight.shape[1:])


def _merge(x: Array, weight: Array, accumulate: str) -> Array:
    joined = math.prod(weight.shape[:2])
    flat = x.reshape(*x.shape[:-2], joined)
    return _dense(flat, weight.reshape(joined, *weight.shape[2:]), accumulate)


def _gelu(x: Array, approximate: bool = True) -> Array:
    dtype = jnp.result_type(x)  # integers and Python's numbers become float32, as with other forms
    if approximate or not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).bits > 16:
        return jax_ops.gelu(x, approximate)
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1 + lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


@partial(jax.jit, inline=True)  # a gradient that is not jitted is taken of arrays that are not on a device
def _in_order(x: Array) -> Array:
    from jax.experimental.layout import Layout, with_layout_constraint

    return with_layout_constraint(x, Layout(major_to_minor=(0, 1, 2)))


def _features_innermost(op: Callable[..., Any], ordered: Callable[[Array], Array]) -> Callable[..., Any]:
    """A norm of arrays in the order of their axes, where they are those of a sequence."""

    @wraps(op)
    def run(x: Any, *arrays: Any, **options: Any) -> Any:
        # A program that is exported may not hold what JAX gives no guarantee for.
        if isinstance(x, Tracer) and x.ndim == 3 and not _few(x.shape[1]) and not is_portable():
            x = ordered(x)
        return op(x, *arrays, **options)

    return run


def on_tpu(ops: Any, *, ordered: Callable[[Array], Array] | None = _in_order) -> Any:
    """The operations of a module (its ``__all__``), some of them in the form for TPUs.

    Args:
        ops: :mod:`capibara.compose.backends.jax_ops`.
        ordered: gives activations of a sequence the order of their axes; None: norms take them as they are.
    """
    norms = {"rms_norm": ops.rms_norm, "layer_norm": ops.layer_norm}
    own = {
        "dense": _dense,
        "project": _project,
        "products": each_product(_dense, _project),
        "merge": _merge,
        "gelu": _gelu,
        "rotate": partial(ops.rotate, implementation="auto"),
        **{name: _features_innermost(norm, ordered) if ordered else norm for name, norm in norms.items()},
    }
    same = {name: getattr(ops, name) for name in ops.__all__}
    return SimpleNamespace(**{**same, **own}, __all__=list(ops.__all__))


def returning_half_width(ops: Any) -> Any:
    """The operations, with products of 16-bit operands that return 16 bits rather than sums that are rounded later.

    TPUs and GPUs sum them in float32 either way, so that a device's results stay the same. But the products of the
    backward pass then have 16-bit operands, too, for which XLA's GPU compiler would take float32, and return 16 bits:
    where a mesh sums the devices' parts of a weight's gradient, these are rounded before.
    """

    def half(op: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(op)
        def run(x: Any, weight: Any, accumulate: str) -> Any:
            dtype = jnp.result_type(x, weight)
            return op(x, weight, dtype.name if dtype.itemsize == 2 else accumulate)

        return run

    same = {name: getattr(ops, name) for name in ops.__all__}
    own = {name: half(same[name]) for name in ("dense", "project", "merge")}
    own["products"] = each_product(own["dense"], own["project"])
    return SimpleNamespace(**{**same, **own}, __all__=list(ops.__all__))


def choose_forms(ops: Any, backend: JaxBackend, mesh: Any | None) -> Any:
    """The operations of a module in the form for a backend's platform and mesh.

    Where the platform is that of JAX's default device, it is asked for when the first operation is: compiling a model
    starts no devices, which ``jax.distributed.initialize`` has to come before.

    Args:
        ops: :mod:`capibara.compose.backends.jax_ops`.
        backend: of the model. mesh: its mesh with automatic axes, if it has one.
    """

    def chosen() -> Any:
        tpu = backend.platform == "tpu"
        found = on_cpu(ops) if backend.platform == "cpu" else ops
        if tpu:
            found = on_tpu(ops, ordered=_ordered(mesh, backend.rules))
        alone = backend.mesh is None or backend.mesh.size == 1
        if backend.policy.exchange == "compute" or (alone and backend.platform in _GPUS):
            found = returning_half_width(found)
        if mesh is None or mesh.size == 1:
            return found
        from capibara.compose.backends.jax_parts import on_parts

        policy = backend.policy
        sums = policy.compute if policy.exchange == "compute" else policy.accumulate
        return on_parts(found, mesh, backend.rules, tpu=tpu, sums=sums)

    return chosen() if backend.knows_platform else _AtFirstUse(chosen)


def _ordered(mesh: Any | None, rules: AxisRules) -> Callable[[Array], Array] | None:
    """What :func:`on_tpu` takes on a mesh: each device gives the order of its own rows."""
    if mesh is None or mesh.size == 1:
        return _in_order
    if not _only_rows(mesh, rules):
        return None

    def run(x: Array) -> Array:
        free = free_axes(mesh)
        if free is None:
            return _in_order(x)
        rows = rules.spec(("batch", None, None), free, x.shape, kind="activations")
        return jax.shard_map(_in_order, **free.options, in_specs=rows, out_specs=rows)(x)

    return run


def _only_rows(mesh: Any, rules: AxisRules) -> bool:
    """Whether a mesh divides nothing of a sequence's activations but their rows."""
    # A stage of a pipeline has arrays of its own. Tokens on their way to experts are divided in another way than rows.
    free = {axis for axis, size in mesh.shape.items() if size > 1} - {"pipeline"}
    return free <= set(rules.activations.get("batch", ())) - {"expert"}


class _AtFirstUse:
    """Operations that are chosen when one of them is asked for."""

    def __init__(self, choose: Callable[[], Any]) -> None:
        self._choose = choose

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions, of copying and the like
            raise AttributeError(name)
        found = self._choose()
        # From now on they are found without coming here.
        vars(self).update({each: getattr(found, each) for each in getattr(found, "__all__", vars(found))})
        return getattr(found, name)

"""Report the platform, the memory and the implementation of each operation behind ``capibara.jax``.

A capability is true only if the registry of :mod:`capibara.ops` would choose, on this platform and for the sizes in
:data:`TYPICAL_CALLS`, something better than the plain reference. A "custom kernel" is hand-written (Pallas, or native
code called through ``jax.ffi``); a composition of XLA operations is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec, Sharding

if TYPE_CHECKING:
    from capibara.config.axes import AxisRules
    from capibara.ops import Explanation

__all__ = [
    "TYPICAL_CALLS",
    "explain_operations",
    "get_backend_info",
    "get_optimization_status",
    "tpu_v4_optimizations",
    "with_sharding_constraint",
]


def _array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _attention() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (_array(1, 8, 1024, 64),) * 3, {"use_causal_mask": True}


def _selective_scan() -> tuple[tuple[Any, ...], dict[str, Any]]:
    x, dt, a = _array(1, 1024, 8, 32), _array(1, 1024, 8), _array(8)
    return (x, dt, a, _array(1, 1024, 1, 32), _array(1, 1024, 1, 32)), {}


def _parallel_scan() -> tuple[tuple[Any, ...], dict[str, Any]]:
    def decay(h: Any, x: Any) -> tuple[Any, Any]:
        h = 0.9 * h + x
        return h, h

    return (decay, _array(256), _array(1024, 256)), {}


def _causal_conv1d() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (_array(1, 1024, 256), _array(4, 256)), {}


def _nearest_code() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (_array(1024, 64), _array(256, 64)), {}


def _cached_attention() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (_array(1, 1, 8, 64), _array(1, 1024, 8, 64), _array(1, 1024, 8, 64), 0), {}


def _paged_attention() -> tuple[tuple[Any, ...], dict[str, Any]]:
    pages, table = _array(16, 64, 8, 64), _array(1, 16, dtype=jnp.int32)
    return (_array(1, 1, 8, 64), pages, pages, table, _array(1, dtype=jnp.int32)), {}


# The calls that "which implementation runs here" is answered for: arguments and keyword arguments by
# operation.
TYPICAL_CALLS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "flash_attention": _attention,
    "cached_attention": _cached_attention,
    "selective_scan": _selective_scan,
    "parallel_scan": _parallel_scan,
    "linear_recurrence": lambda: ((_array(1024, 256), _array(1024, 256)), {}),
    "matrix_linear_recurrence": lambda: ((_array(32, 32), _array(1024, 32)), {}),
    "causal_conv1d": _causal_conv1d,
    "nearest_code": _nearest_code,
    "paged_attention": _paged_attention,
    "async_all_reduce": lambda: ((_array(1024, 1024),), {}),
    "optimized_gemm": lambda: ((_array(512, 512), _array(512, 512)), {}),
    "fast_svd": lambda: ((_array(1024, 1024), 32), {}),
    "grouped_matmul": lambda: (
        (_array(512, 256), _array(8, 256, 512), _array(8, dtype=jnp.int32)),
        {},
    ),
    "quantised_matmul": lambda: (
        (_array(64, 512), _array(512, 512, dtype=jnp.int8), _array(512, 16)),
        {"group": 32},
    ),
    "cross_entropy": lambda: (
        (_array(2048, 512), _array(512, 32768), _array(2048, dtype=jnp.int32)),
        {},
    ),
    "rotary": lambda: (
        (_array(1, 1024, 8, 64), _array(1, 1024, 2, 64)),
        {"positions": _array(1024, dtype=jnp.int32)},
    ),
    "qr": lambda: ((_array(1024, 64),), {}),
    "cholesky_update": lambda: ((_array(256, 256), _array(256)), {}),
    "winograd_conv2d": lambda: ((_array(8, 28, 28, 128), _array(3, 3, 128, 128)), {}),
    "tropical_matmul": lambda: ((_array(512, 512), _array(512, 512)), {}),
    "radix_optimized_fft": lambda: ((_array(64, 4096),), {"real": True}),
}

# The documents' names for capabilities, and the operation that each one speaks of.
CAPABILITIES = {
    "flash_attention": "flash_attention",
    "parallel_scan": "parallel_scan",
    "vq_kernels": "nearest_code",
    "cached_attention": "cached_attention",
    "causal_conv1d": "causal_conv1d",
}

_HAND_WRITTEN = ("pallas", "mosaic", "triton", "ffi", "native")


def explain_operations(platform: str | None = None) -> dict[str, Explanation]:
    """For each operation of ``capibara.ops``: which implementation runs for its typical call, and why.

    Args:
      platform: ``"cpu"``, ``"tpu"``, ``"cuda"`` …; by default the one JAX runs on here.
    """
    from capibara import ops

    answers = {}
    for name in ops.list_ops():
        if name in TYPICAL_CALLS:
            args, kwargs = TYPICAL_CALLS[name]()
            answers[name] = ops.explain(name, *args, platform=platform, **kwargs)
    return answers


def _is_custom(implementation: str) -> bool:
    return any(mark in implementation for mark in _HAND_WRITTEN)


def _tpu_status() -> tuple[bool, str]:
    """Whether the TPU settings are in force, and why (not)."""
    from ._config import config

    platform = jax.default_backend()
    if platform != "tpu":
        return False, f"the default backend is {platform!r}, not a TPU"
    applied = config.applied("enable_tpu_optimizations")
    if not applied:
        return False, 'not switched on; use capibara.jax.config.update("enable_tpu_optimizations", True)'
    return True, "set: " + ", ".join(f"{name}={value!r}" for name, value in applied.items())


def get_backend_info() -> dict[str, Any]:
    """Describe what runs here, as a dict. Starts JAX's backend if necessary.

    Keys:
      ``name``: the platform (``"cpu"``, ``"gpu"``, ``"tpu"``). ``device_kind``, ``device_count``,
      ``process_count``, ``jax_version``: as JAX reports them.
      ``tpu_optimized``: the default backend is a TPU *and* ``enable_tpu_optimizations`` is in force.
      ``custom_kernels``: whether a hand-written kernel runs for at least one operation.
      ``memory_limit_gb``: GiB that JAX may use on the first device; on a CPU the machine's memory; None if
      unknown. ``memory_limit_source``: where that was read.
      ``capabilities``: ``{name: bool}``: an implementation better than the plain reference runs here.
      ``implementations``: ``{operation: {"chosen": name, "not_chosen": {name: reason}}}``.
    """
    from capibara.measure.installation import memory_limit_bytes

    explained = explain_operations()
    limit = memory_limit_bytes()
    device = jax.devices()[0]
    return {
        "name": jax.default_backend(),
        "device_kind": device.device_kind,
        "device_count": jax.device_count(),
        "process_count": jax.process_count(),
        "jax_version": jax.__version__,
        "tpu_optimized": _tpu_status()[0],
        "custom_kernels": any(_is_custom(each.chosen) for each in explained.values()),
        "memory_limit_gb": None if limit is None else limit / 2**30,
        "memory_limit_source": None if limit is None else limit.source,
        "capabilities": {
            name: op in explained and explained[op].chosen != "reference" for name, op in CAPABILITIES.items()
        },
        "implementations": {
            name: {"chosen": each.chosen, "not_chosen": dict(each.reasons)}
            for name, each in explained.items()
        },
    }


def get_optimization_status() -> dict[str, Any]:
    """Report which optimisations are active here.

    Keys:
      ``tpu_optimized``: as in :func:`get_backend_info`. ``custom_kernels_active``: a hand-written kernel
      runs for at least one operation. ``memory_optimized``: attention runs in blocks, so that no [sequence,
      sequence] array of scores is stored. ``reasons``: one sentence for each of the three.
    """
    explained = explain_operations()
    kernels = {name: each.chosen for name, each in explained.items() if _is_custom(each.chosen)}
    attention = explained.get("flash_attention")
    blocked = attention is not None and attention.chosen != "reference"
    tpu, why_tpu = _tpu_status()
    return {
        "tpu_optimized": tpu,
        "custom_kernels_active": bool(kernels),
        "memory_optimized": blocked,
        "reasons": {
            "tpu_optimized": why_tpu,
            "custom_kernels_active": (
                "running: " + ", ".join(f"{name} ({chosen})" for name, chosen in kernels.items())
                if kernels
                else f"every operation runs as XLA operations on {jax.default_backend()!r}"
            ),
            "memory_optimized": (
                f"flash_attention runs as {attention.chosen!r}, block by block"
                if attention is not None and blocked
                else "flash_attention runs as the plain reference, which stores every score"
            ),
        },
    }


def with_sharding_constraint(
    x: jax.Array,
    names: Sequence[str | None] | PartitionSpec | Sharding,
    mesh: Any | None = None,
    rules: AxisRules | None = None,
) -> jax.Array:
    """Constrain the sharding of ``x`` over the current mesh by the logical names of its dimensions.

    Equivalent JAX: ``jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))``. Outside a mesh it is
    the identity, so the same code runs on one device.

    Args:
      x: any array.
      names: a logical axis (``"batch"``, ``"hidden"``, ``"embed"`` …), a mesh axis or None for each
        dimension of ``x``. A ``PartitionSpec`` or ``Sharding`` goes to JAX's function unchanged.
      mesh: by default the mesh of the surrounding ``jax.set_mesh(mesh)`` or ``with mesh:``.
      rules: the mesh axes of each name; by default :class:`capibara.config.axes.AxisRules`' own.

    Raises:
      capibara.compose.errors.InputError: the number of names is not the number of dimensions.
      capibara.errors.ConfigError: an unknown name.
    """
    if isinstance(names, PartitionSpec | Sharding):
        return jax.lax.with_sharding_constraint(x, names)
    from capibara.compose.physical.sharding import constrain, current_mesh

    if mesh is None and current_mesh() is None:
        # The older `with mesh:` is invisible to jax.sharding.get_abstract_mesh().
        from capibara.config.mesh import current_mesh as concrete_mesh

        mesh = concrete_mesh()
    return constrain(x, names, mesh, rules)


def tpu_v4_optimizations() -> Any:
    """The module :mod:`capibara.jax.tpu_v4` if the default backend is a TPU; otherwise ``AttributeError``.

    So ``hasattr(capibara.jax, "tpu_v4_optimizations")`` says whether they have any effect here.
    """
    platform = jax.default_backend()
    if platform != "tpu":
        raise AttributeError(
            f"module 'capibara.jax' has 'tpu_v4_optimizations' only where the default backend is a TPU; "
            f"here it is {platform!r}. The same functions, which then say that they change nothing, are in "
            "capibara.jax.tpu_v4",
            name="tpu_v4_optimizations",
        )
    from . import tpu_v4

    return tpu_v4

"""``capibara.jax``: JAX, with what Capibara adds.

``import capibara.jax as jax`` is ``import jax`` plus the names below. Every other public name, in this module
and in every module under it, is the *same object* as JAX's, so both imports can be mixed in one program.

Added here (each is documented where it is defined):

==================================  =====================================================================
``get_backend_info()``              which backend runs, which operations have which implementation here
``get_optimization_status()``       what is really switched on, and why the rest is not
``config``                          JAX's configuration and the flags ``jax_debug_mode`` and
                                    ``enable_tpu_optimizations``
``device_memory_allocated()``       bytes in use on this process's devices
``device_memory_peak()``            the most bytes that were in use
``pjit``                            deprecated adapter for the old ``in_axis_resources`` spelling
``diagnostics``, ``utils``          ``check_installation()``; ``check_migration_compatibility()``
``tpu_v4``                          the TPU v4 presets and helpers
``tpu_v4_optimizations``            the same module, but only where the default backend is a TPU
``numpy.random``                    :mod:`jax.random`, for ``jnp.random.normal(key, shape)``
==================================  =====================================================================

Without JAX this import raises one :class:`ImportError` that says how to install it.
"""

from __future__ import annotations

from ._overlay import guard_rebound_children as _guard
from ._overlay import install_finder as _install_finder
from ._overlay import overlay as _overlay_module
from ._overlay import remove_finder as _remove_finder


def _import_jax():
    from capibara.jax_versions import require_supported_jax

    require_supported_jax()
    try:
        import jax
    except ImportError as error:
        from capibara.measure.installation import MissingJaxError

        raise MissingJaxError(str(error)) from error
    return jax


def _tpu_v4_optimizations():
    from ._backend import tpu_v4_optimizations

    return tpu_v4_optimizations()


def _setup() -> None:
    import sys

    # Before JAX, which takes a second: another thread may import a module below this one meanwhile.
    _install_finder()
    try:
        jax = _import_jax()
    except ImportError:
        _remove_finder()
        raise
    _guard(__name__, jax)
    _overlay_module(
        __name__,
        jax,
        {
            "config": "capibara.jax._config:config",
            "numpy": "capibara.jax.numpy",
            "get_backend_info": "capibara.jax._backend:get_backend_info",
            "get_optimization_status": "capibara.jax._backend:get_optimization_status",
            "device_memory_allocated": "capibara.measure.installation:device_memory_allocated",
            "device_memory_peak": "capibara.measure.installation:device_memory_peak",
            "pjit": "capibara.jax._pjit:pjit",
            "diagnostics": "capibara.jax.diagnostics",
            "utils": "capibara.jax.utils",
            "tpu_v4": "capibara.jax.tpu_v4",
            "tpu_v4_optimizations": _tpu_v4_optimizations,
        },
    )
    # What remains in this namespace is shown by dir() and completion: leave only what a user may want.
    namespace = vars(sys.modules[__name__])
    for helper in ("annotations", "_import_jax", "_setup", "_guard", "_install_finder", "_remove_finder"):
        namespace.pop(helper, None)
    namespace.pop("_overlay_module", None)


_setup()

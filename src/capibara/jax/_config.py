"""``capibara.jax.config``: JAX's configuration object and two flags of Capibara.

Every attribute, flag and method is JAX's own; ``capibara.jax.config.update("jax_enable_x64", True)`` sets
the one flag that ``jax.config`` shows too. The two flags added here are *bundles*: enabling one sets several JAX
flags, disabling it restores their previous values. A flag that was set explicitly while the bundle was enabled keeps
its value.

``jax_debug_mode``
    ``jax_debug_nans=True`` (the operation that first makes a NaN raises), ``jax_check_tracer_leaks=True`` (a
    traced value kept after its function ended raises), ``jax_traceback_filtering="off"`` (tracebacks show
    JAX's frames too). Slower: every result is checked for NaN, and the leak check turns some caching off.

``enable_tpu_optimizations``
    Where the default backend is a TPU: the settings of
    :func:`capibara.config.mesh.tpu_optimization_settings`. Anywhere else no flag of JAX changes;
    ``get_optimization_status()`` keeps saying ``tpu_optimized: False`` and gives the reason.
    Asking for it initialises JAX's backend, since only the backend knows.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from capibara.errors import ConfigError

__all__ = ["ConfigOverlay", "config"]

DEBUG_SETTINGS: Mapping[str, Any] = {
    "jax_debug_nans": True,
    "jax_check_tracer_leaks": True,
    "jax_traceback_filtering": "off",
}


def _set(name: str, value: Any) -> None:
    jax.config.update(name, value)
    if name == "jax_compilation_cache_dir":
        # JAX looks at the folder once, at the first compilation; this makes it look again.
        from jax.experimental.compilation_cache import compilation_cache

        compilation_cache.reset_cache()


@dataclass
class _Bundle:
    """What a bundle flag set, and what stood there before."""

    on: bool = False
    before: dict[str, Any] = field(default_factory=dict)
    applied: dict[str, Any] = field(default_factory=dict)

    def switch_on(self, settings: Mapping[str, Any]) -> None:
        for name, value in settings.items():
            self.before[name] = jax.config.values[name]
            _set(name, value)
            self.applied[name] = value
        self.on = True

    def switch_off(self) -> None:
        for name, value in self.before.items():
            # Changed meanwhile through jax.config itself: then it is no longer ours to put back.
            if jax.config.values[name] == self.applied.get(name):
                _set(name, value)
        self.before.clear()
        self.applied.clear()
        self.on = False

    def forget(self, name: str) -> None:
        self.before.pop(name, None)
        self.applied.pop(name, None)


class ConfigOverlay:
    """JAX's configuration with the flags ``jax_debug_mode`` and ``enable_tpu_optimizations``."""

    def __init__(self) -> None:
        self.__dict__["_bundles"] = {"jax_debug_mode": _Bundle(), "enable_tpu_optimizations": _Bundle()}
        self.__dict__["_lock"] = threading.RLock()

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        # isinstance(config, type(jax.config)) holds, as for every other forwarded object.
        return type(jax.config)

    def update(self, name: str, val: Any) -> None:
        """Set a flag: one of JAX's, or one of the two bundles described in this module's docstring.

        Raises:
          AttributeError: JAX has no such flag (JAX's own error).
          ConfigError: the value of a bundle flag is not a boolean.
        """
        with self._lock:
            bundle = self._bundles.get(name)
            if bundle is None:
                jax.config.update(name, val)
                for each in self._bundles.values():
                    each.forget(name)
                return
            if not isinstance(val, bool):
                raise ConfigError(
                    f"the flag {name!r} was set to {val!r} ({type(val).__name__}); "
                    f"it is a switch: use config.update({name!r}, True) or False"
                )
            if val and not bundle.on:
                bundle.switch_on(self._settings(name))
            elif not val and bundle.on:
                bundle.switch_off()

    def _settings(self, name: str) -> Mapping[str, Any]:
        if name == "jax_debug_mode":
            return DEBUG_SETTINGS
        from capibara.config.mesh import tpu_optimization_settings

        return tpu_optimization_settings(jax.default_backend())

    def applied(self, name: str) -> dict[str, Any]:
        """The JAX flags that the bundle ``name`` has set and that are still in effect; empty if it is disabled."""
        bundle = self._bundles[name]
        return {key: value for key, value in bundle.applied.items() if jax.config.values[key] == value}

    def __getattr__(self, name: str) -> Any:
        bundle = self.__dict__["_bundles"].get(name)
        return getattr(jax.config, name) if bundle is None else bundle.on

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._bundles:
            raise AttributeError(f"use config.update({name!r}, {value!r})", name=name, obj=self)
        setattr(jax.config, name, value)

    def __dir__(self) -> list[str]:
        return sorted({*dir(jax.config), *self._bundles, "applied"})

    def __repr__(self) -> str:
        flags = ", ".join(f"{name}={bundle.on}" for name, bundle in self._bundles.items())
        return f"<capibara.jax.config: {jax.config!r} with {flags}>"

    def __reduce__(self) -> str:
        return "config"


config = ConfigOverlay()

"""From a lowered function to a compiled one: for which platform, and with errors that name the option."""

from __future__ import annotations

from typing import Any

from capibara.compilation.errors import CompilationOptionError
from capibara.compilation.signature import Signature

__all__ = ["compile_lowered", "devices_of", "platform_of"]


def devices_of(signature: Signature, shardings: Any = None) -> list[Any]:
    """The devices that a program runs on: those of its arrays, of its shardings or of the mesh; else JAX's default.

    Args:
      signature: of a call. shardings: those that the function was made with, as a tree.
    """
    import jax

    given = jax.tree.leaves(shardings)
    for sharding in (*(leaf.sharding for leaf in signature.leaves), *given):
        sharding = getattr(sharding, "sharding", sharding)  # of a Format
        if isinstance(sharding, jax.Device):
            return [sharding]
        if isinstance(sharding, jax.sharding.Sharding):
            mesh = getattr(sharding, "mesh", None)
            if mesh is None:
                return list(sharding.device_set)
            if isinstance(mesh, jax.sharding.Mesh):  # an abstract one has no devices
                return list(mesh.devices.flat)
    if devices := dict(signature.settings)["devices of the mesh"]:
        return list(devices)
    default = jax.config.jax_default_device  # pyright: ignore
    return [default if hasattr(default, "client") else jax.local_devices()[0]]


def platform_of(signature: Signature, shardings: Any = None) -> str:
    """The platform of the devices that a program runs on: see :func:`devices_of`."""
    return devices_of(signature, shardings)[0].platform


def compile_lowered(lowered: Any, options: dict[str, Any], name: str) -> Any:
    """``lowered.compile(options)``.

    Raises:
      CompilationOptionError: XLA does not know an option.
    """
    import jax

    try:
        return lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError as error:
        if "compile option" in str(error):
            raise CompilationOptionError(
                f"compiler_options of {name}: {error}. Given: {', '.join(options) or 'none'}."
            ) from error
        raise

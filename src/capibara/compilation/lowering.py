"""From a lowered function to a compiled one: for which platform, and with errors that name the option."""

from __future__ import annotations

from typing import Any

from capibara.compilation.errors import CompilationOptionError
from capibara.compilation.signature import Signature

__all__ = ["compile_lowered", "platform_of"]


def platform_of(signature: Signature) -> str:
    """The platform of the devices that a call's arrays are on, or JAX's default."""
    import jax

    for leaf in signature.leaves:
        if leaf.sharding is not None:
            return next(iter(leaf.sharding.device_set)).platform
    device = jax.config.jax_default_device  # pyright: ignore
    return getattr(device, "platform", None) or jax.default_backend()


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

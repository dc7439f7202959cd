"""Models in float64 need JAX's 64-bit mode for the whole process.

The mode could be switched on around a run, but it belongs to one thread, and checkpoints are read and written on
others; so a run asks for it instead of switching it on.
"""

from __future__ import annotations

from typing import Any

import jax

from capibara.errors import ConfigError

__all__ = ["check_float64"]


def check_float64(config: Any, what: str) -> None:
    """Refuse float64 settings while JAX would cut their numbers to float32.

    Args:
      config: a :class:`capibara.config.ModularModelConfig`.
      what: what needs the numbers, for the error: "training".

    Raises:
      ConfigError: a ``precision`` setting is float64 and JAX's 64-bit mode is off.
    """
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        return
    names = ("param_dtype", "compute_dtype", "accumulate_dtype")
    wide = [f"precision.{name}" for name in names if getattr(config.precision, name) == "float64"]
    if wide:
        raise ConfigError(
            f"{' and '.join(wide)}: got 'float64', which {what} can only have in JAX's 64-bit mode, and that is off. "
            "Set JAX_ENABLE_X64=1 in the environment of the command, or use 'float32'."
        )

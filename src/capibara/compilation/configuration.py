"""The settings with which functions are compiled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capibara.compilation.errors import CompilationOptionError
from capibara.compilation.options import LEVELS, Effect, effects
from capibara.errors import did_you_mean

__all__ = ["TpuCompilationConfig"]

_FLAGS = (
    "use_bfloat16",
    "enable_async_collective",
    "memory_optimization",
    "cache_compiled_functions",
    "warn_on_recompilation",
    "strict",
)


@dataclass(frozen=True, kw_only=True)
class TpuCompilationConfig:
    """How :func:`create_tpu_optimized_jit` compiles. Without arguments: as ``jax.jit`` does.

    An option that the platform does not have is reported: with a :class:`CompilationOptionWarning` when the first
    program is compiled, and in ``explain()``; or refused, with ``strict``. :meth:`explain` says what each does on a
    platform.

    Args:
      optimization_level: ``"debug"`` compiles in less time to slower code, ``"default"`` leaves XLA's defaults,
        ``"aggressive"`` asks for the most that the platform has.
      use_bfloat16: products and convolutions of float32 arrays take bfloat16 operands and are summed in float32
        (Micikevicius et al., "Mixed Precision Training"); all else, parameters and optimizer state included, keeps
        its dtype. Products with a ``precision`` of their own keep it.
      enable_async_collective: communication that overlaps computation.
      memory_optimization: orders operations for less memory.
      cache_compiled_functions: keep programs on disk, for the next start of the program.
      cache_size_gb: the size of that cache in GiB (2³⁰ bytes); the programs that were used longest ago make room.
      cache_directory: its folder; None: a folder of the user's own for this type of machine.
      compiler_options: further options for XLA, by name; unknown ones are refused by it.
      warn_on_recompilation: a :class:`RecompilationWarning` with the reason whenever a call needs another program.
      strict: refuse options that the platform does not have.

    Raises:
      CompilationOptionError: an option has an invalid value.
    """

    optimization_level: str = "default"
    use_bfloat16: bool = False
    enable_async_collective: bool = False
    memory_optimization: bool = False
    cache_compiled_functions: bool = False
    cache_size_gb: float = 1.0
    cache_directory: str | Path | None = None
    compiler_options: Mapping[str, Any] = field(default_factory=dict)
    warn_on_recompilation: bool = False
    strict: bool = False

    def __post_init__(self) -> None:
        if self.optimization_level not in LEVELS:
            raise CompilationOptionError(
                f"optimization_level: got {self.optimization_level!r:.80}, expected one of "
                f"{', '.join(map(repr, LEVELS))}.{did_you_mean(str(self.optimization_level), LEVELS)}"
            )
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool):
                raise CompilationOptionError(f"{name}: got {value!r:.80}, expected True or False.")
        cache_bytes(self.cache_size_gb, "cache_size_gb")
        if self.cache_directory is not None and not isinstance(self.cache_directory, str | Path):
            raise CompilationOptionError(
                f"cache_directory: got {self.cache_directory!r:.80}, expected a path or None."
            )
        if not isinstance(self.compiler_options, Mapping) or not all(
            isinstance(name, str) for name in self.compiler_options
        ):
            raise CompilationOptionError(
                f"compiler_options: got {self.compiler_options!r:.80}, expected a mapping of names to values."
            )
        object.__setattr__(self, "compiler_options", dict(self.compiler_options))

    @property
    def cache_bytes(self) -> int:
        """``cache_size_gb`` in bytes."""
        return cache_bytes(self.cache_size_gb, "cache_size_gb")

    def effects(self, platform: str | None = None) -> tuple[Effect, ...]:
        """What each option that is set does on a platform: ``"cpu"``, ``"gpu"``, ``"tpu"``, by default JAX's own.

        Raises:
          CompilationOptionError: ``strict`` and the platform does not have an option.
        """
        if platform is None:
            import jax

            platform = jax.default_backend()
        return effects(self, platform)

    def explain(self, platform: str | None = None) -> str:
        """:meth:`effects` as text, one line each."""
        return "\n".join(map(str, self.effects(platform))) or "no option is set: as jax.jit"


def cache_bytes(gibibytes: Any, name: str) -> int:
    """A size in GiB as bytes.

    Raises:
      CompilationOptionError: it is not a number above 0.
    """
    valid = isinstance(gibibytes, int | float) and not isinstance(gibibytes, bool)
    if not valid or not math.isfinite(gibibytes) or gibibytes <= 0:
        raise CompilationOptionError(f"{name}: got {gibibytes!r:.80}, expected a number of GiB above 0.")
    return int(gibibytes * 2**30)

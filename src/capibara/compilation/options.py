"""What each option of a :class:`TpuCompilationConfig` becomes on each platform.

XLA has few options in common for all platforms, and refuses those that it does not know. So one table says, for every
option and platform, which compiler options stand for it; or why there are none, which :class:`Effect` then reports.
The entries are those that change a compiled program, found by compiling for each platform that can be compiled for
here (CPU and TPU; the GPU's follow XLA's documentation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from capibara.compilation.errors import CompilationOptionError
from capibara.sharding import ASYNCHRONOUS

if TYPE_CHECKING:
    from capibara.compilation.configuration import TpuCompilationConfig

__all__ = ["LEVELS", "Effect", "compiler_options", "effects"]

LEVELS = ("debug", "default", "aggressive")

# Effort levels of XLA (`EffortLevel` in its compile options).
_O0, _O3 = 9, 39

# (option, platform) -> the compiler options, and a sentence on what they do.
_TABLE: dict[tuple[str, str], tuple[Mapping[str, Any], str]] = {
    ("debug", "cpu"): (
        {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
        "compiles in less time to slower code",
    ),
    ("debug", "gpu"): ({"xla_backend_optimization_level": 0}, "compiles in less time to slower code"),
    ("debug", "tpu"): (
        {"optimization_level": _O0},
        "compiles in less time to slower code with more temporaries",
    ),
    ("aggressive", "cpu"): (
        {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False},
        "the most that the CPU backend has, whatever XLA_FLAGS says; it is also the backend's default",
    ),
    ("aggressive", "gpu"): (
        {"optimization_level": _O3, "xla_gpu_enable_latency_hiding_scheduler": True},
        "orders operations so that communication is hidden",
    ),
    ("aggressive", "tpu"): (
        {"optimization_level": _O3, "xla_tpu_enable_latency_hiding_scheduler": True},
        "the most that the TPU compiler has, which is also its default: programs for v4 to v6e came out the same",
    ),
    ("enable_async_collective", "tpu"): (
        ASYNCHRONOUS["tpu"],
        "on v4 all-gathers become pairs of start and done, with computation between; explain() counts them",
    ),
    ("memory_optimization", "tpu"): (
        {"xla_memory_scheduler": "list"},
        "orders operations by the memory that they hold",
    ),
}

_WITHOUT: dict[tuple[str, str], str] = {
    ("enable_async_collective", "cpu"): "the CPU backend runs collectives synchronously",
    ("enable_async_collective", "gpu"): "collectives are already asynchronous on GPUs by default",
    (
        "memory_optimization",
        "cpu",
    ): "no option of the CPU backend changes what a program holds; donate_argnums does",
    (
        "memory_optimization",
        "gpu",
    ): "the GPU backend has no such compiler option; donate_argnums saves memory",
}


@dataclass(frozen=True)
class Effect:
    """What one option does on a platform.

    Attributes:
      option: its name, and its value if there are several.
      platform: ``"cpu"``, ``"gpu"`` or ``"tpu"``.
      applied: whether it changes how programs are compiled there.
      text: what it does, or why nothing.
      options: the compiler options.
    """

    option: str
    platform: str
    applied: bool
    text: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        flags = ", ".join(f"{name}={value}" for name, value in self.options)
        note = "" if self.applied else f"no effect on {self.platform}: "
        return f"{self.option}: {note}{self.text}{f' ({flags})' if flags else ''}"


def effects(config: TpuCompilationConfig, platform: str) -> tuple[Effect, ...]:
    """What each option that is set does on a platform.

    Raises:
      CompilationOptionError: ``config.strict`` and the platform does not have an option; or nothing is known of the
        platform.
    """
    platform = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    if platform not in ("cpu", "gpu", "tpu"):
        raise CompilationOptionError(f"platform: got {platform!r}, expected 'cpu', 'gpu' or 'tpu'.")
    found: list[Effect] = []
    if config.optimization_level != "default":
        name = f"optimization_level={config.optimization_level!r}"
        found.append(_effect(name, config.optimization_level, platform))
    if config.use_bfloat16:
        text = "products of float32 arrays take bfloat16 operands and are summed in float32"
        found.append(Effect("use_bfloat16", platform, True, text))
    found += [
        _effect(name, name, platform)
        for name in ("enable_async_collective", "memory_optimization")
        if getattr(config, name)
    ]
    if config.cache_compiled_functions:
        found.append(Effect("cache_compiled_functions", platform, True, "programs are kept on disk"))
    if config.compiler_options:
        given = tuple(config.compiler_options.items())
        found.append(Effect("compiler_options", platform, True, "passed to XLA", given))
    if config.strict and (missing := [effect for effect in found if not effect.applied]):
        raise CompilationOptionError(
            "; ".join(map(str, missing)) + ". Leave these options out on this platform, or set strict=False."
        )
    return tuple(found)


def _effect(name: str, key: str, platform: str) -> Effect:
    if (entry := _TABLE.get((key, platform))) is None:
        return Effect(name, platform, False, _WITHOUT[key, platform])
    options, text = entry
    return Effect(name, platform, True, text, tuple(options.items()))


def compiler_options(found: tuple[Effect, ...]) -> dict[str, Any]:
    """The options for ``Lowered.compile``: of several that set the same one, the last."""
    return {name: value for effect in found for name, value in effect.options}

"""Compile functions ahead of time, keep their programs, and say why one was compiled again.

:func:`create_tpu_optimized_jit` is ``jax.jit`` with options that are visible in the compiled program, programs that
are compiled before they are needed, and the reason of each recompilation. :class:`TpuWarmupManager` compiles and runs
a model for all of its shapes; :func:`pack_program` puts a compiled program in one file for another machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.lazy import on_demand

if TYPE_CHECKING:
    from capibara.compilation.changes import Change, Recompilation
    from capibara.compilation.configuration import TpuCompilationConfig
    from capibara.compilation.counting import CompilationCounts, count_compilations
    from capibara.compilation.errors import (
        CompilationOptionError,
        CompilationOptionWarning,
        NotCompiledError,
        PackedProgramError,
        RecompilationWarning,
    )
    from capibara.compilation.forward import create_jitted_forward
    from capibara.compilation.jitted import OptimizedJit, create_tpu_optimized_jit
    from capibara.compilation.options import Effect
    from capibara.compilation.packing import PackedProgram, load_program, pack_program, read_packed
    from capibara.compilation.persistent_cache import cache_folder, keep_compiled
    from capibara.compilation.programs import CompiledCalls, Program
    from capibara.compilation.warmup import TpuWarmupManager, WarmupReport

_HOMES = {
    "changes": ("Change", "Recompilation"),
    "configuration": ("TpuCompilationConfig",),
    "counting": ("CompilationCounts", "count_compilations"),
    "errors": (
        "CompilationOptionError",
        "CompilationOptionWarning",
        "NotCompiledError",
        "PackedProgramError",
        "RecompilationWarning",
    ),
    "forward": ("create_jitted_forward",),
    "jitted": ("OptimizedJit", "create_tpu_optimized_jit"),
    "options": ("Effect",),
    "packing": ("PackedProgram", "load_program", "pack_program", "read_packed"),
    "persistent_cache": ("cache_folder", "keep_compiled"),
    "programs": ("CompiledCalls", "Program"),
    "warmup": ("TpuWarmupManager", "WarmupReport"),
}

__all__ = [
    "Change",
    "CompilationCounts",
    "CompilationOptionError",
    "CompilationOptionWarning",
    "CompiledCalls",
    "Effect",
    "NotCompiledError",
    "OptimizedJit",
    "PackedProgram",
    "PackedProgramError",
    "Program",
    "Recompilation",
    "RecompilationWarning",
    "TpuCompilationConfig",
    "TpuWarmupManager",
    "WarmupReport",
    "cache_folder",
    "count_compilations",
    "create_jitted_forward",
    "create_tpu_optimized_jit",
    "keep_compiled",
    "load_program",
    "pack_program",
    "read_packed",
]

__getattr__, __dir__ = on_demand(__name__, _HOMES)

"""Compile for TPUs and GPUs that are not present: one process per program, results cached on disk.

The TPU compiler, ``libtpu``, works on any Linux machine, but not in every process: it takes a lock, it looks for
TPUs, and JAX's platform is chosen only once. XLA's GPU compiler, in JAX's CUDA plugin, needs no GPU either. So each
program is compiled in a separate process, which never uses the devices of the caller, and a crash of the compiler costs
one result, not the session.
"""

from __future__ import annotations

from capibara.plan.compiler.cache import ProgramCache
from capibara.plan.compiler.environment import compiler_for, find_compiler
from capibara.plan.compiler.job import CompiledProgram, Job, Memory
from capibara.plan.compiler.pool import compile_program, compile_programs

__all__ = [
    "CompiledProgram",
    "Job",
    "Memory",
    "ProgramCache",
    "compile_program",
    "compile_programs",
    "compiler_for",
    "find_compiler",
]

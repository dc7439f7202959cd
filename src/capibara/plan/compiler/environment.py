"""Find the compiler for a target, and the environment of processes that use it."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from capibara.jax_versions import libtpu_problem
from capibara.plan.errors import CompilerMissingError

if TYPE_CHECKING:
    from capibara.plan.targets import Target

__all__ = ["Compiler", "compiler_for", "find_compiler"]

VARIABLE = "CAPIBARA_LIBTPU"


# Settings of JAX and Capibara that change no compiled program.
_WITHOUT_EFFECT = {
    "CAPIBARA_CUDA_PLUGIN",
    "CAPIBARA_PRICES",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_NUM_CPU_DEVICES",
    "JAX_PLATFORMS",
    "JAX_TRACEBACK_FILTERING",
    "JAX_TRACEBACK_IN_LOCATIONS_LIMIT",
    VARIABLE,
}


@dataclass(frozen=True)
class Compiler:
    """An installed ``libtpu``.

    Attributes:
      version: of the package.
      path: the folder to add to the import path, or None if it is already there.
      library: the file of the library; empty if it is not known.
      name: the package.
    """

    version: str
    path: str | None
    library: str = ""
    name: str = "libtpu"

    def notes(self) -> list[str]:
        """Notes for the user: that it does not match the installed JAX, and how to get the one that does."""
        problem = libtpu_problem(self.version)
        return [f"figures may be off: {problem}"] if problem else []

    def settings(self) -> dict[str, str]:
        """The parts of this process's environment that affect a compiled program: flags of XLA and libtpu, settings
        of JAX and Capibara."""
        names = {"XLA_FLAGS", "LIBTPU_INIT_ARGS"}
        names |= {name for name in os.environ if name.startswith(("JAX_", "CAPIBARA_"))} - _WITHOUT_EFFECT
        found = self.environment()
        return {name: found[name] for name in sorted(names) if found.get(name)}

    def environment(self) -> dict[str, str]:
        """Variables for a process that compiles for TPUs and runs on the CPU."""
        # Importing libtpu sets it, also in the process that asks, which may have imported another one.
        library = {"TPU_LIBRARY_PATH": self.library} if self.library else {}
        return {
            **self.shared_environment(),
            **library,
            # Compiling asks no metadata server; several may load the library at once, for none opens a TPU.
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_STDERR_LOG_LEVEL": "3",
            "TPU_MIN_LOG_LEVEL": "3",
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }

    def shared_environment(self) -> dict[str, str]:
        """What processes of all compilers have."""
        paths = [self.path] if self.path else []
        paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        flags = os.environ.get("XLA_FLAGS", "").split()
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "JAX_PLATFORMS": "cpu",
            # A program says where it comes from, whatever this process wants of its own.
            "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "10",
            # An emulated mesh of the asking process only takes memory here.
            "XLA_FLAGS": " ".join(f for f in flags if "host_platform_device_count" not in f),
        }


def compiler_for(target: Target) -> Compiler:
    """The compiler of a target's programs.

    Raises:
      CompilerMissingError: it is not installed; the message says how to install it.
    """
    from capibara.plan.compiler.gpu_environment import find_gpu_compiler

    return find_gpu_compiler() if target.platform == "cuda" else find_compiler()


def find_compiler() -> Compiler:
    """The ``libtpu`` of this environment.

    It is looked for in the folder that the variable CAPIBARA_LIBTPU names; else on the import path, and in the folder
    ``libtpu`` of the environment (``pip install --target``: there JAX does not look for TPUs in every process), of
    which two the one that the installed JAX pins is taken, or else the first.

    Raises:
      CompilerMissingError: there is none; the message says how to install it, or that this machine does not support
        it.
    """
    asked = os.environ.get(VARIABLE)
    found: list[Compiler] = []
    if not asked and (spec := importlib.util.find_spec("libtpu")) and spec.origin:
        package = Path(spec.origin).parent
        found.append(Compiler(_version(package.parent), None, _library(package)))
    folder = Path(asked) if asked else Path(sys.prefix) / "libtpu"
    if library := _library(folder / "libtpu"):
        found.append(Compiler(_version(folder), str(folder.resolve()), library))
    if found:
        return next((each for each in found if not each.notes()), found[0])
    if asked:
        raise CompilerMissingError(f"{VARIABLE}={asked!r} names no folder with libtpu/libtpu.so in it")
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise CompilerMissingError(
            f"the TPU compiler (libtpu) exists for Linux on x86-64 only; this is {platform.system()} on "
            f"{platform.machine()}. Plan there, or take the analytic estimate (compile=False)"
        )
    raise CompilerMissingError(
        "the TPU compiler (libtpu) is not installed. Install it with: pip install 'capibara-jax[plan]'; or take the "
        "analytic estimate (compile=False, --no-compile)"
    )


def _library(package: Path) -> str:
    library = package / "libtpu.so"
    return str(library.resolve()) if library.is_file() else ""


def _version(folder: Path) -> str:
    """Of the package in a folder; of several records the last that was written, for pip leaves the others there."""
    names = [
        (entry.stat().st_mtime, match[1])
        for entry in folder.glob("libtpu-*.dist-info")
        if (match := re.match(r"libtpu-(.+)\.dist-info", entry.name))
    ]
    return max(names, default=(0.0, "unknown"))[1]

"""Find XLA's compiler for NVIDIA GPUs, and the environment of processes that use it."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from capibara.jax_versions import installed_version
from capibara.plan.compiler.environment import Compiler
from capibara.plan.errors import CompilerMissingError

__all__ = ["GpuCompiler", "find_gpu_compiler"]

VARIABLE = "CAPIBARA_CUDA_PLUGIN"
# The newest CUDA first; each has a package jax-cudaNN-pjrt beside it, with the library.
_PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin")


@dataclass(frozen=True)
class GpuCompiler(Compiler):
    """An installed CUDA plugin of JAX. It compiles without a GPU and without a driver."""

    name: str = "jax-cuda13-plugin"

    def notes(self) -> list[str]:
        """Notes for the user: that it is not the plugin of the installed JAX."""
        jax = installed_version()
        if jax is None or not self.version[:1].isdecimal() or self.version == jax:
            return []
        return [
            f"figures may be off: {self.name} {self.version} is installed beside JAX {jax}. Install the one that "
            f"belongs to it with: {_install(jax)}"
        ]

    def environment(self) -> dict[str, str]:
        """Variables for a process that compiles for GPUs and runs on the CPU."""
        return {
            **self.shared_environment(),
            # Devices that are here stay as they are: only the CPU's backend is started.
            "CUDA_VISIBLE_DEVICES": "",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }


def find_gpu_compiler() -> GpuCompiler:
    """The CUDA plugin of this environment.

    It is looked for in the folder that the variable CAPIBARA_CUDA_PLUGIN names; else on the import path; else in the
    folder ``cuda`` of the environment (``pip install --target``: there JAX does not look for GPUs in every process).

    Raises:
      CompilerMissingError: there is none; the message says how to install it, or that this machine does not support
        it.
    """
    asked = os.environ.get(VARIABLE)
    for plugin in _PLUGINS:
        if asked:
            break
        spec = importlib.util.find_spec(plugin)
        if spec is not None and spec.origin:
            return _found(plugin, Path(spec.origin).parent.parent, None)
    folder = Path(asked) if asked else Path(sys.prefix) / "cuda"
    for plugin in _PLUGINS:
        if (folder / plugin).is_dir():
            return _found(plugin, folder, str(folder.resolve()))
    if asked:
        raise CompilerMissingError(f"{VARIABLE}={asked!r} names no folder with {' or '.join(_PLUGINS)} in it")
    if platform.system() != "Linux":
        raise CompilerMissingError(
            f"XLA's GPU compiler (the package jax-cuda13-plugin) exists for Linux only; this is {platform.system()}. "
            "Plan there, or take the analytic estimate (compile=False, --no-compile)"
        )
    raise CompilerMissingError(
        "XLA's GPU compiler (the packages jax-cuda13-plugin and jax-cuda13-pjrt) is not installed. No GPU is needed: "
        f"install it with: {_install(installed_version())}; or take the analytic estimate (compile=False, --no-compile)"
    )


def _found(plugin: str, folder: Path, path: str | None) -> GpuCompiler:
    return GpuCompiler(version=_version(folder, plugin), path=path, name=plugin.replace("_", "-"))


def _install(jax: str | None) -> str:
    pin = f"=={jax}" if jax else ""
    return f"pip install --no-deps jax-cuda13-plugin{pin} jax-cuda13-pjrt{pin}"


def _version(folder: Path, plugin: str) -> str:
    """Of the package in a folder; of several records the last that was written, for pip leaves the others there."""
    names = [
        (entry.stat().st_mtime, match[1])
        for entry in folder.glob(f"{plugin}-*.dist-info")
        if (match := re.fullmatch(rf"{plugin}-(.+)\.dist-info", entry.name))
    ]
    return max(names, default=(0.0, "unknown"))[1]

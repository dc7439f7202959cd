"""Compiling the library. Only the standard library is imported: the package's build runs this file by itself."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = [
    "LIBRARY",
    "SOURCES",
    "NativeBuildError",
    "build",
    "compile_kernels",
    "is_current",
    "source_digest",
]

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "cc"
LIBRARY = HERE / "libcapibara.so"

# Kernels are compiled once for each of these; isa.cc chooses at run time.
_SETS = {
    "x86_64": {
        "baseline": [],
        "avx2": ["-mavx2", "-mfma"],
        "avx512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"],
    },
    "aarch64": {"neon": []},  # every such processor has it
}
_KINDS = (
    "attention",
    "codec",
    "elementwise",
    "fixed",
    "grouped",
    "paged",
    "quantised",
    "scan",
    "thin",
    "tropical",
)
# Of these XLA calls entries that need no kernels of their own.
_ENTRIES = (*_KINDS, "products", "rows", "thin_chain", "zeros")
# Of these neither XLA's headers nor a set of instructions matters.
_PLAIN = ("isa", "codec_choice", "codec_decode", "codec_encode", "panels", "placed", "trace")
# No -ffast-math: infinities and NaN mean something here. Contraction is what lets a*b + c be one instruction.
_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno"]


class NativeBuildError(RuntimeError):
    """The library could not be built; the message says why and what to do."""


def source_digest() -> str:
    """A digest of the C++ sources, which the library carries too."""
    digest = hashlib.sha256()
    for path in sorted([*SOURCES.glob("*.cc"), *SOURCES.glob("*.h")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def is_current(library: Path = LIBRARY) -> bool:
    """Whether the library is there and was built from these sources; it is not loaded for that."""
    return library.is_file() and source_digest().encode() in library.read_bytes()


def find_compiler() -> str | None:
    """``$CXX``, else the first of g++, clang++ and c++ on the path."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    return None


def find_headers() -> Path | None:
    """The folder of XLA's FFI headers, which jaxlib carries; ``None`` without jaxlib."""
    import importlib.util

    # By its place, without importing it: a build needs nothing of it but the headers.
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "include"
    return folder if (folder / "xla" / "ffi" / "api" / "ffi.h").is_file() else None


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NativeBuildError(
            f"{' '.join(command)}\nfailed with status {done.returncode}:\n{done.stderr[-4000:]}"
        )


def _compile(compiler: str, jobs: list[tuple[list[str], str]], folder: Path) -> list[Path]:
    """Compile each (arguments, name of the object) into ``folder``."""

    def compile_one(job: tuple[list[str], str]) -> Path:
        arguments, name = job
        _run([compiler, *_FLAGS, *arguments, "-c", "-o", str(folder / name)])
        return folder / name

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(compile_one, jobs))


def compile_kernels(compiler: str, machine: str, folder: Path) -> list[Path]:
    """Compile what knows nothing of XLA, kernels and the choice among them, for ``machine``; return the objects.

    Raises:
      NativeBuildError: the compiler's own error.
    """
    jobs = [
        ([*flags, f"-DCAPIBARA_ISA={name}", str(SOURCES / f"{kind}_kernels.cc")], f"{kind}_{name}.o")
        for kind in _KINDS
        for name, flags in _SETS.get(machine, {"baseline": []}).items()
    ]
    jobs += [
        ([f'-DCAPIBARA_SOURCES="{source_digest()}"', str(SOURCES / f"{name}.cc")], f"{name}.o")
        for name in _PLAIN
    ]
    return _compile(compiler, jobs, folder)


def build(
    to: Path = LIBRARY,
    *,
    compiler: str | None = None,
    machine: str | None = None,
    kernels: list[Path] | None = None,
) -> Path:
    """Compile the library and put it at ``to``, at once or not at all; some seconds.

    Args:
      compiler: by default ``$CXX``, else the first of g++, clang++ and c++ on the path. A cross compiler goes with
        the ``machine`` it compiles for.
      machine: ``"x86_64"``, ``"aarch64"`` or another; by default this one.
      kernels: what :func:`compile_kernels` gave for the machine; by default it is called.

    Raises:
      NativeBuildError: no compiler, no headers, a platform other than Linux, or the compiler's own error.
    """
    if sys.platform != "linux":
        raise NativeBuildError(f"native kernels are built on Linux only, this is {sys.platform}")
    compiler, headers = compiler or find_compiler(), find_headers()
    if compiler is None:
        raise NativeBuildError("no C++ compiler found. Remedy: install g++ or clang++, or set CXX.")
    if headers is None:
        raise NativeBuildError("jaxlib's FFI headers were not found. Remedy: pip install jaxlib.")
    with tempfile.TemporaryDirectory(prefix="capibara-native-") as name:
        folder = Path(name)
        if kernels is None:
            kernels = compile_kernels(compiler, machine or platform.machine(), folder)
        handlers = [
            (["-isystem", str(headers), str(SOURCES / f"{kind}.cc")], f"{kind}.o") for kind in _ENTRIES
        ]
        objects = [*kernels, *_compile(compiler, handlers, folder)]
        made = folder / to.name
        # The C++ runtime goes in: the library must not depend on the one of the machine that loads it.
        flags = ["-shared", "-s", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL"]
        _run([compiler, *flags, "-o", str(made), *map(str, objects)])
        # Beside its place first: only within one file system is a rename all or nothing.
        beside = to.with_name(f".{os.getpid()}-{to.name}")
        try:
            shutil.copy(made, beside)
            beside.replace(to)
        finally:
            beside.unlink(missing_ok=True)
    return to

"""Compile a function and put the program in a file."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capibara.compilation.cache_entries import decompress
from capibara.compilation.errors import PackedProgramError
from capibara.compilation.jitted import OptimizedJit
from capibara.compilation.lowering import compile_lowered, devices_of, platform_of
from capibara.compilation.options import compiler_options
from capibara.compilation.packing.container import PackedProgram, write_packed
from capibara.compilation.packing.environment import environment_of
from capibara.compilation.persistent_cache import private_cache
from capibara.compilation.signature import Signature
from capibara.jax_versions import watch_program_keys

__all__ = ["inputs_of", "pack_lowered", "pack_program", "prepare", "require_jitted"]


def pack_program(
    path: str | os.PathLike[str],
    function: OptimizedJit,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
) -> PackedProgram:
    """Compile a function for the arguments of a call, and write the program to a file.

    Args:
      path: the file.
      function: made by :func:`create_tpu_optimized_jit`.
      args, kwargs: of the call: arrays, or ``jax.ShapeDtypeStruct``, whose shardings may be over the devices of a
        topology that is described (``jax.experimental.topologies``) and not attached. Static arguments have their
        values.

    Returns:
      What is in the file. Its ``sha256`` lets the other machine know that it is this one.

    Raises:
      PackedProgramError: the platform cannot write its programs.
      CompilationOptionError: as for a call.
      OSError: the file cannot be written.
    """
    require_jitted(function)
    signature, lowered, options = prepare(function, args, dict(kwargs or {}))
    inputs, devices = inputs_of(function, signature, len(args)), devices_of(signature, function._shardings)
    return pack_lowered(path, lowered, name=function.name, inputs=inputs, devices=devices, options=options)


def pack_lowered(
    path: str | os.PathLike[str],
    lowered: Any,
    *,
    name: str,
    inputs: tuple[str, ...],
    devices: Sequence[Any],
    options: Mapping[str, Any] | None = None,
) -> PackedProgram:
    """Compile what ``jax.jit(…).lower(…)`` gave, and write the program to a file.

    Args:
      path: the file. name: of the function. inputs: one text for each array.
      devices: that it is compiled for. options: of the compiler.

    Raises:
      PackedProgramError, CompilationOptionError, OSError: as :func:`pack_program`.
    """
    options = dict(options or {})
    keys: list[str] = []
    with tempfile.TemporaryDirectory(prefix="capibara-program-") as folder:
        with private_cache(Path(folder)), watch_program_keys(lambda key, _: keys.append(key)):
            compile_lowered(lowered, options, name)
        entry = Path(folder) / f"{keys[-1] if keys else ''}-cache"
        if not entry.is_file():
            raise PackedProgramError(
                f"{name}: JAX cannot write programs for the platform {devices[0].platform!r} to a file."
            )
        program = decompress(entry.read_bytes())
    return write_packed(
        path,
        function=name,
        inputs=inputs,
        environment=environment_of(devices, options),
        stablehlo=stablehlo_digest(lowered),
        program=program,
    )


def require_jitted(function: Any) -> None:
    """Raise a PackedProgramError for anything but an OptimizedJit."""
    if not isinstance(function, OptimizedJit):
        raise PackedProgramError(
            f"function: got {function!r:.100}, expected one made by create_tpu_optimized_jit."
        )


def prepare(
    function: OptimizedJit, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Signature, Any, dict[str, Any]]:
    """The signature of a call, its program as JAX lowered it, and the compiler options."""
    signature = function._sign(args, kwargs)
    options = compiler_options(function.config.effects(platform_of(signature, function._shardings)))
    return signature, function.lower(*args, **kwargs), options


def inputs_of(function: OptimizedJit, signature: Signature, count: int) -> tuple[str, ...]:
    """One text for each array of a call with ``count`` positional arguments: ``"params['w']: float32[768,16]"``."""
    paths = signature.paths(function._dynamic_names(count))
    return tuple(f"{where}: {leaf}" for where, leaf in zip(paths, signature.leaves, strict=True))


def stablehlo_digest(lowered: Any) -> str:
    """SHA-256 of a program before XLA, without places in source files."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()

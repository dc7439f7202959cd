"""Take a program out of a file and use it for a function's calls.

The function is traced and lowered here, as for any first call, which tells JAX everything about the program except
its code. JAX then looks in its persistent cache under a key of its own; the key is noted, the code from the file is
put there in a folder of this call alone, and JAX reads it. So donation, shardings, layouts and dispatch are JAX's
own, and nothing in the file is interpreted but the code.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capibara.compilation.cache_entries import compress
from capibara.compilation.counting import count_compilations
from capibara.compilation.errors import PackedProgramError
from capibara.compilation.jitted import OptimizedJit
from capibara.compilation.lowering import compile_lowered, devices_of, platform_of
from capibara.compilation.packing.container import PackedProgram, read_trusted
from capibara.compilation.packing.environment import differences, environment_of
from capibara.compilation.packing.writing import (
    inputs_of,
    prepare,
    require_jitted,
    stablehlo_digest,
)
from capibara.compilation.persistent_cache import private_cache
from capibara.compilation.programs import Program
from capibara.errors import printable
from capibara.jax_versions import watch_program_keys

__all__ = ["load_lowered", "load_program"]


class _KeyKnown(BaseException):
    """Ends a compilation once its key is known."""


def load_program(
    path: str | os.PathLike[str],
    function: OptimizedJit,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    sha256: str | None = None,
) -> Program:
    """Use the program in a file for calls of a function; they compile nothing.

    The program is machine code, which will run with your rights. So give the ``sha256`` that :func:`pack_program`
    returned; without it, the file must belong to you (or root) and nobody else may be able to write to it.

    Args:
      path: the file.
      function: the same function with the same options as where it was packed, made by
        :func:`create_tpu_optimized_jit`.
      args, kwargs: of the call: arrays, or ``jax.ShapeDtypeStruct`` with the shardings that they will have.
      sha256: of the file, in hexadecimal.

    Returns:
      The program, which ``function`` now has.

    Raises:
      PackedProgramError: the file is damaged or not to be trusted; or it was made by another version of JAX or of the
        compiler, for other devices, with other flags or options, or of another function. The message says which.
      OSError: it cannot be read.
    """
    require_jitted(function)
    name = Path(path).name
    packed = read_trusted(path, sha256)
    begin = time.perf_counter()
    signature, lowered, options = prepare(function, args, dict(kwargs or {}))
    inputs, devices = inputs_of(function, signature, len(args)), devices_of(signature, function._shardings)
    compiled = _compiled(
        name, packed, lowered, name_of=function.name, inputs=inputs, devices=devices, options=options
    )
    platform = platform_of(signature, function._shardings)
    program = Program(
        function=function.name,
        signature=signature,
        platform=platform,
        effects=function.config.effects(platform),
        options=options,
        notes=(f"loaded from {name}",),
        seconds=time.perf_counter() - begin,
        from_cache=True,
        compiled=compiled,
        lowered_text=lowered.as_text,
    )
    function.adopt(program)
    return program


def load_lowered(
    path: str | os.PathLike[str],
    lowered: Any,
    *,
    name: str,
    inputs: tuple[str, ...],
    devices: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    sha256: str | None = None,
) -> Any:
    """The program in a file in place of ``lowered.compile()``, of what ``jax.jit(…).lower(…)`` gave.

    Args:
      path: the file, which :func:`~capibara.compilation.packing.writing.pack_lowered` wrote.
      name: of the function. inputs: one text for each array. devices: that it runs on. options: of the compiler.
      sha256: of the file.

    Raises:
      PackedProgramError, OSError: as :func:`load_program`.
    """
    packed, options = read_trusted(path, sha256), dict(options or {})
    return _compiled(
        Path(path).name, packed, lowered, name_of=name, inputs=inputs, devices=devices, options=options
    )


def _compiled(
    name: str,
    packed: PackedProgram,
    lowered: Any,
    *,
    name_of: str,
    inputs: tuple[str, ...],
    devices: Sequence[Any],
    options: dict[str, Any],
) -> Any:
    found = differences(packed.environment, environment_of(devices, options))
    if found:
        raise PackedProgramError(
            f"{name}: was compiled for another environment. {'; '.join(found)}. Pack it again with what is here."
        )
    if stablehlo_digest(lowered) != packed.stablehlo:
        raise PackedProgramError(
            f"{name}: was compiled from another program than {name_of} is now: "
            f"{_changed(packed.inputs, inputs)}. Pack it again."
        )
    return _load(name, packed, lowered, options, name_of)


def _changed(then: tuple[str, ...], now: tuple[str, ...]) -> str:
    found = [
        f"{printable(old)} in the file, {new} here"
        for old, new in itertools.zip_longest(then, now, fillvalue="nothing")
        if old != new
    ]
    return "; ".join(found[:4]) or "with the same inputs, so the function or JAX's settings changed"


def _load(name: str, packed: PackedProgram, lowered: Any, options: dict[str, Any], function: str) -> Any:
    import jax

    keys: list[str] = []

    def stop(key: str, _: bool) -> None:
        keys.append(key)
        raise _KeyKnown

    def require(key: str, there: bool) -> None:
        if not there:
            raise PackedProgramError(f"{name}: JAX asked for {key!r:.120} and then did not find it.")

    with tempfile.TemporaryDirectory(prefix="capibara-program-") as folder:
        with private_cache(Path(folder)):
            try:
                with watch_program_keys(stop):
                    compile_lowered(lowered, options, function)
            except _KeyKnown:
                (Path(folder) / f"{keys[-1]}-cache").write_bytes(compress(packed._program))
            else:
                raise PackedProgramError(
                    f"{name}: this JAX ({jax.__version__}) does not look for programs in its cache on this platform."
                )
            try:
                with count_compilations() as counts, watch_program_keys(require):
                    compiled = compile_lowered(lowered, options, function)
            except jax.errors.JaxRuntimeError as error:
                raise PackedProgramError(
                    f"{name}: the device's runtime refused the program: {error}"
                ) from error
        if counts.hits < 1:
            raise PackedProgramError(f"{name}: JAX compiled {function} instead of reading it.")
    return compiled

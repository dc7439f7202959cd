"""Compiled models as programs that any process with JAX runs, without Capibara: ``jax.export`` (StableHLO in a file).

A program takes the model's arguments, including parameters, and leaves the same sizes open. The file has the format
of ``jax.export.Exported.serialize``, so that JAX alone can read it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping
from typing import Any

from capibara.compose.errors import CompileError, InputError
from capibara.compose.physical.compiled import CompiledModel
from capibara.compose.physical.params_file import file_to_read, file_to_write
from capibara.compose.physical.specs import ArraySpec, nest
from capibara.errors import MissingExtraError
from capibara.files import replace_file

__all__ = ["export", "load_exported"]

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
MAX_BYTES = 1 << 30


def export(
    compiled: CompiledModel,
    path: str | os.PathLike[str] | None = None,
    *,
    platforms: Iterable[str] | None = None,
    gradients: bool = False,
    **sizes: int,
) -> Any:
    """Write a compiled model as a program of ``jax.export``.

    Equivalent JAX: ``jax.export.export(jax.jit(function), platforms=…)(jax.ShapeDtypeStruct(…), …)`` and
    ``path.write_bytes(exported.serialize())``. Operations with native code of this installation use another
    implementation, so that the program runs elsewhere.

    Args:
        compiled: a model compiled on a ``JaxBackend`` without a mesh.
        path: the file, written atomically. None: only return the program.
        platforms: of "cpu", "cuda", "rocm", "tpu"; by default the backend's own.
        gradients: the program can be differentiated once (``vjp``) by its caller.
        sizes: values for free sizes, by name; the others stay open.

    Returns:
        The ``jax.export.Exported``; its ``call(params, inputs)`` gives the outputs by key; that of a model with
        states is ``call(params, inputs, state)`` and gives outputs and the next state.

    Raises:
        CompileError: the model is on another backend or a mesh, an input's rank is unknown, or JAX cannot export it.
        MissingExtraError: a file is to be written, and the package flatbuffers is missing.
    """
    import jax

    from capibara.ops.registry import portable

    if not isinstance(compiled, CompiledModel) or not compiled._in_jax:
        raise CompileError(f"export: {compiled!r:.200} is not a model compiled on a JaxBackend")
    backend = compiled.backend
    if backend.mesh is not None:
        raise CompileError(
            "export: the model is sharded over a mesh; compile it for a JaxBackend without one"
        )
    given = (
        [backend.platform]
        if platforms is None
        else [platforms]
        if isinstance(platforms, str)
        else list(platforms)
    )
    names = [{"gpu": "cuda"}.get(name, name) for name in given]
    if not names or not set(names) <= set(PLATFORMS):
        raise CompileError(f"platforms={given} must be some of {', '.join(PLATFORMS)}")

    everything = [*compiled.inputs.values(), *compiled.params.values(), *compiled.states.values()]
    free = dict.fromkeys(n for spec in everything for n in spec.shape or () if isinstance(n, str))
    for name in sizes:
        if name not in free:
            raise CompileError(f"{name!r} is not a free size of the model; the free sizes are {list(free)}")
    open_sizes = [name for name in free if name not in sizes]
    symbols = (
        jax.export.symbolic_shape(", ".join(f"size_{i}" for i, _ in enumerate(open_sizes)))
        if open_sizes
        else ()
    )
    table: dict[Any, Any] = {**dict(zip(open_sizes, symbols, strict=True)), **sizes}

    def struct(what: str, spec: ArraySpec) -> Any:
        if spec.shape is None:
            raise CompileError(f"export: the rank of {what} is not known; compile with shapes={{…}}")
        return jax.ShapeDtypeStruct(tuple(table.get(n, n) for n in spec.shape), spec.dtype)

    def structs(what: str, specs: Mapping[tuple[str, ...], ArraySpec]) -> dict[str, Any]:
        return nest({p: struct(f"{what} {'.'.join(p)!r}", s) for p, s in specs.items()})

    arguments = [
        structs("parameter", compiled.params),
        {key: struct(f"input {key!r}", spec) for key, spec in compiled.inputs.items()},
    ]
    if compiled.states:
        arguments.append(structs("state", compiled.states))

    def function(params: Any, inputs: Any, *state: Any) -> Any:
        outputs, after = compiled.function(params, inputs, *(state or ({},)), None, False)
        return (outputs, after) if state else outputs

    if path is not None:
        _check_flatbuffers()
        path = file_to_write(path)
    with backend.scope(), portable():
        try:
            exported = jax.export.export(jax.jit(function), platforms=names)(*arguments)
            data = b"" if path is None else exported.serialize(vjp_order=1 if gradients else 0)
        except Exception as error:
            raise CompileError(
                f"export: {type(error).__name__}: {str(error)[:800]}. A size that has to be known can be given: "
                f"export(…, {next(iter(open_sizes), 'batch')}=8)"
            ) from error
    if path is not None:
        replace_file(path, bytes(data))
    return exported


def _check_flatbuffers() -> None:
    if importlib.util.find_spec("flatbuffers") is None:
        raise MissingExtraError("flatbuffers", "export", "Programs of jax.export in files")


def load_exported(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> Any:
    """Read a program written by :func:`export` (or ``jax.export``).

    Args:
        path: the file. max_bytes: maximum size.

    Returns:
        The ``jax.export.Exported``: ``.call``, ``.platforms``, ``.in_avals``.

    Raises:
        MissingFileError: there is no such file. InputError: it is too large, or not such a program.
        MissingExtraError: the package flatbuffers is missing.
    """
    import jax

    _check_flatbuffers()
    file = file_to_read(path)
    size = file.stat().st_size
    if size > max_bytes:
        raise InputError(f"{str(file)!r} has {size:,} bytes, more than max_bytes={max_bytes:,}")
    data = file.read_bytes()
    if len(data) < 16:
        raise InputError(f"{str(file)!r} is not a program of jax.export: it has {len(data)} bytes")
    try:
        return jax.export.deserialize(bytearray(data))
    except Exception as error:
        raise InputError(
            f"{str(file)!r} is not a program of jax.export that this JAX can read: {type(error).__name__}: "
            f"{str(error)[:300]}"
        ) from error

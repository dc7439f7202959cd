"""The programs of an engine in a folder: compiled on one machine, such as a laptop, for the devices of another.

The folder has a file for each program (:mod:`capibara.compilation.packing`) and ``bundle.json``, which is written last:
the sizes of the engine, the mesh, and each program's file with its digest. An engine that starts with the bundle has
these sizes, and compiles nothing; each program is traced there as well, and refused if it is another one by now.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from capibara.compilation.errors import PackedProgramError
from capibara.compilation.packing.container import require_own
from capibara.compilation.packing.loading import load_lowered
from capibara.compilation.packing.writing import pack_lowered
from capibara.compress.coded import is_coded
from capibara.errors import ConfigError
from capibara.files import read_bounded, replace_file
from capibara.serve.engine.arrays import bytes_of_one_device
from capibara.serve.engine.layers import as_computed, bytes_held, layers_apart
from capibara.serve.engine.programs import Programs, pages_in_memory
from capibara.serve.engine.steps import EngineSizes

__all__ = ["ProgramBundle", "write_bundle"]

_INDEX = "bundle.json"
_VERSION = 1
_MOST_INDEX = 4 << 20
_MOST_PROGRAMS = 4096
_FILE = re.compile(r"program-[0-9a-f]{8}-[0-9]{3,4}\.caprog")
_MOST = {"max_batch": 4096, "prefill_tokens": 1 << 20, "prefill_chunks": 4096, "guesses": 16}
_REMEDY = "Write the bundle again with capibara serve --compile-for."


@dataclasses.dataclass(frozen=True)
class ProgramBundle:
    """Programs in a folder.

    Attributes:
      folder: where they are.
      sizes: of the engine that they are for. mesh: axis → devices; none for one device without a mesh.
      target: what they were compiled for, in words.
      files: program → file and its SHA-256.
    """

    folder: Path
    sizes: EngineSizes
    mesh: Mapping[str, int]
    target: str
    files: Mapping[str, tuple[str, str]]

    @classmethod
    def read(cls, folder: str | os.PathLike[str], *, sha256: str | None = None) -> ProgramBundle:
        """Read what is in a folder; no program is looked at yet.

        The programs are machine code, which will run with your rights. So give the ``sha256`` of ``bundle.json``;
        without it, that file must belong to you (or root) and nobody else may be able to write to it.

        Raises:
          PackedProgramError: there is no bundle, or it is damaged or not to be trusted.
        """
        path = Path(folder) / _INDEX
        try:
            content = read_bounded(
                path, _MOST_INDEX, check=require_own(str(path)) if sha256 is None else None
            )
        except OSError as error:
            raise PackedProgramError(f"{path}: {error.strerror or error}. {_REMEDY}") from None
        digest = hashlib.sha256(content).hexdigest()
        if sha256 is not None and sha256.lower() != digest:
            raise PackedProgramError(f"{path}: has the SHA-256 {digest}, expected {sha256:.80}.")
        try:
            given = json.loads(content)
            version = int(given["version"])
            files = {
                str(name): (str(one["file"]), str(one["sha256"])) for name, one in given["programs"].items()
            }
            mesh = {str(axis): int(size) for axis, size in given["mesh"].items()}
            sizes = _sizes(given["sizes"])
            target = str(given["target"])
            if not all(1 <= size <= 1 << 16 for size in mesh.values()):
                raise ValueError("mesh")
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            raise PackedProgramError(f"{path}: is damaged. {_REMEDY}") from None
        if version != _VERSION:
            raise PackedProgramError(f"{path}: has version {version}, expected {_VERSION}. {_REMEDY}")
        if len(files) > _MOST_PROGRAMS or not all(_FILE.fullmatch(file) for file, _ in files.values()):
            raise PackedProgramError(f"{path}: names files outside its folder, or too many. {_REMEDY}")
        return cls(Path(folder), sizes, mesh, target, files)

    def check(self, model: Any, asked: EngineSizes, *, adapters: bool) -> None:
        """That the bundle is for such an engine.

        Raises:
          PackedProgramError: it is not.
        """
        mesh = {} if model.mesh is None else dict(model.mesh.shape)
        if mesh != dict(self.mesh):
            raise PackedProgramError(
                f"{self.folder}: is for {_mesh_text(self.mesh)}, the model has {_mesh_text(mesh)}. {_REMEDY}"
            )
        if adapters:
            raise PackedProgramError(f"{self.folder}: has no programs with adapters. Start without them.")
        if asked.guesses != self.sizes.guesses:
            raise PackedProgramError(
                f"{self.folder}: is for {self.sizes.guesses} guessed tokens, asked for are {asked.guesses}. {_REMEDY}"
            )

    def check_devices(self, model: Any, arrays: Any) -> None:
        """That a model's arrays lie where the programs run: what JAX lowers for one device says nothing of which.

        Raises:
          PackedProgramError: they do not.
        """
        if model.mesh is not None:
            return
        (device,) = _devices(model)
        for leaf in jax.tree.leaves(arrays):
            if isinstance(leaf, jax.Array) and leaf.devices() != {device}:
                raise PackedProgramError(
                    f"{self.folder}: its programs run on {device}, and an array of the model lies on "
                    f"{', '.join(sorted(map(str, leaf.devices())))}. Put the model's arrays there (jax.device_put), or "
                    "set jax_default_device."
                )

    def maker(self, model: Any) -> Callable[[str, Any], Any]:
        """What makes programs of what JAX lowered: reads them."""
        devices = _devices(model)
        return lambda name, lowered: self.load(name, lowered, devices)

    def load(self, name: str, lowered: Any, devices: list[Any]) -> Any:
        """A program, in place of compiling it.

        Raises:
          PackedProgramError: it is not in the bundle, or does not fit what is here; the message says why.
        """
        if name not in self.files:
            raise PackedProgramError(f"{self.folder}: has no program {name!r:.80} ({self.target}). {_REMEDY}")
        file, digest = self.files[name]
        try:
            return load_lowered(
                self.folder / file,
                lowered,
                name=name,
                inputs=_inputs(lowered),
                devices=devices,
                sha256=digest,
            )
        except OSError as error:
            raise PackedProgramError(f"{self.folder / file}: {error.strerror or error}. {_REMEDY}") from None


def _sizes(given: dict[str, Any]) -> EngineSizes:
    kinds = {"cache_dtype": (str, type(None)), "recurrent": (bool,)}
    names = {field.name for field in dataclasses.fields(EngineSizes)}
    if set(given) != names:
        raise ValueError("sizes")
    for name, value in given.items():
        right = (
            isinstance(value, kinds[name])
            if name in kinds
            else type(value) is int and 0 <= value <= _MOST.get(name, (1 << 31) - 1)
        )
        if not right or (name not in kinds and name != "guesses" and value < 1):
            raise ValueError(name)
    return EngineSizes(**given)


def write_bundle(
    folder: str | os.PathLike[str],
    model: Any,
    params: Any,
    state: Any,
    sizes: EngineSizes,
    *,
    target: str,
    writable: int,
    memory_bytes: int | None = None,
    pages: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> ProgramBundle:
    """Compile all programs of an engine, and write them to a folder.

    Args:
      folder: a new one, an empty one, or one with an earlier bundle.
      model: a :class:`capibara.core.ModularCapibaraModel`; its mesh may be of devices that are described, not attached.
      params, state: its arrays, or :func:`~capibara.serve.engine.arrays.describe_arrays`.
      sizes: of the engine. target: what is compiled for, in words.
      writable: ids of tokens below this can be written.
      memory_bytes: of a device, of which half of what the parameters leave is for pages.
      pages: how many; by default as many as the texts need, or that memory holds.
      progress: called with the number of programs compiled and of all.

    Raises:
      ConfigError: the folder has something else, or a text's pages do not fit. PackedProgramError: the platform cannot
        write its programs. OSError: a file cannot be written.
    """
    place = Path(folder)
    if place.exists() and (not place.is_dir() or not all(_is_ours(one.name) for one in place.iterdir())):
        raise ConfigError(f"{os.fspath(folder)!r}: is there and holds something else. Name a new folder.")
    place.mkdir(parents=True, exist_ok=True)
    model = as_computed(model)
    if model.mesh is None:  # nothing is run, so nothing has to be copied
        params = jax.tree.map(
            lambda leaf: leaf if is_coded(leaf) else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype),
            params,
            is_leaf=is_coded,
        )
    parts = layers_apart(model, params, panels=True)
    if pages is None:
        held = bytes_held(params, parts) + bytes_of_one_device(state)
        free = None if memory_bytes is None else memory_bytes - held
        pages = pages_in_memory(
            model, sizes.page_size, sizes.cache_dtype, least=sizes.table, most=sizes.pages - 1, free=free
        )
    sizes = dataclasses.replace(sizes, pages=1 + pages)
    devices = _devices(model)
    written: dict[str, tuple[str, str]] = {}

    # Of other names than those of an earlier bundle, which stays whole until this one is.
    own = os.urandom(4).hex()

    def make(name: str, lowered: Any) -> None:
        file = f"program-{own}-{len(written):03d}.caprog"
        try:
            packed = pack_lowered(place / file, lowered, name=name, inputs=_inputs(lowered), devices=devices)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" in str(error):
                raise ConfigError(
                    f"{name} does not fit the memory of a device of {target}: {str(error).splitlines()[0]:.200}. "
                    "Choose a smaller max_batch, max_length or number of pages, or more devices."
                ) from None
            raise
        written[name] = file, packed.sha256

    programs = Programs(model, parts, state, writable=writable, make=make)
    first, rest = programs.to_compile(sizes.every, programs.describe_cache(sizes), sizes.inputs)
    every = [lambda: programs.empty_cache(sizes), *first, *rest]
    try:
        for done, compile_one in enumerate(every, start=1):
            compile_one()
            if progress is not None:
                progress(done, len(every))
    except BaseException:
        for file in place.glob(f"program-{own}-*.caprog"):
            file.unlink(missing_ok=True)
        raise
    content = {
        "version": _VERSION,
        "target": target,
        "mesh": {} if model.mesh is None else dict(model.mesh.shape),
        "sizes": dataclasses.asdict(sizes),
        "programs": {name: {"file": file, "sha256": digest} for name, (file, digest) in written.items()},
    }
    replace_file(place / _INDEX, json.dumps(content, indent=1).encode(), durable=True)
    (place / _INDEX).chmod(0o644)  # what others may write to is not trusted, whatever the umask
    for old in place.glob("program-*.caprog"):
        if not old.name.startswith(f"program-{own}-"):
            old.unlink(missing_ok=True)
    return ProgramBundle.read(place)


def _is_ours(name: str) -> bool:
    return name == _INDEX or _FILE.fullmatch(name) is not None


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return (
        f"a mesh of {' × '.join(f'{axis} {size}' for axis, size in mesh.items())}" if mesh else "one device"
    )


def _devices(model: Any) -> list[Any]:
    if model.mesh is not None:
        return list(model.mesh.devices.flat)
    with model.backend.scope():
        default = jax.config.jax_default_device  # pyright: ignore
        return [default if hasattr(default, "client") else jax.local_devices()[0]]


def _inputs(lowered: Any) -> tuple[str, ...]:
    leaves = jax.tree_util.tree_leaves_with_path(lowered.args_info)
    return tuple(f"{jax.tree_util.keystr(path)}: {info.dtype}{list(info.shape)}" for path, info in leaves)

"""Copies of a run's state in memory that outlives its processes, for a restart from a step that is not on the disk.

``capibara launch --restarts`` holds two files in memory for each process (:mod:`capibara.launch.memory`). Each process
writes the parts of the arrays that it holds, in turn into one and the other, so that a kill leaves one of them whole::

    magic, length of the header, SHA-256 of all that follows
    header: JSON with the step, the run, the process, and of each part name, dtype, shape, place, offset, bytes
    the parts, one after another

All processes go on from the newest step that every one of them has whole; without one, from the newest checkpoint on
the disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from capibara.config import ModularModelConfig
from capibara.hardware.telemetry import available_memory
from capibara.launch import read_memory
from capibara.train.checkpoint import Checkpoint
from capibara.train.checkpoint_files import first_line
from capibara.train.copies import Copier
from capibara.train.processes import Processes

__all__ = ["HeldCopies"]

_MAGIC = b"CAPIHELD"
_HEAD = len(_MAGIC) + 8 + 32
_FORMAT = 1
_LONGEST_HEADER = 64 << 20
_CHUNK = 16 << 20
_MARGIN = 1.1

Index = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class _Found:
    """A copy whose digest is right."""

    step: int
    meta: dict[str, Any]
    parts: dict[tuple[str, Index], tuple[str, tuple[int, ...], int, int]]
    content: mmap.mmap


class HeldCopies:
    """The copies of one process of one run.

    Args:
      files: descriptors of two files.
      run: what copies have to be of: the same settings and data.
      warn: told if there is no memory for copies, after which there are none.
    """

    def __init__(self, files: tuple[int, ...], *, run: str, warn: Callable[[str], None]) -> None:
        self._files, self._run, self._warn = files, run, warn
        self._processes = Processes.here()
        self._copier = Copier()
        self._found: dict[int, _Found] = {}
        self._steps = dict.fromkeys(files, -1)
        self._thread: threading.Thread | None = None
        self._works = True

    @classmethod
    def of_launcher(
        cls,
        config: ModularModelConfig,
        fingerprint: str,
        *,
        note: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> HeldCopies | None:
        """Those in the memory of this process's launcher; None without one, or if the settings ask for none."""
        if not config.checkpoint.memory_every_steps:
            return None
        files = read_memory(os.environ)
        if not all(Processes.here().all_say(bool(files))):
            note(
                "checkpoint.memory_every_steps: no copies, as nothing holds them: capibara launch --restarts N does"
            )
            return None
        run = hashlib.sha256(f"{config.to_toml()}\0{fingerprint}".encode()).hexdigest()
        return cls(files, run=run, warn=warn)

    def newest(self, items: Mapping[str, Any]) -> Checkpoint | None:
        """The newest copy that every process has whole, and that has these arrays; every process calls it.

        Args:
          items: ``jax.ShapeDtypeStruct`` with shardings, nested as the arrays are.
        """
        needed = _needed(items)
        found = {}
        for file in self._files:
            copy = self._read(file)
            self._steps[file] = -1 if copy is None else copy.step
            if copy is not None and all(
                (part := copy.parts.get(key)) is not None and part[:3] == kind for key, kind in needed.items()
            ):
                found[copy.step] = copy
        common = set.intersection(*map(set, self._processes.all_say(list(found))))
        if not common:
            return None
        self._found = {max(common): found[max(common)]}
        return Checkpoint(Path("the launcher's memory"), max(common), found[max(common)].meta)

    def restore(self, step: int, items: Mapping[str, Any]) -> Any:
        """The arrays of the copy that :meth:`newest` gave."""
        found = self._found[step]

        def array(path: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
            name = jax.tree_util.keystr(path)

            def part(index: tuple[slice, ...] | None) -> np.ndarray:
                _, shape, size, offset = found.parts[name, _index(index, like.shape)]
                if not size:
                    return np.zeros(shape, like.dtype)
                content = np.frombuffer(found.content, np.uint8, size, offset)
                return content.copy().view(like.dtype).reshape(shape)

            return jax.make_array_from_callback(like.shape, like.sharding, part)

        arrays = jax.tree_util.tree_map_with_path(array, dict(items))
        self._found = {}
        return arrays

    def remember(self, step: int, items: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Copy a state, which may be donated afterwards. It takes no agreement, and waits for the copy before."""
        self.settle()
        if not self._works:
            return
        file = min(self._files, key=self._steps.__getitem__)
        if self._copier.place_for(dict(items)) != "device":  # straight from the arrays themselves
            self._write(file, step, items, meta)
            return
        try:
            copied = [self._copier.copy(dict(items), "device")]
        except jax.errors.JaxRuntimeError as error:
            # There is no room beside a checkpoint's copy, and training does not need this one.
            self._give_up(file, error)
            return
        self._thread = threading.Thread(
            target=lambda: self._write(file, step, copied.pop(), meta),
            name=f"capibara-copy-{step}",
            daemon=True,
        )
        self._thread.start()

    def settle(self) -> None:
        """Wait for the copy that is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def clear(self) -> None:
        """Remove the copies: they are of steps that are computed anew, or of a run that has ended."""
        self.settle()
        for file in self._files:
            os.ftruncate(file, 0)
            self._steps[file] = -1

    def _write(self, file: int, step: int, items: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        try:
            self._write_parts(file, step, items, meta)
            self._steps[file] = step
        except Exception as error:  # in a thread of its own nobody else sees it
            self._give_up(file, error)

    def _give_up(self, file: int, error: Exception) -> None:
        os.ftruncate(file, 0)
        self._steps[file], self._works = -1, False
        self._warn(f"the state is no longer copied to the launcher's memory: {first_line(error)}")

    def _write_parts(self, file: int, step: int, items: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        described: list[list[Any]] = []
        parts: list[Any] = []
        offset = 0
        for name, index, data in _parts(items):
            described.append([name, index, str(data.dtype), data.shape, offset, data.nbytes])
            parts.append(data)
            offset += data.nbytes
        fields = {
            "format": _FORMAT,
            "step": step,
            "meta": dict(meta),
            "run": self._run,
            "process": [self._processes.count, self._processes.index],
            "parts": described,
        }
        header = json.dumps(fields).encode()
        size = _HEAD + len(header) + offset
        available = available_memory()
        if available is not None and _MARGIN * (size - os.fstat(file).st_size) > available:
            raise MemoryError(f"a copy takes {size:,} bytes, and {available:,} are available")
        os.ftruncate(file, min(size, os.fstat(file).st_size))
        os.pwrite(file, bytes(_HEAD), 0)  # what is there now is not whole any more
        digest, place = hashlib.sha256(), _HEAD
        for part in (np.frombuffer(header, np.uint8), *parts):
            content = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
            for begin in range(0, len(content), _CHUNK):
                chunk = content[begin : begin + _CHUNK]
                digest.update(chunk)
                while chunk:
                    written = os.pwrite(file, chunk, place)
                    place, chunk = place + written, chunk[written:]
        head = len(header).to_bytes(8, "little") + digest.digest()
        os.pwrite(file, _MAGIC + head, 0)

    def _read(self, file: int) -> _Found | None:
        """The copy in a file; None if there is none, it is damaged, or of something else."""
        size = os.fstat(file).st_size
        head = os.pread(file, _HEAD, 0)
        length = int.from_bytes(head[len(_MAGIC) : len(_MAGIC) + 8], "little")
        if head[: len(_MAGIC)] != _MAGIC or length > min(_LONGEST_HEADER, size - _HEAD):
            return None
        content = mmap.mmap(file, size, prot=mmap.PROT_READ)
        with memoryview(content) as view, view[_HEAD:] as covered:
            if hashlib.sha256(covered).digest() != head[-32:]:
                return None
        try:
            fields = json.loads(content[_HEAD : _HEAD + length])
            mine = [self._processes.count, self._processes.index]
            if (fields["format"], fields["run"], fields["process"]) != (_FORMAT, self._run, mine):
                return None
            parts = {
                (name, tuple((a, b) for a, b in index)): (dtype, tuple(shape), count, _HEAD + length + offset)
                for name, index, dtype, shape, offset, count in fields["parts"]
            }
            for _, _, count, begin in parts.values():
                if (
                    type(begin) is not int
                    or type(count) is not int
                    or not _HEAD + length <= begin <= begin + count <= size
                ):
                    return None
            return _Found(int(fields["step"]), dict(fields["meta"]), parts, content)
        except (ValueError, KeyError, TypeError, RecursionError):
            return None


def _needed(items: Mapping[str, Any]) -> dict[tuple[str, Index], tuple[str, tuple[int, ...], int]]:
    """Name and place of each part that this process's devices hold → dtype, shape and bytes."""
    found = {}
    for path, like in jax.tree_util.tree_leaves_with_path(dict(items)):
        name = jax.tree_util.keystr(path)
        for index in like.sharding.addressable_devices_indices_map(like.shape).values():
            place = _index(index, like.shape)
            shape = tuple(stop - start for start, stop in place)
            found[name, place] = str(like.dtype), shape, math.prod(shape) * like.dtype.itemsize
    return found


def _parts(items: Mapping[str, Any]) -> list[tuple[str, Index, np.ndarray]]:
    """Each part that this process's devices hold, once."""
    found: dict[tuple[str, Index], np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(dict(items)):
        for shard in leaf.addressable_shards:
            key = jax.tree_util.keystr(path), _index(shard.index, leaf.shape)
            if key not in found:
                found[key] = np.asarray(shard.data)
    return [(name, index, data) for (name, index), data in found.items()]


def _index(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> Index:
    places = (slice(None),) * len(shape) if index is None else index
    return tuple(one.indices(size)[:2] for one, size in zip(places, shape, strict=True))

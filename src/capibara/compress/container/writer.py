"""Write an archive: tensor by tensor, in bounded memory; the file appears once it is complete."""

from __future__ import annotations

import json
import math
import operator
import os
import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np

from capibara.compress.calibration.activations import stack_of
from capibara.compress.codecs.in_place import InPlace
from capibara.compress.codecs.protocol import Codec, get_codec, settings_of_rows, stored_settings
from capibara.compress.container.checksum import crc32
from capibara.compress.container.index import (
    CHUNK,
    HEADER,
    MAGIC,
    VERSION,
    Chunk,
    Entry,
    check_name,
    check_shape,
    dump,
    version_of,
)
from capibara.compress.container.pool import Buffers, ahead
from capibara.compress.errors import CompressError
from capibara.compress.formats import NumberFormat
from capibara.files import NewFile, naming

if TYPE_CHECKING:
    from capibara.compress.container.reader import Archive

__all__ = ["ArchiveWriter", "Tensor", "coded_shape", "rows_together"]


@dataclass(frozen=True)
class Tensor:
    """A tensor to write; the attributes are the arguments of :meth:`ArchiveWriter.add`.

    Attributes:
      payloads: what the codec makes of its chunks, if that is at hand: nothing is coded then.
    """

    name: str
    bits: np.ndarray
    form: NumberFormat
    shape: Iterable[int]
    codec: str = "lossless"
    settings: Mapping[str, Any] | None = None
    payloads: tuple[bytes, ...] | None = None


def coded_shape(shape: tuple[int, ...], codec: Codec) -> tuple[int, ...]:
    """The shape along whose first axis a tensor is split into chunks.

    That is its own shape; but if rows are longer than a chunk may be, and the codec accepts any run of elements (its
    ``cuts_rows``), the rows are the vectors along the last axis or, if those are too long as well, single elements.
    """
    if not getattr(codec, "cuts_rows", False) or math.prod(shape[1:]) <= CHUNK or not shape[0]:
        return shape
    return (math.prod(shape[:-1]), shape[-1]) if shape[-1] <= CHUNK else (math.prod(shape),)


def rows_together(shape: tuple[int, ...], codec: Codec, settings: Mapping[str, Any]) -> int:
    """The number of rows per chunk along a tensor's first axis: a size that suits the codec, at least one row; one for
    a stack with moments for each entry."""
    rows = shape[0] if shape else 1
    if stack_of(settings.get("hessian")) is not None:
        return 1
    if not math.prod(shape):
        return max(rows, 1)
    return max(min(CHUNK, getattr(codec, "chunk", CHUNK)) // math.prod(shape[1:]), 1)


class ArchiveWriter:
    """Writes a ``.capi`` file; use it as a context manager.

    The file is written under a temporary name in the same folder and renamed when the context ends without an
    exception: a reader sees either the old file or the complete new one.

    Args:
      path: the file; its folder must exist.
      metadata: text to store with the tensors.

    Raises:
      OSError: the folder is missing, the disk is full …; an existing file is then unchanged.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
        self.path = Path(path)
        self.metadata = dict(metadata or {})
        for key, value in self.metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise CompressError(f"metadata[{key!r}]: got {value!r}, expected text under a name")
        self.entries: list[Entry] = []
        self._by_name: dict[str, Entry] = {}
        self._new = NewFile(self.path, clean=True)
        self._file: BinaryIO | None = None
        self._at = 0
        self._buffers = Buffers()

    def __enter__(self) -> Self:
        self._file = self._new.__enter__().stream
        try:
            self._write(HEADER.pack(MAGIC, VERSION, 0))
        except BaseException:
            self._new.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        assert self._file is not None
        try:
            if kind is None:
                self._write(dump(self.entries, self.metadata, self._at))
                with naming(self.path):
                    self._file.seek(0)
                    self._file.write(HEADER.pack(MAGIC, version_of(self.entries), 0))
        except BaseException:
            self._new.__exit__(*sys.exc_info())
            raise
        self._new.__exit__(kind, error, trace)

    def _write(self, data: bytes | memoryview) -> None:
        if self._file is None or self._file.closed:
            raise CompressError("the archive is not open. Remedy: with ArchiveWriter(path) as archive: …")
        with naming(self.path):
            self._file.write(data)
        self._at += len(data)

    def add(
        self,
        name: str,
        bits: np.ndarray,
        form: NumberFormat,
        shape: Iterable[int],
        *,
        codec: str = "lossless",
        settings: Mapping[str, Any] | None = None,
    ) -> Entry:
        """Encode one tensor and append it.

        Args:
          name: a new name.
          bits: the elements in C order as ``form.unsigned`` [count]; a memory map is read only as it is encoded.
          form: the number format.
          shape: of the tensor.
          codec: one of :data:`capibara.compress.codecs.protocol.CODECS`.
          settings: of the codec. Those of calibration (``hessian``, ``input_axes``) are used but not stored. With
            moments for each entry of a stack, [entries, features, features], every entry is a chunk.

        Raises:
          CompressError: a duplicate name, or sizes that do not match.
        """
        return self.add_many([Tensor(name, bits, form, shape, codec, settings)])[0]

    def add_many(
        self, tensors: Iterable[Tensor], progress: Callable[[Entry], object] | None = None
    ) -> list[Entry]:
        """Encode tensors and append them, several at a time: faster for many small ones than :meth:`add`.

        Args:
          tensors: consumed one by one, a few ahead of writing.
          progress: called with each entry when its tensor is written.

        Raises:
          CompressError: as :meth:`add`; the tensors before the failed one stay in the archive.
        """
        done: list[Entry] = []
        chunks: list[Chunk] = []
        begin = self._at
        coming: set[str] = set()
        try:
            for part, payload, crc, buffer in ahead(self._encode, self._parts(tensors, coming), _Part.size):
                chunks.append(Chunk(part.rows, self._at, len(payload), crc))
                self._write(payload)
                if buffer is not None:
                    self._buffers.give(buffer)
                if part.last:
                    tensor = part.tensor
                    done.append(
                        self._keep(
                            Entry(
                                tensor.name,
                                tensor.form,
                                part.whole,
                                tensor.codec,
                                part.stored,
                                tuple(chunks),
                                None,
                                part.shape if part.shape != part.whole else None,
                            )
                        )
                    )
                    chunks, begin = [], self._at
                    if progress is not None:
                        progress(done[-1])
        except BaseException:
            self._take_back(begin)
            raise
        return done

    def _encode(self, part: _Part) -> tuple[_Part, bytes | memoryview, int, np.ndarray | None]:
        """What becomes of a part, its checksum, and the buffer that it lies in, if it does."""
        if part.payload is not None:
            return part, part.payload, crc32(part.payload), None
        bits = np.ascontiguousarray(part.bits)
        form, shape = part.tensor.form, (part.rows, *part.shape[1:]) if part.shape else ()
        settings = settings_of_rows(part.given, part.shape, part.start, part.start + part.rows)
        if not isinstance(part.codec, InPlace):
            payload = part.codec.encode(bits, form, shape, settings)
            return part, payload, crc32(payload), None
        buffer = self._buffers.take(part.codec.size_bound(form, bits.size, settings))
        payload = buffer[: part.codec.encode_into(buffer, bits, form, shape, settings)].data
        return part, payload, crc32(payload), buffer

    def _parts(self, tensors: Iterable[Tensor], coming: set[str]) -> Iterator[_Part]:
        """Checked, and cut into what is coded at a time."""
        for tensor in tensors:
            name, form, bits = tensor.name, tensor.form, tensor.bits
            shape, given = tuple(operator.index(n) for n in tensor.shape), dict(tensor.settings or {})
            stored = stored_settings(given)
            self._check_name(name, coming)
            coming.add(name)
            if (wrong := check_shape(shape)) is not None:
                raise CompressError(f"{name}: shape: got {shape}: {wrong}")
            try:
                json.dumps(stored, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise CompressError(
                    f"{name}: settings: got {stored!r}, expected plain values ({error})"
                ) from None
            if math.prod(shape) != bits.size or bits.dtype != form.unsigned:
                raise CompressError(
                    f"{name}: got {bits.size} numbers of {bits.dtype} for the shape {shape} of {form.name}, "
                    f"expected {math.prod(shape)} of {form.unsigned}"
                )
            how = get_codec(tensor.codec)
            whole, shape = shape, coded_shape(shape, how)
            if (stack := stack_of(given.get("hessian"))) is not None:
                given["hessian"] = stack  # scaled once for all entries
            if shape != whole:
                given = stored  # what is known of a layer's inputs fits no other shape
            flat = bits.reshape(-1)
            rows = shape[0] if shape else 1
            length = max(math.prod(shape[1:]), 1)
            step = rows_together(shape, how, given)
            starts = range(0, max(rows, 1), step)
            payloads = tensor.payloads if tensor.payloads is not None else [None] * len(starts)
            if len(payloads) != len(starts):
                raise CompressError(
                    f"{name}: payloads: got {len(payloads)}, expected one for each of {len(starts)} chunks"
                )
            for start, payload in zip(starts, payloads, strict=True):
                some = min(step, rows - start)
                yield _Part(
                    tensor, whole, shape, given, stored, how, flat[start * length : (start + some) * length],
                    start, some, start + step >= rows, payload,
                )  # fmt: skip

    def _keep(self, entry: Entry) -> Entry:
        self.entries.append(entry)
        self._by_name[entry.name] = entry
        return entry

    def _check_name(self, name: str, coming: Container[str] = ()) -> None:
        if (wrong := check_name(name)) is not None:
            raise CompressError(f"name: got {name!a}: {wrong}")
        if name in self._by_name or name in coming:
            raise CompressError(f"name: got {name!r}, expected text that no earlier tensor has")

    def add_coded(self, name: str, archive: Archive, of: str) -> Entry:
        """Append a tensor of another archive without decoding it: nothing more is lost.

        Args:
          name: a new name.
          archive: open for reading.
          of: the tensor's name there.

        Raises:
          CompressError: a duplicate name.
          KeyError: no tensor ``of`` in that archive.
          DamagedError: a payload there has the wrong checksum.
        """
        self._check_name(name)
        entry = archive[archive[of].same_as or of]
        chunks, begin = [], self._at
        try:
            for chunk, (_, payload) in zip(entry.chunks, archive.payloads(entry.name), strict=True):
                chunks.append(Chunk(chunk.rows, self._at, len(payload), chunk.crc32))
                self._write(payload)
        except BaseException:
            self._take_back(begin)
            raise
        return self._keep(replace(entry, name=name, chunks=tuple(chunks)))

    def _take_back(self, begin: int) -> None:
        """What was written from there on belongs to no tensor: the caller may go on with another codec."""
        if self._file is not None and not self._file.closed:
            self._file.seek(begin)
            self._file.truncate()
            self._at = begin

    def add_tied(self, name: str, same_as: str) -> Entry:
        """Add a second name for a tensor: tied weights are stored once."""
        self._check_name(name)
        if (tied := self._by_name.get(same_as)) is None or tied.same_as is not None:
            raise CompressError(
                f"same_as: got {same_as!r}, expected a tensor that was added before under this name"
            )
        return self._keep(Entry(name, tied.format, tied.shape, tied.codec, tied.settings, (), same_as))


@dataclass(frozen=True)
class _Part:
    """Rows of a tensor that become one chunk; ``whole`` is its shape, ``shape`` the one that it is cut along."""

    tensor: Tensor
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    given: dict[str, Any]
    stored: dict[str, Any]
    codec: Codec
    bits: np.ndarray
    start: int
    rows: int
    last: bool
    payload: bytes | None

    def size(self) -> int:
        return self.bits.nbytes

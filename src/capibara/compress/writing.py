"""Write tensors to an archive according to an allocation, and measure the loss."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from capibara.compress.allocation import Allocation
from capibara.compress.codecs.zeros import exact_codec
from capibara.compress.container import Archive, ArchiveWriter
from capibara.compress.container.index import Entry, dump, parse_footer
from capibara.compress.container.writer import Tensor
from capibara.compress.curves import finite_or_zero, squared_error
from capibara.compress.formats import NumberFormat
from capibara.compress.models.source import TensorSource, numbers_of

__all__ = ["add_tensors", "change_metadata", "compare"]

_BLOCK = 1 << 18  # numbers that are compared at a time


def add_tensors(
    archive: ArchiveWriter,
    source: TensorSource,
    tied: Mapping[str, str],
    chosen: Allocation | None,
    progress: Callable[[str, int], None] | None = None,
    *,
    coded: bool = True,
) -> None:
    """Append every tensor of a source.

    Args:
      archive: open for writing.
      source: the tensors.
      tied: names of tensors that share another tensor's data.
      chosen: how to store each; ``None``: all lossless.
      progress: called after each tensor with its original bytes.
      coded: whether to write the payloads of the allocation, if available; only with the source it was computed for.
    """
    points = {} if chosen is None else chosen.points

    def told(entry: Entry) -> None:
        if progress is not None:
            progress(entry.name, entry.original_bytes)

    def tensor(name: str, form: NumberFormat, shape: tuple[int, ...]) -> Tensor:
        bits = numbers_of(source, name)
        if chosen is None:
            return Tensor(name, bits, form, shape, exact_codec(bits, form, shape))
        if (point := points.get(name)) is None:
            return Tensor(name, bits, form, shape)
        payloads = point.payloads if coded else None
        return Tensor(name, bits, form, shape, point.codec, point.settings, payloads)

    # A second name can be entered when the first is written: it ends a run of tensors that are coded side by side.
    for again, run in itertools.groupby(source, lambda one: one[0] in tied):
        if again:
            for name, _, _ in run:
                told(archive.add_tied(name, tied[name]))
        else:
            archive.add_many((tensor(*one) for one in run), told)


def compare(path: Path, source: TensorSource) -> tuple[dict[str, float], float, float]:
    """Decode an archive and compare it with the original tensors.

    Returns:
      The relative error of each floating-point tensor with finite values, and the sum of squared errors and the sum
      of squares of all of them. The error of an equal tensor is 0.

    Raises:
      DamagedError: it cannot be decoded.
    """
    errors: dict[str, float] = {}
    lost, whole = 0.0, 0.0
    with Archive(path) as archive:
        for name, form, _ in source:
            entry, original = archive[name], numbers_of(source, name).reshape(-1)
            if not form.is_float:
                continue
            found = None if entry.codec == "lossless" else archive.read(name).reshape(-1)
            square = error = 0.0
            for first in range(0, len(original), _BLOCK):
                part = np.asarray(original[first : first + _BLOCK])
                with np.errstate(over="ignore"):  # numbers above 1e150 are stored without loss
                    values = finite_or_zero(part, form)
                    square += float(np.dot(values, values))
                if found is not None:
                    error += squared_error(part, found[first : first + _BLOCK], form)
            errors[name] = (error / square) ** 0.5 if square else 0.0
            if entry.same_as is None:
                lost, whole = lost + error, whole + square
    return errors, lost, whole


def change_metadata(path: str | os.PathLike[str], changed: Mapping[str, str]) -> None:
    """Add to the metadata of an archive that is not shared yet: its index is rewritten in place."""
    with Archive(path) as archive:
        entries, metadata, size = list(archive), {**archive.metadata, **changed}, archive.size
    with open(path, "r+b") as file:
        head = file.read(16)
        file.seek(size - 32)
        offset, _, _ = parse_footer(head, file.read(32), size, path)
        file.seek(offset)
        file.write(dump(entries, metadata, offset))
        file.truncate()

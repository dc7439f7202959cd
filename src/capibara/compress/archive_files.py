"""From files to archives and back: a safetensors file, or a model's folder as Hugging Face lays it out."""

from __future__ import annotations

import functools
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from capibara.compress.allocation import choose_steps
from capibara.compress.container import Archive, ArchiveWriter, Entry
from capibara.compress.errors import CompressError
from capibara.compress.safetensors_file import SafetensorsFile, write_safetensors
from capibara.files import replace_file

__all__ = ["Job", "compress_files", "decompress_files", "plan_compress", "plan_decompress"]

SUFFIX = ".capi"
Progress = Callable[[str, int], None]  # a tensor's name, and how many bytes of the original it takes


@dataclass(frozen=True)
class Job:
    """One file to write: ``convert`` an archive or a safetensors file, or copy what is neither."""

    source: Path
    target: Path
    convert: bool
    size: int


def _plan(source: Path, target: Path, suffix: str, new_suffix: str) -> list[Job]:
    if not source.exists():
        raise CompressError(f"{source}: there is no such file or folder")
    if source.is_file():
        if target.is_dir():
            raise CompressError(
                f"{target}: is a folder, but {source} is a file. Remedy: name a file to write."
            )
        if target.exists() and target.samefile(source):
            raise CompressError(f"{target}: is the source itself. Remedy: another file to write.")
        return [Job(source, target, True, source.stat().st_size)]
    if target.exists() and not target.is_dir():
        raise CompressError(
            f"{target}: is a file, but {source} is a folder. Remedy: name a folder to write to."
        )
    if source.resolve() == target.resolve() or source.resolve() in target.resolve().parents:
        raise CompressError(f"{target}: lies within {source}. Remedy: another folder.")
    jobs = []
    for path in sorted(source.rglob("*")):
        if path.is_symlink() and not path.is_file():
            raise CompressError(
                f"{path}: a link to a folder, or to nothing. Remedy: copy what it should lead to."
            )
        if path.is_file():
            convert = path.name.endswith(suffix)
            where = target / path.relative_to(source)
            jobs.append(
                Job(path, where.with_name(where.name.removesuffix(suffix) + new_suffix) if convert else where,
                    convert, path.stat().st_size)
            )  # fmt: skip
    if not any(job.convert for job in jobs):
        raise CompressError(f"{source}: no *{suffix} file in this folder")
    taken = {job.source.resolve() for job in jobs}
    for job in jobs:
        if (where := job.target.resolve()) in taken:
            raise CompressError(
                f"{job.target}: {job.source} would overwrite another file. Remedy: rename one of them."
            )
        taken.add(where)
    return jobs


def plan_compress(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[Job]:
    """What compressing a file or a folder will write; other files of a folder (configuration, tokenizer) are copied.

    Raises:
      CompressError: nothing to compress there, or a target that cannot be.
    """
    return _plan(Path(source), Path(target), ".safetensors", SUFFIX)


def plan_decompress(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[Job]:
    """What decompressing an archive or a folder of them will write."""
    return _plan(Path(source), Path(target), SUFFIX, ".safetensors")


def _jobs(jobs: list[Job]) -> Iterator[Job]:
    for job in jobs:
        job.target.parent.mkdir(parents=True, exist_ok=True)
        if job.convert:
            yield job
        else:
            with open(job.source, "rb") as source:
                replace_file(job.target, functools.partial(shutil.copyfileobj, source))


def _twins(source: SafetensorsFile) -> dict[str, str]:
    """Names of tensors whose bytes an earlier one has, and that one's name."""
    twins: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, form, shape in source:
        bits = source.read(name)
        if bits.size >= 1024:
            first = seen.setdefault((form.name, shape, zlib.crc32(bits.data)), name)
            if first != name and np.array_equal(source.read(first), bits):
                twins[name] = first
    return twins


def compress_files(
    jobs: list[Job], *, ratio: float | None = None, progress: Progress | None = None
) -> list[list[Entry]]:
    """Write the archives; returns the entries of each.

    Tensors of the same bytes under two names are stored once.

    Args:
      jobs: of :func:`plan_compress`.
      ratio: how many times smaller than its source each archive is to be; without one nothing is lost.
      progress: called after each tensor.

    Raises:
      CompressError: ``ratio`` is not a number above 1, or more than what these tensors can be shrunk by.
      ArchiveError: a source is no safetensors file, or a damaged one.
      OSError: reading or writing failed; files that were there stand.
    """
    written = []
    for job in _jobs(jobs):
        with SafetensorsFile(job.source) as source, ArchiveWriter(job.target, source.metadata) as archive:
            twins = _twins(source)
            steps = {} if ratio is None else choose_steps(source, ratio, twins)
            for name, form, shape in source:
                bits = source.read(name)
                if name in twins:
                    archive.add_twin(name, twins[name])
                elif name in steps:
                    archive.add(name, bits, form, shape, codec="uniform", settings={"step": steps[name]})
                else:
                    archive.add(name, bits, form, shape)
                if progress is not None:
                    progress(name, bits.nbytes)
            written.append(archive.entries)
    return written


def decompress_files(jobs: list[Job], *, progress: Progress | None = None) -> None:
    """Write safetensors files from archives.

    Raises:
      ArchiveError: a source is no archive, or a damaged one; nothing of it is written then.
      OSError: reading or writing failed; files that were there stand.
    """
    for job in _jobs(jobs):
        with Archive(job.source) as archive:

            def read(name: str, archive: Archive = archive):
                bits = archive.read(name)
                if progress is not None:
                    progress(name, bits.nbytes)
                return bits

            tensors = {e.name: (e.format, e.shape) for e in archive}
            write_safetensors(job.target, tensors, read, archive.metadata)

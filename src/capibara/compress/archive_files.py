"""From files to archives and back: a safetensors file, or a Hugging Face model folder."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from capibara import __version__
from capibara.compress.allocation import Allocation, allocate, check_ratio, everywhere, survey
from capibara.compress.analysis import Compressibility, analyse
from capibara.compress.codecs.protocol import CODECS
from capibara.compress.container import Archive, ArchiveWriter, Entry
from capibara.compress.container.index import SUFFIX
from capibara.compress.errors import CompressError
from capibara.compress.folders import files_in
from capibara.compress.formats import NumberFormat
from capibara.compress.models.source import find_tied
from capibara.compress.original_header import check_header, with_header, without_header
from capibara.compress.output_folder import OutputFolder
from capibara.compress.profile import EXACT
from capibara.compress.safetensors_file import (
    SafetensorsFile,
    parse_header,
    write_safetensors,
    write_with_header,
)
from capibara.compress.sensitivity import by_scale
from capibara.compress.system.engines import strategy_engine
from capibara.compress.writing import add_tensors, compare
from capibara.errors import did_you_mean
from capibara.files import replace_file

__all__ = [
    "Job",
    "Written",
    "compress_files",
    "decompress_files",
    "original_bytes",
    "plan_compress",
    "plan_decompress",
]

Progress = Callable[[str, int], None]  # a tensor's name, and how many bytes of the original it takes


@dataclass(frozen=True)
class Job:
    """One file to write: ``convert`` an archive or a safetensors file, or copy any other file.

    ``root`` is the folder to which the file belongs, if any.
    """

    source: Path
    target: Path
    convert: bool
    size: int
    root: Path | None = None


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
    if (target.exists() or target.is_symlink()) and not target.is_dir():
        what = "a file" if target.exists() else "a link to nothing"
        raise CompressError(
            f"{target}: is {what}, but {source} is a folder. Remedy: name a folder to write to."
        )
    if source.resolve() == target.resolve() or source.resolve() in target.resolve().parents:
        raise CompressError(f"{target}: is inside {source}. Remedy: choose another folder.")
    jobs = []
    for path in files_in(source, suffix):
        convert = path.name.endswith(suffix)
        where = target / path.relative_to(source)
        jobs.append(
            Job(path, where.with_name(where.name.removesuffix(suffix) + new_suffix) if convert else where,
                convert, path.stat().st_size, target)
        )  # fmt: skip
    taken = {job.source.resolve() for job in jobs}
    for job in jobs:
        if (where := job.target.resolve()) in taken:
            raise CompressError(
                f"{job.target}: {job.source} would overwrite another file. Remedy: rename one of them."
            )
        taken.add(where)
        folders = itertools.takewhile(lambda folder: folder != target, job.target.parents)
        wrong = [job.target] if job.target.is_dir() else [f for f in folders if f.exists() and not f.is_dir()]
        if wrong:
            raise CompressError(
                f"{wrong[0]}: is {'a folder' if wrong[0].is_dir() else 'a file'}, and {job.target} cannot be written. "
                "Remedy: remove it, or name another folder to write to."
            )
    return jobs


def plan_compress(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[Job]:
    """What compressing a file or a folder will write; other files of a folder (configuration, tokenizer) are copied.

    Raises:
      CompressError: nothing to compress, or an invalid target.
    """
    return _plan(Path(source), Path(target), ".safetensors", SUFFIX)


def plan_decompress(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> list[Job]:
    """What decompressing an archive or a folder of them will write."""
    return _plan(Path(source), Path(target), SUFFIX, ".safetensors")


def _folder(jobs: list[Job], resume: bool, **settings: object) -> OutputFolder:
    """Where the files go; what is resumed is of the same sources and settings."""
    roots = {job.root for job in jobs}
    root = roots.pop() if len(roots) == 1 else None
    if resume and root is None:
        raise CompressError(
            "resume: applies to folders only; a single file is written at once. Remedy: leave it out."
        )
    sources = [[str(job.source.absolute()), job.size, job.source.stat().st_mtime_ns] for job in jobs]
    made_from = {"version": __version__, **settings, "sources": sources if resume else []}
    return OutputFolder(root, made_from, resume=resume)


def _already(entries: Iterable[Entry], progress: Progress | None) -> None:
    """Tell of tensors that an earlier run has written."""
    if progress is not None:
        for entry in entries:
            progress(entry.name, entry.original_bytes)


def _copy_others(jobs: list[Job], folder: OutputFolder) -> list[Job]:
    """Copy what is not converted; the other jobs."""
    for job in jobs:
        if not job.convert:
            place, _ = folder.place(job.target)
            with open(job.source, "rb") as source:
                replace_file(place, functools.partial(shutil.copyfileobj, source), clean=True)
    return [job for job in jobs if job.convert]


class _Together:
    """Several files as one source of tensors: their names begin with the file's number."""

    def __init__(self, sources: list[SafetensorsFile]) -> None:
        self._sources = sources

    def __iter__(self) -> Iterator[tuple[str, NumberFormat, tuple[int, ...]]]:
        for i, source in enumerate(self._sources):
            for name, form, shape in source:
                yield f"{i}:{name}", form, shape

    def read(self, name: str) -> np.ndarray:
        index, _, name = name.partition(":")
        return self._sources[int(index)].read(name)


def _allocate(
    sources: list[SafetensorsFile],
    tied: list[dict[str, str]],
    ratio: float,
    strategy: str,
    progress: Progress | None,
    analysed: Callable[[Compressibility], None] | None,
) -> list[Allocation]:
    """What becomes of each file's tensors, with one budget for all files."""
    together = {f"{i}:{a}": f"{i}:{b}" for i, found in enumerate(tied) for a, b in found.items()}
    metadata = sum(len(json.dumps(s.metadata)) + 70 for s in sources)
    found = survey(
        _Together(sources),
        codecs=None if strategy in ("auto", "jax") else [strategy],
        tied=together,
        metadata=metadata,
        progress=None if progress is None else lambda name, size: progress(name.partition(":")[2], size),
    )
    weights = by_scale(found)
    if analysed is not None:
        analysed(analyse(found, weights))
    chosen = allocate(found, ratio, weights=weights)
    return [
        Allocation({n.partition(":")[2]: p for n, p in chosen.points.items() if n.startswith(f"{i}:")},
                   chosen.size, chosen.error)
        for i in range(len(sources))
    ]  # fmt: skip


@dataclass(frozen=True)
class Written:
    """An archive that was written.

    Attributes:
      path: the file.
      entries: its tensors.
      errors: the relative error of each floating-point tensor, measured by decoding; 0 for lossless ones.
      error: of all of them together, √(Σ(w′ − w)² / Σw²).
    """

    path: Path
    entries: list[Entry]
    errors: dict[str, float]
    error: float


def compress_files(
    jobs: list[Job],
    *,
    ratio: float | None = None,
    strategy: str = "auto",
    progress: Progress | None = None,
    analysed: Callable[[Compressibility], None] | None = None,
    resume: bool = False,
) -> list[Written]:
    """Write the archives and, with a ratio, decode them to measure the error.

    Tensors with equal bytes under two names are stored once.

    Args:
      jobs: of :func:`plan_compress`.
      ratio: total source size over total archive size, met within 2 % (codecs of fixed width alone may give smaller
        files); without a ratio compression is lossless, unless the strategy is a codec that needs none, such as
        ``"int8"``.
      strategy: ``"auto"``; ``"jax"``, the same computed by JAX; or the name of the only codec to use besides
        ``lossless``.
      progress: called after each tensor with its original bytes; with a ratio twice, when it is measured and when it
        is written.
      analysed: called with the expected error at other ratios; only with a ratio.
      resume: for a folder: keep finished files if interrupted, and continue from those that an earlier run kept.

    Raises:
      CompressError: ``ratio`` is not a number above 1, or cannot be met with these tensors; an unknown strategy, or
        one that has no effect without a ratio.
      ArchiveError: a source is not a safetensors file, or a damaged one.
      OSError: reading or writing failed; existing files are unchanged.
    """
    if strategy == "tropical":
        raise CompressError(
            "strategy: 'tropical' merges neurons of a network, and a file does not say how its tensors are connected. "
            "Remedy: ModelCompressionAPI, with the model."
        )
    known = ["auto", "jax", *CODECS]
    if strategy not in known:
        raise CompressError(
            f"strategy: got {strategy!r}, expected one of {', '.join(known)}.{did_you_mean(str(strategy), known)}"
        )
    if ratio is not None:
        check_ratio(ratio)
        if strategy in EXACT:
            raise CompressError(f"ratio: got {ratio}, but lossless compression has no target ratio")
    folder = _folder(jobs, resume, ratio=ratio, strategy=strategy)
    with contextlib.ExitStack() as stack, strategy_engine(strategy), folder:
        work = _copy_others(jobs, folder)
        sources = [stack.enter_context(SafetensorsFile(job.source)) for job in work]
        tied = [find_tied(source) for source in sources]
        chosen: list[Allocation | None] = [None] * len(work)
        if ratio is not None:
            chosen[:] = _allocate(sources, tied, ratio, strategy, progress, analysed)
        elif strategy not in ("auto", "jax", "lossless"):
            chosen[:] = [everywhere(source, strategy) for source in sources]
        written = []
        for job, source, same, how in zip(work, sources, tied, chosen, strict=True):
            place, finished = folder.place(job.target)
            if finished:
                with Archive(place) as archive:
                    entries = list(archive)
                _already(entries, progress)
            else:
                with ArchiveWriter(place, with_header(source.metadata, source.header)) as archive:
                    add_tensors(archive, source, same, how, progress)
                    entries = archive.entries
                folder.finish(job.target)
            if how is None:
                errors, lost, whole = {n: 0.0 for n, form, _ in source if form.is_float}, 0.0, 0.0
            else:
                errors, lost, whole = compare(place, source)
            written.append(Written(job.target, entries, errors, (lost / whole) ** 0.5 if whole else 0.0))
    return written


def original_bytes(jobs: list[Job]) -> int:
    """Bytes of all tensors that decompressing writes: what ``progress`` adds up to.

    Raises:
      ArchiveError, OSError: as :func:`decompress_files`.
    """
    total = 0
    for job in jobs:
        if job.convert:
            with Archive(job.source) as archive:
                total += sum(entry.original_bytes for entry in archive)
    return total


def decompress_files(jobs: list[Job], *, progress: Progress | None = None, resume: bool = False) -> None:
    """Write safetensors files from archives; losslessly compressed files are restored byte by byte.

    Args:
      jobs: of :func:`plan_decompress`.
      progress: called after each tensor, with its bytes.
      resume: for a folder: keep finished files if interrupted, and continue from those that an earlier run kept.

    Raises:
      ArchiveError: a source is not an archive, or is damaged; nothing is written then, not even part of a folder.
      OSError: reading or writing failed; existing files are unchanged.
    """
    with _folder(jobs, resume) as folder:
        for job in _copy_others(jobs, folder):
            place, finished = folder.place(job.target)
            with Archive(job.source) as archive:
                if finished:
                    _already(archive, progress)
                    continue
                _write_original(archive, place, progress)
            folder.finish(job.target)


def _write_original(archive: Archive, place: Path, progress: Progress | None) -> None:
    metadata, text = without_header(archive.metadata, archive.path)
    tensors = {e.name: (e.format, e.shape) for e in archive}
    if text is not None:
        check_header(text, tensors, archive.path)
        order = list(parse_header(text, sum(e.original_bytes for e in archive), archive.path)[1])
    else:
        order = list(tensors)
    coming = archive.read_many(order)

    def read(name: str) -> np.ndarray:
        got, bits = next(coming)
        assert got == name  # both go through the archive in the same order
        if progress is not None:
            progress(name, bits.nbytes)
        return bits

    if text is None:
        write_safetensors(place, tensors, read, metadata)
    else:
        write_with_header(place, text, {name: tensors[name][0] for name in order}, read)

"""The rows as compiled programs: memory and scheduled HLO, kept on disk."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import capibara
from benchmarks._maxtext.rows import PublishedRow
from capibara.plan.compiler import CompiledProgram, Job, ProgramCache, compile_programs
from capibara.plan.compiler.environment import Compiler, find_compiler
from capibara.plan.slices import parse_slice

__all__ = ["compile_rows", "is_kept", "job_of"]

_CODE = (Path(__file__).with_name("decoder.py"), Path(capibara.__file__).parent / "ops" / "attention")


class _Programs(ProgramCache):
    """Programs by what they are made of: the decoder's code, the attention kernels' and the compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = self.folder.with_name("calibration")

    def key(self, job: Job, compiler: Compiler, *, schedule: bool = False) -> str:
        if schedule:
            return super().key(job, compiler, schedule=True)
        digest = hashlib.sha256(json.dumps(job.to_json(), sort_keys=True).encode())
        for version in (compiler.version, *(importlib.metadata.version(name) for name in ("jax", "jaxlib"))):
            digest.update(version.encode() + b"\0")
        for root in _CODE:
            for path in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
                digest.update(f"{path.name} {ast.dump(ast.parse(path.read_bytes()))}".encode())
        return digest.hexdigest()


def job_of(row: PublishedRow) -> Job:
    """What the compiler is asked for a row."""
    return Job(
        builder="benchmarks._maxtext.decoder:build",
        params=dict(row.model),
        slice=parse_slice(row.topology),
        mesh=row.mesh,
        compiler_options=dict(row.flags),
    )


def compile_rows(
    rows: Iterable[PublishedRow], *, workers: int | None = 1
) -> Iterator[tuple[PublishedRow, CompiledProgram]]:
    """Each row with its program, as it is done.

    Raises:
      CompilerMissingError, CompilationError: as :func:`capibara.plan.compiler.compile_programs`.
    """
    rows = list(rows)
    for number, program in compile_programs(
        [job_of(row) for row in rows], cache=_Programs(), workers=workers
    ):
        yield rows[number], program


def is_kept(row: PublishedRow) -> bool:
    """Whether a row's program is on disk.

    Raises:
      CompilerMissingError: there is no TPU compiler here, whose version the programs are kept by.
    """
    cache = _Programs()
    return cache.get(cache.key(job_of(row), find_compiler())) is not None

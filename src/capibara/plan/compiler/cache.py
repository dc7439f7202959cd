"""Compiled results on disk, keyed by everything that they depend on."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import capibara
from capibara.files import digest_of_files, replace_file
from capibara.plan.compiler.environment import Compiler
from capibara.plan.compiler.job import CompiledProgram, Job
from capibara.plan.errors import PlanError

__all__ = ["ProgramCache"]

_ROOT = Path(capibara.__file__).parent
# What a lowered program can depend on; planning's own reading of programs is not among it.
_ROOMS = (
    "config",
    "compose",
    "core",
    "ops",
    "vq",
    "sharding",
    "train",
    "serve",
    "plan/workloads",
    "plan/compiler",
    "plan/gpus",
)
_FILES = (
    "hardware/meshes.py",
    "plan/slices.py",
    "plan/program/digest.py",
    "plan/program/frames.py",
    "plan/program/parts.py",
)
_MOST_BYTES = 4 << 30
_MOST_JSON = 64 << 20
# What this module, the pool and step_work write. A folder may hold files of somebody else.
_OURS = re.compile(r"[0-9a-f]{64}\.(json|hlo\.gz|exported)|\.[0-9a-f]{64}\.[\w.]*\.tmp")


class ProgramCache:
    """A folder of results.

    Args:
      folder: by default ``capibara/programs`` in the user's cache folder (``XDG_CACHE_HOME``, ``~/.cache``).
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = base / "capibara" / "programs" if folder is None else Path(folder)

    def key(self, job: Job, compiler: Compiler, *, schedule: bool = False) -> str:
        """A hash of the job, of the versions that compile it and of the code that builds it.

        Args:
          schedule: that of the program without machine code.
        """
        facts = {
            **({"stage": "schedule"} if schedule else {}),
            "job": job.to_json(),
            compiler.name: compiler.version,
            "jax": importlib.metadata.version("jax"),
            "jaxlib": importlib.metadata.version("jaxlib"),
            "optax": _version("optax"),
            "settings": compiler.settings(),
            "code": _code_hash(),
            "builder": _file_hash(job.builder.partition(":")[0]),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()

    def paths(self, key: str) -> tuple[Path, Path]:
        """The result's file and the program text's."""
        return self.folder / f"{key}.json", self.folder / f"{key}.hlo.gz"

    def get(self, key: str) -> CompiledProgram | None:
        """The result, or None if there is no usable one."""
        path, text = self.paths(key)
        try:
            if path.stat().st_size > _MOST_JSON:
                return None
            data = json.loads(path.read_bytes())
            # Most damage leaves other figures that look as good.
            if not isinstance(data, dict) or data.pop("sha256", None) != _sum(data):
                return None
            found = CompiledProgram.from_json(data, text, cached=True)
            if found.status == "ok" and data.get("text_sha256") != _digest(text):
                return None
        except (OSError, ValueError, RecursionError, PlanError):
            return None
        for each in (path, text):
            with contextlib.suppress(OSError):
                os.utime(each)
        return found

    def put(self, key: str, result: CompiledProgram) -> None:
        """Store a result whose text, if any, is already in the cache's file."""
        path, text = self.paths(key)
        self.folder.mkdir(parents=True, exist_ok=True)
        digest = {"text_sha256": _digest(text)} if result.status == "ok" else {}
        data = {**result.to_json(), **digest}
        replace_file(path, json.dumps({**data, "sha256": _sum(data)}))
        self._prune()

    def _prune(self) -> None:
        """Drop the results that nobody asked for longest, where all take more than the folder may."""
        sizes: list[tuple[float, int, Path]] = []
        for path in self.folder.iterdir():
            if not _OURS.fullmatch(path.name):
                continue
            with contextlib.suppress(OSError):
                stat = path.stat()
                sizes.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in sizes)
        for changed, size, path in sorted(sizes):
            # Files just written belong to compilations that are under way.
            if total <= _MOST_BYTES or time.time() - changed < 3600:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size


def _sum(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _code_hash() -> str:
    return digest_of_files(_ROOT, (*_ROOMS, *_FILES), suffixes=(".py", ".txtpb"))


def _file_hash(module: str) -> str:
    """Of a builder's own file, which need not be Capibara's."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        spec: Any = importlib.util.find_spec(module)
        if spec is not None and spec.origin and Path(spec.origin).is_file():
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    return ""

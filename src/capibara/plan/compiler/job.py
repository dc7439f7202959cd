"""A program to compile, and the compiler's results."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from capibara.plan.errors import PlanError
from capibara.plan.targets import Target, target_from_json

__all__ = ["CompiledProgram", "Job", "Memory"]

MAX_TEXT = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Job:
    """A program for a worker to compile.

    Attributes:
      builder: ``"module:function"``; called as ``function(mesh, **params)``, it returns a
        :class:`~capibara.plan.workloads.Workload` on a mesh of abstract devices.
      params: its further arguments; JSON values.
      slice: the target.
      mesh: mesh axes and sizes.
      compiler_options: flags of the compiler for this program. It may use the memory of a device of the slice, unless
        they say that it is less.
    """

    builder: str
    params: Mapping[str, Any]
    slice: Target
    mesh: tuple[tuple[str, int], ...]
    compiler_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, str]:
        """``compiler_options``, and the memory of a device, of which some compilers assume more than the catalogue."""
        limit = self.slice.limit_flag(self.slice.usable_hbm_bytes)
        return dict([] if limit is None else [limit]) | dict(self.compiler_options)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "builder": self.builder,
            "params": dict(self.params),
            "slice": self.slice.to_json(),
            "mesh": [list(pair) for pair in self.mesh],
            "compiler_options": self.options,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Job:
        """Read the output of :meth:`to_json`."""
        return cls(
            builder=data["builder"],
            params=data["params"],
            slice=target_from_json(data["slice"]),
            mesh=tuple((axis, size) for axis, size in data["mesh"]),
            compiler_options=data["compiler_options"],
        )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of HBM per device, as the compiler lays them out (including padding to tiles).

    Attributes:
      arguments: all inputs. outputs: all results. aliased: outputs that reuse the memory of arguments.
      temporaries: buffers that exist only within the step. host: bytes in the host's memory.
      kinds: arguments by kind (``parameters``, ``optimizer`` …), without padding.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    host: int = 0
    kinds: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Memory that one device needs: arguments + outputs − aliased + temporaries."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def padding(self) -> int:
        """Padding of the arguments to tiles."""
        return max(0, self.arguments - sum(self.kinds.values())) if self.kinds else 0


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """The result of a :class:`Job`.

    Attributes:
      status: ``"ok"``, ``"oom"`` (it does not fit) or ``"error"``.
      memory: None unless it compiled.
      needed_bytes: if it does not fit: the memory that it would need, by the compiler (an early estimate).
      message: if it did not compile: the compiler's message, shortened.
      coordinates: of every device, in the order of the mesh.
      program_hash: SHA-256 of the program before compilation.
      buffers: the largest at the memory peak, as :func:`read_buffers` gives them.
      lines: texts of the source lines that it comes from, by place (``"model.py:31"``).
      versions: of jax, jaxlib and libtpu.
      lower_seconds, compile_seconds: times of the first compilation.
      text_path: the compiled program's text, compressed; None unless it compiled.
      cached: whether it was found in the cache.
      complete: whether machine code was made for it. If not, its text is without the cycles of its operations.
    """

    status: Literal["ok", "oom", "error"]
    memory: Memory | None = None
    needed_bytes: int | None = None
    message: str = ""
    coordinates: tuple[tuple[int, ...], ...] = ()
    program_hash: str = ""
    buffers: tuple[Mapping[str, Any], ...] = ()
    lines: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    text_path: Path | None = None
    cached: bool = False
    complete: bool = True

    @property
    def fits(self) -> bool:
        """Whether it compiled."""
        return self.status == "ok"

    @cached_property
    def text(self) -> str:
        """The compiled program: the scheduled HLO of one device.

        Raises:
          PlanError: it did not compile, or its text is no longer in the cache.
        """
        if self.text_path is None:
            raise PlanError(f"the program did not compile ({self.status}), so it has no text: {self.message}")
        try:
            with gzip.open(self.text_path, "rb") as stream:
                data = stream.read(MAX_TEXT + 1)
            if not data:  # an empty file is an empty archive to gzip
                raise EOFError("it is empty")
            if len(data) > MAX_TEXT:
                raise PlanError(f"{self.text_path}: the text of the program is longer than {MAX_TEXT} bytes")
            return data.decode()
        except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
            raise PlanError(f"{self.text_path}: the text of the program cannot be read: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Plain data, without the text."""
        data = {key: getattr(self, key) for key in ("status", "needed_bytes", "message", "program_hash")}
        data |= {"lower_seconds": self.lower_seconds, "compile_seconds": self.compile_seconds}
        data |= {"versions": dict(self.versions), "buffers": [dict(each) for each in self.buffers]}
        data |= {"lines": dict(self.lines), "complete": self.complete}
        data["coordinates"] = [list(each) for each in self.coordinates]
        data["memory"] = (
            None if self.memory is None else {**asdict(self.memory), "kinds": dict(self.memory.kinds)}
        )
        return data

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], text_path: Path | None = None, cached: bool = False
    ) -> CompiledProgram:
        """Read the output of :meth:`to_json`.

        Raises:
          PlanError: the data is invalid.
        """
        try:
            rest = {
                k: data[k]
                for k in (
                    "status",
                    "needed_bytes",
                    "message",
                    "program_hash",
                    "versions",
                    "lower_seconds",
                    "compile_seconds",
                )
            }
            if rest["status"] not in ("ok", "oom", "error"):
                raise ValueError(f"status {rest['status']!r}")
            return cls(
                **rest,
                memory=None if data["memory"] is None else _memory(data["memory"]),
                coordinates=tuple(tuple(int(n) for n in each) for each in data["coordinates"]),
                buffers=tuple(map(_buffer, data["buffers"])),
                lines={str(place): str(line) for place, line in data.get("lines", {}).items()},
                text_path=text_path if rest["status"] == "ok" else None,
                cached=cached,
                complete=bool(data.get("complete", True)),
            )
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise PlanError(f"this is not a result of a compilation: {error!r}") from None

    def __str__(self) -> str:
        if self.memory is not None:
            return f"compiled: {self.memory.total / 2**30:.2f} GiB a device, {self.compile_seconds:.1f} s"
        return f"{self.status}: {json.dumps(self.message[:200])}"


def _buffer(data: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: data[name] for name in ("bytes", "padding", "shape", "op_name", "kind", "place")}
    for name, value in found.items():
        if not isinstance(value, int if name in ("bytes", "padding") else str) or isinstance(value, bool):
            raise ValueError(f"{name} of a buffer is {value!r:.100}")
    return found


def _memory(data: Mapping[str, Any]) -> Memory:
    own = [(name, size) for name, size in data.items() if name != "kinds"]
    for name, size in (*own, *data["kinds"].items()):
        if isinstance(size, bool) or not isinstance(size, int) or abs(size) >= 1 << 60:
            raise ValueError(f"{name} is {size!r:.100}, expected bytes")
    return Memory(**data)

"""The compiled programs that ran: what each of their operations is, does and comes from.

Traces name operations (``fusion.3``) and the program by its number; the program's own text says the rest. Both carry
the number that XLA gave the module, so that two programs of one name are not confused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from capibara.compilation.counting import COMPILED
from capibara.jax_versions import loaded_programs
from capibara.plan.errors import PlanError
from capibara.plan.program import OperationFacts, read_operations

__all__ = ["HeldPrograms", "KnownProgram", "known_program", "module_number"]

_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)", re.MULTILINE)
_FILE = re.compile(r'^(\d+) "((?:[^"\\]|\\.)*)"', re.MULTILINE)
_PLACED = re.compile(r"^\s+(?:ROOT )?%?([^\s%=(]+) = .*?\bstack_frame_id=(\d+)", re.MULTILINE)
_OLD_PLACED = re.compile(
    r'^\s+(?:ROOT )?%?([^\s%=(]+) = .*?source_file="([^"]*)".*?source_line=(\d+)', re.MULTILINE
)


@dataclass(frozen=True)
class KnownProgram:
    """A program: its text, what can run in it by name, the source lines of these, and temporary bytes of one run."""

    name: str
    text: str
    operations: dict[str, OperationFacts]
    sources: dict[str, str]
    temporary_bytes: int | None


class HeldPrograms:
    """Keeps the programs that are compiled while it is open, so that those of functions that are gone can be read."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}

    def __enter__(self) -> HeldPrograms:
        import jax.monitoring

        self._hold()
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        return self

    def __exit__(self, *_: object) -> None:
        import jax.monitoring

        jax.monitoring.unregister_event_duration_listener(self._compiled)

    def _compiled(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED:
            self._hold()

    def _hold(self) -> None:
        for program in loaded_programs():
            self._held.setdefault(id(program), program)

    def by_number(self) -> dict[int, list[tuple[Any, int | None]]]:
        """The programs' modules (with ``to_string()``), and their temporary bytes, by XLA's number of the module.

        A program that was read from a file has the number of the process that compiled it, which another may have here.
        """
        self._hold()
        found: dict[int, list[tuple[Any, int | None]]] = {}
        for program in self._held.values():
            for module in program.hlo_modules():
                number = module_number(module.as_serialized_hlo_module_proto())
                try:
                    temporary: int | None = int(program.get_compiled_memory_stats().temp_size_in_bytes)
                except (RuntimeError, AttributeError):  # a backend without these figures
                    temporary = None
                found.setdefault(number, []).append((module, temporary))
        self._held.clear()
        return found


def known_program(text: str, temporary_bytes: int | None = None) -> KnownProgram:
    """Read a compiled program's text.

    Raises:
      PlanError: it is not one, or unreasonably large.
    """
    name = text.split(",", 1)[0].removeprefix("HloModule ").strip()
    found = {one.name: one for one in read_operations(text)}
    return KnownProgram(name, text, found, _sources(text), temporary_bytes)


def _sources(text: str) -> dict[str, str]:
    """``file.py:line`` of each instruction: where in the user's program it was traced."""
    head = text.split("\n%", 1)[0]
    head = head.split("\nENTRY", 1)[0]
    parts = {}
    for title in ("FileNames", "FileLocations", "StackFrames"):
        _, _, after = head.partition(f"\n{title}\n")
        parts[title] = after.split("\n\n", 1)[0]
    files = dict(_FILE.findall(parts["FileNames"]))
    lines = {
        number: f"{files.get(file, '')}:{line}"
        for number, file, line in _LOCATION.findall(parts["FileLocations"])
    }
    frames = {number: lines.get(place, "") for number, place in _FRAME.findall(parts["StackFrames"])}
    found = {name: f"{file}:{line}" for name, file, line in _OLD_PLACED.findall(text)}
    found.update({name: frames.get(frame, "") for name, frame in _PLACED.findall(text)})
    return found


def module_number(proto: bytes) -> int:
    """XLA's number of a module: field 5 of ``HloModuleProto`` (0 where it is left out), by which traces name it."""
    for field, value in _fields(proto):
        if field == 5 and isinstance(value, int):
            return value
    return 0


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Fields of a serialized protobuf message; only those of integers have their value."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = _varint(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise PlanError(f"a serialized program has a field of kind {kind}, which protobuf does not have")
        at += length
        yield key >> 3, None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise PlanError("a serialized program ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at

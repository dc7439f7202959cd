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
from capibara.plan.program import ProgramFacts, read_program

__all__ = ["HeldPrograms", "Known", "KnownProgram", "known_program", "module_number"]

_LOCATION = re.compile(r"^(\d+) \{file_name_id=(\d+) function_name_id=\d+ line=(\d+)", re.MULTILINE)
_FRAME = re.compile(r"^(\d+) \{file_location_id=(\d+)", re.MULTILINE)
_FILE = re.compile(r'^(\d+) "((?:[^"\\]|\\.)*)"', re.MULTILINE)
_PLACED = re.compile(r"^\s+(?:ROOT )?%?([^\s%=(]+) = .*?\bstack_frame_id=(\d+)", re.MULTILINE)
# A TPU calls Python by exchanging arrays with the host, on CPUs and GPUs it is a custom call.
_HOST_TRANSFER = re.compile(
    r"^\s+(?:ROOT )?%?([^\s%=(]+) = [^=\n]*? (send|recv|send-done|recv-done)\(.*?\bis_host_transfer=true(.*)$",
    re.MULTILINE,
)
_OP_NAME = re.compile(r'\bop_name="([^"]*)"')
_OLD_PLACED = re.compile(
    r'^\s+(?:ROOT )?%?([^\s%=(]+) = .*?source_file="([^"]*)".*?source_line=(\d+)', re.MULTILINE
)


@dataclass(frozen=True)
class Known:
    """One operation of a program: see :class:`~capibara.observe.profile.result.Operation`.

    ``flops`` and ``bytes`` are of one run, ``trips`` its runs in one execution of the program.
    """

    kind: str
    opcode: str
    path: str
    source: str
    dtype: str
    trips: int
    flops: int
    bytes: int


@dataclass(frozen=True)
class KnownProgram:
    """A program: its text, its operations by name, and what the text did not say."""

    name: str
    text: str
    operations: dict[str, Known]
    temporary_bytes: int | None
    unknown: tuple[str, ...]


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
    facts: ProgramFacts = read_program(text)
    sources = _sources(text)
    found: dict[str, Known] = {}
    for piece in facts.pieces:
        kind = "copy" if piece.opcode.startswith("copy") else "compute"
        found[piece.name] = Known(
            kind,
            piece.opcode,
            piece.op_name,
            sources.get(piece.name, ""),
            piece.dtype,
            piece.trips,
            piece.flops,
            piece.hbm_bytes,
        )
    for one in facts.collectives:
        found[one.name] = Known(
            "collective", one.kind, one.op_name, sources.get(one.name, ""), "", one.trips, 0, one.bytes
        )
    for one in facts.kernels:
        found[one.name] = Known(
            "kernel",
            one.target,
            one.op_name,
            sources.get(one.name, ""),
            "",
            one.trips,
            one.flops or 0,
            one.bytes,
        )
    for name, opcode, rest in _HOST_TRANSFER.findall(text):
        path = _OP_NAME.search(rest)
        # No trips: it is not known whether each of them is in a trace, and what is not there must not refuse it.
        found[name] = Known("kernel", opcode, path[1] if path else "", sources.get(name, ""), "", 0, 0, 0)
    return KnownProgram(facts.name, text, found, temporary_bytes, facts.unknown)


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

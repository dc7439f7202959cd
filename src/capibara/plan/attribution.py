"""Where the predicted time and the memory of a step go: by source line, by part of the model, and by pass.

The compiled program's operations have the places in the source that they were traced at. Where the compiler made one
operation of several lines its time is divided between them by their work: FLOPs of products, or else the elements that
each computes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from capibara.plan.compiler import CompiledProgram
from capibara.plan.program import Frames, ProgramFacts, read_places
from capibara.plan.program.parts import PASSES, part_of, pass_of
from capibara.plan.program.places import Parts
from capibara.plan.targets import Target
from capibara.plan.time import time_of_each

__all__ = ["Attribution", "Held", "Spent", "attribute"]

_MOST_LINES = 200


@dataclass(frozen=True)
class Spent:
    """What a line, a part or a pass has of a step's predicted seconds.

    Attributes:
      name: ``"model.py:31"``, ``"blocks/mlp_gate_product"``, ``"backward"`` …; in brackets, an operation of the
        compiler's own.
      compute: operations with matrix products in them, and kernels. other: all other work on the device.
      communication: waiting for other devices.
      text: of a line, as it stands in the source, if it could be read.
    """

    name: str
    compute: float = 0.0
    other: float = 0.0
    communication: float = 0.0
    text: str = ""

    @property
    def seconds(self) -> float:
        """In one step."""
        return self.compute + self.other + self.communication


@dataclass(frozen=True)
class Held:
    """Bytes of a device's memory at the step's peak that a part of the model holds: its parameters and optimizer state
    (``kind``), or what it computed (``"temporary"``)."""

    name: str
    kind: str
    bytes: int


@dataclass(frozen=True)
class Attribution:
    """A step by where it comes from.

    Attributes:
      seconds: of the step.
      parts: of the model, the longest first. lines: of the source, likewise. passes: forward, recomputed, backward,
        update.
      memory: the largest buffers at the peak, summed by part and kind, the largest first; empty if the compiler wrote
        no report.
    """

    seconds: float
    parts: tuple[Spent, ...]
    lines: tuple[Spent, ...]
    passes: tuple[Spent, ...]
    memory: tuple[Held, ...] = ()

    def and_waiting(self, name: str, seconds: float) -> Attribution:
        """Of a longer step, which also waits for other devices; ``name``: what for."""
        waiting = Spent(f"[{name}]", communication=seconds)
        tables = {
            key: tuple(sorted((*getattr(self, key), waiting), key=lambda one: -one.seconds))
            for key in ("parts", "lines", "passes")
        }
        return replace(self, seconds=self.seconds + seconds, **tables)

    def to_json(self) -> dict[str, Any]:
        """Plain data; seconds and bytes."""
        return {
            "seconds": self.seconds,
            **{
                name: [{**asdict(one), "seconds": one.seconds} for one in found]
                for name, found in (("parts", self.parts), ("lines", self.lines), ("passes", self.passes))
            },
            "memory": [asdict(one) for one in self.memory],
        }


@dataclass
class _Table:
    rows: defaultdict[str, dict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: {"compute": 0.0, "other": 0.0, "communication": 0.0})
    )

    def spent(self, text_of: Callable[[str], str] = lambda _: "") -> tuple[Spent, ...]:
        found = [Spent(name, **row, text=text_of(name)) for name, row in self.rows.items()]
        return tuple(sorted(found, key=lambda one: -one.seconds))


def attribute(program: CompiledProgram, target: Target, mesh: tuple[tuple[str, int], ...]) -> Attribution:
    """Attribute a compiled step's predicted time and its memory.

    Args:
      program: compiled for ``target``.
      mesh: its mesh axes and sizes.

    Raises:
      PlanError: it did not compile, or its text is no longer in the cache.
    """
    facts, places = read_places(program.text)
    frames = Frames.of(program.text)
    texts = program.lines

    def line_of(file: str, line: int) -> str:
        return texts.get(f"{file}:{line}", "")

    parts, lines, passes = _Table(), _Table(), _Table()
    each = time_of_each(facts, target, mesh, places=program.coordinates)
    for (kind, index), seconds in each.items():
        path, sort, made = _what(facts, kind, index)
        listed = {"piece": places.pieces, "kernel": places.kernels, "collective": places.collectives}[kind][
            index
        ]
        for place, share in _shares(listed):
            spent = seconds * share
            source = frames.source(place)
            part = part_of(path, frames.stack(place), line_of)
            lines.rows[source or f"({made})"][sort] += spent
            parts.rows[part or f"({made})"][sort] += spent
        passes.rows[pass_of(path)][sort] += seconds
    by_pass = {one.name: one for one in passes.spent()}
    return Attribution(
        seconds=sum(each.values()),
        parts=parts.spent(),
        lines=_shortened(lines.spent(lambda source: texts.get(source, ""))),
        passes=tuple(by_pass[name] for name in PASSES if name in by_pass),
        memory=_memory(program.buffers),
    )


def _shortened(lines: tuple[Spent, ...]) -> tuple[Spent, ...]:
    """The first of them, and the others as one."""
    left = lines[_MOST_LINES:]
    if not left:
        return lines
    rest = Spent(
        f"({len(left)} more lines)",
        compute=sum(one.compute for one in left),
        other=sum(one.other for one in left),
        communication=sum(one.communication for one in left),
    )
    return (*lines[:_MOST_LINES], rest)


def _what(facts: ProgramFacts, kind: str, index: int) -> tuple[str, str, str]:
    """Path, sort of work and name of an operation."""
    if kind == "collective":
        collective = facts.collectives[index]
        return collective.op_name, "communication", collective.kind
    if kind == "kernel":
        kernel = facts.kernels[index]
        return kernel.op_name, "compute", kernel.name
    piece = facts.pieces[index]
    return piece.op_name, "compute" if piece.flops else "other", piece.opcode


def _shares(parts: Parts) -> list[tuple[str, float]]:
    whole = sum(work for _, work in parts)
    return [(place, work / whole) for place, work in parts] if whole else [("", 1.0)]


def _memory(buffers: tuple[Mapping[str, Any], ...]) -> tuple[Held, ...]:
    found: defaultdict[tuple[str, str], int] = defaultdict(int)
    for one in buffers:
        name = one["place"] or "/".join(str(one["op_name"]).split("/")[-2:]) or str(one["shape"])
        found[name, one["kind"]] += one["bytes"]
    held = [Held(name, kind, size) for (name, kind), size in found.items()]
    return tuple(sorted(held, key=lambda one: -one.bytes))

"""Walk through a scheduled program: what runs how often, in which order, and what overlaps."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from capibara.plan.errors import PlanError
from capibara.plan.program.facts import Collective, Kernel, OperationFacts, Piece, ProgramFacts
from capibara.plan.program.flops import instruction_flops, operand_shape, tiled_flops
from capibara.plan.program.fused import COLLECTIVES, DONES, STARTS, Fused, FusedComputations
from capibara.plan.program.groups import groups_text, parse_groups, parse_pairs
from capibara.plan.program.kernels import (
    NOTES,
    collective_algorithm,
    cost_estimate,
    custom_call_target,
    kernel_name,
    registered_flops,
)
from capibara.plan.program.loops import Look, Loop
from capibara.plan.program.places import Parts, ProgramPlaces, Work, WorkByPlace, work_of
from capibara.plan.program.text import Computation, Instruction, Module, parse_module
from capibara.plan.program.traffic import moved_bytes, reread_bytes, unchanged

__all__ = ["read_operations", "read_places", "read_program"]

_FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "add-dependency",
    "optimization-barrier",
    "opt-barrier",
    "partition-id",
    "replica-id",
    "domain",
    "get-dimension-size",
}
# XLA compiles a small loop on a CPU into one kernel: the call is all that runs under a name.
_ONE_KERNEL = 'xla_cpu_small_call="true"'
_DEPTH = 64
_MOST_EVENTS = 1_000_000
_MOST_TRIPS = 10**15
_MOST_MEMBERS = 5_000_000
# The largest integer stands for no estimate.
_CYCLES = re.compile(r'"estimated_cycles":\s*"?(\d{1,18})(?!\d)')


def read_program(text: str) -> ProgramFacts:
    """Read what a compiled program does on one device.

    Args:
      text: ``jax.jit(f).lower(…).compile().as_text()``: scheduled HLO, preferably of the TPU compiler (libtpu 0.0.42
        and later), whose fusions have estimated cycles; for XLA on CPUs and GPUs everything else is read.

    Returns:
      Everything that one execution does; what could not be determined is in ``unknown``, as text.

    Raises:
      PlanError: it is not the text of an HLO program, or unreasonably large.
    """
    return _facts(_walk(text))


def read_places(text: str) -> tuple[ProgramFacts, ProgramPlaces]:
    """As :func:`read_program`, with the places in the source that each operation's work comes from.

    Raises:
      PlanError: it is not the text of an HLO program, or unreasonably large.
    """
    walk = _walk(text, placed=True)
    facts = _facts(walk)
    places = (tuple(parts) for parts in (walk.piece_parts, walk.collective_parts, walk.kernel_parts))
    return facts, ProgramPlaces(*places)


def _walk(text: str, *, placed: bool = False) -> _Walk:
    module = parse_module(text)
    walk = _Walk(module, FusedComputations(module), WorkByPlace(module), placed=placed)
    walk.events, _ = walk.computation(module.entry, 1, None, 0)
    return walk


def _facts(walk: _Walk) -> ProgramFacts:
    module = walk.module
    flops = sum(piece.flops * piece.trips for piece in walk.pieces)
    flops += sum((kernel.flops or 0) * kernel.trips for kernel in walk.kernels)
    if not module.scheduled and walk.collectives:
        walk.note("the program is not scheduled: what runs beside what is not known")
    return ProgramFacts(
        name=module.name,
        num_devices=module.num_partitions * module.replica_count,
        flops=flops,
        hbm_bytes=sum(p.hbm_bytes * p.trips for p in walk.pieces)
        + sum(k.bytes * k.trips for k in walk.kernels),
        cycles=sum((p.cycles or 0) * p.trips for p in walk.pieces)
        + sum((k.cycles or 0) * k.trips for k in walk.kernels),
        pieces=tuple(walk.pieces),
        collectives=tuple(walk.collectives),
        kernels=tuple(walk.kernels),
        schedule=walk.events,
        unknown=tuple(walk.unknown),
    )


def read_operations(text: str) -> tuple[OperationFacts, ...]:
    """Read which operations of a compiled program can run, all branches included, under the names that a trace has.

    Args:
      text: as in :func:`read_program`.

    Raises:
      PlanError: it is not the text of an HLO program, or unreasonably large.
    """
    module = parse_module(text)
    walk = _Walk(module, FusedComputations(module), WorkByPlace(module), as_run=True)
    walk.computation(module.entry, 1, None, 0)
    return tuple(walk.found.values())


def _alone(place: str) -> Parts:
    return ((place, 1),) if place else ()


@dataclass
class _Walk:
    module: Module
    fused: FusedComputations
    places: WorkByPlace
    pieces: list[Piece] = field(default_factory=list)
    collectives: list[Collective] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    unknown: dict[str, None] = field(default_factory=dict)
    left: list[int] = field(default_factory=lambda: [_MOST_EVENTS])
    loop_steps: list[int] = field(default_factory=lambda: [3_000_000])
    members: list[int] = field(default_factory=lambda: [_MOST_MEMBERS])
    work: list[int] = field(default_factory=lambda: [0, 0, 0])  # cycles, FLOPs, bytes × trips
    events: tuple[Any, ...] = ()
    placed: bool = False  # whether the lists that follow are kept
    piece_parts: list[Parts] = field(default_factory=list)
    collective_parts: list[Parts] = field(default_factory=list)
    kernel_parts: list[Parts] = field(default_factory=list)
    as_run: bool = False  # every branch, and as one what runs as one
    unsure: int = 0  # branches, and loops of unknown length, that the walk is in
    found: dict[str, OperationFacts] = field(default_factory=dict)
    works: dict[str, Work] = field(default_factory=dict)  # by the names of ``found``
    _groups: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def spend(self, steps: int = 1) -> None:
        """Steps of the walk: there is an end to them, however a text calls its computations."""
        self.left[0] -= steps
        if self.left[0] < 0:
            raise PlanError(f"the program has more than {_MOST_EVENTS:,} operations in its schedule")

    def note(self, words: str) -> None:
        if len(self.unknown) < 1000:
            self.unknown[words] = None

    def add(
        self,
        instruction: Instruction,
        kind: str,
        opcode: str,
        trips: int,
        flops: int | None,
        moved: int,
        dtype: str = "",
        reread: int = 0,
        tiled: int = 0,
        products: int = 1,
        work: Work | None = None,
    ) -> None:
        """Note an operation under the name that it has in a trace. A computation may be called in several places."""
        before = self.found.get(instruction.name)
        if work is not None:
            self.works[instruction.name] = work
        sure = None if self.unsure or (before and before.trips is None) else trips
        if before is not None and sure is not None and before.trips is not None:
            sure += before.trips
        self.found[instruction.name] = OperationFacts(
            instruction.name,
            kind,
            opcode,
            instruction.op_name,
            sure,
            flops,
            moved,
            dtype or (instruction.shapes[0].dtype if instruction.shapes else ""),
            reread,
            tiled,
            products if flops else 0,
            work.elementwise if work else 0,
            work.parts if work else (),
        )

    def apart(self) -> _Walk:
        """A walk of its own over a part of the same program, that spends of the same limits."""
        return _Walk(
            self.module,
            self.fused,
            self.places,
            left=self.left,
            loop_steps=self.loop_steps,
            members=self.members,
            _groups=self._groups,
        )

    def computation(
        self, computation: Computation, trips: int, outer: Look | None, depth: int, turns: int = 1
    ) -> tuple[tuple[Any, ...], int]:
        """Walk one computation that runs ``trips`` times; the events and cycles of one run."""
        if depth > _DEPTH:
            raise PlanError(f"the program's computations call one another more than {_DEPTH} deep")
        self.spend(10)
        return _Line(self, computation, trips, outer, depth, turns).run()

    def groups(self, instruction: Instruction) -> tuple[tuple[int, ...], ...]:
        text = instruction.attribute("source_target_pairs")
        kind = "pairs"
        if not text:
            kind, head = "groups", instruction.head
            at = head.find("replica_groups=")
            text = groups_text(head, at + len("replica_groups=")) if at >= 0 else ""
        key = kind + text
        if key not in self._groups:
            devices = self.module.num_partitions * self.module.replica_count
            found = parse_pairs(text) if kind == "pairs" else parse_groups(text, devices)
            self.members[0] -= sum(map(len, found))
            if self.members[0] < 0:
                raise PlanError(f"the program's replica groups name more than {_MOST_MEMBERS:,} devices")
            self._groups[key] = found
        return self._groups[key]


class _Line:
    """One computation on its way through the schedule."""

    def __init__(
        self, walk: _Walk, computation: Computation, trips: int, outer: Look | None, depth: int, turns: int
    ) -> None:
        self.turns = turns  # of the loop that this is the body of
        self.walk = walk
        self.computation = computation
        self.trips = trips
        self.outer = outer
        self.depth = depth
        self.out: list[Any] = []
        self.cycles = 0
        self.open: dict[str, tuple[int, int]] = {}  # asynchronous collective → (index, cycles when it began)
        self.copies: dict[str, int] = {}

    @cached_property
    def same(self) -> dict[str, int]:
        """Values that come from arrays which are the same in each turn, if this is a loop's body."""
        return unchanged(self.computation, self.walk.module) if self.turns > 1 else {}

    def reread(self, instruction: Instruction) -> int:
        """Bytes of an operation that another turn of the loop reads, too."""
        return reread_bytes(instruction, self.computation, self.walk.module, self.same, self.turns)

    def run(self) -> tuple[tuple[Any, ...], int]:
        """Events of one run, and its cycles."""
        for instruction in self.computation.instructions:
            if instruction.opcode not in _FREE:
                self.step(instruction)
        for key, (index, _) in self.open.items():
            self.walk.note(f"{key} is begun and not ended in {self.computation.name}")
            self.event("done", index)
        return tuple(self.out), self.cycles

    def event(self, kind: str, index: int) -> None:
        self.walk.spend()
        self.out.append((kind, index))

    def step(self, instruction: Instruction) -> None:
        opcode = instruction.opcode
        if opcode == "while":
            self.loop(instruction)
        elif opcode == "conditional":
            self.conditional(instruction)
        elif opcode == "call" and self.walk.as_run and _ONE_KERNEL in instruction.head:
            self.one_kernel(instruction)
        elif opcode == "call":
            called = instruction.called()
            self.inline(instruction, called.get("to_apply", []) or called.get("calls", []))
        elif opcode.endswith("-start") and opcode not in STARTS and instruction.called():
            self.async_start(instruction)
        elif opcode == "async-update":
            return
        elif opcode in STARTS:
            self.start(instruction, instruction, self.computation, STARTS[opcode], instruction.name)
        elif opcode in DONES or (
            opcode.endswith("-done") and instruction.operands[:1] and (instruction.operands[0] in self.open)
        ):
            self.done(instruction)
        elif opcode in COLLECTIVES:
            self.exchange(instruction, instruction, self.computation, opcode)
        elif opcode in ("send", "recv", "send-done", "recv-done"):
            self.walk.note(f"{opcode} {instruction.name}: transfers by send and recv are not counted")
            if "is_host_transfer=true" in instruction.head:
                # How a TPU calls Python. Whether a trace has each of them is not known: none must be missed in it.
                self.walk.unsure += 1
                self.walk.add(instruction, "kernel", opcode, self.trips, 0, 0)
                self.walk.unsure -= 1
        elif opcode in ("infeed", "outfeed"):
            self.walk.note(f"{opcode} {instruction.name}: the host's feed is not counted")
        elif opcode.endswith("-start"):
            index = self.piece(instruction, asynchronous=True)
            self.copies[instruction.name] = index
            self.event("copy", index)
        elif opcode.endswith("-done"):
            index = self.copies.pop(instruction.operands[0], None) if instruction.operands else None
            if index is not None:
                self.event("copied", index)
        elif opcode == "custom-call":
            self.custom_call(instruction)
        elif opcode == "fusion":
            self.fusion(instruction)
        else:
            self.plain(instruction)

    # --- control flow

    def loop(self, instruction: Instruction) -> None:
        loop = Loop(instruction, self.computation, self.walk.module, self.outer, self.walk.loop_steps)
        turns = loop.trips()
        unsure = turns is None
        if turns is None:
            self.walk.note(
                f"the loop {instruction.name} ({instruction.op_name or 'of no stated origin'}) runs as often as its "
                "data say: counted once"
            )
            turns = 1
        if loop.body is None or not turns:
            return
        if self.trips * turns > _MOST_TRIPS:
            raise PlanError(f"the loop {instruction.name} runs {self.trips * turns:.3g} times, beyond reason")
        self.walk.unsure += unsure
        events, cycles = self.walk.computation(
            loop.body, self.trips * turns, loop.constant, self.depth + 1, turns
        )
        self.walk.unsure -= unsure
        self.cycles += cycles * turns
        if events:
            self.walk.spend()
            self.out.append(("loop", turns, events))

    def inline(self, instruction: Instruction, names: list[str]) -> None:
        for name in names:
            computation = self.walk.module.computations.get(name)
            if computation is not None:
                events, cycles = self.walk.computation(computation, self.trips, None, self.depth + 1)
                self.out.extend(events)
                self.cycles += cycles

    def conditional(self, instruction: Instruction) -> None:
        """The branch with the most work counts: which one runs is known when it runs."""
        called = instruction.called()
        names = [name for names in called.values() for name in names if name in self.walk.module.computations]
        if not names:
            return
        if self.walk.as_run:
            self.walk.unsure += 1
            self.inline(instruction, names)
            self.walk.unsure -= 1
            return
        tried = []
        for name in names:
            branch = self.walk.apart()
            branch.computation(self.walk.module.computations[name], 1, None, self.depth + 1)
            tried.append((tuple(branch.work), name))
        if len({work for work, _ in tried}) > 1:
            # Of many of one origin (each step of a ring of attention has one) it is said once.
            origin = "/".join(instruction.op_name.split("/")[-2:])
            said = f"conditionals of {origin} are" if origin else f"the conditional {instruction.name} is"
            self.walk.note(f"{said} counted as if the branch with the most work always ran")
        self.inline(instruction, [max(tried)[1]])

    def one_kernel(self, instruction: Instruction) -> None:
        """A call that runs as one operation: what it does is that of all in it."""
        name = (instruction.called().get("to_apply") or [""])[0]
        called = self.walk.module.computations.get(name)
        if called is None:
            return
        inside = replace(self.walk.apart(), as_run=True)
        inside.computation(called, 1, None, self.depth + 1)
        # Loops as long as their data say: their work is not known, unless there is none to count.
        flops = None if inside.unknown and inside.work[1] else inside.work[1]
        dtype = max(inside.pieces, key=lambda piece: piece.flops).dtype if inside.pieces else ""
        products = [one for one in inside.found.values() if one.flops]
        work = Work()
        for one in inside.found.values():
            work.add(inside.works.get(one.name, Work()), one.trips or 1)
        self.walk.add(
            instruction,
            "compute",
            "call",
            self.trips,
            flops,
            inside.work[2],
            dtype,
            sum(one.reread * (one.trips or 1) for one in inside.found.values()),
            sum(one.tiled_flops * (one.trips or 1) for one in products),
            sum(one.products * (one.trips or 1) for one in products),
            work=work,
        )

    def async_start(self, instruction: Instruction) -> None:
        """A wrapped operation: ``async-start``, or ``call-start`` on a core of its own for exchanges (TPU7x)."""
        called = instruction.called()
        name = (called.get("calls") or called.get("to_apply") or [""])[0]
        inner = self.walk.module.computations.get(name)
        if inner is None:
            return
        for wrapped in inner.instructions:
            if wrapped.opcode in COLLECTIVES:
                self.start(instruction, wrapped, inner, wrapped.opcode, instruction.name)
                return
        self.inline(instruction, [name])

    # --- exchanges

    def exchange(
        self,
        outside: Instruction,
        inside: Instruction,
        computation: Computation,
        kind: str,
        *,
        begun: bool = False,
    ) -> int:
        groups = self.walk.groups(inside)
        size = 2 if kind == "collective-permute" else max((len(group) for group in groups), default=1)
        sent = 0
        for name in inside.operands:
            source = computation.by_name.get(name)
            sent += sum(shape.padded_size for shape in source.shapes) if source is not None else 0
        algorithm, dims = collective_algorithm(
            outside.tail if "collective_algorithm_config" in outside.tail else inside.tail
        )
        self.walk.collectives.append(
            Collective(
                kind="all-to-all" if kind == "ragged-all-to-all" else kind,
                bytes=sent * size if kind == "all-gather" else sent,
                groups=groups,
                group_size=size,
                trips=self.trips,
                asynchronous=begun,
                cycles_hidden=0,
                op_name=outside.op_name or inside.op_name,
                name=outside.name,
                algorithm=algorithm,
                ring_dims=dims,
            )
        )
        index = len(self.walk.collectives) - 1
        made = self.walk.collectives[index]
        self.walk.add(outside, "collective", made.kind, self.trips, 0, made.bytes)
        if self.walk.placed:
            self.walk.collective_parts.append(_alone(outside.place or inside.place))
        self.event("start" if begun else "collective", index)
        return index

    def start(
        self, outside: Instruction, inside: Instruction, computation: Computation, kind: str, key: str
    ) -> None:
        self.open[key] = (self.exchange(outside, inside, computation, kind, begun=True), self.cycles)

    def done(self, instruction: Instruction) -> None:
        operands = instruction.operands
        if operands and operands[0] in self.open:
            self.finish(operands[0])

    def finish(self, key: str) -> None:
        index, began = self.open.pop(key)
        self.walk.collectives[index] = replace(
            self.walk.collectives[index], cycles_hidden=self.cycles - began
        )
        self.event("done", index)

    # --- work

    def fusion(self, instruction: Instruction) -> None:
        name = (instruction.called().get("calls") or [""])[0]
        inside = self.walk.fused.get(name)
        if inside.exchange is None:
            self.event("piece", self.piece(instruction, inside))
            return
        exchange, computation = inside.exchange
        kind = STARTS.get(exchange.opcode, exchange.opcode)
        # A collective that goes on beside several fusions stands in all of them, under one channel.
        key = f"{exchange.opcode} {exchange.attribute('channel_id')}"
        works = inside.flops > 0 or _CYCLES.search(instruction.tail) is not None
        if inside.starts:
            self.start(instruction, exchange, computation, kind, key)
        if works:
            self.event("piece", self.piece(instruction, inside))
        if inside.ends and key in self.open:
            self.finish(key)
        elif not (inside.starts or inside.ends or key in self.open):
            if kind == "all-reduce" and inside.slices:
                kind = "reduce-scatter"
            self.exchange(instruction, exchange, computation, kind)

    def piece(
        self, instruction: Instruction, inside: Fused | None = None, *, asynchronous: bool = False
    ) -> int:
        found = _CYCLES.search(instruction.rest, instruction.cut)
        cycles = int(found[1]) if found else None
        flops = inside.flops if inside else instruction_flops(instruction, self.computation)
        dtype = inside.dtype if inside else ""
        if flops and not dtype:
            dtype = operand_shape(instruction, self.computation, 0).dtype
        moved, host = moved_bytes(instruction, self.computation, self.walk.module)
        self.walk.pieces.append(
            Piece(
                name=instruction.name,
                opcode=instruction.opcode,
                op_name=instruction.op_name,
                trips=self.trips,
                cycles=cycles,
                flops=flops,
                hbm_bytes=moved,
                host_bytes=host,
                asynchronous=asynchronous,
                dtype=dtype,
            )
        )
        if self.walk.placed:
            self.walk.piece_parts.append(self.worked(instruction).parts or _alone(instruction.place))
        if self.walk.as_run:
            self.walk.add(
                instruction,
                "copy" if instruction.opcode.startswith("copy") else "compute",
                instruction.opcode,
                self.trips,
                flops,
                moved,
                dtype,
                min(moved, self.reread(instruction)),
                inside.tiled if inside else tiled_flops(instruction, self.computation),
                work=self.worked(instruction),
            )
        self.cycles += cycles or 0
        self.walk.work[0] += (cycles or 0) * self.trips
        self.walk.work[1] += flops * self.trips
        self.walk.work[2] += moved * self.trips
        return len(self.walk.pieces) - 1

    def worked(self, instruction: Instruction) -> Work:
        """The work of a fusion, or of an instruction alone."""
        if instruction.opcode == "fusion":
            return self.walk.places.get((instruction.called().get("calls") or [""])[0])
        return work_of(instruction, self.computation)

    def plain(self, instruction: Instruction) -> None:
        """An operation that is not a fusion. Those on single numbers run in the scalar unit beside the rest."""
        if all(shape.elements <= 1 for shape in instruction.shapes) and instruction.opcode not in (
            "reduce",
            "sort",
        ):
            if self.walk.as_run:
                # Whether one has a place of its own in a trace depends on the platform.
                self.walk.unsure += 1
                self.walk.add(instruction, "compute", instruction.opcode, self.trips, 0, 0)
                self.walk.unsure -= 1
            return
        self.event("piece", self.piece(instruction))

    def custom_call(self, instruction: Instruction) -> None:
        target = custom_call_target(instruction)
        if target in NOTES:
            return
        moved, _ = moved_bytes(instruction, self.computation, self.walk.module)
        flops, stated = cost_estimate(instruction, self.computation)
        self.walk.add(
            instruction,
            "kernel",
            target,
            self.trips,
            registered_flops(instruction, self.computation) if flops is None else flops,
            moved if stated is None else stated,
        )
        if flops is None:
            self.walk.note(
                f"the kernel {kernel_name(instruction)} ({target}) states no operations: not in the FLOPs"
            )
        found = _CYCLES.search(instruction.tail)
        cycles = int(found[1]) if found else None
        kernel = Kernel(
            target=target,
            trips=self.trips,
            flops=flops,
            bytes=moved if stated is None else stated,
            op_name=instruction.op_name,
            name=kernel_name(instruction),
            cycles=cycles,
        )
        self.walk.kernels.append(kernel)
        if self.walk.placed:
            self.walk.kernel_parts.append(_alone(instruction.place))
        self.cycles += cycles or 0
        self.walk.work[0] += (cycles or 0) * self.trips
        self.walk.work[1] += (flops or 0) * self.trips
        self.walk.work[2] += kernel.bytes * self.trips
        self.event("kernel", len(self.walk.kernels) - 1)

"""Predict the time of a program on a slice, or on a host of GPUs.

The schedule is simulated once. A piece of work takes the compiler's own cycles at the chip's clock or, if the
compiler gives none, its roofline time: operations at the peak or bytes at the memory bandwidth, whichever is longer.
A collective takes its bytes over the links of its group on the torus. An asynchronous collective overlaps with the
work between its start and its end, and costs only the remainder when its result is needed; two that need the same
links run one after the other. The same applies to copies between memories, over the memory bandwidth.

The range: ``low`` uses the best time that the hardware allows for every piece (the roofline if the compiler's cycles
exceed it), ``high`` overlaps no collective with work and gives foreign kernels half of their roofline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from capibara.hardware import roofline
from capibara.plan.errors import PlanError
from capibara.plan.gpus import GpuHost
from capibara.plan.program.facts import Collective, Kernel, Piece, ProgramFacts
from capibara.plan.program.groups import mesh_axes_of
from capibara.plan.slices import Slice
from capibara.plan.targets import Target
from capibara.plan.time.gpu import GpuRates
from capibara.plan.time.torus import Torus
from capibara.sharding import Group

__all__ = ["Constants", "Part", "StepTime", "predict_step", "start_seconds", "time_of_each"]

# What an operation takes beyond its roofline where it is small: the median of the compiler's cycles for those without
# a byte from main memory, in programs for v5e and v6e; on v4, whose two cores act as one, it is twice as many.
_START_CYCLES = 2000
# Operations of a schedule for which the compiler states no cycles.
_WITHOUT_CYCLES = frozenset({"bitcast", "copy-start", "dynamic-update-slice", "reshape", "slice-start"})

_DTYPES = {"bf16": "bfloat16", "f16": "bfloat16", "f32": "bfloat16", "s8": "int8", "u8": "int8", "s4": "int8"}


@dataclass(frozen=True)
class Constants:
    """Constants that may be fitted to measurements; 1 means not fitted.

    Attributes:
      compute: share of the rate assumed by the compiler's cycles that work reaches.
      links: share of the links' rate that collectives reach.
      kernels: share of their roofline that foreign kernels (Pallas) reach.
    """

    compute: float = 1.0
    links: float = 1.0
    kernels: float = 1.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int | float) or not 0 < value <= 10:
                raise PlanError(f"{name}={value!r} must be a share of a rate, above 0 and about 1")


@dataclass(frozen=True)
class Part:
    """A share of a step's time.

    Attributes:
      label: the work.
      seconds: in one step.
      source: where the figure comes from: ``"compiler cycles"``, ``"roofline"`` or ``"links"``.
    """

    label: str
    seconds: float
    source: str


@dataclass(frozen=True)
class StepTime:
    """The time of one execution.

    Attributes:
      seconds: the prediction.
      low: with every piece at its roofline.
      high: without overlap.
      compute: pieces with matrix products in them, and kernels.
      memory: all other work on the device: element-wise operations, reductions, copies, waiting for copies.
      communication: collectives that do not overlap with work.
      hidden: collectives that overlap with work; not part of ``seconds``.
      parts: what ``seconds`` is made of, the longest first.
      unknown: what is not included, as text.
    """

    seconds: float
    low: float
    high: float
    compute: float
    memory: float
    communication: float
    hidden: float
    parts: tuple[Part, ...]
    unknown: tuple[str, ...] = ()

    def slower(self, seconds: float) -> StepTime:
        """This time with as much more work on the device that the step takes ``seconds``, if it takes less."""
        busy = self.compute + self.memory
        if not busy or seconds <= self.seconds:
            return self
        rate = 1 + (seconds - self.seconds) / busy
        parts = (
            part if part.source == "links" else replace(part, seconds=part.seconds * rate)
            for part in self.parts
        )
        return replace(
            self,
            seconds=seconds,
            high=self.high + seconds - self.seconds,
            compute=self.compute * rate,
            memory=self.memory * rate,
            parts=tuple(sorted(parts, key=_length)),
        )


def predict_step(
    facts: ProgramFacts,
    slice: Target,
    mesh: tuple[tuple[str, int], ...],
    *,
    places: tuple[tuple[int, ...], ...] | None = None,
    constants: Constants | None = None,
    hop_latency: float = 1e-6,
    host_bandwidth: float | None = None,
    cycles: bool = True,
) -> StepTime:
    """Predict the time of one execution of a compiled program.

    Args:
      facts: of :func:`capibara.plan.program.read_program`.
      slice: where it runs: a slice, or a host of GPUs, whose times are those of :mod:`capibara.plan.time.gpu`.
      mesh: names and sizes of the mesh's axes, slowest first: positions in it are the program's devices.
      places: coordinates of the devices on the grid, in the mesh's order; by default those of ``jax.make_mesh``.
      constants: shares of rates fitted to measurements; none by default.
      hop_latency: latency of a message over one link, in seconds ("How to Scale Your Model", part 3, about a
        microsecond).
      host_bandwidth: bytes a second between a device and its host; vendors publish none; if None, copies to and from
        the host are omitted and listed in ``unknown``.
      cycles: whether the compiler's are taken, where it gives any; otherwise every piece takes its roofline time, and
        on a TPU what it takes to start it (:func:`start_seconds`).

    Raises:
      PlanError: the program is for another number of devices, or ``mesh`` does not match the slice.
    """
    if facts.num_devices > 1 and facts.num_devices != slice.num_devices:
        raise PlanError(
            f"the program was compiled for {facts.num_devices} devices, but {slice} has {slice.num_devices}"
        )
    if not cycles:
        facts = replace(facts, pieces=tuple(replace(piece, cycles=None) for piece in facts.pieces))
    rates = _rates(slice, mesh, places, constants or Constants(), hop_latency, host_bandwidth)
    if not cycles and isinstance(rates, _Rates):
        rates = replace(rates, start=start_seconds(rates.torus.slice))
    middle = _run(facts, rates)
    low = _run(facts, replace(rates, best=True)).time
    high = _run(facts, replace(rates, worst=True)).time
    if facts.num_devices == 1 and slice.num_devices > 1:
        rates.unknown[
            "the program was compiled for one device: the others of the slice do the same or nothing"
        ] = None
    parts = sorted(
        (Part(label, value, source) for (label, source), value in middle.parts.items()), key=_length
    )
    return StepTime(
        seconds=middle.time,
        low=min(low, middle.time),
        high=max(high, middle.time),
        compute=middle.compute,
        memory=middle.memory,
        communication=middle.waited,
        hidden=max(0.0, middle.exchanged - middle.waited),
        parts=tuple(parts),
        unknown=(*facts.unknown, *rates.unknown),
    )


def start_seconds(slice: Slice) -> float:
    """What the compiler's cycles have for an operation of no size, in seconds."""
    cores = (slice.chip.cores_per_chip or 1) / slice.devices_per_chip
    return _START_CYCLES * cores / slice.clock_hz


def time_of_each(
    facts: ProgramFacts,
    slice: Target,
    mesh: tuple[tuple[str, int], ...],
    *,
    places: tuple[tuple[int, ...], ...] | None = None,
    constants: Constants | None = None,
) -> dict[tuple[str, int], float]:
    """What each operation has of the seconds that :func:`predict_step` predicts.

    Args: as for :func:`predict_step`.

    Returns:
      By ``("piece" | "kernel" | "collective", index into that list of the facts)``. Collectives, and copies between
      memories, have the time for which the others wait. The sum is the step's time.
    """
    return _run(facts, _rates(slice, mesh, places, constants or Constants(), 1e-6, None)).each


def _rates(
    target: Target,
    mesh: tuple[tuple[str, int], ...],
    places: tuple[tuple[int, ...], ...] | None,
    constants: Constants,
    latency: float,
    host: float | None,
) -> _Rates | GpuRates:
    """How long single things take on a target.

    Raises:
      PlanError: the mesh has another number of devices, or the target's rates are not known.
    """
    if isinstance(target, Slice):
        return _Rates(Torus(target, mesh, places), constants, latency, host)
    if isinstance(target, GpuHost):
        if math.prod(size for _, size in mesh) != target.num_devices:
            raise PlanError(f"mesh={dict(mesh)} has not the {target.num_devices} devices of {target}")
        return GpuRates(target, mesh, constants.compute, constants.links, constants.kernels, host)
    raise PlanError(f"there is no model of the time on {target}")


def _length(part: Part) -> float:
    return -part.seconds


@dataclass
class _Rates:
    """How long single things take."""

    torus: Torus
    constants: Constants
    latency: float
    host: float | None
    best: bool = False
    worst: bool = False
    start: float = 0.0
    unknown: dict[str, None] = field(default_factory=dict)
    _known: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        slice = self.torus.slice
        self.clock = slice.clock_hz
        if slice.chip.hbm_bandwidth is None:
            raise PlanError(
                f"{slice}: the bandwidth of its memory is not known, so nothing can be timed on it"
            )
        self.bandwidth: float = slice.chip.hbm_bandwidth
        self._known = {}

    @property
    def link(self) -> float:
        """Bytes a second over a link (asked for only where something is exchanged)."""
        return self.torus.slice.link_bandwidth * self.constants.links

    def roofline(self, flops: int, moved: int, dtype: str) -> float:
        chip = self.torus.slice.chip
        peak = chip.peak_flops.get(_DTYPES.get(dtype, "bfloat16"), chip.peak("bfloat16"))
        return roofline(flops, moved, peak, self.bandwidth)

    def piece(self, piece: Piece) -> tuple[float, str]:
        floor = self.roofline(piece.flops, piece.hbm_bytes, piece.dtype)
        if piece.cycles is None:
            start = 0.0 if self.best or piece.opcode in _WITHOUT_CYCLES else self.start
            return (floor + start) / self.constants.compute, "roofline"
        seconds = piece.cycles / self.clock / self.constants.compute
        if self.best:
            return min(seconds, floor), "roofline"
        return (max(seconds, floor) if self.worst else seconds), "compiler cycles"

    def kernel(self, kernel: Kernel) -> tuple[float, str]:
        floor = self.roofline(kernel.flops or 0, kernel.bytes, "bf16")
        if kernel.cycles is not None:
            return kernel.cycles / self.clock, "compiler cycles"
        share = (
            1.0
            if self.best
            else 0.5 * min(1.0, self.constants.kernels)
            if self.worst
            else self.constants.kernels
        )
        return floor / share, "roofline"

    def copy(self, piece: Piece) -> float:
        seconds = piece.hbm_bytes / self.bandwidth
        if piece.host_bytes:
            if self.host is None:
                self.unknown[
                    "copies to and from the host's memory are not in the time: host_bandwidth is not given"
                ] = None
            else:
                seconds = max(seconds, piece.host_bytes / self.host)
        return seconds

    def exchange(self, collective: Collective) -> tuple[float, frozenset[Any], str]:
        """Seconds, links that are busy meanwhile, label."""
        key = (collective.kind, collective.bytes, collective.ring_dims, collective.groups)
        if key not in self._known:
            axes = mesh_axes_of(collective.groups, self.torus.mesh)
            label = f"{collective.kind} over {' × '.join(axes) or 'nothing'}"
            self._known[key] = (*self._exchange(collective), label)
        return self._known[key]

    def _exchange(self, collective: Collective) -> tuple[float, frozenset[Any]]:
        if collective.kind == "collective-permute":
            route = self.torus.route(collective.groups)
            inside = 2 * collective.bytes / self.bandwidth  # between memories of one chip
            return max(
                route.load * collective.bytes / self.link, inside
            ) + route.hops * self.latency, route.links
        rings = self.torus.rings(collective.groups)
        dims = len(self.torus.slice.shape)
        outside = tuple(ring for ring in rings if ring.axis < dims)
        size = collective.group_size
        share = Group(size, self.link).moved(collective.bytes)
        # Cores of a chip share its links, each for its own group unless they are in one.
        together = math.prod(ring.size for ring in rings if ring.axis >= dims)
        sharing = self.torus.slice.devices_per_chip / together
        inside = 2 * share / self.bandwidth
        busy = frozenset((ring.axis, way) for ring in outside for way in (1, -1))
        if not outside:
            return inside, busy
        hops = sum(ring.hops for ring in outside)
        if collective.kind == "all-to-all":
            slowest = max(ring.size * ring.spacing / (8 if ring.closed else 4) for ring in outside)
            return max(sharing * collective.bytes * slowest / self.link, inside) + hops * self.latency, busy
        links = sum((2 if ring.closed else 1) / ring.spacing for ring in outside)
        if 0 < collective.ring_dims < len(outside):
            # One ring that winds through several axes closes where these have an even number of chips.
            links = min(links, 2.0 * collective.ring_dims)
            hops = size // 2
        # Rings run over the cores: for an all-reduce on 4×4×4 chips the compiler says "cores:{8 4 4}". What is for both
        # cores of a chip then comes over its links once for each; at best it came once.
        members = size // together if self.best else size
        group = Group(members, links * self.link / sharing, hops, self.latency)
        takes = group.reduce if collective.kind == "all-reduce" else group.gather
        return takes(collective.bytes, at_least=inside), busy


@dataclass
class _Clock:
    """A run through the schedule."""

    time: float = 0.0
    compute: float = 0.0
    memory: float = 0.0
    waited: float = 0.0
    exchanged: float = 0.0
    parts: dict[tuple[str, str], float] = field(default_factory=dict)
    each: dict[tuple[str, int], float] = field(default_factory=dict)

    def add(self, label: str, source: str, seconds: float, of: tuple[str, int]) -> None:
        self.parts[label, source] = self.parts.get((label, source), 0.0) + seconds
        self.each[of] = self.each.get(of, 0.0) + seconds

    def repeat(self, other: _Clock, times: int) -> None:
        self.time += other.time * times
        self.compute += other.compute * times
        self.memory += other.memory * times
        self.waited += other.waited * times
        self.exchanged += other.exchanged * times
        for key, seconds in other.parts.items():
            self.parts[key] = self.parts.get(key, 0.0) + seconds * times
        for of, seconds in other.each.items():
            self.each[of] = self.each.get(of, 0.0) + seconds * times


def _run(facts: ProgramFacts, rates: _Rates | GpuRates) -> _Clock:
    try:
        return _line(facts, facts.schedule, rates)
    except (LookupError, TypeError) as error:
        raise PlanError(f"facts of the program contradict themselves: {error!r}") from error


def _line(facts: ProgramFacts, events: Iterable[Any], rates: _Rates | GpuRates) -> _Clock:
    clock = _Clock()
    free: dict[Any, float] = {}  # when a link, or the way between memories, is free again
    ends: dict[tuple[str, int], float] = {}
    for event in events:
        kind, index = event[0], event[1]
        if kind == "loop":
            clock.repeat(_line(facts, event[2], rates), index)
        elif kind == "piece":
            piece = facts.pieces[index]
            seconds, source = rates.piece(piece)
            clock.time += seconds
            if piece.flops:
                clock.compute += seconds
                clock.add("matrix products", source, seconds, event)
            else:
                clock.memory += seconds
                clock.add("other work on the device", source, seconds, event)
        elif kind == "kernel":
            kernel = facts.kernels[index]
            seconds, source = rates.kernel(kernel)
            clock.time += seconds
            clock.compute += seconds
            clock.add(f"kernel {kernel.name}", source, seconds, event)
        elif kind in ("collective", "start"):
            seconds, links, label = rates.exchange(facts.collectives[index])
            begins = max([clock.time, *(free.get(link, 0.0) for link in links)])
            clock.exchanged += seconds
            for link in links:
                free[link] = begins + seconds
            ends["done", index] = begins + seconds
            if kind == "collective" or rates.worst:
                _wait(clock, begins + seconds, label, index)
        elif kind == "done":
            _wait(clock, ends.pop(("done", index)), rates.exchange(facts.collectives[index])[2], index)
        elif kind == "copy":
            begins = max(clock.time, free.get("copies", 0.0))
            free["copies"] = ends["copied", index] = begins + rates.copy(facts.pieces[index])
        elif kind == "copied":
            left = max(0.0, ends.pop(("copied", index)) - clock.time)
            clock.time += left
            clock.memory += left
            if left:
                clock.add("waiting for copies", "roofline", left, ("piece", index))
        else:
            raise PlanError(f"the schedule of the program has an event {kind!r} that is not known")
    return clock


def _wait(clock: _Clock, until: float, label: str, index: int) -> None:
    left = max(0.0, until - clock.time)
    clock.time += left
    clock.waited += left
    if left:
        clock.add(label, "links", left, ("collective", index))

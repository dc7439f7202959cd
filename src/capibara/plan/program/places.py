"""Element-wise work, and which places in the source the work of one operation comes from.

XLA puts operations of several source lines into one fusion, which a trace shows as a whole. What each line has in it
is told by the fused computation: FLOPs of its products, and of everything else the elements that it computes.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from capibara.plan.program.flops import instruction_flops
from capibara.plan.program.text import Computation, Instruction, Module

__all__ = ["Parts", "ProgramPlaces", "Work", "WorkByPlace", "work_of"]

# Operations on each element that a vector unit needs, about.
_SIMPLE = (
    "abs add and clamp compare convert maximum minimum multiply negate not or reduce reduce-window select shift-left "
    "shift-right-arithmetic shift-right-logical sign subtract xor floor ceil is-finite round-nearest-even "
    "round-nearest-afz popcnt count-leading-zeros real imag complex map"
)
_BY_NEWTON = "divide remainder sqrt rsqrt cbrt"
_BY_POLYNOMIAL = (
    "exponential exponential-minus-one log log-plus-one logistic tanh tan sine cosine power erf atan2 acos acosh asin "
    "asinh atanh cosh sinh"
)
_COST = {
    opcode: cost
    for opcodes, cost in ((_SIMPLE, 1), (_BY_NEWTON, 4), (_BY_POLYNOMIAL, 10))
    for opcode in opcodes.split()
}
_DEPTH = 64
_MOST_PLACES = 64


Parts = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class ProgramPlaces:
    """Of each of a program's pieces, collectives and kernels, in the order of :class:`ProgramFacts`: the places in the
    source (:attr:`Instruction.place`) with the work that comes from each, most first; empty where it is not said."""

    pieces: tuple[Parts, ...]
    collectives: tuple[Parts, ...]
    kernels: tuple[Parts, ...]


@dataclass
class Work:
    """What a fused computation has in it.

    Attributes:
      elementwise: operations on elements; a function such as a logarithm counts ten, a quotient or root four.
      products: FLOPs of matrix products and convolutions by place (:attr:`Instruction.place`).
      others: operations on elements by place.
    """

    elementwise: int = 0
    products: Counter[str] = field(default_factory=Counter)
    others: Counter[str] = field(default_factory=Counter)

    def add(self, other: Work, times: int = 1) -> None:
        """Add other work, done a number of times."""
        self.elementwise += other.elementwise * times
        for mine, theirs in ((self.products, other.products), (self.others, other.others)):
            for place, work in theirs.items():
                mine[place] += work * times

    @property
    def parts(self) -> Parts:
        """Places with their work, most first; products count by their FLOPs, and where there are any nothing else:
        they take the time."""
        return tuple((self.products or self.others).most_common(_MOST_PLACES))


def work_of(instruction: Instruction, computation: Computation) -> Work:
    """The work of one run of an instruction that is no fusion; of what only moves data there is none."""
    work, place = Work(), instruction.place
    if flops := instruction_flops(instruction, computation):
        if place:
            work.products[place] = flops
        return work
    if cost := _COST.get(instruction.opcode, 0):
        shapes = instruction.shapes
        if instruction.opcode in ("reduce", "reduce-window"):
            source = computation.by_name.get(instruction.operands[0]) if instruction.operands else None
            shapes = source.shapes[:1] if source is not None else ()
        work.elementwise = cost * sum(shape.elements for shape in shapes)
        if place and work.elementwise:
            work.others[place] = work.elementwise
    return work


@dataclass
class WorkByPlace:
    """The work of each fused computation of a program, counted once."""

    module: Module
    known: dict[str, Work] = field(default_factory=dict)

    def get(self, name: str, depth: int = 0) -> Work:
        """Sum up a fused computation and those inside it."""
        known = self.known.get(name)
        if known is not None:
            return known
        out = self.known[name] = Work()
        computation = self.module.computations.get(name)
        if computation is None or depth > _DEPTH:
            return out
        for instruction in computation.instructions:
            if instruction.opcode in ("fusion", "call"):
                called = instruction.called()
                for target in called.get("calls", []) + called.get("to_apply", []):
                    out.add(self.get(target, depth + 1))
            else:
                out.add(work_of(instruction, computation))
        return out

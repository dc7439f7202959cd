"""Trip counts of loops.

A compiled ``while`` does not state it (XLA:CPU does, as ``known_trip_count``). It is determined by treating the loop
as a program on a few integers: the condition depends on elements of the loop's state; their initial values and their
changes in one iteration are evaluated as far as they are compile-time integers. If each grows by a constant, the
first iteration whose condition fails is computed. This covers counters with any start and step, limits that are part
of the state, counters inside fusions, and the compiler's own loops around windowed matrix products.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from capibara.plan.program.text import Computation, Instruction, Module

__all__ = ["Look", "Loop"]

Path = tuple[int, ...]
Look = Callable[[int, Path], "int | None"]

_PASS = {
    "copy",
    "bitcast",
    "convert",
    "reshape",
    "copy-start",
    "copy-done",
    "broadcast",
    "optimization-barrier",
}
_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}
_DEPTH = 60
_STEPS = 20_000
_BUDGET = 3_000_000
_MOST_TURNS = 1 << 40


class _GaveUpError(Exception):
    pass


@dataclass
class _Reader:
    """Evaluates integers; the steps of one question and those of the program (``budget``) are limited, because text
    can be made to ask without end."""

    module: Module
    budget: list[int]
    steps: int = _STEPS

    def value(
        self, computation: Computation, name: str, path: Path, look: Look, depth: int = 0
    ) -> int | None:
        """The integer at ``path`` of an instruction's value, or None."""
        self.steps -= 1
        self.budget[0] -= 1
        instruction = computation.by_name.get(name)
        if self.steps < 0 or self.budget[0] < 0 or depth > _DEPTH or instruction is None:
            return None

        def of(operand: int, at: Path = ()) -> int | None:
            names = instruction.operands
            return (
                self.value(computation, names[operand], at, look, depth + 1) if operand < len(names) else None
            )

        opcode = instruction.opcode
        if opcode == "constant":
            return _constant(instruction) if not path else None
        if opcode == "parameter":
            number = instruction.operand_text.strip()
            return look(int(number), path) if number.isdigit() and len(number) < 9 else None
        if opcode == "get-tuple-element":
            index = re.search(r"index=(\d{1,8})", instruction.head)
            return of(0, (int(index[1]), *path)) if index else None
        if opcode == "tuple":
            return of(path[0], path[1:]) if path else None
        if opcode == "copy-start":
            return of(0)
        if opcode in _PASS:
            shapes = instruction.shapes
            return of(0, path) if path or (len(shapes) == 1 and shapes[0].elements == 1) else None
        if opcode in ("fusion", "call"):
            return self._called(instruction, path, of, depth)
        if opcode == "while":
            return self._loop(instruction, path, of, depth)
        if path:
            return None
        return self._arithmetic(instruction, of)

    def _arithmetic(self, instruction: Instruction, of: Callable[..., int | None]) -> int | None:
        opcode = instruction.opcode
        if opcode == "negate":
            value = of(0)
            return None if value is None else -value
        if opcode == "not":
            value = of(0)
            return None if value is None else int(not value)
        if opcode == "select":
            chosen = of(0)
            return None if chosen is None else of(1 if chosen else 2)
        if opcode in _BINARY:
            a, b = of(0), of(1)
            return None if a is None or b is None else _BINARY[opcode](a, b)
        if opcode == "compare":
            a, b = of(0), of(1)
            test = _COMPARE.get(instruction.attribute("direction"))
            return None if a is None or b is None or test is None else int(test(a, b))
        return None

    def _called(
        self, instruction: Instruction, path: Path, of: Callable[..., int | None], depth: int
    ) -> int | None:
        names = instruction.called()
        target = (names.get("calls") or names.get("to_apply") or [""])[0]
        inner = self.module.computations.get(target)
        if inner is None or inner.root is None:
            return None
        return self.value(inner, inner.root.name, path, of, depth + 1)

    def _loop(
        self, instruction: Instruction, path: Path, of: Callable[..., int | None], depth: int
    ) -> int | None:
        """An element that a loop hands through unchanged."""
        body = self.module.computations.get((instruction.called().get("body") or [""])[0])
        if body is None or body.root is None or not path:
            return None
        asked: list[Path] = []

        def itself(_: int, at: Path) -> int | None:
            asked.append(at)
            return 0

        result = self.value(body, body.root.name, path, itself, depth + 1)
        return of(0, path) if asked == [path] and result == 0 else None


def _constant(instruction: Instruction) -> int | None:
    text = instruction.operand_text.strip().strip("{}").strip()
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else None


class Loop:
    """A ``while`` loop as a program on integers.

    Args:
      loop: the instruction.
      computation: the one that contains it.
      module: the program.
      outer: integers known of the parameters of ``computation``.
      budget: remaining steps for all loops of the program.
    """

    def __init__(
        self,
        loop: Instruction,
        computation: Computation,
        module: Module,
        outer: Look | None = None,
        budget: list[int] | None = None,
    ) -> None:
        self._instruction = loop
        self._computation = computation
        self._reader = _Reader(module, budget if budget is not None else [_BUDGET])
        self._outer = outer or (lambda _, __: None)
        called = loop.called()
        self.body = module.computations.get((called.get("body") or [""])[0])
        self.condition = module.computations.get((called.get("condition") or [""])[0])
        self._start: dict[Path, int] = {}
        self._gain: dict[Path, int] = {}

    def trips(self) -> int | None:
        """The trip count, or None if the text does not determine it."""
        stated = re.search(r'"known_trip_count":\s*\{"n":\s*"?(\d{1,15})', self._instruction.tail)
        if stated:
            return int(stated[1])
        if (
            self.body is None
            or self.condition is None
            or self.body.root is None
            or self.condition.root is None
        ):
            return None
        try:
            return _first_failure(self._goes_on)
        except (_GaveUpError, RecursionError):
            return None

    def constant(self, number: int, path: Path) -> int | None:
        """An integer of the state that is the same in every iteration, or None."""
        try:
            self._reader.steps = _STEPS
            return self._initial(path) if number == 0 and path and self._turn(path) == 0 else None
        except (_GaveUpError, RecursionError):
            return None

    def _initial(self, path: Path) -> int:
        if path not in self._start:
            operands = self._instruction.operands
            value = (
                self._reader.value(self._computation, operands[0], path, self._outer) if operands else None
            )
            if value is None:
                raise _GaveUpError
            self._start[path] = value
        return self._start[path]

    def _turn(self, path: Path) -> int:
        """What one turn adds to an element: seen to be the same from its first value and from three others."""
        if path in self._gain:
            return self._gain[path]
        if self.body is None or self.body.root is None:
            raise _GaveUpError
        self._gain[path] = 0  # an element that needs itself through others is looked at in its own turn
        gains = set()
        for shift in (0, 1, 2, 5):
            base = self._initial(path) + shift

            def state(_: int, at: Path, base: int = base) -> int | None:
                return base if at == path else self._initial(at) if self._turn(at) == 0 else None

            after = self._reader.value(self.body, self.body.root.name, path, state)
            if after is None:
                del self._gain[path]
                raise _GaveUpError
            gains.add(after - base)
        if len(gains) != 1:
            del self._gain[path]
            raise _GaveUpError
        self._gain[path] = gains.pop()
        return self._gain[path]

    def _goes_on(self, turn: int) -> bool:
        if self.condition is None or self.condition.root is None:
            raise _GaveUpError
        self._reader.steps = _STEPS
        result = self._reader.value(
            self.condition,
            self.condition.root.name,
            (),
            lambda _, at: self._initial(at) + self._turn(at) * turn,
        )
        if result is None:
            raise _GaveUpError
        return bool(result)


def _first_failure(goes_on: Callable[[int], bool]) -> int | None:
    """The first turn at which a condition on straight lines fails: few turns are tried one by one (which is right
    for "not equal" as well), more are bisected."""
    for turn in range(64):
        if not goes_on(turn):
            return turn
    low, high = 63, 64
    while goes_on(high):
        low, high = high, high * 2
        if high > _MOST_TURNS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        if goes_on(middle):
            low = middle
        else:
            high = middle
    return high

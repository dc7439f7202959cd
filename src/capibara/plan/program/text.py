"""Parse the text of a compiled program into computations and instructions.

XLA prints one instruction per line, ``%name = shape opcode(operands), attributes, metadata={…}, backend_config=…``,
between lines that open and close a computation. Lines are only split here: most of a large program is not used
further, so shapes and attributes are parsed on demand.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property

from capibara.plan.errors import PlanError
from capibara.plan.program.shapes import ArrayShape, parse_shape

__all__ = ["MAX_TEXT", "Computation", "Instruction", "Module", "parse_module"]

MAX_TEXT = 2_000_000_000
_START = re.compile(r"\s+(ROOT )?%?([^\s%=(]+) = ")
_HEADER = re.compile(r"(ENTRY )?%?([^\s%(]+) (?:\(.*\) -> .*)?\{\s*$")
_SHAPE = re.compile(r"[a-z]\w*\[[^\]]*\](?:\{[^{}]*\})?")
_OPCODE = re.compile(r"\s*([a-zA-Z][\w\-]*)\(")
_PAREN = re.compile(r"[()]")
_NAME = re.compile(r"%([^\s,()%]+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation|async_execution)=%?([^\s,{}]+)"
)
_CALLED_LISTS = re.compile(r"\b(branch_computations|called_computations|calls)=\{([^{}]*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_FRAME = re.compile(r"\bstack_frame_id=(\d{1,9})")
_LINE = re.compile(r'\bsource_file="([^"]*)".*?\bsource_line=(\d{1,9})')


@dataclass(slots=True)
class Instruction:
    """One line. ``head`` are the attributes before metadata, ``tail`` metadata and backend configuration."""

    name: str
    shape_text: str
    opcode: str
    operand_text: str
    rest: str
    root: bool
    _cut: int = -2

    @property
    def shapes(self) -> tuple[ArrayShape, ...]:
        """Result arrays, flattened."""
        return parse_shape(self.shape_text)

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        text = self.operand_text
        if "%" in text:
            return _NAME.findall(text)
        if self.opcode in ("constant", "parameter"):
            return []
        return [part.split()[-1] for part in text.split(",") if part.strip()]

    @property
    def cut(self) -> int:
        """The start of metadata or backend configuration."""
        if self._cut == -2:
            places = [p for p in (self.rest.find("metadata={"), self.rest.find("backend_config=")) if p >= 0]
            self._cut = min(places) if places else len(self.rest)
        return self._cut

    @property
    def head(self) -> str:
        """Attributes before metadata and backend configuration."""
        return self.rest[: self.cut]

    @property
    def tail(self) -> str:
        """Metadata and backend configuration."""
        return self.rest[self.cut :]

    @property
    def op_name(self) -> str:
        """Its source in the JAX program (``"jit(step)/while/body/dot_general"``), or an empty string."""
        found = _OP_NAME.search(self.rest, self.cut)
        return found[1] if found else ""

    @property
    def place(self) -> str:
        """Where it was traced: the number of a stack frame in the program's tables, ``"file.py:31"`` in programs
        without tables, or an empty string."""
        frame = _FRAME.search(self.rest, self.cut)
        if frame:
            return frame[1]
        line = _LINE.search(self.rest, self.cut)
        return f"{line[1]}:{line[2]}" if line else ""

    def called(self) -> dict[str, list[str]]:
        """Computations that it calls, by the attribute that names them."""
        head = self.head
        out: dict[str, list[str]] = {}
        for key, name in _CALLED.findall(head):
            out.setdefault(key, []).append(name)
        for key, names in _CALLED_LISTS.findall(head):
            out.setdefault(key, []).extend(
                name.strip().lstrip("%") for name in names.split(",") if name.strip()
            )
        return out

    def attribute(self, key: str) -> str:
        """The text of one attribute, including braces or brackets; empty if there is none of that name."""
        head = self.head
        found = re.search(rf"(?:^|[\s,]){key}=", head)
        if not found:
            return ""
        start = position = found.end()
        depth = 0
        while position < len(head):
            char = head[position]
            if char in "{[(":
                depth += 1
            elif char in "}])":
                depth -= 1
            elif char == "," and depth == 0:
                break
            position += 1
        return head[start:position].strip()


@dataclass
class Computation:
    """A named list of instructions, in schedule order if the program has a schedule."""

    name: str
    entry: bool = False
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction | None:
        """The result of the computation."""
        for instruction in reversed(self.instructions):
            if instruction.root:
                return instruction
        return self.instructions[-1] if self.instructions else None

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        found = {}
        for instruction in self.instructions:
            if instruction.opcode == "parameter" and instruction.operand_text.strip().isdigit():
                found[int(instruction.operand_text)] = instruction
        return found

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The users of an instruction's value."""
        out: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in instruction.operands:
                out.setdefault(operand, []).append(instruction)
        return out


@dataclass
class Module:
    """A whole program."""

    name: str
    header: str
    computations: dict[str, Computation]
    entry: Computation

    @property
    def scheduled(self) -> bool:
        """Whether the order of instructions is the order of execution."""
        return "is_scheduled=true" in self.header

    @property
    def num_partitions(self) -> int:
        """Number of devices that it is partitioned over (1 if the text does not say)."""
        return self._number("num_partitions")

    @property
    def replica_count(self) -> int:
        """Number of replicas."""
        return self._number("replica_count")

    def _number(self, key: str) -> int:
        found = re.search(rf"\b{key}=(\d{{1,9}})", self.header)
        return int(found[1]) if found else 1


def parse_module(text: str) -> Module:
    """Split HLO text into computations and instructions.

    Raises:
      PlanError: it is not the text of an HLO module, or it is truncated.
    """
    if not isinstance(text, str):
        raise PlanError(f"text must be the string that compiled.as_text() gives, got {type(text).__name__}")
    if len(text) > MAX_TEXT:
        raise PlanError(f"text has {len(text):,} characters, more than {MAX_TEXT:,}")
    start = text.find("HloModule ")
    if start < 0 or text[:start].strip():
        raise PlanError(
            "text is not an HLO program: it must begin with 'HloModule', as jax.jit(f).lower(…).compile().as_text() "
            f"does; it begins with {text.lstrip()[:40]!r}"
        )
    lines = text[start:].split("\n")
    header = lines[0]
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    entry: Computation | None = None
    for number, line in enumerate(lines[1:], 2):
        if not line or line[0] == "/":
            continue
        if line[0] in " \t":
            if current is None:
                continue  # tables of files and stack frames
            instruction = _instruction(line)
            if instruction is not None:
                current.instructions.append(instruction)
        elif line[0] == "}":
            current = None
        elif line.rstrip().endswith("{"):
            found = _HEADER.match(line)
            if not found:
                raise PlanError(f"line {number} of the program's text opens no computation: {line[:60]!r}")
            current = Computation(found[2], bool(found[1]))
            if current.name in computations:
                raise PlanError(
                    f"line {number} of the program's text: the computation {current.name!r} stands twice"
                )
            computations[current.name] = current
            if current.entry:
                entry = current
    if current is not None:
        raise PlanError(f"the program's text is broken off within the computation {current.name!r}")
    if entry is None or not entry.instructions:
        raise PlanError("the program's text has no ENTRY computation: is it whole?")
    name = re.match(r"HloModule ([^\s,]+)", header)
    return Module(name[1] if name else "", header, computations, entry)


def _instruction(line: str) -> Instruction | None:
    start = _START.match(line)
    if not start:
        return None
    at = start.end()
    if line.startswith("(", at):
        end = _matching(line, at)
    else:
        shape = _SHAPE.match(line, at)
        if not shape:
            return None
        end = shape.end()
    opcode = _OPCODE.match(line, end)
    if not opcode:
        return None
    opened = opcode.end() - 1
    closed = _matching(line, opened) - 1
    return Instruction(
        start[2], line[at:end], opcode[1], line[opened + 1 : closed], line[closed + 1 :], start[1] is not None
    )


def _matching(line: str, at: int) -> int:
    """Position after the parenthesis that closes the one at ``at``; the end of the line if none does."""
    end = line.find(")", at)
    if end >= 0 and line.find("(", at + 1, end) < 0:
        return end + 1
    depth = 0
    for found in _PAREN.finditer(line, at):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return found.end()
    return len(line)

"""Read the compiler's own report of its buffers: what a program's memory contains at its peak.

With ``xla_dump_to`` the compiler writes, before it generates machine code for a program, which buffers it has
(``…buffer-assignment.txt``: sizes, places, shapes with their tiles), from which instruction to which each is live
(``…live-range.txt``), and the program itself, in which every instruction has its source. It writes the same for a
program that does not fit. Only buffers that are live at the memory peak determine the memory that a program needs;
removing any other would not save a byte.

A refusal that comes with a list of the largest allocations ("Ran out of memory … Largest program allocations in hbm")
can be read too (:func:`buffers_of_message`).
"""

from __future__ import annotations

import linecache
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from capibara.plan.program.frames import Frames
from capibara.plan.program.parts import generated_part

__all__ = ["buffers_of_message", "padding_of", "read_buffers", "read_heap"]

MOST_BUFFERS = 48
_LONGEST_FILE = 512 << 20
_LONGEST_LINE = 1 << 20
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BITS = {"pred": 8, "c64": 64, "c128": 128}

_ALLOCATION = re.compile(r"allocation \d+: size (\d+)(.*)")
_VALUE = re.compile(
    r"\s+value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (\S+)"
)
_RANGE = re.compile(r"\s+(\S+)\{([\d,]*)\}:(\d+)-(\d+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = ")
_PARAMETER = re.compile(r" parameter\((\d+)\)")
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SHAPE = re.compile(r"([a-z]+\d*[a-z\d]*)\[([\d,]*)\]")


def read_buffers(
    folder: Path, line_of: Callable[[str, int], str] = linecache.getline
) -> tuple[dict[str, Any], ...]:
    """The largest buffers in a device's memory (HBM) at the memory peak of a step.

    Args:
      folder: that the compiler wrote to. If it contains several programs, the one with the largest buffer is used.
      line_of: gives the text of a line of a file.

    Returns:
      ``{"bytes", "shape", "op_name", "kind", "padding", "place"}``, the largest first; empty if the compiler wrote no
      report. ``kind`` is ``parameters``, ``optimizer``, ``batch``, ``arguments`` (any other), ``output`` or
      ``temporary``; ``padding`` the bytes of padding to tiles; ``op_name`` the compiler's path; ``place`` the
      operation of a Capibara model that created it, if known (``blocks/mlp_gate_product``).
    """
    reports = sorted(
        Path(folder).glob("*after_optimizations-buffer-assignment.txt"),
        key=lambda path: path.stat().st_size,
        reverse=True,
    )
    if not reports:
        return ()
    stem = reports[0].name.removesuffix("-buffer-assignment.txt")
    ranges = _ranges(reports[0].with_name(f"{stem}-live-range.txt"))
    arguments, outputs, values = _allocations(reports[0])
    origins = _Origins(reports[0].with_name(f"{stem}.txt"), line_of)
    found = [_buffer(size, shape, *origins.of_argument(number)) for number, size, shape in arguments]
    found += [_buffer(size, shape, "", "output", "") for size, shape in outputs]
    for name, size, shape in _fullest(values, ranges):
        found.append(_buffer(size, shape, *origins.of_value(name)))
    found.sort(key=lambda each: -each["bytes"])
    return tuple(found[:MOST_BUFFERS])


def read_heap(folder: Path) -> int | None:
    """Bytes of a device's memory (HBM) that the compiler assigned to buffers that exist only within the step.

    Together with the arguments this is the figure that the compiler compares with the memory of a device: it accepts
    a program with ``xla_tpu_max_hbm_size_mib`` just above it and refuses the same program just below. The
    ``temp_size_in_bytes`` of ``memory_analysis()`` is larger by 10 to 30 %, and nothing is refused for it (libtpu
    0.0.42 for v4 and v5p).

    Args:
      folder: that the compiler wrote to; of several programs, the one that needs most is used.

    Returns:
      The bytes, or None if the compiler wrote no report.
    """
    found = None
    for report in Path(folder).glob("*after_optimizations-buffer-assignment.txt"):
        size, allocations = 0, 0
        for line in _lines(report):
            allocations += line.startswith("allocation ")
            if line.startswith("allocation ") and "preallocated-temp" in line and ", color " not in line:
                match = _ALLOCATION.match(line)
                size += int(match[1]) if match else 0
        if allocations:  # else it is empty, for a disk was full
            found = max(found or 0, size)
    return found


def buffers_of_message(text: str) -> tuple[dict[str, Any], ...]:
    """The largest allocations listed in a refusal of the compiler, in the form of :func:`read_buffers`."""
    found = []
    for part in re.split(r"\n\s*\d+\. (?=Size: )", text)[1:]:
        size = re.match(r"Size: ([\d.]+)([KMGT]?)", part)
        if size is None:
            continue
        shape = re.search(r"Shape: (\S+)", part)
        name = _OP_NAME.search(part)
        extra = re.search(r"Extra memory due to padding: ([\d.]+)([KMGT]?)", part)
        kind = re.search(r"Allocation type: (.+)", part)
        said = kind[1].strip() if kind else ""
        found.append(
            {
                "bytes": _bytes(size),
                "shape": shape[1].partition("{")[0] if shape else "",
                "op_name": name[1] if name else "",
                "kind": "temporary" if "temp" in said else _kind(name[1] if name else "", "arguments"),
                "padding": _bytes(extra) if extra else 0,
                "place": "",
            }
        )
    found.sort(key=lambda each: -each["bytes"])
    return tuple(found[:MOST_BUFFERS])


def padding_of(size: int, shape: str) -> int:
    """Bytes that a buffer of ``size`` has beyond what an array like ``bf16[8,128]`` holds; 0 for tuples."""
    match = _SHAPE.fullmatch(shape)
    if match is None:
        return 0
    bits = _BITS.get(match[1]) or int(re.sub(r"^\D*(\d+).*$", r"\1", match[1]) or 8)
    count = math.prod(int(n) for n in match[2].split(",") if n)
    return max(0, size - -(-count * bits // 8))


def _bytes(match: re.Match[str]) -> int:
    return int(float(match[1]) * _UNITS[match[2]])


def _buffer(size: int, shape: str, op_name: str, kind: str, place: str) -> dict[str, Any]:
    shape = shape.partition("{")[0]
    return {
        "bytes": size,
        "shape": shape,
        "op_name": op_name,
        "kind": kind,
        "padding": padding_of(size, shape),
        "place": place,
    }


def _kind(op_name: str, otherwise: str) -> str:
    head = re.split(r"[\[.']", op_name.removeprefix("state.") or "", maxsplit=1)[0]
    return {
        "params": "parameters",
        "opt_state": "optimizer",
        "ema": "optimizer",
        "batch": "batch",
        "tokens": "batch",
    }.get(head, otherwise)


def _lines(path: Path) -> Iterator[str]:
    """The lines of a report, shortened where they are absurd; none of a file that is not there or far too large."""
    try:
        if path.stat().st_size > _LONGEST_FILE:
            return
        with open(path, encoding="utf-8", errors="replace") as stream:
            while line := stream.readline(_LONGEST_LINE):
                yield line
    except OSError:
        return


def _allocations(
    path: Path,
) -> tuple[list[tuple[int, int, str]], list[tuple[int, str]], list[tuple[str, int, int, str]]]:
    """Arguments ``(number, bytes, shape)``, outputs ``(bytes, shape)`` and values ``(name, bytes, offset, shape)`` of
    the heap, all of them in the devices' main memory (the others have a colour)."""
    arguments, outputs, values = [], [], []
    in_heap = False
    for line in _lines(path):
        if line.startswith("allocation "):
            match = _ALLOCATION.match(line)
            rest = match[2] if match else ""
            in_heap = "preallocated-temp" in rest and ", color " not in rest
            if match is None or ", color " in rest:
                continue
            if parameter := re.search(r"parameter (\d+), shape \|(\S+?)\|", rest):
                arguments.append((int(parameter[1]), int(match[1]), parameter[2]))
            elif "maybe-live-out" in rest and "output shape" not in rest:
                outputs.append((int(match[1]), ""))
        elif in_heap and (match := _VALUE.match(line)):
            name = f"{match[1]}{{{match[2] or ''}}}"
            values.append((name, int(match[3]), int(match[4]), match[5]))
    return arguments, outputs, values


def _ranges(path: Path) -> dict[str, tuple[int, int]]:
    """From which to which instruction each value is alive."""
    found: dict[str, tuple[int, int]] = {}
    inside = False
    for line in _lines(path):
        if "BufferLiveRange" in line:
            inside = True
        elif "Live ranges at" in line:
            break
        elif inside and (match := _RANGE.match(line)):
            found[f"{match[1]}{{{match[2]}}}"] = (int(match[3]), int(match[4]))
    return found


def _fullest(
    values: list[tuple[str, int, int, str]], ranges: dict[str, tuple[int, int]]
) -> list[tuple[str, int, str]]:
    """The values that are alive at the memory peak; of those that share a place the largest."""
    known = [(*value, *ranges[value[0]]) for value in values if value[0] in ranges]
    if not known:
        return [(name, size, shape) for name, size, _, shape in values]
    events: dict[int, tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
    for i, value in enumerate(known):
        events[value[4]][0].append(i)
        events[value[5] + 1][1].append(i)
    # Several names of one buffer (a loop's and its body's) share its place: it counts once.
    places: dict[int, Counter[int]] = defaultdict(Counter)
    held: dict[int, int] = defaultdict(int)
    total, best, moment = 0, -1, 0
    for at in sorted(events):
        begun, ended = events[at]
        changed = set()
        for i in ended:
            places[known[i][2]][known[i][1]] -= 1
            changed.add(known[i][2])
        for i in begun:
            places[known[i][2]][known[i][1]] += 1
            changed.add(known[i][2])
        for place in changed:
            now = max((size for size, count in places[place].items() if count > 0), default=0)
            total += now - held[place]
            held[place] = now
        if total > best:
            best, moment = total, at
    alive: dict[int, tuple[str, int, str]] = {}
    for name, size, place, shape, begin, end in known:
        if begin <= moment <= end and size > alive.get(place, ("", -1, ""))[1]:
            alive[place] = (name, size, shape)
    return list(alive.values())


class _Origins:
    """Where the values of a program come from, by what its text says of each instruction."""

    def __init__(self, path: Path, line_of: Callable[[str, int], str]) -> None:
        self._line_of = line_of
        self._names: dict[str, tuple[str, str]] = {}
        self._arguments: dict[int, str] = {}
        head: list[str] = []
        entry = within = False
        for line in _lines(path):
            if line.startswith(("%", "ENTRY")):
                within, entry = True, line.startswith("ENTRY")
            elif not within:
                head.append(line)
            elif match := _INSTRUCTION.match(line):
                said = _OP_NAME.search(line)
                frame = _FRAME.search(line)
                name = said[1].replace("\\'", "'").replace('\\"', '"') if said else ""
                self._names[match[1]] = (name, frame[1] if frame else "")
                if entry and (number := _PARAMETER.search(line)):
                    self._arguments[int(number[1])] = name
        self._frames = Frames.of_lines(head)

    def of_argument(self, number: int) -> tuple[str, str, str]:
        name = self._arguments.get(number, "")
        return name, _kind(name, "arguments"), _place_of_argument(name)

    def of_value(self, value: str) -> tuple[str, str, str]:
        name, frame = self._names.get(value.partition("{")[0], ("", ""))
        return name, "temporary", self._place(frame)

    def _place(self, frame: str) -> str:
        parts = (generated_part(one, self._line_of) for one in self._frames.stack(frame))
        return next(filter(None, parts), "")


def _place_of_argument(op_name: str) -> str:
    """``state.params['blocks']['mlp']['up']['weight']`` → ``blocks/mlp/up/weight``."""
    return "/".join(re.findall(r"\['([^']*)'\]", op_name))

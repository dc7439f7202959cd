"""The tables of stack frames in a program's text: where in a user's program, and in which functions, it was traced."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

__all__ = ["Frame", "Frames"]

_TITLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_NUMBERS = re.compile(r"(\w+)=(\d{1,9})")
_DEEPEST = 200


class Frame(NamedTuple):
    """A place in the source: ``file``, ``function`` and ``line``."""

    file: str
    function: str
    line: int


@dataclass
class Frames:
    """The stack frames of a program, by the numbers that its instructions have (:attr:`Instruction.place`)."""

    tables: Mapping[str, Mapping[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Frames:
        """Those of a program's text; none if it was lowered without places."""
        head = text.split("\n%", 1)[0].split("\nENTRY", 1)[0]
        return cls.of_lines(head.split("\n"))

    @classmethod
    def of_lines(cls, lines: Iterable[str]) -> Frames:
        """Those of the lines before a program's first computation, and not more of them than needed."""
        tables: dict[str, dict[int, str]] = {title: {} for title in _TITLES}
        table: dict[int, str] | None = None
        for line in lines:
            word = line.strip()
            if line.startswith(("%", "ENTRY")):
                break
            if word in tables:
                table = tables[word]
            elif table is not None and word:
                number, _, rest = word.partition(" ")
                if number.isdecimal() and len(number) < 10:
                    table[int(number)] = rest
        return cls(tables)

    @cached_property
    def _known(self) -> dict[int, tuple[Frame, int]]:
        """Of each frame its place, and the frame that called it (0: none)."""
        files, functions = (
            {number: name.strip('"') for number, name in self.tables.get(title, {}).items()}
            for title in _TITLES[:2]
        )
        places = {}
        for number, row in self.tables.get("FileLocations", {}).items():
            said = {key: int(value) for key, value in _NUMBERS.findall(row)}
            file = files.get(said.get("file_name_id", 0), "")
            function = functions.get(said.get("function_name_id", 0), "")
            places[number] = Frame(file, function, said.get("line", 0))
        found = {}
        for number, row in self.tables.get("StackFrames", {}).items():
            said = {key: int(value) for key, value in _NUMBERS.findall(row)}
            place = places.get(said.get("file_location_id", 0), Frame("", "", 0))
            # Counted from one more than the frames themselves.
            found[number] = place, said.get("parent_frame_id", 1) - 1
        return found

    def stack(self, place: str) -> Iterator[Frame]:
        """The frames of a place, the innermost first; nothing of ``"file.py:31"``."""
        number = int(place) if place.isdecimal() else 0
        for _ in range(_DEEPEST):
            if number not in self._known:
                return
            frame, number = self._known[number]
            yield frame

    def places(self) -> set[Frame]:
        """All of them, each once."""
        return {frame for frame, _ in self._known.values() if frame.file}

    def source(self, place: str) -> str:
        """``"file.py:31"`` of a place: that itself, or the innermost frame's; or an empty string."""
        if not place.isdecimal():
            return place
        frame = next(self.stack(place), None)
        return f"{frame.file}:{frame.line}" if frame is not None and frame.file else ""

"""The compiled programs that ran: what each of their operations is, does and comes from.

Traces name operations (``fusion.3``) and the program by its number; the program's own text says the rest. Both carry
the number that XLA gave the module, so that two programs of one name are not confused.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from capibara.compilation.counting import COMPILED
from capibara.jax_versions import call_being_compiled, loaded_programs
from capibara.observe.profile.arguments import Call, describe_call
from capibara.observe.profile.modules import module_number
from capibara.plan.program import Frames, OperationFacts, read_operations

__all__ = ["Held", "HeldPrograms", "KnownProgram", "known_program"]

_PLACED = re.compile(r"^\s+(?:ROOT )?%?([^\s%=(]+) = .*?\bstack_frame_id=(\d+)", re.MULTILINE)
# An operation's lines that are told apart, and the least share of its work that one has.
_MOST_PARTS, _LEAST_PART = 16, 0.01
_OLD_PLACED = re.compile(
    r'^\s+(?:ROOT )?%?([^\s%=(]+) = .*?source_file="([^"]*)".*?source_line=(\d+)', re.MULTILINE
)


@dataclass(frozen=True)
class KnownProgram:
    """A program: its text, what can run in it by name, the source lines of these, and temporary bytes of one run.

    ``call`` is what it was compiled for, if that was within the region; ``parts`` are the lines, with the share of each
    in the work, of operations that have more than one.
    """

    name: str
    text: str
    operations: dict[str, OperationFacts]
    sources: dict[str, str]
    temporary_bytes: int | None
    call: Call | None = None
    parts: Mapping[str, tuple[tuple[str, float], ...]] = field(default_factory=dict)


class Held(NamedTuple):
    """A loaded program's module (with ``to_string()``), its temporary bytes, and the call that it was compiled for."""

    module: Any
    temporary_bytes: int | None
    call: Call | None


class HeldPrograms:
    """Keeps the programs that are compiled while it is open, so that those of functions that are gone can be read."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}
        self._calls: dict[int, Call] = {}
        self._unclaimed: dict[int, None] = {}  # held since it was opened, without a call so far
        self._values: dict[str, list[Any]] = {}  # of static arguments, by their text
        self._lock = threading.Lock()

    def __enter__(self) -> HeldPrograms:
        import jax.monitoring

        self._hold()
        jax.monitoring.register_event_duration_secs_listener(self._compiled)
        return self

    def __exit__(self, *_: object) -> None:
        import jax.monitoring

        with contextlib.suppress(Exception):  # a program may have removed all listeners
            jax.monitoring.unregister_event_duration_listener(self._compiled)

    def _compiled(self, event: str, duration_secs: float, **about: Any) -> None:
        if event != COMPILED:
            return
        call = Call(time.perf_counter() - duration_secs, duration_secs)
        if (made := call_being_compiled()) is not None:
            # Code of the arguments runs here (their trees, repr, comparison): what it raises is not the compilation's.
            with contextlib.suppress(Exception):
                function, arguments = describe_call(made, self._values)
                call = replace(call, function=function, arguments=arguments)
        with self._lock:
            self._unclaimed.update(dict.fromkeys(self._hold()))
            number = self._made_for(str(about.get("fun_name", "")))
            if number is not None:
                del self._unclaimed[number]
                self._calls[number] = call

    def _made_for(self, name: str) -> int | None:
        """The program that was just compiled: the last one of that name where several threads compile."""
        numbers = list(self._unclaimed)
        if len(numbers) > 1:
            # JAX says jit(<lambda>), XLA jit__lambda.
            numbers = [
                one for one in numbers if _letters(self._held[one].hlo_modules()[0].name) == _letters(name)
            ]
        return numbers[-1] if numbers else None

    def _hold(self) -> list[int]:
        new = [program for program in loaded_programs() if id(program) not in self._held]
        self._held.update((id(program), program) for program in new)
        return [id(program) for program in new]

    def by_number(self) -> dict[int, list[Held]]:
        """The programs by XLA's number of the module.

        A program that was read from a file has the number of the process that compiled it, which another may have here.
        """
        self._hold()
        calls = _without_constant_settings(self._calls)
        found: dict[int, list[Held]] = {}
        for key, program in self._held.items():
            for module in program.hlo_modules():
                number = module_number(module.as_serialized_hlo_module_proto())
                try:
                    temporary: int | None = int(program.get_compiled_memory_stats().temp_size_in_bytes)
                except (RuntimeError, AttributeError):  # a backend without these figures
                    temporary = None
                found.setdefault(number, []).append(Held(module, temporary, calls.get(key)))
        self._held.clear()
        self._calls.clear()
        self._values.clear()
        return found


def _letters(name: str) -> str:
    return "".join(letter for letter in name if letter.isalnum())


def _without_constant_settings(calls: dict[int, Call]) -> dict[int, Call]:
    """Calls without the settings of JAX that were the same in all of them: they made nothing compile again."""
    seen: dict[str, set[str]] = {}
    for call in calls.values():
        for one in call.arguments or ():
            if one.kind == "setting":
                seen.setdefault(one.name, set()).add(one.value)
    return {
        key: replace(
            call,
            arguments=call.arguments
            and tuple(one for one in call.arguments if one.kind != "setting" or len(seen[one.name]) > 1),
        )
        for key, call in calls.items()
    }


def known_program(text: str, temporary_bytes: int | None = None, call: Call | None = None) -> KnownProgram:
    """Read a compiled program's text; ``call`` is what it was compiled for.

    Raises:
      PlanError: it is not one, or unreasonably large.
    """
    name = text.split(",", 1)[0].removeprefix("HloModule ").strip()
    found = {one.name: one for one in read_operations(text)}
    frames = Frames.of(text)
    parts = {one.name: named for one in found.values() if (named := _shares(one, frames))}
    # What XLA puts together has the place of its last operation: where most of the work comes from says more.
    sources = {**_sources(text, frames), **{name: shares[0][0] for name, shares in parts.items()}}
    divided = {name: shares for name, shares in parts.items() if len(shares) > 1}
    return KnownProgram(name, text, found, sources, temporary_bytes, call, divided)


def _shares(one: OperationFacts, frames: Frames) -> tuple[tuple[str, float], ...]:
    """The source lines that an operation's work comes from and the share of each, most first."""
    works: Counter[str] = Counter()
    for place, work in one.parts:
        works[frames.source(place)] += work
    works.pop("", None)
    whole = works.total()
    kept = [(source, work) for source, work in works.most_common(_MOST_PARTS) if work >= _LEAST_PART * whole]
    whole = sum(work for _, work in kept)
    return tuple((source, work / whole) for source, work in kept)


def _sources(text: str, frames: Frames) -> dict[str, str]:
    """``file.py:line`` of each instruction."""
    found = {name: f"{file}:{line}" for name, file, line in _OLD_PLACED.findall(text)}
    found.update({name: frames.source(frame) for name, frame in _PLACED.findall(text)})
    return found

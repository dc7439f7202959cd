"""Actionable messages about invalid settings.

Pydantic finds the problems, but its messages refer to Python types and union members. This module turns each problem
into one line with the dotted key, the value, what is allowed, the nearest spelling, and (for settings from a file)
the file and line. All problems of a file are reported at once.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Union

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from capibara.errors import ConfigError, did_you_mean

__all__ = [
    "FORMER_NAMES",
    "Problem",
    "SettingsError",
    "describe_field",
    "problems_from_validation",
    "show_value",
]

# Settings that were renamed: files, checkpoints and overrides may still have the former name.
FORMER_NAMES = {"chunk_length": "chunk_size"}


@dataclass(frozen=True)
class Problem:
    """One problem: the dotted ``key``, and ``text`` with the value and what is expected."""

    key: str
    text: str
    origin: str = ""

    def __str__(self) -> str:
        head = f"{self.origin}: " if self.origin else ""
        return f"{head}{self.key}: {self.text}" if self.key else f"{head}{self.text}"

    def under(self, prefix: str) -> Problem:
        """The same problem, one level further out."""
        if not prefix:
            return self
        return replace(self, key=f"{prefix}.{self.key}" if self.key else prefix)


class SettingsError(ConfigError):
    """One or more settings are unknown, of the wrong type, or outside their range.

    Attributes:
      problems: one :class:`Problem` each, in the order of the sections.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [str(problem) for problem in self.problems]
        super().__init__(
            lines[0] if len(lines) == 1 else "\n  ".join([f"{len(lines)} settings are wrong:", *lines])
        )

    def __reduce__(self) -> tuple[type[SettingsError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)

    def located(self, origin_of: Callable[[str], str]) -> SettingsError:
        """The same error with ``origin_of(key)`` (such as ``"demo.toml, line 3"``) in front of each problem."""
        return type(self)([p if p.origin else replace(p, origin=origin_of(p.key)) for p in self.problems])


def show_value(value: Any, limit: int = 80) -> str:
    """``repr(value)``, truncated to ``limit`` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _split_optional(annotation: Any) -> tuple[Any, bool, tuple[Any, ...]]:
    """Unwrap ``Annotated`` and ``X | None`` into (X, whether None is allowed, metadata met on the way)."""
    metadata: tuple[Any, ...] = ()
    optional = False
    while True:
        origin = typing.get_origin(annotation)
        if origin is typing.Annotated:
            annotation, *extra = typing.get_args(annotation)
            for item in extra:
                metadata += tuple(item.metadata) if isinstance(item, FieldInfo) else (item,)
        elif origin in (Union, types.UnionType):
            arms = [arm for arm in typing.get_args(annotation) if arm is not type(None)]
            optional = optional or len(arms) < len(typing.get_args(annotation))
            if len(arms) != 1:
                return annotation, optional, metadata
            annotation = arms[0]
        else:
            return annotation, optional, metadata


def field_kind(field: FieldInfo) -> tuple[Any, bool]:
    """The plain type of a field (``int``, ``tuple[str, ...]`` …) and whether None is allowed."""
    kind, optional, _ = _split_optional(field.annotation)
    return kind, optional


# What the patterns of string settings mean; used both to check and to explain.
NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*$"
PATH_PATTERN = r"^[^\x00-\x1f\x7f]+$"
_PATTERNS = {
    NAME_PATTERN: "made of letters, digits and '_'",
    PATH_PATTERN: "that is not empty and has no control characters",
}


def _describe_range(metadata: Sequence[Any]) -> str:
    bound = {
        name: getattr(item, name)
        for item in metadata
        for name in ("ge", "gt", "le", "lt")
        if hasattr(item, name)
    }
    low = next(
        (f"{'≥' if n == 'ge' else '>'} {bound[n]}" for n in ("ge", "gt") if bound.get(n) is not None), ""
    )
    high = next(
        (f"{'≤' if n == 'le' else '<'} {bound[n]}" for n in ("le", "lt") if bound.get(n) is not None), ""
    )
    return " and ".join(part for part in (low, high) if part)


def describe_kind(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """Describe what a type annotation allows: ``"an integer ≥ 1 and ≤ 4096"``."""
    kind, optional, more = _split_optional(annotation)
    origin = typing.get_origin(kind)
    if origin is Literal:
        text = "one of " + ", ".join(repr(choice) for choice in typing.get_args(kind))
    elif origin is tuple:
        few = max((item.min_length or 0 for item in metadata if hasattr(item, "min_length")), default=0)
        size = f"a list of at least {few}" if few else "a list"
        text = f"{size}, each entry {describe_kind(typing.get_args(kind)[0])}"
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        text = "a table of settings"
    else:
        text = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}.get(
            kind, str(kind)
        )
    everything = [*metadata, *more]
    limits = _describe_range(everything) if origin is not tuple else ""
    if kind is str:
        patterns = (getattr(item, "pattern", None) for item in everything)
        limits = next((_PATTERNS[p] for p in patterns if p in _PATTERNS), limits)
    text = f"{text} {limits}" if limits else text
    return f"{text}, or left out" if optional else text


def describe_field(field: FieldInfo) -> str:
    """Describe the values that a field allows."""
    return describe_kind(field.annotation, field.metadata)


def _find_field(model: type[BaseModel], loc: Sequence[Any]) -> tuple[FieldInfo | None, type[BaseModel]]:
    """The field that an error location ends in (None when unknown), and the section it was looked up in."""
    field: FieldInfo | None = None
    for part in loc:
        if not isinstance(part, str):
            break
        field = model.model_fields.get(part)
        if field is None:
            return None, model
        kind, _ = field_kind(field)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            model = kind
    return field, model


def _choices(field: FieldInfo) -> list[str]:
    kind, _ = field_kind(field)
    if typing.get_origin(kind) is tuple:
        kind, _, _ = _split_optional(typing.get_args(kind)[0])
    return (
        [c for c in typing.get_args(kind) if isinstance(c, str)] if typing.get_origin(kind) is Literal else []
    )


def _dotted(loc: Sequence[Any]) -> str:
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def unknown_key_text(name: str, options: Sequence[str], where: str) -> str:
    """The message for an unknown setting, with the nearest spelling and the whole list."""
    hint = did_you_mean(name, options)
    return f"there is no such setting{where}.{hint} Known: {', '.join(options)}"


def problems_from_validation(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Convert pydantic's errors to :class:`Problem`; problems of nested sections are kept."""
    problems: list[Problem] = []
    faults = error.errors(include_url=False)
    for fault in faults:
        # A list with a wrong entry is also reported as too short; the entry's own fault says it better.
        if any(
            len(f["loc"]) > len(fault["loc"]) and f["loc"][: len(fault["loc"])] == fault["loc"]
            for f in faults
        ):
            continue
        loc, key = fault["loc"], _dotted(fault["loc"])
        inner = fault.get("ctx", {}).get("error")
        if isinstance(inner, SettingsError):
            problems.extend(problem.under(key) for problem in inner.problems)
            continue
        field, section = _find_field(model, loc)
        expected = "" if field is None else describe_field(field)
        if field is not None and isinstance(loc[-1], int):
            expected = describe_kind(typing.get_args(field_kind(field)[0])[0])
        value = show_value(fault["input"])
        if fault["type"] == "extra_forbidden" or field is None:
            where = f" in [{_dotted(loc[:-1])}]" if len(loc) > 1 else ""
            text = unknown_key_text(str(loc[-1]) if loc else "", sorted(section.model_fields), where)
            problems.append(Problem(key, f"{text} (its value: {value})"))
            continue
        hint = ""
        if isinstance(fault["input"], str):
            hint = did_you_mean(fault["input"], _choices(field))
        extra = f" ({fault['msg'].removeprefix('Value error, ')})" if fault["type"] == "value_error" else ""
        problems.append(Problem(key, f"got {value}, expected {expected}.{hint}{extra}"))
    return problems

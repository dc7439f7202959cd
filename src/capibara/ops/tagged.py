"""Problems by tag: each category's ``specs`` has one list, of which tests, tuning and benchmarks take their parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

__all__ = ["tagged"]


class Tagged(Protocol):
    """Something with ``tags``, among ``small``, ``large`` and ``odd``."""

    @property
    def tags(self) -> tuple[str, ...]: ...


T = TypeVar("T", bound=Tagged)


def tagged(specs: Iterable[T], tag: str) -> tuple[T, ...]:
    """The specs that carry ``tag``."""
    return tuple(spec for spec in specs if tag in spec.tags)

"""Topologies of accelerators: parse ``"4x8"``, ``"2x2x4"``, ``"v4:2x2x4"`` and ``"v4-32"``.

Two ways of counting exist, and confusing them doubles or halves a bill:

* **chips**: a topology ``AxB`` or ``AxBxC`` is a grid of chips (as in ``v4:2x2x4``, 16 chips).
* **TensorCores**: Google's slice names count cores for v2, v3, v4 and v5p (``v4-32`` is 32 cores = 16
  chips), and chips for v5e and v6e (``v5litepod-16`` and ``v6e-16`` are 16 chips).

Capibara's documents call a mesh of 32 *devices* (4x8) "v4-32". Written as ``"4x8"`` it is that mesh, 32
chips; written as ``"v4-32"`` it is read as Google's name, 16 chips with 32 cores.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from capibara.errors import CapibaraError, did_you_mean

__all__ = ["Topology", "TopologyError", "parse_topology"]


class TopologyError(CapibaraError, ValueError):
    """A topology is misspelt or invalid."""


# TensorCores a chip, and whether a slice name counts cores. Sources: the "System architecture" and
# per-version pages of the Cloud TPU documentation; see chips.toml.
_CORES: dict[str, tuple[int, bool]] = {
    "v2": (2, True),
    "v3": (2, True),
    "v4": (2, True),
    "v5p": (2, True),
    "v5e": (1, False),
    "v6e": (1, False),
    "v7x": (2, True),
}
_ALIASES = {"v5litepod": "v5e", "v5lite": "v5e", "tpu7x": "v7x", "v6": "v6e", "trillium": "v6e"}
_MAX_CHIPS = 1_048_576


@dataclass(frozen=True)
class Topology:
    """A grid of chips, or a count of them.

    Attributes:
      shape: chips along each axis; one number for a slice name (its grid is not part of the name).
      generation: ``"v4"``, ``"v5e"`` …, or None when the text names none.
      text: what was parsed.
    """

    shape: tuple[int, ...]
    generation: str | None = None
    text: str = ""

    @property
    def size(self) -> int:
        """Number of chips (of mesh positions, when no generation is named)."""
        return math.prod(self.shape)

    @property
    def num_chips(self) -> int:
        """Number of chips."""
        return self.size

    @property
    def cores_per_chip(self) -> int | None:
        """TensorCores per chip, or None if no generation is named."""
        return None if self.generation is None else _CORES[self.generation][0]

    @property
    def num_cores(self) -> int | None:
        """TensorCores in all, or None when no generation is named."""
        return None if self.cores_per_chip is None else self.size * self.cores_per_chip

    @property
    def slice_name(self) -> str | None:
        """Google's name for a slice of this size (``"v4-32"`` for 16 chips), or None without a generation."""
        if self.generation is None:
            return None
        cores, counts_cores = _CORES[self.generation]
        prefix = {"v5e": "v5litepod", "v7x": "tpu7x"}.get(self.generation, self.generation)
        return f"{prefix}-{self.size * cores if counts_cores else self.size}"

    def __str__(self) -> str:
        grid = "x".join(map(str, self.shape))
        if self.generation is None:
            return f"{grid} ({self.size} chips)"
        return f"{self.generation}:{grid} ({self.size} chips, {self.num_cores} cores, {self.slice_name})"


def parse_topology(text: str) -> Topology:
    """Parse ``"4x8"``, ``"2x2x4"``, ``"v4:2x2x4"`` or ``"v4-32"``, which counts cores as Google's name does.

    Raises:
      TopologyError: (a ``ValueError``) another format, an unknown generation, a zero axis, more than 1,048,576 chips,
        or a number of cores that is not a multiple of a chip's.
    """
    if not isinstance(text, str):
        raise TopologyError(f"topology: got {text!r}, expected a string such as '4x8', 'v4:2x2x4' or 'v4-32'")
    lowered = text.strip().lower()
    if match := re.fullmatch(r"([a-z0-9]+)-(\d{1,9})", lowered):
        generation = _generation(match[1], text)
        cores, counts_cores = _CORES[generation]
        count = int(match[2])
        if counts_cores and count % cores:
            raise TopologyError(
                f"topology {text!r}: a {generation} slice name counts TensorCores, {cores} a chip, so the "
                f"number must be a multiple of {cores}"
            )
        chips = count // cores if counts_cores else count
        return Topology(_checked((chips,), text), generation, text)
    if match := re.fullmatch(r"(?:([a-z0-9]+):)?(\d{1,9}(?:x\d{1,9})*)", lowered):
        generation = _generation(match[1], text) if match[1] else None
        return Topology(_checked(tuple(int(n) for n in match[2].split("x")), text), generation, text)
    raise TopologyError(
        f"topology: got {text[:80]!r}, expected numbers separated by 'x' ('4x8'), a generation and a grid "
        "('v4:2x2x4') or a slice name ('v4-32')"
    )


def _generation(name: str, text: str) -> str:
    generation = _ALIASES.get(name, name)
    if generation not in _CORES:
        known = [*_CORES, *_ALIASES]
        raise TopologyError(
            f"topology {text!r}: unknown TPU generation {name!r}.{did_you_mean(name, known)} "
            f"Known: {', '.join(known)}"
        )
    return generation


def _checked(shape: tuple[int, ...], text: str) -> tuple[int, ...]:
    if len(shape) > 8:
        raise TopologyError(f"topology {text!r}: got {len(shape)} axes, expected at most 8")
    if 0 in shape:
        raise TopologyError(f"topology {text!r}: every number must be at least 1")
    if math.prod(shape) > _MAX_CHIPS:
        raise TopologyError(
            f"topology {text!r}: {math.prod(shape)} chips are more than the {_MAX_CHIPS} allowed"
        )
    return shape

"""Validation of the arguments that all plans share: a memory limit, counts, a price."""

from __future__ import annotations

from numbers import Real
from typing import Any

from capibara.hardware import Price, UnknownPriceError, get_price
from capibara.plan.errors import PlanError
from capibara.plan.grids import at_least, is_part_of_host
from capibara.plan.slices import Slice

__all__ = [
    "COMPILE_REMEDY",
    "MeshSizes",
    "check_counts",
    "host_notes",
    "limit_of",
    "price_of",
]

COMPILE_REMEDY = "compile=True, or leaving out --no-compile, asks the TPU compiler"
"""What plans that were not compiled say."""


class MeshSizes:
    """What ``AxisRules.spec`` reads of a mesh: the sizes of its axes."""

    def __init__(self, mesh: Any) -> None:
        self.shape: dict[str, int] = dict(mesh)


def limit_of(target: Slice, memory_limit_gb: Any) -> int:
    """Bytes that a device may use.

    Raises:
      PlanError: the limit is not a number of GiB above 0.
    """
    if memory_limit_gb is None:
        return target.usable_hbm_bytes
    if (
        isinstance(memory_limit_gb, bool)
        or not isinstance(memory_limit_gb, Real)
        or not 0 < memory_limit_gb < 1e6  # pyright: ignore[reportOperatorIssue]
    ):
        raise PlanError(f"memory_limit_gb={memory_limit_gb!r} must be a number of GiB above 0")
    return min(target.usable_hbm_bytes, max(1, int(float(memory_limit_gb) * 2**30)))


def check_counts(**numbers: Any) -> None:
    """Refuse what is not an integer of at least 1.

    Raises:
      PlanError: by the argument's name.
    """
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(f"{name}={value!r} must be an integer of at least 1")


def host_notes(target: Slice) -> list[str]:
    """A note for a part of a host, which has no price of its own."""
    if not is_part_of_host(target.generation, target.shape):
        return []
    whole = Slice(target.generation, at_least(target.generation, 2) or target.shape)
    return [f"{target.text} is a part of a host, which is rented as {whole}; the price is that part's"]


def price_of(target: Slice, region: str | None, term: str, path: Any, notes: list[str]) -> Price | None:
    """The price of a chip, or None and a note that it is not known.

    Raises:
      PriceError: no such term, or a wrong price file.
    """
    try:
        return get_price(f"tpu-{target.generation}", region=region, term=term, path=path)
    except UnknownPriceError as error:
        notes.append(f"no price: {error}")
        return None

"""What each part of a health check found, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["AxisHealth", "DeviceHealth", "Fault", "MemoryHealth", "ProductHealth", "Temperature"]

# Bytes below which a memory test is too short to be compared with the catalogue's bandwidth.
_ENOUGH = 256 * 2**20


@dataclass(frozen=True)
class Fault:
    """Something that failed.

    Attributes:
      check: the check's name (``"memory_healthy"``).
      where: the device, link or mesh axis (``"TPU_3(…)"``, ``"axis 'x'"``).
      what: what was found.
    """

    check: str
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class ProductHealth:
    """Matrix products whose result is known.

    Attributes:
      checked: products that were compared with the host's, element by element.
      wrong: elements that differ, over all products.
      first: the first of them, in words.
      rates: FLOP/s by dtype, the best of several repetitions.
      problem: why the products could not be computed; empty if they were.
      failed: whether that problem is the device's.
    """

    checked: int
    wrong: int = 0
    first: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""
    failed: bool = False


@dataclass(frozen=True)
class MemoryHealth:
    """A test of a device's memory with patterns.

    Attributes:
      tested: bytes that were filled, read back and compared, twice (a pattern and its complement).
      wrong: 4-byte words that differed.
      first_offset: byte offset of the first of them in the tested memory; None if there is none.
      wrong_bits: its wrong bits; None if there is none.
      bandwidth: bytes per second, read and written, the best of several repetitions.
      problem: why memory could not be tested; empty if it was.
      failed: whether that problem is the device's.
    """

    tested: int
    wrong: int = 0
    first_offset: int | None = None
    wrong_bits: int | None = None
    bandwidth: float | None = None
    problem: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Temperature:
    """A device's temperature, read after it computed.

    Attributes:
      normal: None if it cannot be known.
      celsius: degrees; None if it is not reported.
      limit: degrees from which it is not normal.
      reason: where the figures come from, or why there are none.
    """

    normal: bool | None
    celsius: float | None = None
    limit: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class DeviceHealth:
    """One device.

    Attributes:
      id: JAX's number of it.
      name: as JAX prints it.
      kind: ``device.device_kind``.
      platform: ``"cpu"``, ``"gpu"``, ``"tpu"``.
      process: the process that it belongs to.
      online: whether it answered a small computation, correctly and in time.
      seconds: until that answer; compilation included.
      problem: why it is not online; empty if it is.
      products: None if it was not reached.
      memory: None if it was not reached.
      temperature: None if it was not reached.
      peak_flops: FLOP/s by dtype, of the catalogue; empty if the chip is not in it.
      peak_bandwidth: bytes per second of its memory, of the catalogue.
      slow: what was slow each time that it was measured: rate → what was found.
    """

    id: int
    name: str
    kind: str
    platform: str
    process: int
    online: bool
    seconds: float | None = None
    problem: str = ""
    products: ProductHealth | None = None
    memory: MemoryHealth | None = None
    temperature: Temperature | None = None
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    peak_bandwidth: float | None = None
    slow: Mapping[str, str] = field(default_factory=dict)

    @property
    def answers(self) -> bool:
        """Whether it still did at the end."""
        return self.online and not any(part and part.failed for part in (self.products, self.memory))

    def rates(self) -> dict[str, tuple[float, float | None]]:
        """Measured rates with the catalogue's, by name: ``"float32"``, ``"bfloat16"`` (FLOP/s), ``"memory"``."""
        found: dict[str, tuple[float, float | None]] = {}
        if self.products is not None:
            found |= {
                dtype: (rate, self.peak_flops.get(dtype)) for dtype, rate in self.products.rates.items()
            }
        if self.memory is not None and self.memory.bandwidth is not None:
            enough = self.memory.tested >= _ENOUGH
            found["memory"] = self.memory.bandwidth, self.peak_bandwidth if enough else None
        return found

    def with_rate(self, name: str, rate: float) -> DeviceHealth:
        """The device with a newly measured rate, if that is better than those before.

        Args:
          name: as in :meth:`rates`. That part of the device was tested.
          rate: FLOP/s, or bytes per second.
        """
        if name == "memory":
            assert self.memory is not None
            return replace(
                self, memory=replace(self.memory, bandwidth=max(rate, self.memory.bandwidth or 0.0))
            )
        assert self.products is not None
        rates = {**self.products.rates, name: max(rate, self.products.rates.get(name, 0.0))}
        return replace(self, products=replace(self.products, rates=rates))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DeviceHealth:
        """The device whose ``dataclasses.asdict`` was given."""
        parts = {"products": ProductHealth, "memory": MemoryHealth, "temperature": Temperature}
        made = {key: kind(**data[key]) for key, kind in parts.items() if data[key] is not None}
        return cls(**{**data, **made})


@dataclass(frozen=True)
class AxisHealth:
    """One axis of the mesh.

    Attributes:
      name: the axis.
      size: devices along it.
      payload: bytes that each device sent.
      all_reduce: whether the sums were right; None if it was not reached.
      wrong_on: devices of this process with a wrong sum.
      permute: whether each device received its neighbour's data, in both directions; None if it was not reached.
      bad_links: ``(sender, receiver, wrong elements)``.
      all_reduce_bandwidth: bytes per second that each device sends in a ring: 2 (size - 1) / size · payload / time.
      link_bandwidth: bytes per second from a device to its neighbour.
      peak_link: the catalogue's figure for it.
      problem: an error or a time limit; empty if there was neither.
    """

    name: str
    size: int
    payload: int = 0
    all_reduce: bool | None = None
    wrong_on: tuple[str, ...] = ()
    permute: bool | None = None
    bad_links: tuple[tuple[str, str, int], ...] = ()
    all_reduce_bandwidth: float | None = None
    link_bandwidth: float | None = None
    peak_link: float | None = None
    problem: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AxisHealth:
        """The axis whose ``dataclasses.asdict`` was given, possibly through JSON."""
        links = tuple((str(a), str(b), int(count)) for a, b, count in data["bad_links"])
        return cls(**{**data, "wrong_on": tuple(data["wrong_on"]), "bad_links": links})

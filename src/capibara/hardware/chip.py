"""The description of a chip from which plans, utilisation and costs are computed.

Every figure is a vendor's (see :attr:`Chip.sources`) or was measured here; otherwise it is None.

Two views of a TPU: Google sells and prices *chips*; some generations have two TensorCores that appear as two JAX
devices (v2, v3, TPU7x, and v4 when not in megacore mode), others as one (v4 and v5p in megacore mode, v5e, v6e).
:func:`get_chip` returns the chip; :meth:`Chip.core_view` returns one core of it, with half of everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from capibara.errors import CapibaraError, did_you_mean

__all__ = ["Chip", "ChipError", "Source"]

GIB = 1024**3
# Spellings people use for the keys of `peaks`.
_DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "fp32": "float32",
    "f32": "float32",
    "fp64": "float64",
    "f64": "float64",
    "fp8": "float8",
    "float8_e4m3fn": "float8",
    "float8_e5m2": "float8",
    "s8": "int8",
    "uint8": "int8",
    "tensorfloat32": "tf32",
}


class ChipError(CapibaraError, ValueError):
    """A chip, or one of its figures, is unknown."""


@dataclass(frozen=True)
class Source:
    """The source of a figure."""

    title: str
    url: str | None = None

    def __str__(self) -> str:
        return f"{self.title} <{self.url}>" if self.url else self.title


@dataclass(frozen=True, kw_only=True)
class Chip:
    """A chip, or (``view == "core"``) one TensorCore of it.

    Attributes:
      name: catalogue name, such as ``"tpu-v4"``.
      title: the vendor's name.
      kind: ``"tpu"``, ``"gpu"`` or ``"cpu"``.
      peaks: (dtype, FLOP/s) pairs: dense matrix products, a multiply-add counted as 2. See :meth:`peak`.
      hbm_bytes: device memory in bytes (main memory for a CPU).
      hbm_bandwidth: bytes per second between that memory and the chip.
      usable_hbm_bytes: the part that the compiler makes available to programs, if known.
      cores_per_chip: TensorCores (TPU) or cores (CPU).
      view: whether the figures are a whole chip's or one core's.
      megacore: whether a chip's two cores can act as one device.
      link_bandwidth: bytes per second, one way, over one chip-to-chip link.
      links_per_chip: number of such links.
      interconnect_bandwidth: bytes per second, both ways together, over all links of a chip (vendor's figure).
      dcn_bandwidth: bytes per second, one way, that a chip has of its host's network to other slices.
      topology_dims: axes of the grid of chips.
      gke_accelerator: what Kubernetes calls nodes with these chips (GKE's label ``gke-tpu-accelerator``).
      chips_per_host: chips on each host of a slice with several hosts.
      most_chips_on_one_host: chips of the largest slice that has one host.
      sources: (figure, :class:`Source`) pairs.
      measured: whether ``peaks`` were measured on this machine.
    """

    name: str
    title: str
    vendor: str
    kind: Literal["tpu", "gpu", "cpu"]
    peaks: tuple[tuple[str, float], ...] = ()
    hbm_bytes: int | None = None
    hbm_bandwidth: float | None = None
    usable_hbm_bytes: int | None = None
    cores_per_chip: int | None = None
    view: Literal["chip", "core"] = "chip"
    megacore: bool = False
    link_bandwidth: float | None = None
    links_per_chip: int | None = None
    interconnect_bandwidth: float | None = None
    dcn_bandwidth: float | None = None
    topology_dims: int | None = None
    gke_accelerator: str | None = None
    chips_per_host: int | None = None
    most_chips_on_one_host: int | None = None
    aliases: tuple[str, ...] = ()
    device_kinds: tuple[str, ...] = ()
    sources: tuple[tuple[str, Source], ...] = ()
    measured: bool = False
    usable_hbm_bytes_core: int | None = field(default=None, repr=False)

    @property
    def peak_flops(self) -> dict[str, float]:
        """Known FLOP/s by dtype."""
        return dict(self.peaks)

    def peak(self, dtype: object = "bfloat16") -> float:
        """FLOP/s of dense matrix products in ``dtype`` (a name, a NumPy or a JAX dtype).

        Raises:
          ChipError: not known for this chip; the message lists what is, and how to measure.
        """
        name = (
            dtype
            if isinstance(dtype, str)
            else getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
        )
        key = _DTYPE_ALIASES.get(str(name), str(name))
        known = self.peak_flops
        if key in known:
            return known[key]
        have = ", ".join(known) if known else "none"
        remedy = (
            "; measure it with capibara.measure.measured_chip()"
            if self.kind == "cpu"
            else did_you_mean(key, known) + " The vendor states no other"
        )
        raise ChipError(
            f"{self.title}: the peak FLOP/s for {str(name)!r} is not known (known: {have}){remedy}"
        )

    def ridge(self, dtype: object = "bfloat16") -> float:
        """FLOP per byte of memory traffic above which compute is the limit (the roofline's ridge).

        Raises:
          ChipError: the peak or the memory bandwidth is not known.
        """
        if self.hbm_bandwidth is None:
            raise ChipError(f"{self.title}: the memory bandwidth is not known, so there is no ridge point")
        return self.peak(dtype) / self.hbm_bandwidth

    @property
    def devices_per_chip(self) -> int:
        """JAX devices per chip: its cores, unless they act as one (megacore)."""
        if self.kind != "tpu" or self.megacore or self.view == "core":
            return 1
        return self.cores_per_chip or 1

    def source(self, figure: str) -> Source | None:
        """The source of a figure (``"hbm_bytes"``, ``"peak_flops"``, ``"peak_flops.int8"``), or None."""
        table = dict(self.sources)
        return table.get(figure) or table.get(figure.partition(".")[0])

    def core_view(self) -> Chip:
        """One TensorCore: an equal share of compute, memory and its bandwidth; the links are those of the chip.

        Raises:
          ChipError: this is not a TPU.
        """
        if self.kind != "tpu" or self.cores_per_chip is None:
            raise ChipError(f"{self.title}: only TPUs have a core view; this is a {self.kind}")
        if self.view == "core" or self.cores_per_chip == 1:
            return self
        share = self.cores_per_chip
        return replace(
            self,
            name=f"{self.name}-core",
            title=f"{self.title}, one TensorCore of {share}",
            peaks=tuple((dtype, rate / share) for dtype, rate in self.peaks),
            hbm_bytes=None if self.hbm_bytes is None else self.hbm_bytes // share,
            hbm_bandwidth=None if self.hbm_bandwidth is None else self.hbm_bandwidth / share,
            usable_hbm_bytes=self.usable_hbm_bytes_core,
            view="core",
            megacore=False,
        )

    def describe(self) -> str:
        """All known figures, one per line, with their sources."""
        rows: list[tuple[str, str, str]] = []
        for dtype, rate in self.peaks:
            rows.append((f"peak {dtype}", f"{rate / 1e12:,.4g} TFLOP/s", f"peak_flops.{dtype}"))
        for label, value, scale, unit, key in (
            ("memory", self.hbm_bytes, GIB, "GiB", "hbm_bytes"),
            ("memory usable", self.usable_hbm_bytes, GIB, "GiB", "usable_hbm_bytes"),
            ("memory bandwidth", self.hbm_bandwidth, 1e9, "GB/s", "hbm_bandwidth"),
            ("a link, one way", self.link_bandwidth, 1e9, "GB/s", "link_bandwidth"),
            ("all links, both ways", self.interconnect_bandwidth, 1e9, "GB/s", "interconnect_bandwidth"),
            ("to other slices", self.dcn_bandwidth, 1e9, "GB/s", "dcn_bandwidth"),
        ):
            rows.append((label, "not known" if value is None else f"{value / scale:,.4g} {unit}", key))
        if self.cores_per_chip is not None:
            rows.append(("cores a chip", str(self.cores_per_chip), ""))
        if self.topology_dims is not None:
            rows.append(
                (
                    "grid of chips",
                    f"{self.topology_dims} axes, {self.links_per_chip} links a chip",
                    "links_per_chip",
                )
            )
        width = max(len(label) for label, _, _ in rows)
        lines = [f"{self.title} ({self.name})"]
        for label, shown, key in rows:
            source = self.source(key) if key and shown != "not known" else None
            lines.append(f"  {label:<{width}}  {shown}" + (f"   [{source.title}]" if source else ""))
        if not self.peaks:
            lines.append("  peak FLOP/s: not published; capibara.measure.measured_chip() measures it")
        return "\n".join(lines)

    def __str__(self) -> str:
        parts = [self.title]
        if self.peaks:
            dtype, rate = next(((d, r) for d, r in self.peaks if d == "bfloat16"), self.peaks[0])
            parts.append(f"{rate / 1e12:.4g} TFLOP/s {dtype}{' measured' if self.measured else ''}")
        if self.hbm_bytes is not None:
            parts.append(f"{self.hbm_bytes / GIB:.4g} GiB")
        return ", ".join(parts)

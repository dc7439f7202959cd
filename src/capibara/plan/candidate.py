"""One layout of a step, with its memory, time and price."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from capibara.hardware import Price
from capibara.plan.compiler import CompiledProgram
from capibara.plan.targets import Target
from capibara.plan.time import StepTime
from capibara.plan.time.network import Exchange
from capibara.sharding import Layout, across_slices

__all__ = ["Candidate"]

Source = Literal["compiler", "analytic"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout, its memory and its time.

    Attributes:
      layout: how the step is sharded over the slice.
      target: the slice or host.
      memory: bytes of HBM per device by kind; their sum is what a device needs.
      memory_source: ``"compiler"``, or ``"analytic"`` if nothing was compiled.
      time: of one step, as a range with its parts.
      tokens: tokens of a step; None if a step has no tokens.
      flops: floating-point operations of the model in a step (without rematerialisation), if known.
      price: of a chip; None if no price is known.
      program_hash, versions: of the compiled program.
      coordinates: of every device on the grid, in the order of the mesh; empty if nothing was compiled.
      compile_seconds: the time of the compilation, when it was done.
      program: the compiled program; None if nothing was compiled.
      slices: number of slices; each has ``layout`` and its share of the batch. ``tokens``, ``flops`` and the time are
        those of all of them.
      exchange: of gradients between them; None for one slice.
      settings: ``key=value``: settings of the program (:mod:`capibara.plan.program_settings`) with which it was
        compiled in place of the configuration's.
    """

    layout: Layout
    target: Target
    memory: Mapping[str, int]
    memory_source: Source
    time: StepTime
    tokens: int | None = None
    flops: float | None = None
    price: Price | None = None
    program_hash: str = ""
    versions: Mapping[str, str] | None = None
    coordinates: tuple[tuple[int, ...], ...] = ()
    compile_seconds: float = 0.0
    program: CompiledProgram | None = field(default=None, repr=False, compare=False)
    slices: int = 1
    exchange: Exchange | None = None
    settings: tuple[str, ...] = ()

    @property
    def training_layout(self) -> Layout:
        """The layout over the devices of all slices, in which it trains."""
        return across_slices(self.layout, self.slices)

    def overrides(self) -> list[str]:
        """``key=value`` settings, each an argument of ``capibara train``."""
        return [*self.settings, *self.training_layout.overrides()]

    @property
    def scheduled(self) -> bool:
        """Whether the compiler scheduled it, but made no machine code, so that its time is that of its roofline and of
        what cycles made of the compiled layouts'."""
        return self.program is not None and not self.program.complete

    @property
    def hbm_bytes(self) -> int:
        """Memory that one device needs, in bytes."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether a device has enough memory."""
        return self.hbm_bytes <= self.target.usable_hbm_bytes

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.time.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second, on all devices together."""
        return None if self.tokens is None or not self.step_seconds else self.tokens / self.step_seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOP utilisation: the model's own operations over the devices' bfloat16 peak in that time (Chowdhery
        et al., "PaLM", arXiv:2204.02311, appendix B)."""
        if self.flops is None or not self.step_seconds:
            return None
        peak = self.target.chip.peak("bfloat16") * self.target.num_devices * self.slices
        return self.flops / (self.step_seconds * peak)

    @property
    def usd_per_hour(self) -> float | None:
        """US dollars per hour for all slices."""
        return None if self.price is None else self.price.cost(self.target.num_chips * self.slices, 1.0)

    @property
    def usd_per_step(self) -> float | None:
        """US dollars per step."""
        hourly = self.usd_per_hour
        return None if hourly is None else hourly * self.step_seconds / 3600

    @property
    def usd_per_billion_tokens(self) -> float | None:
        """US dollars per 10⁹ tokens."""
        step = self.usd_per_step
        return None if step is None or not self.tokens else step / self.tokens * 1e9

    def to_json(self) -> dict[str, Any]:
        """Plain data for scripts; sizes in bytes, times in seconds."""
        return {
            "topology": self.target.text,
            "view": self.target.view,
            "slices": self.slices,
            "chips": self.target.num_chips * self.slices,
            "devices": self.target.num_devices * self.slices,
            "layout": self.training_layout.to_json(),
            "settings": list(self.settings),
            "overrides": self.overrides(),
            "exchange": None if self.exchange is None else self.exchange.to_json(),
            "hbm_bytes": self.hbm_bytes,
            "hbm_usable_bytes": self.target.usable_hbm_bytes,
            "fits": self.fits,
            "memory": dict(self.memory),
            "memory_source": self.memory_source,
            "time": asdict(self.time),
            "step_seconds": self.step_seconds,
            "tokens_per_step": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "model_flops": self.flops,
            "mfu": self.mfu,
            "usd_per_hour": self.usd_per_hour,
            "usd_per_step": self.usd_per_step,
            "usd_per_billion_tokens": self.usd_per_billion_tokens,
            "price": None if self.price is None else str(self.price),
            "program_hash": self.program_hash,
            "versions": dict(self.versions or {}),
            "compile_seconds": self.compile_seconds,
            "scheduled": self.scheduled,
        }

"""The result of a serving plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from capibara.hardware import Price
from capibara.plan.errors import PlanError
from capibara.plan.serving.task import Mesh
from capibara.plan.targets import Target
from capibara.plan.time import StepTime

__all__ = ["ServingOption", "ServingPlan", "ServingPoint", "UnreachableTargetError"]

Source = Literal["compiler", "analytic"]


class UnreachableTargetError(PlanError):
    """The model fits, but none of the requested slices meets the latency targets."""


@dataclass(frozen=True, kw_only=True)
class ServingPoint:
    """A number of concurrent requests on one mesh, with both programs.

    A batch of ``concurrency`` requests starts together: its prompts are read a group at a time, then every decoding
    step produces one token for each request.

    Attributes:
      target, mesh: where it runs.
      concurrency: concurrent requests, on all devices together.
      group: prompts read at once.
      prompt_length, output_length: tokens of a request and of its answer.
      decode, prefill: seconds of one step of decoding, and of reading one group of prompts.
      decode_memory, prefill_memory: bytes of HBM a device by kind while each runs.
      cache_bytes: of the whole batch on all devices, without padding.
      source: ``"compiler"``, or ``"analytic"`` if nothing was compiled.
      price: of a chip; None if no price is known.
      program_hashes, versions: of the compiled programs.
    """

    target: Target
    mesh: Mesh
    concurrency: int
    group: int
    prompt_length: int
    output_length: int
    decode: StepTime
    prefill: StepTime
    decode_memory: Mapping[str, int]
    prefill_memory: Mapping[str, int]
    cache_bytes: int
    source: Source
    price: Price | None = None
    program_hashes: tuple[str, ...] = ()
    versions: Mapping[str, str] | None = None

    @property
    def hbm_bytes(self) -> int:
        """Memory that one device needs: the larger of the two programs."""
        return max(sum(self.decode_memory.values()), sum(self.prefill_memory.values()))

    @property
    def groups(self) -> int:
        """Prefills of a batch."""
        return -(-self.concurrency // self.group)

    @property
    def seconds_per_token(self) -> float:
        """Between two tokens of a request."""
        return self.decode.seconds

    @property
    def time_to_first_token(self) -> float:
        """Seconds until the last request of a batch has its first token: all prompts are read by then."""
        return self.groups * self.prefill.seconds

    @property
    def batch_seconds(self) -> float:
        """From the first prompt to the last token of a batch; prefill gives each request its first token."""
        return self.time_to_first_token + (self.output_length - 1) * self.decode.seconds

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens per second, of all requests together, including prefill."""
        return self.concurrency * self.output_length / self.batch_seconds

    @property
    def usd_per_hour(self) -> float | None:
        """Of the slice."""
        return None if self.price is None else self.price.cost(self.target.num_chips, 1.0)

    @property
    def usd_per_million_tokens(self) -> float | None:
        """US dollars per 10⁶ answer tokens (including their prompts)."""
        hourly = self.usd_per_hour
        return None if hourly is None else hourly / 3600 / self.tokens_per_second * 1e6

    def to_json(self) -> dict[str, Any]:
        """Plain data; sizes in bytes, times in seconds."""
        return {
            "topology": self.target.text,
            "view": self.target.view,
            "mesh": [list(pair) for pair in self.mesh],
            "concurrency": self.concurrency,
            "group": self.group,
            "hbm_bytes": self.hbm_bytes,
            "cache_bytes": self.cache_bytes,
            "decode_memory": dict(self.decode_memory),
            "prefill_memory": dict(self.prefill_memory),
            "seconds_per_token": self.seconds_per_token,
            "time_to_first_token": self.time_to_first_token,
            "tokens_per_second": self.tokens_per_second,
            "decode": asdict(self.decode),
            "prefill": asdict(self.prefill),
            "usd_per_hour": self.usd_per_hour,
            "usd_per_million_tokens": self.usd_per_million_tokens,
            "price": None if self.price is None else str(self.price),
            "source": self.source,
            "program_hashes": list(self.program_hashes),
            "versions": dict(self.versions or {}),
        }


@dataclass(frozen=True, kw_only=True)
class ServingOption:
    """What one slice can do.

    Attributes:
      target: the slice. limit_bytes: memory that one of its devices may use.
      largest: the most concurrent requests that fit; None if not even one per device does.
      at_target: the most that fit and meet the targets; None if not even the smallest batch does; without targets the
        batch with the most tokens per second.
      smallest: the fastest compiled point, if the targets are not met.
      compiled: programs that were compiled (or found in the cache).
      failure: why there is no result, as text; empty otherwise.
    """

    target: Target
    limit_bytes: int
    largest: ServingPoint | None = None
    at_target: ServingPoint | None = None
    smallest: ServingPoint | None = None
    compiled: int = 0
    failure: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        points = {name: getattr(self, name) for name in ("largest", "at_target", "smallest")}
        return {
            "topology": self.target.text,
            "slice": self.target.slice_name,
            "chips": self.target.num_chips,
            "limit_bytes": self.limit_bytes,
            **{name: None if point is None else point.to_json() for name, point in points.items()},
            "compiled": self.compiled,
            "failure": self.failure,
        }


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """The best way to serve a model on the requested slices.

    Attributes:
      work: a one-line description.
      options: one per slice; those that meet the targets first, the cheapest first.
      latency, first_token: the targets in seconds, or None.
      weight_bytes, cache_bytes_per_request: of all devices together, without padding.
      notes: caveats.
    """

    work: str
    options: tuple[ServingOption, ...]
    latency: float | None
    first_token: float | None
    weight_bytes: int
    cache_bytes_per_request: int
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> ServingPoint:
        """The cheapest that meets the targets (without a price: the one with the most tokens per second and chip)."""
        point = self.options[0].at_target
        if point is None:
            raise PlanError("no slice of this plan meets the targets")
        return point

    def to_json(self) -> dict[str, Any]:
        """Plain data for scripts."""
        return {
            "work": self.work,
            "latency": self.latency,
            "first_token": self.first_token,
            "weight_bytes": self.weight_bytes,
            "cache_bytes_per_request": self.cache_bytes_per_request,
            "notes": list(self.notes),
            "options": [option.to_json() for option in self.options],
        }

    def __str__(self) -> str:
        from capibara.plan.serving.table import serving_text

        return serving_text(self)

"""What is planned, seen by the search: its layouts, rough figures of each, and the program to compile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Protocol

from capibara.config import ModularModelConfig
from capibara.config.sections import FinetuneSection
from capibara.core.encoders import require_decoder
from capibara.data.packed import decided, is_packed
from capibara.errors import ConfigError
from capibara.plan.compiler import Job
from capibara.plan.memory import estimate_memory
from capibara.plan.search.analytic import count_parameters, estimate_time, step_flops
from capibara.plan.search.space import layouts
from capibara.plan.sizes import count_text
from capibara.plan.targets import Target
from capibara.sharding import Layout

__all__ = ["Rough", "TrainWork", "Work"]


@dataclass(frozen=True)
class Rough:
    """Figures of a layout that nothing was compiled for.

    Attributes:
      memory: bytes a device, by kind.
      compute, traffic, communication: seconds.
    """

    memory: Mapping[str, int]
    compute: float
    traffic: float
    communication: float

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.compute + self.traffic + self.communication

    @property
    def hbm_bytes(self) -> int:
        """A device's, of all kinds."""
        return sum(self.memory.values())


class Work(Protocol):
    """A step that can be planned."""

    @property
    def title(self) -> str:
        """What it is, in a line."""
        ...

    @property
    def tokens(self) -> int | None:
        """Tokens of a step."""
        ...

    @property
    def flops(self) -> float | None:
        """Floating-point operations of a step that the model asks for."""
        ...

    def layouts(self, target: Target) -> Iterator[Layout]:
        """Every layout worth thinking of."""
        ...

    def rough(self, layout: Layout, target: Target) -> Rough:
        """What it would take, without a compiler."""
        ...

    def job(self, layout: Layout, target: Target) -> Job:
        """The program to compile."""
        ...


@dataclass(frozen=True)
class TrainWork:
    """The train step of a configuration."""

    config: ModularModelConfig

    def __post_init__(self) -> None:
        require_decoder(self.config.model, "a plan for training")
        if self.config.finetune.objective == "dpo":
            raise ConfigError(
                "finetune.objective='dpo': steps on pairs of answers are not planned. Plan with "
                "finetune.objective=next_token"
            )

    @cached_property
    def _decided(self) -> ModularModelConfig:
        """``config`` with its kind of rows, which may take the first record of each data file."""
        return self.config.replace(data=decided(self.config.data))

    @property
    def title(self) -> str:
        """Layers, width, parameters (and those trained, if not all) and tokens a step."""
        m, t, f = self.config.model, self.config.train, self.config.finetune
        words = f"{count_text(count_parameters(self.config.replace(finetune=FinetuneSection())).every)} parameters"
        if f.method != "full":
            words += f" and {count_text(count_parameters(self.config).trained)} of adapters"
            words += "" if f.base == "none" else f" beside {f.base}"
        words += ", packed" if is_packed(self._decided.data) else ""
        return (
            f"{m.num_layers} × {_pattern_text(m.pattern)}, width {m.embed_dim}, {words}; "
            f"{t.batch_size} × {t.sequence_length} tokens a step"
        )

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.config.train.batch_size * self.config.train.sequence_length

    @property
    def flops(self) -> float:
        """Floating-point operations of a step."""
        return step_flops(self.config)

    def layouts(self, target: Target) -> Iterator[Layout]:
        """Every layout worth thinking of."""
        return layouts(self.config, target)

    def rough(self, layout: Layout, target: Target) -> Rough:
        """What it would take, without a compiler."""
        memory = estimate_memory(self._decided, layout, target)
        time = estimate_time(self.config, layout, target)
        return Rough(dict(memory.kinds), time.compute, time.memory, time.communication)

    def job(self, layout: Layout, target: Target) -> Job:
        """The program to compile."""
        return Job(
            builder="capibara.plan.workloads.training:lower_train_step",
            params={
                "config": self.config.to_dict(),
                "layout": layout.to_json(),
                "packed": is_packed(self._decided.data),
            },
            slice=target,
            mesh=layout.mesh,
            compiler_options=layout.compiler_options,
        )


def _pattern_text(pattern: Sequence[str]) -> str:
    """``"5 local/attention"``."""
    runs = [(kind, len(list(group))) for kind, group in groupby(pattern)]
    return "/".join(kind if count == 1 else f"{count} {kind}" for kind, count in runs)

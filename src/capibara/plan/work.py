"""What is planned, seen by the search: its layouts, rough figures of each, and the program to compile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from capibara.config import ModularModelConfig
from capibara.errors import ConfigError
from capibara.plan.compiler import Job
from capibara.plan.layout import Layout
from capibara.plan.memory import estimate_memory
from capibara.plan.search.analytic import estimate_time, model_specs, step_flops
from capibara.plan.search.space import layouts
from capibara.plan.sizes import count_text
from capibara.plan.slices import Slice

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

    def layouts(self, target: Slice) -> Iterator[Layout]:
        """Every layout worth thinking of."""
        ...

    def rough(self, layout: Layout, target: Slice) -> Rough:
        """What it would take, without a compiler."""
        ...

    def job(self, layout: Layout, target: Slice, *, buffers: bool = False) -> Job:
        """The program to compile."""
        ...


@dataclass(frozen=True)
class TrainWork:
    """The train step of a configuration."""

    config: ModularModelConfig

    def __post_init__(self) -> None:
        if self.config.finetune.method != "full":
            raise ConfigError(
                f"finetune.method={self.config.finetune.method!r}: estimates are for training all parameters. Plan "
                "with finetune.method=full; adapters need less"
            )

    @property
    def title(self) -> str:
        """Layers, width, parameters and tokens a step."""
        m, t = self.config.model, self.config.train
        count = count_text(model_specs(self.config).num_params)
        return (
            f"{m.num_layers} × {'/'.join(m.pattern)}, width {m.embed_dim}, {count} parameters; "
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

    def layouts(self, target: Slice) -> Iterator[Layout]:
        """Every layout worth thinking of."""
        return layouts(self.config, target)

    def rough(self, layout: Layout, target: Slice) -> Rough:
        """What it would take, without a compiler."""
        memory = estimate_memory(self.config, layout, target)
        time = estimate_time(self.config, layout, target)
        return Rough(dict(memory.kinds), time.compute, time.memory, time.communication)

    def job(self, layout: Layout, target: Slice, *, buffers: bool = False) -> Job:
        """The program to compile."""
        return Job(
            builder="capibara.train.lowered:lower_train_step",
            params={"config": self.config.to_dict(), "layout": layout.to_json()},
            slice=target,
            mesh=layout.mesh,
            compiler_options=layout.compiler_options,
            buffers=buffers,
        )

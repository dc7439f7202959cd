"""Settings of the program: how a step is computed, not which model is trained, nor how it is sharded.

They are compiled with ``--improve``, beside changes of the model and its training, and chosen by a plan that is asked
to (:mod:`capibara.plan.settings_choice`). By default they stay as configured: compiling blocks one by one takes several
times as long as a loop over them, and sums of 16-bit parts round differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from capibara.config import ModularModelConfig
from capibara.config.sections import ModelSection
from capibara.sharding import Layout

__all__ = ["PROGRAM_SETTINGS", "ProgramChange", "program_changes"]

_UNROLL, _EXCHANGE = "model.scan_layers", "precision.exchange"
PROGRAM_SETTINGS = (_UNROLL, _EXCHANGE)
"""Settings of the program that a plan can choose, and that can be kept instead."""

# Compiling each block takes its time: 24 of 50 million parameters five times that of a loop, and more in proportion.
_MOST_UNROLLED = 32
# Fifty steps in which the parts of gradients are rounded were compared with steps in which they are not for these
# blocks, on meshes of these axes up to these sizes (emulated devices; tests/train/test_exchange_dtype.py).
_TESTED_BLOCKS = frozenset({"attention"})
_TESTED_AXES = {"data": 32, "model": 4}


@dataclass(frozen=True)
class ProgramChange:
    """Another value of a setting of the program.

    Attributes:
      change: the setting and the value.
      words: why it may help. effect: what it changes of the results.
      reason: why a plan does not choose it by itself; empty if it may.
      proposed: whether it is worth compiling for those who choose it themselves.
    """

    change: Mapping[str, Any]
    words: str
    effect: str
    reason: str = ""
    proposed: bool = True

    @property
    def name(self) -> str:
        """Name of the setting."""
        return next(iter(self.change))


def program_changes(config: ModularModelConfig, layout: Layout) -> Iterator[ProgramChange]:
    """The other values that settings of the program may have in a layout."""
    model, precision = config.model, config.precision
    half = precision.compute_dtype in ("bfloat16", "float16")
    if half and precision.exchange != "compute" and layout.num_devices > 1:
        yield ProgramChange(
            {_EXCHANGE: "compute"},
            "gradients exchanged in the dtype of products: half the bytes, each part is rounded before the sum",
            f"each device's part of a linear layer's gradient is rounded to {precision.compute_dtype} before the sum",
            reason=_untested(config, layout),
        )
    if model.scan_layers != "unroll" and _loops(model, layout):
        long = model.num_layers > _MOST_UNROLLED
        yield ProgramChange(
            {_UNROLL: "unroll"},
            "blocks that are compiled one by one: no stacks of what a loop keeps for its gradient",
            "the same arithmetic: results differ only where the compiler rounds in another place",
            reason=f"{model.num_layers} blocks take long to compile one by one (at most {_MOST_UNROLLED} are tried)"
            if long
            else "",
            proposed=not long,
        )


def _loops(model: ModelSection, layout: Layout) -> bool:
    """Whether a loop goes through blocks: not where a model, or a stage of a pipeline, has one turn of its pattern."""
    from capibara.core.decoder import groups_of

    return max(group.turns for group in groups_of(model)) > layout.stages


def _untested(config: ModularModelConfig, layout: Layout) -> str:
    """Why nothing is known of gradients whose parts are rounded; empty if they were tested."""
    model = config.model
    what = ""
    if config.precision.compute_dtype != "bfloat16":
        what = f"products of {config.precision.compute_dtype}"
    elif others := sorted(set(model.block_kinds) - _TESTED_BLOCKS):
        what = f"{others[0]} blocks"
    elif model.experts.count:
        what = "experts"
    elif model.latent.kv_rank is not None:
        what = "latent attention"
    elif config.finetune.method != "full":
        what = "adapters"
    else:
        for axis, size in layout.mesh:
            if size > _TESTED_AXES.get(axis, 1):
                what = f"{size} devices along {axis!r}"
                break
    return f"what the rounding does to training was not tested with {what}" if what else ""

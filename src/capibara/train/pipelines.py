"""Which models can be trained over the mesh axis ``pipeline``, and what a run says of it."""

from __future__ import annotations

from typing import Any

from capibara.core.pipelined import check_stages, stages_of
from capibara.errors import ConfigError
from capibara.sharding import Layout
from capibara.train.frameworks import WithLoss

__all__ = ["check_pipeline", "pipeline_notes"]


def check_pipeline(model: Any, mesh: Any) -> None:
    """Refuse a model that the mesh's stages would not divide.

    Args:
      model: any model of the protocol. mesh: with the axis ``pipeline``, or not.

    Raises:
      ConfigError: the model is of another kind, has a loss of its own, or cannot be divided into equal stages.
    """
    stages = stages_of(mesh)
    if stages == 1:
        return
    said = f"the mesh axis 'pipeline' has {stages} devices, "
    if isinstance(model, WithLoss):
        raise ConfigError(
            f"{said}and the stages of a pipeline compute the next-token loss of the model. Leave out loss=, or use the "
            "axes data, fsdp and model"
        )
    if not hasattr(type(model), "loss_of_microbatches"):
        raise ConfigError(
            f"{said}which divides the blocks of a ModularCapibaraModel into stages; got {type(model).__name__}, whose "
            "layers are not known. Use the axes data, fsdp and model"
        )
    check_stages(model.config, stages)


def pipeline_notes(layout: Layout | None) -> list[str]:
    """What a run with stages says before it begins; nothing without them."""
    if layout is None or layout.stages == 1:
        return []
    said = f"{layout.stages} stages, {layout.microbatches} microbatches: a stage waits {layout.bubble:.0%} of each step"
    if layout.microbatches < layout.stages:
        said += "; use more microbatches than stages (train.gradient_accumulation_steps)"
    return [said]

"""A planned layout in the form of other programs: MaxText's settings, or a Python file of ``NamedSharding``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.errors import did_you_mean
from capibara.plan.errors import PlanError
from capibara.plan.export.maxtext import MaxTextExport, check_maxtext, maxtext_settings
from capibara.plan.export.named_sharding import named_sharding_code
from capibara.plan.slices import Slice

if TYPE_CHECKING:
    from capibara.config import ModularModelConfig
    from capibara.plan.targets import Target
    from capibara.sharding import Layout

__all__ = [
    "FORMATS",
    "MaxTextExport",
    "check_export",
    "export_layout",
    "maxtext_settings",
    "named_sharding_code",
]

FORMATS = ("maxtext", "jax")


def check_export(config: ModularModelConfig, target: Target, format: str) -> None:
    """Refuse what no layout of a configuration could be exported for, before one is looked for.

    Raises:
      PlanError: the target is a host of GPUs, or MaxText cannot express a setting of the configuration.
    """
    if not isinstance(target, Slice):
        raise PlanError(f"the layout of a plan for GPUs ({target.text}) is not exported, only a slice's")
    if format == "maxtext":
        check_maxtext(config)


def export_layout(
    config: ModularModelConfig,
    layout: Layout,
    target: Slice,
    format: str,
    *,
    slices: int = 1,
    coordinates: tuple[tuple[int, ...], ...] = (),
) -> str:
    """A layout of a configuration's training step as a file of another program.

    Args:
      config: what is trained; its batch is that of all slices together.
      layout: how it is trained, over the devices of all slices (:meth:`capibara.plan.Candidate.training_layout`).
      target: one slice.
      format: ``"maxtext"``, a shell script with MaxText's settings and compiler flags (:func:`maxtext_settings`), or
        ``"jax"``, a Python file (:func:`named_sharding_code`).
      slices: how many such slices.
      coordinates: of a slice's devices on its grid of chips, in the mesh's order, if known from the compiler.

    Raises:
      PlanError: an unknown format; or MaxText cannot express a setting.
    """
    if format == "maxtext":
        return maxtext_settings(config, layout, target, slices=slices).script()
    if format == "jax":
        return named_sharding_code(config, layout, target, slices=slices, coordinates=coordinates)
    raise PlanError(
        f"format={format!r} must be one of {', '.join(FORMATS)}.{did_you_mean(str(format), FORMATS)}"
    )

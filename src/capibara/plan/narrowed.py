"""A piece of work with fewer layouts: those that keep what was set by hand, within a limit of memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from capibara.config import ModularModelConfig
from capibara.config.overrides import setting_text
from capibara.plan.compiler import Job
from capibara.plan.compiler.limits import within
from capibara.plan.errors import PlanError
from capibara.plan.program_settings import PROGRAM_SETTINGS
from capibara.plan.targets import Target
from capibara.plan.work import Rough, Work
from capibara.sharding import Layout

__all__ = ["LAYOUT_SETTINGS", "Kept", "Narrowed"]

# What a layout decides of a configuration, and the field of the layout that holds it.
_FIELDS = {
    "model.remat": "remat",
    "train.gradient_accumulation_steps": "microbatches",
    "tpu.parameters": "parameters",
    "tpu.optimizer": "optimizer",
    "tpu.offload": "offload",
    "tpu.flags": "flags",
}
_MESH = ("tpu.topology", "tpu.mesh_axes")
LAYOUT_SETTINGS = (*_FIELDS, *_MESH)
"""The settings that a plan chooses, and that can be kept instead."""


@dataclass(frozen=True)
class Kept:
    """Settings that a plan keeps instead of choosing them.

    Attributes:
      layout: the layout that the configuration describes.
      settings: names of the settings that are kept, of :data:`LAYOUT_SETTINGS`.
    """

    layout: Layout
    settings: tuple[str, ...]

    @classmethod
    def of(cls, config: ModularModelConfig, settings: Iterable[str]) -> Kept:
        """The settings of a configuration that are kept.

        Raises:
          PlanError: a plan does not choose one of them.
        """
        names = list(settings)
        for name in names:
            if name not in LAYOUT_SETTINGS:
                known = ", ".join((*LAYOUT_SETTINGS, *PROGRAM_SETTINGS))
                raise PlanError(f"keep: got {name!r:.100}, expected some of {known}")
        chosen = tuple(dict.fromkeys(names))
        return cls(Layout.from_config(config), chosen)

    def layouts(self, every: Iterable[Layout], rows: int) -> Iterator[Layout]:
        """Each layout with what is kept, once; not those of other meshes, or whose rows do not divide.

        Args:
          rows: of a batch.
        """
        fields = {
            _FIELDS[name]: getattr(self.layout, _FIELDS[name]) for name in self.settings if name in _FIELDS
        }
        mesh = any(name in _MESH for name in self.settings)
        seen = set()
        for layout in every:
            if mesh:
                if sorted(_long(layout.mesh)) != sorted(_long(self.layout.mesh)):
                    continue
                # In the order that was asked for: it decides which devices are neighbours.
                layout = replace(layout, mesh=_ordered(layout.mesh, self.layout.mesh))
            found = replace(layout, **fields)
            sizes = found.axis_sizes
            data = sizes.get("data", 1) * sizes.get("expert", 1)
            if found not in seen and rows % (found.microbatches * data) == 0:
                seen.add(found)
                yield found

    def __str__(self) -> str:
        known = self.layout.settings()
        return ", ".join(f"{name}={setting_text(known[name])}" for name in self.settings)


def _axes(layouts: Iterable[Layout]) -> str:
    return ", ".join(dict.fromkeys(axis for layout in layouts for axis, _ in layout.mesh))


def _long(mesh: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The axes along which there is more than one device."""
    return [(axis, size) for axis, size in mesh if size > 1]


def _ordered(
    mesh: tuple[tuple[str, int], ...], like: Iterable[tuple[str, int]]
) -> tuple[tuple[str, int], ...]:
    """A mesh with its axes in the order of another; those that the other does not have come last."""
    order = [axis for axis, _ in like]
    return tuple(sorted(mesh, key=lambda pair: order.index(pair[0]) if pair[0] in order else len(order)))


@dataclass(frozen=True)
class Narrowed:
    """Another piece of work with fewer layouts.

    Attributes:
      work: the other one.
      limit_bytes: what a device may use: its layouts are compiled for that.
      kept: what its layouts keep, with the rows of a batch; None: nothing.
    """

    work: Work
    limit_bytes: int
    kept: tuple[Kept, int] | None = None

    @property
    def title(self) -> str:
        """What it is, in a line, with what is kept."""
        return self.work.title if self.kept is None else f"{self.work.title}, with {self.kept[0]}"

    @property
    def tokens(self) -> int | None:
        """Tokens of a step."""
        return self.work.tokens

    @property
    def flops(self) -> float | None:
        """Floating-point operations of a step that the model asks for."""
        return self.work.flops

    def layouts(self, target: Target) -> Iterator[Layout]:
        """Those that are left.

        Raises:
          PlanError: none is left of some.
        """
        every = list(self.work.layouts(target))
        left = every
        if self.kept is not None:
            kept, rows = self.kept
            left = list(kept.layouts(every, rows))
            if every and not left:
                raise PlanError(
                    f"no layout of {target.num_devices} devices has {kept}: a plan knows the mesh axes {_axes(every)}, "
                    "which must have as many devices in all; those along 'model' must divide the heads, and "
                    f"train.batch_size={rows} must be a multiple of the microbatches times the devices along 'data'. "
                    "Leave out one of these settings"
                )
        yield from (within(layout, self.limit_bytes, target) for layout in left)

    def keeps(self, layout: Layout) -> bool:
        """Whether a layout has what is kept."""
        if self.kept is None:
            return True
        kept, rows = self.kept
        return layout in kept.layouts([layout], rows)

    def rough(self, layout: Layout, target: Target) -> Rough:
        """What it would take, without a compiler."""
        return self.work.rough(layout, target)

    def job(self, layout: Layout, target: Target) -> Job:
        """The program to compile."""
        return self.work.job(layout, target)

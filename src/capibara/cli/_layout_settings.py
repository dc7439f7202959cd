"""Settings of a layout that were given by hand, beside a plan that would choose them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capibara.config import ModularModelConfig

__all__ = ["GivenByHand"]

_DERIVED = ("tpu.enabled", "tpu.num_chips")
_LIMIT = "tpu.memory_limit_gb"


@dataclass(frozen=True)
class GivenByHand:
    """What the ``key=value`` settings of a command line say about what a plan chooses.

    Attributes:
      kept: settings that a plan can keep. derived: those that follow from its slice.
      memory_limit_gb: the limit, by its option or else by its setting.
    """

    kept: tuple[str, ...]
    derived: tuple[str, ...]
    memory_limit_gb: float | None

    @classmethod
    def of(cls, config: ModularModelConfig, args: argparse.Namespace) -> GivenByHand:
        """Those of ``args.overrides``, of which ``config`` was made.

        Raises:
          SettingsError: there is no such setting.
        """
        from capibara.config import ModularModelConfig
        from capibara.config.overrides import override_names
        from capibara.plan.narrowed import LAYOUT_SETTINGS
        from capibara.plan.program_settings import PROGRAM_SETTINGS

        chosen = (*LAYOUT_SETTINGS, *PROGRAM_SETTINGS) if args.choose_settings else LAYOUT_SETTINGS
        names = override_names(args.overrides, ModularModelConfig)
        limit = args.memory_limit
        if limit is None and _LIMIT in names:
            limit = config.tpu.memory_limit_gb
        return cls(
            tuple(name for name in names if name in chosen),
            tuple(name for name in names if name in _DERIVED),
            limit,
        )

    def notes(self, config: ModularModelConfig, settings: dict[str, object]) -> tuple[str, ...]:
        """That a plan replaced some by its own ``settings``."""
        from capibara.config.overrides import setting_text

        mine = {"tpu.enabled": config.tpu.enabled, "tpu.num_chips": config.tpu.num_chips}
        replaced = [
            f"{name}={setting_text(mine[name])} by {setting_text(settings[name])}"
            for name in self.derived
            if mine[name] != settings[name]
        ]
        return (f"replaced by the plan's own: {', '.join(replaced)}",) if replaced else ()

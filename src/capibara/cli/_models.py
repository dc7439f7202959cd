"""Which settings a verb's arguments name."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capibara.config import ModularModelConfig

__all__ = ["named_config"]


def named_config(args: argparse.Namespace) -> tuple[ModularModelConfig, str | None]:
    """The settings of ``--model``, a published folder, or of ``--config``, with ``key=value``; and its name."""
    from capibara.config import ModularModelConfig

    if args.model is None:
        return ModularModelConfig.from_toml(args.config, args.overrides), args.config
    from capibara.families import read_config

    return read_config(args.model, overrides=args.overrides)[0], None

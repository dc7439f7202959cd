"""Typed settings: load them from TOML, check them, print them, write them back.

Two things live here. :class:`ModularModelConfig` holds everything a training run or a generation needs, in
sections (``config.model.num_layers``), and comes from a TOML file plus ``key=value`` overrides.
:class:`TPUConfig` describes the accelerator slice a program is meant for and answers sharding questions.

Nothing is imported until it is asked for, so ``import capibara.config`` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from capibara.errors import ConfigError

if TYPE_CHECKING:
    from capibara.config.files import ConfigFileNotFoundError, list_packaged_configs
    from capibara.config.model_config import ModularModelConfig
    from capibara.config.problems import SettingsError
    from capibara.config.tpu_config import TPUConfig, TPUError

__all__ = [
    "ConfigError",
    "ConfigFileNotFoundError",
    "ModularModelConfig",
    "SettingsError",
    "TPUConfig",
    "TPUError",
    "list_packaged_configs",
]

_HOMES = {
    "ConfigFileNotFoundError": "capibara.config.files",
    "list_packaged_configs": "capibara.config.files",
    "ModularModelConfig": "capibara.config.model_config",
    "SettingsError": "capibara.config.problems",
    "TPUConfig": "capibara.config.tpu_config",
    "TPUError": "capibara.config.tpu_config",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""From a plan to training: the command line of a plan, and reading a plan's file.

Two files hold a layout: the lockfile (``capibara plan --lock``) and the output of ``capibara plan --json``. Both also
contain the planned configuration. Either may be untrusted, so everything in it is validated before use.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.config import ModularModelConfig
from capibara.config.flags import flag_problem
from capibara.config.overrides import leaf_fields, setting_text
from capibara.errors import ConfigError
from capibara.plan.errors import PlanError
from capibara.plan.program_settings import PROGRAM_SETTINGS
from capibara.plan.targets import parse_target
from capibara.sharding import Layout

__all__ = ["Planned", "read_planned", "train_command"]

_MOST_BYTES = 16 << 20
# What may differ from the planned configuration without a byte or a millisecond of difference.
_INDIFFERENT = frozenset(
    {"model.dropout_rate", "model.rope_theta", "model.norm_epsilon", "tpu.memory_limit_gb"}
)
_TELLING = (
    "train.batch_size",
    "train.sequence_length",
    "train.gradient_accumulation_steps",
    "optimizer.name",
)


@dataclass(frozen=True)
class Planned:
    """The contents of a plan's file.

    Attributes:
      config: the planned configuration, including the layout's settings.
      layout: how its step is sharded over the slice.
      topology: the slice or host, as named in the file.
    """

    config: ModularModelConfig
    layout: Layout
    topology: str

    def settings(self) -> dict[str, Any]:
        """What a model's training takes of the plan: its layout, and the settings that its figures depend on, but not
        the model's own."""
        planned = _flat(self.config)
        taken = {
            key: value
            for key, value in planned.items()
            if key in (*_TELLING, *PROGRAM_SETTINGS) or key.partition(".")[0] in ("precision", "finetune")
        }
        return {**taken, **self.layout.settings()}

    def differences(self, config: ModularModelConfig) -> list[str]:
        """Settings for which the planned memory and time do not hold: ``"model.num_layers is 4, planned 2"`` …"""
        mine, planned = _flat(config), _flat(self.config)
        return [
            f"{key} is {mine.get(key, 'left out')!r}, planned {planned.get(key, 'left out')!r}"
            for key in leaf_fields(ModularModelConfig)
            if mine.get(key) != planned.get(key)
            and (key in _TELLING or key.partition(".")[0] in ("model", "precision", "finetune", "tpu"))
            and key not in _INDIFFERENT
        ]


def read_planned(path: str | os.PathLike[str]) -> Planned:
    """Read a lockfile, or the output of ``capibara plan --json`` (its best candidate).

    Raises:
      PlanError: there is no such file, or it is neither of the two, too large, or invalid.
    """
    path = Path(path)
    try:
        with open(path, "rb") as stream:
            data = stream.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: the path holds a NUL
        reason = getattr(error, "strerror", None) or error
        raise PlanError(f"the plan {str(path)[:200]!r} cannot be read: {reason}") from None
    if len(data) > _MOST_BYTES:
        raise PlanError(f"{path} is not a valid plan file: it is larger than {_MOST_BYTES:,} bytes")
    try:
        found = json.loads(data)
        if not isinstance(found, dict):
            raise ValueError(f"it holds {type(found).__name__}, expected an object")
        if found.get("fits") is False:
            raise ValueError("it says that nothing fits")
        best = found
        if "candidates" in found:
            candidates = found["candidates"]
            if not isinstance(candidates, list) or not candidates or not isinstance(candidates[0], dict):
                raise ValueError("it has no candidate")
            best = candidates[0]
        layout = Layout.from_json(_table(best["layout"]))
        for name, value in layout.flags:
            if (problem := flag_problem(f"{name}={value}")) is not None:
                raise ValueError(f"compiler flags: {problem}")
        if found.get("config") is None:
            raise ValueError("it is the plan of a step function, and trains no configuration")
        config = ModularModelConfig.from_dict(_table(found["config"]), layout.settings())
        return Planned(config, layout, parse_target(found["topology"], rented=False).text)
    except KeyError as error:
        raise PlanError(f"{path} is not a valid plan file: missing {error}") from None
    except (ValueError, TypeError, RecursionError, ConfigError) as error:
        raise PlanError(
            f"{path} is not a valid plan file: {error}. Write one with capibara plan --lock FILE, or with "
            "capibara plan --json > FILE"
        ) from None


def train_command(
    config: ModularModelConfig, layout: Layout, source: str, base: ModularModelConfig | None = None
) -> str:
    """The command line that trains a configuration in a layout, quoted for a shell.

    Args:
      config: the planned configuration.
      layout: one of its candidates.
      source: the file or packaged name that the configuration comes from, or the folder of a model; settings that
        differ from it are listed.
      base: the settings of that model; None: ``source`` is a configuration.
    """
    option = "--config" if base is None else "--model"
    mine, given = _flat(config), _flat(ModularModelConfig.from_toml(source) if base is None else base)
    laid = layout.settings()
    changed = [
        f"{key}={setting_text(mine[key]) if key in mine else 'none'}"
        for key in leaf_fields(ModularModelConfig)
        if mine.get(key) != given.get(key) and key not in laid
    ]
    return shlex.join(["capibara", "train", option, source, *changed, *layout.overrides()])


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"expected a table, got {value!r:.100}")
    return value


def _flat(config: ModularModelConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(tree: Mapping[str, Any], prefix: str) -> None:
        for key, value in tree.items():
            if isinstance(value, Mapping):
                walk(value, f"{prefix}{key}.")
            else:
                flat[prefix + key] = value

    walk(config.to_dict(), "")
    return flat

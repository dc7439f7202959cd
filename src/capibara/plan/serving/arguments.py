"""Validate the arguments of a serving plan."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from capibara.config import ModularModelConfig
from capibara.core.encoders import require_decoder
from capibara.errors import did_you_mean
from capibara.plan.errors import PlanError
from capibara.plan.serving.task import ITEM_SIZES, Mesh, ServingTask
from capibara.plan.targets import Target, parse_target

__all__ = [
    "DEFAULT_SLICES",
    "milliseconds",
    "read_config",
    "read_mesh",
    "read_slices",
    "serving_task",
]

DEFAULT_SLICES = (
    "v5e:2x2",
    "v5e:2x4",
    "v5e:4x4",
    "v6e:2x2",
    "v6e:2x4",
    "v4:2x2x1",
    "v4:2x2x2",
    "v5p:2x2x1",
    "v5p:2x2x2",
)
_LONGEST = 16_777_216


def read_config(config: Any) -> ModularModelConfig:
    """A configuration, from an object, a name or a path."""
    if isinstance(config, ModularModelConfig):
        return config
    if isinstance(config, os.PathLike):
        return ModularModelConfig.from_toml(Path(config))
    if isinstance(config, str):
        return ModularModelConfig.from_toml(config)
    raise PlanError(f"config is {type(config).__name__}, expected a ModularModelConfig, its name or path")


def serving_task(config: ModularModelConfig, prompt: int, output: int, dtype: str) -> ServingTask:
    """The serving task.

    Raises:
      PlanError: an invalid length, dtype or form.
    """
    require_decoder(config.model, "a plan for serving")
    for name, value in (("prompt_length", prompt), ("output_length", output)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LONGEST:
            raise PlanError(f"{name}={value!r} must be a number of tokens from 1 to {_LONGEST}")
    most = config.model.max_sequence_length
    if config.model.attends and prompt + output > most:
        raise PlanError(
            f"prompt_length={prompt} and output_length={output} are {prompt + output} tokens, but the model reads at "
            f"most model.max_sequence_length={most}: shorten one of them, or plan for a model that reads further"
        )
    if dtype not in ITEM_SIZES:
        raise PlanError(
            f"dtype={dtype!r} must be one of {', '.join(ITEM_SIZES)}.{did_you_mean(str(dtype), tuple(ITEM_SIZES))}"
        )
    return ServingTask(config, dtype, prompt, output)


def milliseconds(name: str, value: Any) -> float | None:
    """A target in seconds."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise PlanError(f"{name}={value!r} must be a number of milliseconds above 0")
    return value / 1e3


def read_slices(topology: Any, view: str | None) -> list[Target]:
    """The requested slices and hosts, or the usual slices."""
    if topology is None:
        return [parse_target(name, view if name.startswith("v4") else None) for name in DEFAULT_SLICES]
    if isinstance(topology, str | Target):
        return [parse_target(topology, view)]
    if not isinstance(topology, Iterable):
        raise PlanError(
            f"topology={topology!r} must be a slice such as 'v5e:2x2' or GPUs such as 'h100:8', or several"
        )
    found = list(dict.fromkeys(parse_target(each, view) for each in topology))
    if not found:
        raise PlanError("topology names no slice: give at least one, such as 'v5e:2x2'")
    return found


def read_mesh(mesh: Any, targets: list[Target], task: ServingTask) -> Mesh:
    """A mesh that is valid for every slice."""
    if not isinstance(mesh, Mapping) or set(mesh) != {"data", "model"}:
        raise PlanError(
            f"mesh={mesh!r} must give the sizes of 'data' and 'model', as {{'data': 1, 'model': 4}}"
        )
    found: Mesh = (("data", mesh["data"]), ("model", mesh["model"]))
    for target in targets:
        possible = list(task.meshes(target))
        if found not in possible:
            listed = ", ".join(f"{dict(m)['data']} × {dict(m)['model']}" for m in possible)
            raise PlanError(
                f"mesh={dict(mesh)}: {target} can be divided into data × model = {listed} (model divides the "
                "key-value heads)"
            )
    return found

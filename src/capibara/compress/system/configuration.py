"""The settings of the compression system: engine, devices, memory.

They are one class of plain values, validated on creation, and can be saved to a TOML file. Creating them does not
affect JAX: the configuration adapter does that when a system starts.
"""

from __future__ import annotations

import dataclasses
import math
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from capibara.compress.errors import CompressError
from capibara.errors import ConfigError, did_you_mean
from capibara.files import replace_file

__all__ = ["OptimizationStrategy", "SystemConfiguration", "UnknownStrategyError"]

_BACKENDS = ("auto", "cpu", "gpu", "tpu")
_MOST_BYTES = 1 << 20  # of a file of settings


class UnknownStrategyError(ConfigError, CompressError):
    """There is no strategy of that name; also a ``CompressError``, as elsewhere for strategy names."""


class OptimizationStrategy(StrEnum):
    """The engine that runs the codecs.

    All engines write the same bytes.
    """

    AUTO = "auto"
    """JAX where it runs on an accelerator, the host's compiled code otherwise."""
    JAX_ACCELERATED = "jax_accelerated"
    """JAX, wherever it runs."""
    HOST = "host"
    """Compiled code, or NumPy where that was not built."""


@dataclass(frozen=True)
class SystemConfiguration:
    """The settings of a :class:`~capibara.compress.system.coordinator.SystemIntegrationCoordinator`.

    Attributes:
      enable_jax: use JAX if it is installed.
      jax_backend: ``"auto"`` (JAX's own choice), ``"gpu"``, ``"cpu"`` or ``"tpu"``; if there is no device of that
        kind, JAX's own choice is used, with a warning.
      jax_memory_fraction: the share of an accelerator's memory that JAX may take, above 0 and at most 1. JAX reads it
        when it initialises its first device, so create the system before that.
      jax_compilation_cache_size: compiled programs to keep; the least recently used is evicted first; 0 keeps none.
      jax_enable_x64: 64-bit dtypes in the system's own JAX programs; JAX's global setting does not change.
      jax_parallel_devices: the number of devices that share the work; if there are fewer, all of them, with a
        warning.
      optimization_strategy: the engine of the codecs.
      strategy: the codec: ``"auto"``, ``"jax"`` (as ``"auto"``, on JAX), or a codec's name.
      target_compression_ratio: original bytes over compressed bytes, above 1; ``None``: lossless.

    Raises:
      ConfigError: a value has the wrong type or is out of range; the message names the setting.
      UnknownStrategyError: a ConfigError; there is no strategy of that name.
    """

    enable_jax: bool = True
    jax_backend: str = "auto"
    jax_memory_fraction: float = 0.75
    jax_compilation_cache_size: int = 128
    jax_enable_x64: bool = False
    jax_parallel_devices: int = 1
    optimization_strategy: OptimizationStrategy = OptimizationStrategy.AUTO
    strategy: str = "auto"
    target_compression_ratio: float | None = None

    def __post_init__(self) -> None:
        for name in ("enable_jax", "jax_enable_x64"):
            self._check(name, isinstance(getattr(self, name), bool), "True or False")
        self._check("jax_backend", self.jax_backend in _BACKENDS, f"one of {', '.join(map(repr, _BACKENDS))}",
                    did_you_mean(str(self.jax_backend), _BACKENDS))  # fmt: skip
        fraction = _is_number(self.jax_memory_fraction) and 0 < self.jax_memory_fraction <= 1
        self._check("jax_memory_fraction", fraction, "a number above 0 and at most 1")
        for name, least in (("jax_compilation_cache_size", 0), ("jax_parallel_devices", 1)):
            value = getattr(self, name)
            self._check(name, type(value) is int and least <= value < 1 << 31, f"an integer ≥ {least}")
        try:
            object.__setattr__(
                self, "optimization_strategy", OptimizationStrategy(self.optimization_strategy)
            )
        except ValueError:
            self._check("optimization_strategy", False, f"one of {', '.join(OptimizationStrategy)}",
                        did_you_mean(str(self.optimization_strategy), OptimizationStrategy))  # fmt: skip
        self._check(
            "strategy", isinstance(self.strategy, str) and bool(self.strategy), "the name of a strategy"
        )
        if self.strategy not in ("auto", "jax"):
            # Here, as it brings NumPy: settings that name no codec, which most do not, are made without.
            from capibara.compress.codecs.protocol import CODECS

            names = ["auto", "jax", *CODECS]
            if self.strategy not in names:
                raise UnknownStrategyError(
                    f"strategy: got {self.strategy!r:.200}, expected one of {', '.join(names)}."
                    f"{did_you_mean(self.strategy, names)}"
                )
        ratio = self.target_compression_ratio
        self._check("target_compression_ratio", ratio is None or (_is_number(ratio) and 1 < ratio < math.inf),
                    "a number above 1, or None")  # fmt: skip

    def _check(self, name: str, good: bool, expected: str, hint: str = "") -> None:
        if not good:
            raise ConfigError(f"{name}: got {getattr(self, name)!r:.200}, expected {expected}.{hint}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values by name; settings that are ``None`` are omitted."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return values | {"optimization_strategy": self.optimization_strategy.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The settings of such a mapping; missing ones have their defaults.

        Raises:
          ConfigError: not a mapping, an unknown setting, or an invalid value.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"values: got {type(values).__name__}, expected a mapping of settings by name. "
                "Remedy: {'jax_backend': 'cpu'}, or SystemConfiguration.load(path) for a file."
            )
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise ConfigError(
                    f"{name!s:.200}: there is no such setting.{did_you_mean(str(name), names)} "
                    f"Remedy: one of {', '.join(names)}."
                )
        return cls(**values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the settings as TOML, atomically.

        Raises:
          OSError: the folder is missing, the disk is full …; an existing file is then unchanged.
        """
        import tomli_w

        replace_file(path, tomli_w.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Load the settings from a TOML file, written by :meth:`save` or by hand.

        Raises:
          ConfigError: it is not valid TOML, or a setting is unknown or invalid; the message names the file.
          OSError: it cannot be read.
        """
        with open(Path(path), "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ConfigError(f"{path}: more than {_MOST_BYTES} bytes: not a file of settings")
        try:
            return cls.from_dict(tomllib.loads(text.decode()))
        except (
            ValueError,
            RecursionError,
        ) as error:  # ConfigError is a ValueError, as TOML's and Unicode's errors are
            raise ConfigError(f"{path}: {error}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)

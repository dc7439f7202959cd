"""The settings of the compression system: which engine, on which devices, with how much memory.

They are checked when they are made, one class of plain values, and can be kept in a TOML file. Nothing of JAX is
touched by making them: that is the configuration adapter's work, once a system starts.
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
    """No strategy of that name; a ``CompressError`` too, as everywhere else that a strategy is named."""


class OptimizationStrategy(StrEnum):
    """Which engine does the arithmetic of the codecs.

    The bytes are the same with all of them.
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
      enable_jax: use JAX where it is installed.
      jax_backend: ``"auto"`` (JAX's own choice), ``"gpu"``, ``"cpu"`` or ``"tpu"``; where there is no device of that
        kind JAX's own choice runs, with a warning.
      jax_memory_fraction: the share of an accelerator's memory that JAX may take, above 0 and at most 1. JAX reads it
        when it starts its first device, so a system has to be made before that.
      jax_compilation_cache_size: compiled programs that are kept, the least recently used goes first; 0 keeps none.
      jax_enable_x64: 64-bit numbers in the system's own JAX programs; JAX's global setting stays as it is.
      jax_parallel_devices: how many devices share the work; where there are fewer, all of them, with a warning.
      optimization_strategy: which engine the codecs run on.
      strategy: which codec: ``"auto"``, ``"jax"`` (as ``"auto"``, on JAX), or a codec's name.
      target_compression_ratio: original bytes over compressed ones, above 1; ``None`` compresses without loss.

    Raises:
      ConfigError: a value is of the wrong type or out of range; the text names the setting.
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
        """Plain values by name; a setting that is ``None`` is left out."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return values | {"optimization_strategy": self.optimization_strategy.value}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The settings of such a mapping; what is not in it has its default.

        Raises:
          ConfigError: not a mapping, a name is none of a setting, or a value is wrong.
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
        """Write the settings as TOML, in one step.

        Raises:
          OSError: the folder is missing, the disk is full …; a file that was there then stands.
        """
        import tomli_w

        replace_file(path, tomli_w.dumps(self.to_dict()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The settings of a TOML file that :meth:`save` or a person wrote.

        Raises:
          ConfigError: it is no TOML, or a setting is unknown or wrong; the text names the file.
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

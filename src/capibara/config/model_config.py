"""All settings of a model and its runs, for ``capibara train`` and ``ModularCapibaraModel``.

    >>> config = ModularModelConfig.from_toml("demo", ["num_layers=4", "train.steps=10"])
    >>> config.model.num_layers, config.train.steps
    (4, 10)

The object is frozen and hashable; sections are attributes. A file only needs to list what differs from the defaults,
which are those of ``demo.toml``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import tomli_w
from pydantic import Field

from capibara.config.files import ConfigFileNotFoundError, find_config, line_finder, write_text_atomically
from capibara.config.overrides import apply_overrides, leaf_fields
from capibara.config.problems import Problem, SettingsError
from capibara.config.recovery import RecoverySection
from capibara.config.sections import (
    CheckpointSection,
    DataSection,
    FinetuneSection,
    GenerateSection,
    ModelSection,
    OptimizerSection,
    PrecisionSection,
    Section,
    TPUSection,
    TrainSection,
)
from capibara.hardware.tomlfile import read_toml

__all__ = ["ModularModelConfig"]


class ModularModelConfig(Section):
    """Settings of a model, its precision, device mesh, training, data, checkpoints, recovery and sampling.

    Raises:
      SettingsError: (a ``ConfigError`` and ``ValueError``) unknown setting, wrong type, value out of range,
        or settings that do not fit together; every problem is listed, with key, value and what is allowed.
    """

    model: ModelSection = Field(default=ModelSection(), description="the decoder language model")
    precision: PrecisionSection = Field(default=PrecisionSection(), description="number types")
    tpu: TPUSection = Field(default=TPUSection(), description="the device mesh")
    train: TrainSection = Field(default=TrainSection(), description="the training loop")
    optimizer: OptimizerSection = Field(default=OptimizerSection(), description="the optimizer")
    data: DataSection = Field(default=DataSection(), description="the text")
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), description="saved states")
    recovery: RecoverySection = Field(
        default=RecoverySection(), description="what a run does when something goes wrong"
    )
    finetune: FinetuneSection = Field(default=FinetuneSection(), description="which parameters are trained")
    generate: GenerateSection = Field(default=GenerateSection(), description="sampling")

    def _rules(self) -> Iterator[Problem]:
        if self.train.sequence_length > self.model.max_sequence_length:
            yield Problem(
                "train.sequence_length",
                f"got {self.train.sequence_length}, expected at most model.max_sequence_length = "
                f"{self.model.max_sequence_length}. Shorten the one or raise the other",
            )
        here = set(self._attention_weights())
        here |= set() if self.model.mlp == "none" else {"gate", "up", "down"}
        if self.finetune.method == "lora" and not here & set(self.finetune.targets):
            yield Problem(
                "finetune.targets",
                f"got {list(self.finetune.targets)!r}, but no block has such weights"
                + (
                    f"; they have {sorted(here)!r}"
                    if here
                    else ": state-space layers take no adapters. Set finetune.method=full"
                ),
            )
        experts = [name for name in self.finetune.targets if name in ("gate", "up", "down")]
        if self.finetune.method == "lora" and self.model.experts.count and experts:
            rest = self._attention_weights()
            others = f", or give weights of attention alone: finetune.targets={rest!r}" if rest else ""
            if self.finetune.dropout:
                yield Problem(
                    "finetune.dropout",
                    f"got {self.finetune.dropout}, but the adapters of experts ({experts[0]!r}) have no dropout. Set "
                    f"finetune.dropout=0{others}",
                )
            if self.finetune.base != "none":
                yield Problem(
                    "finetune.base",
                    f"got {self.finetune.base!r}, but experts ({experts[0]!r}) that have adapters are not stored in "
                    f"8 or 4 bits. Set finetune.base=none{others}",
                )

    def _attention_weights(self) -> list[str]:
        """The weights of attention that may have adapters."""
        latent = self.model.latent
        if not self.model.attends:
            return []
        if latent.kv_rank is None:
            return ["query", "key", "value", "out"]
        return [
            *(["query"] if latent.query_rank is None else ["query_down", "query_up"]),
            "latent_down",
            "latent_up",
            "out",
        ]

    @classmethod
    def from_toml(
        cls, path_or_name: str | os.PathLike[str], overrides: Iterable[str] | Mapping[str, Any] = ()
    ) -> Self:
        """Load settings from a TOML file, then apply ``overrides``.

        Args:
          path_or_name: a file, or a packaged name: ``"demo"``, ``"production/tpu_v4"``, or the documented
            ``"capibara/config/configs_toml/production/tpu_v4.toml"``, from any working directory. A real file at that
            path takes precedence.
          overrides: ``"key=value"`` strings with a dotted key or a bare name that only one section has
            (``"num_layers=4"``); or a mapping from such keys to values.

        Raises:
          ConfigFileNotFoundError: there is no such file; the message lists the packaged names.
          ConfigError: a directory, a binary or oversized file, or not TOML.
          SettingsError: see the class; each problem names its file and line, or the override.
        """
        path = find_config(path_or_name)
        data, text = read_toml(path, missing=ConfigFileNotFoundError)
        in_file = line_finder(_short_path(path), text)
        return cls._from_data(data, overrides, in_file)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], overrides: Iterable[str] | Mapping[str, Any] = ()) -> Self:
        """Create settings from nested dictionaries, as returned by ``config.to_dict()``."""
        return cls._from_data(data, overrides, lambda key: "")

    @classmethod
    def _from_data(cls, data: Mapping[str, Any], overrides: Any, in_file: Any) -> Self:
        merged, origins = apply_overrides(data, overrides, cls)
        try:
            return cls(**merged)
        except SettingsError as error:
            raise error.located(lambda key: origins.get(key.split("[")[0]) or in_file(key)) from None
        except TypeError:  # a key that is no Python string cannot come from TOML, only from from_dict
            raise SettingsError([Problem("", f"got keys {list(merged)!r}, expected section names")]) from None

    def with_overrides(self, overrides: Iterable[str] | Mapping[str, Any]) -> Self:
        """A validated copy with ``key=value`` overrides."""
        return self.from_dict(self.to_dict(), overrides)

    def to_dict(self) -> dict[str, Any]:
        """Nested plain dictionaries as in TOML: lists for tuples, None omitted."""
        return self.model_dump(mode="json", exclude_none=True)

    def to_toml(self, path: str | os.PathLike[str] | None = None) -> str:
        """All settings as TOML text, which ``from_toml`` reads back to an equal object.

        Args:
          path: if given, the text is also written there, atomically.

        Raises:
          ConfigError: the file cannot be written; an existing one is unchanged.
        """
        text = tomli_w.dumps(self.to_dict())
        if path is not None:
            write_text_atomically(path, text)
        return text

    def describe(self) -> str:
        """Every setting with its value and meaning, by section; ``*`` marks values that differ from the default."""
        default = type(self)()
        lines: list[str] = []
        table: str | None = None
        for path, field in leaf_fields(type(self)).items():
            section, _, leaf = path.rpartition(".")
            if section != table:
                lines += [""] * bool(lines) + [f"[{section}]"]
                table = section
            value = _look_up(self, path)
            mark = " " if value == _look_up(default, path) else "*"
            lines.append(f"{mark} {leaf:<28} {_shown(value):<22} {field.description or ''}".rstrip())
        return "\n".join(lines)

    def __str__(self) -> str:
        """The main figures in a few lines; :meth:`describe` shows everything."""
        m, t, o = self.model, self.train, self.optimizer
        head = f"{m.resolved_head_dim}" if m.head_dim is not None or m.embed_dim % m.num_heads == 0 else "?"
        lines = [
            f"model      {m.num_layers} layers of {'+'.join(m.pattern)}, embed_dim {m.embed_dim}, "
            f"{m.num_heads} heads ({m.num_kv_heads} kv) of {head}, "
            f"mlp_dim {m.resolved_mlp_dim}, vocab {m.vocab_size}",
            f"precision  params {self.precision.param_dtype}, compute {self.precision.compute_dtype}, "
            f"sums {self.precision.accumulate_dtype}",
            f"train      {t.steps} steps of {t.batch_size} x {t.sequence_length} tokens, seed {t.seed}"
            + (f", at most {t.max_seconds:g} s" if t.max_seconds is not None else ""),
            f"optimizer  {o.name}, learning rate {o.learning_rate:g} after {o.warmup_steps} warm-up steps",
            f"checkpoint {self.checkpoint.directory}, every {self.checkpoint.every_steps} steps",
        ]
        if self.tpu.enabled:
            axes = ", ".join(f"{n}={s}" for n, s in zip(self.tpu.mesh_axes, self.tpu.mesh_shape, strict=True))
            how = f"parameters {self.tpu.parameters}"
            if self.tpu.parameters == "replicated" and self.tpu.optimizer == "sharded":
                how += ", optimizer state sharded"
            if self.tpu.offload != "none":
                how += f", {self.tpu.offload} state in host memory"
            lines.insert(
                2,
                f"tpu        {self.tpu.num_chips} chips, mesh {axes}, {self.tpu.memory_limit_gb:g} GiB each, {how}",
            )
        return "\n".join(lines)


def _look_up(config: Section, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _shown(value: Any) -> str:
    if value is None:
        return "(left out)"
    if isinstance(value, tuple):
        return str(list(value))
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _short_path(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)

"""How a step is sharded over a slice: what the search varies, and what a plan passes to training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from capibara.config.axes import AxisRules
from capibara.config.flags import split_flag
from capibara.config.overrides import setting_text
from capibara.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from capibara.config import ModularModelConfig

__all__ = ["Layout"]

Parameters = Literal["sharded", "replicated"]
Optimizer = Literal["as parameters", "sharded"]
Remat = Literal["none", "dots", "full"]
Offload = Literal["none", "optimizer"]
_CHOICES: dict[str, tuple[str, ...]] = {
    "parameters": ("sharded", "replicated"),
    "optimizer": ("as parameters", "sharded"),
    "remat": ("none", "dots", "full"),
    "offload": ("none", "optimizer"),
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way of running a step.

    Attributes:
      mesh: mesh axes and their sizes, outermost first: ``(("data", 4), ("model", 8))``. ``data`` shards the batch,
        ``model`` shards heads, feed-forward and vocabulary, ``expert`` shards the batch and the experts of mixtures;
        ``pipeline`` divides the blocks into stages.
      parameters: ``"sharded"`` over ``data`` too (FSDP; Rajbhandari et al., "ZeRO", stage 3) or
        ``"replicated"`` there.
      optimizer: moments sharded like the parameters, or ``"sharded"`` over ``data`` even if those are not (ZeRO,
        stage 1).
      remat: what the backward pass recomputes: nothing, all but matrix products, or each whole block.
      microbatches: number of parts of a batch that are processed one after another; in a pipeline, by each stage.
      offload: ``"optimizer"`` keeps the moments in the hosts' memory.
      flags: compiler options, ``(name, value)`` pairs.
    """

    mesh: tuple[tuple[str, int], ...]
    parameters: Parameters = "sharded"
    optimizer: Optimizer = "as parameters"
    remat: Remat = "full"
    microbatches: int = 1
    offload: Offload = "none"
    flags: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(
                    f"layout: {name}={value!r} must be one of {', '.join(choices)}.{did_you_mean(str(value), choices)}"
                )
        if not self.mesh or len({axis for axis, _ in self.mesh}) != len(self.mesh):
            raise ConfigError(
                f"layout: mesh={self.mesh!r} must name each of its axes once, as (('data', 4), ('model', 8))"
            )
        for axis, size in self.mesh:
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(
                    f"layout: the mesh axis {axis!r} has the size {size!r}, expected an integer from 1"
                )
        if (
            isinstance(self.microbatches, bool)
            or not isinstance(self.microbatches, int)
            or self.microbatches < 1
        ):
            raise ConfigError(f"layout: microbatches={self.microbatches!r} must be an integer from 1")

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(size for _, size in self.mesh)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size by axis."""
        return dict(self.mesh)

    @property
    def stages(self) -> int:
        """Stages of a pipeline that the blocks are divided into; 1: there is none."""
        return self.axis_sizes.get("pipeline", 1)

    @property
    def bubble(self) -> float:
        """The part of a step in which a stage of a pipeline has nothing to do: ``(p - 1) / (m + p - 1)``.

        Of ``p`` stages and ``m`` microbatches; 0.0 without a pipeline.
        """
        return (self.stages - 1) / (self.microbatches + self.stages - 1)

    @property
    def rules(self) -> AxisRules:
        """The rules that shard parameters and activations over the mesh."""
        return _EVERYWHERE if self.parameters == "sharded" else _REPLICATED

    @property
    def optimizer_rules(self) -> AxisRules:
        """The rules for the moments."""
        return _EVERYWHERE if "sharded" in (self.parameters, self.optimizer) else self.rules

    @property
    def compiler_options(self) -> dict[str, str]:
        """``flags`` as a dict."""
        return dict(self.flags)

    def to_json(self) -> dict[str, Any]:
        """Plain lists, strings and numbers; :meth:`from_json` reads them."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """Read the output of :meth:`to_json`.

        Raises:
          ConfigError: a key is unknown or a value is invalid.
        """
        known = {f.name for f in fields(cls)}
        if not isinstance(data, Mapping) or not data.keys() <= known or "mesh" not in data:
            raise ConfigError(
                f"layout: expected a table with mesh and any of {', '.join(sorted(known))}; got {data!r:.200}"
            )
        try:
            pairs = {
                "mesh": tuple((str(axis), size) for axis, size in data["mesh"]),
                "flags": tuple((str(k), str(v)) for k, v in data.get("flags", ())),
            }
        except (TypeError, ValueError) as error:
            raise ConfigError(f"layout: mesh and flags must be lists of pairs: {error}") from None
        return cls(**{**data, **pairs})

    def settings(self) -> dict[str, Any]:
        """The layout as settings of a configuration, by dotted key; :meth:`from_config` reads them."""
        return {
            "tpu.enabled": True,
            "tpu.topology": "x".join(str(size) for _, size in self.mesh),
            "tpu.num_chips": self.num_devices,
            "tpu.mesh_axes": [axis for axis, _ in self.mesh],
            "tpu.parameters": self.parameters,
            "tpu.optimizer": self.optimizer,
            "tpu.offload": self.offload,
            "tpu.flags": [f"{name}={value}" for name, value in self.flags],
            "model.remat": self.remat,
            "train.gradient_accumulation_steps": self.microbatches,
        }

    def overrides(self) -> list[str]:
        """:meth:`settings` as ``key=value`` strings, arguments of ``capibara train``.

        ``shlex.join`` quotes them for a shell.
        """
        return [f"{key}={setting_text(value)}" for key, value in self.settings().items()]

    @classmethod
    def from_config(cls, config: ModularModelConfig) -> Layout:
        """The layout in which a configuration with ``tpu.enabled`` trains: the inverse of :meth:`settings`."""
        tpu = config.tpu
        return cls(
            mesh=tuple(zip(tpu.mesh_axes, tpu.mesh_shape, strict=True)),
            parameters=tpu.parameters,
            optimizer=tpu.optimizer,
            remat=config.model.remat,
            microbatches=config.train.gradient_accumulation_steps,
            offload=tpu.offload,
            flags=tuple(split_flag(flag) for flag in tpu.flags),
        )

    def __str__(self) -> str:
        mesh = " × ".join(f"{axis} {size}" for axis, size in self.mesh)
        words = [mesh, f"parameters {self.parameters}", f"remat {self.remat}"]
        if self.parameters == "replicated" and self.optimizer == "sharded":
            words.append("optimizer sharded")
        if self.microbatches > 1:
            words.append(f"{self.microbatches} microbatches")
        if self.stages > 1:
            words.append(f"bubble {self.bubble:.0%}")
        if self.offload != "none":
            words.append(f"{self.offload} offloaded")
        return ", ".join(words)


def _without_data(rules: AxisRules) -> AxisRules:
    """Without the axes of the batch; experts stay where they are."""
    parameters = {
        axis: places
        if axis == "experts"
        else tuple(place for place in places if not {"data", "fsdp", "expert"} & set(place.split("+")))
        for axis, places in rules.parameters.items()
    }
    return AxisRules(parameters=parameters, activations=rules.activations)


_EVERYWHERE = AxisRules()
_REPLICATED = _without_data(_EVERYWHERE)

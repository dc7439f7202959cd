"""Low-rank adapters of one model, loaded and unloaded while texts are written (Hu et al., arXiv:2106.09685).

The programs of the engine have room for adapters of one rank beside the weights; an adapter of a smaller one is filled
up with zeros, and without one all of it is zero. A step computes texts of one adapter; where there are texts of
several, these take turns. A text keeps the adapter that it began with.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from capibara.core.adapters import adapter_part, add_adapters, only_adapters
from capibara.errors import ConfigError
from capibara.serve.engine.layers import layers_apart

__all__ = ["AdapterRoom", "Adapters", "LoadedAdapter"]


@dataclass(frozen=True)
class AdapterRoom:
    """What adapters an engine has room for.

    Attributes:
      rank: the largest. targets: the weights that they may adapt, as in ``finetune.targets``; ``None``: all of them.
      most: how many may be loaded at once.
    """

    rank: int = 16
    targets: tuple[str, ...] | None = None
    most: int = 64


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter: its name, a number that no other has, and the weights of the programs with it."""

    name: str
    number: int
    weights: Any


class Adapters:
    """The adapters of an engine.

    Args:
      model: without adapters, of a published family. params: its parameters, some of which may be quantized.
      room: for which adapters. panels, donate: see :func:`~capibara.serve.engine.layers.layers_apart`.

    Attributes:
      model: the same with room for adapters. params: its parameters, with adapters that change nothing.

    Raises:
      ConfigError: the model has adapters already, a number is out of range, or a target is unknown.
    """

    def __init__(
        self, model: Any, params: Any, room: AdapterRoom, *, panels: bool = False, donate: bool = False
    ) -> None:
        if model.config.finetune.method != "full":
            raise ConfigError(
                "adapters: the model has adapters of its own. Merge them first (model.merged())"
            )
        if isinstance(room.most, bool) or not isinstance(room.most, int) or room.most < 1:
            raise ConfigError(f"adapters.most={room.most!r}: expected an integer of at least 1.")
        self._base, self._room = model, room
        given: dict[str, Any] = {"finetune.method": "lora", "finetune.rank": room.rank}
        if room.targets is not None:
            given["finetune.targets"] = list(room.targets)
        # A factor of 1: that of each adapter is put into its numbers.
        config = model.config.with_overrides(given | {"finetune.alpha": float(room.rank)})
        self.model = type(model)(config, mesh=model.mesh, rules=model.backend.rules)
        self.model.pretrained, self.model.tokenizer_files = model.pretrained, model.tokenizer_files
        with self.model.backend.scope():
            fresh = only_adapters(self.model.with_adapters(params))
            self._none = jax.tree.map(jnp.zeros_like, fresh)
        self._plain = layers_apart(self.model, params, panels=panels, donate=donate)
        self.params = self._with(self._none)
        self._lock = threading.Lock()
        self._loaded: dict[str, LoadedAdapter] = {}
        self._number = 0

    def _with(self, adapter: Any) -> Any:
        return add_adapters(self._plain, layers_apart(self.model, adapter))

    @property
    def names(self) -> list[str]:
        return list(self._loaded)

    def get(self, name: str) -> LoadedAdapter | None:
        return self._loaded.get(name)

    def load(self, name: str, folder: str | os.PathLike[str], weights_of: Any) -> None:
        """Read an adapter (PEFT's files); one of the same name is replaced for the texts that begin from now on.

        Args:
          weights_of: of parameters, those that programs take.

        Raises:
          ConfigError: there are too many, its rank is too large or it adapts other weights than there is room for.
          FamilyError: the files are not those of an adapter of this model.
        """
        from capibara.families.peft import adapter_settings, load_adapter

        if self._base.pretrained is None:
            raise ConfigError(
                "adapters: the model was not read from a published folder, whose names they have."
            )
        family = self._base.pretrained.family
        given = adapter_settings(folder, family)
        own, room = self._base.config.with_overrides(given), self.model.config.finetune
        if own.finetune.rank > room.rank:
            raise ConfigError(
                f"adapter {name!r:.100} has rank {own.finetune.rank}, and there is room for {room.rank}. Start with a "
                "larger adapter rank."
            )
        if lacking := sorted(set(own.finetune.targets) - set(room.targets)):
            raise ConfigError(
                f"adapter {name!r:.100} adapts {lacking[0]}, and there is room for {room.targets}."
            )
        with self._lock:
            if name not in self._loaded and len(self._loaded) >= self._room.most:
                raise ConfigError(f"adapters: there are {len(self._loaded)} already. Unload one first.")
            model = type(self._base)(own, mesh=self._base.mesh, rules=self._base.backend.rules)
            with model.backend.scope():
                fresh = only_adapters(jax.jit(lambda: only_adapters(model.init(0)[0]))())
                found = load_adapter(folder, family, model, fresh)
            factor = own.finetune.alpha / own.finetune.rank
            adapter = jax.tree_util.tree_map_with_path(
                lambda path, empty: _filled(found, path, empty, factor), self._none
            )
            self._number += 1
            made = LoadedAdapter(name, self._number, weights_of(self._with(adapter)))
            self._loaded = {**self._loaded, name: made}

    def unload(self, name: str) -> None:
        """Forget an adapter; texts that have begun with it go on.

        Raises:
          ConfigError: there is none of this name.
        """
        with self._lock:
            if name not in self._loaded:
                raise ConfigError(f"adapter {name!r:.100} is not loaded; there are {self.names or 'none'}.")
            self._loaded = {key: value for key, value in self._loaded.items() if key != name}


def _filled(found: Any, path: Any, empty: Any, factor: float) -> Any:
    """One array of an adapter in the place of zeros of a larger rank: ``a [*, rank]``, ``b [*, rank, *]``."""
    *folders, last = [step.key for step in path]
    for key in folders:
        if key not in found:
            return empty
        found = found[key]
    if last not in found:
        return empty
    values = jnp.asarray(found[last], empty.dtype)
    if adapter_part(last) == "b":
        values = values * jnp.asarray(factor, empty.dtype)
    widths = [(0, whole - own) for whole, own in zip(empty.shape, values.shape, strict=True)]
    return jnp.pad(values, widths)

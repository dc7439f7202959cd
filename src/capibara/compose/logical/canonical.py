"""Canonical inputs and outputs: the default connections of ``model += block``.

By default, the model's latest output is connected to the block's only unnamed input. Models with several inputs or
outputs choose them with :meth:`Canonical.set_cins` and :meth:`Canonical.set_couts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.compose.errors import WiringError
from capibara.compose.logical.connections import Port
from capibara.compose.logical.settings import Settings
from capibara.compose.logical.trail import put, transaction

__all__ = ["Canonical"]


class Canonical(Settings):
    """The part of a model that stores its canonical connections."""

    @property
    def cins(self) -> list[Port]:
        """The inputs that ``+=`` may connect to the previous output: those of :meth:`set_cins`, or the main one."""
        keys = self._cins if self._cins is not None else [k for k in [self._main_input()] if k is not None]
        return [Port(self, key) for key in keys]

    @property
    def couts(self) -> list[Port]:
        """The outputs that ``+=`` may connect next: those of :meth:`set_couts`, or the latest one."""
        if self._couts is not None:
            return [Port(self, key) for key in self._couts]
        return [] if self._last is None else [self._last]

    @property
    def cin(self) -> Port:
        """The one canonical input.

        Raises:
            WiringError: there is none, or there are several.
        """
        return _only(self.cins, self.label, "input", "set_cins")

    @property
    def cout(self) -> Port:
        """The one canonical output.

        Raises:
            WiringError: there is none, or there are several.
        """
        return _only(self.couts, self.label, "output", "set_couts")

    def set_cins(self, *keys: Any) -> None:
        """Set the inputs that ``outer += model`` may connect to ``outer``'s latest output: one that is still open.

        Raises:
            WiringError: one is not an input of the model.
        """
        self._unfrozen()
        with transaction():
            names = [self._name_of(*self._found(key)) for key in keys]
            for name in names:
                if name not in self.input_keys:
                    raise WiringError(f"{name!r} is not an input of {self.label}; they are {self.input_keys}")
            put(self, "_cins", names)

    def set_couts(self, *keys: Any) -> None:
        """Set the outputs that ``model += block``, and ``outer += block`` after ``outer += model``, connect next.

        Raises:
            WiringError: one is not computed in the model.
        """
        self._unfrozen()
        with transaction():
            names = []
            for key in keys:
                wire, shown = self._found(key)
                if wire.find().producer is None:
                    raise WiringError(f"{shown} is not a result of a block in {self.label}")
                names.append(self._name_of(wire, shown))
            put(self, "_couts", names)
            if len(names) == 1:
                put(self, "_last", Port(self, names[0]))

    def set_cin(self, *keys: Any) -> None:
        """:meth:`set_cins`."""
        self.set_cins(*keys)

    def set_cout(self, *keys: Any) -> None:
        """:meth:`set_couts`."""
        self.set_couts(*keys)

    def _chosen_input(self, given: Mapping[str, Any]) -> str | None:
        if self._cins is None:
            return self._main_input()
        left = [key for key in self._cins if key not in given]
        if len(left) > 1:
            raise WiringError(
                f"{self.label} has several canonical inputs ({', '.join(left)}): name all but one, or use |="
            )
        return left[0] if left else None

    def _main_output(self) -> str | None:
        if self._couts:
            return self._couts[0]
        return super()._main_output()


def _only(ports: list[Port], label: str, what: str, how: str) -> Port:
    if len(ports) != 1:
        raise WiringError(f"{label} has {len(ports) or 'no'} canonical {what}s: choose one with {how}(…)")
    return ports[0]

"""Mithril's ``Model``: compose's, with ``connect`` for placing it, one canonical input and output, and its keys."""

from __future__ import annotations

from typing import Any

from capibara import compose
from mithril.connecting import Connectable

__all__ = ["Model"]


class Model(Connectable, compose.Model):
    """:class:`capibara.compose.Model` with Mithril's ``connect``; joining connections is ``merge_connections``."""

    @classmethod
    def create(cls, *results: Any, name: str | None = None, **outputs: Any) -> Model:
        """A model of everything that the results are computed from; one without a name is ``output``.

        Args:
            results: connections. name: of the model. outputs: connections, by the names that they get.
        """
        for i, value in enumerate(results):
            outputs[f"output{i}" if len(results) > 1 else "output"] = value
        return super().create(name=name, **outputs)  # type: ignore[return-value]

    def merge_connections(self, *connections: Any, name: str | None = None) -> None:
        """Make connections one value: :meth:`capibara.compose.Model.connect`."""
        compose.Model.connect(self, *connections, key=name)

    def _name_of(self, wire: Any, shown: str) -> str:
        """The name of a value; one that has none is called as where it was made calls it (``input``)."""
        return super()._name_of(wire, shown.rpartition(".")[2])

    @property
    def conns(self) -> Any:
        raise AttributeError(
            "conns is Mithril's own bookkeeping: use input_keys, output_keys, cin and cout, or model.port(name)"
        )

"""``TrainModel`` under Mithril's arguments."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

from capibara import compose
from capibara.compose.logical.model import Model as _Model
from mithril.connecting import Connectable
from mithril.model import Model
from mithril.naming import name_all

__all__ = ["TrainModel"]


class TrainModel(Model, compose.TrainModel):
    """:class:`capibara.compose.TrainModel` as Mithril has it.

    The model's inputs and parameters are named here, flat (:mod:`mithril.naming`), so that a regularization names
    ``"weight"`` or ``"weight_0"``. Coefficients of regularizations are divided by the geometric mean of what the losses
    are averaged over, always.

    Args:
        model: the model to train.
    """

    signature = "model"

    def __init__(self, model: Any) -> None:
        Connectable.__init__(self, model=model)

    def _make(self, options: dict[str, Any], name: str | None) -> None:
        model = options["model"]
        unnamed = isinstance(model, _Model) and "output" not in model.wires
        if isinstance(model, _Model):
            name_all(model)
        compose.TrainModel.__init__(self, model, geometric_mean=True, name=name)
        for key, wire in list(model.wires.items()):
            if wire.find().role == "param" and key not in self.wires:
                self._name(key, wire.find())
        if unnamed and "output" in self._exposed:  # the name is ours, and no output that the author asked for
            self._exposed.remove("output")

    def finalize(self) -> None:
        """Join losses and regularization to ``final_cost``, the one output that Mithril adds."""
        done = self._done
        super().finalize()
        if not done:
            self._exposed.remove("loss")

    def add_regularization(
        self, model: Any, coef: Any, reg_key: Any = None, key_name: str | None = None, **connections: Any
    ) -> None:
        """:meth:`capibara.compose.TrainModel.add_regularization`; ``coef`` may be a tensor of one number.

        Args:
            reg_key: in Mithril, the input that is the parameter; here that follows from ``connections``.
        """
        del reg_key
        coef = float(getattr(coef, "value", coef))
        patterns = {k: v for k, v in connections.items() if isinstance(v, re.Pattern)}
        if len(connections) == 1 and patterns:
            ((key, pattern),) = patterns.items()
            found = [n for n, w in self.wires.items() if w.find().role == "param" and pattern.search(n)]
            for name in found:
                self.add_regularization(deepcopy(model), coef, key_name=key_name, **{key: name})
            if found:
                return
        for key, value in connections.items():
            if isinstance(value, str) and value in self.wires:
                connections[key] = self.port(value)
        super().add_regularization(model, coef, key_name=key_name, **connections)

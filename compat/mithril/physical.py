"""Compiled models under Mithril's calls: ``evaluate(params, data, output_gradients=True)``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from capibara.compose import CompiledModel
from capibara.compose.errors import InputError

__all__ = ["PhysicalModel", "physical"]

COST = "final_cost"


class PhysicalModel(CompiledModel):
    """A :class:`capibara.compose.CompiledModel` whose ``evaluate`` takes what Mithril's does."""

    def evaluate(
        self,
        params: Mapping[str, Any] | None = None,
        data: Mapping[str, Any] | None = None,
        output_gradients: Any = None,
        **options: Any,
    ) -> Any:
        """Run the model, with ``output_gradients`` also the gradients of its parameters.

        Args:
            params: by name; None for a model without any.
            data: inputs by name; constants given again when the model was compiled are taken as they were then.
            output_gradients: cotangents by output, or True: 1 for the cost of a :class:`~mithril.TrainModel`.
            options: ``state``, ``key``, ``train``, as :meth:`capibara.compose.CompiledModel.evaluate`.

        Raises:
            InputError: as compose's, and for True where there is no ``final_cost``.
        """
        given = {} if data is None else data
        if any(key in self.fixed for key in given):
            given = {key: value for key, value in given.items() if key not in self.fixed}
        given = {key: self._as_float(key, value) for key, value in given.items()}
        if output_gradients is True:
            if COST not in self.outputs:
                raise InputError(
                    f"output_gradients: got True, expected a dict of cotangents, since the model has no {COST!r}. "
                    f"Give one for each output to differentiate: {', '.join(self.outputs)}"
                )
            output_gradients = {COST: self.backend.ones()}
        elif output_gradients is False:
            output_gradients = None
        return super().evaluate({} if params is None else params, given, output_gradients, **options)

    def _as_float(self, key: str, value: Any) -> Any:
        """Integers for an input of floats as floats: Mithril converts where compose refuses."""
        spec = self.inputs.get(key)
        if spec is None or "float" not in str(spec.dtype) or not hasattr(value, "dtype"):
            return value
        return self.backend.cast(value, spec.dtype) if "int" in str(value.dtype) else value

    def evaluate_gradients(self, params: Mapping[str, Any], data: Any = None, **options: Any) -> Any:
        """The gradients alone; ``output_gradients`` is True if it is not given."""
        return self.evaluate(params, data, options.pop("output_gradients", True), **options)[1]


@cache
def physical(base: type) -> type:
    """The class for a backend's compiled models."""
    return type("PhysicalModel", (PhysicalModel, base), {"__module__": "mithril", "__doc__": base.__doc__})

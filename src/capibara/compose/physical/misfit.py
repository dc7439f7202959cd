"""Why a call failed: sizes that were free when the model was compiled, and do not fit together now.

What an operation says of its operands (JAX, NumPy and PyTorch each in their own words) names neither the connections
nor the line that connected them. So when one fails, the model's shapes are solved once more with the sizes of the call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from capibara.compose.errors import ComposeError, InputError, ShapeError
from capibara.compose.logical.model import Model
from capibara.compose.logical.trail import building_alone, what_if

__all__ = ["explaining"]


@contextlib.contextmanager
def explaining(model: Model, inputs: Any) -> Iterator[None]:
    """Errors of operations on inputs that do not fit the model become one that says so.

    Raises:
        InputError: the sizes of ``inputs`` contradict each other in the model. Other errors come as they are.
    """
    try:
        yield
    except ComposeError:
        raise
    except (TypeError, ValueError, RuntimeError, IndexError, ZeroDivisionError) as error:
        reason = _misfit(model, inputs)
        if reason is None:
            raise
        raise InputError(reason) from error


def _misfit(model: Model, inputs: Any) -> str | None:
    if not isinstance(inputs, Mapping):
        return None
    sizes = {key: tuple(v.shape) for key, v in inputs.items() if key in model.wires and hasattr(v, "shape")}
    with building_alone, what_if():
        for key, shape in sizes.items():
            try:
                model.set_shapes({key: shape})
            except ShapeError as error:
                given = ", ".join(f"{k} {s}" for k, s in sizes.items())
                return f"inputs of shapes {given} do not fit together in {model.label}: {error}"
            except ComposeError:
                return None  # something else is wrong, which the operation's own error says
    return None

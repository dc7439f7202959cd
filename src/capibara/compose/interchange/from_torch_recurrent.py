"""The recurrent layers of PyTorch, which the trace keeps whole: one scan for each layer and direction.

For :mod:`.from_torch_operations`, whose functions these are. Kept whole, a layer compiles in the time of one step,
however long the sequence. The length itself is the example's: torch closes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compose import primitives as p
from capibara.compose.interchange.from_torch_sizes import Refused
from capibara.compose.logical.connections import Port

__all__ = ["LAYERS", "RECURRENT", "Blank"]

LAYERS = ("lstm", "gru", "rnn_tanh")
"""The operations that the trace keeps."""


@dataclass(frozen=True)
class Blank:
    """An array of one number in a shape with open sizes: what layers start from where they are given no state.

    It is made only where something else reads it: ``made`` gives its port, the same at every call.
    """

    value: float
    made: Callable[[], Port]


def _initial(step: Any, states: Any, i: int, x: Any, hidden: int) -> Any:
    if isinstance(states, Port):
        return step.put(p.Indexer((i,)), input=states)
    number = states.value if isinstance(states, Blank) else states[i]
    if np.any(number):
        return number
    return step.put(p.ZeroState(hidden), input=x)


def _backwards(step: Any, x: Any) -> Any:
    return step.put(p.Indexer((slice(None), slice(None, None, -1))), input=x)


def _layers(make: Any, states: tuple[str, ...], joined: bool) -> Any:
    """``joined``: the two biases of torch are one, since they are only ever added."""

    def run(
        step: Any,
        x: Any,
        given: Any,
        params: Any,
        biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool,
    ) -> Any:
        if len(step.given(0).shape) != 3:
            raise Refused("sequences of several lengths packed together")
        start = given if isinstance(given, list | tuple) else [given]
        directions, each = 1 + both, 4 if biases else 2
        hidden = step.node.args[2][1].meta["val"].shape[1]
        x = x if batch_first else step.put(p.SwapAxes(0, 1), input=x)
        last: dict[str, list[Any]] = {key: [] for key in states}
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                i = layer * directions + direction
                w_ih, w_hh, *shifts = params[i * each : (i + 1) * each]
                ports: dict[str, Any] = {
                    "input": _backwards(step, x) if direction else x,
                    "w_ih": step.put(p.SwapAxes(0, 1), input=w_ih),
                    "w_hh": step.put(p.SwapAxes(0, 1), input=w_hh),
                    **{key: _initial(step, start[j], i, x, hidden) for j, key in enumerate(states)},
                }
                if not biases:
                    shifts = [np.zeros(step.node.args[2][i * each].meta["val"].shape[0])] * 2
                if joined:
                    ports["bias"] = (
                        step.put(p.Add(), left=shifts[0], right=shifts[1]) if biases else shifts[0]
                    )
                else:
                    ports["bias"], ports["bias_h"] = shifts
                output, *ends = step.all(make(), **ports)
                outputs.append(_backwards(step, output) if direction else output)
                for key, end in zip(states, ends, strict=True):
                    last[key].append(end)
            x = (
                outputs[0]
                if len(outputs) == 1
                else step.put(p.Concat(2, -1), input_0=outputs[0], input_1=outputs[1])
            )
            if dropout and train and layer < layers - 1:
                x = step.put(p.Dropout(dropout), input=x)
        ends = [
            step.put(p.Stack(len(row), 0), **{f"input_{i}": end for i, end in enumerate(row)})
            for row in last.values()
        ]
        return x if batch_first else step.put(p.SwapAxes(0, 1), input=x), *ends

    return run


RECURRENT: dict[str, Any] = {
    "lstm": _layers(p.LstmScan, ("hidden", "cell"), True),
    "gru": _layers(p.GruScan, ("hidden",), False),
    "rnn_tanh": _layers(p.RnnScan, ("hidden",), True),
}
"""By the operation's name without its overload."""

"""Operations of a user's own in JSON: their names are written, what they compute is not; what is read is checked."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from capibara import compose as ml


def model() -> ml.Model:
    made = ml.Model()
    made |= ml.Linear(4)(input="x", output="h")
    made |= ml.op("squash", limit=3.0, mode="soft", row=(1, None), shapes={"h": "*b n", "output": "*b n"})(
        h="h", output="s"
    )
    made |= ml.op("halves", outputs=("low", "high"), kinds={"high": "float"})(
        input="s", low="low", high="high"
    )
    made |= ml.Repeat(ml.op("twice")(input="z").block, 2)(input="low", output="y")
    made.expose("y", "high")
    return made


def backend() -> ml.NumpyBackend:
    made = ml.NumpyBackend()
    made.register_op("squash", lambda h, limit, mode, row: limit * np.tanh(h / limit))
    made.register_op("halves", lambda x: (x / 2, x + 1))
    made.register_op("twice", lambda x: 2 * x)
    return made


def test_operations_go_to_json_and_back() -> None:
    text = ml.to_json(model())
    again = ml.from_json(text)
    assert ml.to_json(again) == text
    x = {"x": np.linspace(-9, 9, 6, dtype="float32").reshape(2, 3)}
    results = []
    for one in (model(), again):
        compiled = ml.compile(one, backend(), shapes={"x": [None, 3]})
        results.append((compiled.source, compiled.evaluate(compiled.randomize_params(), x)))
    assert results[0][0] == results[1][0]
    for key in ("y", "high"):
        np.testing.assert_array_equal(results[0][1][key], results[1][1][key])


def test_wrapped_functions_say_what_to_do() -> None:
    made = ml.Model()
    made |= ml.from_jax(lambda x: x + 1)(x="x", output="y")
    with pytest.raises(ml.ModelFormatError, match="register_op"):
        ml.to_json(made)


def test_operations_that_are_not_registered() -> None:
    with pytest.raises(ml.CompileError, match="no operation 'squash' is registered"):
        ml.compile(ml.from_json(ml.to_json(model())), ml.NumpyBackend(), shapes={"x": [None, 3]})


def changed(**arguments: Any) -> str:
    made = ml.Model()
    made |= ml.op("squash", limit=3.0)(input="x", output="y")
    document = json.loads(ml.to_json(made))
    document["model"]["blocks"][0]["block"]["arguments"].update(arguments)
    return json.dumps(document)


HOSTILE: dict[str, dict[str, Any]] = {
    "code as a name": {"op": "squash(__import__('os').system('true'))"},
    "a word of Python's": {"op": "lambda"},
    "no name": {"op": 3},
    "code as an argument": {"attributes": {"dict": [["x=print(1), y", 1]]}},
    "a word as an argument": {"attributes": {"dict": [["class", 1]]}},
    "a number as an argument": {"attributes": {"dict": [[3, 1]]}},
    "an array": {
        "attributes": {"dict": [["limit", {"array": {"dtype": "float32", "shape": [1], "data": [1]}}]]}
    },
    "infinity": {"attributes": {"dict": [["limit", {"float": "inf"}]]}},
    "attributes that are none": {"attributes": 3},
    "code as a port": {"inputs": {"list": ["input", "x]; print(1)"]}},
    "a private port": {"inputs": {"list": ["__class__"]}},
    "an unknown kind": {"kinds": {"dict": [["input", "complex"]]}},
    "a kind that is none": {"kinds": {"dict": [["input", 3]]}},
    "a shape of nothing": {"shapes": {"dict": [["output", -3]]}},
    "a huge shape": {"shapes": {"dict": [["output", {"tuple": [10**7] * 3 + [10**9]}]]}},
    "another class": {"function": 3},
    "no outputs": {"outputs": {"list": []}},
    "too much": {"outputs": 5},
}


@pytest.mark.parametrize("what", list(HOSTILE))
def test_hostile_operations(what: str) -> None:
    with pytest.raises(ml.ComposeError):
        ml.from_json(changed(**HOSTILE[what]))


def test_an_operation_by_its_own_words_is_read() -> None:
    assert ml.from_json(changed()).output_keys == ["y"]


@pytest.mark.parametrize(
    "arguments",
    [
        {"attributes": {"x=1, y": 2}},
        {"attributes": {"class": 2}},
        {"kinds": {"input": "complex"}},
        {"kinds": {"input": 3}},
    ],
)
def test_op_refuses_what_cannot_stand_in_source(arguments: dict[str, Any]) -> None:
    attributes = arguments.pop("attributes", {})
    with pytest.raises(ml.WiringError, match=r"is not a name for an argument|must be 'float'"):
        ml.op("squash", **arguments, **attributes)

"""Models as JSON: the same model comes back, and nothing else is let in."""

from __future__ import annotations

import copy
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara import compose as ml
from capibara.compose.initializers import LogUniform, Normal, ones, zeros
from capibara.compose.interchange.json_model import ModelFormatError, from_json, to_json


def tied() -> ml.Model:
    model = ml.Model()
    table = model.add(ml.Embedding(7, 4), "table", input="tokens", output="h")
    model.add(ml.Unembed(), "scores", input="h", table=table.weight, output="output")
    model.expose("output")
    return model


def deep_tie() -> ml.Model:
    model = ml.Model()
    first = model.add(ml.MLP(4, [4], 4), "first", input="x", output="h")
    model.add(ml.Linear(4), "second", input="h", weight=first.layer_0.weight, output="output")
    model.expose("output")
    return model


def shared_repeat() -> ml.Model:
    model = ml.Model()
    first = model.add(ml.Linear(4), "first", input="x", output="h")
    again = ml.Repeat(ml.Linear(4), 3, mode="scan", shared=["weight"])
    model.add(again, "again", input="h", weight=first.weight, output="output")
    model.set_shapes(x=(2, 4))
    model.expose("output")
    return model


def stateful() -> ml.Model:
    inner = ml.Model()
    inner.add_input("input", ("batch", 4), "float", ("batch", "embed"))
    inner.add_state("total", ("batch", 4), zeros, axes=("batch", None))
    inner.add_parameter("gain", (4,), LogUniform(0.5, 2.0), axes=("embed",), keep_dtype=True)
    inner |= ml.Add()(left="input", right="total", output="sum")
    inner.update_state("total", "sum")
    inner |= ml.Multiply()(left="sum", right="gain", output="output")
    inner.expose("output")
    model = ml.Model()
    model.add(inner, "inner", input="x", output="y")
    model |= ml.Multiply()(left="y", right=np.array([1.0, 2.0, 3.0, 4.0], "float32"), output="z")
    model.set_shapes(x=(2, None))
    return model


def arguments() -> ml.Model:
    model = ml.Model()
    model |= ml.Indexer((..., slice(1, None), 0))(input="x", output="a")
    model |= ml.Pad(((1, 1),), -1.5)(input="a", output="b")
    model |= ml.Concat(2)(input_0="b", input_1="b", output="c")
    model |= ml.Softmax(axis=-1)(input="c", output="d")
    model |= ml.Transpose()(input="d", output="output")
    model.expose("output")
    model.set_shapes(x=(5, 2))
    return model


MODELS = [tied, deep_tie, shared_repeat, stateful, arguments, lambda: ml.MLP(3, [5], 2), lambda: ml.Relu(),
          lambda: ml.Remat(ml.SwiGLU(8, 4)), lambda: ml.Linear(3, init=Normal(0.5))]  # fmt: skip


@pytest.mark.parametrize("make", MODELS)
def test_there_and_back(make: Any) -> None:
    model = make()
    text = to_json(model)
    again = from_json(text)
    first, second = ml.compile(model), ml.compile(again)
    assert first.source == second.source
    assert (first.inputs, first.outputs, first.params, first.states) == (
        second.inputs,
        second.outputs,
        second.params,
        second.states,
    )
    assert to_json(from_json(text)) == to_json(from_json(to_json(again)))
    known = all(isinstance(n, int) for s in first.params.values() for n in s.shape or ("?",))
    if known:
        jax.tree.map(np.testing.assert_array_equal, first.randomize_params(3), second.randomize_params(3))


def test_values_are_the_same_after_being_written_down() -> None:
    model = tied()
    again = from_json(json.loads(to_json(model, indent=2)))
    params = ml.compile(model).randomize_params(0)
    inputs = {"tokens": jnp.array([1, 2, 3])}
    outs = [ml.compile(m).evaluate(params, inputs)["output"] for m in (model, again)]
    np.testing.assert_array_equal(*outs)


def test_the_class_is_told_and_a_changed_model_is_written_as_it_is() -> None:
    model = ml.MLP(3, [5], 2)
    assert "from MLP." in ml.compile(from_json(to_json(model))).source
    model.set_shapes(input=(7, 3))
    assert ml.compile(from_json(to_json(model))).inputs["input"].shape == (7, 3)


class Own(ml.Primitive):
    def __init__(self) -> None:
        super().__init__("own", {"input": ("*b", "float")}, {"output": ("*b", "float")})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Own(), "not one of the library's primitives"),
        (lambda: ml.Linear(3, init=jax.nn.initializers.ones), "initialiser of 'weight'"),
        (lambda: "model", "is not a model"),
    ],
)
def test_what_cannot_be_written(make: Any, words: str) -> None:
    with pytest.raises(ModelFormatError, match=words):
        to_json(make())


def change(*path: Any, to: Any) -> Any:
    """The JSON of a small model with one thing changed."""

    def changed() -> Any:
        model = ml.Model()
        model.add_parameter("w", (3,), ones)
        model |= ml.Multiply()(left="x", right="w", output="h")
        model.add(ml.Concat(2), "join", input_0="h", input_1="h", output="output")
        model.expose("output")
        document = json.loads(to_json(model))
        at = document
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = to
        return document

    return changed


def nested(depth: int) -> dict[str, Any]:
    body: dict[str, Any] = {"class": "Relu", "arguments": {}}
    for _ in range(depth):
        body = {"class": "Remat", "arguments": {"block": body}}
    return {"format": "capibara.compose.model", "version": 1, "symbols": {}, "model": body}


def cyclic() -> dict[str, Any]:
    document = nested(1)
    document["model"]["arguments"]["block"] = document["model"]
    return document


BLOCK = ("model", "blocks", 1, "block")
HOSTILE = {
    "version": change("version", to=2),
    "version_bool": change("version", to=True),
    "format": change("format", to="pickle"),
    "unknown_class": change(*BLOCK, "class", to="os.system"),
    "base_class": change(*BLOCK, "class", to="Primitive"),
    "class_type": change(*BLOCK, "class", to=["Relu"]),
    "unknown_argument": change(*BLOCK, "arguments", to={"x": 1}),
    "dunder_argument": change(*BLOCK, "arguments", to={"__class__": 1}),
    "many_ports": change(*BLOCK, "arguments", "count", to=10**9),
    "float_count": change(*BLOCK, "arguments", "count", to=2.0),
    "negative_count": change(*BLOCK, "arguments", "count", to=-1),
    "huge_size": change("model", "wires", 0, "shape", to=[10**9]),
    "negative_size": change("model", "wires", 0, "shape", to=[-3]),
    "shape_type": change("model", "wires", 0, "shape", to="3"),
    "shape_item": change("model", "wires", 0, "shape", to=[None]),
    "unknown_symbol": change("model", "wires", 0, "shape", to=["d99"]),
    "kind": change("model", "wires", 0, "kind", to="object"),
    "role": change("model", "wires", 0, "role", to="self"),
    "init_class": change("model", "wires", 0, "init", "class", to="Precision"),
    "init_value": change("model", "wires", 0, "init", "value", to="__import__('os')"),
    "init_nan": change("model", "wires", 0, "init", "value", to=float("nan")),
    "dtype": change("model", "wires", 0, "dtype", to="object"),
    "axes": change("model", "wires", 0, "axes", to=["a", "b"]),
    "key": change("model", "wires", 0, "key", to="w'] + __import__('os')"),
    "title": change("model", "title", to='x"""\nimport os\n"""'),
    "block_name": change("model", "blocks", 0, "name", to="a b"),
    "same_block_name": change("model", "blocks", 0, "name", to="join"),
    "exposed": change("model", "exposed", to=["nothing"]),
    "exposed_type": change("model", "exposed", to="output"),
    "no_such_port": change("model", "blocks", 0, "connections", "left", to={"port": ["later", "output"]}),
    "own_port": change("model", "blocks", 0, "connections", "left", to={"port": []}),
    "connection": change("model", "blocks", 0, "connections", "left", to=3),
    "nan": change("model", "blocks", 0, "connections", "left", to={"value": float("nan")}),
    "array": change(
        "model", "blocks", 0, "connections", "left",
        to={"value": {"array": {"dtype": "float32", "shape": [10**8, 10**8], "data": []}}},
    ),
    "array_object": change(
        "model", "blocks", 0, "connections", "left",
        to={"value": {"array": {"dtype": "object", "shape": [1], "data": [1]}}},
    ),
    "array_strings": change(
        "model", "blocks", 0, "connections", "left",
        to={"value": {"array": {"dtype": "float32", "shape": [1], "data": ["1"]}}},
    ),
    "two_results": change("model", "blocks", 1, "connections", "output", to="h"),
    "update": change("model", "updates", to={"w": "h"}),
    "symbols": change("symbols", to=[]),
    "symbol_size": change("symbols", to={"d0": {"name": None, "size": 1e9}}),
    "deep": lambda: nested(100),
    "cyclic": cyclic,
    "deep_text": lambda: "[" * 200_000,
    "deep_objects": lambda: '{"a":' * 200_000,
    "no_json": lambda: "{'format': 1}",
    "nothing": lambda: "",
    "binary": lambda: b"\x80\x04\xff",
    "twice": lambda: '{"format": 1, "format": 2}',
    "not_a_number": lambda: '{"format": NaN}',
    "long_number": lambda: '{"version": ' + "9" * 10_000 + "}",
    "list": lambda: "[]",
    "none": lambda: None,
    "exec": lambda: {"class": "Relu", "format": "x", "version": 1, "symbols": {}, "model": {}},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile(name: str) -> None:
    document = HOSTILE[name]()
    with pytest.raises(ml.ComposeError):
        from_json(document)


def test_a_cycle_of_data_is_refused_when_compiled() -> None:
    document = change("model", "blocks", 0, "connections", "left", to="output")()
    with pytest.raises(ml.ComposeError):
        ml.compile(from_json(document))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(JSON)
def test_garbage(value: Any) -> None:
    with pytest.raises(ml.ComposeError):
        from_json(json.dumps(value))


BASE = json.loads(to_json(stateful()))


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(p for k, v in items for p in places(v, (*path, k)))]


PLACES = places(BASE)[1:]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(PLACES), JSON | st.sampled_from(["x", "inner", 10**9, -1, [], {}]))
def test_one_wrong_thing(path: tuple[Any, ...], value: Any) -> None:
    """Whatever stands in one place: a model that compiles, or an error of the library's own."""
    document = copy.deepcopy(BASE)
    at = document
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    try:
        compiled = ml.compile(from_json(document))
    except ml.ComposeError:
        return
    assert "forward" in compiled.source


def test_an_initialiser_that_cannot_be_is_refused_where_it_stands() -> None:
    model = ml.Model()
    model |= ml.Linear(3)(input="x", output="y")
    model.expose("y")
    text = ml.to_json(model)
    assert '"fan_in": 1' in text
    with pytest.raises(ml.ModelFormatError, match=r"weight.*fan_in=1\.5 must be an integer"):
        ml.from_json(text.replace('"fan_in": 1', '"fan_in": 1.5'))

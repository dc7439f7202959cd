"""Joining blocks: what connects, what is refused, and in which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from capibara import compose as ml
from capibara.compose.initializers import zeros

THIS = "test_model.py"


def two_layers() -> ml.Model:
    model = ml.Model()
    model |= ml.Linear(64)(input="x", output="hidden")
    model += ml.Relu()
    model += ml.Linear(10)(output="logits")
    return model


def test_names_become_inputs_and_outputs() -> None:
    model = two_layers()
    assert model.input_keys == ["x"]
    assert model.output_keys == ["logits"]
    assert [child.name for child in model.children] == ["linear", "relu", "linear_1"]


def test_shapes_flow_through_nested_models() -> None:
    outer = ml.Model()
    outer |= two_layers()(x="pixels", logits="scores")
    outer.set_shapes(pixels=(None, 784))
    compiled = ml.compile(outer)
    assert compiled.shapes["model.linear.weight"] == (784, 64)
    assert compiled.shapes["scores"] == ("size", 10)


def test_deep_nesting() -> None:
    block: ml.Model = ml.Linear(4, name="inner")
    for _ in range(1500):
        outer = ml.Model()
        outer.add(block, "m", input="input", output="output")
        block = outer
    compiled = ml.compile(block, shapes={"input": [2, 4]})
    assert compiled.shapes["output"] == (2, 4)


def test_mismatch_names_both_connections_both_shapes_and_the_line() -> None:
    model = ml.Model()
    model |= ml.Linear(64)(input="x", output="h")
    with pytest.raises(ml.ShapeError) as caught:
        model |= ml.SwiGLU(32, 48)(input="h", output="y")
    text = str(caught.value)
    for part in ("Model.h", "swi_glu.input", "(*b, 64)", "(*b, 48)", "linear.sum.output", THIS):
        assert part in text, f"{part!r} missing in:\n{text}"


def test_refused_connection_leaves_the_model_as_it_was() -> None:
    model = ml.Model()
    model |= ml.Linear(64)(input="x", output="h")
    before = repr(model)
    block = ml.SwiGLU(32, 48)
    with pytest.raises(ml.ShapeError):
        model |= block(input="h", output="y")
    assert repr(model) == before
    assert "y" not in model.wires
    # The refused block is as good as new.
    other = ml.Model()
    other |= block(input="z", output="y")
    assert ml.compile(other, shapes={"z": [2, 48]}).shapes["y"] == (2, 48)


def test_mismatch_found_by_broadcasting_names_the_operation() -> None:
    model = ml.Model()
    model |= ml.Linear(3)(input="x", output="a")
    model |= ml.Linear(4)(input="x", output="b")
    with pytest.raises(ml.ShapeError, match=r"(?s)add.*3 does not broadcast with 4.*while connecting"):
        model |= ml.Add()(left="a", right="b", output="c")


def test_shapes_given_at_compile_time_are_checked() -> None:
    model = ml.Model()
    model |= ml.SwiGLU(8, 16)(input="x", output="y")
    with pytest.raises(ml.ShapeError, match=r"shapes\['x'\].*\(\*b, 16\)"):
        ml.compile(model, shapes={"x": [2, 17]})
    assert ml.compile(model, shapes={"x": [2, 16]}).shapes["y"] == (2, 16)
    assert ml.compile(model, shapes={"x": [5, 16]}).shapes["y"] == (5, 16)


def test_kind_mismatch() -> None:
    model = ml.Model()
    model |= ml.Linear(8)(input="x", output="h")
    with pytest.raises(ml.KindError, match=r"(?s)embedding\.input.*float is not int.*Model\.h is float"):
        model |= ml.Embedding(10, 4)(input="h", output="e")


def test_cycle_is_named() -> None:
    model = ml.Model()
    model |= ml.Relu()(input="a", output="b")
    model |= ml.Tanh()(input="b", output="a")
    with pytest.raises(ml.CycleError, match=rf"(?s)relu .*{THIS}.*tanh"):
        ml.compile(model)


def test_unconnected_input_is_named() -> None:
    model = ml.Model()
    model |= ml.Relu()(input="x", output="a")
    model |= ml.Linear(3)(output="b")
    with pytest.raises(ml.UnconnectedError, match=rf"(?s)'input' of linear .*{THIS}"):
        ml.compile(model)


def test_two_producers() -> None:
    model = ml.Model()
    model |= ml.Relu()(input="x", output="y")
    with pytest.raises(ml.WiringError, match=r"(?s)y.*both are results"):
        model |= ml.Tanh()(input="x", output="y")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda m: m.__ior__(ml.Linear(3)(inputs="x")), "no port 'inputs'.*Did you mean 'input'"),
        (lambda m: m.__ior__("gelu"), "is not a block"),
        (lambda m: m.__ior__(m), "to itself"),
        (lambda m: m.__ior__(ml.Relu()(input="not a name")), "not a connection name"),
        (lambda m: m.__ior__(ml.Relu()(input=object())), "cannot be connected"),
        (lambda m: m.__ior__(ml.Relu()(input=ml.Relu().output)), "not part of"),
        (lambda m: m.__ior__(m.children[0].block), "already part of"),
        (lambda m: m.set_shapes(nothing=(1,)), "no port 'nothing'"),
        (lambda m: m.add(ml.Relu(), "relu", input="h"), "already has a block named 'relu'"),
        (lambda m: m.update_state("h", "h"), "is not a state"),
        (lambda m: ml.Linear(0), "dimension=0"),
        (lambda m: ml.Linear(2.5), "dimension=2.5"),  # pyright: ignore[reportArgumentType]
        (lambda m: ml.Repeat(ml.Linear(3), 0), "count=0"),
        (lambda m: ml.Repeat(ml.Linear(3), 2, mode="loop"), "mode='loop'"),
        (lambda m: ml.Repeat(ml.Linear(3), 2, remat="some"), "remat='some'"),
        (lambda m: ml.Dropout(1.0), "rate=1.0"),
        (lambda m: ml.MLP(3), "either"),
        (lambda m: m.hiden, "no port or attribute 'hiden'"),
    ],
)
def test_wrong_use_is_refused(wrong, words: str) -> None:
    model = ml.Model()
    model |= ml.Relu()(input="x", output="h")
    with pytest.raises((ml.ComposeError, AttributeError), match=f"(?s){words}"):
        wrong(model)


def test_repeat_needs_a_block_that_keeps_the_shape() -> None:
    body = ml.Model()
    body |= ml.Linear(8)(input="input", output="h")
    body |= ml.Linear(9)(input="h", output="output")
    body.set_shapes(input=("*b", 8))
    with pytest.raises(ml.ShapeError, match=r"cannot be repeated.*9.*8"):
        ml.Repeat(body, 2)


def test_values_inside_a_repeated_block_cannot_be_used_outside() -> None:
    body = ml.SwiGLU(8, 4)
    model = ml.Model()
    model |= ml.Repeat(body, 3)(input="x", output="y")
    with pytest.raises(ml.WiringError, match="not part of"):
        model |= ml.Relu()(input=body.output)


def test_constants_and_weak_numbers() -> None:
    model = ml.Model()
    model |= ml.Multiply()(left="x", right=2, output="double")
    model |= ml.Add()(left="double", right=np.array([1, 2, 3], "float32"), output="y")
    compiled = ml.compile(model)
    out = compiled.apply({}, {"x": np.ones((1, 3), "float32")})["y"]
    np.testing.assert_array_equal(out, [[3, 4, 5]])


def test_shared_parameter_is_one_parameter() -> None:
    model = ml.Model()
    first = model.add(ml.Linear(4, False), "first", input="x", output="h")
    model.add(ml.Linear(4, False), "second", input="h", weight=first.weight, output="y")
    compiled = ml.compile(model, shapes={"x": [2, 4]})
    params = compiled.randomize_params(0)
    assert list(params) == ["first"]
    x, w = np.ones((2, 4), "float32"), np.asarray(params["first"]["weight"])
    np.testing.assert_allclose(compiled.apply(params, {"x": x})["y"], x @ w @ w, rtol=1e-5)


def test_parameter_and_block_with_one_path() -> None:
    model = ml.Model()
    model.add_parameter("linear", (2,), zeros)
    model |= ml.Linear(2)(input="x", output="h")
    model |= ml.Add()(left="h", right="linear", output="y")
    with pytest.raises(ml.WiringError, match="same path"):
        ml.compile(model)


def test_exposed_and_unused_names_are_outputs() -> None:
    model = ml.Model()
    model |= ml.Relu()(input="x", output="a")
    model |= ml.Tanh()(input="a", output="b")
    model |= ml.Exp()(input="a", output="c")
    assert model.output_keys == ["b", "c"]
    model.expose("a", "c")
    assert ml.compile(model).output_keys == ["a", "c"]


def test_a_block_refused_for_its_name_can_still_grow() -> None:
    block = ml.Model()
    block |= ml.Linear(4)(input="x", output="h")
    with pytest.raises(ml.WiringError, match="is not a name for a block"):
        ml.Model().add(block, name="not a name")
    block |= ml.Relu()(input="h", output="y")
    assert block.output_keys == ["y"]


def test_block_of_a_refused_repeat_can_still_be_used() -> None:
    block = ml.Model()
    block |= ml.Linear(4)(input="x", output="h")
    block.set_shapes(x=[2, 3])
    with pytest.raises(ml.ShapeError, match="cannot be repeated"):
        ml.Repeat(block, 2)
    model = ml.Model()
    model |= block(x="x", h="y")
    assert ml.compile(model).shapes["y"] == (2, 4)


def snapshot(model: ml.Model) -> Any:
    return (
        list(model.symbols),
        list(model.wires),
        [repr(wire.find().shape) for wire in model.wires.values()],
        [wire.find().axes for wire in model.wires.values()],
        list(model._exposed),
        list(model.state_updates),
        len(model.children),
    )


@pytest.mark.parametrize(
    "refused",
    [
        lambda m: m.add(ml.Relu(), input=ml.IOKey("x", shape=("new", "other", "third"))),
        lambda m: m.add(ml.Relu(), input=ml.IOKey("fresh", shape=("new", 3)), output="x"),
        lambda m: m.add(ml.Relu(), input=ml.IOKey("x", shape=("new", "*two", "*rests"))),
        lambda m: m.add(ml.Relu(), input=ml.IOKey("x", shape=("new", 5), axes=("embed", "mlp"))),
        lambda m: m.add_input("x", ("new", 3)),
        lambda m: m.add_input("not a key", ("new", 3)),
        lambda m: m.add_input("z", ("new", "*a", "*b")),
        lambda m: m.add_input("z", ("new", 3), axes=("one",)),
        lambda m: m.add_parameter("x", ("new", 3), zeros),
        lambda m: m.add_state("s", ("new", 3), zeros),
        lambda m: m.update_state("s", "newer"),
        lambda m: m.set_shapes(x=("new", 5)),
        lambda m: m.set_shapes(x=("new", 4), y=("new", 5)),
        lambda m: m.set_shapes(x=(7, 4), nothing=(1,)),
        lambda m: m.set_sizes(rows=7, columns=2),
        lambda m: m.expose("x", "nothing"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(refused: Any) -> None:
    model = ml.Model()
    model.add_input("x", ("rows", 4), "float")
    model.add_state("s", (), zeros)
    model |= ml.Relu()(input="x", output="y")
    model.update_state("s", "y")
    before = snapshot(model)
    with pytest.raises(ml.ComposeError):
        refused(model)
    assert snapshot(model) == before


def test_names_given_for_one_compilation_stay_there() -> None:
    model = ml.Model()
    model |= ml.Linear(3)(input="x", output="y")
    before = snapshot(model)
    compiled = ml.compile(model, shapes={"x": ["many", 4]})
    assert compiled.shapes["y"] == ("many", 3)
    assert snapshot(model) == before
    model.add_input("z", ("many", 5))
    assert list(model.symbols) == ["many"]

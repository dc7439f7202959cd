"""The table of a logical model."""

from __future__ import annotations

import pytest

from capibara import compose as ml


def model() -> ml.Model:
    model = ml.Model()
    model |= ml.Linear(4)(input="x", output="h")
    model += ml.Relu()
    model += ml.Repeat(ml.SwiGLU(8), 3)
    model |= ml.Linear(2)(input=model.h * 2, output="y")
    return model


EXPECTED = """\
block                port          connection       shape     parameters
-------------------  ------------  ---------------  --------  ----------
model (Model)        in  x                          (*b, in)     302 + ?
                     out y                          (*b, 2)
linear (Linear)      in  input     x                (*b, in)       4 + ?
                     param weight  param            (in, 4)
                     param bias    param            (4,)
                     out output    h                (*b, 4)
relu (Relu)          in  input     h                (*b, 4)
                     out output                     (*b, 4)
repeat (Repeat × 3)  in  input     relu.output      (*b, 4)          288
                     out output                     (*b, 4)
multiply (Multiply)  in  left      h                (*b, 4)
                     in  right     2                ()
                     out output                     (*b, 4)
linear_1 (Linear)    in  input     multiply.output  (*b, 4)           10
                     param weight  param            (4, 2)
                     param bias    param            (2,)
                     out output    y                (*b, 2)

parameters: 302 + ?"""


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = model().summary()
    assert text == EXPECTED
    assert capsys.readouterr().out == EXPECTED + "\n"
    assert model().summary(verbose=False) == EXPECTED
    assert capsys.readouterr().out == ""


def test_the_number_of_parameters_is_that_of_the_compiled_model() -> None:
    whole = model()
    whole.set_shapes(x=(2, 5))
    compiled = ml.compile(whole)
    assert whole.summary(verbose=False).endswith(f"parameters: {compiled.num_params}")


def test_shared_parameters_count_once() -> None:
    whole = ml.Model()
    whole |= ml.Linear(3)(input="x", weight="w", output="a")
    whole |= ml.Linear(3)(input="a", weight="w", output="b")
    whole.set_shapes(x=(2, 3))
    assert whole.summary(verbose=False).endswith(f"parameters: {3 * 3 + 3 + 3}")


def test_depth_and_columns() -> None:
    whole = model()
    flat, deep = whole.summary(verbose=False), whole.summary(depth=None, verbose=False)
    assert "linear.product (Dense)" not in flat
    assert "linear.product (Dense)" in deep
    assert "repeat.gate.product (Dense)" in deep
    assert "repeat.gate.product" not in whole.summary(depth=1, verbose=False)
    assert "repeat.gate (Linear)" in whole.summary(depth=1, verbose=False)
    typed = whole.summary(shapes=False, types=True, verbose=False)
    assert "type" in typed.splitlines()[0]
    assert "shape" not in typed.splitlines()[0]
    assert "float" in typed
    assert all(line == line.rstrip() for line in deep.splitlines())


def test_half_built_models() -> None:
    empty = ml.Model().summary(verbose=False)
    assert "model (Model)" in empty
    assert empty.endswith("parameters: 0")
    half = ml.Model()
    half |= ml.Add()(right=2.0)
    half |= ml.op("gelu")(input="x")
    text = half.summary(verbose=False)
    assert "(open)" in text
    assert "gelu (op gelu)" in text
    assert "2.0" in text


@pytest.mark.parametrize("arguments", [{"depth": -1}, {"depth": 1.5}, {"shapes": 1}, {"verbose": None}])
def test_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ml.WiringError, match=next(iter(arguments))):
        model().summary(**arguments)  # type: ignore[arg-type]

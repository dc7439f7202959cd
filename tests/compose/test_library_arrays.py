"""Shapes, indexing and arrays made from nothing, against PyTorch; random arrays against their distribution."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from primitive_table import Case, check, check_dtypes, draw, run
from torch_oracle import torch

from capibara import compose as ml

p: Any = ml.primitives  # many calls here are wrong on purpose

X = draw(2, 3, 4)
INDEX = np.array([[2, -1], [1, 7]])


def _counted(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Negative indices from the end, then clipped."""
    return torch.where(indices < 0, indices + size, indices).clamp(0, size - 1).long()


def one(make: Any, want: Any, x: Any = X, **options: Any) -> Case:
    return Case(make, {"input": x}, lambda input: want(input), **options)


def made(make: Any, want: Any) -> Case:
    return Case(make, {}, lambda: want)


CASES = {
    "reshape": one(lambda: p.Reshape((4, 6)), lambda x: x.reshape(4, 6)),
    "reshape_free": one(lambda: p.Reshape((2, -1, 2)), lambda x: x.reshape(2, -1, 2)),
    "reshape_scalar": one(lambda: p.Reshape(()), lambda x: x.reshape(()), draw(1, 1)),
    "flatten": one(p.Flatten, torch.flatten),
    "flatten_part": one(lambda: p.Flatten(1), lambda x: x.flatten(1)),
    "flatten_scalar": one(p.Flatten, torch.flatten, np.float64(2.0)),
    "transpose": one(p.Transpose, lambda x: x.permute(2, 1, 0)),
    "transpose_axes": one(lambda: p.Transpose((1, 0, -1)), lambda x: x.permute(1, 0, 2)),
    "swap_axes": one(lambda: p.SwapAxes(0, -1), lambda x: x.swapaxes(0, -1)),
    "squeeze": one(p.Squeeze, torch.squeeze, draw(1, 3, 1)),
    "squeeze_axis": one(lambda: p.Squeeze(-1), lambda x: x.squeeze(-1), draw(1, 3, 1)),
    "expand_dims": one(lambda: p.ExpandDims((0, -1)), lambda x: x[None, ..., None]),
    "broadcast_to": one(lambda: p.BroadcastTo((5, 2, 3)), lambda x: x.broadcast_to(5, 2, 3), draw(2, 1)),
    "pad": one(
        lambda: p.Pad(((0, 0), (1, 0), (2, 3)), 7.0),
        lambda x: torch.nn.functional.pad(x, (2, 3, 1, 0), value=7.0),
    ),
    "item": one(p.Item, lambda x: x.reshape(()), draw(1, 1)),
    "at_least_1d": one(p.AtLeast1D, torch.atleast_1d, np.float64(3.0)),
    "at_least_1d_of_two": one(p.AtLeast1D, torch.atleast_1d, draw(2, 3)),
    "to_tensor": one(p.ToTensor, lambda x: x * 1),
    "shape_of": one(p.ShapeOf, lambda x: torch.tensor(x.shape, dtype=torch.int32), gradient=False),
    "size": one(p.Size, lambda x: torch.tensor(24), gradient=False),
    "size_of_some": one(lambda: p.Size((0, -1)), lambda x: torch.tensor(8), gradient=False),
    "length": one(p.Length, lambda x: torch.tensor(2), gradient=False),
    "split": one(lambda: p.Split(2, -1), lambda x: x.split(2, -1)),
    "split_one": one(lambda: p.Split(1), lambda x: x * 1),
    "unstack": one(lambda: p.Unstack(3, 1), lambda x: x.unbind(1)),
    "concat": Case(
        lambda: p.Concat(2, 1),
        {"input_0": X, "input_1": draw(2, 1, 4)},
        lambda input_0, input_1: torch.cat([input_0, input_1], 1),
    ),
    "concat_all": Case(
        lambda: p.Concat(2, None),
        {"input_0": X, "input_1": draw(2, 1)},
        lambda input_0, input_1: torch.cat([input_0.flatten(), input_1.flatten()]),
    ),
    "stack": Case(
        lambda: p.Stack(2, -1),
        {"input_0": X, "input_1": 2 * X},
        lambda input_0, input_1: torch.stack([input_0, input_1], -1),
    ),
    "indexer": one(
        lambda: p.Indexer((slice(None), -1, None, slice(3, 0, -2))), lambda x: x[:, -1, None, [3, 1]]
    ),
    "indexer_dots": one(lambda: p.Indexer((..., 2)), lambda x: x[..., 2]),
    "indexer_row": one(lambda: p.Indexer(1), lambda x: x[1]),
    "slice": one(lambda: p.Slice(1), lambda x: x[1:]),
    "slice_bool": one(lambda: p.Slice(stop=1), lambda x: x[:1], np.array([True, False])),
    "take": Case(
        lambda: p.Take(1),
        {"input": X, "indices": INDEX},
        lambda input, indices: input[:, _counted(indices, 3)],
    ),
    "permute_tensor": Case(
        p.PermuteTensor,
        {"input": X, "indices": np.array([1, 0, -1, -2])},
        lambda input, indices: input[_counted(indices, 2)],
    ),
    "take_along_axis": Case(
        lambda: p.TakeAlongAxis(1),
        {"input": draw(2, 3), "indices": INDEX},
        lambda input, indices: torch.take_along_dim(input, _counted(indices, 3), 1),
    ),
    "scatter": Case(
        lambda: p.Scatter(1),
        {"input": X, "indices": np.array([2, -3]), "updates": draw(2, 2, 4)},
        lambda input, indices, updates: input.index_copy(1, _counted(indices, 3), updates),
    ),
    "scatter_add": Case(
        lambda: p.Scatter(1, True),
        {"input": X, "indices": np.array([1, -2, 1]), "updates": draw(2, 3, 4)},
        lambda input, indices, updates: input.index_add(1, _counted(indices, 3), updates),
    ),
    "scatter_along_axis": Case(
        lambda: p.ScatterAlongAxis(1),
        {"input": draw(2, 3), "indices": np.array([[0, -1], [2, 1]]), "updates": draw(2, 2)},
        lambda input, indices, updates: input.scatter(1, _counted(indices, 3), updates),
    ),
    "scatter_along_axis_add": Case(
        lambda: p.ScatterAlongAxis(1, True),
        {"input": draw(2, 3), "indices": np.array([[0, 0], [2, 1]]), "updates": draw(2, 2)},
        lambda input, indices, updates: input.scatter_add(1, _counted(indices, 3), updates),
    ),
    "trapezoid": Case(
        p.Trapezoid,
        {"y": X, "x": np.array([0.0, 1.0, 3.0, 3.5])},
        lambda y, x: torch.trapezoid(y, x),
    ),
    "trapezoid_axis": Case(
        lambda: p.Trapezoid(0), {"y": X, "x": 2 * X}, lambda y, x: torch.trapezoid(y, x, dim=0)
    ),
    "unique": one(
        lambda: p.Unique(4, 9),
        lambda x: (torch.tensor([1, 3, 5, 9]), torch.tensor([1, 2, 3, 0]), torch.tensor(3)),
        np.array([5, 3, 5, 1, 3, 5]),
    ),
    "one_hot": one(
        lambda: p.OneHot(3),
        lambda x: torch.tensor([[0, 0, 1], [1, 0, 0], [0, 0, 0]]).double(),
        np.array([2, 0, 5]),
    ),
    "positional_encoding": one(
        lambda: p.PositionalEncoding(100.0),
        lambda x: (
            x
            + torch.stack(
                [
                    torch.stack([torch.arange(3.0).sin(), torch.arange(3.0).cos()], -1).double().flatten(1),
                    torch.stack([(torch.arange(3.0) / 10).sin(), (torch.arange(3.0) / 10).cos()], -1)
                    .double()
                    .flatten(1),
                ],
                1,
            ).flatten(1)
        ),
        rtol=1e-6,  # this oracle's angles are float32; the next test has them in float64
    ),
    "arange": made(lambda: p.Arange(5), torch.arange(5)),
    "arange_float": made(
        lambda: p.Arange(1.0, 0.0, 0.3), torch.tensor([0.0, 0.3, 0.6, 0.9]).double().round(decimals=1)
    ),
    "arange_down": made(lambda: p.Arange(0, 5, -2), torch.tensor([5, 3, 1])),
    "eye": made(lambda: p.Eye(2, 3), torch.eye(2, 3).double()),
    "eye_complement": made(lambda: p.EyeComplement(3), 1 - torch.eye(3).double()),
    "ones": made(lambda: p.Ones((2, 0, 3)), torch.ones(2, 0, 3).double()),
    "zeros": made(lambda: p.Zeros(()), torch.zeros(()).double()),
    "full": made(lambda: p.Full((2,), 0.25), torch.full((2,), 0.25).double()),
    "full_like": one(lambda: p.FullLike(2.5), lambda x: torch.full_like(x, 2.5).detach(), gradient=False),
    "ones_like": one(p.OnesLike, torch.ones_like, INDEX),
    "zeros_like": one(p.ZerosLike, lambda x: torch.zeros_like(x), np.array([True])),
}


@pytest.fixture(scope="module")
def found() -> Iterator[Any]:
    yield run(CASES)
    jax.clear_caches()


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", CASES)
def test_against_torch(name: str, found: Any) -> None:
    check(f"arrays/{name}", CASES[name], found[name])


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_dtypes(compute: str) -> None:
    check_dtypes(CASES, compute)


@pytest.mark.parametrize("size", [1, 4, 5])
def test_positional_encoding(size: int) -> None:
    x = draw(2, 3, size)
    got = ml.compile(p.PositionalEncoding(), ml.JaxBackend("float64")).apply({}, {"input": x})["output"]
    want = x.copy()
    for t in range(3):
        for i in range(size):
            angle = t / 10000 ** ((i - i % 2) / size)
            want[:, t, i] += np.cos(angle) if i % 2 else np.sin(angle)
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_random_arrays() -> None:
    model = ml.Model()
    model |= p.Randn((4000,))(output="normal")
    model |= p.RandomUniform((4000,), -1.0, 3.0)(output="even")
    model |= p.RandInt((4000,), -2, 3)(output="whole")
    model |= p.Randn((4000,))(output="other")
    model.expose("normal", "even", "whole", "other")
    compiled = ml.compile(model)
    with pytest.raises(ml.InputError, match=r"Randn needs randomness"):
        compiled.apply({}, {})
    out = compiled.apply({}, {}, key=jax.random.key(1))
    again = compiled.apply({}, {}, key=jax.random.key(1))
    assert (out["normal"] == again["normal"]).all()
    assert (out["normal"] != out["other"]).any()
    assert (out["normal"] != compiled.apply({}, {}, key=jax.random.key(2))["normal"]).any()
    # Five standard errors.
    assert abs(float(out["normal"].mean())) < 5 / 4000**0.5
    assert abs(float(out["normal"].std()) - 1) < 5 / 8000**0.5
    assert -1 <= float(out["even"].min()) < -0.98
    assert 2.98 < float(out["even"].max()) < 3
    assert sorted(set(np.asarray(out["whole"]).tolist())) == [-2, -1, 0, 1, 2]
    assert {k: str(v.dtype) for k, v in out.items()} == {
        "normal": "float32",
        "even": "float32",
        "whole": "int32",
        "other": "float32",
    }


def test_arrays_from_nothing_have_the_compute_dtype() -> None:
    policy = ml.Precision("float32", "bfloat16", "float32")
    for block in (p.Ones((2,)), p.Eye(2), p.Arange(2.0), p.Randn((2,))):
        out = ml.compile(block, ml.JaxBackend(policy=policy)).apply({}, {}, key=jax.random.key(0))["output"]
        assert str(out.dtype) == "bfloat16"


BAD = [
    (lambda: p.Reshape((-1, -1)), r"more than one -1"),
    (lambda: p.Reshape((2, -2)), r"-2 must be an integer of at least -1"),
    (lambda: p.Reshape(3), r"shape=3 must be a row of sizes"),
    (lambda: p.Transpose((0, 0)), r"names a dimension twice"),
    (lambda: p.Pad(((1,),)), r"two numbers, before and after"),
    (lambda: p.Pad(((1, -1),)), r"-1 must be an integer"),
    (lambda: p.Split(0), r"count=0"),
    (lambda: p.Indexer(1.5), r"1\.5 is not an integer, a slice"),
    (lambda: p.Indexer((..., ...)), r"more than one '\.\.\.'"),
    (lambda: p.Indexer(slice(0, 4, 0)), r"step of 0"),
    (lambda: p.Indexer("a; b"), r"'a; b' is not an integer"),
    (lambda: p.Arange(1, 0, 0), r"step=0"),
    (lambda: p.Arange(float("inf")), r"stop=inf"),
    (lambda: p.Eye(-1), r"rows=-1"),
    (lambda: p.OneHot(0), r"depth=0"),
    (lambda: p.Unique(0), r"size=0"),
    (lambda: p.RandInt((2,), 3, 3), r"low=3 must be below high=3"),
    (lambda: p.PositionalEncoding(0), r"base=0"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ml.WiringError, match=message):
        make()


S = {"input": (2, 3, 4)}
BAD_SHAPES = [
    (lambda: p.Reshape((5, -1)), S, r"24 elements cannot be put in the shape \(5, -1\)\n.*input \(2, 3, 4\)"),
    (lambda: p.Reshape((5, 5)), S, r"24 elements do not fill the shape \(5, 5\)"),
    (lambda: p.Flatten(2, 1), S, r"start=2 comes after end=1"),
    (lambda: p.Transpose((0, 1)), S, r"names 2 of 3 dimensions"),
    (lambda: p.SwapAxes(0, 3), S, r"axis=3 is outside"),
    (lambda: p.Squeeze(1), S, r"dimension 1 has size 3"),
    (lambda: p.BroadcastTo((2, 3, 5)), S, r"4 does not broadcast with 5|4 is not 5"),
    (lambda: p.Pad(((0, 0),)), S, r"3 dimensions are not 1|1 dimensions are not 3"),
    (lambda: p.Item(), S, r"more than one element"),
    (lambda: p.Split(2, 1), S, r"3 elements cannot be split into 2"),
    (lambda: p.Unstack(2, 1), S, r"3 is not 2|2 is not 3"),
    (lambda: p.Indexer((0, 3)), S, r"index 3 is outside a dimension of size 3\n.*input"),
    (lambda: p.Indexer((0, 0, 0, 0)), S, r"an index of 4 places is too long for 3 dimensions"),
    (lambda: p.Size(3), S, r"axis=3 is outside"),
    (lambda: p.Stack(2), {"input_0": (2,), "input_1": (3,)}, r"shapes\['input_1'\]"),
    (lambda: p.Concat(2, 0), {"input_0": (2, 3), "input_1": (3, 2)}, r"3 is not 2"),
    (lambda: p.TakeAlongAxis(1), {"input": (2, 3), "indices": (3, 3)}, r"2 is not 3|3 is not 2"),
    (lambda: p.Trapezoid(), {"y": (2, 3), "x": (4,)}, r"do not fit"),
]


@pytest.mark.parametrize(("make", "shapes", "message"), BAD_SHAPES)
def test_bad_shapes(make: Any, shapes: Any, message: str) -> None:
    with pytest.raises(ml.ShapeError, match=message):
        ml.compile(make(), shapes=shapes)


def test_sizes_that_follow() -> None:
    """From the output back to the input, and with free sizes."""
    output = ml.compile(p.Reshape((-1, 4)), shapes={"input": (None, 8)}).shapes["output"]
    assert output is not None
    assert output[1] == 4
    model = ml.Model()
    model |= p.Split(2, 1)(input="x", output_0="a", output_1="b")
    model |= p.Transpose()(input="a", output="t")
    model |= p.Pad(((1, 1), (0, 0)))(input="b", output="padded")
    model.expose("t", "padded")
    model.set_shapes(x=(None, None), padded=(7, 3))
    assert ml.compile(model).shapes == {"x": (5, 6), "t": (3, 5), "padded": (7, 3)}

"""Models of every kind as named tensors and back, bit by bit."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.errors import CompressError
from capibara.compress.models import adapt
from capibara.compress.models.numbers import from_bits, to_bits

jax = pytest.importorskip("jax")
jnp = jax.numpy
ml = pytest.importorskip("capibara.compose")
ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = [
    np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
    np.int64, np.int32, np.int16, np.int8, np.uint64, np.uint32, np.uint16, np.uint8,
]  # fmt: skip


def round_trip(model, **options):
    adapter = adapt(model, **options)
    return adapter, adapter.rebuild(adapter.tensors.read)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(DTYPES), st.sampled_from([(), (0,), (1, 7), (3, 0, 2), (2, 3, 4)]), st.integers(0, 2**32)
)
def test_bits_of_numpy_arrays_come_back(dtype, shape, seed):
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    array = raw.view(dtype).reshape(shape)
    bits, form, found = to_bits(array)
    assert (found, bits.size, form.bits) == (shape, array.size, 8 * np.dtype(dtype).itemsize)
    back = from_bits(bits, form, found)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_arrays_that_lie_otherwise_in_memory():
    array = np.arange(24, dtype=">i4").reshape(4, 6).T[::2]
    bits, form, shape = to_bits(array)
    np.testing.assert_array_equal(from_bits(bits, form, shape), array)
    assert from_bits(to_bits(np.bool_(True))[0], *to_bits(np.bool_(True))[1:]).dtype == bool


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8", "bool"])
def test_bits_of_jax_arrays_come_back_on_their_devices(dtype):
    array = jnp.asarray(np.linspace(-3, 3, 12).reshape(3, 4)).astype(dtype)
    bits, form, shape = to_bits(array)
    back = from_bits(bits, form, shape, like=array)
    assert isinstance(back, jax.Array)
    assert (back.dtype, back.sharding) == (array.dtype, array.sharding)
    assert np.asarray(back).tobytes() == np.asarray(array).tobytes()


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "bfloat16", "float16", "float8_e5m2", "int64", "uint8", "bool"]
)
def test_bits_of_torch_tensors_come_back(dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.linspace(-3, 3, 12).reshape(3, 4).T.to(getattr(torch, dtype))
    bits, form, shape = to_bits(tensor)
    back = from_bits(bits, form, shape, like=tensor)
    assert (back.dtype, tuple(back.shape)) == (tensor.dtype, (4, 3))
    assert torch.equal(back.float(), tensor.float())


def test_trees_keep_their_nesting_and_their_kinds():
    Pair = namedtuple("Pair", "left right")
    w = np.arange(6.0).reshape(2, 3)
    tree = OrderedDict(a={"w": w, "b": jnp.ones(3)}, l=[w + 1, (np.int8(3), None, "text", 2.5)])
    adapter, back = round_trip(tree)
    assert list(adapter.arrays) == ["a.w", "a.b", "l.0", "l.1.0"]
    assert type(back) is OrderedDict
    assert type(back["l"][1]) is tuple
    assert back["l"][1][1:] == (None, "text", 2.5)
    assert isinstance(back["a"]["b"], jax.Array)
    assert isinstance(back["a"]["w"], np.ndarray)
    np.testing.assert_array_equal(back["a"]["w"], w)
    adapter, back = round_trip({"pair": Pair(jnp.ones((2, 2)), jnp.zeros(3))})
    assert type(back["pair"]) is Pair
    np.testing.assert_array_equal(back["pair"].left, np.ones((2, 2)))
    assert adapter.metadata == {}  # JSON has no named tuples: it cannot be put together without the model


def test_tied_arrays_stay_one():
    w = jnp.ones((3, 3))
    adapter, back = round_trip({"embed": w, "head": w})
    assert adapter.tied == {"head": "embed"}
    assert back["embed"] is back["head"]


def test_torch_modules_keep_ties_buffers_and_their_own_numbers():
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    )
    model[0].bias = model[1].bias
    adapter = adapt(model)
    assert adapter.tied == {"1.bias": "0.bias"}
    changed = np.full(16, 2.0, np.float32)
    variant = adapter.variant({"0.weight": changed.view(np.uint32)})
    assert float(variant[0].weight.detach().sum()) == 32
    assert torch.equal(adapter.variant({})[0].weight, model[0].weight)
    back = adapter.rebuild(adapter.tensors.read)
    assert back[0].bias is back[1].bias
    assert back[0] is not model[0]
    assert all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), back.state_dict().values(), strict=True)
    )


def test_composed_models_come_with_their_parameters():
    model = ml.Model()
    model |= ml.Linear(5)(input="x", output="y")
    compiled = ml.compile(model, ml.JaxBackend(), shapes={"x": [None, 4]})
    params = compiled.randomize_params(seed=0)
    adapter, back = round_trip((compiled, params))
    assert set(adapter.arrays) == {".".join(p) for p in compiled.params}
    x = np.ones((2, 4), np.float32)
    expected = compiled.evaluate(params, {"x": x})["y"]
    np.testing.assert_allclose(adapter.run(back, {"x": x})["y"], expected)
    np.testing.assert_allclose(adapter.run(adapter.model, {"x": x})["y"], expected)
    with pytest.raises(CompressError, match=r"Remedy: compress\(\(model, params\)\)"):
        adapt(compiled)


def test_functions_run_trees():
    tree = {"w": np.eye(3, dtype=np.float32) * 2}
    adapter = adapt(tree, apply=lambda p, x: x @ p["w"])
    assert adapter.runs
    np.testing.assert_array_equal(adapter.run(tree, np.ones((1, 3), np.float32)), np.full((1, 3), 2.0))
    plain = adapt(tree)
    assert not plain.runs
    with pytest.raises(CompressError, match="pass apply="):
        plain.run(tree, np.ones(3))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({}, "without any tensor"),
        ({"a": 1}, "without any tensor"),
        ({"a": np.ones(2, complex)}, "a: numbers of type complex128"),
        ({"a": np.array(["x"])}, "a: numbers of type"),
        ({"a.b": np.ones(2), "a": {"b": np.ones(2)}}, "two tensors are called 'a.b'"),
        ({"key": jax.random.key(0)}, "key: numbers of type key"),
    ],
)
def test_what_is_no_model(model, message):
    with pytest.raises(CompressError, match=message):
        adapt(model)


def test_what_cannot_run_it():
    with pytest.raises(CompressError, match="apply: got 3"):
        adapt({"w": np.ones(3)}, apply=3)  # type: ignore[arg-type]

"""What compiled models are called with, keep and give out: foreign arrays, numbers, files, threads, memory."""

from __future__ import annotations

import gc
import linecache
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from torch_oracle import HAS_TORCH, needs_torch, torch

from capibara import compose as ml
from capibara.compose.physical.constants import argument

BACKENDS: dict[str, Any] = {"jax": ml.JaxBackend, "numpy": ml.NumpyBackend}
if HAS_TORCH:
    BACKENDS["torch"] = ml.TorchBackend
EVERYWHERE = pytest.mark.parametrize("name", list(BACKENDS))
X = np.ones((2, 3), "float32")
SHAPES = {"x": [2, 3]}


def linear() -> ml.Model:
    model = ml.Model()
    model |= ml.Linear(4)(input="x", output="y")
    return model


def with_weight(params: Any, weight: Any) -> dict[str, Any]:
    return {"linear": {**params["linear"], "weight": weight}}


@EVERYWHERE
@pytest.mark.parametrize(
    "weight",
    [
        np.ones((3, 4), "int32"),
        np.ones((3, 4), bool),
        np.ones((3, 4), "complex64"),
        np.ones((3, 4), object),
        [[1.0] * 4] * 3,
        None,
        "text",
    ],
    ids=["int", "bool", "complex", "object", "list", "none", "text"],
)
@pytest.mark.parametrize("gradients", [False, True])
def test_parameters_must_be_arrays_of_floats(name: str, weight: Any, gradients: bool) -> None:
    compiled = ml.compile(linear(), BACKENDS[name](), shapes=SHAPES)
    params = with_weight(compiled.randomize_params(0), weight)
    given = ({"y": np.ones((2, 4), "float32")},) if gradients else ()
    with pytest.raises(ml.InputError, match=r"params\['linear'\]\['weight'\]"):
        compiled.evaluate(params, {"x": X}, *given)


@needs_torch
@pytest.mark.parametrize("what", ["inputs", "params", "cotangents"])
def test_tensors_of_pytorch_are_refused_by_jax_with_a_remedy(what: str) -> None:
    compiled = ml.compile(linear(), shapes=SHAPES)
    params = compiled.randomize_params(0)
    x, cotangent = X, np.ones((2, 4), "float32")
    if what == "inputs":
        x = torch.ones(2, 3)
    elif what == "params":
        params = with_weight(params, torch.ones(3, 4))
    else:
        cotangent = torch.ones(2, 4)
    with pytest.raises(ml.InputError, match="PyTorch tensor"):
        compiled.evaluate(params, {"x": x}, {"y": cotangent})


@needs_torch
def test_numpy_takes_every_dense_tensor() -> None:
    compiled = ml.compile(linear(), ml.NumpyBackend(), shapes=SHAPES)
    params = compiled.randomize_params(0)
    want = compiled.evaluate(params, {"x": X})["y"]
    for tensor in (torch.ones(2, 3, requires_grad=True), torch.ones(2, 3, dtype=torch.bfloat16)):
        np.testing.assert_array_equal(compiled.evaluate(params, {"x": tensor})["y"], want)


@needs_torch
def test_pytorch_takes_parameters_and_inputs_of_numpy_also_for_gradients() -> None:
    compiled = ml.compile(linear(), ml.TorchBackend(), shapes=SHAPES)
    params = compiled.randomize_params(0)
    given = {"y": np.ones((2, 4), "float32")}
    want, slope = compiled.evaluate(params, {"x": X}, given)
    arrays = {"linear": {k: v.numpy() for k, v in params["linear"].items()}}
    found, other = compiled.evaluate(arrays, {"x": X.astype(">f4")}, given)
    np.testing.assert_array_equal(found["y"], want["y"])
    np.testing.assert_array_equal(other["linear"]["weight"], slope["linear"]["weight"])


def test_a_state_must_be_a_dict() -> None:
    compiled = ml.compile(linear(), shapes=SHAPES)
    with pytest.raises(ml.InputError, match="state is int"):
        compiled.evaluate(compiled.randomize_params(0), {"x": X}, state=5)  # type: ignore[arg-type]


@EVERYWHERE
@pytest.mark.parametrize("jit", [False, True])
def test_outputs_are_arrays_of_the_compute_dtype_also_where_they_are_constant(name: str, jit: bool) -> None:
    if name == "torch" and jit:
        pytest.skip("torch.compile takes long")
    model = ml.Model()
    model |= ml.Relu()(input="x", output="y")
    model |= ml.Add()(left="number", right=1.0, output="sum")
    model |= ml.Buffer()(input="number", output="same")
    model |= ml.Buffer()(input="infinite", output="limit")
    model |= ml.Buffer()(input="row", output="array")
    model.expose("y", "sum", "same", "limit", "array")
    fixed = {"number": 2.0, "row": [1.0, 2.0], "infinite": float("inf")}
    backend = BACKENDS[name]()
    outputs = ml.compile(model, backend, shapes=SHAPES, constant_keys=fixed, jit=jit).evaluate({}, {"x": X})
    for key, want in {"sum": 3.0, "same": 2.0, "limit": float("inf"), "array": [1.0, 2.0]}.items():
        assert isinstance(outputs[key], backend.get_backend_array_type()), key
        assert str(outputs[key].dtype).removeprefix("torch.") == "float32", key
        np.testing.assert_array_equal(backend.to_numpy(outputs[key]), want)


def test_constants_do_not_change_with_the_arrays_they_came_from_or_went_to() -> None:
    row = np.array([1, 2, 3], "int32")
    model = ml.Model()
    model |= ml.Add()(left="x", right=row, output="y")
    model |= ml.Buffer()(input="c", output="same")
    model.expose("y", "same")
    own = np.array([1, 2], "int32")
    compiled = ml.compile(model, ml.NumpyBackend(), shapes={"x": [3]}, constant_keys={"c": own})
    row[:] = 9
    own[:] = 9
    outputs = compiled.evaluate({}, {"x": np.zeros(3, "int32")})
    assert outputs["y"].tolist() == [1, 2, 3]
    assert outputs["same"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        outputs["same"][0] = 7


@EVERYWHERE
@pytest.mark.parametrize("size", [3, 100])
def test_constants_in_the_other_byte_order(name: str, size: int, tmp_path: Path) -> None:
    model = ml.Model()
    model |= ml.Add()(left="x", right=np.arange(size, dtype=">i4"), output="y")
    path = tmp_path / "model.py"
    compiled = ml.compile(model, BACKENDS[name](), shapes={"x": [size]}, file_path=path)
    found = compiled.evaluate({}, {"x": np.zeros(size, "int32")})["y"]
    assert np.asarray(found).tolist() == list(range(size))
    namespace: dict[str, Any] = {}
    exec(path.read_text(), namespace)
    assert np.asarray(namespace["constants"]["c0"]).tolist() == list(range(size))


def test_lists_of_whole_numbers_are_floats_where_floats_are_needed() -> None:
    compiled = ml.compile(linear(), constant_keys={"x": [[1, 2, 3], [4, 5, 6]]})
    params = compiled.randomize_params(0)
    want = np.array([[1, 2, 3], [4, 5, 6]]) @ np.asarray(params["linear"]["weight"])
    np.testing.assert_allclose(compiled.evaluate(params, {})["y"], want, rtol=1e-5)


def test_a_name_cannot_hide_a_function_of_gradients() -> None:
    model = ml.Model()
    model |= ml.Linear(4)(input="repeat_block_gradients", output="h")
    model |= ml.Repeat(ml.Linear(4), 2)(input="h", output="y")
    compiled = ml.compile(model, ml.NumpyBackend(), shapes={"repeat_block_gradients": [2, 3]})
    params = compiled.randomize_params(0)
    _, slope = compiled.evaluate(params, {"repeat_block_gradients": X}, {"y": np.ones((2, 4), "float32")})
    assert np.asarray(slope["repeat"]["bias"])[1].tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing/model.py", "no folder"),
        (".", "file_path"),
        (5, "file_path"),
        ("a\0b", "null"),
        ("", "file_path"),
    ],
)
def test_file_paths_that_cannot_be(
    path: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ml.CompileError, match=words):
        ml.compile(linear(), shapes=SHAPES, file_path=path)
    assert list(tmp_path.iterdir()) == []


def test_jit_is_a_flag() -> None:
    with pytest.raises(ml.CompileError, match="jit='yes'"):
        ml.compile(linear(), shapes=SHAPES, jit="yes")  # type: ignore[arg-type]


@pytest.mark.thin(3)
@EVERYWHERE
def test_a_file_with_an_operation_of_ones_own_runs_by_itself(name: str, tmp_path: Path) -> None:
    backend = BACKENDS[name]()
    backend.register_op("twice", lambda x: 2 * x)
    model = ml.Model()
    model |= ml.op("twice")(input="x", output="y")
    ml.compile(model, backend, shapes=SHAPES, jit=False, file_path=tmp_path / "model.py")
    code = (
        "import model\nmodel.registered['twice'] = lambda x: 2 * x\n"
        "print(model.forward({}, {'x': 3.0}, {}, None, False))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "({'y': 6.0}, {})"


def test_a_model_can_be_compiled_in_several_threads_at_once() -> None:
    model, errors = linear(), []

    def work(size: int) -> None:
        try:
            for _ in range(20):
                compiled = ml.compile(model, ml.NumpyBackend(), shapes={"x": [2, size]})
                assert compiled.shapes["x"] == (2, size)
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(3 + i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


def test_nothing_is_kept_of_a_model_that_is_gone() -> None:
    gc.collect()
    before = set(linecache.cache)
    models = [ml.compile(linear(), shapes=SHAPES) for _ in range(5)]
    for i in range(5):
        models[i].evaluate(models[i].randomize_params(0), {"x": X})
    gone = [weakref.ref(compiled) for compiled in models]
    assert set(linecache.cache) - before
    del models
    gc.collect()
    assert [ref() for ref in gone] == [None] * 5
    assert set(linecache.cache) <= before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": 5}, "device=5"),
        ({"device": ""}, "device=''"),
        ({"jit": "x"}, "jit='x'"),
        ({"debug": 1}, "debug=1"),
        ({"device_mesh": 5}, "device_mesh=5"),
        ({"device_mesh": "ab"}, "device_mesh='ab'"),
        ({"device_mesh": (1.5,)}, "integer"),
        ({"device_mesh": (1,), "mesh_axes": 5}, "mesh_axes=5"),
        ({"device_mesh": (1, 1), "mesh_axes": ("a", "a")}, "different names"),
        ({"device_mesh": (1, 1), "mesh_axes": "ab"}, "mesh_axes='ab'"),
    ],
)
def test_settings_of_the_jax_backend_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ml.CompileError, match=words):
        ml.JaxBackend(**options)


def torch_settings() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        torch.get_float32_matmul_precision(),
    )


def test_no_setting_of_any_library_is_changed() -> None:
    def settings() -> tuple[Any, ...]:
        return (
            dict(jax.config.values),
            *(torch_settings() if HAS_TORCH else ()),
            np.random.get_state()[1].tolist(),  # noqa: NPY002  # type: ignore[union-attr]
            np.geterr(),
        )

    before = settings()
    for make in BACKENDS.values():
        for dtype in ("float32", "float64"):
            backend = make(dtype)
            backend.set_seed(3)
            backend.rand(2, 3)
            compiled = ml.compile(linear(), backend, shapes=SHAPES)
            x = backend.array(X, dtype=dtype)
            compiled.evaluate(compiled.randomize_params(1), {"x": x}, {"y": np.ones((2, 4), dtype)})
    strict = ml.compile(
        linear(), ml.JaxBackend(precision="highest", debug=True, device="cpu:0"), shapes=SHAPES
    )
    with pytest.raises(FloatingPointError):
        strict.evaluate(strict.randomize_params(0), {"x": X * np.nan})
    assert settings() == before


def test_inputs_may_be_any_mapping() -> None:
    compiled = ml.compile(linear(), shapes=SHAPES)
    params = compiled.randomize_params(0)
    want = compiled.evaluate(params, {"x": jnp.asarray(X)})["y"]
    np.testing.assert_array_equal(compiled.evaluate(params, types.MappingProxyType({"x": X}))["y"], want)


@EVERYWHERE
@pytest.mark.parametrize(
    "train", [1, "yes", np.True_, jnp.array(True)], ids=["number", "text", "numpy", "array"]
)
def test_train_is_a_python_bool(name: str, train: Any) -> None:
    compiled = ml.compile(linear(), BACKENDS[name](), shapes=SHAPES)
    with pytest.raises(ml.InputError, match="train is"):
        compiled.evaluate(compiled.randomize_params(0), {"x": X}, train=train)


@EVERYWHERE
def test_keys_and_bounds_of_random_methods(name: str) -> None:
    backend = BACKENDS[name]()
    with pytest.raises(ml.InputError, match=r"key is (int|0)"):
        backend.split_key(0)
    with pytest.raises(ml.InputError, match="key is"):
        backend.random_normal(5, (2,))
    with pytest.raises(ml.InputError, match=r"low=1.0 must not be above high=0.0"):
        backend.rand_uniform(1.0, 0.0, 3)
    assert len(backend.split_key(backend.get_random_key())) == 2


@EVERYWHERE
@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_softmax_of_nothing_is_nothing(name: str, shape: tuple[int, ...]) -> None:
    backend = BACKENDS[name]()
    compiled = ml.compile(ml.Softmax(), backend, trainable_keys=["input"])
    empty = backend.zeros(*shape)
    outputs, slope = compiled.evaluate({"input": empty}, {}, {"output": empty})
    assert tuple(outputs["output"].shape) == tuple(slope["input"].shape) == shape


@pytest.mark.parametrize("axis", [None, 0, 1, (0, 1)])
@pytest.mark.parametrize(
    "rows",
    [
        [[3.0, 0.0, 2.0], [1.0, -4.0, 0.0]],
        [[0.0, 0.0, 2.0], [1.0, 5.0, 0.0]],
        [[np.nan, 2.0, 3.0], [1.0, np.inf, 4.0]],
        [[0.0, np.inf, 3.0], [-np.inf, 2.0, np.nan]],
        [[], []],
    ],
)
def test_gradient_of_a_product_is_the_product_of_the_others(axis: Any, rows: Any) -> None:
    x = np.asarray(rows, "float64").reshape(2, -1)
    numbers = ml.compile(ml.Prod(axis=axis), ml.NumpyBackend("float64"), trainable_keys=["input"])
    axes = (0, 1) if axis is None else (axis,) if isinstance(axis, int) else axis
    want = np.empty_like(x)
    with np.errstate(all="ignore"):
        total = np.prod(x, axis=axis)
        for i, j in np.ndindex(x.shape):
            others = [
                x[k, m]
                for k, m in np.ndindex(x.shape)
                if (k, m) != (i, j) and (0 in axes or k == i) and (1 in axes or m == j)
            ]
            want[i, j] = np.prod(others)
    out, slope = numbers.evaluate({"input": x}, {}, {"output": np.ones_like(total)})
    np.testing.assert_allclose(out["output"], total)
    np.testing.assert_allclose(slope["input"], want)


def test_names_that_python_reads_as_one_are_told_apart() -> None:
    backend = ml.JaxBackend()
    backend.register_op("ﬁ", lambda x: x + 1)
    model = ml.Model()
    model.add(ml.op("ﬁ"), None, input="x", output="a")
    model.add(ml.Relu(), "fi", input="x", output="b")
    model |= ml.Subtract()(left="a", right="b", output="c")
    compiled = ml.compile(model, backend, shapes={"x": [2]})
    assert compiled.evaluate({}, {"x": np.ones(2, "float32")})["c"].tolist() == [1.0, 1.0]


def test_parameters_are_saved_only_as_they_can_be_loaded(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    compiled = ml.compile(linear(), shapes=SHAPES)
    params = with_weight(compiled.randomize_params(0), np.ones((3, 4)))
    with pytest.raises(ml.InputError, match="has dtype float64, expected float32"):
        compiled.save_params(tmp_path / "model", params)
    assert list(tmp_path.iterdir()) == []


@needs_torch
def test_bfloat16_parameters_of_pytorch_in_a_file(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    compiled = ml.compile(linear(), ml.TorchBackend("bfloat16"), shapes=SHAPES)
    params = compiled.randomize_params(0)
    compiled.save_params(tmp_path / "model", params)
    again = compiled.load_params(tmp_path / "model")
    assert torch.equal(again["linear"]["weight"], params["linear"]["weight"])


def test_a_header_that_names_a_parameter_twice(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    compiled = ml.compile(linear(), shapes=SHAPES)
    path = tmp_path / "model"
    compiled.save_params(path, compiled.randomize_params(0))
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    twice = b'{"linear.bias":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},' + data[9 : 8 + size]
    path.write_bytes(len(twice).to_bytes(8, "little") + twice + data[8 + size :])
    with pytest.raises(ml.InputError, match="duplicate key"):
        compiled.load_params(path)


@EVERYWHERE
@pytest.mark.parametrize(
    "half", [np.float64(0.5), np.float32(0.5), 0.5], ids=["float64", "float32", "python"]
)
def test_numbers_of_numpy_are_arguments_like_any(name: str, half: Any) -> None:
    try:
        block = ml.Clip(low=-half, high=half)
    except ml.WiringError:
        assert not isinstance(half, float)  # NumPy's float32 is none
        return
    compiled = ml.compile(block, BACKENDS[name](), trainable_keys=["input"])
    assert "np." not in compiled.source.split("def forward")[1]
    x = compiled.backend.array([-2.0, 0.25, 2.0])
    outputs, slope = compiled.evaluate({"input": x}, {}, {"output": compiled.backend.ones(3)})
    assert np.asarray(outputs["output"]).tolist() == [-0.5, 0.25, 0.5]
    assert np.asarray(slope["input"]).tolist() == [0.0, 1.0, 0.0]


def test_arguments_in_source() -> None:
    values = [
        np.float64(0.5),
        float("-inf"),
        (1,),
        [],
        (slice(None, np.int64(2)), ..., None),
        True,
        "it's",
        np.str_("a"),
    ]
    text = argument(tuple(values), "x")
    assert eval(text, {"__builtins__": {"float": float, "slice": slice, "Ellipsis": ...}}) == tuple(values)
    assert "np" not in text
    assert eval(argument(float("nan"), "x")) != eval(argument(float("nan"), "x"))
    with pytest.raises(ml.CompileError, match=r"clip: low=.*object"):
        argument((object(),), "clip: low")


def test_numbers_of_numpy_are_written_down_as_numbers() -> None:
    model = ml.Model()
    model |= ml.Clip(low=np.float64(0.0), high=np.float64(0.5))(input="x", output="y")
    again = ml.from_json(ml.to_json(model))
    assert ml.compile(again, shapes={"x": [2]}).source == ml.compile(model, shapes={"x": [2]}).source

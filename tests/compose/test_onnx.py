"""Models as ONNX: what ONNX' own reference implementation makes of them, against the compiled model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capibara import compose as ml
from capibara.errors import MissingExtraError

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from onnx.reference import ReferenceEvaluator

Sizes = dict[str, int]
export_onnx: Any = ml.export_onnx


def ran(proto: Any, inputs: dict[str, Any]) -> list[Any]:
    return list(ReferenceEvaluator(proto).run(None, inputs))


def chain(*blocks: ml.Block) -> ml.Model:
    model = ml.Model()
    for i, block in enumerate(blocks):
        last = i == len(blocks) - 1
        model.add(block, input=f"x{i}" if i else "input", output="output" if last else f"x{i + 1}")
    model.expose("output")
    return model


def conv_net() -> ml.Model:
    return chain(
        ml.Convolution2D(3, 4, padding=((0, 1), (1, 1))), ml.BatchNorm2D(), ml.Relu(), ml.MaxPool2D(2),
        ml.Convolution2D(3, 6, stride=2, padding=1), ml.GroupNorm(3), ml.AvgPool2D(2, 1, 1), ml.Flatten(1),
        ml.Linear(3),
    )  # fmt: skip


def gpt_block() -> ml.Model:
    model = ml.Model()
    table = model.add(ml.RotaryTable(4), "rotary", positions="positions")
    model |= ml.Embedding(17, 16)(input="tokens", output="x")
    model |= ml.LayerNorm()(input="x", output="a")
    model |= ml.SelfAttention(16, 4, 2, window=4, softcap=5.0, sinks=True)(
        input="a", cos=table.cos, sin=table.sin, output="b"
    )
    model |= ml.Add()(left="x", right="b", output="h")
    model |= ml.RMSNorm()(input="h", output="c")
    model |= ml.SwiGLU(24)(input="c", output="d")
    model |= ml.Add()(left="h", right="d", output="z")
    model |= ml.Linear(17)(input="z", output="raw")
    model |= ml.Gelu()(input="raw", output="logits")
    model.expose("logits")
    return model


def cached_attention() -> ml.Model:
    model = ml.Model()
    table = model.add(ml.RotaryTable(4), "rotary", positions="positions")
    model |= ml.SelfAttention(8, 2, sinks=True, cached=True, cache_size=6, name="att")(
        input="input", cos=table.cos, sin=table.sin, position="position", output="output"
    )
    model.expose("output")
    return model


def signal() -> ml.Model:
    return chain(
        ml.Convolution1D(3, 4, dilation=2),
        ml.MaxPool1D(2),
        ml.AvgPool1D(2, 2, 1),
        ml.LeakyRelu(0.1),
        ml.Mean(2),
    )


# The model, the backend that it is compiled on, its inputs' shapes, the sizes of each call.
CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any], dict[str, list[Any]], list[Sizes]]] = {
    "mlp": (
        lambda: ml.MLP(3, [4], 2),
        lambda: ml.JaxBackend(dtype="float64"),
        {"input": ["batch", 3]},
        [{"batch": 1}, {"batch": 5}],
    ),
    "conv": (
        conv_net,
        lambda: ml.NumpyBackend(dtype="float64"),
        {"input": ["n", 2, 12, 12]},
        [{"n": 1}, {"n": 3}],
    ),
    "signal": (
        signal,
        lambda: ml.TorchBackend(dtype="float64"),
        {"input": ["n", 2, "width"]},
        [{"n": 1, "width": 13}, {"n": 2, "width": 20}],
    ),
    "gpt": (
        gpt_block,
        lambda: ml.JaxBackend(dtype="float64"),
        {"tokens": ["batch", "sequence"], "positions": ["sequence"]},
        [{"batch": 2, "sequence": 7}, {"batch": 1, "sequence": 3}],
    ),
    "lstm": (
        lambda: ml.LSTM(6),
        lambda: ml.JaxBackend(dtype="float64"),
        {"input": ["batch", "sequence", 4]},
        [{"batch": 2, "sequence": 5}, {"batch": 1, "sequence": 9}],
    ),
    "gru": (
        lambda: ml.GRU(6),
        lambda: ml.TorchBackend(dtype="float64"),
        {"input": [2, "sequence", 4]},
        [{"sequence": 5}],
    ),
    "rnn": (
        lambda: chain(ml.RNN(6), ml.Tanh()),
        lambda: ml.TorchBackend(),
        {"input": [2, 5, 4]},
        [{}],
    ),
}


def drawn(specs: dict[str, Any], sizes: Sizes) -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    out = {}
    for key, spec in specs.items():
        shape: Any = [sizes.get(n, n) for n in spec.shape]
        if spec.dtype == "int32":
            out[key] = random.integers(0, 7, shape).astype("int32")
        else:
            out[key] = random.normal(size=shape).astype(spec.dtype)
    return out


def perturbed(tree: Any, backend: Any) -> Any:
    """Other numbers than zeros and ones, so that no bias or statistic goes unseen."""
    if isinstance(tree, dict):
        return {k: perturbed(v, backend) for k, v in tree.items()}
    value = np.asarray(backend.to_numpy(tree))
    return backend.array(value + 0.1 + np.random.default_rng(value.size).uniform(0, 0.3, value.shape))


@pytest.mark.thin(3)
@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c == "gpt")) for c in CASES])
def test_the_reference_implementation_computes_the_same(case: str) -> None:
    make, on, shapes, calls = CASES[case]
    backend = on()
    compiled = ml.compile(make(), backend, shapes=shapes)
    params = perturbed(compiled.randomize_params(1), backend)
    state = perturbed(compiled.init_state(), backend) if compiled.states else None
    proto = export_onnx(compiled, params, state=state)
    onnx.checker.check_model(proto, full_check=True)
    assert [v.name for v in proto.graph.input] == compiled.input_keys
    assert [v.name for v in proto.graph.output] == compiled.output_keys
    for value in proto.graph.input:
        dims = [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        assert tuple(dims) == compiled.inputs[value.name].shape
    tolerance = 2e-5 if case == "rnn" else 1e-11
    for sizes in calls:
        inputs = drawn(compiled.inputs, sizes)
        found = ran(proto, inputs)
        want = compiled.evaluate(params, {k: backend.array(v) for k, v in inputs.items()}, state=state)
        want = want if state is None else want[0]
        for key, got in zip(compiled.output_keys, found, strict=True):
            expected = np.asarray(backend.to_numpy(want[key]))
            assert got.dtype == expected.dtype
            np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def ops_of(proto: Any) -> set[str]:
    return {node.op_type for node in proto.graph.node}


@pytest.mark.slow
def test_runtimes_see_whole_operations_not_loops() -> None:
    lstm = ml.compile(ml.LSTM(6), ml.TorchBackend(), shapes={"input": ["batch", "sequence", 4]})
    assert "LSTM" in ops_of(export_onnx(lstm, lstm.randomize_params(0)))
    net = ml.compile(conv_net(), ml.TorchBackend(), shapes={"input": [1, 2, 12, 12]})
    ops = ops_of(export_onnx(net, net.randomize_params(0), state=net.init_state()))
    assert {"Conv", "MaxPool", "AveragePool"} <= ops


def test_a_cache_goes_in_and_comes_out() -> None:
    backend = ml.JaxBackend(dtype="float64")
    compiled = ml.compile(cached_attention(), backend, shapes={"input": [2, 1, 8]})
    params, state = compiled.randomize_params(0), compiled.init_state()
    proto = export_onnx(compiled, params, state=state)
    names = [".".join(p) for p in compiled.states]
    assert [v.name for v in proto.graph.input] == [*compiled.input_keys, *(f"state.{n}" for n in names)]
    assert [v.name for v in proto.graph.output] == ["output", *(f"next_state.{n}" for n in names)]
    memory = {f"state.{n}": np.zeros((2, 2, 6, 4)) for n in names}
    for step in range(3):
        x = np.random.default_rng(step).normal(size=(2, 1, 8))
        at = {"positions": np.array([step], "int32"), "position": np.array(step, "int32")}
        want, state = compiled.evaluate(
            params, {k: backend.array(v) for k, v in {"input": x, **at}.items()}, state=state
        )
        got, *after = ran(proto, {"input": x, **at, **memory})
        np.testing.assert_allclose(got, want["output"], rtol=1e-11, atol=1e-12)
        memory = dict(zip(memory, after, strict=True))


def test_a_file_that_is_written_whole(tmp_path: Path) -> None:
    compiled = ml.compile(ml.MLP(3, [4], 2), ml.TorchBackend(), shapes={"input": ["batch", 3]})
    params = compiled.randomize_params(0)
    path = tmp_path / "mlp.onnx"
    proto = export_onnx(compiled, params, path, batch=4, optimize=False)
    assert [p.name for p in tmp_path.iterdir()] == ["mlp.onnx"]
    again = onnx.load(path)
    assert again == proto
    assert [d.dim_value for d in again.graph.input[0].type.tensor_type.shape.dim] == [4, 3]
    weights = {i.name: onnx.numpy_helper.to_array(i) for i in again.graph.initializer}
    assert set(weights) == {f"layer_{i}.{k}" for i in (0, 1) for k in ("weight", "bias")}
    np.testing.assert_array_equal(weights["layer_0.weight"], params["layer_0"]["weight"])
    before = path.read_bytes()
    with pytest.raises(FileNotFoundError):
        export_onnx(compiled, params, tmp_path / "nowhere" / "mlp.onnx", batch=4)
    assert path.read_bytes() == before


@pytest.mark.slow
def test_compile_arguments_are_kept() -> None:
    def model() -> ml.Model:
        net = ml.Model()
        net |= ml.Linear(2, name="first")(input="x", output="y")
        net |= ml.Multiply()(left="y", right="gain", output="z")
        net.set_shapes(gain=[2])
        net.expose("y", "z")
        return net

    arguments: Any = {"shapes": {"x": ["batch", 3]}, "trainable_keys": ["gain"], "discard_keys": ["y"]}
    compiled = ml.compile(model(), **arguments)
    params = compiled.randomize_params(0)
    proto = export_onnx(compiled, params)
    x = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
    (got,) = ran(proto, {"x": x})
    np.testing.assert_allclose(got, compiled.evaluate(params, {"x": x})["z"], rtol=1e-5, atol=1e-6)

    gain = np.array([2.0, 3.0], "float32")
    fixed: Any = {"shapes": {"x": [4, 3]}, "constant_keys": {"gain": gain}, "discard_keys": ["y"]}
    with pytest.raises(ml.CompileError, match=r"constant_keys for gain.*compile the model for TorchBackend"):
        export_onnx(ml.compile(model(), **fixed), {"first": params["first"]})
    own = {"first": {k: np.asarray(v) for k, v in params["first"].items()}}
    proto = export_onnx(ml.compile(model(), ml.TorchBackend(), **fixed), own)
    (got,) = ran(proto, {"x": x})
    np.testing.assert_allclose(got, (x @ own["first"]["weight"] + own["first"]["bias"]) * gain, rtol=1e-5)


def test_weights_and_values_of_one_name() -> None:
    """A weight called as an inner value is: torch calls the first addition ``add``."""
    from capibara.compose.initializers import zeros

    model = ml.Model()
    model.add_input("input", ("n", 2), "float")
    model.add_parameter("add", (2,), zeros)
    model.add_parameter("held_1", (2,), zeros)
    model.add(ml.Add(), left="input", right="add", output="a")
    model.add(ml.Multiply(), left="a", right="held_1", output="output")
    model.expose("output")
    compiled = ml.compile(model, ml.TorchBackend())
    params = {"add": np.array([1.0, 2.0], "float32"), "held_1": np.array([3.0, 4.0], "float32")}
    proto = export_onnx(compiled, params)
    assert {i.name for i in proto.graph.initializer} == {"add", "held_1"}
    (got,) = ran(proto, {"input": np.ones((1, 2), "float32")})
    np.testing.assert_array_equal(got, [[6.0, 12.0]])


def linear(backend: Any = None, **options: Any) -> Any:
    return ml.compile(ml.Linear(2), backend or ml.TorchBackend(), shapes={"input": ["batch", 3]}, **options)


GOOD = {"weight": np.zeros((3, 2), "float32"), "bias": np.zeros(2, "float32")}


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (lambda: export_onnx(lambda x: x, {}), ml.CompileError, "is neither a compiled model"),
        (lambda: export_onnx(linear(), GOOD, time=3), ml.CompileError, "free sizes are"),
        (lambda: export_onnx(linear(), GOOD, batch=0), ml.CompileError, "batch=0"),
        (lambda: export_onnx(linear(), GOOD, opset=True), ml.CompileError, "opset=True"),
        (lambda: export_onnx(linear(), [1]), ml.InputError, "must be a dict"),
        (lambda: export_onnx(linear(), {"weight": GOOD["weight"]}), ml.InputError, "missing .*bias"),
        (lambda: export_onnx(linear(), {**GOOD, "extra": 1}), ml.InputError, "unknown extra"),
        (
            lambda: export_onnx(linear(), {**GOOD, "bias": np.zeros(3)}),
            ml.InputError,
            r"'bias' has shape \(3,\)",
        ),
        (lambda: export_onnx(linear(), {**GOOD, "bias": "no"}), ml.InputError, "'bias' is str"),
        (lambda: export_onnx(ml.compile(ml.Relu(), ml.TorchBackend()), {}), ml.CompileError, "rank"),
        (
            lambda: export_onnx(ml.compile(ml.BatchNorm1D(), ml.TorchBackend()), {}),
            ml.InputError,
            "missing",
        ),
    ],
)
def test_what_cannot_be_exported(call: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind, match=text):
        call()


def test_an_operation_that_onnx_lacks_is_named() -> None:
    compiled = ml.compile(ml.Eigvalsh(), ml.TorchBackend(), shapes={"input": [3, 3]})
    with pytest.raises(ml.CompileError, match="eigh"):
        export_onnx(compiled, {})


def test_a_size_that_the_trace_has_written_in_is_found() -> None:
    backend = ml.TorchBackend()

    @backend.register_op("times_rows")
    def times_rows(x: Any) -> Any:
        return x * torch.from_numpy(np.full((), x.shape[0], "float32"))  # a number, as NumPy sees it

    model = ml.Model()
    model |= ml.op("times_rows")(input="x", output="y")
    model.set_shapes(x=["rows", 2], y=["rows", 2])
    model.set_types(x="float", y="float")
    model.expose("y")
    compiled = ml.compile(model, backend)
    with pytest.raises(ml.CompileError, match="rows"):
        export_onnx(compiled, {})
    (got,) = ran(export_onnx(compiled, {}, rows=3), {"x": np.ones((3, 2), "float32")})
    np.testing.assert_array_equal(got, np.full((3, 2), 3.0))


def test_a_trace_that_computes_something_else_at_other_sizes_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the care that is taken of sizes as numbers, torch writes in half the width that was traced."""
    from capibara.compose.interchange.torch_onnx_ops import ExactNumbers

    monkeypatch.setattr(
        ExactNumbers,
        "__torch_function__",
        lambda self, run, types, args=(), kw=None: run(*args, **(kw or {})),
    )
    model = chain(ml.AvgPool1D(2), ml.Mean(2))
    compiled = ml.compile(model, ml.TorchBackend(), shapes={"input": ["n", 2, "width"]})
    with pytest.raises(
        ml.CompileError, match=r"'output' depends on n, width in a way that a trace does not keep"
    ):
        export_onnx(compiled, {})


def test_a_module_of_torch_goes_through() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU(), torch.nn.Linear(4, 2)).eval()
    imported = ml.from_torch(module, (torch.zeros(2, 3),))
    proto = export_onnx(ml.compile(imported.model, ml.NumpyBackend()), imported.params)
    x = np.random.default_rng(0).normal(size=(2, 3)).astype("float32")
    (got,) = ran(proto, {"input": x})
    np.testing.assert_allclose(got, module(torch.tensor(x)).detach().numpy(), rtol=1e-5, atol=1e-6)


def test_a_function_of_jax_has_no_counterpart() -> None:
    import jax.numpy as jnp

    model = ml.Model()
    model |= ml.from_jax(lambda a: jnp.sin(a))(a="x", output="y")
    model.expose("y")
    compiled = ml.compile(model, shapes={"x": [3]})
    with pytest.raises(ml.CompileError, match="cannot be compiled for PyTorch"):
        export_onnx(compiled, {})


def test_too_large_for_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from capibara.compose.interchange import export_onnx as module

    monkeypatch.setattr(module, "MAX_BYTES", 16)
    with pytest.raises(ml.CompileError, match="32 bytes, and one ONNX file holds 16"):
        export_onnx(linear(), GOOD)


@pytest.mark.parametrize("package", ["torch", "onnx", "onnxscript"])
def test_what_has_to_be_installed(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    compiled = linear()
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == package else find(name, *a)
    )
    with pytest.raises(MissingExtraError, match=rf"'{package}'.*capibara-jax\[onnx\]"):
        export_onnx(compiled, GOOD)

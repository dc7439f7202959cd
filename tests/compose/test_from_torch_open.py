"""Ordinary torch modules with open sizes: values, gradients, programs and ONNX at sizes that were not traced."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from capibara import compose as ml
from capibara.compose import from_torch

torch = pytest.importorskip("torch")

from tests.support.open_modules import OPEN
from tests.support.torch_modules import tree

pytestmark = pytest.mark.filterwarnings("error")

SIZES = ((2, 4), (5, 7))
BACKENDS = {"jax": ml.JaxBackend, "numpy": ml.NumpyBackend, "torch": ml.TorchBackend}


def named(spec: tuple[dict[int, str], ...]) -> tuple[dict[int, Any], ...]:
    dims = {name: torch.export.Dim(name, max=64) for row in spec for name in row.values()}
    return tuple({axis: dims[name] for axis, name in row.items()} for row in spec)


@cache
def traced(case: str) -> Any:
    torch.manual_seed(0)
    make, inputs, spec = OPEN[case]
    module = make().double().eval()
    return module, from_torch(module, inputs(3, 6), dynamic_shapes=named(spec))


@cache
def compiled_in_jax(case: str) -> Any:
    return ml.compile(traced(case)[1].model, ml.JaxBackend(dtype="float64"))


def given(compiled: Any, arrays: Any) -> dict[str, Any]:
    backend = compiled.backend
    return {
        k: backend.array(a.numpy(), dtype=None if a.dtype == torch.float64 else "bool")
        for k, a in zip(compiled.input_keys, arrays, strict=True)
    }


@pytest.mark.thin(12)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("case", OPEN)
def test_values_and_gradients_at_other_sizes(case: str, name: str) -> None:
    module, imported = traced(case)
    backend = BACKENDS[name](dtype="float64")
    compiled = compiled_in_jax(case) if name == "jax" else ml.compile(imported.model, backend)
    params = tree(backend, imported.params)
    for sizes in SIZES:
        arrays = OPEN[case][1](*sizes)
        want = module(*arrays)
        weights = torch.cos(torch.arange(want.numel(), dtype=torch.float64)).reshape(want.shape)
        module.zero_grad()
        (want * weights).sum().backward()
        got, gradients = compiled.evaluate(params, given(compiled, arrays), {"output": weights.numpy()})
        np.testing.assert_allclose(
            backend.to_numpy(got["output"]), want.detach().numpy(), rtol=1e-9, atol=1e-9
        )
        for key, parameter in module.named_parameters():
            found = gradients
            for part in key.split("."):
                found = found[part if part[:1].isalpha() else f"item_{part}"]
            np.testing.assert_allclose(
                backend.to_numpy(found), parameter.grad.numpy(), rtol=1e-8, atol=1e-8, err_msg=key
            )


@pytest.mark.thin(4)
@pytest.mark.parametrize("case", OPEN)
def test_exported_and_read_again_it_runs_at_other_sizes(case: str, tmp_path: Any) -> None:
    module, imported = traced(case)
    compiled = compiled_in_jax(case)
    ml.export(compiled, tmp_path / "program")
    program = ml.load_exported(tmp_path / "program")
    params = tree(compiled.backend, imported.params)
    for sizes in SIZES:
        arrays = OPEN[case][1](*sizes)
        with compiled.backend.scope():
            got = program.call(params, given(compiled, arrays))["output"]
        np.testing.assert_allclose(np.asarray(got), module(*arrays).detach().numpy(), rtol=1e-9, atol=1e-9)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "case",
    [c if c in ("experts", "lstm") else pytest.param(c, marks=pytest.mark.slow) for c in OPEN],
)
def test_as_onnx_another_reader_runs_it_at_other_sizes(case: str) -> None:
    pytest.importorskip("onnxscript")
    from onnx.reference import ReferenceEvaluator

    module, imported = traced(case)
    compiled = compiled_in_jax(case)
    proto: Any = ml.export_onnx(compiled, imported.params)
    run = ReferenceEvaluator(proto)
    for sizes in SIZES:
        arrays = OPEN[case][1](*sizes)
        outputs: Any = run.run(None, {k: a.numpy() for k, a in zip(compiled.input_keys, arrays, strict=True)})
        (got,) = outputs
        np.testing.assert_allclose(got, module(*arrays).detach().numpy(), rtol=1e-9, atol=1e-9)


AS_NUMBERS = {
    "divided": lambda x: x / x.shape[1] + x.numel(),
    "scaled": lambda x: x * x.shape[1] ** -0.5 - x.shape[0] % 3,
    "compared": lambda x: torch.where(torch.arange(x.shape[1])[:, None] < x.shape[1] - 2, x, 0.0),
    "filled": lambda x: x + torch.full((x.shape[0], 1, 1), 1 / x.shape[1]) + torch.full_like(x, x.shape[0]),
    "filled with integers": lambda x: x.sum(-1) + torch.full((x.shape[0], x.shape[1]), x.shape[1]),
    "a tensor": lambda x: x * torch.tensor(x.shape[1]) + max(x.shape[0], 3),
    "padded": lambda x: torch.nn.functional.pad(x, (1, 0, 0, 10 - x.shape[1]), value=2.0),
    "a place": lambda x: x[:, x.shape[1] - 1] + x.select(1, x.shape[1] // 2),
    "turned": lambda x: torch.roll(x, (1, -2), (0, 1)),
}


class Computed(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


@pytest.mark.thin(3)
@pytest.mark.parametrize("case", AS_NUMBERS)
def test_open_sizes_as_numbers_are_those_of_the_call(case: str) -> None:
    module = Computed(AS_NUMBERS[case])
    sizes = ({0: torch.export.Dim("b"), 1: torch.export.Dim("t")},)
    if case == "a place":  # torch finds out for itself in which range
        sizes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    imported = from_torch(module, (torch.randn(3, 6, 4),), dynamic_shapes=sizes)
    compiled = ml.compile(imported.model, ml.NumpyBackend())
    for shape in ((5, 7, 4), (2, 3, 4), (1, 8, 4)):
        x = torch.randn(shape)
        got = compiled.evaluate({}, {compiled.input_keys[0]: x.numpy()})["output"]
        np.testing.assert_allclose(got, module(x).numpy(), rtol=1e-5, atol=1e-6)


def test_a_size_that_the_trace_settled_is_not_left_open() -> None:
    module = Computed(lambda x: x * float(x.shape[1]))
    auto = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    imported = from_torch(module, (torch.ones(3, 6),), dynamic_shapes=auto)
    compiled = ml.compile(imported.model, ml.NumpyBackend())
    (key,) = compiled.input_keys
    assert (compiled.evaluate({}, {key: np.ones((5, 6), "float32")})["output"] == 6).all()
    with pytest.raises(ml.InputError, match="expected"):
        compiled.evaluate({}, {key: np.ones((3, 7), "float32")})


def test_nothing_is_assumed_of_an_open_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from capibara.compose.interchange.from_torch_operations import TABLE

    def careless(step: Any, x: Any, *_: Any) -> Any:
        return step.put(ml.primitives.Multiply(), left=x, right=float(int(step.given(0).shape[1])))

    monkeypatch.setitem(TABLE, "relu", careless)
    dims = ({1: torch.export.Dim("t")},)
    with pytest.raises(ml.UnsupportedTorchError, match=r"aten::relu.* would be assumed of a size"):
        from_torch(Computed(torch.relu), (torch.ones(3, 6),), dynamic_shapes=dims)
    from_torch(Computed(torch.relu), (torch.ones(3, 6),))


def test_what_cannot_be_connected_is_told_with_its_place() -> None:
    dims = ({1: torch.export.Dim("t")},)
    with pytest.raises(ml.UnsupportedTorchError, match=r"aten::\w+.* in .*test_from_torch_open"):
        from_torch(Computed(lambda x: x * round(x.shape[1] / 2)), (torch.ones(3, 6),), dynamic_shapes=dims)

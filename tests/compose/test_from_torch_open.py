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


@pytest.mark.parametrize("case", OPEN)
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

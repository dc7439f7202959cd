"""Tables of primitives against PyTorch in float64: values, gradients, and the shapes that were declared.

All cases of a table become one model, so that a table is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from capibara import compose as ml

torch.set_num_threads(1)
KINDS = {"f": "float", "i": "int", "b": "bool"}


class Case(NamedTuple):
    """A block, an array for each of its inputs, and the same in PyTorch (one tensor, or one for each output)."""

    make: Callable[[], ml.Block]
    inputs: dict[str, Any]
    want: Callable[..., Any]
    gradient: bool = True
    rtol: float = 1e-10
    but: str = ""  # an input whose gradient is not compared


def draw(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    """Numbers away from kinks and ties."""
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape)


def _whole(
    cases: dict[str, Case], backend: ml.JaxBackend
) -> tuple[ml.CompiledModel, dict[str, Any], list[str]]:
    """All cases as one model, the arrays for its inputs, and the names of its outputs."""
    model = ml.Model()
    given: dict[str, Any] = {}
    exposed = []
    for number, case in enumerate(cases.values()):
        block = case.make()
        names = {}
        for key, value in case.inputs.items():
            array = np.asarray(value)
            array = array.astype("int32") if array.dtype.kind == "i" else array
            names[key] = ml.IOKey(f"c{number}_{key}", shape=array.shape, kind=KINDS[array.dtype.kind])
            given[f"c{number}_{key}"] = array
        outputs = {key: f"c{number}_out_{key}" for key in block.output_keys}
        model.add(block, f"b{number}", **names, **outputs)
        exposed += outputs.values()
    model.expose(*exposed)
    return ml.compile(model, backend), given, exposed


def run(cases: dict[str, Case]) -> dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """For each case: outputs, gradients of ``Σ output · weight`` by input, declared shapes."""
    compiled, given, exposed = _whole(cases, ml.JaxBackend(dtype="float64"))
    real = {k: v for k, v in given.items() if v.dtype.kind == "f"}
    rest = {k: v for k, v in given.items() if v.dtype.kind != "f"}

    def both(real: Any) -> Any:
        def forward(real: Any) -> Any:
            return compiled.apply({}, {**real, **rest}, key=jax.random.key(0), train=True)

        out, pull = jax.vjp(forward, real)
        return out, pull({k: weight_of(v) for k, v in out.items()})[0]

    with compiled.backend.scope():
        jitted = jax.jit(both, compiler_options={"xla_backend_optimization_level": 0})
        out, gradients = jax.tree.map(np.asarray, jitted(real))
    found = {}
    for number, name in enumerate(cases):
        start, into = f"c{number}_out_", f"c{number}_"
        found[name] = (
            {k[len(start) :]: out[k] for k in exposed if k.startswith(start)},
            {k[len(into) :]: v for k, v in gradients.items() if k.startswith(into)},
            {k[len(start) :]: s.shape for k, s in compiled.outputs.items() if k.startswith(start)},
        )
    return found


def weight_of(array: Any) -> Any:
    """Different numbers for the elements of an output, so that a mixed up gradient shows."""
    if array.dtype.kind != "f":
        return np.zeros(array.shape, jax.dtypes.float0)
    return np.cos(np.arange(array.size, dtype="float64") * 0.7 + 0.3).reshape(array.shape)


def check(case: Case, found: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
    """Compare what was found with PyTorch."""
    outputs, gradients, shapes = found
    tensors = {k: torch.tensor(np.asarray(v)) for k, v in case.inputs.items()}
    for tensor in tensors.values():
        tensor.requires_grad_(tensor.dtype == torch.float64)
    wanted = case.want(**tensors)
    wanted = wanted if isinstance(wanted, tuple | list) else (wanted,)
    assert len(wanted) == len(outputs)
    for (key, got), want in zip(outputs.items(), wanted, strict=True):
        want = torch.as_tensor(want)
        np.testing.assert_allclose(got, want.detach().numpy(), rtol=case.rtol, atol=1e-12, err_msg=key)
        assert got.shape == tuple(want.shape)
        assert KINDS[got.dtype.kind] == KINDS[want.detach().numpy().dtype.kind]
        assert got.dtype in (np.float64, np.int32, bool)
        assert shapes[key] == got.shape, key
    if not case.gradient:
        for got in gradients.values():
            np.testing.assert_array_equal(got, 0)
        return
    terms = [
        (torch.as_tensor(weight_of(got)) * want).sum()
        for got, want in zip(outputs.values(), wanted, strict=True)
        if want.requires_grad
    ]
    if not terms:
        for got in gradients.values():
            np.testing.assert_array_equal(got, 0)
        return
    real = {k: t for k, t in tensors.items() if t.requires_grad}
    pulled = torch.autograd.grad(sum(terms), list(real.values()), allow_unused=True)  # type: ignore[arg-type]
    for (key, tensor), want in zip(real.items(), pulled, strict=True):
        if key == case.but:
            continue
        want = torch.zeros_like(tensor) if want is None else want
        np.testing.assert_allclose(
            gradients[key], want.numpy(), rtol=max(case.rtol, 1e-10), atol=1e-11, err_msg=f"gradient of {key}"
        )


def check_dtypes(cases: dict[str, Case], compute: str) -> None:
    """Every output has the dtype that was declared for it, in any precision; nothing is computed."""
    policy = ml.Precision("float32", compute, "float32")
    compiled, given, _ = _whole(cases, ml.JaxBackend(policy=policy))
    given = {k: v.astype("float32") if v.dtype.kind == "f" else v for k, v in given.items()}
    out = jax.eval_shape(lambda x: compiled.apply({}, x, key=jax.random.key(0), train=True), given)
    names = list(cases)
    wrong = {
        (names[int(k[1 : k.index("_")])], k): str(v.dtype)
        for k, v in out.items()
        if str(v.dtype) != compiled.outputs[k].dtype
    }
    assert not wrong

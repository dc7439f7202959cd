"""Tables of primitives against PyTorch in float64: values, gradients, and the shapes that were declared.

All cases of a table become one model, so that a table is compiled once. Without PyTorch, results are compared with
what it gave; after a change of a table, ``python tests/support/primitive_table.py`` records that anew.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import numpy as np
from torch_oracle import HAS_TORCH, torch

from capibara import compose as ml

COMPOSE = Path(__file__).parents[1] / "compose"
RECORD = COMPOSE / "golden" / "references.npz"
TABLES = ("elements", "arrays", "operations", "language")
KINDS = {"f": "float", "i": "int", "u": "int", "b": "bool"}


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


def wanted(case: Case) -> dict[str, np.ndarray]:
    """What PyTorch says: ``"out0"``, ``"out1"`` …, and, where there is a gradient, ``"d NAME"`` for each real input."""
    tensors = {k: torch.tensor(np.asarray(v)) for k, v in case.inputs.items()}
    for tensor in tensors.values():
        tensor.requires_grad_(tensor.dtype == torch.float64)
    out = case.want(**tensors)
    out = [torch.as_tensor(each) for each in (out if isinstance(out, tuple | list) else (out,))]
    found = {f"out{i}": each.detach().numpy() for i, each in enumerate(out)}
    terms = [
        (torch.as_tensor(weight_of(each.detach().numpy())) * each).sum() for each in out if each.requires_grad
    ]
    if case.gradient and terms:
        real = {k: t for k, t in tensors.items() if t.requires_grad}
        pulled = torch.autograd.grad(terms, list(real.values()), allow_unused=True)
        for (key, tensor), each in zip(real.items(), pulled, strict=True):
            found[f"d {key}"] = (torch.zeros_like(tensor) if each is None else each).numpy()
    return found


@cache
def _record() -> dict[str, np.ndarray]:
    with np.load(RECORD, allow_pickle=False) as file:
        return dict(file)


def recorded(name: str) -> dict[str, np.ndarray]:
    """What PyTorch said when the record was made, for ``"table/case"``."""
    start = f"{name}/"
    found = {k.removeprefix(start): v for k, v in _record().items() if k.startswith(start)}
    assert found, f"{name} is not in {RECORD.name}: run python tests/support/primitive_table.py, with PyTorch"
    return found


def same_references(got: dict[str, np.ndarray], want: dict[str, np.ndarray], rtol: float) -> None:
    """Compare a record with PyTorch."""
    assert sorted(got) == sorted(want)
    for key, each in want.items():
        assert (got[key].shape, got[key].dtype) == (each.shape, each.dtype), key
        np.testing.assert_allclose(got[key], each, rtol=max(rtol, 1e-10), atol=1e-11, err_msg=key)


def check(name: str, case: Case, found: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]) -> None:
    """Compare what was found for ``"table/case"`` with PyTorch, or with what it said."""
    outputs, gradients, shapes = found
    want = wanted(case) if HAS_TORCH else recorded(name)
    assert sum(key.startswith("out") for key in want) == len(outputs)
    for i, (key, got) in enumerate(outputs.items()):
        right = want[f"out{i}"]
        np.testing.assert_allclose(got, right, rtol=case.rtol, atol=1e-12, err_msg=key)
        assert got.shape == right.shape
        assert KINDS[got.dtype.kind] == KINDS[right.dtype.kind]
        assert got.dtype in (np.float64, np.int32, bool)
        assert shapes[key] == got.shape, key
    pulled = {key.removeprefix("d "): each for key, each in want.items() if key.startswith("d ")}
    if not pulled:
        for got in gradients.values():
            np.testing.assert_array_equal(got, 0)
    for key, right in pulled.items():
        if key != case.but:
            np.testing.assert_allclose(
                gradients[key], right, rtol=max(case.rtol, 1e-10), atol=1e-11, err_msg=f"gradient of {key}"
            )


def table(name: str) -> ModuleType:
    """The module ``tests/compose/test_library_NAME.py``."""
    spec = importlib.util.spec_from_file_location(f"table_{name}", COMPOSE / f"test_library_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


if __name__ == "__main__":
    everything: dict[str, Any] = {
        f"{name}/{label}/{key}": value
        for name in TABLES
        for label, case in table(name).CASES.items()
        for key, value in wanted(case).items()
    }
    np.savez_compressed(RECORD, **everything)
    print(f"{len(everything)} arrays of PyTorch {torch.__version__} in {RECORD}")

"""The source that ``compile`` writes, kept word by word: nine models on JAX, three of them on NumPy and PyTorch too.

To write the files again after a wanted change, and then read the difference::

    python tests/compose/test_golden.py
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import compose as ml
from capibara.compose.initializers import zeros

GOLDEN = Path(__file__).resolve().parent / "golden"


def mlp() -> tuple[Any, dict[str, Any]]:
    return ml.MLP(4, [8, 8], 2), {"shapes": {"input": [3, 4]}}


def norm_block() -> tuple[Any, dict[str, Any]]:
    model = ml.Model()
    model |= ml.RMSNorm()(input="input", output="normed")
    model.add(ml.SwiGLU(16, 8), "feed", input="normed", output="fed")
    model |= ml.Add()(left="input", right="fed", output="output")
    model.expose("output")
    return model, {"shapes": {"input": [2, 3, 8]}}


def attention_block() -> tuple[Any, dict[str, Any]]:
    model = ml.Model()
    model |= ml.Embedding(11, 8)(input="tokens", output="embedded")
    model |= ml.Positions()(like="tokens", start=0, output="positions")
    model |= ml.RotaryTable(4)(positions="positions", cos="cos", sin="sin")
    model.add(ml.SelfAttention(8, 2), "attend", input="embedded", cos="cos", sin="sin", output="mixed")
    model.expose("mixed")
    return model, {"shapes": {"tokens": [2, 5]}}


def repeated() -> tuple[Any, dict[str, Any]]:
    return ml.Repeat(ml.SwiGLU(16, 8), 3, mode="scan", remat="full"), {"shapes": {"input": [2, 8]}}


def states() -> tuple[Any, dict[str, Any]]:
    model = ml.Model()
    model.add_input("input", ("batch", 4), "float")
    model.add_state("total", ("batch", 4), zeros)
    model |= ml.Add()(left="input", right="total", output="sum")
    model.update_state("total", "sum")
    model |= ml.Multiply()(left="sum", right=0.5, output="output")
    model.expose("output")
    return model, {"shapes": {"input": [2, 4]}}


def constants_folded() -> tuple[Any, dict[str, Any]]:
    model = ml.Model()
    model |= ml.Multiply()(left="scale", right=2.0, output="twice")
    model |= ml.Exp()(input="table", output="grown")
    model |= ml.Multiply()(left="input", right="grown", output="product")
    model |= ml.Multiply()(left="product", right="twice", output="output")
    model.expose("output")
    fixed = {"scale": 0.5, "table": [0.0, 0.0, 0.0, 0.0]}
    return model, {"constant_keys": fixed, "shapes": {"input": [2, 4]}}


def shared_work() -> tuple[Any, dict[str, Any]]:
    model = ml.Model()
    for name in ("first", "second"):
        model.add(ml.Sine(), name, input="input", output=f"{name}_sine")
    model |= ml.Buffer()(input="second_sine", output="copy")
    model |= ml.Multiply()(left="first_sine", right="copy", output="output")
    model |= ml.Cosine()(input="unused", output="left_out")
    model.expose("output", "left_out")
    return model, {"discard_keys": {"left_out"}, "shapes": {"input": [2, 4]}}


def dropout() -> tuple[Any, dict[str, Any]]:
    model = ml.Model()
    model.add(ml.Linear(4), "layer", input="input", output="hidden")
    model |= ml.Dropout(0.5)(input="hidden", output="dropped")
    model |= ml.Relu()(input="dropped", output="output")
    model.expose("output")
    return model, {
        "backend": ml.JaxBackend(policy=ml.Precision("float32", "bfloat16")),
        "shapes": {"input": [2, 3]},
    }


def inference() -> tuple[Any, dict[str, Any]]:
    model, arguments = dropout()
    return model, {**arguments, "inference": True, "use_short_namings": False}


MODELS: list[Callable[[], tuple[Any, dict[str, Any]]]] = [
    mlp,
    norm_block,
    attention_block,
    repeated,
    states,
    constants_folded,
    shared_work,
    dropout,
    inference,
]


PORTABLE: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "mlp": mlp,
    "norm_block": norm_block,
    "states": states,
}
# By the folder of their golden files. The type of a backend: PyTorch may not be installed.
BACKENDS: dict[str, Callable[[], Any]] = {"numpy": ml.NumpyBackend, "torch": ml.TorchBackend}


def portable(name: str, kind: str, file_path: Path | None = None) -> Any:
    model, arguments = PORTABLE[name]()
    return ml.compile(model, BACKENDS[kind](), file_path=file_path, **arguments)


@pytest.mark.parametrize("name", PORTABLE)
@pytest.mark.parametrize("kind", BACKENDS)
def test_written_source_of_other_backends(kind: str, name: str, tmp_path: Path) -> None:
    if kind == "torch":
        pytest.importorskip("torch")
    compiled = portable(name, kind, tmp_path / "model.py")
    golden = (GOLDEN / f"on_{kind}" / f"{name}.py").read_text(encoding="utf-8")
    assert (tmp_path / "model.py").read_text(encoding="utf-8") == golden
    assert compiled.source == golden


@pytest.mark.parametrize("kind", BACKENDS)
def test_every_golden_file_of_other_backends_is_of_a_model(kind: str) -> None:
    assert {p.stem for p in (GOLDEN / f"on_{kind}").glob("*.py")} == set(PORTABLE)


@pytest.mark.parametrize("name", PORTABLE)
@pytest.mark.parametrize("kind", BACKENDS)
def test_golden_file_of_other_backends_runs_by_itself(kind: str, name: str) -> None:
    if kind == "torch":
        pytest.importorskip("torch")
    compiled = portable(name, kind)
    module = _module(GOLDEN / f"on_{kind}" / f"{name}.py")
    params, state = compiled.randomize_params(1), compiled.init_state()
    inputs = {
        k: compiled.backend.array(np.linspace(-1, 1, int(np.prod(s.shape))).reshape(s.shape))  # type: ignore[arg-type]
        for k, s in compiled.inputs.items()
    }
    ours = compiled.evaluate(params, inputs, state=state)
    theirs = module.forward(params, inputs, state, None, False)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), ours, theirs)
    if kind == "numpy" and compiled.params:
        given = {"output": np.ones_like(ours[0]["output"])}
        after, _, gradients = module.gradients(params, inputs, state, None, False, given)
        expected = compiled.evaluate(params, inputs, given)
        jax.tree.map(np.testing.assert_array_equal, (after, gradients), expected)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_written_source_is_the_golden_one(make: Any, jit: bool, tmp_path: Path) -> None:
    model, arguments = make()
    path = tmp_path / "model.py"
    compiled = ml.compile(model, jit=jit, file_path=path, **arguments)
    golden = (GOLDEN / f"{make.__name__}.py").read_text(encoding="utf-8")
    assert path.read_text(encoding="utf-8") == golden
    assert compiled.source == golden


def test_every_golden_file_is_of_a_model() -> None:
    assert {p.stem for p in GOLDEN.glob("*.py")} == {f.__name__ for f in MODELS}


@pytest.mark.thin(3)
@pytest.mark.parametrize("make", MODELS, ids=lambda f: f.__name__)
def test_golden_file_runs_by_itself(make: Any) -> None:
    model, arguments = make()
    compiled = ml.compile(model, **arguments)
    module = _module(GOLDEN / f"{make.__name__}.py")
    params, state = compiled.randomize_params(1), compiled.init_state()
    inputs = {
        k: jnp.arange(np.prod(s.shape)).reshape(s.shape).astype(s.dtype)  # type: ignore[arg-type]
        for k, s in compiled.inputs.items()
    }
    ours = compiled.apply(params, inputs, state=state)
    theirs = module.forward(params, inputs, state, None, False)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"golden_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_golden_file_imports_in_a_fresh_process() -> None:
    code = (
        "import constants_folded as m, numpy as np; "
        "print(m.forward({}, {'input': np.ones((2, 4), 'float32')}, {}, None, False)[0]['output'].sum())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=GOLDEN, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "8.0", done.stderr


if __name__ == "__main__":
    for make in MODELS:
        model, arguments = make()
        ml.compile(model, file_path=GOLDEN / f"{make.__name__}.py", **arguments)
        print(GOLDEN / f"{make.__name__}.py")
    for kind in BACKENDS:
        (GOLDEN / f"on_{kind}").mkdir(exist_ok=True)
        for name in PORTABLE:
            portable(name, kind, GOLDEN / f"on_{kind}" / f"{name}.py")
            print(GOLDEN / f"on_{kind}" / f"{name}.py")

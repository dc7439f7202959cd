"""Models exported as programs of JAX: they run in another process, without Capibara, and give the same."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from capibara import compose as ml


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def mlp() -> Any:
    return ml.compile(ml.MLP(3, [4], 2), shapes={"input": [None, 3]})


def test_open_sizes_stay_open_in_another_process(tmp_path: Path) -> None:
    compiled = mlp()
    params = compiled.randomize_params(0)
    path = tmp_path / "mlp.jax"
    ml.export(compiled, path)
    flat: Any = {"/".join(str(k.key) for k in p): np.asarray(v) for p, v in jax.tree.leaves_with_path(params)}
    np.savez(tmp_path / "params.npz", **flat)
    script = """
import json, sys
import jax, numpy as np
run = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
params = {}
for name, value in np.load(sys.argv[2]).items():
    at = params
    *path, key = name.split("/")
    for part in path:
        at = at.setdefault(part, {})
    at[key] = value
out = [np.asarray(run.call(params, {"input": np.ones((n, 3), "float32")})["output"]).tolist() for n in (1, 5)]
assert not any(name.startswith("capibara") for name in sys.modules)
print(json.dumps(out))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(tmp_path / "params.npz")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for n, found in zip((1, 5), json.loads(done.stdout), strict=True):
        want = compiled.evaluate(params, {"input": np.ones((n, 3), "float32")})["output"]
        np.testing.assert_allclose(found, want, rtol=1e-6)


def attention() -> ml.Model:
    model = ml.Model()
    model |= ml.ScaledDotProduct(causal=True)(query="q", key="k", value="v", output="y")
    model.expose("y")
    return model


def test_native_code_is_left_out_also_after_it_has_run() -> None:
    shape = [1, 2, 32, 8]
    compiled = ml.compile(attention(), shapes={"q": shape, "k": shape, "v": shape})
    inputs = {key: draw(*shape) for key in "qkv"}
    want = compiled.evaluate({}, inputs)["y"]
    exported = ml.export(compiled, platforms=["cpu", "tpu"])
    assert exported.platforms == ("cpu", "tpu")
    assert not re.findall(r"custom_call @(capibara\w*)", exported.mlir_module())
    np.testing.assert_allclose(exported.call({}, inputs)["y"], want, rtol=1e-5, atol=1e-6)


def test_gradients_and_states() -> None:
    compiled = ml.compile(ml.BatchNorm1D(), shapes={"input": [4, 3, 2]})
    params, state, x = compiled.randomize_params(0), compiled.init_state(), draw(4, 3, 2)
    exported = ml.export(compiled, gradients=True)
    out, after = exported.call(params, {"input": x}, state)
    want, same = compiled.evaluate(params, {"input": x}, state=state)
    np.testing.assert_allclose(out["output"], want["output"], rtol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, after, same)
    slope = jax.grad(lambda p: exported.call(p, {"input": x}, state)[0]["output"].sum())(params)
    found = compiled.evaluate(params, {"input": x}, {"output": np.ones_like(x)}, state=state)[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), slope, found)


def test_sizes_that_are_given_are_fixed(tmp_path: Path) -> None:
    compiled = mlp()
    (name,) = (n for n in compiled.inputs["input"].shape or () if isinstance(n, str))
    fixed: Any = {name: 6}
    exported = ml.export(compiled, tmp_path / "file", **fixed)
    assert exported.in_avals[-1].shape == (6, 3)
    again = ml.load_exported(tmp_path / "file")
    params, x = compiled.randomize_params(0), draw(6, 3)
    np.testing.assert_array_equal(
        again.call(params, {"input": x})["output"], exported.call(params, {"input": x})["output"]
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: ml.export(ml.compile(ml.Linear(2), ml.NumpyBackend(), shapes={"input": [2, 3]})),
            "JaxBackend",
        ),
        (lambda: ml.export(mlp(), platforms=["gameboy"]), "gameboy"),
        (lambda: ml.export(mlp(), platforms=[]), "must be some of"),
        (lambda: ml.export(mlp(), batch_size=3), "free sizes are"),
        (lambda: ml.export(ml.compile(ml.Relu())), "rank"),
    ],
)
def test_what_cannot_be_exported(call: Any, text: str) -> None:
    with pytest.raises(ml.CompileError, match=text):
        call()


def test_files_that_are_no_programs(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError):
        ml.load_exported(path)
    ml.export(mlp(), path)
    whole = path.read_bytes()
    with pytest.raises(ml.InputError, match="max_bytes"):
        ml.load_exported(path, max_bytes=len(whole) - 1)
    for data in (b"", b"x" * 100):
        path.write_bytes(data)
        with pytest.raises(ml.InputError, match="is not a program"):
            ml.load_exported(path)

"""Document 5 ("JAX Backend" of the model compiler): all its snippets, in order, in one program, as a reader would.

On one device the snippets that ask for two must say what is missing and how to emulate it; on four they run. A
GPU that is not there is an error that lists the devices there are. Everything else runs everywhere.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from document_5 import SNIPPETS
from emulation import emulated

SUPPORT = Path(__file__).parents[1] / "support"

RUNNER = """
import json, sys, warnings
warnings.simplefilter("error")
from document_5 import SNIPPETS
import numpy as np, jax

digits = np.random.default_rng(0).normal(size=(16, 784)).astype("float32")
def compute_loss_gradient(output, target):
    return (output - target) / len(target)
given = {
    "num_epochs": 3, "X_batch": digits, "y_batch": digits[:, :10], "compute_loss_gradient": compute_loss_gradient
}
settings = ("jax_enable_x64", "jax_debug_nans", "jax_default_matmul_precision")
before = {name: getattr(jax.config, name) for name in settings}
space, found = {"__name__": "guide", **given}, {}
def plain(x):
    return {"shape": list(x.shape), "dtype": str(x.dtype), "devices": len(x.sharding.device_set)}
for name, text in SNIPPETS.items():
    if name == "optax":
        # The loop reads the outputs of the step before; its first step needs some.
        space["outputs"] = {"output": np.zeros((16, 10), "float32")}
    try:
        exec(compile(text, name, "exec"), space)
        found[name] = {"error": None}
    except Exception as error:
        found[name] = {"error": type(error).__name__, "text": str(error), "module": type(error).__module__}
    found[name]["arrays"] = {k: plain(v) for k, v in space.items() if isinstance(v, jax.Array)
        and not jax.numpy.issubdtype(v.dtype, jax.dtypes.prng_key)}
    for key in ("gradients", "outputs", "params"):
        tree = space.get(key)
        if isinstance(tree, dict):
            found[name][key] = {jax.tree_util.keystr(p): plain(v) for p, v in jax.tree_util.tree_leaves_with_path(tree)}
    if name == "tensors":
        found[name]["rand"] = [float(space["rand"].min()), float(space["rand"].max())]
after = {name: getattr(jax.config, name) for name in before}
assert before == after, (before, after)
assert "torch" not in sys.modules
print("RESULT" + json.dumps(found))
"""


@cache
def guide(devices: int) -> dict[str, Any]:
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": emulated(devices),
        "PYTHONPATH": str(SUPPORT),
    }
    command = [sys.executable, "-c", RUNNER]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("RESULT")[2])


NEEDS_GPU = ("backend", "placement")
NEEDS_TWO = ("mesh", "sharded", "parallel")


def test_all_nineteen_are_here():
    assert len(SNIPPETS) == 19


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("name", SNIPPETS)
def test_snippet(name, devices):
    result = guide(devices)[name]
    if name in NEEDS_GPU:
        assert result["module"].startswith("capibara."), result
        assert "gpu" in result["text"]
        assert "cpu:0" in result["text"]
    elif name in NEEDS_TWO and devices == 1:
        assert result["module"].startswith("capibara."), result
        assert "--xla_force_host_platform_device_count" in result["text"]
    else:
        assert result["error"] is None, result["text"]


@pytest.mark.parametrize("devices", [1, 4])
def test_what_the_snippets_give(devices):
    found = guide(devices)
    tensors = found["tensors"]["arrays"]
    assert tensors["zeros"]["shape"] == [3, 4]
    assert tensors["jax_tensor"]["shape"] == [3, 4]
    assert tensors["float16_tensor"]["dtype"] == "float16"
    assert tensors["int32_tensor"]["dtype"] == "int32"
    low, high = found["tensors"]["rand"]
    assert 0 <= low < high < 1
    assert found["mathematics"]["arrays"]["matmul"]["shape"] == [3, 5]
    assert found["shapes"]["arrays"]["concatenated"]["shape"] == [6, 4]
    assert found["inference"]["arrays"]["output_tensor"]["shape"] == [32, 64]
    gradients = found["gradients"]["arrays"]
    assert gradients["weight_grad"]["shape"] == [64, 128]
    assert gradients["bias_grad"]["shape"] == [64]
    assert found["random"]["arrays"]["random_numbers"]["shape"] == [3, 4]
    assert next(iter(found["optax"]["outputs"].values()))["shape"] == [16, 10]


def test_on_four_devices_arrays_lie_on_the_two_of_the_mesh():
    found = guide(4)
    assert found["sharded"]["arrays"]["sharded_tensor"]["devices"] == 2
    (output,) = found["parallel"]["outputs"].values()
    assert output["shape"] == [128, 1024]
    assert output["devices"] == 2
    assert all(each["devices"] == 2 for each in found["parallel"]["params"].values())


def test_a_platform_that_is_not_here_is_compiled_for_but_not_run_on():
    import jax

    from capibara.compose import CompileError, JaxBackend, Linear, compile

    compiled = compile(Linear(2), JaxBackend(platform="tpu"), shapes={"input": [3, 4]})
    params, inputs = compiled.randomize_params(), {"input": jax.numpy.ones((3, 4))}
    with pytest.raises(CompileError, match=r"'tpu': this machine has no such device.*cpu:0"):
        compiled.evaluate(params, inputs)
    lowered = jax.jit(compiled.apply).trace(params, inputs).lower(lowering_platforms=("tpu",))
    assert "dot_general" in lowered.as_text()

"""Experts over a mesh: what one device computes, values and gradients, however experts and tokens are divided."""

from __future__ import annotations

import json
from typing import Any

import pytest
from emulation import emulated
from other_process import run_apart

SCRIPT = r"""
import json, sys
import jax, numpy as np
from small_models import small_config, small_params, small_tokens
from capibara.core import ModularCapibaraModel

config = small_config("experts", **{"model.experts.count": 8, "model.experts.shared_dim": 8, "model.mlp_dim": 16,
    "model.experts.dim": 16, **json.loads(sys.argv[2])})
tokens = small_tokens(8, 6)


def results(model, params):
    def loss(p):
        return model.loss(p, {"tokens": tokens}, state={}, train=False)[0]

    return jax.jit(lambda p: (model.apply(p, tokens, state={})[0], jax.value_and_grad(loss)(p)))(params)


one = ModularCapibaraModel(config)
params, _ = small_params(one)
want = jax.tree.map(np.asarray, results(one, params))
out = {}
for shape, names in json.loads(sys.argv[1]):
    mesh = jax.make_mesh(shape, names, axis_types=(jax.sharding.AxisType.Auto,) * len(shape))
    many = ModularCapibaraModel(config, mesh=mesh)
    laid = jax.device_put(params, many.compiled.propose_shardings()["params"])
    found = results(many, laid)
    gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max() / (1 + np.abs(b).max())), found, want)
    out[" ".join(names)] = [max(jax.tree.leaves(gaps)), laid["blocks"]["mlp"]["gate"].addressable_shards[0].data.shape]
print("RESULT", json.dumps(out))
"""


EXPERT = {"expert": ((8,), [2, 1, 8, 16])}  # tokens are gathered, and their sums scattered
OTHERS = {
    "data": ((8,), [2, 8, 1, 16]),  # stored in parts, and gathered
    "data expert": ((2, 4), [2, 2, 4, 16]),
    "data model": ((4, 2), [2, 8, 2, 8]),
    "data expert model": ((2, 2, 2), [2, 4, 4, 8]),
}
# As gpt-oss has them.
BIASED = {
    "model.mlp_bias": True,
    "model.experts.logit_bias": True,
    "model.attention_sinks": True,
    "model.activation": "swiglu_clamped",
    "model.activation_limit": 0.5,
}

ADAPTED = {"finetune.method": "lora", "finetune.rank": 3, **BIASED}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("meshes", "more"),
    [
        (EXPERT, BIASED),
        pytest.param(EXPERT | OTHERS, {}, marks=pytest.mark.slow),
        pytest.param(OTHERS, BIASED, marks=pytest.mark.slow),
        pytest.param(EXPERT | OTHERS, ADAPTED, marks=pytest.mark.slow),
    ],
    ids=["experts", "others", "others, biased", "with adapters"],
)
def test_eight_devices_compute_what_one_does(meshes: dict[str, Any], more: dict[str, Any]) -> None:
    asked = [(shape, names.split()) for names, (shape, _) in meshes.items()]
    found = run_apart(SCRIPT, json.dumps(asked), json.dumps(more), XLA_FLAGS=emulated(8, quick=True))
    assert {names: shape for names, (_, shape) in found.items()} == {
        names: shape for names, (_, shape) in meshes.items()
    }
    assert max(gap for gap, _ in found.values()) < 2e-6

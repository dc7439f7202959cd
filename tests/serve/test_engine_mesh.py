"""The engine over a mesh of 2 × 4 emulated devices writes what it writes on one."""

from __future__ import annotations

import pytest
from emulation import emulated
from other_process import run_apart

SCRIPT = """
import json, sys
import jax
import numpy as np
from capibara.compose.physical.sharding import param_shardings
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.hardware import build_mesh
from capibara.serve import Engine, Request, Sampling, Speculation
from small_models import KINDS, SMALL

settings = {
    "model.vocab_size": 256, "model.max_sequence_length": 64, "train.sequence_length": 32, "model.embed_dim": 32,
    "model.num_heads": 8, "model.num_kv_heads": 4,
}
kind = dict(KINDS[sys.argv[1]])
config = ModularModelConfig.from_dict({}, SMALL | kind | settings)
one = ModularCapibaraModel(config)
random = np.random.default_rng(0)
asked = [
    Request(
        # Most repeat themselves, so that something can be guessed.
        tuple(np.resize(random.integers(0, 256, random.integers(1, 9 if n % 3 else 30)), 1 + n % 29).tolist()),
        max_tokens=int(random.integers(1, 12)),
        sampling=Sampling(temperature=0.0 if n % 2 else 0.8), seed=n,
    )
    for n in range(30)
]

def texts(model, params):
    sizes = {"max_batch": 4, "page_size": 4, "pages": 24, "prefill_tokens": 8, "prefill_chunks": 2}
    if sys.argv[2] == "guesses":
        sizes["speculation"] = Speculation(3)
    if sys.argv[2] == "draft":
        sizes["speculation"] = Speculation(2, draft=model, params=params)
    if sys.argv[2] == "codes":
        sizes["cache_dtype"] = "int8"
    with Engine(model, params, **sizes, warm=False) as engine:
        streams = [engine.submit(request) for request in asked]
        found = [[token for piece in stream for token in piece.tokens] for stream in streams]
        guessed = engine.statistics().guessed_tokens
        specs = [str(x.sharding.spec) for x in jax.tree.leaves(engine._cache) if model.mesh is not None]
        return found, specs, engine.statistics().preemptions, guessed

mesh = build_mesh((2, 4), ("data", "model"), jax.devices())
over = ModularCapibaraModel(config, mesh=mesh)
params = jax.device_put(one.params, param_shardings(one.params, over.param_axes, mesh))
alone, together = texts(one, one.params), texts(over, params)
print(json.dumps({"same": alone[0] == together[0], "specs": together[1], "preemptions": together[2],
                  "guessed": together[3]}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [("grouped", ""), ("experts", ""), ("grouped", "guesses"), ("grouped", "draft"), ("grouped", "codes")],
)
def test_texts_are_those_of_one_device(kind: str, more: str) -> None:
    found = run_apart(SCRIPT, kind, more, XLA_FLAGS=emulated(8, quick=True))
    assert found["same"]
    assert found["preemptions"] > 0
    assert (found["guessed"] > 0) == (more in ("guesses", "draft"))
    assert all("'model'" in spec for spec in found["specs"])

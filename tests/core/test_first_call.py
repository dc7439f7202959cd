"""What the first call of a process leaves to the second one."""

from __future__ import annotations

import jax
import pytest
from other_process import run_apart


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 11),
    reason="what this JAX traces depends on whether Pallas was imported before",
)
def test_the_second_call_compiles_nothing() -> None:
    program = """
import json
import jax, jax.numpy as jnp
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
model = ModularCapibaraModel(ModularModelConfig.from_toml("demo"))
compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda name, _, **more: compiled.append(name) if name.endswith("backend_compile_duration") else None
)
run, tokens = jax.jit(model.apply), jnp.zeros((1, 8), jnp.int32)
run(model.params, tokens).block_until_ready()
first = len(compiled)
run(model.params, tokens).block_until_ready()
print("RESULT", json.dumps([first > 0, len(compiled) - first]))
"""
    assert run_apart(program) == [True, 0]

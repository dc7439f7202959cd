"""The Pallas kernels for TPUs in JAX's TPU interpreter, which has a TPU's memories and copies between them.

It finds what the plain interpreter cannot: two accesses to one place that nothing orders (races), reads of memory that
nothing has written (here NaN), and copies that nobody waits for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import make, oracle
from device_arrays import device_array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.ops.attention import flash_attention
from capibara.ops.attention.specs import AttentionSpec

PARAMS = pltpu.InterpretParams(
    detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan", random_seed=1
)
BLOCKS: dict[str, Any] = {"use_causal_mask": True, "block_size": 128}
SPECS = (
    AttentionSpec("segments, window", 1, 1, 200, 8, segments=True, options={**BLOCKS, "window": 90}),
    AttentionSpec("grouped, causal", 1, 2, 200, 8, 1, options=BLOCKS),
)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    pltpu.reset_tpu_interpret_mode_state()
    yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize(
    "spec", [pytest.param(s, id=s.name, marks=pytest.mark.slow if s is SPECS[1] else []) for s in SPECS]
)
def test_attention_has_no_races_and_is_the_definition(spec, capfd):
    arrays, options = make(spec)
    given = {name: device_array(x, jnp.float32) for name, x in arrays.items()}

    def value_and_gradient(implementation: str) -> tuple[Any, Any]:
        def run(a: dict[str, jax.Array]) -> jax.Array:
            return flash_attention(**a, **options, implementation=implementation)

        out, pull = jax.vjp(run, given)
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))[0]

    with pltpu.force_tpu_interpret_mode(PARAMS):
        out, gradients = jax.block_until_ready(value_and_gradient("pallas_tpu"))
    assert "RACE" not in capfd.readouterr().out
    np.testing.assert_allclose(out, oracle(arrays, options), rtol=2e-5, atol=2e-5)
    for name, want in value_and_gradient("reference")[1].items():
        np.testing.assert_allclose(gradients[name], want, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("waits", [True, False])
def test_the_interpreter_finds_a_copy_that_is_read_too_early(waits, capfd):
    def kernel(source: Any, out: Any, buffer: Any, semaphore: Any) -> None:
        copy = pltpu.make_async_copy(source, buffer, semaphore)
        copy.start()
        if waits:
            copy.wait()
        out[...] = buffer[...]
        if not waits:
            copy.wait()

    x = jnp.ones((8, 128), jnp.float32)
    run = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=PARAMS,
    )
    if not waits and jax.__version_info__ >= (0, 12):  # a race is an error there; before, it was printed
        with pytest.raises(jax.errors.JaxRuntimeError, match="RACE"):
            jax.block_until_ready(run(x))
        return
    out = np.asarray(jax.block_until_ready(run(x)))
    assert ("RACE" in capfd.readouterr().out) == (not waits)
    assert np.isnan(out).all() == (not waits)

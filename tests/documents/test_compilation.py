"""Documents 1 and 2 on compilation and warm-up: their own text, with a model and inputs that a reader would have."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.compilation import CompilationOptionWarning, count_compilations

JITTED_FORWARD = """
    from capibara.jax.tpu_v4.optimizations import create_jitted_forward

    # Compilación JIT optimizada para TPU
    optimized_forward = create_jitted_forward(
        model_fn=model.forward,
        input_shapes=[(32, 512, 768)],  # Shapes típicos
        optimization_level="aggressive",
        use_bfloat16=True,
        enable_async_collective=True
    )

    # Forward pass optimizado
    result = optimized_forward(inputs)
"""

OPTIMIZED_JIT = """
    from capibara.jax.tpu_v4.optimizations import (
        create_tpu_optimized_jit,
        TpuCompilationConfig
    )

    # Configuración compilación TPU
    compilation_config = TpuCompilationConfig(
        optimization_level="aggressive",
        use_bfloat16=True,
        enable_async_collective=True,
        memory_optimization=True,
        cache_compiled_functions=True
    )

    # JIT optimizado para TPU
    @create_tpu_optimized_jit(config=compilation_config)
    def optimized_forward(params, inputs):
        return model.apply(params, inputs)

    # Compilar función con optimizaciones TPU
    compiled_forward = optimized_forward.compile(
        input_shapes=[(32, 512, 768)],
        static_argnums=[0]  # params estáticos
    )
"""

WARMUP = """
    from capibara.jax.tpu_v4.optimizations import TpuWarmupManager

    # Manager warmup TPU
    warmup_manager = TpuWarmupManager(
        compilation_cache_size_gb=2.0,
        warmup_steps=10,
        progressive_warmup=True
    )

    # Warmup automático del modelo
    warmup_manager.warmup_model(
        model=model,
        input_shapes=[(8, 256, 768), (16, 512, 768), (32, 1024, 768)],
        batch_sizes=[8, 16, 32]
    )
"""


class Model:
    """A reader's model: one layer over features of width 768."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.params = {"w": jnp.asarray(rng.normal(size=(768, 4)) / 28, jnp.float32)}
        self._jitted = jax.jit(self.apply)

    def apply(self, params: dict[str, Any], inputs: jax.Array) -> jax.Array:
        return inputs @ params["w"]

    def forward(self, inputs: jax.Array) -> jax.Array:
        return self._jitted(self.params, inputs)


def run(snippet: str, **given: Any) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "snippet", **given}
    exec(compile(textwrap.dedent(snippet), "document", "exec"), namespace)
    return namespace


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield Model()
    jax.config.update("jax_compilation_cache_dir", before)


@cache
def inputs() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).standard_normal((32, 512, 768), np.float32))


def check(result: Any, model: Model) -> None:
    """The result is the product of operands that were rounded to bfloat16."""
    assert result.shape == (32, 512, 4)
    x, w = (np.asarray(jnp.asarray(a, jnp.bfloat16), np.float32) for a in (inputs()[:2], model.params["w"]))
    np.testing.assert_allclose(result[:2], x @ w, rtol=1e-4, atol=1e-4)


def test_document_1_forward(model: Model) -> None:
    x = inputs()
    with pytest.warns(CompilationOptionWarning, match="enable_async_collective: no effect on cpu"):
        names = run(JITTED_FORWARD, model=model, inputs=x)
    check(names["result"], model)
    (program,) = names["optimized_forward"].programs
    assert "bf16[" in program.as_text()
    with count_compilations() as counts:
        names["optimized_forward"](x).block_until_ready()
    assert counts.programs == 0


def test_document_2_compile(model: Model) -> None:
    with pytest.warns(CompilationOptionWarning) as caught:
        names = run(OPTIMIZED_JIT, model=model)
    assert sorted(str(one.message).partition(":")[0] for one in caught) == [
        "enable_async_collective",
        "memory_optimization",
    ]
    x = inputs()
    with count_compilations() as counts:
        result = names["compiled_forward"](model.params, x)
        again = names["optimized_forward"](model.params, x)
        jax.block_until_ready((result, again))
    assert counts.programs == 0
    check(result, model)
    np.testing.assert_array_equal(result, again)
    assert "bf16[" in names["compiled_forward"].as_text()


def test_document_2_warmup(model: Model) -> None:
    snippet = WARMUP.replace("warmup_steps=10", "warmup_steps=2").replace(
        "(8, 256, 768), (16, 512, 768), (32, 1024, 768)", "(8, 2, 768), (16, 5, 768), (32, 10, 768)"
    )
    run(snippet, model=model)
    zeros = [jnp.zeros((batch, length, 768)) for batch in (8, 16, 32) for length in (2, 5, 10)]
    with count_compilations() as counts:
        for x in zeros:
            model.forward(x).block_until_ready()
    assert counts.programs == 0


@pytest.mark.slow
def test_document_2_warmup_as_written(model: Model) -> None:
    run(WARMUP, model=model)
    with count_compilations() as counts:
        model.forward(jnp.zeros((32, 1024, 768))).block_until_ready()
    assert counts.programs <= 1  # the zeros

"""Document 2, "Inferencia de Alta Velocidad": its snippet, as a reader would type it."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest
from small_models import KINDS, SMALL

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel

SNIPPET = """
    from capibara.jax.tpu_v4.inference import (
        TpuInferenceOptimizer,
        create_inference_pipeline
    )

    # Optimizador inferencia TPU
    inference_optimizer = TpuInferenceOptimizer(
        target_latency_ms=50,        # Latencia objetivo
        batch_size_optimizer=True,   # Optimizar batch size
        memory_efficient_attention=True,
        use_kv_cache=True
    )

    # Pipeline inferencia optimizado
    inference_pipeline = create_inference_pipeline(
        model=model,
        optimizer=inference_optimizer,
        max_batch_size=64,
        max_sequence_length=2048
    )
"""


@pytest.mark.slow
def test_inference() -> None:
    settings = {"model.vocab_size": 256, "model.max_sequence_length": 2048}
    config = ModularModelConfig.from_dict({}, SMALL | KINDS["grouped"] | settings)
    names: dict[str, Any] = {"__name__": "snippet", "model": ModularCapibaraModel(config)}
    exec(compile(textwrap.dedent(SNIPPET), "document 2", "exec"), names)
    with names["inference_pipeline"] as pipeline:
        assert 1 <= pipeline.choice.batch <= 64
        texts = pipeline.generate(["one", "two", "three"], max_tokens=5, temperature=0.0)
        assert len(texts) == 3
        assert texts == [pipeline.generate(p, max_tokens=5, temperature=0.0) for p in ("one", "two", "three")]

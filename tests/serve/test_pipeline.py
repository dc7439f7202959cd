"""Texts from Python, and the sizes that are chosen by measuring."""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import numpy as np
import pytest
from small_models import KINDS, SMALL

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError
from capibara.jax.tpu_v4.inference import TpuInferenceOptimizer, create_inference_pipeline
from capibara.serve import RequestError, ServeError, inference_optimizer
from capibara.serve.engine import engine
from capibara.serve.engine.programs import Programs
from capibara.serve.inference_optimizer import _Timer


@pytest.fixture(scope="module")
def model() -> ModularCapibaraModel:
    settings = {"model.vocab_size": 256, "model.max_sequence_length": 64, "train.sequence_length": 32}
    return ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | KINDS["grouped"] | settings))


@pytest.fixture(scope="module")
def pipeline(model: ModularCapibaraModel) -> Any:
    optimizer = TpuInferenceOptimizer(target_latency_ms=1e6)
    with create_inference_pipeline(model, optimizer, max_batch_size=4, warm=False) as pipeline:
        yield pipeline


def test_lists_streams_and_event_loops_give_the_same(pipeline: Any) -> None:
    asked = {"max_tokens": 8, "seed": 3, "temperature": 0.8, "top_k": 20}
    prompts = ["a prompt", np.array([98, 99]), (1, 2, 3)]
    texts = pipeline.generate(prompts, **asked)
    assert texts == ["".join(pipeline.stream(prompt, **asked)) for prompt in prompts]

    async def together() -> list[str]:
        return await asyncio.gather(*(pipeline.agenerate(prompt, **asked) for prompt in prompts))

    assert texts == asyncio.run(together())
    assert pipeline.generate("a prompt", **asked) == texts[0]
    first = texts[0][2]
    assert pipeline.generate("a prompt", **asked, stop=first) == texts[0][: texts[0].find(first)]


def test_a_stream_that_is_left_ends_its_text(pipeline: Any) -> None:
    for _ in pipeline.stream("x", max_tokens=60):
        break
    while pipeline.engine.statistics().running:
        pass
    assert pipeline.engine.statistics().pages_used == 0


def test_what_was_measured_is_reported(pipeline: Any) -> None:
    choice = pipeline.choice
    assert (choice.batch, choice.prefill_tokens, choice.met) == (4, 64, True)
    assert {(m.batch, m.prefill_tokens) for m in choice.measured} == {(1, 0), (4, 0), (4, 32), (4, 64)}
    assert all(m.milliseconds > 0 for m in choice.measured)
    assert "chosen: 4 texts, 64 tokens" in str(choice)
    assert choice.to_json()["measured"][0]["batch"] == 1


def test_the_largest_steps_below_the_target_are_chosen(
    model: ModularCapibaraModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def planted(self: _Timer, batch: int, tokens: int, dtype: str) -> float:
        asked.append((batch, tokens, dtype))
        return batch * (2 if dtype == "float32" else 1) + tokens / 100

    monkeypatch.setattr(_Timer, "__call__", planted)

    def chosen(target: float, **options: Any) -> tuple[Any, ...]:
        asked.clear()
        optimizer = TpuInferenceOptimizer(target, **options)
        choice = optimizer.choose(model, max_batch_size=16, max_sequence_length=64)
        return choice.batch, choice.prefill_tokens, choice.cache_dtype, choice.met

    assert chosen(100.0) == (16, 64, "float32", True)
    assert chosen(9.0) == (4, 64, "float32", True)
    assert chosen(8.4) == (4, 32, "float32", True)
    # A smaller cache where nothing else meets the target, and the least where that does not either.
    assert chosen(1.5) == (1, 32, "bfloat16", True)
    assert chosen(0.5) == (1, 32, "bfloat16", False)
    assert chosen(9.0, batch_size_optimizer=False)[0] == 16
    assert {batch for batch, *_ in asked} == {16}
    assert chosen(9.0, memory_efficient_attention=False) == (4, 64, "float32", True)


def test_the_steps_that_are_timed_are_the_engine_s(model: ModularCapibaraModel) -> None:
    held = []

    def kept(model: Any, params: Any, *args: Any, **options: Any) -> Programs:
        held.append(params)
        return Programs(model, params, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        for module in (inference_optimizer, engine):
            patch.setattr(module, "Programs", kept)
        timed = TpuInferenceOptimizer(1e6, batch_size_optimizer=False, memory_efficient_attention=False)
        with create_inference_pipeline(model, timed, max_batch_size=1, max_sequence_length=16, warm=False):
            pass
    first, second = (jax.tree.structure(params) for params in held)
    assert first == second != jax.tree.structure(model.params)


def test_without_a_cache_the_text_is_the_same(model: ModularCapibaraModel, pipeline: Any) -> None:
    optimizer = TpuInferenceOptimizer(1e6, batch_size_optimizer=False, use_kv_cache=False)
    asked = {"max_tokens": 12, "temperature": 0.0}
    with create_inference_pipeline(model, optimizer, max_batch_size=2, warm=False) as without:
        prompts = ["first", "another one", "third"]
        before = without.engine.statistics()
        assert without.generate(prompts, **asked) == pipeline.generate(prompts, **asked)
        assert without.engine.statistics().steps - before.steps >= 3 * 12 / 2
        assert without.engine.statistics().cached_prompt_tokens == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: TpuInferenceOptimizer(0), "target_latency_ms=0: expected milliseconds"),
        (lambda m: TpuInferenceOptimizer(50, use_kv_cache=1), "use_kv_cache=1: expected True or False"),  # pyright: ignore
        (lambda m: create_inference_pipeline(m, None, 0), "max_batch_size=0: expected an integer from 1"),
        (
            lambda m: create_inference_pipeline(m, None, 1, 65),
            "max_sequence_length=65: expected an integer from 1 to 64",
        ),
    ],
)
def test_arguments_out_of_range_are_named(model: ModularCapibaraModel, make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(model)


def test_unknown_settings_and_a_closed_pipeline(model: ModularCapibaraModel, pipeline: Any) -> None:
    with pytest.raises(ConfigError, match="temprature: no such setting"):
        pipeline.generate("x", temprature=1)
    with pytest.raises(RequestError, match="max_tokens=1000"):
        pipeline.generate(["x", "y"], max_tokens=1000)
    optimizer = TpuInferenceOptimizer(1e6, batch_size_optimizer=False)
    closed = create_inference_pipeline(model, optimizer, 1, warm=False)
    closed.close()
    with pytest.raises(ServeError, match="shutting down"):
        closed.generate("x")

"""Models of 16 bits on a CPU: arithmetic in float32, with matrices read as they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_texts import same_texts, written_texts
from small_models import KINDS, SMALL

from capibara import native
from capibara.compress import CompressionProfile, ModelCompressionAPI
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.serve import Embedder, Engine, Sampling, Speculation, load_compressed
from capibara.serve.engine.early import EarlyPrograms
from capibara.serve.engine.layers import as_computed, layers_apart
from capibara.serve.engine.steps import EngineSizes
from capibara.serve.generate import Generator

# Matrices that are large enough for the kernels.
LARGE = {
    "model.vocab_size": 256,
    "model.max_sequence_length": 64,
    "train.sequence_length": 32,
    "model.embed_dim": 256,
    "model.mlp_dim": 320,
}
SIZES: dict[str, Any] = {"max_batch": 3, "page_size": 4, "prefill_tokens": 16, "prefill_chunks": 2}
PROMPTS = [(1, 2, 3), tuple(range(40, 61)), (200,)]


def model_of(dtype: str, kind: str = "grouped", **more: Any) -> ModularCapibaraModel:
    precision = {"precision.param_dtype": dtype, "precision.compute_dtype": dtype}
    return ModularCapibaraModel(
        ModularModelConfig.from_dict({}, SMALL | KINDS[kind] | LARGE | precision | more)
    )


def widened(model: ModularCapibaraModel, kind: str = "grouped", **more: Any) -> ModularCapibaraModel:
    """A model of float32 with the same numbers."""
    wide = model_of("float32", kind, **more)
    wide.params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), model.params)
    return wide


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("grouped", "float16"), ("mixed", "bfloat16"), ("experts", "bfloat16"), ("latent", "bfloat16")],
)
def test_texts_are_those_of_float32(kind: str, dtype: str) -> None:
    model = model_of(dtype, kind)
    with Engine(model, warm=False, cache_dtype="float32", **SIZES) as engine:
        got = written_texts(engine, PROMPTS)
        assert engine.model.config.precision.compute_dtype == "float32"
    with Engine(widened(model, kind), warm=False, **SIZES) as engine:
        want = written_texts(engine, PROMPTS)
    same_texts(got, want)
    assert model.config.precision.compute_dtype == dtype  # the model itself is as it was


@pytest.mark.skipif(native.problem() is not None, reason=str(native.problem()))
def test_matrices_and_pages_keep_their_16_bits() -> None:
    model = model_of("bfloat16")
    assert EngineSizes.of(model).cache_dtype == "bfloat16"
    assert EngineSizes.of(model_of("float16")).cache_dtype is None
    assert EngineSizes.of(model_of("float32")).cache_dtype is None
    up = model.params["blocks"]["mlp"]["up"]["weight"]
    with Engine(model, warm=False, **SIZES) as engine:
        got = written_texts(engine, PROMPTS)
        held: Any = engine._params
        layer = held["blocks"]["mlp"]["up"]["weight"].arrays[1]
        assert layer.panels.dtype == jnp.bfloat16
        np.testing.assert_array_equal(layer.matrix(), up[1])
        assert held["blocks"]["mlp_norm"]["scale"].dtype == jnp.float32
        assert {leaf.dtype for leaf in jax.tree.leaves(engine._cache)} == {jnp.dtype("bfloat16")}
        program = next(p for shape, p in engine._programs._steps.items() if not shape.chunks)
        # No step makes float32 of a matrix, or of the pages.
        assert program.memory_analysis().temp_size_in_bytes < up.size // up.shape[0]
    with Engine(widened(model), warm=False, cache_dtype="bfloat16", **SIZES) as engine:
        same_texts(got, written_texts(engine, PROMPTS))
    # Where they are not put in panels, nothing is copied.
    layer = layers_apart(as_computed(model), model.params)["blocks"]["mlp"]["up"]["weight"].arrays[1]
    assert layer.unsafe_buffer_pointer() == up.unsafe_buffer_pointer() + up[0].nbytes


def test_without_kernels_nothing_stays_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "problem", lambda: "not built")
    model = model_of("bfloat16")
    with Engine(model, warm=False, **SIZES) as engine:
        assert {leaf.dtype for leaf in jax.tree.leaves((engine._params, engine._cache))} == {
            jnp.dtype("float32")
        }
        got = written_texts(engine, PROMPTS)
    with Engine(widened(model), warm=False, **SIZES) as engine:
        assert [tokens for tokens, _ in written_texts(engine, PROMPTS)] == [tokens for tokens, _ in got]


def test_codes_of_a_model_of_bfloat16(tmp_path: Path) -> None:
    model = model_of("bfloat16")
    api = ModelCompressionAPI(CompressionProfile(strategy="int8"))
    path = api.compress(model, decode="auto").save(tmp_path / "model.capi")
    loaded = load_compressed(path, model.config, decode="auto")
    with Engine(loaded.model, loaded.params, warm=False, cache_dtype="float32", **SIZES) as engine:
        got = written_texts(engine, PROMPTS)
    decoded = load_compressed(path, model.config)
    with Engine(decoded.model, decoded.params, warm=False, **SIZES) as engine:
        want = written_texts(engine, PROMPTS)
    for (_, scores), (_, others) in zip(got, want, strict=True):
        # Decoded numbers were rounded to bfloat16.
        np.testing.assert_allclose(scores[0], others[0], rtol=0, atol=0.02)


def test_programs_that_were_made_early(tmp_path: Path) -> None:
    model = model_of("bfloat16")
    early = EarlyPrograms(model.config, tmp_path, **SIZES)
    with Engine(model, early=early, warm="first", **SIZES) as engine:
        got = written_texts(engine, PROMPTS[:1], logprobs=None)
        assert engine.statistics().compilations == 0
    with Engine(model, warm=False, **SIZES) as engine:
        assert written_texts(engine, PROMPTS[:1], logprobs=None) == got


def test_a_draft_of_16_bits() -> None:
    model = model_of("bfloat16")
    with Engine(model, warm=False, **SIZES) as engine:
        want = [tokens for tokens, _ in written_texts(engine, PROMPTS)]
    speculation = Speculation(3, draft=model_of("bfloat16"))
    with Engine(model, warm=False, speculation=speculation, **SIZES) as engine:
        assert [tokens for tokens, _ in written_texts(engine, PROMPTS)] == want


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_generator(dtype: str) -> None:
    model = model_of(dtype)
    greedy = Sampling(temperature=0.0)
    for prompt in PROMPTS:
        got, want = (
            list(Generator(one, one.params, sampling=greedy).tokens(prompt, max_tokens=8))
            for one in (model, widened(model))
        )
        assert got == want


def test_vectors() -> None:
    model = model_of("bfloat16")
    texts = ["Capybaras swim.", "So do otters, and beavers too."]
    got, want = (Embedder(one).embed(texts) for one in (model, widened(model)))
    np.testing.assert_array_equal(got, want)

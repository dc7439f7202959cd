"""Weights in panels, as engines on a CPU keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_texts import same_texts, written_texts
from live_equations import live_primitives
from small_models import KINDS, SMALL

from capibara import native
from capibara.compose.backends.jax_stacked import Layers
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError
from capibara.memory.budget import MemoryBudget
from capibara.memory.errors import MemorySettingError
from capibara.ops.linalg.few_rows import few_rows
from capibara.ops.linalg.joined import joined
from capibara.ops.linalg.panels import Panels
from capibara.serve import AdapterRoom, Engine, Request, Sampling, Speculation
from capibara.serve.engine.bundle import ProgramBundle, write_bundle
from capibara.serve.engine.early import EarlyPrograms
from capibara.serve.engine.layers import (
    as_computed,
    bytes_held,
    has_panels,
    layers_apart,
    room_for_panels,
    without_panels,
)
from capibara.serve.engine.steps import EngineSizes

pytestmark = pytest.mark.skipif(native.problem() is not None, reason="no native library")
# Matrices that are large enough for the kernels, with whole panels.
LARGE = {
    "model.vocab_size": 256,
    "model.max_sequence_length": 64,
    "train.sequence_length": 32,
    "model.embed_dim": 256,
    "model.num_heads": 4,
    "model.mlp_dim": 320,
}
SIZES: dict[str, Any] = {"max_batch": 3, "page_size": 4, "prefill_tokens": 16, "prefill_chunks": 2}
PROMPTS = [(1, 2, 3), tuple(range(40, 61)), (200,)]


def model_of(kind: str = "grouped", /, **more: Any) -> ModularCapibaraModel:
    return ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | KINDS[kind] | LARGE | more))


def panels_of(tree: Any) -> list[Panels]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Panels))
    return [leaf for leaf in leaves if isinstance(leaf, Panels)]


def little_memory(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(MemoryBudget, "free", lambda _: free)


@pytest.mark.thin(5)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["grouped", "mixed", "experts", "latent", "mamba"])
def test_a_model_gives_the_same_and_reads_them_as_they_lie(kind: str, tied: bool) -> None:
    model = model_of(kind, **{"model.tie_embeddings": tied})
    given = layers_apart(model, model.params, panels=True)
    assert has_panels(given)
    assert not has_panels(layers_apart(model, model.params))
    table = given["embedding"]["weight"]
    assert isinstance(table, Panels) == tied
    tokens = {"tokens": np.array([[3, 1, 4, 1, 250]], np.int32)}

    def run(params: Any) -> Any:
        with few_rows(panels=True):
            return model.compiled.apply(without_panels(params), tokens, state=model.state or None)

    assert "capibara_matrix_of_panels" in live_primitives(run, given)
    assert "capibara_matrix_of_panels" not in live_primitives(joined(run), given)
    want = jax.jit(lambda p: model.compiled.apply(p, tokens, state=model.state or None))(model.params)
    for one, other in zip(jax.tree.leaves(want), jax.tree.leaves(jax.jit(joined(run))(given)), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-4, atol=5e-5)


def test_matrices_lie_in_panels_and_nothing_else_does() -> None:
    model = model_of(**{"model.tie_embeddings": False})
    given = layers_apart(model, model.params, panels=True)
    up, norm = (given["blocks"][name] for name in ("mlp", "mlp_norm"))
    stack = up["up"]["weight"]
    assert isinstance(stack, Layers)
    assert stack.shape == model.params["blocks"]["mlp"]["up"]["weight"].shape
    for one, matrix in zip(stack.arrays, model.params["blocks"]["mlp"]["up"]["weight"], strict=True):
        assert isinstance(one, Panels)
        assert one.panels.shape == (20, 256, 16)
        np.testing.assert_array_equal(one.matrix(), matrix)
    assert panels_of(norm) == []
    assert panels_of(given["embedding"]) == []
    (head,) = panels_of(given["head"])
    np.testing.assert_array_equal(head.matrix(), model.params["head"]["weight"])
    # Of an odd number of columns, and of few numbers, they stay as they are.
    for more in ({"model.mlp_dim": 321}, {"model.mlp_dim": 16}):
        other = model_of(**more)
        assert panels_of(layers_apart(other, other.params, panels=True)["blocks"]["mlp"]["up"]) == []


def test_descriptions_are_of_the_same_arrays() -> None:
    model = model_of()
    described = jax.eval_shape(lambda: model.init(0))[0]
    made, said = (layers_apart(model, params, panels=True) for params in (model.params, described))
    assert jax.tree.structure(made) == jax.tree.structure(said)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(made)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(said)
    ]
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    copies = sum(one.panels.nbytes for one in panels_of(made))
    assert copies > held // 2
    assert bytes_held(described, said) == held + copies
    assert bytes_held(described, said, donate=True) == held


def test_memory_decides_where_the_parameters_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    copies = [one.panels.nbytes for one in panels_of(layers_apart(model, model.params, panels=True))]
    most = 2 * model.params["blocks"]["mlp"]["up"]["weight"][0].nbytes  # of two layers
    little_memory(monkeypatch, 2 * sum(copies))
    assert room_for_panels(model, model.params)
    assert not room_for_panels(model, model.params, there=False)
    little_memory(monkeypatch, 2 * sum(copies) - 1)
    assert not room_for_panels(model, model.params)
    assert room_for_panels(model, model.params, donate=True)
    little_memory(monkeypatch, 2 * most + held)
    assert room_for_panels(model, model.params, donate=True, there=False)
    little_memory(monkeypatch, 2 * most - 1)
    assert not room_for_panels(model, model.params, donate=True)
    # Where nothing is known only what is deleted is copied, and of no use are copies that no kernel reads.
    monkeypatch.setattr("capibara.serve.engine.layers.device_budget", unknown)
    assert not room_for_panels(model, model.params)
    assert room_for_panels(model, model.params, donate=True)
    wide = model_of(**{"precision.accumulate_dtype": "float64"})
    assert not room_for_panels(wide, model.params, donate=True)
    assert not has_panels(layers_apart(wide, model.params, panels=True))


def unknown() -> Any:
    raise MemorySettingError("memory_limit_gb: not known")


def test_what_is_copied_of_float16_is_counted_and_deleted() -> None:
    model = model_of(**{"precision.param_dtype": "float16", "precision.compute_dtype": "float16"})
    given, described = model.params, jax.eval_shape(lambda: model.init(0))[0]
    model = as_computed(model)
    parts = layers_apart(model, given, panels=True)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))
    held, made = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in (given, parts))
    assert made == 2 * held
    assert bytes_held(described, layers_apart(model, described, panels=True)) == held + made
    assert bytes_held(given, parts, donate=True) == made
    layers_apart(model, given, panels=True, donate=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_arrays_in_several_places_are_kept() -> None:
    model = model_of()
    mlp = model.params["blocks"]["mlp"]
    shared = model.params | {"blocks": model.params["blocks"] | {"mlp": mlp | {"gate": mlp["up"]}}}
    layers_apart(model, shared, panels=True, donate=True)
    assert not mlp["up"]["weight"].is_deleted()
    assert mlp["down"]["weight"].is_deleted()


@pytest.mark.thin(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_writes_the_same_with_them(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    model = model_of(**{"precision.param_dtype": dtype, "precision.compute_dtype": dtype})
    with Engine(model, warm=False, **SIZES) as engine:
        assert has_panels(engine._params)
        got = written_texts(engine, PROMPTS)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(model.params))
    monkeypatch.setattr("capibara.serve.engine.engine.room_for_panels", lambda *_, **__: False)
    with Engine(model, warm=False, **SIZES) as engine:
        assert not has_panels(engine._params)
        same_texts(written_texts(engine, PROMPTS), got)


@pytest.mark.thin(2)
@pytest.mark.parametrize("adapters", [None, AdapterRoom(most=1, rank=2)], ids=["alone", "adapters"])
def test_donated_matrices_are_deleted(adapters: AdapterRoom | None) -> None:
    model, other = model_of(), model_of()
    if adapters is not None:
        model.pretrained = other.pretrained = None
    with Engine(other, warm=False, adapters=adapters, **SIZES) as engine:
        want = written_texts(engine, PROMPTS)
    with Engine(model, warm=False, adapters=adapters, donate_params=True, **SIZES) as engine:
        same_texts(written_texts(engine, PROMPTS), want)
        named = {jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_leaves_with_path(model.params)}
        deleted = {name for name, leaf in named.items() if leaf.is_deleted()}
        assert "['blocks']['mlp']['up']['weight']" in deleted
        assert "['embedding']['weight']" in deleted
        assert "['final_norm']['scale']" not in deleted
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(model.params["embedding"]["weight"])


def test_scores_of_whole_prompts_and_guesses() -> None:
    """Every row of a prompt is scored against the table, and a draft model has panels of its own."""
    model = model_of()
    with Engine(model, warm=False, **SIZES) as engine:
        want = written_texts(engine, PROMPTS)
        asked = engine.submit(Request(PROMPTS[1], max_tokens=1, prompt_logprobs=0))
        scores = [score for piece in asked for score in piece.prompt_scores or ()]
    tokens = {"tokens": np.array([PROMPTS[1]], np.int32)}
    logits = model.compiled.apply(model.params, tokens)["logits"][0]
    own = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
    found = [own[at, token] for at, token in enumerate(PROMPTS[1][1:])]
    got = [score.logprob for score in scores if score is not None][-len(found) :]
    np.testing.assert_allclose(got, found, rtol=0, atol=1e-4)
    # A draft of the same arrays keeps them.
    speculation = Speculation(2, draft=model, params=model.params)
    with Engine(model, warm=False, speculation=speculation, donate_params=True, **SIZES) as engine:
        assert engine._draft is not None
        assert has_panels(engine._draft.params)
        assert not model.params["embedding"]["weight"].is_deleted()
        same_texts(written_texts(engine, PROMPTS), want)
    other = model_of(**{"model.vocab_size": 272})
    for draft, refused in ((other, True), (model_of(), False)):
        again = model_of()
        options = {"speculation": Speculation(2, draft=draft), "donate_params": True, "warm": False}
        if refused:
            with pytest.raises(ConfigError, match="272 token ids"):
                Engine(again, **options, **SIZES)
        else:
            Engine(again, **options, **SIZES).close()
        for each in (again, draft):
            assert each.params["embedding"]["weight"].is_deleted() != refused


def test_early_programs_are_for_donated_weights(tmp_path: Path) -> None:
    model = model_of()
    early = EarlyPrograms(model.config, tmp_path, **SIZES)
    with Engine(model, early=early, warm="first", donate_params=True, **SIZES) as engine:
        assert has_panels(engine._params)
        asked = Request(PROMPTS[0], max_tokens=4, sampling=Sampling(temperature=0.0))
        assert sum(len(piece.tokens) for piece in engine.submit(asked))
        assert engine.statistics().compilations == 0


@pytest.mark.slow
def test_a_bundle_is_for_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    sizes = EngineSizes.of(model, max_batch=1, max_length=32, page_size=4, prefill_tokens=8, prefill_chunks=1)
    write_bundle(tmp_path / "bundle", model, model.params, model.state, sizes, writable=256, target="cpu")
    with Engine(model, warm=False, **SIZES) as engine:
        want = written_texts(engine, PROMPTS)
    monkeypatch.setattr("capibara.serve.engine.engine.room_for_panels", lambda *_, **__: False)
    with Engine(model, bundle=ProgramBundle.read(tmp_path / "bundle")) as engine:
        assert has_panels(engine._params)
        same_texts(written_texts(engine, PROMPTS), want)
        assert engine.statistics().compilations == 0

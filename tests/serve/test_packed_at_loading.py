"""Weights that are put into panels while they are read, against those that are packed afterwards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engine_texts import same_texts, written_texts
from published import DECODERS, model_type
from transformers_oracle import recorded_facts

from capibara import native
from capibara.compose.backends.jax_stacked import Layers
from capibara.core import ModularCapibaraModel
from capibara.families import load_pretrained, read_config
from capibara.native.rooms import reuse_rooms, room
from capibara.ops.linalg.panels import Panels
from capibara.serve import Engine
from capibara.serve.engine.arrays import describe_arrays
from capibara.serve.engine.early import EarlyPrograms
from capibara.serve.engine.layers import as_computed, has_panels, layers_apart, packing_of

pytestmark = pytest.mark.skipif(native.problem() is not None, reason="no native library")
FACTS = recorded_facts()
LARGE = {
    "hidden_size": 256,
    "n_embd": 256,
    "intermediate_size": 320,
    "n_inner": 320,
    "num_attention_heads": 4,
    "n_head": 4,
    "vocab_size": 304,
}
SIZES: dict[str, Any] = {"max_batch": 3, "page_size": 4, "prefill_tokens": 16, "prefill_chunks": 2}
PROMPTS = [(1, 2, 3), tuple(range(40, 61)), (200,)]
FAST = ("llama", "gpt2", "phi3, heads turned in part", "mixtral, a window, tied", "mamba2 with biases")


def folder_of(folder: Path, name: str, dtype: str = "float32") -> Path:
    """A model of a family whose matrices are large enough for the kernels."""
    config = FACTS[name]["config"]
    if name.startswith("mamba"):
        large = LARGE | {"head_dim": 64, "num_heads": config["expand"] * 4}
    else:
        large = LARGE | ({"head_dim": 96} if config.get("head_dim") and "deepseek" not in name else {})
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(config | {key: size for key, size in large.items() if key in config})
    )
    model = ModularCapibaraModel(read_config(folder, dtype=dtype)[0])
    model.params, model.state = model.init(3)
    model.save_pretrained(folder / "saved", family=model_type(name))
    return folder / "saved"


def is_apart(leaf: Any) -> bool:
    return isinstance(leaf, Layers | Panels)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(
            (n, "float32") if n in FAST else pytest.param(n, "float32", marks=pytest.mark.slow)
            for n in DECODERS
        ),
        ("llama 3.1, one key head, tied", "bfloat16"),
    ],
)
def test_they_are_the_same(name: str, dtype: str, tmp_path: Path):
    folder = folder_of(tmp_path / "model", name, dtype)
    model = ModularCapibaraModel.from_pretrained(folder)
    computed = as_computed(model)
    expected = layers_apart(computed, model.params, panels=True)
    packing = packing_of(computed, describe_arrays(model)[0])
    assert packing
    with reuse_rooms():
        room((1 << 22,), np.uint8)[...] = 0x5A  # memory that is handed out again
        given = load_pretrained(ModularCapibaraModel, folder, packing=lambda: packing).params
        packed = {
            tuple(step.key for step in path)
            for path, leaf in jax.tree_util.tree_leaves_with_path(given, is_leaf=is_apart)
            if is_apart(leaf)
        }
        found = layers_apart(computed, given, panels=True, donate=True)
    assert packed == set(packing)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(own, jax.Array)
        assert own.dtype == other.dtype
        np.testing.assert_array_equal(own, other)
        assert own.unsafe_buffer_pointer() % 64 == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_writes_the_same_texts(dtype: str, tmp_path: Path):
    # In bfloat16 keys and values could round the other way where other requests share a step.
    sizes: dict[str, Any] = SIZES | {"cache_dtype": "float32"}
    folder = folder_of(tmp_path / "model", "llama", dtype)
    model = ModularCapibaraModel.from_pretrained(folder)
    with Engine(model, **sizes) as engine:
        expected = written_texts(engine, PROMPTS)
    early = EarlyPrograms(read_config(folder)[0], folder, **sizes)
    with reuse_rooms():
        loaded = load_pretrained(ModularCapibaraModel, folder, packing=early.packing)
        assert has_panels(loaded.params)
        with Engine(loaded, early=early, donate_params=True, **sizes) as engine:
            same_texts(written_texts(engine, PROMPTS), expected)
            assert not engine.statistics().compilations
    # An engine without such programs takes them, too.
    with reuse_rooms():
        loaded = load_pretrained(ModularCapibaraModel, folder, packing=lambda: early.packing())
        with Engine(loaded, donate_params=True, **sizes) as engine:
            same_texts(written_texts(engine, PROMPTS), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_it_is_what_the_early_programs_are_for(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Matrices of float16 are made float32 before they are packed."""
    folder = folder_of(tmp_path / "model", "llama", dtype)
    traced: list[Any] = []
    decode = ModularCapibaraModel.decode_pages
    monkeypatch.setattr(
        ModularCapibaraModel,
        "decode_pages",
        lambda *given, **more: (traced.append(given[4]), decode(*given, **more))[1],
    )
    early = EarlyPrograms(read_config(folder)[0], folder, **SIZES)
    early._thread.join()
    made = set(traced)
    assert made
    traced.clear()
    with reuse_rooms():
        loaded = load_pretrained(ModularCapibaraModel, folder, packing=early.packing)
        assert has_panels(loaded.params) == (dtype != "float16")
        with Engine(loaded, early=early, donate_params=True, warm=False, **SIZES) as engine:
            assert has_panels(engine._params)
            written_texts(engine, PROMPTS[:1], logprobs=None)
    assert made.isdisjoint(traced)  # they are others, of rows alone


def test_matrices_that_are_stored_in_another_dtype_are_packed_later(tmp_path: Path):
    folder = folder_of(tmp_path / "model", "llama")
    model = ModularCapibaraModel(read_config(folder, dtype="bfloat16")[0])
    packing = packing_of(as_computed(model), describe_arrays(model)[0])
    assert packing
    with reuse_rooms():
        given = load_pretrained(
            ModularCapibaraModel, folder, dtype="bfloat16", packing=lambda: packing
        ).params
    assert not has_panels(given)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(given)} == {"bfloat16"}


def test_nothing_is_packed_for_what_owns_its_parameters(tmp_path: Path):
    """Without :func:`reuse_rooms` XLA does, and a step may update them in place."""
    folder = folder_of(tmp_path / "model", "llama")
    model = ModularCapibaraModel(read_config(folder)[0])
    packing = packing_of(as_computed(model), describe_arrays(model)[0])
    assert not has_panels(load_pretrained(ModularCapibaraModel, folder, packing=lambda: packing).params)


def test_programs_that_fail_pack_nothing(tmp_path: Path):
    folder = folder_of(tmp_path / "model", "llama")
    wrong: dict[str, Any] = SIZES | {"max_batch": 0}
    assert EarlyPrograms(read_config(folder)[0], folder, **wrong).packing() == {}

"""Encoders against what Hugging Face's own computed, recorded or in this process (``transformers_oracle.py``)."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import transformers_oracle as oracle
from published import CONFIGS, ENCODERS, draw, token_types, tokens, write_folder
from safetensors.numpy import load_file, save_file

from capibara.compose.errors import InputError
from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError
from capibara.families import FAMILIES, FamilyError, config_values, read_config
from capibara.serve import Generator

FACTS = {name: fact for name, fact in oracle.recorded_facts().items() if name in ENCODERS}
NAMES = sorted(ENCODERS)


def folder_of(name: str, path: Path) -> Path:
    shapes = {tensor: tuple(shape) for tensor, shape in FACTS[name]["shapes"].items()}
    return write_folder(path / "model", FACTS[name]["config"], shapes)


def outputs(model: ModularCapibaraModel, params: Any, given: dict[str, Any]) -> dict[str, Any]:
    settings = model.config.model
    key = "hidden" if settings.head == "none" else "logits"
    found = {key: model.apply(params, given)}
    return found | ({"pooled": model.pooled(params, given)} if settings.pooler else {})


def loss_and_gradients(model: ModularCapibaraModel, given: dict[str, Any]) -> tuple[float, Any]:
    loss, found = jax.jit(
        jax.value_and_grad(lambda params: oracle.projected(outputs(model, params, given), draw))
    )(model.params)
    return float(loss), found


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_gradients_and_a_folder_that_comes_back(name: str, tmp_path: Path) -> None:
    source = folder_of(name, tmp_path)
    model, text = ModularCapibaraModel.from_pretrained(source), tokens(rows=1)
    given = {"tokens": text, **token_types(CONFIGS[name], text.shape)}
    assert model.num_params == sum(int(np.prod(shape)) for shape in FACTS[name]["shapes"].values())
    recorded = oracle.recorded_logits()
    for key, value in outputs(model, model.params, given).items():
        np.testing.assert_allclose(value[0], recorded[f"{name}: {key}"], rtol=0, atol=1e-4, err_msg=key)

    model.save_pretrained(tmp_path / "again")
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(before[tensor].tobytes() == after[tensor].tobytes() for tensor in before)
    # And as a model that came from nowhere, whose config.json is written anew.
    values = config_values(model.config.model, FAMILIES["bert"])
    (tmp_path / "again" / "config.json").write_text(json.dumps(values))
    assert read_config(tmp_path / "again")[0].model == read_config(source)[0].model

    loss, found = loss_and_gradients(model, given)
    np.testing.assert_allclose(loss, FACTS[name]["loss"], rtol=1e-4, atol=1e-4)
    model.params = found
    model.save_pretrained(tmp_path / "gradients")
    written = load_file(tmp_path / "gradients" / "model.safetensors")
    expected = FACTS[name]["gradients"]
    assert written.keys() == expected.keys()
    for tensor, (projected, largest) in expected.items():
        gradient = written[tensor]
        np.testing.assert_allclose(np.abs(gradient).max(), largest, rtol=1e-4, atol=1e-4, err_msg=tensor)
        seen = float((gradient * draw(f"{tensor} projected", gradient.shape)).sum())
        assert abs(seen - projected) < 1e-4 * max(1.0, float(np.abs(gradient).sum())), tensor


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_all_gradients_and_folders_both_ways(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def theirs_of(model: Any, *given: Any) -> dict[str, np.ndarray]:
        return {key: value.detach().numpy() for key, value in oracle.outputs(model, *given).items()}

    def compare(ours: ModularCapibaraModel, theirs: Any) -> None:
        want = theirs_of(theirs, text, types)
        found = outputs(ours, ours.params, {"tokens": text, "token_types": types})
        assert found.keys() == want.keys()
        for key, value in found.items():
            np.testing.assert_allclose(value, want[key], rtol=0, atol=1e-4, err_msg=key)

    text = tokens()
    types = token_types(CONFIGS[name], text.shape)["token_types"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = oracle.build(name)
        theirs.save_pretrained(tmp_path / "theirs")
        ours = ModularCapibaraModel.from_pretrained(tmp_path / "theirs")
        compare(ours, theirs)

        # Padding on either side.
        padded, mask = np.where(np.arange(text.shape[1]) < 5, 0, text), np.ones_like(text)
        mask[0, :5] = 0
        mask[-1, -7:] = 0
        given = {"tokens": padded, "segments": mask, "token_types": types}
        want = theirs_of(theirs, padded, types, mask)
        for key, value in outputs(ours, ours.params, given).items():
            real = mask == 1 if value.ndim == 3 else np.array([False, True])  # the first token may be padding
            np.testing.assert_allclose(
                np.asarray(value)[real], want[key][real], rtol=0, atol=1e-4, err_msg=key
            )

        loss, expected = oracle.encoder_gradients(theirs, text, types)
        found, gradients = loss_and_gradients(ours, {"tokens": text, "token_types": types})
        np.testing.assert_allclose(found, loss, rtol=1e-4, atol=1e-4)
        params, ours.params = ours.params, gradients
        ours.save_pretrained(tmp_path / "gradients")
        written = load_file(tmp_path / "gradients" / "model.safetensors")
        assert written.keys() == expected.keys()
        for tensor, gradient in expected.items():
            np.testing.assert_allclose(written[tensor], gradient, rtol=1e-4, atol=1e-4, err_msg=tensor)

        # A folder of other weights, which their reader loads; and one whose config.json nobody has written before.
        ours.params = jax.tree.map(lambda x: x * 0.5, params)
        for place, family in (("ours", None), ("fresh", "bert")):
            ours.pretrained = None if family else ours.pretrained
            ours.save_pretrained(tmp_path / place, family=family)
            loaded = oracle.class_of(name).from_pretrained(tmp_path / place, attn_implementation="eager")
            compare(ours, loaded.eval())


def test_older_names_prefixes_and_heads_of_other_tasks(tmp_path: Path) -> None:
    source = folder_of("bert", tmp_path)
    tensors = load_file(source / "model.safetensors")
    want = ModularCapibaraModel.from_pretrained(source)
    assert not want.pretrained.notes
    old = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): array
        for name, array in tensors.items()
    }
    heads = {
        "cls.seq_relationship.weight": np.zeros((2, 32), np.float32),
        "cls.predictions.bias": np.zeros(61, np.float32),
        "bert.embeddings.position_ids": np.arange(96)[None],
    }
    save_file(old | heads, source / "model.safetensors")
    model = ModularCapibaraModel.from_pretrained(source)
    text = tokens()
    np.testing.assert_array_equal(model(text), want(text))
    assert len(model.pretrained.notes) == 1
    assert "cls.predictions.bias, cls.seq_relationship.weight" in model.pretrained.notes[0]
    # They leave by the names of today.
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert {name: array.tobytes() for name, array in again.items()} == {
        name: array.tobytes() for name, array in tensors.items()
    }

    save_file(
        tensors | {"bert.pooler.dense.bias": tensors["pooler.dense.bias"]}, source / "model.safetensors"
    )
    with pytest.raises(FamilyError, match="are the same tensor"):
        ModularCapibaraModel.from_pretrained(source)
    save_file(tensors | {"adapter.weight": heads["cls.predictions.bias"]}, source / "model.safetensors")
    with pytest.raises(FamilyError, match=r"no place for the tensor adapter\.weight"):
        ModularCapibaraModel.from_pretrained(source)


def test_a_folder_without_a_pooler(tmp_path: Path) -> None:
    source = folder_of("bert", tmp_path)
    tensors = load_file(source / "model.safetensors")
    save_file(
        {name: array for name, array in tensors.items() if "pooler" not in name}, source / "model.safetensors"
    )
    model = ModularCapibaraModel.from_pretrained(source)
    assert "has no bert.pooler.dense.weight: model.pooler=False" in model.pretrained.notes[0]
    with pytest.raises(InputError, match="no pooler"):
        model.pooled(model.params, tokens())
    model.save_pretrained(tmp_path / "again")
    again = ModularCapibaraModel.from_pretrained(tmp_path / "again")
    assert not again.pretrained.notes
    assert again.config.model == model.config.model
    np.testing.assert_array_equal(again(tokens()), model(tokens()))


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("architectures", ["BertLMHeadModel"], "architectures: got .*BertLMHeadModel.*BertForMaskedLM"),
        ("architectures", [], None),
        ("architectures", [7], "architectures"),
        ("is_decoder", True, "is_decoder"),
        ("position_embedding_type", "relative_key", "position_embedding_type"),
        ("hidden_act", "tanh", "hidden_act"),
        ("pooler_type", "mean", "pooler_type"),
        ("type_vocab_size", 0, "type_vocab_size"),
        ("rope_theta", 1e4, "rope_theta"),
    ],
)
def test_what_a_config_asks_for(key: str, value: Any, match: str | None, tmp_path: Path) -> None:
    values = {"model_type": "bert", **CONFIGS["bert"], key: value}
    (tmp_path / "config.json").write_text(json.dumps(values))
    if match is None:
        assert read_config(tmp_path)[0].model.pooler
        return
    with pytest.raises(FamilyError, match=match):
        read_config(tmp_path)


def test_an_encoder_has_no_next_token(tmp_path: Path) -> None:
    model = ModularCapibaraModel.from_pretrained(folder_of("bert, masked words", tmp_path))
    batch = {"tokens": tokens()}
    calls: dict[str, Any] = {
        "decoding": lambda: model.init_cache(1, 8),
        "the loss": lambda: model.loss(model.params, batch, state={}),
        "losses": lambda: model.token_losses(model.params, batch),
        "generating": lambda: Generator(model, model.params),
    }
    for call in calls.values():
        with pytest.raises(ConfigError, match=r"model\.causal: got false, an encoder.*capibara embed"):
            call()
    with pytest.raises(InputError, match="no pooler"):
        model.pooled(model.params, batch)

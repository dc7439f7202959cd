"""Adapters in the form of PEFT: written, read, and refused by the name of what cannot be done."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published import CONFIGS, model_type, tokens, write_folder
from safetensors.numpy import load_file, save_file
from transformers_oracle import recorded_facts

from capibara.core import ModularCapibaraModel
from capibara.families import FamilyError, save_adapter
from capibara.families.known import FAMILIES

FACTS = recorded_facts()
LORA = {"finetune.method": "lora", "finetune.rank": 3, "finetune.alpha": 6.0}


def folder_of(name: str, where: Path) -> Path:
    return write_folder(where / "base", FACTS[name]["config"], FACTS[name]["shapes"])


def adapted(folder: Path, **settings: Any) -> ModularCapibaraModel:
    """A model with adapters that change something."""
    model = ModularCapibaraModel.from_pretrained(folder, overrides={**LORA, **settings})
    rng = np.random.default_rng(0)

    def one(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return jnp.asarray(rng.normal(size=leaf.shape) * 0.2, leaf.dtype) if name.endswith("lora_b") else leaf

    model.params = jax.tree_util.tree_map_with_path(one, model.params)
    return model


def save(model: ModularCapibaraModel, folder: Path) -> Path:
    assert model.pretrained is not None
    save_adapter(model, model.params, folder, model.pretrained.family)
    return folder


def test_they_come_back(tmp_path: Path) -> None:
    base = folder_of("qwen3, tied, one key head", tmp_path)
    model = adapted(base, **{"finetune.targets": ["query", "out", "down"]})
    folder = save(model, tmp_path / "adapter")
    told = json.loads((folder / "adapter_config.json").read_text())
    assert told["target_modules"] == ["down_proj", "o_proj", "q_proj"]
    back = ModularCapibaraModel.from_pretrained(base, adapter=folder)
    for key in ("method", "rank", "alpha", "dropout"):
        assert getattr(back.config.finetune, key) == getattr(model.config.finetune, key)
    assert set(back.config.finetune.targets) == {"query", "out", "down"}
    for one, other in zip(jax.tree.leaves(model.params), jax.tree.leaves(back.params), strict=True):
        np.testing.assert_array_equal(one, other)
    # An exported folder has them in its weights.
    back.save_pretrained(tmp_path / "merged")
    text = tokens(rows=1)
    merged = ModularCapibaraModel.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(merged(text), model(text), atol=2e-5)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "name",
    ["llama with biases", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "olmo2"))],
)
def test_peft_computes_the_same(name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    base = folder_of(name, tmp_path)
    model = adapted(base)
    folder = save(model, tmp_path / "adapter")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").float()
    with_adapter = peft.PeftModel.from_pretrained(theirs, folder).eval()
    text = tokens(rows=2)
    with torch.no_grad():
        expected = with_adapter(torch.from_numpy(text)).logits.numpy()
    np.testing.assert_allclose(model(text), expected, atol=1e-4)
    assert np.abs(np.asarray(ModularCapibaraModel.from_pretrained(base)(text)) - expected).max() > 1e-2

    # And the other way: theirs, with other numbers, is read.
    with torch.no_grad():
        for key, parameter in with_adapter.named_parameters():
            if "lora_" in key:
                parameter.mul_(0.5)
        expected = with_adapter(torch.from_numpy(text)).logits.numpy()
    with_adapter.save_pretrained(tmp_path / "theirs")
    back = ModularCapibaraModel.from_pretrained(base, adapter=tmp_path / "theirs")
    np.testing.assert_allclose(back(text), expected, atol=1e-4)


MIXTURES = [
    ("mixtral", None),
    ("qwen3_moe", ["gate", "up"]),
    ("gpt_oss", None),
    ("gpt_oss", ["up", "query"]),
]


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        MIXTURES[0],
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in [*MIXTURES[1:], ("qwen3_moe", ["down", "out"])]
        ),
    ],
)
def test_adapters_of_experts_come_back(name: str, targets: list[str] | None, tmp_path: Path) -> None:
    given = {} if targets is None else {"finetune.targets": targets}
    model = adapted(base := folder_of(name, tmp_path), **given)
    folder = save(model, tmp_path / "adapter")
    back = ModularCapibaraModel.from_pretrained(base, adapter=folder)
    text = tokens(rows=2)
    np.testing.assert_allclose(back(text), model(text), atol=1e-5)
    assert np.abs(np.asarray(model(text) - ModularCapibaraModel.from_pretrained(base)(text))).max() > 0.1
    if targets != ["up", "query"]:  # "gate" comes back as well, and changes nothing
        assert back.config.finetune.model_dump() | {"targets": ()} == model.config.finetune.model_dump() | {
            "targets": ()
        }
        jax.tree.map(np.testing.assert_array_equal, back.params, model.params)
    back.save_pretrained(tmp_path / "merged")
    merged = ModularCapibaraModel.from_pretrained(tmp_path / "merged")
    np.testing.assert_allclose(merged(text), model(text), atol=1e-4)


@pytest.mark.slow
# PEFT warns that ranks of parameters are not those of modules, and uses them.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "targets"), MIXTURES)
def test_peft_computes_the_same_with_experts(name: str, targets: list[str] | None, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = adapted(
        base := folder_of(name, tmp_path), **({} if targets is None else {"finetune.targets": targets})
    )
    folder, text = save(model, tmp_path / "adapter"), tokens(rows=2)

    def whole() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").float()

    theirs = peft.PeftModel.from_pretrained(whole(), folder).eval()
    with torch.no_grad():
        expected = theirs(torch.from_numpy(text)).logits.numpy()
    np.testing.assert_allclose(model(text), expected, atol=1e-4)
    # What it saves has all experts in one tensor, whatever ours had.
    theirs.save_pretrained(tmp_path / "theirs")
    back = ModularCapibaraModel.from_pretrained(base, adapter=tmp_path / "theirs")
    np.testing.assert_allclose(back(text), expected, atol=1e-4)

    # One that is new there: gate and up share a factor.
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["v_proj"], target_parameters=parameters)
    torch.manual_seed(0)
    fresh = peft.get_peft_model(whole(), config).eval()
    with torch.no_grad():
        for key, parameter in fresh.named_parameters():
            if "lora_B" in key:
                parameter.normal_(std=0.3)
        expected = fresh(torch.from_numpy(text)).logits.numpy()
    fresh.save_pretrained(tmp_path / "fresh")
    back = ModularCapibaraModel.from_pretrained(base, adapter=tmp_path / "fresh")
    assert set(back.config.finetune.targets) == {"value", "gate", "up", "down"}
    np.testing.assert_allclose(back(text), expected, atol=1e-4)


def test_adapters_of_experts_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    base = folder_of("qwen3_moe", tmp_path)
    folder = save(adapted(base, **{"finetune.targets": ["gate", "up"]}), tmp_path / "adapter")
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    whole, arrays = json.loads(config.read_text()), load_file(weights)

    def refused(words: str) -> None:
        with pytest.raises(FamilyError, match=words):
            ModularCapibaraModel.from_pretrained(base, adapter=folder)

    for key, value in (
        ("target_parameters", "mlp.experts.gate_up_proj"),
        ("target_parameters", ["mlp.experts.router"]),
        ("rank_pattern", {"mlp.experts.gate_up_proj": 5}),
        ("rank_pattern", {"q_proj": 6}),
        ("rank_pattern", ["gate_up_proj"]),
        ("alpha_pattern", {"mlp.experts.gate_up_proj": True}),
    ):
        config.write_text(json.dumps({**whole, key: value}))
        refused(f"{key}: got")
    config.write_text(json.dumps({**whole, "rank_pattern": {}}))
    refused("expected both or none")
    config.write_text(json.dumps(whole))
    name = "base_model.model.model.layers.0.mlp.experts.lora_B.weight"
    mixed = arrays[name].copy()
    mixed[0] = 1
    for changed, words in (
        ({k: v for k, v in arrays.items() if k != name}, "has no lora_B of model.layers.0.mlp.experts"),
        ({**arrays, name: arrays[name][:2]}, "expected floating-point numbers"),
        ({**arrays, name: mixed}, "halves are not those of gate and up. Remedy: merge"),
        ({**arrays, name.replace(".lora_B", ".base_layer.lora_B"): mixed}, "has no adapter in this model"),
    ):
        save_file({key: np.ascontiguousarray(value) for key, value in changed.items()}, weights)
        refused(words)
    save_file(arrays, weights)
    (tmp_path / "other").mkdir()
    dense = folder_of("llama", tmp_path / "other")
    with pytest.raises(FamilyError, match=r"target_parameters.*llama has no experts"):
        ModularCapibaraModel.from_pretrained(dense, adapter=folder)
    # PEFT does not tell experts from layers beside them, which have the same names.
    (tmp_path / "shared").mkdir()
    with pytest.raises(FamilyError, match=r"does not tell them apart\. Remedy: export the merged model"):
        save(adapted(folder_of("deepseek_v3", tmp_path / "shared")), tmp_path / "x")


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    base = folder_of("llama", tmp_path)
    folder = save(adapted(base), tmp_path / "adapter")
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    whole, arrays = json.loads(config.read_text()), load_file(weights)

    def refused(words: str) -> None:
        with pytest.raises(FamilyError, match=words):
            ModularCapibaraModel.from_pretrained(base, adapter=folder)

    for key, value in (
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("use_dora", True),
        ("rank_pattern", {"q_proj": 4}),
        ("modules_to_save", ["lm_head"]),
        ("r", 0),
        ("r", "8"),
        ("lora_alpha", -1),
        ("target_modules", ["lm_head"]),
        ("target_modules", "all-linear"),
    ):
        config.write_text(json.dumps({**whole, key: value}))
        refused(f"{key}: got|{key}, |, {key}: got")
    config.write_text(json.dumps({**whole, "use_rslora": True, "r": 3, "lora_alpha": 6.0 / 3**0.5}))
    rescaled = ModularCapibaraModel.from_pretrained(base, adapter=folder)
    assert rescaled.config.finetune.alpha == pytest.approx(6)

    config.write_text(json.dumps(whole))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    for changed, words in (
        ({k: v for k, v in arrays.items() if k != name}, "has no lora_A of model.layers.0.self_attn.q_proj"),
        ({**arrays, name: arrays[name][:2]}, "expected floating-point numbers"),
        ({**arrays, "other": arrays[name]}, "unknown tensor 'other'"),
        ({**arrays, name.replace("q_proj", "x_proj"): arrays[name]}, "has no adapter in this model"),
    ):
        save_file({key: np.ascontiguousarray(value) for key, value in changed.items()}, weights)
        refused(words)
    weights.unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    refused("Pickled adapters")
    refused_base = ModularCapibaraModel.from_pretrained(base)
    with pytest.raises(FamilyError, match="has none"):
        save_adapter(refused_base, refused_base.params, tmp_path / "x", FAMILIES["llama"])


def test_a_tensor_of_several_weights_is_refused(tmp_path: Path) -> None:
    name = next(one for one in CONFIGS if model_type(one) == "phi3")
    with pytest.raises(FamilyError, match="several adapted weights"):
        save(adapted(folder_of(name, tmp_path)), tmp_path / "adapter")

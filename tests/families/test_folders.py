"""Folders that are not what they should be: one clear error, and nothing outside of the folder is read."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published import CONFIGS, SIZES, draw, model_type, write_folder
from safetensors.numpy import load_file, save_file

from capibara.core import ModularCapibaraModel
from capibara.families import FamilyError, config_values, read_config
from capibara.families.known import FAMILIES
from capibara.families.saving import _chosen

CONFIG: dict[str, Any] = {"model_type": "llama", "num_key_value_heads": 2, **SIZES, "num_hidden_layers": 2}


def shapes() -> dict[str, tuple[int, ...]]:
    block = {
        "input_layernorm.weight": (32,),
        "self_attn.q_proj.weight": (32, 32),
        "self_attn.k_proj.weight": (16, 32),
        "self_attn.v_proj.weight": (16, 32),
        "self_attn.o_proj.weight": (32, 32),
        "post_attention_layernorm.weight": (32,),
        "mlp.gate_proj.weight": (40, 32),
        "mlp.up_proj.weight": (40, 32),
        "mlp.down_proj.weight": (32, 40),
    }
    return {
        "model.embed_tokens.weight": (61, 32),
        "model.norm.weight": (32,),
        "lm_head.weight": (61, 32),
    } | {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in block.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", CONFIG, shapes())


def rewritten(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


def test_it_loads(folder: Path) -> None:
    model = ModularCapibaraModel.from_pretrained(folder)
    first = model.params["blocks"]["attention"]["query"]["weight"][1]
    stored = draw("model.layers.1.self_attn.q_proj.weight", (32, 32))
    np.testing.assert_array_equal(np.asarray(first).reshape(32, 32), stored.T)


def test_it_loads_in_double_precision(folder: Path) -> None:
    """Every bit of float64, in a process that has not turned it on."""
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.norm.weight", "model.layers.1.self_attn.q_proj.weight", "lm_head.weight"):
        tensors[name] = tensors[name].astype(np.float64) / 3
    save_file(tensors, folder / "model.safetensors")
    params = ModularCapibaraModel.from_pretrained(folder, dtype="float64").params
    for found, name in (
        (params["final_norm"]["scale"], "model.norm.weight"),
        (params["blocks"]["attention"]["query"]["weight"][1], "model.layers.1.self_attn.q_proj.weight"),
        (params["head"]["weight"], "lm_head.weight"),
    ):
        numbers = np.asarray(found)
        assert numbers.dtype == np.float64
        stored = tensors[name]
        np.testing.assert_array_equal(numbers.reshape(len(numbers), -1).T.reshape(stored.shape), stored)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "lama"}, "Did you mean 'llama'"),
        ({"model_type": None}, "model_type: got None"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"mla_rank": 3}, "does not know what this asks for: mla_rank=3"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_size": "32"}, "hidden_size: got '32'"),
        ({"hidden_size": True}, "hidden_size: got True"),
        ({"hidden_size": -1}, "at least 1"),
        ({"hidden_size": 1 << 40}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e300}, "norm_epsilon"),
        ({"hidden_act": "xielu"}, "one of silu"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_type: got 'longrope'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "warp": 3}}, "warp=3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}}, "beta_fast"),
        ({"torch_dtype": "int8"}, "dtype='int8'"),
        ({"tie_word_embeddings": True, "num_hidden_layers": 3}, "has no tensor model.layers.2"),
        ({"num_hidden_layers": 1}, "no place for the tensor model.layers.1"),
        ({"intermediate_size": 48}, "has the shape (40, 32), config.json asks for (48, 32)"),
    ],
)
def test_a_config_that_cannot_be(folder: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(FamilyError) as error:
        ModularCapibaraModel.from_pretrained(rewritten(folder, **changes))
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rms_norm": False}, "rms_norm: got False"),
        ({"num_heads": 7}, "num_heads: got 7, .* expected 8, as hidden_size, expand and head_dim say"),
        ({"intermediate_size": 63}, "intermediate_size: got 63"),
        ({"n_groups": 3}, r"ssm\.groups: got 3"),
        ({"hidden_act": "mish"}, "hidden_act: got 'mish'"),
        ({"time_step_limit": [0.1]}, "time_step_limit: .* two numbers of at least 0"),
        ({"time_step_limit": [-1.0, 2.0]}, "time_step_limit"),
        ({"time_step_limit": [0.0, float("nan")]}, "time_step_limit"),
        ({"time_step_limit": [2.0, 1.0]}, r"ssm\.step_max: got 1\.0"),
        ({"time_step_limit": {"__float__": "Infinity"}}, "time_step_limit"),
        ({"n_heads": 8}, "n_heads=8"),
    ],
)
def test_what_mamba2_does_not_do(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "mamba2", **CONFIGS["mamba2"], **changes})
    )
    with pytest.raises(FamilyError, match=told):
        read_config(tmp_path)


@pytest.mark.parametrize(("name", "count"), [("mistral", 8), ("gemma2", 4), ("gemma3", 4), ("llama", 16)])
def test_key_heads_that_a_file_does_not_say(name: str, count: int, tmp_path: Path) -> None:
    """As many as the models' own classes take; null is as many as heads."""
    values = {"model_type": model_type(name), **SIZES, "num_attention_heads": 16, "sliding_window": 5}
    if name == "llama":
        del values["sliding_window"]
    del values["num_key_value_heads"]
    for given, expected in (({}, count), ({"num_key_value_heads": None}, 16)):
        (tmp_path / "config.json").write_text(json.dumps(values | given))
        assert read_config(tmp_path)[0].model.num_kv_heads == expected


@pytest.mark.parametrize("given", [{}, {"rope_scaling": {}}, {"rope_parameters": None}])
def test_positions_that_gpt_oss_does_not_say(given: dict[str, Any], tmp_path: Path) -> None:
    values = {"model_type": "gpt_oss", **CONFIGS["gpt_oss"], **given}
    (tmp_path / "config.json").write_text(json.dumps(values))
    rope = read_config(tmp_path)[0].model.rope
    assert (rope.scaling, rope.factor, rope.original_length, rope.truncate) == ("yarn", 32.0, 4096, False)


def test_positions_that_are_said_twice(folder: Path) -> None:
    """Readers differ in which of the two keys they take."""
    linear = {"rope_type": "linear", "factor": 4.0}
    rewritten(folder, rope_scaling=linear, rope_parameters={**linear, "rope_theta": 10000.0})
    assert read_config(folder)[0].model.rope.factor == 4.0
    for other in ({"rope_type": "default"}, {**linear, "factor": 2.0}, {**linear, "rope_theta": 5e5}):
        rewritten(folder, rope_scaling=linear, rope_parameters=other)
        with pytest.raises(FamilyError, match=r"rope_scaling: .* expected what rope_parameters says"):
            read_config(folder)


def test_scores_that_gemma3_does_not_bound(tmp_path: Path) -> None:
    """The key is Gemma 2's: the models' own implementation passes over it."""
    values = {"model_type": "gemma3_text", **CONFIGS["gemma3"], "attn_logit_softcapping": 3.0}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(FamilyError, match=r"attn_logit_softcapping: got 3\.0"):
        read_config(tmp_path)


def test_stretching_that_gemma3_does_not_do(tmp_path: Path) -> None:
    """Of the names of a kind only the newer one stretches, in files with the older key ``rope_scaling``."""

    def read(**changes: Any) -> Any:
        values = {"model_type": "gemma3_text", **CONFIGS["gemma3"], **changes}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return read_config(tmp_path)

    kind, newer = {"type": "linear", "factor": 8.0}, {"rope_type": "linear", "factor": 8.0}
    plain, _ = read()
    config, source = read(rope_scaling=kind)
    assert config == plain
    (note,) = source.notes
    assert "type='linear' has no effect without rope_type" in note
    for scaling in (newer, {**kind, **newer}):
        config, source = read(rope_scaling=scaling)
        assert (config.model.rope.scaling, config.model.rope.factor) == ("linear", 8.0)
        assert not source.notes
    both = {"full_attention": newer, "sliding_attention": {"rope_type": "default"}}
    assert read(rope_parameters=both, rope_scaling=newer)[0].model.rope.factor == 8.0
    assert read(rope_parameters={**both, "full_attention": kind})[0].model.rope.factor == 8.0
    with pytest.raises(FamilyError, match=r"rope_scaling: .* expected what rope_parameters says"):
        read(rope_parameters=both, rope_scaling={**newer, "factor": 4.0})


@pytest.mark.parametrize(
    "limit", [[0.0, float("inf")], [0.25, float("inf")], [0.0, {"__float__": "Infinity"}]]
)
def test_a_limit_that_is_infinite(tmp_path: Path, limit: list[Any]) -> None:
    """As files have had it: `Infinity`, which is not JSON, and an object."""
    values = {"model_type": "mamba2", **CONFIGS["mamba2"], "time_step_limit": limit}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, source = read_config(tmp_path)
    assert (config.model.ssm.step_min, config.model.ssm.step_max) == (limit[0], None)
    json.dumps(source.to_json(), allow_nan=False)
    _, written = _chosen(config.model, None, source)
    json.dumps(written, allow_nan=False)
    assert written.get("time_step_limit") == (None if limit[0] == 0 else [0.25, 1e6])
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert read_config(tmp_path)[0].model == config.model


@pytest.mark.parametrize("text", ["", "[]", "{", "nul", '{"model_type": "llama"}', "[" * 100_000])
def test_a_config_that_is_no_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(FamilyError, match=r"config\.json"):
        read_config(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match=r"No such file.*config\.json"):
        ModularCapibaraModel.from_pretrained(tmp_path / "nothing")


def test_pickle_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FamilyError, match=r"pytorch_model\.bin is a pickle.*save_pretrained"):
        ModularCapibaraModel.from_pretrained(folder)


def sharded(folder: Path) -> dict[str, str]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {}
    for part, some in enumerate((names[:9], names[9:])):
        file = f"model-{part}.safetensors"
        save_file({name: tensors[name] for name in some}, folder / file)
        where |= dict.fromkeys(some, file)
    write_index(folder, where)
    return where


def write_index(folder: Path, where: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def test_several_files(folder: Path) -> None:
    whole = ModularCapibaraModel.from_pretrained(folder)
    sharded(folder)
    parts = ModularCapibaraModel.from_pretrained(folder)
    a, b = (np.asarray(m.params["blocks"]["mlp"]["down"]["weight"]) for m in (whole, parts))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "out", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "x.bin", "", 3, None]
)
def test_an_index_does_not_lead_out_of_the_folder(folder: Path, out: Any) -> None:
    save_file({"lm_head.weight": np.zeros((61, 32), np.float32)}, folder.parent / "secret.safetensors")
    write_index(folder, sharded(folder) | {"lm_head.weight": out})
    with pytest.raises(FamilyError, match=r"expected the name of a \.safetensors file"):
        ModularCapibaraModel.from_pretrained(folder)


def test_an_index_that_does_not_fit(folder: Path) -> None:
    where = sharded(folder)
    for wrong, told in (
        (where | {"lm_head.weight": "model-1.safetensors"}, "which does not have it"),
        (where | {"more": "model-1.safetensors"}, "says that more is in"),
        (
            {name: file for name, file in where.items() if name != "lm_head.weight"},
            "does not say where lm_head.weight",
        ),
        (where | {"lm_head.weight": "model-7.safetensors"}, "has no model-7.safetensors"),
        ([], "weight_map"),
    ):
        write_index(folder, wrong)
        with pytest.raises(FamilyError, match=told):
            ModularCapibaraModel.from_pretrained(folder)


def test_tensors_that_are_codes(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(FamilyError, match=r"lm_head.weight is stored as I8.*before they were quantized"):
        ModularCapibaraModel.from_pretrained(folder)


def test_any_damage_is_one_error(folder: Path) -> None:
    """Random bytes of every file, random values of every key: an error of ours, or a model."""
    draws = random.Random(0)
    config = json.dumps(CONFIG).encode()
    weights = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(weights[:8], "little")
    odd = [None, True, -1, 0, 1e308, float("inf"), 1 << 62, "", "x" * 100, [], {}, [[]], {"a": 1}]
    refused = 0
    for number in range(300):
        (folder / "config.json").write_bytes(config)
        (folder / "model.safetensors").write_bytes(weights)
        kind = number % 3
        if kind == 0:
            rewritten(folder, **{draws.choice(list(CONFIG)): draws.choice(odd)})
        elif kind == 1:
            damaged = bytearray(config)
            damaged[draws.randrange(len(damaged))] = draws.randrange(256)
            (folder / "config.json").write_bytes(damaged)
        else:
            damaged = bytearray(weights)
            damaged[draws.randrange(8 + length)] = draws.randrange(256)
            (folder / "model.safetensors").write_bytes(damaged[: draws.choice((len(damaged), length))])
        try:
            read_config(folder)
            if kind == 2:
                ModularCapibaraModel.from_pretrained(folder)
        except FamilyError:
            refused += 1
    assert refused > 100


def test_a_family_says_what_it_cannot_express() -> None:
    from capibara.config import ModularModelConfig

    config = ModularModelConfig.from_toml("demo", ["model.norm_placement=both", "model.qk_norm=all"])
    for name, family in FAMILIES.items():
        with pytest.raises(FamilyError, match=f"family='{name}' cannot express"):
            config_values(config.model, family)


def test_our_own_models_leave_as_llama(tmp_path: Path) -> None:
    from capibara.config import ModularModelConfig

    config = ModularModelConfig.from_toml(
        "demo", ["num_layers=2", "embed_dim=32", "mlp_dim=40", "model.head_dim=8"]
    )
    model = ModularCapibaraModel(config)
    model.save_pretrained(tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLM"]
    again = ModularCapibaraModel.from_pretrained(tmp_path / "out")
    text = np.arange(12)[None] + 60
    np.testing.assert_array_equal(model(text), again(text))


def test_files_of_a_given_size(tmp_path: Path, folder: Path) -> None:
    from capibara.families import save_folder

    model = ModularCapibaraModel.from_pretrained(folder)
    save_folder(model, model.params, tmp_path / "out", source=model.pretrained, most_bytes=20_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    again = ModularCapibaraModel.from_pretrained(tmp_path / "out")
    np.testing.assert_array_equal(model(np.arange(9)[None]), again(np.arange(9)[None]))
    # Another model in the same place leaves nothing of this one, and nothing else is touched.
    (tmp_path / "out" / "model-card.md").write_text("mine")
    model.save_pretrained(tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "model-card.md"}


def test_a_dtype_can_be_chosen(folder: Path, tmp_path: Path) -> None:
    model = ModularCapibaraModel.from_pretrained(folder, dtype="bfloat16")
    assert str(model.params["embedding"]["weight"].dtype) == "bfloat16"
    model.pretrained = None
    model.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with pytest.raises(FamilyError, match="dtype='int4'"):
        model.save_pretrained(tmp_path / "other", dtype="int4")
    assert not (tmp_path / "other").exists()


def test_nothing_is_drawn_for_a_model_that_was_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModularCapibaraModel.from_pretrained(folder)
    monkeypatch.setattr(model, "init", lambda seed: pytest.fail("parameters were drawn"))
    assert model.state == {}
    assert model(np.arange(5)[None]).shape == (1, 5, 61)

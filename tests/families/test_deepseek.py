"""DeepSeek's folders as they are published: eight-bit blocks, further layers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from published import CONFIGS, draw, model_type, write_folder
from quantized_folders import FACTS, blocks_folder
from safetensors.numpy import load_file, save_file

from capibara.cli._models import start_from
from capibara.core import ModularCapibaraModel
from capibara.data.tokenizer_file import byte_tokenizer_files
from capibara.families import FamilyError, open_tensors, read_config


def test_eight_bit_blocks_are_decoded(tmp_path: Path) -> None:
    decoded = blocks_folder(tmp_path / "model")
    model = ModularCapibaraModel.from_pretrained(tmp_path / "model", dtype="float32")
    # The same from a folder of the decoded numbers, without the further layer.
    plain = {name: values for name, values in decoded.items() if ".layers.3." not in name}
    write_folder(tmp_path / "plain", {**FACTS["config"], "num_nextn_predict_layers": 0}, {})
    save_file(plain, tmp_path / "plain" / "model.safetensors")
    want = ModularCapibaraModel.from_pretrained(tmp_path / "plain")
    jax.tree.map(np.testing.assert_array_equal, model.params, want.params)

    notes = "; ".join(model.pretrained.notes)
    assert "8-bit floats in blocks (fp8)" in notes
    assert f"left out: {sum('.layers.3.' in name for name in decoded)} tensors" in notes
    assert "(layers 3)" in notes
    # It leaves in the dtype that its config.json names, and the bias as it came.
    model.save_pretrained(tmp_path / "again")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == plain.keys()
    for name, values in written.items():
        kind = np.float32 if name.endswith("_bias") else ml_dtypes.bfloat16
        np.testing.assert_array_equal(values, plain[name].astype(kind), err_msg=name)
    told = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "quantization_config" not in told
    assert told["num_nextn_predict_layers"] == 0


def test_further_layers_are_those_that_the_config_counts(tmp_path: Path) -> None:
    def said(count: int | None, **changes: Any) -> Path:
        told = {**config, "num_nextn_predict_layers": count, **changes}
        told = {key: value for key, value in told.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(told))
        return tmp_path

    blocks_folder(tmp_path, more=2)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "(layers 3, 4)" in ModularCapibaraModel.from_pretrained(said(2)).pretrained.notes[-1]
    for count, layer in ((1, 4), (0, 3), (None, 3)):
        with pytest.raises(FamilyError, match=rf"no place for the tensor model\.layers\.{layer}\."):
            ModularCapibaraModel.from_pretrained(said(count))
    # A layer of the model that the settings do not have predicts nothing further ahead.
    with pytest.raises(FamilyError, match=r"no place for the tensor model\.layers\.2\."):
        ModularCapibaraModel.from_pretrained(said(2), overrides={"model.num_layers": 2})
    with pytest.raises(FamilyError, match=r"no place for the tensor model\.layers\.2\."):
        ModularCapibaraModel.from_pretrained(said(2, num_hidden_layers=2, num_nextn_predict_layers=0))


def test_a_run_that_goes_on_records_no_further_layers(tmp_path: Path) -> None:
    blocks_folder(tmp_path)
    for name, content in byte_tokenizer_files().items():
        (tmp_path / name).write_bytes(content)
    config, _, origin = start_from(str(tmp_path), [])
    origin.load(ModularCapibaraModel(config))
    assert origin.record()["config"]["num_nextn_predict_layers"] == 0


def test_rows_are_decoded_by_themselves(tmp_path: Path) -> None:
    decoded = blocks_folder(tmp_path, 0)
    _, source = read_config(tmp_path)
    with open_tensors(tmp_path, source) as files:
        for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.kv_b_proj.weight"):
            rows, width = decoded[name].shape
            for first, last in ((0, rows), (0, 1), (15, 17), (rows - 3, rows)):
                bits = files.tensors[name][0].numbers(name)[first * width : last * width]
                np.testing.assert_array_equal(
                    np.asarray(bits).view(np.float32).reshape(-1, width), decoded[name][first:last]
                )


MATRIX = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "config", "expected"),
    [
        ({MATRIX + "_scale_inv": None}, {}, f"{MATRIX}: has no scales"),
        ({MATRIX + "_scale_inv": np.ones((2, 3), np.float32)}, {}, r"is F32 \(2, 3\), expected F32 \(2, 4\)"),
        ({MATRIX + "_scale_inv": np.ones((2, 4), np.float16)}, {}, "is F16"),
        ({}, {"fmt": "e5m2"}, "quantization_config.fmt: got 'e5m2', expected 'e4m3'"),
        ({}, {"weight_block_size": [0, 12]}, "weight_block_size: got .*expected two sizes"),
        ({}, {"weight_block_size": None}, "weight_block_size: got None"),
        ({}, {"scale_fmt": "ue8m0"}, "scale_fmt: got 'ue8m0'"),
        ({"model.layers.2.eh_proj.weight": np.ones((2, 2), np.float32)}, {}, "no place for the tensor"),
    ],
)
def test_damaged_blocks_are_refused(tensors: Any, config: Any, expected: str, tmp_path: Path) -> None:
    blocks_folder(tmp_path, changes=tensors)
    told = json.loads((tmp_path / "config.json").read_text())
    told["quantization_config"] |= config
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(FamilyError, match=expected):
        ModularCapibaraModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob: got True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method: got 'noaux_tc'"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func: got 'sigmoid'"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq: got 2"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads: got 2"),
        ("deepseek_v2", {"kv_lora_rank": None}, "kv_lora_rank: got None"),
        ("deepseek_v2", {"topk_group": 5}, "at most groups = 4"),
        ("deepseek_v3", {"n_group": 3}, "divisor of count = 8"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func: got 'softmax'"),
        ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1.0}}, "mscale_all_dim"),
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1.0}}, "mscale"),
    ],
)
def test_what_is_not_done_is_refused_by_its_name(
    name: str, changes: Any, expected: str, tmp_path: Path
) -> None:
    config = {"model_type": model_type(name), **CONFIGS[name], **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FamilyError, match=expected):
        read_config(tmp_path)


def test_the_bias_for_choosing_keeps_its_bits(tmp_path: Path) -> None:
    shapes = {name: tuple(shape) for name, shape in FACTS["shapes"].items()}
    folder = write_folder(tmp_path / "model", FACTS["config"], shapes)
    model = ModularCapibaraModel.from_pretrained(folder, dtype="bfloat16")
    assert model.params["blocks"]["mlp"]["router"].dtype == "bfloat16"
    assert model.params["blocks"]["mlp"]["router_bias"].dtype == "float32"
    model.save_pretrained(tmp_path / "again", dtype="float32")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written[name].tobytes() == draw(name, shapes[name]).tobytes()

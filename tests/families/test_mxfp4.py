"""Matrices in MXFP4: against the format's definition and transformers, as a folder, and damaged ones."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from mxfp4_folder import CONFIG, QUANTIZED, numbers, random_blocks, write_mxfp4
from published import draw, tokens
from safetensors.numpy import load_file, save_file
from torch_oracle import HAS_TORCH, torch

from capibara.core import ModularCapibaraModel
from capibara.families import FamilyError, load_params, open_tensors, read_config
from capibara.families.loading import placed_tensors
from capibara.families.mxfp4 import decode


def test_every_code_and_scale_is_what_the_format_says() -> None:
    blocks, scales = random_blocks(2, 40, 4, low=0, high=255)
    found = decode(blocks, scales).view(jnp.bfloat16).astype(np.float64)
    want = numbers(blocks, scales)
    np.testing.assert_array_equal(found, np.where(np.abs(want) >= 2.0**128, np.copysign(np.inf, want), want))
    assert np.isnan(decode(blocks[:1, :1], np.full((1, 1, 4), 255, np.uint8)).view(jnp.bfloat16)).all()


@pytest.mark.skipif(not HAS_TORCH, reason="without PyTorch there are no models of transformers")
def test_decoded_as_transformers_does() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = random_blocks(3, 20, 4, low=1, high=250)
    want = mxfp4.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    found = decode(blocks, scales).swapaxes(1, 2).view(np.int16)
    np.testing.assert_array_equal(found, want.view(torch.int16).numpy())


def test_a_folder_is_read_and_leaves_in_bfloat16(tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "packed", packed=True)
    plain = write_mxfp4(tmp_path / "plain", packed=False)
    model = ModularCapibaraModel.from_pretrained(tmp_path / "packed")
    assert "MXFP4" in model.pretrained.notes[0]
    model.save_pretrained(tmp_path / "again")
    written = load_file(tmp_path / "again" / "model.safetensors")
    assert written.keys() == plain.keys()
    assert all(written[name].tobytes() == np.ascontiguousarray(x).tobytes() for name, x in plain.items())
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())

    given = [ModularCapibaraModel.from_pretrained(tmp_path / n, dtype="float32") for n in ("packed", "plain")]
    text = tokens(rows=1, length=8)
    np.testing.assert_array_equal(given[0](text), given[1](text))


@pytest.mark.slow
def test_matrices_are_decoded_one_at_a_time(tmp_path: Path) -> None:
    config = CONFIG | {"hidden_size": 512, "intermediate_size": 512, "num_local_experts": 16}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZED}))
    settings, source = read_config(tmp_path)
    model, tensors = ModularCapibaraModel(settings), {}
    wanted = placed_tensors(source.family, model)
    for one in wanted:
        if one.name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = random_blocks(one.shape[0], one.shape[2], one.shape[1] // 32)
            tensors |= {f"{one.name}_blocks": blocks, f"{one.name}_scales": scales}
        else:
            tensors[one.name] = draw(one.name, one.shape).astype(jnp.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    with open_tensors(tmp_path, source) as files:
        load_params(files, source.family, model)  # what is compiled and cached is no part of it
        tracemalloc.start()
        load_params(files, source.family, model)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1.2 * 2 * max(int(np.prod(one.shape)) for one in wanted)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t, n: t.pop(f"{n}_scales"), "blocks and scales are"),
        (lambda t, n: t.update({f"{n}_scales": t[f"{n}_scales"][:, :-1].copy()}), "blocks and scales are"),
        (lambda t, n: t.update({f"{n}_blocks": t[f"{n}_blocks"].view(np.int8)}), "I8"),
        (lambda t, n: t.update({n: t[f"{n}_scales"]}), "has .*down_proj and .*down_proj_blocks"),
        (
            lambda t, n: t.update(
                {
                    f"{n}_blocks": t[f"{n}_blocks"][:, :-1].copy(),
                    f"{n}_scales": t[f"{n}_scales"][:, :-1].copy(),
                }
            ),
            "has the shape",
        ),
    ],
)
def test_damaged_folders_are_refused(tmp_path: Path, change: Any, words: str) -> None:
    tensors = write_mxfp4(tmp_path / "packed", packed=True)
    change(tensors, "model.layers.1.mlp.experts.down_proj")
    save_file(
        {name: np.ascontiguousarray(x) for name, x in tensors.items()}, tmp_path / "packed/model.safetensors"
    )
    with pytest.raises(FamilyError, match=words):
        ModularCapibaraModel.from_pretrained(tmp_path / "packed")


def test_other_methods_are_refused(tmp_path: Path) -> None:
    for method in ({"quant_method": "gptq"}, {**QUANTIZED, "bits": 3}, "mxfp4"):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": method}))
        with pytest.raises(FamilyError, match="quantization_config"):
            read_config(tmp_path)

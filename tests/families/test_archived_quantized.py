"""A folder of quantized weights, compressed: it is read as the folder is, by every way to read a model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from mxfp4_folder import write_mxfp4
from published import write_folder
from quantized_folders import CONFIG, blocks_folder, shapes
from safetensors.numpy import load_file, save_file

from capibara.cli import main
from capibara.core import ModularCapibaraModel
from capibara.data.tokenizer_file import byte_tokenizer_files
from capibara.families import FamilyError, open_tensors, read_config

KINDS = ["int4", "int4, zero points", "int4, groups in another order", "w8a8", "mxfp4", "fp8"]


def compressed(source: Path) -> Path:
    target = source.with_name(f"{source.name}-archives")
    assert main(["compress", str(source), str(target), "--json"]) == 0
    assert not list(target.glob("*.safetensors"))
    return target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("quantized")
    write_mxfp4(place / "mxfp4", packed=True)
    blocks_folder(place / "fp8")
    plain = write_folder(place / "plain", CONFIG | {"vocab_size": 256}, shapes() | {
        "model.embed_tokens.weight": (256, 64), "lm_head.weight": (256, 64),
    })  # fmt: skip
    for name, content in byte_tokenizer_files().items():
        (plain / name).write_bytes(content)
    model = ModularCapibaraModel.from_pretrained(plain)
    for kind in KINDS[:4]:
        quantize, _, more = kind.partition(", ")
        model.save_pretrained(place / kind, quantize=quantize, asymmetric=more == "zero points")
    file, name = place / KINDS[2] / "model.safetensors", "model.layers.0.mlp.down_proj.weight_g_idx"
    save_file(load_file(file) | {name: np.arange(128, dtype=np.int32) % 2}, file)
    return {kind: place / kind for kind in KINDS}


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_read_as_the_folder_is(kind: str, folders: dict[str, Path]) -> None:
    archives = compressed(folders[kind])
    want, found = (ModularCapibaraModel.from_pretrained(one) for one in (folders[kind], archives))
    jax.tree.map(np.testing.assert_array_equal, found.params, want.params)
    assert found.pretrained is not None
    assert want.pretrained is not None
    assert found.pretrained.notes == want.pretrained.notes
    assert "decoded" in "; ".join(found.pretrained.notes)
    assert found.pretrained.dtypes == want.pretrained.dtypes


def test_its_numbers_are_those_of_the_format(tmp_path: Path) -> None:
    """NumPy decodes the matrices, as the format's definition says, from what was compressed."""
    decoded = blocks_folder(tmp_path / "fp8")
    _, source = read_config(archives := compressed(tmp_path / "fp8"))
    with open_tensors(archives, source) as files:
        for name, (holder, stored) in files.tensors.items():
            bits = np.asarray(holder.numbers(name)[0 : decoded[name].size])
            found = (
                bits.view(np.float32) if stored.form.name == "F32" else (bits.astype("<u4") << 16).view("<f4")
            )
            np.testing.assert_array_equal(found.reshape(stored.shape), decoded[name])


def test_the_verbs_take_it(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = folders["int4, zero points"]
    shutil.copytree(folder, tmp_path / "model")
    archives = compressed(tmp_path / "model")
    one = tmp_path / "model.capi"
    assert main(["compress", str(folder), str(one), "--json"]) == 0
    capsys.readouterr()
    told = []
    for source in (["--model", str(folder)], ["--model", str(archives)], ["--weights", str(one)]):
        assert (
            main(["generate", *source, "--prompt", "abc", "--length", "12", "--temperature", "0", "--json"])
            == 0
        )
        told.append(json.loads(capsys.readouterr().out)["text"])
    assert told[0] == told[1] == told[2]
    # And it comes back as it was.
    assert main(["decompress", str(archives), str(tmp_path / "back")]) == 0
    for path in folder.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("part", "array", "told"),
    [
        ("weight_scale", None, "weight_scale: is missing"),
        ("weight_shape", np.array([128, 1 << 40]), "does not fit"),
        ("weight_packed", np.zeros((128, 8), np.float32), "weight_packed: is F32"),
    ],
)
def test_parts_that_do_not_fit(
    folders: dict[str, Path], tmp_path: Path, part: str, array: np.ndarray | None, told: str
) -> None:
    shutil.copytree(folders["int4"], tmp_path / "model")
    tensors = load_file(file := tmp_path / "model" / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{part}"
    save_file(
        {**{k: v for k, v in tensors.items() if k != name}, **({} if array is None else {name: array})}, file
    )
    archives = compressed(tmp_path / "model")
    _, source = read_config(archives)
    with pytest.raises(FamilyError, match=told):
        open_tensors(archives, source)

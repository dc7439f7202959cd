"""Published models, runs, GGUF files and compressed files on the command line: each verb takes each."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published import SIZES, write_folder
from safetensors.numpy import load_file, save_file

from capibara.cli import main
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.data.tokenizer_file import byte_tokenizer_files
from capibara.families.errors import FamilyError
from capibara.families.known import FAMILIES
from capibara.families.saving import config_values

WIDE = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 256, "num_hidden_layers": 2}
CONFIG: dict[str, Any] = {**SIZES, **WIDE, "model_type": "qwen2", "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer of bytes, wide enough for the codecs."""
    block = {
        "input_layernorm.weight": (128,),
        "self_attn.q_proj.weight": (128, 128),
        "self_attn.q_proj.bias": (128,),
        "self_attn.k_proj.weight": (64, 128),
        "self_attn.k_proj.bias": (64,),
        "self_attn.v_proj.weight": (64, 128),
        "self_attn.v_proj.bias": (64,),
        "self_attn.o_proj.weight": (128, 128),
        "post_attention_layernorm.weight": (128,),
        "mlp.gate_proj.weight": (256, 128),
        "mlp.up_proj.weight": (256, 128),
        "mlp.down_proj.weight": (128, 256),
    }
    outside = {
        "model.embed_tokens.weight": (256, 128),
        "model.norm.weight": (128,),
        "lm_head.weight": (256, 128),
    }
    shapes = outside | {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    found = write_folder(tmp_path_factory.mktemp("interop") / "model", CONFIG, shapes)
    for name, content in byte_tokenizer_files().items():
        (found / name).write_bytes(content)
    return found


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def generated(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    given = ["--prompt", "Once", "--length", "6", "--temperature", "0"]
    return told(capsys, "generate", *arguments, *given)["text"]


def test_a_compressed_file_of_a_published_model_runs_quantized(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "small.capi"
    report = told(capsys, "compress", folder, small, "--strategy", "int8")
    assert 0 < report["errors"][str(small)] < 0.02
    assert small.stat().st_size < 0.4 * (folder / "model.safetensors").stat().st_size
    assert generated(capsys, "--model", folder, "--weights", small, "--quantized")
    listed = told(capsys, "inspect", small)
    assert {entry["codec"] for entry in listed["tensors"]} >= {"int8", "lossless"}
    assert "capibara.config" in listed["metadata"]
    assert not any(key.startswith("capibara.tokenizer") for key in listed["metadata"])


@pytest.mark.slow  # five programs are compiled
def test_a_compressed_file_of_a_published_model_is_a_whole_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, small = tmp_path / "whole.capi", tmp_path / "small.capi"
    assert told(capsys, "compress", folder, whole)["errors"] == {str(whole): 0.0}
    assert generated(capsys, "--weights", whole) == generated(capsys, "--model", folder)
    told(capsys, "compress", folder, small, "--strategy", "int8")
    plain = generated(capsys, "--weights", small)
    assert generated(capsys, "--weights", small, "--quantized") == plain
    assert generated(capsys, "--model", folder, "--weights", small, "--quantized") == plain
    # And leaves again, as the family that it came from.
    out = told(capsys, "export", whole, tmp_path / "out")
    assert out["family"] == "qwen2"
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert {n: a.tobytes() for n, a in before.items()} == {n: a.tobytes() for n, a in after.items()}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_codes_of_archives_leave_as_they_are(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compress", str(folder), str(tmp_path / "archives"), "--strategy", "int4"]) == 0
    out = told(capsys, "export", tmp_path / "archives", tmp_path / "out", "--quantize", "int4")
    assert out["notes"] == ["14 matrices kept their existing codes, 0 were quantized"]
    from capibara.compress import Archive

    name = "model.layers.1.mlp.down_proj.weight"
    with Archive(tmp_path / "archives" / "model.capi") as archive:
        expected = archive.read(name).view(np.float32)
    found = ModularCapibaraModel.from_pretrained(tmp_path / "out").params["blocks"]["mlp"]["down"]["weight"][
        1
    ]
    np.testing.assert_allclose(np.asarray(found).T, expected, rtol=1e-6, atol=0)
    # Another layout: anew, from the decoded values.
    out = told(capsys, "export", tmp_path / "archives", tmp_path / "int8", "--quantize", "int8")
    assert out["notes"] == ["14 matrices were quantized"]
    # Weights that are read from safetensors have none of the codes of archives beside them.
    name = "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {name: -tensors[name]}, tmp_path / "archives" / "model.safetensors")
    out = told(capsys, "export", tmp_path / "archives", tmp_path / "other", "--quantize", "int4")
    assert out["notes"] == ["14 matrices were quantized"]
    other = ModularCapibaraModel.from_pretrained(tmp_path / "other").params["blocks"]["mlp"]["down"]["weight"]
    assert np.corrcoef(np.ravel(other[1]), -np.ravel(tensors[name].T))[0, 1] > 0.9


def test_gguf_on_every_verb(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, run = tmp_path / "new folder" / "model.gguf", tmp_path / "run"
    out = told(capsys, "export", folder, path, "--quantize", "q8_0")
    assert (out["format"], out["family"], out["quantize"]) == ("gguf", "qwen2", "q8_0")
    assert told(capsys, "import", path, run, "--dtype", "float32")["family"] == "qwen2"
    text = generated(capsys, "--checkpoint", run)
    facts = told(capsys, "inspect", path)
    assert facts["quantization"] == "Q8_0"
    assert facts["tokenizer"]["tokens"] == 256
    assert facts["notes"] == ["its weights were quantized (Q8_0) and are decoded"]
    assert told(capsys, "inspect", run)["stored"] == {"float32": facts["parameters"]}
    told(capsys, "compress", run, tmp_path / "run.capi")
    assert generated(capsys, "--weights", tmp_path / "run.capi") == text
    assert main(["compress", str(path), str(tmp_path / "folder")]) == 2
    assert "expected a name that ends with .capi" in capsys.readouterr().err


def test_inspect_tells_what_a_folder_is(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = told(capsys, "inspect", folder)
    tensors = load_file(folder / "model.safetensors")
    assert facts["family"] == "qwen2"
    assert (
        facts["parameters"] == sum(array.size for array in tensors.values()) == sum(facts["parts"].values())
    )
    assert facts["stored"] == {"F32": facts["parameters"]}
    assert facts["bytes"] == (folder / "model.safetensors").stat().st_size
    assert facts["parts"]["mlp"] == 2 * 3 * 256 * 128
    assert facts["quantization"] is None
    assert facts["tokenizer"]["chat_template"] is False
    assert main(["export", str(folder), str(tmp_path / "q"), "--quantize", "int4", "--asymmetric"]) == 0
    assert told(capsys, "inspect", tmp_path / "q")["quantization"] == (
        "compressed-tensors, 4 bits, groups of 128, asymmetric"
    )
    assert main(["inspect", str(folder)]) == 0
    lines = capsys.readouterr().out
    assert "qwen2" in lines
    assert "tokenizer: tokenizer.json, 256 tokens, no chat template" in lines


def test_errors_name_the_argument(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["export", folder, tmp_path / "a", "--quantize", "int5"], "quantize: got 'int5'"),
        (
            ["export", folder, tmp_path / "a.gguf", "--quantize", "int4"],
            "quantize: got 'int4' for format='gguf'",
        ),
        (
            ["export", folder, tmp_path / "a", "--adapter", "--quantize", "int4"],
            "--quantize cannot be combined",
        ),
        (["compress", folder, tmp_path / "a.capi", "--strategy", "uniform"], "'uniform' needs a ratio"),
        (["compress", folder, tmp_path / "a.capi", "--resume"], "--resume"),
        (["inspect", tmp_path], "no *.capi file"),
        (["generate", "--weights", tmp_path / "none.capi"], "none.capi"),
    ):
        assert main([*map(str, arguments)]) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "text", "told"),
    [
        ("capibara.config", "[[[", "not TOML"),
        ("capibara.config", "[model]\nnum_layers = -1", "num_layers"),
        ("capibara.pretrained", "{", "unknown form"),
        ("capibara.pretrained", "[]", "known form"),
        ("capibara.tokenizer.tokenizer.json", "!", "tokenizer.json is damaged"),
        ("capibara.tokenizer.tokenizer.json", "QUJD", "tokenizer.json is damaged"),
    ],
)
def test_what_a_file_carries_is_checked(
    folder: Path, tmp_path: Path, key: str, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from capibara.compress.writing import change_metadata

    made = folder.parent / "made.capi"
    if not made.exists():
        assert main(["compress", str(folder), str(made)]) == 0
    shutil.copy(made, tmp_path / "a.capi")
    change_metadata(tmp_path / "a.capi", {key: text})
    assert main(["generate", "--weights", str(tmp_path / "a.capi"), "--prompt", "a"]) == 2
    assert told in capsys.readouterr().err


def test_inspect_tells_only_sizes_that_a_model_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ModularModelConfig().replace(
        model={
            "vocab_size": 256,
            "embed_dim": 32,
            "num_layers": 1,
            "pattern": ("ssm",),
            "mlp": "none",
            "positions": "none",
            "ssm": {"state_dim": 8},
        }
    )
    ModularCapibaraModel(config).save_pretrained(tmp_path / "states")
    found = told(capsys, "inspect", tmp_path / "states")["sizes"]
    assert found["state_dim"] == 8
    assert not any(found[name] for name in ("heads", "kv_heads", "head_dim", "mlp_dim"))


def test_messages_name_what_was_given(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(folder), str(tmp_path / "x.gguf"), "--quantize", "int4"]) == 2
    assert "expected one of f32, f16, q4_0, q8_0, bf16." in " ".join(capsys.readouterr().err.split("\n"))
    assert main(["import", str(folder)]) == 2
    assert "are required: RUN. " in capsys.readouterr().err
    missing = tmp_path / "missing" / "model.capi"
    assert main(["compress", str(folder), str(missing)]) == 2
    assert f"{missing}: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "told_as"),
    [
        (OSError(28, "No space left on device"), "OUT: No space left on device. Remedy: a place"),
        (OSError("8192 requested and 4656 written"), "could not be written whole (8192 requested"),
    ],
)
def test_a_full_disk_is_told_without_numbers_of_errors(
    error: OSError,
    told_as: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("capibara.families.save_model", full)
    assert main(["export", str(folder), str(tmp_path / "out")]) == 2
    assert told_as in " ".join(capsys.readouterr().err.split("\n"))


def refusal(model: Any, family: Any) -> str | None:
    """The error of a family that cannot express a model."""
    try:
        config_values(model, family)
    except FamilyError as error:
        return str(error)
    return None


@pytest.mark.parametrize("pattern", [("ssm",), ("attention", "ssm"), ("vq", "attention"), ("local",)])
@pytest.mark.parametrize("heads", [4, 6])
def test_a_family_refuses_blocks_that_it_lacks_by_name(pattern: tuple[str, ...], heads: int) -> None:
    settings = {"pattern": pattern, "window": 8 if "local" in pattern else None, "embed_dim": 48}
    model = ModularModelConfig().replace(model={**settings, "num_heads": heads, "num_kv_heads": heads}).model
    refused = {family.name: refusal(model, family) for family in FAMILIES.values()}
    assert [name for name, told in refused.items() if told is not None and name not in told] == []
    # Those of which every layer may have a window.
    taken = {name for name, told in refused.items() if told is None}
    assert taken == ({"mistral", "phi3"} if pattern == ("local",) else set())

"""``capibara import``, ``export`` and ``plan --model``: published folders on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from published import CONFIGS, model_type, write_folder
from safetensors.numpy import load_file
from transformers_oracle import recorded_facts

from capibara.cli import main
from capibara.cli._models import start_from
from capibara.core import ModularCapibaraModel
from capibara.families import Pretrained
from capibara.serve import Embedder, find_checkpoint, load_model

NAME = "qwen3, tied, one key head"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    facts = recorded_facts()[NAME]
    return write_folder(tmp_path / "model", facts["config"], facts["shapes"])


def test_a_folder_becomes_a_run_and_a_folder_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    assert main(["import", str(folder), run, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["family"] == "qwen3"
    loaded = load_model(find_checkpoint(run))
    text = np.arange(12)[None]
    expected = ModularCapibaraModel.from_pretrained(folder)(text)
    np.testing.assert_allclose(loaded.model.apply(loaded.params, text), expected, rtol=0, atol=1e-4)

    assert main(["export", run, out]) == 0
    assert f"qwen3, float32: {out}" in capsys.readouterr().out
    before, after = (load_file(Path(path) / "model.safetensors") for path in (folder, out))
    assert {n: a.tobytes() for n, a in before.items()} == {n: a.tobytes() for n, a in after.items()}
    assert json.loads((Path(out) / "config.json").read_text())["model_type"] == "qwen3"

    assert main(["import", str(folder), run]) == 2
    assert "has a checkpoint already" in capsys.readouterr().err
    assert main(["export", run, out, "--family", "llama"]) == 2
    assert "family='llama' cannot express qk_norm='head'" in capsys.readouterr().err
    # Its texts are not bytes.
    assert main(["generate", "--checkpoint", run, "--prompt", "a"]) == 2
    assert "tokenizer" in capsys.readouterr().err


def test_a_model_that_is_trained_further_keeps_how_it_embeds(folder: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    made.save(str(folder / "tokenizer.json"))
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "max"}))
    config, tokenizer, origin = start_from(str(folder), [])
    model = ModularCapibaraModel(config)
    origin.load(model)
    model.tokenizer_files = tokenizer.files
    model.pretrained = Pretrained.from_json(origin.record(), "record")
    assert set(model.pretrained.embedding) == {"modules.json", "1_Pooling/config.json"}
    assert Embedder.of(model).pooling == "max"


def test_errors_name_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", str(tmp_path / "none"), str(tmp_path / "run")]) == 2
    assert "config.json: No such file" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


def test_a_plan_needs_the_config_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": model_type(NAME), **CONFIGS[NAME]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    lines = ["plan", "--model", str(tmp_path), "--topology", "v4:2x2x1", "--no-compile", "train.batch_size=8"]
    assert main(lines) == 0
    assert "3 × attention" in capsys.readouterr().out
    asked = ["plan", "--model", str(tmp_path), "--topology", "v4:2x2x1", "--no-compile", "--json"]
    assert main([*asked, "train.batch_size=8"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is True
    assert main([*asked, "--config", "production/tpu_v4"]) == 2
    assert "--config cannot be combined with --model" in capsys.readouterr().err

"""``capibara generate --weights``: the parameters of a compressed file write what the model writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_model import core_with_tiny_model
from tiny_run import TEXT, TINY

import capibara.measure
from capibara.cli import main
from capibara.compress import CompressionProfile, ModelCompressionAPI
from capibara.compress.errors import CompressError
from capibara.config import ModularModelConfig
from capibara.serve import Generator, find_checkpoint, load_compressed, load_model

LOSSLESS = ModelCompressionAPI(CompressionProfile(mode="lossless"))
SIZES = ["embed_dim=32", "num_layers=2", "num_heads=2", "num_kv_heads=1"]


def test_a_run_with_compressed_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "capibara.core", core_with_tiny_model())
    monkeypatch.setattr(capibara.measure, "matmul_rate", lambda dtype="float32": 1e11)
    (tmp_path / "text.txt").write_text(TEXT)
    run = tmp_path / "run"
    assert main(["train", str(tmp_path / "text.txt"), *TINY, "--directory", str(run)]) == 0
    loaded = load_model(find_checkpoint(run))
    weights = LOSSLESS.compress(loaded.params).save(tmp_path / "model.capi")
    capsys.readouterr()
    asked = ["generate", "--prompt", "A", "--length", "20", "--temperature", "0", "--json"]
    found = []
    for extra in ([], ["--weights", str(weights)]):
        assert main([*asked, "--checkpoint", str(run), *extra]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["text"] == found[1]["text"]
    assert [f["weights"] for f in found] == [None, str(weights)]
    assert main([*asked, "--weights", str(weights)]) == 2
    assert f"there is no {tmp_path / 'config.toml'}" in capsys.readouterr().err
    with pytest.raises(CompressError, match="the model has more than parameters"):
        load_compressed(weights, loaded.model.config)


@pytest.mark.slow  # XLA compiles the model several times
def test_a_file_beside_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from capibara.core import ModularCapibaraModel

    config = ModularModelConfig.from_toml("demo", SIZES)
    model = ModularCapibaraModel(config)
    config.to_toml(tmp_path / "config.toml")
    path = LOSSLESS.compress(model, decode="auto").save(tmp_path / "model.capi")
    small = load_compressed(path)
    jax.tree.map(np.testing.assert_array_equal, small.params, model.params)
    expected = list(Generator(model, model.params, state=model.state).tokens(list(b"Once"), max_tokens=6))
    found = list(Generator(small.model, small.params, state=small.state).tokens(list(b"Once"), max_tokens=6))
    assert found == expected
    asked = ["generate", "--weights", str(path), "--prompt", "A", "--length", "3", "--json"]
    assert main(asked) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["checkpoint"], told["tokens"]) == (None, 3)
    other = LOSSLESS.compress({"w": np.ones((4, 4), np.float32)})
    with pytest.raises(CompressError, match=r"missing \['blocks"):
        load_compressed(other.path, config)
    wide: Any = ModularModelConfig.from_toml("demo", [*SIZES, "embed_dim=64"])
    with pytest.raises(CompressError, match=r"and float32 \("):
        load_compressed(path, wide)

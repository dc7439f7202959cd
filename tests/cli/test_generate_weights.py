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


def _bytes(tree: Any) -> int:
    return sum(int(leaf.nbytes) for leaf in jax.tree_util.tree_leaves(tree))


@pytest.mark.parametrize("strategy", [pytest.param("int8", marks=pytest.mark.slow), "nf4"])
def test_parameters_that_stay_in_their_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: Any
) -> None:
    from capibara.core import ModularCapibaraModel

    config = ModularModelConfig.from_toml(
        "demo", ["embed_dim=128", "num_layers=2", "num_heads=2", *SIZES[3:]]
    )
    model = ModularCapibaraModel(config)
    config.to_toml(tmp_path / "config.toml")
    api = ModelCompressionAPI(CompressionProfile(strategy=strategy))
    path = api.compress(model, decode="auto").save(tmp_path / "model.capi")
    plain, coded = load_compressed(path), load_compressed(path, decode=False)
    assert _bytes(coded.params) < 1.2 * path.stat().st_size < 0.4 * _bytes(plain.params)
    written = {}
    for loaded in (plain, coded):
        generator = Generator(loaded.model, loaded.params, state=loaded.state)
        written[loaded is coded] = list(generator.tokens(list(b"Once"), max_tokens=12))
    assert written[True] == written[False]
    assert generator.decoded == {}  # of the last one: every product and lookup was in codes
    asked = [
        "generate",
        "--weights",
        str(path),
        "--prompt",
        "Once",
        "--length",
        "8",
        "--temperature",
        "0",
        "--json",
    ]
    told = []
    for extra in ([], ["--quantized"]):
        assert main([*asked, *extra]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0]["text"] == told[1]["text"]
    assert [t["quantized"] for t in told] == [False, True]


def test_codes_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from capibara.core import ModularCapibaraModel

    config = ModularModelConfig.from_toml("demo", SIZES)
    model = ModularCapibaraModel(config)
    path = LOSSLESS.compress(model, decode="auto").save(tmp_path / "model.capi")
    with pytest.raises(CompressError, match=r"decode: got False, but no weight .*strategy='int8'"):
        load_compressed(path, config, decode=False)
    with pytest.raises(CompressError, match="decode: got 'codes', expected True, False or 'auto'"):
        load_compressed(path, config, decode="codes")
    same = load_compressed(path, config, decode="auto")
    jax.tree.map(np.testing.assert_array_equal, same.params, model.params)
    config.to_toml(tmp_path / "config.toml")
    assert main(["generate", "--weights", str(path), "--quantized"]) == 2
    told = capsys.readouterr().err
    assert (
        f"--quantized: no parameter of {path} is stored with int8, int4 or nf4. Remedy: leave it out" in told
    )
    assert main(["generate", "--weights", str(tmp_path / "none.capi"), "--quantized"]) == 2
    assert f"--weights: {tmp_path / 'none.capi'}: No such file or directory." in capsys.readouterr().err
    assert main(["generate", "--config", "demo", "--quantized"]) == 2
    assert "--quantized: a checkpoint has no codes. Remedy: --weights FILE.capi." in capsys.readouterr().err


@pytest.mark.parametrize("decode", [True, "auto"])
def test_numbers_of_another_width_are_refused(tmp_path: Path, decode: Any) -> None:
    from capibara.core import ModularCapibaraModel

    config = ModularModelConfig.from_toml("demo", SIZES)
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), ModularCapibaraModel(config).params)
    path = LOSSLESS.compress(wide).save(tmp_path / "model.capi")
    with pytest.raises(
        CompressError, match=r"is float64 .*, and float32 .* in the model\. Remedy: the settings"
    ):
        load_compressed(path, config, decode=decode)


@pytest.mark.thin(2)
@pytest.mark.parametrize("decode", [True, "auto"])
def test_two_names_of_one_tensor_are_one_array(tmp_path: Path, decode: Any) -> None:
    from capibara.core import ModularCapibaraModel

    config = ModularModelConfig.from_toml("demo", SIZES)
    params = dict(ModularCapibaraModel(config).params)
    blocks = params["blocks"] = dict(params["blocks"])
    blocks["mlp_norm"] = blocks["attention_norm"]
    path = LOSSLESS.compress(params).save(tmp_path / "model.capi")
    found = load_compressed(path, config, decode=decode).params["blocks"]
    assert found["mlp_norm"]["scale"] is found["attention_norm"]["scale"]

"""Strategies that know their width, engines by name, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from capibara.cli import main
from capibara.compress.container import Archive
from capibara.compress.errors import CompressError, FolderError
from capibara.compress.formats import get_format
from capibara.compress.model_api import ModelCompressionAPI
from capibara.compress.profile import CompressionProfile
from capibara.compress.safetensors_file import write_safetensors


def api(**fields) -> ModelCompressionAPI:
    return ModelCompressionAPI(CompressionProfile(**fields))


def tree() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(128, 96)).astype(np.float32), "b": rng.normal(size=96).astype(np.float32)}


def run(params, x):
    return x @ params["w"] + params["b"]


@pytest.mark.parametrize(
    ("strategy", "least", "most"), [("int8", 3.6, 4), ("int4", 6.2, 7.6), ("nf4", 6.2, 7.6)]
)
def test_codecs_of_fixed_width_need_no_ratio(strategy, least, most):
    profile = CompressionProfile(strategy=strategy)
    assert (profile.ratio, profile.own_width) == (None, True)
    made = ModelCompressionAPI(profile).compress(tree())
    assert least < made.stats.compression_ratio < most
    assert {t.name: t.codec for t in made.stats.tensors} == {"w": strategy, "b": "lossless"}
    assert 0 < made.stats.weight_error < 0.12
    given = CompressionProfile(strategy=strategy, target_compression_ratio=3)
    assert (given.ratio, given.own_width) == (3, False)
    assert CompressionProfile(strategy=strategy, mode="aggressive").ratio == 8
    assert api(strategy=strategy, mode="lossless").compress(tree()).stats.weight_error == 0


def test_at_their_own_width_they_take_what_data_tell():
    jnp = pytest.importorskip("jax.numpy")
    params = {name: jnp.asarray(value) for name, value in tree().items()}
    rng = np.random.default_rng(1)
    x = jnp.asarray(
        (rng.normal(size=(400, 128)) @ (rng.normal(size=(128, 128)) * 0.9 ** np.arange(128))), "float32"
    )
    blind = api(strategy="int4").compress(params)
    seeing = api(strategy="int4").compress(params, x, apply=run)
    expected = run(params, x)

    def error(made):
        return float(jnp.linalg.norm(run(made.model, x) - expected) / jnp.linalg.norm(expected))

    assert error(seeing) < 0.9 * error(blind)


def test_a_threshold_that_their_own_width_does_not_reach_comes_with_what_can_be_had():
    with pytest.raises(CompressError, match="cannot be had at a ratio of 6") as error:
        api(strategy="int4", preserve_accuracy_threshold=0.99).compress(tree())
    assert len(error.value.frontier) >= 2  # type: ignore[attr-defined]


def test_tuning_at_their_own_width():
    jnp = pytest.importorskip("jax.numpy")
    params = {name: jnp.asarray(value) for name, value in tree().items()}
    x = jnp.ones((4, 128))
    made = api(strategy="int8").compress_with_fine_tuning(params, x, apply=run, steps=1)
    assert {t.codec for t in made.stats.tensors if t.name == "w"} == {"int8"}


@pytest.mark.parametrize("labels", [[0, 96], [-1, 3], [-100, 3]])
def test_classes_that_the_outputs_do_not_have(labels):
    with pytest.raises(CompressError, match=r"targets are from -?\d+ to \d+, expected classes from 0 to 95"):
        api(strategy="int8").compress(tree(), (np.ones((2, 128), np.float32), np.array(labels)), apply=run)


def test_a_folder_is_no_file_to_save_to(tmp_path):
    made = api(strategy="int8").compress(tree())
    with pytest.raises(
        FolderError, match=r"is a folder, expected a file to write. Remedy: .*model\.capi"
    ) as error:
        made.save(tmp_path)
    assert isinstance(error.value, CompressError | IsADirectoryError)
    assert list(tmp_path.iterdir()) == []


def test_the_engine_jax_from_the_command_line(tmp_path, capsys):
    pytest.importorskip("jax")
    w = tree()["w"][:8]
    source = tmp_path / "m.safetensors"
    write_safetensors(source, {"w": (get_format("F32"), w.shape)}, lambda _: w.reshape(-1).view(np.uint32))
    made = []
    for strategy in ("auto", "jax"):
        target = tmp_path / f"{strategy}.capi"
        assert main(["compress", str(source), str(target), "--strategy", strategy]) == 0
        with Archive(target) as archive:
            made.append([(e.codec, [c.crc32 for c in e.chunks]) for e in archive])
    assert made[0] == made[1]
    assert main(["compress", str(source), str(tmp_path / "x"), "--strategy", "jxa"]) == 2
    assert "Did you mean 'jax'" in capsys.readouterr().err

"""Parameters in safetensors files: what is written comes back, and what does not fit is refused."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import compose as ml
from capibara.errors import MissingExtraError

load_file = pytest.importorskip("safetensors.numpy").load_file


def compiled(dtype: str = "float32", size: int = 4) -> ml.CompiledModel:
    return ml.compile(ml.MLP(3, [size], 2), ml.JaxBackend(dtype=dtype), shapes={"input": [2, 3]})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_there_and_back(dtype: str, tmp_path: Path) -> None:
    model = compiled(dtype)
    params = model.randomize_params(1)
    model.save_params(tmp_path / "p.safetensors", params)
    again = model.load_params(tmp_path / "p.safetensors")
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(again), strict=True):
        assert isinstance(b, jax.Array)
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert [p.name for p in tmp_path.iterdir()] == ["p.safetensors"]


def test_names_are_dotted_and_the_format_is_told(tmp_path: Path) -> None:
    model = compiled()
    model.save_params(tmp_path / "p", model.randomize_params())
    assert set(load_file(tmp_path / "p")) == {
        "layer_0.weight",
        "layer_0.bias",
        "layer_1.weight",
        "layer_1.bias",
    }
    data = (tmp_path / "p").read_bytes()
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    assert header["__metadata__"] == {"format": "capibara.compose.params", "version": "1"}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled()
    path = tmp_path / "p"
    model.save_params(path, model.randomize_params(0))
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space"):
        model.save_params(path, model.randomize_params(1))
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def edited(path: Path, edit: Any) -> None:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda h: h.pop("layer_0.bias"), "another model: missing"),
        (lambda h: h.update({"layer_9.bias": h["layer_0.bias"]}), "unknown"),
        (lambda h: h["layer_0.bias"].update(shape=[9]), r"shape \(9,\), expected"),
        (lambda h: h["layer_0.bias"].update(shape=[-4]), "no shape"),
        (lambda h: h["layer_0.bias"].update(shape="4"), "no shape"),
        (lambda h: h["layer_0.bias"].update(dtype="I32"), "dtype I32, expected float32"),
        (lambda h: h["layer_0.bias"].update(data_offsets=[0, 10**12]), "is not a safetensors file"),
        (lambda h: h.update({"layer_0.bias": 3}), "no shape"),
        (lambda h: h["__metadata__"].update(version="2"), "version '2'"),
        (lambda h: h.pop("__metadata__"), "format is not"),
        (lambda h: h.update(__metadata__=[1]), "format is not"),
    ],
)
def test_files_that_do_not_fit(edit: Any, words: str, tmp_path: Path) -> None:
    model = compiled()
    path = tmp_path / "p"
    model.save_params(path, model.randomize_params())
    edited(path, edit)
    with pytest.raises(ml.InputError, match=words):
        model.load_params(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        struct.pack("<Q", 2**62) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 20_000) + b"[" * 20_000,
    ],
)
def test_files_that_are_no_parameters(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_bytes(data)
    with pytest.raises(ml.InputError):
        compiled().load_params(path)


def test_a_file_far_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "p"
    with path.open("wb") as file:
        file.truncate(10**9)  # a hole: takes no room
    with pytest.raises(ml.InputError, match="more than this model's parameters"):
        compiled().load_params(path)


def test_parameters_of_another_model_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ml.InputError, match=r"has shape \(3, 5\), expected \(3, 4\)"):
        compiled().save_params(tmp_path / "p", compiled(size=5).randomize_params())
    with pytest.raises(ml.InputError, match="no 'layer_0"):
        compiled().save_params(tmp_path / "p", {})
    assert not list(tmp_path.iterdir())


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        compiled().load_params(tmp_path / "nothing")


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = compiled()
    params = model.randomize_params()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    for call in (
        lambda: model.save_params(tmp_path / "p", params),
        lambda: model.load_params(tmp_path / "p"),
    ):
        with pytest.raises(MissingExtraError, match="safetensors"):
            call()


def test_loaded_parameters_lie_over_the_mesh(tmp_path: Path) -> None:
    backend = ml.JaxBackend(device_mesh=(1,))
    model = ml.compile(ml.MLP(4, [8], 2), backend, shapes={"input": [4, 4]})
    params = model.randomize_params()
    model.save_params(tmp_path / "p", params)
    again = model.load_params(tmp_path / "p")
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.sharding, b.sharding), params, again)
    x = {"input": jnp.ones((4, 4))}
    np.testing.assert_array_equal(model.evaluate(params, x)["output"], model.evaluate(again, x)["output"])

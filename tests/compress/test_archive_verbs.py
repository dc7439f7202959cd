"""The verbs of archives with folders, pictures, numbers that are none, and a signal in the middle of their work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capibara.cli import main
from capibara.compress.container import Archive
from capibara.compress.errors import CompressError
from capibara.compress.folders import find_archives
from capibara.compress.formats import get_format
from capibara.compress.safetensors_file import write_safetensors

F32 = get_format("F32")


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    forms = {n: (F32, a.shape) for n, a in arrays.items()}
    write_safetensors(path, forms, lambda n: arrays[n].reshape(-1).view(np.uint32), {"format": "pt"})


def strictly(text: str) -> Any:
    """JSON as other parsers take it."""

    def refuse(word: str) -> None:
        raise AssertionError(word)

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model's folder with two files of weights."""
    folder, rng = tmp_path / "model", np.random.default_rng(0)
    (folder / "deep").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    write(folder / "one.safetensors", {"a": rng.normal(size=(96, 64)).astype(np.float32)})
    more = {"b": rng.normal(size=(64, 80)).astype(np.float32), "c": np.ones(7, np.float32)}
    write(folder / "deep" / "two.safetensors", more)
    return folder


@pytest.fixture
def folder(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The same as archives."""
    assert main(["compress", str(source), str(tmp_path / "small")]) == 0
    capsys.readouterr()
    return tmp_path / "small"


def test_inspect_takes_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    for text in ("one.capi", "deep/two.capi", "2 archives, 3 tensors, 45.08 kB as", "96×64", "64×80"):
        assert text in out
    assert main(["inspect", str(folder), "--json"]) == 0
    told = strictly(capsys.readouterr().out)
    one, two = folder / "one.capi", folder / "deep" / "two.capi"
    assert told["files"] == {
        str(p): {"bytes": p.stat().st_size, "metadata": {"format": "pt"}} for p in (two, one)
    }
    found = {t["name"]: t for t in told["tensors"]}
    assert {n: t["file"] for n, t in found.items()} == {"a": str(one), "b": str(two), "c": str(two)}
    # What is said of a tensor is what is said of it in its file alone.
    assert main(["inspect", str(one), "--json"]) == 0
    alone = strictly(capsys.readouterr().out)
    assert alone["metadata"] == {"format": "pt"}
    assert [{"file": str(one), **t} for t in alone["tensors"]] == [found["a"]]


def test_verify_takes_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder)]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: 2 archives, 3 tensors, all as they were written" in out
    path = folder / "deep" / "two.capi"
    data = bytearray(path.read_bytes())
    with Archive(path) as archive:
        data[archive["b"].chunks[0].offset + 5] ^= 4
    path.write_bytes(data)
    assert main(["verify", str(folder)]) == 1
    out = capsys.readouterr().out
    assert f"damaged: {path}: b" in out
    assert f"{folder / 'one.capi'}: 1 tensors, all as they were written" in out
    assert f"{folder}: 2 archives, 3 tensors, 1 damaged" in out
    assert main(["verify", str(folder), "--json"]) == 1
    told = strictly(capsys.readouterr().out)
    assert told["damaged"] == 1
    found = {one["file"]: one for one in told["files"]}
    assert found[str(folder / "one.capi")] == {"file": str(folder / "one.capi"), "tensors": 1, "damaged": []}
    assert [one["tensor"] for one in found[str(path)]["damaged"]] == ["b"]
    assert str(path) in found[str(path)]["damaged"][0]["problem"]


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_a_folder_without_archives(
    verb: str, source: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, str(source)]) == 2
    err = capsys.readouterr().err
    # Without archives it may be a published model, which can be inspected.
    why = "/config.json: model_type" if verb == "inspect" else ": no *.capi file in this folder. Remedy: "
    assert f"capibara {verb}: {source}{why}" in err
    (folder / "gone").symlink_to(tmp_path / "nowhere")
    assert main([verb, str(folder)]) == 2
    assert "a link to a folder, or to nothing" in capsys.readouterr().err
    assert main([verb, str(tmp_path / "nowhere")]) == 2


def test_archives_of_a_folder(folder: Path, source: Path) -> None:
    assert find_archives(folder) == [folder / "deep" / "two.capi", folder / "one.capi"]
    assert find_archives(folder / "one.capi") == [folder / "one.capi"]
    with pytest.raises(CompressError, match=r"no \*.capi file"):
        find_archives(source)


@pytest.mark.parametrize(
    ("plot", "message"),
    [
        ("p.txt", "expected a name that ends in .png. Remedy: --plot "),
        ("nowhere/p.png", "there is no folder"),
        (".", "is a folder. Remedy"),
        ("model/one.safetensors/p.png", "there is no folder"),
    ],
)
def test_a_picture_that_cannot_be_is_refused_before_the_work(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], plot: str, message: str
) -> None:
    target = tmp_path / "out"
    assert main(["compress", str(source), str(target), "--ratio", "4", "--plot", str(tmp_path / plot)]) == 2
    assert message in capsys.readouterr().err
    assert not target.exists()


def test_a_picture_in_the_place_of_the_archive(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "p.png")
    assert main(["compress", str(source / "one.safetensors"), out, "--ratio", "4", "--plot", out]) == 2
    assert "is one of the model's own files" in capsys.readouterr().err


def test_a_picture_in_the_folder_that_is_made(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "out"
    args = ["compress", str(source), str(target), "--ratio", "4", "--plot", str(target / "p.png")]
    assert main(args) == 0
    assert (target / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_no_curve_to_draw_is_found_out_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Zeros are small without loss.
    write(tmp_path / "zeros.safetensors", {"a": np.zeros((128, 96), np.float32)})
    target, picture = tmp_path / "out.capi", tmp_path / "p.png"
    args = ["compress", str(tmp_path / "zeros.safetensors"), str(target), "--ratio", "2"]
    assert main([*args, "--plot", str(picture)]) == 2
    assert "there is no curve. Remedy" in capsys.readouterr().err
    assert not target.exists()


def test_a_picture_that_fails_comes_after_the_table(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("capibara.compress.plots.plot_rate_error", full)
    target = tmp_path / "out.capi"
    args = ["compress", str(source / "one.safetensors"), str(target), "--ratio", "4"]
    assert main([*args, "--plot", str(tmp_path / "p.png")]) == 1
    out, err = capsys.readouterr()
    assert "relative error of its weights" in out
    assert "the archives are written, but not" in err
    assert target.exists()


def test_json_of_errors_that_are_not_defined(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*_: object) -> tuple[dict[str, float], float, float]:
        return {"a": float("nan")}, float("inf"), 1.0

    monkeypatch.setattr("capibara.compress.archive_files.compare", compare)
    target = str(tmp_path / "out.capi")
    args = ["compress", str(source / "one.safetensors"), target, "--strategy", "int8", "--json"]
    assert main(args) == 0
    told = strictly(capsys.readouterr().out)
    assert told["files"][target][0]["error"] is None
    assert told["errors"] == {target: None}


STUCK = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may have it ignored
import capibara.compress.archive_files as files
from capibara.cli import main

def stay(*_):
    print("at work", flush=True)
    time.sleep(60)

if sys.argv[1] == "compress":
    add = files.add_tensors
    def add_tensors(*args):
        add(*args)
        stay()
    files.add_tensors = add_tensors
else:
    files.Archive.read_many = lambda self, names: iter(stay, None)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("verb", ["compress", "decompress"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing_behind(
    folder: Path, source: Path, tmp_path: Path, verb: str, number: signal.Signals
) -> None:
    given = source / "one.safetensors" if verb == "compress" else folder / "one.capi"
    target = tmp_path / "out" / "file"
    target.parent.mkdir()
    target.write_text("old")
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", STUCK, verb, str(given), str(target)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "at work\n"
        assert len(list(target.parent.iterdir())) == 2  # the file that is being written
        process.send_signal(number)
        code, err = process.wait(timeout=60), process.stderr.read()
    assert code == 128 + number, err
    assert err.endswith("capibara: terminated\n" if number == signal.SIGTERM else "capibara: interrupted\n")
    assert "Traceback" not in err
    assert list(target.parent.iterdir()) == [target]
    assert target.read_text() == "old"


@pytest.mark.parametrize("verb", ["inspect", "verify"])
def test_a_file_that_is_not_there_is_named(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "none.capi"
    assert main([verb, str(path)]) == 2
    assert capsys.readouterr().err == f"capibara {verb}: {path}: No such file or directory\n"

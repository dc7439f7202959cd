"""``capibara compress`` with a ratio: a folder is one budget, the table says what was lost, the picture is one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from capibara.cli import main
from capibara.compress.archive_files import compress_files, plan_compress
from capibara.compress.container import Archive
from capibara.compress.errors import CompressError
from capibara.compress.formats import get_format
from capibara.compress.safetensors_file import write_safetensors

F32 = get_format("F32")


def write(path, arrays):
    write_safetensors(
        path, {n: (F32, a.shape) for n, a in arrays.items()}, lambda n: arrays[n].reshape(-1).view(np.uint32)
    )


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    source = tmp_path / "model"
    source.mkdir()
    (source / "config.json").write_text("{}")
    write(source / "one.safetensors", {"a": rng.normal(size=(128, 96)).astype(np.float32)})
    # Of two rates within one file: easy to shrink.
    easy = (rng.normal(size=(128, 96)) * (rng.random((128, 96)) < 0.05)).astype(np.float32)
    write(source / "two.safetensors", {"b": easy, "c": np.ones(7, np.float32)})
    return source


def sizes(path):
    return sum(p.stat().st_size for p in path.rglob("*.capi"))


def test_a_folder_is_one_budget(folder, tmp_path, capsys):
    assert main(["compress", str(folder), str(tmp_path / "out"), "--ratio", "6", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    original = 4 * (2 * 128 * 96 + 7)
    assert original / sizes(tmp_path / "out") == pytest.approx(6, rel=0.02)
    ratios = [4 * 128 * 96 / size for size in told["sizes"].values()]
    assert max(ratios) > 1.3 * min(ratios)
    rows = {row["name"]: row for rows in told["files"].values() for row in rows}
    with Archive(tmp_path / "out" / "one.capi") as archive:
        back = archive.read("a").view(np.float32)
    a = np.random.default_rng(0).normal(size=(128, 96)).astype(np.float32)
    assert rows["a"]["error"] == pytest.approx(float(np.linalg.norm(back - a) / np.linalg.norm(a)), rel=1e-4)
    assert rows["c"]["error"] == 0
    assert (tmp_path / "out" / "config.json").read_text() == "{}"


def test_the_table_and_the_picture(folder, tmp_path, capsys):
    picture = tmp_path / "curve.png"
    source, target = str(folder / "one.safetensors"), str(tmp_path / "one.capi")
    args = ["compress", source, target, "--ratio", "5", "--strategy", "uniform", "--plot", str(picture)]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "error" in out
    assert "uniform" in out
    assert "relative error of its weights: 0.0" in out
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--plot", "x.png"], "--plot: nothing is lost without a ratio"),
        (["--strategy", "uniform"], "strategy: uniform without a ratio: step: got None"),
        (["--strategy", "unifrom"], "Did you mean 'uniform'"),
        (["--ratio", "1"], "ratio: got 1.0"),
        (["--ratio", "4", "--strategy", "lossless"], "lossless compression has no target ratio"),
        (["--ratio", "500"], "cannot be met"),
    ],
)
def test_what_cannot_be_asked(folder, tmp_path, capsys, more, message):
    target = tmp_path / "one.capi"
    assert main(["compress", str(folder / "one.safetensors"), str(target), *more]) == 2
    assert message in capsys.readouterr().err
    assert not target.exists()


def test_codecs_of_a_fixed_width_need_no_ratio(folder, tmp_path, capsys):
    target = tmp_path / "one.capi"
    assert (
        main(["compress", str(folder / "one.safetensors"), str(target), "--strategy", "int8", "--json"]) == 0
    )
    told = json.loads(capsys.readouterr().out)
    (row,) = told["files"][str(target)]
    assert (row["codec"], 0 < row["error"] < 0.02) == ("int8", True)


def test_progress_comes_twice_with_a_ratio(folder, tmp_path):
    seen = []
    jobs = plan_compress(folder, tmp_path / "out")
    compress_files(jobs, ratio=4, progress=lambda name, size: seen.append((name, size)))
    assert sorted(seen) == sorted(2 * [("a", 49152), ("b", 49152), ("c", 28)])
    with pytest.raises(CompressError, match="ratio: got True"):
        compress_files(jobs, ratio=True)

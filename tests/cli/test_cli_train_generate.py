"""``capibara train`` and ``capibara generate`` as a person or a script would call them."""

from __future__ import annotations

import io
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_model import core_with_tiny_model
from tiny_run import TEXT, TINY

import capibara.measure
from capibara.cli import main
from capibara.cli.train import split_items
from capibara.serve.generate import Generator


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "capibara.core", core_with_tiny_model())
    monkeypatch.setattr(capibara.measure, "matmul_rate", lambda dtype="float32": 1e11)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("cli")
    (base / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "capibara.core", core_with_tiny_model())
        patch.setattr(capibara.measure, "matmul_rate", lambda dtype="float32": 1e11)
        assert main(["train", str(base / "text.txt"), *TINY, "--directory", str(base / "run")]) == 0
    return base


def test_split_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a=b.txt").write_text("x")
    Path("steps=5").write_text("x")
    texts, settings = split_items(
        [
            "book.txt",
            "train.steps=3",
            "num_layers=2",
            "a=b.txt",
            "./steps=5",
            "steps=5",
            "-",
            "trian.steps=1",
            "x/y=z",
        ]
    )
    assert texts == ["book.txt", "a=b.txt", "./steps=5", "-", "x/y=z"]
    assert settings == ["train.steps=3", "num_layers=2", "steps=5", "trian.steps=1"]


@pytest.mark.thin(3)
@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".SVG", b"<?xml"), (".pdf", b"%PDF")])
def test_a_picture_of_a_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str, magic: bytes
) -> None:
    image = tmp_path / f"curves{suffix}"
    arguments = [
        "train",
        str(trained / "text.txt"),
        *TINY,
        "--directory",
        str(trained / "run"),
        "--plot",
        str(image),
    ]
    assert main(arguments) == 0
    assert f"drawn: {image}" in capsys.readouterr().out
    assert image.read_bytes().startswith(magic)


def test_a_picture_of_another_kind_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["train", *TINY, "--directory", str(tmp_path / "run"), "--plot", str(tmp_path / "a.txt")]) == 2
    )
    assert "expected a name that ends in .png, .svg, .pdf" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_training_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    arguments = [
        "train",
        str(tmp_path / "text.txt"),
        *TINY,
        "train.steps=6",
        "--directory",
        str(tmp_path / "run"),
    ]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for expected in (
        f"text.txt: {len(TEXT):,} bytes in 1 document",
        "a matrix multiply here reaches 100 GFLOP/s",
        "training 6 steps of ",
        " expected. Ctrl-C stops it; the same command continues",
        "step 5/6  loss ",
        " left\n",
        "tokens/s  MFU ",
        "  gradient ",
        "  rate ",
        " GiB  pass 0.",
        "step 6: validation ",
        "finished: 6 steps",
    ):
        assert expected in out
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["reason"] == "already trained"
    assert "already trained 6 steps" in captured.err
    assert main([*arguments, "--json", "--fresh"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["reason"], report["start_step"], report["step"]) == ("finished", 0, 6)
    assert report["validation_bits_per_byte"] > 0


def test_text_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    assert main(["train", "-", *TINY, "train.steps=3", "--directory", str(tmp_path)]) == 0
    assert "standard input" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.txt"], "no text at 'nothing.txt'"),
        (["trian.steps=3"], "Did you mean 'train.steps'?"),
        (["train.steps=many"], "train.steps"),
        (
            ["optimizer.warmup_steps=50", "train.steps=20"],
            "optimizer.warmup_steps=50 must be below train.steps=20",
        ),
        (["--config", "dmeo"], "demo"),
        (["--config", ""], "got '', expected the path of a TOML file"),
        (["--config", "a\0b"], "expected the path of a TOML file"),
        (["--config", "/proc/self/mem"], "cannot read the settings file '/proc/self/mem'"),
        (["--directory", ""], "checkpoint.directory"),
        (["--directory", "a\0b"], "checkpoint.directory"),
        (["a\0b"], "data.paths[0]"),
        ([""], "data.paths[0]"),
        (["/proc/self/mem"], "could not read '/proc/self/mem'"),
        (["/bin/true"], "binary file"),
        (["/dev/null"], "neither a file nor a folder"),
    ],
)
def test_bad_input(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("capibara: ")
    assert list(tmp_path.iterdir()) == []


def test_generate_streams_and_repeats(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--checkpoint", str(trained / "run"), "--prompt", "Sentence ä", "--length", "40"]
    texts = []
    for extra in ([], [], ["--seed", "1"], ["--temperature", "0"]):
        assert main([*arguments, *extra]) == 0
        texts.append(capsys.readouterr().out)
    assert all(text.startswith("Sentence ä") and text.endswith("\n") for text in texts)
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_generate_as_json_says_the_same(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: list[Any] = [
        "--prompt",
        "A",
        "--max-tokens",
        "20",
        "--top-k",
        "5",
        "--top-p",
        "0.9",
        "--seed",
        "3",
    ]
    arguments = ["generate", "--checkpoint", str(trained / "run" / "checkpoints"), *options]
    assert main(arguments) == 0
    streamed = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prompt"] + result["text"] + "\n" == streamed
    assert (result["tokens"], result["step"], result["top_k"], result["seed"]) == (20, 12, 5, 3)


def test_generate_finds_the_run_of_a_configuration(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(f'[checkpoint]\ndirectory = "{trained / "run"}"\n[generate]\nmax_tokens = 7\n')
    assert main(["generate", "--config", str(config), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--top-p", "0"], "top_p=0.0"),
        (["--top-k", "-2"], "top_k=-2"),
        (["--length", "0"], "max_tokens=0"),
        (["--seed", "-1"], "seed=-1"),
        (["--length", "many"], "invalid int value"),
    ],
)
def test_generate_refuses_values_outside_their_range(
    trained: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["generate", "--checkpoint", str(trained / "run"), *options]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_the_json_counts_what_was_generated(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Generator.tokens
    monkeypatch.setattr(Generator, "tokens", lambda *a, **k: itertools.islice(whole(*a, **k), 3))
    arguments = ["generate", "--checkpoint", str(trained / "run"), "--length", "9", "--json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", ""], "got '', expected the path of a TOML file"),
        (["--config", "a\0b"], "expected the path of a TOML file"),
        (["--config", "/proc/self/mem"], "cannot read the settings file '/proc/self/mem'"),
        (["--checkpoint", ""], "the folder of the checkpoint is empty"),
        (["--checkpoint", "a\0b"], "embedded null"),
        (["--checkpoint", "a" * 300], "File name too long"),
        (["--checkpoint", "round"], "Too many levels of symbolic links"),
        (["--checkpoint", "/proc/self/mem"], "there is no checkpoint in '/proc/self/mem'"),
    ],
)
def test_generate_refuses_paths_that_are_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "round").symlink_to("round")
    assert main(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.startswith("capibara: ")


def test_generate_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--checkpoint", str(tmp_path)]) == 2
    assert "Train first" in capsys.readouterr().err

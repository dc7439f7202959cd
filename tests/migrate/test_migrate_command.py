"""``capibara migrate``: arguments, output, exit codes."""

from __future__ import annotations

import argparse
import json

import pytest

from capibara.cli import migrate

BAD = "import jax\njax.tree_map(abs, [1])\n"
OLD = "import jax\nfrom jax.experimental.pjit import pjit\n"
GOOD = "import jax\njax.tree.map(abs, [1])\n"


def command(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    migrate.add_arguments(parser)
    return migrate.run(parser.parse_args(arguments))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "good.py").write_text(GOOD)
    (tmp_path / "old.py").write_text(OLD)
    return tmp_path


@pytest.mark.parametrize(
    ("names", "options", "code"),
    [
        (["good.py"], [], 0),
        (["good.py"], ["--fail-on", "warning"], 0),
        (["old.py"], [], 0),
        (["old.py"], ["--fail-on", "warning"], 1),
        (["bad.py"], [], 1),
        (["good.py", "bad.py"], [], 1),
        (["."], [], 1),
        (["."], ["--no-functions"], 0),
        (["old.py"], ["--no-imports", "--fail-on", "warning"], 0),
        (["missing.py"], [], 2),
        (["good.py", "missing"], [], 2),
    ],
)
def test_exit_codes(folder, names, options, code):
    assert command(*(str(folder / name) for name in names), *options) == code


def test_text_output(folder, capsys):
    command(str(folder / "bad.py"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{folder / 'bad.py'}:2:1: error: jax.tree_map was removed")
    assert lines[1].startswith("1 file checked against JAX")
    assert "\033" not in lines[0]


def test_json_output(folder, capsys):
    assert command(str(folder), "--json") == 1
    data = json.loads(capsys.readouterr().out)
    assert data["counts"]["error"] == 1
    assert data["is_compatible"] is False
    assert [issue["code"] for issue in data["issues"]] == ["removed-name", "deprecated-name"]
    assert len(data["files"]) == 3


def test_bad_input_is_told_without_traceback(folder, capsys):
    assert command(str(folder / "nothing.py")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("capibara migrate: path: there is no file or folder")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "path: got an empty one"),
        ("a\0b", "embedded null"),
        ("a" * 300, "File name too long"),
        ("round.py", "Too many levels of symbolic links"),
        ("nowhere.py", "No such file or directory"),
        ("/proc/self/mem", "cannot read '/proc/self/mem'"),
    ],
)
def test_paths_that_cannot_be_read(tmp_path, monkeypatch, capsys, path, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "round.py").symlink_to("round.py")
    (tmp_path / "nowhere.py").symlink_to("nothing")
    assert command(path) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


def test_unreadable_files_in_a_folder_are_noted_and_the_rest_is_checked(folder, capsys):
    for name, to in {"round": "round.py", "nowhere": "nothing", "memory": "/proc/self/mem"}.items():
        (folder / f"{name}.py").symlink_to(to)
    assert command(str(folder), "--json") == 1
    issues = json.loads(capsys.readouterr().out)["issues"]
    noted = {issue["path"].rpartition("/")[2] for issue in issues if issue["code"] == "not-checked"}
    assert noted == {"round.py", "nowhere.py", "memory.py"}
    assert any(issue["path"].endswith("bad.py") for issue in issues)


def test_broken_file_is_a_finding(tmp_path, capsys):
    (tmp_path / "two.py").write_text("print 'x'\n")
    assert command(str(tmp_path)) == 1
    assert "syntax-error" in capsys.readouterr().out

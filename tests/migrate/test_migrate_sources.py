"""What may be checked and how it is read: paths, text, encodings, notebooks, hostile and broken files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from capibara.errors import CapibaraError
from capibara.migrate import (
    MigrationInputError,
    MigrationInputTypeError,
    MigrationPathError,
    check_migration_compatibility,
    check_paths,
    sources,
)

BAD = "import jax\njax.tree_map(abs, [1])\n"


def codes(report) -> list[tuple[int, str]]:
    return [(issue.line, issue.code) for issue in report.issues]


def test_path_object_string_path_and_text_agree(tmp_path):
    file = tmp_path / "old.py"
    file.write_text(BAD)
    assert (
        codes(check_migration_compatibility(file))
        == codes(check_migration_compatibility(str(file)))
        == codes(check_migration_compatibility(BAD))
        == [(2, "removed-name")]
    )
    assert check_migration_compatibility(str(file)).files == (str(file),)
    assert check_migration_compatibility(BAD).files == ("<source>",)


def test_an_existing_file_of_any_name_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("script").write_text(BAD)
    assert codes(check_migration_compatibility("script")) == [(2, "removed-name")]


@pytest.mark.parametrize(
    "text", ["", "   ", "import jax", "x = 1  # see model.py", "import jax.py", "f(x).py", "\0", "a" * 5000]
)
def test_one_line_of_code_is_text(text):
    assert check_migration_compatibility(text).files == ("<source>",)


@pytest.mark.parametrize("missing", ["mi_modelo.py", "no/such/folder/x.ipynb", Path("nothing_here"), "x.PY"])
def test_missing_file(missing):
    with pytest.raises(MigrationPathError, match="there is no file") as caught:
        check_migration_compatibility(missing)
    assert isinstance(caught.value, FileNotFoundError)
    assert isinstance(caught.value, CapibaraError)


@pytest.mark.parametrize("wrong", [b"import jax", None, 3, ["a.py"]])
def test_wrong_type(wrong):
    with pytest.raises(MigrationInputTypeError, match=type(wrong).__name__) as caught:
        check_migration_compatibility(wrong)
    assert isinstance(caught.value, TypeError)


def test_folder_and_special_file(tmp_path):
    with pytest.raises(MigrationInputError, match="is a folder"):
        check_migration_compatibility(tmp_path)
    os.mkfifo(tmp_path / "pipe.py")
    with pytest.raises(MigrationInputError, match="not a regular file"):
        check_migration_compatibility(tmp_path / "pipe.py")


def test_size_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "MAX_SOURCE_BYTES", 50)
    file = tmp_path / "big.py"
    file.write_text("#" * 51)
    with pytest.raises(MigrationInputError, match="51 bytes, the limit is 50"):
        check_migration_compatibility(file)
    with pytest.raises(MigrationInputError, match="the limit is 50"):
        check_migration_compatibility("\n" * 51)
    # Found in a folder it is noted and the others are checked; named, it is refused.
    (tmp_path / "small.py").write_text(BAD)
    report = check_paths([tmp_path])
    assert codes(report) == [(1, "not-checked"), (2, "removed-name")]
    with pytest.raises(MigrationInputError):
        check_paths([tmp_path / "small.py", file])


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (BAD.encode("utf-8-sig"), [(2, "removed-name")]),
        (b"# -*- coding: latin-1 -*-\nimport jax\nx = '\xe9', jax.tree_map\n", [(3, "removed-name")]),
        (b"import jax\r\njax.tree_map\r\n", [(2, "removed-name")]),
        (b"import jax\rjax.tree_map\r", [(2, "removed-name")]),
        (b"x = 1\ny = '\xff'\n", [(2, "encoding")]),
        (b"# coding: no-such-codec\n", [(1, "encoding")]),
        (b"# coding: zlib\n", [(1, "encoding")]),
        (b"\xef\xbb\xbf# coding: latin-1\n", [(1, "encoding")]),
        (b"x = 1\0\n", [(1, "syntax-error")]),
        (b"", []),
    ],
)
def test_encodings(tmp_path, data, found):
    file = tmp_path / "file.py"
    file.write_bytes(data)
    report = check_migration_compatibility(file)
    assert codes(report) == found
    assert report.is_compatible == (not found)


def test_syntax_error_has_its_place():
    (issue,) = check_migration_compatibility("import jax\nx = (1,\n").issues
    assert (issue.line, issue.column, issue.severity, issue.code) == (2, 5, "error", "syntax-error")


def test_python_2():
    (issue,) = check_migration_compatibility("import jax\nprint 'x'\n").issues
    assert issue.code == "syntax-error"
    assert "Python 2" in issue.fix


def test_warnings_of_the_compiler_are_not_ours():
    assert check_migration_compatibility("x = '\\d'\nassert (x, 'y')\nx is 1\n").issues == ()


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "(" * 3000 + "1" + ")" * 3000 + "\n",
        "x = " + "-" * 50000 + "1\n",
        "x = " + "[" * 150 + "]" * 150 + "\n",
    ],
)
def test_deep_nesting_is_no_crash(text):
    check_migration_compatibility("import jax\n" + text)


def test_long_chains_are_checked():
    text = "import jax\n" + "x = 1" + " + 1" * 1500 + " + jax.tree_map\n"
    assert codes(check_migration_compatibility(text)) == [(2, "removed-name")]
    ladder = "import jax\n" + "if a: b\n" + "elif a: b\n" * 500 + "else: jax.tree_map\n"
    assert codes(check_migration_compatibility(ladder)) == [(503, "removed-name")]
    dots = "import jax\nx = jax" + ".a" * 2000 + "\n"
    assert codes(check_migration_compatibility(dots)) == [(2, "unknown-name")]


def test_alias_cycles_end():
    text = "import jax\na = b\nb = a\nc = c.d\na.tree_map, b.x, c.y\ndef f():\n    g = g.h\n    return g.x\n"
    assert check_migration_compatibility(text).issues == ()


def notebook(*cells: str | list[str]) -> str:
    return json.dumps(
        {
            "nbformat": 4,
            "cells": [
                {"cell_type": "markdown", "source": "jax.tree_map"},
                *({"cell_type": "code", "source": cell} for cell in cells),
            ],
        }
    )


def test_notebook(tmp_path):
    file = tmp_path / "demo.ipynb"
    file.write_text(
        notebook(
            ["%matplotlib inline\n", "!pip install jax\n", "import jax"],
            "%%bash\nif jax.tree_map",
            "%%time\nx = await y\njax.tree_map(\n    a\n    % b)",
            "  # indented\n  y?\n  jax.tree_leaves",
            "timeit jax.jit(f)",
            "def f(:",
        )
    )
    report = check_migration_compatibility(file)
    assert [(issue.cell, issue.line, issue.code) for issue in report.issues] == [
        (3, 3, "removed-name"),
        (4, 3, "removed-name"),
        (5, 1, "not-checked"),
        (6, 1, "not-checked"),
    ]
    assert "cell 3, line 3, column 1" in str(report.issues[0])
    assert json.loads(report.to_json())["issues"][0]["cell"] == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"cells": [{}]}', '{"cells": 3}', "[" * 100000, "\xff"])
def test_broken_notebook(tmp_path, text):
    file = tmp_path / "demo.ipynb"
    file.write_text(text)
    assert [code for _, code in codes(check_migration_compatibility(file))] == ["notebook"]


def test_folders(tmp_path):
    for name in ("a.py", "sub/b.pyi", "sub/c.ipynb", ".git/d.py", "__pycache__/e.py", "sub/text.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(notebook(BAD) if name.endswith("ipynb") else BAD)
    environment = tmp_path / "myenv"
    environment.mkdir()
    (environment / "pyvenv.cfg").touch()
    (environment / "f.py").write_text(BAD)
    (tmp_path / "sub" / "loop").symlink_to(tmp_path, target_is_directory=True)
    report = check_paths([tmp_path, tmp_path / "a.py"])
    assert [Path(name).name for name in report.files] == ["a.py", "b.pyi", "c.ipynb"]
    assert report.counts["error"] == 3


def test_folders_that_hold_nothing(tmp_path):
    with pytest.raises(MigrationInputError, match="found no Python file"):
        check_paths([tmp_path])
    with pytest.raises(MigrationInputError, match="nothing"):
        check_paths([])
    with pytest.raises(MigrationPathError, match="no file or folder"):
        check_paths([tmp_path / "gone"])

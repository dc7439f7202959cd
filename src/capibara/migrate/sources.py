"""Read source code from files, text and notebooks, all of which are untrusted.

A source becomes an ``ast.Module`` with continuous line numbers; the code cells of a notebook are concatenated, and
:meth:`Source.locate` converts such a line back to a cell and the line inside it.
"""

from __future__ import annotations

import ast
import bisect
import io
import json
import os
import re
import stat
import textwrap
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from capibara.errors import CapibaraError
from capibara.migrate.report import Severity

__all__ = [
    "MAX_SOURCE_BYTES",
    "MigrationInputError",
    "MigrationInputTypeError",
    "MigrationPathError",
    "ParseFailure",
    "Source",
    "find_files",
    "read_source",
]

#: Larger files are refused: hand-written Python is far smaller, and the syntax tree takes some 100 times as
# much.
MAX_SOURCE_BYTES = 4 * 1024 * 1024
SUFFIXES = (".py", ".pyi", ".ipynb")
_SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"}
# Cell magics whose cell is still Python; any other `%%magic` cell is another language.
_PYTHON_MAGICS = {"%%time", "%%timeit", "%%capture", "%%prun", "%%python", "%%python3"}
_TEXT_LABEL = "<source>"


class MigrationInputError(CapibaraError, ValueError):
    """The source given to the checker cannot be used: too large, not a regular file, not a notebook."""


class MigrationInputTypeError(CapibaraError, TypeError):
    """The source given to the checker is neither a path nor text."""


class MigrationPathError(CapibaraError, FileNotFoundError):
    """The file given to the checker does not exist."""


@dataclass(frozen=True, slots=True)
class ParseFailure:
    """Why a source has no syntax tree (or why a cell is missing from it)."""

    line: int
    column: int
    code: str
    message: str
    fix: str = ""
    severity: Severity = "error"


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed source.

    Attributes:
        label: the name it is reported under.
        tree: its syntax tree (empty when nothing could be parsed).
        lines: its text by lines.
        failures: what could not be parsed.
        cell_starts: for a notebook: the running line before each code cell's first line; else empty.
        cell_numbers: for a notebook: the number of each of those cells, from 1.
    """

    label: str
    tree: ast.Module
    lines: list[str]
    failures: tuple[ParseFailure, ...] = ()
    cell_starts: list[int] = field(default_factory=list)
    cell_numbers: list[int] = field(default_factory=list)

    def locate(self, line: int, byte_column: int) -> tuple[int | None, int, int]:
        """Cell number (or None), line and column (in characters, from 1) of a place in the tree."""
        text = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        column = len(text.encode()[:byte_column].decode(errors="ignore")) + 1
        if not self.cell_starts:
            return None, line, column
        index = max(0, bisect.bisect_left(self.cell_starts, line) - 1)
        return self.cell_numbers[index], line - self.cell_starts[index], column


def read_source(source_code: str | os.PathLike[str]) -> Source:
    """Read a path or take source text.

    A ``Path`` is a path. A string is a path when it is a single line that names an existing file or ends in
    ``.py``, ``.pyi`` or ``.ipynb``; any other string is source text.

    Raises:
        MigrationPathError: the path does not exist.
        MigrationInputError: it is a folder or a special file, unreadable, or larger than ``MAX_SOURCE_BYTES``.
        MigrationInputTypeError: ``source_code`` is neither text nor a path.
    """
    if isinstance(source_code, os.PathLike):
        return _read_file(Path(source_code))
    if not isinstance(source_code, str):
        raise MigrationInputTypeError(
            f"source_code must be a path or source text (str), got {type(source_code).__name__}; "
            "decode bytes first, or write them to a file and pass its path"
        )
    if _names_a_file(source_code):
        return _read_file(Path(source_code))
    if len(source_code) > MAX_SOURCE_BYTES:
        raise MigrationInputError(
            f"source_code: {len(source_code):,} characters of text, the limit is {MAX_SOURCE_BYTES:,}; "
            "check it in parts"
        )
    return _parse_python(_TEXT_LABEL, source_code)


def _names_a_file(text: str) -> bool:
    if "\n" in text or "\r" in text or not text.strip():
        return False
    if text.rstrip().lower().endswith(SUFFIXES) and not re.search(r"[#=();]|\bimport\b", text):
        return True
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # too long for a file name, or holds a NUL
        return False


def _read_file(path: Path) -> Source:
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        raise MigrationPathError(
            f"source_code: there is no file {str(path)!r} ({getattr(error, 'strerror', None) or error}); "
            "pass the path of a Python file, or source text with at least one line break"
        ) from None
    if stat.S_ISDIR(status.st_mode):
        raise MigrationInputError(
            f"source_code: {str(path)!r} is a folder, expected one file; "
            "use capibara.migrate.check_paths([...]) or the command `capibara migrate` for folders"
        )
    if not stat.S_ISREG(status.st_mode):
        raise MigrationInputError(f"source_code: {str(path)!r} is not a regular file; pass a Python file")
    if status.st_size > MAX_SOURCE_BYTES:
        raise MigrationInputError(
            f"source_code: {str(path)!r} has {status.st_size:,} bytes, the limit is {MAX_SOURCE_BYTES:,}; "
            "split the file, or leave it out if it holds data"
        )
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SOURCE_BYTES + 1)
    except OSError as error:
        raise MigrationInputError(
            f"source_code: cannot read {str(path)!r}: {error.strerror or error}; check its permissions, or leave "
            "it out"
        ) from None
    if len(data) > MAX_SOURCE_BYTES:  # one that says it is smaller than it is, as files in /proc do
        raise MigrationInputError(
            f"source_code: {str(path)!r} has more than the {MAX_SOURCE_BYTES:,} bytes that are read; leave it out "
            "if it holds data"
        )
    label = str(path)
    if path.suffix.lower() == ".ipynb":
        return _parse_notebook(label, data)
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        failure = ParseFailure(
            _line_of(data, error),
            0,
            "encoding",
            f"the file cannot be decoded: {error}",
            "save it as UTF-8, or declare its encoding in the first line: # -*- coding: latin-1 -*-",
        )
        return Source(label, _empty(), [], (failure,))
    return _parse_python(label, io.IncrementalNewlineDecoder(None, translate=True).decode(text, final=True))


def _line_of(data: bytes, error: Exception) -> int:
    return data.count(b"\n", 0, error.start) + 1 if isinstance(error, UnicodeDecodeError) else 1


def _empty() -> ast.Module:
    return ast.Module(body=[], type_ignores=[])


def _parse(text: str, label: str, flags: int = 0) -> ast.Module | ParseFailure:
    """Parse Python without running it, and turn everything that can go wrong into a ParseFailure."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are not our business
            tree = compile(text, label, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
    except SyntaxError as error:
        line = error.lineno or 1
        fix = ""
        if re.search(
            r"Missing parentheses|multiple exception types|leading zeros in decimal|Did you mean print",
            str(error.msg),
        ):
            fix = "this looks like Python 2, which no JAX supports: convert it first (2to3, or by hand)"
        return ParseFailure(
            line, max(0, (error.offset or 1) - 1), "syntax-error", f"not valid Python: {error.msg}", fix
        )
    except (RecursionError, MemoryError):
        return ParseFailure(1, 0, "too-deep", "nested too deeply for Python's parser; not checked")
    except ValueError as error:  # NUL bytes in the text
        return ParseFailure(1, 0, "syntax-error", f"not valid Python: {error}")
    assert isinstance(tree, ast.Module)
    return tree


def _parse_python(label: str, text: str) -> Source:
    text = text.removeprefix("\ufeff")
    lines = text.split("\n")
    parsed = _parse(text, label)
    if isinstance(parsed, ParseFailure):
        return Source(label, _empty(), lines, (parsed,))
    return Source(label, parsed, lines)


def _parse_notebook(label: str, data: bytes) -> Source:
    lines: list[str] = []
    body: list[ast.stmt] = []
    failures: list[ParseFailure] = []
    starts: list[int] = []
    numbers: list[int] = []
    try:
        cells = list(_code_cells(json.loads(data)))
    except (ValueError, RecursionError, TypeError, AttributeError, KeyError) as error:
        failure = ParseFailure(1, 0, "notebook", f"not a Jupyter notebook (nbformat 4): {error}")
        return Source(label, _empty(), [], (failure,))
    for number, text in enumerate(cells, start=1):
        starts.append(len(lines))
        numbers.append(number)
        cleaned = _without_magics(text)
        parsed = _parse(cleaned, label, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if isinstance(parsed, ParseFailure):
            # IPython runs more than Python (`timeit f()` is a command there), so this need not be a fault.
            line = parsed.line + len(lines)
            message = f"cell not checked: {parsed.message}"
            failures.append(ParseFailure(line, parsed.column, "not-checked", message, severity="warning"))
        else:
            body.extend(ast.increment_lineno(parsed, len(lines)).body)
        lines.extend(cleaned.split("\n"))
    return Source(label, ast.Module(body=body, type_ignores=[]), lines, tuple(failures), starts, numbers)


def _code_cells(notebook: dict) -> Iterator[str]:
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = cell["source"]
            yield source if isinstance(source, str) else "".join(source)


def _without_magics(text: str) -> str:
    """Blank out IPython's own syntax, keeping every line where it is."""
    lines = text.split("\n")
    first = next((line.strip() for line in lines if line.strip()), "")
    if first.startswith("%%") and first.split()[0] not in _PYTHON_MAGICS:
        return "\n" * (len(lines) - 1)
    cleaned = []
    for line in lines:
        bare = line.lstrip()
        magic = re.match(r"%%?[A-Za-z_]|!|\?|[\w.]+\?\??\s*$", bare)
        cleaned.append(f"{line[: len(line) - len(bare)]}pass" if magic else line)
    return textwrap.dedent("\n".join(cleaned))


def find_files(path: str | os.PathLike[str]) -> list[Path]:
    """The Python files and notebooks under a path, sorted; a file is returned as it is.

    Hidden folders, virtual environments and build output are left out, links to folders are not followed.

    Raises:
        MigrationPathError: the path does not exist, or is not a path (empty, too long).
    """
    if not os.fspath(path):
        raise MigrationPathError("path: got an empty one; name a file or a folder ('.' is the current one)")
    start = Path(path)
    try:
        start.stat()
    except (OSError, ValueError) as error:  # ValueError: it holds a NUL
        reason = getattr(error, "strerror", None) or error
        raise MigrationPathError(
            f"path: there is no file or folder {str(start)!r} ({reason}); check the spelling"
        ) from None
    if not start.is_dir():
        return [start]
    found: list[Path] = []
    for folder, names, files in os.walk(start):
        names[:] = sorted(
            name
            for name in names
            if not name.startswith(".")
            and name not in _SKIPPED_FOLDERS
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        )
        found.extend(Path(folder, name) for name in sorted(files) if name.endswith(SUFFIXES))
    return found

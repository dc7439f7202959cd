"""Output of the verbs that handle archives."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from capibara.compress.container import Entry

__all__ = ["on_terminal", "print_folder_table", "print_table", "progress_bar", "reason"]


def reason(error: Exception) -> str:
    """The message of an error; of one of the system the file and what is wrong with it, without the number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def on_terminal() -> bool:
    """Whether standard error is a terminal; a process without one, as of a service, has ``None`` in its place."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def progress_bar(what: str, total: int, *, quiet: bool = False) -> Iterator[Callable[[str, int], None]]:
    """A progress bar on standard error, in bytes, where that is a terminal; yields the function that advances it.

    Args:
      what: the label. total: bytes. quiet: no bar.
    """
    if quiet or not on_terminal():  # to import rich takes a twentieth of a second
        yield lambda _name, _size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TextColumn("{task.fields[tensor]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=total, tensor="")

        def step(name: str, size: int) -> None:
            bar.update(task, advance=size, tensor=name)

        yield step


def _short(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.4g} {unit}"
        size /= 1000
    return f"{size:.4g} TB"


def print_table(path: Path, entries: Sequence[Entry], errors: Mapping[str, float] | None = None) -> None:
    """The tensors of an archive, and their sum; with a column of relative errors, if there are any."""
    table = _table()
    if errors is not None:
        table.add_column("error", justify="right", no_wrap=True)
    for e in entries:
        cells = _cells(e)
        if errors is not None:
            cells.append(f"{errors[e.name]:.4g}" if e.name in errors else "")
        table.add_row(*cells)
    _print(table, f"{path}: {len(entries)} tensors, {_sizes(entries, path.stat().st_size)}")


def print_folder_table(folder: Path, archives: Mapping[Path, Sequence[Entry]]) -> None:
    """The tensors of a folder's archives, each archive under its name, and the sum of all."""
    table = _table()
    whole: list[Entry] = []
    for path, entries in archives.items():
        table.add_section()
        table.add_row(f"{path.relative_to(folder)}:")
        for e in entries:
            table.add_row(*_cells(e))
        whole += entries
    sizes = {path: path.stat().st_size for path in archives}
    lines = [
        f"{path}: {len(entries)} tensors, {_sizes(entries, sizes[path])}"
        for path, entries in archives.items()
    ]
    total = f"{folder}: {len(archives)} archives, {len(whole)} tensors, {_sizes(whole, sum(sizes.values()))}"
    _print(table, *lines, total)


def _table() -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, header_style="bold")
    for column in ("tensor", "type", "shape", "codec"):
        table.add_column(column, overflow="fold")
    for column in ("original", "bytes", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cells(e: Entry) -> list[str]:
    """A tensor's row."""
    ratio = f"{e.coded_bytes / e.original_bytes:.3f}" if e.original_bytes else ""
    how = e.codec if e.same_as is None else f"= {e.same_as}"
    shape = "×".join(map(str, e.shape)) or "scalar"
    return [e.name, e.format.name, shape, how, _short(e.original_bytes), _short(e.coded_bytes), ratio]


def _sizes(entries: Sequence[Entry], size: int) -> str:
    """Sizes of tensors, and of the files that contain them."""
    original = sum(e.original_bytes for e in entries)
    return f"{_short(original)} as {_short(size)}" + (f", {size / original:.4f} of them" if original else "")


def _print(table: Table, *lines: str) -> None:
    from rich.console import Console

    console = Console(markup=False, highlight=False)
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True)

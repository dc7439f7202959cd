"""``capibara verify FILE…``: decode everything and compare checksums."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from capibara.errors import CapibaraError

HELP = "decode every tensor of archives and check their checksums"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``capibara verify``."""
    parser.description = (
        "Decode every tensor of .capi archives; of a folder, of all those in it. Exit code: 0 all is well, 1 a tensor "
        "is damaged (each is named), 2 a file is no archive, or a folder has none."
    )
    parser.add_argument(
        "files", metavar="FILE", type=Path, nargs="+", help=".capi archives, or folders with some"
    )


def run(args: argparse.Namespace) -> int:
    """Check the files; returns the exit code."""
    from capibara.compress.archive_files import find_archives

    damaged = 0
    try:
        # All names are looked at before anything is decoded: a wrong one should not cost minutes.
        found = [(given, find_archives(given)) for given in args.files]
        for given, paths in found:
            results = [_verify(path) for path in paths]
            bad = sum(wrong for _, wrong in results)
            if given.is_dir():
                how = f"{bad} damaged" if bad else "all as they were written"
                print(f"{given}: {len(paths)} archives, {sum(n for n, _ in results)} tensors, {how}")
            damaged += bad
    except (CapibaraError, OSError) as error:
        print(f"capibara verify: {error}", file=sys.stderr)
        return 2
    return 1 if damaged else 0


def _verify(path: Path) -> tuple[int, int]:
    """Decode an archive and say what is wrong; how many tensors there are, and how many are damaged."""
    from capibara.cli._archives import progress_bar
    from capibara.compress.container import Archive

    with Archive(path) as archive:
        total = sum(e.original_bytes for e in archive)
        with progress_bar(f"verifying {path.name}", total) as step:
            found = []
            for entry, problem in archive.verify():
                step(entry.name, entry.original_bytes)
                if problem is not None:
                    found.append(problem)
    for problem in found:
        print(f"damaged: {problem}")
    if not found:
        print(f"{path}: {len(archive.entries)} tensors, all as they were written")
    return len(archive.entries), len(found)

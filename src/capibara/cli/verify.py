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
        "Decode every tensor of .capi archives. Exit code: 0 all is well, 1 a tensor is damaged (each is named), "
        "2 a file is no archive."
    )
    parser.add_argument("files", metavar="FILE", type=Path, nargs="+", help=".capi archives")


def run(args: argparse.Namespace) -> int:
    """Check the files; returns the exit code."""
    from capibara.cli._archives import progress_bar
    from capibara.compress.container import Archive

    damaged = 0
    for path in args.files:
        try:
            with Archive(path) as archive:
                total = sum(e.original_bytes for e in archive)
                with progress_bar(f"verifying {path.name}", total) as step:
                    found = []
                    for entry, problem in archive.verify():
                        step(entry.name, entry.original_bytes)
                        if problem is not None:
                            found.append(problem)
        except (CapibaraError, OSError) as error:
            print(f"capibara verify: {error}", file=sys.stderr)
            return 2
        for problem in found:
            print(f"damaged: {problem}")
        if not found:
            print(f"{path}: {len(archive.entries)} tensors, all as they were written")
        damaged += len(found)
    return 1 if damaged else 0

"""``capibara inspect FILE``: what is in an archive."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from capibara.errors import CapibaraError

HELP = "list the tensors of an archive"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``capibara inspect``."""
    parser.description = (
        "List the tensors of a .capi archive with their types, shapes, codecs and sizes. Only the index is read. "
        "Exit code: 0, or 2 for a file that is no archive or a damaged one."
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a .capi archive")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the list; returns the exit code."""
    from capibara.cli._archives import print_table
    from capibara.compress.container import Archive

    try:
        with Archive(args.file) as archive:
            entries, metadata = list(archive), archive.metadata
    except (CapibaraError, OSError) as error:
        print(f"capibara inspect: {error}", file=sys.stderr)
        return 2
    if args.json:
        tensors = [
            {
                "name": e.name,
                "dtype": e.format.name,
                "shape": list(e.shape),
                "codec": e.codec,
                "bytes": e.coded_bytes,
                "original": e.original_bytes,
                **({"same_as": e.same_as} if e.same_as is not None else {}),
            }
            for e in entries
        ]
        print(json.dumps({"metadata": metadata, "tensors": tensors}, indent=1))
    else:
        print_table(args.file, entries)
    return 0

"""``capibara inspect FILE``: what is in an archive, or in a folder of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.cli._json import print_json
from capibara.errors import CapibaraError

if TYPE_CHECKING:
    from capibara.compress.container import Entry

HELP = "list the tensors of an archive, or of a folder of them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``capibara inspect``."""
    parser.description = (
        "List the tensors of a .capi archive, or of all archives in a folder, with dtypes, shapes, codecs and sizes. "
        "Reads only the index. "
        "Exit code: 0 success, 2 a file is not an archive or is damaged, or a folder has no archives."
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a .capi archive, or a folder of them")
    parser.add_argument("--json", action="store_true", help="print the list as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the list; returns the exit code."""
    from capibara.cli._archives import print_folder_table, print_table, reason
    from capibara.compress.container import Archive
    from capibara.compress.folders import find_archives

    found: dict[Path, list[Entry]] = {}
    metadata: dict[Path, dict[str, str]] = {}
    try:
        for path in find_archives(args.file):
            with Archive(path) as archive:
                found[path], metadata[path] = list(archive), archive.metadata
    except (CapibaraError, OSError) as error:
        print(f"capibara inspect: {reason(error)}", file=sys.stderr)
        return 2
    folder = args.file.is_dir()
    if args.json and folder:
        files = {str(p): {"bytes": p.stat().st_size, "metadata": metadata[p]} for p in found}
        tensors = [{"file": str(p), **_facts(e)} for p, entries in found.items() for e in entries]
        print_json({"files": files, "tensors": tensors})
    elif args.json:
        print_json({"metadata": metadata[args.file], "tensors": [_facts(e) for e in found[args.file]]})
    elif folder:
        print_folder_table(args.file, found)
    else:
        print_table(args.file, found[args.file])
    return 0


def _facts(entry: Entry) -> dict[str, Any]:
    """A tensor, as JSON has it."""
    return {
        "name": entry.name,
        "dtype": entry.format.name,
        "shape": list(entry.shape),
        "codec": entry.codec,
        "bytes": entry.coded_bytes,
        "original": entry.original_bytes,
        **({"same_as": entry.same_as} if entry.same_as is not None else {}),
    }

"""``capibara verify FILE…``: decode everything and compare checksums."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from capibara.errors import CapibaraError

HELP = "decode every tensor of archives and check their checksums"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``capibara verify``."""
    parser.description = (
        "Decode every tensor of .capi archives, or of all archives in a folder, and check their checksums. "
        "Exit code: 0 success, 1 a tensor is damaged (each is named), 2 a file is not an archive, or a folder has none."
    )
    parser.add_argument(
        "files", metavar="FILE", type=Path, nargs="+", help=".capi archives, or folders of them"
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    """Check the files; returns the exit code."""
    from capibara.cli._archives import reason
    from capibara.cli._json import print_json
    from capibara.compress.folders import find_archives

    every = []
    try:
        # Check all names before decoding anything: a wrong one should not cost minutes.
        for given, paths in [(given, find_archives(given)) for given in args.files]:
            results = [_verify(path) for path in paths]
            every += results
            if not args.json:
                _say(given, results)
    except (CapibaraError, OSError) as error:
        print(f"capibara verify: {reason(error)}", file=sys.stderr)
        return 2
    damaged = sum(len(one["damaged"]) for one in every)
    if args.json:
        print_json({"damaged": damaged, "files": every})
    return 1 if damaged else 0


def _verify(path: Path) -> dict[str, Any]:
    """Decode an archive: its name, how many tensors it has, and what is wrong with those that are damaged."""
    from capibara.cli._archives import progress_bar
    from capibara.compress.container import Archive

    with Archive(path) as archive:
        found = []
        with progress_bar(f"verifying {path.name}", sum(e.original_bytes for e in archive)) as step:
            for entry, problem in archive.verify():
                step(entry.name, entry.original_bytes)
                if problem is not None:
                    found.append({"tensor": entry.name, "problem": problem})
        return {"file": str(path), "tensors": len(archive.entries), "damaged": found}


def _say(given: Path, results: list[dict[str, Any]]) -> None:
    for one in results:
        for wrong in one["damaged"]:
            print(f"damaged: {wrong['problem']}")
        if not one["damaged"]:
            print(f"{one['file']}: {one['tensors']} tensors, all as they were written")
    if given.is_dir():
        bad = sum(len(one["damaged"]) for one in results)
        how = f"{bad} damaged" if bad else "all as they were written"
        print(f"{given}: {len(results)} archives, {sum(one['tensors'] for one in results)} tensors, {how}")

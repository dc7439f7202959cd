"""``capibara compress IN OUT``: a safetensors file or a model's folder as archives."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from capibara.errors import CapibaraError

HELP = "make a safetensors file or a model's folder smaller, without loss or to a ratio"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``capibara compress``."""
    parser.description = (
        "Write a .capi archive from a safetensors file, or a folder of them from a model's folder as Hugging Face "
        "lays it out (other files are copied). Every bit comes back with 'capibara decompress'; with --ratio numbers "
        "are rounded, to the same step in all matrices, so that the archive is that many times smaller. "
        "Exit code: 0 written, 2 bad input; a file that was there stands until the new one is whole."
    )
    parser.add_argument("source", metavar="IN", type=Path, help="a .safetensors file, or a folder")
    parser.add_argument("target", metavar="OUT", type=Path, help="the archive or the folder to write")
    parser.add_argument(
        "--ratio", type=float, metavar="N", help="how many times smaller (default: what is lossless)"
    )
    parser.add_argument("--json", action="store_true", help="print the table of tensors as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the archives and print what became of the tensors; returns the exit code."""
    from capibara.cli._archives import print_table, progress_bar
    from capibara.compress.archive_files import compress_files, plan_compress

    try:
        jobs = plan_compress(args.source, args.target)
        with progress_bar("compressing", sum(j.size for j in jobs if j.convert), quiet=args.json) as step:
            written = compress_files(jobs, ratio=args.ratio, progress=step)
    except (CapibaraError, OSError) as error:
        print(f"capibara compress: {error}", file=sys.stderr)
        return 2
    targets = [job.target for job in jobs if job.convert]
    if args.json:
        files = {
            str(t): [
                {"name": e.name, "codec": e.codec, "bytes": e.coded_bytes, "original": e.original_bytes}
                for e in entries
            ]
            for t, entries in zip(targets, written, strict=True)
        }
        sizes = {str(t): t.stat().st_size for t in targets}
        print(json.dumps({"files": files, "sizes": sizes}, indent=1))
        return 0
    for target, entries in zip(targets, written, strict=True):
        print_table(target, entries)
    return 0

"""``capibara decompress IN OUT``: archives as safetensors files again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from capibara.errors import CapibaraError

HELP = "write safetensors files from archives"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``capibara decompress``."""
    parser.description = (
        "Write a safetensors file from a .capi archive, or a model's folder from a folder of them. "
        "Exit code: 0 success, 2 invalid input or a damaged archive (nothing is written)."
    )
    parser.add_argument("source", metavar="IN", type=Path, help="a .capi archive, or a folder")
    parser.add_argument(
        "target", metavar="OUT", type=Path, help="the safetensors file or the folder to write"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="for a folder: keep finished files when interrupted, and continue from there",
    )


def run(args: argparse.Namespace) -> int:
    """Write the files; returns the exit code."""
    from capibara.cli._archives import progress_bar, reason
    from capibara.compress.archive_files import decompress_files, original_bytes, plan_decompress

    try:
        jobs = plan_decompress(args.source, args.target)
        with progress_bar("decompressing", original_bytes(jobs)) as step:
            decompress_files(jobs, progress=step, resume=args.resume)
    except (CapibaraError, OSError) as error:
        print(f"capibara decompress: {reason(error)}", file=sys.stderr)
        return 2
    return 0

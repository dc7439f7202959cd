"""``capibara compress IN OUT``: a safetensors file, a model's folder, a run or a GGUF file as archives."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.cli._json import print_json
from capibara.errors import CapibaraError

if TYPE_CHECKING:
    from capibara.compress.analysis import Compressibility
    from capibara.compress.archive_files import Job
    from capibara.compress.container import Entry

HELP = "compress a safetensors file or a model, losslessly or to a ratio"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``capibara compress``."""
    parser.description = (
        "Write a .capi archive from a safetensors file, a folder of archives from a Hugging Face model folder (other "
        "files are copied), or, if OUT ends with .capi, one file that runs by itself (capibara generate --weights OUT) "
        "from a model folder, a run or a GGUF file: it has the settings and the tokenizer. "
        "Compression is lossless by default. With --ratio it is lossy for matrices: each is "
        "stored by the codec and at the rate that give the least error, so that all archives together are that many "
        "times smaller, within 2 %. "
        "Exit code: 0 success, 1 the archives are written but not the plot, 2 invalid input. Existing files are "
        "replaced once the new ones are complete; after an error or an interruption no part of a folder remains."
    )
    parser.add_argument(
        "source",
        metavar="IN",
        type=Path,
        help="a .safetensors file, the folder of a model or a run, or a .gguf file",
    )
    parser.add_argument("target", metavar="OUT", type=Path, help="the archive or the folder to write")
    parser.add_argument("--ratio", type=float, metavar="N", help="compression ratio (default: lossless)")
    parser.add_argument(
        "--strategy",
        default="auto",
        metavar="CODEC",
        help="the only lossy codec to use, such as uniform, or int8, which needs no ratio; or jax: the best "
        "for each tensor, computed by JAX, with the same bytes (default: auto, the best for each tensor)",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="plot the expected error at other ratios; with --ratio"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="for a folder: keep finished files when interrupted, and continue from there",
    )
    parser.add_argument("--json", action="store_true", help="print the table of tensors as JSON")


def run(args: argparse.Namespace) -> int:
    """Write the archives and print a table of the tensors; returns the exit code."""
    from capibara.cli._archives import print_table, progress_bar, reason
    from capibara.cli._compress_model import is_model_job
    from capibara.compress.analysis import RATIOS
    from capibara.compress.archive_files import compress_files, plan_compress
    from capibara.compress.errors import CompressError
    from capibara.compress.plots import plot_rate_error

    reports: list[Compressibility] = []

    def analysed(report: Compressibility) -> None:
        # Called before the first archive is written.
        if args.plot is not None and not any(error > 0 for _, error in report.frontier):
            raise CompressError(
                f"--plot: no lossy ratio from {RATIOS[0]:g} to {RATIOS[-1]:g} can be reached for these tensors, so "
                "there is no curve. Remedy: leave it out."
            )
        reports.append(report)

    try:
        if is_model_job(args.source, args.target):
            return _report_model(args)
        jobs = plan_compress(args.source, args.target)
        if args.plot is not None:
            _check_plot(args.plot, args.ratio, jobs)
        total = sum(j.size for j in jobs if j.convert) * (1 if args.ratio is None else 2)
        with progress_bar("compressing", total, quiet=args.json) as step:
            written = compress_files(
                jobs,
                ratio=args.ratio,
                strategy=args.strategy,
                progress=step,
                analysed=analysed,
                resume=args.resume,
            )
    except (CapibaraError, OSError) as error:
        print(f"capibara compress: {reason(error)}", file=sys.stderr)
        return 2
    if args.json:
        files = {
            str(one.path): [_row(entry, one.errors.get(entry.name)) for entry in one.entries]
            for one in written
        }
        sizes = {str(one.path): one.path.stat().st_size for one in written}
        errors = {str(one.path): one.error for one in written}
        print_json({"files": files, "sizes": sizes, "errors": errors})
    else:
        for one in written:
            print_table(one.path, one.entries, one.errors if one.error else None)
            if one.error:
                print(f"relative error of its weights: {one.error:.4g}")
    if args.plot is not None:
        try:
            plot_rate_error(args.plot, reports[0].frontier, title=f"{args.source.name}, {args.strategy}")
        except (CapibaraError, OSError) as error:
            print(
                f"capibara compress: the archives are written, but not {args.plot}: {reason(error)}",
                file=sys.stderr,
            )
            return 1
    return 0


def _report_model(args: argparse.Namespace) -> int:
    """Compress a model into one file and print what is in it."""
    from capibara.cli._archives import print_table
    from capibara.cli._compress_model import compress_model

    entries, errors, error, notes = compress_model(args)
    path = args.target
    if args.json:
        rows = [_row(entry, errors.get(entry.name)) for entry in entries]
        sizes = {str(path): path.stat().st_size}
        print_json({"files": {str(path): rows}, "sizes": sizes, "errors": {str(path): error}, "notes": notes})
        return 0
    print_table(path, entries, errors if error else None)
    if error:
        print(f"relative error of its weights: {error:.4g}")
    for note in notes:
        print(f"note: {note}")
    return 0


def _row(entry: Entry, error: float | None) -> dict[str, Any]:
    """A tensor, as JSON has it."""
    return {
        "name": entry.name,
        "codec": entry.codec,
        "bytes": entry.coded_bytes,
        "original": entry.original_bytes,
        "error": error,
    }


def _check_plot(path: Path, ratio: float | None, jobs: Sequence[Job]) -> None:
    """Check that the plot can be written, before minutes are spent on archives.

    Raises:
      CompressError: it cannot, or there will be nothing to draw.
      MissingExtraError: matplotlib is not installed.
    """
    from capibara.compress.errors import CompressError
    from capibara.errors import MissingExtraError

    if ratio is None:
        raise CompressError("--plot: nothing is lost without a ratio. Remedy: --ratio 4.")
    if path.is_dir():
        raise CompressError(f"--plot: {path} is a folder. Remedy: a file in it, {path / 'curve.png'}.")
    if path.suffix.lower() != ".png":
        raise CompressError(
            f"--plot: got {str(path)!r}, expected a name that ends in .png. Remedy: --plot {path.with_suffix('.png')}."
        )
    folder = path.resolve().parent
    # A folder that archives go to is made when they are written.
    made = {above for job in jobs for above in job.target.resolve().parents}
    if not folder.is_dir() and folder not in made:
        raise CompressError(
            f"--plot: there is no folder {folder}. Remedy: create it, or choose another folder."
        )
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise CompressError(f"--plot: the folder {folder} is not writable. Remedy: choose another folder.")
    if any(path.resolve() in (job.source.resolve(), job.target.resolve()) for job in jobs):
        raise CompressError(f"--plot: {path} is one of the model's own files. Remedy: another name.")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError("matplotlib", "train", "Drawing the rate–error curve")

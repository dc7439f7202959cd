"""``capibara inspect PATH``: what is in a model, a run, an archive, or a folder of archives."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from capibara.cli._json import print_json
from capibara.errors import CapibaraError

if TYPE_CHECKING:
    from capibara.compress.container import Entry

HELP = "show what a model, a run or an archive is made of"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``capibara inspect``."""
    parser.description = (
        "Show a model's family, sizes, parameters by part, formats, quantization and tokenizer: of a published folder, "
        "a GGUF file or a run. Or list the tensors of a .capi archive, or of all archives in a folder, with dtypes, "
        "shapes, codecs and sizes. Reads headers only. "
        "Exit code: 0 success, 2 there is no model or archive, or it is damaged."
    )
    parser.add_argument(
        "file",
        metavar="PATH",
        type=Path,
        help="folder of a model, a run or archives, .gguf file, .capi archive",
    )
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the list; returns the exit code."""
    from capibara.cli._archives import print_folder_table, print_table, reason
    from capibara.cli._describe import describe_model, print_model
    from capibara.compress.container import Archive
    from capibara.compress.folders import find_archives

    found: dict[Path, list[Entry]] = {}
    metadata: dict[Path, dict[str, str]] = {}
    try:
        if _is_model(args.file):
            facts = describe_model(args.file)
            print_json(facts) if args.json else print_model(facts)
            return 0
        for path in find_archives(args.file):
            with Archive(path) as archive:
                found[path], metadata[path] = list(archive), _short(archive.metadata)
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


def _is_model(path: Path) -> bool:
    """Whether this is a model, or a run, rather than archives."""
    from capibara.cli._models import is_published, is_run
    from capibara.compress.container.index import SUFFIX
    from capibara.families import is_gguf

    if is_gguf(path):
        return True
    return path.is_dir() and not any(path.rglob(f"*{SUFFIX}")) and (is_published(path) or is_run(path))


def _short(metadata: dict[str, str]) -> dict[str, str]:
    """Metadata without the files of a tokenizer."""
    return {key: value for key, value in metadata.items() if not key.startswith("capibara.tokenizer.")}


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

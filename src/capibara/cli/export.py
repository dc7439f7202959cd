"""``capibara export MODEL OUT``: write a model in a format that other programs load."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

HELP = """Write a model in a format that other programs load: a Hugging Face folder (config.json, safetensors) for
transformers and vLLM, such a folder with quantized weights (compressed-tensors) for vLLM, or a GGUF file for llama.cpp.
An imported model keeps its tensor names, dtypes and config.json; any other model is written as the first family that
can express it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "run",
        metavar="MODEL",
        help="folder of a run, of one checkpoint or of a published model, a .gguf file, or a .capi file of a model",
    )
    parser.add_argument(
        "folder", metavar="OUT", help="folder or .gguf file to write; appears when it is complete"
    )
    parser.add_argument(
        "--format",
        metavar="FORMAT",
        help="safetensors, compressed-tensors or gguf (default: gguf for a name that ends with .gguf, "
        "compressed-tensors with --quantize, otherwise safetensors)",
    )
    parser.add_argument(
        "--quantize",
        metavar="TYPE",
        help="compressed-tensors: int4, int8, or w8a8 (8-bit activations too); gguf: q8_0, q4_0, f16, bf16, f32",
    )
    parser.add_argument(
        "--asymmetric", action="store_true", help="with int4 and int8: zero points as well as scales"
    )
    parser.add_argument("--family", help="llama, qwen3 … (default: where the model came from, or what fits)")
    parser.add_argument("--dtype", help="of the tensors: bfloat16, float32 … (default: as they were stored)")
    parser.add_argument(
        "--adapter", action="store_true", help="write the low-rank adapters only, in the form of PEFT"
    )
    parser.add_argument("--ema", action="store_true", help="the averaged parameters of a run (train.ema)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Export; return 0."""
    from capibara.cli._archives import reason
    from capibara.cli._json import print_json
    from capibara.cli._models import is_published, load_source
    from capibara.errors import ConfigError
    from capibara.families import save_adapter, save_model
    from capibara.families.archives import ArchiveTensors
    from capibara.families.folder import is_read_from_archives
    from capibara.families.known import find_family

    if args.adapter:
        for name in ("dtype", "format", "quantize"):
            if getattr(args, name) is not None:
                raise ConfigError(f"--{name} cannot be combined with --adapter. Remedy: leave it out")
    loaded = load_source(args.run, quiet=args.json, ema=args.ema)
    source = loaded.model.pretrained
    folder = Path(args.run)
    with contextlib.ExitStack() as stack:
        codes = None
        kept = args.quantize is not None and args.family is None
        if kept and is_published(folder) and is_read_from_archives(folder):
            codes = stack.enter_context(ArchiveTensors(folder))
        try:
            if args.adapter:
                named = args.family or ("llama" if source is None else source.family.name)
                save_adapter(loaded.model, loaded.params, args.folder, find_family(named, "--family"))
                told = {"family": named, "dtype": loaded.model.config.precision.param_dtype}
            else:
                told = save_model(
                    loaded.model,
                    loaded.params,
                    args.folder,
                    format=args.format,
                    quantize=args.quantize,
                    asymmetric=args.asymmetric,
                    family=args.family,
                    dtype=args.dtype,
                    codes=codes,
                )
        except OSError as error:
            what = reason(error) if error.errno else f"{args.folder}: it could not be written whole ({error})"
            raise ConfigError(
                f"OUT: {what}. Remedy: a place that can be written and has enough space"
            ) from None
    if args.json:
        print_json({**told, "folder": args.folder})
        return 0
    kinds = [told["family"], told.get("quantize") or told["dtype"]]
    print(f"{', '.join(kinds)}: {args.folder}")
    for note in told.get("notes", ()):
        print(f"note: {note}")
    return 0

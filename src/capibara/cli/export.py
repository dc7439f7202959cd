"""``capibara export RUN FOLDER``: a trained model becomes a folder that others load."""

from __future__ import annotations

import argparse

HELP = """Write the newest checkpoint of a run as a folder in the form of Hugging Face (config.json, safetensors), which
transformers, vLLM and others load. A model that was imported leaves with the names, dtypes and config.json that it
came with; another one as the first family that has such models."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument("run", metavar="RUN", help="folder of a run, or of one checkpoint")
    parser.add_argument("folder", metavar="FOLDER", help="to write; appears when it is complete")
    parser.add_argument("--family", help="llama, qwen3 … (default: where the model came from, or what fits)")
    parser.add_argument("--dtype", help="of the tensors: bfloat16, float32 … (default: as they were stored)")
    parser.add_argument(
        "--adapter", action="store_true", help="write the low-rank adapters only, in the form of PEFT"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Export; return 0."""
    from capibara.cli._archives import reason
    from capibara.cli._json import print_json
    from capibara.cli._models import warn_on_stderr
    from capibara.errors import ConfigError
    from capibara.families import save_adapter, save_folder
    from capibara.families.known import find_family
    from capibara.serve.load import find_checkpoint, load_model

    loaded = load_model(find_checkpoint(args.run, warn=warn_on_stderr))
    source = loaded.model.pretrained
    if args.adapter and args.dtype is not None:
        raise ConfigError("--dtype cannot be combined with --adapter. Remedy: leave it out")
    try:
        if args.adapter:
            named = args.family or ("llama" if source is None else source.family.name)
            save_adapter(loaded.model, loaded.params, args.folder, find_family(named, "--family"))
            told = {"family": named, "dtype": loaded.model.config.precision.param_dtype}
        else:
            values = save_folder(
                loaded.model, loaded.params, args.folder, family=args.family, dtype=args.dtype, source=source
            )
            told = {"family": values["model_type"], "dtype": values["dtype"]}
    except OSError as error:
        raise ConfigError(f"FOLDER: {reason(error)}. Remedy: a place that can be written") from None
    if args.json:
        print_json({**told, "folder": args.folder})
    else:
        print(f"{told['family']}, {told['dtype']}: {args.folder}")
    return 0

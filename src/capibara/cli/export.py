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
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Export; return 0."""
    from capibara.cli._archives import reason
    from capibara.cli._json import print_json
    from capibara.cli._models import warn_on_stderr
    from capibara.errors import ConfigError
    from capibara.families import save_folder
    from capibara.serve.load import find_checkpoint, load_model

    loaded = load_model(find_checkpoint(args.run, warn=warn_on_stderr))
    source = loaded.model.pretrained
    model, params = loaded.model, loaded.params
    if model.trainable is not None:
        model = model.merged(params)
        params = model.params
    try:
        values = save_folder(model, params, args.folder, family=args.family, dtype=args.dtype, source=source)
    except OSError as error:
        raise ConfigError(f"FOLDER: {reason(error)}. Remedy: a place that can be written") from None
    if args.json:
        print_json({"family": values["model_type"], "dtype": values["dtype"], "folder": args.folder})
    else:
        print(f"{values['model_type']}, {values['dtype']}: {args.folder}")
    return 0

"""``capibara import MODEL RUN``: a published model becomes a run, which every other verb takes."""

from __future__ import annotations

import argparse

HELP = """Read a published model, a folder in the form of Hugging Face (config.json and safetensors) or a GGUF file, and
write a run with its parameters: a checkpoint of step 0, which other verbs take. Quantized weights are decoded. Nothing
is downloaded, and weights stored as pickle are refused."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the verb."""
    parser.add_argument(
        "folder", metavar="MODEL", help="folder with config.json and safetensors, or a .gguf file"
    )
    parser.add_argument("run", metavar="RUN", help="folder of the run; must not have a checkpoint")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="settings that override the folder's"
    )
    parser.add_argument(
        "--dtype", help="of the parameters: bfloat16, float32 … (default: as they are stored)"
    )
    parser.add_argument("--adapter", metavar="FOLDER", help="of a low-rank adapter (PEFT) of this model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Import; return 0."""
    from capibara.cli._archives import progress_bar
    from capibara.cli._json import print_json
    from capibara.cli._models import model_bytes
    from capibara.core import ModularCapibaraModel
    from capibara.errors import ConfigError
    from capibara.serve.load import save_pretrained_run
    from capibara.train import checkpoint_store

    if checkpoint_store(args.run).steps():
        raise ConfigError(f"RUN: {args.run!r} has a checkpoint already. Remedy: another folder")
    with progress_bar("importing", model_bytes(args.folder), quiet=args.json) as progress:
        model = ModularCapibaraModel.from_pretrained(
            args.folder,
            dtype=args.dtype,
            overrides=[*args.overrides, f"checkpoint.directory={args.run}"],
            adapter=args.adapter,
            progress=progress,
        )
    checkpoint = save_pretrained_run(model, args.run)
    assert model.pretrained is not None
    if args.json:
        print_json(
            {
                "family": model.pretrained.family.name,
                "parameters": model.num_params,
                "checkpoint": str(checkpoint.path),
                "notes": list(model.pretrained.notes),
            }
        )
        return 0
    print(f"{model.pretrained.family.name}: {model.num_params:,} parameters in {checkpoint.path}")
    for note in model.pretrained.notes:
        print(f"note: {note}")
    return 0

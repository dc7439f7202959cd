"""``capibara compress MODEL FILE.capi``: a model as one compressed file that runs by itself."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from capibara.compress.container import Entry

__all__ = ["compress_model", "is_model_job"]


def is_model_job(source: Path, target: Path) -> bool:
    """Whether a model is to become one file: a published model or a run, and a name that ends with .capi."""
    from capibara.cli._models import is_published, is_run
    from capibara.compress.container.index import SUFFIX
    from capibara.compress.errors import CompressError
    from capibara.families import is_gguf

    one = target.name.endswith(SUFFIX) and not target.is_dir()
    if is_gguf(source) and not one:
        raise CompressError(
            f"OUT: got {str(target)!r} for a GGUF file, expected a name that ends with {SUFFIX}"
        )
    if one and source.is_dir() and (is_published(source) or is_run(source)):
        return True
    if not one and source.is_dir() and not is_published(source) and is_run(source):
        raise CompressError(f"OUT: got {str(target)!r} for a run, expected a name that ends with {SUFFIX}")
    return is_gguf(source)


def compress_model(args: argparse.Namespace) -> tuple[list[Entry], dict[str, float], float, tuple[str, ...]]:
    """Write the file.

    Returns:
      Its tensors, the relative error of each that lost something, that of all together, and notes.

    Raises:
      CapibaraError: there is no model, or the arguments do not fit.
      OSError: reading or writing failed; an existing file is unchanged.
    """
    from capibara.cli._models import load_source
    from capibara.compress import Archive, ModelCompressionAPI
    from capibara.compress.errors import CompressError
    from capibara.compress.profile import EXACT, FIXED, CompressionProfile
    from capibara.compress.writing import change_metadata
    from capibara.serve.carried import metadata_of_model

    for name in ("plot", "resume"):
        if getattr(args, name):
            raise CompressError(
                f"--{name} is for folders of archives. Remedy: leave it out, or OUT without .capi"
            )
    lossless = args.ratio is None and args.strategy in ("auto", "jax", *EXACT)
    if args.ratio is None and not lossless and args.strategy not in FIXED:
        raise CompressError(f"strategy: {args.strategy!r} needs a ratio. Remedy: --ratio 4")
    profile = CompressionProfile(
        strategy=args.strategy,
        mode="lossless" if lossless else "balanced",
        target_compression_ratio=args.ratio,
    )
    loaded = load_source(str(args.source), quiet=args.json)
    model: Any = loaded.model
    params = loaded.params
    if model.trainable is not None:
        model = model.merged(params)
        params = model.params
    metadata, notes = metadata_of_model(model)
    made = ModelCompressionAPI(profile).compress(params)
    change_metadata(made.path, metadata)
    made.save(args.target)
    errors = {one.name: one.error for one in made.stats.tensors if one.error is not None}
    with Archive(args.target) as archive:
        return list(archive), errors, made.stats.weight_error, notes

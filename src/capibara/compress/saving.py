"""Temporary folders of models' archives, and saving a module that was changed after compression.

A module can be trained or loaded with other values, which does not change its archive. Unchanged tensors keep their
encoding, so that nothing more is lost; changed ones are written losslessly: choosing rates is part of compression,
not of saving.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from capibara.compress.container import Archive, ArchiveWriter
from capibara.compress.models.numbers import format_of, is_torch, to_bits, torch_from_bits
from capibara.compress.profile import EXACT
from capibara.compress.stored_codes import stored_parts

if TYPE_CHECKING:
    import torch

__all__ = ["make_folder", "save_module"]


def make_folder() -> tuple[Path, Any]:
    """A temporary folder, and the object that owns it."""
    folder = tempfile.TemporaryDirectory(prefix="capibara-", ignore_cleanup_errors=True)
    keeper = _Keeper()
    weakref.finalize(keeper, folder.cleanup)
    return Path(folder.name), keeper


class _Keeper:
    """Lives as long as the models whose file it keeps."""


def save_module(module: torch.nn.Module, source: Path, target: Path, stats_key: str) -> bool:
    """Write a module's tensors, if they differ from those of its archive.

    Args:
      module: in its current state.
      source: its archive.
      target: the file to write.
      stats_key: of the metadata with measured statistics, which are no longer valid.

    Returns:
      Whether a file was written; ``False``: the archive is up to date.
    """
    with Archive(source) as archive:
        held = _held_tensors(module)
        changed = _changed_tensors(archive, held)
        if not changed and held.keys() == archive.entries.keys():
            return False
        # A module is loaded with tensors of its own types: where one is written anew, those that were converted are.
        changed += [n for n in held if n not in changed and _is_converted(archive, n, held[n])]
        metadata = dict(archive.metadata)
        known = json.loads(metadata.pop(stats_key, "{}"))
        if "original_bytes" in known:  # of a network before it was merged
            metadata[stats_key] = json.dumps({"original_bytes": known["original_bytes"]})
        rounded = [n for n in changed if n in archive.entries and archive[n].codec not in EXACT]
        _write_changed(target, archive, held, changed, metadata)
        before = archive.size
    if rounded:
        warnings.warn(
            f"path: {target} has {target.stat().st_size:,} bytes, where the archive had {before:,}: {len(rounded)} "
            f"tensors ({', '.join(rounded[:3])}{', …' if len(rounded) > 3 else ''}) have changed since compression, "
            "and were stored losslessly. Remedy, to restore the ratio: "
            "ModelCompressionAPI(profile).compress(model.model).",
            UserWarning,
            stacklevel=4,
        )
    return True


def _held_tensors(module: torch.nn.Module) -> dict[str, Any]:
    """What a module holds, by the names that an archive has for it: tensors, and quantized weights."""
    tensors = {k: v for k, v in module.state_dict(keep_vars=True).items() if is_torch(v)}
    for path, layer in module.named_modules(remove_duplicate=False):
        if (coded := _coded(layer)) is not None:
            prefix = f"{path}." if path else ""
            for name in [n for n in tensors if n.startswith(f"{prefix}coded.")]:
                del tensors[name]
            tensors[f"{prefix}weight"] = coded
    return tensors


def _coded(layer: Any) -> Any:
    """The weight of a layer that runs quantized; only where some do is their module there."""
    codes = sys.modules.get("capibara.compress.torch_codes")
    coded = getattr(layer, "coded", None)
    return coded if codes is not None and isinstance(coded, codes.CodedWeight) else None


def _changed_tensors(archive: Archive, held: Mapping[str, Any]) -> list[str]:
    """Names of the tensors that are not what the archive holds.

    Every number is compared: counters of versions do not see what is written to ``parameter.data``.
    """
    return [name for name, value in held.items() if not _is_stored(archive, name, value)]


def _is_stored(archive: Archive, name: str, value: Any) -> bool:
    if name not in archive.entries or archive[name].shape != tuple(value.shape):
        return False
    if not is_torch(value):
        return _are_stored_codes(archive, name, value)
    if value.is_meta:
        return True  # it has no numbers that could be others
    entry, stored = archive[name], archive.read(name).reshape(-1)
    bits, form, _ = to_bits(value, name)
    if form != entry.format:
        # Of a module that was converted: what its numbers become on the way.
        stored, _, _ = to_bits(torch_from_bits(stored, entry.format, entry.shape).to(value.dtype), name)
    return np.array_equal(bits, stored)


def _is_converted(archive: Archive, name: str, value: Any) -> bool:
    import torch

    return format_of(torch.empty(0, dtype=value.dtype), name) != archive[name].format


def _are_stored_codes(archive: Archive, name: str, coded: Any) -> bool:
    import torch

    entry, parts = archive[archive[name].same_as or name], stored_parts(archive, name)
    if isinstance(parts, str):
        return False
    fresh = dict(type(coded)(parts, entry.format, entry.shape, coded.dtype).named_buffers())
    mine = {key: buffer.cpu() for key, buffer in coded.named_buffers()}
    return mine.keys() == fresh.keys() and all(torch.equal(mine[key], fresh[key]) for key in mine)


def _write_changed(
    target: Path, archive: Archive, held: Mapping[str, Any], changed: list[str], metadata: Mapping[str, str]
) -> None:
    """Write an archive of what a module holds now.

    Args:
      target: the file; it may be the archive's own.
      archive: of the module as it was; tensors that are not ``changed`` keep their codes.
      held: of :func:`_held_tensors`.
      changed: of :func:`_changed_tensors`.
      metadata: text to keep.

    Raises:
      CompressError: a tensor of a kind that files do not know.
      OSError: the folder is missing, the disk is full …; an existing file is then unchanged.
    """
    others = set(changed)
    first: dict[object, str] = {}  # tied weights are written once
    with ArchiveWriter(target, metadata) as out:
        for name, value in held.items():
            known = archive[name].same_as or name if name not in others else None
            key = ("coded", known) if known is not None else ("held", _memory(value))
            if (tied := first.setdefault(key, name)) != name:
                out.add_tied(name, tied)
            elif known is not None:
                out.add_coded(name, archive, known)
            else:
                bits, form, shape = to_bits(value if is_torch(value) else value.dense(), name)
                entry = archive.entries.get(name)
                # Another codec without loss was chosen for who reads the file.
                keeps = entry is not None and entry.codec in EXACT and entry.format == form
                codec, settings = (entry.codec, entry.settings) if entry and keeps else ("lossless", {})
                out.add(name, bits, form, shape, codec=codec, settings=settings)


def _memory(value: Any) -> object:
    """Equal for two names of one tensor."""
    if not is_torch(value) or value.numel() == 0:
        return id(value)
    return (value.data_ptr(), value.dtype, tuple(value.shape), tuple(value.stride()), str(value.device))

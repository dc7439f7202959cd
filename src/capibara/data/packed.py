"""Whether a run's rows are packed documents, or windows of all text."""

from __future__ import annotations

from capibara.config.sections import DataSection
from capibara.data.conversations import is_text
from capibara.data.records import RECORD_SUFFIXES, read_records

__all__ = ["PACKED", "decided", "is_packed"]

PACKED = {"tokens": "int32", "segments": "int32", "positions": "int32", "weights": "float32"}
"""Arrays of a batch of packed documents, all ``[rows, length]``, and their dtypes."""


def is_packed(settings: DataSection) -> bool:
    """Whether documents are packed: as the settings say, or because there are others than plain texts.

    With ``data.packing=auto`` the first record of each file of records is read; files that are not there have none.
    """
    if settings.packing != "auto":
        return settings.packing == "documents"
    return bool(settings.weights) or any(_needs_packing(path) for path in settings.paths)


def decided(settings: DataSection) -> DataSection:
    """The same settings, with ``packing=auto`` replaced by what :func:`is_packed` finds: files are read no more."""
    if settings.packing != "auto":
        return settings
    return settings.replace(packing="documents" if is_packed(settings) else "windows")


def _needs_packing(path: str) -> bool:
    if not path.endswith(RECORD_SUFFIXES):
        return False
    if path.endswith(".parquet"):
        return True
    try:
        first = next(iter(read_records(path)), None)
    except (OSError, ValueError):
        return False  # reported where it is read
    return first is not None and not is_text(first[1])

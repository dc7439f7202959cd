"""Statistics of a compressed model."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from capibara.compress.container import Archive, Entry

__all__ = ["CompressionStats", "TensorStats", "tensor_stats"]


@dataclass(frozen=True)
class TensorStats:
    """One tensor.

    Attributes:
      name, dtype, shape, codec: as in the archive; ``codec`` is ``"= other"`` for a second name of another tensor.
      original_bytes, compressed_bytes: of its data, without the index.
      error: relative, √(Σ(w′ − w)² / Σw²); ``None`` if the original is not known.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    original_bytes: int
    compressed_bytes: int
    error: float | None


@dataclass(frozen=True)
class CompressionStats:
    """A compressed model.

    Attributes:
      original_bytes: of all tensors, before merging neurons (if any were merged).
      compressed_bytes: of the whole file.
      weight_error: relative error of all weights together, √(Σ(w′ − w)² / Σw²). If neurons were merged, that of the
        worst layer over all directions of its inputs.
      output_error: relative error of the outputs on validation data; ``None`` without any.
      accuracy, original_accuracy: on labelled validation data, otherwise ``None``.
      fidelity: the value compared with ``preserve_accuracy_threshold``.
      seconds: the time of compression.
      executor: the engine that ran the codecs.
      tensors: one by one.
    """

    original_bytes: int
    compressed_bytes: int
    weight_error: float
    output_error: float | None
    accuracy: float | None
    original_accuracy: float | None
    fidelity: float
    seconds: float
    executor: str
    tensors: tuple[TensorStats, ...]

    @property
    def compression_ratio(self) -> float:
        """Original bytes over the file's bytes."""
        return self.original_bytes / self.compressed_bytes

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        out = asdict(self)
        out["tensors"] = [{**t, "shape": list(t["shape"])} for t in out["tensors"]]
        return {**out, "compression_ratio": self.compression_ratio}

    def __str__(self) -> str:
        lines = [
            f"{self.original_bytes:,} bytes as {self.compressed_bytes:,}: ratio {self.compression_ratio:.3f}, "
            f"weights' relative error {self.weight_error:.4g}"
            + ("" if self.output_error is None else f", outputs' {self.output_error:.4g}")
            + (
                ""
                if self.accuracy is None
                else f", accuracy {self.accuracy:.4g} of {self.original_accuracy:.4g}"
            )
        ]
        width = max((len(t.name) for t in self.tensors), default=0)
        for t in self.tensors:
            error = "" if t.error is None else f"  {t.error:.4g}"
            lines.append(
                f"  {t.name:<{width}}  {t.dtype:<5} {'×'.join(map(str, t.shape)) or 'scalar':<14} {t.codec:<12} "
                f"{t.original_bytes:>12,} {t.compressed_bytes:>12,}{error}"
            )
        return "\n".join(lines)


def tensor_stats(entry: Entry, error: float | None) -> TensorStats:
    """Statistics of an archive's entry."""
    codec = entry.codec if entry.same_as is None else f"= {entry.same_as}"
    return TensorStats(
        entry.name, entry.format.name, entry.shape, codec, entry.original_bytes, entry.coded_bytes, error
    )


def stats_of(archive: Archive, known: dict[str, Any]) -> CompressionStats:
    """Statistics of an archive and its (untrusted) metadata."""

    def number(key: str) -> float | None:
        value = known.get(key)
        if not isinstance(value, float | int) or isinstance(value, bool) or not math.isfinite(value):
            return None
        return float(value)

    original = number("original_bytes")
    whole = sum(e.original_bytes for e in archive)
    if original is not None and whole <= original < 1e18:
        whole = int(original)
    weight = number("weight_error")
    fidelity = number("fidelity")
    return CompressionStats(
        whole, archive.size, math.nan if weight is None else weight,
        number("output_error"), number("accuracy"), number("original_accuracy"),
        math.nan if fidelity is None else fidelity, number("seconds") or 0.0, str(known.get("executor", ""))[:40],
        tuple(tensor_stats(e, None) for e in archive),
    )  # fmt: skip

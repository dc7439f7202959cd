"""The goals of compressing a model: one frozen object, validated when it is created."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from capibara.compress.codecs.protocol import CODECS
from capibara.compress.errors import CompressError
from capibara.errors import did_you_mean

__all__ = ["EXACT", "FIXED", "MODES", "CompressionProfile"]

MODES: dict[str, float | None] = {"lossless": None, "conservative": 2.0, "balanced": 4.0, "aggressive": 8.0}
EXACT = ("lossless", "exponent", "zeros")  # codecs that lose nothing
FIXED = ("int8", "int4", "nf4")  # codecs that have a ratio of their own


@dataclass(frozen=True)
class CompressionProfile:
    """How far to compress a model, and how.

    Attributes:
      strategy: ``"auto"``: for each tensor the codec with the least error for the size; ``"jax"``: the same, computed
        by JAX if it is installed (otherwise with a warning); ``"tropical"``: merge neurons of a ReLU network
        (:mod:`~capibara.compress.merged_models`), which stays an ordinary network; or the name of a codec in
        :data:`capibara.compress.codecs.protocol.CODECS`, which is then the only lossy one.
      mode: the target ratio if ``target_compression_ratio`` is ``None``: ``"lossless"`` none (bit-exact);
        ``"conservative"`` 2; ``"balanced"`` 4, but with a codec of fixed width (``int8``, ``int4``, ``nf4``) that of
        its width; ``"aggressive"`` 8.
      target_compression_ratio: original bytes over the file's bytes, above 1; not with ``"lossless"``. Met within 2
        %; with a single codec of fixed width a file may be smaller.
      preserve_accuracy_threshold: the least fidelity, above 0 and at most 1; ``None``: any. Fidelity is the model's
        accuracy over the original's with labelled validation data, 1 − the relative error of its outputs with
        unlabelled data, and 1 − the relative error of its weights without data.
      exclude: patterns (as in :mod:`fnmatch`) of names of tensors that stay exact.
      smallest: tensors with fewer elements than this, and vectors, stay exact: they are a thousandth of a model and
        its most sensitive part.

    Raises:
      CompressError: a value is invalid.
    """

    strategy: str = "auto"
    mode: str = "balanced"
    target_compression_ratio: float | None = None
    preserve_accuracy_threshold: float | None = None
    exclude: tuple[str, ...] = ()
    smallest: int = 4096

    def __post_init__(self) -> None:
        known = ["auto", "jax", "tropical", *CODECS]
        if self.strategy not in known:
            raise CompressError(
                f"strategy: got {self.strategy!r}, expected one of {', '.join(known)}."
                f"{did_you_mean(str(self.strategy), known)}"
            )
        if not isinstance(self.mode, str) or self.mode not in MODES:
            raise CompressError(
                f"mode: got {self.mode!r}, expected one of {', '.join(MODES)}.{did_you_mean(str(self.mode), MODES)}"
            )
        ratio, least = self.target_compression_ratio, self.preserve_accuracy_threshold
        if ratio is not None and not (_is_number(ratio) and 1 < ratio < math.inf):
            raise CompressError(
                f"target_compression_ratio: got {ratio!r}, expected a number above 1, such as 4, or None"
            )
        if ratio is not None and (self.mode == "lossless" or self.strategy in EXACT):
            raise CompressError(
                f"target_compression_ratio: got {ratio!r}, but lossless compression has no target ratio. "
                "Remedy: omit it, or choose another mode and strategy."
            )
        if least is not None and not (_is_number(least) and 0 < least <= 1):
            raise CompressError(
                f"preserve_accuracy_threshold: got {least!r}, expected a number above 0 and at most 1, or None"
            )
        if not isinstance(self.exclude, list | tuple | set | frozenset) or not all(
            isinstance(p, str) for p in self.exclude
        ):
            raise CompressError(
                f"exclude: got {self.exclude!r}, expected patterns of names, such as ('*.bias', 'head.*')"
            )
        object.__setattr__(self, "exclude", tuple(self.exclude))
        if self.strategy == "tropical" and (self.exclude or self.smallest != 4096 or self.mode == "lossless"):
            raise CompressError(
                "strategy: 'tropical' merges neurons of all hidden layers, which loses something in each. "
                "Remedy: leave exclude, smallest and mode='lossless' out."
            )
        if not isinstance(self.smallest, int) or isinstance(self.smallest, bool) or self.smallest < 0:
            raise CompressError(f"smallest: got {self.smallest!r}, expected an integer, 0 or more")

    @property
    def ratio(self) -> float | None:
        """The target ratio; ``None``: lossless, or :attr:`own_width`."""
        if self.strategy in EXACT or self.own_width:
            return None
        return (
            self.target_compression_ratio if self.target_compression_ratio is not None else MODES[self.mode]
        )

    @property
    def own_width(self) -> bool:
        """Whether the strategy's codec determines the size: its width is fixed, and no ratio is given."""
        return self.strategy in FIXED and self.target_compression_ratio is None and self.mode == "balanced"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; ``CompressionProfile(**…)`` reads them."""
        out = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**out, "exclude": list(self.exclude)}


def _is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)

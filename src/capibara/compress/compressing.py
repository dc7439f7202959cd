"""The compression of one model: surveyed once, then written at one or several ratios, and measured."""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from capibara.compress.allocation import Allocation, Survey, allocate, everywhere, survey
from capibara.compress.calibration.layers import layer_moments
from capibara.compress.codecs.executors import best_executor
from capibara.compress.codecs.fixed import Fixed
from capibara.compress.codecs.protocol import CODECS
from capibara.compress.compressed import PROFILE, STATS, CompressedModel, make_folder, open_compressed
from capibara.compress.container import Archive, ArchiveWriter
from capibara.compress.curves import moments_for
from capibara.compress.errors import CompressError, TargetError
from capibara.compress.merged_models import (
    MERGED,
    Merger,
    training_inputs,
    worst_error,
)
from capibara.compress.models.adapters import Adapter, TreeAdapter, adapt
from capibara.compress.models.source import Tensors, find_tied
from capibara.compress.profile import EXACT, FIXED, CompressionProfile
from capibara.compress.sensitivity import by_outputs, by_scale
from capibara.compress.system.engines import strategy_engine
from capibara.compress.validation import Measured, Validation
from capibara.compress.writing import add_tensors, change_metadata, compare

__all__ = ["Compression", "Merging", "Progress"]

Progress = Callable[[str, int], None]
_STATS_SIZE = 220  # bytes of the metadata's numbers, which are only known when the archive is written


class Compression:
    """The compression of one model; its measurements are shared by several ratios."""

    def __init__(
        self, profile: CompressionProfile, adapter: Adapter, data: Any, progress: Progress | None = None
    ) -> None:
        self.profile, self.adapter, self.progress = profile, adapter, progress
        self.validation = None if data is None else Validation(adapter, data)
        self.tied = {**find_tied(adapter.tensors), **adapter.tied}
        self.began = time.perf_counter()
        self._survey: Survey | None = None
        self._alone_surveys: dict[str, Survey] = {}
        self.weights: dict[str, float] = {}

    def surveyed(self) -> Survey:
        """The ways to store each tensor; measured once."""
        if self._survey is None:
            self._survey = self.survey_of(self.adapter.tensors, self.progress)
            if self.validation is None:
                self.weights = by_scale(self._survey)
            else:
                self.weights = by_outputs(self.adapter, self.validation, self._survey, self.moments)
        return self._survey

    def survey_of(
        self, source: Tensors, progress: Progress | None = None, codecs: list[str] | None = None
    ) -> Survey:
        """The same for other values of these tensors, or with other codecs than the profile's."""
        if codecs is None and self.profile.strategy not in ("auto", "jax"):
            codecs = [self.profile.strategy]
        metadata = len(json.dumps(self.metadata(), separators=(",", ":"))) + _STATS_SIZE
        return survey(
            source, codecs=codecs, tied=self.tied, exclude=self.profile.exclude, smallest=self.profile.smallest,
            metadata=metadata, moments=self.moments, progress=progress,
        )  # fmt: skip

    @functools.cached_property
    def moments(self) -> dict[str, dict[str, Any]]:
        """Second moments of the inputs of layers, on the validation data."""
        if self.validation is None:
            return {}
        return layer_moments(self.adapter, (x for x, _ in self.validation.batches))

    def metadata(self) -> dict[str, str]:
        profile = json.dumps(self.profile.as_dict(), separators=(",", ":"))
        return {**self.adapter.metadata, PROFILE: profile}

    def make(self, ratio: float | None) -> CompressedModel:
        """The model at a ratio; ``None``: lossless."""
        if ratio is not None:
            return self.at_ratio(ratio)
        if self.profile.own_width:
            return self.write(self.own_width(), progress=self.progress)
        exact = self.profile.strategy if self.profile.strategy in EXACT else "lossless"
        options: dict[str, Any] = {"exclude": self.profile.exclude, "smallest": self.profile.smallest}
        chosen = None if exact == "lossless" else everywhere(self.adapter.tensors, exact, **options)
        return self.write(chosen, progress=self.progress)

    def at_ratio(self, ratio: float) -> CompressedModel:
        """The model at a ratio. With data, a choice from all codecs is compared with those of single codecs: the
        error of the outputs is not exactly the sum of the tensors' errors."""
        chosen = self.allocate(ratio)
        made = self.write(chosen, progress=self.progress)
        if self.validation is None or self.profile.strategy not in ("auto", "jax"):
            return made
        for codec in CODECS:
            if (other := self._alone(codec, ratio, chosen)) is not None:
                again = self.write(other)
                better = (again.stats.output_error or 0.0) < (made.stats.output_error or 0.0)
                met = 0.996 < again.stats.compression_ratio / ratio < 1.02
                made = again if better and met else made
        return made

    def _alone(self, codec: str, ratio: float, chosen: Allocation) -> Allocation | None:
        """What the codec as a strategy makes of each tensor, where that is nearly as good as what was chosen, by
        estimate."""
        if codec in EXACT or not self._may_differ(codec, ratio, chosen):
            return None
        try:
            other = allocate(self._surveyed_alone(codec), ratio, weights=self.weights)
        except CompressError:
            return None
        return other if other.points and other.error < 1.25 * chosen.error else None

    def _may_differ(self, codec: str, ratio: float, chosen: Allocation) -> bool:
        """Whether a codec alone can meet the ratio, and is not what was chosen: looked at without a survey."""
        if codec not in FIXED:
            return any(p.codec != codec for p in chosen.points.values())
        found, how = self.surveyed(), CODECS[codec]
        assert isinstance(how, Fixed)
        least = sum(min(c.points[0].size, c.count * how.kind.bits / 8) for c in found.curves.values())
        return found.fixed + least < 1.02 * found.total / ratio

    def _surveyed_alone(self, codec: str) -> Survey:
        """The survey of one codec as a strategy.

        That of all codecs has no points of a fixed-width one where "uniform" does better, tensor by tensor and as far
        as is seen there; the whole model may do better with it nevertheless, so that these are surveyed once more.
        """
        if codec not in self._alone_surveys:
            found = self.surveyed()
            self._alone_surveys[codec] = (
                self.survey_of(self.adapter.tensors, codecs=[codec]) if codec in FIXED
                else replace(found, curves={n: c.only(codec) for n, c in found.curves.items()})
            )  # fmt: skip
        return self._alone_surveys[codec]

    def allocate(self, ratio: float) -> Allocation:
        """The allocation of tensors at a ratio."""
        return allocate(self.surveyed(), ratio, weights=self.weights)

    def own_width(self) -> Allocation:
        """The profile's codec at its own width, for every tensor that may be lossy."""
        codec = self.profile.strategy
        options: dict[str, Any] = {"exclude": self.profile.exclude, "smallest": self.profile.smallest}
        found = everywhere(self.adapter.tensors, codec, **options)
        forms = self.adapter.tensors.forms
        points = {
            n: replace(p, settings=moments_for(codec, self.moments.get(n), forms[n][1]))
            for n, p in found.points.items()
        }
        return replace(found, points=points)

    def good(self, made: CompressedModel) -> bool:
        """Whether enough accuracy is preserved."""
        least = self.profile.preserve_accuracy_threshold
        return least is None or made.stats.fidelity >= least

    def finish(self) -> CompressedModel:
        """The model at the profile's ratio."""
        made = self.make(self.profile.ratio)
        if not self.good(made):
            raise self.failure(made)
        return made

    def failure(self, made: CompressedModel) -> TargetError:
        """The error for a model that lost too much, with measured alternatives at lower ratios."""
        points = [(made.stats.compression_ratio, made.stats.fidelity)]
        share = self.profile.ratio or made.stats.compression_ratio
        while (share := share / 1.4) > 1.05:
            one = self.make(share)
            points.append((one.stats.compression_ratio, one.stats.fidelity))
            if self.good(one) or one.stats.weight_error == 0:
                break
        return TargetError(
            f"preserve_accuracy_threshold: {self.profile.preserve_accuracy_threshold} cannot be had at a ratio of "
            f"{made.stats.compression_ratio:.2f}, where the fidelity is {made.stats.fidelity:.4f}. "
            "Remedy: another ratio or threshold.",
            sorted(set(points)),
        )

    def known(self, weight_error: float, measured: Measured | None) -> dict[str, Any]:
        """Statistics to store in the metadata."""
        return {
            "weight_error": weight_error,
            "output_error": None if measured is None else measured.error,
            "accuracy": None if measured is None else measured.accuracy,
            "original_accuracy": None if measured is None else measured.reference,
            "fidelity": max(1 - weight_error, 0.0) if measured is None else measured.fidelity,
            "seconds": round(time.perf_counter() - self.began, 3),
            "executor": self.executor(),
        }

    def executor(self) -> str:
        """The engine of the codecs."""
        with strategy_engine(self.profile.strategy):
            return best_executor().name

    def write(
        self, chosen: Allocation | None, tuned: Tensors | None = None, progress: Progress | None = None
    ) -> CompressedModel:
        """Write the archive, decode it, and measure."""
        folder, keeper = make_folder()
        path = folder / "model.capi"
        source = self.adapter.tensors
        # Sizes were looked for with the quickest executor: bytes are the same from all of them.
        with strategy_engine(self.profile.strategy), ArchiveWriter(path, self.metadata()) as archive:
            add_tensors(
                archive, tuned or source, self.tied, chosen, progress,
                coded=tuned is None and self.profile.strategy != "jax",
            )  # fmt: skip
        errors, lost, whole = compare(path, source)
        weight_error = math.sqrt(lost / whole) if whole else 0.0
        measured = None
        if self.validation is not None:
            with Archive(path) as archive:
                measured = self.validation.measure(
                    self.adapter.rebuild(lambda n: archive.read(n).reshape(-1))
                )
        known = self.known(weight_error, measured)
        change_metadata(path, {STATS: json.dumps(known, separators=(",", ":"))})
        model = open_compressed(path, self.adapter, keeper)
        tensors = tuple(replace(t, error=errors.get(t.name)) for t in model.stats.tensors)
        model.stats = replace(model.stats, tensors=tensors)
        return model


class Merging(Compression):
    """The compression of a ReLU network by merging neurons."""

    def surveyed(self) -> Survey:
        raise CompressError(
            "strategy: 'tropical' has no estimate beforehand. Remedy: progressive_compression, or another strategy."
        )

    @functools.cached_property
    def merger(self) -> Merger:
        source = self.adapter.tensors
        self.original = sum(math.prod(shape) * form.bits // 8 for form, shape in source.forms.values())
        inputs = None
        if self.validation is not None:
            inputs = training_inputs(x for x, _ in self.validation.batches)

        def size(network: Any) -> int:
            folder, _ = make_folder()
            return self.store(network, folder / "model.capi") + _STATS_SIZE

        return Merger(self.adapter.model, inputs, size, self.original)

    def adapted(self, network: Any) -> Adapter:
        return adapt(network, self.adapter.apply if isinstance(self.adapter, TreeAdapter) else None)

    def store(self, network: Any, path: Path) -> int:
        """Write a network losslessly; returns its size in bytes."""
        adapter = self.adapted(network)
        metadata = {**adapter.metadata, PROFILE: self.metadata()[PROFILE], MERGED: "1"}
        with ArchiveWriter(path, metadata) as archive:
            add_tensors(archive, adapter.tensors, adapter.tied, None)
        return path.stat().st_size

    def make(self, ratio: float | None) -> CompressedModel:
        assert ratio is not None  # the profile has one
        found = self.merger.to_ratio(ratio)
        folder, keeper = make_folder()
        path = folder / "model.capi"
        self.store(found.network, path)
        measured = None if self.validation is None else self.validation.measure(found.network)
        known = {**self.known(worst_error(found), measured), "original_bytes": self.original}
        change_metadata(path, {STATS: json.dumps(known, separators=(",", ":"))})
        model = open_compressed(path, self.adapted(found.network), keeper)
        model.merged = found
        return model

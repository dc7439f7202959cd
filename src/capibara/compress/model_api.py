"""Compress a model: survey its tensors, weigh them, choose codecs and rates, write the archive, and look at the result.

Everything that is said of the result was measured on the finished file: it is decoded, compared with the original, and,
with validation data, run.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from capibara.compress.allocation import Allocation, Survey, allocate, check_ratio, everywhere, survey
from capibara.compress.analysis import Compressibility, analyse
from capibara.compress.calibration.layers import layer_moments
from capibara.compress.codecs.executors import best_executor
from capibara.compress.compressed import PROFILE, STATS, CompressedModel, make_folder, open_compressed
from capibara.compress.container import Archive, ArchiveWriter
from capibara.compress.errors import CompressError, TargetError
from capibara.compress.fine_tuning import tune
from capibara.compress.models.adapters import Adapter, adapt
from capibara.compress.models.gradients import distance
from capibara.compress.models.source import Tensors, find_twins
from capibara.compress.profile import EXACT, CompressionProfile
from capibara.compress.running import check_decode
from capibara.compress.sensitivity import by_outputs, by_scale
from capibara.compress.system.engines import strategy_engine
from capibara.compress.validation import Validation, as_batches
from capibara.compress.writing import add_tensors, change_metadata, compare

__all__ = ["ModelCompressionAPI"]

Progress = Callable[[str, int], None]
_STATS_SIZE = 220  # bytes of the metadata's numbers, which are only known when the archive is written


class ModelCompressionAPI:
    """Compresses models.

    Args:
      profile: what to aim at; ``CompressionProfile()`` by default.
    """

    def __init__(self, profile: CompressionProfile | None = None) -> None:
        if profile is not None and not isinstance(profile, CompressionProfile):
            raise CompressError(f"profile: got {type(profile).__name__}, expected a CompressionProfile")
        self.profile = profile or CompressionProfile()

    def compress(
        self,
        model: Any,
        validation_data: Any = None,
        *,
        apply: Callable[[Any, Any], Any] | None = None,
        decode: bool | str = True,
        progress: Progress | None = None,
    ) -> CompressedModel:
        """Make a model smaller, as the profile says.

        Args:
          model: a ``torch.nn.Module``; nested dicts, lists and tuples of arrays (a state dict, a JAX tree); anything
            with ``params`` and ``apply(params, inputs)``, or a pair of what has ``apply`` and its parameters.
          validation_data: batches: an array, a dict of inputs by name, a pair ``(inputs, classes)``, or a list of
            these. Codecs and rates are then chosen for the least error of the outputs; else for that of the weights.
          apply: runs a tree of arrays: ``apply(tree, inputs)``.
          decode: as in :meth:`CompressedModel.load`.
          progress: called with a tensor's name and bytes, twice for each: when it is surveyed, when it is written.

        Raises:
          CompressError: a model of no known kind, a ratio that cannot be met.
          TargetError: the ratio can be met, but not with the accuracy that is to be preserved; it holds the frontier.
        """
        check_decode(decode)
        adapter = adapt(model, apply)
        made = _Compression(self.profile, adapter, validation_data, progress).finish()
        return made if decode is True else made.reopened(adapter, decode)

    def decompress(self, compressed: CompressedModel) -> Any:
        """The model again, of the kind that was compressed, with the numbers that its archive holds.

        Raises:
          CompressError: not a :class:`CompressedModel`.
          DamagedError: a tensor is damaged.
        """
        if not isinstance(compressed, CompressedModel):
            raise CompressError(f"compressed: got {type(compressed).__name__}, expected a CompressedModel")
        with strategy_engine(self.profile.strategy):
            return compressed.decompress()

    def analyze_compressibility(
        self,
        model: Any,
        validation_data: Any = None,
        *,
        apply: Callable[[Any, Any], Any] | None = None,
        progress: Progress | None = None,
    ) -> Compressibility:
        """How far a model can be compressed, and at what error: estimated, nothing is written.

        Args:
          model, validation_data, apply: as in :meth:`compress`.
          progress: called with a tensor's name and bytes, when it was surveyed.
        """
        work = _Compression(self.profile, adapt(model, apply), validation_data, progress)
        return analyse(work.surveyed(), work.weights)

    def progressive_compression(
        self,
        model: Any,
        validation_data: Any = None,
        *,
        ratios: Sequence[float] = (2.0, 4.0, 6.0, 8.0, 10.0),
        apply: Callable[[Any, Any], Any] | None = None,
        progress: Progress | None = None,
    ) -> list[CompressedModel]:
        """The model at one ratio after another, as far as the profile's ``preserve_accuracy_threshold`` allows.

        The tensors are surveyed once for all ratios. The profile's own ratio is not looked at.

        Args:
          model, validation_data, apply, progress: as in :meth:`compress`.
          ratios: ascending.

        Returns:
          One for each ratio, up to the last that can be met and preserves enough.

        Raises:
          CompressError: ratios that do not ascend, or the first one cannot be met.
          TargetError: the first ratio loses too much already.
        """
        targets = [check_ratio(r) for r in ratios] if isinstance(ratios, Iterable) else []
        if not targets or any(b <= a for a, b in itertools.pairwise(targets)):
            raise CompressError(
                f"ratios: got {ratios!r}, expected ascending numbers above 1, such as (2, 4, 8)"
            )
        out: list[CompressedModel] = []
        work = _Compression(self.profile, adapt(model, apply), validation_data, progress)
        for ratio in targets:
            try:
                made = work.make(ratio)
            except CompressError:
                if not out:
                    raise
                break
            if not work.good(made):
                if not out:
                    raise work.failure(made)
                break
            out.append(made)
        return out

    def compress_with_fine_tuning(
        self,
        model: Any,
        data: Any,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        steps: int = 100,
        learning_rate: float = 1e-4,
        validation_data: Any = None,
        apply: Callable[[Any, Any], Any] | None = None,
        progress: Callable[[int, float], None] | None = None,
    ) -> CompressedModel:
        """Train the weights for what they become, straight through the rounding, and compress those.

        Args:
          model, apply: as in :meth:`compress`; a module, or arrays of JAX. The model itself is not changed.
          data: batches to train on, as ``validation_data``; with targets of any kind that ``loss`` takes.
          loss: a scalar from outputs and targets. Without one it is the mean squared distance from the original's
            outputs, and targets are refused.
          steps: of Adam, over the batches in turn.
          learning_rate: Adam's.
          validation_data: as in :meth:`compress`; what the result is measured on.
          progress: called after each step, with its number and loss.

        Raises:
          CompressError: as :meth:`compress`, a loss that is not finite, or a profile without loss.
          TargetError: as :meth:`compress`.
        """
        if self.profile.ratio is None and not self.profile.own_width:
            raise CompressError("profile: it loses nothing, so that there is nothing to tune for")
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise CompressError(f"steps: got {steps!r}, expected a whole number above 0")
        if not isinstance(learning_rate, float | int) or not 0 < learning_rate < math.inf:
            raise CompressError(f"learning_rate: got {learning_rate!r}, expected a number above 0")
        adapter = adapt(model, apply)
        batches = as_batches(data)
        if loss is None:
            if any(t is not None for _, t in batches):
                raise CompressError(
                    "data: there are targets, but no loss to compare outputs with. Remedy: loss=…"
                )
            batches = [(x, adapter.run(adapter.model, x)) for x, _ in batches]
        work = _Compression(self.profile, adapter, validation_data)
        # Tuned numbers spread a little: they take more bytes at the same steps.
        ratio = self.profile.ratio
        chosen = work.own_width() if ratio is None else work.allocate(1.01 * ratio)
        tuned = tune(
            adapter, batches, chosen, loss or distance,
            steps=steps, learning_rate=learning_rate, progress=progress,
        )  # fmt: skip
        source = adapter.tensors
        forms = source.forms
        changed = Tensors(forms, lambda name: tuned[name] if name in tuned else source.read(name))
        made = work.write(chosen, changed)
        if ratio is not None and made.stats.compression_ratio < 0.985 * ratio:
            # Other steps than those that the numbers were tuned for: a last resort.
            again = work.survey_of(changed)
            made = work.write(allocate(again, ratio, weights=work.weights), changed)
        if not work.good(made):
            raise work.failure(made)
        return made


class _Compression:
    """One model on its way; what was measured serves several ratios."""

    def __init__(
        self, profile: CompressionProfile, adapter: Adapter, data: Any, progress: Progress | None = None
    ) -> None:
        self.profile, self.adapter, self.progress = profile, adapter, progress
        self.validation = None if data is None else Validation(adapter, data)
        self.twins = {**find_twins(adapter.tensors), **adapter.tied}
        self.began = time.perf_counter()
        self._survey: Survey | None = None
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

    def survey_of(self, source: Tensors, progress: Progress | None = None) -> Survey:
        """The same of other numbers for these tensors."""
        metadata = len(json.dumps(self.metadata(), separators=(",", ":"))) + _STATS_SIZE
        return survey(
            source, codecs=None if self.profile.strategy in ("auto", "jax") else [self.profile.strategy],
            twins=self.twins, exclude=self.profile.exclude, smallest=self.profile.smallest, metadata=metadata,
            moments=self.moments, progress=progress,
        )  # fmt: skip

    @functools.cached_property
    def moments(self) -> dict[str, dict[str, Any]]:
        """Second moments of the inputs of linear layers, on the validation data."""
        if self.validation is None:
            return {}
        return layer_moments(self.adapter, (x for x, _ in self.validation.batches))

    def metadata(self) -> dict[str, str]:
        profile = json.dumps(self.profile.as_dict(), separators=(",", ":"))
        return {**self.adapter.metadata, PROFILE: profile}

    def make(self, ratio: float | None) -> CompressedModel:
        """The model at a ratio; ``None``: without loss."""
        if ratio is not None:
            return self.write(self.allocate(ratio))
        if self.profile.own_width:
            return self.write(self.own_width())
        exact = self.profile.strategy if self.profile.strategy in EXACT else "lossless"
        options: dict[str, Any] = {"exclude": self.profile.exclude, "smallest": self.profile.smallest}
        return self.write(None if exact == "lossless" else everywhere(self.adapter.tensors, exact, **options))

    def allocate(self, ratio: float) -> Allocation:
        """What becomes of each tensor at a ratio."""
        return allocate(self.surveyed(), ratio, weights=self.weights)

    def own_width(self) -> Allocation:
        """The profile's codec at its own width, for every tensor that may lose something."""
        codec = self.profile.strategy
        options: dict[str, Any] = {"exclude": self.profile.exclude, "smallest": self.profile.smallest}
        found = everywhere(self.adapter.tensors, codec, **options)
        points = {n: replace(p, settings=self.moments.get(n, {})) for n, p in found.points.items()}
        return replace(found, points=points)

    def good(self, made: CompressedModel) -> bool:
        """Whether enough of the accuracy is preserved."""
        least = self.profile.preserve_accuracy_threshold
        return least is None or made.stats.fidelity >= least

    def finish(self) -> CompressedModel:
        """The model at the profile's ratio."""
        made = self.make(self.profile.ratio)
        if not self.good(made):
            raise self.failure(made)
        return made

    def failure(self, made: CompressedModel) -> TargetError:
        """What to say of a model that lost too much, with what can be had below its ratio, measured by doing it."""
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

    def write(self, chosen: Allocation | None, tuned: Tensors | None = None) -> CompressedModel:
        """Write the archive, decode it, and measure."""
        folder, keeper = make_folder()
        path = folder / "model.capi"
        source = self.adapter.tensors
        # Sizes were looked for with the quickest executor: bytes are the same from all of them.
        with strategy_engine(self.profile.strategy), ArchiveWriter(path, self.metadata()) as archive:
            executor = best_executor().name
            add_tensors(archive, tuned or source, self.twins, chosen, self.progress)
        errors, lost, whole = compare(path, source)
        weight_error = math.sqrt(lost / whole) if whole else 0.0
        measured = None
        if self.validation is not None:
            with Archive(path) as archive:
                measured = self.validation.measure(
                    self.adapter.rebuild(lambda n: archive.read(n).reshape(-1))
                )
        known = {
            "weight_error": weight_error,
            "output_error": None if measured is None else measured.error,
            "accuracy": None if measured is None else measured.accuracy,
            "original_accuracy": None if measured is None else measured.reference,
            "fidelity": max(1 - weight_error, 0.0) if measured is None else measured.fidelity,
            "seconds": round(time.perf_counter() - self.began, 3),
            "executor": executor,
        }
        change_metadata(path, {STATS: json.dumps(known, separators=(",", ":"))})
        model = open_compressed(path, self.adapter, keeper)
        tensors = tuple(replace(t, error=errors.get(t.name)) for t in model.stats.tensors)
        model.stats = replace(model.stats, tensors=tensors)
        return model

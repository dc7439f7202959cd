"""Compress a model: survey its tensors, weigh them, choose codecs and rates, write the archive, and look at the result.

All figures in the result are measured on the finished file: it is decoded, compared with the original and, with
validation data, run.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from capibara.compress.allocation import allocate, check_ratio
from capibara.compress.analysis import Compressibility, analyse
from capibara.compress.compressed import CompressedModel
from capibara.compress.compressing import Compression, Merging, Progress
from capibara.compress.container import Archive
from capibara.compress.errors import CompressError
from capibara.compress.fine_tuning import mean_loss, tune
from capibara.compress.merged_models import (
    is_pairs,
    relu_chain,
)
from capibara.compress.models.adapters import adapt
from capibara.compress.models.gradients import distance
from capibara.compress.models.source import Tensors
from capibara.compress.profile import CompressionProfile
from capibara.compress.running import check_decode
from capibara.compress.system.engines import strategy_engine
from capibara.compress.validation import as_batches

__all__ = ["ModelCompressionAPI"]


class ModelCompressionAPI:
    """Compresses models.

    Args:
      profile: the goals; ``CompressionProfile()`` by default.
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
        """Compress a model according to the profile.

        Args:
          model: a ``torch.nn.Module``; nested dicts, lists and tuples of arrays (a state dict, a JAX tree); anything
            with ``params`` and ``apply(params, inputs)``, or a pair of an object with ``apply`` and its parameters.
          validation_data: batches: an array, a dict of inputs by name, a pair ``(inputs, classes)``, or a list of
            these. Codecs and rates then minimise the error of the outputs; otherwise that of the weights.
          apply: runs a tree of arrays: ``apply(tree, inputs)``.
          decode: as in :meth:`CompressedModel.load`.
          progress: called with each tensor's name and bytes twice: when it is surveyed and when it is written.

        Raises:
          CompressError: an unsupported kind of model, or a ratio that cannot be met.
          TargetError: the ratio can be met, but not with the accuracy to preserve; the error has the frontier.
        """
        check_decode(decode)
        work = self._work(model, validation_data, apply, progress)
        made = work.finish()
        return made if decode is True else made.reopened(decode)

    def decompress(self, compressed: CompressedModel) -> Any:
        """The decoded model, of the same kind as the original.

        Raises:
          CompressError: not a :class:`CompressedModel`.
          DamagedError: a tensor is damaged.
        """
        if not isinstance(compressed, CompressedModel):
            raise CompressError(f"compressed: got {type(compressed).__name__}, expected a CompressedModel")
        with strategy_engine(self.profile.strategy):
            return compressed.decompress()

    def _work(self, model: Any, data: Any, apply: Any, progress: Progress | None) -> Compression:
        if self.profile.strategy != "tropical":
            return Compression(self.profile, adapt(model, apply), data, progress)
        adapter = adapt(model, relu_chain if apply is None and is_pairs(model) else apply)
        return Merging(self.profile, adapter, data, progress)

    def analyze_compressibility(
        self,
        model: Any,
        validation_data: Any = None,
        *,
        apply: Callable[[Any, Any], Any] | None = None,
        progress: Progress | None = None,
    ) -> Compressibility:
        """Estimate how far a model can be compressed, and at what error; nothing is written.

        Args:
          model, validation_data, apply: as in :meth:`compress`.
          progress: called with each tensor's name and bytes after it is surveyed.
        """
        work = self._work(model, validation_data, apply, progress)
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
        """Compress a model at increasing ratios, as far as the profile's ``preserve_accuracy_threshold`` allows.

        The tensors are surveyed once for all ratios. The profile's own ratio is ignored.

        Args:
          model, validation_data, apply, progress: as in :meth:`compress`.
          ratios: ascending.

        Returns:
          One compressed model per ratio, up to the last that can be met with enough accuracy.

        Raises:
          CompressError: the ratios are not ascending, or the first one cannot be met.
          TargetError: the first ratio already loses too much.
        """
        targets = [check_ratio(r) for r in ratios] if isinstance(ratios, Iterable) else []
        if not targets or any(b <= a for a, b in itertools.pairwise(targets)):
            raise CompressError(
                f"ratios: got {ratios!r}, expected ascending numbers above 1, such as (2, 4, 8)"
            )
        out: list[CompressedModel] = []
        work = self._work(model, validation_data, apply, progress)
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
        """Fine-tune the weights through the rounding (straight-through gradients), then compress them.

        If the result is worse than that of :meth:`compress` (for example, because the learning rate is too high), a
        warning says so, and the result of :meth:`compress` is returned. They are compared by the error of the outputs
        on ``validation_data`` or, without it or with your own ``loss``, by the loss on ``data``.

        Args:
          model, apply: as in :meth:`compress`; a module, or JAX arrays. The model itself is not changed.
          data: batches to train on, as ``validation_data``; with targets of any kind that ``loss`` accepts.
          loss: a scalar function of outputs and targets. By default the mean squared distance from the original's
            outputs, without targets.
          steps: steps of Adam, cycling over the batches.
          learning_rate: Adam's.
          validation_data: as in :meth:`compress`; used to measure the result.
          progress: called after each step, with its number and loss.

        Raises:
          CompressError: as :meth:`compress`, a loss that is not finite, or a lossless profile.
          TargetError: as :meth:`compress`.
        """
        if self.profile.ratio is None and not self.profile.own_width:
            raise CompressError("profile: it loses nothing, so that there is nothing to tune for")
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
            raise CompressError(f"steps: got {steps!r}, expected an integer above 0")
        if not isinstance(learning_rate, float | int) or not 0 < learning_rate < math.inf:
            raise CompressError(f"learning_rate: got {learning_rate!r}, expected a number above 0")
        if self.profile.strategy == "tropical":
            raise CompressError(
                "strategy: 'tropical' is not tuned for. Remedy: compress, and train the ordinary model that comes out."
            )
        adapter = adapt(model, apply)
        batches = as_batches(data)
        if loss is None:
            if any(t is not None for _, t in batches):
                raise CompressError(
                    "data: there are targets, but no loss to compare outputs with. Remedy: loss=…"
                )
            batches = [(x, adapter.run(adapter.model, x)) for x, _ in batches]
        work = Compression(self.profile, adapter, validation_data)
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
        untuned = work.make(ratio)

        def score(one: CompressedModel) -> float:
            if loss is None and one.stats.output_error is not None:
                return one.stats.output_error
            with Archive(one.path) as archive:
                model = adapter.rebuild(lambda n: archive.read(n).reshape(-1))
            return mean_loss(adapter, model, batches, loss or distance)

        after, before = score(made), score(untuned)
        if not after <= before:
            warnings.warn(
                f"compress_with_fine_tuning: after {steps} steps the error is {after:.4g}, without them {before:.4g}: "
                f"the result is that without. Remedy: a lower learning_rate (it is {learning_rate}), or more steps.",
                RuntimeWarning,
                stacklevel=2,
            )
            made = untuned
        if not work.good(made):
            raise work.failure(made)
        return made

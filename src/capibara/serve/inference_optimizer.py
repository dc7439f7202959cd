"""How many texts at once, and how much of a prompt in a step: measured, for a target of milliseconds per token.

A step that has more texts takes longer, and a text then waits longer for its next token. Of the batches, and of the
sizes of the pieces in which prompts are read, the largest are taken whose steps stay below the target.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from capibara.core.paged import StepShape
from capibara.errors import ConfigError
from capibara.serve.engine.layers import as_computed, layers_apart, room_for_panels
from capibara.serve.engine.programs import Programs, pages_in_memory

__all__ = ["InferenceChoice", "Measured", "TpuInferenceOptimizer"]

_TIMES = 5
_PIECES = (32, 128, 512)


@dataclass(frozen=True)
class Measured:
    """The time of one step.

    Attributes:
      batch: texts that get a token. prefill_tokens: tokens of a prompt that it reads.
      cache_dtype: of keys and values. milliseconds: median of several steps.
    """

    batch: int
    prefill_tokens: int
    cache_dtype: str
    milliseconds: float


@dataclass(frozen=True)
class InferenceChoice:
    """What an optimizer has chosen, and why.

    Attributes:
      batch: texts at once. prefill_tokens: of prompts in a step. cache_dtype: of keys and values.
      target_ms: milliseconds per token. met: whether the steps chosen stay below them.
      measured: every step that was timed.
    """

    batch: int
    prefill_tokens: int
    cache_dtype: str
    target_ms: float
    met: bool
    measured: tuple[Measured, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The choice as plain values."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{'texts':>6} {'prompt tokens':>14} {'cache':>9} {'ms a step':>10}"]
        lines += [
            f"{m.batch:>6} {m.prefill_tokens:>14} {m.cache_dtype:>9} {m.milliseconds:>10.2f}"
            for m in self.measured
        ]
        met = "met" if self.met else "not met"
        lines.append(
            f"chosen: {self.batch} texts, {self.prefill_tokens} tokens of prompts in a step, {self.cache_dtype} cache; "
            f"{self.target_ms:g} ms per token: {met}"
        )
        return "\n".join(lines)


class TpuInferenceOptimizer:
    """Chooses how a model is served, from steps that are timed on the devices there are.

    Args:
      target_latency_ms: milliseconds per token of each text.
      batch_size_optimizer: take the largest batch whose steps stay below the target; otherwise the largest allowed.
      memory_efficient_attention: read prompts in pieces, so that the scores of a long one never stand in memory whole
        and texts that are being written do not wait for it; otherwise each prompt in one step.
      use_kv_cache: keep the keys and values of earlier tokens. Without them every token costs as much as reading the
        whole text before it: to compare with, and for nothing else.

    Raises:
      ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        target_latency_ms: float = 50.0,
        batch_size_optimizer: bool = True,
        memory_efficient_attention: bool = True,
        use_kv_cache: bool = True,
    ) -> None:
        number = not isinstance(target_latency_ms, bool) and isinstance(target_latency_ms, int | float)
        if not number or not 0 < target_latency_ms < 1e9:
            raise ConfigError(
                f"target_latency_ms={target_latency_ms!r}: expected milliseconds, a number above 0."
            )
        for name, value in (
            ("batch_size_optimizer", batch_size_optimizer),
            ("memory_efficient_attention", memory_efficient_attention),
            ("use_kv_cache", use_kv_cache),
        ):
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r}: expected True or False.")
        self.target_latency_ms = float(target_latency_ms)
        self.batch_size_optimizer = batch_size_optimizer
        self.memory_efficient_attention = memory_efficient_attention
        self.use_kv_cache = use_kv_cache

    def choose(
        self,
        model: Any,
        params: Any | None = None,
        *,
        max_batch_size: int,
        max_sequence_length: int,
        page_size: int = 16,
    ) -> InferenceChoice:
        """Time steps of a model, half of whose longest texts is in the cache, and choose.

        Args:
          model: a :class:`capibara.core.ModularCapibaraModel`. params: its parameters; by default its own.
          max_batch_size: texts at once, at most. max_sequence_length: tokens of a text, at most.
          page_size: positions of a page of the cache.

        Raises:
          ConfigError: the cache of one text does not fit into the memory.
        """
        timer = _Timer(model, params, max_sequence_length, page_size)
        own = np.dtype(model.config.precision.compute_dtype).name
        dtypes = [own] if own == "bfloat16" else [own, "bfloat16"]
        sizes = sorted({min(max_batch_size, 4**n) for n in range(max_batch_size.bit_length())})
        if not self.batch_size_optimizer:
            sizes = [max_batch_size]
        batch, dtype, met = sizes[0], own, False
        for dtype in dtypes:
            for size in sizes:
                if timer.fits(size, dtype) < size:
                    break
                time_ms = timer(size, 0, dtype)
                if time_ms > self.target_latency_ms and size > sizes[0]:
                    break
                batch, met = size, time_ms <= self.target_latency_ms
            if met or not timer.attends:
                break  # a smaller cache would be less exact for nothing
        if not self.memory_efficient_attention:
            return self._of(timer, batch, max_sequence_length, dtype, met)
        pieces = _PIECES[0]
        for size in _PIECES:
            time_ms = timer(batch, min(size, max_sequence_length), dtype)
            if time_ms > self.target_latency_ms and size > _PIECES[0]:
                break
            pieces, met = min(size, max_sequence_length), met and time_ms <= self.target_latency_ms
            if size >= max_sequence_length:
                break
        return self._of(timer, batch, pieces, dtype, met)

    def _of(self, timer: _Timer, batch: int, pieces: int, dtype: str, met: bool) -> InferenceChoice:
        return InferenceChoice(batch, pieces, dtype, self.target_latency_ms, met, tuple(timer.found))


class _Timer:
    def __init__(self, model: Any, params: Any | None, length: int, page_size: int) -> None:
        self._length, self._page_size = length, page_size
        self._table = -(-length // page_size)
        state, params = model.state, model.params if params is None else params
        # As the engine computes and holds them, whose steps these are.
        self._model = model = as_computed(model)
        params = layers_apart(model, params, panels=room_for_panels(model, params))
        self._programs = Programs(model, params, state, writable=model.config.model.vocab_size)
        self.attends = model.config.model.attends
        self.found: list[Measured] = []

    def fits(self, batch: int, dtype: str) -> int:
        """How many texts of the full length the memory holds, at most ``batch``."""
        most = batch * self._table
        return (
            pages_in_memory(self._model, self._page_size, dtype, least=self._table, most=most) // self._table
        )

    def __call__(self, batch: int, tokens: int, dtype: str) -> float:
        """Milliseconds of a step."""
        shape = StepShape(batch, 1 if tokens else 0, max(tokens, 1))
        pages = shape.sequences * self._table + 1
        with self._model.backend.scope():
            cache = self._model.init_pages(pages, self._page_size, shape.sequences + 1, dtype=dtype)
        starts = np.full(shape.sequences, self._length // 2, np.int32)
        starts[batch:] = max(0, min(self._length // 2, self._length - tokens))
        inputs = {
            "tokens": np.zeros(shape.tokens, np.int32),
            "starts": starts,
            "counts": np.array([1] * batch + [tokens] * shape.chunks, np.int32),
            "page_table": 1 + np.arange(pages - 1, dtype=np.int32).reshape(shape.sequences, self._table),
            "slots": 1 + np.arange(shape.sequences, dtype=np.int32),
            "outputs": np.arange(shape.sequences, dtype=np.int32),
        }
        times = []
        for _ in range(_TIMES + 1):  # the first one is not counted
            begun = time.perf_counter()
            logits, cache, _ = self._programs.step(shape, cache, inputs)
            jax.block_until_ready(logits)
            times.append(1e3 * (time.perf_counter() - begun))
        self._programs.forget(shape)  # the next cache has another dtype or size
        self.found.append(Measured(batch, tokens, dtype, statistics.median(times[1:])))
        return self.found[-1].milliseconds

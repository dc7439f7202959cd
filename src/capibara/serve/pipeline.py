"""Texts from Python: an engine whose sizes were chosen by measuring."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Self, overload

import numpy as np

from capibara.core.encoders import require_decoder
from capibara.errors import ConfigError
from capibara.serve.engine import Engine
from capibara.serve.inference_optimizer import InferenceChoice, TpuInferenceOptimizer
from capibara.serve.requests import Piece, Request, ServeError, Stream
from capibara.serve.sampling import Sampling

__all__ = ["InferencePipeline", "create_inference_pipeline"]

_Prompt = str | Sequence[int] | np.ndarray


class InferencePipeline:
    """Writes texts: see :func:`create_inference_pipeline`. A context manager, which frees the cache at its end.

    Attributes:
      engine: a :class:`capibara.serve.Engine`. choice: its sizes, and what was measured.
    """

    def __init__(self, engine: Engine, choice: InferenceChoice) -> None:
        self.engine, self.choice = engine, choice

    @overload
    def generate(self, prompts: str, **settings: Any) -> str: ...
    @overload
    def generate(self, prompts: list[Any] | tuple[Any, ...], **settings: Any) -> list[str]: ...

    def generate(self, prompts: Any, **settings: Any) -> Any:
        """The text that continues a prompt, or those of several, which are written at the same time.

        Args:
          prompts: a text; or several, each a text or token ids.
          settings: ``max_tokens`` (by default as many as fit), ``temperature``, ``top_k``, ``top_p`` and the other
            settings of :class:`~capibara.serve.Sampling`; ``seed``, ``stop`` and those of
            :class:`~capibara.serve.Request`.

        Raises:
          RequestError: a prompt or a setting cannot be answered. ServeError: the engine failed.
        """
        alone = isinstance(prompts, str)
        asked = [self._request(prompt, settings) for prompt in ([prompts] if alone else prompts)]
        streams: list[Stream] = []
        try:
            streams += map(self.engine.submit, asked)
            texts = ["".join(_text(piece) for piece in stream) for stream in streams]
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return texts[0] if alone else texts

    def stream(self, prompt: _Prompt, **settings: Any) -> Iterator[str]:
        """Yield the text as it is written, in whole characters. Arguments and errors as :meth:`generate`."""
        return _pieces(self.engine.submit(self._request(prompt, settings)))

    async def agenerate(self, prompt: _Prompt, **settings: Any) -> str:
        """:meth:`generate` of one prompt, for an event loop."""
        return "".join([piece async for piece in self.astream(prompt, **settings)])

    async def astream(self, prompt: _Prompt, **settings: Any) -> AsyncIterator[str]:
        """:meth:`stream`, for an event loop."""
        stream = self.engine.submit(self._request(prompt, settings))
        try:
            async for piece in stream:
                if text := _text(piece):
                    yield text
        finally:
            stream.cancel()

    def _request(self, prompt: _Prompt, settings: dict[str, Any]) -> Request:
        tokens = self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else np.asarray(prompt)
        given = {key: settings[key] for key in settings if key in Sampling.__dataclass_fields__}
        others: dict[str, Any] = {key: value for key, value in settings.items() if key not in given}
        known = set(Request.__dataclass_fields__) - {"prompt", "sampling"}
        if wrong := sorted(set(others) - known):
            every = ", ".join(sorted(known | set(Sampling.__dataclass_fields__)))
            raise ConfigError(f"{wrong[0]}: no such setting. There are {every}.")
        if isinstance(stop := others.get("stop"), str):
            others["stop"] = (stop,)
        others.setdefault("max_tokens", None)
        return Request(tuple(tokens.tolist()), sampling=Sampling(**given), **others)

    def close(self) -> None:
        """End what is being written, and free the cache."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"InferencePipeline({self.engine.name!r}, {self.choice.batch} texts at once)"


def _pieces(stream: Stream) -> Iterator[str]:
    try:
        for piece in stream:
            if text := _text(piece):
                yield text
    finally:
        stream.cancel()


def _text(piece: Piece) -> str:
    if piece.finish in ("error", "cancelled"):
        raise ServeError(piece.error or "the text was ended before it was finished: the engine is closed")
    return piece.text


def create_inference_pipeline(
    model: Any,
    optimizer: TpuInferenceOptimizer | None = None,
    max_batch_size: int = 16,
    max_sequence_length: int | None = None,
    *,
    params: Any | None = None,
    progress: Callable[[int, int], object] | None = None,
    **options: Any,
) -> InferencePipeline:
    """An object that writes texts, with sizes that are chosen for the devices there are.

    Args:
      model: a :class:`capibara.core.ModularCapibaraModel`, a decoder.
      optimizer: chooses them; by default for 50 ms per token.
      max_batch_size: texts that are written at once, at most.
      max_sequence_length: most tokens of a prompt and its answer; by default ``model.max_sequence_length``.
      params: the parameters; by default the model's own.
      progress: called with the number of programs compiled and of all, after the measurements.
      options: further ones of :class:`capibara.serve.Engine`.

    Raises:
      ConfigError: an argument is out of range, or the model is an encoder.
    """
    require_decoder(model.config.model, "serving texts")
    optimizer = TpuInferenceOptimizer() if optimizer is None else optimizer
    longest = model.config.model.max_sequence_length
    length = longest if max_sequence_length is None else max_sequence_length
    for name, value, most in (
        ("max_batch_size", max_batch_size, 4096),
        ("max_sequence_length", length, longest),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(f"{name}={value!r}: expected an integer from 1 to {most}.")
    choice = optimizer.choose(model, params, max_batch_size=max_batch_size, max_sequence_length=length)
    whole = not optimizer.memory_efficient_attention
    engine = Engine(
        model,
        params,
        max_batch=choice.batch,
        max_length=length,
        prefill_tokens=choice.prefill_tokens,
        prefill_chunks=1 if whole else min(4, choice.prefill_tokens),
        cache_dtype=choice.cache_dtype,
        use_cache=optimizer.use_kv_cache,
        progress=progress,
        **options,
    )
    return InferencePipeline(engine, choice)

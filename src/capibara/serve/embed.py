"""Vectors of texts: what they mean as points, for search, clustering and comparison.

A text's tokens pass the model, and its hidden states are pooled to one vector. Short texts share a row, in which none
sees another, so that little of the work is padding; rows have one of a few lengths, so that few programs are compiled.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax
import numpy as np

from capibara.core import ModularCapibaraModel
from capibara.data import Tokenizer, pack
from capibara.errors import ConfigError, did_you_mean
from capibara.serve.engine.layers import as_computed, in_float32
from capibara.serve.pooling import (
    POOLINGS,
    EmbeddingSettings,
    embedding_settings,
    pool,
    read_embedding_settings,
)
from capibara.serve.token_ids import checked_ids

__all__ = ["BatchShape", "Embedder"]

# Rows have so many tokens, or those of a longer text: scores between texts of a row are computed in vain, and grow
# with it. The least is for a call with a few words.
_ROW, _LEAST = 128, 16


@dataclass(frozen=True)
class BatchShape:
    """What the program of a batch is compiled for.

    Attributes:
      rows: how many. width: tokens of each. texts: in all of them, at most.
    """

    rows: int
    width: int
    texts: int

    @property
    def tokens(self) -> int:
        return self.rows * self.width

    def holds(self, other: BatchShape) -> bool:
        """Whether a batch of the other shape can be computed in this one."""
        return self.rows >= other.rows and self.width >= other.width and self.texts >= other.texts


class Embedder:
    """Makes vectors of texts with one model; compiles once for each shape and can be used many times.

    Args:
      model: an encoder, or a decoder.
      params: its parameters; by default its own.
      tokenizer: by default the model's.
      pooling: ``"mean"``, ``"cls"`` (the first token), ``"last"`` or ``"max"``; by default the mean of an encoder's
        states, and the last of a decoder's, which alone has seen all of the text.
      normalise: make vectors of length 1, whose products are cosines.
      max_length: tokens of a text, at most and by default ``model.max_sequence_length``; longer texts lose their end.
      lower: make texts lower case before.
      prompts: name → what is put before texts. prompt: the name of the one that :meth:`embed` uses by default.

    Example::

        embedder = Embedder.from_pretrained("all-MiniLM-L6-v2")
        vectors = embedder.embed(["Capybaras swim.", "So do otters."])  # float32 [2, 384]

    Raises:
      ConfigError: an argument is out of range, or the tokenizer has more tokens than the model.
    """

    def __init__(
        self,
        model: ModularCapibaraModel,
        params: Any | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        pooling: str | None = None,
        normalise: bool = False,
        max_length: int | None = None,
        lower: bool = False,
        prompts: dict[str, str] | None = None,
        prompt: str | None = None,
    ) -> None:
        settings = model.config.model
        given = model.params if params is None else params
        self.model = as_computed(model)
        self.params = in_float32(self.model, given)
        self.tokenizer = model.tokenizer if tokenizer is None else tokenizer
        self.pooling = pooling or ("mean" if not settings.causal else "last")
        self.normalise, self.lower, self.prompts, self.prompt = normalise, lower, dict(prompts or {}), prompt
        if self.pooling not in POOLINGS:
            raise ConfigError(f"pooling: got {self.pooling!r:.80}, expected one of {', '.join(POOLINGS)}")
        if not isinstance(normalise, bool):
            raise ConfigError(f"normalise: got {normalise!r:.80}, expected True or False")
        most = settings.max_sequence_length
        if max_length is not None and (
            isinstance(max_length, bool) or not isinstance(max_length, int) or not 1 <= max_length <= most
        ):
            raise ConfigError(
                f"max_length: got {max_length!r:.80}, expected an integer from 1 to model.max_sequence_length={most}"
            )
        self.max_length = max_length or most
        if self.tokenizer.vocab_size > settings.vocab_size:
            raise ConfigError(
                f"tokenizer: has {self.tokenizer.vocab_size} tokens, the model {settings.vocab_size} "
                "(model.vocab_size). Use the model's own"
            )
        self._programs: dict[BatchShape, Callable[..., jax.Array]] = {}
        self._lock = threading.Lock()  # one program is compiled at a time, and none twice

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        dtype: str | None = None,
        mesh: jax.sharding.Mesh | None = None,
        pooling: str | None = None,
        normalise: bool | None = None,
        max_length: int | None = None,
        prompt: str | None = None,
    ) -> Self:
        """The model of a published folder, and how its vectors are made.

        Args:
          folder: in the form of Hugging Face; of sentence-transformers' files ``modules.json`` and what it names,
            ``sentence_bert_config.json`` and ``config_sentence_transformers.json`` are read.
          dtype, mesh: as for :meth:`~capibara.core.ModularCapibaraModel.from_pretrained`.
          pooling, normalise, max_length, prompt: as for the class; by default what the folder says.

        Raises:
          ConfigError: the folder asks for what Capibara does not do.
        """
        read_embedding_settings(folder)  # before the weights are
        model = ModularCapibaraModel.from_pretrained(folder, dtype=dtype, mesh=mesh)
        return cls.of(model, pooling=pooling, normalise=normalise, max_length=max_length, prompt=prompt)

    @classmethod
    def of(
        cls,
        model: ModularCapibaraModel,
        params: Any | None = None,
        *,
        pooling: str | None = None,
        normalise: bool | None = None,
        max_length: int | None = None,
        prompt: str | None = None,
    ) -> Self:
        """A model, and how the folder that it came from makes vectors: of a run that was imported, or trained further.

        Args:
          model, params, pooling, normalise, max_length, prompt: as for the class; by default what the folder said.

        Raises:
          ConfigError: the folder asks for what Capibara does not do.
        """
        files = {} if model.pretrained is None else model.pretrained.embedding
        said = embedding_settings(files, "the model's folder") or EmbeddingSettings(pooling="")
        most = model.config.model.max_sequence_length
        return cls(
            model,
            params,
            pooling=pooling or said.pooling or None,
            normalise=said.normalise if normalise is None else normalise,
            max_length=min(said.max_length or most, most) if max_length is None else max_length,
            lower=said.lower,
            prompts=dict(said.prompts),
            prompt=said.prompt if prompt is None else prompt,
        )

    @property
    def dimension(self) -> int:
        """Features of a vector."""
        return self.model.config.model.embed_dim

    def embed(
        self,
        texts: Sequence[str],
        *,
        batch_tokens: int = 4096,
        prompt: str | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """The vectors of texts: float32 ``[texts, dimension]``, in their order.

        Args:
          texts: of any length.
          batch_tokens: tokens that are computed together; of one row, if that has more.
          prompt: the name of one of ``prompts``.
          progress: called with the number of texts of each batch.

        Raises:
          ConfigError: ``batch_tokens`` is out of range, there is no such prompt, or one of ``texts`` is not a text.
        """
        if isinstance(texts, str):
            raise ConfigError("texts: got a string, expected a list of them: [text]")
        for number, text in enumerate(texts):
            _check_text(number, text)
        name = self.prompt if prompt is None else prompt
        if name is not None and name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise ConfigError(
                f"prompt: got {name!r:.80}, the model has {known}.{did_you_mean(name, self.prompts)}"
            )
        before = "" if name is None else self.prompts[name]
        given = [before + text for text in texts]
        if self.lower:
            given = [text.lower() for text in given]
        tokens = self.tokenizer.encode_batch(given, most=self.max_length)
        return self.embed_tokens(tokens, batch_tokens=batch_tokens, progress=progress)

    def embed_tokens(
        self,
        tokens: Sequence[Any],
        *,
        batch_tokens: int = 4096,
        progress: Callable[[int], None] | None = None,
        missing: Callable[[BatchShape], None] | None = None,
    ) -> np.ndarray:
        """As :meth:`embed`, of token ids: int ``[tokens]`` for each text, at most ``max_length``.

        A text without tokens has the vector 0.

        Args:
          missing: called with the shape of a batch whose program is not there yet. Its texts are then computed by
            programs that are, one after another, and nothing is compiled unless even a text alone has none. By default
            a program that is missing is compiled.

        Raises:
          ConfigError: ``batch_tokens`` is out of range, or tokens are not ids of the model or too many.
        """
        if isinstance(batch_tokens, bool) or not isinstance(batch_tokens, int) or batch_tokens < 1:
            raise ConfigError(f"batch_tokens: got {batch_tokens!r:.80}, expected an integer of at least 1")
        size = self.model.config.model.vocab_size
        rows = [checked_ids(f"tokens[{at}]", one, size, least=0) for at, one in enumerate(tokens)]
        lengths = np.asarray([len(row) for row in rows], np.int64)
        if rows and lengths.max() > self.max_length:
            raise ConfigError(f"tokens: a text has {lengths.max()}, expected at most {self.max_length}")
        out = np.zeros((len(rows), self.dimension), np.float32)
        waiting: list[tuple[np.ndarray, jax.Array]] = []
        with self.model.backend.scope():
            for shape, members in self._shaped(
                _batches(lengths, self.max_length, batch_tokens), lengths, missing
            ):
                chosen, arrays = _arrays(rows, members, shape)
                waiting.append((chosen, self.compile(shape)(self.params, *arrays)))
                if len(waiting) > 1:  # one is computed while the next is prepared
                    _take(out, *waiting.pop(0))
                if progress is not None:
                    progress(len(chosen))
        for chosen, vectors in waiting:
            _take(out, chosen, vectors)
        return out

    def compile(self, shape: BatchShape) -> Callable[..., jax.Array]:
        """The program of a shape, which is compiled unless it is there; any thread may ask."""
        if (program := self._programs.get(shape)) is not None:
            return program
        with self._lock:
            if shape not in self._programs:
                row = jax.ShapeDtypeStruct((shape.rows, shape.width), np.int32)
                text = jax.ShapeDtypeStruct((shape.texts,), np.int32)
                with self.model.backend.scope():
                    lowered = jax.jit(self._vectors).lower(self.params, row, row, row, text, text)
                    self._programs[shape] = lowered.compile()
            return self._programs[shape]

    def _shaped(
        self,
        batches: Iterator[tuple[int, list[list[int]]]],
        lengths: np.ndarray,
        missing: Callable[[BatchShape], None] | None,
    ) -> Iterator[tuple[BatchShape, list[list[int]]]]:
        """Batches with the shapes in which they are computed."""
        for width, members in batches:
            shape = _shape_of(width, members)
            if missing is None or shape in self._programs:
                yield shape, members
            else:
                missing(shape)
                yield from self._in_known_shapes(width, members, lengths)

    def _in_known_shapes(
        self, width: int, members: list[list[int]], lengths: np.ndarray
    ) -> Iterator[tuple[BatchShape, list[list[int]]]]:
        """A batch in as many parts as the programs that are there ask for."""
        shape = _shape_of(width, members)
        # No more than half of the work may be padding.
        known = [one for one in list(self._programs) if one.holds(shape) and one.tokens <= 2 * shape.tokens]
        if known or (len(members) == 1 and len(members[0]) == 1):
            yield min(known, key=lambda one: (one.tokens, one.texts), default=shape), members
            return
        if len(members) > 1:
            middle = len(members) // 2
            parts = [members[:middle], members[middle:]]
        else:
            middle = len(members[0]) // 2
            parts = [[members[0][:middle]], [members[0][middle:]]]
        for part in parts:
            yield from self._in_known_shapes(_least_width(width, part, lengths), part, lengths)

    def _vectors(
        self,
        params: Any,
        tokens: jax.Array,
        texts: jax.Array,
        positions: jax.Array,
        starts: jax.Array,
        lengths: jax.Array,
    ) -> jax.Array:
        given = {"tokens": tokens, "segments": texts + 1, "positions": positions}
        hidden = self.model.hidden(params, given)
        return pool(hidden, texts, starts, lengths, pooling=self.pooling, normalise=self.normalise)


def _check_text(number: int, text: Any) -> None:
    if not isinstance(text, str):
        raise ConfigError(f"texts[{number}]: got {type(text).__name__}, expected a string")
    try:
        text.encode("utf-8", "surrogateescape")  # the tokenizer replaces bytes of the command line
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"texts[{number}]: has half of a character at {error.start} ({text[error.start]!r}), expected Unicode. "
            "Replace it"
        ) from None


def _take(out: np.ndarray, chosen: np.ndarray, vectors: jax.Array) -> None:
    out[chosen] = np.asarray(vectors)[: len(chosen)]


def _width(length: int, most: int) -> int:
    """The length of the row that a text stands in."""
    return min(max(_ROW, 1 << (length - 1).bit_length()), most)


def _batches(lengths: np.ndarray, most: int, batch_tokens: int) -> Iterator[tuple[int, list[list[int]]]]:
    """Rows of texts that are computed together, the longest first: their length, and the texts of each."""
    widths = np.asarray([_width(int(length), most) for length in lengths], np.int64)
    for width in sorted(set(widths.tolist()), reverse=True):
        own = np.flatnonzero((widths == width) & (lengths > 0))
        rows = [
            [int(own[piece.document]) for piece in row]
            for row in pack(lengths[own].tolist(), width, split=False)
        ]
        count = max(1, batch_tokens // width)
        for start in range(0, len(rows), count):
            members = rows[start : start + count]
            yield _least_width(width, members, lengths), members


def _least_width(width: int, members: list[list[int]], lengths: np.ndarray) -> int:
    """The length of the rows of a batch, of at most ``width``."""
    if len(members) > 1:
        return width
    # One row of a few words, a query, is no longer than it has to be.
    return min(width, max(_LEAST, 1 << (int(lengths[members[0]].sum()) - 1).bit_length()))


def _shape_of(width: int, members: Sequence[Sequence[int]]) -> BatchShape:
    """The smallest shape for rows of texts."""
    texts = sum(map(len, members))
    return BatchShape(_rounded(len(members)), width, 1 << max(3, (texts - 1).bit_length()))


def _rounded(count: int) -> int:
    """At least ``count``, by at most a quarter more: so that numbers of rows are few."""
    step = 1 << max(0, count.bit_length() - 3)
    return -(-count // step) * step


def _arrays(
    rows: Sequence[np.ndarray], members: Sequence[Sequence[int]], shape: BatchShape
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The texts of a batch, and what the compiled function takes of them."""
    chosen = np.asarray([text for row in members for text in row])
    width = shape.width
    tokens, positions = np.zeros((2, shape.rows, width), np.int32)
    texts = np.full((shape.rows, width), -1, np.int32)
    starts, lengths = np.zeros((2, shape.texts), np.int32)
    number = 0
    for at, row in enumerate(members):
        end = 0
        for text in row:
            size = len(rows[text])
            here = slice(end, end + size)
            tokens[at, here], positions[at, here], texts[at, here] = rows[text], np.arange(size), number
            starts[number], lengths[number] = at * width + end, size
            end, number = end + size, number + 1
    return chosen, (tokens, texts, positions, starts, lengths)

"""How large an engine is, which shapes its steps have, and the arrays of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Row
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from capibara.core.encoders import require_decoder
from capibara.core.paged import StepShape
from capibara.errors import ConfigError
from capibara.serve.engine.layers import cache_dtype_of
from capibara.serve.engine.sequences import Sequence
from capibara.serve.engine.several import MOST_ENDS, TokenLoop, Written
from capibara.serve.row_sampling import rows_of
from capibara.serve.sampling import GREEDY

__all__ = ["EngineSizes", "StartedStep", "StepPiece"]


def _name(dtype: Any) -> str | None:
    try:
        return None if dtype is None else jnp.dtype(dtype).name
    except TypeError:
        raise ConfigError(
            f"cache_dtype={dtype!r:.80}: expected a dtype of floats, such as 'bfloat16'."
        ) from None


@dataclass
class StepPiece:
    """What a step computes of a sequence: ``count`` tokens at a place of the step; ``last``: a token follows."""

    sequence: Sequence
    place: int
    count: int
    start: int
    last: bool

    @property
    def written(self) -> int:
        """How many tokens of the text were generated before the one that follows."""
        return self.start + self.count - len(self.sequence.request.prompt)


@dataclass
class StartedStep:
    """A step that the device computes.

    Attributes:
      pieces, shape: of it. logits: that it will give. written: the tokens, where its program chooses them
        (:meth:`Programs.step`). count: most tokens of each text.
      started: when, in ``time.monotonic`` seconds.
    """

    pieces: list[StepPiece]
    shape: StepShape
    logits: Any
    written: Written | None
    count: int
    started: float

    @property
    def computed(self) -> int:
        """How many steps its call computed; waits for a loop, of which that is not known before."""
        return 1 if self.written is None or self.written.alive is None else self.written.steps


@dataclass(frozen=True)
class EngineSizes:
    """All that decides which programs an engine runs, beside the model.

    Attributes:
      max_batch: texts that are written at once. max_length: tokens of a prompt and its answer.
      page_size: positions of a page. pages: how many, one of which is nobody's.
      prefill_tokens: of prompts, which a step reads at most. prefill_chunks: in how many pieces.
      cache_dtype: of keys and values; ``None``: that in which the engine computes.
      guesses: tokens that are guessed ahead; 0: none.
      recurrent: whether a model has states that pieces of one step cannot share.
    """

    max_batch: int
    max_length: int
    page_size: int
    pages: int
    prefill_tokens: int
    prefill_chunks: int
    cache_dtype: str | None = None
    guesses: int = 0
    recurrent: bool = False

    @classmethod
    def of(
        cls,
        model: Any,
        *,
        max_batch: int = 16,
        max_length: int | None = None,
        page_size: int = 16,
        prefill_tokens: int = 128,
        prefill_chunks: int = 4,
        cache_dtype: Any | None = None,
        guesses: int = 0,
    ) -> EngineSizes:
        """The sizes for a model, with as many pages as the texts need.

        Raises:
          ConfigError: one is out of range, or the model is an encoder.
        """
        settings = model.config.model
        require_decoder(settings, "serving texts")
        longest = settings.max_sequence_length
        length = longest if max_length is None else max_length
        for key, value, most in (
            ("max_batch", max_batch, 4096),
            ("max_length", length, longest),
            ("page_size", page_size, longest),
            ("prefill_tokens", prefill_tokens, 1 << 20),
            ("prefill_chunks", prefill_chunks, prefill_tokens),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{key}={value!r}: expected an integer from 1 to {most}.")
        return cls(
            max_batch,
            length,
            page_size,
            1 + max_batch * -(-length // page_size),
            prefill_tokens,
            prefill_chunks,
            cache_dtype_of(model) if cache_dtype is None else _name(cache_dtype),
            guesses,
            "ssm" in settings.block_kinds,
        )

    @property
    def table(self) -> int:
        """Pages of the longest text."""
        return -(-self.max_length // self.page_size)

    @property
    def slots(self) -> int:
        """Recurrent states, one of which is nobody's."""
        return self.max_batch + 1

    @cached_property
    def plain(self) -> list[StepShape]:
        """The shapes of steps without guesses."""
        # Pieces of one prompt follow each other in a step; a recurrence cannot be cut like that.
        chunks = max(1, min(self.prefill_chunks, self.max_batch) if self.recurrent else self.prefill_chunks)
        chunk = max(1, self.prefill_tokens // chunks)
        rows = self._rows
        found = [StepShape(n, c, chunk) for n in rows for c in (0, chunks)]
        # Where little else runs, a short prompt, or the new end of a known one, takes less time than a long one.
        fewer = [2**n for n in range(chunks.bit_length()) if 2**n < chunks]
        # Where all places are taken, texts end one by one, and each leaves room for one prompt.
        full = [StepShape(rows[-1], 1, chunk)] if rows[1:] and chunks > 1 else []
        return [*found[:2], *(StepShape(rows[0], n, chunk) for n in fewer), *found[2:], *full]

    @property
    def early(self) -> list[StepShape]:
        """The shapes that one plain request cannot do without: a row with the smallest part of a prompt.

        The step of a row alone gives the same tokens in less time; a first token should not wait for it.
        """
        return [self.plain[2] if self.plain[1].chunks > 1 else self.plain[1]]

    @property
    def _rows(self) -> list[int]:
        steps = range(math.ceil(math.log(self.max_batch, 4)) + 1)
        return sorted({min(self.max_batch, 4**n) for n in steps})

    @cached_property
    def guessed(self) -> list[StepShape]:
        """The shapes of steps that look at guesses."""
        return [StepShape(0, n, 1 + self.guesses) for n in self._rows] if self.guesses else []

    @cached_property
    def scored(self) -> StepShape:
        """The shape of steps that score prompts."""
        return StepShape(0, self.plain[1].chunks, self.plain[1].chunk)

    @property
    def every(self) -> list[StepShape]:
        """All shapes, those of a plain request first."""
        return [*self.plain, *self.guessed, self.scored]

    def shape(self, rows: int, chunks: int, ready: Callable[[StepShape], bool] | None = None) -> StepShape:
        """The smallest shape of steps without guesses that has room for so many rows and pieces of prompts.

        Args:
          ready: whether a shape's program is there; those that are not come last.
        """
        return min(
            (s for s in self.plain if s.rows >= rows and s.chunks >= chunks),
            key=lambda s: (ready is not None and not ready(s), s.tokens, s.rows),
        )

    def inputs(
        self, shape: StepShape, pieces: Row[StepPiece] = (), tokens: Any | None = None
    ) -> dict[str, Any]:
        """The arrays of a step.

        Args:
          tokens: int32 ``[tokens]``, where they are on the device already; by default those of the pieces.
        """
        none = np.full(shape.sequences, -1, np.int32)
        found: dict[str, Any] = {
            "tokens": np.zeros(shape.tokens, np.int32) if tokens is None else tokens,
            "starts": np.zeros(shape.sequences, np.int32),
            "counts": np.zeros(shape.sequences, np.int32),
            "page_table": np.full((shape.sequences, self.table), -1, np.int32),
            "slots": none,
            # Of guesses every token is looked at.
            "outputs": np.zeros(shape.sequences if shape.rows else shape.tokens, np.int32),
        }
        for piece in pieces:
            place = self.place(shape, piece)
            first = place if place < shape.rows else shape.rows + (place - shape.rows) * shape.chunk
            end = piece.start + piece.count
            if tokens is None:
                found["tokens"][first : first + piece.count] = piece.sequence.tokens[piece.start : end]
            found["starts"][place], found["counts"][place] = piece.start, piece.count
            found["page_table"][place, : len(piece.sequence.pages)] = piece.sequence.pages
            found["slots"][place] = piece.sequence.slot
            found["outputs"][place] = first + piece.count - 1
        return found

    def loop(
        self, shape: StepShape, pieces: Row[StepPiece], tokens: int, alive: Any | None = None
    ) -> TokenLoop:
        """How the tokens of a step are chosen, and how many of each text, for :meth:`Programs.step`.

        Args:
          alive: bool ``[sequences]``, where it is on the device already; by default those that are used.
        """
        by_place: list[StepPiece | None] = [None] * shape.sequences
        ends = np.full((shape.sequences, MOST_ENDS), -1, np.int32)
        for piece in pieces:
            place = self.place(shape, piece)
            by_place[place] = piece
            some = list(piece.sequence.ends)[:MOST_ENDS]
            ends[place, : len(some)] = some
        sampling = rows_of(
            [piece.sequence.request.sampling if piece else GREEDY for piece in by_place],
            [piece.sequence.seed if piece else 0 for piece in by_place],
            [piece.written if piece else 0 for piece in by_place],
        )
        used = np.array([piece is not None for piece in by_place]) if alive is None else alive
        return TokenLoop(np.int32(tokens), used, ends, sampling)

    @staticmethod
    def place(shape: StepShape, piece: StepPiece) -> int:
        """Which of a step's sequences a piece is: rows come first, then pieces of prompts."""
        return piece.place if piece.place >= 0 else shape.rows - 1 - piece.place

"""What a text looks like while it is written: whole characters, without what could become a stop string."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

from capibara.data.tokens import TextStream
from capibara.serve.requests import Piece, Request

__all__ = ["PieceStream", "StoppingText"]


class StoppingText:
    """Decodes tokens until one of some strings appears.

    Args:
      stream: decodes the tokens.
      stop: the strings; the first to appear ends the text, and is not part of it.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str]) -> None:
        self._stream, self._stop = stream, [s for s in stop if s]
        self._held = ""
        self.stopped = False

    def push(self, token: int, *, stopping: bool = True) -> str:
        """The text that is now certain; :attr:`stopped` afterwards says whether it ends there.

        Args:
          stopping: whether the text may end with this token; otherwise a stop string is text like any other.
        """
        new = self._stream.push(token)
        return self._more(new) if stopping else new

    def finish(self) -> str:
        """What was held back, where the text ends for another reason."""
        if self.stopped:
            return ""
        text = self._more(self._stream.finish())
        text, self._held = text + ("" if self.stopped else self._held), ""
        return text

    def _more(self, new: str) -> str:
        text = self._held + new
        if not self._stop:
            return text
        found = [at for at in (text.find(s) for s in self._stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        held = max(_begun(text, s) for s in self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _begun(text: str, stop: str) -> int:
    """How many of the last characters of ``text`` are the first ones of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class PieceStream:
    """A :class:`capibara.serve.requests.Stream`: one thread writes it, and one reader reads it.

    Args:
      request: what is answered.
      cancel: called when the reader does not want more.
    """

    def __init__(self, request: Request, cancel: Callable[[], None]) -> None:
        self._request, self._cancel = request, cancel
        self._pieces: deque[Piece] = deque()
        self._ready = threading.Condition()
        self._wake: Callable[[], None] | None = None
        self._ended = False
        self.cached_tokens = 0

    @property
    def request(self) -> Request:
        return self._request

    def put(self, piece: Piece) -> None:
        """Add a piece; after one with ``finish`` there is none."""
        with self._ready:
            if self._ended:
                return
            self._ended = piece.finish is not None
            self._pieces.append(piece)
            self._ready.notify()
            wake = self._wake
        if wake is not None:
            wake()

    def __iter__(self) -> Iterator[Piece]:
        while True:
            with self._ready:
                while not self._pieces:
                    self._ready.wait()
                piece = self._pieces.popleft()
            yield piece
            if piece.finish is not None:
                return

    async def __aiter__(self) -> AsyncIterator[Piece]:
        loop, there = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # The loop may have ended while the text was written, or end now.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(there.set)

        with self._ready:
            self._wake = wake
        try:
            while True:
                there.clear()
                with self._ready:
                    piece = self._pieces.popleft() if self._pieces else None
                if piece is None:
                    await there.wait()
                    continue
                yield piece
                if piece.finish is not None:
                    return
        finally:
            self._wake = None

    def cancel(self) -> None:
        """End the text: see :class:`capibara.serve.requests.Stream`."""
        self._cancel()

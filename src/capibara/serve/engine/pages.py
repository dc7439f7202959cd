"""The pages of a cache: which are free, who holds them, and what those that nobody holds still contain.

A full page of keys and values depends on the tokens up to its end alone. So a page that was filled stays known by a
digest of them, the *prefix cache*, and a text that begins with the same tokens takes it instead of computing it again.
Pages that only the prefix cache knows are given away when they are needed, those that were used longest ago first.
Digests begin with a salt: texts of other salts share nothing, and cannot tell from the time that they take what others
have asked (Gu et al., arXiv:2502.07776).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

__all__ = ["PagePool"]


class PagePool:
    """Counts who holds each page; not for several threads at once.

    Args:
      pages: how many there are; page 0 is never given out.
      page_size: positions of a page.
      prefix: whether full pages are remembered.
    """

    def __init__(self, pages: int, page_size: int, *, prefix: bool = True) -> None:
        self.page_size, self.total = page_size, pages - 1
        self._prefix = prefix
        self._holders = np.zeros(pages, np.int64)
        self._free = list(range(pages - 1, 0, -1))
        self._by_digest: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # known and held by nobody, longest unused first

    @property
    def used(self) -> int:
        """Pages that a sequence holds."""
        return self.total - self.available

    @property
    def available(self) -> int:
        """Pages that can be given out, those that only the prefix cache knows included."""
        return len(self._free) + len(self._idle)

    def take(self, count: int) -> list[int] | None:
        """So many pages, whose contents mean nothing; ``None`` if there are not as many."""
        if count > self.available:
            return None
        found = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                del self._by_digest[self._digests.pop(page)]
            self._holders[page] = 1
            found.append(page)
        return found

    def give_back(self, pages: Sequence[int]) -> None:
        """Hold these pages no more."""
        # The last pages of a text are of use to fewer texts than the first ones: they become the oldest.
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._digests:
                self._idle[page] = None
            else:
                self._free.append(page)

    def find(self, tokens: Sequence[int], salt: bytes) -> list[int]:
        """Hold the known pages that a text begins with; of a whole text its last token is left to be computed."""
        if not self._prefix:
            return []
        found: list[int] = []
        digest = salt
        for first in range(0, (len(tokens) - 1) // self.page_size * self.page_size, self.page_size):
            digest = _digest(digest, tokens[first : first + self.page_size])
            page = self._by_digest.get(digest)
            if page is None:
                break
            found.append(page)
        for page in found:
            if not self._holders[page]:
                del self._idle[page]
            self._holders[page] += 1
        return found

    def remember(self, page: int, before: bytes, tokens: Sequence[int]) -> bytes:
        """A page that is held is full now.

        Args:
          page: the page. before: the digest of what comes before it, of the first page the salt.
          tokens: those of the page.

        Returns:
          The digest of all up to its end.
        """
        digest = _digest(before, tokens)
        if self._prefix and digest not in self._by_digest and page not in self._digests:
            self._by_digest[digest] = page
            self._digests[page] = digest
        return digest


def _digest(before: bytes, tokens: Sequence[int]) -> bytes:
    return hashlib.sha256(before + np.asarray(tokens, np.int32).tobytes()).digest()

"""Who may ask."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable

from capibara.errors import ConfigError

__all__ = ["Keys"]


class Keys:
    """The keys that may ask; without any, everybody may.

    Args:
      keys: each of at least 8 characters.

    Raises:
      ConfigError: one is shorter, or has spaces or other characters than those of ASCII.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = []
        self._secret = os.urandom(32)
        for number, key in enumerate(keys, start=1):
            if len(key) < 8 or not all("!" <= c <= "~" for c in key):
                raise ConfigError(
                    f"API key {number} has {len(key)} characters, expected at least 8 of ASCII and no spaces: a header "
                    "carries no others."
                )
            self._digests.append(self._digest(key))

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode("utf-8", "surrogateescape"), "sha256")

    def check(self, authorization: str | None) -> str:
        """The salt of the requests of a key: of others it says nothing.

        Args:
          authorization: ``Bearer KEY``.

        Raises:
          ApiError: the key may not ask.
        """
        scheme, _, key = (authorization or "").partition(" ")
        digest = self._digest(key.strip())
        if not self._digests:
            return digest.hex() if key else ""
        # All are compared, each in constant time.
        known = [hmac.compare_digest(digest, one) for one in self._digests]
        if scheme.lower() != "bearer" or not any(known):
            from capibara.serve.http.errors import (
                ApiError,
            )  # not before a start has checked its keys: of FastAPI

            raise ApiError(
                401, "the API key is missing or wrong: send the header 'Authorization: Bearer KEY'"
            )
        return digest.hex()

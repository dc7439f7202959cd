"""Token ids that a caller gives."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.errors import ConfigError

__all__ = ["checked_ids"]


def checked_ids(name: str, ids: Any, vocab_size: int, *, least: int = 1) -> np.ndarray:
    """The ids as an array of integers ``[tokens]``.

    Args:
      name: of the argument, for messages.
      ids: a sequence of at least ``least`` integers from 0 to ``vocab_size - 1``.

    Raises:
      ConfigError: it is not that.
    """
    try:
        found = np.asarray(ids)
    except (TypeError, ValueError):  # sequences of different lengths
        found = np.asarray(None)
    if found.shape == (0,) and least == 0:
        return found.astype(np.int32)
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
        expected = (
            f"at least {'one token id' if least == 1 else f'{least} token ids'}" if least else "token ids"
        )
        raise ConfigError(
            f"{name} must be a sequence of {expected}, got shape {found.shape} of {found.dtype}."
        )
    if found.min() < 0 or found.max() >= vocab_size:
        raise ConfigError(
            f"{name} has the token id {int(found.max() if found.min() >= 0 else found.min())}, but the model's ids "
            f"are 0 to {vocab_size - 1} (model.vocab_size={vocab_size})."
        )
    return found

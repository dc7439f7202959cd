"""Refusals of tokens that do not fit a cache: they would be written over its last ones."""

from __future__ import annotations

from capibara.compose.errors import InputError

__all__ = ["check_end", "check_room"]

_REMEDY = "make a longer cache (init_cache(batch_size, max_length)), or start a new one from the last tokens"


def check_room(position: int, new: int, places: int) -> None:
    """Refuse ``new`` tokens from ``position`` on in a cache of so many places.

    Raises:
        InputError: they do not fit.
    """
    if not 0 <= position <= places - new:
        raise InputError(
            f"position {position} and {new} new token{'s' * (new != 1)} need {position + new} places, the cache has "
            f"{places}: {_REMEDY}"
        )


def check_end(last: int, places: int) -> None:
    """Refuse a token at place ``last``, the highest of all rows.

    Raises:
        InputError: the cache does not have it.
    """
    if last >= places:
        raise InputError(f"a row needs {last + 1} places, the cache has {places}: {_REMEDY}")

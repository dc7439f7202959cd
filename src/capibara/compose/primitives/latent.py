"""Multi-head latent attention (DeepSeek-AI, arXiv:2405.04434).

The keys and values of all heads are linear in one short vector of a token, its *latent*, but for a part of the key that
has rotary positions, which all heads share. A cache holds these two only. With ``own`` features of a query and a key
without positions, ``rope`` with them, and ``value`` of a value: queries are ``[…, heads, own + rope]``, and what is
computed from the latent is ``[…, heads, own + value]``, key first.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from capibara.compose.errors import ShapeError
from capibara.compose.logical.arguments import number, whole
from capibara.compose.logical.block import Primitive
from capibara.compose.logical.shapes import Shape, set_size

__all__ = [
    "CachedLatentAttention",
    "LatentAttention",
    "RaggedCachedLatentAttention",
    "SegmentLatentAttention",
]

_EXPANDED: dict[str, Any] = {
    "query": ("batch sequence heads dim", "float"),
    "key_value": ("batch sequence heads both", "float"),
    "rotary_key": (("batch", "sequence", 1, "rope"), "float"),
}
_OUTPUT: dict[str, Any] = {"output": ("batch sequence heads value", "float")}


def _sizes(query: Shape, both: Shape, rotary: Shape, output: Shape) -> bool:
    """``value = both - (dim - rope)``."""
    dims = [shape.dims() for shape in (query, both, rotary, output)]
    if any(found is None for found in dims):
        return False
    dim, width, rope, value = (found[-1] for found in dims if found is not None)
    if dim.size is None or width.size is None or rope.size is None:
        return False
    own = dim.size - rope.size
    if own < 0 or width.size <= own:
        raise ShapeError(
            f"queries of {dim.size} features, {rope.size} of them with positions, leave {own} for keys: {width.size} "
            "features of keys and values are too few"
        )
    set_size(value, width.size - own)
    return True


def _width(latent: Shape, rotary: Shape, cache: Shape) -> bool:
    """``width = rank + rope``."""
    dims = [shape.dims() for shape in (latent, rotary, cache)]
    if any(found is None for found in dims):
        return False
    rank, rope, width = (found[-1] for found in dims if found is not None)
    if rank.size is None or rope.size is None:
        return False
    set_size(width, rank.size + rope.size)
    return True


def _options(window: int | None, softcap: float | None, scale: float | None) -> dict[str, Any]:
    whole("window", window, optional=True)
    number("softcap", softcap, above=True, optional=True)
    number("scale", scale, above=True, optional=True)
    return {"window": window, "softcap": softcap} | ({} if scale is None else {"scale": float(scale)})


class LatentAttention(Primitive):
    """Latent attention of whole sequences, through :func:`capibara.ops.attention.flash_attention`.

    ``query [batch, sequence, heads, own + rope]``, ``key_value [batch, sequence, heads, own + value]``, ``rotary_key
    [batch, sequence, 1, rope]`` → ``output [batch, sequence, heads, value]``. ``scale`` is the factor on the scores,
    by default ``1 / sqrt(own + rope)``.
    """

    def __init__(
        self,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        *,
        scale: float | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            "latent_attention",
            _EXPANDED,
            _OUTPUT,
            {"causal": bool(causal)} | _options(window, softcap, scale),
            constraints=[(_sizes, ("query", "key_value", "rotary_key", "output"))],
            name=name,
        )


class SegmentLatentAttention(Primitive):
    """:class:`LatentAttention` within segments: a query sees keys whose number in ``segments`` is its own.

    ``segments int [batch, sequence]``, as for :class:`~capibara.compose.primitives.SegmentAttention`.
    """

    def __init__(
        self,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        *,
        scale: float | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            "segment_latent_attention",
            _EXPANDED | {"segments": ("batch sequence", "int")},
            _OUTPUT,
            {"causal": bool(causal)} | _options(window, softcap, scale),
            constraints=[(_sizes, ("query", "key_value", "rotary_key", "output"))],
            name=name,
        )


_CACHE = (("batch", 1, "cache", "width"), "float")
_DECODING: dict[str, Any] = {
    "query": ("batch sequence heads dim", "float"),
    "latent": ("batch sequence rank", "float"),
    "rotary_key": (("batch", "sequence", 1, "rope"), "float"),
    "weight": ("rank heads both", "float"),
    "cache": _CACHE,
}
_RULES: list[Any] = [
    (_sizes, ("query", "weight", "rotary_key", "output")),
    (_width, ("latent", "rotary_key", "cache")),
]


class CachedLatentAttention(Primitive):
    """Causal latent attention of new tokens over a cache of the latents and rotary keys of the earlier ones.

    What is new is written at ``position``; a query sees everything up to itself. The cache must be long enough, as for
    :class:`~capibara.compose.primitives.CachedAttention`. ``query [batch, sequence, heads, own + rope]``, ``latent
    [batch, sequence, rank]``, ``rotary_key [batch, sequence, 1, rope]``, ``weight [rank, heads, own + value]`` and
    ``cache [batch, 1, cache, rank + rope]`` → ``output [batch, sequence, heads, value]`` and ``next_cache``.
    """

    decodes = True
    in_place = MappingProxyType({"cache": "next_cache"})

    def __init__(
        self,
        window: int | None = None,
        softcap: float | None = None,
        *,
        scale: float | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            "cached_latent_attention",
            _DECODING | {"position": ((), "int")},
            _OUTPUT | {"next_cache": _CACHE},
            _options(window, softcap, scale),
            constraints=_RULES,
            accumulates=True,
            name=name,
        )


class RaggedCachedLatentAttention(Primitive):
    """:class:`CachedLatentAttention` for rows of different lengths: each new token has a place of its own.

    ``slots int [batch, sequence]`` as for :class:`~capibara.compose.primitives.RaggedCachedAttention`.
    """

    decodes = True
    in_place = MappingProxyType({"cache": "next_cache"})

    def __init__(
        self,
        window: int | None = None,
        softcap: float | None = None,
        *,
        scale: float | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            "ragged_cached_latent_attention",
            _DECODING | {"slots": ("batch sequence", "int")},
            _OUTPUT | {"next_cache": _CACHE},
            _options(window, softcap, scale),
            constraints=_RULES,
            accumulates=True,
            name=name,
        )

"""Decoding for many sequences at once, whose states lie in pools: keys and values in pages, recurrent states in slots.

One row of tokens ``[1, tokens]`` holds new tokens of many sequences, so that products with weights read them once for
all: first one token of each of ``rows`` sequences, then up to ``chunk`` tokens of each of ``chunks`` sequences. For
each of the ``rows + chunks`` sequences there is

- ``starts int [sequences]``: how many tokens it has before these;
- ``counts int [sequences]``: how many of its tokens here are real, the first ones. What follows is padding: it is
  written nowhere, changes no state, and its output is 0;
- ``page_table int [sequences, table]``: its pages, in order; a number below 0 is no page;
- ``slots int [sequences]``: where its recurrent state is; below 0: nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from capibara.compose.errors import WiringError
from capibara.compose.logical.arguments import number, whole
from capibara.compose.logical.block import Primitive
from capibara.compose.primitives.latent import _OUTPUT, _options, _sizes, _width
from capibara.compose.primitives.sequence import _SCAN_INPUTS, _given, _grouped, _sinks

__all__ = [
    "PagedAttention",
    "PagedCodesAttention",
    "PagedConv",
    "PagedLatentAttention",
    "PagedPositions",
    "PagedScan",
]


@dataclass(frozen=True)
class StepShape:
    """How many tokens one step has.

    Attributes:
        rows: sequences that give one token each.
        chunks: sequences that give up to ``chunk`` tokens each.

    Raises:
        WiringError: a number is out of range, or there are no tokens.
    """

    rows: int
    chunks: int = 0
    chunk: int = 1

    def __post_init__(self) -> None:
        _parts(self.rows, self.chunks, self.chunk)
        if not self.tokens:
            raise WiringError("a step needs rows or chunks: there are none")

    @property
    def tokens(self) -> int:
        """Of all sequences, padding included."""
        return self.rows + self.chunks * self.chunk

    @property
    def sequences(self) -> int:
        return self.rows + self.chunks

    @property
    def parts(self) -> tuple[int, int, int]:
        """``(rows, chunks, chunk)``, as the primitives take them."""
        return self.rows, self.chunks, self.chunk


@dataclass(frozen=True)
class Pools:
    """How blocks that decode from pools are built.

    Attributes:
        shape: of a step.
        pages, page_size, states: sizes, names, or one :class:`~capibara.compose.logical.shapes.Dim` for all blocks of a
            model.
        width: size of a row of a page; None for what it holds.
        coded: pages are int8 codes, with a scale for each row.
    """

    shape: StepShape
    pages: Any = "pages"
    page_size: Any = "page_size"
    states: Any = "states"
    width: int | None = None
    coded: bool = False


def _parts(rows: int, chunks: int, chunk: int) -> dict[str, int]:
    for name, value, least in (("rows", rows, 0), ("chunks", chunks, 0), ("chunk", chunk, 1)):
        whole(name, value, least)
    return {"rows": int(rows), "chunks": int(chunks), "chunk": int(chunk)}


class PagedPositions(Primitive):
    """Positions of the tokens: ``like [1, tokens]``, ``starts int [sequences]`` → ``output int [1, tokens]``.

    A sequence's tokens count from its start on, its padding too.
    """

    def __init__(self, rows: int, chunks: int, chunk: int, *, name: str | None = None) -> None:
        super().__init__(
            "paged_positions",
            {"like": ("batch sequence", "T"), "starts": (("sequences",), "int")},
            {"output": ("batch sequence", "int")},
            _parts(rows, chunks, chunk),
            name=name,
        )


class PagedAttention(Primitive):
    """Causal attention of new tokens over the pages of their sequences (Kwon et al., arXiv:2309.06180).

    Keys and values are written into the pages first; a query sees its own sequence up to itself.
    ``query [1, tokens, heads, dim]``, ``key``/``value [1, tokens, kv_heads, dim]``, the pools
    ``[pages, page_size, kv_heads, width]``, whose rows may be wider than ``dim`` (padded with zeros). Computed by
    :func:`capibara.ops.attention.paged_attention`.
    """

    decodes = True
    in_place: Mapping[str, str] = MappingProxyType(
        {"key_pages": "next_key_pages", "value_pages": "next_value_pages"}
    )
    _op = "paged_attention"

    @staticmethod
    def _pools() -> dict[str, Any]:
        pool = ("pages page_size kv_heads width", "float")
        return {"key_pages": pool, "value_pages": pool}

    def __init__(
        self,
        rows: int,
        chunks: int,
        chunk: int,
        window: int | None = None,
        softcap: float | None = None,
        *,
        scale: float | None = None,
        sinks: bool = False,
        name: str | None = None,
    ) -> None:
        number("scale", scale, above=True, optional=True)
        whole("window", window, optional=True)
        number("softcap", softcap, above=True, optional=True)
        pools = self._pools()
        super().__init__(
            self._op,
            {
                "query": ("batch sequence heads dim", "float"),
                "key": ("batch sequence kv_heads dim", "float"),
                "value": ("batch sequence kv_heads dim", "float"),
                **pools,
                "page_table": ("sequences table", "int"),
                "starts": (("sequences",), "int"),
                "counts": (("sequences",), "int"),
            }
            | _sinks(sinks),
            {"output": ("batch sequence heads dim", "float")}
            | {f"next_{key}": pool for key, pool in pools.items()},
            {**_parts(rows, chunks, chunk), "window": window, "softcap": softcap} | _given(scale),
            constraints=[(_grouped, ("query", "key"))],
            name=name,
        )


class PagedCodesAttention(PagedAttention):
    """:class:`PagedAttention` whose pages are int8 codes.

    ``key_scales``/``value_scales float32 [pages, page_size, kv_heads]`` are what the codes of a row are multiplied by:
    1/127 of the largest of its numbers (:func:`capibara.ops.attention.paged.code_rows`).
    """

    in_place = MappingProxyType(
        {
            "key_pages": "next_key_pages",
            "value_pages": "next_value_pages",
            "key_scales": "next_key_scales",
            "value_scales": "next_value_scales",
        }
    )
    _op = "paged_codes_attention"

    @staticmethod
    def _pools() -> dict[str, Any]:
        pool, scales = ("pages page_size kv_heads width", "int"), ("pages page_size kv_heads", "float")
        return {"key_pages": pool, "value_pages": pool, "key_scales": scales, "value_scales": scales}


class PagedLatentAttention(Primitive):
    """:class:`PagedAttention` of latents: ``pages [pages, page_size, 1, rank + rope]`` hold them and rotary keys.

    The other arrays are those of :class:`~capibara.compose.primitives.CachedLatentAttention`.
    """

    decodes = True
    in_place = MappingProxyType({"pages": "next_pages"})

    def __init__(
        self,
        rows: int,
        chunks: int,
        chunk: int,
        window: int | None = None,
        softcap: float | None = None,
        *,
        scale: float | None = None,
        name: str | None = None,
    ) -> None:
        pool = (("pages", "page_size", 1, "width"), "float")
        super().__init__(
            "paged_latent_attention",
            {
                "query": ("batch sequence heads dim", "float"),
                "latent": ("batch sequence rank", "float"),
                "rotary_key": (("batch", "sequence", 1, "rope"), "float"),
                "weight": ("rank heads both", "float"),
                "pages": pool,
                "page_table": ("sequences table", "int"),
                "starts": (("sequences",), "int"),
                "counts": (("sequences",), "int"),
            },
            _OUTPUT | {"next_pages": pool},
            {**_parts(rows, chunks, chunk), **_options(window, softcap, scale)},
            constraints=[
                (_sizes, ("query", "weight", "rotary_key", "output")),
                (_width, ("latent", "rotary_key", "pages")),
            ],
            accumulates=True,
            name=name,
        )


_OF_SLOTS: dict[str, Any] = {
    "slots": (("sequences",), "int"),
    "starts": (("sequences",), "int"),
    "counts": (("sequences",), "int"),
}


class PagedConv(Primitive):
    """:class:`~capibara.compose.primitives.CachedConv` whose tails lie in slots: ``tails [slots, width - 1, *c]``.

    ``input [1, tokens, *c]``; a sequence that starts at 0 begins from a tail of zeros.
    """

    decodes = True
    in_place = MappingProxyType({"tails": "next_tails"})

    def __init__(
        self, rows: int, chunks: int, chunk: int, *, use_bias: bool = True, name: str | None = None
    ) -> None:
        inputs: dict[str, Any] = {
            "input": ("batch sequence *c", "float"),
            "weight": ("width *c", "float"),
            "tails": ("states tail *c", "float"),
            **_OF_SLOTS,
        }
        if use_bias:
            inputs["bias"] = ("*c", "float")
        super().__init__(
            "paged_conv",
            inputs,
            {"output": ("batch sequence *c", "float"), "next_tails": ("states tail *c", "float")},
            _parts(rows, chunks, chunk),
            name=name,
        )


class PagedScan(Primitive):
    """:class:`~capibara.compose.primitives.ContinuedScan` whose states lie in slots.

    ``memories [slots, heads, dim, state]``; a sequence that starts at 0 begins from a state of zeros.
    """

    decodes = True
    in_place = MappingProxyType({"memories": "next_memories"})

    def __init__(
        self, rows: int, chunks: int, chunk: int, chunk_size: int | None = None, *, name: str | None = None
    ) -> None:
        if chunk_size is not None:
            whole("chunk_size", chunk_size)
        memories = ("states heads dim state", "float")
        super().__init__(
            "paged_scan",
            {**_SCAN_INPUTS, "memories": memories, **_OF_SLOTS},
            {"output": ("batch sequence heads dim", "float"), "next_memories": memories},
            {
                **_parts(rows, chunks, chunk),
                "chunk_size": None if chunk_size is None else int(chunk_size),
            },
            name=name,
        )

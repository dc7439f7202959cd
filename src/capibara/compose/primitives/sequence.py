"""What mixes positions of a sequence: attention, rotary positions, convolutions, recurrences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from capibara.compose.errors import ShapeError
from capibara.compose.logical.arguments import flag, number, whole
from capibara.compose.logical.block import Primitive
from capibara.compose.logical.shapes import Shape, set_size

__all__ = [
    "Attention",
    "CachedAttention",
    "CachedConv",
    "CausalConv",
    "ContinuedScan",
    "Positions",
    "RaggedCachedAttention",
    "RaggedCachedConv",
    "RaggedContinuedScan",
    "RaggedPositions",
    "RotaryTable",
    "Rotate",
    "SegmentAttention",
    "SegmentConv",
    "SegmentScan",
    "SelectiveScan",
]


class Positions(Primitive):
    """Positions of a row of tokens: ``like [*b, sequence]``, ``start int []`` → ``start + arange(sequence)``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "positions",
            {"like": ("*b sequence", "T"), "start": ((), "int")},
            {"output": (("sequence",), "int"), "end": ((), "int")},
            name=name,
        )


class RaggedPositions(Primitive):
    """Positions of new tokens of rows of different lengths, of which some are padding.

    ``segments int [batch, sequence]`` is 0 where there is padding, and ``start int [batch]`` counts each row's earlier
    tokens. ``output int [batch, sequence]`` counts a row's tokens from there on, without padding (which is 0);
    ``slots`` is the same but -1 for padding; ``end int [batch]`` is the next ``start``.
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "ragged_positions",
            {"segments": ("batch sequence", "int"), "start": (("batch",), "int")},
            {
                "output": ("batch sequence", "int"),
                "slots": ("batch sequence", "int"),
                "end": (("batch",), "int"),
            },
            name=name,
        )


def _half(whole: Shape, half: Shape) -> bool:
    a, b = whole.dims(), half.dims()
    if not a or not b:
        return False
    full, part = a[-1], b[-1]
    if full.size is not None:
        if full.size % 2:
            raise ShapeError(f"rotary positions need an even head size, not {full.size}")
        set_size(part, full.size // 2)
        return True
    if part.size is not None:
        set_size(full, part.size * 2)
        return True
    return False


def _part(whole: Shape, half: Shape) -> bool:
    a, b = whole.dims(), half.dims()
    if not a or not b or a[-1].size is None or b[-1].size is None:
        return False
    if 2 * b[-1].size > a[-1].size:
        raise ShapeError(
            f"rotary tables of {b[-1].size} turn {2 * b[-1].size} features, a head has {a[-1].size}"
        )
    return True


class RotaryTable(Primitive):
    """Cosines and sines for rotary positions (Su et al., 2021): ``positions int [*p]`` → ``[*p, dim / 2]`` each.

    Args:
        dim: features of a head that are turned. theta: base of the wavelengths: pair ``i`` turns by
            ``theta ** (-2 i / dim)`` a position.
        frequencies: those turns, ``dim / 2`` numbers, where they are others. factor: on both tables.
    """

    def __init__(
        self,
        dim: int,
        theta: float = 10000.0,
        *,
        frequencies: Sequence[float] | None = None,
        factor: float = 1.0,
        name: str | None = None,
    ) -> None:
        whole("dim", dim)
        number("theta", theta, above=True)
        number("factor", factor, above=True)
        if dim % 2:
            raise ShapeError(f"dim={dim!r}: rotary positions need an even head size of at least 2")
        turns = None if frequencies is None else tuple(float(turn) for turn in frequencies)
        if turns is not None and len(turns) != dim // 2:
            raise ShapeError(f"frequencies has {len(turns)} numbers, expected dim / 2 = {dim // 2}")
        super().__init__(
            "rotary_table",
            {"positions": ("*p", "int")},
            {"cos": (("*p", dim // 2), "float"), "sin": (("*p", dim // 2), "float")},
            {"dim": int(dim), "theta": float(theta)}
            | ({} if turns is None else {"frequencies": turns})
            | ({} if factor == 1.0 else {"factor": float(factor)}),
            accumulates=True,
            name=name,
        )


class Rotate(Primitive):
    """Rotary positions: turn the two halves of each head by its position's angles.

    ``input [*b, sequence, heads, dim]``, ``cos``/``sin [sequence, dim / 2]`` → the same shape as ``input``. With
    ``partial=True`` the tables may be narrower: ``[sequence, part / 2]`` turn the first ``part`` features of a head.
    With ``by_row=True`` each row has its own positions: the tables are ``[*b, sequence, dim / 2]``.

    With ``interleaved=True`` what is turned are neighbours, features ``2 i`` and ``2 i + 1``, instead of the two
    halves. With ``last=True`` a part is the last features of a head instead of the first.
    """

    def __init__(
        self,
        *,
        partial: bool = False,
        by_row: bool = False,
        interleaved: bool = False,
        last: bool = False,
        name: str | None = None,
    ) -> None:
        flag("partial", partial)
        flag("by_row", by_row)
        flag("interleaved", interleaved)
        flag("last", last)
        table = ("*b sequence half" if by_row else "sequence half", "float")
        super().__init__(
            "rotate",
            {"input": ("*b sequence heads dim", "float"), "cos": table, "sin": table},
            {"output": ("*b sequence heads dim", "float")},
            {key: True for key, given in (("interleaved", interleaved), ("last", last)) if given},
            constraints=[(_part if partial else _half, ("input", "cos"))],
            name=name,
        )


def _grouped(query: Shape, key: Shape) -> bool:
    q, k = query.dims(), key.dims()
    if q is None or k is None or q[-2].size is None or k[-2].size is None:
        return False
    if k[-2].size == 0 or q[-2].size % k[-2].size:
        raise ShapeError(f"{q[-2].size} query heads cannot share {k[-2].size} key heads: not a multiple")
    return True


def _given(scale: float | None) -> dict[str, float]:
    return {} if scale is None else {"scale": float(scale)}


def _sinks(wanted: bool) -> dict[str, tuple[str, str]]:
    """The input of that name, last of all, if it is wanted."""
    flag("sinks", wanted)
    return {"sinks": ("heads", "float")} if wanted else {}


class Attention(Primitive):
    """Scaled dot-product attention through :func:`capibara.ops.attention.flash_attention`.

    ``query [batch, sequence, heads, dim]``, ``key``/``value [batch, sequence, kv_heads, dim]`` → like ``query``;
    each key head serves ``heads / kv_heads`` query heads (Ainslie et al., 2023). ``scale`` is the factor on the scores,
    by default ``1 / sqrt(dim)``. With ``sinks`` there is the input ``sinks [heads]``, logits that only add to the
    softmax's denominators.
    """

    def __init__(
        self,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        *,
        scale: float | None = None,
        sinks: bool = False,
        name: str | None = None,
    ) -> None:
        whole("window", window, optional=True)
        number("softcap", softcap, above=True, optional=True)
        number("scale", scale, above=True, optional=True)
        super().__init__(
            "attention",
            {
                "query": ("batch sequence heads dim", "float"),
                "key": ("batch context kv_heads dim", "float"),
                "value": ("batch context kv_heads dim", "float"),
            }
            | _sinks(sinks),
            {"output": ("batch sequence heads dim", "float")},
            {"causal": bool(causal), "window": window, "softcap": softcap} | _given(scale),
            constraints=[(_grouped, ("query", "key"))],
            name=name,
        )


class SegmentAttention(Primitive):
    """:class:`Attention` within segments: a query sees keys whose number in ``segments`` is its own.

    ``segments int [batch, sequence]``. Several texts in one row do not see one another (packing), nor do they see
    padding, which has a number of its own. Numbers are compared, wherever they are: in ``[1, 1, 2, 2, 1, 1]`` the last
    two positions see the first two. (:class:`SegmentConv` and :class:`SegmentScan` begin anew at each change.)
    """

    def __init__(
        self,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        *,
        scale: float | None = None,
        sinks: bool = False,
        name: str | None = None,
    ) -> None:
        whole("window", window, optional=True)
        number("softcap", softcap, above=True, optional=True)
        number("scale", scale, above=True, optional=True)
        super().__init__(
            "segment_attention",
            {
                "query": ("batch sequence heads dim", "float"),
                "key": ("batch sequence kv_heads dim", "float"),
                "value": ("batch sequence kv_heads dim", "float"),
                "segments": ("batch sequence", "int"),
            }
            | _sinks(sinks),
            {"output": ("batch sequence heads dim", "float")},
            {"causal": bool(causal), "window": window, "softcap": softcap} | _given(scale),
            constraints=[(_grouped, ("query", "key"))],
            name=name,
        )


class CachedAttention(Primitive):
    """Causal attention of new tokens over a cache of the earlier ones.

    The new keys and values are written at ``position``; a query sees everything up to itself. Returns the output
    and the caches with the new rows. The cache must be long enough: ``position + sequence ≤ cache``, which
    is checked where the position is known (not in a trace, where rows past the end overwrite the last ones).

    ``query [batch, sequence, heads, dim]``, ``key``/``value [batch, sequence, kv_heads, dim]``, the caches
    ``[batch, kv_heads, cache, dim]``: the order in which the products of attention read them, so that no compiler
    has to turn a cache round.
    """

    decodes = True
    in_place = MappingProxyType({"key_cache": "next_key_cache", "value_cache": "next_value_cache"})

    def __init__(
        self,
        window: int | None = None,
        softcap: float | None = None,
        *,
        scale: float | None = None,
        sinks: bool = False,
        name: str | None = None,
    ) -> None:
        number("scale", scale, above=True, optional=True)
        cache = "batch kv_heads cache dim"
        whole("window", window, optional=True)
        number("softcap", softcap, above=True, optional=True)
        super().__init__(
            "cached_attention",
            {
                "query": ("batch sequence heads dim", "float"),
                "key": ("batch sequence kv_heads dim", "float"),
                "value": ("batch sequence kv_heads dim", "float"),
                "key_cache": (cache, "float"),
                "value_cache": (cache, "float"),
                "position": ((), "int"),
            }
            | _sinks(sinks),
            {
                "output": ("batch sequence heads dim", "float"),
                "next_key_cache": (cache, "float"),
                "next_value_cache": (cache, "float"),
            },
            {"window": window, "softcap": softcap} | _given(scale),
            constraints=[(_grouped, ("query", "key"))],
            name=name,
        )


class RaggedCachedAttention(Primitive):
    """:class:`CachedAttention` for rows of different lengths: each new token has a place of its own in its row's cache.

    ``slots int [batch, sequence]`` says which, and is also its position: from :class:`RaggedPositions`. A token whose
    slot is -1 is padding: it is written nowhere, nothing sees it, and its output means nothing.
    """

    decodes = True
    in_place = MappingProxyType({"key_cache": "next_key_cache", "value_cache": "next_value_cache"})

    def __init__(
        self,
        window: int | None = None,
        softcap: float | None = None,
        *,
        scale: float | None = None,
        sinks: bool = False,
        name: str | None = None,
    ) -> None:
        number("scale", scale, above=True, optional=True)
        cache = "batch kv_heads cache dim"
        whole("window", window, optional=True)
        number("softcap", softcap, above=True, optional=True)
        super().__init__(
            "ragged_cached_attention",
            {
                "query": ("batch sequence heads dim", "float"),
                "key": ("batch sequence kv_heads dim", "float"),
                "value": ("batch sequence kv_heads dim", "float"),
                "key_cache": (cache, "float"),
                "value_cache": (cache, "float"),
                "slots": ("batch sequence", "int"),
            }
            | _sinks(sinks),
            {
                "output": ("batch sequence heads dim", "float"),
                "next_key_cache": (cache, "float"),
                "next_value_cache": (cache, "float"),
            },
            {"window": window, "softcap": softcap} | _given(scale),
            constraints=[(_grouped, ("query", "key"))],
            name=name,
        )


class _Conv(Primitive):
    """A depthwise causal convolution; the inputs besides ``input``, ``weight`` and ``bias`` depend on its kind."""

    def _build(self, op: str, use_bias: bool, name: str | None, more: Mapping[str, str]) -> None:
        flag("use_bias", use_bias)
        tail = {"next_tail": (more["tail"], "float")} if "tail" in more else {}
        super().__init__(
            op,
            {"input": ("batch sequence *c", "float"), "weight": ("width *c", "float")}
            | {key: (shape, "float" if key == "tail" else "int") for key, shape in more.items()}
            | ({"bias": ("*c", "float")} if use_bias else {}),
            {"output": ("batch sequence *c", "float"), **tail},
            name=name,
        )


class CausalConv(_Conv):
    """Depthwise causal convolution: ``input [batch, sequence, *c]``, ``weight [width, *c]``, ``bias [*c]``.

    ``use_bias=False``: without the input ``bias``.
    """

    def __init__(self, *, use_bias: bool = True, name: str | None = None) -> None:
        self._build("causal_conv", use_bias, name, {})


class SegmentConv(_Conv):
    """:class:`CausalConv` within segments: a position sees earlier ones of its own segment alone.

    ``segments int [batch, sequence]``; a segment is a run of equal numbers, as in :class:`SegmentScan`: in
    ``[1, 1, 2, 2, 1, 1]`` there are three.
    """

    def __init__(self, *, use_bias: bool = True, name: str | None = None) -> None:
        self._build("segment_conv", use_bias, name, {"segments": "batch sequence"})


class CachedConv(_Conv):
    """:class:`CausalConv` that goes on from the last ``width - 1`` inputs, and returns the newest ones."""

    decodes = True

    def __init__(self, *, use_bias: bool = True, name: str | None = None) -> None:
        self._build("cached_conv", use_bias, name, {"tail": "batch tail *c"})


class RaggedCachedConv(_Conv):
    """:class:`CachedConv` for rows of different lengths: what is padding is passed over, wherever it stands.

    ``slots int [batch, sequence]`` is below 0 for padding, whose output is 0: from :class:`RaggedPositions`.
    """

    decodes = True

    def __init__(self, *, use_bias: bool = True, name: str | None = None) -> None:
        self._build(
            "ragged_cached_conv", use_bias, name, {"tail": "batch tail *c", "slots": "batch sequence"}
        )


_SCAN_INPUTS: dict[str, tuple[Any, str | None]] = {
    "input": ("batch sequence heads dim", "float"),
    "step": ("batch sequence heads", "float"),
    "rate": (("heads",), "float"),
    "write": ("batch sequence groups state", "float"),
    "read": ("batch sequence groups state", "float"),
}


class SelectiveScan(Primitive):
    """Selective state-space recurrence through :func:`capibara.ops.scan.selective_scan`, from a zero state.

    ``h[t] = exp(step[t] rate) h[t-1] + step[t] input[t] ⊗ write[t]``; ``output[t] = h[t] · read[t]``
    (Dao and Gu, 2024). ``input [batch, sequence, heads, dim]``, ``step [batch, sequence, heads]``,
    ``rate [heads]``, ``write``/``read [batch, sequence, groups, state]``. ``chunk_size``: positions computed at once
    (speed only); None: what ``capibara tune`` has measured, or a heuristic.
    """

    def __init__(self, chunk_size: int | None = None, *, name: str | None = None) -> None:
        if chunk_size is not None:
            whole("chunk_size", chunk_size)
        super().__init__(
            "selective_scan",
            _SCAN_INPUTS,
            {"output": ("batch sequence heads dim", "float")},
            {"chunk_size": None if chunk_size is None else int(chunk_size)},
            name=name,
        )


class SegmentScan(Primitive):
    """:class:`SelectiveScan` within segments: each begins with a zero state.

    ``segments int [batch, sequence]``; a segment is a run of equal numbers: in ``[1, 1, 2, 2, 1, 1]`` there are three,
    where :class:`SegmentAttention` compares numbers, and has two. Positions of 0 are padding: the state skips them.
    """

    def __init__(self, chunk_size: int | None = None, *, name: str | None = None) -> None:
        if chunk_size is not None:
            whole("chunk_size", chunk_size)
        super().__init__(
            "segment_scan",
            {**_SCAN_INPUTS, "segments": ("batch sequence", "int")},
            {"output": ("batch sequence heads dim", "float")},
            {"chunk_size": None if chunk_size is None else int(chunk_size)},
            name=name,
        )


class _Continued(Primitive):
    """A scan that goes on from a state."""

    def _build(self, op: str, chunk_size: int | None, name: str | None, more: dict[str, Any]) -> None:
        if chunk_size is not None:
            whole("chunk_size", chunk_size)
        memory = ("batch heads dim state", "float")
        super().__init__(
            op,
            {**_SCAN_INPUTS, "memory": memory, **more},
            {"output": ("batch sequence heads dim", "float"), "next_memory": memory},
            {"chunk_size": None if chunk_size is None else int(chunk_size)},
            name=name,
        )


class ContinuedScan(_Continued):
    """:class:`SelectiveScan` that goes on from a given state ``[batch, heads, dim, state]`` and returns the next."""

    decodes = True

    def __init__(self, chunk_size: int | None = None, *, name: str | None = None) -> None:
        self._build("continued_scan", chunk_size, name, {})


class RaggedContinuedScan(_Continued):
    """:class:`ContinuedScan` for rows of different lengths: what is padding leaves the state as it is.

    ``slots int [batch, sequence]`` is below 0 for padding, whose output means nothing: from :class:`RaggedPositions`.
    """

    decodes = True

    def __init__(self, chunk_size: int | None = None, *, name: str | None = None) -> None:
        self._build("ragged_continued_scan", chunk_size, name, {"slots": ("batch sequence", "int")})

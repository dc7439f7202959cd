"""Multi-head self-attention with grouped key and value heads and rotary positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.compose import primitives as p
from capibara.compose.errors import WiringError
from capibara.compose.initializers import Scaled, ones, zeros
from capibara.compose.library.adapters import Adapter, part_adapters
from capibara.compose.logical.arguments import choice, flag, whole
from capibara.compose.logical.model import Model
from capibara.compose.primitives.paged import Pools

__all__ = ["SelfAttention"]


class SelfAttention(Model):
    """Self-attention: ``input [batch, sequence, embed]`` → ``output`` of the same shape.

    Queries, keys and values are projections of the input; positions are rotary (``cos``, ``sin``
    ``[sequence, head_dim / 2]`` from :class:`~capibara.compose.primitives.RotaryTable`); each key head serves
    ``num_heads / num_kv_heads`` query heads.

    Args:
        dimension: size of the input and output. num_heads, num_kv_heads, head_dim: the heads.
        causal: a query sees no later position; False for all positions (and there is no cache then).
        window: how many positions back (and if not causal, forward) a query sees, its own included; None for all.
        softcap: bound on the scores, ``softcap * tanh(score / softcap)``; None for none.
        scale: factor on the scores; None for ``1 / sqrt(head_dim)``.
        use_bias: of the projections to queries, keys and values. output_bias: of the last projection.
        rotary_dim: features of a head that are turned, an even number; None for all; 0 for no rotary positions, and
            then there are no inputs ``cos`` and ``sin``.
        interleaved: what is turned are pairs of neighbours instead of the two halves (GPT-J).
        qk_norm: root-mean-square normalisation of queries and keys before they are turned, of each ``"head"`` (Qwen 3,
            Gemma 3) or over ``"all"`` heads (OLMo 2); None for none. norm_epsilon, norm_offset: of it.
        sinks: a learned logit of each query head that only adds to the softmax's denominators (gpt-oss).
        adapters: low-rank products added to ``"query"``, ``"key"``, ``"value"`` and ``"out"``.
        cached: decode with a key-value cache: adds the states ``key_cache`` and ``value_cache``
            ``[batch, num_kv_heads, cache_size, head_dim]`` and the input ``position``, how many tokens they hold.
        cache_size: a size, a name, or one :class:`~capibara.compose.logical.shapes.Dim` for all layers of a model.
        paged: decode many sequences whose keys and values lie in pages
            (:class:`~capibara.compose.primitives.PagedAttention`): adds the states ``key_pages`` and ``value_pages``
            ``[pages, page_size, num_kv_heads, width]`` and the inputs ``page_table``, ``starts`` and ``counts``;
            ``cos`` and ``sin`` are ``[batch, sequence, head_dim / 2]``.
        ragged: rows hold several texts, or texts of different lengths. ``cos`` and ``sin`` are then
            ``[batch, sequence, head_dim / 2]``; the input ``segments int [batch, sequence]`` numbers the texts
            (:class:`~capibara.compose.primitives.SegmentAttention`), or with a cache ``slots`` takes the place of
            ``position`` (:class:`~capibara.compose.primitives.RaggedCachedAttention`).
    """

    def __init__(
        self,
        dimension: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        use_bias: bool = False,
        output_bias: bool = False,
        rotary_dim: int | None = None,
        interleaved: bool = False,
        qk_norm: str | None = None,
        norm_epsilon: float = 1e-5,
        norm_offset: float = 0.0,
        sinks: bool = False,
        adapters: Mapping[str, Adapter] | None = None,
        cached: bool = False,
        cache_size: Any = "cache",
        ragged: bool = False,
        paged: Pools | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        whole("dimension", dimension)
        whole("num_heads", num_heads)
        whole("num_kv_heads", num_kv_heads, optional=True)
        whole("head_dim", head_dim, optional=True)
        flag("use_bias", use_bias)
        flag("output_bias", output_bias)
        flag("ragged", ragged)
        flag("causal", causal)
        if (cached or paged) and not causal:
            raise WiringError(
                "causal=False has no cache: a new token would change what earlier positions see. Use cached=False"
            )
        flag("sinks", sinks)
        low = part_adapters(adapters, ("query", "key", "value", "out"))
        if qk_norm is not None:
            choice("qk_norm", qk_norm, ("head", "all"))
        kv_heads = num_kv_heads or num_heads
        if num_heads % kv_heads:
            raise WiringError(
                f"num_kv_heads={kv_heads} does not divide num_heads={num_heads}: each key head serves the same "
                "number of query heads"
            )
        if head_dim is None and dimension % num_heads:
            raise WiringError(
                f"num_heads={num_heads} does not divide dimension={dimension}: give head_dim, or another number of "
                "heads"
            )
        size = head_dim or dimension // num_heads
        turned = _turned(size, rotary_dim)
        by_row = ragged or paged is not None
        self.add_input("input", ("batch", "sequence", dimension), "float", ("batch", "sequence", "embed"))
        if turned:
            table = (*(("batch",) if by_row else ()), "sequence", turned // 2)
            self.add_input("cos", table, "float")
            self.add_input("sin", table, "float")

        heads_of = {
            "query": (num_heads, "heads"),
            "key": (kv_heads, "kv_heads"),
            "value": (kv_heads, "kv_heads"),
        }
        at = {key: f"{key}_heads" for key in heads_of}
        for key, (heads, axis) in heads_of.items():
            projection = project_heads(dimension, heads, size, axis, use_bias, low[key])
            self.add(projection, key, input="input", output=at[key])
        for key in ("query", "key") if qk_norm else ():
            heads, axis = heads_of[key]
            norm = _HeadNorm(heads, size, axis, qk_norm == "all", norm_epsilon, norm_offset)
            self.add(norm, f"{key}_norm", input=at[key], output=f"{key}_normed")
            at[key] = f"{key}_normed"
        for key in ("query", "key") if turned else ():
            self.add(
                p.Rotate(partial=turned < size, by_row=by_row, interleaved=interleaved),
                f"{key}_rotated",
                input=at[key],
                cos="cos",
                sin="sin",
                output=f"{key}_turned",
            )
            at[key] = f"{key}_turned"
        if sinks:
            self.add_parameter("sinks", (num_heads,), zeros, axes=("heads",))
            at["sinks"] = "sinks"
        if paged is not None:
            whole("width", paged.width, size, optional=True)
            pool = (paged.pages, paged.page_size, kv_heads, paged.width or size)
            axes = (None, None, "kv_heads", "head_dim")
            given = add_page_inputs(self)
            kind: Any = {"kind": "int", "dtype": "int8"} if paged.coded else {}
            pools = ["key_pages", "value_pages"]
            for key in pools:
                self.add_state(key, pool, zeros, axes=axes, **kind)
            if paged.coded:
                for key in ("key_scales", "value_scales"):
                    self.add_state(key, pool[:3], zeros, axes=axes[:3], dtype="float32")
                    pools.append(key)
            op = p.PagedCodesAttention if paged.coded else p.PagedAttention
            attend = self.add(
                op(*paged.shape.parts, window, softcap, scale=scale, sinks=sinks),
                "attend",
                **at,
                **given,
                **{key: key for key in pools},
                output="attended",
            )
            for key in pools:
                self.update_state(key, getattr(attend, f"next_{key}"))
        elif cached:
            cache = ("batch", kv_heads, cache_size, size)
            axes = ("batch", "kv_heads", None, "head_dim")
            where, op = ("slots", p.RaggedCachedAttention) if ragged else ("position", p.CachedAttention)
            self.add_input(where, ("batch", "sequence") if ragged else (), "int")
            self.add_state("key_cache", cache, zeros, axes=axes)
            self.add_state("value_cache", cache, zeros, axes=axes)
            attend = self.add(
                op(window, softcap, scale=scale, sinks=sinks),
                "attend",
                **at,
                key_cache="key_cache",
                value_cache="value_cache",
                **{where: where},
                output="attended",
            )
            self.update_state("key_cache", attend.next_key_cache)
            self.update_state("value_cache", attend.next_value_cache)
        elif ragged:
            self.add_input("segments", ("batch", "sequence"), "int")
            attend = p.SegmentAttention(causal, window, softcap, scale=scale, sinks=sinks)
            self.add(attend, "attend", **at, segments="segments", output="attended")
        else:
            attend = p.Attention(causal, window, softcap, scale=scale, sinks=sinks)
            self.add(attend, "attend", **at, output="attended")
        joined = join_heads(num_heads, size, dimension, output_bias, low["out"])
        self.add(joined, "out", input="attended", output="output")
        self.expose("output")


def add_page_inputs(model: Model) -> dict[str, str]:
    """Add the inputs that say where the pages of sequences are; their names, as connections."""
    model.add_input("page_table", ("sequences", "table"), "int")
    model.add_input("starts", ("sequences",), "int")
    model.add_input("counts", ("sequences",), "int")
    return {key: key for key in ("page_table", "starts", "counts")}


def _turned(size: int, rotary_dim: int | None) -> int:
    """How many features of a head of ``size`` are turned."""
    if rotary_dim == 0:
        return 0
    whole("rotary_dim", rotary_dim, optional=True)
    if rotary_dim is None and size % 2:
        raise WiringError(f"head_dim={size} must be even: rotary positions turn pairs of features")
    if rotary_dim is not None and (rotary_dim % 2 or rotary_dim > size):
        raise WiringError(
            f"rotary_dim={rotary_dim} must be an even number of at most head_dim={size}: rotary positions turn pairs "
            "of features"
        )
    return rotary_dim or size


def project_heads(
    dimension: int,
    heads: int,
    size: int,
    axis: str,
    use_bias: bool,
    adapter: Adapter | None,
    into: str | None = "embed",
) -> Model:
    """``[*b, dimension]`` → ``[*b, heads, size]``; ``axis`` and ``into`` name the axes of heads and input."""
    projection = Model()
    projection.add_input("input", "*b in", "float")
    product = "product" if use_bias else "output"
    own = "own_product" if adapter else product
    of: dict[str, Any] = {"ins": (dimension,), "outs": (heads, size), "out_axes": (axis, "head_dim")}
    if adapter and adapter.base:
        adapter.add_base(projection, own, **of)
    else:
        weight, axes = (dimension, heads, size), (into, axis, "head_dim")
        projection.add_parameter("weight", weight, Scaled(1.0), axes=axes)
        projection.add(p.Project(), "product", input="input", weight="weight", output=own)
    if adapter:
        adapter.join(projection, own, product, **of, in_axes=(into,), down=p.Dense(), up=p.Project())
    if use_bias:
        projection.add_parameter("bias", (heads, size), zeros, axes=(axis, "head_dim"))
        projection.add(p.Add(), "sum", left="product", right="bias", output="output")
    return projection


def join_heads(heads: int, size: int, dimension: int, use_bias: bool, adapter: Adapter | None) -> Model:
    """``[*b, heads, size]`` → ``[*b, dimension]``."""
    joined = Model()
    joined.add_input("input", "*b heads dim", "float")
    product = "product" if use_bias else "output"
    own = "own_product" if adapter else product
    of: dict[str, Any] = {"ins": (heads, size), "outs": (dimension,), "out_axes": ("embed",)}
    if adapter and adapter.base:
        adapter.add_base(joined, own, **of)
    else:
        weight = (heads, size, dimension)
        drawn, axes = Scaled(1.0, fan_in=2), ("heads", "head_dim", "embed")
        joined.add_parameter("weight", weight, drawn, axes=axes)
        joined.add(p.Merge(), "product", input="input", weight="weight", output=own)
    if adapter:
        of["in_axes"] = ("heads", "head_dim")
        adapter.join(joined, own, product, **of, down=p.Merge(), up=p.Dense())
    if use_bias:
        joined.add_parameter("bias", (dimension,), zeros, axes=("embed",))
        joined.add(p.Add(), "sum", left="product", right="bias", output="output")
    return joined


class _HeadNorm(Model):
    """Root-mean-square normalisation of ``[*b, heads, size]``, of each head or over all."""

    def __init__(
        self, heads: int, size: int, axis: str, over_all: bool, epsilon: float, offset: float
    ) -> None:
        super().__init__()
        self.add_input("input", ("*b", heads, size), "float")
        shape, axes = ((heads, size), (axis, "head_dim")) if over_all else ((size,), ("head_dim",))
        self.add_parameter("scale", shape, zeros if offset else ones, axes=axes, keep_dtype=True)
        norm = p.Normalise("rms", epsilon, offset=offset, dims=len(shape))
        self.add(norm, "norm", input="input", scale="scale", output="output")
        self.expose("output")

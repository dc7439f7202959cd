"""Multi-head latent attention: keys and values of all heads are computed from one short vector a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from capibara.compose import primitives as p
from capibara.compose.initializers import Scaled, zeros
from capibara.compose.library.adapters import Adapter, part_adapters
from capibara.compose.library.attention import add_page_inputs, join_heads, project_heads
from capibara.compose.library.layers import Linear, RMSNorm
from capibara.compose.logical.arguments import flag, whole
from capibara.compose.logical.model import Model
from capibara.compose.primitives.paged import Pools

__all__ = ["LatentSelfAttention"]

PARTS = ("query", "query_down", "query_up", "latent_down", "latent_up", "out")


class LatentSelfAttention(Model):
    """Causal multi-head latent attention (DeepSeek-AI, arXiv:2405.04434): ``input [batch, sequence, embed]`` →
    ``output`` of the same shape.

    ``latent_down`` maps the input to a latent of ``rank`` features, which is normalised, and to a key of ``rotary_dim``
    features with rotary positions, which all heads share; ``latent_up`` maps the latent to the rest of each head's key
    and to its value. Rotary tables are as for :class:`~capibara.compose.SelfAttention`, ``[sequence, rotary_dim / 2]``.

    Args:
        dimension: size of the input and output. num_heads: the heads.
        rank: of keys and values. query_rank: of queries, which then have a normalised latent of their own
            (``query_down``, ``query_up``); None: queries are a product of the input (``query``).
        head_dim: features of a query and a key without positions. rotary_dim: with positions, after them.
        value_dim: features of a value; None for ``head_dim``.
        interleaved: what is turned are pairs of neighbours instead of the two halves.
        window, softcap: as for :class:`~capibara.compose.SelfAttention`.
        scale: factor on the scores; None for ``1 / sqrt(head_dim + rotary_dim)``.
        use_bias: of the products of the input that give latents. output_bias: of the last projection.
        norm_epsilon: of the norms of latents.
        adapters: low-rank products added to ``"query"`` (or ``"query_down"`` and ``"query_up"``), ``"latent_down"``,
            ``"latent_up"`` and ``"out"``.
        cached: decode with a cache: adds the state ``cache [batch, 1, cache_size, rank + rotary_dim]``, the latents and
            shared keys of earlier tokens, and the input ``position``.
        cache_size, ragged: as for :class:`~capibara.compose.SelfAttention`.
        paged: the same with the state ``pages [pages, page_size, 1, rank + rotary_dim]``, and inputs as there.
    """

    def __init__(
        self,
        dimension: int,
        num_heads: int,
        rank: int,
        query_rank: int | None = None,
        head_dim: int = 128,
        rotary_dim: int = 64,
        value_dim: int | None = None,
        *,
        interleaved: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        scale: float | None = None,
        use_bias: bool = False,
        output_bias: bool = False,
        norm_epsilon: float = 1e-6,
        adapters: Mapping[str, Adapter] | None = None,
        cached: bool = False,
        cache_size: Any = "cache",
        ragged: bool = False,
        paged: Pools | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        for key, value in (("dimension", dimension), ("num_heads", num_heads), ("rank", rank)):
            whole(key, value)
        for key, value in (("head_dim", head_dim), ("rotary_dim", rotary_dim)):
            whole(key, value)
        whole("query_rank", query_rank, optional=True)
        whole("value_dim", value_dim, optional=True)
        flag("ragged", ragged)
        low = part_adapters(adapters, PARTS)
        values = value_dim or head_dim
        both = head_dim + values
        self.add_input("input", ("batch", "sequence", dimension), "float", ("batch", "sequence", "embed"))
        by_row = ragged or paged is not None
        table = (*(("batch",) if by_row else ()), "sequence", rotary_dim // 2)
        self.add_input("cos", table, "float")
        self.add_input("sin", table, "float")

        def down(key: str, size: int) -> Linear:
            return Linear(size, use_bias, axes=("embed", "latent"), adapter=low[key], inputs=dimension)

        def rotated(key: str, at: str, output: str) -> None:
            turn = p.Rotate(partial=True, by_row=by_row, interleaved=interleaved, last=True)
            self.add(turn, f"{key}_rotated", input=at, cos="cos", sin="sin", output=output)

        wide = head_dim + rotary_dim
        if query_rank is None:
            query = project_heads(dimension, num_heads, wide, "heads", False, low["query"])
            self.add(query, "query", input="input", output="query_heads")
        else:
            self.add(down("query_down", query_rank), "query_down", input="input", output="query_latent")
            norm = RMSNorm(norm_epsilon, axis="latent")
            self.add(norm, "query_norm", input="query_latent", output="query_normed")
            query = project_heads(query_rank, num_heads, wide, "heads", False, low["query_up"], "latent")
            self.add(query, "query_up", input="query_normed", output="query_heads")
        rotated("query", "query_heads", "query_turned")
        self.add(down("latent_down", rank + rotary_dim), "latent_down", input="input", output="latents")
        first, last = p.Indexer((..., slice(0, rank))), p.Indexer((..., None, slice(rank, None)))
        self.add(first, "latent_part", input="latents", output="latent_raw")
        self.add(last, "key_part", input="latents", output="key_shared")
        self.add(RMSNorm(norm_epsilon, axis="latent"), "latent_norm", input="latent_raw", output="latent")
        rotated("key", "key_shared", "key_turned")
        at = {"query": "query_turned", "rotary_key": "key_turned"}
        if paged is not None:
            up = _Whole(rank, num_heads, both, low["latent_up"])
            self.add(up, "latent_up")
            where = add_page_inputs(self)
            pool = (paged.pages, paged.page_size, 1, rank + rotary_dim)
            self.add_state("pages", pool, zeros, axes=(None, None, None, None))
            attend = self.add(
                p.PagedLatentAttention(*paged.shape.parts, window, softcap, scale=scale),
                "attend",
                **at,
                **where,
                latent="latent",
                weight=up.output,
                pages="pages",
                output="attended",
            )
            self.update_state("pages", attend.next_pages)
        elif cached:
            up = _Whole(rank, num_heads, both, low["latent_up"])
            self.add(up, "latent_up")
            where = "slots" if ragged else "position"
            op = p.RaggedCachedLatentAttention if ragged else p.CachedLatentAttention
            self.add_input(where, ("batch", "sequence") if ragged else (), "int")
            shape = ("batch", 1, cache_size, rank + rotary_dim)
            self.add_state("cache", shape, zeros, axes=("batch", None, None, None))
            attend = self.add(
                op(window, softcap, scale=scale),
                "attend",
                **at,
                latent="latent",
                weight=up.output,
                cache="cache",
                **{where: where},
                output="attended",
            )
            self.update_state("cache", attend.next_cache)
        else:
            expand = project_heads(rank, num_heads, both, "heads", False, low["latent_up"], "latent")
            self.add(expand, "latent_up", input="latent", output="key_value")
            attend, given = p.LatentAttention(True, window, softcap, scale=scale), {}
            if ragged:
                self.add_input("segments", ("batch", "sequence"), "int")
                attend = p.SegmentLatentAttention(True, window, softcap, scale=scale)
                given = {"segments": "segments"}
            self.add(attend, "attend", **at, **given, key_value="key_value", output="attended")
        joined = join_heads(num_heads, values, dimension, output_bias, low["out"])
        self.add(joined, "out", input="attended", output="output")
        self.set_shapes(output=("batch", "sequence", dimension))
        self.expose("output")


class _Whole(Model):
    """The weight ``[rank, heads, size]`` of :func:`project_heads` itself, with its adapter's product.

    Its parameters are those of that layer, under the same names.
    """

    def __init__(self, rank: int, heads: int, size: int, adapter: Adapter | None) -> None:
        super().__init__()
        axes = ("latent", "heads", "head_dim")
        if adapter and adapter.base:
            # Its product with the identity: the only way to read it.
            self.add(p.Eye(rank), "identity", output="input")
            adapter.add_base(self, "own", ins=(rank,), outs=(heads, size), out_axes=axes[1:])
        else:
            self.add_parameter("weight", (rank, heads, size), Scaled(1.0), axes=axes)
            self.add(p.Buffer(), "own_weight", input="weight", output="own" if adapter else "output")
        if adapter:
            drawn = Scaled(1.0)
            self.add_parameter("lora_a", (rank, adapter.rank), drawn, axes=("latent", None))
            self.add_parameter("lora_b", (adapter.rank, heads, size), zeros, axes=(None, *axes[1:]))
            self.add(p.Project(), "lora_product", input="lora_a", weight="lora_b", output="product")
            self.add(p.Multiply(), "lora_scaled", left="product", right=adapter.scale, output="change")
            self.add(p.Add(), "lora_sum", left="own", right="change", output="output")
        self.expose("output")

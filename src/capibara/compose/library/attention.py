"""Multi-head self-attention with grouped key and value heads and rotary positions."""

from __future__ import annotations

from typing import Any

from capibara.compose import primitives as p
from capibara.compose.errors import WiringError
from capibara.compose.initializers import Scaled, zeros
from capibara.compose.logical.arguments import whole
from capibara.compose.logical.model import Model

__all__ = ["SelfAttention"]


class SelfAttention(Model):
    """Causal self-attention: ``input [batch, sequence, embed]`` → ``output`` of the same shape.

    Queries, keys and values are projections of the input; positions are rotary (``cos``, ``sin``
    ``[sequence, head_dim / 2]`` from :class:`~capibara.compose.primitives.RotaryTable`); each key head serves
    ``num_heads / num_kv_heads`` query heads.

    Args:
        dimension: size of the input and output. num_heads, num_kv_heads, head_dim: the heads.
        window: how many positions back a query sees; None for all.
        softcap: bound on the scores, ``softcap * tanh(score / softcap)``; None for none.
        cached: decode with a key-value cache: adds the states ``key_cache`` and ``value_cache``
            ``[batch, num_kv_heads, cache_size, head_dim]`` and the input ``position``, how many tokens they hold.
        cache_size: a size, a name, or one :class:`~capibara.compose.logical.shapes.Dim` for all layers of a model.
    """

    def __init__(
        self,
        dimension: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        window: int | None = None,
        softcap: float | None = None,
        cached: bool = False,
        cache_size: Any = "cache",
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        whole("dimension", dimension)
        whole("num_heads", num_heads)
        whole("num_kv_heads", num_kv_heads, optional=True)
        whole("head_dim", head_dim, optional=True)
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
        if size % 2:
            raise WiringError(f"head_dim={size} must be even: rotary positions turn pairs of features")
        self.add_input("input", ("batch", "sequence", dimension), "float", ("batch", "sequence", "embed"))
        self.add_input("cos", ("sequence", size // 2), "float")
        self.add_input("sin", ("sequence", size // 2), "float")

        for key, heads, axis in (
            ("query", num_heads, "heads"),
            ("key", kv_heads, "kv_heads"),
            ("value", kv_heads, "kv_heads"),
        ):
            projection = Model()
            projection.add_input("input", "*b in", "float")
            projection.add_parameter(
                "weight", (dimension, heads, size), Scaled(1.0), axes=("embed", axis, "head_dim")
            )
            projection.add(p.Project(), "product", input="input", weight="weight", output="output")
            self.add(projection, key, input="input", output=f"{key}_heads")
        for key in ("query", "key"):
            self.add(
                p.Rotate(),
                f"{key}_rotated",
                input=f"{key}_heads",
                cos="cos",
                sin="sin",
                output=f"{key}_turned",
            )
        if cached:
            cache = ("batch", kv_heads, cache_size, size)
            axes = ("batch", "kv_heads", None, "head_dim")
            self.add_input("position", (), "int")
            self.add_state("key_cache", cache, zeros, axes=axes)
            self.add_state("value_cache", cache, zeros, axes=axes)
            attend = self.add(
                p.CachedAttention(window, softcap),
                "attend",
                query="query_turned",
                key="key_turned",
                value="value_heads",
                key_cache="key_cache",
                value_cache="value_cache",
                position="position",
                output="attended",
            )
            self.update_state("key_cache", attend.next_key_cache)
            self.update_state("value_cache", attend.next_value_cache)
        else:
            self.add(
                p.Attention(True, window, softcap),
                "attend",
                query="query_turned",
                key="key_turned",
                value="value_heads",
                output="attended",
            )
        joined = Model()
        joined.add_input("input", "*b heads dim", "float")
        joined.add_parameter(
            "weight", (num_heads, size, dimension), Scaled(1.0, fan_in=2), axes=("heads", "head_dim", "embed")
        )
        joined.add(p.Merge(), "product", input="input", weight="weight", output="output")
        self.add(joined, "out", input="attended", output="output")
        self.expose("output")

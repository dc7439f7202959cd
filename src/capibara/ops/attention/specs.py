"""The attention problems that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["SPECS", "AttentionSpec", "arguments"]


@dataclass(frozen=True)
class AttentionSpec:
    """Sizes and options of one ``flash_attention`` call; ``tags`` among ``small``, ``large``, ``odd``."""

    name: str
    batch: int
    heads: int
    q_len: int
    dim: int
    kv_heads: int | None = None
    kv_len: int | None = None
    value_dim: int | None = None
    bias: tuple[bool, bool, bool, bool] | None = None
    """Which of the bias' four axes are full (the others have size 1)."""
    segments: bool = False
    sinks: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ("small",)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Array shapes in the spec's layout."""
        kv_heads, kv_len = self.kv_heads or self.heads, self.kv_len or self.q_len
        value_dim = self.value_dim or self.dim

        def order(heads: int, length: int, dim: int) -> tuple[int, ...]:
            if self.options.get("layout", "bhsd") == "bhsd":
                return (self.batch, heads, length, dim)
            return (self.batch, length, heads, dim)

        full = (self.batch, self.heads, self.q_len, kv_len)
        shapes = {
            "query": order(self.heads, self.q_len, self.dim),
            "key": order(kv_heads, kv_len, self.dim),
            "value": order(kv_heads, kv_len, value_dim),
        }
        if self.bias is not None:
            shapes["bias"] = tuple(f if keep else 1 for f, keep in zip(full, self.bias, strict=True))
        if self.sinks:
            shapes["sinks"] = (self.heads,)
        return shapes


_CAUSAL = {"use_causal_mask": True}

SPECS: tuple[AttentionSpec, ...] = (
    AttentionSpec("plain", 2, 2, 8, 4),
    AttentionSpec("causal", 2, 3, 12, 4, options=_CAUSAL),
    AttentionSpec("one position", 1, 2, 1, 4, options=_CAUSAL, tags=("small", "odd")),
    AttentionSpec("one head", 1, 1, 5, 3, options=_CAUSAL, tags=("small", "odd")),
    AttentionSpec("grouped", 2, 4, 10, 4, kv_heads=2, options=_CAUSAL),
    AttentionSpec("one key head", 2, 4, 7, 4, kv_heads=1, options={**_CAUSAL, "layout": "bshd"}),
    AttentionSpec("bshd", 2, 3, 9, 5, options={**_CAUSAL, "layout": "bshd", "block_size": 4}),
    AttentionSpec("ragged blocks", 1, 2, 13, 4, options={**_CAUSAL, "block_size": 4}, tags=("small", "odd")),
    AttentionSpec("many blocks", 1, 2, 29, 4, options={**_CAUSAL, "block_size": 2}, tags=("small", "odd")),
    AttentionSpec("longer keys", 2, 2, 5, 4, kv_len=11, options={"block_size": 2}),
    AttentionSpec("longer queries", 2, 2, 11, 4, kv_len=5, options={**_CAUSAL, "block_size": 3}),
    AttentionSpec("window", 1, 2, 15, 4, options={**_CAUSAL, "window": 3, "block_size": 4}),
    AttentionSpec("window both ways", 1, 2, 15, 4, options={"window": (2, 1), "block_size": 2}),
    AttentionSpec(
        "window past the keys", 1, 1, 12, 4, kv_len=4, options={"window": 3, "block_size": 4}, tags=("odd",)
    ),
    AttentionSpec("softcap", 1, 2, 9, 4, options={**_CAUSAL, "softcap": 0.7, "block_size": 4}),
    AttentionSpec("bias", 2, 4, 6, 4, kv_heads=2, bias=(True, True, True, True), options={"block_size": 2}),
    AttentionSpec(
        "bias per head", 2, 2, 9, 4, bias=(False, True, True, True), options={**_CAUSAL, "block_size": 4}
    ),
    AttentionSpec("bias per key", 2, 2, 9, 4, bias=(True, False, False, True), options={"softcap": 2.0}),
    AttentionSpec(
        "bias, many blocks", 1, 2, 20, 4, bias=(False, True, True, True), options={"block_size": 2}
    ),
    AttentionSpec("segments", 2, 2, 11, 4, segments=True, options={**_CAUSAL, "block_size": 4}),
    AttentionSpec("other value size", 1, 2, 6, 4, value_dim=3, options={**_CAUSAL, "scale": 0.3}),
    AttentionSpec("sinks", 2, 4, 13, 4, kv_heads=2, sinks=True, options={**_CAUSAL, "window": 5}),
    AttentionSpec(
        "sinks, segments, bias",
        2,
        3,
        9,
        4,
        kv_heads=1,
        bias=(False, True, True, True),
        segments=True,
        sinks=True,
        options={"layout": "bshd", "softcap": 2.0},
    ),
    AttentionSpec("model 8 heads", 16, 8, 256, 32, options=_CAUSAL, tags=("large",)),
    AttentionSpec("model 6 heads", 16, 6, 256, 32, options=_CAUSAL, tags=("large",)),
    AttentionSpec(
        "model 8 heads, bshd", 16, 8, 256, 32, options={**_CAUSAL, "layout": "bshd"}, tags=("large",)
    ),
    AttentionSpec("longer", 4, 8, 1024, 64, options=_CAUSAL, tags=("large",)),
    AttentionSpec("longest", 1, 8, 4096, 64, options=_CAUSAL, tags=("large",)),
)


def arguments(
    spec: AttentionSpec, random: np.random.Generator
) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """The arguments of a call: normal random values, and three segments of the sequence if the spec has segments."""
    arrays: dict[str, Any] = {name: random.normal(size=shape) for name, shape in spec.shapes().items()}
    if spec.segments:
        lengths = (spec.q_len, spec.kv_len or spec.q_len)
        ids = [np.broadcast_to(np.arange(n) * 3 // n, (spec.batch, n)).astype(np.int32) for n in lengths]
        arrays["segment_ids"] = tuple(ids)
    operands = tuple(arrays.pop(name) for name in ("query", "key", "value"))
    return operands, {**arrays, **spec.options}

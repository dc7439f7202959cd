"""Attention of composed models over a sequence that is sharded over a mesh, inside of ``jax.shard_map``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from capibara.compose.backends.jax_ops.latent import expanded

__all__ = ["RINGS"]


def _ring(query: Any, key: Any, value: Any, *, causal: bool, **options: Any) -> Any:
    from capibara.ops.attention.ring import ring_attention

    return ring_attention(query, key, value, use_causal_mask=causal, layout="bshd", **options)


def _attention(query: Any, key: Any, value: Any, sinks: Any = None, **options: Any) -> Any:
    return _ring(query, key, value, sinks=sinks, **options)


def _segment_attention(
    query: Any, key: Any, value: Any, segments: Any, sinks: Any = None, **options: Any
) -> Any:
    return _ring(query, key, value, segment_ids=segments, sinks=sinks, **options)


def _latent_attention(query: Any, key_value: Any, rotary_key: Any, **options: Any) -> Any:
    return _ring(query, *expanded(query, key_value, rotary_key), **options)


def _segment_latent_attention(
    query: Any, key_value: Any, rotary_key: Any, segments: Any, **options: Any
) -> Any:
    return _ring(query, *expanded(query, key_value, rotary_key), segment_ids=segments, **options)


RINGS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "attention": _attention,
        "segment_attention": _segment_attention,
        "latent_attention": _latent_attention,
        "segment_latent_attention": _segment_latent_attention,
    }
)
"""The operations that can go round a ring, by name; called as those of ``jax_ops``, and with ``axis_name``."""

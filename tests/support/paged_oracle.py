"""Attention over pages by its definition, and sequences in shuffled pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_arrays import device_array

from capibara.ops.attention import paged_attention

__all__ = ["arrays", "check_nan_and_infinity", "definition", "in_pages"]


def definition(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    length: int,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """One sequence: q [new, heads, dim], keys [length, kv_heads, dim]."""
    new, heads, dim = q.shape
    scale = dim**-0.5 if scale is None else scale
    out = np.zeros((new, heads, values.shape[-1]))
    for t, h in np.ndindex(new, heads):
        at = length - new + t
        low = 0 if window is None else max(0, at - window + 1)
        if at < 0:
            continue
        kv = h // (heads // keys.shape[1])
        s = keys[low : at + 1, kv] @ q[t, h] * scale
        s = s if softcap is None else softcap * np.tanh(s / softcap)
        s = np.append(s, -np.inf if sinks is None else sinks[h])
        w = np.exp(s - s.max())
        out[t, h] = (w / w.sum())[:-1] @ values[low : at + 1, kv]
    return out


def in_pages(
    lengths: Sequence[int] | np.ndarray,
    *,
    kv_heads: int,
    heads: int,
    page_size: int,
    dim: int = 128,
    value_dim: int = 128,
    new: int = 1,
    table: int | None = None,
    pages: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Sequences in shuffled pages; what no sequence owns is NaN, and the table has nonsense after their ends."""
    rng = np.random.default_rng(seed)
    needed = [-(-int(n) // page_size) for n in lengths]
    table = max(*needed, 0, 1) + 1 if table is None else table
    pages = sum(needed) + 3 if pages is None else pages
    where = np.full((len(lengths), table), -1, np.int32)
    key = np.full((pages, page_size, kv_heads, dim), np.nan)
    value = np.full((pages, page_size, kv_heads, value_dim), np.nan)
    free, whole = list(rng.permutation(pages)), []
    for b, length in enumerate(lengths):
        k, v = rng.normal(size=(length, kv_heads, dim)), rng.normal(size=(length, kv_heads, value_dim))
        whole.append((k, v))
        for s in range(length):
            if s % page_size == 0:
                where[b, s // page_size] = free.pop()
            page = where[b, s // page_size]
            key[page, s % page_size], value[page, s % page_size] = k[s], v[s]
    return {
        "query": rng.normal(size=(len(lengths), new, heads, dim)),
        "pages": (key, value),
        "table": where,
        "lengths": np.asarray(lengths, np.int32),
        "whole": whole,
    }


def arrays(
    case: dict[str, Any], dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Query, pools, table and lengths of :func:`in_pages`."""
    query, key, value = (device_array(x, dtype) for x in (case["query"], *case["pages"]))
    return query, key, value, device_array(case["table"]), device_array(case["lengths"])


def check_nan_and_infinity(kernel: Callable[..., jax.Array], dim: int) -> None:
    """They stay with their sequence and head."""
    case = in_pages([6, 9], kv_heads=2, heads=4, dim=dim, value_dim=dim, page_size=4)
    query, key, value, table, lengths = arrays(case)
    # The last value of the first sequence and head, a key of the second ones.
    value = value.at[table[0, 1], 1, 0, 0].set(jnp.inf)
    key = key.at[table[1, 2], 0, 1, 3].set(jnp.nan)
    got = kernel(query, key, value, table, lengths)
    want = paged_attention(query, key, value, table, lengths, implementation="reference")
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.isfinite(got[0, :, 2:]).all()
    assert np.isfinite(got[1, :, :2]).all()

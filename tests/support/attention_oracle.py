"""Attention from its definition, in NumPy and float64, and the arrays of a spec."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.ops.attention.specs import AttentionSpec

__all__ = ["make", "oracle"]


def make(spec: AttentionSpec, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Float64 arrays of a spec, and its options (with the segments)."""
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(size=shape) for name, shape in spec.shapes().items()}
    options = dict(spec.options)
    if spec.segments:
        options["segment_ids"] = np.sort(rng.integers(0, 3, (spec.batch, spec.q_len)), axis=1).astype(
            np.int32
        )
    return arrays, options


def oracle(arrays: dict[str, np.ndarray], options: dict[str, Any]) -> np.ndarray:
    """Attention with loops over everything, in float64, from the definition."""
    bshd = options.get("layout", "bhsd") == "bshd"
    q, k, v = (arrays[n].swapaxes(1, 2) if bshd else arrays[n] for n in ("query", "key", "value"))
    scale = options.get("scale", q.shape[-1] ** -0.5)
    causal, window, softcap = (options.get(n) for n in ("use_causal_mask", "window", "softcap"))
    left, right = window if isinstance(window, tuple) else (None if window is None else window - 1,) * 2
    segments = options.get("segment_ids")
    own, other = segments if isinstance(segments, tuple) else (segments, segments)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    bias = np.broadcast_to(arrays["bias"], shape) if "bias" in arrays else np.zeros(shape)
    sinks = arrays.get("sinks", np.full(q.shape[1], -np.inf))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // k.shape[1])
            for i in range(q.shape[2]):
                seen = [
                    j
                    for j in range(k.shape[2])
                    if not (causal and j > i)
                    and not (left is not None and j < i - left)
                    and not (right is not None and j > i + right)
                    and not (own is not None and other is not None and own[b, i] != other[b, j])
                    and bias[b, h, i, j] > -np.inf
                ]
                if not seen:
                    continue
                s = scale * k[b, kv, seen] @ q[b, h, i]
                if softcap is not None:
                    s = softcap * np.tanh(s / softcap)
                s = s + bias[b, h, i, seen]
                top = max(s.max(), sinks[h])
                w = np.exp(s - top)
                out[b, h, i] = (w / (w.sum() + np.exp(sinks[h] - top))) @ v[b, kv, seen]
    return out.swapaxes(1, 2) if bshd else out

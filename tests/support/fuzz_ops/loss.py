"""Losses from hidden states and a head: logits, a logarithm of sums, and what is added to it."""

from __future__ import annotations

from typing import Any

import numpy as np

from capibara.ops import loss
from fuzz_ops.case import EPS, Arg, Family, Generator, floats, pick

__all__ = ["OPERATIONS"]


def _losses(hidden: Any, head: Any, labels: Any, options: dict[str, Any]) -> np.ndarray:
    logits = hidden @ (head if options["layout"] == "fv" else head.T)
    if options["softcap"] is not None:
        logits = options["softcap"] * np.tanh(logits / options["softcap"])
    high = logits.max(-1)
    log_sum = high + np.log(np.exp(logits - high[..., None]).sum(-1))
    ignored = labels == options["ignore_index"]
    chosen = np.take_along_axis(logits, np.where(ignored, 0, labels)[..., None], -1)[..., 0]
    smooth = options["label_smoothing"]
    value = log_sum - (1 - smooth) * chosen - smooth * logits.mean(-1)
    return np.where(ignored, 0, value + options["z_loss"] * log_sum**2)


def family(rng: Generator) -> Family:
    lead, features, vocab = pick(rng, (), (1,), (4,), (8,), (2, 6)), pick(rng, 1, 2, 4), pick(rng, 1, 2, 4, 8)
    dtype, weighted = floats(rng), bool(rng.random() < 0.5)
    options: dict[str, Any] = {
        "layout": pick(rng, "fv", "vf"),
        "softcap": pick(rng, None, None, 2.0),
        "label_smoothing": pick(rng, 0.0, 0.0, 0.1),
        "z_loss": pick(rng, 0.0, 0.0, 0.1),
        "ignore_index": -1,
        "reduction": pick(rng, "mean", "sum", "none"),
        "chunk_size": pick(rng, None, 1, 3),
        "implementation": pick(rng, "auto", "xla", "xla", "reference"),
    }

    def oracle(hidden: Any, head: Any, labels: Any, *weights: Any) -> list[np.ndarray]:
        found = _losses(hidden, head, labels, options)
        factors = np.where(labels == -1, 0, weights[0] if weights else 1.0)
        total = factors.sum()
        if options["reduction"] == "none":
            return [found * factors]
        summed = (found * factors).sum()
        return [np.asarray(summed if options["reduction"] == "sum" else summed / total if total else 0.0)]

    def call(hidden: Any, head: Any, labels: Any, *weights: Any) -> Any:
        return loss.cross_entropy(hidden, head, labels, weights=weights[0] if weights else None, **options)

    wide = "float64" if dtype == "float64" else "float32"
    narrow = dtype in ("bfloat16", "float16")
    # What is said of a few tokens is a sum over them and over features.
    tolerance = 200 * EPS[wide]
    return Family(
        f"cross_entropy({(*lead, features)}, {vocab}, {dtype}, weights={weighted}, {options})",
        call,
        oracle,
        (
            Arg((*lead, features), dtype),
            Arg((features, vocab) if options["layout"] == "fv" else (vocab, features), dtype),
            Arg(lead, "int32", range(-1, vocab)),
            *((Arg(lead, wide, "positive"),) if weighted else ()),
        ),
        x64=dtype == "float64",
        tolerance=tolerance,
        gradient_tolerance=20 * EPS[dtype] if narrow else None,
        differentiable=(0, 1, 3) if weighted else (0, 1),
        twice=not narrow,
        dtypes=(wide,),
    )


OPERATIONS = {"loss.cross_entropy": family}

"""The losses that tests and benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["SPECS", "LossSpec", "arguments"]


@dataclass(frozen=True)
class LossSpec:
    """One ``cross_entropy`` call; ``tags`` among ``small``, ``large``, ``odd``."""

    name: str
    batch: tuple[int, ...]
    features: int
    vocab: int
    options: dict[str, Any] = field(default_factory=dict)
    weighted: bool = False
    ignored: float = 0.2
    """The share of labels that are ignored."""
    tags: tuple[str, ...] = ("small",)


_ODD, _LARGE = ("small", "odd"), ("large",)
_ALL: dict[str, Any] = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.01}

SPECS: tuple[LossSpec, ...] = (
    LossSpec("plain", (4, 9), 8, 11, {"chunk_size": 8}),
    LossSpec("everything", (37,), 8, 21, {**_ALL, "layout": "vf", "chunk_size": 10}, True),
    LossSpec("each", (2, 3, 7), 5, 13, {**_ALL, "reduction": "none", "chunk_size": 5}, True),
    LossSpec("blocks", (70,), 4, 4500, {"reduction": "sum", "z_loss": 0.1, "chunk_size": 64}),
    LossSpec("blocks of rows", (40,), 4, 4100, {**_ALL, "layout": "vf"}, True, tags=_ODD),
    LossSpec("one token", (), 3, 5, tags=_ODD, ignored=0),
    LossSpec("one entry", (6,), 3, 1, tags=_ODD),
    LossSpec("no token", (3, 0), 3, 5, tags=_ODD),
    LossSpec("all ignored", (5,), 3, 5, ignored=1, tags=_ODD),
    LossSpec("demo", (8, 256), 192, 256, {"layout": "vf"}, tags=_LARGE),
    LossSpec("bytes", (4096,), 128, 256, tags=_LARGE),
    LossSpec("vocabulary of 32k", (2048,), 768, 32768, {"layout": "vf"}, tags=_LARGE),
    LossSpec("vocabulary of 128k", (4096,), 128, 131072, {"layout": "vf"}, tags=_LARGE),
)


def arguments(spec: LossSpec, random: np.random.Generator) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """The arguments of a call."""
    hidden = random.normal(size=(*spec.batch, spec.features))
    head = random.normal(size=(spec.features, spec.vocab)) * spec.features**-0.5
    labels = random.integers(0, spec.vocab, size=spec.batch)
    labels = np.where(random.random(spec.batch) < spec.ignored, -100, labels).astype(np.int32)
    options = dict(spec.options)
    if options.get("layout") == "vf":
        head = np.ascontiguousarray(head.T)
    if spec.weighted:
        options["weights"] = random.uniform(0.5, 2.0, size=spec.batch)
    return (hidden, head, labels), options

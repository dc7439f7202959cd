"""Settings, text and runs small enough for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from capibara.config import ModularModelConfig
from capibara.train import Corpus, split_corpus

TINY = (
    "model.embed_dim=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.max_sequence_length=16",
    "train.sequence_length=16",
    "train.batch_size=4",
    "train.steps=12",
    "train.log_every=5",
    "train.eval_every=6",
    "train.eval_batches=2",
    "optimizer.warmup_steps=2",
    "checkpoint.every_steps=4",
)

QUICK_COMPILE = "--xla_backend_optimization_level=0"
"""For ``XLA_FLAGS`` of processes that only run a tiny program a few times."""

TEXT = "".join(f"Sentence {n} says that {n} squared is {n * n}.\n" for n in range(200))


def tiny_config(directory: Path | str, *overrides: str) -> ModularModelConfig:
    """The demo's settings, cut down; the run goes to ``directory``."""
    config = ModularModelConfig.from_toml("demo", [*TINY, *overrides])
    return config.with_overrides({"checkpoint.directory": str(directory)})


def tiny_corpus() -> Corpus:
    """About 9 kB of sentences."""
    return split_corpus(TEXT.encode(), name="sentences", validation_fraction=0.1)


def python(
    *arguments: str, env: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run this Python with warnings as errors; output captured as text."""
    return subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu", **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )

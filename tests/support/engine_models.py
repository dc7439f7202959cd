"""Small models for the engine, of every kind that :mod:`small_models` has."""

from __future__ import annotations

from typing import Any

from small_models import KINDS, SMALL

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel

__all__ = ["LONGEST", "engine_model"]

LONGEST = 64
"""Most tokens of a text."""


def engine_model(kind: str, **more: Any) -> ModularCapibaraModel:
    """A model of bytes and some further tokens, with other settings by their full names."""
    settings = {"model.vocab_size": 300, "model.max_sequence_length": LONGEST, "train.sequence_length": 32}
    return ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | KINDS[kind] | settings | more))

"""Programs that are made while a model is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_models import KINDS, SMALL

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError
from capibara.serve import Engine, Request, Sampling
from capibara.serve.engine.early import EarlyPrograms

SETTINGS = {"model.vocab_size": 256, "model.max_sequence_length": 64, "train.sequence_length": 32}
SIZES: dict[str, Any] = {"max_batch": 2, "page_size": 4, "prefill_tokens": 8, "prefill_chunks": 2}
ASKED = Request((1, 2, 3), max_tokens=6, sampling=Sampling(temperature=0.0))


def config_of(**more: Any) -> ModularModelConfig:
    return ModularModelConfig.from_dict({}, SMALL | KINDS["grouped"] | SETTINGS | more)


def tokens(engine: Engine) -> list[int]:
    return [token for piece in engine.submit(ASKED) for token in piece.tokens]


@pytest.mark.parametrize("pages", [None, 20])
def test_an_engine_takes_them(tmp_path: Path, pages: int | None) -> None:
    early = EarlyPrograms(config_of(), tmp_path, pages=pages, **SIZES)
    model = ModularCapibaraModel(config_of())
    with Engine(model, early=early, warm=False, **SIZES) as engine:
        found = tokens(engine)
        assert engine.statistics().compilations == 0
        assert pages in (None, engine.statistics().pages_total)
    with Engine(model, warm=False, **SIZES) as engine:
        assert tokens(engine) == found
        assert engine.statistics().compilations > 0


@pytest.mark.parametrize("other", [{"model.mlp_dim": 24}, {"model.rope_theta": 77.0}])
def test_those_of_another_model_are_left(tmp_path: Path, other: dict[str, Any]) -> None:
    early = EarlyPrograms(config_of(**other), tmp_path, **SIZES)
    model = ModularCapibaraModel(config_of())
    with Engine(model, early=early, warm=False, **SIZES) as engine:
        tokens(engine)
        assert engine.statistics().compilations > 0


def test_what_is_wrong_the_engine_says(tmp_path: Path) -> None:
    wrong: dict[str, Any] = SIZES | {"max_batch": 0}
    early = EarlyPrograms(config_of(), tmp_path, **wrong)
    assert early.take() is None
    with pytest.raises(ConfigError, match="max_batch=0"):
        Engine(ModularCapibaraModel(config_of()), early=early, warm=False, **wrong)

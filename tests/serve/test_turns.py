"""How long requests wait for their turn, and which are refused because of it."""

from __future__ import annotations

import heapq
import threading
from typing import Any

import numpy as np
import pytest
from small_models import KINDS, SMALL

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError
from capibara.serve import Engine, QueueFullError, Request, Sampling
from capibara.serve.engine.turns import Turns

SETTINGS = {"model.vocab_size": 256, "model.max_sequence_length": 64, "train.sequence_length": 32}
ASKED: dict[str, Any] = {"prompt": (1, 2, 3), "max_tokens": 2, "sampling": Sampling(temperature=0.0)}


@pytest.mark.parametrize("places", [1, 4, 16])
@pytest.mark.parametrize("ahead", [8, 40])
def test_waits_are_those_of_a_simulated_queue(places: int, ahead: int) -> None:
    random = np.random.default_rng(0)
    turns = Turns()
    assert turns.wait_s(ahead, places) == 0
    for held in random.uniform(0.5, 1.5, 200):
        turns.ended(held)
    waits = []
    for _ in range(300):
        # All places are taken, by texts that began at any time; each end lets the next one in.
        ends = (random.uniform(0.5, 1.5, places) * random.uniform(0, 1, places)).tolist()
        heapq.heapify(ends)
        for _ in range(ahead):
            heapq.heappush(ends, heapq.heappop(ends) + random.uniform(0.5, 1.5))
        waits.append(ends[0])
    assert turns.wait_s(ahead, places) == pytest.approx(np.mean(waits), rel=0.15, abs=0.15)


def test_what_would_wait_too_long_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | KINDS["grouped"] | SETTINGS))
    sizes: dict[str, Any] = {"max_batch": 1, "page_size": 4, "prefill_tokens": 8, "prefill_chunks": 2}
    with Engine(model, warm=False, max_wait_s=1.5, **sizes) as engine:
        assert len(list(engine.submit(Request(**ASKED)))) >= 2  # nothing is known yet, and nothing runs
        assert engine._turns.wait_s(0, 1) > 0
        # One second for each that comes before; and a step that lasts until all have been asked.
        monkeypatch.setattr(engine._turns, "wait_s", lambda ahead, places: float(ahead))
        there, go = threading.Event(), threading.Event()
        step = engine._programs.step

        def held(*args: Any, **options: Any) -> Any:
            there.set()
            assert go.wait(60)
            return step(*args, **options)

        monkeypatch.setattr(engine._programs, "step", held)
        try:
            streams = [engine.submit(Request(**ASKED))]
            assert there.wait(60)
            assert engine.full_for_s() == 0
            streams += [engine.submit(Request(**ASKED)) for _ in range(2)]
            assert engine.full_for_s() == pytest.approx(0.5)
            with pytest.raises(
                QueueFullError, match=r"wait about 2\.0 s for its turn, expected at most 1\.5 s"
            ) as caught:
                engine.submit(Request(**ASKED))
            assert caught.value.retry_after_s == pytest.approx(0.5)
            with pytest.raises(QueueFullError, match=r"at most 0\.5 s"):
                engine.submit(Request(**ASKED, deadline_s=0.5))
            with pytest.raises(QueueFullError, match=r"wait about 2\.0 s"):
                engine.submit_all([Request(**ASKED, priority=-1)] * 3)  # the last of them
            # Before those that wait.
            streams.append(engine.submit(Request(**ASKED, priority=-1, deadline_s=60.0)))
            assert engine.statistics().waiting == 3
            assert engine.full_for_s() == 0  # of the next one that is as urgent
        finally:
            go.set()
        for stream in streams:
            assert sum(len(piece.tokens) for piece in stream) == 2


def test_requests_that_find_free_places_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | KINDS["grouped"] | SETTINGS))
    sizes: dict[str, Any] = {"max_batch": 2, "page_size": 4, "prefill_tokens": 8, "prefill_chunks": 2}
    with Engine(model, warm=False, max_wait_s=1.5, **sizes) as engine:
        list(engine.submit(Request(**ASKED)))
        monkeypatch.setattr(engine._turns, "_held", [10.0])  # far longer than a request may wait
        # As many as there are places, though those that come first run in none yet.
        streams = engine.submit_all([Request(**ASKED)] * 2)
        assert [sum(len(piece.tokens) for piece in stream) for stream in streams] == [2, 2]
        monkeypatch.setattr(engine._turns, "_held", [10.0])
        with pytest.raises(QueueFullError, match=r"wait about 5\.0 s for its turn, expected at most 1\.5 s"):
            engine.submit_all([Request(**ASKED)] * 3)


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), "1"])
def test_a_wrong_limit(wrong: Any) -> None:
    model = ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | KINDS["grouped"] | SETTINGS))
    with pytest.raises(ConfigError, match="max_wait_s="):
        Engine(model, max_wait_s=wrong, warm=False)

"""Prompts whose tokens are scored, against the whole text."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from small_models import KINDS, SMALL

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.serve import Engine, Request, RequestError, Sampling, Speculation

LONGEST = 64
GREEDY = Sampling(temperature=0.0)


def model_of(kind: str) -> ModularCapibaraModel:
    settings = {"model.vocab_size": 256, "model.max_sequence_length": LONGEST, "train.sequence_length": 32}
    return ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | KINDS[kind] | settings))


def requests(count: int) -> list[Request]:
    random = np.random.default_rng(2)
    found = []
    for number in range(count):
        prompt = tuple(random.integers(0, 256, random.integers(1, 40)).tolist())
        scored = None if number % 4 == 3 else number % 3
        most = int(random.integers(0 if scored is not None else 1, 6))
        found.append(
            Request(prompt, most, sampling=GREEDY, prompt_logprobs=scored, logprobs=0, ignore_eos=True)
        )
    return found


def check(model: ModularCapibaraModel, engine: Engine, asked: list[Request]) -> None:
    run = jax.jit(lambda row: jax.nn.log_softmax(model.apply(model.params, row)[0]))
    streams = [engine.submit(request) for request in asked]
    for request, stream in zip(asked, streams, strict=True):
        pieces = list(stream)
        assert pieces[-1].finish == "length", pieces[-1].error
        tokens = [token for piece in pieces for token in piece.tokens]
        assert len(tokens) == request.max_tokens
        row = np.zeros((1, LONGEST), np.int32)
        row[0, : len(request.prompt) + len(tokens)] = [*request.prompt, *tokens]
        known = np.asarray(run(row))
        scores = [score for piece in pieces for score in piece.prompt_scores]
        number = request.prompt_logprobs
        if number is None:
            assert not scores
        else:
            assert [score.token for score in scores] == list(request.prompt)
            assert math.isnan(scores[0].logprob)
            for place, score in enumerate(scores[1:]):
                assert score.logprob == pytest.approx(known[place, score.token], abs=1e-4)
                assert len(score.top) == number
                best = np.sort(known[place])[::-1][:number]
                np.testing.assert_allclose([p for _, p in score.top], best, atol=1e-4)
        written = [score.logprob for piece in pieces for score in piece.scores]
        want = [known[len(request.prompt) - 1 + n, token] for n, token in enumerate(tokens)]
        np.testing.assert_allclose(written, want, atol=1e-4)
    assert engine.statistics().pages_used == 0


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("grouped", {"pages": 24}),
        pytest.param("ssm", {}, marks=pytest.mark.slow),
        pytest.param("latent", {"speculation": Speculation(2)}, marks=pytest.mark.slow),
        pytest.param("grouped", {"speculation": "draft"}, marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_the_whole_text(kind: str, more: dict[str, Any]) -> None:
    model = model_of(kind)
    if more.get("speculation") == "draft":
        more = {"speculation": Speculation(2, draft=model)}
    sizes: dict[str, Any] = {
        "max_batch": 3,
        "page_size": 4,
        "prefill_tokens": 16,
        "prefill_chunks": 2,
        "pages": 80,
    }
    with Engine(model, **(sizes | more)) as engine:
        check(model, engine, requests(24))
        assert engine.statistics().compilations == 0
        # What was read to be scored is known to later texts, and is not read instead of scoring.
        again = requests(6)[5]
        check(model, engine, [again, dataclasses.replace(again, prompt_logprobs=1)])


@pytest.mark.thin(3)
@pytest.mark.parametrize("most", [0, 1, 3])
def test_scores_that_are_complete_before_the_last_piece_are_sent_once(most: int) -> None:
    model = model_of("grouped")
    with Engine(model, max_batch=3, page_size=4, prefill_tokens=16, prefill_chunks=2, pages=80) as engine:
        lengths = [1, 2, 7, 8, 9, 15, 16, 17, 24, 25, 33]
        check(
            model,
            engine,
            [
                Request(
                    tuple(range(n)), most, sampling=GREEDY, prompt_logprobs=1, logprobs=0, ignore_eos=True
                )
                for n in lengths
            ],
        )


def test_a_prompt_that_fills_the_engine_is_scored() -> None:
    model = model_of("grouped")
    with Engine(model, max_batch=2, page_size=4, pages=16, prefill_tokens=16, warm=False) as engine:
        whole = tuple(range(LONGEST))
        check(model, engine, [Request(whole, 0, sampling=GREEDY, prompt_logprobs=1)])
        with pytest.raises(RequestError, match="leaves no room for an answer"):
            engine.submit(Request(whole))


def test_what_cannot_be_scored() -> None:
    with Engine(model_of("grouped"), max_batch=2, page_size=4, pages=20, warm=False) as engine:
        with pytest.raises(RequestError, match="prompt_logprobs=21: expected an integer from 0 to 20"):
            engine.submit(Request((1,), prompt_logprobs=21))
        with pytest.raises(RequestError, match="max_tokens=0: expected an integer from 1"):
            engine.submit(Request((1,), max_tokens=0))

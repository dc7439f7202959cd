"""Guessed tokens change how fast a text is written, and nothing of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_models import KINDS, SMALL

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError
from capibara.serve import Engine, Request, Sampling, Speculation

LONGEST = 64
SIZES: dict[str, Any] = {"max_batch": 4, "page_size": 4, "prefill_tokens": 8, "prefill_chunks": 2}


def model_of(kind: str, **more: Any) -> ModularCapibaraModel:
    settings = {"model.vocab_size": 300, "model.max_sequence_length": LONGEST, "train.sequence_length": 32}
    return ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | KINDS[kind] | settings | more))


def requests(count: int, seed: int) -> list[Request]:
    """Of few different tokens, so that texts repeat themselves; greedy and drawn, some with what changes logits."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        prompt = random.integers(0, 8, random.integers(1, 30))
        sampling = Sampling(
            temperature=float(random.choice([0, 0, 0.4, 1.0])),
            frequency_penalty=float(random.choice([0, 0, 0, 0.5])),
            logit_bias=((int(random.integers(0, 8)), 3.0),) if random.random() < 0.1 else (),
        )
        found.append(
            Request(
                tuple(prompt.tolist()),
                max_tokens=int(random.integers(1, 30)),
                sampling=sampling,
                seed=number,
                logprobs=1 if random.random() < 0.3 else None,
                stop=("a",) if random.random() < 0.2 else (),
            )
        )
    return found


def written(
    model: ModularCapibaraModel, asked: list[Request], speculation: Speculation | None, pages: int = 60
) -> tuple[list[Any], Any]:
    with Engine(model, **SIZES, pages=pages, speculation=speculation) as engine:
        streams = [engine.submit(request) for request in asked]
        texts = []
        for stream in streams:
            pieces = list(stream)
            tokens = [token for piece in pieces for token in piece.tokens]
            scores = [score.logprob for piece in pieces for score in piece.scores]
            texts.append((tokens, "".join(piece.text for piece in pieces), pieces[-1].finish, scores))
        return texts, engine.statistics()


def check(texts: list[Any], want: list[Any]) -> None:
    for (tokens, text, finish, scores), (*same, likely) in zip(texts, want, strict=True):
        assert [tokens, text, finish] == same
        np.testing.assert_allclose(scores, likely, atol=1e-4)


@pytest.fixture(scope="module")
def model() -> ModularCapibaraModel:
    return model_of("grouped")


@pytest.fixture(scope="module")
def without(model: ModularCapibaraModel) -> tuple[list[Request], list[Any], int]:
    asked = requests(40, 0)
    texts, statistics = written(model, asked, None)
    return asked, texts, statistics.steps


@pytest.mark.parametrize("pages", [60, 17])
def test_guesses_from_the_text_itself(model: ModularCapibaraModel, without: Any, pages: int) -> None:
    asked, want, steps = without
    texts, statistics = written(model, asked, Speculation(3, longest=3), pages)
    check(texts, want)
    assert statistics.guessed_tokens >= statistics.right_guesses > 0
    assert statistics.pages_used == statistics.compilations == 0
    assert statistics.steps < steps or statistics.preemptions


@pytest.mark.parametrize("pages", [60, pytest.param(17, marks=pytest.mark.slow)])
def test_guesses_of_the_model_itself_are_all_right(
    model: ModularCapibaraModel, without: Any, pages: int
) -> None:
    asked, want, steps = without
    texts, statistics = written(model, asked, Speculation(4, draft=model), pages)
    check(texts, want)
    # Pages that another text left may lack what the draft has to read.
    assert statistics.right_guesses > 0.9 * statistics.guessed_tokens > 0
    assert statistics.pages_used == statistics.compilations == 0
    assert statistics.steps < 0.8 * steps or statistics.preemptions


@pytest.mark.parametrize(
    "kind", ["multi_query", *(pytest.param(k, marks=pytest.mark.slow) for k in ("latent",))]
)
def test_guesses_of_another_model(kind: str, without: Any, model: ModularCapibaraModel) -> None:
    asked, want, _ = without
    draft = model_of(kind)
    texts, statistics = written(model, asked, Speculation(2, draft=draft, params=draft.init(5)[0]))
    check(texts, want)
    assert statistics.guessed_tokens > statistics.right_guesses


@pytest.mark.parametrize("draft", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_texts_with_penalties_are_guessed(model: ModularCapibaraModel, draft: bool) -> None:
    random = np.random.default_rng(3)
    asked = []
    for number in range(16):
        sampling = Sampling(
            temperature=float(random.choice([0, 0.7])),
            presence_penalty=float(random.choice([0.5, -0.5, 1.5])),
            frequency_penalty=float(random.choice([0, 0.3, -0.3])),
            repetition_penalty=float(random.choice([1.0, 1.2])),
            logit_bias=((int(random.integers(0, 8)), 2.0),) if number % 4 == 0 else (),
        )
        prompt = tuple(random.integers(0, 8, random.integers(1, 20)).tolist())
        least = int(random.integers(0, 12))
        asked.append(
            Request(prompt, max_tokens=20, sampling=sampling, seed=number, logprobs=1, min_tokens=least,
                    stop_tokens=frozenset(range(8)) if number % 3 == 0 else frozenset())
        )  # fmt: skip
    want, before = written(model, asked, None)
    texts, statistics = written(model, asked, Speculation(3, draft=model if draft else None))
    check(texts, want)
    assert statistics.right_guesses > 0
    assert statistics.steps < before.steps
    if draft:  # which has the same penalties
        assert statistics.right_guesses > 0.9 * statistics.guessed_tokens
    assert statistics.pages_used == statistics.compilations == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["latent", "experts", "attention"])
@pytest.mark.parametrize("draft", [False, True])
def test_500_random_requests(kind: str, draft: bool) -> None:
    model = model_of(kind)
    asked = requests(500, 1)
    want, _ = written(model, asked, None)
    texts, statistics = written(model, asked, Speculation(4, draft=model if draft else None), 40)
    check(texts, want)
    assert statistics.right_guesses > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 0}, r"speculation.tokens=0: expected an integer from 1 to 16"),
        ({"tokens": True}, "speculation.tokens=True"),
        ({"longest": 1}, "speculation.longest=1: expected an integer from 2 to 32"),
        ({"draft": "vocabulary"}, "speculation.draft has 310 token ids, the model 300"),
        ({"draft": "short"}, "speculation.draft takes 32 tokens, the model 64"),
        ({"draft": "ssm"}, "expected a model of attention alone"),
    ],
)
def test_what_cannot_guess(model: ModularCapibaraModel, change: dict[str, Any], message: str) -> None:
    drafts = {
        "vocabulary": lambda: model_of("grouped", **{"model.vocab_size": 310}),
        "short": lambda: model_of("grouped", **{"model.max_sequence_length": 32}),
        "ssm": lambda: model_of("ssm"),
    }
    if "draft" in change:
        change = {"draft": drafts[change["draft"]]()}
    with pytest.raises(ConfigError, match=message):
        Engine(model, **SIZES, pages=20, speculation=Speculation(**change), warm=False)


def test_recurrent_states_cannot_be_taken_back() -> None:
    with pytest.raises(ConfigError, match="recurrent states, which cannot be taken back"):
        Engine(model_of("ssm"), **SIZES, pages=20, speculation=Speculation(), warm=False)

"""Guessed tokens change how fast a text is written, and nothing of it."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import numpy as np
import pytest
from engine_models import engine_model

from capibara.core import ModularCapibaraModel
from capibara.data import ByteTokenizer
from capibara.errors import ConfigError
from capibara.serve import Engine, Grammar, Request, RequestError, Sampling, Speculation

SIZES: dict[str, Any] = {"max_batch": 4, "page_size": 4, "prefill_tokens": 8, "prefill_chunks": 2}


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
    return engine_model("grouped")


@pytest.fixture(scope="module")
def without(model: ModularCapibaraModel) -> tuple[list[Request], list[Any], int]:
    asked = requests(40, 0)
    texts, statistics = written(model, asked, None)
    return asked, texts, statistics.steps


@pytest.mark.thin(2)
@pytest.mark.parametrize("pages", [60, 17])
def test_guesses_from_the_text_itself(model: ModularCapibaraModel, without: Any, pages: int) -> None:
    asked, want, steps = without
    texts, statistics = written(model, asked, Speculation(3, longest=3), pages)
    check(texts, want)
    assert statistics.guessed_tokens >= statistics.right_guesses > 0
    assert statistics.pages_used == statistics.compilations == 0
    assert statistics.steps < steps or statistics.preemptions


@pytest.mark.slow
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
    assert statistics.steps < 0.9 * steps or statistics.preemptions, (statistics.steps, steps)


@pytest.mark.parametrize(
    "kind", ["multi_query", *(pytest.param(k, marks=pytest.mark.slow) for k in ("latent",))]
)
def test_guesses_of_another_model(kind: str, without: Any, model: ModularCapibaraModel) -> None:
    asked, want, _ = without
    draft = engine_model(kind)
    texts, statistics = written(model, asked, Speculation(2, draft=draft, params=draft.init(5)[0]))
    check(texts, want)
    assert statistics.guessed_tokens > statistics.right_guesses


@pytest.mark.slow
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


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 3},
            "age": {"type": "integer"},
            "ok": {"type": "boolean"},
        },
        "required": ["name", "age", "ok"],
        "additionalProperties": False,
    }
)
GRAMMARS = (
    Grammar("json_schema", SCHEMA),
    Grammar("regex", "(ab|cd){1,8}!"),
    Grammar("regex", "[0-9]{2,9}"),
    Grammar("choice", "yes\nyesterday\nno"),
)


def requests_with_grammars(count: int, seed: int) -> list[Request]:
    """Most of them with a grammar, among others; greedy and drawn, some with what changes logits, too."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        grammar = GRAMMARS[number % 4] if random.random() < 0.8 else None
        sampling = Sampling(
            temperature=float(random.choice([0, 0.7, 1.0])),
            frequency_penalty=float(random.choice([0, 0, 0.5])),
            logit_bias=((int(random.integers(97, 101)), 3.0),) if random.random() < 0.3 else (),
        )
        found.append(
            Request(
                tuple(random.integers(0, 110, random.integers(1, 20)).tolist()),
                max_tokens=int(random.integers(1, 44)),
                min_tokens=int(random.integers(0, 4)) if random.random() < 0.3 else 0,
                sampling=sampling,
                seed=number,
                grammar=grammar,
                logprobs=1 if random.random() < 0.3 else None,
                stop=("c",) if random.random() < 0.1 else (),
            )
        )
    return found


def follows(grammar: Grammar, text: str) -> bool:
    """Whether a whole text is one of a grammar, without the package that the engine asks."""
    if grammar.kind == "regex":
        return re.fullmatch(grammar.text, text) is not None
    if grammar.kind == "choice":
        return text in grammar.text.split("\n")
    read = json.loads(text)
    return (
        list(read) == ["name", "age", "ok"]
        and isinstance(read["name"], str)
        and len(read["name"]) <= 3
        and type(read["age"]) is int
        and type(read["ok"]) is bool
    )


@pytest.fixture(scope="module")
def grammars_without(model: ModularCapibaraModel) -> tuple[list[Request], list[Any], int]:
    pytest.importorskip("llguidance")
    asked = requests_with_grammars(40, 0)
    texts, statistics = written(model, asked, None)
    return asked, texts, statistics.steps


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("draft", "pages"),
    [
        (False, 60),
        (False, 18),
        (True, 60),
        pytest.param(True, 18, marks=pytest.mark.slow),
    ],
)
def test_texts_with_grammars_are_guessed(
    model: ModularCapibaraModel, grammars_without: Any, draft: bool, pages: int
) -> None:
    asked, want, steps = grammars_without
    texts, statistics = written(model, asked, Speculation(3, draft=model if draft else None), pages)
    check(texts, want)
    whole = [
        follows(request.grammar, text)
        for request, (_, text, finish, _) in zip(asked, texts, strict=True)
        if request.grammar is not None and finish == "stop" and not request.stop
    ]
    assert len(whole) > 10
    assert all(whole)
    assert statistics.pages_used == statistics.compilations == 0
    assert statistics.right_guesses > 0
    assert statistics.steps < 0.9 * steps or statistics.preemptions, (statistics.steps, steps)
    if draft:  # it has the same grammars
        assert statistics.right_guesses > 0.9 * statistics.guessed_tokens


@pytest.mark.slow
def test_what_a_grammar_leaves_no_choice_about_is_guessed(model: ModularCapibaraModel) -> None:
    pytest.importorskip("llguidance")
    grammar = Grammar("regex", "(yesterday|tomorrow), (always|never), (friday|monday)")
    asked = [Request((200, 130 + n), max_tokens=40, seed=n, grammar=grammar) for n in range(4)]
    want, before = written(model, asked, None)
    texts, statistics = written(model, asked, Speculation(4))
    check(texts, want)
    assert {finish for _, _, finish, _ in texts} == {"stop"}
    # Of each word the first letter is the model's; five tokens a step are the most.
    assert statistics.right_guesses > 0.6 * statistics.generated_tokens
    assert statistics.steps < 0.6 * before.steps


@pytest.mark.slow
@pytest.mark.parametrize("draft", [False, True])
def test_500_random_requests_with_grammars(model: ModularCapibaraModel, draft: bool) -> None:
    pytest.importorskip("llguidance")
    asked = requests_with_grammars(500, 1)
    want, _ = written(model, asked, None)
    texts, statistics = written(model, asked, Speculation(4, draft=model if draft else None), 40)
    check(texts, want)
    assert statistics.right_guesses > 0


def test_a_grammar_forgets_what_was_only_guessed() -> None:
    pytest.importorskip("llguidance")
    from capibara.serve.grammar import compile_grammar

    state = compile_grammar(Grammar("regex", "[0-9]{3}-ab"), ByteTokenizer(), 300)

    def allowed(*after: int) -> bytes:
        return bytes(np.flatnonzero(state.allowed(after)[:256]).tolist())

    digits = b"0123456789"
    assert (state.follow(b"123-ab"), state.follow(b"123-abc"), state.follow(b"12x"), state.follow(b"")) == (
        6,
        6,
        2,
        0,
    )
    # Ids that the tokenizer does not have, whatever the model may write, come to nothing.
    assert (state.follow([49, 299]), allowed(49, 299), allowed(299)) == (1, b"", b"")
    assert (allowed(), allowed(*b"12"), allowed(*b"123"), allowed(*b"x")) == (digits, digits, b"-", b"")
    assert allowed(*b"123-ab") == b""
    assert state.forced() == []
    for token in b"123":
        assert state.accept(token)
    assert allowed() == b"-"
    assert bytes(state.forced()) == b"-ab"
    assert (allowed(*b"-"), state.follow(b"123")) == (b"a", 0)
    assert [state.accept(token) for token in b"-ab"] == [True, True, False]
    assert state.may_end


@pytest.mark.parametrize("work", ["forced", "follow"])
def test_what_guesses_cost_counts_as_work_of_the_grammar(monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    pytest.importorskip("llguidance")
    from capibara.serve.grammar import compile_grammar

    monkeypatch.setattr("capibara.serve.grammar._MOST_S", 0.05)
    state = compile_grammar(Grammar("regex", "[a-z]*"), ByteTokenizer(), 300)
    state.allowed()
    state.accept(97)
    assert state.allowed()[97]  # which takes far less than that
    begun = time.thread_time()
    while time.thread_time() - begun < 0.5:
        state.forced() if work == "forced" else state.follow(b"abc" * 50)
    state.accept(97)
    with pytest.raises(RequestError, match="ms to find what may follow a token"):
        state.allowed()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["latent", "experts", "attention"])
@pytest.mark.parametrize("draft", [False, True])
def test_500_random_requests(kind: str, draft: bool) -> None:
    model = engine_model(kind)
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
        ({"draft": "short"}, "speculation.draft takes 32 tokens, the engine 64"),
        ({"draft": "ssm"}, "expected a model of attention alone"),
    ],
)
def test_what_cannot_guess(model: ModularCapibaraModel, change: dict[str, Any], message: str) -> None:
    drafts = {
        "vocabulary": lambda: engine_model("grouped", **{"model.vocab_size": 310}),
        "short": lambda: engine_model("grouped", **{"model.max_sequence_length": 32}),
        "ssm": lambda: engine_model("ssm"),
    }
    if "draft" in change:
        change = {"draft": drafts[change["draft"]]()}
    with pytest.raises(ConfigError, match=message):
        Engine(model, **SIZES, pages=20, speculation=Speculation(**change), warm=False)


def test_a_draft_model_of_fewer_tokens_guesses_for_an_engine_of_as_many() -> None:
    model = engine_model("grouped")
    draft = engine_model("grouped", **{"model.max_sequence_length": 32})
    asked = Request((1, 2, 3), max_tokens=29, sampling=Sampling(temperature=0.0), ignore_eos=True)
    found = []
    for speculation in (None, Speculation(4, draft=draft)):
        sizes: dict[str, Any] = SIZES | {"max_length": 32}
        with Engine(model, **sizes, pages=20, speculation=speculation, warm=False) as engine:
            found.append([token for piece in engine.submit(asked) for token in piece.tokens])
            guessed = engine.statistics().guessed_tokens
    assert found[0] == found[1]
    assert len(found[0]) == 29
    assert guessed > 0


def test_recurrent_states_cannot_be_taken_back() -> None:
    with pytest.raises(ConfigError, match="recurrent states, which cannot be taken back"):
        Engine(engine_model("ssm"), **SIZES, pages=20, speculation=Speculation(), warm=False)

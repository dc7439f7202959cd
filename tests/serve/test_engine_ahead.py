"""The device computes the next step before the tokens of the last one are read, and texts stay the same."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
from engine_models import engine_model

from capibara.core import ModularCapibaraModel
from capibara.serve import Engine, Grammar, Request, Sampling
from capibara.serve.engine.choosing import Choice
from capibara.serve.engine.several import StepTimes, TokenLoop, Written
from capibara.serve.engine.steps import EngineSizes

SIZES: dict[str, Any] = {"max_batch": 4, "page_size": 4, "prefill_tokens": 8, "prefill_chunks": 2}
GREEDY = Sampling(temperature=0.0)
NUMBERS = "[0-9]{2,6}(-[a-f]{1,4})?"


@pytest.fixture(scope="module")
def model() -> ModularCapibaraModel:
    return engine_model("grouped")


def requests(count: int, seed: int) -> list[Request]:
    """All that makes a text end, or its tokens depend on those before, with one another."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        prompt = random.integers(0, 200, random.integers(1, 24))
        sampling = Sampling(
            temperature=float(random.choice([0, 0, 0.8])),
            frequency_penalty=float(random.choice([0, 0, 0.5])),
            repetition_penalty=float(random.choice([1, 1, 1.3])),
            logit_bias=((int(random.integers(0, 200)), 3.0),) if random.random() < 0.2 else (),
        )
        kind = random.integers(0, 5)
        found.append(
            Request(
                tuple(prompt.tolist()),
                max_tokens=int(random.integers(1, 36)),
                min_tokens=int(random.integers(0, 4)),
                sampling=sampling,
                seed=number,
                logprobs=1 if random.random() < 0.3 else None,
                stop=tuple("aeiou") if kind == 0 else (),
                stop_tokens=frozenset(random.integers(0, 256, 60).tolist()) if kind == 1 else frozenset(),
                grammar=Grammar("regex", NUMBERS) if kind == 2 else None,
                priority=int(random.integers(0, 2)),
            )
        )
    return found


def ahead_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the engine does, in order: steps whose tokens come from the device, other steps, and reading tokens."""
    done: list[str] = []
    step, read = engine._programs.step, Choice.read
    monkeypatch.setattr(engine, "_host_computes", False)  # as where there is an accelerator

    def planted(shape: Any, cache: Any, inputs: Any, *rest: Any, **more: Any) -> Any:
        done.append("ahead" if isinstance(inputs["tokens"], jax.Array) else "step")
        return step(shape, cache, inputs, *rest, **more)

    def reads(self: Choice) -> Any:
        done.append("read")
        return read(self)

    monkeypatch.setattr(engine._programs, "step", planted)
    monkeypatch.setattr(Choice, "read", reads)
    return done


def take_at_once(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Have one call write so many tokens of each text where it may write several."""
    monkeypatch.setattr(StepTimes, "at_once", lambda *_: count)


def written(engine: Engine, asked: list[Request], together: int | None = None) -> list[Any]:
    """The texts of requests that are submitted so many at a time; by default all at once."""
    size = together or len(asked)
    groups = [asked[first : first + size] for first in range(0, len(asked), size)]
    return [text for group in groups for text in written_together(engine, group)]


def written_together(engine: Engine, asked: list[Request]) -> list[Any]:
    texts = []
    for stream in engine.submit_all(asked):
        pieces = list(stream)
        tokens = [token for piece in pieces for token in piece.tokens]
        scores = [score.logprob for piece in pieces for score in piece.scores]
        texts.append((tokens, "".join(piece.text for piece in pieces), pieces[-1].finish, scores))
    return texts


def check(texts: list[Any], want: list[Any]) -> None:
    for (tokens, text, finish, scores), (*same, likely) in zip(texts, want, strict=True):
        assert [tokens, text, finish] == same
        np.testing.assert_allclose(scores, likely, atol=1e-4)


def test_each_step_but_the_first_is_started_before_the_tokens_of_the_last_are_read(
    model: ModularCapibaraModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_at_once(monkeypatch, 1)
    with Engine(model, **SIZES, pages=60, warm=False) as engine:
        done = ahead_of(engine, monkeypatch)
        (text,) = written(engine, [Request((1, 2, 3), max_tokens=6, sampling=GREEDY)])
        assert len(text[0]) == 6
        # A prompt is read, and its token; then there is a step for each further token, none after the last.
        assert done == ["step", "read", "step", *["ahead", "read"] * 4, "read"]
        assert engine.statistics().steps == 6
        # On CPUs what changes logits is prepared between steps, not beside them.
        monkeypatch.setattr(engine, "_host_computes", True)
        changed = Request((1, 2, 3), max_tokens=6, sampling=Sampling(temperature=0.0, frequency_penalty=1.0))
        done.clear()
        written(engine, [changed])
        assert done == ["step", "read"] * 6


def test_a_text_that_ends_unexpectedly_takes_one_step_more_and_no_token(
    model: ModularCapibaraModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_at_once(monkeypatch, 1)
    with Engine(model, **SIZES, pages=60, warm=False) as engine:
        ((tokens, *_),) = written(engine, [Request((7, 8), max_tokens=12, sampling=GREEDY)])
        at = next(n for n in range(2, 12) if tokens[n] not in tokens[:n])
        loop = EngineSizes.loop

        def without_ends(*given: Any) -> TokenLoop:
            asked = loop(*given)
            return asked._replace(ends=np.full_like(asked.ends, -1))

        monkeypatch.setattr(EngineSizes, "loop", without_ends)
        ends = frozenset({tokens[at]})
        asked = Request((7, 8), max_tokens=12, sampling=GREEDY, stop_tokens=ends)
        before = engine.statistics()
        done = ahead_of(engine, monkeypatch)
        ((found, _, finish, _),) = written(engine, [asked])
        assert (found, finish) == (tokens[:at], "stop")
        assert done.count("read") == at + 1
        engine.close(drain_s=60)
        after = engine.statistics()
    assert after.pages_used == 0
    # The prompt's step, one for each further token and the end, and the one that nobody asked for.
    assert after.generated_tokens - before.generated_tokens == at + 1
    assert after.steps - before.steps == at + 2


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_a_text_of_the_likeliest_tokens_takes_few_calls(
    model: ModularCapibaraModel, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [Request((1, 2, 3 + n), max_tokens=18 + n, sampling=GREEDY) for n in range(2)]
    with Engine(model, **SIZES, pages=60, warm=False, use_cache=False) as engine:
        want = written(engine, asked)
    with Engine(model, **SIZES, pages=60, warm=False) as engine:
        take_at_once(monkeypatch, 1)
        before = written(engine, asked[:1])
        take_at_once(monkeypatch, at_once)
        done = ahead_of(engine, monkeypatch)
        check(written(engine, asked[:1]), before)
        # The prompt's step gives the first token, and each call so many of the other 17, as far as they are wanted.
        calls = -(-17 // at_once)
        assert (done.count("step"), done.count("ahead")) == (2, calls - 1)
        check(written(engine, asked), want)
        found = engine.statistics()
    assert (found.pages_used, found.generated_tokens) == (0, 18 * 3 + 19)


def loops_of(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Written]:
    """What each call of a loop writes, also those that nobody waits for."""
    found: list[Written] = []
    step = engine._programs.step

    def noted(*given: Any, **options: Any) -> Any:
        logits, cache, result = step(*given, **options)
        if result is not None and result.alive is not None:
            found.append(result)
        return logits, cache, result

    monkeypatch.setattr(engine._programs, "step", noted)
    return found


def calls_of(
    engine: Engine, asked: list[Request], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[int], list[int]]:
    """How many steps the engine's calls computed for some requests, and how many tokens each got."""
    loops = loops_of(engine, monkeypatch)
    texts = [[token for piece in stream for token in piece.tokens] for stream in engine.submit_all(asked)]
    engine.close(drain_s=60)  # calls may be started after a text has ended
    return [loop.steps for loop in loops], [len(text) for text in texts]


@pytest.fixture(scope="module")
def ending(model: ModularCapibaraModel) -> tuple[Request, int]:
    """A text that ends with a stop token, and how many come before it."""
    with Engine(model, **SIZES, pages=60, warm=False) as engine:
        ((tokens, *_),) = written(engine, [Request((7, 8), max_tokens=24, sampling=GREEDY)])
    at = next(n for n in range(10, 23) if tokens[n] not in tokens[:n])
    stops = frozenset({tokens[at]})
    return Request((7, 8), max_tokens=40, sampling=GREEDY, stop_tokens=stops, ignore_eos=True), at


@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_a_loop_ends_with_the_last_text(
    model: ModularCapibaraModel, ending: tuple[Request, int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, at = ending
    take_at_once(monkeypatch, at_once)
    with Engine(model, **SIZES, pages=60, warm=False) as engine:
        steps, lengths = calls_of(engine, [request], monkeypatch)
        # The prompt's step gives the first token, and the end follows the at-th. The call after that computes none.
        assert (lengths, sum(steps), steps[-1]) == ([at], at, 0)
        found = engine.statistics()
    assert (found.steps, found.pages_used) == (at + 1, 0)


def test_texts_that_have_left_keep_no_loop_going(
    model: ModularCapibaraModel, ending: tuple[Request, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (request, at), short = ending, Request((1, 5), max_tokens=8, sampling=GREEDY, ignore_eos=True)
    take_at_once(monkeypatch, 8)
    with Engine(model, **SIZES, pages=60, warm=False) as engine:
        steps, lengths = calls_of(engine, [request, request, short], monkeypatch)
        assert lengths == [at, at, 8]
        # Two tokens come while prompts are read, of two texts and then of the third.
        assert sum(steps) == at - 1
        assert engine.statistics().steps == sum(steps) + 2  # with those that read prompts


def test_after_scored_texts_one_step_is_computed_for_nothing(
    model: ModularCapibaraModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program chooses their tokens, and the step ahead of it does not know that the other texts end."""
    sizes: dict[str, Any] = SIZES | {"prefill_chunks": 4}
    asked = Request((7, 8), max_tokens=40, sampling=Sampling(temperature=1.0), seed=1, ignore_eos=True)
    with Engine(model, **sizes, pages=60, warm=False) as engine:
        ((tokens, *_),) = written(engine, [asked])
    at = next(n for n in range(4, 30) if tokens[n] not in tokens[:n] + tokens[n + 1 : n + 9])
    asked = dataclasses.replace(asked, stop_tokens=frozenset({tokens[at]}))
    scored = Request((1, 5), max_tokens=at + 1, sampling=GREEDY, logprobs=1, ignore_eos=True)
    take_at_once(monkeypatch, 8)
    with Engine(model, **sizes, pages=60, warm=False) as engine:
        steps, lengths = calls_of(engine, [asked] * 3 + [scored], monkeypatch)
        assert lengths == [at] * 3 + [at + 1]
        # The prompts' step gives the first tokens.
        assert (steps[-1], engine.statistics().steps) == (1, at + 2)


@pytest.mark.parametrize("pages", [24, 26, 40])
def test_pages_for_later_tokens_are_taken_from_nobody(
    model: ModularCapibaraModel, ending: tuple[Request, int], pages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (request, at), long = ending, Request((1, 5), max_tokens=30, sampling=GREEDY, ignore_eos=True)
    take_at_once(monkeypatch, 8)
    sizes: dict[str, Any] = SIZES | {"page_size": 2}
    with Engine(model, **sizes, pages=pages, warm=False, prefix_cache=False) as engine:
        _, lengths = calls_of(engine, [request, request, long], monkeypatch)
        found = engine.statistics()
    assert (lengths, found.preemptions, found.pages_used) == ([at, at, 30], 0, 0)


def test_where_requests_wait_or_texts_take_turns_steps_are_taken_one_at_a_time(
    model: ModularCapibaraModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_at_once(monkeypatch, 8)
    asked = [Request((1, 5 + n), max_tokens=9, sampling=GREEDY, ignore_eos=True) for n in range(2)]
    alone: dict[str, Any] = SIZES | {"max_batch": 1}
    with Engine(model, **alone, pages=60, warm=False) as engine:
        steps, lengths = calls_of(engine, asked, monkeypatch)
        # The first text has the other behind it, the second nobody.
        assert (lengths, steps) == ([9, 9], [1] * 8 + [8])
    scored = Request(tuple(range(40)), max_tokens=1, sampling=GREEDY, prompt_logprobs=1)
    with Engine(model, **SIZES, pages=60, warm=False) as engine:
        steps, _ = calls_of(engine, [*asked[:1], scored], monkeypatch)
    assert steps[:2] == [1, 1]  # beside the five pieces of a prompt


@pytest.mark.parametrize("at_once", [1, 3, 8])
@pytest.mark.parametrize("kind", ["grouped", pytest.param("mamba", marks=pytest.mark.slow)])
def test_sampled_texts_are_the_same_several_tokens_at_once(
    kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine_model(kind)
    samplings = [
        Sampling(temperature=0.9),
        Sampling(temperature=1.3, top_k=20),
        Sampling(temperature=0.7, top_p=0.8, min_p=0.02),
        GREEDY,
    ]
    asked = [
        Request(
            tuple(range(n, 4 + 4 * n)),
            max_tokens=25 + n,
            sampling=sampling,
            seed=n,
            ignore_eos=True,
        )
        for n, sampling in enumerate(samplings)
    ]
    with Engine(model, **SIZES, pages=60, use_cache=False, warm=False) as engine:
        want = written(engine, asked)
    take_at_once(monkeypatch, at_once)
    with Engine(model, **SIZES, pages=60, warm=False) as engine:
        loops = loops_of(engine, monkeypatch)
        check(written(engine, asked), want)
        assert max(loop.steps for loop in loops) == at_once
        check(written(engine, asked, 1), want)
        # Beside scored texts, whose tokens another program chooses.
        scored = [dataclasses.replace(request, logprobs=1) for request in asked[::2]]
        together = written(engine, [*scored, *asked[1::2]])
        check([(*text[:3], []) for text in together], [want[n] for n in (0, 2, 1, 3)])


@pytest.mark.parametrize(
    ("pages", "at_once"),
    [(60, 1), (18, 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((60, 8), (18, 1)))],
)
def test_texts_are_those_of_whole_recomputation(
    model: ModularCapibaraModel, pages: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    take_at_once(monkeypatch, at_once)
    asked = requests(40, pages)
    with Engine(model, **SIZES, pages=60, use_cache=False) as engine:
        want = written(engine, asked)
    with Engine(model, **SIZES, pages=pages) as engine:
        done, loops = ahead_of(engine, monkeypatch), loops_of(engine, monkeypatch)
        texts = written(engine, asked, None if at_once == 1 else 4)  # loops are for where nobody waits
        found = engine.statistics()
    check(texts, want)
    assert any(loop.steps > 1 for loop in loops) or at_once == 1
    for request, (_, text, finish, _) in zip(asked, texts, strict=True):
        if request.grammar is not None and finish == "stop":
            assert re.fullmatch(NUMBERS, text)
    assert {finish for _, _, finish, _ in texts} == {"stop", "length"}
    assert done.count("ahead") > 20
    assert (found.pages_used, found.compilations) == (0, 0)
    assert found.preemptions > 0 or pages == 60


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 5])
@pytest.mark.parametrize("kind", ["mixed", "latent", "experts", "mamba"])
def test_500_random_requests(kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    take_at_once(monkeypatch, at_once)
    model, asked = engine_model(kind), requests(500, 1)
    with Engine(model, **SIZES, pages=60, use_cache=False) as engine:
        want = written(engine, asked)
    for pages in (60, 20):
        with Engine(model, **SIZES, pages=pages) as engine:
            engine._host_computes = False
            check(written(engine, asked, None if at_once == 1 else 4), want)
            assert engine.statistics().pages_used == 0


@pytest.mark.thin(2)
@pytest.mark.parametrize("at_once", [1, 4])
def test_readers_that_go_away_take_no_pages_with_them(
    model: ModularCapibaraModel, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_at_once(monkeypatch, at_once)
    asked = [Request((n, n + 1), max_tokens=40, sampling=GREEDY) for n in range(12)]
    with Engine(model, **SIZES, pages=24) as engine:
        (alone,) = written(engine, asked[:1])
        for go in range(4):
            streams = [engine.submit(request) for request in asked]
            for number, stream in enumerate(streams):
                finish = None
                for count, piece in enumerate(stream):
                    if number and count == go + number % 3:
                        stream.cancel()
                    finish = piece.finish
                assert finish in (("length", "cancelled") if number else ("length",))
            assert engine.statistics().pages_used == 0
        check(written(engine, asked[:1]), [alone])

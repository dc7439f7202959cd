"""Rows with settings of their own, against NumPy and probabilities that are known."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.errors import ConfigError
from capibara.serve.row_sampling import Changes, choose, keep_likeliest, rows_of
from capibara.serve.sampling import Sampling

VOCABULARY = 12
CHOOSE = jax.jit(choose, static_argnames="top")


def possible(logits: np.ndarray, s: Sampling) -> set[int]:
    """The tokens that the settings leave, from their definitions."""
    x = logits.astype(np.float64) / s.temperature
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    kept = order[: s.top_k] if s.top_k else order
    p = np.exp([x[i] - x[order[0]] for i in kept])
    p /= p.sum()
    return {i for n, i in enumerate(kept) if n == 0 or (p[:n].sum() < s.top_p and p[n] >= s.min_p * p[0])}


def changed(logits: np.ndarray, prompt: list[int], text: list[int], s: Sampling) -> np.ndarray:
    x = logits.astype(np.float64).copy()
    for token in {*prompt, *text}:
        x[token] = x[token] / s.repetition_penalty if x[token] > 0 else x[token] * s.repetition_penalty
    for token in set(text):
        x[token] -= s.frequency_penalty * text.count(token) + s.presence_penalty
    for token, bias in s.logit_bias:
        x[token] += bias
    return x


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.9, 2.0]),
    top_k=st.integers(0, VOCABULARY + 2),
    top_p=st.sampled_from([0.2, 0.7, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.6]),
)


@settings(max_examples=30)
@given(st.lists(SAMPLINGS, min_size=4, max_size=4), st.integers(0, 2**32 - 1))
def test_what_is_chosen_is_possible_and_depends_on_its_row_alone(samplings: Any, seed: int) -> None:
    # Coarse numbers, so that there are ties; in float32 they are exact.
    logits = np.random.default_rng(seed).integers(-6, 7, (4, VOCABULARY)).astype(np.float32) / 2
    seeds, numbers = [seed, 1, 2, seed], [0, 7, 7, 0]
    found = CHOOSE(logits, rows_of(samplings, seeds, numbers), top=3)
    for row, sampling in enumerate(samplings):
        assert int(found.tokens[row]) in possible(logits[row], sampling)
    # Other rows, another place: the same token.
    others = [Sampling(temperature=0.0), samplings[0], Sampling(), Sampling(top_k=2)]
    shuffled = np.stack([logits[1] * 3, logits[0], logits[2] - 1, logits[3]])
    again = CHOOSE(shuffled, rows_of(others, [5, seed, 6, 7], [1, 0, 2, 3]), top=3)
    assert int(again.tokens[1]) == int(found.tokens[0])
    assert np.array_equal(again.top_logprobs[1], found.top_logprobs[0])


KEEP = jax.jit(keep_likeliest)


@pytest.mark.parametrize("steepness", [0.0, 0.05, 3.0])
def test_what_is_kept_of_a_large_vocabulary(steepness: float) -> None:
    """Few tokens, which are found among the likeliest, and so many that all are sorted; in both ways the same."""
    vocabulary = 1000
    samplings = [
        Sampling(top_p=0.3),
        Sampling(top_p=0.9999),
        Sampling(top_k=40, top_p=0.8, min_p=0.01),
        Sampling(top_k=256),
        Sampling(top_k=257),
        Sampling(top_k=700, top_p=0.5),
        Sampling(min_p=0.2),
        Sampling(top_k=5000, min_p=1e-6),
    ]
    # Powers of two as probabilities, in any order and with ties: their sums are exact.
    rng = np.random.default_rng(int(100 * steepness))
    logits = -np.log(2) * np.floor(rng.integers(0, 400, (len(samplings), vocabulary)) * steepness / 8)
    logits = logits.astype(np.float32)
    every = rows_of(samplings, [0] * len(samplings), [0] * len(samplings))
    kept = np.asarray(KEEP(logits, every, np.ones(len(samplings), bool)))
    for row, sampling in enumerate(samplings):
        found = np.flatnonzero(kept[row] > -np.inf)
        wanted = possible(logits[row], sampling)
        # Where a sum of probabilities is top-p but for rounding, one token more or less.
        assert len(wanted ^ set(found.tolist())) <= (1 if 0 < sampling.top_p < 1 else 0), (row, sampling)
        assert np.array_equal(kept[row][found], logits[row][found])
        alone = rows_of([sampling], [0], [0])
        np.testing.assert_array_equal(KEEP(logits[row : row + 1], alone, np.ones(1, bool))[0], kept[row])


def test_numbers_that_compare_with_nothing_are_not_kept() -> None:
    logits = np.linspace(-1, 1, 300, dtype=np.float32)
    logits[[7, 299]] = np.nan
    kept = np.asarray(KEEP(logits[None], rows_of([Sampling(top_k=2)], [0], [0]), np.ones(1, bool)))[0]
    assert np.flatnonzero(kept > -np.inf).tolist() == [297, 298]


def test_draws_have_the_probabilities_that_the_settings_leave() -> None:
    logits = np.log(np.array([0.4, 0.3, 0.2, 0.05, 0.05], np.float32))
    sampling = Sampling(temperature=0.5, top_k=4, top_p=0.97)
    count = 4000
    found = CHOOSE(np.tile(logits, (count, 1)), rows_of([sampling] * count, range(count), [3] * count))
    p = np.array([0.16, 0.09, 0.04, 0, 0]) / 0.29  # squared; the fourth token begins at .988
    shares = np.bincount(found.tokens, minlength=5) / count
    np.testing.assert_allclose(shares, p, atol=4 * np.sqrt(0.25 / count))
    assert shares[3:].sum() == 0


def test_logprobs_are_those_of_the_model() -> None:
    logits = np.random.default_rng(0).normal(size=(3, VOCABULARY)).astype(np.float32)
    rows = rows_of(
        [Sampling(temperature=0.0), Sampling(temperature=3.0, top_k=2), Sampling()], [1, 2, 3], [0] * 3
    )
    found = CHOOSE(logits, rows, top=4)
    want = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    for row in range(3):
        assert np.allclose(found.logprobs[row], want[row, int(found.tokens[row])], atol=1e-6)
        order = np.argsort(-want[row])[:4]
        assert np.array_equal(found.top_tokens[row], order)
        np.testing.assert_allclose(found.top_logprobs[row], want[row, order], atol=1e-6)
    assert int(found.tokens[0]) == int(logits[0].argmax())


def test_penalties_and_biases_are_their_definitions() -> None:
    random = np.random.default_rng(1)
    logits = random.normal(size=(3, VOCABULARY)).astype(np.float32) * 2
    texts: list[tuple[list[int], list[int]]] = [([1, 2, 2], [3, 3, 4]), ([5], []), ([0], [7, 7, 7])]
    samplings = [
        Sampling(0.0, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.5),
        Sampling(0.0, logit_bias=((8, 30.0), (9, -100.0))),
        Sampling(0.0, repetition_penalty=0.6, frequency_penalty=-1.0),
    ]
    generated = np.stack([np.bincount(text, minlength=VOCABULARY) for _, text in texts]).astype(np.int32)
    seen = np.stack([np.isin(np.arange(VOCABULARY), prompt + text) for prompt, text in texts])
    bias = np.zeros((3, VOCABULARY), np.float32)
    for row, sampling in enumerate(samplings):
        for token, value in sampling.logit_bias:
            bias[row, token] = value
    bias[2, 7] = -np.inf
    presence, frequency, repetition = (
        np.array([getattr(s, f"{name}_penalty") for s in samplings], np.float32)
        for name in ("presence", "frequency", "repetition")
    )
    found = CHOOSE(
        logits,
        rows_of(samplings, [0] * 3, [0] * 3),
        Changes(bias, generated, seen, presence, frequency, repetition),
    )
    want = [changed(x, both[0], both[1], s) for x, both, s in zip(logits, texts, samplings, strict=True)]
    want[2][7] = -np.inf
    assert found.tokens.tolist() == [int(x.argmax()) for x in want]
    assert int(found.tokens[1]) == 8


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"min_p": 1.5}, "min_p=1.5 must be from 0 to 1"),
        ({"presence_penalty": 3}, "presence_penalty=3 must be from -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan must be from -2 to 2"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be from 0.01 to 100"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty=1e-46 must be from 0.01 to 100"),
        ({"temperature": 1e39}, "temperature=1e[+]39 must be from 0 to 100"),
        ({"top_k": 1 << 31}, "top_k=2147483648 must be an integer of at least 0 and 31 bits"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias has 1: 101.0"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias has -1"),
    ],
)
def test_settings_out_of_range_are_named(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**given_)


@settings(max_examples=30)
@given(
    st.lists(
        st.sampled_from([-np.inf, -1.0, 0.0, 2.0, np.inf, np.nan]), min_size=VOCABULARY, max_size=VOCABULARY
    )
)
def test_the_likeliest_is_the_first_of_equals_and_a_token_whatever_the_logits_are(row: list[float]) -> None:
    logits = np.array([row, row[::-1]], np.float32)
    found = CHOOSE(logits, rows_of([Sampling(temperature=0.0)] * 2, [0, 1], [0, 0]))
    assert found.tokens.dtype == np.int32
    assert found.tokens.tolist() == logits.argmax(1).tolist()


@pytest.mark.parametrize("vocabulary", [3, 5, 9, 17])
def test_a_draw_is_the_likeliest_token_where_no_other_can_be(vocabulary: int) -> None:
    for likeliest in range(vocabulary):
        for seed in range(10):
            logits = np.full((1, vocabulary), -40, np.float32)
            logits[0, likeliest] = seed / 7
            found = CHOOSE(logits, rows_of([Sampling(temperature=0.7)], [seed], [3]))
            assert found.tokens.tolist() == [likeliest]

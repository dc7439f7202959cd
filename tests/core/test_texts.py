"""Rows of several texts (packing) and of texts of different lengths (padding), against each text by itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import quick_jit, small_config, small_params, small_tokens

from capibara.compose.errors import InputError
from capibara.core import ModularCapibaraModel
from capibara.core.texts import texts_of
from capibara.ops.loss import api

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped": ("grouped", {}),
    "windows": ("grouped", {"model.pattern": ["local", "attention"], "model.window": 3}),
    "learned": ("untied", {"model.positions": "learned"}),
    "ssm": ("ssm", {}),
    "mamba": ("mamba", {}),
    "experts": ("experts", {}),
    "latent": ("latent", {}),
}
LENGTHS = (5, 1, 4)


class Compiled(NamedTuple):
    model: ModularCapibaraModel
    apply: Any
    decode: Any


@pytest.fixture(
    scope="module",
    params=[pytest.param(k, marks=pytest.mark.slow if k in ("experts", "ssm") else ()) for k in KINDS],
)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    kind, changes = KINDS[request.param]
    model = ModularCapibaraModel(small_config(kind, **changes))
    model.params, _ = small_params(model, 1)
    return Compiled(model, quick_jit(model.apply), quick_jit(model.decode))


def texts() -> list[np.ndarray]:
    return [small_tokens(1, length, seed=length)[0] for length in LENGTHS]


def padded(side: str, rows: list[np.ndarray], width: int = max(LENGTHS) + 1) -> dict[str, np.ndarray]:
    tokens, mask = np.full((len(rows), width), 7, np.int32), np.zeros((len(rows), width), np.int32)
    for at, text in enumerate(rows):
        where = slice(0, len(text)) if side == "right" else slice(width - len(text), width)
        tokens[at, where], mask[at, where] = text, 1
    return {"tokens": tokens, "segments": mask}


def alone(compiled: Compiled, rows: list[np.ndarray]) -> list[np.ndarray]:
    """Logits of each text. What stands after one in its row is not seen from it, by causality alone."""
    logits = compiled.apply(compiled.model.params, padded("right", rows)["tokens"])
    return [np.asarray(row[: len(text)]) for row, text in zip(logits, rows, strict=True)]


@pytest.mark.thin(3)
def test_a_packed_row_is_its_texts(compiled: Compiled) -> None:
    tokens = np.concatenate([*texts(), np.zeros(2, np.int32)])[None]
    segments = np.repeat([4, 2, 9, 0], [*LENGTHS, 2])[None]
    packed = compiled.apply(compiled.model.params, {"tokens": tokens, "segments": segments})
    want = np.concatenate(alone(compiled, texts()))
    np.testing.assert_allclose(packed[0, : sum(LENGTHS)], want, atol=2e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_there(compiled: Compiled, side: str) -> None:
    batch = padded(side, texts())
    logits = np.asarray(compiled.apply(compiled.model.params, batch))
    for row, mask, want in zip(logits, batch["segments"], alone(compiled, texts()), strict=True):
        np.testing.assert_allclose(row[mask == 1], want, atol=2e-5)


@pytest.mark.thin(3)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_takes_no_place_in_the_cache(compiled: Compiled, side: str) -> None:
    batch = padded(side, texts())
    # As many places as the longest text with its next token.
    params, cache = (
        compiled.model.params,
        compiled.model.init_cache(len(LENGTHS), max(LENGTHS) + 1, ragged=True),
    )
    logits, cache = compiled.decode(params, batch, cache)
    np.testing.assert_array_equal(cache["position"], LENGTHS)
    for row, mask, want in zip(np.asarray(logits), batch["segments"], alone(compiled, texts()), strict=True):
        np.testing.assert_allclose(row[mask == 1], want, atol=2e-5)
    following = np.array([[3], [6], [9]], np.int32)
    logits, cache = compiled.decode(params, following, cache)
    longer = [np.concatenate([text, new]) for text, new in zip(texts(), following, strict=True)]
    for row, want in zip(np.asarray(logits), alone(compiled, longer), strict=True):
        np.testing.assert_allclose(row[0], want[-1], atol=2e-5)


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", ["ssm", "mamba"])
def test_a_state_takes_in_what_is_not_padding(kind: str) -> None:
    model = ModularCapibaraModel(small_config(kind))
    params, _ = small_params(model, 3)
    text = small_tokens(1, 12, seed=8)
    want = np.asarray(quick_jit(model.apply)(params, text))
    decode = quick_jit(model.decode)
    # Padding before, between and after tokens; more of it, and fewer tokens, than the convolution has taps.
    pieces = [[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]
    cache, at = model.init_cache(1, 12, ragged=True), 0
    for piece in pieces:
        mask = np.array([piece], np.int32)
        tokens = np.full((1, 5), 9, np.int32)
        tokens[mask == 1] = text[0, at : at + mask.sum()]
        before = cache
        logits, cache = decode(params, {"tokens": tokens, "segments": mask}, cache)
        np.testing.assert_allclose(logits[mask == 1], want[0, at : at + mask.sum()], atol=2e-5)
        if not mask.any():
            jax.tree.map(np.testing.assert_array_equal, before, cache)
        at += mask.sum()
    logits, after = decode(params, {"tokens": text[:, :1], "segments": np.zeros((1, 1), np.int32)}, cache)
    jax.tree.map(np.testing.assert_array_equal, cache, after)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("kind", "few"),
    [("grouped", api.FEW_LOGITS), ("grouped", 0), ("mamba", 0)],
    ids=["whole", "chunks", "state"],
)
def test_the_loss_is_within_texts_and_by_weights(
    kind: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "FEW_LOGITS", few)
    model = ModularCapibaraModel(small_config(kind))
    params, _ = small_params(model, 2)
    tokens = np.concatenate([*texts(), np.zeros(2, np.int32)])[None]
    segments = np.repeat([1, 2, 3, 0], [*LENGTHS, 2])[None]
    weights = np.linspace(0.0, 2.0, tokens.size, dtype=np.float32)[None]

    def by_hand(params: Any) -> jax.Array:
        total, count = jnp.zeros(()), 0.0
        for text, start in zip(texts(), np.cumsum([0, *LENGTHS]), strict=False):
            scores = jax.nn.log_softmax(model.apply(params, text[None])[0])
            for i in range(1, len(text)):
                total -= weights[0, start + i] * scores[i - 1, text[i]]
                count += weights[0, start + i]
        return total / count

    def ours(params: Any) -> jax.Array:
        batch = {"tokens": tokens, "segments": segments, "weights": weights}
        return model.loss(params, batch, state={})[0]

    (got, found), (want, expected) = quick_jit(
        lambda p: (jax.value_and_grad(ours)(p), jax.value_and_grad(by_hand)(p))
    )(params)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
def test_a_loss_of_no_tokens_is_nothing() -> None:
    model = ModularCapibaraModel(small_config("grouped", **{"model.num_layers": 1}))
    params, _ = small_params(model)
    params["blocks"] = jax.tree.map(
        lambda x: x * np.inf, params["blocks"]
    )  # of which the loss is not a number
    batch = {"tokens": small_tokens(1, 4), "weights": np.zeros((1, 4))}
    assert float(model.loss(params, batch, state={})[0]) == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_positions_are_counted_from_the_start_of_each_text(numbers: list[int]) -> None:
    found = texts_of({"tokens": [numbers], "segments": [numbers]}).inputs()["positions"]
    want: list[int] = []
    for i, number in enumerate(numbers):
        want.append(want[-1] + 1 if i and number == numbers[i - 1] else 0)
    assert np.asarray(found)[0].tolist() == want


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"segments": np.ones((1, 4), int)},
            r"segments has shape \(1, 4\), expected that of tokens, \(2, 4\)",
        ),
        ({"segments": np.ones((2, 4))}, "segments has dtype float64, expected an integer"),
        ({"weights": np.ones(4)}, r"weights has shape \(4,\)"),
        ({"labels": np.ones((2, 4), int)}, "unknown key 'labels'; its keys can be tokens, segments"),
    ],
)
def test_what_a_batch_may_say(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        texts_of({"tokens": small_tokens(2, 4), **changed})


def test_what_cannot_be_done_is_refused() -> None:
    batch = {"tokens": small_tokens(2, 4), "segments": np.ones((2, 4), int)}
    model = ModularCapibaraModel(small_config("attention"))
    model.params, _ = small_params(model)
    with pytest.raises(InputError, match=r"init_cache\(…, ragged=True\)"):
        model.decode(model.params, batch, model.init_cache(2, 4))
    with pytest.raises(InputError, match="a row needs 4 places, the cache has 3"):
        model.decode(model.params, batch, model.init_cache(2, 3, ragged=True))
    with pytest.raises(InputError, match="decode takes tokens and segments only"):
        model.decode(model.params, {**batch, "weights": np.ones((2, 4))}, model.init_cache(2, 4, ragged=True))

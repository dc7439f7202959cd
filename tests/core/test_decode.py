"""Decoding with a cache: equal to computing everything again, whatever the tokens are fed in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from numpy_decoder import Decoder, as_float64
from small_models import FLOAT64, quick_jit, small_config, small_params, small_tokens

from capibara.compose import InputError
from capibara.core import ModularCapibaraModel


class Fed:
    """A model and a compiled ``decode``, fed a row of tokens in pieces."""

    def __init__(self, kind: str, **changes: Any) -> None:
        self.config = small_config(kind, **changes)
        self.model = ModularCapibaraModel(self.config)
        self.params, self.state = small_params(self.model, 4)
        self.step = quick_jit(
            lambda tokens, cache: self.model.decode(self.params, tokens, cache, state=self.state)
        )

    def logits(self, tokens: np.ndarray, pieces: tuple[int, ...], length: int = 12) -> np.ndarray:
        cache = self.model.init_cache(len(tokens), length)
        at, out = 0, []
        for piece in pieces:
            logits, cache = self.step(device_array(tokens[:, at : at + piece]), cache)
            out.append(np.asarray(logits))
            at += piece
        assert at == tokens.shape[1]
        if "position" in cache:
            assert int(cache["position"]) == at
        return np.concatenate(out, axis=1)

    def oracle(self, tokens: np.ndarray) -> np.ndarray:
        return Decoder(self.config.model).forward(as_float64(self.params), as_float64(self.state), tokens)


# Two lengths of piece only, because each is a program to compile.
PIECES = [(4, 1, 4), (1, 4, 4), (4, 4, 1), (1,) * 9]


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", ["grouped", "ssm", "mamba", "vq", "mixed"])
def test_any_pieces_give_the_whole(kind: str) -> None:
    fed = Fed(kind, model__scan_layers="scan" if kind == "grouped" else "auto")
    tokens = small_tokens(3, 9, seed=2)
    want = fed.oracle(tokens)
    for pieces in PIECES:
        np.testing.assert_allclose(
            fed.logits(tokens, pieces), want, rtol=2e-5, atol=2e-5, err_msg=str(pieces)
        )
    # A row's logits are those of the row alone: not of its place, nor of its neighbours.
    other = small_tokens(3, 9, seed=3)
    other[2] = tokens[0]
    np.testing.assert_allclose(fed.logits(other, (4, 1, 4))[2], want[0], rtol=2e-5, atol=2e-5)


def test_one_row() -> None:
    fed = Fed("grouped")
    tokens = small_tokens(1, 9)
    np.testing.assert_allclose(fed.logits(tokens, (4, 1, 4)), fed.oracle(tokens), rtol=2e-5, atol=2e-5)
    # The length of the cache does not matter, down to exactly what is needed.
    np.testing.assert_allclose(
        fed.logits(tokens, (4, 1, 4), 9), fed.logits(tokens, (4, 1, 4)), rtol=1e-6, atol=1e-6
    )


def test_greedy_tokens_are_those_of_full_recomputation() -> None:
    fed = Fed("mixed")
    prompt = small_tokens(3, 4, seed=6)
    whole = quick_jit(lambda tokens: fed.model.apply(fed.params, tokens, state=fed.state)[0])

    tokens = np.zeros((3, 12), "int32")
    tokens[:, :4] = prompt
    for t in range(4, 12):
        # What comes after position t is zeros; a causal model does not see it.
        tokens[:, t] = np.argmax(whole(tokens)[:, t - 1], axis=-1)

    cache = fed.model.init_cache(3, 12)
    logits, cache = fed.step(device_array(prompt), cache)
    cached = [prompt]
    for _ in range(4, 12):
        cached.append(np.argmax(logits[:, -1:], axis=-1).astype("int32"))
        logits, cache = fed.step(device_array(cached[-1]), cache)
    np.testing.assert_array_equal(np.concatenate(cached, axis=1), tokens)
    assert len(np.unique(tokens[:, 4:])) > 2


def test_decoding_in_float64() -> None:
    tokens = small_tokens(1, 5)
    with jax.enable_x64(True):
        fed = Fed("grouped", **FLOAT64)
        got = fed.logits(tokens, (4, 1))
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, fed.oracle(tokens), rtol=1e-9, atol=1e-9)


def test_decode_is_pure_and_leaves_its_cache() -> None:
    fed = Fed("ssm")
    cache = fed.model.init_cache(3, 9)
    before = jax.tree.map(np.array, cache)
    tokens = device_array(small_tokens(3, 4))
    first, _ = fed.step(tokens, cache)
    jax.tree.map(np.testing.assert_array_equal, before, cache)
    np.testing.assert_array_equal(first, fed.step(tokens, cache)[0])


def test_codebooks_are_no_part_of_the_cache() -> None:
    fed = Fed("mixed")
    cache = fed.model.init_cache(2, 5)
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(cache)}
    assert names
    assert not any("codebook" in name or "cluster" in name for name in names)
    _, after = jax.eval_shape(fed.step, jnp.zeros((2, 1), "int32"), cache)
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), after, cache)
    assert all(jax.tree.leaves(same))


def test_prompt_longer_than_the_cache_is_refused() -> None:
    fed = Fed("attention")
    cache = fed.model.init_cache(1, 4)
    with pytest.raises(InputError, match=r"5 tokens do not fit a cache of 4 positions.*init_cache"):
        fed.model.decode(fed.params, jnp.zeros((1, 5), "int32"), cache)


@pytest.mark.parametrize("layers", ["scan", pytest.param("unroll", marks=pytest.mark.slow)])
def test_a_full_cache_is_refused_where_the_position_is_known(layers: str) -> None:
    fed = Fed("attention", model__scan_layers=layers, model__remat="full")

    def decode(count: int, cache: Any) -> Any:
        return fed.model.decode(fed.params, jnp.zeros((1, count), "int32"), cache)[1]

    cache = decode(3, fed.model.init_cache(1, 5))
    with pytest.raises(InputError, match=r"position 3 and 3 new tokens need 6 places, the cache has 5"):
        decode(3, cache)
    full = decode(2, cache)
    with pytest.raises(InputError, match=r"position 5 and 1 new token need 6 places.*init_cache"):
        decode(1, full)
    with pytest.raises(InputError, match="position -1"):
        decode(1, {**cache, "position": jnp.int32(-1)})
    # In a trace nobody knows where the cache stands.
    fed.step(jnp.zeros((1, 1), "int32"), full)


@pytest.mark.parametrize(
    ("batch", "length", "named"),
    [
        (0, 4, "batch_size=0"),
        (2, 0, "max_length=0"),
        (True, 4, "batch_size"),
        (2, 4.0, "max_length=4.0"),
        ("2", 4, "batch_size"),
    ],
)
def test_init_cache_refuses_what_is_no_size(batch: Any, length: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        Fed("attention").model.init_cache(batch, length)


def test_init_cache_has_no_length_where_nothing_grows() -> None:
    short, long = (Fed("ssm").model.init_cache(2, n) for n in (1, 1000))
    assert [x.shape for x in jax.tree.leaves(short)] == [x.shape for x in jax.tree.leaves(long)]


@pytest.mark.parametrize(
    "tokens", [np.zeros((1, 2), "float32"), np.zeros(3, "int32"), {"token": np.zeros((1, 2), "int32")}]
)
def test_decode_refuses_what_is_no_tokens(tokens: Any) -> None:
    fed = Fed("attention")
    with pytest.raises(InputError, match="tokens"):
        fed.model.decode(fed.params, tokens, fed.model.init_cache(1, 4))


def test_decode_refuses_another_batch_size() -> None:
    fed = Fed("attention")
    with pytest.raises(InputError, match="batch"):
        fed.model.decode(fed.params, jnp.zeros((2, 1), "int32"), fed.model.init_cache(3, 4))

"""Generation with a cache against recomputing everything, and text that is never half a character."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from hypothesis import given
from hypothesis import strategies as st
from tiny_model import TinyModel, core_with_tiny_model
from tiny_run import tiny_config, tiny_corpus

from capibara.data import Utf8Stream
from capibara.errors import ConfigError
from capibara.serve.generate import Generator
from capibara.serve.load import find_checkpoint, load_model
from capibara.serve.sampling import Sampling, sample
from capibara.train import CheckpointDamagedError, CheckpointNotFoundError, train

PLACES = 16


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(tiny_config("unused", f"model.max_sequence_length={PLACES}"))


@pytest.fixture(scope="module")
def params(model: TinyModel) -> Any:
    # Far from uniform, so that a wrong cache shows in the tokens.
    return jax.tree.map(lambda leaf: leaf * 3, model.init(5)[0])


def recomputed(
    model: TinyModel, params: Any, prompt: list[int], count: int, sampling: Sampling, seed: int
) -> list[int]:
    """The same tokens without a cache: the whole visible text through ``apply`` for each."""
    apply = jax.jit(model.apply)
    half = PLACES // 2
    visible = prompt if len(prompt) <= PLACES else prompt[-half:]
    written: list[int] = []
    for number in range(count):
        if len(visible) > PLACES:
            visible = visible[-half:]
        padded = device_array([visible + [0] * (PLACES - len(visible))], jnp.int32)
        logits = apply(params, padded)[:, len(visible) - 1]
        token = int(sample(jax.random.fold_in(jax.random.key(seed), number), logits, sampling)[0])
        written.append(token)
        visible = [*visible, token]
    return written


@pytest.mark.thin(2)
@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(0.9, top_k=40, top_p=0.95)])
def test_the_cache_changes_nothing(model: TinyModel, params: Any, sampling: Sampling) -> None:
    generator = Generator(model, params, sampling=sampling)
    for length in (1, 8, 16, 17, 40):
        prompt = np.random.default_rng(length).integers(0, 256, length).tolist()
        found = list(generator.tokens(prompt, max_tokens=30, seed=7))
        assert found == recomputed(model, params, prompt, 30, sampling, seed=7)


@pytest.mark.parametrize("places", [1, 2, 3, 8, 16])
def test_the_cache_is_never_overfull(places: int) -> None:
    """Whatever the prompt's length, each step finds room; the places used are counted here by the model itself."""

    class Counting:
        config = tiny_config(
            "unused", f"model.max_sequence_length={places}", f"train.sequence_length={places}"
        )

        def init_cache(self, batch_size: int, max_length: int) -> Any:
            assert max_length == places
            return {"used": jnp.int32(0)}

        def decode(self, params: Any, tokens: Any, cache: Any, *, state: Any = None) -> Any:
            used = cache["used"] + tokens.shape[1]
            return jnp.broadcast_to(jax.nn.one_hot(used, 256), (*tokens.shape, 256)), {"used": used}

    generator = Generator(Counting(), {}, sampling=Sampling(temperature=0.0))
    for length in range(1, 2 * places + 2):
        # Each token is how many places were used when it was chosen.
        used = list(generator.tokens([0] * length, max_tokens=3 * places))
        assert all(1 <= count <= places for count in used), (length, used)
        assert len(used) == 3 * places


def test_the_step_itself_refuses_a_full_cache(model: TinyModel, params: Any) -> None:
    generator = Generator(model, params)
    tokens, key = jnp.zeros((1, 2), jnp.int32), jax.random.key(0)
    with pytest.raises(RuntimeError, match="17 tokens for the 16 places"):
        generator._read(tokens, model.init_cache(1, PLACES), PLACES - 1, key, 0)


def test_a_shorter_text_is_the_beginning_of_a_longer_one(model: TinyModel, params: Any) -> None:
    generator = Generator(model, params)
    long = list(generator.tokens([65], max_tokens=25, seed=1))
    for count in (1, 2, 10, 24):
        assert list(generator.tokens([65], max_tokens=count, seed=1)) == long[:count]
    assert list(generator.tokens([65], max_tokens=25, seed=2)) != long
    assert len(set(long)) > 5


def test_tokens_stream_one_by_one(model: TinyModel, params: Any) -> None:
    endless = Generator(model, params).tokens([1, 2, 3], max_tokens=10**9)
    assert len([next(endless) for _ in range(5)]) == 5


def test_only_the_allowed_vocabulary_is_chosen(model: TinyModel, params: Any) -> None:
    generator = Generator(model, params, vocabulary=10, sampling=Sampling(temperature=5.0))
    drawn = list(generator.tokens([200], max_tokens=40))
    assert max(drawn) < 10
    assert len(set(drawn)) > 3


def test_state_reaches_the_model(model: TinyModel, params: Any) -> None:
    class Stateful(TinyModel):
        def decode(self, params: Any, tokens: Any, cache: Any, *, state: Any = None) -> Any:
            logits, cache = super().decode(params, tokens, cache)
            return logits.at[..., state["favourite"]].set(1e6), cache

    generator = Generator(Stateful(model.config), params, state={"favourite": jnp.int32(42)})
    assert set(generator.tokens([1], max_tokens=5)) == {42}


def test_a_model_without_attention_never_slides(model: TinyModel, params: Any) -> None:
    """A recurrent model: the next token counts up from the sum of all tokens it has ever seen."""

    class Recurrent:
        config = tiny_config("unused", 'model.pattern=["ssm"]', f"model.max_sequence_length={PLACES}")

        def init_cache(self, batch_size: int, max_length: int) -> Any:
            return {"seen": jnp.zeros(batch_size, jnp.int32)}

        def decode(self, params: Any, tokens: Any, cache: Any, *, state: Any = None) -> Any:
            seen = cache["seen"][:, None] + jnp.cumsum(jnp.ones_like(tokens), axis=1)
            return jax.nn.one_hot(seen % 256, 256), {"seen": seen[:, -1]}

    generator = Generator(Recurrent(), {}, sampling=Sampling(temperature=0.0))
    assert list(generator.tokens([9] * 20, max_tokens=60)) == [n % 256 for n in range(20, 80)]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "at least one token id"),
        ([[1]], {}, "at least one token id"),
        ([0.5], {}, "at least one token id"),
        ([256], {}, "token id 256.*0 to 255"),
        ([-1], {}, "token id -1"),
        ([1], {"max_tokens": 0}, "max_tokens=0"),
        ([1], {"seed": -1}, "seed=-1"),
        ([1], {"seed": 2**32}, "seed=4294967296"),
    ],
)
def test_bad_arguments_are_refused_at_once(
    model: TinyModel, params: Any, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Generator(model, params).tokens(prompt, **{"max_tokens": 3, **options})


@given(st.binary(max_size=60), st.lists(st.integers(1, 5), max_size=60))
def test_streamed_text_is_the_decoded_bytes_in_whole_characters(data: bytes, cuts: list[int]) -> None:
    stream, pieces, position = Utf8Stream(), [], 0
    for size in [*cuts, len(data)]:
        pieces.append(stream.push(data[position : position + size]))
        position += size
    pieces.append(stream.finish())
    assert "".join(pieces) == data.decode("utf-8", "replace")


def test_half_a_character_is_held_back() -> None:
    stream = Utf8Stream()
    assert [stream.push(bytes([byte])) for byte in "a🦫".encode()] == ["a", "", "", "", "🦫"]
    assert stream.finish() == ""
    assert stream.push("水".encode()[:2]) == ""
    assert stream.finish() == "�"


def test_text_is_the_tokens_decoded(model: TinyModel, params: Any) -> None:
    generator = Generator(model, params)
    tokens = list(generator.tokens(list("Zürich".encode()), max_tokens=40, seed=3))
    pieces = list(generator.text("Zürich", max_tokens=40, seed=3))
    assert "".join(pieces) == bytes(tokens).decode("utf-8", "replace")
    assert all(pieces)


def test_an_empty_prompt_begins_after_a_line_break(model: TinyModel, params: Any) -> None:
    generator = Generator(model, params)
    assert list(generator.text("", max_tokens=9)) == list(generator.text("\n", max_tokens=9))


def test_a_trained_model_is_found_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setitem(sys.modules, "capibara.core", core_with_tiny_model())
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        find_checkpoint(tmp_path / "run")
    config = tiny_config(tmp_path / "run", "train.steps=4", "checkpoint.every_steps=2")
    train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
    run = tmp_path / "run"
    for folder, step in (
        (run, 4),
        (run / "checkpoints", 4),
        (run / "checkpoints/2", 2),
        (run / "checkpoints/4", 4),
    ):
        assert find_checkpoint(folder).step == step
    loaded = load_model(find_checkpoint(run))
    assert loaded.model.config.model == config.model
    assert int(loaded.state["calls"]) == 4
    assert np.abs(np.asarray(loaded.params["embed"]) - np.asarray(loaded.model.init(0)[0]["embed"])).max() > 0
    generator = Generator(loaded.model, loaded.params, state=loaded.state)
    assert len(list(generator.tokens([65], max_tokens=3))) == 3

    (run / "checkpoints/4/meta.json").unlink()
    warnings: list[str] = []
    assert find_checkpoint(run, warn=warnings.append).step == 2
    assert len(warnings) == 1
    with pytest.raises(CheckpointDamagedError):
        find_checkpoint(run / "checkpoints/4")

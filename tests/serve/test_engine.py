"""The engine against whole texts computed anew for every token."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from engine_models import LONGEST, engine_model
from small_models import KINDS

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.data import ByteTokenizer
from capibara.errors import ConfigError
from capibara.native import build
from capibara.serve import Engine, Grammar, Piece, Request, RequestError, Sampling
from capibara.serve.engine.adapters import AdapterRoom
from capibara.serve.engine.programs import page_bytes
from capibara.serve.engine.sequences import Sequence
from capibara.serve.engine.steps import EngineSizes
from capibara.serve.engine.streams import StoppingText
from capibara.serve.requests import EngineClosedError, EngineProtocol, QueueFullError, Stream

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def model() -> ModularCapibaraModel:
    return engine_model("grouped")


@pytest.fixture(scope="module")
def engine(model: ModularCapibaraModel) -> Any:
    """So few pages that texts have to give theirs back."""
    with Engine(model, max_batch=4, page_size=4, pages=16, prefill_tokens=8, prefill_chunks=2) as engine:
        yield engine


def oracle(model: ModularCapibaraModel) -> Callable[[np.ndarray], np.ndarray]:
    """The logits after each token of a text, without a cache."""
    whole = jax.jit(lambda tokens: model.apply(model.params, tokens))

    def logits(tokens: np.ndarray) -> np.ndarray:
        row = np.zeros((1, LONGEST), np.int32)
        row[0, : len(tokens)] = tokens
        return np.asarray(whole(row))[0, : len(tokens)]

    return logits


def requests(count: int, seed: int, **more: Any) -> list[Request]:
    """Random ones, of which some begin alike."""
    random = np.random.default_rng(seed)
    start = random.integers(0, 256, 20)
    found = []
    for _ in range(count):
        prompt = random.integers(0, 256, random.integers(1, 24))
        if random.random() < 0.4:
            prompt[: len(start)] = start[: len(prompt)]
        found.append(
            Request(tuple(prompt.tolist()), max_tokens=int(random.integers(1, 14)), sampling=GREEDY, **more)
        )
    return found


def read(stream: Stream) -> tuple[list[int], list[Any], Piece]:
    pieces = list(stream)
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    tokens = [token for piece in pieces for token in piece.tokens]
    return tokens, [score for piece in pieces for score in piece.scores], pieces[-1]


def check(model: ModularCapibaraModel, request: Request, tokens: list[int], scores: Any = ()) -> None:
    """Every token is the likeliest one after the text before it, up to rounding; the bytes' ids only."""
    assert len(tokens) == request.max_tokens
    logits = oracle_of(model)(np.array([*request.prompt, *tokens]))[len(request.prompt) - 1 : -1]
    allowed = logits[:, :256]
    chosen = allowed[np.arange(len(tokens)), tokens]
    np.testing.assert_allclose(chosen, allowed.max(1), atol=1e-4)
    if scores:
        want = chosen - np.log(np.exp(allowed.astype(np.float64)).sum(1))
        np.testing.assert_allclose([score.logprob for score in scores], want, atol=1e-4)


_ORACLES: dict[int, Any] = {}


def oracle_of(model: ModularCapibaraModel) -> Any:
    return _ORACLES.setdefault(id(model), oracle(model))


def test_texts_are_those_of_whole_recomputation(engine: Engine, model: ModularCapibaraModel) -> None:
    assert isinstance(engine, EngineProtocol)
    asked = requests(24, 0, logprobs=0)
    before = engine.statistics()
    streams = [engine.submit(request) for request in asked]
    for request, stream in zip(asked, streams, strict=True):
        tokens, scores, last = read(stream)
        assert (last.finish, last.error) == ("length", None)
        check(model, request, tokens, scores)
    after = engine.statistics()
    assert after.preemptions > before.preemptions
    assert after.cached_prompt_tokens > before.cached_prompt_tokens
    assert (after.running, after.waiting, after.waiting_tokens, after.pages_used) == (0, 0, 0, 0)
    assert after.compilations == 0
    assert after.generated_tokens - before.generated_tokens == sum(
        request.max_tokens or 0 for request in asked
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize("prefix", [True, False])
def test_every_kind_of_model(kind: str, prefix: bool) -> None:
    model = engine_model(kind)
    with Engine(model, max_batch=8, page_size=4, pages=24, prefill_tokens=12, prefix_cache=prefix) as engine:
        asked = requests(40, 1)
        for request, stream in [(request, engine.submit(request)) for request in asked]:
            check(model, request, read(stream)[0])
        assert engine.statistics().pages_used == 0


def test_pages_of_codes_hold_more_and_say_nearly_the_same(model: ModularCapibaraModel) -> None:
    wide = ModularCapibaraModel(model.config.with_overrides({"model.head_dim": 64}))
    sizes = [page_bytes(wide, 4, dtype) for dtype in ("int8", "bfloat16", "float32")]
    assert sizes[1] == sizes[2] / 2
    assert sizes[2] / sizes[0] == 4 * 64 / (64 + 4)
    logits = oracle(model)
    given: dict[str, Any] = {
        "max_batch": 4,
        "page_size": 4,
        "pages": 16,
        "prefill_tokens": 8,
        "prefill_chunks": 2,
    }
    with Engine(model, cache_dtype="int8", warm=False, **given) as engine:
        asked = requests(12, 5, logprobs=0, ignore_eos=True)
        for request, stream in [(request, engine.submit(request)) for request in asked]:
            tokens, scores, last = read(stream)
            assert (len(tokens), last.finish) == (request.max_tokens, "length")
            found = logits(np.asarray([*request.prompt, *tokens]))[len(request.prompt) - 1 : -1, :256]
            own = np.asarray(jax.nn.log_softmax(found, axis=-1))[np.arange(len(tokens)), tokens]
            np.testing.assert_allclose([score.logprob for score in scores], own, atol=0.05)
        assert engine.statistics().preemptions > 0


def test_the_same_seed_gives_the_same_text_whatever_else_runs(engine: Engine) -> None:
    sampling = Sampling(temperature=1.2, top_k=50, top_p=0.95)
    request = Request((3, 1, 4, 1, 5), max_tokens=12, sampling=sampling, seed=7, logprobs=2)
    alone, scores, _ = read(engine.submit(request))
    others = [engine.submit(other) for other in requests(7, 5)]
    together, again, _ = read(engine.submit(request))
    for stream in others:
        read(stream)
    assert together == alone
    assert {(s.token, len(s.top)) for s in again} == {(s.token, 2) for s in scores}
    np.testing.assert_allclose([s.logprob for s in again], [s.logprob for s in scores], atol=1e-5)


def test_a_text_ends_before_a_stop_string_and_with_a_token(engine: Engine) -> None:
    tokens, _, _ = read(engine.submit(Request((65, 66), max_tokens=12, sampling=GREEDY)))
    text = bytes(tokens).decode("utf-8", "replace")
    stop = text[4:6]
    pieces = list(engine.submit(Request((65, 66), max_tokens=12, sampling=GREEDY, stop=("never", stop))))
    assert "".join(piece.text for piece in pieces) == text[: text.find(stop)]
    assert pieces[-1].finish == "stop"
    ended = read(
        engine.submit(Request((65, 66), max_tokens=12, sampling=GREEDY, stop_tokens=frozenset({tokens[3]})))
    )
    assert ended[0] == tokens[: tokens.index(tokens[3])]
    assert ended[2].finish == "stop"
    later = Request((65, 66), max_tokens=12, min_tokens=9, sampling=GREEDY, stop_tokens=frozenset(tokens[:1]))
    assert len(read(engine.submit(later))[0]) >= 9


def test_a_stop_string_waits_for_min_tokens(engine: Engine) -> None:
    given: dict[str, Any] = {"prompt": (7, 8), "max_tokens": 12, "sampling": GREEDY, "ignore_eos": True}
    pieces = list(engine.submit(Request(**given)))
    text = "".join(piece.text for piece in pieces)
    stop = tuple(set(text))
    for least in range(8):
        tokens, _, last = read(engine.submit(Request(**given, stop=stop, min_tokens=least)))
        assert (len(tokens), last.finish) == (max(1, least), "stop")


def test_a_grammar_is_followed(engine: Engine) -> None:
    pytest.importorskip("llguidance")
    request = Request(
        (1,), max_tokens=20, sampling=Sampling(), seed=1, grammar=Grammar("regex", "[0-9]{3}-[a-f]{2}")
    )
    pieces = list(engine.submit(request))
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", "".join(piece.text for piece in pieces))
    assert pieces[-1].finish == "stop"
    with pytest.raises(RequestError, match="json_schema"):
        engine.submit(Request((1,), grammar=Grammar("json_schema", "{")))


def test_no_token_is_written_where_none_is_allowed(engine: Engine) -> None:
    given: dict[str, Any] = {"max_tokens": 5, "sampling": GREEDY, "ignore_eos": True}
    tokens, _, last = read(
        engine.submit(Request((1,), min_tokens=2, stop_tokens=frozenset(range(300)), **given))
    )
    assert (tokens, last.finish) == ([], "error")
    assert "no token may follow" in (last.error or "")
    pytest.importorskip("llguidance")
    tokens, _, last = read(engine.submit(Request((1,), grammar=Grammar("regex", ""), **given)))
    assert (tokens, last.finish, last.error) == ([], "stop", None)
    wanted = Request((1,), grammar=Grammar("regex", "a"), min_tokens=3, **given)
    tokens, _, last = read(engine.submit(wanted))
    assert (tokens, last.finish) == ([97], "stop")


def test_many_are_read_by_one_event_loop_and_some_go_away(engine: Engine) -> None:
    async def one(request: Request, most: int | None) -> int:
        stream, count = engine.submit(request), 0
        async for piece in stream:
            count += len(piece.tokens)
            if most is not None and count >= most:
                stream.cancel()
        return count

    async def all_of_them() -> list[int]:
        asked = requests(12, 3)
        return await asyncio.gather(*(one(r, 1 if i % 3 == 0 else None) for i, r in enumerate(asked)))

    counts = asyncio.run(all_of_them())
    for i, (count, request) in enumerate(zip(counts, requests(12, 3), strict=True)):
        assert count <= (request.max_tokens or 0) if i % 3 == 0 else count == request.max_tokens
    assert engine.statistics().pages_used == 0


def test_a_deadline_ends_a_text(engine: Engine) -> None:
    tokens, _, last = read(engine.submit(Request((1, 2), max_tokens=9, sampling=GREEDY, deadline_s=0.0)))
    assert len(tokens) <= 1
    assert last.finish == "length"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": ()}, "prompt must be a sequence of at least one token id"),
        ({"prompt": (300,)}, "prompt has the token id 300"),
        ({"prompt": (1,) * LONGEST}, "leaves no room for an answer"),
        ({"prompt": (1,), "max_tokens": LONGEST}, f"max_tokens={LONGEST}: expected an integer from 1 to 63"),
        ({"prompt": (1,), "logprobs": 21}, "logprobs=21: expected an integer from 0 to 20"),
        ({"prompt": (1,), "seed": -1}, "seed=-1"),
        ({"prompt": (1,), "max_tokens": 2.5}, "max_tokens=2.5: expected an integer from 1"),
        ({"prompt": (1,), "min_tokens": "3"}, "min_tokens='3': expected an integer from 0"),
        ({"prompt": (1,), "logprobs": 1.5}, "logprobs=1.5: expected an integer"),
        ({"prompt": (1,), "priority": "high"}, "priority='high': expected an integer"),
        ({"prompt": (1,), "deadline_s": math.nan}, "deadline_s=nan: expected a number of seconds"),
        ({"prompt": 5}, "prompt must be a sequence"),
        ({"prompt": (1,), "stop": None}, "stop=None: expected a tuple of strings"),
        ({"prompt": (1,), "stop_tokens": 3}, "stop_tokens=3: expected a set of token ids"),
        ({"prompt": (1,), "stop": "end"}, "stop='end': expected a tuple of strings"),
        ({"prompt": (1,), "stop_tokens": ("a",)}, "stop_tokens=.*: expected a set of token ids"),
        ({"prompt": (1,), "sampling": Sampling(logit_bias=((300, 1.0),))}, "logit_bias has token 300"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(engine: Engine, given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.submit(Request(**given))


def test_a_full_queue_says_when_to_come_again(model: ModularCapibaraModel) -> None:
    with Engine(model, max_batch=1, pages=8, page_size=4, max_waiting=2, warm=False, max_length=32) as engine:
        long = Request((1, 2), max_tokens=30, sampling=GREEDY)
        streams = [engine.submit(long)]
        while engine.statistics().waiting:
            time.sleep(0.001)
        streams += [engine.submit(long), engine.submit(long)]
        with pytest.raises(QueueFullError, match="2 requests with 4 tokens wait already") as caught:
            engine.submit(long)
        assert caught.value.retry_after_s > 0
        for stream in streams:
            assert len(read(stream)[0]) == 30


def test_closing_lets_texts_finish_and_takes_no_more(model: ModularCapibaraModel) -> None:
    engine = Engine(model, max_batch=2, pages=16, page_size=4, warm=False, max_length=32)
    running, waiting = (engine.submit(Request((9,), max_tokens=8, sampling=GREEDY)) for _ in range(2))
    engine.close(drain_s=60)
    assert [read(stream)[2].finish for stream in (running, waiting)] == ["length", "length"]
    with pytest.raises(EngineClosedError, match="shutting down"):
        engine.submit(Request((9,)))
    assert engine.stalled_s() == 0


def test_a_step_that_fails_ends_every_text_and_is_seen(
    model: ModularCapibaraModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(model, max_batch=2, pages=16, page_size=4, warm=False, max_length=32)
    assert engine.stalled_s() == 0

    def broken(*_: Any, **__: Any) -> Any:
        raise MemoryError("planted")

    monkeypatch.setattr(engine._programs, "step", broken)
    last = read(engine.submit(Request((9,))))[2]
    assert last.finish == "error"
    assert "planted" in (last.error or "")
    assert math.isinf(engine.stalled_s())
    with pytest.raises(EngineClosedError, match="planted"):
        engine.submit(Request((9,)))
    engine.close()


def test_a_text_that_fails_ends_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = engine.submit(Request((5, 6), max_tokens=8, sampling=GREEDY, ignore_eos=True, seed=77))
    add = Sequence.add

    def planted(self: Sequence, *given: Any) -> Any:
        if self.seed == 77:
            raise MemoryError("planted")
        return add(self, *given)

    monkeypatch.setattr(Sequence, "add", planted)
    whole = engine.submit(Request((5, 6), max_tokens=8, sampling=GREEDY, ignore_eos=True))
    assert len(read(whole)[0]) == 8
    list(broken)  # it may have ended before the fault was planted
    last = read(engine.submit(Request((5, 6), max_tokens=8, sampling=GREEDY, seed=77)))[2]
    assert (last.finish, last.error) == ("error", "MemoryError: planted")
    assert engine.stalled_s() == 0


class Failing(ByteTokenizer):
    """A decoder that fails at the end, or earlier."""

    def __init__(self, *where: str) -> None:
        self.where = where

    def stream(self) -> Any:
        stream: Any = super().stream()

        def planted(*_: Any) -> str:
            raise MemoryError("planted")

        for name in self.where:
            setattr(stream, name, planted)
        return stream


@pytest.mark.parametrize("where", [("finish",), ("push", "finish")])
def test_readers_are_told_even_where_a_text_cannot_end(
    model: ModularCapibaraModel, where: tuple[str, ...]
) -> None:
    given: dict[str, Any] = {"max_batch": 1, "pages": 16, "page_size": 4, "warm": False, "max_length": 32}
    with Engine(model, tokenizer=Failing(*where), **given) as engine:
        last = read(engine.submit(Request((9,), max_tokens=3, ignore_eos=True)))[2]
        assert (last.finish, last.error) == ("error", "MemoryError: planted")
        cancelled = engine.submit(Request((9,), max_tokens=30, ignore_eos=True))
        cancelled.cancel()
        assert read(cancelled)[2].finish in ("cancelled", "error")
        assert engine.statistics().pages_used == 0
        streams = [engine.submit(Request((9,), max_tokens=30, ignore_eos=True)) for _ in range(3)]
    assert {read(stream)[2].finish for stream in streams} <= {"cancelled", "error"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_batch": 0}, "max_batch=0: expected an integer from 1"),
        ({"max_length": LONGEST + 1}, f"max_length={LONGEST + 1}: expected an integer from 1 to {LONGEST}"),
        ({"pages": 0}, "pages=0: expected an integer from 1"),
    ],
)
def test_settings_out_of_range_are_named(model: ModularCapibaraModel, given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Engine(model, **given)


class Letters:
    """Tokens are characters."""

    def push(self, token: int) -> str:
        return chr(token)

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize("stop", [("ab",), ("aab", "c"), ("bab", "abba"), ()])
@pytest.mark.parametrize("text", ["aaab", "abab", "xxabbab", "aacab", "ba", "ababab"])
def test_what_could_become_a_stop_string_is_held_back(text: str, stop: tuple[str, ...]) -> None:
    writer, found = StoppingText(Letters(), stop), ""
    for character in text:
        found += writer.push(ord(character))
        assert not any(found.endswith(s) for s in stop)
        if writer.stopped:
            break
    found += writer.finish()
    cuts = [end for end in range(len(text) + 1) if any(text[:end].endswith(s) for s in stop)]
    want = text if not cuts else text[: min(text.find(s) for s in stop if s in text[: cuts[0]])]
    assert found == want


@pytest.mark.thin(2)
@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler: there are no kernels to call")
@pytest.mark.parametrize("tied", [False, True])
def test_products_of_one_token_share_calls(tied: bool) -> None:
    sizes = {"embed_dim": 256, "mlp_dim": 512, "num_heads": 4, "num_kv_heads": 4, "num_layers": 2}
    more = {"max_sequence_length": 64, "vocab_size": 300, "tie_embeddings": tied}
    given = {f"model.{key}": value for key, value in (sizes | more).items()}
    config = ModularModelConfig.from_dict({}, given | {"train.sequence_length": 32})
    model = ModularCapibaraModel(config)
    asked = Request(tuple(b"Once"), max_tokens=9, sampling=GREEDY, logprobs=0)
    with Engine(model, max_batch=1, pages=8, warm=False) as engine:
        tokens, scores, _ = read(engine.submit(asked))
        again, scores_again, _ = read(engine.submit(asked))
        (step,) = (step for shape, step in engine._programs._steps.items() if not shape.chunks)
    check(model, asked, tokens, scores)
    assert (tokens, scores) == (again, scores_again)
    found = re.findall(r"= (.*?) custom-call\(.*custom_call_target=\"capibara_thin_(\w+)", step.as_text())
    # From the first norm to queries, keys and values; from what attention gives to those of the next layer, and what
    # is added to later; to the last layer's end; and for the rows that are wanted from the last norm to the head.
    assert [name for _, name in found] == ["chain"] * 4
    assert sorted(each.count("f32[") for each, _ in found) == [1, 1, 3, 4]


def test_likeliest_tokens_are_those_that_scored_choices_take() -> None:
    """Steps choose them by themselves where no request wants anything else."""
    model = ModularCapibaraModel(ModularModelConfig.from_toml("demo", ["num_layers=2"]))
    prompts = [tuple(b"Once"), tuple(b"upon a"), tuple(b"time")]
    found = []
    with Engine(model, max_batch=4, pages=16, warm=False) as engine:
        for logprobs in (None, 0):
            asked = [Request(p, max_tokens=9, sampling=GREEDY, logprobs=logprobs) for p in prompts]
            found.append([read(stream)[0] for stream in engine.submit_all(asked)])
            # One that wants something else has all chosen by another program.
            engine.submit_all([Request(prompts[0], max_tokens=3, sampling=GREEDY), asked[1]])
            kinds = {top > 0 for _, _, top in engine._programs._choices}
            assert kinds == (set() if logprobs is None else {True})
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["int8", "nf4"])
def test_weights_stay_in_their_codes(tmp_path: Any, strategy: Any) -> None:
    from capibara.compress import CompressionProfile, ModelCompressionAPI
    from capibara.serve import load_compressed

    sizes = ["embed_dim=128", "num_layers=2", "num_heads=2", "num_kv_heads=2", "model.vocab_size=256"]
    config = ModularModelConfig.from_toml("demo", sizes)
    config.to_toml(tmp_path / "config.toml")
    api = ModelCompressionAPI(CompressionProfile(strategy=strategy))
    path = api.compress(ModularCapibaraModel(config), decode="auto").save(tmp_path / "model.capi")
    asked, found = Request(tuple(b"Once upon a time"), max_tokens=12, sampling=GREEDY), []
    for decode in (True, False):
        loaded = load_compressed(path, decode=decode)
        state = {"state": loaded.state}
        with Engine(loaded.model, loaded.params, **state, max_batch=2, pages=8, warm=False) as engine:
            found.append(read(engine.submit(asked))[0])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "batch", "pages", "prefix"),
    [
        ("grouped", 1, 16, True),
        ("grouped", 64, 200, True),
        ("grouped", 64, 60, False),
        ("mixed", 16, 60, False),
        ("latent", 16, 40, True),
    ],
)
def test_500_random_requests(kind: str, batch: int, pages: int, prefix: bool) -> None:
    model = engine_model(kind)
    sizes: dict[str, Any] = {"max_batch": batch, "pages": pages, "page_size": 4, "prefill_tokens": 16}
    with Engine(model, **sizes, prefix_cache=prefix) as engine:
        asked = requests(500, batch)
        streams = [engine.submit(request) for request in asked]
        for request, stream in zip(asked, streams, strict=True):
            check(model, request, read(stream)[0])
        found = engine.statistics()
        assert (found.pages_used, found.compilations) == (0, 0)
        assert found.cached_prompt_tokens > 0 or not prefix
        assert found.preemptions > 0 or batch == 1 or pages == 200


def test_steps_tell_a_stranger_nothing_of_what_others_asked() -> None:
    """The time of an answer is that of its steps: of what another salt has asked as many as of what nobody has."""
    random = np.random.default_rng(5)
    known, unknown = (tuple(random.integers(0, 256, 60).tolist()) for _ in range(2))
    with Engine(
        engine_model("grouped"), max_batch=2, page_size=4, pages=60, prefill_tokens=8, prefill_chunks=1
    ) as engine:

        def steps(prompt: tuple[int, ...], salt: str) -> int:
            before = engine.statistics().steps
            read(engine.submit(Request(prompt, max_tokens=2, sampling=GREEDY, salt=salt)))
            return engine.statistics().steps - before

        first = steps(known, "one")
        assert steps(known, "one") < first / 2
        # Guesses of the first tokens, each a little longer, are what an attacker would try.
        for length in (9, 30, 60):
            assert steps(known[:length], "two") == steps(unknown[:length], "three")
        assert steps(known, "four") == first


@pytest.mark.parametrize(("recurrent", "most"), [(False, 4), (True, 3)])
def test_a_prompt_takes_the_smallest_step_that_has_room_for_it(recurrent: bool, most: int) -> None:
    sizes = EngineSizes(3, 256, 16, 49, prefill_tokens=128, prefill_chunks=4, recurrent=recurrent)
    alone = [sizes.shape(0, n) for n in range(1, most + 1)]
    assert [(s.rows, s.chunks) for s in alone] == [(1, 1), (1, 2), *[(1, most)] * (most - 2)]
    assert {s.chunk for s in alone} == {128 // most}
    # Beside several texts that are written there is one for a prompt of one piece, and one for all others.
    beside = [sizes.shape(2, n) for n in range(1, most + 1)]
    assert [(s.rows, s.chunks) for s in beside] == [(3, 1), *[(3, most)] * (most - 1)]
    assert sizes.early == [alone[0]]


def test_the_first_request_does_not_wait_for_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = engine_model("grouped")
    moved: list[Any] = []
    place = "capibara.serve.engine.engine"
    monkeypatch.setattr(f"{place}.spans_of", lambda _: {(4096, 8192)})
    monkeypatch.setattr(f"{place}.ask_for_large_pages", lambda *given, move: moved.append((*given, move)))
    with Engine(model, max_batch=2, page_size=16, warm=False):
        assert moved == [(4096, 8192, True)]
    moved.clear()
    monkeypatch.setattr(f"{place}._START_S", 600)
    with Engine(model, max_batch=2, page_size=16, warm="first") as engine:
        assert list(engine.submit(Request((1, 2), max_tokens=2)))
    assert moved == []
    monkeypatch.setattr(f"{place}._START_S", 0)
    with Engine(model, max_batch=2, page_size=16, warm="first"):
        ends = time.monotonic() + 60
        while not moved and time.monotonic() < ends:
            time.sleep(0.01)
    assert moved == [(4096, 8192, True)]


@pytest.mark.parametrize("adapters", [None, AdapterRoom(most=1, rank=2)], ids=["alone", "adapters"])
def test_whole_weights_and_pages_go_into_large_pages(
    adapters: AdapterRoom | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine_model("grouped")
    asked: list[Any] = []
    monkeypatch.setattr("capibara.serve.engine.engine.spans_of", lambda tree: asked.append(tree) or set())
    with Engine(model, max_batch=2, page_size=16, warm=False, adapters=adapters) as engine:
        ((weights, cache),) = asked
        assert weights is engine._params
        assert all(leaf.size for leaf in jax.tree.leaves(cache))

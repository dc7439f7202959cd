"""Programs that are made while a model is read."""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import math
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from own_cache import own_cache
from small_models import KINDS, SMALL

from capibara.compilation.persistent_cache import keep_compiled
from capibara.compress import CompressionProfile, ModelCompressionAPI
from capibara.compress.coded import is_coded
from capibara.compress.errors import CompressError
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError
from capibara.memory.budget import device_budget
from capibara.serve import (
    AdapterRoom,
    Engine,
    EngineClosedError,
    Request,
    Sampling,
    Speculation,
    load_compressed,
)
from capibara.serve.engine.early import EarlyPrograms
from capibara.serve.engine.layers import packing_of
from capibara.serve.engine.programs import run_each
from capibara.serve.weights import describe_compressed

SETTINGS = {"model.vocab_size": 256, "model.max_sequence_length": 64, "train.sequence_length": 32}
SIZES: dict[str, Any] = {"max_batch": 2, "page_size": 4, "prefill_tokens": 8, "prefill_chunks": 2}
ASKED = Request((1, 2, 3), max_tokens=6, sampling=Sampling(temperature=0.0))


def config_of(**more: Any) -> ModularModelConfig:
    return ModularModelConfig.from_dict({}, SMALL | KINDS["grouped"] | SETTINGS | more)


def tokens(engine: Engine) -> list[int]:
    return [token for piece in engine.submit(ASKED) for token in piece.tokens]


@pytest.mark.thin(2)
@pytest.mark.parametrize("pages", [None, 20])
def test_an_engine_takes_them(tmp_path: Path, pages: int | None) -> None:
    early = EarlyPrograms(config_of(), tmp_path, pages=pages, **SIZES)
    model = ModularCapibaraModel(config_of())
    with Engine(model, early=early, warm="first", **SIZES) as engine:
        assert early.take() is None  # the engine has all of it
        found = tokens(engine)
        assert engine.statistics().compilations == 0
        assert pages in (None, engine.statistics().pages_total)
    with Engine(model, warm=False, **SIZES) as engine:
        assert tokens(engine) == found
        assert engine.statistics().compilations > 0


@pytest.mark.thin(2)
@pytest.mark.parametrize("decode", ["auto", True])
@pytest.mark.parametrize("strategy", ["int8", "nf4", "lossless"])
def test_an_engine_takes_those_of_an_archive(strategy: str, decode: bool | str, tmp_path: Path) -> None:
    model = ModularCapibaraModel(config_of(**{"model.embed_dim": 64}))
    api = ModelCompressionAPI(CompressionProfile(strategy=strategy))
    path = api.compress(model, decode="auto").save(tmp_path / "model.capi")
    (tmp_path / "config.toml").write_text(model.config.to_toml(), encoding="utf-8")
    config, tokenizer, describe = describe_compressed(path, decode=decode)
    early = EarlyPrograms(config, tokenizer, describe=describe, **SIZES)
    found = []
    for given in (early, None):
        loaded = load_compressed(path, decode=decode)
        assert any(map(is_coded, jax.tree.leaves(loaded.params, is_leaf=is_coded))) == (
            decode == "auto" and strategy != "lossless"
        )
        own: dict[str, Any] = {"early": given, "warm": "first" if given else False, "donate_params": True}
        with Engine(loaded.model, loaded.params, state=loaded.state, **own, **SIZES) as engine:
            found.append(tokens(engine))
            assert (engine.statistics().compilations == 0) == (given is not None)
    assert found[0] == found[1]


def test_an_archive_without_the_state_of_its_model_is_refused_before_anything_is_traced(
    tmp_path: Path,
) -> None:
    config = ModularModelConfig.from_dict({}, SMALL | KINDS["vq"] | SETTINGS)
    api = ModelCompressionAPI(CompressionProfile(strategy="lossless"))
    path = api.compress(ModularCapibaraModel(config)).save(tmp_path / "model.capi")
    (tmp_path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    config, _, describe = describe_compressed(path)
    with pytest.raises(CompressError, match="--checkpoint, the folder of its run"):
        describe(ModularCapibaraModel(config))


@pytest.mark.thin(2)
@pytest.mark.parametrize("other", [{"model.mlp_dim": 24}, {"model.rope_theta": 77.0}])
def test_those_of_another_model_are_left(tmp_path: Path, other: dict[str, Any]) -> None:
    early = EarlyPrograms(config_of(**other), tmp_path, **SIZES)
    model = ModularCapibaraModel(config_of())
    with Engine(model, early=early, warm=False, **SIZES) as engine:
        tokens(engine)
        assert engine.statistics().compilations > 0


def test_a_later_start_traces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    decode = ModularCapibaraModel.decode_pages

    def counted(self: Any, params: Any, inputs: Any, cache: Any, shape: Any, **more: Any) -> Any:
        traced.append(shape)
        return decode(self, params, inputs, cache, shape, **more)

    monkeypatch.setattr(ModularCapibaraModel, "decode_pages", counted)
    model = ModularCapibaraModel(config_of())

    def start(warm: bool = False, **other: Any) -> list[int]:
        traced.clear()
        early = EarlyPrograms(config_of(), tmp_path, **SIZES | other)
        with Engine(model, early=early, warm=warm, **SIZES | other) as engine:
            found = tokens(engine)
            assert not warm or engine.statistics().compilations == 0
        return found

    with own_cache(tmp_path / "home", monkeypatch), keep_compiled(pytest.fail, min_seconds=0.0):
        want = start(warm=True)
        assert len(set(traced)) > 2
        assert start(warm=True) == want
        assert not traced
        # Each of these is another engine, with programs of its own.
        others: list[dict[str, Any]] = [
            {"pages": 40},
            {"max_batch": 3},
            {"cache_dtype": "bfloat16"},
            {"prefill_tokens": 16},
        ]
        for other in others:
            found = start(**other)
            assert traced
            assert "cache_dtype" in other or found == want
        for other in others:
            found = start(**other)
            assert not traced
            assert "cache_dtype" in other or found == want
        # Of another model nothing is found.
        other = EarlyPrograms(config_of(**{"model.rope_theta": 77.0}), tmp_path, **SIZES).take()
        assert other is not None
        assert len(set(traced)) == 1


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", ["plain", "codes", "adapters", "guesses", "draft"])
def test_nor_does_an_engine_without_them(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    decode = ModularCapibaraModel.decode_pages

    def counted(self: Any, params: Any, inputs: Any, cache: Any, shape: Any, **more: Any) -> Any:
        traced.append(shape)
        return decode(self, params, inputs, cache, shape, **more)

    model = ModularCapibaraModel(config_of(**({"model.embed_dim": 64} if kind == "codes" else {})))
    params, more = model.params, {}
    if kind == "codes":
        api = ModelCompressionAPI(CompressionProfile(strategy="int8"))
        path = api.compress(model, decode="auto").save(tmp_path / "model.capi")
        params = load_compressed(path, model.config, decode=False).params
    elif kind == "adapters":
        more = {"adapters": AdapterRoom(2)}
    elif kind == "guesses":
        more = {"speculation": Speculation(2)}
    elif kind == "draft":
        more = {"speculation": Speculation(2, draft=model)}
    monkeypatch.setattr(ModularCapibaraModel, "decode_pages", counted)

    def start(**other: Any) -> list[int]:
        traced.clear()
        with Engine(model, params, untraced=True, warm=False, **SIZES, **more, **other) as engine:
            return tokens(engine)

    with own_cache(tmp_path / "home", monkeypatch), keep_compiled(pytest.fail, min_seconds=0.0):
        want = start()
        assert len(set(traced)) > 1
        assert start() == want
        assert not traced
        assert start(pages=40) == want
        assert traced


@pytest.mark.parametrize("untraced", [False, True])
def test_settings_of_the_calling_thread_hold(
    untraced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[Any] = set()
    decode = ModularCapibaraModel.decode_pages

    def look(self: Any, *given: Any, **more: Any) -> Any:
        precision = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
        seen.add((str(precision), mark.get()))
        return decode(self, *given, **more)

    mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="none")
    monkeypatch.setattr(ModularCapibaraModel, "decode_pages", look)
    model = ModularCapibaraModel(config_of())
    mark.set("own")
    with own_cache(tmp_path / "home", monkeypatch), keep_compiled(pytest.fail, min_seconds=0.0):
        for precision in ("highest", None):
            seen.clear()
            with jax.default_matmul_precision(precision):
                Engine(model, untraced=untraced, warm=True, **SIZES).close()
            assert seen == {(str(precision), "own")}
    with jax.default_prng_impl("rbg"):
        made: set[str] = set()
        list(run_each([lambda: made.add(jax.config.jax_default_prng_impl)], together=True))  # pyright: ignore
        assert made == {"rbg"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parameters_of_numpy(dtype: str) -> None:
    model = ModularCapibaraModel(
        config_of(**{"precision.param_dtype": dtype, "precision.compute_dtype": dtype})
    )
    plain = jax.tree.map(np.asarray, model.params)
    found = []
    for params in (model.params, plain):
        with Engine(model, params, warm=False, **SIZES) as engine:
            found.append(tokens(engine))
    assert found[0] == found[1]


@pytest.mark.parametrize("together", [False, True])
def test_after_an_error_no_more_programs_are_made(together: bool) -> None:
    begun: list[int] = []
    go_on = threading.Event()

    def fail() -> None:
        raise ValueError("no program")

    def work(number: int) -> None:
        begun.append(number)
        go_on.wait(0.2)

    with pytest.raises(ValueError, match="no program"):
        list(run_each([fail, *(lambda n=n: work(n) for n in range(20))], together=together))
    assert len(begun) < 5
    assert list(run_each([lambda: begun.clear()] * 3, together=together)) == [None] * 3


def test_a_model_of_another_class_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does is not in the settings."""

    class Other(ModularCapibaraModel):
        def decode_pages(self, *given: Any, **more: Any) -> Any:
            logits, cache = super().decode_pages(*given, **more)
            return -logits, cache

    plain, other = ModularCapibaraModel(config_of()), Other(config_of())
    found = []
    with own_cache(tmp_path / "home", monkeypatch), keep_compiled(pytest.fail, min_seconds=0.0):
        for model in (plain, other, plain, other):
            with Engine(model, plain.params, untraced=True, warm=False, **SIZES) as engine:
                found.append(tokens(engine))
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def test_free_memory_is_looked_at_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is loaded meanwhile would be counted twice."""
    seen: list[str] = []
    place = "capibara.serve.engine.early"

    def budget() -> Any:
        seen.append("free")
        return device_budget()

    def packing(*given: Any) -> Any:
        seen.append("packing")
        return packing_of(*given)

    monkeypatch.setattr(f"{place}.device_budget", budget)
    monkeypatch.setattr(f"{place}.packing_of", packing)
    monkeypatch.setattr(f"{place}.room_for_panels", lambda *_, **__: True)
    assert EarlyPrograms(config_of(), tmp_path, **SIZES).take() is not None
    assert seen == ["free", "packing"]


def test_what_is_wrong_the_engine_says(tmp_path: Path) -> None:
    wrong: dict[str, Any] = SIZES | {"max_batch": 0}
    early = EarlyPrograms(config_of(), tmp_path, **wrong)
    assert early.take() is None
    with pytest.raises(ConfigError, match="max_batch=0"):
        Engine(ModularCapibaraModel(config_of()), early=early, warm=False, **wrong)


def test_a_long_prompt_does_not_wait_for_its_program() -> None:
    """Where only the smallest shapes are there, it is read in smaller parts; later in larger ones."""
    prompt = tuple(range(1, 21))
    asked = Request(prompt, max_tokens=4, sampling=Sampling(temperature=0.0))
    model = ModularCapibaraModel(config_of())
    held = threading.Event()

    class Held(Engine):
        def _warm(self, rest: Any, done: int, total: int, progress: Any) -> None:
            assert held.wait(60)
            super()._warm(rest, done, total, progress)

    with Engine(model, warm=False, prefix_cache=False, **SIZES) as engine:
        want = [token for piece in engine.submit(asked) for token in piece.tokens]
        steps = engine.statistics().steps
    with Held(model, warm="first", prefix_cache=False, **SIZES) as engine:
        try:
            found = [token for piece in engine.submit(asked) for token in piece.tokens]
            first = engine.statistics()
            assert found == want
            assert first.compilations == 0
            assert first.programs_left > 0
            assert first.steps == 5 + 3  # 20 tokens, 4 in a step, and three more of the answer
        finally:
            held.set()
        while engine.statistics().programs_left:
            time.sleep(0.01)
        assert [token for piece in engine.submit(asked) for token in piece.tokens] == want
        assert engine.statistics().steps - first.steps == steps == 3 + 3  # 8 in a step
        assert engine.statistics().compilations == 0


def test_texts_take_turns_until_there_are_programs_for_several() -> None:
    asked = [Request((1, 2, number), max_tokens=5, sampling=Sampling(temperature=0.0)) for number in range(6)]
    model = ModularCapibaraModel(config_of())
    sizes: dict[str, Any] = SIZES | {"max_batch": 5, "prefix_cache": False}
    made, held, ended = threading.Event(), threading.Event(), threading.Event()

    class Held(Engine):
        def _warm(self, rest: Any, done: int, total: int, progress: Any) -> None:
            assert held.wait(60)
            # Of one text alone, with more of a prompt, and of several with and without.
            for compile_one in rest[:5]:
                compile_one()
            made.set()
            assert ended.wait(60)

    def write(engine: Engine) -> list[list[int]]:
        streams = engine.submit_all(asked)  # one by one, the first might have ended before the last comes
        return [[token for piece in stream for token in piece.tokens] for stream in streams]

    with Engine(model, warm=False, **sizes) as engine:
        want = write(engine)
    with Held(model, warm="first", **sizes) as engine:
        try:
            assert write(engine) == want
            steps = engine.statistics().steps
            assert steps >= 6 * 5  # a text after the other
            held.set()
            assert made.wait(60)
            assert write(engine) == want
            assert engine.statistics().steps - steps < 6 * 5 / 2
            assert engine.statistics().compilations == 0
        finally:
            held.set()
            ended.set()


def test_a_prompt_takes_a_larger_step_whose_program_is_there() -> None:
    model = ModularCapibaraModel(config_of())
    sizes: dict[str, Any] = SIZES | {"prefill_chunks": 4}
    made, held = threading.Event(), threading.Event()

    class Held(Engine):
        def _warm(self, rest: Any, done: int, total: int, progress: Any) -> None:
            for compile_one in rest[:2]:  # of a row alone, and of four pieces
                compile_one()
            made.set()
            assert held.wait(60)

    with Held(model, warm="first", prefix_cache=False, **sizes) as engine:
        try:
            assert made.wait(60)
            two_pieces = Request((1, 2, 3, 4), max_tokens=2, sampling=Sampling(temperature=0.0))
            assert [piece.error for piece in engine.submit(two_pieces)] == [None, None]
            assert engine.statistics().compilations == 0
        finally:
            held.set()


@pytest.mark.parametrize("wrong", [{}, {"max_batch": 0}])
def test_that_xla_is_at_work_is_said_in_any_case(tmp_path: Path, wrong: dict[str, Any]) -> None:
    early = EarlyPrograms(config_of(), tmp_path, **SIZES | wrong)
    early.wait_for_xla()  # ends
    assert (early.take() is None) == bool(wrong)


@pytest.mark.parametrize("precision", [None, "highest"])
def test_a_start_waits_for_rows_alone_where_its_settings_do_not_hold_elsewhere(
    precision: str | None,
) -> None:
    held = threading.Event()

    class Held(Engine):
        def _warm(self, rest: Any, done: int, total: int, progress: Any) -> None:
            assert held.wait(60)

    model = ModularCapibaraModel(config_of())
    with jax.default_matmul_precision(precision):
        engine = Held(model, warm="first", **SIZES)
    with engine:
        try:
            alone, *_ = engine._sizes.plain
            assert engine._programs.has_step(alone) == (precision is not None)
            assert all(map(engine._programs.has_step, engine._sizes.early))
        finally:
            held.set()


def wait_for_failure(engine: Engine) -> None:
    end = time.monotonic() + 60
    while not math.isinf(engine.stalled_s()):
        assert time.monotonic() < end
        time.sleep(0.01)


class Refused(Engine):
    """A program cannot be compiled beside the steps, once texts were asked for; after a first step others wait for it.

    Attributes:
      which: of the programs; ``None``: of one, and there are no others.
    """

    which: int | None

    def __init__(self, **more: Any) -> None:
        self.submitted = threading.Event()
        super().__init__(ModularCapibaraModel(config_of()), warm="first", **SIZES | more)

    def _to_compile(self) -> Any:
        def refused() -> None:
            assert self.submitted.wait(60)
            raise RuntimeError("no such instruction")

        first, rest = super()._to_compile()
        if self.which is None:
            return first, [refused]
        return first, [*rest[: self.which], refused, *rest[self.which + 1 :]]

    def _advance(self, pieces: Any) -> None:
        super()._advance(pieces)
        wait_for_failure(self)


@pytest.mark.parametrize("which", [0, 1])
def test_no_text_is_taken_once_a_program_cannot_be_compiled(
    which: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of rows alone, which is made after the first token of a text, or another. Plain texts go on."""
    monkeypatch.setattr(Refused, "which", which, raising=False)
    scored = dataclasses.replace(ASKED, logprobs=2)
    with Refused() as engine:
        *plain, last = engine.submit_all([ASKED, ASKED, ASKED, scored])
        engine.submitted.set()
        wait_for_failure(engine)
        if which == 0:
            engine.close(drain_s=60)
        for stream in plain:
            assert len([token for piece in stream for token in piece.tokens]) == ASKED.max_tokens
        (end,) = last
        assert (end.finish, end.tokens) == ("error", ())
        assert "a program cannot be compiled: RuntimeError: no such instruction" in str(end.error)
        with pytest.raises(EngineClosedError, match="cannot be compiled: RuntimeError: no such instruction"):
            engine.submit(ASKED)
    assert "cannot be compiled" in caplog.text
    assert engine.statistics().pages_used == 0


def test_texts_go_on_without_guesses_once_a_program_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = dataclasses.replace(ASKED, prompt=(1, 2, 3, 1, 2, 3, 1), max_tokens=30)
    with Engine(ModularCapibaraModel(config_of()), speculation=Speculation(2), **SIZES) as engine:
        want = [token for piece in engine.submit(asked) for token in piece.tokens]
        assert engine.statistics().guessed_tokens > 0
    monkeypatch.setattr(Refused, "which", None, raising=False)
    with Refused(speculation=Speculation(2)) as engine:
        stream = engine.submit(asked)
        engine.submitted.set()
        assert [token for piece in stream for token in piece.tokens] == want
        assert engine.statistics().guessed_tokens == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_texts_end_though_a_failure_cannot_be_logged() -> None:
    class Full(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the disk is full")

    class Failing(Engine):
        def _advance(self, pieces: Any) -> None:
            raise RuntimeError("no such device")

    handler = Full()
    logging.getLogger("capibara").addHandler(handler)
    try:
        with Failing(ModularCapibaraModel(config_of()), warm=False, **SIZES) as engine:
            (end,) = engine.submit(ASKED)
            assert str(end.error) == "a step of the engine failed: RuntimeError: no such device"
            assert math.isinf(engine.stalled_s())
    finally:
        logging.getLogger("capibara").removeHandler(handler)


def test_programs_are_compiled_though_their_progress_cannot_be_shown(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def progress(done: int, total: int) -> None:
        if done > 2:  # beside the steps
            raise OSError("the terminal is gone")

    with Engine(ModularCapibaraModel(config_of()), warm="first", progress=progress, **SIZES) as engine:
        end = time.monotonic() + 300
        while engine.statistics().programs_left:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert [record.getMessage() for record in caplog.records] == ["the progress of compiling cannot be shown"]


@pytest.mark.parametrize("kind", ["step", "choice"])
def test_a_step_that_waits_for_its_program_is_not_taken_for_one_that_hangs(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, go = threading.Event(), threading.Event()
    asked = dataclasses.replace(ASKED, logprobs=None if kind == "step" else 1)
    with Engine(ModularCapibaraModel(config_of()), warm=False, **SIZES) as engine:
        compile_one, step = getattr(engine._programs, f"_compiled_{kind}"), engine._programs.step

        def slow(*given: Any) -> Any:
            waits.set()
            assert go.wait(60)
            return compile_one(*given)

        def hanging(*given: Any, **more: Any) -> Any:
            waits.set()
            assert go.wait(60)
            return step(*given, **more)

        monkeypatch.setattr(engine._programs, f"_compiled_{kind}", slow)
        stream = engine.submit(asked)
        try:
            assert waits.wait(60)
            engine._progress_at -= 100
            assert engine.stalled_s() < 50
            with monkeypatch.context() as patch:
                patch.setattr("capibara.serve.engine.programs._LONGEST_COMPILATION_S", -50.0)
                assert engine.stalled_s() >= 50
        finally:
            go.set()
        assert len([token for piece in stream for token in piece.tokens]) == ASKED.max_tokens
        # What hangs later does not wait for a program.
        waits.clear()
        go.clear()
        monkeypatch.setattr(engine._programs, "step", hanging)
        stream = engine.submit(asked)
        try:
            assert waits.wait(60)
            engine._progress_at -= 100
            engine._programs._waited_until -= 100
            assert engine.stalled_s() >= 50
        finally:
            go.set()
        assert len([token for piece in stream for token in piece.tokens]) == ASKED.max_tokens

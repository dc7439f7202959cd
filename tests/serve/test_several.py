"""A loop of steps gives what a step at a time does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SMALL

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.core.paged import StepShape
from capibara.serve.engine import programs as engine_programs
from capibara.serve.engine.layers import layers_apart
from capibara.serve.engine.programs import Programs
from capibara.serve.engine.several import (
    MOST_ENDS,
    MOST_TOKENS,
    StepTimes,
    TokenLoop,
    one_token,
    several_tokens,
)
from capibara.serve.engine.steps import EngineSizes, StepPiece
from capibara.serve.requests import Request
from capibara.serve.row_sampling import SamplingRows
from capibara.serve.sampling import Sampling

ROWS, VOCABULARY = 3, 11
SIZES = EngineSizes(4, 32, 4, 33, 16, 2)


def step(weights: Any, cache: Any, inputs: Any, sampling: SamplingRows) -> Any:
    """Tokens that depend on all that came before in their row, which the cache holds, and on their number."""
    cache = cache % 1009 * weights + inputs["tokens"] + inputs["starts"] + 5 * sampling.number
    tokens = (cache % VOCABULARY).astype(jnp.int32)
    return jax.nn.one_hot(tokens, VOCABULARY), cache, tokens


run = jax.jit(several_tokens(step, jax.ShapeDtypeStruct((ROWS, VOCABULARY), jnp.float32)))


def by_hand(
    tokens: list[int], starts: list[int], count: int, ends: list[list[int]], alive: list[bool]
) -> tuple[list[list[int]], list[int], list[bool], list[int]]:
    """In plain Python: each row's tokens, its last one, whether it has not ended, and what the cache holds."""
    cache, last, alive, written = [1] * ROWS, list(tokens), list(alive), [[] for _ in range(ROWS)]
    for n in range(count):
        if not any(alive):
            break
        for row in range(ROWS):
            cache[row] = cache[row] % 1009 * 7 + last[row] + starts[row] + n + 5 * (row + n)
            if alive[row]:
                last[row] = cache[row] % VOCABULARY
                written[row].append(last[row])
        alive = [alive[row] and last[row] not in ends[row] for row in range(ROWS)]
    return written, last, alive, cache


a_row = st.lists(st.integers(0, VOCABULARY - 1), max_size=MOST_ENDS)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.lists(st.integers(0, VOCABULARY - 1), min_size=ROWS, max_size=ROWS),
    starts=st.lists(st.integers(0, 50), min_size=ROWS, max_size=ROWS),
    count=st.integers(1, MOST_TOKENS),
    ends=st.lists(a_row, min_size=ROWS, max_size=ROWS),
    alive=st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
    part=st.integers(0, 1),
)
def test_a_loop_is_one_step_after_another(
    tokens: list[int], starts: list[int], count: int, ends: list[list[int]], alive: list[bool], part: int
) -> None:
    after = np.full((ROWS, MOST_ENDS), -1, np.int32)
    for row, ids in enumerate(ends):
        after[row, : len(ids)] = ids
    sampling = TokenLoop.once(ROWS).sampling._replace(number=np.arange(ROWS, dtype=np.int32))
    loop = TokenLoop(np.int32(count), np.array(alive), after, sampling)
    # Rows that are not used are not alive, whatever is known of them.
    counts = np.array([1, part, 1], np.int32)
    inputs = {"tokens": np.array(tokens, np.int32), "starts": np.array(starts, np.int32), "counts": counts}
    alive = [alive[0], alive[1] and part == 1, alive[2]]
    logits, cache, written = run(np.int32(7), np.ones(ROWS, np.int32), inputs, loop)
    want, last, left, held = by_hand(tokens, starts, count, ends, alive)
    for row in range(ROWS):
        found = np.asarray(written.tokens)[:, row]
        assert found[: len(want[row])].tolist() == want[row]
        assert (found[len(want[row]) :] == -1).all()
    assert np.asarray(written.last).tolist() == last
    assert np.asarray(written.alive).tolist() == left
    assert np.asarray(cache).tolist() == held
    assert written.steps == max(map(len, want))
    for row in range(ROWS):
        if len(want[row]) == written.steps and want[row]:
            assert int(np.asarray(logits)[row].argmax()) == want[row][-1]


def test_a_loop_keeps_no_weights_in_another_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """What XLA finds to be the same in each round of a loop, such as a converted table, it computes before it."""
    wide: dict[str, Any] = {"model.vocab_size": 4000, "model.embed_dim": 64, "model.mlp_dim": 128}
    low = {"precision.compute_dtype": "bfloat16", "precision.param_dtype": "bfloat16"}
    model = ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | wide | low))
    sizes = EngineSizes.of(model, max_batch=1, page_size=16)

    def temporary() -> int:
        made: list[Any] = []
        programs = Programs(
            model,
            layers_apart(model, model.params),
            model.state,
            writable=4000,
            make=lambda _, lowered: made.append(lowered.compile()),
        )
        shape = sizes.plain[0]
        programs.to_compile([shape], programs.describe_cache(sizes), sizes.inputs)[1][0]()
        return made[0].memory_analysis().temp_size_in_bytes

    loop = temporary()
    monkeypatch.setattr(engine_programs, "several_tokens", lambda step, _: one_token(step))
    alone = temporary()
    # The table has 512 kB; the logits of a row, 16.
    assert loop - alone < 64e3


def test_a_loop_knows_the_rows_that_are_used_and_what_each_asks_for() -> None:
    sampling = Sampling(temperature=0.5, top_k=3)
    request = Request((1, 2, 3), sampling=sampling, stop_tokens=frozenset(range(100)))
    text: Any = SimpleNamespace(request=request, seed=9, ends=request.stop_tokens)
    # The prompt and four tokens; the step reads the last.
    shape = StepShape(4, 0, 1)
    loop = SIZES.loop(shape, [StepPiece(text, 2, 1, 6, True)], 5)
    assert (int(loop.tokens), loop.alive.tolist()) == (5, [False, False, True, False])
    # As many of its ends as there is room for.
    assert (loop.ends[2] >= 0).all()
    assert (loop.ends[[0, 1, 3]] < 0).all()
    assert [float(array[2]) for array in loop.sampling] == [0.5, 3, 1, 0, 9, 4]
    assert (loop.sampling.temperature[[0, 1, 3]] == 0).all()
    # Beside prompts: the first token follows the prompt.
    mixed = SIZES.loop(StepShape(1, 2, 8), [StepPiece(text, -2, 3, 0, True)], 1)
    assert mixed.alive.tolist() == [False, False, True]
    assert mixed.sampling.number.tolist() == [0, 0, 0]
    assert mixed.sampling.seed.tolist() == [0, 0, 9]


def test_slow_steps_are_taken_one_at_a_time_and_fast_ones_together() -> None:
    now = [100.0]
    times, shape, other = StepTimes(lambda: now[0]), StepShape(1, 0, 1), StepShape(4, 0, 1)
    assert times.at_once(shape) == 1
    started = now[0]
    for _ in range(8):  # five at once, each asked for before those before it have finished
        now[0] += 0.0245
        times.finished(shape, started, 5)
        started = now[0] - 0.02
    assert times.at_once(shape) == 4
    assert times.at_once(other) == 1
    times.finished(shape, now[0], 0)  # none was computed: nothing is learned
    assert times.at_once(shape) == 4
    for _ in range(12):
        now[0] += 0.001
        times.finished(shape, now[0] - 0.0001, 1)
    assert times.at_once(shape) == MOST_TOKENS
    for _ in range(12):
        now[0] += 0.5
        times.finished(shape, now[0] - 0.5, 1)
    assert times.at_once(shape) == 1

"""Serving plans: arithmetic, the search for the largest batch, what is printed, and what is refused."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from emulation import emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from tpu_compiler import needs_libtpu

from capibara.cli import main
from capibara.config import ModularModelConfig
from capibara.core.flops import decoding_flops
from capibara.plan import CompilationError, DoesNotFitError, PlanError, parse_slice
from capibara.plan.compiler import CompiledProgram, ProgramCache, compile_program
from capibara.plan.serving import UnreachableTargetError, plan_serving
from capibara.plan.serving.capacity import Measured, MeshSearch
from capibara.plan.serving.task import ServingTask
from capibara.plan.time import StepTime

SUPPORT = Path(__file__).parents[1] / "support"


def tiny(*more: str) -> ModularModelConfig:
    return ModularModelConfig.from_toml(
        "demo",
        ["model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=2",
         "model.vocab_size=512", "model.scan_layers=scan", *more],
    )  # fmt: skip


def production() -> ModularModelConfig:
    return ModularModelConfig.from_toml("production/tpu_v4")


# ---- by arithmetic --------------------------------------------------------------------------------------------


def test_bytes_of_weights_and_cache_by_hand():
    task = ServingTask(production(), "bfloat16", 512, 128)
    # Keys and values: 24 layers × 8 heads × 128 features × 640 places × 2 bytes.
    assert task.cache_bytes_per_request == 2 * 24 * 8 * 128 * 640 * 2
    per_layer = 2 * 2048 * 16 * 128 + 2 * 2048 * 8 * 128 + 3 * 2048 * 5632 + 2 * 2048
    assert task.weight_bytes == 2 * (24 * per_layer + 32768 * 2048 + 2048)
    assert ServingTask(production(), "float32", 512, 128).weight_bytes == 2 * task.weight_bytes
    whole = task.rough((("data", 1), ("model", 1)))
    quarter = task.rough((("data", 1), ("model", 4)))
    assert whole.row == task.cache_bytes_per_request
    assert quarter.row == whole.row // 4
    # Norms are not divided: a little more than a quarter.
    assert whole.weights / 4 < quarter.weights < whole.weights / 4 * 1.01
    # Parameters are whole on each device along "data".
    assert task.rough((("data", 4), ("model", 1))).weights == whole.weights


def test_the_cache_of_latent_attention_is_the_latents():
    latent = ["model.num_kv_heads=4", "latent.kv_rank=32", "latent.rotary_dim=8", "latent.head_dim=16"]
    config = tiny(*latent, "latent.value_dim=24")
    task = ServingTask(config, "bfloat16", 48, 16)
    assert task.cache_bytes_per_request == 2 * (32 + 8) * 64 * 2
    # A token over 64 places, by hand: four heads of 24 features, values of 24.
    weights = 64 * 4 * 24 + 64 * 40 + 32 * 4 * (16 + 24) + 4 * 24 * 64
    mlp = 3 * 64 * config.model.resolved_mlp_dim
    places = 4 * (32 + 8 + 32) * 64  # scores against the cache, and its mean
    assert decoding_flops(config.model, 64) == 2 * (2 * (weights + mlp + places) + 64 * 512)
    # The heads are divided, the cache is whole on each device.
    whole, half = (task.rough((("data", 1), ("model", n))) for n in (1, 2))
    assert whole.row == half.row
    assert half.weights < whole.weights


def test_state_spaces_hold_the_same_for_any_length():
    config = tiny("model.pattern=ssm")
    short, long = (ServingTask(config, "bfloat16", n, 16).cache_bytes_per_request for n in (16, 4096))
    assert short == long > 0


def test_without_a_compiler_figures_are_arithmetic_and_say_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CAPIBARA_LIBTPU", str(tmp_path))
    found = plan_serving(production(), "v5e:2x2", prompt_length=512, output_length=128)
    assert found.best.source == "analytic"
    assert "nothing was compiled" in str(found)
    assert any("CAPIBARA_LIBTPU" in note for note in found.notes)
    json.dumps(found.to_json(), allow_nan=False)


def test_one_token_takes_at_least_the_reading_of_weights_and_cache():
    found = plan_serving(production(), "v4:2x2x1", prompt_length=512, output_length=128, compile=False)
    point = found.best
    held = point.decode_memory["parameters"] + point.decode_memory["cache"]
    assert point.target.chip.hbm_bandwidth is not None
    assert point.seconds_per_token >= held / point.target.chip.hbm_bandwidth
    assert point.hbm_bytes <= point.target.usable_hbm_bytes
    # One more row a device would not fit.
    task = ServingTask(production(), "bfloat16", 512, 128)
    rows = point.concurrency // dict(point.mesh)["data"]
    assert task.rough(point.mesh).hbm_bytes(rows + 1) > point.target.usable_hbm_bytes


def test_a_batch_from_its_parts():
    found = plan_serving(production(), "v4:2x2x1", prompt_length=512, output_length=128, compile=False)
    p = found.best
    seconds = math.ceil(p.concurrency / p.group) * p.prefill.seconds + 127 * p.decode.seconds
    assert p.tokens_per_second == pytest.approx(p.concurrency * 128 / seconds)
    assert p.usd_per_hour is not None
    assert p.usd_per_million_tokens == pytest.approx(p.usd_per_hour / (p.tokens_per_second * 3600) * 1e6)


@pytest.mark.parametrize("limit", [2.0, 5.0, 12.0])
def test_targets_cost_requests(limit):
    free = plan_serving(production(), "v5e:2x2", prompt_length=512, output_length=128, compile=False)
    asked = plan_serving(
        production(),
        "v5e:2x2",
        prompt_length=512,
        output_length=128,
        compile=False,
        latency_ms_per_token=limit,
    )
    assert asked.best.seconds_per_token <= limit / 1e3 < free.best.seconds_per_token
    assert asked.best.concurrency < free.best.concurrency
    assert asked.options[0].largest is not None
    assert "at target" in str(asked)


def test_first_tokens_bound_the_batch_too():
    found = plan_serving(
        production(),
        "v5e:2x2",
        prompt_length=512,
        output_length=128,
        compile=False,
        time_to_first_token_ms=100,
    )
    assert found.best.time_to_first_token <= 0.1
    assert found.options[0].largest is not None
    assert found.options[0].largest.time_to_first_token > 0.1


def test_of_several_slices_the_cheapest_comes_first(tmp_path):
    path = tmp_path / "prices.toml"
    rows = [
        f'[[price]]\nchip = "{chip}"\nregion = "home"\nterm = "on-demand"\nusd_per_chip_hour = {usd}\n'
        'as_of = 2026-01-01\nsource = "a contract"\n'
        for chip, usd in (("v4", 0.01), ("v5e", 50.0))
    ]
    path.write_text("\n".join(rows))
    slices = ["v5e:2x2", "v4:2x2x1"]
    ours = plan_serving(
        production(), slices, prompt_length=512, output_length=128, compile=False, prices=path
    )
    assert [option.target.text for option in ours.options] == ["v4:2x2x1", "v5e:2x2"]
    prices: list[Any] = [o.at_target.usd_per_million_tokens for o in ours.options if o.at_target]
    assert prices == sorted(prices)
    theirs = plan_serving(production(), slices, prompt_length=512, output_length=128, compile=False)
    assert theirs.best.target.text == "v5e:2x2"


def test_without_slices_the_usual_ones_are_compared():
    found = plan_serving(production(), prompt_length=512, output_length=128, compile=False)
    assert {option.target.generation for option in found.options} == {"v4", "v5e", "v5p", "v6e"}


# ---- the search -----------------------------------------------------------------------------------------------


class Imagined(MeshSearch):
    """A search whose compiler is a formula, with steps of eight rows as tiles have them."""

    fixed = 300
    row = 17
    step = 8
    base_time = 1.0
    row_time = 0.01

    def _all(self, known: Any, job: Any, what: str, rows: tuple[int, ...]) -> list[Measured]:
        for n in dict.fromkeys(rows):
            if n in known:
                continue
            assert self.budget > 0
            needed = self.fixed + self.row * (-(-n // self.step) * self.step)
            seconds = self.base_time + self.row_time * n
            time = StepTime(seconds, seconds, seconds, seconds, 0, 0, 0, ()) if needed <= self.limit else None
            memory = SimpleNamespace(
                total=needed,
                kinds={"parameters": self.fixed},
                arguments=needed,
                temporaries=0,
                outputs=0,
                aliased=0,
            )
            program: Any = SimpleNamespace(memory=memory, program_hash="", versions={})
            known[n] = Measured(n, program, needed, time)
            self.budget -= 1
            self.compiled += 1
        return [known[n] for n in rows]


def imagined(limit: int, most: int = 4096, budget: int = 12, **figures: float) -> Imagined:
    task = ServingTask(tiny(), "bfloat16", 64, 64)
    mesh = (("data", 1), ("model", 4))
    search = Imagined(task, parse_slice("v5e:2x2"), mesh, limit, budget, most)
    for name, value in figures.items():
        setattr(search, name, value)
    return search


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 100_000),
    st.integers(1, 400),
    st.integers(0, 10_000),
    st.sampled_from([1, 8]),
)
def test_the_largest_that_fits_is_found_within_three_percent(limit, row, fixed, step):
    search = imagined(limit, row=row, fixed=fixed, step=step, budget=40)
    found = search.largest()
    best = max((n for n in range(1, 4097) if fixed + row * (-(-n // step) * step) <= limit), default=0)
    if best == 0:
        assert found is None
        return
    assert found is not None
    assert found.concurrency <= best
    assert found.concurrency >= best * 0.96 - step
    assert found.hbm_bytes <= limit


def test_few_compilations_are_enough_where_memory_is_a_line():
    search = imagined(50_000, step=1, fixed=1000, row=37, budget=40)
    found = search.largest()
    assert found is not None
    assert found.concurrency == (50_000 - 1000) // 37
    # Decoding at two sizes or three, the answer, and its prefill.
    assert search.compiled <= 6


@settings(max_examples=60, deadline=None)
@given(st.floats(0.5, 30), st.floats(0.001, 0.5))
def test_the_largest_that_is_fast_enough(latency, row_time):
    search = imagined(30_000, step=1, row_time=row_time, budget=60)
    largest = search.largest()
    assert largest is not None
    found = search.within(largest, latency, None)
    best = max((n for n in range(1, largest.concurrency + 1) if 1 + row_time * n <= latency), default=0)
    if best == 0:
        assert found is None
        fastest = search.fastest()
        assert fastest is not None
        assert fastest.seconds_per_token > latency
        return
    assert found is not None
    assert found.seconds_per_token <= latency
    assert best * 0.96 - 1 <= found.concurrency <= best


def test_without_targets_the_batch_with_the_most_tokens_counts():
    even = imagined(50_000, step=1, row_time=0.001)
    largest = even.largest()
    assert largest is not None
    assert even.busiest(largest) == largest

    class Worse(Imagined):
        """The time of a token grows with the square of the rows."""

        def _all(self, known: Any, job: Any, what: str, rows: tuple[int, ...]) -> list[Measured]:
            self.row_time = 1e-4 * max(rows)
            return super()._all(known, job, what, rows)

    worse = Worse(even.task, even.target, even.mesh, 50_000, 12, 4096)
    largest = worse.largest()
    assert largest is not None
    best = worse.busiest(largest)
    assert best.concurrency < largest.concurrency
    assert best.tokens_per_second > largest.tokens_per_second


def test_a_budget_is_kept():
    for budget in range(4, 9):
        search = imagined(99_999, step=8, budget=budget)
        found = search.largest()
        if found is not None:
            search.within(found, 5.0, None)
            search.busiest(found)
        assert search.compiled <= budget


class Prefilling(Imagined):
    """A prefill takes more than decoding, and its rows are padded to tiles of its own."""

    extra = 0
    tile = 8

    def _all(self, known: Any, job: Any, what: str, rows: tuple[int, ...]) -> list[Measured]:
        fixed, step = self.fixed, self.step
        if what == "prefill":
            self.fixed, self.step = fixed + self.extra, self.tile
        try:
            return super()._all(known, job, what, rows)
        finally:
            self.fixed, self.step = fixed, step


def prefilling(limit: int, budget: int, **figures: int) -> Prefilling:
    plain = imagined(limit)
    search = Prefilling(plain.task, plain.target, plain.mesh, limit, budget, 4096)
    for name, value in figures.items():
        setattr(search, name, value)
    return search


def test_fewer_requests_are_tried_until_the_prefill_fits():
    # Decoding fits with 2,287 rows; a prefill takes ten bytes more and pads its rows to tiles of 128, so that one row
    # less saves nothing.
    search = prefilling(31_240, budget=10, row=13, fixed=1_500, step=1, extra=10, tile=128)
    found = search.largest()
    assert found is not None
    assert found.hbm_bytes <= 31_240
    # The largest is 2,176 rows: 17 tiles.
    assert 0.85 * 2_176 <= found.concurrency <= 2_176
    assert search.compiled <= 10


@settings(max_examples=100, deadline=None)
@given(
    limit=st.integers(1_000, 100_000),
    row=st.integers(1, 400),
    fixed=st.integers(0, 10_000),
    extra=st.integers(0, 20_000),
    tile=st.sampled_from([1, 8, 64, 256]),
    budget=st.integers(4, 20),
)
def test_what_is_found_fits_whatever_a_prefill_takes(limit, row, fixed, extra, tile, budget):
    search = prefilling(limit, budget, row=row, fixed=fixed, extra=extra, tile=tile)
    found = search.largest()
    assert search.compiled <= budget
    if found is not None:
        assert found.hbm_bytes <= limit
    least = fixed + row * max(8, tile + extra // row + 1)
    if budget >= 10 and least * 4 <= limit:
        assert found is not None


# ---- compiled -------------------------------------------------------------------------------------------------


@needs_libtpu
def test_a_prefill_compiles_and_its_memory_is_weights_and_cache(tmp_path):
    task = ServingTask(tiny(), "bfloat16", 32, 32)
    job = task.prefill_job(parse_slice("v5e:2x2"), (("data", 2), ("model", 2)), 3)
    assert (job.params["rows"], job.params["group"]) == (6, 6)
    program = compile_program(job, cache=ProgramCache(tmp_path))
    assert program.memory is not None, program.message
    # Three requests on each half of the data axis, one of two heads: keys and values of two layers, and the position.
    assert program.memory.kinds["cache"] == 3 * 2 * 2 * 64 * 16 * 2 + 4
    assert program.memory.aliased >= program.memory.kinds["cache"]  # donated
    rough = task.rough((("data", 2), ("model", 2)))
    assert program.memory.arguments == pytest.approx(rough.weights + 3 * rough.row, rel=0.1)


@needs_libtpu
@pytest.mark.slow
def test_compiled_for_a_slice_that_is_not_here(tmp_path):
    """What is reported was compiled: the largest fits, is within its limit, and has weights and cache in it."""
    seen = []
    found = plan_serving(
        tiny(),
        "v5e:2x2",
        prompt_length=32,
        output_length=32,
        mesh={"data": 2, "model": 2},
        max_compiles=5,
        max_concurrency=4,
        cache=tmp_path,
        progress=lambda event, words, program: seen.append((event, words)),
    )
    point = found.best
    assert point.source == "compiler"
    assert point.concurrency == 4
    assert point.versions is not None
    assert point.versions["libtpu"]
    assert all(len(digest) == 64 for digest in point.program_hashes)
    assert point.decode_memory["parameters"] > 0
    # Two requests on each half of the data axis, one of two heads: keys and values of two layers.
    assert point.decode_memory["cache"] >= 2 * 2 * 2 * 64 * 16 * 2
    assert point.hbm_bytes <= point.target.usable_hbm_bytes
    assert 0 < point.decode.low <= point.seconds_per_token <= point.decode.high
    assert point.decode.communication > 0  # all-reduces over model
    assert ("done", "v5e:2x2, data 2 × model 2: prefill, 4 requests") in seen
    assert "the TPU compiler" in str(found)


@needs_libtpu
@pytest.mark.slow
def test_decoding_holds_its_cache_once_and_copies_none_of_it():
    """Neither the loop over layers nor the order in which products want their operands makes a second one."""
    task = ServingTask(tiny("model.max_sequence_length=4096"), "bfloat16", 2048, 2048)
    program = compile_program(task.decode_job(parse_slice("v5e:2x2"), (("data", 4), ("model", 1)), 256))
    assert program.memory is not None, program.message
    cache = program.memory.kinds["cache"]
    assert cache > 2**28
    assert program.memory.aliased >= cache
    assert program.memory.temporaries < cache / 16
    # Keys and values of both layers, 256 rows and 2 heads of 4096 places: what has this shape is written in place.
    whole = re.findall(r"= bf16\[2,256,2,4096,\d+\]\S* ([a-z-]+)\(", program.text)
    assert "dynamic-update-slice" in whole
    assert not {"copy", "copy-start", "transpose", "concatenate"} & set(whole), whole


def served(*arguments: str) -> dict[str, Any]:
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": emulated(4),
    }
    done = subprocess.run(
        [sys.executable, str(SUPPORT / "served_tokens.py"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("attention",), ("ssm,attention",)])
def test_the_programs_give_the_tokens_of_the_plain_model(arguments):
    """Prefill group by group, rows put in their places on a mesh of 2 × 2, then decoding."""
    tokens = served(*arguments)
    assert tokens["served"] == tokens["plain"]
    assert len({tuple(row) for row in tokens["served"]}) > 1


# ---- refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_length": 0}, "prompt_length=0 must be a number of tokens"),
        ({"output_length": 1.5}, "output_length=1.5 must be a number of tokens"),
        ({"prompt_length": 2048, "output_length": 1}, "max_sequence_length=2048"),
        ({"dtype": "bfloat61"}, "dtype='bfloat61' must be one of.*Did you mean"),
        ({"latency_ms_per_token": 0}, "latency_ms_per_token=0 must be"),
        ({"time_to_first_token_ms": float("nan")}, "time_to_first_token_ms=nan must be"),
        ({"max_compiles": 3}, "max_compiles=3 must be an integer of at least 4"),
        ({"workers": 0}, "workers=0 must be an integer of at least 1"),
        ({"mesh": {"data": 4}}, "sizes of 'data' and 'model'"),
        ({"mesh": {"data": 3, "model": 1}}, "data × model = 4 × 1, 2 × 2, 1 × 4"),
        ({"topology": []}, "names no slice"),
        ({"topology": 7}, "topology=7"),
        ({"topology": "v5e:2x2x2"}, "v5e"),
        ({"memory_limit_gb": 0}, "memory_limit_gb=0"),
        ({"config": 3}, "config is int"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(changes, message):
    given: dict[str, Any] = {
        "config": production(),
        "topology": "v5e:2x2",
        "prompt_length": 512,
        "output_length": 128,
    }
    given |= changes
    config, topology = given.pop("config"), given.pop("topology")
    with pytest.raises(PlanError, match=message):
        plan_serving(config, topology, compile=False, **given)


def test_nothing_fits():
    with pytest.raises(
        DoesNotFitError, match=r"(?s)nothing fits.*weights 2.23 GiB.*v5e:2x2|v5e:2x2.*weights"
    ):
        plan_serving(
            production(), "v5e:2x2", prompt_length=512, output_length=128, compile=False, memory_limit_gb=0.1
        )


def test_a_target_that_nothing_reaches():
    with pytest.raises(
        UnreachableTargetError, match=r"(?s)0.01 ms a token.*v5e:2x2.*ms a token.*1 requests"
    ) as info:
        plan_serving(
            production(),
            "v5e:2x2",
            prompt_length=512,
            output_length=128,
            compile=False,
            latency_ms_per_token=0.01,
        )
    assert isinstance(info.value, ValueError)


# ---- the command line -----------------------------------------------------------------------------------------

SERVE = ["plan", "--serve", "--config", "production/tpu_v4", "--topology", "v5e:2x2,v4:2x2x1", "--no-compile"]
LENGTHS = ["--prompt-length", "512", "--output-length", "128"]


def test_the_command_line(capsys):
    assert main([*SERVE, *LENGTHS, "--latency-ms", "5", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [option["topology"] for option in printed["options"]] == ["v5e:2x2", "v4:2x2x1"]
    assert all(option["at_target"]["seconds_per_token"] <= 0.005 for option in printed["options"])
    assert main([*SERVE, *LENGTHS]) == 0
    table = capsys.readouterr().out
    assert "…" not in table
    assert "nothing was compiled" in table
    assert main([*SERVE, *LENGTHS, "--latency-ms", "0.01"]) == 1
    assert "no slice reaches" in capsys.readouterr().err
    assert main([*SERVE, *LENGTHS, "--memory-limit", "0.1", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SERVE, "--prompt-length", "4"], "--serve needs --output-length"),
        ([*SERVE, *LENGTHS, "--lock", "x"], "--lock cannot be combined with --serve"),
        (["plan", "--latency-ms", "4"], "--latency-ms is for serving plans"),
        ([*SERVE, "--prompt-length", "0", "--output-length", "1"], "prompt_length=0"),
    ],
)
def test_wrong_options_are_refused(arguments, message, capsys):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_nothing_goes_on_compiling_behind_an_error(monkeypatch):
    """While the error is looked at, too: its traceback holds the frame that asked for the programs."""
    closed = []

    def compile_programs(jobs, **_):
        try:
            for number, _ in enumerate(jobs):
                yield number, CompiledProgram(status="error", message="ValueError: broken")
        finally:
            closed.append(True)

    monkeypatch.setattr("capibara.plan.serving.capacity.compile_programs", compile_programs)
    target = parse_slice("v5e:2x2")
    task = ServingTask(production(), "bfloat16", 64, 16)
    mesh = (("data", 2), ("model", 2))
    search = MeshSearch(
        task=task, target=target, mesh=mesh, limit=target.usable_hbm_bytes, budget=9, most_rows=64
    )
    with pytest.raises(CompilationError, match="ValueError: broken") as error:
        search.decode(1, 2)
    assert error.tb is not None
    assert closed == [True]

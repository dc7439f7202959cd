"""Profiles against closed forms, an outside clock, a known allocation; and traces that are not complete."""

from __future__ import annotations

import contextlib
import gc
import gzip
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import emulated
from hypothesis import given
from hypothesis import strategies as st
from jax.profiler import ProfileData
from other_process import run_apart

from capibara.observe.profile import (
    Operation,
    Profile,
    ProfileError,
    TpuPerformanceProfiler,
    TpuProfiler,
    diff_profiles,
)
from capibara.observe.profile import capture as capture_module
from capibara.observe.profile import operations as operations_module
from capibara.observe.profile import programs as programs_module
from capibara.observe.profile.modules import module_number
from capibara.observe.profile.programs import known_program
from capibara.observe.profile.trace import find_trace, read_trace

pytestmark = pytest.mark.usefixtures("without_the_persistent_cache")


def layers(x, weights):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]


def attention(q):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, q)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), q)


def convolution(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def while_loop(x, n):
    return jax.lax.fori_loop(0, n, lambda _, h: jnp.tanh(h @ x), x)


def branch(x, n):
    return jax.lax.cond(n > 3, lambda h: h @ h @ h, lambda h: h + 1, x)


def equal_work(x, n):
    return jax.lax.cond(n > 3, lambda h: jnp.sin(h @ h), lambda h: jnp.cos(h @ h), x)


def switched(x, kinds):
    """Of three alternatives with 0, 1 and 2 products, one for each number."""
    alternatives = [lambda h: h + 1, lambda h: jnp.tanh(h @ h), lambda h: jnp.sin(h @ h) @ h]
    return jax.lax.scan(lambda h, kind: (jax.lax.switch(kind, alternatives, h), None), x, kinds)[0]


def ones(*shape):
    return jnp.ones(shape)


# A multiply-add is two operations. Loops whose bound is an argument, and branches: what really ran.
CASES = {
    "product": (lambda a, b: a @ b, (ones(96, 160), ones(160, 224)), 2 * 96 * 160 * 224),
    "matrix and vector": (lambda a, b: a @ b, (ones(96, 160), ones(160)), 2 * 96 * 160),
    "complex product": (
        lambda a: a @ a,
        (np.full((48, 48), 1 + 1j, np.complex64),),
        8 * 48**3,
    ),
    "attention": (attention, (ones(2, 64, 3, 32),), 4 * 2 * 3 * 64 * 64 * 32),
    "scan over layers": (layers, (ones(16, 48), ones(5, 48, 48)), 5 * 2 * 16 * 48 * 48),
    "gradient of it": (
        jax.grad(lambda x, w: layers(x, w).sum(), argnums=(0, 1)),
        (ones(16, 48), ones(5, 48, 48)),
        3 * 5 * 2 * 16 * 48 * 48,
    ),
    "convolution": (convolution, (ones(2, 20, 20, 4), ones(3, 3, 4, 8)), 2 * 2 * 18 * 18 * 9 * 4 * 8),
    "loop with a bound in an argument": (while_loop, (ones(64, 64), 7), 7 * 2 * 64**3),
    "branch taken": (branch, (ones(64, 64), 5), 2 * 2 * 64**3),
    "branch not taken": (branch, (ones(64, 64), 1), 0),
    "cheaper branch": (
        lambda x, n: jax.lax.cond(n > 3, lambda h: h @ h @ h, lambda h: h @ h, x),
        (ones(64, 64), 1),
        2 * 64**3,
    ),
    "one of two branches with the same work": (equal_work, (ones(64, 64), 5), 2 * 64**3),
    "the other of them": (equal_work, (ones(64, 64), 1), 2 * 64**3),
    "alternatives in a scan": (
        switched,
        (ones(64, 64), np.array([0, 1, 2, 2, 1, 0, 1], np.int32)),
        7 * 2 * 64**3,
    ),
    "a loop that XLA makes one kernel": (
        lambda x: jax.lax.fori_loop(0, 10, lambda i, h: h + i, x),
        (ones(4),),
        0,
    ),
    "random numbers": (
        lambda key: jax.random.normal(key, (100,)),
        (np.array([0, 7], np.uint32),),
        0,
    ),
    "no product": (lambda x: jnp.tanh(x).sum(), (ones(64, 64),), 0),
}


WRONG: dict[str, Any] = {"capture_flops": 1}


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine can reach is measured once in a process, which takes a second; the tests do not need it."""
    monkeypatch.setattr(capture_module, "_measured", lambda dtype: (1e11, 1e10))


@pytest.mark.thin(3)
@pytest.mark.parametrize("case", CASES)
def test_flops_are_the_closed_form(case: str):
    function, arguments, expected = CASES[case]
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*arguments))
    profiler = TpuPerformanceProfiler()
    with profiler.profile_context(case):
        jax.block_until_ready([compiled(*arguments) for _ in range(3)])
    found = profiler.profile()
    assert found.flops == 3 * expected
    assert found.programs[0].runs == 3
    assert found.compiled == 0
    assert found.devices == 1
    assert found.reasons == {}
    assert found.busy_seconds is not None
    assert 0 < found.busy_seconds <= 1.5 * found.wall_seconds
    assert found.communication_seconds == 0
    assert found.tflops == pytest.approx(3 * expected / found.wall_seconds / 1e12)
    assert sum(one.flops for one in found.operations) == found.flops


def test_kernels_of_capibara_say_what_they_compute():
    """Native code, of which XLA knows nothing: as counted from the function (`count_flops`)."""
    from capibara.measure import count_flops
    from capibara.ops.attention import flash_attention

    def step(q):
        return jax.lax.scan(lambda h, _: (flash_attention(h, h, h), None), q, None, length=3)[0]

    q = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 128, 32)), jnp.float32)
    compiled = jax.jit(step)
    compiled(q).block_until_ready()
    profiler = TpuPerformanceProfiler()
    with profiler.profile_context("kernel"):
        compiled(q).block_until_ready()
    assert profiler.profile().flops == count_flops(step, q).total == 3 * 4 * 2 * 4 * 128 * 128 * 32
    assert "flops" not in profiler.profile().reasons


def test_what_a_program_does_not_say_is_a_lower_bound():
    compiled = jax.jit(lambda x: jnp.linalg.qr(x)[0] @ x)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)
    compiled(x).block_until_ready()
    profiler = TpuPerformanceProfiler()
    with profiler.profile_context("factored"):
        compiled(x).block_until_ready()
    found = profiler.profile()
    assert found.flops is not None
    assert found.flops >= 2 * 64**3
    assert "do not say what they compute" in found.reasons["flops"]
    assert "at least" in str(found)


def test_time_is_that_of_an_outside_clock():
    profiler = TpuPerformanceProfiler()
    with profiler.profile_context("sleep"):
        began = time.perf_counter()
        time.sleep(0.3)
        outside = time.perf_counter() - began
    assert profiler.profile().wall_seconds == pytest.approx(outside, rel=0.03)


STAMPS: list[float] = []


def stamp(_: Any) -> np.ndarray:
    STAMPS.append(time.perf_counter())
    return np.zeros((), np.float32)


def stamped_products(x, n):
    """Products between two readings of the clock by the program itself."""
    kind = jax.ShapeDtypeStruct((), jnp.float32)
    x = x + jax.pure_callback(stamp, kind, x[0, 0])
    x = jax.lax.fori_loop(0, n, lambda _, h: jnp.tanh(h @ x), x)
    return x + jax.pure_callback(stamp, kind, x[0, 0])


@pytest.mark.parametrize("waited", [True, False], ids=["waited for", "dropped"])
def test_time_of_real_work_is_that_of_an_outside_clock(waited: bool):
    """Both clocks read the same interval, so that a busy machine makes it longer for both.

    What the region has beyond the work's own readings is starting a program; on a busy machine a thread may lose its
    processor just there, so that one of five must agree. The bounds hold for each.
    """
    compiled = jax.jit(stamped_products)
    x = ones(384, 384)
    compiled(x, 1).block_until_ready()
    began = time.perf_counter()
    compiled(x, 50).block_until_ready()
    turns = max(50, round(50 * 0.5 / (time.perf_counter() - began)))
    errors = []
    for _ in range(5):
        profiler = TpuPerformanceProfiler()
        STAMPS.clear()
        before = time.perf_counter()
        with profiler.profile_context("products"):
            inside = time.perf_counter()
            result = compiled(x, turns)
            if waited:
                result.block_until_ready()
            del result
        after = time.perf_counter()
        wall = profiler.profile().wall_seconds
        assert STAMPS[-1] - STAMPS[0] < wall < after - before
        assert wall > STAMPS[-1] - inside
        errors.append(wall / (STAMPS[-1] - inside) - 1)
        if errors[-1] < 0.03:
            break
    assert min(errors) < 0.03, errors


def test_two_programs_of_one_name_are_not_confused():
    profiler = TpuPerformanceProfiler()
    small, large = ones(32, 32), ones(96, 96)
    square = jax.jit(lambda x: x @ x)
    jax.block_until_ready([square(small), square(large)])
    with profiler.profile_context("both"):
        results = [square(small), square(large), square(large)]
        jax.block_until_ready(results)
    runs = {program.flops: program.runs for program in profiler.profile().programs}
    assert runs == {2 * 32**3: 1, 2 * 2 * 96**3: 2}


def test_two_programs_of_one_number_are_told_apart_by_their_operations(monkeypatch: pytest.MonkeyPatch):
    """One that was read from a file has the number that it had where it was compiled."""
    profiler = TpuPerformanceProfiler()
    square, other = jax.jit(lambda x: x @ x), jax.jit(lambda x: jnp.sort(x) + 1)
    x = ones(64, 64)
    jax.block_until_ready([square(x), other(x)])
    real = programs_module.HeldPrograms.by_number

    def mixed(self):
        found = real(self)
        everything = [one for mine in found.values() for one in mine]
        return dict.fromkeys(found, everything)

    monkeypatch.setattr(programs_module.HeldPrograms, "by_number", mixed)
    with profiler.profile_context("mixed"):
        jax.block_until_ready([square(x) for _ in range(3)])
    assert profiler.profile().flops == 3 * 2 * 64**3


def test_a_function_that_is_gone_is_known():
    profiler = TpuPerformanceProfiler()

    def inside() -> None:
        jax.jit(lambda x: (x * 3) @ x)(ones(48, 48)).block_until_ready()

    with profiler.profile_context("gone"):
        inside()
        gc.collect()
    found = profiler.profile()
    assert found.flops == 2 * 48**3
    assert found.compiled >= 1
    assert found.compile_seconds > 0


def test_source_lines():
    profiler = TpuPerformanceProfiler()
    compiled = jax.jit(layers)
    arguments = ones(16, 48), ones(5, 48, 48)
    compiled(*arguments).block_until_ready()
    with profiler.profile_context("lines"):
        compiled(*arguments).block_until_ready()
    products = [one for one in profiler.profile().operations if one.flops]
    line = layers.__code__.co_firstlineno + 1
    assert {one.source for one in products} == {f"{__file__}:{line}"}
    assert {one.count for one in products} == {5}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux keeps a high-water mark")
def test_memory_peak_is_that_of_a_known_allocation():
    gc.collect()
    held = np.ones(8_000_000, np.float32)  # 32 MB that JAX does not know of
    profiler = TpuPerformanceProfiler(
        capture_flops=False, capture_communication=False, capture_kernel_details=False
    )
    before = sum(array.nbytes for array in jax.live_arrays())
    with profiler.profile_context("allocation"):
        large = jax.device_put(np.ones(100_000_000, np.float32))
        large.block_until_ready()
        del large
    found = profiler.profile().peak_memory_bytes
    assert found is not None
    peak = found - before
    assert peak == pytest.approx(400e6, rel=0.05) or peak == pytest.approx(
        800e6, rel=0.05
    )  # with NumPy's own
    del held


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux keeps a high-water mark")
def test_memory_peak_has_what_a_program_needs_for_itself():
    """Its pages may be those of an earlier run, which the system already counts."""
    both = jax.jit(lambda x: (x @ x) @ (x @ x).T)
    x = ones(1448, 1448)
    analysis = both.lower(x).compile().memory_analysis()
    assert analysis is not None
    needed = analysis.temp_size_in_bytes
    assert needed > 0
    for _ in range(3):
        both(x).block_until_ready()
    profiler = TpuPerformanceProfiler()
    with profiler.profile_context("temporary"):
        both(x).block_until_ready()
    peak = profiler.profile().peak_memory_bytes
    assert peak is not None
    assert peak >= x.nbytes + needed


def test_without_a_trace():
    profiler = TpuPerformanceProfiler(
        capture_memory=False, capture_flops=False, capture_communication=False, capture_kernel_details=False
    )
    with profiler.profile_context("plain"):
        jnp.ones(8).block_until_ready()
    found = profiler.profile()
    assert found.events == 0
    assert found.perturbation is None
    for name in ("flops", "communication_seconds", "peak_memory_bytes", "busy_seconds"):
        assert getattr(found, name) is None
        assert found.reasons[name]
    assert "unknown: capture_flops=False" in str(found)
    assert profiler.get_metrics()["tflops"] is None


@pytest.mark.slow  # times of a real program, by turns
def test_a_region_without_a_trace_is_not_slower():
    profiler = TpuPerformanceProfiler(
        capture_flops=False, capture_communication=False, capture_kernel_details=False
    )
    step = jax.jit(lambda x: jnp.tanh(x @ x))
    x = ones(256, 256) / 256

    def work() -> float:
        began = time.perf_counter()
        for _ in range(60):
            step(x).block_until_ready()
        return time.perf_counter() - began

    work()
    within, without = [], []
    for _ in range(15):
        without.append(work())
        with profiler.profile_context("region"):
            within.append(work())
    # The least of each: other processes only make a region longer.
    assert min(within) <= 1.05 * min(without)


def test_metrics_in_percent_and_as_shares():
    profiler = TpuPerformanceProfiler()
    square = jax.jit(lambda x: x @ x)
    square(ones(64, 64)).block_until_ready()
    with profiler.profile_context("square"):
        square(ones(64, 64)).block_until_ready()
    simple, detailed = profiler.get_metrics("square"), profiler.get_detailed_metrics("square")
    found = profiler.profile()
    assert found.flops
    assert found.bytes
    assert detailed["compute_efficiency"] == pytest.approx(found.flops / found.wall_seconds / 1e11)
    assert detailed["memory_efficiency"] == pytest.approx(found.bytes / found.wall_seconds / 1e10)
    for name in ("compute_efficiency", "memory_efficiency"):
        assert simple[name] == pytest.approx(100 * detailed[name])
    json.dumps(detailed, allow_nan=False)


def test_kept_in_a_folder(tmp_path: Path):
    profiler = TpuPerformanceProfiler(trace_dir=tmp_path)
    square = jax.jit(lambda x: x @ x)
    square(ones(64, 64)).block_until_ready()
    for _ in range(2):  # the second replaces the first
        with profiler.profile_context("a b/../c"):
            square(ones(64, 64)).block_until_ready()
    (folder,) = tmp_path.iterdir()
    assert Profile.from_json((folder / "profile.json").read_text()) == profiler.profile()
    trace = find_trace(folder)
    assert ProfileData.from_file(str(trace)).planes is not None
    programs = trace.parent / "programs"
    (text,) = [path.read_text() for path in programs.iterdir() if "lambda" in path.name]
    assert sum(about.flops or 0 for about in known_program(text).operations.values()) == 2 * 64**3


def test_perfetto_opens_what_is_kept(tmp_path: Path):
    """It reads the trace-event format: events with a name, a beginning and a length, in microseconds."""
    profiler = TpuPerformanceProfiler(trace_dir=tmp_path)
    square = jax.jit(lambda x: x @ x)
    square(ones(64, 64)).block_until_ready()
    with profiler.profile_context("kept"):
        jax.block_until_ready([square(ones(64, 64)) for _ in range(3)])
    (path,) = tmp_path.glob("kept/plugins/profile/*/*.trace.json.gz")
    with gzip.open(path) as stream:
        events = json.load(stream)["traceEvents"]
    (product,) = [one for one in profiler.profile().operations if one.flops]
    seen = [one for one in events if one.get("args", {}).get("hlo_op") == product.name]
    assert len(seen) == product.count == 3
    assert all(one["ph"] == "X" and one["ts"] > 0 for one in seen)
    assert sum(one["dur"] for one in seen) == pytest.approx(1e6 * product.seconds, rel=0.5, abs=100)


def test_xprof_opens_what_is_kept(tmp_path: Path):
    tools = pytest.importorskip("xprof.convert.raw_to_tool_data")
    profiler = TpuPerformanceProfiler(trace_dir=tmp_path)
    with profiler.profile_context("kept"):
        jax.jit(lambda x: x @ x)(ones(64, 64)).block_until_ready()
    (path,) = tmp_path.glob("kept/plugins/profile/*/*.xplane.pb")
    for tool in ("overview_page", "hlo_stats", "trace_viewer@"):
        data, _ = tools.xspace_to_tool_data([str(path)], tool, {})
        assert data, tool


def test_profiles_do_not_lie_within_one_another():
    profiler = TpuPerformanceProfiler()
    with profiler.profile_context("outer"):
        with pytest.raises(ProfileError, match="being taken already"), profiler.profile_context("inner"):
            pass
        jnp.ones(8).block_until_ready()
    assert list(profiler.profiles) == ["outer"]


def test_an_exception_ends_the_trace_and_leaves_no_profile():
    profiler = TpuPerformanceProfiler()
    with pytest.raises(KeyError), profiler.profile_context("broken"):
        raise KeyError("mine")
    with pytest.raises(ProfileError, match="nothing was profiled yet"):
        profiler.get_metrics()
    with profiler.profile_context("next"):
        jnp.ones(8).block_until_ready()
    assert profiler.profile().name == "next"


def test_names_have_folders_of_their_own(tmp_path: Path):
    profiler = TpuPerformanceProfiler(
        capture_flops=False, capture_communication=False, capture_kernel_details=False, trace_dir=tmp_path
    )
    names = ("..", ".", "a b", "a_b", "a/b", "x" * 300)
    for name in names:
        with profiler.profile_context(name):
            pass
    found = [Profile.from_json(path.read_text()).name for path in tmp_path.glob("*/profile.json")]
    assert sorted(found) == sorted(names)
    assert [path.name for path in tmp_path.glob("*.json")] == []


def test_a_failure_at_the_end_leaves_no_trace_running(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    profiler = TpuPerformanceProfiler()

    def interrupted(restless: set[int]) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), profiler.profile_context("interrupted"):
        monkeypatch.setattr(capture_module, "settle", interrupted)
    monkeypatch.undo()
    with pytest.raises(ProfileError, match="End no trace"), profiler.profile_context("ended"):
        jax.profiler.stop_trace()
    kept = TpuPerformanceProfiler(trace_dir=tmp_path / "kept")
    with pytest.raises(ProfileError, match="could not be written"), kept.profile_context("x"):
        shutil.rmtree(tmp_path / "kept")
        (tmp_path / "kept").touch()
    (tmp_path / "file").touch()
    broken = TpuPerformanceProfiler(trace_dir=tmp_path / "file")
    with (
        pytest.raises(ProfileError, match="expected one that can be written to"),
        broken.profile_context("x"),
    ):
        pass
    with profiler.profile_context("next"):
        jnp.ones(8).block_until_ready()
    assert list(profiler.profiles) == ["next"]


def test_the_profiler_as_context():
    square = jax.jit(lambda x: x @ x)
    square(ones(64, 64)).block_until_ready()
    with TpuProfiler() as profiler:
        square(ones(64, 64)).block_until_ready()
        with pytest.raises(ProfileError, match="in use already"), profiler:
            pass
    assert profiler.generate_report()["total_flops"] == 2 * 64**3
    with profiler:
        square(ones(64, 64)).block_until_ready()
    assert profiler.profile.flops == 2 * 64**3


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: TpuPerformanceProfiler(**WRONG),
            "capture_flops: got 1, expected True or False",
        ),
        (
            lambda: TpuPerformanceProfiler().profile_context("  ").__enter__(),
            "name: got '  ', expected a text",
        ),
        (lambda: TpuPerformanceProfiler().profile_context(WRONG["capture_flops"]).__enter__(), "name: got 1"),
        (lambda: TpuProfiler().generate_report(), "nothing was profiled yet"),
        (lambda: find_trace("/proc/self/fdinfo"), "holds no trace"),
        (lambda: read_trace("/nowhere.xplane.pb", {}), "is not a file"),
        (lambda: Profile.from_json("[]"), "is not a profile"),
        (lambda: Profile.from_json("[" * 100_000), "is not a profile"),
        (lambda: Profile.from_json('{"format": 7}'), "another format"),
    ],
)
def test_bad_input(make, words: str):
    with pytest.raises(ProfileError, match=words.replace("(", r"\(")):
        make()


def test_a_name_that_is_not_there():
    profiler = TpuPerformanceProfiler(
        capture_flops=False, capture_communication=False, capture_kernel_details=False
    )
    with profiler.profile_context("forward"):
        pass
    with pytest.raises(ProfileError, match="forward"):
        profiler.get_metrics("forwards")


def test_an_incomplete_trace_is_refused(monkeypatch: pytest.MonkeyPatch):
    real = read_trace

    def dropping(*arguments):
        trace = real(*arguments)
        for key, (count, spent) in trace.counts.items():
            trace.counts[key] = (count - (count > 1), spent)
        return trace

    monkeypatch.setattr(operations_module, "read_trace", dropping)
    square = jax.jit(lambda x: x @ x)
    square(ones(64, 64)).block_until_ready()
    profiler = TpuPerformanceProfiler()
    words = r"incomplete.*ran 3 times, and 2 were recorded"
    with pytest.raises(ProfileError, match=words), profiler.profile_context("dropped"):
        jax.block_until_ready([square(ones(64, 64)) for _ in range(3)])


def test_the_number_of_a_module():
    # name: field 1, text; id: field 5; a field of 8 bytes that is passed over
    assert module_number(b"\x0a\x02ab\x31" + bytes(8) + b"\x28\xac\x02") == 300
    assert module_number(b"\x0a\x02ab") == 0


@given(st.binary(max_size=40))
def test_rubbish_in_place_of_a_module(data: bytes):
    with contextlib.suppress(ProfileError):  # "a message ends within a number"
        assert isinstance(module_number(data), int)


CACHED = """
import json, sys, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
from capibara.observe.profile import TpuPerformanceProfiler
square = jax.jit(lambda x: x @ x)
sizes = [64] if sys.argv[2] == "one" else [64, 96]
arrays = [jnp.ones((n, n)) for n in sizes]
jax.block_until_ready([square(x) for x in arrays])
profiler = TpuPerformanceProfiler()
with profiler.profile_context("cached"):
    jax.block_until_ready([square(arrays[0]) for _ in range(3)])
found = profiler.profile()
print("RESULT", json.dumps([found.flops, found.reasons.get("flops", "")]))
"""


@pytest.mark.slow
def test_programs_from_the_persistent_cache(tmp_path: Path):
    """They have other numbers in the trace than in the runtime's list: one is found, two like it are not guessed."""
    for _ in range(2):
        flops, reason = run_apart(CACHED, str(tmp_path), "one")
        assert (flops, reason) == (3 * 2 * 64**3, "")
    for _ in range(2):
        flops, reason = run_apart(CACHED, str(tmp_path), "two")
        assert flops is None
        assert "persistent cache, and 2 programs like" in reason


EMULATED = """
import json, warnings
warnings.simplefilter("error")
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from capibara.observe.profile import TpuPerformanceProfiler
mesh = Mesh(jax.devices(), ("d",))
put = lambda *spec: jax.device_put(jnp.ones((256, 256)), NamedSharding(mesh, P(*spec)))
f = jax.jit(lambda x, w: x @ w, out_shardings=NamedSharding(mesh, P()))
x, w = put(None, "d"), put("d", None)
f(x, w).block_until_ready()
profiler = TpuPerformanceProfiler()
with profiler.profile_context("sum"):
    for _ in range(3):
        y = f(x, w)
    y.block_until_ready()
found = profiler.profile()
kinds = {one.kind: one.count for one in found.operations}
print("RESULT", json.dumps([found.flops, found.devices, found.communication_seconds, found.wall_seconds, kinds]))
"""


def test_collectives_on_emulated_devices():
    flops, devices, exposed, wall, kinds = run_apart(EMULATED, XLA_FLAGS=emulated(4))
    assert flops == 3 * 2 * 256**3
    assert devices == 4
    assert 0 < exposed < wall
    assert kinds["collective"] == 12


ONE = Operation("jit_f", "fusion.1", "compute", "fusion", "jit(f)/dot", "a.py:3", "float32", 4, 0.4, 8, 8)


def profile_of(*operations: Operation, wall: float = 1.0) -> Profile:
    return Profile(
        name="x",
        platform="cpu",
        chip="cpu",
        devices=2,
        wall_seconds=wall,
        flops=0,
        bytes=0,
        busy_seconds=0.5,
        communication_seconds=0.0,
        peak_memory_bytes=None,
        peak_flops=None,
        peak_bandwidth=None,
        compiled=0,
        compile_seconds=0.0,
        events=1,
        perturbation=0.0,
        operations=operations,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"wall_seconds": 0},
        {"wall_seconds": float("nan")},
        {"wall_seconds": float("inf")},
        {"devices": 0},
        {"devices": 10**400},
        {"events": -1},
        {"flops": "many"},
        {"name": "red \x1b[31m"},
        {"name": "half \ud800"},
        {"reasons": {"flops": 3}},
        {"reasons": []},
        {"operations": [{**vars(ONE), "kind": "magic"}]},
        {"operations": [{**vars(ONE), "seconds": float("nan")}]},
        {"operations": [{"name": "x"}]},
        {"operations": 3},
        {"more": 1},
    ],
)
def test_a_profile_with_nonsense_is_refused(change: dict[str, Any]):
    data = {**json.loads(profile_of(ONE).to_json()), **change}
    with pytest.raises(ProfileError, match="is not a profile"):
        Profile.from_json(json.dumps(data))


def test_names_that_look_like_formulas_and_no_time_at_all(tmp_path: Path):
    from capibara.observe.profile.plot import plot_profile, write_page

    odd = replace(ONE, name=r"$\x{$", seconds=0.0)
    found = Profile.from_json(replace(profile_of(odd), name=r"a $\frac{$ b").to_json())
    assert "frac" in str(found)
    plot_profile(found, tmp_path / "a.png")
    write_page(found, tmp_path / "a.html")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_the_difference_of_two_profiles():
    one = ONE
    other = replace(one, name="fusion.2", source="a.py:9", seconds=0.2)
    before = profile_of(one, other)
    after = replace(
        profile_of(replace(one, name="fusion.7", seconds=1.4, count=6), other, wall=2.0), compiled=2
    )
    before, after = (replace(each, platform="tpu") for each in (before, after))
    found = diff_profiles(before, after)
    assert found.ratio == 2
    (change,) = found.changes
    assert (change.place, change.count_before, change.count_after) == ("a.py:3", 4, 6)
    assert change.seconds == pytest.approx(0.5)
    assert change.operations == ("fusion.1", "fusion.7")
    assert found.idle_seconds == pytest.approx(1.0)
    assert "100.0 % slower" in str(found)
    assert "a.py:3" in str(found)
    json.dumps(found.to_dict(), allow_nan=False)


def test_products_that_threads_share_are_as_long_as_they_take():
    """XLA on a CPU says that they end when they are given away: at many times the machine's FLOP/s."""

    @jax.jit
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)

    w, x = ones(512, 512), ones(1024, 512)
    step(w, x).block_until_ready()
    profiler = TpuPerformanceProfiler()
    with profiler.profile_context("products"):
        for _ in range(4):
            w = step(w, x)
        w.block_until_ready()
    profile = profiler.profile()
    products = [one for one in profile.operations if one.flops]
    assert len(products) == 2
    assert profile.peak_flops is not None
    rates = [one.flops / one.seconds / profile.peak_flops for one in products]
    assert max(rates) < 4, rates


def test_sorting_on_several_threads():
    sort = jax.jit(lambda x: jnp.sort(x, axis=-1))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(300, 3000)).astype("float32"))
    sort(x).block_until_ready()
    profiler = TpuPerformanceProfiler()
    with profiler.profile_context("sort"):
        sort(x).block_until_ready()
    profile = profiler.profile()
    (sorting,) = [one for one in profile.operations if one.opcode == "sort"]
    assert sorting.count == 1
    assert 0.5 * profile.wall_seconds < sorting.seconds <= profile.wall_seconds


THREADS_THAT_SPIN = """
import json, time
import jax, jax.numpy as jnp, jax.scipy.linalg as linalg
from capibara.observe.profile import TpuPerformanceProfiler
# LAPACK's own threads go on looking for work for a while.
factor = jax.jit(lambda a: linalg.cho_factor(a)[0])
a = jnp.eye(400) * 400 + 1
factor(a).block_until_ready()
profiler, ratios = TpuPerformanceProfiler(), []
for number in range(5):
    with profiler.profile_context("x"):
        start = time.perf_counter()
        time.sleep(0.2)
        factor(a).block_until_ready()
        spent = time.perf_counter() - start
    ratios.append(profiler.profile().wall_seconds / spent)
print("RESULT", json.dumps(ratios))
"""


def test_threads_of_other_libraries_are_not_part_of_the_time():
    """The region ends with its last operation: the wall time is that of an outside clock."""
    ratios = run_apart(THREADS_THAT_SPIN)
    # A median of five: one of them may be disturbed.
    assert sorted(ratios)[2] < 1.2


ONE_OF_EIGHT = """
import json
import jax, jax.numpy as jnp
from capibara.observe.profile import TpuPerformanceProfiler
f = jax.jit(lambda x: x @ x)
x = jnp.ones((600, 600))
f(x).block_until_ready()
profiler = TpuPerformanceProfiler()
with profiler.profile_context("x"):
    for _ in range(5):
        f(x).block_until_ready()
found = profiler.profile()
alone, everywhere = found.peak_flops, jax.pmap(lambda x: x @ x)
x = jnp.ones((8, 64, 64))
jax.block_until_ready(everywhere(x))
with profiler.profile_context("all"):
    jax.block_until_ready(everywhere(x))
shared = profiler.profile()
print("RESULT", json.dumps([found.devices, shared.devices, alone / shared.peak_flops]))
"""


def test_a_device_that_works_alone_has_all_cores():
    assert run_apart(ONE_OF_EIGHT, XLA_FLAGS=emulated(8)) == [1, 8, pytest.approx(8)]

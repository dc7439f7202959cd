"""Measured parameters: the file and what it survives, the look-up, what the problem then runs, and the measuring."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara import __version__
from capibara.ops import OpTypeError, OpValueError, explain, list_ops, tuner, tuning, tuning_cache, use_tuning
from capibara.ops import registry as registry_module
from capibara.ops.attention import flash_attention
from capibara.ops.registry import Implementation, Op, portable, public
from capibara.ops.scan import selective_scan
from capibara.ops.tuning import Tuned, Tuning, forced
from capibara.ops.tuning_cache import CacheError, Device, Entry, TuningWarning

DEVICE = Device("cpu", "a test's processor, 2 cores")
ENTRY = Entry(
    "xla", {"xla": {"block_size": 64}, "cpu": {"block_size": 32}}, {"xla": 1.5, "": 1.2}, 15, "0.10.2"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of measurements, which this process reads."""
    monkeypatch.setenv("CAPIBARA_TUNING", "1")
    monkeypatch.setenv("CAPIBARA_TUNING_DIR", str(tmp_path))
    use_tuning()
    yield tmp_path
    monkeypatch.undo()
    use_tuning()


def here(folder: Path) -> tuple[Path, Device]:
    path, device = tuning.tuning_file(folder)
    assert path is not None
    return path, device


def key_of(name: str, *args: Any, **kwargs: Any) -> str:
    op = list_ops()[name]
    assert op.tuning is not None
    problem, _ = op.prepare(*args, **kwargs)
    bucket = op.tuning.bucket(problem)
    assert bucket is not None
    return tuning.bucket_key(name, problem, bucket)


# The file.


def test_what_is_written_is_read(tmp_path):
    path = tuning_cache.cache_file(tmp_path / "new" / "folder", DEVICE)
    tuning_cache.write(path, DEVICE, {"op|float32|n=4": ENTRY})
    tuning_cache.write(path, DEVICE, {"op|float32|n=8": Entry()})
    assert tuning_cache.read(path, DEVICE) == {"op|float32|n=4": ENTRY, "op|float32|n=8": Entry()}
    tuning_cache.write(path, DEVICE, {"op|float32|n=4": Entry()})
    assert tuning_cache.read(path, DEVICE)["op|float32|n=4"] == Entry()
    assert [p.name for p in path.parent.iterdir() if not p.name.startswith(".")] == [path.name]


def test_no_file_is_no_entries_and_no_warning(tmp_path):
    assert tuning_cache.read(tmp_path / "none.json", DEVICE) == {}
    assert tuning_cache.read(tmp_path / "no folder" / "none.json", DEVICE) == {}


def test_kinds_of_devices_have_files_of_their_own():
    names = {
        tuning_cache.cache_file(Path(), Device(*each)).name
        for each in (
            ("cpu", "A B, 2 cores"),
            ("cpu", "A-B, 2 cores"),
            ("cuda", "A B, 2 cores"),
            ("tpu", "../../x/é"),
        )
    }
    assert len(names) == 4
    assert all(re.fullmatch(r"[a-z0-9-]+\.json", name) for name in names)


def change(*path: str | int, to: Any) -> Any:
    def do(content: Any) -> Any:
        inner = content
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = to
        return content

    return do


KEY = "op|float32|n=4"
BROKEN = {
    "another format": change("format", to=2),
    "a format that is a flag": change("format", to=True),
    "another version": change("capibara", to="0.0.1"),
    "another device": change("device", "kind", to="a better one"),
    "no object": lambda content: [content],
    "a field too many": change("more", to=1),
    "no entries": change("entries", to=None),
    "a key that is a path": change("entries", "../../etc/passwd", to={}),
    "an entry that is a number": change("entries", KEY, to=3),
    "an implementation that is no name": change("entries", KEY, "fastest", to="rm -rf"),
    "a parameter that is no name": change("entries", KEY, "parameters", "xla", to={"a b": 1}),
    "a fraction": change("entries", KEY, "parameters", "xla", "block_size", to=1.5),
    "a flag": change("entries", KEY, "parameters", "xla", "block_size", to=True),
    "a negative number": change("entries", KEY, "parameters", "xla", "block_size", to=-1),
    "a huge number": change("entries", KEY, "parameters", "xla", "block_size", to=1 << 40),
    "a list": change("entries", KEY, "parameters", "xla", to=[64]),
    "a gain of zero": change("entries", KEY, "gains", "xla", to=0),
    "a gain that is text": change("entries", KEY, "gains", "xla", to="1.5"),
    "rounds below zero": change("entries", KEY, "rounds", to=-1),
    "a surrogate": change("entries", KEY, "jax", to="\ud800"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_moved_aside_with_a_warning(what, tmp_path):
    path = tmp_path / "file.json"
    tuning_cache.write(path, DEVICE, {KEY: ENTRY})
    path.write_text(json.dumps(BROKEN[what](json.loads(path.read_text()))))
    with pytest.warns(TuningWarning, match="moved to"):
        assert tuning_cache.read(path, DEVICE) == {}
    assert not path.exists()
    assert path.with_name("file.json.broken").exists()
    tuning_cache.write(path, DEVICE, {KEY: ENTRY})
    assert tuning_cache.read(path, DEVICE) == {KEY: ENTRY}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"1" * 5000,
        b'{"format": NaN}',
        b" " * (tuning_cache.MAX_BYTES + 1),
    ],
    ids=["empty", "half", "bytes", "deep", "long number", "NaN", "large"],
)
def test_a_file_that_is_no_json_is_moved_aside(content, tmp_path):
    path = tmp_path / "file.json"
    path.write_bytes(content)
    with pytest.warns(TuningWarning, match="left out"):
        assert tuning_cache.read(path, DEVICE) == {}
    assert not path.exists()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_change_of_a_file_raises(data, tmp_path_factory):
    path = tmp_path_factory.mktemp("tuning") / "file.json"
    tuning_cache.write(path, DEVICE, {KEY: ENTRY})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TuningWarning)
        found = tuning_cache.read(path, DEVICE)
    for entry in found.values():
        assert isinstance(entry, Entry)
        hash(tuning.declared(list_ops()["flash_attention"], "cpu", entry))


def test_what_is_no_regular_file_does_not_block(tmp_path):
    pipe = tmp_path / "file.json"
    os.mkfifo(pipe)
    with pytest.warns(TuningWarning, match="not a regular file"):
        assert tuning_cache.read(pipe, DEVICE) == {}
    folder = tmp_path / "folder.json"
    folder.mkdir()
    with pytest.warns(TuningWarning, match="left out"):
        assert tuning_cache.read(folder, DEVICE) == {}


def test_a_folder_that_cannot_be_written_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="--cache"):
        tuning_cache.write(tmp_path / "file" / "below.json", DEVICE, {KEY: ENTRY})
    with pytest.raises(CacheError, match="a key has characters"):
        tuning_cache.write(tmp_path / "a.json", DEVICE, {"no key": ENTRY})
    assert not (tmp_path / "a.json").exists()


def _write_some(path: Path, writer: int) -> None:
    for n in range(8):
        tuning_cache.write(path, DEVICE, {f"op|float32|writer={writer},n={n}": ENTRY})


def test_several_writers_lose_nothing(tmp_path):
    path = tmp_path / "file.json"
    context = multiprocessing.get_context("fork" if sys.version_info < (3, 12) else "forkserver")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks; these processes only write files
        writers = [context.Process(target=_write_some, args=(path, i)) for i in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert len(tuning_cache.read(path, DEVICE)) == 32


def test_where_the_folder_is(monkeypatch, tmp_path):
    monkeypatch.delenv("CAPIBARA_TUNING_DIR", raising=False)
    monkeypatch.setenv("CAPIBARA_TUNING", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning_cache.cache_folder() == tmp_path / "capibara" / "tuning" / __version__
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tuning_cache.cache_folder() == tmp_path / "home" / ".cache" / "capibara" / "tuning" / __version__
    monkeypatch.setenv("CAPIBARA_TUNING_DIR", str(tmp_path / "own"))
    assert tuning_cache.cache_folder() == tmp_path / "own" / __version__
    monkeypatch.setenv("CAPIBARA_TUNING", "0")
    assert tuning_cache.cache_folder() is None
    monkeypatch.setenv("CAPIBARA_TUNING", "yes")
    with pytest.raises(CacheError, match="CAPIBARA_TUNING must be 0"):
        tuning_cache.cache_folder()


# The look-up.

X = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, 70, 8)), jnp.float32)


def keep(folder: Path, name: str, entry: Entry, *args: Any, **kwargs: Any) -> None:
    path, device = here(folder)
    tuning_cache.write(path, device, {key_of(name, *args, **kwargs): entry})
    use_tuning()


def quick(function: Any) -> Any:
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})


def value_and_gradient(x: Any) -> Any:
    return quick(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(flash_attention(x, x, x)))))(x)


def test_a_measured_choice_runs_and_computes_the_same(folder):
    plain, gradient = value_and_gradient(X)
    keep(folder, "flash_attention", ENTRY, X, X, X)
    found = explain(flash_attention, X, X, X)
    assert (found.chosen, dict(found.parameters)) == ("xla", {"block_size": 64})
    tuned, tuned_gradient = value_and_gradient(X)
    np.testing.assert_allclose(tuned, plain, rtol=1e-5)
    np.testing.assert_allclose(tuned_gradient, gradient, atol=1e-5)
    # 70 positions in blocks of 64 are padded to 128.
    text = jax.jit(jax.grad(lambda x: jnp.sum(flash_attention(x, x, x)))).lower(X).as_text()
    assert "tensor<1x2x1x128x8xf32>" in text
    assert explain(flash_attention, X, X, X, platform="tpu").chosen == "pallas_tpu"
    assert dict(explain(flash_attention, X, X, X, platform="tpu").parameters) == {}


def test_an_implementation_that_is_asked_for_takes_its_own_parameters(folder):
    keep(folder, "flash_attention", ENTRY, X, X, X)
    for name, size in (("cpu", 32), ("xla", 64)):
        found = explain(flash_attention, X, X, X, implementation=name)
        assert (found.chosen, dict(found.parameters)) == (name, {"block_size": size})
    assert explain(flash_attention, X, X, X, implementation="reference").chosen == "reference"
    got, want = (
        quick(lambda x, n=n: flash_attention(x, x, x, implementation=n))(X) for n in ("xla", "reference")
    )
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_what_the_caller_says_wins(folder):
    keep(folder, "flash_attention", ENTRY, X, X, X)
    found = explain(flash_attention, X, X, X, block_size=16)
    assert dict(found.parameters) == {}
    assert found.chosen == "cpu"


def test_other_shapes_and_dtypes_take_the_heuristics(folder):
    plain = explain(flash_attention, X, X, X)
    keep(folder, "flash_attention", ENTRY, X, X, X)
    longer = jnp.zeros((1, 2, 200, 8))
    for other in (longer, X.astype(jnp.bfloat16)):
        assert dict(explain(flash_attention, other, other, other).parameters) == {}
    alike = X[:, :, :65]  # the same power of two
    assert explain(flash_attention, alike, alike, alike).chosen == "xla"
    assert plain.chosen == explain(flash_attention, longer, longer, longer).chosen


def test_what_the_operation_does_not_declare_is_left_out(folder):
    for entry in (
        Entry("pallas_gpu", {"xla": {"block_size": 63}}),
        Entry(None, {"xla": {"size": 64}}),
        Entry(None, {"native": {"block_size": 64}}),
        Entry(None, {"xla": {"block_size": "large"}}),
        Entry(None, {"xla": {}}),
        Entry(None, {"nobody": {"block_size": 64}}),
    ):
        keep(folder, "flash_attention", entry, X, X, X)
        problem, _ = list_ops()["flash_attention"].prepare(X, X, X)
        assert problem.tuned is None, entry


def test_a_choice_that_refuses_falls_back(folder):
    keep(folder, "flash_attention", Entry("pallas_tpu", {}), X, X, X)
    with forced("flash_attention", None):
        plain = explain(flash_attention, X, X, X).chosen
    found = explain(flash_attention, X, X, X)
    assert found.chosen == plain
    assert found.reasons["pallas_tpu"] == "is for tpu, not cpu"


def test_the_file_is_read_once_and_the_process_stays_as_it_began(folder):
    before = explain(flash_attention, X, X, X)
    path, device = here(folder)
    tuning_cache.write(path, device, {key_of("flash_attention", X, X, X): ENTRY})
    assert explain(flash_attention, X, X, X) == before
    use_tuning()
    assert explain(flash_attention, X, X, X) != before


def test_compiled_functions_of_one_choice_are_not_taken_for_another():
    inner = jax.jit(lambda problem, x: x * len(problem.of("xla")), static_argnums=0)
    one, other = Tuned("cpu"), Tuned("cpu", None, (("xla", (("block_size", 64),)),))
    assert (inner(one, 1.0), inner(other, 1.0)) == (0, 1)
    op = list_ops()["selective_scan"]
    args = [jnp.ones(s) for s in ((1, 40, 2, 3), (1, 40, 2), (2,), (1, 40, 1, 4), (1, 40, 1, 4))]
    lengths = []
    for size in (8, 16):
        with forced("selective_scan", Tuned("cpu", "xla", (("xla", (("chunk_length", size),)),))):
            text = jax.jit(lambda *a: selective_scan(*a)).lower(*args).as_text()
            lengths.append(re.search(r"tensor<(\d+)x1x\d+x2x3xf32>", text))
    assert [int(found[1]) for found in lengths if found] == [5, 3]
    assert op.prepare(*args)[0].chunk_length is None


def test_what_is_exported_takes_the_heuristics(folder):
    keep(folder, "flash_attention", ENTRY, X, X, X)
    with portable():
        assert dict(explain(flash_attention, X, X, X).parameters) == {}


def test_several_processes_read_only_a_folder_that_was_given(folder, monkeypatch):
    keep(folder, "flash_attention", ENTRY, X, X, X)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    use_tuning()
    assert explain(flash_attention, X, X, X).chosen == "xla"
    monkeypatch.delenv("CAPIBARA_TUNING_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    os.renames(folder / __version__, folder / "capibara" / "tuning" / __version__)
    use_tuning()
    assert dict(explain(flash_attention, X, X, X).parameters) == {}
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    use_tuning()
    assert explain(flash_attention, X, X, X).chosen == "xla"


def test_a_folder_by_argument(folder, tmp_path):
    other = tmp_path / "other"
    path, device = here(other)
    tuning_cache.write(path, device, {key_of("flash_attention", X, X, X): ENTRY})
    use_tuning(other)
    assert tuning.describe_tuning()["file"] == str(path)
    assert tuning.describe_tuning()["faster"] == 1
    assert explain(flash_attention, X, X, X).chosen == "xla"
    with pytest.raises(OpTypeError, match="folder must be a path"):
        use_tuning(3)  # type: ignore[arg-type]


def test_a_broken_file_warns_at_the_first_call_and_the_call_is_right(folder):
    path, _ = here(folder)
    path.parent.mkdir(parents=True)
    path.write_text("{")
    use_tuning()
    with pytest.warns(TuningWarning, match="moved to"):
        out = flash_attention(X, X, X)
    assert out.shape == X.shape
    flash_attention(X, X, X)


def test_a_wrong_switch_warns_and_the_call_is_right(folder, monkeypatch):
    monkeypatch.setenv("CAPIBARA_TUNING", "maybe")
    use_tuning()
    with pytest.warns(TuningWarning, match="CAPIBARA_TUNING"):
        assert flash_attention(X, X, X).shape == X.shape


# The measuring.


@dataclass(frozen=True)
class _Spec:
    name: str
    size: int
    tags: tuple[str, ...] = ("small",)


@dataclass(frozen=True)
class _Problem:
    size: int
    dtype: str
    implementation: str
    block: int | None = None
    tuned: Tuned | None = None


def _slow(steps: int, x: jax.Array, error: float = 0.0) -> jax.Array:
    """``2 x``, after so many steps that XLA cannot leave out."""
    return jax.lax.fori_loop(0, steps, lambda _, y: jnp.sin(y) * 0 + y, x) * (2 + error)


STEPS = {8: 4000, 16: 1, 32: 8000, None: 4000}


@pytest.fixture
def op(monkeypatch):
    """An operation whose block of 16 is quick, whose block of 64 is wrong, and whose block of 128 does not compile."""
    monkeypatch.setattr(registry_module, "_OPS", dict(registry_module._OPS))

    def prepare(x: Any, *, implementation: str = "auto") -> tuple[_Problem, tuple[Any, ...]]:
        return _Problem(x.shape[0], str(x.dtype), implementation), (x,)

    def looped(problem: _Problem, x: jax.Array) -> jax.Array:
        if problem.block == 128:
            raise NotImplementedError("too large for the chip")
        return _slow(STEPS.get(problem.block, 1), x, 0.1 if problem.block == 64 else 0.0)

    made = Op(
        "double",
        prepare,
        [
            Implementation("xla", {"forward": looped}, tunables={"block": (8, 16, 32, 64, 128)}),
            Implementation("other", {"forward": lambda p, x: _slow(4000, x)}),
            Implementation("reference", {"forward": lambda p, x: x + x}),
        ],
        Tuning(
            lambda: [_Spec("some", 512), _Spec("same", 512), _Spec("more", 1024, ("large",))],
            lambda spec, random: ((random.normal(size=spec.size),), {}),
            lambda problem: {"size": problem.size},
            differentiable=False,
        ),
    )

    @public(made)
    def double(x: Any, *, implementation: str = "auto") -> Any:
        made.check_name(implementation)
        problem, arrays = made.prepare(x, implementation=implementation)
        return made.run("forward", problem, *arrays)

    return made


def test_the_quick_block_is_found_the_wrong_one_is_not_taken(op):
    (case,) = tuner.cases(op, "small")
    outcome = tuner.tune_case(case, max_seconds=60)
    assert outcome.key == "double|float32|size=512"
    assert outcome.entry.parameters == {"xla": {"block": 16}}
    assert outcome.entry.gains["xla"] > 1.03
    assert outcome.gain > 1.03
    assert outcome.entry.fastest is None
    assert outcome.default == "xla"
    assert list(outcome.wrong_results) == ["xla block=64"]
    assert "of 512 numbers differ" in outcome.wrong_results["xla block=64"]
    assert outcome.failed == {"xla block=128": "NotImplementedError: too large for the chip"}
    assert outcome.complete
    assert set(outcome.seconds) == {"heuristic", "choice"}


def test_a_faster_implementation_is_chosen(op, monkeypatch):
    order = {"xla": Implementation("xla", {"forward": lambda p, x: _slow(8000, x)})}
    order["other"] = Implementation("other", {"forward": lambda p, x: _slow(1, x)})
    monkeypatch.setattr(op, "_implementations", [order["xla"], order["other"], op._implementations[2]])
    outcome = tuner.tune_case(tuner.cases(op)[0], max_seconds=60)
    assert (outcome.entry.fastest, outcome.entry.parameters) == ("other", {})
    assert outcome.gain > 1.03
    tuned = tuning.declared(op, "cpu", outcome.entry)
    with forced("double", tuned):
        found = explain("double", jnp.zeros(1024))
    assert found.chosen == "other"
    assert found.reasons["xla"] == "other was measured to be faster here"


def test_nothing_is_kept_where_nothing_is_faster(op, monkeypatch):
    same = [Implementation(n, {"forward": lambda p, x: x * 2}) for n in ("xla", "other")]
    monkeypatch.setattr(op, "_implementations", [*same, op._implementations[2]])
    # A clock on which every call takes as long as any other.
    ticks = iter(range(1_000_000))
    outcome = tuner.tune_case(tuner.cases(op)[0], max_seconds=1e5, clock=lambda: float(next(ticks)))
    assert outcome.entry == Entry(jax=jax.__version__)
    assert outcome.gain == 1.0


def test_without_time_it_says_so_and_keeps_nothing(op):
    outcome = tuner.tune_case(tuner.cases(op)[0], max_seconds=1e-6)
    assert not outcome.complete
    assert outcome.entry.parameters == {}


def test_one_implementation_leaves_the_rest_of_an_entry_alone(op):
    outcome = tuner.tune_case(tuner.cases(op)[0], max_seconds=60, implementation="xla")
    assert outcome.entry.parameters == {"xla": {"block": 16}}
    before = Entry("other", {"other": {"size": 3}, "xla": {"block": 8}}, {"other": 2.0, "xla": 3.0, "": 4.0})
    merged = outcome.merged(before, "xla")
    assert merged.fastest == "other"
    assert merged.parameters == {"other": {"size": 3}, "xla": {"block": 16}}
    assert merged.gains["other"] == 2.0
    assert merged.gains["xla"] == outcome.entry.gains["xla"]


def test_cases_take_changes_and_leave_doubles_out(op):
    assert [case.spec.size for case in tuner.cases(op, "small")] == [512]
    assert [case.spec.size for case in tuner.cases(op, "large", changes={"size": 7})] == [7]
    with pytest.raises(OpValueError, match="no field 'sise'"):
        tuner.cases(op, changes={"sise": 7})
    with pytest.raises(OpTypeError, match="whole number"):
        tuner.cases(op, changes={"size": "7"})  # type: ignore[dict-item]
    with pytest.raises(OpValueError, match="dtype must be"):
        tuner.cases(op, dtype="int8")
    with pytest.raises(OpValueError, match="nothing that could be tuned"):
        tuner.cases(list_ops()["cached_attention"])
    with pytest.raises(OpValueError, match="no implementation 'cpu'"):
        tuner.tune_case(tuner.cases(op)[0], implementation="cpu")


@pytest.mark.parametrize("seed", range(3))
def test_bounds_of_a_median_hold_it_as_often_as_they_say(seed):
    random = np.random.default_rng(seed)
    for n in (7, 9, 15):
        inside = 0
        for _ in range(400):
            low, high = tuner.median_bounds(random.exponential(size=n).tolist())
            inside += low <= np.log(2) <= high
        assert inside >= 0.92 * 400
    assert tuner.median_bounds([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert tuner.median_bounds([float(i) for i in range(9)]) == (1.0, 7.0)


def test_noise_is_not_taken_for_a_gain():
    random = np.random.default_rng(0)
    kept = sum(
        tuner.is_faster(ratios, {"forward": ratios})
        for ratios in (np.exp(random.normal(0, 0.2, 15)).tolist() for _ in range(300))
    )
    assert kept <= 9
    sure = np.exp(random.normal(-0.2, 0.02, 15)).tolist()
    assert tuner.is_faster(sure, {"forward": sure})
    assert not tuner.is_faster(sure[:5], {"forward": sure[:5]})
    assert not tuner.is_faster(sure, {"forward": [1.2] * 15, "gradient": sure})


@pytest.mark.parametrize("name", sorted(n for n, op in list_ops().items() if op.tuning is not None))
def test_every_operation_that_declares_it_can_be_measured(name):
    """Every spec makes a valid call; problems have the field; what is tunable is a field that the heuristic leaves."""
    op = list_ops()[name]
    assert op.tuning is not None
    assert op.face is not None
    assert tuner.cases(op, "large")
    for spec in op.tuning.specs():
        args, kwargs = op.tuning.arguments(spec, np.random.default_rng(0))
        args, kwargs = jax.tree.map(
            lambda x: (
                jax.ShapeDtypeStruct(x.shape, "float32" if x.dtype == "float64" else x.dtype)
                if isinstance(x, np.ndarray)
                else x
            ),
            (args, kwargs),
        )
        problem, _ = op.prepare(*args, **kwargs)
        assert replace(problem, tuned=Tuned("cpu")).tuned == Tuned("cpu")
        bucket = op.tuning.bucket(problem)
        if bucket is None:
            continue
        assert tuning_cache._KEY.fullmatch(tuning.bucket_key(name, problem, bucket))
        for each in op._implementations:
            for parameter in each.tunables:
                assert getattr(problem, parameter) is None, (spec.name, parameter)


def _prepared(op: Op) -> Iterator[tuple[Any, Any, Any]]:
    """Problem and arguments of the small specs, in float32, with the heuristics."""
    assert op.tuning is not None
    for case in tuner.cases(op, "small"):
        args, kwargs = jax.tree.map(
            lambda x: x.astype("float32") if isinstance(x, np.ndarray) and x.dtype == "float64" else x,
            op.tuning.arguments(case.spec, np.random.default_rng(0)),
        )
        with forced(op.name, None):
            yield op.prepare(*args, **kwargs)[0], args, kwargs


@pytest.mark.parametrize("name", sorted(n for n, op in list_ops().items() if op.tuning is not None))
def test_a_choice_reaches_the_program_of_every_such_operation(name):
    """The public function prepares its calls with what was measured, and each tunable value makes its own problem."""
    op = list_ops()[name]
    assert op.tuning is not None
    assert op.face is not None
    face = op.face
    problem, args, kwargs = next(each for each in _prepared(op) if op.tuning.bucket(each[0]) is not None)
    for each in op.usable(problem, "cpu"):
        values = {parameter: numbers[0] for parameter, numbers in op.tunables(each).items()}
        chosen = Tuned("cpu", each, ((each, tuple(sorted(values.items()))),) if values else ())
        with forced(name, chosen):
            (part,) = explain(lambda *a, **k: face(*a, **k), *args, platform="cpu", **kwargs).parts
        assert part.chosen == each
        assert part.parameters in (values, {})  # one that refuses these values runs with its own


def test_without_a_backend_the_heuristics_answer(folder, monkeypatch):
    def none() -> int:
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(jax, "process_count", none)
    use_tuning()
    assert explain("flash_attention", X, X, X, platform="tpu").chosen == "pallas_tpu"


def test_importing_the_operations_reads_no_file(tmp_path):
    code = "import capibara.ops, sys; print('capibara.ops.tuner' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "CAPIBARA_TUNING": "nonsense", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr

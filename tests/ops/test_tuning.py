"""Measured parameters: the file and what it survives, the look-up, what the problem then runs, and the measuring."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara import __version__
from capibara.ops import OpTypeError, explain, list_ops, tuning, tuning_cache, use_tuning
from capibara.ops.attention import flash_attention
from capibara.ops.registry import portable
from capibara.ops.scan import selective_scan
from capibara.ops.tuning import Tuned, forced
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
    "an implementation that is not a name": change("entries", KEY, "fastest", to="rm -rf"),
    "a parameter that is not a name": change("entries", KEY, "parameters", "xla", to={"a b": 1}),
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
    with pytest.warns(TuningWarning, match="ignored"):
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
    with pytest.warns(TuningWarning, match="ignored"):
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

X = device_array(np.random.default_rng(0).normal(size=(1, 2, 70, 8)), jnp.float32)


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
    plain = explain(flash_attention, X, X, X, block_size=16)
    keep(folder, "flash_attention", ENTRY, X, X, X)
    found = explain(flash_attention, X, X, X, block_size=16)
    assert dict(found.parameters) == {}
    assert found.chosen == plain.chosen != "xla"


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
        Entry("pallas_mars", {"xla": {"block_size": 63}}),
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
        with forced("selective_scan", Tuned("cpu", "xla", (("xla", (("chunk_size", size),)),))):
            text = jax.jit(lambda *a: selective_scan(*a)).lower(*args).as_text()
            lengths.append(re.search(r"tensor<(\d+)x1x\d+x2x3xf32>", text))
    assert [int(found[1]) for found in lengths if found] == [5, 3]
    assert op.prepare(*args)[0].chunk_size is None


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

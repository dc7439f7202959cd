"""Compiling in processes of their own, and the cache before them."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tpu_compiler import needs_libtpu

from capibara.config import ModularModelConfig
from capibara.plan import CompilationError, CompilerMissingError, PlanError, parse_slice
from capibara.plan.compiler import (
    CompiledProgram,
    Job,
    Memory,
    ProgramCache,
    compile_program,
    compile_programs,
)
from capibara.plan.compiler.environment import Compiler, find_compiler
from capibara.plan.compiler.schedule import Watch, read_scheduled
from capibara.plan.program import read_program
from capibara.plan.program.groups import mesh_axes_of
from capibara.plan.work import TrainWork
from capibara.sharding import Layout

SUPPORT = Path(__file__).parents[1] / "support"
MESH = (("data", 2), ("model", 2))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    return ProgramCache(tmp_path / "programs")


def job(name: str, topology: str = "v4:2x2x1", **params) -> Job:
    return Job(builder=f"plan_builders:{name}", params=params, slice=parse_slice(topology), mesh=MESH)


@needs_libtpu
def test_a_program_its_memory_its_text_and_the_cache(cache):
    found = compile_program(job("product", rows=512), cache=cache)
    assert found.status == "ok"
    assert found.fits
    assert not found.cached
    memory = found.memory
    assert memory is not None
    # Half of x, half of w, a quarter of the result, in float32; whole tiles, so nothing is padded.
    assert memory.kinds == {"parameters": 256 * 128 * 4, "batch": 256 * 256 * 4}
    assert memory.arguments == sum(memory.kinds.values())
    assert memory.padding == 0
    assert memory.outputs == 256 * 128 * 4
    assert "f32[256,128]" in found.text
    assert sorted(found.coordinates) == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert set(found.versions) == {"jax", "jaxlib", "libtpu"}
    again = compile_program(job("product", rows=512), cache=cache)
    assert again.cached
    assert again.to_json() == found.to_json()
    assert again.text == found.text


@pytest.mark.thin(2)
@needs_libtpu
@pytest.mark.parametrize("view", ["chip", "core"])
def test_a_scheduled_program_is_the_compiled_one_without_cycles(cache, view):
    config = ModularModelConfig.from_toml(
        "demo",
        ["model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=4",
         "model.vocab_size=512", "train.batch_size=8", "train.sequence_length=128"],
    )  # fmt: skip
    target = parse_slice("v4:2x2x1" if view == "chip" else "v4:1x1x2", view)
    asked = TrainWork(config).job(Layout(mesh=MESH, remat="full"), target)
    glance = compile_program(asked, cache=cache, schedule=True)
    assert (glance.status, glance.complete, glance.cached) == ("ok", False, False)
    assert glance.to_json() == compile_program(asked, cache=cache, schedule=True).to_json()
    whole = compile_program(asked, cache=cache)
    assert (whole.complete, whole.cached) == (True, False)
    assert glance.memory is not None
    assert whole.memory is not None
    assert glance.memory.total == whole.memory.total
    assert (glance.memory.arguments, glance.memory.kinds) == (whole.memory.arguments, whole.memory.kinds)
    assert (glance.buffers, glance.program_hash) == (whole.buffers, whole.program_hash)
    assert glance.coordinates == whole.coordinates
    scheduled, compiled = read_program(glance.text), read_program(whole.text)
    assert any(piece.cycles for piece in compiled.pieces)
    assert not any(piece.cycles for piece in scheduled.pieces)
    bare = [replace(piece, cycles=None) for piece in compiled.pieces]
    assert [replace(piece, cycles=None) for piece in scheduled.pieces] == bare
    # How they go round the links is decided with the machine code.
    unknown: dict[str, Any] = {"algorithm": "", "ring_dims": 0, "cycles_hidden": 0}
    assert list(scheduled.collectives) == [replace(each, **unknown) for each in compiled.collectives]
    assert scheduled.schedule == compiled.schedule
    # What was compiled is known as a whole from now on.
    assert compile_program(asked, cache=cache, schedule=True).complete


@pytest.mark.slow
@needs_libtpu
def test_rows_stay_where_they_are_for_norms_of_divided_features(cache):
    """Where the order of an array is given, XLA gathers the rows of all devices."""
    config = ModularModelConfig.from_toml(
        "demo",
        ["model.pattern=[ssm]", "model.num_layers=2", "model.embed_dim=128", "model.vocab_size=512",
         "train.batch_size=8", "train.sequence_length=256"],
    )  # fmt: skip
    layout = Layout(mesh=MESH, parameters="replicated", remat="none")
    found = compile_program(TrainWork(config).job(layout, parse_slice("v5e:2x2")), cache=cache, schedule=True)
    assert found.fits, found.message
    gathers = [each for each in read_program(found.text).collectives if each.kind == "all-gather"]
    assert [each for each in gathers if "data" in mesh_axes_of(each.groups, MESH)] == []


@needs_libtpu
def test_what_does_not_fit_is_refused_when_it_is_scheduled(cache):
    large = job("product", rows=1 << 26, width=512)
    found = compile_program(large, cache=cache, schedule=True)
    assert found.status == "oom"
    assert compile_program(large, cache=cache).cached


def write_schedule(folder: Path) -> tuple[Path, str]:
    """What a compiler writes when a program is scheduled: the text, in its file."""
    report = "allocation 0: size 400, parameter 0, shape |f32[100]|\n"
    report += "allocation 1: size 96, color 5, parameter 1, shape |f32[24]|\n"
    report += "allocation 2: size 80, maybe-live-out:\nallocation 3: size 1000, preallocated-temp:\n"
    text = "HloModule step\n\n%part (x: f32[]) -> f32[] {\n}\n\nENTRY %main () -> f32[] {\n  ROOT %x = f32[]\n}\n"
    (folder / "step.after_optimizations-buffer-assignment.txt").write_text(report)
    path = folder / "step.after_optimizations_after_buffer_assignment.txt"
    path.write_text(text)
    return path, text


def test_what_is_scheduled_and_what_is_compiled_are_not_written_at_once(tmp_path):
    write_schedule(tmp_path)
    begun, written = threading.Event(), threading.Event()

    def slowly(memory: Memory, text: str) -> None:
        begun.set()
        time.sleep(0.3)
        written.set()

    watch = Watch(tmp_path, {}, 1 << 30, slowly)
    assert begun.wait(10)
    watch.finish()
    assert written.is_set()


@pytest.mark.parametrize("limit", [1 << 30, 1])
def test_what_is_compiled_before_is_not_scheduled_as_well(limit, tmp_path):
    calls: list[str] = []
    watch = Watch(tmp_path, {}, limit, lambda memory, text: calls.append(text))
    if limit == 1:  # too large: the refusal is awaited
        write_schedule(tmp_path)
        time.sleep(0.3)
    watch.finish()
    write_schedule(tmp_path)
    time.sleep(0.3)
    assert not calls


def test_a_schedule_is_read_when_it_is_written_as_a_whole(tmp_path):
    path, text = write_schedule(tmp_path)
    for end in range(len(text) - 2):
        path.write_text(text[:end])
        assert read_scheduled(tmp_path) is None, text[:end]
    path.write_text(text)
    memory = Memory(arguments=400, outputs=80, aliased=0, temporaries=1000, host=96, kinds={"batch": 4})
    assert read_scheduled(tmp_path, {"batch": 4}) == (memory, text)
    (tmp_path / "step.after_optimizations-buffer-assignment.txt").write_text("")  # a full disk
    assert read_scheduled(tmp_path) is None


@needs_libtpu
def test_what_does_not_fit_fails_and_dies_is_told_apart(cache):
    jobs = [job("product", rows=1 << 26, width=512), job("failing"), job("nothing")]
    started: list[int] = []
    found = dict(compile_programs(jobs, cache=cache, workers=2, started=started.append))
    assert sorted(started) == [0, 1, 2]
    large = found[0]
    assert large.status == "oom"
    assert large.needed_bytes is not None
    assert large.needed_bytes > parse_slice("v4:2x2x1").usable_hbm_bytes
    assert found[1].status == found[2].status == "error"
    assert "no program for 4 devices" in found[1].message
    assert "expected 'module:function'" in found[2].message
    with pytest.raises(PlanError, match="did not compile"):
        _ = large.text
    # What does not fit is known from now on; a failure may be another one tomorrow.
    assert cache.get(cache.key(jobs[0], find_compiler())) is not None
    assert cache.get(cache.key(jobs[1], find_compiler())) is None


@needs_libtpu
def test_a_process_that_dies_or_hangs(cache):
    with pytest.raises(CompilationError, match=r"(?s)exit code 3.*these are my last words"):
        compile_program(job("dying"), cache=cache)
    with pytest.raises(CompilationError, match="longer than 4 s"):
        compile_program(job("hanging"), cache=cache, timeout=4)


@needs_libtpu
def test_a_process_that_dies_costs_one_result(cache):
    found = dict(compile_programs([job("dying"), job("product", rows=512)], cache=cache, workers=1))
    assert found[0].status == "error"
    assert "these are my last words" in found[0].message
    assert found[1].status == "ok"


@pytest.mark.thin(3)
@needs_libtpu
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM", "SIGINT"])
def test_compiling_ends_with_the_process_that_asked(cache, tmp_path, how):
    """Also when that one is killed, which no handler sees; and its folder goes, too."""
    said = tmp_path / "pid"
    folders = tmp_path / "folders"
    folders.mkdir()
    code = (
        # What shells start in the background ignores Ctrl-C, and so would everything below it.
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from test_compiler import job, ProgramCache, compile_program\n"
        f"compile_program(job('telling', path={str(said)!r}), cache=ProgramCache({str(tmp_path / 'cache')!r}))"
    )
    asking = subprocess.Popen(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(Path(__file__).parent)]),
            "TMPDIR": str(folders),
        },
        stderr=subprocess.DEVNULL,
    )
    try:
        while not said.exists() and asking.poll() is None:
            time.sleep(0.1)
        worker = int(said.read_text())
        os.kill(worker, 0)
        assert list(folders.iterdir())
        asking.send_signal(signal.Signals[how])
        asking.wait(60)
    finally:
        asking.kill()
        asking.wait()
    with contextlib.suppress(ProcessLookupError):
        while "Z" not in _state(worker):
            time.sleep(0.1)
    assert not list(folders.iterdir())


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        raise ProcessLookupError from None


@needs_libtpu
def test_the_mesh_has_to_have_the_slices_devices(cache):
    wrong = Job(builder="plan_builders:product", params={"rows": 8}, slice=parse_slice("v4-32"), mesh=MESH)
    found = compile_program(wrong, cache=cache)
    assert found.status == "error"
    assert "has 4 devices, but v4:2x2x4" in found.message


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CAPIBARA_LIBTPU", str(tmp_path))
    with pytest.raises(CompilerMissingError, match="CAPIBARA_LIBTPU"):
        find_compiler()
    monkeypatch.delenv("CAPIBARA_LIBTPU")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CompilerMissingError, match=r"libtpu.*(Install it with|Linux on x86-64)"):
        find_compiler()


def package(folder: Path, *versions: str) -> Path:
    """A folder with a libtpu, whose records were written in this order."""
    (folder / "libtpu").mkdir(parents=True)
    for name in ("__init__.py", "libtpu.so"):
        (folder / "libtpu" / name).touch()
    for number, version in enumerate(versions):
        record = folder / f"libtpu-{version}.dist-info"
        record.mkdir()
        os.utime(record, (number, number))
    return folder


def test_the_compiler_that_jax_pins_is_taken_wherever_it_is(monkeypatch, tmp_path):
    monkeypatch.delenv("CAPIBARA_LIBTPU", raising=False)
    monkeypatch.setattr("capibara.jax_versions.required_libtpu", lambda: "0.0.42.*")
    on_path, beside = package(tmp_path / "a", "0.0.50"), package(tmp_path / "b" / "libtpu", "0.0.42.1")
    origin = SimpleNamespace(origin=str(on_path / "libtpu" / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: origin)
    # Somewhere else there is none: the one on the path is taken, with a note.
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    found = find_compiler()
    assert (found.version, found.path) == ("0.0.50", None)
    assert "pip install 'libtpu==0.0.42.*'" in found.notes()[0]
    monkeypatch.setattr("sys.prefix", str(tmp_path / "b"))
    found = find_compiler()
    assert (found.version, found.path, found.notes()) == ("0.0.42.1", str(beside), [])
    # The library of this process, or one that a user named, is not loaded in its place.
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(on_path / "libtpu" / "libtpu.so"))
    assert found.environment()["TPU_LIBRARY_PATH"] == str(beside / "libtpu" / "libtpu.so")
    assert found.environment()["PYTHONPATH"].startswith(str(beside))
    monkeypatch.setenv("CAPIBARA_LIBTPU", str(on_path))
    assert find_compiler().version == "0.0.50"


def test_records_that_pip_left_are_not_the_version(monkeypatch, tmp_path):
    """``pip install --target`` writes a new one beside them."""
    monkeypatch.setenv("CAPIBARA_LIBTPU", str(package(tmp_path, "0.0.9", "0.0.50", "0.0.42.1")))
    assert find_compiler().version == "0.0.42.1"


def test_memory_adds_up():
    memory = Memory(arguments=10, outputs=4, aliased=3, temporaries=5, kinds={"parameters": 7})
    assert memory.total == 10 + 4 - 3 + 5
    assert memory.padding == 3


def test_damaged_results_are_not_used(tmp_path):
    store = ProgramCache(tmp_path)
    found = CompiledProgram(status="oom", needed_bytes=99, coordinates=((0, 1),))
    store.put("k", found)
    assert store.get("k") == CompiledProgram.from_json(found.to_json(), cached=True)
    path, _ = store.paths("k")
    whole = path.read_text()
    for text in ("", "[]", "{", whole.replace('"oom"', '"fine"'), json.dumps({"status": "ok"}), "1" * 100):
        path.write_text(text)
        assert store.get("k") is None
    # A compiled program whose text is gone is not a result either.
    path.write_text(whole.replace('"oom"', '"ok"'))
    assert store.get("k") is None


DEEP = "[" * 100_000


@pytest.mark.parametrize("size", ["x", -(1 << 60), 1.5, True, None, DEEP])
def test_sizes_are_whole_numbers(tmp_path, size):
    store = ProgramCache(tmp_path)
    store.put(
        "k", CompiledProgram(status="oom", memory=Memory(arguments=1, outputs=2, aliased=0, temporaries=3))
    )
    path, _ = store.paths("k")
    assert store.get("k") is not None
    data = json.loads(path.read_text())
    data["memory"]["temporaries"] = size
    path.write_text(DEEP if size is DEEP else json.dumps(data))
    assert store.get("k") is None
    with pytest.raises(PlanError, match="not a result of a compilation"):
        CompiledProgram.from_json(data)


def test_no_bit_of_a_result_changes_unnoticed(tmp_path):
    """Another digit is as good a figure, and without its name a scheduled program would count as compiled."""
    store = ProgramCache(tmp_path)
    path, text = store.paths("k")
    text.write_bytes(gzip.compress(b"HloModule x"))
    memory = Memory(arguments=1, outputs=2, aliased=0, temporaries=3, kinds={"batch": 1})
    store.put("k", CompiledProgram(status="ok", memory=memory, complete=False, compile_seconds=1.5))
    found, whole = store.get("k"), path.read_bytes()
    assert found is not None
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        # JSON has several spellings of some values.
        assert store.get("k") in (None, found), bytes(damaged)
        path.write_bytes(whole)
    assert store.get("k") == found


@pytest.mark.parametrize("place", [float("inf"), float("nan"), "x", None])
def test_coordinates_are_whole_numbers(place):
    data = CompiledProgram(status="oom", coordinates=((0, 1),)).to_json()
    with pytest.raises(PlanError, match="not a result of a compilation"):
        CompiledProgram.from_json({**data, "coordinates": [[0, place]]})


def test_a_damaged_text_is_compiled_again(tmp_path):
    store = ProgramCache(tmp_path)
    memory = Memory(arguments=1, outputs=2, aliased=0, temporaries=3)
    _, text = store.paths("k")
    whole = gzip.compress(b"HloModule x" * 100)
    text.write_bytes(whole)
    store.put("k", CompiledProgram(status="ok", memory=memory))
    found = store.get("k")
    assert found is not None
    assert found.text == "HloModule x" * 100
    for damaged in (b"", whole[:30], whole[:12] + b"\xff" * 9 + whole[21:], gzip.compress(b"\xff\xfe")):
        text.write_bytes(damaged)
        assert store.get("k") is None
        # One that was handed out before says so, too.
        with pytest.raises(PlanError, match="cannot be read"):
            _ = CompiledProgram(status="ok", memory=memory, text_path=text).text


def test_what_is_dropped_is_ours_and_unused(tmp_path, monkeypatch):
    """A folder that somebody names may hold what is dear to them."""
    monkeypatch.setattr("capibara.plan.compiler.cache._MOST_BYTES", 250)
    store = ProgramCache(tmp_path)
    old = time.time() - 7200
    used, unused = "a" * 64, "b" * 64
    for key in (used, unused):
        _, text = store.paths(key)
        text.write_bytes(gzip.compress(key.encode()))
        store.put(key, CompiledProgram(status="ok"))
    mine = tmp_path / "thesis.json"
    mine.write_text("x" * 1000)
    for path in tmp_path.iterdir():
        os.utime(path, (old, old))
    assert store.get(used) is not None
    store.put("c" * 64, CompiledProgram(status="oom"))
    assert mine.exists()
    assert store.get(used) is not None
    assert store.get(unused) is None
    assert not store.paths(unused)[1].exists()


def test_a_full_disk_is_said_before_compiling(tmp_path, monkeypatch):
    """Files can still be made on it, and hold nothing."""
    monkeypatch.setattr("capibara.plan.compiler.pool.compiler_for", lambda _: Compiler("1.0", None))
    full = lambda **_: open("/dev/full", "wb")  # noqa: E731, SIM115
    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(PlanError, match=r"cannot be kept in .*No space left on device.*--cache"):
        compile_program(job("product", rows=8), cache=ProgramCache(tmp_path))


def test_a_full_temporary_disk_is_one_line(tmp_path, monkeypatch):
    from capibara.plan.compiler.worker import _write_text

    (tmp_path / "work" / "dump").mkdir(parents=True)
    assert _write_text(tmp_path / "work", "HloModule x") is None
    usage = SimpleNamespace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert "less than 1 MiB is left. Set TMPDIR" in str(_write_text(tmp_path / "work", "HloModule x"))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gzip.open", full)
    reason = _write_text(tmp_path / "work", "HloModule x")
    assert reason is not None
    assert reason.startswith(f"the compiler needs more room in {tmp_path}: No space left on device.")
    # What is there is not the result.
    assert not list((tmp_path / "work").iterdir())


def test_last_words_are_not_about_a_missing_tpu(tmp_path):
    from capibara.plan.compiler.process import read_result

    (tmp_path / "words").write_text(
        "Failed to find host bounds for accelerator type: WARNING: could not determine TPU accelerator type\n"
        "WARNING: Logging before InitGoogle() is written to STDERR\nlearning/tfrc/libtpu_init_utils.cc:327\n"
        "a bus error\n"
    )
    with pytest.raises(CompilationError, match=r"exit code 7 and no result. Its last words:\na bus error$"):
        read_result(job("product"), tmp_path, 7)


def test_what_cannot_be_kept_is_said_before_compiling(tmp_path, monkeypatch):
    monkeypatch.setattr("capibara.plan.compiler.pool.compiler_for", lambda _: Compiler("1.0", None))
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match=r"cannot be kept in .*file/x.*--cache"):
        compile_program(job("product", rows=8), cache=ProgramCache(tmp_path / "file" / "x"))
    for workers in (0, -1, True, 1.5):
        with pytest.raises(PlanError, match="workers="):
            list(compile_programs([job("product", rows=8)], cache=ProgramCache(tmp_path), workers=workers))  # type: ignore[arg-type]


def test_keys_depend_on_the_environment(tmp_path, monkeypatch):
    store, compiler = ProgramCache(tmp_path), Compiler("1.0", None)
    for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    keys = [store.key(job("product", rows=8), compiler)]
    for name, value in (
        ("LIBTPU_INIT_ARGS", "--xla_tpu_scoped_vmem_limit_kib=1"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "highest"),
        ("XLA_FLAGS", "--xla_some=1"),
    ):
        monkeypatch.setenv(name, value)
        keys.append(store.key(job("product", rows=8), compiler))
    assert len(set(keys)) == 4
    # Emulated devices of the asking process are none of the worker's.
    monkeypatch.setenv("XLA_FLAGS", "--xla_some=1 --xla_force_host_platform_device_count=8")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    assert store.key(job("product", rows=8), compiler) == keys[-1]


def test_keys_depend_on_everything(tmp_path):
    store = ProgramCache(tmp_path)
    keys = {
        store.key(each, compiler)
        for compiler in (Compiler("1.0", None), Compiler("2.0", None))
        for each in (
            job("product", rows=8),
            job("product", rows=16),
            job("failing", rows=8),
            job("product", "v5e:2x2", rows=8),
            Job(
                builder="plan_builders:product",
                params={"rows": 8},
                slice=parse_slice("v4:2x2x1"),
                mesh=MESH,
                compiler_options={"xla_enable_async_all_gather": "true"},
            ),
        )
    }
    assert len(keys) == 10


@pytest.mark.slow
@needs_libtpu
def test_generated_code_is_told_though_its_model_is_gone(tmp_path):
    """The collector takes the model at some time after the program is lowered: here it did while buffers were read."""
    config = ModularModelConfig.from_toml(
        "demo", ["model.num_layers=4", "train.batch_size=4", "model.scan_layers=scan"]
    )
    layout = Layout(mesh=(("data", 4), ("model", 1)), remat="full")
    job = TrainWork(config).job(layout, parse_slice("v5e:2x2"))
    program = compile_program(job, cache=ProgramCache(tmp_path))
    assert any("mlp_up_product = " in line for line in program.lines.values()), list(program.lines)[:20]

"""One run over several processes is the run of one device: batches, losses, gradients, parameters, checkpoints."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_model import TinyModel
from tiny_run import QUICK_COMPILE, TEXT, TINY, tiny_config, tiny_corpus

from capibara.errors import ConfigError
from capibara.launch import Membership, launch_processes
from capibara.sharding import Layout
from capibara.train import Placement, checkpoint_store, read_losses, read_metrics, restore_model, train
from capibara.train.errors import DataError, ProcessesError, RunLockedError
from capibara.train.examples import load_data
from capibara.train.processes import Processes, error_of, join_processes

PROGRAM = Path(__file__).parent.parent / "support" / "process_run.py"
SETTINGS = (
    "train.steps=8",
    "batch_size=8",
    "train.log_every=1",
    "train.eval_every=4",
    "checkpoint.every_steps=4",
)
LAYOUTS = {
    "data": None,
    "fsdp": Layout(mesh=(("data", 4),)),
    "tensor": Layout(mesh=(("data", 2), ("model", 2)), microbatches=2),
}


def overrides(layout: Layout | None) -> list[str]:
    return [*SETTINGS, *([] if layout is None else layout.overrides())]


def run(tmp_path: Path, count: int, devices: int, specs: list[dict[str, Any]]) -> tuple[int, list[str]]:
    """Run specifications in processes; gives the exit code and the lines of standard error."""
    (tmp_path / "specs.json").write_text(json.dumps(specs))
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILE}"}
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        command = [sys.executable, str(PROGRAM), str(tmp_path / "specs.json")]
        code = launch_processes(
            command, count, devices=devices, environment=environment, out=out, err=err, grace=1.0
        )
    return code, (tmp_path / "err").read_text().splitlines()


def seen(folder: Path, count: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"process-{index}.json").read_text()) for index in range(count)]


def metrics(folder: Path) -> dict[str, np.ndarray]:
    lines = [entry for entry in read_metrics(folder / "metrics.jsonl") if entry["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, 9))
    return {
        "loss": np.array([line["losses"][0] for line in lines]),
        "grad_norm": np.array([line["grad_norm"] for line in lines]),
    }


def parameters(folder: Path) -> Any:
    checkpoint = checkpoint_store(folder).newest()
    assert checkpoint is not None
    assert checkpoint.step == 8
    config = tiny_config(folder, *SETTINGS)
    return restore_model(checkpoint, TinyModel(config))


def check_same(folder: Path, reference: Path, *, accumulated: bool = False) -> None:
    for name, values in metrics(reference).items():
        np.testing.assert_allclose(metrics(folder)[name], values, rtol=2e-4 if name == "grad_norm" else 2e-5)
    # The state of the model is that of its calls, of which there is one for each microbatch.
    parts = slice(0, 1 if accumulated else 2)
    both = (jax.tree.leaves(parameters(one)[parts]) for one in (folder, reference))
    for mine, wanted in zip(*both, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-3, atol=2e-4)


def one_device(folder: Path) -> Path:
    config = tiny_config(folder, *SETTINGS)
    train(config, TinyModel(config), tiny_corpus(), devices=jax.devices()[:1], measure_utilisation=False)
    losses = metrics(folder)["loss"]
    assert losses[-1] < losses[0] - 0.01  # it learns, so that equal losses say something of the optimizer
    return folder


def check_batches(found: list[dict[str, Any]]) -> None:
    """The rows of every process are those of the one global order, and all are there."""
    batch = tiny_corpus().batches(batch_size=8, sequence_length=16, seed=tiny_config("unused").train.seed)
    import hashlib

    wanted = {
        f"{step} {row}": hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
        for step in range(3)
        for row, tokens in enumerate(batch.batch(step))
    }
    together: dict[str, str] = {}
    for one in found:
        assert one["batches"].items() <= wanted.items()
        assert len(one["batches"]) == len(wanted) // len(found)  # each has its part
        together |= one["batches"]
    assert together == wanted


def test_two_processes_are_one_device(tmp_path: Path) -> None:
    one, folder = one_device(tmp_path / "one"), tmp_path / "run"
    # Stopped by a signal that only process 1 gets.
    spec = {"directory": str(folder), "settings": overrides(LAYOUTS["fsdp"]), "stop": [4, 1]}
    code, err = run(tmp_path, 2, 2, [spec])
    assert code == 0, err
    found = seen(folder, 2)
    assert [one["processes"] for one in found] == [[2, 0, 4], [2, 1, 4]]
    check_batches(found)
    assert found[1]["notes"] == []  # of process 0 alone
    assert any("compiled" in note for note in found[0]["notes"])
    (step,) = {one["report"]["step"] for one in found}
    assert step == checkpoint_store(folder).steps()[-1]
    assert 4 <= step < 8
    assert {(one["report"]["reason"], one["report"]["signal"]) for one in found} == {("interrupted", 15)}
    # The checkpoint of two processes goes on in this one.
    config = tiny_config(folder, *SETTINGS)
    report = train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
    assert report.start_step == step
    check_same(folder, one)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data", "tensor"])
def test_two_processes_move_to_fewer_devices_and_back(tmp_path: Path, layout: str) -> None:
    one, folder = one_device(tmp_path / "one"), tmp_path / "run"
    spec = {
        "directory": str(folder),
        "settings": [*overrides(LAYOUTS[layout]), "checkpoint.every_steps=100"],
        "scale": [[0, 2], [1, 1], [4, 2]],
    }
    code, err = run(tmp_path, 2, 2, [spec])
    assert code == 0, err
    found = seen(folder, 2)
    moved = [note for note in found[0]["notes"] if note.startswith("moved to")]
    assert [int(note.split()[2]) for note in moved] == [2, 4]
    assert [one["report"]["step"] for one in found] == [8, 8]
    check_same(folder, one, accumulated=layout == "tensor")


@pytest.mark.slow
def test_four_processes_then_two_then_one(tmp_path: Path) -> None:
    one = one_device(tmp_path / "one")
    folder = tmp_path / "run"
    first = [
        *(
            {"directory": str(tmp_path / name), "settings": overrides(layout)}
            for name, layout in LAYOUTS.items()
        ),
        {"directory": str(folder), "settings": overrides(LAYOUTS["tensor"]), "stop": [1, 3]},
    ]
    code, err = run(tmp_path, 4, 1, first)
    assert code == 0, err
    for name in LAYOUTS:
        check_same(tmp_path / name, one, accumulated=name == "tensor")
    check_batches(seen(tmp_path / "data", 4))
    stopped = seen(folder, 4)
    assert len({one["report"]["step"] for one in stopped}) == 1
    second = {"directory": str(folder), "settings": overrides(LAYOUTS["fsdp"]), "stop": [1, 0]}
    code, err = run(tmp_path, 2, 2, [second])
    assert code == 0, err
    again = seen(folder, 2)
    assert again[0]["report"]["start_step"] == stopped[0]["report"]["step"] >= 1
    assert again[0]["report"]["step"] < 8
    config = tiny_config(folder, *SETTINGS)
    report = train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
    assert report.start_step == again[0]["report"]["step"] > again[0]["report"]["start_step"]
    check_same(folder, one, accumulated=True)


@pytest.mark.slow  # twice the time after which a silent process counts as dead, and the start of two
@pytest.mark.parametrize("busy", [0, 1])
def test_a_process_that_is_busy_in_one_call_counts_as_alive(busy: int) -> None:
    """Signs of life come from a thread that does not wait for Python, in the coordinator's process too."""
    code = f"""
import ctypes
from capibara.train import join_processes
processes = join_processes()
processes.barrier("before")
if processes.index == {busy}:
    ctypes.PyDLL(None).usleep(12_000_000)  # keeps Python's lock
print(processes.all_say(processes.index))
"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "CAPIBARA_HEARTBEAT_SECONDS": "5",
                **Membership(address, 2, index).variables(),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        for one in processes:
            said, _ = one.communicate(timeout=120)
            assert (one.returncode, said.splitlines()[-1]) == (0, "[0, 1]")
    finally:
        for one in processes:
            one.kill()
            one.wait()


@pytest.mark.slow
def test_without_a_launcher_the_others_learn_of_a_kill_in_a_save_in_half_a_minute(tmp_path: Path) -> None:
    """As on several machines, where only heartbeats tell."""
    folder, failing = tmp_path / "run", {"FAIL_IN_A_SAVE": "kill"}
    (tmp_path / "specs.json").write_text(
        json.dumps([{"directory": str(folder), "settings": overrides(LAYOUTS["fsdp"])}])
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILE} --xla_force_host_platform_device_count=2"
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(tmp_path / "specs.json")],
            env={**os.environ, "XLA_FLAGS": flags, **failing, **Membership(address, 2, index).variables()},
            stderr=subprocess.DEVNULL,
        )
        for index in range(2)
    ]
    try:
        assert processes[1].wait(timeout=300) == -signal.SIGKILL
        begun = time.monotonic()
        assert processes[0].wait(timeout=120) != 0
        assert time.monotonic() - begun < 30
    finally:
        for one in processes:
            one.kill()
            one.wait()
    assert checkpoint_store(folder).steps() == [4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "code", "last"),
    [
        ("kill", 137, r"process 1 of 2 was ended by SIGKILL; the others were stopped"),
        (
            "digest",  # all processes learn of it
            1,
            r"process [01] of 2 failed with exit code 1; the others were stopped: capibara: could not write the "
            r"checkpoint of step 8 to .*: No space left on device. The checkpoint of step 4 is intact.*",
        ),
        (
            "disk",
            1,
            r"process 1 of 2 failed with exit code 1; the others were stopped: capibara: could not write the "
            r"checkpoint of step 8 to .*: No space left on device. The checkpoint of step 4 is intact.*",
        ),
    ],
)
def test_a_process_that_fails_in_a_save_ends_the_run_and_leaves_the_checkpoint_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, code: int, last: str
) -> None:
    folder = tmp_path / "run"
    spec = {"directory": str(folder), "settings": overrides(LAYOUTS["fsdp"])}
    monkeypatch.setenv("FAIL_IN_A_SAVE", how)
    found, err = run(tmp_path, 2, 2, [spec])
    assert found == code, err
    assert re.fullmatch(f"capibara launch: {last}", err[-1])
    assert checkpoint_store(folder).steps() == [4]
    monkeypatch.delenv("FAIL_IN_A_SAVE")
    found, err = run(tmp_path, 2, 2, [spec])
    assert found == 0, err
    assert seen(folder, 2)[0]["report"]["start_step"] == 4
    check_same(folder, one_device(tmp_path / "one"))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["4", "8"]


@pytest.mark.slow
def test_packed_documents_have_one_order(tmp_path: Path) -> None:
    pytest.importorskip("grain", reason="packing needs grain")
    lines = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}."} for n in range(120)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    data = f"data.paths=[{json.dumps(str(tmp_path / 'sums.jsonl'))}]"
    folder, settings = tmp_path / "run", [*overrides(LAYOUTS["fsdp"]), data]
    for count, stop in ((2, [2, 1]), (4, None)):
        spec = {"directory": str(folder), "settings": settings, "stop": stop}
        code, err = run(tmp_path, count, 4 // count, [spec])
        assert code == 0, err
    config = tiny_config(tmp_path / "one", *SETTINGS, data)
    corpus = load_data(config.data)
    train(config, TinyModel(config), corpus, devices=jax.devices()[:1], measure_utilisation=False)
    check_same(folder, tmp_path / "one")
    positions = [checkpoint_store(one).newest().meta["position"] for one in (folder, tmp_path / "one")]  # pyright: ignore
    assert positions[0] == positions[1]


def test_a_folder_that_is_not_shared_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two of three see the file that process 0 writes; of process 1 the folder is another one.
    monkeypatch.setattr("capibara.train.processes._SHARED", 0.2)
    processes = Processes(3, 0)
    seen: list[list[str]] = []

    def all_say(_: Processes, value: bool) -> list[bool]:
        seen.append(sorted(path.name for path in tmp_path.iterdir()))
        return [value, False, True]

    monkeypatch.setattr(Processes, "first_does", lambda _, action: action())
    monkeypatch.setattr(Processes, "all_say", all_say)
    with pytest.raises(ProcessesError, match=r"process 1 of 3 do not see .*--directory"):
        processes.check_shared(tmp_path)
    ((token,),) = seen
    assert token.startswith(".")
    assert not list(tmp_path.iterdir())  # it is gone
    monkeypatch.setattr(Processes, "first_does", lambda _, action: ".not-there.tmp")
    monkeypatch.setattr(Processes, "all_say", lambda _, value: [True, value, True])
    with pytest.raises(ProcessesError, match="process 1 of 3"):
        Processes(3, 1).check_shared(tmp_path)


def kill_and_go_on(base: Path, kills: int, steps: int, seed: int, *, memory: bool = False) -> None:
    """SIGKILL for random processes at random moments; the launcher starts all again, and nothing is different."""
    chance = random.Random(seed)
    text = base / "text.txt"
    text.write_text(TEXT)
    settings = [
        *TINY,
        f"train.steps={steps}",
        "batch_size=8",
        "train.log_every=1",
        *(
            ("checkpoint.every_steps=1000", "checkpoint.memory_every_steps=1")
            if memory
            else ("checkpoint.every_steps=2",)
        ),
    ]
    layout = [*Layout(mesh=(("data", 2),)).overrides(), "checkpoint.keep=3"]
    environment = {
        **os.environ,
        "XLA_FLAGS": QUICK_COMPILE,
        "JAX_COMPILATION_CACHE_DIR": str(base / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    def start(folder: Path) -> subprocess.Popen[bytes]:
        options = ["-n", "2", "--devices", "1", "--restarts", str(kills), "--grace", "0.2"]
        program = [str(PROGRAM.with_name("tiny_cli.py")), "train", str(text), *settings, *layout]
        with open(f"{folder}.log", "wb") as log:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "capibara",
                    "launch",
                    *options,
                    "--",
                    *program,
                    "--directory",
                    str(folder),
                ],
                stdout=log,
                stderr=log,
                env=environment,
            )

    def outcome(folder: Path) -> list[str]:
        losses = read_losses(folder / "metrics.jsonl")
        assert list(losses) == list(range(1, steps + 1))
        return [loss.hex() for loss in losses.values()]

    process = start(base / "undisturbed")
    assert process.wait(timeout=300) == 0, Path(f"{base / 'undisturbed'}.log").read_text()
    process = start(base / "disturbed")
    try:
        for number in range(kills):
            newest = max(checkpoint_store(base / "disturbed").steps(), default=0)
            if memory:
                newest = 2 + max(read_losses(base / "disturbed" / "metrics.jsonl"), default=0)
            goal = newest + chance.choice((1, 2, 3))
            while not any(step >= goal for step in read_losses(base / "disturbed" / "metrics.jsonl")):
                assert process.poll() is None, Path(f"{base / 'disturbed'}.log").read_text()
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.2))
            children: list[str] = []
            while len(children) != 2:  # they may just be started
                assert process.poll() is None, Path(f"{base / 'disturbed'}.log").read_text()
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[chance.randrange(2)]), signal.SIGKILL)
            while f"starting all again ({number + 1} of" not in Path(f"{base / 'disturbed'}.log").read_text():
                assert process.poll() is None, Path(f"{base / 'disturbed'}.log").read_text()
                time.sleep(0.01)
        assert process.wait(timeout=300) == 0, Path(f"{base / 'disturbed'}.log").read_text()
    finally:
        process.kill()
        process.wait()
    assert outcome(base / "disturbed") == outcome(base / "undisturbed")
    log = Path(f"{base / 'disturbed'}.log").read_text()
    assert "damaged" not in log
    if memory:  # nothing was on the disk until the end
        resumed = [
            int(step) for step in re.findall(r"after step (\d+) from the copy in the launcher's memory", log)
        ]
        assert len(resumed) == kills
        assert resumed == sorted(resumed)
        assert resumed[0] > 0


@pytest.mark.slow
def test_random_kills_change_nothing(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, kills=4, steps=40, seed=1)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux alone has files in memory")
def test_killed_processes_go_on_from_the_launchers_memory(tmp_path: Path) -> None:
    kill_and_go_on(tmp_path, kills=2, steps=30, seed=5, memory=True)


class Device:
    platform = "cpu"

    def __init__(self, process: int) -> None:
        self.process_index = process


def places(*counts: int) -> list[Any]:
    return [Device(process) for process, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize(
    ("rows", "counts", "expected"),
    [
        (8, (2, 2), [2, 2]),
        (8, (4, 4, 4, 4), [2] * 4),
        (6, (4, 4), [3, 3]),
        (8, (3, 3), [2, 2]),
        (7, (4,), [1]),
    ],
)
def test_every_process_gives_as_many_devices(
    rows: int, counts: tuple[int, ...], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capibara.train.placement.build_mesh", lambda sizes, names, devices: (sizes, devices))
    chosen = Placement.choose(rows, places(*counts)).devices
    assert [sum(d.process_index == n for d in chosen) for n in range(len(counts))] == expected


def test_more_processes_than_rows() -> None:
    with pytest.raises(ConfigError, match=r"6 sequences .* among 4 processes.*train.batch_size=8"):
        Placement.choose(6, places(1, 1, 1, 1))
    with pytest.raises(ConfigError, match=r"tpu.num_chips=4 .* multiple of the 3 processes"):
        Placement.planned(Layout(mesh=(("data", 4),)), places(2, 2, 2))
    with pytest.raises(ConfigError, match=r"at most 1 devices"):
        Placement.planned(Layout(mesh=(("data", 4),)), places(1, 4))


def test_the_error_of_another_process_is_of_its_class() -> None:
    assert type(error_of("RunLockedError", "a text")) is RunLockedError
    assert type(error_of("DataError", "a text")) is DataError
    assert type(error_of("ConfigError", "a text")) is ConfigError
    other = error_of("ZeroDivisionError", "a text")
    assert type(other) is ProcessesError
    assert "ZeroDivisionError: a text" in str(other)
    assert isinstance(error_of("MissingExtraError", "a text"), ProcessesError)


def test_a_group_that_cannot_be_joined_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> None:
        assert options["process_id"] == 1
        raise RuntimeError("Barrier timed out\nand more")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    for name, value in (("COORDINATOR", "host:1"), ("NUM_PROCESSES", "2"), ("PROCESS_ID", "1")):
        monkeypatch.setenv(f"CAPIBARA_{name}", value)
    with pytest.raises(
        ProcessesError, match=r"2 processes at host:1 as process 1: Barrier timed out\. Check"
    ):
        join_processes()
    monkeypatch.setenv("CAPIBARA_NUM_PROCESSES", "1")
    monkeypatch.setenv("CAPIBARA_PROCESS_ID", "0")
    assert join_processes().count == 1  # nobody to join

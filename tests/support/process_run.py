"""What one process of a run trains, and what it saw of it: ``python process_run.py SPECS.json``.

The file has a list of runs, one after another in the same processes: ``directory``, ``settings``, and ``stop``: the
step after which one process is asked to stop, as by a signal, and the number of that process; ``scale``: how many
devices each process has, after so many looks of a scaler (:class:`Devices`). Each process writes what
it saw to ``process-N.json`` in the folder of the run.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from capibara.train.processes import Processes, by_process, join_processes

joined = join_processes()  # before JAX is used

import jax
import numpy as np
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus

from capibara.cli._leaving import leave
from capibara.train import Run, checkpoint, train
from capibara.train.examples import load_data
from capibara.train.progress import SilentReporter
from capibara.train.scaling.autoscaler import TpuAutoScaler
from capibara.train.signals import StopFlag


class Watch(SilentReporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Stop(StopFlag):
    """Asked to stop once it was looked at so often."""

    looks, after = 0, None

    @property
    def requested(self) -> bool:
        self.looks += 1
        return self.after is not None and self.looks > self.after

    @requested.setter
    def requested(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if value:
            self.after = 0


class Devices:
    """How many devices of each process there are, after so many looks."""

    looks = 0

    def __init__(self, moments: list[list[int]]) -> None:
        self.moments = moments

    def __call__(self) -> list[Any]:
        self.looks += 1
        each = [count for after, count in self.moments if self.looks > after][-1]
        return [device for group in by_process(jax.devices()) for device in group[:each]]


def batches(run: Run) -> str:
    """A digest of the first batches as the devices of this process hold them, by row of the global batch."""
    rows = {}
    for step in range(3):
        for shard in run.put_batch(step)["tokens"].addressable_shards:
            for row, tokens in zip(
                range(*shard.index[1].indices(10**6)), np.asarray(shard.data)[0], strict=False
            ):
                rows[f"{step} {row}"] = hashlib.sha256(tokens.tobytes()).hexdigest()[:16]
    return json.dumps(rows)


def one(spec: dict[str, Any]) -> dict[str, Any]:
    folder = Path(spec["directory"])
    config = tiny_config(folder, *spec["settings"])
    stop, watch = Stop(), Watch()
    if spec.get("stop") and spec["stop"][1] == joined.index:
        stop.after, stop.signal = spec["stop"][0], 15
    corpus = load_data(config.data) if config.data.paths else tiny_corpus()
    options: dict[str, Any] = {"measure_utilisation": False, "reporter": watch, "stop": stop}
    if "scale" in spec:
        scaler = TpuAutoScaler(
            1, 64, scaling_policy="utilization", devices=Devices(spec["scale"]), cooldown=0.0
        )
        with scaler.managed_scaling():
            report = train(config, TinyModel(config), corpus, **options)
    else:
        report = train(config, TinyModel(config), corpus, **options)
    return {
        "report": report.to_dict(),
        "notes": watch.notes,
        "batches": json.loads(batches(Run.build(config, TinyModel(config), corpus))),
        "processes": [Processes.here().count, Processes.here().index, len(jax.devices())],
    }


def fail_in_a_save(how: str) -> None:
    """Let process 1 die, or its disk fail, at its part of the checkpoint of step 8."""
    name = "sync_and_digest" if how == "digest" else "_write_item"
    real = getattr(checkpoint, name)

    def failing(path: Path, *rest: Any) -> Any:
        if ".tmp-8-" in str(path):
            if how == "kill":
                os.kill(os.getpid(), 9)
            raise OSError(28, os.strerror(28))
        return real(path, *rest)

    setattr(checkpoint, name, failing)


if __name__ == "__main__":
    if "FAIL_IN_A_SAVE" in os.environ and joined.index == 1:
        fail_in_a_save(os.environ["FAIL_IN_A_SAVE"])
    for spec in json.loads(Path(sys.argv[1]).read_text()):
        try:
            found = one(spec)
        except BaseException as error:
            leave(error)  # as the command line does
        (Path(spec["directory"]) / f"process-{joined.index}.json").write_text(json.dumps(found))
        Processes.here().barrier("written")

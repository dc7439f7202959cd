"""Kill processes of a training at random, again and again, and see that nothing is lost.

::

    python tests/support/kill_runs.py --kills 20            two processes, always the same mesh
    python tests/support/kill_runs.py --kills 20 --fewer    four processes, at times two of them

The launcher starts the processes again. Kills hit any process, number 0 as often as others, while it starts, trains or
writes a checkpoint. What is checked:

- after each kill the training goes on by itself; how long that takes is reported;
- each start goes on with the batch after the newest checkpoint, and takes the batches in their order: none is trained
  on twice or left out;
- on the same mesh, losses and final parameters are bit for bit those of a run that nobody disturbed; with fewer
  processes, whose sums have another order, within tolerance.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).parent
sys.path.insert(0, str(SUPPORT))

RECORD = "RECORD_BATCHES"


@dataclass
class Outcome:
    """What was done to a run, and what came of it.

    Attributes:
      kills: by the number of the process; in_saves: those while a checkpoint was being written; starting: those before
        the first step of a start.
      seconds: from each kill to the next step that was trained.
      sizes: how many processes each start had.
      bits: whether losses and parameters are bit for bit the undisturbed ones; difference: the largest of a loss.
    """

    kills: dict[int, int] = field(default_factory=dict)
    in_saves: int = 0
    starting: int = 0
    seconds: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    bits: bool = False
    difference: float = 0.0


class Campaign:
    """One run that is killed, and one that is not.

    Args:
      base: a folder. fewer: four processes, of which a failing one is not replaced for some seconds.
    """

    def __init__(self, base: Path, *, kills: int, seed: int, fewer: bool) -> None:
        from tiny_run import QUICK_COMPILE, TEXT, TINY

        self.base, self.kills, self.fewer, self.chance = base, kills, fewer, random.Random(seed)
        self.steps = 30 + 20 * kills
        (base / "text.txt").write_text(TEXT)
        every = ["train.log_every=1", "train.eval_every=1000000", "checkpoint.keep=3"]
        self.settings = [
            *TINY,
            f"train.steps={self.steps}",
            "batch_size=8",
            *every,
            "optimizer.warmup_steps=5",
        ]
        self.environment = {
            **os.environ,
            "XLA_FLAGS": QUICK_COMPILE,
            # As an installed package: not compiled anew by each process.
            "PYTHONPYCACHEPREFIX": str(base / "pycache"),
            "PYTHONDONTWRITEBYTECODE": "",
            "JAX_COMPILATION_CACHE_DIR": str(base / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        self.count, self.last = (4 if fewer else 2), -1

    def start(self, name: str, *settings: str, disturbed: bool) -> subprocess.Popen[bytes]:
        options = ["-n", str(self.count), "--devices", "1", "--grace", "0.2"]
        options += ["--restarts", str(self.kills)] if disturbed else []
        options += ["--min-processes", "2", "--replacements", "1", "--retry", "10"] if self.fewer else []
        # One file for each process of each start: the launcher's own process is the same for all.
        (self.base / f"{name}-batches").mkdir()
        program = [
            str(SUPPORT / "kill_runs.py"),
            "child",
            "train",
            str(self.base / "text.txt"),
            *self.settings,
        ]
        mesh = ["tpu.enabled=true", f"tpu.num_chips={self.count}", f"tpu.topology={self.count}"]
        mesh += ['tpu.mesh_axes=["data"]', *settings, "--directory", str(self.base / name)]
        with open(self.base / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "capibara", "launch", *options, "--", *program, *mesh],
                stdout=log,
                stderr=log,
                env={**self.environment, RECORD: str(self.base / f"{name}-batches")},
            )

    def log(self, name: str = "killed") -> str:
        return (self.base / f"{name}.log").read_text(errors="replace")

    def run(self) -> Outcome:
        """Train undisturbed and disturbed, and compare.

        Raises:
          AssertionError: something is not as it should be.
        """
        outcome = Outcome()
        undisturbed = self.start("whole", f"checkpoint.every_steps={self.steps}", disturbed=False)
        assert undisturbed.wait(timeout=600) == 0, self.log("whole")[-4000:]
        process = self.start("killed", "checkpoint.every_steps=2", disturbed=True)
        try:
            self.wait_for_step(process, 0)
            for _ in range(self.kills):
                self.kill_one(process, outcome)
            assert process.wait(timeout=900) == 0, self.log()[-4000:]
        finally:
            process.kill()
            process.wait()
        self.check(outcome)
        return outcome

    def kill_one(self, launcher: subprocess.Popen[bytes], outcome: Outcome) -> None:
        """Kill a process at a random moment, and wait until the training has gone on."""
        kind = self.chance.choice(("training", "training", "saving", "saving", "starting"))
        if kind == "starting" and outcome.kills:
            # Right after the kill before: a step may not have been trained since.
            time.sleep(self.chance.uniform(0.0, 6.0))
        else:
            if outcome.kills:
                self.wait_for_step(launcher, self.killed_at)
                outcome.seconds.append(time.monotonic() - self.killed)
            time.sleep(self.chance.uniform(0.0, 0.4))
        skipped = kind == "starting" and outcome.kills and not self.has_gone_on(self.killed_at)
        saving = kind == "saving" and self.wait_for_save(launcher)
        processes: dict[int, int] = {}
        while len(processes) < 2:
            assert launcher.poll() is None, self.log()[-4000:]
            processes = children(launcher.pid)
        index = self.chance.choice(sorted(processes))
        if self.fewer and self.last in processes and self.chance.random() < 0.5:
            index = self.last  # it fails again soon, and cannot be replaced
        self.last = index
        before = len(self.log())
        with contextlib.suppress(ProcessLookupError):  # its group may just be ended
            os.kill(processes[index], signal.SIGKILL)
        self.killed, self.killed_at = time.monotonic(), before
        outcome.kills[index] = outcome.kills.get(index, 0) + 1
        outcome.in_saves += saving
        outcome.starting += bool(skipped)
        if sum(outcome.kills.values()) == self.kills:
            self.wait_for_step(launcher, before)
            outcome.seconds.append(time.monotonic() - self.killed)

    def has_gone_on(self, since: int) -> bool:
        """Whether a step was trained by processes that were started after a place in the log."""
        text = self.log()[since:]
        again = text.find("starting all again")
        return re.search(r"^\[0\] step \d+/", text[max(0, again) :], re.MULTILINE) is not None and (
            again >= 0 or since == 0
        )

    def wait_for_step(self, launcher: subprocess.Popen[bytes], since: int) -> None:
        end = time.monotonic() + 300
        while not self.has_gone_on(since):
            assert launcher.poll() is None, self.log()[-4000:]
            assert time.monotonic() < end, self.log()[-4000:]
            time.sleep(0.01)

    def wait_for_save(self, launcher: subprocess.Popen[bytes]) -> bool:
        """Whether a checkpoint is being written."""
        folder, end = self.base / "killed" / "checkpoints", time.monotonic() + 20
        while time.monotonic() < end:
            assert launcher.poll() is None, self.log()[-4000:]
            with contextlib.suppress(OSError):
                if any(name.startswith(".tmp-") for name in os.listdir(folder)):
                    return True
            time.sleep(0.0005)
        return False

    def check(self, outcome: Outcome) -> None:
        import jax
        import numpy as np
        from tiny_model import TinyModel
        from tiny_run import tiny_config

        from capibara.train import checkpoint_store, read_losses, restore_model

        log = self.log()
        assert "damaged" not in log
        config = tiny_config(self.base, *self.settings)
        wanted = corpus_of(self.base).batches(batch_size=8, sequence_length=16, seed=config.train.seed)
        losses, params = {}, {}
        for name in ("whole", "killed"):
            found = read_losses(self.base / name / "metrics.jsonl")
            assert list(found) == list(range(1, self.steps + 1))
            losses[name] = np.array(list(found.values()))
            checkpoint = checkpoint_store(self.base / name).newest()
            assert checkpoint is not None
            assert checkpoint.step == self.steps
            leaves = jax.tree.leaves(restore_model(checkpoint, TinyModel(config)))
            params[name] = np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in leaves])
        outcome.difference = float(abs(losses["whole"] - losses["killed"]).max())
        outcome.bits = all(np.array_equal(both["whole"], both["killed"]) for both in (losses, params))
        if not self.fewer:
            assert outcome.bits
        else:
            np.testing.assert_allclose(losses["killed"], losses["whole"], rtol=1e-4)
            np.testing.assert_allclose(params["killed"], params["whole"], rtol=1e-2, atol=2e-3)
        # Each start goes on where a checkpoint was, and takes one batch after another.
        resumed = {
            0,
            *(int(text.replace(",", "")) for text in re.findall(r"resuming after step ([\d,]+) from", log)),
        }
        trained: set[int] = set()
        for path in (self.base / "killed-batches").iterdir():
            lines = [line.split() for line in path.read_text().splitlines() if line.endswith(".")]
            numbers = [int(number) for number, *_ in lines]
            if not numbers:
                continue
            outcome.sizes.append(int(lines[0][2]))
            assert numbers[0] in resumed
            # The first batch is also what the step is compiled for.
            assert numbers[1:2] in ([], [numbers[0]])
            assert numbers[1:] == list(range(numbers[0], numbers[0] + len(numbers) - 1))
            for number, digest, *_ in lines:
                assert digest == hashlib.sha256(wanted.batch(int(number)).tobytes()).hexdigest()[:16]
            trained.update(numbers[1:])
        assert trained == set(range(self.steps))


def corpus_of(base: Path) -> Any:
    """The text as ``capibara train`` reads it."""
    from tiny_run import tiny_config

    from capibara.train.examples import load_data

    config = tiny_config(base).with_overrides({"data.paths": [str(base / "text.txt")]})
    return load_data(config.data)


def children(pid: int) -> dict[int, int]:
    """Number of a process of the launcher → its id."""
    found = {}
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{child}/environ").read_bytes()
                if match := re.search(rb"CAPIBARA_PROCESS_ID=(\d+)", text):
                    found[int(match[1])] = int(child)
    return found


def child(arguments: list[str]) -> int:
    """``capibara train`` with the tiny model; the number and digest of every batch are written down by process 0."""
    import tiny_cli

    from capibara.train.run import Run

    put = Run.put_batch

    def recorded(self: Run, step: int) -> Any:
        with open(path, "a") as stream:
            digest = hashlib.sha256(self.batches.batch(step).tobytes()).hexdigest()[:16]  # pyright: ignore
            stream.write(f"{step} {digest} {os.environ['CAPIBARA_NUM_PROCESSES']} .\n")
        return put(self, step)

    if os.environ["CAPIBARA_PROCESS_ID"] == "0":
        path = Path(os.environ[RECORD], f"{time.time_ns()}")
        Run.put_batch = recorded
    return tiny_cli.main(arguments)


def main() -> int:
    """Run a campaign, print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fewer", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="capibara-kills-") as folder:
        outcome = Campaign(Path(folder), kills=args.kills, seed=args.seed, fewer=args.fewer).run()
    print(json.dumps(asdict(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(child(sys.argv[2:]) if sys.argv[1:2] == ["child"] else main())

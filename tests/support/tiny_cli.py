"""The command line with the tiny model in the real one's place: ``python tiny_cli.py train …``."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from tiny_model import core_with_tiny_model

import capibara.measure
from capibara.cli import main

# In place of the module, not in it: importing the real one would cost every start of a process.
sys.modules["capibara.core"] = core_with_tiny_model()
# The measurement takes a second of both cores; what it gives is tested where it is made.
capibara.measure.matmul_rate = lambda dtype="float32": 1e11


def kill_in_a_save(step: str) -> None:
    """SIGKILL in the thread that writes the checkpoint of a step, when the model is written and the rest is not."""
    from capibara.train import checkpoint

    real = checkpoint._write_item

    def killed(path: Path, *rest: Any) -> None:
        real(path, *rest)
        if f".tmp-{step}-" in str(path):
            assert threading.current_thread() is not threading.main_thread()
            os.kill(os.getpid(), 9)

    checkpoint._write_item = killed


def hang_in_a_save(step: str) -> None:
    """Never come back from writing the checkpoint of a step, in a thread for which Python waits when it ends."""
    from concurrent.futures import ThreadPoolExecutor

    from capibara.train import checkpoint

    real = checkpoint._write_item

    def hanging(path: Path, *rest: Any) -> None:
        if f".tmp-{step}-" in str(path):
            ThreadPoolExecutor(1).submit(threading.Event().wait).result()
        real(path, *rest)

    checkpoint._write_item = hanging


if __name__ == "__main__":
    if step := os.environ.get("HANG_IN_A_SAVE"):
        hang_in_a_save(step)
    if step := os.environ.get("KILL_IN_A_SAVE"):
        kill_in_a_save(step)
    sys.exit(main())

"""What imports of Capibara cost beside ``import jax``, each in a fresh process, taking turns.

They are measured in rounds, in alternating order, so that a machine that slows down slows all. The processes
time the import themselves; starting Python is not in it. A warm-up round fills the file cache and is dropped.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from typing import Any

__all__ = ["run"]

_CODE = (
    "import time; wall, cpu = time.perf_counter(), time.process_time(); import {module}; "
    "print(time.perf_counter() - wall, time.process_time() - cpu)"
)


def _seconds(module: str) -> tuple[float, float]:
    """Wall and processor seconds of one import in a new Python."""
    command = [sys.executable, "-c", _CODE.format(module=module)]
    wall, cpu = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return float(wall), float(cpu)


def run(rounds: int = 15) -> list[dict[str, Any]]:
    """Rows whose ratio is time of ``import jax`` / time of ours.

    At most 5 % more, 0.952, for the drop-in; at most 10 % more, 0.909, for compose, which imports JAX only when a
    model is compiled for it: the last row is of both together.
    """
    ours = ("capibara.jax", "capibara.compose", "capibara.compose.backends.jax_ops")
    times: dict[str, list[tuple[float, float]]] = {"jax": [], **{module: [] for module in ours}}
    for turn in range(rounds + 1):
        for module in list(times)[:: 1 if turn % 2 else -1]:
            measured = _seconds(module)
            if turn:
                times[module].append(measured)
    wall = {module: statistics.median(pair[0] for pair in pairs) for module, pairs in times.items()}
    cpu = {module: statistics.median(pair[1] for pair in pairs) for module, pairs in times.items()}
    return [
        {
            "what": f"import {module}",
            "shape": f"{rounds} fresh processes each, taking turns",
            "peer": "import jax",
            "ratio": wall["jax"] / wall[module],
            "ours_seconds": wall[module],
            "peer_seconds": wall["jax"],
            "cpu_ratio": cpu["jax"] / cpu[module],
            "paired_ratio": statistics.median(
                jax[0] / own[0] for jax, own in zip(times["jax"], times[module], strict=True)
            ),
        }
        for module in ours
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    for row in run(parser.parse_args().rounds):
        print(row)

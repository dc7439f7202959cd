"""What ``import capibara.jax`` costs beside ``import jax``, each in a fresh process, taking turns.

The two are measured in pairs, in alternating order, so that a machine that slows down slows both. The processes
time the import themselves; starting Python is not in it. A warm-up pair fills the file cache and is dropped.
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
    """One row: the ratio is time of ``import jax`` / time of ``import capibara.jax``; at most 5 % more is 0.952."""
    times: dict[str, list[tuple[float, float]]] = {"jax": [], "capibara.jax": []}
    for turn in range(rounds + 1):
        for module in list(times)[:: 1 if turn % 2 else -1]:
            measured = _seconds(module)
            if turn:
                times[module].append(measured)
    wall = {module: statistics.median(pair[0] for pair in pairs) for module, pairs in times.items()}
    cpu = {module: statistics.median(pair[1] for pair in pairs) for module, pairs in times.items()}
    pairs = zip(times["jax"], times["capibara.jax"], strict=True)
    return [
        {
            "what": "import capibara.jax",
            "shape": f"{rounds} fresh processes each, taking turns",
            "peer": "import jax",
            "ratio": wall["jax"] / wall["capibara.jax"],
            "ours_seconds": wall["capibara.jax"],
            "peer_seconds": wall["jax"],
            "cpu_ratio": cpu["jax"] / cpu["capibara.jax"],
            "paired_ratio": statistics.median(theirs[0] / ours[0] for theirs, ours in pairs),
        }
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    for row in run(parser.parse_args().rounds):
        print(row)

"""One process of many that train over their devices together: ``python axes_processes.py FOLDER STEPS CASE``.

The case is one of ``axes_cases.SPREAD``. Process 0 writes what came of it to ``found.npz``: the ``losses`` and
``norms`` of all steps, and each parameter under its name.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from capibara.train.processes import join_processes

joined = join_processes()  # before JAX is used

import axes_cases
import jax
import numpy as np

if __name__ == "__main__":
    folder, steps, name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    assert (joined.count, jax.local_device_count()) == (4, 8)
    kind, axes, options = axes_cases.SPREAD[name]
    losses, norms, params, facts = axes_cases.run(kind, axes, options, steps)
    if joined.first:
        arrays = {f"params/{key}": value for key, value in params.items()}
        np.savez(folder / "found.npz", losses=losses, norms=norms, part=facts["part"], **arrays)
    joined.barrier("written")

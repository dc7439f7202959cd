"""Programs for tests of the planner's compiler: named there as ``"plan_builders:product"``."""

from __future__ import annotations

import os
import time
from typing import Any

from capibara.plan import Workload


def product(mesh: Any, *, rows: int, width: int = 256) -> Workload:
    """``x @ w``, rows over ``data``, columns over ``model``."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    x = jax.ShapeDtypeStruct(
        (rows, width), "float32", sharding=NamedSharding(mesh, PartitionSpec("data", None))
    )
    w = jax.ShapeDtypeStruct(
        (width, width), "float32", sharding=NamedSharding(mesh, PartitionSpec(None, "model"))
    )
    return Workload(jax.jit(lambda w, x: x @ w).lower(w, x), {"parameters": w, "batch": x})


def failing(mesh: Any) -> Workload:
    """Raises."""
    raise ValueError(f"no program for {mesh.size} devices")


def dying(mesh: Any) -> Workload:
    """Ends the process as a crash does."""
    print("these are my last words", flush=True)
    os._exit(3)


def telling(mesh: Any, *, path: str) -> Workload:
    """Says who it is, and does not end."""
    with open(f"{path}.new", "w") as stream:
        stream.write(str(os.getpid()))
    os.replace(f"{path}.new", path)
    return hanging(mesh)


def hanging(mesh: Any) -> Workload:
    """Does not end."""
    time.sleep(3600)
    return failing(mesh)

"""Any JAX function as a workload: exported to a file by the process that has it, lowered by the one that compiles.

``jax.export`` turns the function into StableHLO for TPUs without a TPU. The file holds a function of flat lists, so no
type of the user's has to be known to the worker, and shardings are not in it: they are the layout's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from capibara.plan.errors import PlanError
from capibara.plan.workloads.workload import Workload

__all__ = ["MAX_BYTES", "lower_exported"]

MAX_BYTES = 1 << 30


def lower_exported(
    mesh: Any,
    *,
    path: str,
    sha256: str,
    specs: Sequence[Sequence[Any]],
    kinds: Mapping[str, Sequence[int]],
    donated: Sequence[int],
) -> Workload:
    """Lower an exported function.

    Args:
      mesh: devices, real or described.
      path, sha256: the file, and what it has to be.
      specs: for each flat argument, one entry a dimension: None, a mesh axis or a list of them.
      kinds: numbers of the flat arguments by kind.
      donated: numbers of the flat arguments whose memory outputs may take; outputs of the same shape and order are laid
        out like them.

    Raises:
      PlanError: the file is another one.
    """
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    if Path(path).stat().st_size > MAX_BYTES:
        raise PlanError(f"{path} is larger than {MAX_BYTES} bytes")
    data = Path(path).read_bytes()
    if hashlib.sha256(data).hexdigest() != sha256:
        raise PlanError(f"{path} is not the function that was exported: its SHA-256 differs")
    exported = jax.export.deserialize(bytearray(data))
    arguments = [
        jax.ShapeDtypeStruct(
            aval.shape,
            aval.dtype,
            sharding=NamedSharding(
                mesh, PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in spec))
            ),
        )
        for aval, spec in zip(exported.in_avals, specs, strict=True)
    ]
    # A step gives back the state it was given: what is donated first comes out first, if shapes agree.
    outputs: list[Any] = [None] * len(exported.out_avals)
    for place, number in enumerate(donated):
        if place < len(outputs):
            out, given = exported.out_avals[place], exported.in_avals[number]
            if (out.shape, out.dtype) == (given.shape, given.dtype):
                outputs[place] = arguments[number].sharding
    jitted = jax.jit(exported.call, donate_argnums=tuple(donated), out_shardings=tuple(outputs))
    by_kind = {kind: [arguments[n] for n in numbers] for kind, numbers in kinds.items()}
    return Workload(jitted.lower(*arguments), by_kind)

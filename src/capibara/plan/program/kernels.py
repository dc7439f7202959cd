"""Calls of code that XLA did not write, and what the backend configuration says of it and of collectives."""

from __future__ import annotations

import math
import re

from capibara.plan.program.flops import operand_shape
from capibara.plan.program.text import Computation, Instruction

__all__ = ["NOTES", "collective_algorithm", "cost_estimate", "custom_call_target", "kernel_name"]

# Custom calls that are notes to the compiler or buffers, not work.
NOTES = {
    "AllocateBuffer",
    "AllocateHbm",
    "AssumeGatherIndicesInBound",
    "ConcatBitcast",
    "CreateBuffer",
    "GatherScatterIndicesBitpacked",
    "PinToDevice",
    "PrepareAsyncCallDone",
    "PrepareAsyncCallStart",
    "PinToDeviceSram",
    "MoveToDevice",
    "MoveToHost",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
    "Sharding",
    "SliceToDynamic",
    "PadToStatic",
    "annotate_device_placement",
    "xla.sdy.FuncResultSharding",
}
_TARGET = re.compile(r'custom_call_target="((?:[^"\\]|\\.)*)"')


def custom_call_target(instruction: Instruction) -> str:
    """What a custom call calls."""
    found = _TARGET.search(instruction.head)
    return found[1] if found else ""


def kernel_name(instruction: Instruction) -> str:
    """The kernel's own name where the text states it, else the instruction's."""
    found = re.search(r'kernel_name\s*=\s*"([^"]{1,200})"|"kernel_name":\s*"([^"]{1,200})"', instruction.rest)
    return (found[1] or found[2]) if found else instruction.name


def cost_estimate(instruction: Instruction, computation: Computation) -> tuple[int | None, int | None]:
    """(FLOPs, bytes) as a custom call states them itself."""
    tail = instruction.tail
    at = tail.find('"cost_estimate"')
    if at >= 0:
        flops = re.search(r'"flops":\s*"?(-?\d{1,18})', tail[at : at + 400])
        moved = re.search(r'"bytes_accessed":\s*"?(-?\d{1,18})', tail[at : at + 400])
        return (
            int(flops[1]) if flops and int(flops[1]) >= 0 else None,
            int(moved[1]) if moved and int(moved[1]) > 0 else None,
        )
    gemm = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', tail)
    if gemm and instruction.operands:  # XLA's calls of matrix libraries on GPUs
        left = operand_shape(instruction, computation, 0)
        dims = [int(d) for d in re.findall(r"\d{1,3}", gemm[1])]
        if all(d < len(left.dims) for d in dims) and instruction.shapes:
            return 2 * instruction.shapes[0].elements * math.prod(left.dims[d] for d in dims), None
    return None, None


def collective_algorithm(tail: str) -> tuple[str, int]:
    """The form of a collective that the compiler chose, and along how many axes of the torus it works."""
    at = tail.find('"collective_algorithm_config"')
    if at < 0:
        return "", 0
    found = re.search(r'"emitter":"(\w{1,80})"', tail[at:])
    name = found[1] if found else ""
    dims = re.match(r"(\d)D", name)
    if dims:
        return name, int(dims[1])
    dims = re.search(r"num_dims:(\d)", tail[at : at + 2000])
    if dims:
        return name, int(dims[1])
    return name, 1 if "SinglePhaseRing" in name or "StrategyRing{" in tail[at : at + 2000] else 0

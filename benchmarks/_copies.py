"""Bytes that a Pallas TPU kernel's pipeline copies between the chip's memory (HBM) and on-chip memory (VMEM).

The pipeline copies a block of an input when its index differs from that of the step before, and writes a block of the
output when its index is about to change. A block that reaches beyond its array is copied as far as the array goes. The
last axis counts as it is, without the padding to 128 that its layout has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks._bundles import KINDS

__all__ = ["Operand", "bytes_per_cycle", "copied"]


@dataclass(frozen=True)
class Operand:
    """An input or the output of a kernel.

    Attributes:
      whole: its shape.
      block: the shape of its blocks.
      index: for each axis the index of the block that each step of the grid takes, in the order of the steps.
    """

    whole: tuple[int, ...]
    block: tuple[int, ...]
    index: tuple[np.ndarray, ...]

    @property
    def elements(self) -> int:
        """Elements that are copied."""
        index = np.stack(self.index)
        fresh = np.append(True, (index[:, 1:] != index[:, :-1]).any(axis=0))
        block, whole = np.array(self.block)[:, None], np.array(self.whole)[:, None]
        return int(np.minimum(block, whole - index * block)[:, fresh].prod(axis=0).sum())


def copied(operands: Sequence[Operand], itemsize: int) -> int:
    """Bytes of all copies of a kernel whose arrays have elements of ``itemsize`` bytes."""
    return itemsize * sum(each.elements for each in operands)


def bytes_per_cycle(kind: str) -> float:
    """Bytes between memory and one core in a cycle: the core's share where a chip has several (v4 and v5p: half).

    Raises:
      ValueError: the catalogue does not say the chip's bandwidth.
    """
    from capibara.plan.slices import parse_slice

    target = parse_slice(KINDS[kind])
    bandwidth, cores = target.chip.hbm_bandwidth, target.chip.cores_per_chip or 1
    if bandwidth is None or not math.isfinite(bandwidth):
        raise ValueError(f"kind: got {kind!r}, expected a chip whose memory bandwidth the catalogue states")
    return bandwidth / cores / target.clock_hz

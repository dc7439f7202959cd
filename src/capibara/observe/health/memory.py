"""Fill memory with patterns that depend on the address, read it back, and compare.

Each word holds a hash of its own index, so that data which ends up at another address is seen, as is a bit that is
stuck, flips by itself or changes with its neighbour. Then each bit is inverted in place and compared again: every cell
holds a 0 and a 1. All blocks are written before the first is read, so that caches hold little of it.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.errors import JaxRuntimeError

from capibara.observe.health.results import MemoryHealth
from capibara.observe.health.work import DeviceWork

__all__ = ["check_memory", "is_exhausted", "measure_bandwidth", "size_to_test"]

# Bytes of a block, the unit in which memory is filled: inverting one takes an accelerator longer than starting that.
_BLOCK, _CPU_BLOCK = 256 * 2**20, 16 * 2**20
_SMALLEST = 2**16
_TIMES = 3  # inversions; odd, so that the bits are inverted at the end. The first one compiles.
_ONES = 0xFFFFFFFF


def size_to_test(device: Any, fraction: float, most: int) -> tuple[int, str]:
    """Bytes to test: a share of what is free, at most ``most``; and why it is 0.

    On a CPU, what is free is the machine's, or the control group's, shared by all CPU devices.
    """
    from capibara.hardware.telemetry import available_memory
    from capibara.memory.budget import device_budget
    from capibara.memory.errors import MemorySettingError

    try:
        free = device_budget(device).free()
    except MemorySettingError:
        return 0, "the device does not report its memory"
    if device.platform == "cpu" and (available := available_memory()) is not None:
        free = min(free, available)
    share = int(max(free, 0) * fraction)
    if share < _SMALLEST:
        why = f"{fraction:.3g} of the {max(free, 0):,} free bytes is less than the {_SMALLEST:,} of the smallest test"
        return 0, why
    if most < _SMALLEST:  # no other bound is that small
        return 0, f"memory_limit_bytes is {most:,}, and the smallest test needs {_SMALLEST:,} bytes"
    return min(share, most), ""


def check_memory(work: DeviceWork, device: Any, size: int, seed: int) -> MemoryHealth:
    """Test so many bytes of a device's memory, of which one more block is needed for a moment."""
    words = _words(device, size)
    count = size // (words * 4)
    seeds = [jax.device_put(_seed(seed, number), device) for number in range(count)]
    blocks: list[Any] = []
    try:
        for each in seeds:  # those before an error stay
            blocks.append(jax.block_until_ready(work.write(each, words)))  # noqa: PERF401
    except JaxRuntimeError as error:
        if not is_exhausted(error):
            raise
        # Others use the device, too, or its memory is fragmented: what could be filled is tested.
        blocks = blocks[: len(blocks) // 2]
        if not blocks:
            return MemoryHealth(0, problem=f"a block of {words * 4:,} bytes could not be allocated")
    wrong, first, bits = _compare(work, device, blocks, seeds, words, inverted=False)
    times = []
    for _ in range(_TIMES):
        # Queued one behind the other, so that starting them costs little.
        blocks, seconds = work.timed(device, lambda now=blocks: [work.complement(block) for block in now])
        times.append(seconds)
    again, first_again, bits_again = _compare(work, device, blocks, seeds, words, inverted=True)
    if first is None:
        first, bits = first_again, bits_again
    return MemoryHealth(
        tested=len(blocks) * words * 4,
        wrong=wrong + again,
        first_offset=first,
        wrong_bits=bits,
        bandwidth=2 * len(blocks) * words * 4 / max(min(times[1:]), 1e-9),
    )


def is_exhausted(error: BaseException) -> bool:
    """Whether an error says that there is too little memory."""
    return "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()


def _words(device: Any, size: int) -> int:
    block = _CPU_BLOCK if device.platform == "cpu" else _BLOCK
    return max(1, min(size, block) // 4)


def _seed(seed: int, number: int) -> np.uint32:
    return np.uint32((seed * 0x9E3779B1 + number * 0x7FEB352D + 1) & _ONES)


def _compare(
    work: DeviceWork, device: Any, blocks: list[Any], seeds: list[Any], words: int, *, inverted: bool
) -> tuple[int, int | None, int | None]:
    mask = jax.device_put(np.uint32(_ONES if inverted else 0), device)
    wrong, first, bits = 0, None, None
    for number, block in enumerate(blocks):
        count, index, differing = (
            int(value) for value in jax.device_get(work.compare(block, seeds[number], mask))
        )
        wrong += count
        if count and first is None:
            first, bits = (number * words + index) * 4, differing
    return wrong, first, bits


def measure_bandwidth(work: DeviceWork, device: Any, size: int) -> float:
    """Bytes per second, read and written, of inverting a block."""
    words = _words(device, size)
    block = work.complement(work.write(jax.device_put(np.uint32(1), device), words))
    jax.block_until_ready(block)
    calls = 1 if device.platform == "cpu" else 8

    def run(block: Any) -> Any:
        for _ in range(calls):
            block = work.complement(block)
        return block

    times = []
    for _ in range(5):
        block, seconds = work.timed(device, lambda now=block: run(now))
        times.append(seconds)
    return 2 * calls * words * 4 / max(min(times), 1e-9)

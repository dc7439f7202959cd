"""Arrays in large pages, as the system itself counts them."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.memory import large_pages
from capibara.memory.large_pages import ask_for_large_pages, spans_of

SMAPS = Path("/proc/self/smaps")
LARGE = 1 << 21


def in_large_pages(array: jax.Array) -> int:
    """Bytes in large pages of the mappings that an array lies in."""
    first, total = array.unsafe_buffer_pointer(), 0
    for one in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", SMAPS.read_text()):
        begin, end = (int(at, 16) for at in one.split(maxsplit=1)[0].split("-"))
        if begin < first + array.nbytes and first < end:
            found = re.search(r"^AnonHugePages: +(\d+) kB$", one, re.M)
            total += 0 if found is None else 1024 * int(found[1])
    return total


def collapses() -> bool:
    """Whether the system moves memory into large pages at once."""
    with mmap.mmap(-1, 2 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(bytes(2 * LARGE))
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        first = -start % LARGE
        try:
            memory.madvise(25, first, LARGE)
        except OSError:
            return False
        return True


def made(count: int) -> jax.Array:
    return jnp.arange(count, dtype=jnp.float32) + 1  # of XLA's own memory


def move(tree: Any) -> None:
    for start, length in spans_of(tree):
        ask_for_large_pages(start, length, move=True)


def test_weights_of_several_pages_move_and_stay_as_they_are():
    if not SMAPS.is_file() or large_pages._large_page() != LARGE or not collapses():
        pytest.skip("no large pages of 2 MiB here, or Linux before 6.1")
    array = made(16 << 20)
    array.block_until_ready()
    place, before = array.unsafe_buffer_pointer(), in_large_pages(array)
    move({"weight": [array, array[:3], np.ones(1 << 20), jax.ShapeDtypeStruct((9,), "f4")]})
    after = in_large_pages(array)
    assert after >= max(before, array.nbytes - 2 * LARGE)
    assert array.unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(array, np.arange(16 << 20, dtype=np.float32) + 1)


def test_what_lies_side_by_side_is_one() -> None:
    """Layers are parts of one array, most of them smaller than a large page."""
    if large_pages._large_page() != LARGE:
        pytest.skip("no large pages of 2 MiB here")
    memory = np.zeros(LARGE + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    whole = memory[begin : begin + LARGE].view(np.float32).reshape(8, -1)
    parts = [jax.device_put(part, may_alias=True) for part in whole]
    start = whole.ctypes.data
    assert [part.unsafe_buffer_pointer() - start for part in parts] == [i * LARGE // 8 for i in range(8)]
    assert spans_of({"layers": parts[::-1], "again": parts[2], "small": made(8)}) == {(start, LARGE)}
    assert spans_of(parts[:3] + parts[4:]) == set()


def test_a_system_without_large_pages_is_left_alone(monkeypatch, tmp_path):
    check_left_alone(monkeypatch, tmp_path / "nothing")


def test_large_pages_that_are_turned_off_stay_off(monkeypatch, tmp_path):
    """The request to move what is there would be granted all the same."""
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    (tmp_path / "hpage_pmd_size").write_text(f"{LARGE}\n")
    check_left_alone(monkeypatch, tmp_path)


def check_left_alone(monkeypatch, settings: Path) -> None:
    large_pages._large_page.cache_clear()
    monkeypatch.setattr(large_pages, "_SETTINGS", settings)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("the system was asked"))
    try:
        array = made(1 << 20)
        assert spans_of([array]) == set()
        assert not ask_for_large_pages(array.unsafe_buffer_pointer(), array.nbytes, move=True)
    finally:
        large_pages._large_page.cache_clear()


def test_any_dtype_is_moved_without_a_copy():
    """NumPy has no keys of JAX, and copies numbers of 4 bits, which the array then holds beside its own."""
    nibbles = jnp.ones(4 << 20, "int4")
    keys = jax.random.split(jax.random.key(0), 1 << 18)
    before = jax.random.key_data(keys)
    move([nibbles, keys])
    assert nibbles.addressable_shards[0].data._npy_value is None  # pyright: ignore
    np.testing.assert_array_equal(jax.random.key_data(keys), before)
    assert bool((nibbles == 1).all())

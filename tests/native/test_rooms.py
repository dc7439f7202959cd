"""Memory for arrays that is handed out again."""

from __future__ import annotations

import contextlib
import gc
import threading
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.native import rooms
from capibara.native.rooms import is_reusing, reuse_rooms, room

PAGE = rooms._PAGE


def address(x: np.ndarray) -> int:
    return x.__array_interface__["data"][0]


@pytest.mark.parametrize("reused", [False, True])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((), np.float64), ((0, 3), np.float32), ((3, 1000, 7), ml_dtypes.bfloat16)]
)
def test_an_array_of_that_shape_in_whole_pages(shape: tuple[int, ...], dtype: type, reused: bool):
    with reuse_rooms() if reused else contextlib.nullcontext():
        x = room(shape, dtype)
        x[...] = 3
        assert x.shape == shape
        assert x.dtype == dtype
        assert address(x) % PAGE == 0
        assert (np.asarray(x, np.float32) == 3).all()
    assert (np.asarray(x, np.float32) == 3).all()  # what is held stays


def test_memory_is_handed_out_again_once_nothing_holds_it():
    with reuse_rooms():
        x = room((4 * PAGE,), np.uint8)
        view, first = x[PAGE : 2 * PAGE].view(np.float32), address(x)
        del x
        other = room((4 * PAGE,), np.uint8)
        assert not first <= address(other) < first + 4 * PAGE
        del view
        assert address(room((4 * PAGE,), np.uint8)) == first


def test_parts_beside_one_another_are_joined():
    with reuse_rooms():
        whole = room((8 * PAGE,), np.uint8)
        del whole
        parts = [room((2 * PAGE,), np.uint8) for _ in range(4)]
        first = min(map(address, parts))
        for part in (1, 3, 0, 2):
            parts[part] = np.empty(0, np.uint8)
        assert address(room((8 * PAGE,), np.uint8)) == first
        assert len(rooms._in_use._arenas) == 1  # pyright: ignore[reportOptionalMemberAccess]


def test_what_a_device_holds_is_not_handed_out():
    with reuse_rooms():
        given = room((1000, 1000), np.float32)
        given[...] = 5
        x = jax.device_put(given)
        same = x.unsafe_buffer_pointer() == address(given)
        del given
        others = [room((1000, 1000), np.float32) for _ in range(3)]
        for other in others:
            other[...] = 9
        assert same  # otherwise this shows nothing
        assert (np.asarray(x) == 5).all()
    assert (np.asarray(x) == 5).all()
    del others, x
    gc.collect()


def test_at_the_end_what_is_free_goes_back_to_the_system():
    with reuse_rooms():
        held, dropped = room((PAGE,), np.uint8), room((PAGE,), np.uint8)
        held[...], dropped[...] = 1, 2
        arenas = list(rooms._in_use._arenas)  # pyright: ignore[reportOptionalMemberAccess]
        del dropped
        assert sum(len(arena.returned) for arena in arenas) == 1
    assert rooms._in_use is None
    assert not any(arena.free or arena.returned or arena.reused for arena in arenas)
    assert (held == 1).all()
    del held
    assert not any(arena.free or arena.returned for arena in arenas)


def test_memory_that_goes_back_is_the_systems():
    """Pages of an arena that live on are empty when they were dropped after the end."""
    with reuse_rooms():
        whole = room((4 * PAGE,), np.uint8)
        del whole
        first, second = room((2 * PAGE,), np.uint8), room((2 * PAGE,), np.uint8)
        first[...], second[...] = 1, 2
        (arena,) = rooms._in_use._arenas  # pyright: ignore[reportOptionalMemberAccess]
    at = address(first) - arena.address
    del first
    assert bytes(arena.memory[at : at + 2 * PAGE]) == bytes(2 * PAGE)
    assert (second == 2).all()


def test_a_part_dropped_by_the_garbage_collector_is_found():
    with reuse_rooms():
        x = room((4 * PAGE,), np.uint8)
        first, ring = address(x), [x]
        ring.append(ring)  # pyright: ignore[reportArgumentType]
        del x, ring
        gc.collect()
        assert address(room((4 * PAGE,), np.uint8)) == first


def test_within_another_one_that_one_goes_on():
    with reuse_rooms():
        outer = rooms._in_use
        with reuse_rooms():
            assert rooms._in_use is outer
        assert rooms._in_use is outer
        assert is_reusing()
    assert not is_reusing()


def test_memory_that_the_system_does_not_have():
    with pytest.raises(MemoryError, match="bytes: "):
        room((1 << 60,), np.uint8)


def test_sizes_of_numpy_do_not_overflow():
    shape: Any = np.array([70_000, 70_000, 0], np.int32)
    assert room(tuple(shape), np.uint8).shape == (70_000, 70_000, 0)
    with pytest.raises(MemoryError):
        room((*shape[:2], 1 << 40), np.uint8)


def test_an_error_within_ends_it():
    with pytest.raises(KeyError), reuse_rooms():
        raise KeyError
    assert rooms._in_use is None


def test_threads_get_memory_of_their_own():
    failed: list[int] = []

    def work(mark: int) -> None:
        random = np.random.default_rng(mark)
        for _ in range(200):
            x = room((int(random.integers(1, 5 * PAGE)),), np.uint8)
            x[...] = mark
            if not (x == mark).all():
                failed.append(mark)

    with reuse_rooms():
        threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failed


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6 * PAGE)), max_size=30))
def test_arrays_never_overlap(steps: list[tuple[int, int]]):
    with reuse_rooms():
        held: list[tuple[np.ndarray, int]] = []
        for mark, (drop, size) in enumerate(steps):
            x = room((size,), np.uint8)
            x[...] = mark
            held.append((x, mark))
            del x
            if drop == 0:
                held.pop(len(held) // 2)
            for array, own in held:
                assert (array == own).all()

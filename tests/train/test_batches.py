"""Batches: a pure function of seed and step that visits everything once an epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.train.batches import BatchSampler, permute, validation_batches
from capibara.train.errors import DataError


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_bijection(size: int, key: int) -> None:
    keys = np.full(size, key, np.uint64)
    result = permute(np.arange(size, dtype=np.uint64), size, keys)
    assert sorted(result.tolist()) == list(range(size))


def test_permute_depends_on_the_key_and_moves_things() -> None:
    index = np.arange(1000, dtype=np.uint64)
    orders = [permute(index, 1000, np.full(1000, key, np.uint64)) for key in range(5)]
    for number, order in enumerate(orders):
        assert (order == index).mean() < 0.02
        for other in orders[:number]:
            assert (order == other).mean() < 0.02


def test_permute_works_far_beyond_memory() -> None:
    size = 2**61 + 12345
    index = np.asarray([0, 1, size - 1], np.uint64)
    result = permute(index, size, np.full(3, 7, np.uint64))
    assert len(set(result.tolist())) == 3
    assert all(int(value) < size for value in result)


@given(
    length=st.integers(2, 400),
    sequence=st.integers(1, 50),
    batch=st.integers(1, 9),
    step=st.integers(0, 10**12),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_batch_is_a_slice_of_the_text_and_repeats(
    length: int, sequence: int, batch: int, step: int, seed: int
) -> None:
    tokens = np.random.default_rng(length).integers(0, 256, length).astype(np.uint8)
    if length < sequence + 1:
        with pytest.raises(DataError, match="too short"):
            BatchSampler(tokens, batch, sequence, seed)
        return
    sampler = BatchSampler(tokens, batch, sequence, seed)
    rows = sampler.batch(step)
    assert rows.shape == (batch, sequence + 1)
    assert rows.dtype == np.int32
    starts = sampler.starts(step)
    assert starts.min() >= 0
    assert starts.max() + sequence + 1 <= length
    for start, row in zip(starts, rows, strict=True):
        assert row.tolist() == tokens[start : start + sequence + 1].tolist()
    np.testing.assert_array_equal(rows, BatchSampler(tokens.copy(), batch, sequence, seed).batch(step))


def test_an_epoch_visits_every_window_once_whatever_the_batch_size() -> None:
    sampler = BatchSampler(np.zeros(1010, np.uint8), batch_size=7, sequence_length=10, seed=3)
    windows = sampler.windows_per_epoch
    assert windows == 100
    starts = np.concatenate([sampler.starts(step) for step in range(40)])
    for epoch in range(2):
        mine = starts[epoch * windows : (epoch + 1) * windows]
        # One offset an epoch, and with it every window exactly once.
        assert len({start % 10 for start in mine.tolist()}) == 1
        assert sorted((mine // 10).tolist()) == list(range(100))
    assert starts[:100].tolist() != starts[100:200].tolist()


def test_seeds_give_different_batches() -> None:
    tokens = np.arange(5000, dtype=np.uint64).astype(np.uint8)
    first, second = (BatchSampler(tokens, 16, 8, seed).starts(0).tolist() for seed in (0, 1))
    assert first != second


def test_validation_batches_are_evenly_spread_and_do_not_overlap() -> None:
    tokens = np.arange(101).astype(np.uint8)
    (only,) = validation_batches(tokens, batch_size=16, sequence_length=10, max_batches=4)
    assert only[:, 0].tolist() == list(range(0, 100, 10))
    assert only.shape == (10, 11)
    few = validation_batches(tokens, batch_size=2, sequence_length=10, max_batches=2)
    assert [batch[:, 0].tolist() for batch in few] == [[0, 20], [50, 70]]


def test_validation_text_that_is_too_short_is_refused() -> None:
    with pytest.raises(DataError, match=r"held-out text has 10 tokens.*needs 11"):
        validation_batches(np.zeros(10, np.uint8), batch_size=1, sequence_length=10, max_batches=1)

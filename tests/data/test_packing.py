"""Packed documents: every token once, the same rows for any number of readers, and going on anywhere."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.data import ByteTokenizer, Documents, Example, PackedBatches, examples_of, pack, read_records
from capibara.errors import ConfigError

pytest.importorskip("grain")

LENGTHS = st.lists(st.integers(2, 40), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(2, 16), st.booleans())
def test_every_prediction_is_packed_once(lengths: list[int], size: int, split: bool) -> None:
    rows = pack(lengths, size, split=split)
    assert all(2 <= sum(piece.length for piece in row) <= size for row in rows)
    predicted = Counter(
        (piece.document, piece.first + at) for row in rows for piece in row for at in range(1, piece.length)
    )
    kept = [length if split else min(length, size) for length in lengths]
    assert predicted == Counter((n, at) for n, length in enumerate(kept) for at in range(1, length))
    assert rows == sorted(rows)
    # Best fit decreasing: no more than 11/9 of what is needed, and one.
    least = -(-sum(piece.length for row in rows for piece in row) // size)
    halves = sum(piece.length > size / 2 for row in rows for piece in row)
    assert len(rows) <= 11 / 9 * max(least, halves) + 6


def documents(name: str, count: int, seed: int, longest: int = 30) -> Documents:
    rng = np.random.default_rng(seed)
    return Documents.of(
        name,
        [
            Example(rng.integers(1, 200, n), rng.random(n) < 0.7, int(n))
            for n in rng.integers(5, longest, count)
        ],
    )


def test_an_epoch_has_each_document_once() -> None:
    source = documents("a", 50, 0)
    batches = PackedBatches([source], batch_size=1, sequence_length=16, seed=3)
    rows, seen = 0, Counter[int]()
    while batches.position(rows)["block"] == 0:
        batch = batches.batch(rows)
        rows += 1
        for array in batch.values():
            assert array.shape == (1, 17)
        numbers, places = batch["segments"][0], batch["positions"][0]
        assert sorted(set(numbers) - {0}) == list(range(1, numbers.max() + 1))
        assert (np.diff(np.trim_zeros(numbers, "b")) >= 0).all()  # padding is at the end
        for number in range(1, numbers.max() + 1):
            inside = numbers == number
            assert places[inside].tolist() == list(range(inside.sum()))
            assert batch["weights"][0][inside][0] == 0
            seen.update(batch["tokens"][0][inside][1:].tolist())
        assert not batch["weights"][0][numbers == 0].any()
    expected = Counter[int]()
    for at in range(len(source)):
        expected.update(source.tokens[source.starts[at] + 1 : source.starts[at + 1]].tolist())
    assert seen == expected
    assert source.answers is not None


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> list[Documents]:
    """JSON Lines and Parquet."""
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    folder: Path = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(0)
    lines = [
        {"prompt": f"{n} squared: ", "completion": str(n * n) * int(rng.integers(1, 9))} for n in range(700)
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    texts = [f"Text {n}. " * int(rng.integers(1, 30)) for n in range(300)]
    parquet.write_table(arrow.table({"text": texts, "id": list(range(300))}), folder / "b.parquet")
    return [
        Documents.of(name, examples_of(read_records(folder / name), ByteTokenizer()))
        for name in ("a.jsonl", "b.parquet")
    ]


def reader(mixed: list[Documents], number: int = 0, count: int = 1, **options: Any) -> PackedBatches:
    chosen = {"batch_size": 4, "sequence_length": 48, "weights": [3, 1], "seed": 7, **options}
    return PackedBatches(mixed, reader=number, readers=count, **chosen)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[key].tobytes() == b[key].tobytes() for key in a)


@pytest.mark.parametrize("places", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_any_number_of_readers_and_any_place_to_go_on(mixed: list[Documents], places: int) -> None:
    whole = reader(mixed)
    batches = [whole.batch(step) for step in range(400)]
    assert whole.position(399)["block"] >= 1
    for count in (2, 4):
        readers = [reader(mixed, number, count) for number in range(count)]
        for step in (*range(0, 400, 37), 3, 2):  # also backwards
            assert same(together(readers, step), batches[step])
    rng = np.random.default_rng(1)
    changes = [(a, b) for a in (1, 2, 4) for b in (1, 2, 4) if a != b]
    for at, step in enumerate(rng.integers(0, 390, places).tolist()):
        # Any reader of those that stop says where; others, in another number, go on.
        before, after = changes[at % 6]
        position = json.loads(json.dumps(reader(mixed, int(rng.integers(before)), before).position(step)))
        readers = [reader(mixed, number, after) for number in range(after)]
        for one in readers:
            one.seek(step, position)
        for ahead in (step, step + 1, step + 9):
            assert same(together(readers, ahead), batches[ahead])


def together(readers: list[PackedBatches], step: int) -> dict[str, np.ndarray]:
    """The batch of a step, of all readers' parts."""
    parts = [one.batch(step) for one in readers]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def test_the_order_is_the_seeds(mixed: list[Documents]) -> None:
    assert not same(reader(mixed).batch(0), reader(mixed, seed=8).batch(0))
    assert not same(reader(mixed).batch(0), reader(mixed, weights=None).batch(0))


def test_sources_are_drawn_by_their_weights(mixed: list[Documents]) -> None:
    order = reader(mixed)._order
    drawn = [order[place] for place in range(4000)]
    assert sum(source == 0 for source, _ in drawn) == pytest.approx(3000, abs=2)
    numbers = [number for source, number in drawn if source == 0]
    for epoch in range(4):
        assert sorted(numbers[epoch * 700 : (epoch + 1) * 700]) == list(range(700))
    plain = reader(mixed, weights=None)._order
    assert sorted(plain[place] for place in range(1000)) == [(0, n) for n in range(700)] + [
        (1, n) for n in range(300)
    ]


def test_what_is_learnt_of_a_prompt_and_a_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "ab", "completion": "cde"}\n{"text": "xyz"}\n')
    source = Documents.of("a", examples_of(read_records(path), ByteTokenizer()))
    assert source.answers is not None
    assert source.answers.tolist() == [False, False, True, True, True, True, True, True]
    batch = PackedBatches([source], batch_size=1, sequence_length=9, seed=0).batch(0)
    # By hand: what follows the prompt's end, and all but the first of a text. Which comes first is the seed's.
    found = dict(zip(bytes(batch["tokens"][0].astype(np.uint8)).decode(), batch["weights"][0], strict=False))
    assert found == {"a": 0, "b": 0, "c": 1, "d": 1, "e": 1, "x": 0, "y": 1, "z": 1, "\0": 0}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"count": 3}, "whose number divides batch_size=4"),
        ({"number": 2, "count": 2}, "reader=2 of readers=2"),
        ({"weights": [1]}, "a positive number for each of the 2 sources"),
        ({"weights": [1, -1]}, "a positive number"),
        ({"sequence_length": 0}, "expected at least 1"),
    ],
)
def test_wrong_arguments(mixed: list[Documents], changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        reader(mixed, **changed)


@pytest.mark.parametrize(
    "position", [{}, {"block": -1, "row": 0}, {"block": 0, "row": 10**9}, {"block": "0", "row": 0}]
)
def test_what_is_no_position(mixed: list[Documents], position: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected a block and a row in it"):
        reader(mixed).seek(5, position)

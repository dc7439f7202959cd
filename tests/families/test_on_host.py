"""Parameters that are put where they lie on this machine, against those that XLA turns round and stacks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import write_folder
from transformers_oracle import recorded_facts

from capibara.compress.errors import DamagedError
from capibara.core import ModularCapibaraModel
from capibara.families import on_host
from capibara.families.tensors import Piece
from capibara.native.placing import Placing, can_place, place
from capibara.native.rooms import reuse_rooms, room

FACTS = recorded_facts()
NAMES = ["llama with biases", "gpt2", "phi3, heads turned in part", "deepseek_v2", "mixtral, a window, tied"]

pytestmark = pytest.mark.skipif(not can_place(), reason="the native library is not there")


def folder_of(name: str, path: Path) -> Path:
    shapes = {tensor: tuple(shape) for tensor, shape in FACTS[name]["shapes"].items()}
    return write_folder(path / "model", FACTS[name]["config"], shapes)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Placing]:
    """What is put in its place from now on."""
    parts: list[Placing] = []
    monkeypatch.setattr(on_host, "place", lambda given: (parts.extend(given), place(given))[1])
    return parts


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, "float32") for name in NAMES[:2]),
        *(pytest.param(name, "float32", marks=pytest.mark.slow) for name in NAMES[2:]),
        (NAMES[0], "bfloat16"),
        pytest.param(NAMES[1], "float16", marks=pytest.mark.slow),
    ],
)
def test_they_are_the_same(name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = folder_of(name, tmp_path)
    if dtype != "float32":
        ModularCapibaraModel.from_pretrained(folder, dtype=dtype).save_pretrained(tmp_path / dtype)
        folder = tmp_path / dtype
    parts = watched(monkeypatch)
    with reuse_rooms():
        room((1 << 20,), np.uint8)[...] = 0x5A  # memory that is handed out again
        found = ModularCapibaraModel.from_pretrained(folder).params
    assert parts
    parts.clear()
    expected = ModularCapibaraModel.from_pretrained(folder).params
    assert not parts
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(own, jax.Array)
        assert own.dtype == other.dtype
        assert own.sharding == other.sharding
        np.testing.assert_array_equal(own, other)


def test_numbers_of_another_dtype_are_left_to_xla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = folder_of(NAMES[0], tmp_path)
    parts = watched(monkeypatch)
    with reuse_rooms():
        model = ModularCapibaraModel.from_pretrained(folder, dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"bfloat16"}
    assert not parts


def test_those_of_a_plain_model_are_updated_in_place(tmp_path: Path):
    """XLA owns them: a step that is given them takes no memory for new ones."""
    params = ModularCapibaraModel.from_pretrained(folder_of(NAMES[0], tmp_path)).params
    stacks = {path for path, leaf in jax.tree_util.tree_leaves_with_path(params) if leaf.ndim > 2}
    where = {path: leaf.unsafe_buffer_pointer() for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    halved = jax.jit(lambda tree: jax.tree.map(lambda x: x / 2, tree), donate_argnums=0)(params)
    after = {path: leaf.unsafe_buffer_pointer() for path, leaf in jax.tree_util.tree_leaves_with_path(halved)}
    assert stacks
    assert all(where[path] == after[path] for path in stacks)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_orders_that_transpose_matrices(shape: list[int], data: st.DataObject):
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    raw = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    expected = raw.transpose(order)
    names = "abcde"[: len(shape)]
    piece = Piece("x", f"{' '.join(names)} -> {' '.join(names[i] for i in order)}")
    way = on_host._way(piece, expected.shape)
    if way is None:
        assert on_host._matrices(order) is None
        return
    layout, sides = way
    out = np.empty(expected.shape, np.float32)
    place([Placing(raw, sides, out, layout)])
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ((0,), (1, 1)),
        ((0, 1), (2, 2)),
        ((1, 0), (0, 1)),
        ((0, 2, 1), (1, 2)),
        ((2, 0, 1), (0, 2)),
        ((1, 2, 0), (0, 1)),
        ((2, 1, 0), None),
        ((1, 0, 2), None),
        ((0, 3, 1, 2), (1, 3)),
    ],
)
def test_where_rows_and_columns_begin(order: tuple[int, ...], expected: tuple[int, int] | None):
    assert on_host._matrices(order) == expected


def test_a_file_that_ends_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = folder_of(NAMES[0], tmp_path)
    (file,) = folder.glob("*.safetensors")

    def truncated(parts: list[Placing]) -> int | None:
        os.truncate(file, file.stat().st_size // 2)
        return place(parts)

    monkeypatch.setattr(on_host, "place", truncated)
    with reuse_rooms(), pytest.raises(DamagedError, match=r"safetensors: ends after \d+ bytes"):
        ModularCapibaraModel.from_pretrained(folder)


def test_what_failed_for_a_moment_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = folder_of(NAMES[0], tmp_path)
    expected = ModularCapibaraModel.from_pretrained(folder).params
    failed = []

    def at_first(parts: list[Placing]) -> int | None:
        if len(failed) < 3 and len(parts) > 1:
            failed.append(parts[len(parts) // 2])
            return len(parts) // 2
        return place(parts)

    monkeypatch.setattr(on_host, "place", at_first)
    with reuse_rooms():
        room((1 << 20,), np.uint8)[...] = 0x5A
        found = ModularCapibaraModel.from_pretrained(folder).params
    assert len(failed) == 3
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_progress_says_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = folder_of(NAMES[0], tmp_path)
    plain: list[tuple[str, int]] = []
    ModularCapibaraModel.from_pretrained(folder, progress=lambda *given: plain.append(given))
    monkeypatch.setattr(on_host, "_BATCH", 5000)
    parts, found, placed = watched(monkeypatch), [], []

    def progress(*given: Any) -> None:
        found.append(given)
        placed.append(sum(part.out.nbytes for part in parts))

    with reuse_rooms():
        ModularCapibaraModel.from_pretrained(folder, progress=progress)
    assert found == plain
    assert len(set(placed)) > 2
    done = 0
    for (_, size), there in zip(found, placed, strict=True):
        done += size
        assert there >= done

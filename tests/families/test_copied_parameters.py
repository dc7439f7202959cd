"""Parameters that are copied on this machine, against those that XLA turns round and stacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import write_folder
from transformers_oracle import recorded_facts

from capibara.core import ModularCapibaraModel
from capibara.families import loading
from capibara.native.rooms import reuse_rooms, room
from capibara.native.transposed import can_transpose

FACTS = recorded_facts()
NAMES = ["llama with biases", "gpt2", "phi3, heads turned in part", "deepseek_v2", "mixtral, a window, tied"]

pytestmark = pytest.mark.skipif(not can_transpose(), reason="the native library is not there")


def folder_of(name: str, path: Path) -> Path:
    shapes = {tensor: tuple(shape) for tensor, shape in FACTS[name]["shapes"].items()}
    return write_folder(path / "model", FACTS[name]["config"], shapes)


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
    copies: list[Any] = []
    copy = loading._copy
    monkeypatch.setattr(loading, "_copy", lambda *given: (copies.append(given[1]), copy(*given)))
    with reuse_rooms():
        room((1 << 20,), np.uint8)[...] = 0x5A  # memory that is handed out again
        found = ModularCapibaraModel.from_pretrained(folder).params
    assert copies
    copies.clear()
    expected = ModularCapibaraModel.from_pretrained(folder).params
    assert not copies
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for own, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(own, jax.Array)
        assert own.dtype == other.dtype
        assert own.sharding == other.sharding
        np.testing.assert_array_equal(own, other)


def test_numbers_of_another_dtype_are_left_to_xla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = folder_of(NAMES[0], tmp_path)
    copies: list[Any] = []
    monkeypatch.setattr(loading, "_copy", lambda *given: copies.append(given))
    with reuse_rooms():
        model = ModularCapibaraModel.from_pretrained(folder, dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"bfloat16"}
    assert not copies


def test_those_of_a_plain_model_are_updated_in_place(tmp_path: Path):
    """XLA owns them: a step that is given them takes no memory for new ones."""
    params = ModularCapibaraModel.from_pretrained(folder_of(NAMES[0], tmp_path)).params
    stacks = {path for path, leaf in jax.tree_util.tree_leaves_with_path(params) if leaf.ndim > 2}
    where = {path: leaf.unsafe_buffer_pointer() for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    halved = jax.jit(lambda tree: jax.tree.map(lambda x: x / 2, tree), donate_argnums=0)(params)
    after = {path: leaf.unsafe_buffer_pointer() for path, leaf in jax.tree_util.tree_leaves_with_path(halved)}
    assert stacks
    assert all(where[path] == after[path] for path in stacks)


def test_one_number_of_each_layer():
    to = np.zeros(4, np.float32)
    loading._copy(np.array(3, np.float32), (), to[(1, ...)])
    assert to.tolist() == [0, 3, 0, 0]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_orders_that_transpose_matrices(shape: list[int], data: st.DataObject):
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    raw = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    expected = raw.transpose(order)
    if (found := loading._matrices(order)) is None:
        return
    out = np.empty(expected.shape, np.float32)
    loading._copy(raw, order, out)
    np.testing.assert_array_equal(out, expected)
    first, middle = found
    assert order[:first] == tuple(range(first))
    assert 0 <= first <= middle <= len(shape)


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
    assert loading._matrices(order) == expected

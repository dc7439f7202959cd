"""Tensors that are decoded by rows or matrices: any part of them, and over a mesh that cuts rows and matrices."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from emulation import emulated
from hypothesis import given
from hypothesis import strategies as st
from mxfp4_folder import write_mxfp4
from other_process import run_apart
from published import write_folder
from transformers_oracle import recorded_facts

from capibara.cli import main
from capibara.core import ModularCapibaraModel
from capibara.families import open_tensors, read_config
from capibara.families.entries import Entries

READERS = {  # a tensor of each, and the elements of an entry
    "mxfp4": ("model.layers.0.mlp.experts.down_proj", 32 * 64),
    "compressed-tensors": ("model.layers.0.mlp.down_proj.weight", 40),
    "archives": ("model.layers.0.mlp.down_proj.weight", 40),
}
SCRIPT = r"""
import json, sys
from collections import Counter
import jax, numpy as np
from capibara.core import ModularCapibaraModel
from capibara.families import entries, loading

decoded = Counter()
class Counted(entries.Entries):
    def __init__(self, decode, shape):
        def counting(first, last):
            decoded.update((id(self), entry) for entry in range(first, last))
            kept.append(self)
            return decode(first, last)
        super().__init__(counting, shape)
for module in list(sys.modules.values()):
    if getattr(module, "Entries", None) is entries.Entries and module is not entries:
        module.Entries = Counted
out, block = {}, loading._BLOCK
for folder in sys.argv[1:]:
    kept = []
    one = ModularCapibaraModel.from_pretrained(folder).params
    # An expert on two devices that are not neighbours; blocks that are shorter than a row.
    for names, size in ((("model", "expert"), block), (("data", "model"), 96)):
        loading._BLOCK = size
        decoded.clear()
        kept = []
        auto = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh((2, 4), names, axis_types=auto)
        many = ModularCapibaraModel.from_pretrained(folder, mesh=mesh).params
        same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), one, many)
        out[f"{folder} {names} {size}"] = [all(jax.tree.leaves(same)), len(decoded), max(decoded.values())]
print("RESULT", json.dumps(out))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("decoded")
    write_mxfp4(place / "mxfp4", packed=True, num_local_experts=4)
    facts = recorded_facts()["llama"]
    plain = write_folder(place / "plain", facts["config"], facts["shapes"])
    ModularCapibaraModel.from_pretrained(plain).save_pretrained(place / "compressed-tensors", quantize="int8")
    assert main(["compress", str(plain), str(place / "archives"), "--json"]) == 0
    return {name: place / name for name in READERS}


@pytest.mark.parametrize("reader", READERS)
def test_any_part_is_that_of_the_whole(reader: str, folders: dict[str, Path]) -> None:
    name, size = READERS[reader]
    _, source = read_config(folders[reader])
    draws = np.random.default_rng(0)
    with open_tensors(folders[reader], source) as files:
        holder, stored = files.tensors[name]
        count = int(np.prod(stored.shape))
        assert count % size == 0
        whole = np.asarray(holder.numbers(name)[0:count])
        assert whole.shape == (count,)
        bits = holder.numbers(name)
        cuts = [
            (0, 1),
            (size - 1, size + 1),
            (count - 1, count),
            (1, count),
            (0, count - 1),
            (size, 2 * size),
        ]
        cuts += [tuple(np.sort(draws.choice(count + 1, 2, replace=False)).tolist()) for _ in range(20)]
        for first, last in cuts:
            np.testing.assert_array_equal(np.asarray(bits[first:last]), whole[first:last])


@given(st.data())
def test_entries_are_decoded_once_for_neighbours(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 6))
    whole = np.arange(rows * width).reshape(rows, width)
    decoded: list[int] = []

    def decode(first: int, last: int) -> np.ndarray:
        assert 0 <= first < last <= rows
        decoded.extend(range(first, last))
        return whole[first:last]

    ends = [0, *sorted(data.draw(st.sets(st.integers(1, rows * width)))), rows * width]
    entries = Entries(decode, whole.shape)
    parts = [entries[first:last] for first, last in pairwise(ends) if first < last]
    np.testing.assert_array_equal(np.concatenate(parts), whole.reshape(-1))
    assert decoded == list(range(rows))


@pytest.mark.slow
def test_a_mesh_that_cuts_rows_and_matrices(folders: dict[str, Path]) -> None:
    found = run_apart(SCRIPT, *map(str, folders.values()), XLA_FLAGS=emulated(8))
    assert len(found) == 2 * len(folders)
    for case, (same, decoded, most) in found.items():
        assert same, case
        assert decoded > 0, case
        assert most == 1, case

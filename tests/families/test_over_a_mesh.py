"""Folders that are read onto several devices: the parameters of one device, each byte read once."""

from __future__ import annotations

from pathlib import Path

import pytest
from emulation import emulated
from other_process import run_apart
from published import write_folder
from transformers_oracle import recorded_facts

SCRIPT = r"""
import json, sys
import jax, numpy as np
from capibara.compress.container import file_bytes
from capibara.core import ModularCapibaraModel
from capibara.families import TensorFiles

read = []
real = file_bytes.FileBytes.read_into
def counted(self, out, offset):
    read.append((str(self.path), offset, out.nbytes))
    real(self, out, offset)
file_bytes.FileBytes.read_into = counted
kinds = jax.sharding.AxisType
out = {}
for folder in sys.argv[1:]:
    one = ModularCapibaraModel.from_pretrained(folder).params
    for shape, second, kind in (
        ((2, 4), "model", kinds.Auto),
        ((8, 1), "model", kinds.Auto),
        ((2, 4), "expert", kinds.Explicit),
    ):
        mesh = jax.make_mesh(shape, ("data", second), axis_types=(kind,) * 2)
        read.clear()
        many = ModularCapibaraModel.from_pretrained(folder, mesh=mesh).params
        assert all(x.sharding.mesh == mesh for x in jax.tree.leaves(many))
        same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), one, many)
        split = sum(len({str(s.index) for s in x.addressable_shards}) > 1 for x in jax.tree.leaves(many))
        with TensorFiles(folder) as files:
            size = sum(stored.end - stored.start for _, stored in files.tensors.values())
            header = next(iter(files.tensors.values()))[0]._begin
        ranges = sorted((offset, offset + n) for _, offset, n in read if offset >= header)
        apart = all(a[1] <= b[0] for a, b in zip(ranges, ranges[1:]))
        whole = sum(b - a for a, b in ranges) == size
        out[f"{folder} {shape} {second}"] = [all(jax.tree.leaves(same)), split, apart, whole]
print("RESULT", json.dumps(out))
"""


@pytest.mark.parametrize(
    "names",
    [
        ["gemma3, stretched", "mixtral", "gpt2"],
        pytest.param(["phi3", "olmo2", "qwen3 with biases", "mamba2, groups, tied"], marks=pytest.mark.slow),
    ],
)
def test_parameters_are_those_of_one_device_and_each_byte_is_read_once(
    names: list[str], tmp_path: Path
) -> None:
    facts = recorded_facts()
    folders = [
        write_folder(tmp_path / str(i), facts[name]["config"], facts[name]["shapes"])
        for i, name in enumerate(names)
    ]
    found = run_apart(SCRIPT, *map(str, folders), XLA_FLAGS=emulated(8))
    assert len(found) == 3 * len(names)
    for case, (same, split, apart, whole) in found.items():
        assert (same, apart, whole) == (True, True, True), case
        assert split > 5, case

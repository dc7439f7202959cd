"""What loading takes besides the arrays, on one device and over eight, and how often it reads a byte."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from emulation import emulated
from other_process import run_apart

from capibara.compress.formats import FORMATS
from capibara.compress.safetensors_file import write_safetensors
from capibara.core import ModularCapibaraModel
from capibara.families import read_config
from capibara.families.known import FAMILIES
from capibara.families.loading import placed_tensors

SCRIPT = """
import json, sys, loading_memory
print("RESULT", json.dumps(loading_memory.main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5])))
"""
SIZES = {"model_type": "llama", "max_position_embeddings": 128, "tie_word_embeddings": False}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory and bytes are counted by /proc")


def written(folder: Path, dtype: str, *, vocab: int, width: int, layers: int) -> Path:
    """A folder of a Llama with numbers that need no memory to be drawn."""
    config = SIZES | {
        "dtype": dtype,
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 4 * width,
    }
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": layers}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | heads))
    settings, _ = read_config(folder)
    form = FORMATS[{"float32": "F32", "bfloat16": "BF16"}[dtype]]
    shapes = {
        one.name: one.shape for one in placed_tensors(FAMILIES["llama"], ModularCapibaraModel(settings))
    }
    bits = (
        np.random.default_rng(0).integers(0, 1 << 13, 1 << 20).astype(form.unsigned)
    )  # small positive numbers
    write_safetensors(
        folder / "model.safetensors",
        {name: (form, shape) for name, shape in shapes.items()},
        lambda name: np.resize(bits, int(np.prod(shapes[name]))),
    )
    return folder


def test_150_megabytes_over_eight_devices(tmp_path: Path) -> None:
    small = written(tmp_path / "small", "bfloat16", vocab=256, width=64, layers=2)
    large = written(tmp_path / "large", "bfloat16", vocab=28_672, width=1024, layers=1)
    found = run_apart(SCRIPT, "2", "4", str(large), str(small), XLA_FLAGS=emulated(8, quick=True))
    assert found["tensors"] > 140 << 20
    assert found["beyond"] <= 1.2, found
    assert found["apart"], found
    assert found["read"] == found["tensors"], found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_besides_the_arrays(dtype: str, tmp_path: Path) -> None:
    small = written(tmp_path / "small", dtype, vocab=256, width=64, layers=3)
    large = written(tmp_path / "large", dtype, vocab=49_152, width=1024, layers=3)
    for mesh in ((1, 1), (2, 4), (8, 1), (1, 8)):
        devices = mesh[0] * mesh[1]
        found = run_apart(SCRIPT, *map(str, (*mesh, large, small)), XLA_FLAGS=emulated(devices))
        assert found["beyond"] <= 1.2, (mesh, found)
        assert found["apart"], (mesh, found)
        assert found["read"] == found["tensors"], (mesh, found)


@pytest.mark.slow
def test_four_gibibytes_over_eight_devices(tmp_path: Path) -> None:
    small = written(tmp_path / "small", "bfloat16", vocab=256, width=64, layers=3)
    large = written(tmp_path / "large", "bfloat16", vocab=65_536, width=2048, layers=28)
    found = run_apart(SCRIPT, "2", "4", str(large), str(small), XLA_FLAGS=emulated(8))
    print(found)
    assert found["tensors"] > 4 << 30
    assert found["read"] == found["tensors"]
    assert found["apart"]
    # The kernel's count, without what watching reads, has headers, and modules that are imported while loading.
    assert found["tensors"] < found["by the system"] < found["tensors"] + (4 << 20)
    assert found["beyond"] <= 1.2, found

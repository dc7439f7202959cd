"""Archives straight onto devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from emulation import emulated

from capibara.compress.container import ArchiveWriter
from capibara.compress.errors import CompressError
from capibara.compress.formats import from_float, get_format
from capibara.compress.loading import load_sharded
from capibara.compress.model_api import ModelCompressionAPI
from capibara.compress.profile import CompressionProfile

jax = pytest.importorskip("jax")
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def test_each_device_gets_its_part(tmp_path, monkeypatch):
    monkeypatch.setattr("capibara.compress.container.writer.CHUNK", 8 * 48)
    path = tmp_path / "a.capi"

    def counting(shape, dtype):
        return np.arange(np.prod(shape, dtype=int)).astype(dtype)

    with ArchiveWriter(path) as archive:
        archive.add("rows", counting((64, 48), "<i4").view("<u4"), get_format("I32"), (64, 48))
        archive.add("columns", counting((16, 24), "<f4").view("<u4"), get_format("F32"), (16, 24))
        archive.add_tied("tied", "columns")
        bf16 = get_format("BF16")
        archive.add("half", from_float(counting((8, 8), np.float32), bf16), bf16, (8, 8))
        archive.add("scalar", counting((), "<f4").view("<u4").reshape(1), get_format("F32"), ())
        assert len(archive.entries[0].chunks) == 8
    script = Path(__file__).parents[1] / "support" / "sharded_loading.py"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": emulated(8)}
    out = subprocess.run(
        [sys.executable, str(script), str(path)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert out.returncode == 0, out.stderr
    # Twice everything, and nothing more: 8 chunks of rows, columns, half, scalar.
    assert json.loads(out.stdout) == {"decoded": 2 * 11, "distinct": 11}


def test_models_come_back_nested(tmp_path):
    tree = {"a": [np.ones((70, 70), np.float32), np.arange(3)], "b": {"c": np.float32(2.0)}}
    made = ModelCompressionAPI(CompressionProfile(mode="lossless")).compress(tree)
    for shardings in (HERE, jax.tree.map(lambda _: HERE, tree), {"a.0": HERE, "a.1": HERE, "b.c": HERE}):
        if jax.config.jax_enable_x64:
            got = load_sharded(made.path, shardings)
        else:
            with pytest.raises(CompressError, match=r"a\.1: JAX does not enable int64"):
                load_sharded(made.path, shardings)
            with jax.enable_x64(True):
                got = load_sharded(made.path, shardings)
        assert jax.tree.structure(got) == jax.tree.structure(tree)
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(got))
        np.testing.assert_array_equal(got["a"][0], tree["a"][0])


def test_shardings_that_do_not_fit():
    tree = {"weight": np.ones((70, 70), np.float32), "bias": np.ones(3, np.float32)}
    made = ModelCompressionAPI(CompressionProfile(mode="lossless")).compress(tree)
    with pytest.raises(CompressError, match=r"'wieght' is not a tensor of .* Did you mean 'weight'"):
        load_sharded(made.path, {"wieght": HERE, "bias": HERE})
    with pytest.raises(CompressError, match="there is none for 'bias'"):
        load_sharded(made.path, {"weight": HERE})
    with pytest.raises(CompressError, match="bias is str"):
        load_sharded(made.path, {"weight": HERE, "bias": "x"})
    with pytest.raises(CompressError, match="shardings: got int"):
        load_sharded(made.path, 3)
    with pytest.raises(CompressError, match="got NoneType for weight"):
        load_sharded(made.path, lambda name, shape: None)

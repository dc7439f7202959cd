"""Metadata of archives that somebody else wrote, and data without anything in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from capibara.compress.compressed import PROFILE, STATS, CompressedModel
from capibara.compress.errors import ArchiveError, CompressError
from capibara.compress.model_api import ModelCompressionAPI
from capibara.compress.models.adapters import STRUCTURE
from capibara.compress.profile import CompressionProfile
from capibara.compress.writing import change_metadata

API = ModelCompressionAPI(CompressionProfile(strategy="int8", target_compression_ratio=3))
TREE = {"w": np.random.default_rng(0).normal(size=(90, 96)).astype(np.float32)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return API.compress(TREE).save(tmp_path / "a.capi")


@pytest.mark.parametrize("key", [STATS, PROFILE])
@pytest.mark.parametrize("text", ['"abc"', "null", "5", "[]", "{"])
def test_what_is_no_object(path: Path, key: str, text: str) -> None:
    change_metadata(path, {key: text})
    with pytest.raises(ArchiveError, match="metadata is not what Capibara writes"):
        CompressedModel.load(path)


def test_a_structure_of_tensors_that_are_not_there(path: Path) -> None:
    change_metadata(path, {STRUCTURE: '{"dict":{"x":"nope"}}'})
    with pytest.raises(ArchiveError, match="missing tensor: 'nope'"):
        _ = CompressedModel.load(path).model
    jax = pytest.importorskip("jax")
    from capibara.compress.loading import load_sharded

    with pytest.raises(ArchiveError, match="missing tensor: 'nope'"):
        load_sharded(path, jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def test_codes_straight_from_a_file(path: Path) -> None:
    pytest.importorskip("jax")
    from capibara.compress.direct import load_quantised

    found = np.asarray(load_quantised(path, "w").dequantise())
    np.testing.assert_array_equal(found, CompressedModel.load(path).model["w"])


def test_validation_data_with_nothing_in_it() -> None:
    with pytest.raises(CompressError, match="nothing in its batches"):
        API.compress(TREE, np.zeros((0, 90), np.float32), apply=lambda tree, x: x @ tree["w"])

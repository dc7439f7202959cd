"""Matrices of an archive, multiplied as they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import native
from capibara.compress.container import Archive, ArchiveWriter, writer
from capibara.compress.direct import QuantisedMatrix, load_quantised
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import get_format

RANDOM = np.random.default_rng(0)
F32 = get_format("F32")


def stored(path: Path, weight: np.ndarray, codec: str, **chosen: Any) -> tuple[QuantisedMatrix, np.ndarray]:
    """The matrix from an archive, as it is stored, and as it is read."""
    with ArchiveWriter(path / "w.capi") as archive:
        archive.add("w", weight.reshape(-1).view("<u4"), F32, weight.shape, codec=codec, settings=chosen)
    with Archive(path / "w.capi") as archive:
        return load_quantised(archive, "w"), archive.read("w").view("<f4")


@pytest.mark.thin(3)
@pytest.mark.parametrize("several", [False, True], ids=["one chunk", "several"])
@pytest.mark.parametrize(
    ("codec", "chosen"),
    [
        pytest.param(
            codec,
            chosen,
            id=f"{codec}-{chosen}",
            marks=[] if codec == "int8" or not chosen else pytest.mark.slow,
        )
        for codec in ("int8", "int4", "nf4")
        for chosen in ({}, {"axis": 0}, {"outliers": 0.02})
    ],
)
def test_a_product_is_that_of_what_is_read(
    codec: str, chosen: dict[str, Any], several: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if several:
        monkeypatch.setattr(writer, "CHUNK", 40 * 20)
    weight = RANDOM.normal(size=(48, 40)).astype(np.float32)
    matrix, read = stored(tmp_path, weight, codec, **chosen)
    assert matrix.turned == ("axis" in chosen)
    assert len(matrix.pieces) == (3 if several else 1)
    np.testing.assert_allclose(matrix.dequantise(), read, rtol=1e-6, atol=1e-7)
    expected_in = 48 if matrix.turned else 40
    x = RANDOM.normal(size=(2, 3, expected_in)).astype(np.float32)
    out = jax.jit(lambda m, x: m.matmul(x))(matrix, x)
    np.testing.assert_allclose(out, x @ (read if matrix.turned else read.T), atol=2e-4)
    if codec != "int8" and not chosen:
        tables = sum(piece.table.nbytes for piece in matrix.pieces)
        assert matrix.nbytes - tables < 0.2 * weight.nbytes


@pytest.mark.parametrize("several", [False, True], ids=["one chunk", "several"])
def test_rows_are_looked_up(several: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if several:
        monkeypatch.setattr(writer, "CHUNK", 40 * 20)
    matrix, read = stored(tmp_path, RANDOM.normal(size=(48, 40)).astype(np.float32), "nf4")
    which = np.array([[0, 47], [20, 19]])
    np.testing.assert_allclose(matrix.rows(which), read[which], rtol=1e-6)


@pytest.mark.skipif(native.problem() is not None, reason="the native library is not built")
@pytest.mark.parametrize("codec", ["int8", "int4", "nf4"])
def test_compiled_kernels_multiply_along_either_axis(codec: str, tmp_path: Path) -> None:
    weight = RANDOM.normal(size=(48, 40)).astype(np.float32)
    matrix, read = stored(tmp_path, weight, codec)
    for product, wide in ((matrix.matmul, read.T), (matrix.transposed_matmul, read)):
        x = RANDOM.normal(size=(1, len(wide))).astype(np.float32)
        run = jax.jit(product)
        program = run.lower(x).as_text()
        assert "capibara_codes_product" in program
        assert "gather" not in program  # scales are looked up where they are needed
        np.testing.assert_allclose(run(x), x @ wide, rtol=1e-4, atol=1e-4)


def test_gradients_reach_the_input(tmp_path: Path) -> None:
    matrix, read = stored(tmp_path, RANDOM.normal(size=(8, 40)).astype(np.float32), "int4")
    gradient = jax.grad(lambda x: matrix.matmul(x).sum())(jnp.ones((1, 40)))
    np.testing.assert_allclose(gradient[0], read.sum(0), atol=1e-4)


def test_what_is_no_such_matrix(tmp_path: Path) -> None:
    weight = RANDOM.normal(size=(64, 64)).astype(np.float32)
    with pytest.raises(CompressError, match="stored as lossless"):
        stored(tmp_path, weight, "lossless")
    with pytest.raises(CompressError, match="expected int8"):
        stored(tmp_path, weight.reshape(8, 8, 64), "int8")
    with pytest.raises(CompressError, match="too short"):
        stored(tmp_path, weight.reshape(512, 8), "int8")
    matrix, _ = stored(tmp_path, weight, "int8", axis=0)
    with pytest.raises(CompressError, match=r"expected \[..., 64\]"):
        matrix.matmul(np.ones((2, 63), np.float32))
    with pytest.raises(CompressError, match="dequantise"):
        matrix.rows([1])


@pytest.mark.parametrize("at", range(8))
def test_a_damaged_beginning_is_found_by_its_checksum(at: int, tmp_path: Path) -> None:
    """Whatever else it may say: what codes look like is asked of it only then."""
    stored(tmp_path, RANDOM.normal(size=(48, 40)).astype(np.float32), "nf4")
    path = tmp_path / "w.capi"
    with Archive(path) as archive:
        offset = archive["w"].chunks[0].offset
    content = bytearray(path.read_bytes())
    content[offset + at] ^= 2
    path.write_bytes(content)
    with pytest.raises(DamagedError, match=r"w\.capi: w does not have its checksum"):
        load_quantised(path, "w")

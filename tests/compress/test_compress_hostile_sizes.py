"""Payloads that claim to be far more numbers than they hold, and numbers whose squares overflow."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from capibara.compress.allocation import allocate, survey
from capibara.compress.codecs.lossless import decode
from capibara.compress.codecs.nested import join, part_of
from capibara.compress.codecs.protocol import get_codec
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import from_float, get_format
from capibara.compress.models.source import Tensors
from capibara.compress.writing import add_tensors, compare

F32, F64, U8 = get_format("F32"), get_format("F64"), get_format("U8")


@pytest.mark.parametrize("payload", [b"", b"\x02", b"\xff" * 300])
def test_nothing_is_allocated_for_a_payload_of_no_known_kind(payload: bytes) -> None:
    with pytest.raises(DamagedError, match="no known beginning"):
        decode(payload, U8, (1, 1 << 40))


def test_two_short_factors_do_not_become_a_matrix_of_any_size() -> None:
    side = 1 << 20
    none = part_of(np.zeros(0, np.uint8), U8, "lossless", {}, bits=True)
    factor = part_of(np.ones((1, side)), F32, "lossless", {})
    payload = join({"axes": [2]}, [factor, factor, none, none])
    with pytest.raises(DamagedError, match="cannot hold 1099511627776 numbers"):
        get_codec("low_rank").decode(memoryview(payload), F32, (1, side, side), {})
    with pytest.raises(DamagedError, match="cannot hold"):
        get_codec("sparse").decode(memoryview(payload), F32, (1, side, side), {})


@pytest.mark.parametrize(("codec", "settings"), [("low_rank", {"rank": 1}), ("sparse", {})])
def test_a_writer_makes_nothing_that_is_not_read_back(
    codec: str, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capibara.compress.codecs.nested._FREE", 100)
    monkeypatch.setattr("capibara.compress.codecs.nested._MOST_EACH", 2)
    with pytest.raises(CompressError, match="more than is read back"):
        get_codec(codec).encode(np.zeros(4096, np.uint32), F32, (64, 64), settings)


def test_numbers_whose_squares_overflow_stay_exact(tmp_path) -> None:
    from capibara.compress.container import Archive, ArchiveWriter

    rng = np.random.default_rng(0)
    values = {"huge": rng.normal(size=(80, 80)) * 1e300, "plain": rng.normal(size=(200, 200))}
    bits = {name: from_float(v.reshape(-1), F64) for name, v in values.items()}
    source = Tensors({name: (F64, v.shape) for name, v in values.items()}, bits.__getitem__)
    with pytest.raises(CompressError, match="squares overflow"):
        get_codec("low_rank").encode(bits["huge"], F64, (80, 80), {"rank": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen = allocate(survey(source, codecs=["uniform", "low_rank"]), 2.5)
        with ArchiveWriter(tmp_path / "a.capi") as archive:
            add_tensors(archive, source, {}, chosen)
        errors, lost, _ = compare(tmp_path / "a.capi", source)
    assert errors["huge"] == 0 < errors["plain"]
    assert math.isfinite(lost)
    with Archive(tmp_path / "a.capi") as archive:
        np.testing.assert_array_equal(archive.read("huge").reshape(-1), bits["huge"])

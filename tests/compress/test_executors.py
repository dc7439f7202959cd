"""Compiled code and NumPy make the same bytes, and take each other's apart."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.codecs import lossless
from capibara.compress.codecs.executors import NumpyExecutor
from capibara.compress.codecs.native import NativeExecutor
from capibara.compress.errors import DamagedError
from capibara.compress.formats import FORMATS, NumberFormat, get_format
from capibara.native.loading import open_library

LIBRARY, REASON = open_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason=str(REASON))
NUMPY = NumpyExecutor()
RANDOM = np.random.default_rng(0)


@pytest.fixture(scope="module")
def native() -> NativeExecutor:
    assert LIBRARY is not None
    return NativeExecutor(LIBRARY)


def agree(native: NativeExecutor, bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...]) -> bytes:
    bits = np.ascontiguousarray(bits).reshape(-1).view(form.unsigned)
    payload = lossless.encode(bits, form, shape, NUMPY)
    assert lossless.encode(bits, form, shape, native) == payload
    for executor in (NUMPY, native):
        np.testing.assert_array_equal(lossless.decode(payload, form, shape, executor), bits)
    return payload


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "shape", [(64,), (65,), (1, 700), (700, 1), (50, 40), (33, 3, 3, 3), (5, 4099), (9000, 33)]
)
@pytest.mark.parametrize("kind", ["random", "few", "normal"])
def test_the_same_bytes(native: NativeExecutor, name: str, shape: tuple[int, ...], kind: str) -> None:
    form, count = get_format(name), math.prod(shape)
    if kind == "random":
        bits = RANDOM.integers(0, 256, count * form.bits // 8).astype(np.uint8)
    elif kind == "few":
        few = RANDOM.integers(0, 256, (3, form.bits // 8)).astype(np.uint8)
        bits = few[RANDOM.integers(0, 3, count)].reshape(-1)
    else:
        wide = RANDOM.normal(size=count) * np.exp(RANDOM.normal(size=count))
        if form.is_float:
            wide = wide.astype(np.float64).view(np.uint64) >> np.uint64(64 - form.bits)
        bits = wide.astype(form.unsigned)
    agree(native, bits, form, shape)


@given(
    name=st.sampled_from(sorted(FORMATS)),
    rows=st.integers(1, 60),
    length=st.integers(32, 200),
    zeros=st.integers(0, 40),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_the_same_bytes_of_any_tensor(
    native: NativeExecutor, name: str, rows: int, length: int, zeros: int, seed: int
) -> None:
    form = get_format(name)
    random = np.random.default_rng(seed)
    bits = random.integers(0, 1 << 63, (rows, length), dtype=np.uint64).astype(form.unsigned)
    # Rows of different size, some with zeros at the end.
    bits >>= random.integers(0, form.bits, (rows, 1)).astype(form.unsigned)
    low = form.unsigned.type(min(zeros, form.bits - 1))
    bits[::2] = bits[::2] >> low << low
    agree(native, bits, form, (rows, length))


def test_several_blocks(native: NativeExecutor) -> None:
    wide = RANDOM.normal(size=(1 << 18) + 77).astype(np.float32).view(np.uint32)
    agree(native, (wide >> 16).astype(np.uint16), get_format("BF16"), wide.shape)


def test_damage_is_found_and_nothing_is_written_outside(native: NativeExecutor) -> None:
    form, shape = get_format("BF16"), (64, 80)
    bits = (RANDOM.normal(size=shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(-1)
    good = lossless.encode(bits, form, shape, native)
    found = 0
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(RANDOM.integers(1, 4)):
            bad[RANDOM.integers(len(bad))] ^= 1 << RANDOM.integers(8)
        try:
            one = lossless.decode(bytes(bad), form, shape, native)
        except DamagedError:
            found += 1
            with pytest.raises(DamagedError):
                lossless.decode(bytes(bad), form, shape, NUMPY)
        else:
            np.testing.assert_array_equal(one, lossless.decode(bytes(bad), form, shape, NUMPY))
    assert found > 1000


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "neon"])
def test_every_instruction_set_that_is_here(isa: str) -> None:
    program = (
        "import sys, numpy as np\n"
        "from capibara.compress.codecs import lossless\n"
        "from capibara.compress.formats import get_format\n"
        "executor = lossless.best_executor()\n"
        "x = np.random.default_rng(0).normal(size=(300, 111)).astype('float32').view('uint32')\n"
        "made = lossless.encode(x.reshape(-1), get_format('F32'), x.shape)\n"
        "assert (lossless.decode(made, get_format('F32'), x.shape) == x.reshape(-1)).all()\n"
        "from capibara.compress.codecs.executors import NumpyExecutor\n"
        "assert made == lossless.encode(x.reshape(-1), get_format('F32'), x.shape, NumpyExecutor())\n"
        "print(executor.name, 'jax' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "CAPIBARA_NATIVE_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["native", "False"]  # a set that is not here gives the plainest there is

"""Compiled code, NumPy, JAX and PyTorch make the same bytes, and take each other's apart."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.codecs import lossless
from capibara.compress.codecs.engine import use_engine
from capibara.compress.codecs.executors import Executor, NumpyExecutor, best_executor, get_executor
from capibara.compress.codecs.steps import StepExecutor
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import FORMATS, NumberFormat, get_format
from capibara.errors import MissingExtraError

NUMPY = NumpyExecutor()
RANDOM = np.random.default_rng(0)


def others(*names: str) -> list[Executor]:
    """Those of the executors that can be here."""
    found = []
    for name in names:
        with contextlib.suppress(CompressError, MissingExtraError):
            found.append(get_executor(name))
    return found


NATIVE, ALL = others("native"), others("native", "jax", "torch")


def agree(executors: list[Executor], bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...]) -> bytes:
    bits = np.ascontiguousarray(bits).reshape(-1).view(form.unsigned)
    payload = lossless.encode(bits, form, shape, NUMPY)
    np.testing.assert_array_equal(lossless.decode(payload, form, shape, NUMPY), bits)
    for executor in executors:
        assert lossless.encode(bits, form, shape, executor) == payload, executor.name
        np.testing.assert_array_equal(lossless.decode(payload, form, shape, executor), bits)
    return payload


def numbers(form: NumberFormat, count: int, kind: str) -> np.ndarray:
    if kind == "random":
        return RANDOM.integers(0, 256, count * form.bits // 8).astype(np.uint8)
    if kind == "few":
        few = RANDOM.integers(0, 256, (3, form.bits // 8)).astype(np.uint8)
        return few[RANDOM.integers(0, 3, count)].reshape(-1)
    wide = RANDOM.normal(size=count) * np.exp(RANDOM.normal(size=count))
    if form.is_float:
        wide = wide.astype(np.float64).view(np.uint64) >> np.uint64(64 - form.bits)
    return wide.astype(form.unsigned)


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "shape", [(64,), (65,), (1, 700), (700, 1), (50, 40), (33, 3, 3, 3), (5, 4099), (900, 33)]
)
@pytest.mark.parametrize("kind", ["random", "few", "normal"])
def test_the_same_bytes(name: str, shape: tuple[int, ...], kind: str) -> None:
    form = get_format(name)
    agree(NATIVE, numbers(form, math.prod(shape), kind), form, shape)


@pytest.mark.skipif(not NATIVE, reason="no compiled code here")
@pytest.mark.parametrize("name", ["BF16", "F32", "I16"])
@pytest.mark.parametrize("shape", [(17, 300_000), (9, 262_144), (24, 2_049)])
def test_two_groups_at_a_time(name: str, shape: tuple[int, ...]) -> None:
    """Groups of several blocks, of other lengths, of one symbol only, with escapes and without."""
    form = get_format(name)
    bits = numbers(form, math.prod(shape), "normal").reshape(shape)
    bits[::3] = bits[::3] >> form.unsigned.type(4) << form.unsigned.type(4)
    bits[1] = bits[1, 0]
    bits[2, ::5_000] = RANDOM.integers(0, np.iinfo(bits.dtype).max, len(bits[2, ::5_000]))
    flat = bits.reshape(-1)
    for executor in NATIVE:
        payload = lossless.encode(flat, form, shape, executor)
        for threads in (1, 3):
            out = np.empty(shape, form.unsigned)
            executor.decode_tensor(np.frombuffer(payload, np.uint8)[1:], form, out, threads)
            np.testing.assert_array_equal(out, bits)
        body = np.frombuffer(payload, np.uint8)[1:].copy()
        body[-7] ^= 4
        with pytest.raises(DamagedError):
            executor.decode_tensor(body, form, np.empty(shape, form.unsigned), 1)


@pytest.mark.parametrize("executor", [e for e in ALL if e.name != "native"], ids=lambda e: e.name)
@pytest.mark.parametrize(
    "name",
    [
        "BF16",
        "F32",
        "I64",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("F64", "F8_E4M3", "I16", "U64")),
    ],
)
def test_the_same_bytes_of_frameworks(executor: Executor, name: str) -> None:
    form, shape = get_format(name), (40, 33)
    bits = numbers(form, math.prod(shape), "normal").reshape(shape)
    # Rows whose last bits are zero, and some that no table has an entry for.
    low = form.unsigned.type(min(3, form.mantissa))
    bits[::2] = bits[::2] >> low << low
    bits[5, :3] = [0, np.iinfo(bits.dtype).max, 1]
    agree([executor], bits, form, shape)


@pytest.mark.parametrize("executor", ALL, ids=lambda e: e.name)
def test_damage_is_found_by_all(executor: Executor) -> None:
    form, shape = get_format("BF16"), (16, 40)
    bits = numbers(form, math.prod(shape), "normal")
    good, found = lossless.encode(bits, form, shape, NUMPY), 0
    for _ in range(25 if executor.name != "native" else 400):
        bad = bytearray(good)
        for _ in range(RANDOM.integers(1, 4)):
            bad[RANDOM.integers(len(bad))] ^= 1 << RANDOM.integers(8)
        try:
            one = lossless.decode(bytes(bad), form, shape, executor)
        except DamagedError:
            found += 1
            with pytest.raises(DamagedError):
                lossless.decode(bytes(bad), form, shape, NUMPY)
        else:
            np.testing.assert_array_equal(one, lossless.decode(bytes(bad), form, shape, NUMPY))
    assert found > 5


def test_symbols_that_no_table_has_are_refused() -> None:
    table = np.array([[4096, 0]])
    for executor in (e for e in [NUMPY, *ALL] if isinstance(e, StepExecutor)):
        assert executor.encode([np.zeros(40, np.uint8)], table, [0])[0].words.size == 0
        with pytest.raises(ValueError, match="frequency is 0"):
            executor.encode([np.ones(40, np.uint8)], table, [0])


def test_choosing_an_executor() -> None:
    with pytest.raises(CompressError, match="Did you mean 'numpy'"):
        get_executor("nunpy")
    for name in ("numpy", "torch"):
        if name in {e.name for e in [NUMPY, *ALL]}:
            with use_engine(name):
                assert best_executor().name == name
    with use_engine("native"):  # where it is not built, the codec takes its own choice
        assert best_executor().name in ("native", "numpy")


@given(
    name=st.sampled_from(sorted(FORMATS)),
    rows=st.integers(1, 60),
    length=st.integers(32, 200),
    zeros=st.integers(0, 40),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_the_same_bytes_of_any_tensor(name: str, rows: int, length: int, zeros: int, seed: int) -> None:
    form = get_format(name)
    random = np.random.default_rng(seed)
    bits = random.integers(0, 1 << 63, (rows, length), dtype=np.uint64).astype(form.unsigned)
    # Rows of different size, some with zeros at the end.
    bits >>= random.integers(0, form.bits, (rows, 1)).astype(form.unsigned)
    low = form.unsigned.type(min(zeros, form.bits - 1))
    bits[::2] = bits[::2] >> low << low
    agree(NATIVE, bits, form, (rows, length))


def test_several_blocks() -> None:
    wide = RANDOM.normal(size=(1 << 18) + 77).astype(np.float32).view(np.uint32)
    agree(NATIVE, (wide >> 16).astype(np.uint16), get_format("BF16"), wide.shape)


def test_threads_do_not_change_the_bytes() -> None:
    form, shape = get_format("BF16"), (600, 300)
    rows = numbers(form, math.prod(shape), "normal").reshape(shape)
    for executor in NATIVE:
        one = executor.encode_tensor(rows, form, rows.nbytes)
        assert one is not None
        assert executor.encode_tensor(rows, form, rows.nbytes, threads=3) == one
        assert executor.encode_tensor(rows, form, len(one)) is None
        out = np.zeros_like(rows)
        executor.decode_tensor(np.frombuffer(one, np.uint8), form, out, threads=3)
        np.testing.assert_array_equal(out, rows)


@pytest.mark.skipif(not NATIVE, reason="the native library is not built")
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "neon"])
def test_every_instruction_set_that_is_here(isa: str) -> None:
    program = (
        "import sys, numpy as np\n"
        "from capibara.compress.codecs import executors, lossless\n"
        "from capibara.compress.formats import get_format\n"
        "executor = executors.best_executor()\n"
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


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two processors"
)
def test_callers_may_run_where_they_could_before() -> None:
    """Threads that help are sent away; one that has ended before that is not a name for the caller."""
    before, form = os.sched_getaffinity(0), get_format("BF16")
    rows = (np.random.default_rng(0).normal(size=(2, 256)).astype(np.float32).view(np.uint32) >> 16).astype(
        "u2"
    )
    # Others want the processors, so that the caller is not back before its helper has ended.
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        end = time.monotonic() + 2
        while time.monotonic() < end:
            payload = lossless.encode(rows.reshape(-1), form, rows.shape, threads=2)
            lossless.decode(memoryview(payload), form, rows.shape)
            assert os.sched_getaffinity(0) == before
    finally:
        os.sched_setaffinity(0, before)
        for process in busy:
            process.kill()
            process.wait()

"""Codecs of fixed width in compiled code: byte for byte what NumPy makes and reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from instruction_sets import instruction_sets

from capibara.compress.codecs import engine, fixed_search
from capibara.compress.codecs.engine import use_engine
from capibara.compress.codecs.fixed import INT4, INT8, NF4_CODEC, Fixed
from capibara.compress.errors import CompressError
from capibara.compress.formats import from_float, get_format
from capibara.native import build

pytestmark = pytest.mark.skipif(
    build.find_compiler() is None, reason="no C++ compiler: there is no native library to test"
)
CODECS = (INT8, INT4, NF4_CODEC)
FORMATS = ("F32", "BF16", "F16", "F64")


def values(random: np.random.Generator, what: str, shape: tuple[int, ...]) -> np.ndarray:
    x = random.normal(size=shape) * 10.0 ** random.integers(-3, 3)
    if what == "wide":
        x *= np.exp(3 * random.normal(size=shape))
    elif what == "sparse":
        x[random.random(shape) < 0.7] = 0
    elif what == "not finite":
        x.ravel()[:: max(x.size // 4, 20)] = random.choice([np.nan, np.inf, -np.inf])
    elif what == "denormal":
        x = np.where(random.random(shape) < 0.5, x * 1e-41, x)
    elif what == "few levels":
        x = random.integers(-8, 8, shape) * 0.25
    elif what == "zero":
        x = np.zeros(shape)
    return x


KINDS_OF_VALUES = ("normal", "wide", "sparse", "not finite", "denormal", "few levels", "zero")


def same_bytes(codec: Fixed, form_name: str, what: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    form = get_format(form_name)
    shape = tuple(int(n) for n in random.integers(1, 80, size=random.integers(1, 4)))
    x = np.clip(values(random, what, shape), -6e4, 6e4)
    bits = from_float(x.astype("f8" if form.bits == 64 else "f4"), form).reshape(-1)
    settings: dict[str, Any] = {"group": int(random.choice([4, 5, 16, 32, 48, 100, 1024]))}
    if len(shape) > 1 and random.integers(2):
        settings["axis"] = 0
    if codec is NF4_CODEC and random.integers(2):
        settings["levels"] = "nf4"
    if random.integers(3) == 0:
        settings["outliers"] = 0.02
    if codec is INT8 and random.integers(2):
        settings |= {"step": 0.01, "coded": True}

    def encoded(executor: str) -> bytes | str:
        try:
            return bytes(codec.encode(bits, form, shape, {**settings, "executor": executor}))
        except CompressError as error:
            return str(error)

    want = encoded("numpy")
    assert encoded("native") == want, (shape, settings)
    if isinstance(want, str):
        return
    found = []
    for name in ("numpy", "native"):
        with use_engine(name):
            found.append(codec.decode(memoryview(want), form, shape, {}))
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("what", KINDS_OF_VALUES)
@pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.kind.name)
def test_the_bytes_and_the_numbers_are_those_of_numpy(codec: Fixed, what: str) -> None:
    for seed, form in enumerate(FORMATS):
        same_bytes(codec, form, what, 10 * seed + KINDS_OF_VALUES.index(what))


@pytest.mark.parametrize("resolution", fixed_search.RESOLUTIONS)
@pytest.mark.parametrize("kind", list(fixed_search.KINDS.values()), ids=lambda k: k.name)
def test_the_search_is_that_of_numpy(kind: fixed_search.Kind, resolution: int) -> None:
    random = np.random.default_rng(resolution)
    book = None
    if kind.name == "nf4":  # levels as close as they may be, too
        book = np.sort(random.choice(np.arange(-1024, 1025), 16, replace=False)).astype(np.int32)
        book[4:8] = book[4] + np.arange(4)
        book = np.unique(book)
        book = np.concatenate([book, book[-1] + 1 + np.arange(16 - len(book))]).astype(np.int32)
    x = (random.normal(size=(53, 21)) * 2.0 ** random.integers(-12, 3, (53, 1))).astype(np.float32)
    x[7] = 0
    top = float(np.abs(x).max()) / kind.largest
    for numbers in (x, x.astype(np.float64) * (1 + 1e-12)):
        mine, theirs = (
            fixed_search.search(fixed_search.get_executor(name), kind, book, numbers, top, resolution)
            for name in ("native", "numpy")
        )
        np.testing.assert_array_equal(mine[0], theirs[0])
        np.testing.assert_array_equal(mine[1], theirs[1])


def test_compiled_code_runs_unless_something_else_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fixed_search.default_executor() == "native"
    for name in ("jax", "torch"):  # on this machine's CPU, where compiled code does the same
        monkeypatch.setattr(engine, "on_accelerator", lambda _: False)
        monkeypatch.setattr(fixed_search, "on_accelerator", lambda _: False)
        with use_engine(name):
            assert fixed_search.default_executor() == "native"
        monkeypatch.setattr(fixed_search, "on_accelerator", lambda _: True)
        with use_engine(name):
            assert fixed_search.default_executor() == name
    with use_engine("numpy"):
        assert fixed_search.default_executor() == "numpy"
    monkeypatch.setattr(fixed_search, "open_library", lambda: (None, "not built"))
    monkeypatch.setattr(fixed_search, "has_native", lambda: False)
    assert fixed_search.default_executor() == "numpy"
    fixed_search.get_executor.cache_clear()
    with pytest.raises(CompressError, match="not built"):
        fixed_search.get_executor("native")


@pytest.mark.parametrize("name", instruction_sets())
def test_other_instruction_sets(name: str) -> None:
    program = """
import test_fixed_native as t
from capibara.native.loading import open_library
for codec in t.CODECS:
    for seed, what in enumerate(t.KINDS_OF_VALUES):
        t.same_bytes(codec, t.FORMATS[seed % 4], what, 100 + seed)
print(open_library()[0].capibara_native_isa().decode())
"""
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(here.parent / "support"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CAPIBARA_NATIVE_ISA": name, "PYTHONPATH": path},
    )
    assert done.stdout.strip() == name, done.stderr[-3000:]

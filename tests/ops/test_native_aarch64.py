"""The native library for 64-bit Arm: built by a cross compiler, its kernels run under user-mode emulation."""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import make, oracle
from tropical_oracle import PATTERNS, signed
from tropical_oracle import oracle as product

from capibara.compress.codecs import lossless
from capibara.compress.codecs.executors import NumpyExecutor
from capibara.compress.formats import from_float, get_format
from capibara.native import build
from capibara.native.library import TARGETS
from capibara.ops.attention import flash_attention
from capibara.ops.attention.problem import prepare
from capibara.ops.attention.specs import AttentionSpec

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
HERE = platform.machine() == "aarch64"
MISSING = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.skipif(
        HERE, reason="this is an Arm processor: the tests of the native kernels run on it as they are"
    ),
    pytest.mark.skipif(
        bool(MISSING), reason=f"{' and '.join(MISSING)} not found (Debian: g++-aarch64-linux-gnu, qemu-user)"
    ),
]
CAUSAL = {"use_causal_mask": True}
ATTENTION = (
    AttentionSpec("more than a tile", 1, 2, 150, 9, options=CAUSAL),
    AttentionSpec("grouped", 2, 4, 33, 17, kv_heads=2, value_dim=5, options={**CAUSAL, "layout": "bshd"}),
    AttentionSpec("windows", 1, 1, 40, 3, kv_len=140, options={"window": (3, 20)}),
    AttentionSpec("one position", 1, 2, 1, 4),
)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program with the kernels in it, in the folder of their objects."""
    folder = tmp_path_factory.mktemp("aarch64")
    objects = build.compile_kernels(COMPILER, "aarch64", folder)
    source = Path(__file__).resolve().parent.parent / "support" / "native_driver.cc"
    made = folder / "driver"
    command = [COMPILER, "-std=c++17", "-O1", "-static", "-I", build.SOURCES, "-o", made, source, *objects]
    subprocess.run(command, check=True)
    return made


def _emulate(driver: Path, problem: bytes) -> np.ndarray:
    """What the kernels answer, as bytes."""
    done = subprocess.run(
        [EMULATOR, str(driver)], input=problem + struct.pack("<q", -1), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == b"neon\n"
    return np.frombuffer(done.stdout, np.uint8)


def _cut(answer: np.ndarray, *wanted: tuple[tuple[int, ...], Any]) -> list[np.ndarray]:
    """The answer as arrays of these shapes and dtypes, which take up all of it."""
    arrays = []
    for shape, dtype in wanted:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays.append(answer[:size].view(dtype).reshape(shape))
        answer = answer[size:]
    assert answer.size == 0
    return arrays


@pytest.mark.parametrize("spec", ATTENTION, ids=lambda spec: spec.name)
def test_attention_and_its_gradient(spec, driver):
    arrays, options = make(spec)
    problem, _ = prepare(**arrays, **options)
    q, k, v = (arrays[name].astype("float32") for name in ("query", "key", "value"))
    heads_first = problem.layout == "bhsd"
    grad = np.random.default_rng(1).normal(size=(*q.shape[:3], problem.value_dim)).astype("float32")
    far = problem.q_len + problem.kv_len
    sizes = (problem.batch, problem.heads, problem.kv_heads, problem.q_len, problem.kv_len)
    sizes += (problem.head_dim, problem.value_dim)
    sizes += tuple(far if limit is None else limit for limit in (problem.left, problem.right))
    head = struct.pack("<11qf", 0, *sizes, heads_first, problem.scale)
    answer = _emulate(driver, head + b"".join(x.tobytes() for x in (q, k, v, grad)))
    got = _cut(answer, *(((x.shape), np.float32) for x in (grad, q, k, v)))
    np.testing.assert_allclose(got[0], oracle(arrays, options), rtol=1e-5, atol=2e-6)
    with jax.enable_x64(True):
        attend = partial(flash_attention, **options, implementation="reference")
        _, pull = jax.vjp(jax.jit(attend), *(jnp.asarray(arrays[n]) for n in ("query", "key", "value")))
        want = pull(jnp.asarray(grad, "float64"))
    for name, mine, theirs in zip("qkv", got[1:], want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("pattern", "dtype"), [*((pattern, "float32") for pattern in PATTERNS), (PATTERNS[0], "float64")]
)
def test_max_plus_products(pattern, dtype, driver):
    a, b = (x.astype(dtype) for x in signed(pattern))
    if pattern == "any":
        a, b = np.stack([a, a[::-1]]), np.stack([b, b[:, ::-1]])
    value, index = product(a, b)
    for with_index in (False, True):
        sizes = (*(1,) * (3 - a.ndim), *a.shape, b.shape[-1], with_index)
        answer = _emulate(driver, struct.pack("<6q", a.itemsize, *sizes) + a.tobytes() + b.tobytes())
        wanted = [(value.shape, dtype), (value.shape, np.int32)]
        got = _cut(answer, *wanted[: 1 + with_index])
        np.testing.assert_array_equal(got[0], value)
        if with_index:
            np.testing.assert_array_equal(got[1], index)


@pytest.mark.parametrize("name", ["BF16", "F32", "F64", "I32", "F8_E5M2"])
def test_coded_tensors(name, driver):
    form, shape = get_format(name), (40, 133)
    wide = np.random.default_rng(2).normal(size=shape) * 0.1
    bits = from_float(wide, form) if form.is_float else (wide * 1000).astype("int64").astype(form.unsigned)
    bits = np.ascontiguousarray(bits.reshape(-1), form.unsigned)
    padded = bits.tobytes() + bytes(-bits.nbytes % 8)
    sizes = (form.bits, form.exponent, form.mantissa, form.signed, *shape)
    answer = _emulate(driver, struct.pack("<7q", 16, *sizes) + padded)
    want = lossless.encode(bits, form, shape, NumpyExecutor())
    assert want[0] == lossless.CODED
    size = int(answer[:8].view(np.int64)[0])
    assert answer[8 : 8 + size].tobytes() == want[1:]
    np.testing.assert_array_equal(answer[8 + size :][: bits.nbytes].view(form.unsigned), bits)


@pytest.mark.slow
def test_the_whole_library_is_built_for_arm(tmp_path):
    if build.find_headers() is None:
        pytest.skip("jaxlib here has no headers")
    made = build.build(tmp_path / "libcapibara.so", compiler=COMPILER, machine="aarch64")
    content = made.read_bytes()
    assert content[:5] == b"\x7fELF\x02"
    assert struct.unpack_from("<H", content, 18) == (183,)  # EM_AARCH64
    for name in TARGETS:
        assert name.encode() + b"\0" in content
    assert build.source_digest().encode() in content

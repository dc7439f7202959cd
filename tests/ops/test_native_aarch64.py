"""The native library for 64-bit Arm: built by a cross compiler, its kernels run under user-mode emulation."""

from __future__ import annotations

import platform
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import make, oracle
from device_arrays import device_array
from quantised_oracle import KINDS, quantised_case
from tropical_oracle import PATTERNS, signed
from tropical_oracle import oracle as product

from capibara.compress.codecs import fixed_search, lossless
from capibara.compress.codecs.executors import NumpyExecutor
from capibara.compress.formats import from_float, get_format
from capibara.native import build
from capibara.native.library import TARGETS
from capibara.ops.attention import flash_attention
from capibara.ops.attention.problem import prepare
from capibara.ops.attention.specs import AttentionSpec
from capibara.ops.linalg.specs import QuantisedSpec
from capibara.ops.scan import selective_scan
from capibara.ops.scan.specs import ScanSpec, arguments

COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
HERE = platform.machine() == "aarch64"
MISSING = [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.slow,  # `make test-arm` runs them
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
    AttentionSpec(
        "all that is added",
        2,
        2,
        140,
        7,
        bias=(True, True, True, True),
        segments=True,
        options={**CAUSAL, "softcap": 2.0},
    ),
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Their objects, which take a minute."""
    return build.compile_kernels(COMPILER, "aarch64", tmp_path_factory.mktemp("aarch64"))


@pytest.fixture(scope="module")
def driver(kernels: list[Path]) -> Path:
    """A program with the kernels in it, in the folder of their objects."""
    source = Path(__file__).resolve().parent.parent / "support" / "native_driver.cc"
    made = kernels[0].parent / "driver"
    command = [COMPILER, "-std=c++17", "-O1", "-static", "-I", build.SOURCES, "-o", made, source, *kernels]
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


@pytest.mark.parametrize(
    "spec",
    [
        spec if spec.name in ("grouped", "one position") else pytest.param(spec, marks=pytest.mark.slow)
        for spec in ATTENTION
    ],
    ids=lambda spec: spec.name,
)
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
    switches = (heads_first, spec.bias is not None, spec.segments, False)
    head = struct.pack("<14q2f", 0, *sizes, *switches, problem.scale, problem.softcap or 0.0)
    more = [arrays["bias"].astype("float32")] if spec.bias is not None else []
    ids = [options["segment_ids"]] * 2 if spec.segments else []
    answer = _emulate(driver, head + b"".join(x.tobytes() for x in (q, k, v, grad, *more, *ids)))
    got = _cut(answer, *(((x.shape), np.float32) for x in (grad, q, k, v, *more)))
    np.testing.assert_allclose(got[0], oracle(arrays, options), rtol=1e-5, atol=2e-6)
    with jax.enable_x64(True):

        @jax.jit
        def attend(wide: dict[str, jax.Array]) -> jax.Array:
            return flash_attention(**wide, **options, implementation="reference")

        _, pull = jax.vjp(attend, {name: device_array(x) for name, x in arrays.items()})
        (want,) = pull(device_array(grad, "float64"))
    names = ("query", "key", "value", "bias")[: len(got) - 1]
    for name, mine in zip(names, got[1:], strict=True):
        np.testing.assert_allclose(mine, want[name], rtol=2e-5, atol=1e-5, err_msg=name)


def test_attention_in_bfloat16(driver):
    arrays, _ = make(AttentionSpec("", 1, 2, 50, 9))
    q, k, v = (device_array(arrays[name], jnp.bfloat16) for name in ("query", "key", "value"))
    head = struct.pack("<14q2f", 0, 1, 2, 2, 50, 50, 9, 9, 100, 0, 1, 0, 0, 1, 0.3, 0.0)
    answer = _emulate(driver, head + b"".join(np.asarray(x).tobytes() for x in (q, k, v, q)))
    out, *_ = _cut(answer, *((x.shape, np.uint16) for x in (q, q, k, v)))
    wide = {
        name: np.asarray(x, np.float64) for name, x in zip(("query", "key", "value"), (q, k, v), strict=True)
    }
    want = oracle(wide, {"use_causal_mask": True, "scale": 0.3})
    found = np.asarray(jax.lax.bitcast_convert_type(device_array(out), jnp.bfloat16), np.float64)
    np.testing.assert_allclose(found, want, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_recurrences(reverse, late, driver):
    rng = np.random.default_rng(0)
    a, x = rng.normal(size=(2, 9, 37)).astype("float32")
    first = rng.normal(size=37).astype("float32")
    head = struct.pack("<5q", 1, *x.shape, reverse, late)
    got = _cut(
        _emulate(driver, head + b"".join(v.tobytes() for v in (a, x, first))),
        *((v.shape, "f4") for v in (x, first)),
    )
    want, state = np.zeros(x.shape), first.astype("float64")
    for t in range(9)[:: -1 if reverse else 1]:
        want[t] = x[t] + (state if late else a[t] * state)
        state = a[t] * want[t] if late else want[t]
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], state, rtol=1e-5, atol=1e-5)


def test_selective_scans(driver):
    spec = ScanSpec("", 2, 75, 4, 3, 2, 5, 64)
    arrays, options = arguments(spec, np.random.default_rng(0))
    narrow = [v.astype("float32") for v in (*arrays, options["initial_state"])]
    head = struct.pack("<7q", 2, spec.batch, spec.length, spec.heads, spec.width, spec.groups, spec.states)
    answer = _emulate(driver, head + b"".join(v.tobytes() for v in narrow))
    got = _cut(answer, (narrow[0].shape, "f4"), (narrow[-1].shape, "f4"))
    with jax.enable_x64(True):
        wide = [device_array(v, "float64") for v in narrow]
        want = selective_scan(*wide[:-1], initial_state=wide[-1], implementation="reference")
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)


def test_gradients_of_selective_scans(driver):
    spec, parts = ScanSpec("", 2, 75, 6, 5, 2, 11, 64), 2
    arrays, options = arguments(spec, np.random.default_rng(0))
    rng = np.random.default_rng(1)
    shapes = spec.shapes()
    grads = [rng.normal(size=shapes[name]) for name in ("x", "initial_state")]
    narrow = [v.astype("float32") for v in (*arrays, options["initial_state"], *grads)]
    sizes = (spec.batch, spec.length, spec.heads, spec.width, spec.groups, spec.states, parts)
    answer = _emulate(driver, struct.pack("<8q", 3, *sizes) + b"".join(v.tobytes() for v in narrow))
    wanted = [shapes["x"], shapes["dt"], (spec.batch, spec.heads), shapes["initial_state"]]
    wanted += [shapes["b"], shapes["c"], (parts - 1, 2, *shapes["b"])]
    x, dt, a, first, b, c, others = _cut(answer, *((shape, "f4") for shape in wanted))
    got = (x, dt, a.sum(0), b + others[:, 0].sum(0), c + others[:, 1].sum(0), first)
    with jax.enable_x64(True):
        wide = [device_array(v, "float64") for v in narrow]

        def scan(*v):
            return selective_scan(*v[:-1], initial_state=v[-1], implementation="reference")

        want = jax.jit(lambda v, g: jax.vjp(scan, *v)[1](g))(wide[:6], tuple(wide[6:]))
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5 * np.max(np.abs(theirs)))


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("count", "rows", "inner", "group"),
    [(1, 9, 192, 64), (3, 11, 75, 32), (2, 5, 101, 7), (9, 3, 40, 4), (37, 29, 450, 32)],
)
def test_products_with_codes(kind, count, rows, inner, group, driver):
    x, codes, scales, levels, weight = quantised_case(kind, QuantisedSpec("", (count,), inner, rows, group))
    levels = np.arange(-8, 8, dtype=np.float32) if levels is None else levels
    back = np.random.default_rng(4).normal(size=(count, rows)).astype(np.float32)
    for across, vectors, matrix in ((False, x, weight.T), (True, back, weight)):
        head = struct.pack("<7q", 32, kind != "int8", across, count, rows, inner, group)
        arrays = (vectors, scales, levels, codes)
        answer = _emulate(driver, head + b"".join(np.ascontiguousarray(a).tobytes() for a in arrays))
        got, numbers = _cut(answer, ((count, matrix.shape[1]), "f4"), (weight.shape, "f4"))
        bound = 1e-6 * (np.abs(vectors).astype(np.float64) @ np.abs(matrix))
        assert (np.abs(got - vectors.astype(np.float64) @ matrix) <= bound).all()
        np.testing.assert_array_equal(numbers, weight.astype(np.float32))


@pytest.mark.parametrize("sizes", [(40, 70, 900), (7, 5, 33), (9, 20, 0)])
def test_blocks_of_grouped_products(sizes, driver):
    rows, columns, depth = sizes
    random = np.random.default_rng(6)
    a, b = random.normal(size=(rows, depth)), random.normal(size=(depth, columns))
    for by_depth, by_column in ((0, 0), (0, 1), (1, 0)):
        arrays = (a.T if by_depth else a, b.T if by_column else b)
        given = b"".join(np.ascontiguousarray(x, np.float32).tobytes() for x in arrays)
        answer = _emulate(driver, struct.pack("<6q", 34, *sizes, by_depth, by_column) + given)
        (got,) = _cut(answer, ((rows, columns), "f4"))
        np.testing.assert_allclose(got, a @ b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("sizes", [(1, 70, 900), (1, 900, 131), (2, 33, 70), (5, 257, 19), (16, 64, 200)])
def test_products_of_a_few_rows(sizes, driver):
    rows, inner, columns = sizes
    random = np.random.default_rng(7)
    x, w = (random.normal(size=shape).astype(np.float32) for shape in ((rows, inner), (inner, columns)))
    for by_column in (0, 1):
        given = x.tobytes() + np.ascontiguousarray(w.T if by_column else w).tobytes()
        answer = _emulate(driver, struct.pack("<5q", 35, *sizes, by_column) + given)
        (got,) = _cut(answer, ((rows, columns), "f4"))
        bound = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(w))
        assert (np.abs(got - x.astype(np.float64) @ w) <= bound).all()


@pytest.mark.parametrize("sizes", [(1, 1, 0), (7, 9, 3), (40, 66, 33)])
def test_passes_over_rows(sizes, driver):
    rows, features, pairs = sizes
    random = np.random.default_rng(8)
    x, y, slope = (random.normal(size=(rows, features)).astype(np.float32) for _ in range(3))
    scale = random.normal(size=features).astype(np.float32)
    cos, sin = (random.normal(size=(rows, pairs)).astype(np.float32) for _ in range(2))
    given = b"".join(array.tobytes() for array in (x, y, slope, scale, cos, sin))
    answer = _emulate(driver, struct.pack("<4q", 36, *sizes) + given)
    got = _cut(answer, *[((features,) if i == 2 else (rows, features), "f4") for i in range(7)])

    def norm(x, scale):
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5) * (scale + 1)

    def turned(x):
        a, b = x[:, :pairs], x[:, pairs : 2 * pairs]
        return np.concatenate([a * cos + b * sin, b * cos - a * sin, x[:, 2 * pairs :]], axis=1)

    normed, pull = jax.vjp(norm, x, scale)
    active, pull_gate = jax.vjp(lambda x, y: x / (1 + jnp.exp(-x)) * y, x, y)
    want = [normed, *pull(slope), active, *pull_gate(slope), turned(x)]
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("kind", list(fixed_search.KINDS.values()), ids=lambda kind: kind.name)
def test_searched_scales(kind, driver):
    random, resolution, last = np.random.default_rng(5), 16, 127
    x = (random.normal(size=(13, 21)) * 2.0 ** random.integers(-12, 3, (13, 1))).astype(np.float32)
    top = float(np.float32(np.abs(x).max() / kind.largest))
    book = fixed_search.NF4 if kind.name == "nf4" else None
    want = fixed_search.search(fixed_search.NumpyExecutor(), kind, book, x, top, resolution, last)
    table = np.append(np.float64(top) * fixed_search.multipliers(resolution), kind.largest)
    cap, shift = fixed_search.error_limits(kind, x.shape[1])
    sizes = (
        *x.shape,
        kind.bits,
        kind.fraction,
        kind.signed,
        *kind.steps(resolution),
        last,
        (1 << cap) - 1,
        shift,
    )
    head = struct.pack("<12q", 33, *sizes, book is not None)
    levels = np.zeros(16, np.int32) if book is None else book
    answer = _emulate(driver, head + b"".join(a.tobytes() for a in (table, x, levels)))
    chosen, codes = _cut(answer, ((len(x),), np.uint8), (x.shape, np.int8))
    np.testing.assert_array_equal(chosen, want[0])
    np.testing.assert_array_equal(codes, want[1])


@pytest.mark.slow
def test_the_whole_library_is_built_for_arm(kernels, tmp_path):
    if build.find_headers() is None:
        pytest.skip("jaxlib here has no headers")
    made = build.build(tmp_path / "libcapibara.so", compiler=COMPILER, machine="aarch64", kernels=kernels)
    content = made.read_bytes()
    assert content[:5] == b"\x7fELF\x02"
    assert struct.unpack_from("<H", content, 18) == (183,)  # EM_AARCH64
    for name in TARGETS:
        assert name.encode() + b"\0" in content
    assert build.source_digest().encode() in content

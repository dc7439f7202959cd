"""NaN and infinities, in every implementation: they go where NumPy's plain loops put them, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array

from capibara.ops import list_ops
from capibara.ops.attention import flash_attention
from capibara.ops.conv import causal_conv1d, conv1d, conv2d, winograd_conv2d
from capibara.ops.errors import NoImplementationError
from capibara.ops.fft import radix_optimized_fft
from capibara.ops.linalg import cholesky_update, fast_svd, optimized_gemm, qr
from capibara.ops.scan import lif, linear_recurrence, matrix_linear_recurrence, parallel_scan, selective_scan
from capibara.ops.tropical import matmul

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RANDOM.normal(size=shape).astype(np.float32)


def put(x: Any, *entries: tuple[tuple[int, ...], float]) -> Any:
    x = x.copy()
    for at, value in entries:
        x[at] = value
    return x


def same(got: Any, want: Any, name: str) -> None:
    """The same NaN and infinities, and the same numbers elsewhere."""
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-4, atol=2e-4, err_msg=name)


def every(op: str, call: Callable[[str], Any]) -> dict[str, Any]:
    """What each implementation gives that takes the problem on this machine."""
    found = {}
    for name in ("auto", *list_ops()[op].implementations):
        try:
            found[name] = call(name)
        except NoImplementationError:
            continue
    assert len(found) >= 2, op
    return found


@pytest.fixture(autouse=True)
def _numpy_says_nothing():
    with np.errstate(all="ignore"):
        yield


A = put(normal(5, 6), ((1, 2), np.nan), ((3, 0), np.inf), ((4, 1), -np.inf))


@pytest.mark.parametrize("options", [{}, {"chunk_size": 2}], ids=["whole", "slabs"])
def test_products(options):
    b = put(normal(6, 4), ((2, 1), np.inf), ((5, 3), np.nan))
    want = A.astype(np.float64) @ b.astype(np.float64)
    assert 0 < np.isnan(want).sum() < want.size
    found = every("optimized_gemm", lambda name: optimized_gemm(A, b, implementation=name, **options))
    for name, got in found.items():
        same(got, want, name)


def test_products_of_integers_lose_the_rows_that_have_no_scale():
    b = normal(6, 4)
    for name, got in every(
        "optimized_gemm", lambda name: optimized_gemm(A, b, precision="int8", implementation=name)
    ).items():
        lost = np.isnan(np.asarray(got))
        np.testing.assert_array_equal(lost.all(1), ~np.isfinite(A).all(1), name)
        np.testing.assert_array_equal(lost.any(1), lost.all(1), name)


def test_decompositions_keep_it_in_its_matrix():
    whole = normal(3, 7, 4)
    bad = put(whole, ((1, 2, 3), np.nan))
    for name, (q, r) in every("qr", lambda name: qr(bad, implementation=name)).items():
        product = np.asarray(q @ r)
        np.testing.assert_allclose(product[[0, 2]], whole[[0, 2]], atol=1e-5, err_msg=name)
        assert not np.isfinite(product[1]).all(), name
    for name, (u, s, vh) in every("fast_svd", lambda name: fast_svd(bad, 2, implementation=name)).items():
        want = np.linalg.svd(whole, compute_uv=False)[:, :2]
        np.testing.assert_allclose(np.asarray(s)[[0, 2]], want[[0, 2]], rtol=1e-3, err_msg=name)
        assert np.isnan(np.asarray(s)[1]).all(), name
        assert all(np.isfinite(np.asarray(x)[[0, 2]]).all() for x in (u, vh)), name
    lower: Any = np.stack([np.eye(3, dtype=np.float32) * 2] * 2)
    vector = put(normal(2, 3), ((1, 1), np.nan))
    found = every("cholesky_update", lambda name: cholesky_update(lower, vector, implementation=name))
    for name, got in found.items():
        got = np.asarray(got)
        want = np.linalg.cholesky(lower[0] @ lower[0].T + np.outer(vector[0], vector[0]))
        same(got[0], want, name)
        assert np.isnan(got[1][np.tril_indices(3)]).any(), name
        assert (got[1][np.triu_indices(3, 1)] == 0).all(), name
        assert np.isnan(got[1, 1:, 1:]).any(), name


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_tall_matrix_is_lost_in_both_of_its_factors(value):
    whole = normal(3, 16, 3)
    bad = put(whole, ((1, 5, 1), value))
    found = every("qr", lambda name: qr(bad, implementation=name))
    assert "gram" in found
    for name, (q, r) in found.items():
        q, r = np.asarray(q), np.asarray(r)
        np.testing.assert_allclose((q @ r)[[0, 2]], whole[[0, 2]], atol=1e-5, err_msg=name)
        # Column by column the first one is there; the Gram matrix has all of them.
        first = 0 if name == "gram" else 1
        assert not np.isfinite(q[1][:, first:]).any(), name
        assert not np.isfinite(np.diagonal(r[1])[first:]).any(), name


def _cholesky(matrix: np.ndarray) -> np.ndarray:
    lower = np.zeros_like(matrix)
    for i, j in zip(*np.tril_indices(len(matrix)), strict=True):
        rest = matrix[i, j] - (lower[i, :j] * lower[j, :j]).sum()
        lower[i, j] = np.sqrt(rest) if i == j else rest / lower[j, j]
    return lower


@pytest.mark.parametrize("downdate", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [(0, 0), (1, 1), (2, 1), (3, 0), (3, 3), (0,), (1,), (3,)], ids=str)
def test_an_updated_factor_loses_a_row_and_what_elimination_makes_of_it(at, value, downdate):
    lower: Any = np.tril(normal(4, 4)) / 4 + 2 * np.eye(4, dtype=np.float32)
    vector = normal(4) / 4
    lower, vector = (put(v, (at, value)) if v.ndim == len(at) else v for v in (lower, vector))
    wide, w = lower.astype(np.float64), vector.astype(np.float64)
    # The sum that a product is, zeros and all, as BLAS may leave some out.
    square = sum(np.outer(wide[:, i], wide[:, i]) for i in range(4))
    want = _cholesky(square + (-1 if downdate else 1) * np.outer(w, w))
    finite = np.isfinite(want)
    found = every(
        "cholesky_update", lambda name: cholesky_update(lower, vector, downdate=downdate, implementation=name)
    )
    for name, got in found.items():
        got = np.asarray(got)
        if name == "reference" and (at[0] == 0 or (downdate and len(at) == 1)):
            continue  # LAPACK's may have 0 for inf / inf, and is NaN altogether after a root of something below 0
        np.testing.assert_array_equal(np.isfinite(got), finite, name)
        same(got[finite], want[finite], name)


def _steps(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    h, rows = np.zeros(x.shape[1:]), []
    for factor, now in zip(a.astype(np.float64), x.astype(np.float64), strict=True):
        h = factor * h + now
        rows.append(h)
    return np.stack(rows)


def test_recurrences_carry_it_on_in_its_channel():
    a: Any = np.abs(normal(9, 4)) / 4 + 0.1
    x = put(normal(9, 4), ((3, 1), np.nan), ((5, 2), np.inf), ((0, 3), -np.inf))
    want = _steps(a, x)
    for name, got in every(
        "linear_recurrence", lambda name: linear_recurrence(a, x, implementation=name)
    ).items():
        same(got[0], want, name)

    def step(h: Any, now: Any) -> Any:
        h = now[0] * h + now[1]
        return h, h

    found = every(
        "parallel_scan", lambda name: parallel_scan(step, jnp.zeros(4), (a, x), implementation=name)
    )
    for name, got in found.items():
        same(got[1], want, name)
    matrix: Any = np.array([[0.5, 0.1], [0.2, 0.3]], np.float32)
    vectors = put(normal(6, 2), ((2, 0), np.nan))
    found = every(
        "matrix_linear_recurrence",
        lambda name: matrix_linear_recurrence(matrix, vectors, implementation=name),
    )
    for name, got in found.items():
        lost = np.isnan(np.asarray(got[0]))
        np.testing.assert_array_equal(lost, [[False] * 2] * 2 + [[True, False]] + [[True] * 2] * 3, name)
    spikes, potential = lif(x)
    assert np.isnan(np.asarray(potential)[1])
    assert np.isfinite(np.asarray(spikes)[:, 0]).all()


def _selective(x: Any, dt: Any, a: Any, b: Any, c: Any, h: Any) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence of selective_scan, one position after the other."""
    x, dt, a, b, c, h = (np.asarray(v, np.float64) for v in (x, dt, a, b, c, h))
    b, c = (np.repeat(v, x.shape[2] // v.shape[2], 2) for v in (b, c))
    rows = []
    for t in range(x.shape[1]):
        push = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        h = np.exp(dt[:, t] * a)[..., None, None] * h + push
        rows.append((h * c[:, t, :, None]).sum(-1))
    return np.stack(rows, 1), h


# Where something not finite goes into a selective scan of 2 batch elements, 11 positions, 4 heads, 2 channels, 2 groups
# and 3 states: the array (x, dt, a, b, c, initial state), the entry and the value.
SPOILT = {
    "x": (0, (0, 6, 1, 0), np.nan),
    "x infinite": (0, (1, 0, 2, 1), -np.inf),
    "x in the last": (0, (0, 10, 3, 1), np.inf),
    "dt": (1, (0, 5, 1), np.nan),
    "dt infinite": (1, (1, 3, 0), np.inf),
    "dt below zero": (1, (1, 9, 3), -np.inf),
    "a": (2, (2,), np.nan),
    "a above zero": (2, (1,), np.inf),
    "a below zero": (2, (1,), -np.inf),
    "b": (3, (0, 7, 1, 2), np.nan),
    "b infinite": (3, (1, 2, 0, 0), np.inf),
    "c": (4, (1, 6, 1, 1), np.nan),
    "c infinite": (4, (0, 4, 0, 2), -np.inf),
    "state": (5, (1, 1, 0, 2), np.nan),
    "state infinite": (5, (0, 3, 1, 0), np.inf),
}


def _selective_arrays() -> list[Any]:
    rng = np.random.default_rng(4)
    shapes = (2, 11, 4, 2), (2, 11, 4), (4,), (2, 11, 2, 3), (2, 11, 2, 3), (2, 4, 2, 3)
    x, dt, a, b, c, h = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return [x, np.abs(dt) + 0.1, -np.abs(a), b, c, h]


@partial(jax.jit, static_argnums=(0, 1))  # compiled once for all that is put into the arrays
def _selective_scan(
    name: str, chunk_size: int | None, x: Any, dt: Any, a: Any, b: Any, c: Any, h: Any
) -> Any:
    return selective_scan(x, dt, a, b, c, initial_state=h, chunk_size=chunk_size, implementation=name)


@pytest.mark.parametrize("spoilt", SPOILT)
def test_a_selective_scan_carries_it_on_where_its_recurrence_does(spoilt):
    which, at, value = SPOILT[spoilt]
    arrays = _selective_arrays()
    arrays[which] = put(arrays[which], (at, value))
    want = _selective(*arrays)
    if spoilt == "a below zero":
        assert all(np.isfinite(v).all() for v in want)
    else:
        assert 0 < np.isfinite(want[0]).sum() < want[0].size
    found = every("selective_scan", lambda name: _selective_scan(name, None, *arrays))
    found |= {f"chunks of {n}": _selective_scan("xla", n, *arrays) for n in (1, 4, 11)}
    for name, got in found.items():
        for part, expected in zip(got, want, strict=True):
            finite = np.isfinite(expected)
            np.testing.assert_array_equal(np.isfinite(part), finite, name)
            same(np.asarray(part)[finite], expected[finite], name)


@pytest.mark.parametrize("spoilt", [name for name, (which, _, _) in SPOILT.items() if which in (0, 1, 3)])
def test_a_selective_scans_gradient_of_what_came_before_stays(spoilt):
    which, at, value = SPOILT[spoilt]
    arrays = _selective_arrays()
    arrays[which] = put(arrays[which], (at, value))
    start = at[1]
    weight = np.random.default_rng(5).normal(size=arrays[0].shape).astype(np.float32)

    def gradient(name: str, weight: Any) -> list[np.ndarray]:
        pull = _selective_gradient(name, 4 if name == "xla" else None)
        return [np.asarray(v) for v in pull(arrays, (weight, np.zeros_like(arrays[5])))]

    # Only what comes before is read: its gradient is that of a scan which ends there.
    early = weight.copy()
    early[:, start:] = 0
    shorter = [v[:, :start] if i in (0, 1, 3, 4) else v for i, v in enumerate(arrays)]
    if start:
        want = _selective_gradient("reference", None)(shorter, (weight[:, :start], np.zeros_like(arrays[5])))
        got = gradient("xla", early)
        for i in (0, 1, 3, 4):
            same(got[i][:, :start], want[i], f"{i}")
        same(got[5], want[5], "state")
    # Everything is read: the recurrence's gradient where that is finite. Elsewhere it is not finite for what multiplies
    # a state that is not: c, and from there on dt. (That of a is lost even if there is no later position to read it.)
    got, want = gradient("xla", weight), gradient("reference", weight)
    for i, (part, expected) in enumerate(zip(got, want, strict=True)):
        finite = np.isfinite(expected if i != 2 else part)
        assert finite.any(), i
        same(part[finite], expected[finite], f"{i}")
    assert not np.isfinite(got[2]).all()
    for i in (1, 4):
        np.testing.assert_array_equal(np.isfinite(got[i])[:, start:], np.isfinite(want[i])[:, start:], f"{i}")
    # In forward mode too nothing gets into the tangents of earlier positions.
    tangents = [jnp.cos(v) for v in _selective_arrays()]

    def tangent(name: str) -> np.ndarray:
        scan = partial(_selective_scan, name, 4 if name == "xla" else None)
        return np.asarray(jax.jvp(scan, [device_array(v) for v in arrays], tangents)[1][0])

    got, want = tangent("xla"), tangent("reference")
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    same(got[np.isfinite(want)], want[np.isfinite(want)], "tangent")


def _reached(which: int, at: tuple[int, ...], end: int) -> list[np.ndarray]:
    """What depends on an entry of the output (0) or of the last state (1), of each array; positions up to ``end``."""
    if which == 0:
        batch, position, head, channel = at
        state: Any = slice(None)
    else:
        (batch, head, channel, state), position = at, None
    group = head // 2
    before = slice(end)
    entries: list[Any] = [
        (batch, before, head, channel),
        (batch, before, head),
        (head,),
        (batch, before, group, state),
        () if position is None else (batch, position, group),
        (batch, head, channel, state),
    ]
    lost = [np.zeros(v.shape, bool) for v in _selective_arrays()]
    for mask, entry in zip(lost, entries, strict=True):
        if entry:
            mask[entry] = True
    return lost


@cache
def _selective_gradient(name: str, size: int | None) -> Callable[..., Any]:
    """Compiled once for all cases."""

    def gradient(arrays: Any, cotangents: Any) -> Any:
        return jax.vjp(lambda *v: _selective_scan(name, size, *v), *arrays)[1](cotangents)

    return jax.jit(gradient)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    ("which", "at"), [(0, (0, 5, 1, 0)), (0, (1, 0, 3, 1)), (0, (1, 10, 2, 1)), (1, (1, 2, 1, 2))], ids=str
)
def test_a_selective_scans_cotangent_reaches_what_it_came_from(which, at, value):
    arrays = _selective_arrays()
    rng = np.random.default_rng(6)
    sound = [rng.normal(size=arrays[i].shape).astype(np.float32) for i in (0, 5)]
    spoilt = list(sound)
    spoilt[which] = put(sound[which], (at, value))

    def gradient(name: str, cotangents: list[Any], size: int | None = None) -> list[np.ndarray]:
        return [np.asarray(v) for v in _selective_gradient(name, size)(arrays, tuple(cotangents))]

    length = arrays[0].shape[1]
    end = at[1] + 1 if which == 0 else length
    want, least = gradient("reference", sound), _reached(which, at, end)
    found = every("selective_scan", lambda name: (gradient(name, spoilt), 11 if name == "xla" else 1))
    # Where the compiled loop is not there, "auto" is in one chunk too.
    if "native" not in found:
        found["auto"] = found["xla"]
    found |= {f"chunks of {n}": (gradient("xla", spoilt, n), n) for n in (1, 4)}
    for name, (got, size) in found.items():
        # A product over a chunk takes it on to the end of the chunk.
        most = _reached(which, at, min(-(-end // size) * size, length))
        for i, (part, expected) in enumerate(zip(got, want, strict=True)):
            lost = ~np.isfinite(part)
            assert lost[least[i]].all(), (name, i)
            assert not lost[~most[i]].any(), (name, i)
            same(part[~lost], expected[~lost], f"{name} {i}")


def test_convolutions_put_it_where_a_window_sees_it():
    image = put(normal(2, 8, 8, 1), ((0, 2, 3, 0), np.nan), ((0, 6, 6, 0), np.inf))
    filters = np.abs(normal(3, 3, 1, 2)) + 0.1
    want = np.zeros((2, 6, 6, 2))
    for i, j in np.ndindex(3, 3):
        want += image[:, i : i + 6, j : j + 6].astype(np.float64) * filters[i, j]
    found = every(
        "winograd_conv2d", lambda name: winograd_conv2d(image, filters, padding="VALID", implementation=name)
    )
    for name, got in {
        **found,
        "conv2d": conv2d(device_array(image), device_array(filters), padding="VALID"),
    }.items():
        same(got, want, name)
    line, taps = put(normal(1, 8, 2), ((0, 3, 1), np.nan)), normal(3, 2)
    past = np.concatenate([np.zeros((1, 2, 2)), line], 1)
    want = sum(taps[i] * past[:, i : i + 8] for i in range(3))
    for name, got in every(
        "causal_conv1d", lambda name: causal_conv1d(line, taps, implementation=name)
    ).items():
        same(got[0], want, name)
    plain = conv1d(device_array(line), device_array(normal(3, 2, 4)), padding="VALID")
    np.testing.assert_array_equal(
        np.isnan(np.asarray(plain))[0].all(1), [False, True, True, True, False, False]
    )


def test_a_transform_loses_its_row():
    x = put(normal(3, 12), ((1, 5), np.nan))
    found = every("radix_optimized_fft", lambda name: radix_optimized_fft(x, implementation=name))
    for name, got in found.items():
        got = np.asarray(got)
        np.testing.assert_allclose(got[[0, 2]], np.fft.fft(x[[0, 2]]), atol=1e-4, err_msg=name)
        assert not np.isfinite(got[1]).any(), name


def test_tropical_products_lose_rows_and_columns_with_nan():
    a = put(normal(4, 5), ((1, 2), np.nan), ((2, 0), -np.inf), ((3, 0), np.inf))
    b = put(normal(5, 3), ((4, 1), np.nan), ((0, 0), -np.inf))
    terms = a[:, :, None].astype(np.float64) + b
    terms = np.where((a[:, :, None] == -np.inf) | (b == -np.inf), -np.inf, terms)
    lost: Any = np.isnan(a).any(1)
    want = np.where(lost[:, None] | np.isnan(b).any(0), np.nan, terms.max(1))
    for name, got in every("tropical_matmul", lambda name: matmul(a, b, implementation=name)).items():
        same(got, want, name)


@pytest.mark.parametrize(
    "what", ["query", "value inf", *(pytest.param(x, marks=pytest.mark.slow) for x in ("key", "value"))]
)
def test_in_attention_they_reach_all_that_see_them(what):
    """Others are as without, or have what the plain form has there: a weight of zero times what is not finite."""
    arrays = {name: normal(1, 2, 70, 16) for name in ("query", "key", "value")}
    at, number, changed = 40, np.inf if "inf" in what else np.nan, what.split()[0]
    attend = partial(flash_attention, use_causal_mask=True)
    clean = np.asarray(attend(**arrays, implementation="reference"))
    arrays[changed] = put(arrays[changed], ((0, 1, at, 3), number))
    reached = np.zeros(clean.shape, bool)
    reached[0, 1, at : at + 1 if changed == "query" else None, 3 if changed == "value" else slice(None)] = (
        True
    )
    allowed = reached.copy()
    if changed != "query":
        allowed[0, 1] |= reached[0, 1, at]
    for name, got in every("flash_attention", lambda i: attend(**arrays, implementation=i)).items():
        got = np.asarray(got)
        wanted = np.isposinf(got) if number == np.inf else np.isnan(got)
        assert wanted[reached].all(), name
        assert (np.isnan(got) | np.isclose(got, clean, 2e-4, 2e-4))[allowed & ~reached].all(), name
        np.testing.assert_allclose(got[~allowed], clean[~allowed], rtol=2e-4, atol=2e-4, err_msg=name)

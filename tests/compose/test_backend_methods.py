"""Methods of the backends on arrays, against NumPy in float64, on all three."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

from capibara import compose as ml

KINDS = ["numpy", "jax", "torch"]
MAKERS: dict[str, Any] = {"numpy": ml.NumpyBackend, "jax": ml.JaxBackend, "torch": ml.TorchBackend}
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_debug_nans", "jax_default_device")


@pytest.fixture(params=KINDS)
def backend(request: Any) -> Any:
    if request.param == "torch":
        pytest.importorskip("torch")
    return MAKERS[request.param]("float64")


@pytest.fixture(autouse=True)
def same_settings_after() -> Any:
    before = [getattr(jax.config, name) for name in SETTINGS]
    yield
    assert [getattr(jax.config, name) for name in SETTINGS] == before


def make(kind: str, dtype: Any = "float64") -> Any:
    if kind == "torch":
        pytest.importorskip("torch")
    return MAKERS[kind](dtype)


X = np.random.default_rng(0).uniform(-2, 2, (3, 4))
Y = np.random.default_rng(1).uniform(0.2, 2, (3, 4))
I = np.array([[3, 1, 2], [0, 5, 4]], "int32")  # noqa: E741
B = np.array([[True, False, True], [False, False, True]])


def test_single_values_are_drawn_and_are_ends_of_a_range(backend: Any):
    drawn = backend.rand_uniform(2.0, 3.0)
    assert tuple(drawn.shape) == ()
    assert 2 <= float(drawn) < 3
    ends = backend.array(1.0), backend.array(2.0)
    np.testing.assert_allclose(backend.to_numpy(backend.linspace(*ends, 5)), np.linspace(1, 2, 5))


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def phi(x: np.ndarray) -> np.ndarray:
    return np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))))(x)


DIMS = [{}, {"axis": 0}, {"axis": (0, 1)}, {"axis": -1, "keepdims": True}]
PLACES = [{}, {"axis": 0}, {"axis": 1, "keepdims": True}]
COMPARED = ["equal", "not_equal", "less", "less_equal", "greater", "greater_equal"]
REDUCED = ["sum", "mean", "prod", "max", "min", "var", "std"]
AT = np.array([[0, 1], [1, 2], [3, 3]])
ODD = np.array([1.0, np.nan, -np.inf])


# method, arguments, keyword arguments, what NumPy gives
CASES: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = [
    *[(n, (X,), {}, getattr(np, n)(X)) for n in ("abs", "sign", "sin", "cos", "tan", "tanh", "exp", "expm1")],
    *[(n, (X,), {}, getattr(np, n)(X)) for n in ("floor", "ceil", "round", "square", "negative", "reciprocal")],
    *[(n, (Y,), {}, getattr(np, n)(Y)) for n in ("log", "log1p", "log2", "sqrt")],
    ("rsqrt", (Y,), {}, 1 / np.sqrt(Y)),
    *[(n, (ODD,), {}, getattr(np, n)(ODD)) for n in ("isnan", "isinf", "isfinite")],
    ("stop_gradient", (X,), {}, X),
    ("relu", (X,), {}, np.maximum(X, 0)),
    ("sigmoid", (X,), {}, sigmoid(X)),
    ("silu", (X,), {}, X * sigmoid(X)),
    ("softplus", (X,), {}, np.log1p(np.exp(X))),
    ("gelu", (X, False), {}, X * phi(X)),
    ("gelu", (X,), {}, 0.5 * X * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))),
    ("leaky_relu", (X, 0.3), {}, np.where(X > 0, X, 0.3 * X)),
    ("elu", (X, 0.5), {}, np.where(X > 0, X, 0.5 * np.expm1(X))),
    ("softmax", (X,), {}, softmax(X, -1)),
    ("softmax", (X,), {"dim": 0}, softmax(X, 0)),
    ("log_softmax", (X,), {"dim": 0}, np.log(softmax(X, 0))),
    ("clip", (X, -1, 0.5), {}, np.clip(X, -1, 0.5)),
    ("clip", (X,), {"high": 0.5}, np.minimum(X, 0.5)),
    ("where", (X > 0, X, Y), {}, np.where(X > 0, X, Y)),
    *[(n, (X, Y), {}, getattr(np, n)(X, Y)) for n in ("add", "subtract", "multiply", "divide", "minimum", "maximum")],
    *[(n, (I, 2), {}, getattr(np, n)(I, 2)) for n in ("add", "subtract", "multiply", "divide", "floor_divide")],
    ("power", (Y, X), {}, Y**X),
    ("power", (X, 3), {}, X**3),
    ("floor_divide", (X, Y), {}, X // Y),
    ("modulo", (X, Y), {}, X % Y),
    ("modulo", (-I, 4), {}, -I % 4),
    *[(n, (I, I[::-1]), {}, getattr(np, n)(I, I[::-1])) for n in COMPARED],
    *[(n, (B, B[::-1]), {}, getattr(np, n)(B, B[::-1])) for n in ("logical_and", "logical_or", "logical_xor")],
    ("logical_not", (B,), {}, ~B),
    *[(n, (X,), k, getattr(np, n)(X, **k)) for n in REDUCED for k in DIMS],
    ("var", (X, 0, 1), {}, X.var(0, ddof=1)),
    ("sum", (I,), {"axis": 0}, I.sum(0)),
    ("sum", (B,), {}, B.sum()),
    ("mean", (I,), {}, I.mean()),
    ("mean", (B,), {"axis": 0}, B.mean(0)),
    *[(n, (B,), k, getattr(np, n)(B, **k)) for n in ("all", "any") for k in ({}, {"axis": 1})],
    *[(n, (X,), k, getattr(np, n)(X, **k)) for n in ("argmax", "argmin") for k in PLACES],
    ("cumsum", (X,), {}, np.cumsum(X, -1)),
    ("cumsum", (I, 0), {}, np.cumsum(I, 0)),
    ("norm", (X,), {"axis": 1}, np.linalg.norm(X, axis=1)),
    ("matmul", (X, Y.T), {}, X @ Y.T),
    ("matmul", (X[0], Y.T), {}, X[0] @ Y.T),
    ("dot", (X[0], Y[0]), {}, X[0] @ Y[0]),
    ("outer", (X[0], Y[1]), {}, np.outer(X[0], Y[1])),
    ("reshape", (X, (2, -1)), {}, X.reshape(2, -1)),
    ("reshape", (X, 12), {}, X.reshape(12)),
    ("flatten", (X.reshape(3, 2, 2),), {"start_dim": 1}, X),
    ("flatten", (X,), {}, X.reshape(-1)),
    ("transpose", (X,), {}, X.T),
    ("transpose", (X.reshape(3, 2, 2), (1, 0, 2)), {}, X.reshape(3, 2, 2).transpose(1, 0, 2)),
    ("swapaxes", (X, 0, 1), {}, X.T),
    ("squeeze", (X[None, :, None],), {}, X),
    ("squeeze", (X[None, :, None], 0), {}, X[:, None]),
    ("expand_dims", (X, (0, -1)), {}, X[None, ..., None]),
    ("broadcast_to", (X[:1], (3, 4)), {}, np.broadcast_to(X[:1], (3, 4))),
    ("pad", (X, 1), {}, np.pad(X, 1)),
    ("pad", (X, (1, 2)), {"value": 3.0}, np.pad(X, (1, 2), constant_values=3.0)),
    ("pad", (X, ((0, 1), (2, 0))), {}, np.pad(X, ((0, 1), (2, 0)))),
    ("take", (X, I), {"axis": 1}, np.take(X, np.clip(I, 0, 3), 1)),
    ("gather", (X, AT), {"axis": 1}, np.take_along_axis(X, AT, 1)),
    ("sort", (X,), {}, np.sort(X)),
    ("sort", (X, 0, True), {}, np.sort(X, 0)[::-1]),
    ("argsort", (X,), {"axis": 0}, np.argsort(X, 0)),
    ("argsort", (np.array([1.0, 2.0, 1.0, 2.0]),), {"descending": True}, np.array([1, 3, 0, 2])),
    ("topk", (X, 2), {}, np.sort(X)[:, ::-1][:, :2]),
    ("unique", (np.array([3, 1, 3], "int32"),), {}, np.array([1, 3])),
    ("flip", (X, 0), {}, X[::-1]),
    ("atleast_1d", (np.array(2.0),), {}, np.array([2.0])),
    ("atleast_2d", (X[0],), {}, X[:1]),
    ("cast", (X,), {"dtype": ml.int32}, X.astype("int32")),
]  # fmt: skip


@pytest.mark.thin(3)
@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{n}-{c[0]}" for n, c in enumerate(CASES)])
def test_a_method_gives_what_numpy_gives(backend: Any, number: int) -> None:
    name, args, options, want = CASES[number]
    given = [backend.array(a) if isinstance(a, np.ndarray) else a for a in args]
    got = getattr(backend, name)(*given, **options)
    assert isinstance(got, backend.get_backend_array_type())
    got = backend.to_numpy(got)
    assert got.shape == np.shape(want)
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-14)
    kind = np.asarray(want).dtype.kind
    assert got.dtype == {"f": np.float64, "i": np.int32, "b": np.bool_}[kind]


def test_joining_and_cutting(backend: Any) -> None:
    x, y = backend.array(X), backend.array(Y)
    for name in ("concat", "concatenate", "cat"):
        np.testing.assert_array_equal(
            backend.to_numpy(getattr(backend, name)([x, y], 1)), np.concatenate([X, Y], 1)
        )
    np.testing.assert_array_equal(
        backend.to_numpy(backend.concat([x, y], None)), np.concatenate([X, Y], None)
    )
    np.testing.assert_array_equal(backend.to_numpy(backend.stack([x, y], axis=-1)), np.stack([X, Y], -1))
    for parts, want in ((2, np.split(X, 2, 1)), ([1, 3], np.split(X, [1, 3], 1))):
        got = backend.split(x, parts, axis=1)
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_array_equal(backend.to_numpy(a), b)
    with pytest.raises(ml.InputError, match="4 cannot be split into 3 equal parts"):
        backend.split(x, 3, axis=1)
    values, inverse, counts = backend.unique(backend.array([3, 1, 3]), True, True)
    assert backend.to_numpy(values)[backend.to_numpy(inverse)].tolist() == [3, 1, 3]
    assert backend.to_numpy(counts).tolist() == [1, 2]
    several = backend.atleast_1d(backend.array(1.0), x)
    assert [tuple(s.shape) for s in several] == [(1,), (3, 4)]


DTYPES = [
    ml.float16,
    ml.bfloat16,
    ml.float32,
    ml.float64,
    ml.int8,
    ml.int16,
    ml.int32,
    ml.int64,
    ml.uint8,
    ml.bool,
]


@pytest.mark.thin(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", ["float32", "float64"])
def test_dtypes_of_new_arrays(kind: str, dtype: ml.Dtype, base: str) -> None:
    backend = make(kind, base)
    if kind == "numpy" and dtype is ml.bfloat16:
        with pytest.raises(ml.InputError, match="no bfloat16"):
            backend.zeros(2, dtype=dtype)
        return
    made = [
        backend.zeros(2, 3, dtype=dtype),
        backend.ones((2, 3), dtype=dtype.name),
        backend.full([2, 3], 1, dtype=dtype),
        backend.array(np.ones((2, 3)), dtype=dtype),
        backend.zeros_like(backend.ones(2, 3), dtype=dtype),
        backend.ones_like(backend.zeros(2, 3, dtype=dtype)),
        backend.cast(backend.ones(2, 3), dtype),
    ]
    for array in made:
        assert str(array.dtype).removeprefix("torch.") == dtype.name
        assert tuple(array.shape) == (2, 3)
    assert ml.Dtype(dtype.name, dtype.kind) == dtype
    assert np.dtype(dtype).name == dtype.name  # type: ignore[call-overload]


def test_new_arrays(backend: Any) -> None:
    def same(got: Any, want: Any) -> None:
        np.testing.assert_allclose(backend.to_numpy(got), want, rtol=1e-15)

    same(backend.arange(5), np.arange(5))
    same(backend.arange(2, 8, 3), np.arange(2, 8, 3))
    same(backend.arange(5, 0, -2), [5, 3, 1])
    same(backend.arange(3, 1), [])
    assert "int32" in str(backend.arange(3).dtype)
    assert "float64" in str(backend.arange(3.0).dtype)
    same(backend.linspace(0, 1, 5), np.linspace(0, 1, 5))
    same(backend.eye(2, 3), np.eye(2, 3))
    same(backend.full_like(backend.ones(2), 3), [3, 3])
    same(backend.full(3, 2.5), [2.5] * 3)
    same(backend.zeros(), 0)
    assert str(backend.array([1, 2]).dtype).endswith("int32")
    assert str(backend.array([True]).dtype).endswith("bool")
    assert str(backend.array([1.5]).dtype).endswith("float64")


@pytest.mark.parametrize("kind", KINDS)
def test_floats_have_the_dtype_of_the_backend(kind: str) -> None:
    backend = make(kind, ml.float32)
    for array in (
        backend.array(X),
        backend.randn(2),
        backend.rand(2),
        backend.linspace(0, 1),
        backend.ones(2),
    ):
        assert str(array.dtype).endswith("float32")
    assert backend.cast(0.1) == np.float32(0.1)
    assert backend.cast((0.1, 2, "a", True)) == (float(np.float32(0.1)), 2, "a", True)


# ---- randomness -------------------------------------------------------------------------------------------


def test_random_state(backend: Any) -> None:
    backend.set_seed(4)
    assert backend.seed == 4
    first = [backend.to_numpy(v) for v in (backend.randn(3), backend.rand(3), backend.randint(0, 9, 3))]
    second = backend.to_numpy(backend.randn(3))
    assert not np.allclose(first[0], second)
    backend.set_seed(4)
    for got, want in zip((backend.randn(3), backend.rand(3), backend.randint(0, 9, 3)), first, strict=True):
        np.testing.assert_array_equal(backend.to_numpy(got), want)
    other = type(backend)("float64")
    other.set_seed(4)
    np.testing.assert_array_equal(other.to_numpy(other.randn(3)), first[0])
    backend.set_seed(5)
    assert not np.allclose(backend.to_numpy(backend.randn(3)), first[0])


def test_keys(backend: Any) -> None:
    key = backend.get_random_key()
    new, sub = backend.split_key(key)
    one, two = (backend.to_numpy(backend.random_normal(k, shape=(3, 4))) for k in (new, sub))
    assert one.shape == (3, 4)
    assert not np.allclose(one, two)
    np.testing.assert_array_equal(backend.to_numpy(backend.random_normal(new, shape=(3, 4))), one)
    assert len(backend.split_key(key, 5)) == 5
    np.testing.assert_array_equal(backend.to_numpy(backend.randn(3, 4, prng_key=new)), one)
    for wrong in (0, True, 1.5):
        with pytest.raises(ml.InputError, match="num="):
            backend.split_key(key, wrong)
    for wrong in (-1, 2**32, 1.5, "a", None, True):
        with pytest.raises(ml.InputError, match="seed="):
            backend.set_seed(wrong)
            backend.randn(1)


def test_distributions(backend: Any) -> None:
    """Moments, with bounds of five standard errors for n = 20,000."""
    n = 20_000
    backend.set_seed(1)
    uniform = backend.to_numpy(backend.rand(n))
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert abs(uniform.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(np.histogram(uniform, 10, (0, 1))[0] - n / 10).max() < 5 * math.sqrt(n * 0.09)
    normal = backend.to_numpy(backend.randn(n))
    assert abs(normal.mean()) < 5 / math.sqrt(n)
    assert abs(normal.var() - 1) < 5 * math.sqrt(2 / n)
    between = backend.to_numpy(backend.rand_uniform(-3, 5, n))
    assert -3 <= between.min() < -2.9
    assert 4.9 < between.max() < 5
    whole = backend.to_numpy(backend.randint(-1, 3, n))
    assert sorted(set(whole.tolist())) == [-1, 0, 1, 2]
    probs = backend.array([0.1, 0.0, 0.9])
    drawn = backend.to_numpy(backend.multinomial(probs, n, True))
    assert abs((drawn == 2).mean() - 0.9) < 5 * math.sqrt(0.09 / n)
    assert not (drawn == 1).any()
    both = backend.to_numpy(backend.multinomial(backend.array([[0.5, 0.5, 1e-9], [1.0, 2.0, 3.0]]), 2))
    assert both.shape == (2, 2)
    assert all(len(set(row)) == 2 for row in both.tolist())
    with pytest.raises(ml.InputError, match="4 different indices"):
        backend.multinomial(backend.array([1.0, 2.0]), 4)


def test_numpy_and_torch_draw_the_same() -> None:
    pytest.importorskip("torch")
    a, b = ml.NumpyBackend("float64"), ml.TorchBackend("float64")
    for backend in (a, b):
        backend.set_seed(3)
    for _ in range(2):
        np.testing.assert_array_equal(a.randn(4), b.to_numpy(b.randn(4)))
    np.testing.assert_array_equal(a.rand(4), b.to_numpy(b.rand(4)))


# ---- functions of functions -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_derivatives(backend: Any) -> None:
    x = backend.array([1.0, 2.0, 3.0])
    square_sum = lambda v: backend.sum(v * v * v)  # noqa: E731
    want = 3 * np.array([1.0, 4.0, 9.0])
    np.testing.assert_allclose(backend.to_numpy(backend.grad(square_sum)(x)), want)
    value, gradient = backend.value_and_grad(square_sum)(x)
    assert float(value) == 36
    np.testing.assert_allclose(backend.to_numpy(gradient), want)
    for jacobian in (backend.jacrev, backend.jacfwd, backend.jacobian):
        got = backend.to_numpy(jacobian(lambda v: backend.tanh(v))(x))
        np.testing.assert_allclose(got, np.diag(1 - np.tanh([1.0, 2.0, 3.0]) ** 2))
    rows = backend.vmap(lambda v: backend.sum(v * v))(backend.array(X))
    np.testing.assert_allclose(backend.to_numpy(rows), (X * X).sum(1))
    outputs, pulled, aux = backend.vjp(
        lambda v: (v * 2, {"v": v}), x, cotangents=backend.ones(3), has_aux=True
    )
    assert backend.to_numpy(outputs).tolist() == [2, 4, 6]
    assert backend.to_numpy(pulled).tolist() == [2, 2, 2]
    assert backend.to_numpy(aux["v"]).tolist() == [1, 2, 3]
    outputs, pull, _ = backend.vjp(lambda d: {"y": d["a"] * d["b"]}, {"a": x, "b": backend.add(x, 1)})
    back = pull({"y": backend.ones(3)})
    assert backend.to_numpy(back["a"]).tolist() == [2, 3, 4]
    outputs, pulled, aux = backend.vjp(lambda a, b: a * b, [x, x], cotangents=backend.ones(3))
    assert isinstance(pulled, list)
    assert len(pulled) == 2
    assert aux == []


def test_jit(backend: Any) -> None:
    if backend.type == "torch":
        pytest.skip("torch.compile needs a C++ compiler, and seconds")
    assert float(backend.jit(lambda v: backend.sum(v))(backend.ones(3))) == 3


# ---- places, and what is wrong ----------------------------------------------------------------------------


def test_properties(backend: Any) -> None:
    assert backend.is_manualgrad == (backend.type == "numpy")
    assert backend.inf == math.inf
    assert backend.dtype == "float64"
    assert backend.platform == "cpu"
    assert any("cpu" in name for name in backend.get_available_devices())
    x = backend.ones(3)
    assert backend.block_until_ready(x) is not None
    assert tuple(backend.to_device(x, "cpu").shape) == (3,)
    copy = backend.to_numpy(x)
    copy[0] = 7
    assert backend.to_numpy(x)[0] == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", ["gpu", "gpu:0", "cpu:99", "nonsense"])
def test_devices_that_are_not_there(kind: str, device: str) -> None:
    make(kind)
    if device in ("gpu", "gpu:0") and jax.default_backend() == "gpu":
        pytest.skip("there is a GPU")
    if kind == "torch" and device == "cpu:99":
        pytest.skip("PyTorch takes any number after cpu")
    with pytest.raises(ml.CompileError, match=r"is not available.*cpu"):
        MAKERS[kind](device=device)


WRONG: list[tuple[Any, str]] = [
    (lambda b: b.zeros(-1), "every size"),
    (lambda b: b.zeros(2.5), "every size"),
    (lambda b: b.zeros("a"), "every size"),
    (lambda b: b.ones(2, dtype="float31"), "is not a dtype.*Did you mean"),
    (lambda b: b.ones(2, dtype=3), "is not a dtype"),
    (lambda b: b.array("abc"), "has no numeric dtype"),
    (lambda b: b.array([[1], [2, 3]]), "cannot be made an array"),
    (lambda b: b.array(2**40), "does not fit int32"),
    (lambda b: b.arange(), "arange takes"),
    (lambda b: b.arange(1, 2, 0), "step must not be 0"),
    (lambda b: b.randint(3, 3, 2), "must be below"),
    (lambda b: b.topk(b.ones(3), 4), "topk"),
    (lambda b: b.pad(b.ones(3), ((1, 2), (3, 4))), "pad_width"),
    (lambda b: b.pad(b.ones(3), -1), "pad_width"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_arguments(backend: Any, number: int) -> None:
    call, message = WRONG[number]
    with pytest.raises(ml.InputError, match=message):
        call(backend)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_one_device_cannot_be_a_mesh(kind: str) -> None:
    with pytest.raises(ml.InputError, match=r"device_mesh.*JaxBackend"):
        make(kind).ones(4, device_mesh=(2,))


def test_bfloat16_is_not_numpys() -> None:
    with pytest.raises(ml.CompileError, match="no bfloat16"):
        ml.NumpyBackend("bfloat16")


def test_platforms() -> None:
    assert float(ml.JaxBackend(platform="cpu").ones()) == 1
    with pytest.raises(ml.CompileError, match=r"not one of cpu, gpu.*Did you mean 'gpu'"):
        ml.JaxBackend(platform="gpus")
    if jax.default_backend() != "cpu":
        pytest.skip("there is an accelerator")
    backend = ml.JaxBackend(platform="gpu")  # can be made, and lowered for
    assert backend.platform == "gpu"
    with pytest.raises(ml.CompileError, match=r"platform='gpu' is not available.*cpu:0"):
        backend.ones(3)
    with pytest.raises(ml.CompileError, match=r"platform='gpu' is not available.*cpu:0"):
        ml.JaxBackend(platform="gpu", device_mesh=(1,))

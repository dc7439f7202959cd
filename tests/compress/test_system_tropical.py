"""The component ``tropical_engine`` gives the same with JAX and without it: values, types, kinds, gradients, errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.compress.errors import CompressError
from capibara.compress.system.configuration import SystemConfiguration
from capibara.compress.system.coordinator import SystemIntegrationCoordinator
from capibara.compress.system.host_tropical import HostTropicalEngine
from capibara.compress.system.jax_tropical import JaxTropicalBridge

RANDOM = np.random.default_rng(0)
WIDTHS = ["float16", "float32", "float64"]


@pytest.fixture(scope="module")
def system() -> Iterator[SystemIntegrationCoordinator]:
    with SystemIntegrationCoordinator(SystemConfiguration(jax_backend="cpu")) as made:
        yield made


@pytest.fixture(scope="module", params=["jax", "torch", "numpy"])
def engine(request: pytest.FixtureRequest, system: SystemIntegrationCoordinator) -> Any:
    """With the settings as they are by default, and what stands in where JAX is not."""
    if request.param == "jax":
        found = system.get_component("tropical_engine")
        assert isinstance(found, JaxTropicalBridge)
        return found
    if request.param == "torch":
        pytest.importorskip("torch")
    return HostTropicalEngine(request.param)


def _numbers(*shape: int, dtype: str = "float32") -> np.ndarray:
    return RANDOM.integers(-9, 9, shape).astype(dtype)  # so that sums are exact in every width


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a[..., :, :, None] + b[..., None, :, :]).max(-2)


@pytest.mark.parametrize("left", WIDTHS)
@pytest.mark.parametrize("right", WIDTHS)
def test_the_common_type_of_numpys_arrays(engine: Any, left: str, right: str) -> None:
    a, b, c = _numbers(2, 3, dtype=left), _numbers(3, 4, dtype=right), _numbers(5, dtype=right)
    wanted = np.promote_types(left, right)
    for out, expected in (
        (engine.matmul(a, b), _product(a, b)),
        (engine.polyval(a[0], c), (a[0] + np.arange(3) * c[:, None]).max(-1)),
        (engine.closure(-abs(a[:, :2])), None),
    ):
        assert isinstance(out, np.ndarray)
        assert out.flags.writeable
        if expected is not None:
            assert out.dtype == wanted
            np.testing.assert_array_equal(out, expected)
        else:
            assert out.dtype == a.dtype


@pytest.mark.thin(3)
@pytest.mark.parametrize("left", [*WIDTHS, "bfloat16"])
@pytest.mark.parametrize("right", [*WIDTHS, "bfloat16"])
def test_the_common_type_of_pytorchs_tensors(engine: Any, left: str, right: str) -> None:
    torch = pytest.importorskip("torch")
    a = torch.from_numpy(_numbers(2, 3)).to(getattr(torch, left))
    b = torch.from_numpy(_numbers(3, 4)).to(getattr(torch, right))
    wanted = torch.promote_types(a.dtype, b.dtype)
    expected = (a[:, :, None].double() + b.double()).amax(1)
    out, points = engine.matmul(a, b), engine.polyval(a[0], b)
    assert (out.dtype, points.dtype) == (wanted, wanted)
    assert torch.equal(out.double(), expected)
    assert engine.closure(-a[:, :2].abs()).dtype == a.dtype


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_floats_of_eight_bits(engine: Any, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    a = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]).to(getattr(torch, dtype))
    for out, expected in (
        (engine.matmul(a, a), [[-2, -3], [-4, -5]]),
        (engine.closure(a), [[0, -2], [-3, 0]]),
        (engine.polyval(a[0], a[1]), [-1, -1]),
    ):
        assert out.dtype == a.dtype
        assert out.float().tolist() == expected
    with pytest.raises(CompressError, match=r"b: got torch\.float32 with a of torch\.float8"):
        engine.matmul(a, a.float())


def test_float64_of_pytorch_with_the_default_settings(engine: Any) -> None:
    torch = pytest.importorskip("torch")
    out = engine.matmul(torch.ones(2, 3).double(), torch.full((3, 2), 2.0**-40).double())
    assert out.dtype == torch.float64
    assert (out == 1 + 2.0**-40).all()  # which float32 does not hold
    assert jnp.zeros(1).dtype == np.float32  # JAX's own setting stays


@pytest.mark.thin(3)
@pytest.mark.parametrize("semiring", ["max_plus", "min_plus"])
@pytest.mark.parametrize(
    ("left", "right"),
    [((5, 2, 3), (5, 3, 4)), ((5, 2, 3), (3, 4)), ((2, 3), (5, 3, 4)), ((6, 1, 2, 3), (5, 3, 4)), ((0, 2, 3), (3, 4)),
     ((5, 2, 0), (5, 0, 4))],
)  # fmt: skip
def test_batches(engine: Any, semiring: str, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    a, b = _numbers(*left), _numbers(*right)
    shape = (*np.broadcast_shapes(left[:-2], right[:-2]), left[-2], right[-1])
    sign = 1 if semiring == "max_plus" else -1
    expected = (
        sign * _product(sign * a, sign * b) if a.size and a.shape[-1] else np.full(shape, -sign * np.inf)
    )
    out = engine.matmul(a, b, semiring=semiring)
    assert out.shape == shape
    np.testing.assert_array_equal(out, expected)
    torch = pytest.importorskip("torch")
    found = engine.matmul(torch.from_numpy(a), torch.from_numpy(b), semiring=semiring)
    np.testing.assert_array_equal(found.numpy(), expected)


def test_batches_in_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = _numbers(5, 7, 3), _numbers(5, 3, 4)
    expected = _product(a, b)
    for terms in (1, 30, 100, 200, 1 << 20):  # a row, several rows, two products, all
        monkeypatch.setattr("capibara.compress.system.host_tropical._TERMS", terms)
        np.testing.assert_array_equal(HostTropicalEngine("numpy").matmul(a, b), expected)
        torch = pytest.importorskip("torch")
        out = HostTropicalEngine("torch").matmul(torch.from_numpy(a), torch.from_numpy(b))
        np.testing.assert_array_equal(out.numpy(), expected)


def test_batches_of_closures(engine: Any) -> None:
    weights = RANDOM.integers(-4, 2, (6, 4, 4)).astype(np.float32)
    weights[RANDOM.random(weights.shape) < 0.4] = -np.inf
    out = engine.closure(weights)
    assert isinstance(out, np.ndarray)
    for i in range(6):
        np.testing.assert_array_equal(out[i], engine.closure(weights[i]))
    assert engine.closure(np.zeros((0, 3, 3), np.float32)).shape == (0, 3, 3)


def test_gradients_of_pytorchs_tensors(engine: Any) -> None:
    torch = pytest.importorskip("torch")
    a = torch.tensor([[0.0, 5.0, 1.0], [7.0, -1.0, 2.0]], requires_grad=True)
    b = torch.tensor([[1.0, 0.0], [0.5, 9.0], [0.0, 3.0]])
    for left, right in ((a, b), (b.T, a.T)):  # the other operand asks for none
        a.grad = None
        engine.matmul(left, right).sum().backward()
        assert a.grad is not None
        assert a.grad.tolist() == [[0, 2, 0], [1, 1, 0]]
    with torch.no_grad():
        assert not engine.matmul(a, b).requires_grad
    coefficients = torch.tensor([0.0, 1.0, 0.5], requires_grad=True)
    engine.polyval(coefficients, torch.tensor([-9.0, 9.0])).sum().backward()
    assert coefficients.grad is not None
    assert coefficients.grad.tolist() == [1, 0, 1]
    weights = torch.tensor([[-1.0, -2.0, -9.0], [-9.0, -1.0, -3.0], [-9.0, -9.0, -1.0]], requires_grad=True)
    engine.closure(weights)[0, 2].backward()  # from 0 over 1 to 2
    assert weights.grad is not None
    assert weights.grad.tolist() == [[0, 1, 0], [0, 0, 1], [0, 0, 0]]


def test_views_of_pytorchs_that_are_negative(engine: Any) -> None:
    torch = pytest.importorskip("torch")
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    out = engine.matmul(torch._neg_view(a), b)
    torch.testing.assert_close(out, (b - a[:, :, None]).amax(1))


@pytest.mark.parametrize("x", [2.0, 2, np.float32(2), np.array(2, np.float32)])
def test_single_points(engine: Any, x: Any) -> None:
    out = engine.polyval(np.array([0, 1, -9], np.float32), x)
    assert isinstance(out, np.ndarray)
    assert (out.shape, out.dtype, float(out)) == ((), np.float32, 3)


def test_numbers_in_another_order_of_bytes(engine: Any) -> None:
    a, b = _numbers(2, 3), _numbers(3, 4)
    np.testing.assert_array_equal(engine.matmul(a.astype(">f4"), b.astype(">f4")), _product(a, b))


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e: e.matmul("a", np.ones((3, 2))), "a: got str, expected floating point numbers"),
        (lambda e: e.matmul(np.ones((2, 3)), "b"), "b: got str, expected floating point numbers"),
        (lambda e: e.matmul([[1.0]], np.ones((1, 2))), "a: got list"),
        (lambda e: e.matmul(np.ones((2, 3), int), np.ones((3, 2))), "a: got int64 (2, 3)"),
        (lambda e: e.matmul(np.ones((2, 3), complex), np.ones((3, 2))), "Remedy: a.astype('float32')"),
        (lambda e: e.matmul(np.ones((2, 3)), np.ones(3)), "b: got float64 (3,)"),
        (lambda e: e.matmul(np.ones((2, 3)), np.ones((2, 3))), "b: got shape (2, 3), expected [3, …]"),
        (lambda e: e.matmul(np.ones((5, 2, 3)), np.ones((4, 3, 2))), "do not broadcast"),
        (lambda e: e.matmul(np.ones((2, 3)), np.ones((3, 2)), semiring="max"), "semiring: got 'max'"),
        (lambda e: e.closure("w"), "weights: got str"),
        (lambda e: e.closure(np.ones((2, 3))), "expected a square"),
        (lambda e: e.closure(np.ones((2, 2)), semiring=None), "semiring: got None"),
        (lambda e: e.polyval("c", np.ones(2)), "coefficients: got str"),
        (lambda e: e.polyval(np.ones((2, 2)), np.ones(2)), "with 1 axis."),
        (lambda e: e.polyval(np.ones(2), "x"), "x: got str"),
        (lambda e: e.polyval(np.ones(0), np.ones(2)), "at least one"),
    ],
)
def test_bad_arguments_are_named_by_every_engine(engine: Any, call: Any, words: str) -> None:
    with pytest.raises(CompressError) as caught:
        call(engine)
    assert words in str(caught.value)


def test_arrays_of_two_frameworks(engine: Any) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(CompressError, match="b: got another framework's array than a"):
        engine.matmul(torch.ones(2, 3), np.ones((3, 2), np.float32))
    with pytest.raises(CompressError, match="x: got another framework's array than coefficients"):
        engine.polyval(torch.ones(2), np.ones(3, np.float32))


def test_arrays_of_jax(system: SystemIntegrationCoordinator) -> None:
    bridge, engine = system.get_component("tropical_engine"), system.get_component("jax_tropical_engine")
    a, b = jnp.asarray(_numbers(2, 3)), _numbers(3, 4)
    assert isinstance(bridge.matmul(a, b), jax.Array)
    assert isinstance(engine.matmul(b.T, b), jax.Array)  # the engine's own results are JAX's
    with jax.enable_x64(True):
        wide = jnp.asarray(_numbers(2, 3, dtype="float64"))
    for each in (bridge, engine):
        out = each.matmul(wide, b)
        assert out.dtype == np.float64
        np.testing.assert_array_equal(out, _product(np.asarray(wide), b))
        assert each.closure(-abs(wide[:, :2])).dtype == np.float64
        assert each.polyval(wide[0], a).dtype == np.float64
    torch = pytest.importorskip("torch")
    with pytest.raises(CompressError, match="Remedy: the component jax_tropical_bridge"):
        engine.matmul(torch.ones(2, 3), torch.ones(3, 2))

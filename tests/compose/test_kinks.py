"""Gradients where a function has a kink, by backend: those of the tables in ``docs/compose/backends.md``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import compose as ml

ALIKE = ("jax", "numpy", "torch")
# The block, where it has its kink, what jax.grad gives there for JAX's own function, what NumPy and PyTorch give.
KINKS: dict[str, tuple[Any, Any, Any, float]] = {
    "relu": (ml.Relu, 0.0, jax.nn.relu, 0.0),
    "leaky_relu": (lambda: ml.LeakyRelu(0.1), 0.0, lambda x: jax.nn.leaky_relu(x, 0.1), 0.1),
    "elu": (lambda: ml.Elu(0.5), 0.0, lambda x: jax.nn.elu(x, 0.5), 0.5),
    "absolute": (ml.Absolute, 0.0, jnp.abs, 0.0),
    "sign": (ml.Sign, 0.0, jnp.sign, 0.0),
    "floor": (ml.Floor, 1.0, jnp.floor, 0.0),
}
PAIRS: dict[str, tuple[Any, Any]] = {
    "maximum": (ml.Maximum, jnp.maximum),
    "minimum": (ml.Minimum, jnp.minimum),
}
REDUCED: dict[str, tuple[Any, Any]] = {"max": (ml.Max, jnp.max), "min": (ml.Min, jnp.min)}


def backend(name: str) -> Any:
    if name == "torch":
        pytest.importorskip("torch")
    return {"jax": ml.JaxBackend, "numpy": ml.NumpyBackend, "torch": ml.TorchBackend}[name](dtype="float64")


def gradients(block: Any, name: str, **arrays: Any) -> Any:
    model = ml.Model()
    model |= block(**{k: k for k in arrays}, output="y")
    where = backend(name)
    shapes = {k: list(np.shape(v)) for k, v in arrays.items()}
    compiled = ml.compile(model, where, shapes=shapes, trainable_keys=list(arrays), jit=False)
    params = {k: where.array(np.asarray(v, "float64")) for k, v in arrays.items()}
    ones = np.ones([n for n in compiled.outputs["y"].shape or () if isinstance(n, int)])
    found = compiled.evaluate(params, {}, {"y": ones})[1]
    return [where.to_numpy(found[k]) for k in arrays]


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("case", KINKS)
def test_at_the_kink_of_one_argument(case: str, name: str) -> None:
    make, at, own, other = KINKS[case]
    with jax.enable_x64(True):
        want = float(jax.grad(own)(at)) if name == "jax" else other
    (got,) = gradients(make(), name, input=[at, at])
    np.testing.assert_allclose(got, want)


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("case", PAIRS)
def test_equal_values_share(case: str, name: str) -> None:
    make, own = PAIRS[case]
    want = [float(g) for g in jax.grad(own, (0, 1))(1.5, 1.5)]
    got = gradients(make(), name, left=[1.5], right=[1.5])
    np.testing.assert_allclose(np.ravel(got), want)
    assert want == [0.5, 0.5]


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("case", REDUCED)
def test_equal_largest_elements_share(case: str, name: str) -> None:
    make, own = REDUCED[case]
    row = [2.0, 2.0, 2.0, 2.0]
    (got,) = gradients(make(), name, input=row)
    np.testing.assert_allclose(got, jax.grad(own)(jnp.asarray(row)))


@pytest.mark.parametrize("name", ALIKE)
def test_at_the_bounds_of_clip(name: str) -> None:
    row = [-1.0, 1.0]
    (got,) = gradients(ml.Clip(-1.0, 1.0), name, input=row)
    want = jax.grad(lambda x: jnp.sum(jnp.clip(x, -1.0, 1.0)))(jnp.asarray(row))
    np.testing.assert_allclose(got, want)


@pytest.mark.parametrize("name", ALIKE)
def test_the_penalty_of_weights_that_are_zero(name: str) -> None:
    (got,) = gradients(ml.L1(), name, input=[0.0, -2.0, 3.0])
    np.testing.assert_array_equal(got, [0.0, -1.0, 1.0])


@pytest.mark.parametrize("name", ALIKE)
def test_the_robust_root_is_that_of_the_size(name: str) -> None:
    at = np.array([-4.0, -1e-7, 0.0, 1e-7, 9.0, 1e-6 / 4, -1e-6 / 4])
    model = ml.Model()
    model |= ml.Sqrt(robust=True)(input="x", output="plain")
    model |= ml.Sqrt(robust=True, threshold=1e-6)(input="x", output="wide")
    where = backend(name)
    compiled = ml.compile(model, where, shapes={"x": [7]})
    got = compiled.evaluate({}, {"x": where.array(at)})
    np.testing.assert_allclose(where.to_numpy(got["plain"]), np.sqrt(np.abs(at)), rtol=1e-12)
    want = np.where(np.abs(at) < 1e-6, np.abs(at) / 1e-3, np.sqrt(np.abs(at)))
    np.testing.assert_allclose(where.to_numpy(got["wide"]), want, rtol=1e-12)
    (slope,) = gradients(ml.Sqrt(robust=True, threshold=1e-6), name, input=at)
    far = np.abs(at) >= 1e-6
    want = np.sign(at) * np.where(far, 0.5 / np.sqrt(np.where(far, np.abs(at), 1)), 1e3)
    np.testing.assert_allclose(slope, want, rtol=1e-12)


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
def test_pooling_with_any_batch(name: str, lead: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).normal(size=(*lead, 3, 4, 6))
    windows = x.reshape(*lead, 3, 2, 2, 3, 2)
    model = ml.Model()
    model |= ml.MaxPool2D(2)(input="x", output="largest")
    model |= ml.AvgPool2D(2)(input="x", output="mean")
    where = backend(name)
    compiled = ml.compile(model, where, shapes={"x": list(x.shape)}, trainable_keys=["x"])
    got, back = compiled.evaluate(
        {"x": where.array(x)}, {}, {"largest": np.ones((*lead, 3, 2, 3)), "mean": np.ones((*lead, 3, 2, 3))}
    )
    np.testing.assert_allclose(where.to_numpy(got["largest"]), windows.max((-3, -1)), rtol=1e-12)
    np.testing.assert_allclose(where.to_numpy(got["mean"]), windows.mean((-3, -1)), rtol=1e-12)
    largest = windows == windows.max((-3, -1), keepdims=True)
    np.testing.assert_allclose(where.to_numpy(back["x"]), largest.reshape(x.shape) + 0.25, rtol=1e-12)


def test_a_kernel_machine_with_its_penalty() -> None:
    machine = ml.KernelizedSVM(ml.RBFKernel())
    train = ml.TrainModel(machine)
    train.add_loss(ml.HingeLoss(), input="output", target="target")
    train.add_regularization(
        ml.QuadraticFormRegularizer(), 0.5, input="weight", kernel="kernel", key_name="penalty"
    )
    where = backend("jax")
    compiled = ml.compile(train, where, shapes={"input1": [4, 2], "input2": [4, 2]})
    params = compiled.randomize_params(0)
    points = where.array(np.random.default_rng(0).normal(size=(4, 2)))
    given = {"input1": points, "input2": points, "target": where.ones(4, 1)}
    got = compiled.evaluate(params, given)
    weight = np.asarray(params["model"]["weight"])
    assert got["penalty"].shape == ()
    np.testing.assert_allclose(
        got["penalty"], (weight.T @ np.asarray(got["kernel"]) @ weight)[0, 0] / 2, rtol=1e-9
    )


def test_the_loss_of_a_gaussian_process_is_a_scalar() -> None:
    compiled = ml.compile(ml.GaussProcessRegressionCore(), backend("jax"))
    assert compiled.outputs["loss"].shape == ()
    assert ml.compile(ml.GPRLoss(), backend("jax")).outputs["output"].shape == ()

"""Networks with merged neurons: exact where they must be, near where they may be, never past the bound."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.errors import CompressError
from capibara.compress.tropical import (
    Apply,
    Convolution,
    Dense,
    Flatten,
    Pool,
    RationalMap,
    Relu,
    Zonotope,
    fitting,
    merge_neurons,
)
from capibara.compress.tropical.network import run

RANDOM = np.random.default_rng(0)


def forward(pairs: list, x: np.ndarray) -> np.ndarray:
    """The oracle: a network of pairs, written out."""
    for number, (weight, bias) in enumerate(pairs):
        x = x @ weight.T + (0 if bias is None else bias)
        if number < len(pairs) - 1:
            x = np.where(x > 0, x, 0)
    return x


def network(*sizes: int, seed: int = 0, dtype: str = "float64") -> list[tuple[np.ndarray, np.ndarray]]:
    random = np.random.default_rng(seed)
    return [
        ((random.normal(size=(m, n)) / np.sqrt(n)).astype(dtype), (random.normal(size=m) * 0.3).astype(dtype))
        for n, m in pairwise(sizes)
    ]


def copies(weight: np.ndarray, bias: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Neurons, each several times at other scales, shuffled."""
    factors = RANDOM.uniform(0.1, 5, size=len(weight) * count)
    order = RANDOM.permutation(len(weight) * count)
    rows = np.repeat(weight, count, 0) * factors[:, None]
    return rows[order].astype(weight.dtype), (np.repeat(bias, count) * factors)[order].astype(weight.dtype)


@pytest.mark.parametrize("method", ["paths", "directions"])
@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_collinear_copies_merge_exactly(method: str, data: bool, dtype: str) -> None:
    (weight, bias), *_ = network(20, 12, dtype=dtype)
    wide = copies(weight, bias, 8)
    pairs = [wide, (RANDOM.normal(size=(5, 96)).astype(dtype), RANDOM.normal(size=5).astype(dtype))]
    x = RANDOM.normal(size=(300, 20)).astype(dtype)
    found = merge_neurons(pairs, 1 / 8, method=method, inputs=x if data else None)
    (first, _), (second, _) = found.network
    assert first.shape == (12, 20)
    assert second.shape == (5, 12)
    assert first.dtype == second.dtype == dtype
    want, have = forward(pairs, x), forward(found.network, x)
    assert np.linalg.norm(have - want) / np.linalg.norm(want) < (1e-6 if dtype == "float32" else 1e-12)
    # keep=1 removes what costs nothing, and only that.
    assert merge_neurons(pairs, 1.0, method=method).layers[0].kept == 12


def test_neurons_that_reach_nothing_are_dropped() -> None:
    (weight, bias), (readout, shift) = network(6, 10, 3)
    weight[2], bias[2] = 0, 0
    readout[:, 5] = 0
    found = merge_neurons([(weight, bias), (readout, shift)], 1.0)
    assert found.layers[0].kept == 8
    x = RANDOM.normal(size=(50, 6))
    np.testing.assert_allclose(
        forward(found.network, x), forward([(weight, bias), (readout, shift)], x), rtol=1e-12, atol=1e-12
    )
    nothing = merge_neurons([(weight, bias), (readout * 0, shift)], 0.5)
    np.testing.assert_allclose(forward(nothing.network, x), np.tile(shift, (50, 1)))


def test_a_copy_turned_round_is_another_neuron() -> None:
    weight = np.array([[1.0, 2.0], [-1.0, -2.0]])
    pairs = [(weight, np.zeros(2)), (np.array([[1.0, 1.0]]), None)]
    assert merge_neurons(pairs, 1.0).layers[0].kept == 2


@given(
    seed=st.integers(0, 10**6),
    neurons=st.integers(2, 40),
    keep=st.floats(0.05, 0.9),
    method=st.sampled_from(["paths", "directions"]),
    fit=st.booleans(),
    biased=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_the_hausdorff_bound_holds(
    seed: int, neurons: int, keep: float, method: str, fit: bool, biased: bool
) -> None:
    pairs: list = network(5, neurons, 3, seed=seed)
    if not biased:
        pairs = [(weight, None) for weight, _ in pairs]
    found = merge_neurons(pairs, keep, method=method, fit=fit, seed=seed)
    layer = found.layers[0]
    assert layer.kept <= max(1, neurons * keep)
    random = np.random.default_rng(seed)
    x = random.normal(size=(400, 5)) * np.exp(random.normal(size=(400, 1)) * 2)
    # The worst directions are near the neurons' own.
    x = np.concatenate([x, pairs[0][0], -pairs[0][0], found.network[0][0], -found.network[0][0]])
    gaps = np.abs(forward(found.network, x) - forward(pairs, x))
    lengths = np.hypot(np.linalg.norm(x, axis=1), 1)[:, None]
    assert (gaps <= layer.hausdorff_bounds * lengths * (1 + 1e-9) + 1e-12).all()
    reach = np.linalg.norm(x, axis=1).max()
    assert np.linalg.norm(gaps, axis=1).max() <= found.error_bound(float(reach)) * (1 + 1e-9) + 1e-12


def test_the_bound_of_two_nearly_parallel_edges_is_not_loose() -> None:
    angle = 0.01
    weight = np.array([[np.cos(angle), np.sin(angle)], [np.cos(angle), -np.sin(angle)]])
    found = merge_neurons([(weight, None), (np.ones((1, 2)), None)], [1], fit=False)
    # Along (0, 1) one segment reaches sin, the merged one nothing: the true distance is sin.
    assert np.sin(angle) * (1 - 1e-9) <= found.layers[0].hausdorff_bounds[0] <= np.sin(angle) * (1 + 1e-6)


def test_deep_networks_stay_within_the_bound() -> None:
    pairs = network(6, 30, 25, 20, 4)
    x = RANDOM.normal(size=(200, 6))
    radius = float(np.linalg.norm(x, axis=1).max())
    for inputs in (None, x):
        found = merge_neurons(pairs, [15, 12, 10], inputs=inputs)
        assert [len(weight) for weight, _ in found.network] == [15, 12, 10, 4]
        assert [layer.index for layer in found.layers] == [0, 1, 2]
        gaps = np.linalg.norm(forward(found.network, x) - forward(pairs, x), axis=1)
        assert gaps.max() <= found.error_bound(radius)
        assert "15 neurons" in str(found)
        if inputs is not None:
            want = forward(pairs, x)
            measured = np.linalg.norm(gaps) / np.linalg.norm(want - want.mean(0))
            assert found.layers[-1].data_error == pytest.approx(measured, rel=1e-9)


def test_the_error_over_all_directions_is_the_measured_one() -> None:
    (weight, _), (readout, _) = network(6, 40, 3)
    pairs = [(weight, None), (readout, None)]
    z = RANDOM.normal(size=(200_000, 6))
    want = forward(pairs, z)
    errors = []
    every: list[dict[str, Any]] = [{"fit": False}, {}, {"refine": 60}]
    for options in every:
        found = merge_neurons(pairs, 0.2, **options)
        measured = np.linalg.norm(forward(found.network, z) - want) / np.linalg.norm(want)
        assert found.layers[0].sphere_error == pytest.approx(measured, rel=0.02)
        errors.append(measured)
    assert errors[2] < 0.9 * errors[1] < 0.9 * errors[0]


def test_the_gradient_of_the_kernel() -> None:
    a, b, weights = RANDOM.normal(size=(3, 4)), RANDOM.normal(size=(5, 4)), RANDOM.normal(size=(3, 5))
    step = 1e-6
    want = np.zeros_like(a)
    for place in np.ndindex(a.shape):
        moved = np.zeros_like(a)
        moved[place] = step
        up, down = fitting.kernel(a + moved, b), fitting.kernel(a - moved, b)
        want[place] = np.sum(weights * (up - down)) / (2 * step)
    np.testing.assert_allclose(fitting._kernel_gradient(a, b, weights), want, rtol=1e-6, atol=1e-8)


def test_data_are_fitted_by_least_squares() -> None:
    pairs = network(8, 60, 3)
    x = RANDOM.normal(size=(700, 8)) @ RANDOM.normal(size=(8, 8)) * 0.4
    plain = merge_neurons(pairs, 0.2)
    fitted = merge_neurons(pairs, 0.2, inputs=x)
    (weight, bias), _ = fitted.network
    hidden = np.concatenate([np.maximum(x @ weight.T + bias, 0), np.ones((700, 1))], axis=1)
    best = np.linalg.lstsq(hidden, forward(pairs, x), rcond=None)[0]
    miss = np.linalg.norm(hidden @ best - forward(pairs, x))
    assert np.linalg.norm(forward(fitted.network, x) - forward(pairs, x)) <= miss * 1.001
    moved = merge_neurons(pairs, 0.2, inputs=x, refine=60)
    errors = [np.linalg.norm(forward(m.network, x) - forward(pairs, x)) for m in (moved, fitted, plain)]
    assert errors[0] < 0.8 * errors[1] < 0.8 * errors[2]


def test_polynomials_are_their_monomials() -> None:
    (weight, bias), (readout, shift) = network(3, 9, 2)
    rational = RationalMap(weight, bias, readout, shift)
    x = RANDOM.normal(size=(50, 3))
    np.testing.assert_allclose(rational(x), forward([(weight, bias), (readout, shift)], x), atol=1e-12)
    ones = np.concatenate([x, np.ones((50, 1))], axis=1)
    for output in range(2):
        top, bottom = rational.numerator(output), rational.denominator(output)
        assert len(top.generators) + len(bottom.generators) == 9
        value = (ones @ top.monomials().T).max(1) - (ones @ bottom.monomials().T).max(1)
        np.testing.assert_allclose(value, rational(x)[:, output], atol=1e-12)
    square = Zonotope(np.eye(2), np.zeros(2))
    shifted = Zonotope(np.eye(2), np.array([0.3, 0.4]))
    angles = np.linspace(0, 2 * np.pi, 1000)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert square.distance_at(shifted, circle) == pytest.approx(0.5, rel=1e-4)
    with pytest.raises(CompressError, match="2\\^20 monomials"):
        Zonotope(np.ones((20, 2)), np.zeros(2)).monomials()


def image_steps(dtype: str = "float64") -> list:
    random = np.random.default_rng(1)

    def weights(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(dtype)

    def bias(size: int) -> np.ndarray:
        return (random.normal(size=size) * 0.2).astype(dtype)

    return [
        Convolution(weights(16, 3, 3, 3), bias(16), padding=((1, 1), (1, 1))),
        Relu(),
        Pool("max", (2, 2)),
        Convolution(weights(12, 16, 3, 3), bias(12), stride=(2, 2)),
        Relu(),
        Flatten(),
        Dense(weights(10, 12 * 9), bias(10)),
        Relu(),
        Dense(weights(4, 10), None),
    ]


def test_copies_of_channels_merge_exactly_through_pooling() -> None:
    steps = image_steps()
    first, second, dense = steps[0], steps[3], steps[6]
    rows, bias = copies(first.weight.reshape(16, -1), first.bias, 3)
    steps[0] = Convolution(rows.reshape(48, 3, 3, 3), bias, padding=((1, 1), (1, 1)))
    second = Convolution(RANDOM.normal(size=(12, 48, 3, 3)), second.bias, stride=(2, 2))
    rows, bias = copies(second.weight.reshape(12, -1), second.bias, 2)
    steps[3] = Convolution(rows.reshape(24, 48, 3, 3), bias, stride=(2, 2))
    steps[6] = Dense(RANDOM.normal(size=(10, 24 * 9)), dense.bias)
    x = RANDOM.normal(size=(20, 3, 16, 16))
    for inputs in (None, x):
        found = merge_neurons(steps, [16, 12, 10], inputs=inputs)
        shapes = [step.weight.shape for step in found.network if isinstance(step, Dense | Convolution)]
        assert shapes == [(16, 3, 3, 3), (12, 16, 3, 3), (10, 12 * 9), (4, 10)]
        want = run(steps, x)
        assert np.linalg.norm(run(found.network, x) - want) / np.linalg.norm(want) < 1e-9


def test_convolutions_fitted_to_data_beat_those_that_are_not() -> None:
    steps, x = image_steps("float32"), RANDOM.normal(size=(120, 3, 16, 16)).astype("float32")
    want = run(steps, x)
    errors = []
    every: list[dict[str, Any]] = [{"fit": False}, {}, {"inputs": x}]
    for options in every:
        found = merge_neurons(steps, 0.5, **options)
        assert [layer.kept for layer in found.layers] == [8, 6, 5]
        errors.append(np.linalg.norm(run(found.network, x) - want))
        with pytest.raises(CompressError, match="only for networks of dense layers"):
            found.error_bound(1.0)
    assert errors[2] < 0.7 * min(errors[:2])


def test_the_bound_of_a_convolution_holds() -> None:
    steps = image_steps()[:4]
    x = RANDOM.normal(size=(8, 3, 16, 16))
    found = merge_neurons(steps, 0.5)
    layer = found.layers[0]
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    longest = np.sqrt(np.square(windows).sum((1, 4, 5)).max() + 1)
    gaps = np.abs(run(found.network, x) - run(steps, x)).max((0, 2, 3))
    assert (gaps <= layer.hausdorff_bounds * longest).all()


def test_layers_that_cannot_be_merged_stay() -> None:
    pairs = network(4, 12, 10, 3)
    steps = [
        Dense(*pairs[0]),
        Apply(np.tanh),
        Dense(*pairs[1]),
        Relu(),
        Apply(lambda x: x * 2.0, homogeneous=True),
        Dense(*pairs[2]),
    ]
    found = merge_neurons(steps, 0.5)
    assert [layer.index for layer in found.layers] == [2]
    assert found.network[0] is steps[0]
    assert found.network[2].weight.shape == (5, 12)


PAIRS = network(4, 8, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((PAIRS, 0.0), {}), "keep: got 0.0"),
        (((PAIRS, 1.5), {}), "keep: got 1.5"),
        (((PAIRS, 3), {}), "keep: got 3"),
        (((PAIRS, [2, 2]), {}), "keep: 2 numbers, but 1 hidden"),
        (((PAIRS, [9]), {}), "keep: 9 neurons of the 8"),
        (((PAIRS, 0.5), {"method": "path"}), "Did you mean 'paths'"),
        (((PAIRS, 0.5), {"refine": -1}), "refine: got -1"),
        (((PAIRS, 0.5), {"refine": 5, "fit": False}), "refine: got 5 with fit=False"),
        (((PAIRS, 0.5), {"seed": 0.5}), "seed: got 0.5"),
        (((PAIRS, 0.5), {"inputs": np.ones((3, 4)), "fit": False}), "inputs: given with fit=False"),
        (((PAIRS, 0.5), {"inputs": np.ones((3, 5))}), r"given \(3, 5\), expected \[q, 4\]"),
        (((PAIRS, 0.5), {"inputs": np.full((3, 4), np.nan)}), "inputs: NaN"),
        (((PAIRS, 0.5), {"inputs": np.ones((0, 4))}), "at least one"),
        (((PAIRS[:1], 0.5), {}), "no hidden layer"),
        ((([], 0.5), {}), "network: got list"),
        (((np.ones((3, 3)), 0.5), {}), "network: got ndarray"),
        ((([PAIRS[0], PAIRS[0]], 0.5), {}), "entry 1 reads 4 numbers, but the one before makes 8"),
        ((([(np.ones((2, 2, 3, 3)), None), PAIRS[0]], 0.5), {}), r"Convolution\(weight"),
        ((([(np.ones((2, 2), int), None), PAIRS[0]], 0.5), {}), "array of floats|floats"),
        ((([(np.full((4, 2), np.inf), None), PAIRS[0]], 0.5), {}), "NaN or infinite"),
        ((([(np.ones((4, 2)), np.ones(3)), PAIRS[0]], 0.5), {}), r"bias has shape \(3,\)"),
    ],
)
def test_bad_arguments(arguments: tuple, message: str) -> None:
    positional, named = arguments
    with pytest.raises(CompressError, match=message):
        merge_neurons(*positional, **named)


def test_neither_jax_nor_torch_is_imported() -> None:
    code = (
        "import sys, numpy as np\n"
        "sys.modules['jax'] = sys.modules['torch'] = None\n"
        "from capibara.compress.tropical import merge_neurons\n"
        "r = np.random.default_rng(0)\n"
        "pairs = [(r.normal(size=(8, 4)), r.normal(size=8)), (r.normal(size=(2, 8)), None)]\n"
        "print(len(merge_neurons(pairs, 0.5).network[0][0]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "4"

"""What the inputs of layers tell, used for JAX and composed models as it is for torch modules."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import capibara.compose as ml
from capibara.compress import samples
from capibara.compress.allocation import Allocation, allocate
from capibara.compress.calibration import layers
from capibara.compress.calibration.activations import Metric, as_matrix
from capibara.compress.calibration.layers import layer_moments
from capibara.compress.codecs.uniform import UNIFORM
from capibara.compress.compressing import Compression
from capibara.compress.container import Archive
from capibara.compress.curves import Point, squared_error
from capibara.compress.errors import CompressError
from capibara.compress.formats import get_format
from capibara.compress.model_api import ModelCompressionAPI
from capibara.compress.models.adapters import adapt
from capibara.compress.profile import CompressionProfile
from capibara.compress.samples import settings_of_sample, take_sample

torch = pytest.importorskip("torch")
SIZES = (96, 128, 64)


def api(**fields: Any) -> ModelCompressionAPI:
    return ModelCompressionAPI(CompressionProfile(**fields))


def weights() -> list[tuple[np.ndarray, np.ndarray]]:
    """[out, in] and biases."""
    rng = np.random.default_rng(3)
    return [
        (
            (rng.standard_t(5, size=(m, n)) / n**0.5).astype(np.float32),
            rng.normal(size=m).astype(np.float32) / 9,
        )
        for n, m in itertools.pairwise(SIZES)
    ]


def data() -> np.ndarray:
    """Inputs that lie mostly in a few directions."""
    rng = np.random.default_rng(4)
    mixing = rng.normal(size=(SIZES[0], SIZES[0])) * 0.9 ** np.arange(SIZES[0])
    return (rng.normal(size=(512, SIZES[0])) @ mixing.T).astype(np.float32)


def as_torch() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(*SIZES[:2]), torch.nn.ReLU(), torch.nn.Linear(*SIZES[1:]))
    with torch.no_grad():
        for layer, (w, b) in zip((model[0], model[2]), weights(), strict=True):
            layer.weight.copy_(torch.from_numpy(w))
            layer.bias.copy_(torch.from_numpy(b))
    return model


def as_jax() -> dict[str, Any]:
    """The same with matrices as [in, out]."""
    return {str(i): {"w": jnp.asarray(w.T), "b": jnp.asarray(b)} for i, (w, b) in enumerate(weights())}


def apply(params: Any, x: Any) -> Any:
    hidden = jax.nn.relu(x @ params["0"]["w"] + params["0"]["b"])
    return hidden @ params["1"]["w"] + params["1"]["b"]


def composed() -> tuple[Any, Any]:
    model = ml.Model()
    model |= ml.Linear(SIZES[1])(input="x", output="h")
    model += ml.Relu()
    model += ml.Linear(SIZES[2])(output="y")
    compiled = ml.compile(model, ml.JaxBackend(), shapes={"x": [None, SIZES[0]]})
    params = compiled.randomize_params(seed=0)
    tree = jax.tree_util.tree_structure(params)
    leaves = iter(jax.tree_util.tree_leaves(params))
    by_shape: dict[tuple[int, ...], np.ndarray] = {}
    for w, b in weights():
        by_shape |= {w.shape: w, w.T.shape: w.T, b.shape: b}
    new = [jnp.asarray(by_shape[leaf.shape]) for leaf in leaves]
    return compiled, jax.tree_util.tree_unflatten(tree, new)


def test_moments_are_those_of_torch() -> None:
    x = data()
    expected = layer_moments(adapt(as_torch()), [torch.from_numpy(x)])
    found = layer_moments(adapt(as_jax(), apply), [jnp.asarray(x)])
    assert [m["input_axes"] for m in found.values()] == [[0], [0]]
    assert [m["input_axes"] for m in expected.values()] == [[1], [1]]
    for a, b in zip(found.values(), expected.values(), strict=True):
        np.testing.assert_allclose(a["hessian"], b["hessian"], rtol=1e-4, atol=1e-4)
    of_composed = layer_moments(adapt(composed()), [{"x": jnp.asarray(x)}])
    assert len(of_composed) == 2
    for a, b in zip(of_composed.values(), expected.values(), strict=True):
        np.testing.assert_allclose(a["hessian"], b["hessian"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", ["int4", "nf4", pytest.param("low_rank", marks=pytest.mark.slow)])
def test_errors_are_those_of_the_same_network_in_torch(strategy: str) -> None:
    x, profile = data(), {"strategy": strategy, "target_compression_ratio": 6.0, "smallest": 1000}
    made = {
        "torch": api(**profile).compress(as_torch(), torch.from_numpy(x)),
        "jax": api(**profile).compress(as_jax(), jnp.asarray(x), apply=apply),
        "composed": api(**profile).compress(composed(), {"x": jnp.asarray(x)}),
    }
    blind = api(**profile).compress(as_torch())
    outputs = as_torch()(torch.from_numpy(x)).detach().numpy()
    gone = blind.model(torch.from_numpy(x)).detach().numpy() - outputs
    errors = {kind: m.stats.output_error or 0.0 for kind, m in made.items()}
    assert errors["jax"] == pytest.approx(errors["torch"], rel=0.03)
    assert errors["composed"] == pytest.approx(errors["torch"], rel=0.03)
    assert errors["jax"] < 0.85 * np.linalg.norm(gone) / np.linalg.norm(outputs)
    with Archive(made["jax"].path) as archive:
        assert {archive[f"{i}.w"].codec for i in "01"} == {strategy}


def test_a_tied_matrix_that_is_used_along_both_axes_has_none() -> None:
    w = jnp.asarray(weights()[0][0])
    params = {"a": w, "b": w, "c": jnp.ones((128, 5))}

    def both(p: Any, x: Any) -> Any:
        return (x @ p["a"].T) @ p["b"] @ jnp.ones((96, 128)) @ p["c"]

    with pytest.warns(RuntimeWarning, match="a: it is multiplied along different axes"):
        found = layer_moments(adapt(params, both), [jnp.asarray(data())])
    assert list(found) == ["c"]


def test_moments_of_very_many_inputs_are_not_used() -> None:
    with mock.patch.object(layers, "_MOST", 100):
        found = layer_moments(adapt(as_torch()), [torch.from_numpy(data())])
    assert list(found) == ["0.weight"]


def test_functions_that_jax_cannot_trace_are_named() -> None:
    def untraceable(p: Any, x: Any) -> Any:
        return np.maximum(np.asarray(x) @ np.asarray(p["0"]["w"]), 0)

    with pytest.warns(UserWarning, match="cannot trace the model"):
        assert layer_moments(adapt(as_jax(), untraceable), [jnp.asarray(data())]) == {}
    in_numpy = {"w": np.ones((8, 8), np.float32)}
    assert layer_moments(adapt(in_numpy, untraceable), [data()]) == {}


def test_errors_along_either_axis_are_those_of_the_outputs() -> None:
    (w, _), x = weights()[0], data()
    changed = w + np.random.default_rng(0).normal(size=w.shape).astype(np.float32) / 50
    second = x.T.astype(np.float64) @ x / len(x)
    expected = np.sum((x @ (changed - w).T) ** 2, dtype=np.float64) / len(x) / np.mean(np.diag(second))
    form = get_format("F32")
    for a, b, axes in ((w, changed, (1,)), (w.T, changed.T, (0,))):
        first, other = (np.ascontiguousarray(v).reshape(-1).view(np.uint32) for v in (a, b))
        found = squared_error(first, other, form, Metric(second, axes), a.shape)
        assert found == pytest.approx(expected, rel=1e-4)


def test_a_choice_that_misjudged_the_outputs_gives_way_to_a_single_codec(monkeypatch):
    """Errors that are estimated tensor by tensor do not add up exactly: the outputs decide."""
    net, x = as_torch(), torch.from_numpy(data())
    best = api(strategy="uniform", target_compression_ratio=6.0).compress(net, x).stats.output_error

    def misjudged(self: Compression, ratio: float) -> Allocation:
        found = allocate(self.surveyed(), ratio, weights={n: 1 / w for n, w in self.weights.items()})
        mixed = dict(found.points)
        name, point = next(iter(mixed.items()))
        mixed[name] = Point("nf4", {"group": 64}, point.size, point.error)
        return Allocation(mixed, found.size, math.inf)

    monkeypatch.setattr(Compression, "allocate", misjudged)
    made = api(target_compression_ratio=6.0).compress(net, x)
    assert len({t.codec for t in made.stats.tensors} - {"lossless"}) == 1
    assert best is not None
    assert made.stats.output_error is not None
    assert made.stats.output_error < 1.02 * best
    assert made.stats.compression_ratio == pytest.approx(6, rel=0.02)


@pytest.mark.parametrize("ratio", [4.2, *(pytest.param(r, marks=pytest.mark.slow) for r in (3.3, 6.0, 9.0))])
def test_no_single_codec_has_nearer_outputs_in_as_many_bytes(ratio: float) -> None:
    net, x = as_torch(), torch.from_numpy(data())
    profile = {"target_compression_ratio": ratio, "smallest": 1000}
    error = api(**profile).compress(net, x).stats.output_error
    assert error is not None
    compared = []
    for codec in ("uniform", "int8", "int4", "nf4", "low_rank", "sparse"):
        try:
            single = api(strategy=codec, **profile).compress(net, x).stats
        except CompressError:
            continue  # it cannot be so small
        assert single.output_error is not None
        if single.compression_ratio > 0.996 * ratio:
            compared.append(codec)
            # The name of the strategy is in the file: a few bytes decide between steps that are next to each other.
            assert error <= 1.02 * single.output_error
    assert "uniform" in compared
    assert len(compared) > 1


def test_codecs_of_fixed_width_are_surveyed_where_another_does_better_tensor_by_tensor() -> None:
    x = torch.from_numpy(data())
    profile = CompressionProfile(target_compression_ratio=4.0, smallest=1000)
    work = Compression(profile, adapt(as_torch()), x)
    assert {p.codec for c in work.surveyed().curves.values() for p in c.points} == {"lossless"}
    for codec in ("int8", "int4", "nf4"):
        for curve in work._surveyed_alone(codec).curves.values():
            assert {p.codec for p in curve.points} == {"lossless", codec}
            assert not len(curve.sizes)
    assert work._surveyed_alone("int8") is work._surveyed_alone("int8")
    alone = work._surveyed_alone("uniform").curves.values()
    assert all(len(c.sizes) and [p.codec for p in c.points] == ["lossless"] for c in alone)


@pytest.mark.parametrize("layout", ["torch", "jax"])
def test_inputs_that_were_not_seen_come_out_nearer_too(layout: str) -> None:
    seen, others = np.split(data(), 2)
    profile = {"strategy": "uniform", "target_compression_ratio": 6.0, "smallest": 1000}
    if layout == "torch":
        run: Any = lambda model: model(torch.from_numpy(others)).detach().numpy()  # noqa: E731
        original, given = as_torch(), torch.from_numpy(seen)
        blind, made = api(**profile).compress(original), api(**profile).compress(original, given)
    else:
        run = lambda params: np.asarray(apply(params, jnp.asarray(others)))  # noqa: E731
        original, given = as_jax(), jnp.asarray(seen)
        blind = api(**profile).compress(original, apply=apply)
        made = api(**profile).compress(original, given, apply=apply)
    expected = run(original)
    errors = [np.linalg.norm(run(m.model) - expected) for m in (blind, made)]
    assert errors[1] < 0.65 * errors[0]


def images(count: int, seed: int) -> Any:
    """Smooth ones."""
    x = torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.avg_pool2d(x, 5, stride=1, padding=2) * 4


def convolutions() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(32, 64, 3, stride=2, padding=1),
        torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64 * 36, 10),
    )  # fmt: skip


@pytest.mark.slow
def test_convolutions_know_their_inputs_too() -> None:
    net, seen, others = convolutions(), images(48, 1), images(48, 2)
    found = layer_moments(adapt(net), [seen])
    assert [m["input_axes"] for m in found.values()] == [[1, 2, 3], [1, 2, 3], [1]]
    profile = {"strategy": "uniform", "target_compression_ratio": 6.0, "smallest": 500}
    blind, made = api(**profile).compress(net), api(**profile).compress(net, seen)
    with torch.no_grad():
        errors = [float((m.model(others) - net(others)).norm()) for m in (blind, made)]
    assert errors[1] < 0.5 * errors[0]
    assert made.stats.compression_ratio == pytest.approx(6, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["int4", pytest.param("int8", marks=pytest.mark.slow), pytest.param("nf4", marks=pytest.mark.slow)],
)
def test_codes_of_fixed_width_feed_back_in_matrices_and_not_in_convolutions(strategy: str) -> None:
    net, seen = convolutions(), images(48, 1)
    for profile in ({}, {"target_compression_ratio": 3.2}):
        made = api(strategy=strategy, smallest=500, **profile).compress(net, seen)
        blind = api(strategy=strategy, smallest=500, **profile).compress(net)
        codecs = {t.name: t.codec for t in made.stats.tensors}
        assert strategy in codecs.values()
        assert made.stats.output_error is not None
        with torch.no_grad():
            apart = float((blind.model(seen) - net(seen)).norm() / net(seen).norm())
        assert made.stats.output_error < 1.05 * apart


def test_weights_of_three_axes_in_jax() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "in": jax.random.normal(keys[0], (64, 4, 24)) / 8,
        "out": jax.random.normal(keys[1], (4, 24, 64)) / 10,
    }

    def attend(p: Any, x: Any) -> Any:
        hidden = jnp.tanh(jnp.einsum("bd,dhk->bhk", x, p["in"]))
        return jnp.einsum("bhk,hkd->bd", hidden, p["out"])

    mixing = jax.random.normal(keys[2], (64, 64)) * 0.9 ** jnp.arange(64)
    seen, others = (jax.random.normal(k, (512, 64)) @ mixing.T for k in keys[3:])
    found = layer_moments(adapt(params, attend), [seen])
    assert {n: m["input_axes"] for n, m in found.items()} == {"in": [0], "out": [0, 1]}
    profile = {"strategy": "uniform", "target_compression_ratio": 5.5, "smallest": 1000}
    models = [
        api(**profile).compress(params, apply=attend),
        api(**profile).compress(params, seen, apply=attend),
    ]
    expected = attend(params, others)
    blind, made = (float(jnp.linalg.norm(attend(m.model, others) - expected)) for m in models)
    assert made < 0.65 * blind


@given(
    shape=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    first=st.integers(0, 3),
    count=st.integers(1, 3),
)
def test_samples_have_all_inputs_of_some_outputs(shape: list[int], first: int, count: int) -> None:
    axes = tuple(range(first, min(first + count, len(shape))))
    assume(0 < len(axes) < len(shape))
    sizes = tuple(shape)
    features = math.prod(sizes[a] for a in axes)
    metric = Metric(np.diag(np.arange(1.0, features + 1)), axes)
    numbers = np.arange(math.prod(sizes), dtype=np.uint32)
    with mock.patch.object(samples, "_SAMPLE", 20):
        some, found = take_sample(numbers, sizes, metric)
    rows, whole = (as_matrix(x.reshape(s), axes) for x, s in ((some, found), (numbers, sizes)))
    assert rows.shape[1] == features
    assert {tuple(r) for r in rows} <= {tuple(r) for r in whole}


def test_chunks_of_a_sample_are_those_of_the_whole() -> None:
    hessian = np.ones((60, 60))
    known = {"hessian": hessian, "input_axes": [0]}
    with mock.patch.object(type(UNIFORM), "chunk", 10 * 400):
        cut = settings_of_sample(known, (60, 400), (60, 30))["hessian"]
        assert settings_of_sample({**known, "input_axes": [1]}, (400, 60), (30, 60))["hessian"] is hessian
    expected = np.kron(np.eye(6), np.ones((10, 10)))
    np.testing.assert_array_equal(cut, expected)
    assert settings_of_sample(known, (60, 400), (60, 30))["hessian"] is hessian
    assert settings_of_sample(None, (60, 400), (60, 30)) == {}


@pytest.mark.parametrize("strategy", ["uniform", "auto", "int4"])
def test_layers_whose_inputs_never_occur(strategy: str) -> None:
    net = as_torch()
    with torch.no_grad():
        net[0].bias.fill_(-1e6)  # nothing gets through
        made = api(strategy=strategy, target_compression_ratio=5.0, smallest=1000).compress(
            net, torch.from_numpy(data())
        )
    assert made.stats.output_error == 0
    assert made.stats.compression_ratio > 4.9
    assert made.stats.weight_error < 0.5

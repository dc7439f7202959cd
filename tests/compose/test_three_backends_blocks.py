"""Every composite block on all three backends: outputs, states after, and gradients of inputs and parameters.

That the values are right is tested on JAX against references (``test_library_blocks.py`` and its neighbours); here
NumPy and PyTorch have to give the same, and central differences say that the gradient is one.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from primitive_table import weight_of
from torch_oracle import HAS_TORCH

from capibara import compose as ml
from capibara.compose import library
from capibara.compose import models as m

BACKENDS: dict[str, Callable[[], Any]] = {
    "jax": lambda: ml.JaxBackend("float64"),
    "numpy": lambda: ml.NumpyBackend("float64"),
}
if HAS_TORCH:
    BACKENDS["torch"] = lambda: ml.TorchBackend("float64")


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, shape)


def spread(rows: int, size: int = 2) -> np.ndarray:
    """Distances between points."""
    points = draw(rows, size, seed=9)
    return np.linalg.norm(points[:, None] - points[None], axis=-1)


def positive(size: int) -> np.ndarray:
    points = draw(size, 2, seed=5)
    return np.exp(-0.5 * ((points[:, None] - points[None]) ** 2).sum(-1))


TWO = np.float64(2.0)
SCORES, HOT = np.abs(draw(6, 3)), np.eye(3)[[0, 2, 1, 1, 0, 2]].astype("int32")
ROPE = {"cos": np.cos(draw(5, 1)), "sin": np.sin(draw(5, 1))}
CELL = {"prev_hidden": draw(3, 5)}

# Name: how the block is made, its inputs by port. Some blocks stand in several forms.
CASES: dict[str, tuple[Callable[[], ml.Block], dict[str, Any]]] = {
    "Linear": (lambda: m.Linear(3), {"input": draw(2, 4)}),
    "Layer": (lambda: m.Layer(m.Tanh, 3), {"input": draw(2, 4)}),
    "MLP": (lambda: m.MLP(4, [5], 3), {"input": draw(2, 4)}),
    "MLP composed": (
        lambda: m.MLP(activations=[m.Gelu(), m.Tanh()], dimensions=[5, 3]),
        {"input": draw(2, 4)},
    ),
    "GatedMLP": (
        lambda: m.GatedMLP(6, 4, activation=lambda: ml.Gelu(approximate=False), use_bias=True),
        {"input": draw(3, 4)},
    ),
    "FeedForward": (lambda: m.FeedForward(6, 4), {"input": draw(3, 4)}),
    "FeedForward without biases": (
        lambda: m.FeedForward(6, activation=ml.Relu, use_bias=False),
        {"input": draw(3, 4)},
    ),
    "RMSNorm with an offset": (lambda: m.RMSNorm(offset=1.0), {"input": draw(3, 4)}),
    "SwiGLU": (lambda: m.SwiGLU(6, 4), {"input": draw(3, 4)}),
    "ElementWiseAffine": (lambda: m.ElementWiseAffine(), {"input": draw(3, 4)}),
    "Embedding": (lambda: m.Embedding(7, 3), {"input": np.array([[0, 6, 3], [3, 3, 1]], "int32")}),
    "LayerNorm": (lambda: m.LayerNorm(), {"input": draw(3, 4)}),
    "RMSNorm": (lambda: m.RMSNorm(), {"input": draw(3, 4)}),
    "GroupNorm": (lambda: m.GroupNorm(2), {"input": draw(2, 4, 3, 3)}),
    "InstanceNorm": (lambda: m.InstanceNorm(3), {"input": draw(2, 3, 4, 4)}),
    "BatchNorm1D": (lambda: m.BatchNorm1D(), {"input": draw(4, 3, 5)}),
    "BatchNorm2D": (lambda: m.BatchNorm2D(), {"input": draw(3, 2, 4, 4)}),
    "Convolution1D": (lambda: m.Convolution1D(3, 4, stride=2, padding=1), {"input": draw(2, 4, 7)}),
    "Convolution2D": (lambda: m.Convolution2D(3, 4, padding=1, groups=2), {"input": draw(2, 4, 5, 5)}),
    "AvgPool1D": (lambda: m.AvgPool1D(2, padding=1), {"input": draw(2, 3, 6)}),
    "AvgPool2D": (lambda: m.AvgPool2D(2), {"input": draw(2, 3, 4, 4)}),
    "MaxPool1D": (lambda: m.MaxPool1D(3, stride=2), {"input": draw(2, 3, 7)}),
    "MaxPool2D": (lambda: m.MaxPool2D(2), {"input": draw(2, 3, 4, 4)}),
    "RNN": (lambda: m.RNN(4), {"input": draw(2, 5, 3)}),
    "LSTM": (lambda: m.LSTM(4), {"input": draw(2, 5, 3)}),
    "GRU": (lambda: m.GRU(4), {"input": draw(2, 5, 3)}),
    "RNNCell": (lambda: m.RNNCell(5, 2), {"input": draw(2, 4), **CELL}),
    "LSTMCell": (lambda: m.LSTMCell(5, 2), {"input": draw(2, 4), **CELL, "prev_cell": draw(3, 5, seed=1)}),
    "LSTMCellBody": (
        lambda: m.LSTMCellBody(5),
        {"input": draw(3, 4), **CELL, "prev_cell": draw(3, 5, seed=1)},
    ),
    "OneToMany": (
        lambda: m.OneToMany(m.RNNCell(5, 3), 2),
        {"input": draw(2, 3), "initial_hidden": draw(2, 5), "target1": draw(1, 3)},
    ),
    "OneToManyInference": (
        lambda: m.OneToManyInference(m.RNNCell(5, 3), 2),
        {"input": draw(2, 3), "initial_hidden": draw(2, 5)},
    ),
    "ManyToOne": (
        lambda: m.ManyToOne(m.LSTMCell(5, 2), 2),
        {
            "input0": draw(3, 3),
            "input1": draw(2, 3),
            "initial_hidden": draw(3, 5),
            "initial_cell": draw(3, 5, seed=1),
        },
    ),
    "EncoderDecoder": (
        lambda: m.EncoderDecoder(lambda: m.RNNCell(5, 3), 2, 2),
        {
            "input0": draw(3, 3),
            "input1": draw(2, 3),
            "initial_hidden": np.zeros((3, 5)),
            "target1": draw(2, 3),
            "decoder_input": draw(3, 3),
            "indices": np.array([2, 0, 1], "int32"),
        },
    ),
    "EncoderDecoderInference": (
        lambda: m.EncoderDecoderInference(m.RNNCell(4, 3), 1, 2),
        {"input0": draw(2, 3), "initial_hidden": draw(2, 4), "decoder_input": draw(2, 3)},
    ),
    "SelfAttention": (lambda: m.SelfAttention(4, 2, num_kv_heads=1), {"input": draw(2, 5, 4), **ROPE}),
    "SelfAttention with norms and biases": (
        lambda: m.SelfAttention(
            4, 2, 1, 4, scale=0.7, use_bias=True, output_bias=True, rotary_dim=2, qk_norm="all", window=3
        ),
        {"input": draw(2, 5, 4), **ROPE},
    ),
    "SelfAttention of an encoder": (
        lambda: m.SelfAttention(4, 2, rotary_dim=0, causal=False, use_bias=True),
        {"input": draw(2, 5, 4)},
    ),
    "SelfAttention without positions": (
        lambda: m.SelfAttention(4, 2, rotary_dim=0, qk_norm="head", norm_offset=1.0, sinks=True),
        {"input": draw(2, 5, 4)},
    ),
    "LatentSelfAttention": (
        lambda: m.LatentSelfAttention(4, 2, 3, None, 3, 2, 4, interleaved=True, window=3),
        {"input": draw(2, 5, 4), **ROPE},
    ),
    "LatentSelfAttention with a query rank": (
        lambda: m.LatentSelfAttention(
            4, 2, 3, 5, 3, 2, use_bias=True, output_bias=True, scale=0.7, softcap=2.0
        ),
        {"input": draw(2, 5, 4), **ROPE},
    ),
    "StateSpace": (lambda: m.StateSpace(8, 3, 4, chunk_size=2), {"input": draw(2, 5, 8)}),
    "MixtureOfExperts": (lambda: m.MixtureOfExperts(4, 5, 3), {"input": draw(2, 6, 4)}),
    "Experts": (lambda: m.Experts(4, 5, 3), {"input": draw(2, 6, 4)}),
    "Experts beside a shared one": (
        lambda: m.Experts(
            4, 5, 6, 1, router="sigmoid", normalise=False, scale=2.5, shared=3, activation="gelu"
        ),
        {"input": draw(2, 6, 4)},
    ),
    "Experts in groups": (
        lambda: m.Experts(
            *(4, 5, 8, 2), router="sigmoid", groups=4, top_groups=2, group_score="top2", choice_bias=True
        ),
        {"input": draw(2, 6, 4)},
    ),
    "Experts with biases": (
        lambda: m.Experts(
            *(4, 5, 6, 2), use_bias=True, logit_bias=True, activation="swiglu_clamped", limit=0.5, shared=3
        ),
        {"input": draw(2, 6, 4)},
    ),
    "VectorQuantiser": (lambda: m.VectorQuantiser(4, 3), {"input": draw(6, 3)}),
    "LinearSVM": (lambda: m.LinearSVM(), {"input": draw(4, 3)}),
    "LogisticRegression": (lambda: m.LogisticRegression(), {"input": draw(4, 3)}),
    "PolynomialRegression": (lambda: m.PolynomialRegression(2, 2), {"input": draw(4, 2)}),
    "RBFKernel": (lambda: m.RBFKernel(), {"input1": draw(3, 2), "input2": draw(4, 2, seed=1)}),
    "PolynomialKernel": (lambda: m.PolynomialKernel(), {"input1": draw(3, 2), "input2": draw(4, 2, seed=1)}),
    "KernelizedSVM": (
        lambda: m.KernelizedSVM(m.RBFKernel()),
        {"input1": draw(3, 2), "input2": draw(4, 2, seed=1)},
    ),
    "GPRAlpha": (
        lambda: m.GPRAlpha(),
        {"label_mu_diff": draw(4, 1), "L": np.linalg.cholesky(positive(4) + np.eye(4))},
    ),
    "GPRVOuter": (
        lambda: m.GPRVOuter(),
        {"K": positive(4), "L": np.linalg.cholesky(positive(4) + np.eye(4))},
    ),
    "GPRLoss": (
        lambda: m.GPRLoss(),
        {
            "labels": draw(4, 1),
            "mu": draw(4, 1, seed=1),
            "alpha": draw(4, 1, seed=2),
            "L": np.linalg.cholesky(positive(4) + np.eye(4)),
        },
    ),
    "GaussProcessRegressionCore": (
        lambda: m.GaussProcessRegressionCore(),
        {"label": draw(4, 1), "mu": np.zeros((4, 1)), "k": positive(4), "k_star": positive(4)},
    ),
    "EncoderDistanceMatrix": (
        lambda: m.EncoderDistanceMatrix(),
        {"input1": draw(3, 2), "input2": draw(4, 2, seed=1), "norm": TWO},
    ),
    "MDSCore": (
        lambda: m.MDSCore(),
        {"distances": spread(4) + 0.3, "pred_distances": spread(4) ** 2 + 0.5, "norm": TWO},
    ),
    "MDS": (lambda: m.MDS(2), {"input": spread(4), "norm": TWO}),
    "TSNECore": (
        lambda: m.TSNECore(),
        {"pred_distances": spread(4), "p_joint": np.full((4, 4), 1 / 12) * (1 - np.eye(4))},
    ),
    "TSNE": (lambda: m.TSNE(2, "distances", 2.0), {"input": spread(5)}),
    "PCA": (lambda: m.PCA(2), {"input": draw(7, 3)}),
    "L1": (lambda: m.L1(), {"input": draw(1, 4)}),
    "L2": (lambda: m.L2(), {"input": draw(1, 4)}),
    "QuadraticFormRegularizer": (
        lambda: m.QuadraticFormRegularizer(),
        {"input": draw(1, 4), "kernel": draw(4, 4)},
    ),
    "Accuracy": (lambda: m.Accuracy(), {"pred": SCORES, "label": HOT}),
    "AUC": (lambda: m.AUC(3), {"pred": SCORES, "label": HOT}),
    "F1": (lambda: m.F1("macro", 3), {"pred": SCORES, "label": HOT}),
    "Precision": (lambda: m.Precision("weighted", 3), {"pred": SCORES, "label": HOT}),
    "Recall": (lambda: m.Recall("micro", 3), {"pred": SCORES, "label": HOT}),
    "Metric": (lambda: m.Metric(), {"pred": SCORES, "label": HOT}),
}
# Their results are chosen, counted, ordered or searched for (by TSNE, the bandwidth of each point): no difference
# quotient says what their derivative is.
STEPS = {
    "TSNE",
    "Accuracy",
    "AUC",
    "F1",
    "Precision",
    "Recall",
    "Metric",
    "VectorQuantiser",
    "MixtureOfExperts",
    "PCA",
}
KINDS = {"f": "float", "i": "int", "b": "bool"}


def _trained() -> ml.Block:
    """A loss of several steps, penalties by key and by pattern, a metric."""
    train = m.TrainModel(m.MLP(3, [4], 2, activation=m.Tanh))
    train.add_loss(m.CrossEntropy(), input="output", target="label")
    train.add_loss(m.SquaredError(), [m.Sum(1), m.Mean()], input="output", target="target", coef=0.5)
    train.add_regularization(m.L1(), 0.3, input="layer_1.bias")
    train.add_regularization(m.L2(), 0.2, input=re.compile(r"weight$"))
    train.add_metric(m.Accuracy(is_label_one_hot=False), key_name="accuracy", pred="output", label="label")
    return train


CASES["TrainModel"] = (
    _trained,
    {"input": draw(6, 3), "target": draw(6, 2, seed=3), "label": np.array([0, 1, 1, 0, 1, 1], "int32")},
)


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {k: v for name, sub in tree.items() for k, v in leaves(sub, f"{path}.{name}").items()}


def mapped(function: Any, tree: Any) -> Any:
    return {k: mapped(function, v) for k, v in tree.items()} if isinstance(tree, dict) else function(tree)


def start(specs: Any, low: float, high: float) -> dict[str, Any]:
    """The same numbers for each backend, by path."""
    tree: dict[str, Any] = {}
    for number, (path, spec) in enumerate(sorted(specs.items())):
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = np.random.default_rng(100 + number).uniform(low, high, spec.shape).astype(spec.dtype)
    return tree


class Run:
    """A block on a backend, with all float inputs as parameters."""

    def __init__(self, name: str, kind: str) -> None:
        make, given = CASES[name]
        self.backend = BACKENDS[kind]()
        model, block = ml.Model(), make()
        arrays = {key: np.asarray(value) for key, value in given.items()}
        keys = {k: ml.IOKey(f"in_{k}", shape=v.shape, kind=KINDS[v.dtype.kind]) for k, v in arrays.items()}
        outputs = {key: f"out_{key}" for key in block.output_keys}
        model.add(block, "block", **keys, **outputs)
        model.expose(*outputs.values())
        real = [f"in_{k}" for k, v in arrays.items() if v.dtype.kind == "f"]
        self.compiled = ml.compile(model, self.backend, trainable_keys=real)
        self.params = start(self.compiled.params, 0.2, 0.9) | {
            f"in_{k}": v for k, v in arrays.items() if f"in_{k}" in real
        }
        self.inputs = {f"in_{k}": v for k, v in arrays.items() if f"in_{k}" not in real}
        self.state = start(self.compiled.states, 0.5, 1.5)

    def __call__(self, params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        backend = self.backend
        ready = mapped(backend.array, params)
        state = mapped(lambda v: backend.array(v, dtype=v.dtype.name), self.state)
        more: dict[str, Any] = {"state": state} if state else {}
        train = bool(state)
        found = self.compiled.evaluate(ready, self.inputs, train=train, **more)
        out = found[0] if state else found
        cotangents = {
            k: backend.array(weight_of(backend.to_numpy(v)))
            for k, v in out.items()
            if backend.to_numpy(v).dtype.kind == "f"
        }
        results = self.compiled.evaluate(ready, self.inputs, cotangents, train=train, **more)
        both = {"out": results[0], "state": results[2] if state else {}}
        return (
            leaves(mapped(backend.to_numpy, both)),
            leaves(mapped(backend.to_numpy, results[1])),
        )


@pytest.mark.thin(9)
@pytest.mark.parametrize("name", CASES)
def test_all_backends_agree(name: str) -> None:
    first = Run(name, "jax")
    want, gradients = first(first.params)
    # Codebooks and statistics are float32 whatever the model computes in.
    rtol, atol = (2e-6, 1e-7) if name in ("VectorQuantiser",) else (1e-10, 1e-12)
    for kind in sorted(BACKENDS.keys() - {"jax"}):
        run = Run(name, kind)
        assert run.params.keys() == first.params.keys()
        found, slopes = run(run.params)
        assert found.keys() == want.keys()
        assert slopes.keys() == gradients.keys()
        for mine, theirs in ((found, want), (slopes, gradients)):
            for key in theirs:
                np.testing.assert_allclose(mine[key], theirs[key], rtol, atol, err_msg=f"{kind}{key}")


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", sorted(CASES.keys() - STEPS))
def test_the_gradient_is_one(name: str) -> None:
    """Along a random direction, by central differences on NumPy."""
    run = Run(name, "numpy")
    rng = np.random.default_rng(3)
    direction = mapped(lambda v: rng.uniform(-1, 1, v.shape), run.params)

    def value(step: float) -> float:
        moved = _moved(run.params, direction, step)
        out = {k: v for k, v in run(moved)[0].items() if k.startswith(".out") and v.dtype.kind == "f"}
        return float(sum((weight_of(v) * v).sum() for v in out.values()))

    slope = sum(
        float((g * d).sum())
        for g, d in zip(leaves(run(run.params)[1]).values(), _ordered(run, direction), strict=True)
    )
    h = 1e-5
    assert (value(h) - value(-h)) / (2 * h) == pytest.approx(slope, rel=2e-6, abs=2e-8)


def _moved(tree: Any, direction: Any, step: float) -> Any:
    if isinstance(tree, dict):
        return {k: _moved(v, direction[k], step) for k, v in tree.items()}
    return tree + step * direction


def _ordered(run: Run, direction: Any) -> list[np.ndarray]:
    table = leaves(direction)
    return [table[key] for key in run(run.params)[1]]


def test_every_composite_is_here() -> None:
    blocks = {
        name
        for name in dir(library)
        if inspect.isclass(block := getattr(library, name)) and issubclass(block, ml.Block)
    }
    # Cells are what RNNCell and LSTMCell are kinds of.
    assert blocks - {name.partition(" ")[0] for name in CASES} == {"Cell"}

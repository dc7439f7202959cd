"""Losses, linear algebra, windows, recurrences, experts and scores against PyTorch and scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from primitive_table import Case, check, check_dtypes, draw, run
from torch_oracle import functional as F
from torch_oracle import needs_torch, torch

from capibara import compose as ml

p: Any = ml.primitives  # many calls here are wrong on purpose

X, T = draw(4, 3), draw(4, 3, seed=5)
SIGNS = np.sign(T)
PROBS = np.exp(X) / np.exp(X).sum(1, keepdims=True)
TARGET = np.exp(T) / np.exp(T).sum(1, keepdims=True)
SPARSE = np.array([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
LABELS = np.array([2, 0, 1, 1])
BITS = np.array([[1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 1, 0]])
WEIGHTS = (0.5, 2.0, 1.0)
SYMMETRIC = draw(4, 4) @ draw(4, 4).T + 0.5 * np.eye(4)
SIGNAL, IMAGE = draw(2, 4, 9), draw(2, 4, 6, 7)


def loss(make: Any, want: Any, x: Any = X, target: Any = T, **options: Any) -> Case:
    return Case(make, {"input": x, "target": target}, lambda input, target: want(input, target), **options)


def cross(x: torch.Tensor, target: torch.Tensor, weights: Any = None) -> torch.Tensor:
    """-Σ target log p, the sum over the second dimension."""
    terms = torch.xlogy(target, x) if weights is None else torch.xlogy(target, x) * weights
    return -terms.sum(1)


def chosen(logits: torch.Tensor, top: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    weights, experts = logits.softmax(-1).topk(top)
    return scale * weights / weights.sum(-1, keepdim=True), experts


def chosen_in_groups(
    logits: torch.Tensor, bias: torch.Tensor, groups: int, top_groups: int, best: int, top: int, sigmoid: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token after another, in plain Python; a group's score is the sum of its ``best`` highest."""
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    choice, size = (scores + bias).tolist(), logits.shape[1] // groups
    found = []
    for row in choice:
        parts = [sorted(row[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
        kept = sorted(range(groups), key=lambda g: -sum(parts[g][:best]))[:top_groups]
        allowed = [e for e in range(len(row)) if e // size in kept]
        found.append(sorted(allowed, key=lambda e: -row[e])[:top])
    experts = torch.tensor(found)
    return scores.gather(1, experts), experts


def clamped(gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)


def mixed_with_biases(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, *parts: torch.Tensor
) -> torch.Tensor:
    gate, up, down, gate_bias, up_bias, down_bias = parts
    rows = []
    for i, row in enumerate(x):
        inner = [
            clamped(row @ gate[e] + gate_bias[e], row @ up[e] + up_bias[e], 0.7, 1.5) @ down[e] + down_bias[e]
            for e in experts[i]
        ]
        rows.append((weights[i][:, None] * torch.stack(inner)).sum(0))
    return torch.stack(rows)


def mixed(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    rows = []
    for i, row in enumerate(x):
        inner = [(F.gelu(row @ gate[e], approximate="tanh") * (row @ up[e])) @ down[e] for e in experts[i]]
        rows.append((weights[i][:, None] * torch.stack(inner)).sum(0))
    return torch.stack(rows)


def balanced(target: torch.Tensor) -> torch.Tensor:
    counts = torch.bincount(target.long(), minlength=3)
    return torch.where(counts > 0, len(target) / (3 * counts.double()), 0.0)


CASES = {
    "squared_error": loss(p.SquaredError, lambda x, t: (x - t) ** 2, target=draw(3)),
    "squared_error_int": loss(p.SquaredError, lambda x, t: (x - t) ** 2, target=np.float64(2)),
    "absolute_error": loss(p.AbsoluteError, lambda x, t: (x - t).abs()),
    "huber": loss(lambda: p.HuberLoss(0.7), lambda x, t: F.huber_loss(x, t, "none", 0.7)),
    "quantile": loss(lambda: p.QuantileLoss(0.2), lambda x, t: torch.maximum(0.2 * (t - x), -0.8 * (t - x))),
    "hinge": loss(p.HingeLoss, lambda x, t: (1 - x * t).clamp(min=0), target=SIGNS),
    "quad_hinge": loss(p.QuadHingeLoss, lambda x, t: (1 - x * t).clamp(min=0) ** 2, target=SIGNS),
    "kl": loss(p.KLDivergence, lambda x, t: F.kl_div(x.log(), t, reduction="none"), PROBS, TARGET),
    "kl_sparse": loss(
        p.KLDivergence,
        lambda x, t: torch.where(t > 0, t * (torch.where(t > 0, t, 1.0) / x).log(), 0.0),
        PROBS,
        SPARSE,
    ),
    "bce": loss(
        p.BinaryCrossEntropy, lambda x, t: F.binary_cross_entropy(x, t, reduction="none"), PROBS, TARGET
    ),
    "bce_certain": loss(
        lambda: p.BinaryCrossEntropy(pos_weight=3.0),
        lambda x, t: 3 * t * (1 - x) + (1 - t) * x,  # the tangents where the loss is 0
        np.array([1.0, 0.0]),
        np.array([1.0, 0.0]),
        but="target",
    ),
    "bce_robust": loss(
        lambda: p.BinaryCrossEntropy(robust=True, threshold=0.1),
        lambda x, t: -t * tangent(x) - (1 - t) * tangent(1 - x),
        np.array([0.0, 0.05, 0.5, 1.0]),
        np.array([1.0, 0.3, 0.5, 0.0]),
    ),
    "bce_logits": loss(
        lambda: p.BinaryCrossEntropy("logits", pos_weight=2.5),
        lambda x, t: F.binary_cross_entropy_with_logits(
            x, t, reduction="none", pos_weight=torch.tensor(2.5).double()
        ),
        300 * X,
        SPARSE,
    ),
    "bce_auto": loss(
        lambda: p.BinaryCrossEntropy("logits", "auto"),
        lambda x, t: F.binary_cross_entropy_with_logits(
            x, t, reduction="none", pos_weight=((1 - t.mean()) / t.mean()).detach()
        ),
        X,
        BITS.astype("float64"),
    ),
    "cross_entropy": loss(
        p.CrossEntropy, lambda x, t: F.cross_entropy(x, t.long(), reduction="none"), 400 * X, LABELS
    ),
    "cross_entropy_space": loss(
        lambda: p.CrossEntropy(weights=(1, 2, 3, 4)),
        lambda x, t: F.cross_entropy(
            x, t.long(), reduction="none", weight=torch.tensor([1.0, 2, 3, 4]).double()
        ),
        IMAGE,
        np.arange(84).reshape(2, 6, 7) % 4,
    ),
    "cross_entropy_last": loss(
        lambda: p.CrossEntropy(axis=-1),
        lambda x, t: F.cross_entropy(x.movedim(-1, 1), t.long(), reduction="none"),
        draw(2, 5, 3),
        np.arange(10).reshape(2, 5) % 3,
    ),
    "cross_entropy_distribution": loss(
        lambda: p.CrossEntropy(categorical=False),
        lambda x, t: F.cross_entropy(x, t, reduction="none"),
        X,
        TARGET,
    ),
    "cross_entropy_auto": loss(
        lambda: p.CrossEntropy(weights="auto"),
        lambda x, t: F.cross_entropy(x, t.long(), reduction="none", weight=balanced(t)),
        X,
        LABELS,
    ),
    "cross_entropy_auto_distribution": loss(
        lambda: p.CrossEntropy(weights="auto", categorical=False),
        lambda x, t: cross(x.softmax(1), t, (t.sum() / (3 * t.sum(0))).detach()),
        X,
        SPARSE,
        but="target",
    ),
    "cross_entropy_probs": loss(
        lambda: p.CrossEntropy("probs", WEIGHTS),
        lambda x, t: F.nll_loss(x.log(), t.long(), torch.tensor(WEIGHTS).double(), reduction="none"),
        PROBS,
        LABELS,
    ),
    "cross_entropy_probs_of_0": loss(
        lambda: p.CrossEntropy("probs"),
        lambda x, t: -x.gather(1, t.long()[:, None])[:, 0].log(),
        np.array([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]),
        np.array([1, 2]),
    ),
    "cross_entropy_probs_distribution": loss(
        lambda: p.CrossEntropy("probs", categorical=False), cross, PROBS, TARGET
    ),
    "cross_entropy_probs_robust": loss(
        lambda: p.CrossEntropy("probs", robust=True, threshold=0.25),
        lambda x, t: -tangent(x, 0.25).gather(1, t.long()[:, None])[:, 0],
        np.array([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]),
        np.array([0, 2]),
    ),
    "cross_entropy_log_probs": loss(
        lambda: p.CrossEntropy("log_probs"),
        lambda x, t: F.nll_loss(x, t.long(), reduction="none"),
        np.log(PROBS),
        LABELS,
    ),
    "matmul": Case(
        p.MatrixMultiply, {"left": draw(2, 1, 3, 4), "right": draw(5, 4, 2)}, lambda left, right: left @ right
    ),
    "cholesky": Case(p.Cholesky, {"input": SYMMETRIC}, lambda input: torch.linalg.cholesky(input), rtol=1e-8),
    "eigvalsh": Case(p.Eigvalsh, {"input": SYMMETRIC}, lambda input: torch.linalg.eigvalsh(input), rtol=1e-8),
    "solve": Case(
        p.SolveTriangular,
        {"matrix": np.tril(SYMMETRIC), "right": X},
        lambda matrix, right: torch.linalg.solve_triangular(matrix.tril(), right, upper=False),
        rtol=1e-8,
    ),
    "solve_transposed": Case(
        lambda: p.SolveTriangular(True),
        {"matrix": np.tril(SYMMETRIC), "right": X},
        lambda matrix, right: torch.linalg.solve_triangular(matrix.tril().T, right, upper=True),
        rtol=1e-8,
    ),
    "diagonal": Case(p.Diagonal, {"input": draw(2, 3, 3)}, lambda input: input.diagonal(0, 1, 2)),
    "transposed_diagonal": Case(
        p.TransposedDiagonal, {"input": SYMMETRIC}, lambda input: input.diag()[:, None]
    ),
    "add_diagonal": Case(
        p.AddDiagonal,
        {"input": SYMMETRIC, "value": np.array([2.5])},
        lambda input, value: input + value * torch.eye(4).double(),
    ),
    "zero_diagonal": Case(
        p.ZeroDiagonal, {"input": SYMMETRIC}, lambda input: input * (1 - torch.eye(4).double())
    ),
    "cartesian_difference": Case(
        p.CartesianDifference,
        {"left": X, "right": draw(2, 3)},
        lambda left, right: left[:, None] - right[None],
    ),
    "distance_matrix": Case(
        p.DistanceMatrix,
        {"left": X, "right": draw(2, 3), "norm": np.float64(1.7)},
        lambda left, right, norm: ((left[:, None] - right[None]).abs() ** norm).sum(-1),
    ),
    "polynomial_features": Case(
        lambda: p.PolynomialFeatures(3),
        {"input": X[:, :2]},
        lambda input: torch.stack(
            [input[:, 0] ** (n - k) * input[:, 1] ** k for n in (1, 2, 3) for k in range(n + 1)], -1
        ),
    ),
    "scaled_dot_product": Case(
        p.ScaledDotProduct,
        {"query": draw(2, 3, 4), "key": draw(2, 5, 4), "value": draw(2, 5, 2)},
        lambda query, key, value: F.scaled_dot_product_attention(query, key, value),
    ),
    "scaled_dot_product_causal": Case(
        lambda: p.ScaledDotProduct(True, 3.0),
        {"query": draw(2, 3, 4), "key": draw(2, 3, 4, seed=1), "value": draw(2, 3, 2)},
        lambda query, key, value: F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=3.0
        ),
    ),
    "scaled_dot_product_mask": Case(
        lambda: p.ScaledDotProduct(mask="bool"),
        {
            "query": draw(2, 3, 4),
            "key": draw(2, 4, 4),
            "value": draw(2, 4, 2),
            "mask": np.array(
                [[True, False, True, True], [False, False, False, False], [False, True, False, True]]
            ),
        },
        lambda query, key, value, mask: torch.nan_to_num(
            ((query @ key.mT / 2).masked_fill(~mask, -1e30).softmax(-1) * mask.any(-1, keepdim=True)) @ value
        ),
    ),
    "scaled_dot_product_bias": Case(
        lambda: p.ScaledDotProduct(mask="float"),
        {"query": draw(2, 3, 4), "key": draw(2, 5, 4), "value": draw(2, 5, 2), "mask": draw(3, 5)},
        lambda query, key, value, mask: F.scaled_dot_product_attention(query, key, value, attn_mask=mask),
    ),
    "scaled_dot_product_bias_hides": Case(
        lambda: p.ScaledDotProduct(mask="float"),
        {
            "query": draw(2, 3, 4),
            "key": draw(2, 4, 4),
            "value": draw(2, 4, 2),
            "mask": np.array([[0.3, -np.inf, 0.0, 1.0], [-np.inf] * 4, [-np.inf, 2.0, -np.inf, -0.5]]),
        },
        lambda query, key, value, mask: (
            torch.exp(query @ key.mT / 2 + mask)
            / torch.exp(query @ key.mT / 2 + mask).sum(-1, keepdim=True).clamp(min=1e-300)
            @ value
        ),
    ),
    "conv1d": Case(
        lambda: p.PrimitiveConvolution1D(2, (1, 2), 2, 2),
        {"input": SIGNAL, "weight": draw(6, 2, 3)},
        lambda input, weight: F.conv1d(F.pad(input, (1, 2)), weight, stride=2, dilation=2, groups=2),
    ),
    "conv2d": Case(
        lambda: p.PrimitiveConvolution2D((2, 1), (1, 0), (1, 2)),
        {"input": IMAGE, "weight": draw(3, 4, 2, 3)},
        lambda input, weight: F.conv2d(input, weight, stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
    ),
    "max_pool1d": Case(
        lambda: p.PrimitiveMaxPool1D(3, 2, 1), {"input": SIGNAL}, lambda input: F.max_pool1d(input, 3, 2, 1)
    ),
    "max_pool_ties": Case(
        lambda: p.PrimitiveMaxPool1D(3), {"input": np.ones((1, 1, 6))}, lambda input: F.max_pool1d(input, 3)
    ),
    "max_pool_dilated": Case(
        lambda: p.PrimitiveMaxPool1D(3, 1, 1, 2),
        {"input": SIGNAL},
        lambda input: F.max_pool1d(input, 3, 1, 1, 2),
    ),
    "max_pool2d": Case(
        lambda: p.PrimitiveMaxPool2D((2, 3), (1, 2), (1, 0)),
        {"input": IMAGE},
        lambda input: F.max_pool2d(input, (2, 3), (1, 2), (1, 0)),
    ),
    "avg_pool1d": Case(
        lambda: p.PrimitiveAvgPool1D(3, 2, 1, count_padding=True),
        {"input": SIGNAL},
        lambda input: F.avg_pool1d(input, 3, 2, 1),
    ),
    "avg_pool2d": Case(
        lambda: p.PrimitiveAvgPool2D((2, 3), None, (1, 0)),
        {"input": IMAGE},
        lambda input: F.avg_pool2d(input, (2, 3), None, (1, 0), count_include_pad=False),
    ),
    "group_norm": Case(
        lambda: p.GroupNormalise(2, 0.1), {"input": IMAGE}, lambda input: F.group_norm(input, 2, eps=0.1)
    ),
    "instance_norm": Case(
        lambda: p.GroupNormalise(4), {"input": SIGNAL}, lambda input: F.instance_norm(input)
    ),
    "channel_add": Case(
        p.ChannelAdd,
        {"input": IMAGE, "values": draw(4)},
        lambda input, values: input + values[:, None, None],
    ),
    "channel_multiply": Case(
        p.ChannelMultiply, {"input": SIGNAL, "values": draw(4)}, lambda input, values: input * values[:, None]
    ),
    "split_like": Case(
        p.SplitLike, {"input": draw(5, 2), "like": draw(3, 4)}, lambda input, like: (input[:3], input[3:])
    ),
    "unflatten": Case(
        p.Unflatten, {"input": draw(6, 5), "like": draw(2, 3, 4)}, lambda input, like: input.reshape(2, 3, 5)
    ),
    "moe_dispatch": Case(
        p.Dispatch,
        {"input": X, "dispatch": draw(4, 2, 5)},
        lambda input, dispatch: torch.einsum("td,tec->ecd", input, dispatch),
    ),
    "moe_combine": Case(
        p.ExpertCombine,
        {"input": draw(2, 5, 3), "combine": draw(4, 2, 5)},
        lambda input, combine: torch.einsum("ecd,tec->td", input, combine),
    ),
    "expert_dense": Case(
        p.ExpertDense, {"input": draw(2, 5, 3), "weight": draw(2, 3, 4)}, lambda input, weight: input @ weight
    ),
    "choose_experts": Case(
        lambda: p.ChooseExperts(2, scale=1.5), {"input": draw(6, 5)}, lambda input: chosen(input, 2, 1.5)
    ),
    "choose_experts_in_groups": Case(
        lambda: p.ChooseExperts(
            3, "sigmoid", False, groups=4, top_groups=2, group_score="top2", use_bias=True
        ),
        {"input": draw(6, 12), "bias": draw(12, low=-0.5, high=0.5)},
        lambda input, bias: chosen_in_groups(input, bias, 4, 2, 2, 3, True),
    ),
    "choose_experts_in_the_best_group": Case(
        lambda: p.ChooseExperts(2, normalise=False, groups=3, top_groups=1),
        {"input": draw(6, 9)},
        lambda input: chosen_in_groups(input, torch.zeros(9), 3, 1, 1, 2, False),
    ),
    "expert_mlp": Case(
        lambda: p.ExpertMLP("gelu_tanh"),
        {
            "input": draw(3, 2),
            "weights": draw(3, 2, seed=1),
            "experts": np.array([[2, 0], [0, 3], [2, 3]]),
            "gate": draw(4, 2, 3),
            "up": draw(4, 2, 3, seed=1),
            "down": draw(4, 3, 2),
        },
        lambda input, weights, experts, gate, up, down: mixed(input, weights, experts, gate, up, down),
    ),
    "expert_mlp_with_biases": Case(
        lambda: p.ExpertMLP("swiglu_clamped", limit=0.7, alpha=1.5, use_bias=True),
        {
            "input": draw(3, 2),
            "weights": draw(3, 2, seed=1),
            "experts": np.array([[2, 0], [0, 3], [2, 3]]),
            "gate": draw(4, 2, 3),
            "up": draw(4, 2, 3, seed=1),
            "down": draw(4, 3, 2),
            "gate_bias": draw(4, 3),
            "up_bias": draw(4, 3, seed=1),
            "down_bias": draw(4, 2),
        },
        lambda **given: mixed_with_biases(*given.values()),
    ),
    "expert_mlp_with_adapters": Case(
        lambda: p.ExpertMLP("gelu_tanh", adapters=("down", "gate"), adapter_scale=1.5),
        {
            "input": draw(3, 2),
            "weights": draw(3, 2, seed=1),
            "experts": np.array([[2, 0], [0, 3], [2, 3]]),
            "gate": draw(4, 2, 3),
            "up": draw(4, 2, 3, seed=1),
            "down": draw(4, 3, 2),
            "gate_a": draw(4, 2, 5),
            "gate_b": draw(4, 5, 3),
            "down_a": draw(4, 3, 5),
            "down_b": draw(4, 5, 2),
        },
        lambda input, weights, experts, gate, up, down, gate_a, gate_b, down_a, down_b: mixed(
            input, weights, experts, gate + 1.5 * gate_a @ gate_b, up, down + 1.5 * down_a @ down_b
        ),
    ),
    "clamped_swiglu": Case(
        lambda: p.ClampedSwiGLU(1.2, 1.702),
        {"gate": draw(3, 5), "up": draw(3, 5, seed=1)},
        lambda gate, up: clamped(gate, up, 1.2, 1.702),
    ),
    "confusion": Case(
        lambda: p.Confusion(3),
        {"pred": np.array([0, 2, 2, 1, 0, 5]), "label": np.array([0, 2, 1, 1, 2, 0])},
        lambda pred, label: torch.tensor([[1, 0, 0], [0, 1, 1], [1, 0, 1]]),
    ),
}


def tangent(x: torch.Tensor, at: float = 0.1) -> torch.Tensor:
    return torch.where(x < at, np.log(at) + (x - at) / at, torch.where(x < at, 1.0, x).log())


def batch_norm(train: bool) -> Any:
    def want(input: Any, mean: Any, variance: Any) -> Any:
        m, v = mean.detach().clone(), variance.detach().clone()
        out = F.batch_norm(
            input, m if train else mean, v if train else variance, training=train, momentum=0.3
        )
        if not train:
            return out, mean, variance
        # Of the running statistics only what stays of the old ones has a gradient.
        return out, m + 0.7 * (mean - mean.detach()), v + 0.7 * (variance - variance.detach())

    return want


def recurrent(kind: str, layer: Any, states: tuple[str, ...]) -> Case:
    gates = {"rnn": 1, "lstm": 4, "gru": 3}[kind]
    inputs = {"input": draw(2, 5, 3)} | {s: draw(2, 4, seed=i) for i, s in enumerate(states)}
    inputs |= {"w_ih": draw(3, 4 * gates), "w_hh": draw(4, 4 * gates), "bias": draw(4 * gates)}
    if kind == "gru":
        inputs["bias_h"] = draw(4 * gates, seed=7)

    def want(input: Any, w_ih: Any, w_hh: Any, bias: Any, bias_h: Any = None, **given: Any) -> Any:
        bias_h = torch.zeros_like(bias) if bias_h is None else bias_h
        flat = [w_ih.T, w_hh.T, bias, bias_h]
        start = [given[s][None] for s in states]
        state = tuple(start) if len(start) > 1 else start[0]
        names: tuple[str, ...] = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        weights: Any = dict(zip(names, flat, strict=True))
        out, end = torch.func.functional_call(layer.double(), weights, (input, state))
        return (out, *(e[0] for e in (end if isinstance(end, tuple) else (end,))))

    make = {"rnn": p.RnnScan, "lstm": p.LstmScan, "gru": p.GruScan}[kind]
    return Case(make, inputs, want)


CASES |= {
    "rnn_scan": recurrent("rnn", torch.nn.RNN(3, 4, batch_first=True), ("hidden",)),
    "lstm_scan": recurrent("lstm", torch.nn.LSTM(3, 4, batch_first=True), ("hidden", "cell")),
    "gru_scan": recurrent("gru", torch.nn.GRU(3, 4, batch_first=True), ("hidden",)),
    "batch_norm": Case(
        lambda: p.BatchNormalise(0.3),
        {"input": IMAGE, "mean": draw(4), "variance": draw(4, low=0.5)},
        batch_norm(True),
    ),
}


@pytest.fixture(scope="module")
def found() -> Iterator[Any]:
    yield run(CASES)
    jax.clear_caches()


@pytest.mark.thin(12)
@pytest.mark.parametrize("name", CASES)
def test_against_torch(name: str, found: Any) -> None:
    check(f"operations/{name}", CASES[name], found[name])


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_dtypes(compute: str) -> None:
    check_dtypes(CASES, compute)


@needs_torch
def test_batch_norm_of_running_statistics() -> None:
    inputs = {"input": SIGNAL, "mean": draw(4), "variance": draw(4, low=0.5)}
    got = ml.compile(p.BatchNormalise(), ml.JaxBackend("float64")).apply({}, inputs, train=False)
    want = batch_norm(False)(**{k: torch.tensor(v) for k, v in inputs.items()})
    for a, b in zip(map(np.asarray, got.values()), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)

"""Statistics, metrics and routing of the library against their definitions, and what its operations refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from primitive_table import draw

from capibara import compose as ml

p: Any = ml.primitives  # many calls here are wrong on purpose

X, T = draw(4, 3), draw(4, 3, seed=5)
WEIGHTS = (0.5, 2.0, 1.0)
SIGNAL, IMAGE = draw(2, 4, 9), draw(2, 4, 6, 7)


def applied(block: ml.Block, train: Any = False, **inputs: Any) -> Any:
    model = ml.compile(block, ml.JaxBackend("float64"))
    return {k: np.asarray(v) for k, v in model.apply({}, inputs, train=train).items()}


@pytest.mark.slow
def test_principal_components() -> None:
    from sklearn.decomposition import PCA

    x = draw(9, 4) @ draw(4, 4)
    got = applied(p.PrincipalComponents(3), input=x)
    want: Any = PCA(3).fit(x)
    np.testing.assert_allclose(got["mean"], want.mean_)
    np.testing.assert_allclose(got["variances"], want.explained_variance_)
    signs = np.sign((got["components"] * want.components_.T).sum(0))
    np.testing.assert_allclose(got["components"], want.components_.T * signs, rtol=1e-9)
    assert (got["components"].max(0) >= -got["components"].min(0)).all()


def test_tsne_joint_probabilities() -> None:
    points = draw(8, 3)
    squared = ((points[:, None] - points[None]) ** 2).sum(-1)
    for scale in (1.0, 1e8):  # far points underflow in a plain exp()
        joint = applied(p.TsnePJoint(3.0), input=scale * squared)["output"]
        np.testing.assert_allclose(joint, joint.T)
        np.testing.assert_allclose(joint.sum(), 1)
        # The same, found by another method.
        import scipy.optimize

        brentq: Any = scipy.optimize.brentq

        want = np.zeros((8, 8))
        for i in range(8):
            others = np.delete(squared[i], i)

            def rows(log_rate: float, others: np.ndarray = others) -> np.ndarray:
                weight = np.exp(-(others - others.min()) * np.exp(log_rate))
                return weight / weight.sum()

            def miss(log_rate: float, rows: Any = rows) -> float:
                q = rows(log_rate)
                return -(q[q > 0] * np.log(q[q > 0])).sum() - np.log(3)

            want[i, np.arange(8) != i] = rows(brentq(miss, -10, 10, xtol=1e-14))
        np.testing.assert_allclose(joint, (want + want.T) / 16, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("average", ["micro", "macro", "weighted", "none"])
@pytest.mark.parametrize("score", ["precision", "recall", "f1"])
def test_class_scores(score: str, average: str) -> None:
    import sklearn.metrics

    rng = np.random.default_rng(3)
    label, pred = (
        rng.integers(0, 3, 40),
        rng.integers(0, 4, 40),
    )  # class 3 is never a label, class 4 never occurs
    counts = applied(p.Confusion(5), pred=pred.astype("int32"), label=label.astype("int32"))["output"]
    got = applied(p.ClassScore(score, average), input=counts)["output"]
    want = getattr(sklearn.metrics, f"{score}_score")(
        label,
        pred,
        average=None if average == "none" else average,
        zero_division=0,
        **({"labels": range(5)} if average == "none" else {}),
    )
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_auc() -> None:
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    pred, label = rng.integers(0, 9, 50) / 8, rng.random(50) < 0.4  # with ties
    np.testing.assert_allclose(
        applied(p.AUCCore(), pred=pred, label=label)["output"], roc_auc_score(label, pred)
    )
    assert np.isnan(applied(p.AUCCore(), pred=pred, label=np.ones(50, bool))["output"])


def routed(logits: np.ndarray, top: int, factor: float, normalise: bool) -> Any:
    """The routing rule, place by place."""
    tokens, experts = logits.shape
    places = max(1, int(np.ceil(top * tokens * factor / experts)))
    gate = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    order = np.argsort(-gate, axis=1, kind="stable")[:, :top]
    dispatch, combine = np.zeros((2, tokens, experts, places))
    used, chosen = np.zeros(experts, int), np.zeros(experts)
    for choice in range(top):
        for token in range(tokens):
            expert = order[token, choice]
            chosen[expert] += 1
            if used[expert] < places:
                weight = gate[token, expert] / (gate[token, order[token]].sum() if normalise else 1)
                dispatch[token, expert, used[expert]] = 1
                combine[token, expert, used[expert]] = weight
            used[expert] += 1
    return dispatch, combine, experts * (chosen / chosen.sum() * gate.mean(0)).sum()


@pytest.mark.parametrize(("top", "factor", "normalise"), [(1, 1.0, False), (2, 0.5, True), (3, 4.0, True)])
def test_routing(top: int, factor: float, normalise: bool) -> None:
    logits = draw(10, 3, seed=top)
    model = ml.compile(p.Route(top, factor, normalise), ml.JaxBackend("float64"), shapes={"input": (10, 3)})
    got = model.apply({}, {"input": logits})
    for (key, a), b in zip(got.items(), routed(logits, top, factor, normalise), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
        assert model.shapes[key] == a.shape


BAD = [
    (lambda: p.QuantileLoss(1.5), r"quantile=1\.5"),
    (lambda: p.HuberLoss(0), r"delta=0"),
    (lambda: p.CrossEntropy("probabilities"), r"input_type='probabilities' must be one of"),
    (lambda: p.CrossEntropy(weights="even"), r"weights='even'"),
    (lambda: p.CrossEntropy(weights=["a"]), r"weights='a'"),
    (lambda: p.CrossEntropy(robust=True), r"robust=True is for input_type='probs'"),
    (lambda: p.BinaryCrossEntropy("logits", robust=True), r"robust=True is for"),
    (lambda: p.BinaryCrossEntropy(threshold=0.1), r"only used with robust=True"),
    (lambda: p.KLDivergence(threshold=0.1), r"only used with robust=True"),
    (lambda: p.PolynomialFeatures(0), r"degree=0"),
    (lambda: p.ScaledDotProduct(mask="int"), r"mask='int'"),
    (lambda: p.PrimitiveConvolution2D(stride=(1, 2, 3)), r"stride=\(1, 2, 3\)"),
    (lambda: p.PrimitiveConvolution1D(padding=-1), r"padding=-1"),
    (lambda: p.PrimitiveConvolution1D(padding="full"), r"padding='full'"),
    (lambda: p.PrimitiveMaxPool1D(2, padding=2), r"padding=2 is more than half of kernel_size=2"),
    (lambda: p.GroupNormalise(0), r"groups=0"),
    (lambda: p.BatchNormalise(2.0), r"momentum=2\.0"),
    (lambda: p.Route(0), r"top=0"),
    (lambda: p.Route(1, 0), r"capacity_factor=0"),
    (lambda: p.TsnePJoint(0.5), r"perplexity=0\.5"),
    (lambda: p.ClassScore("accuracy"), r"score='accuracy'"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ml.WiringError, match=message):
        make()


BAD_SHAPES = [
    (p.SquaredError, {"input": (2, 3), "target": (2,)}, r"3 does not broadcast with 2\n.*target \(2,\)"),
    (p.CrossEntropy, {"input": (2, 3), "target": (3,)}, r"2 is not 3|3 is not 2"),
    (
        lambda: p.CrossEntropy(weights=WEIGHTS),
        {"input": (2, 4)},
        r"3 weights for 4 classes\n.*input \(2, 4\)",
    ),
    (lambda: p.CrossEntropy(axis=2), {"input": (2, 4)}, r"axis=2 is outside"),
    (p.MatrixMultiply, {"left": (2, 3, 4), "right": (5, 4, 4)}, r"2 does not broadcast with 5"),
    (p.MatrixMultiply, {"left": (2, 3), "right": (4, 4)}, r"3 is not 4|4 is not 3"),
    (p.Cholesky, {"input": (2, 3)}, r"is not"),
    (lambda: p.PrincipalComponents(3), {"input": (2, 5)}, r"count=3 components"),
    (
        p.PrimitiveConvolution1D,
        {"input": (1, 2, 3), "weight": (1, 2, 4)},
        r"a window of 4 does not fit a size of 3",
    ),
    (
        lambda: p.PrimitiveConvolution1D(groups=2),
        {"input": (1, 3, 3)},
        r"3 channels cannot be split into 2 groups",
    ),
    (p.PrimitiveConvolution1D, {"input": (1, 3, 3), "weight": (1, 2, 1)}, r"2 is not 3|3 is not 2"),
    (lambda: p.PrimitiveMaxPool2D(3), {"input": (1, 1, 3, 2)}, r"a window of 3 does not fit a size of 2"),
    (lambda: p.GroupNormalise(3), {"input": (1, 4, 2)}, r"4 channels cannot be split into 3 groups"),
    (p.LstmScan, {"hidden": (2, 3), "w_hh": (3, 9)}, r"12 is not 9|9 is not 12"),
    (p.SplitLike, {"input": (2, 3), "like": (3,)}, r"3 rows cannot be taken from 2"),
    (lambda: p.Route(3), {"input": (4, 2)}, r"top=3 of 2 experts"),
    (
        lambda: p.ScaledDotProduct(mask="bool"),
        {"query": (2, 3, 4), "key": (2, 5, 4), "mask": (4, 5)},
        r"3 does not broadcast with 4\n.*query \(2, 3, 4\)",
    ),
]


@pytest.mark.parametrize(("make", "shapes", "message"), BAD_SHAPES)
def test_bad_shapes(make: Any, shapes: Any, message: str) -> None:
    with pytest.raises(ml.ShapeError, match=message):
        ml.compile(make(), shapes=shapes)

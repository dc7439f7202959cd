"""Composites of the library against PyTorch, scikit-learn and NumPy in float64."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from primitive_table import draw
from torch_oracle import HAS_TORCH, needs_torch, torch
from torch_oracle import functional as F

from capibara import compose as ml

m: Any = ml.models  # many calls here are wrong on purpose

DOUBLE = ml.JaxBackend(dtype="float64")
QUICK = {"xla_backend_optimization_level": 0}


def tree(specs: Any, seed: int = 0) -> dict[str, Any]:
    """An array for each parameter, by its path."""
    out: dict[str, Any] = {}
    for number, (path, spec) in enumerate(specs.items()):
        at = out
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = draw(*spec.shape, seed=100 * seed + number, low=-1, high=1)
    return out


def run(block: ml.Block, train: Any = False, state: Any = None, params: Any = None, **inputs: Any) -> Any:
    """Parameters, outputs, and the next state if there is one."""
    shapes = {k: np.shape(v) for k, v in inputs.items()}
    model = ml.compile(block, DOUBLE, shapes=shapes)
    params = tree(model.params) if params is None else params
    with DOUBLE.scope():
        call = jax.jit(lambda p, x: model.apply(p, x, state=state, train=train), compiler_options=QUICK)
        out = jax.tree.map(np.asarray, call(params, inputs))
    after = None
    if state is not None:
        out, after = out
    for key, value in out.items():
        assert model.shapes[key] == value.shape, key
    return params, out, after


def close(got: Any, want: Any, rtol: float = 1e-10) -> None:
    want = want.detach().numpy() if HAS_TORCH and isinstance(want, torch.Tensor) else want
    np.testing.assert_allclose(got, want, rtol=rtol, atol=1e-12)


def t(value: Any) -> torch.Tensor:
    return torch.tensor(value)


# ---- signals and images ----------------------------------------------------------------------------------


@needs_torch
def test_convolutions() -> None:
    x, image = draw(2, 4, 9), draw(2, 4, 6, 7)
    p, out, _ = run(m.Convolution1D(3, 6, 2, "same", 2, groups=2), input=x)
    close(out["output"], F.conv1d(t(x), t(p["weight"]), t(p["bias"]), 2, 2, 2, 2))
    p, out, _ = run(m.Convolution2D((2, 3), 5, padding=((1, 0), (0, 2)), use_bias=False), input=image)
    assert set(p) == {"weight"}
    close(out["output"], F.conv2d(F.pad(t(image), (0, 2, 1, 0)), t(p["weight"])))
    p, out, _ = run(m.Convolution2D(4, 1, padding="valid"), input=image)
    close(out["output"], F.conv2d(t(image), t(p["weight"]), t(p["bias"])))


def test_weights_of_convolutions_start_with_variance_1_over_their_inputs() -> None:
    model = ml.compile(m.Convolution2D(5, 64), shapes={"input": (1, 40, 9, 9)})
    weight = np.asarray(model.randomize_params(0)["weight"])
    assert weight.shape == (64, 40, 5, 5)
    np.testing.assert_allclose(weight.std() * 1000**0.5, 1, rtol=0.02)


@needs_torch
def test_pooling() -> None:
    image = draw(2, 3, 6, 7)
    close(run(m.MaxPool2D(2), input=image)[1]["output"], F.max_pool2d(t(image), 2))
    close(run(m.AvgPool2D((3, 2), 2), input=image)[1]["output"], F.avg_pool2d(t(image), (3, 2), 2))
    close(run(m.MaxPool1D(3, 1, 1), input=image[0])[1]["output"], F.max_pool1d(t(image[0]), 3, 1, 1))


@needs_torch
def test_normalisation() -> None:
    x = draw(3, 4, 5)
    p, out, _ = run(m.GroupNorm(2), input=x)
    close(out["output"], F.group_norm(t(x), 2, t(p["weight"]), t(p["bias"])))
    p, out, _ = run(m.InstanceNorm(4, use_bias=False), input=x)
    close(out["output"], F.instance_norm(t(x), weight=t(p["weight"])))
    p, out, _ = run(m.ElementWiseAffine(use_scale=False), input=x)
    close(out["output"], x + p["bias"][:, None])
    close(run(m.GroupNorm(1, False, False), input=x)[1]["output"], F.group_norm(t(x), 1))


@needs_torch
def test_batch_norm_keeps_its_statistics() -> None:
    x = draw(3, 4, 5, 2)
    state = {"mean": draw(4), "variance": draw(4, low=0.5)}
    mean, variance = t(state["mean"]), t(state["variance"])
    p, out, after = run(m.BatchNorm2D(), True, state, input=x)
    close(out["output"], F.batch_norm(t(x), mean, variance, t(p["weight"]), t(p["bias"]), True, 0.1))
    close(after["mean"], mean)
    close(after["variance"], variance)
    p, out, same = run(m.BatchNorm2D(), False, after, input=x)
    close(out["output"], F.batch_norm(t(x), mean, variance, t(p["weight"]), t(p["bias"]), False))
    jax.tree.map(np.testing.assert_array_equal, after, same)
    fresh = ml.compile(m.BatchNorm2D(), shapes={"input": x.shape}).init_state()
    assert {k: v.tolist() for k, v in fresh.items()} == {"mean": [0] * 4, "variance": [1] * 4}


# ---- recurrent networks ----------------------------------------------------------------------------------


@needs_torch
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("initial", [False, True])
def test_sequences(kind: str, initial: bool) -> None:
    x = draw(2, 5, 3)
    states = {"initial_hidden": draw(2, 4), "initial_cell": draw(2, 4, seed=2)}
    given = {k: v for k, v in states.items() if kind == "LSTM" or k == "initial_hidden"} if initial else {}
    p, out, _ = run(getattr(m, kind)(4, initial), input=x, **given)
    layer = getattr(torch.nn, kind)(3, 4, batch_first=True).double()
    second = t(p["bias_h"]) if "bias_h" in p else 0 * t(p["bias"])
    weights = {
        "weight_ih_l0": t(p["w_ih"].T.copy()),
        "weight_hh_l0": t(p["w_hh"].T.copy()),
        "bias_ih_l0": t(p["bias"]),
        "bias_hh_l0": second,
    }
    start = [t(v)[None] for v in given.values()]
    state = None if not initial else start[0] if len(start) == 1 else tuple(start)
    want, end = torch.func.functional_call(layer, weights, (t(x), state))
    close(out["output"], want)
    for key, value in zip(("last_hidden", "last_cell"), end if kind == "LSTM" else (end,), strict=False):
        close(out[key], value[0])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rnn_step(p: Any, x: np.ndarray, state: Any) -> Any:
    hidden = np.tanh(x @ p["w_ih"] + state[0] @ p["w_hh"] + p["bias_h"])
    return (hidden,), hidden @ p["w_ho"] + p["bias_o"]


def lstm_step(p: Any, x: np.ndarray, state: Any) -> Any:
    both = np.concatenate([x, state[0]], -1)
    f, i, o = (sigmoid(both @ p[f"w_{g}"] + p[f"bias_{g}"]) for g in "fio")
    cell = f * state[1] + i * np.tanh(both @ p["w_c"] + p["bias_c"])
    hidden = o * np.tanh(cell)
    return (hidden, cell), hidden @ p["w_out"] + p["bias_out"]


CELLS = {"RNNCell": (rnn_step, ("hidden",)), "LSTMCell": (lstm_step, ("hidden", "cell"))}


@pytest.mark.parametrize("kind", CELLS)
def test_cells(kind: str) -> None:
    step, states = CELLS[kind]
    before = [draw(3, 5, seed=i) for i, _ in enumerate(states)]
    x = draw(2, 4)
    p, out, _ = run(
        getattr(m, kind)(5, 2), input=x, **{f"prev_{k}": v for k, v in zip(states, before, strict=True)}
    )
    after, want = step(p, x, [s[:2] for s in before])
    close(out["output"], want)
    for key, value in zip(states, after, strict=True):
        close(out[key], value)
    close(out["hidden_compl"], before[0][2:])


def encode(step: Any, p: Any, xs: list[np.ndarray], state: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    """Row by row: each runs for as many steps as it has inputs."""
    outputs, ends = [[] for _ in xs], []
    for row in range(len(xs[0])):
        own = [s[row : row + 1] for s in state]
        for number, x in enumerate(xs):
            if row < len(x):
                own, out = step(p, x[row : row + 1], own)
                outputs[number].append(out[0])
        ends.append(own[0][0])
    return outputs, np.stack(ends)


@pytest.mark.parametrize("kind", CELLS)
def test_many_to_one(kind: str) -> None:
    step, states = CELLS[kind]
    xs = [draw(rows, 3, seed=rows) for rows in (4, 3, 1)]
    start = [draw(4, 5, seed=i) for i, _ in enumerate(states)]
    given = {f"initial_{k}": v for k, v in zip(states, start, strict=True)}
    network = m.ManyToOne(getattr(m, kind)(5, 2), 3)
    p, out, _ = run(network, **{f"input{i}": x for i, x in enumerate(xs)}, **given)
    assert set(p) == set(getattr(m, kind).shared_keys)
    outputs, ends = encode(step, p, xs, start)
    close(out["hidden_concat"], ends)
    for i, want in enumerate(outputs):
        close(out[f"output{i}"], np.stack(want))


@pytest.mark.parametrize("teacher_forcing", [False, True])
def test_encoder_decoder(teacher_forcing: bool) -> None:
    xs = [draw(rows, 3, seed=rows) for rows in (3, 2)]
    targets = [draw(rows, 3, seed=10 + rows) for rows in (3, 3, 1)]
    order = np.array([2, 0, 1], "int32")
    network = m.EncoderDecoder(lambda: m.RNNCell(5, 3), 2, 3, teacher_forcing)
    given = {f"input{i}": x for i, x in enumerate(xs)} | {"initial_hidden": np.zeros((3, 5))}
    first = 0 if teacher_forcing else 1
    given |= {f"target{i}": v for i, v in enumerate(targets) if i >= first}
    p, out, _ = run(network, decoder_input=draw(3, 3), indices=order, **given)
    _, ends = encode(rnn_step, p["encoder"], xs, [np.zeros((3, 5))])
    state, made = (ends[order],), draw(3, 3)
    for i, target in enumerate(targets):
        rows = len(target)
        x = targets[i - 1] if i and teacher_forcing else made
        state, made = rnn_step(p["decoder"], x[:rows], [s[:rows] for s in state])
        close(out[f"output{i}"], made)


def test_encoder_decoder_inference() -> None:
    network = m.EncoderDecoderInference(m.RNNCell(4, 3), 1, 2)
    x, start = draw(2, 3), draw(2, 4)
    p, out, _ = run(network, input0=x, initial_hidden=start, decoder_input=2 * x)
    state, _ = rnn_step(p["encoder"], x, [start])
    given = 2 * x
    for i in range(2):
        state, given = rnn_step(p["decoder"], given, state)
        close(out[f"output{i}"], given)


def test_lstm_learns_to_remember() -> None:
    """The first of six numbers, told at the end."""
    model = ml.Model()
    model |= m.LSTM(8)(input="x", last_hidden="end")
    model |= m.Linear(1)(input="end", output="y")
    model.expose("y")
    compiled = ml.compile(model, shapes={"x": (64, 6, 1)})
    x = draw(64, 6, 1).astype("float32")

    def loss(params: Any) -> Any:
        return ((compiled.apply(params, {"x": x})["y"] - x[:, 0]) ** 2).mean()

    params = compiled.randomize_params(0)
    step = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)
    value = first = float(loss(params))
    for _ in range(400):
        value, gradient = step(params)
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient)
    assert float(value) < 0.2 * first


# ---- kernels ---------------------------------------------------------------------------------------------


def test_kernels() -> None:
    from sklearn.metrics.pairwise import rbf_kernel

    x, y = draw(4, 3), draw(2, 3)
    p, out, _ = run(m.RBFKernel(), input1=x, input2=y)
    want = p["l_scale"] ** 2 * rbf_kernel(x, y, gamma=float(1 / (2 * p["sigma"][0] ** 2)))
    close(out["output"], want)
    p, out, _ = run(m.PolynomialKernel(3.0), input1=x, input2=y)
    close(out["output"], (x @ y.T + p["poly_coef"]) ** 3)


def test_support_vectors_and_regressions() -> None:
    from sklearn.preprocessing import PolynomialFeatures

    x, y = draw(4, 3), draw(2, 3)
    p, out, _ = run(m.KernelizedSVM(m.RBFKernel()), input1=x, input2=y)
    assert {k for k, v in p.items() if not isinstance(v, dict)} == {"weight", "bias"}
    _, kernel, _ = run(m.RBFKernel(), params=p["map"], input1=x, input2=y)
    close(out["kernel"], kernel["output"])
    close(out["output"], kernel["output"] @ p["weight"] + p["bias"])
    p, out, _ = run(m.LinearSVM(), input=x)
    close(out["output"], x @ p["weight"] + p["bias"])
    close(out["decision_output"], np.sign(out["output"]))
    p, out, _ = run(m.LogisticRegression(), input=x)
    close(out["probs_output"], sigmoid(x @ p["weight"] + p["bias"]))
    p, out, _ = run(m.PolynomialRegression(2, 2), input=x)
    close(out["output"], PolynomialFeatures(2, include_bias=False).fit_transform(x) @ p["weight"] + p["bias"])
    p, out, _ = run(m.Layer(m.Tanh, 5), input=x)
    close(out["output"], np.tanh(x @ p["weight"] + p["bias"]))


def test_gaussian_process() -> None:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF

    x, new, label = draw(6, 2), draw(4, 2, seed=3), draw(6, 1, seed=4)
    kernel = RBF(1.3)
    process: Any = GaussianProcessRegressor
    want = process(kernel, alpha=0.3, optimizer=None).fit(x, label[:, 0])
    mean, deviation = want.predict(new, return_std=True)
    given = {"label": label, "mu": np.zeros((6, 1)), "k": kernel(x)}
    params = {"s": np.array([0.3])}
    block = m.GaussProcessRegressionCore(test_points=True)
    more = {"k_star": kernel(new), "k_cross": kernel(x, new), "mu_star": np.zeros((4, 1))}
    _, out, _ = run(block, params=params, **given, **more)
    close(out["prediction"][:, 0], mean, 1e-8)
    close(out["confidence"][:, 0], deviation**2 + 0.3, 1e-8)
    close(out["loss"], -want.log_marginal_likelihood_value_, 1e-8)
    _, out, _ = run(m.GaussProcessRegressionCore(), params=params, **given, k_star=kernel(x))
    close(out["prediction"][:, 0], want.predict(x), 1e-8)


# ---- distances -------------------------------------------------------------------------------------------


def test_stress() -> None:
    from scipy.spatial.distance import cdist

    points, norm = draw(5, 3), np.float64(3.0)
    given = cdist(points, points, "minkowski", p=3)
    for kind, value in (("distances", given), ("powered_distances", given**3), ("points", points)):
        p, out, _ = run(m.MDS(2, kind), input=value, norm=norm)
        found = cdist(p["coords"], p["coords"], "minkowski", p=3)
        close(out["output"], ((abs(given - found) ** 3).sum() / (given**3).sum()) ** (1 / 3), 1e-8)
        close(out["predicted_coords"], p["coords"])
    block = m.EncoderDistanceMatrix()
    close(run(block, input1=points, input2=points[:2], norm=norm)[1]["output"], given[:, :2])


def test_scaling_finds_the_distances() -> None:
    """Points in the plane are found again from their distances; equal points give no NaN."""
    points = draw(6, 2)
    points[1] = points[0]
    given = np.linalg.norm(points[:, None] - points[None], axis=-1).astype("float32")
    model = ml.compile(m.MDS(2), shapes={"input": (6, 6)})
    params = model.randomize_params(1)

    def loss(params: Any) -> Any:
        return model.apply(params, {"input": given, "norm": np.float32(2.0)})["output"]

    step = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)
    value = first = float(loss(params))
    for _ in range(200):
        value, gradient = step(params)
        assert np.isfinite(gradient["coords"]).all()
        params = jax.tree.map(lambda p, g: p - 0.3 * g, params, gradient)
    assert float(value) < 0.2 * first


def test_tsne() -> None:
    from scipy.spatial.distance import cdist

    points = draw(7, 3)
    squared = cdist(points, points, "sqeuclidean")
    joint = run(m.TsnePJoint(3.0), input=squared)[1]["output"]
    inputs = {"distances": squared**0.5, "powered_distances": squared, "points": points, "joint": joint}
    for kind, value in inputs.items():
        exact = kind == "joint"
        p, out, _ = run(m.TSNE(2, "distances" if exact else kind, 3.0, not exact), input=value)
        q = 1 / (1 + cdist(p["coords"], p["coords"], "sqeuclidean")) * (1 - np.eye(7))
        q /= q.sum()
        away = ~np.eye(7, dtype=bool)
        close(out["output"], (joint[away] * np.log(joint[away] / q[away])).sum(), 1e-8)


def test_principal_components() -> None:
    from sklearn.decomposition import PCA

    x = draw(9, 4) @ draw(4, 4)
    _, out, _ = run(m.PCA(2), input=x)
    want = PCA(2).fit(x)
    close(abs(out["output"]), abs(want.transform(x)), 1e-8)
    close(out["reconstruction"], want.inverse_transform(want.transform(x)), 1e-8)


def test_regularisers() -> None:
    x, kernel = draw(1, 4), draw(4, 4)
    close(run(m.L1(), input=x)[1]["output"], abs(x).sum())
    close(run(m.L2(), input=x)[1]["output"], (x**2).sum() / 2)
    close(
        run(m.QuadraticFormRegularizer(), input=x, kernel=kernel)[1]["output"], (x @ kernel @ x.T)[0, 0] / 2
    )


# ---- metrics ---------------------------------------------------------------------------------------------


def scored(block: ml.Block, pred: np.ndarray, label: np.ndarray) -> np.ndarray:
    model = ml.Model()
    kinds = {"f": "float", "i": "int", "b": "bool"}
    given = {"pred": pred, "label": label}
    keys = {k: ml.IOKey(k, shape=v.shape, kind=kinds[v.dtype.kind]) for k, v in given.items()}
    model |= block(**keys, output="output")
    return run(model, **given)[1]["output"]


def test_metrics() -> None:
    import sklearn.metrics

    sk: Any = sklearn.metrics

    rng = np.random.default_rng(0)
    scores, labels = rng.random((40, 3)), rng.integers(0, 3, 40).astype("int32")
    classes = scores.argmax(1).astype("int32")
    hot = np.eye(3, dtype="int32")[labels]
    close(scored(m.Accuracy(), scores, hot), sk.accuracy_score(labels, classes))
    close(scored(m.Accuracy(is_label_one_hot=False), scores, labels), sk.accuracy_score(labels, classes))
    plain = {"is_pred_one_hot": False, "is_label_one_hot": False}
    for average in ("micro", "macro", "weighted"):
        for block, want in (
            (m.Precision, sk.precision_score),
            (m.Recall, sk.recall_score),
            (m.F1, sk.f1_score),
        ):
            got = scored(block(average, 3, **plain), classes, labels)
            close(got, want(labels, classes, average=average, zero_division=0))
    binary = {"threshold": 0.3, "is_binary": True, **plain}
    one = (labels == 1).astype("int32")
    close(scored(m.F1("none", **binary), scores[:, 1], one)[1], sk.f1_score(one, scores[:, 1] > 0.3))
    close(scored(m.Accuracy(**binary), scores[:, 1], one), ((scores[:, 1] > 0.3) == one).mean())
    close(scored(m.AUC(1), scores[:, 1], one)[0], sk.roc_auc_score(one, scores[:, 1]))
    want = [sk.roc_auc_score(labels == i, scores[:, i]) for i in range(3)]
    close(scored(m.AUC(3), scores, hot), want)
    close(scored(m.AUC(3, False), scores, labels), want)


# ---- experts ---------------------------------------------------------------------------------------------


def test_mixture_of_experts() -> None:
    x = draw(2, 5, 4)
    p, out, _ = run(m.MixtureOfExperts(4, 6, 3, top=2, capacity_factor=8.0), input=x)
    rows = x.reshape(-1, 4)
    gate = np.exp(rows @ p["router"])
    gate /= gate.sum(1, keepdims=True)
    want = np.zeros((10, 4))
    for i, row in enumerate(rows):
        chosen = np.argsort(-gate[i])[:2]
        for e in chosen:
            a = row @ p["gate"][e]
            inner = a * sigmoid(a) * (row @ p["up"][e])
            want[i] += gate[i, e] / gate[i, chosen].sum() * (inner @ p["down"][e])
    close(out["output"], want.reshape(x.shape))
    model = ml.compile(m.MixtureOfExperts(4, 6, 3), shapes={"input": x.shape})
    assert model.params[("gate",)].axes == ("experts", "embed", "mlp")
    weights = np.asarray(model.randomize_params(0)["down"])
    assert weights.shape == (3, 6, 4)
    # With a place for one token only, nearly all are dropped and give 0.
    _, out, _ = run(m.MixtureOfExperts(4, 6, 3, top=1, capacity_factor=0.01), input=x)
    assert (out["output"] != 0).any(-1).sum() <= 3


@pytest.mark.parametrize(
    ("router", "normalise", "scale", "shared"), [("softmax", True, 1.0, None), ("sigmoid", False, 1.5, 5)]
)
def test_experts_drop_nothing(router: str, normalise: bool, scale: float, shared: int | None) -> None:
    x = draw(2, 9, 4)
    block = m.Experts(4, 6, 5, 3, router=router, normalise=normalise, scale=scale, shared=shared)
    p, out, _ = run(block, input=x)
    rows = x.reshape(-1, 4)
    scores = rows @ p["router"]
    if router == "softmax":
        scores = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    else:
        scores = sigmoid(scores)
    want = np.zeros((18, 4))
    for i, row in enumerate(rows):
        chosen = np.argsort(-scores[i])[:3]
        for e in chosen:
            a = row @ p["gate"][e]
            weight = scale * scores[i, e] / (scores[i, chosen].sum() if normalise else 1)
            want[i] += weight * ((a * sigmoid(a) * (row @ p["up"][e])) @ p["down"][e])
        if shared is not None:
            a, b = (row @ p["shared"][key]["weight"] for key in ("gate", "up"))
            want[i] += (a * sigmoid(a) * b) @ p["shared"]["down"]["weight"]
    close(out["output"], want.reshape(x.shape))


# ---- what is refused -------------------------------------------------------------------------------------

BAD: list[tuple[Any, str]] = [
    (lambda: m.Convolution1D(0, 4), r"kernel_size=0"),
    (lambda: m.Convolution2D((3, 3, 3), 4), r"kernel_size=\(3, 3, 3\)"),
    (lambda: m.Convolution2D(3, 0), r"out_channels=0"),
    (lambda: m.Convolution2D(3, 4, padding="full"), r"padding='full'"),
    (lambda: m.ManyToOne(m.Linear(3), 2), r"cell_type=.*must be a cell"),
    (lambda: m.ManyToOne(m.RNNCell(2, 2), 0), r"max_sequence_length=0"),
    (lambda: m.LSTM(0), r"hidden_size=0"),
    (lambda: m.KernelizedSVM(m.Relu()), r"inputs input1 and input2"),
    (lambda: m.MDS(2, "angles"), r"input_type='angles'"),
    (lambda: m.TSNE(2, "points", calculate_p_joint=False), r"input_type='points'"),
    (lambda: m.F1(), r"n_classes=None"),
    (lambda: m.Accuracy(is_binary=True, is_pred_one_hot=False), r"needs a threshold"),
    (lambda: m.Accuracy(threshold=0.5), r"threshold=0\.5 is only used"),
    (lambda: m.MixtureOfExperts(4, 6, 0), r"num_experts=0"),
    (lambda: m.Experts(4, 6, 0), r"count=0"),
    (lambda: m.Experts(4, 6, 2, router="hash"), r"router='hash'"),
    (lambda: m.Layer(3), r"activation=3"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ml.WiringError, match=message):
        make()


def test_names() -> None:
    """Everything is reached from the guide's module, and from the top."""
    from capibara.compose.models import Linear, Model

    assert ml.models.Linear is Linear is ml.Linear
    assert Model is ml.Model
    assert ml.models.Precision is not ml.Precision
    for name in ml.models.__all__:
        assert callable(getattr(ml.models, name))
    assert ml.models.Exponential is ml.primitives.Exp
    assert ml.models.Clamp is ml.Clip

"""``import mithril``: code written for that library, its names and its layout of parameters, against NumPy.

Every model here is written as Mithril's users write theirs (``connect``, ``|=``, ``+=``, flat names of parameters);
what it should compute is computed beside it in NumPy, from the same arrays in that library's layout.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest

from capibara.compose import CompileError, InputError, WiringError

# Imported as a user does, but for the type checker, which reads whichever mithril is installed.
ml: Any = import_module("mithril")
slots: Any = import_module("mithril.utils.utils")
models: Any = ml.models
MLP = models.MLP
Add = models.Add
Arange = models.Arange
Buffer = models.Buffer
Concat = models.Concat
Convolution2D = models.Convolution2D
Divide = models.Divide
Embedding = models.Embedding
EncoderDecoder = models.EncoderDecoder
Gelu = models.Gelu
GroupNorm = models.GroupNorm
LayerNorm = models.LayerNorm
Linear = models.Linear
LinearSVM = models.LinearSVM
LSTMCell = models.LSTMCell
ManyToOne = models.ManyToOne
Mean = models.Mean
Model = models.Model
Multiply = models.Multiply
PolynomialFeatures = models.PolynomialFeatures
PolynomialKernel = models.PolynomialKernel
Power = models.Power
Relu = models.Relu
Reshape = models.Reshape
RNNCell = models.RNNCell
Sigmoid = models.Sigmoid
Split = models.Split
SquaredError = models.SquaredError
Tanh = models.Tanh
TrainModel = models.TrainModel

BACKENDS = ["JaxBackend", "NumpyBackend", "TorchBackend"]

# The blocks of the published library, by its own list.
PUBLISHED = """
AUC AUCCore Absolute AbsoluteError Accuracy Activation Add Arange ArgMax ArgMin AtLeast1D AvgPool2D
BatchNorm2D BinaryCrossEntropy BroadcastTo Buffer CartesianDifference Cast Cell Cholesky Clamp Concat
Convolution1D Convolution2D Cosine CrossEntropy CustomPrimitiveModel DistanceMatrix Divide Dtype Eigvalsh
ElementWiseAffine Embedding EncoderDecoder EncoderDecoderInference EncoderDistanceMatrix Equal Exponential
Eye EyeComplement F1 Flatten Floor FloorDivide GPRAlpha GPRLoss GPRVOuter GaussProcessRegressionCore Gelu
Greater GreaterEqual GroupNorm HingeLoss IOKey Indexer IsNan Item KLDivergence KernelizedSVM L1 L2 LSTMCell
LSTMCellBody Layer LayerNorm LeakyRelu Length Less LessEqual Linear LinearSVM Log LogicalAnd LogicalNot
LogicalOr LogicalXOr LogisticRegression MDS MDSCore MLP ManyToOne MatrixMultiply Max MaxPool1D MaxPool2D
Maximum Mean Metric Min Minimum Model Multiply NanToNum Negate NormModifier NotEqual OneToMany
OneToManyInference Ones Pad PaddingConverter1D PaddingConverter2D PermuteTensor PhysicalModel
PolynomialFeatures PolynomialKernel PolynomialRegression PositionalEncoding Power Precision
PrimitiveAvgPool2D PrimitiveConvolution1D PrimitiveConvolution2D PrimitiveMaxPool1D PrimitiveMaxPool2D
PrimitiveModel PrimitiveRandInt PrimitiveRandn PrimitiveUnion Prod QuadHingeLoss QuadraticFormRegularizer
QuantileLoss RBFKernel RNN RNNCell RandInt Randn Recall Relu Reshape ScaledDotProduct Shape ShiftLeft
ShiftRight SiLU Sigmoid Sign Sine Size Slice Softmax Softplus Split Sqrt Square SquaredError Squeeze
StableReciprocal StrideConverter Subtract Sum SwapAxes TSNE TSNECore Tanh TensorToList ToList ToTensor
ToTuple TrainModel Transpose TransposedDiagonal Trapezoid TsnePJoint TupleConverter Unique Variance Where
ZerosLike
"""


def made(name: str) -> Any:
    if name == "TorchBackend":
        pytest.importorskip("torch")
    return getattr(ml, name)()


def draw(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype("float32")


def two_layers() -> Any:
    model = Model()
    model |= Linear(dimension=4).connect(input="input")
    model += Tanh()
    model += Linear(dimension=2).connect(output="output")
    return model


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_network_of_two_layers_with_flat_names_and_rows_of_outputs(backend: Any):
    backend = made(backend)
    compiled = ml.compile(two_layers(), backend, shapes={"input": [3, 5]}, jit=False)
    shapes = {"weight_0": (4, 5), "bias_0": (4,), "weight_1": (2, 4), "bias_1": (2,)}
    assert {k: tuple(v.shape) for k, v in compiled.randomize_params().items()} == shapes
    p = {key: draw(*shape, seed=i) for i, (key, shape) in enumerate(shapes.items())}
    x, cotangent = draw(3, 5, seed=7), draw(3, 2, seed=8)
    given = {key: backend.array(value) for key, value in p.items()}
    outputs, gradients = compiled.evaluate(
        given, {"input": backend.array(x)}, output_gradients={"output": backend.array(cotangent)}
    )
    hidden = np.tanh(x @ p["weight_0"].T + p["bias_0"])
    back = (cotangent @ p["weight_1"]) * (1 - hidden**2)
    wanted = {
        "weight_1": cotangent.T @ hidden,
        "bias_1": cotangent.sum(0),
        "weight_0": back.T @ x,
        "bias_0": back.sum(0),
    }
    np.testing.assert_allclose(
        outputs["output"], hidden @ p["weight_1"].T + p["bias_1"], rtol=1e-5, atol=1e-5
    )
    assert gradients.keys() == wanted.keys()
    for key, value in wanted.items():
        np.testing.assert_allclose(gradients[key], value, rtol=1e-4, atol=1e-5)


def test_names_are_the_authors_where_there_are_any_and_places_if_asked_for():
    inner = Model(name="block")
    inner |= Linear(3, name="fc").connect(input="input", weight="w")
    inner += Relu()
    inner += Linear(4)
    inner += Linear(4)
    model = Model()
    model |= inner.connect(input="input")
    model += MLP(activations=[Relu(), Buffer()], dimensions=[3, 2])
    short = ml.compile(model, ml.NumpyBackend(), shapes={"input": [2, 5]})
    assert set(short.randomize_params()) == {
        *("w", "bias_0", "weight_0", "bias_1", "weight_1", "bias_2"),
        *("weight0", "bias0", "weight1", "bias1"),
    }
    long = ml.compile(model, ml.NumpyBackend(), shapes={"input": [2, 5]}, use_short_namings=False)
    assert set(long.randomize_params()) == {
        *("block_w", "block_fc_bias", "block_linear_0_weight", "block_linear_0_bias"),
        *("block_linear_1_weight", "block_linear_1_bias"),
        *("mlp_weight0", "mlp_bias0", "mlp_weight1", "mlp_bias1"),
    }
    assert short.input_keys == long.input_keys == ["input"]
    assert set(model.wires) == {"input", "output"}  # compiling named nothing for good


def test_branches_that_are_connected_by_name():
    model = Model()
    first, second = two_layers(), two_layers()
    model |= first.connect(output="left")
    model |= second.connect(input="other", output="right")
    model |= Add().connect("left", "right", "sum")
    model |= Divide().connect(numerator="sum", denominator=2.0, output=ml.IOKey("half"))
    compiled = ml.compile(model, ml.NumpyBackend(), shapes={"input": [1, 3], "other": [1, 3]})
    params, x = compiled.randomize_params(), draw(1, 3)
    out = compiled.evaluate(params, {"input": x, "other": x})["half"]

    def run(i: int) -> np.ndarray[Any, Any]:
        hidden = np.tanh(x @ params[f"weight_{i}"].T + params[f"bias_{i}"])
        return hidden @ params[f"weight_{i + 1}"].T + params[f"bias_{i + 1}"]

    np.testing.assert_allclose(out, (run(0) + run(2)) / 2, rtol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_with_constants_and_the_gradient_of_the_cost(backend: Any):
    backend = made(backend)
    x, y = draw(8, 3), draw(8, 1)
    train = TrainModel(Linear(1))
    train.add_loss(SquaredError(), input="output", target="target", reduce_steps=[Mean()])
    train.add_regularization(models.L2(), 0.1, input="weight")
    data = {"input": backend.array(x), "target": backend.array(y)}
    compiled = ml.compile(train, backend, constant_keys=data, jit=False)
    assert sorted(compiled.output_keys) == ["final_cost", "output"]
    w, b = draw(1, 3, seed=3), draw(1, seed=4)
    params = {"weight": backend.array(w), "bias": backend.array(b)}
    outputs, gradients = compiled.evaluate(params, output_gradients=True)
    error = x @ w.T + b - y
    # The penalty is divided by the number of elements that the loss is averaged over.
    cost = (error**2).mean() + 0.1 * 0.5 * (w**2).sum() / error.size
    np.testing.assert_allclose(outputs["final_cost"], cost, rtol=1e-5)
    np.testing.assert_allclose(gradients["weight"], 2 * error.T @ x / 8 + 0.1 * w / 8, rtol=1e-4, atol=1e-6)
    again, _ = compiled.evaluate(params, data, output_gradients=True)  # constants given again are ignored
    np.testing.assert_allclose(again["final_cost"], outputs["final_cost"])
    np.testing.assert_allclose(compiled.evaluate_gradients(params)["bias"], gradients["bias"])


def test_an_output_size_that_only_the_target_says():
    train = TrainModel(ManyToOne(RNNCell(), 2))
    train.add_loss(SquaredError(), input="output1", target="target", reduce_steps=[Mean()])
    data = {f"input{i}": draw(2, 1, 3, seed=i) for i in range(2)}
    data |= {"initial_hidden": draw(2, 1, 4), "target": draw(2, 1, 5)}
    compiled = ml.compile(train, ml.NumpyBackend(), constant_keys=data)
    p = compiled.randomize_params()
    assert {k: v.shape for k, v in p.items()} == {
        "w_ih": (4, 3),
        "w_hh": (4, 4),
        "w_ho": (5, 4),
        "bias_h": (4,),
        "bias_o": (5,),
    }
    hidden = data["initial_hidden"]
    for i in range(2):
        hidden = np.tanh(data[f"input{i}"] @ p["w_ih"].T + hidden @ p["w_hh"].T + p["bias_h"])
    output = hidden @ p["w_ho"].T + p["bias_o"]
    outputs = compiled.evaluate(p)
    np.testing.assert_allclose(outputs["output1"], output, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(outputs["final_cost"], ((output - data["target"]) ** 2).mean(), rtol=1e-5)


def test_sequences_of_different_lengths_through_an_encoder_and_a_decoder():
    backend = ml.NumpyBackend()
    samples = [(draw(n, 1, seed=n), backend.arange(m).reshape(-1, 1)) for n, m in ((2, 3), (3, 1), (1, 2))]
    inputs, ordered = slots.pack_data_into_time_slots(samples, backend)
    indices, targets, _ = slots.pack_data_into_time_slots(
        ordered, backend, key=("target",), index=1, return_indices=True
    )
    assert [inputs[f"input{i}"].shape[0] for i in range(3)] == [3, 2, 1]
    assert [targets[f"target{i}"].shape[0] for i in range(3)] == [3, 2, 1]
    assert indices == (1, 2, 0)
    train = TrainModel(EncoderDecoder(LSTMCell(), 3, 3, teacher_forcing=True))
    for i in range(3):
        train.add_loss(SquaredError(), reduce_steps=[Mean()], input=f"output{i}", target=f"target{i}")
    given = {
        key: backend.zeros(3, 1, 4) for key in ("initial_hidden", "initial_cell", "decoder_initial_cell")
    }
    given |= {"decoder_input": backend.zeros(3, 1, 1), "indices": backend.array(indices)}
    compiled = ml.compile(train, backend, constant_keys=given | inputs | targets)
    params = compiled.randomize_params()
    gates = {f"{kind}_{gate}" for kind in ("w", "bias") for gate in "fico"}
    assert set(params) == gates | {f"decoder_{key}" for key in (*gates, "w_out", "bias_out")}
    assert params["w_f"].shape == (4, 5)
    assert params["decoder_w_out"].shape == (1, 4)
    outputs, gradients = compiled.evaluate(params, output_gradients=True)
    assert gradients.keys() == params.keys()
    assert np.isfinite(outputs["final_cost"])
    back = slots.unpack_time_slot_data(backend, outputs, 3, 3, 1, "output", indices)
    for place, row in enumerate(indices):
        np.testing.assert_array_equal(back[row, 0], outputs["output0"][place, 0])


def test_parameters_of_images_have_four_dimensions():
    model = Model()
    model |= Convolution2D(3, 4, padding=1).connect(input="input")
    model += GroupNorm(2)
    compiled = ml.compile(model, ml.NumpyBackend(), shapes={"input": [1, 2, 5, 5]})
    params = compiled.randomize_params()
    image = (1, 4, 1, 1)
    shapes = {"weight_0": (4, 2, 3, 3), "bias_0": image, "weight_1": image, "bias_1": image}
    assert {k: v.shape for k, v in params.items()} == shapes
    params |= {"weight_1": draw(*image), "bias_1": draw(*image, seed=1), "bias_0": draw(*image, seed=2)}
    x = draw(1, 2, 5, 5)
    out = compiled.evaluate(params, {"input": x})["output"]
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    y = np.einsum("nchwij,ocij->nohw", windows, params["weight_0"]) + params["bias_0"]
    groups = y.reshape(1, 2, -1)
    y = (groups - groups.mean(-1, keepdims=True)) / np.sqrt(groups.var(-1, keepdims=True) + 1e-5)
    wanted = y.reshape(1, 4, 5, 5) * params["weight_1"] + params["bias_1"]
    np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)


def test_settings_are_given_when_a_block_is_made_or_when_it_is_connected():
    x = draw(3, 4)
    model = Model()
    model |= Mean(axis=0).connect(input="input", axis=1, output="mean")
    model |= Reshape().connect("input", shape=(2, 6), output="rows")
    model |= Concat(axis=1).connect(input=["rows", "rows"], output="wide")
    model |= Split(2, axis=-1).connect("input", "parts")
    model |= Buffer().connect(input=model.parts[1], output="second")
    model |= Power(exponent=2.0).connect(base="input", output="square")
    model |= PolynomialFeatures().connect(input="input", degree=2, output="products")
    model |= Arange(step=2).connect(stop=5, output="even")
    model.expose_keys("mean", "rows", "wide", "second", "square", "products", "even")
    out = ml.compile(model, ml.NumpyBackend(), shapes={"input": [3, 4]}).evaluate({}, {"input": x})
    np.testing.assert_allclose(out["mean"], x.mean(1), rtol=1e-6)
    np.testing.assert_array_equal(out["wide"], np.tile(x.reshape(2, 6), (1, 2)))
    np.testing.assert_array_equal(out["second"], x[:, 2:])
    np.testing.assert_allclose(out["square"], x**2, rtol=1e-6)
    assert out["products"].shape == (3, 14)
    assert out["even"].tolist() == [0, 2, 4]


def test_gelu_is_exact_and_coefficients_may_be_tensors():
    from math import erf

    x = draw(6)
    model = Model()
    model |= Gelu().connect(input="input", output="output")
    out = ml.compile(model, ml.NumpyBackend(), shapes={"input": [6]}).evaluate({}, {"input": x})["output"]
    np.testing.assert_allclose(out, [v * (1 + erf(v / 2**0.5)) / 2 for v in x.astype("float64")], rtol=1e-5)
    kernel = Model()
    ports = {"poly_coef": ml.Tensor(0.5), "degree": ml.Tensor(3.0)}
    kernel |= PolynomialKernel(robust=False).connect(input1="a", input2="b", output="output", **ports)
    a, b = draw(2, 3), draw(4, 3)
    compiled = ml.compile(kernel, ml.NumpyBackend(), shapes={"a": [2, 3], "b": [4, 3]})
    np.testing.assert_allclose(
        compiled.evaluate({}, {"a": a, "b": b})["output"], (a @ b.T + 0.5) ** 3, rtol=1e-4
    )


def test_functional_style_and_results_without_names():
    x = ml.IOKey("input")
    hidden = LayerNorm(name="norm")(input=x)
    inner = Model.create(Add()(left=Linear(4, name="fc")(input=hidden), right=x), name="inner")
    model = Model.create(inner(input=ml.IOKey("input", differentiable=False)) * 2)
    compiled = ml.compile(model, ml.NumpyBackend(), shapes={"input": [2, 4]}, use_short_namings=False)
    p = compiled.randomize_params()
    assert set(p) == {"inner_norm_weight", "inner_norm_bias", "inner_fc_weight", "inner_fc_bias"}
    v = draw(2, 4)
    normed = (v - v.mean(-1, keepdims=True)) / np.sqrt(v.var(-1, keepdims=True) + 1e-5)
    normed = normed * p["inner_norm_weight"] + p["inner_norm_bias"]
    wanted = 2 * (normed @ p["inner_fc_weight"].T + p["inner_fc_bias"] + v)
    np.testing.assert_allclose(compiled.evaluate(p, {"input": v})["output"], wanted, rtol=1e-4, atol=1e-5)


def test_several_outputs_of_a_call_are_several_connections():
    x = ml.IOKey("input")
    both = Model.create(twice=x * 2, thrice=x * 3)
    twice, thrice = both(input=ml.IOKey("input"))
    model = Model.create(output=thrice - twice)
    out = ml.compile(model, ml.NumpyBackend(), shapes={"input": [3]}).evaluate({}, {"input": draw(3)})
    np.testing.assert_allclose(out["output"], draw(3), rtol=1e-5)


def test_integers_are_taken_where_floats_are_wanted():
    compiled = ml.compile(LinearSVM(), ml.NumpyBackend(), shapes={"input": [2, 3]})
    params = compiled.randomize_params()
    assert params["weight"].shape == (1, 3)
    x = np.arange(6).reshape(2, 3)
    out = compiled.evaluate(params, {"input": x})
    np.testing.assert_allclose(out["output"], x @ params["weight"].T + params["bias"], rtol=1e-5)
    np.testing.assert_array_equal(out["decision_output"], np.sign(out["output"]))


def test_every_block_of_the_published_library_is_there_or_says_what_to_use():
    assert [name for name in PUBLISHED.split() if not hasattr(models, name)] == []
    for name in models.refused.INSTEAD:
        with pytest.raises(WiringError, match=rf"(?s)^{name}: got .* Use "):
            getattr(models, name)()


def test_backends_are_composes_with_the_names_of_the_library():
    for name, kind in (("JaxBackend", "jax"), ("NumpyBackend", "numpy")):
        backend = made(name)
        assert backend.backend_type == kind
        assert isinstance(backend, ml.Backend)
        assert isinstance(backend.ones([2, 3]), backend.DataType)
    assert ml.Backend[ml.DataType] is ml.Backend
    assert ml.types.Dtype.float32 is ml.float32
    assert ml.float is ml.float32
    assert ml.short is ml.int16


def test_a_mesh_for_pytorch_is_said_to_do_nothing():
    assert made("TorchBackend").backend_type == "torch"
    with pytest.warns(UserWarning, match="not sharded here"):
        backend = ml.TorchBackend(device_mesh=(2, 1))
    with pytest.warns(UserWarning, match="not sharded here"):
        assert backend.ones(4, 2, device_mesh=(2, 1)).shape == (4, 2)


def test_what_is_wrong_is_said():
    with pytest.raises(WiringError, match=r"axis is .*expected a value that is known"):
        Mean().connect(input="input", axis="axis")
    with pytest.raises(WiringError, match="Reshape: shape is open"):
        Reshape().connect(input="input")
    with pytest.raises(WiringError, match="has no port 'weigth'"):
        Linear(3).connect(weigth="w")
    with pytest.raises(WiringError, match="twice, by place and by name"):
        Linear(3).connect("input", input="other")
    with pytest.raises(WiringError, match="at most input, output"):
        Relu().connect("a", "b", "c")
    with pytest.raises(WiringError, match=r"inference: got False.*compose.BatchNorm2D"):
        models.BatchNorm2D(inference=False)
    with pytest.raises(WiringError, match="activations: got 1, expected one for each of the 2"):
        MLP(activations=[Relu()], dimensions=[3, 4])
    for absent in (ml.MlxBackend, ml.CBackend, ml.GGMLBackend):
        with pytest.raises(CompileError, match=r"Backend: got .* Use "):
            absent()
    compiled = ml.compile(two_layers(), ml.NumpyBackend(), shapes={"input": [3, 5]})
    with pytest.raises(InputError, match="output_gradients: got True, expected a dict"):
        compiled.evaluate(compiled.randomize_params(), {"input": draw(3, 5)}, output_gradients=True)


def test_connections_beyond_the_ports_and_twice_are_refused_in_a_call_as_in_connect():
    for place in (
        lambda *a, **k: ml.models.Relu()(*a, **k),
        lambda *a, **k: ml.models.Relu().connect(*a, **k),
    ):
        with pytest.raises(WiringError, match="got 3 connections"):
            place(ml.IOKey("x"), ml.IOKey("y"), ml.IOKey("z"))
        with pytest.raises(WiringError, match="twice"):
            place(ml.IOKey("x"), input="y")


def test_embeddings_and_gates():
    model = Model()
    model |= Embedding(7, 3).connect("ids", output="rows")
    model |= Sigmoid().connect("rows", output="gate")
    model |= Multiply().connect("rows", "gate", "output")
    compiled = ml.compile(model, ml.NumpyBackend(), shapes={"ids": [4]}, data_keys={"ids"})
    params, ids = compiled.randomize_params(), np.array([1, 6, 0, 1])
    rows = params["weight"][ids]
    out = compiled.evaluate(params, {"ids": ids})["output"]
    np.testing.assert_allclose(out, rows / (1 + np.exp(-rows)), rtol=1e-5)


def test_attention_is_causal_unless_told_otherwise_and_any_name_will_do():
    model = Model()
    inner = Model(name="0")
    inner |= Linear(4, name="q-1").connect("input", output="query")
    attend = models.ScaledDotProduct().connect(query="query", key="input", value="input", output="output")
    inner |= attend
    model |= inner.connect(input="input", output="causal")
    full = models.ScaledDotProduct(is_causal=False)(query="input", key="input", value="input")
    model |= Buffer().connect(full, output="whole")
    compiled = ml.compile(model, ml.NumpyBackend(), shapes={"input": [3, 4]}, use_short_namings=False)
    p, x = compiled.randomize_params(), draw(3, 4)
    assert set(p) == {"n0_q_1_weight", "n0_q_1_bias"}
    out = compiled.evaluate(p, {"input": x})
    query = x @ p["n0_q_1_weight"].T + p["n0_q_1_bias"]

    def attention(query: Any, mask: Any) -> Any:
        scores = np.where(mask, query @ x.T / 2, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ x

    np.testing.assert_allclose(out["causal"], attention(query, np.tri(3, dtype=bool)), rtol=1e-5)
    np.testing.assert_allclose(out["whole"], attention(x, np.ones((3, 3), bool)), rtol=1e-5)


def test_settings_that_are_words():
    x, label = draw(4, 3), np.array([0, 2, 1, 0])
    shares = np.exp(x) / np.exp(x).sum(-1, keepdims=True)
    model = Model()
    loss = models.CrossEntropy(input_type="probs")
    model |= loss.connect(input="input", target="target", output="loss")
    model |= models.Cast(dtype=ml.int16).connect("input", output="cut")
    model |= Convolution2D(3, 1, padding="same").connect(input="image", output="same")
    shapes = {"input": [4, 3], "target": [4], "image": [1, 1, 5, 5]}
    compiled = ml.compile(model, ml.NumpyBackend(), shapes=shapes)
    given = {"input": shares, "target": label, "image": draw(1, 1, 5, 5)}
    out = compiled.evaluate(compiled.randomize_params(), given)
    np.testing.assert_allclose(out["loss"], -np.log(shares[range(4), label]), rtol=1e-5)
    np.testing.assert_array_equal(out["cut"], 0)
    assert out["same"].shape == (1, 1, 5, 5)


def test_sizes_are_connections():
    model = Model(name="heads")
    model |= Linear(6, name="qkv").connect("input", output="wide")
    sizes = model.input.shape
    model |= Split(3, axis=-1).connect(model.wide, output="parts")
    parts = [model.parts[i].reshape((sizes[0], sizes[1], 2, -1)).transpose((0, 2, 1, 3)) for i in range(3)]
    attend = models.ScaledDotProduct(is_causal=False)
    model |= attend.connect(query=parts[0], key=parts[1], value=parts[2], output="mixed")
    model |= Buffer().connect(model.mixed.transpose((0, 2, 1, 3)).reshape(sizes[:3]), output="output")
    compiled = ml.compile(model, ml.NumpyBackend(), shapes={"input": [2, 3, 2]})
    p, x = compiled.randomize_params(), draw(2, 3, 2)
    wide = x @ p["weight"].T + p["bias"]
    q, k, v = (part.reshape(2, 3, 2, 1).swapaxes(1, 2) for part in np.split(wide, 3, -1))
    weights = np.exp(q @ k.swapaxes(-1, -2))
    mixed = weights / weights.sum(-1, keepdims=True) @ v
    wanted = mixed.swapaxes(1, 2).reshape(2, 3, 2)
    np.testing.assert_allclose(compiled.evaluate(p, {"input": x})["output"], wanted, rtol=1e-4)

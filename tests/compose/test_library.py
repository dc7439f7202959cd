"""Every block of the library against NumPy in float64, and what each refuses to be made with."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import numpy_decoder as oracle
import pytest

from capibara import compose as ml


def compiled(block: ml.Block, **shapes: Any) -> ml.CompiledModel:
    return ml.compile(block, shapes=shapes or None)


def drawn(specs: dict[Any, Any], seed: int = 0) -> dict[str, Any]:
    """An array for each spec of known shape, in float32 (the oracle reads the same numbers in float64)."""
    rng = np.random.default_rng(seed)
    tree: dict[str, Any] = {}
    for path, spec in specs.items():
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = (0.5 * rng.normal(size=spec.shape) + (path[-1] == "scale")).astype("float32")
    return tree


def inputs(*shape: int, seed: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def check(
    block: ml.Block, x: np.ndarray, want: Callable[[np.ndarray, Any], np.ndarray], **shapes: Any
) -> Any:
    model = compiled(block, **shapes)
    params = drawn(model.params)
    got = jax.jit(lambda p, x: model.apply(p, {"input": x})["output"])(params, x)
    expected = want(x.astype("float64"), oracle.as_float64(params))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    return model


def shapes_and_axes(model: ml.CompiledModel) -> dict[str, Any]:
    return {".".join(path): (spec.shape, spec.axes) for path, spec in model.params.items()}


@pytest.mark.parametrize("batch", [(), (3,), (2, 0), (2, 3)])
def test_linear(batch: tuple[int, ...]) -> None:
    model = check(
        ml.Linear(4, axes=("embed", "mlp")),
        inputs(*batch, 5),
        lambda x, p: x @ p["weight"] + p["bias"],
        input=(..., 5),
    )
    assert shapes_and_axes(model) == {"weight": ((5, 4), ("embed", "mlp")), "bias": ((4,), ("mlp",))}


def test_linear_without_bias_takes_its_size_from_what_follows() -> None:
    model = ml.Model()
    model |= ml.Linear(None, False, name="first")(input="x", output="h")
    model |= ml.Linear(3, name="second")(input="h", output="y")
    model.set_shapes(x=(None, 2), h=(None, 7))
    assert shapes_and_axes(ml.compile(model)) == {
        "first.weight": ((2, 7), (None, None)),
        "second.weight": ((7, 3), (None, None)),
        "second.bias": ((3,), (None,)),
    }


def test_embedding() -> None:
    model = compiled(ml.Embedding(6, 4))
    params = drawn(model.params)
    indices = np.array([[0, 5, 2], [3, 3, 1]], "int32")
    got = model.apply(params, {"input": indices})["output"]
    np.testing.assert_array_equal(got, params["weight"][indices])
    assert shapes_and_axes(model) == {"weight": ((6, 4), ("vocab", "embed"))}
    # Out of range is clipped, as the lookup says.
    np.testing.assert_array_equal(
        model.apply(params, {"input": np.array([-3, 99], "int32")})["output"], params["weight"][[0, 5]]
    )
    with pytest.raises(ml.InputError, match=r"inputs\['input'\] has dtype float32, expected int32"):
        model.apply(params, {"input": inputs(2)})


@pytest.mark.parametrize("epsilon", [1e-5, 0.1])
def test_norms(epsilon: float) -> None:
    x = 1000 + 30 * inputs(2, 3, 7)
    check(
        ml.RMSNorm(epsilon, axis="embed"),
        x,
        lambda x, p: oracle.rms_norm(x, p["scale"], epsilon),
        input=(..., 7),
    )
    model = check(
        ml.LayerNorm(epsilon, axis="embed"),
        inputs(2, 3, 7),
        lambda x, p: oracle.layer_norm(x, p["scale"], p["bias"], epsilon),
        input=(..., 7),
    )
    assert shapes_and_axes(model) == {"scale": ((7,), ("embed",)), "bias": ((7,), ("embed",))}


def test_norms_of_zeros_are_finite() -> None:
    for block in (ml.RMSNorm(), ml.LayerNorm()):
        model = compiled(block, input=(2, 3))
        zero = np.zeros((2, 3), "float32")
        params = drawn(model.params)
        gradient = jax.grad(lambda x, m=model, p=params: m.apply(p, {"input": x})["output"].sum())(zero)
        assert np.isfinite(gradient).all()


def test_norms_of_bfloat16_are_summed_in_float32() -> None:
    policy = ml.Precision("float32", "bfloat16", "float32")
    model = ml.compile(ml.RMSNorm(0.0), ml.JaxBackend(policy=policy), shapes={"input": (1, 4096)})
    x = np.full((1, 4096), 1.5, "float32")
    # In bfloat16 a running sum of 4096 equal terms stops growing; in float32 the mean is exact.
    got = model.apply({"scale": np.ones(4096, "float32")}, {"input": x})["output"]
    assert str(got.dtype) == "bfloat16"
    np.testing.assert_array_equal(np.asarray(got, "float32"), 1.0)


@pytest.mark.parametrize("dimension", [5, None])
def test_swiglu(dimension: int | None) -> None:
    model = check(ml.SwiGLU(6, dimension), inputs(2, 3, 5), oracle.swiglu, input=(..., 5))
    assert shapes_and_axes(model) == {
        "gate.weight": ((5, 6), ("embed", "mlp")),
        "up.weight": ((5, 6), ("embed", "mlp")),
        "down.weight": ((6, 5), ("mlp", "embed")),
    }


def layered(activations: list[Callable[[np.ndarray], np.ndarray]]) -> Any:
    def run(x: np.ndarray, p: Any) -> np.ndarray:
        for i, activation in enumerate(activations):
            x = activation(x @ p[f"layer_{i}"]["weight"] + p[f"layer_{i}"]["bias"])
        return x

    return run


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def same(x: np.ndarray) -> np.ndarray:
    return x


def test_mlp_of_sizes() -> None:
    model = check(ml.MLP(4, [6, 5], 3), inputs(2, 4), layered([relu, relu, same]))
    assert model.params[("layer_1", "weight")].shape == (6, 5)
    check(ml.MLP(4, [6], 3, activation=ml.Tanh), inputs(2, 4), layered([np.tanh, same]))
    check(ml.MLP(4, [], 3), inputs(2, 4), layered([same]))


def test_mlp_of_activations() -> None:
    block = ml.MLP(activations=[ml.Relu(), ml.Tanh, None], dimensions=[6, 5, 2])
    check(block, inputs(2, 4), layered([relu, np.tanh, same]), input=(..., 4))
    last = ml.MLP(activations=[ml.Square()], dimensions=[3])
    check(last, inputs(2, 4), layered([np.square]), input=(..., 4))


ELEMENTWISE: dict[Callable[[], ml.Block], Callable[[np.ndarray], np.ndarray]] = {
    ml.Relu: relu,
    ml.Silu: oracle.silu,
    ml.Sigmoid: lambda x: 1 / (1 + np.exp(-x)),
    ml.Tanh: np.tanh,
    ml.Softplus: oracle.softplus,
    ml.Gelu: lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    ml.Exp: np.exp,
    ml.Square: np.square,
    ml.Absolute: np.abs,
    ml.Decay: lambda x: -np.exp(x),
    ml.Softmax: oracle.softmax,
}


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda k: k.__name__)
def test_elementwise(kind: Callable[[], ml.Block]) -> None:
    x = 3 * inputs(3, 5)
    got = compiled(kind()).apply({}, {"input": x})["output"]
    np.testing.assert_allclose(got, ELEMENTWISE[kind](x.astype("float64")), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [ml.Add, ml.Subtract, ml.Multiply, ml.Divide])
def test_binary(kind: Callable[[], ml.Block]) -> None:
    left, right = inputs(2, 1, 3), inputs(4, 1, seed=2) + 3
    want = {ml.Add: np.add, ml.Subtract: np.subtract, ml.Multiply: np.multiply, ml.Divide: np.divide}[kind]
    got = compiled(kind()).apply({}, {"left": left, "right": right})["output"]
    np.testing.assert_allclose(got, want(left, right), rtol=1e-6)


@pytest.mark.parametrize("axis", [None, 0, -1, 1])
def test_reductions_and_joins(axis: int | None) -> None:
    x = inputs(2, 3, 4)
    for kind, want in ((ml.Sum, np.sum), (ml.Mean, np.mean)):
        model = compiled(kind(axis), input=(2, 3, 4))
        got = model.apply({}, {"input": x})["output"]
        np.testing.assert_allclose(got, want(x, axis=axis), rtol=1e-5, atol=1e-6)
        assert model.shapes["output"] == got.shape
    if axis is not None:
        got = compiled(ml.Concat(2, axis)).apply({}, {"input_0": x, "input_1": 2 * x})["output"]
        np.testing.assert_array_equal(got, np.concatenate([x, 2 * x], axis))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window"),
    [(4, None, None, None), (4, 2, None, None), (4, 1, 6, None), (2, 2, 4, 3)],
)
def test_self_attention(heads: int, kv_heads: int | None, head_dim: int | None, window: int | None) -> None:
    size = head_dim or 8 // heads
    model = compiled(ml.SelfAttention(8, heads, kv_heads, head_dim, window=window))
    table = compiled(ml.RotaryTable(size, 100.0))
    params = drawn(model.params)
    x = inputs(2, 6, 8)

    def run(params: Any) -> Any:
        angles = table.apply({}, {"positions": np.arange(6, dtype="int32")})
        return model.apply(params, {"input": x, **angles})["output"]

    wide = oracle.as_float64(params)
    want = oracle.attention(x.astype("float64"), wide, 100.0, window)
    np.testing.assert_allclose(jax.jit(run)(params), want, rtol=2e-5, atol=2e-5)
    assert shapes_and_axes(model) == {
        "query.weight": ((8, heads, size), ("embed", "heads", "head_dim")),
        "key.weight": ((8, kv_heads or heads, size), ("embed", "kv_heads", "head_dim")),
        "value.weight": ((8, kv_heads or heads, size), ("embed", "kv_heads", "head_dim")),
        "out.weight": ((heads, size, 8), ("heads", "head_dim", "embed")),
    }


PLAIN = SimpleNamespace(groups=1, activation="silu", norm=True, step_min=0.0, step_max=None)


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_state_space(chunk: int) -> None:
    check(
        ml.StateSpace(6, 3, 4, 2, 3, chunk, epsilon=0.01),
        inputs(2, 7, 6),
        lambda x, p: oracle.state_space(x, p, PLAIN, 0.01),
    )


@pytest.mark.parametrize("norm", [True, False])
def test_state_space_in_groups(norm: bool) -> None:
    settings = SimpleNamespace(groups=3, activation="relu", norm=norm, step_min=0.5, step_max=1.0)
    block = ml.StateSpace(
        6,
        5,
        2,
        groups=3,
        activation=ml.Relu,
        use_bias=True,
        conv_bias=False,
        step_limits=(0.5, 1.0),
        norm=norm,
        epsilon=0.01,
    )
    check(block, inputs(2, 7, 6), lambda x, p: oracle.state_space(x, p, settings, 0.01))
    model = compiled(block)
    assert shapes_and_axes(model)["write.weight"] == ((6, 3, 5), ("embed", "kv_heads", "state"))
    assert shapes_and_axes(model)["write.bias"] == ((3, 5), ("kv_heads", "state"))
    assert shapes_and_axes(model)["read_conv.weight"] == ((4, 3, 5), ("conv", "kv_heads", None))


def test_state_space_forgets_and_remembers() -> None:
    """What a later input does never reaches an earlier output; what an earlier one does reaches all later ones."""
    model = compiled(ml.StateSpace(4, 3, 4, 2, 2, 4))
    params = drawn(model.params)
    run = jax.jit(lambda x: model.apply(params, {"input": x})["output"])
    x = inputs(1, 9, 4)
    other = x.copy()
    other[0, 4] += 1
    change = np.abs(np.asarray(run(x) - run(other)))[0].max(-1)
    assert (change[:4] == 0).all()
    assert (change[4:] > 0).all()


def test_vector_quantiser() -> None:
    model = compiled(ml.VectorQuantiser(5, 4, commitment_weight=0.5))
    assert not model.params
    state = model.init_state()
    codebook = np.asarray(state["codebook"], "float64")
    x = inputs(2, 3, 4)
    out, after = model.apply({}, {"input": x}, state=state)
    index = oracle.nearest(x.astype("float64").reshape(-1, 4), codebook)
    codes = codebook[index].reshape(x.shape)
    np.testing.assert_array_equal(out["indices"], index.reshape(2, 3))
    assert out["indices"].dtype == np.int32
    np.testing.assert_allclose(out["output"], codes, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out["commitment"], 0.5 * ((x - codes) ** 2).mean(), rtol=1e-5)
    share = np.bincount(index, minlength=5) / index.size
    np.testing.assert_allclose(out["usage"], np.mean(share > 0), rtol=1e-6)
    np.testing.assert_allclose(out["perplexity"], np.exp(-sum(s * np.log(s) for s in share if s)), rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, state, after)
    assert model.state_axes == {
        "codebook": ("codes", "embed"),
        "cluster_size": ("codes",),
        "codebook_sum": ("codes", "embed"),
    }
    # Straight through: the gradient of the output is that of the input, the commitment's pulls to the code.
    gradient = jax.grad(lambda x: model.apply({}, {"input": x}, state=state)[0]["output"].sum())(x)
    np.testing.assert_allclose(gradient, 1.0)
    gradient = jax.grad(lambda x: model.apply({}, {"input": x}, state=state)[0]["commitment"])(x)
    np.testing.assert_allclose(gradient, 0.5 * 2 * (x - codes) / x.size, rtol=1e-4, atol=1e-7)


# ---- what is refused -------------------------------------------------------------------------------------

BAD: list[tuple[Callable[[], Any], str]] = [
    (lambda: ml.Linear(0), r"dimension=0 must be an integer of at least 1"),
    (lambda: ml.Linear(2.5), r"dimension=2\.5"),  # type: ignore[arg-type]
    (lambda: ml.Linear(True), r"dimension=True"),
    (lambda: ml.Linear(4, init=5), r"init=5 must be a function"),  # type: ignore[arg-type]
    (lambda: ml.Linear(4, axes=("embed",)), r"1 axis names \('embed',\) for the 2 dimensions"),  # type: ignore[arg-type]
    (lambda: ml.Linear(4, name="a b"), r"name='a b'"),
    (lambda: ml.Embedding(0, 4), r"vocab_size=0"),
    (lambda: ml.Embedding(4, "8"), r"dimension='8'"),  # type: ignore[arg-type]
    (lambda: ml.RMSNorm(-1.0), r"epsilon=-1\.0 must be a number at least 0"),
    (lambda: ml.LayerNorm(float("nan")), r"epsilon=nan"),
    (lambda: ml.SwiGLU(0), r"hidden=0"),
    (lambda: ml.MLP(), r"needs either"),
    (lambda: ml.MLP(3, [2], 1, dimensions=[2]), r"needs either"),
    (lambda: ml.MLP(3, [0], 1), r"size=0"),
    (lambda: ml.MLP(3, 5, 1), r"hidden_sizes=5 must be a list"),  # type: ignore[arg-type]
    (lambda: ml.MLP(3, [2], 1, activation=ml.Relu()), r"activation=.*block class such as Relu"),  # type: ignore[arg-type]
    (
        lambda: ml.MLP(activations=[ml.Relu()], dimensions=[1, 2]),
        r"activations has 1 entries, dimensions has 2",
    ),
    (lambda: ml.MLP(activations=[3], dimensions=[1]), r"activations=3"),  # type: ignore[list-item]
    (lambda: ml.MLP(dimensions=[]), r"at least one layer"),
    (lambda: ml.SelfAttention(0, 2), r"dimension=0"),
    (lambda: ml.SelfAttention(8, 0), r"num_heads=0"),
    (lambda: ml.SelfAttention(8, 4, 3), r"num_kv_heads=3 does not divide num_heads=4"),
    (lambda: ml.SelfAttention(8, 4, 0), r"num_kv_heads=0"),
    (lambda: ml.SelfAttention(9, 4), r"num_heads=4 does not divide dimension=9"),
    (lambda: ml.SelfAttention(8, 2, head_dim=3), r"head_dim=3 must be even"),
    (lambda: ml.SelfAttention(8, 2, head_dim=0), r"head_dim=0"),
    (lambda: ml.SelfAttention(8, 2, window=0), r"window=0"),
    (lambda: ml.SelfAttention(8, 2, causal=False, cached=True), r"causal=False has no cache"),
    (lambda: ml.SelfAttention(8, 2, softcap=0.0), r"softcap=0\.0 must be a number above 0"),
    (lambda: ml.StateSpace(8, 4, 3), r"head_dim=3 does not divide the inner size 16"),
    (lambda: ml.StateSpace(8, 4, 0), r"head_dim=0"),
    (lambda: ml.StateSpace(8, 4, 4, groups=3), r"groups=3 does not divide the number of heads, 4"),
    (lambda: ml.StateSpace(8, 4, 4, step_limits=(2.0, 1.0)), r"low=2.0 is above high=1.0"),
    (lambda: ml.Normalise("layer", groups=2), r"groups=2 must be 1 for kind='layer'"),
    (lambda: ml.StateSpace(8, 0, 4), r"state_dim=0"),
    (lambda: ml.StateSpace(8, 4, 4, 0), r"expand=0"),
    (lambda: ml.StateSpace(8, 4, 4, 2, 0), r"conv_width=0"),
    (lambda: ml.StateSpace(8, 4, 4, 2, 2, 0), r"chunk_size=0"),
    (lambda: ml.VectorQuantiser(0, 4), r"codebook_size=0"),
    (lambda: ml.VectorQuantiser(4, 0), r"dimension=0"),
    (lambda: ml.VectorQuantiser(4, 4, 1.5), r"decay=1\.5 must be a number at least 0 and at most 1"),
    (lambda: ml.VectorQuantiser(4, 4, commitment_weight=-1.0), r"commitment_weight=-1\.0"),
    (lambda: ml.VectorQuantiser(4, 4, dead_code_threshold=-1.0), r"dead_code_threshold=-1\.0"),
    (lambda: ml.Dropout(1.0), r"rate=1\.0 must be a number at least 0 and below 1"),
    (lambda: ml.Dropout("0.1"), r"rate='0\.1'"),  # type: ignore[arg-type]
    (lambda: ml.RotaryTable(3), r"dim=3.*even"),
    (lambda: ml.RotaryTable(4, 0.0), r"theta=0\.0"),
    (lambda: ml.Cast("float23"), r"dtype='float23' must be one of .*float32"),
    (lambda: ml.Sum("0"), r"axis='0' must be an integer or None"),  # type: ignore[arg-type]
    (lambda: ml.Concat(0), r"count=0"),
    (lambda: ml.Repeat(ml.Linear(2), 0), r"count=0"),
    (lambda: ml.Remat(ml.Relu(), "some"), r"remat='some'"),
    (
        lambda: ml.Model().add_input("x", kind="complex"),
        r"kind='complex' must be one of 'float', 'int', 'bool'",
    ),
    (lambda: ml.Model().add_input("x", 3), r"shape 3 is not a row of sizes"),
    (
        lambda: ml.Model().add(ml.Relu(), "x; import os", input="x"),
        r"name='x; import os' is not a name for a block",
    ),
    (lambda: ml.compile(ml.Relu(), "cpu"), r"backend='cpu' must be a JaxBackend"),  # type: ignore[arg-type]
    (lambda: ml.compile(ml.Relu(), shapes=[3]), r"shapes=\[3\] must be a dict"),  # type: ignore[arg-type]
    (lambda: ml.compile(ml.Relu(), shapes={"input": 3}), r"shape 3 is not a row of sizes"),
]


@pytest.mark.parametrize(("make", "words"), BAD, ids=[words for _, words in BAD])
def test_bad_arguments_are_named(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ml.ComposeError, match=words):
        make()

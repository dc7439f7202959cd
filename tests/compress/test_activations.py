"""Second moments of layers' inputs: against plain sums, from torch, JAX and composed models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.calibration.activations import Moments, as_matrix, collect, from_matrix, moments
from capibara.compress.errors import CompressError

RANDOM = np.random.default_rng(0)


def second(x: Any) -> np.ndarray:
    x = np.asarray(x, np.float64)
    x = x.reshape(-1, x.shape[-1])
    return x.T @ x / len(x)


def check(found: Moments, x: Any, axes: tuple[int, ...], rtol: float = 1e-5) -> None:
    np.testing.assert_allclose(found.second, second(x), rtol=rtol, atol=1e-6)
    assert found.count == np.asarray(x).size // np.shape(x)[-1]
    assert found.axes == axes


def test_moments_of_arrays() -> None:
    x = RANDOM.normal(size=(3, 5, 4)).astype(np.float32)
    check(moments(x), x, (1,))
    check(moments([x[0], x[1:]], (0,)), x, (0,))


@given(rank=st.integers(1, 4), seed=st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_matrices_and_back(rank: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = tuple(random.integers(1, 5, rank).tolist())
    axes = tuple(np.flatnonzero(random.integers(0, 2, rank)).tolist())
    w = random.normal(size=shape)
    matrix = as_matrix(w, axes)
    assert matrix.shape[1] == np.prod([shape[a] for a in axes], dtype=int)
    np.testing.assert_array_equal(from_matrix(matrix, shape, axes), w)


def test_the_error_is_that_of_the_output() -> None:
    x, w = RANDOM.normal(size=(50, 6)) @ RANDOM.normal(size=(6, 6)), RANDOM.normal(size=(4, 6))
    other = w + RANDOM.normal(size=w.shape) * 0.1
    expected = np.linalg.norm(x @ (other - w).T) / np.linalg.norm(x @ w.T)
    np.testing.assert_allclose(moments(x).error(w, other), expected)
    np.testing.assert_allclose(moments(x, (0,)).error(w.T, other.T), expected)
    assert moments(x).error(w * 0, w * 0) == 0


def test_what_is_no_input() -> None:
    with pytest.raises(CompressError, match="no rows"):
        moments(np.zeros((0, 4)))
    with pytest.raises(CompressError, match="expected"):
        moments(np.float32(3))
    with pytest.raises(CompressError, match="NaN or infinite"):
        moments(np.array([[1.0, np.nan]]))
    with pytest.raises(CompressError, match="features"):
        moments([np.zeros((2, 3)), np.zeros((2, 4))])


# ---- torch ----------------------------------------------------------------------------------------------------------


def test_torch_layers() -> None:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Dropout(), torch.nn.ReLU(), torch.nn.Linear(8, 3, bias=False)
    )
    model[1].train()
    model[3].eval()
    x = torch.randn(2, 10, 6)
    found = collect(model, [x[0], (x[1],)])
    assert set(found) == {"0.weight", "3.weight"}
    check(found["0.weight"], x, (1,))
    check(found["3.weight"], torch.relu(model[0](x)).detach(), (1,))
    assert model[1].training
    assert not model[3].training


def test_torch_functional_attention_and_tied_weights() -> None:
    torch = pytest.importorskip("torch")

    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(11, 8)
            self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            self.matrix = torch.nn.Parameter(torch.randn(8, 8))
            self.head = torch.nn.Linear(8, 11, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Any) -> Any:
            h = self.embed(tokens)
            self.before = h
            h, _ = self.attention(h, h, h, need_weights=False)
            self.between = h
            self.after = torch.tanh(h) @ self.matrix
            return self.head(self.after)

    model = Tied()
    tokens = torch.randint(0, 11, (3, 5))
    found = collect(model, [{"tokens": tokens}])
    check(found["matrix"], torch.tanh(model.between).detach(), (0,))
    check(found["head.weight"], model.after.detach(), (1,))
    check(found["embed.weight"], model.after.detach(), (1,))
    np.testing.assert_allclose(
        found["attention.in_proj_weight"].second, second(model.before.detach()), rtol=1e-5, atol=1e-6
    )
    assert {"attention.out_proj.weight", "attention.in_proj_weight"} <= set(found)


def test_torch_convolutions() -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, (3, 2), padding=(1, 0), stride=2), torch.nn.Conv2d(4, 4, 1, groups=2)
    )
    x = torch.randn(2, 3, 9, 8)
    found = collect(model, [x])
    assert set(found) == {"0.weight"}
    patches = torch.nn.functional.unfold(x, (3, 2), 1, (1, 0), 2).mT
    check(found["0.weight"], patches, (1, 2, 3))
    w = model[0].weight.detach().numpy()
    np.testing.assert_allclose(
        as_matrix(w, (1, 2, 3)) @ patches[0].numpy().T + model[0].bias.detach().numpy()[:, None],
        model[0](x)[0].detach().numpy().reshape(4, -1),
        rtol=1e-4,
        atol=1e-5,
    )
    line = torch.nn.Conv1d(2, 3, 3, dilation=2)
    y = torch.randn(1, 2, 12)
    expected = np.stack([y[0, :, i : i + 5 : 2].reshape(-1).numpy() for i in range(8)])
    check(collect(line, [y])["weight"], expected, (1, 2))


def test_bad_calls() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(CompressError, match="batches: got none"):
        collect(torch.nn.Linear(2, 2), [])
    with pytest.raises(CompressError, match="params: a torch module has its own"):
        collect(torch.nn.Linear(2, 2), [torch.zeros(1, 2)], {})
    with pytest.raises(CompressError, match="params: got None"):
        collect(lambda p, x: x, [np.zeros(2)])
    with pytest.raises(CompressError, match="inputs are NaN"):
        collect(torch.nn.Linear(2, 2), [torch.full((1, 2), float("nan"))])


# ---- JAX ------------------------------------------------------------------------------------------------------------


def test_jax_functions() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    draw = lambda *shape: jnp.asarray(RANDOM.normal(size=shape), jnp.float32)  # noqa: E731
    params = {
        "a": {"w": draw(6, 8), "b": draw(8)},
        "rows": [draw(5, 8)],
        "heads": draw(8, 2, 4),
        "out": draw(2, 4, 8),
        "unused": draw(3, 3),
    }
    seen: dict[str, Any] = {}

    def run(params: Any, x: Any) -> Any:
        h = jax.nn.relu(x @ params["a"]["w"] + params["a"]["b"])
        q = jnp.einsum("bi,ihk->bhk", h, params["heads"])
        o = jnp.einsum("bhk,hko->bo", jnp.tanh(q), params["out"])
        return h, q, o, jax.checkpoint(lambda o, w: o @ w.T)(o, params["rows"][0])

    x = draw(7, 6)
    found = collect(jax.jit(run), [x[:4], x[4:]], params)
    h, q, o, _ = run(params, x)
    seen = {
        "a.w": (x, (0,)),
        "heads": (h, (0,)),
        "out": (jnp.tanh(q).reshape(7, 8), (0, 1)),
        "rows.0": (o, (1,)),
    }
    assert set(found) == set(seen)
    for name, (inputs, axes) in seen.items():
        check(found[name], inputs, axes)


def test_jax_loops_branches_and_experts() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    layers = jnp.asarray(RANDOM.normal(size=(3, 4, 4)), jnp.float32)
    experts = jnp.asarray(RANDOM.normal(size=(2, 4, 5)), jnp.float32)
    params = {"layers": layers, "experts": experts}

    def run(params: Any, x: Any) -> Any:
        h, all_h = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h), x, params["layers"], reverse=True)
        h = jax.lax.cond(x.sum() > 1e6, lambda h, w: h @ w[0][:, :4], lambda h, w: h, h, params["layers"])
        return jnp.einsum("ebi,eio->ebo", jnp.stack([h, 2 * h]), params["experts"]), all_h, h

    x = jnp.asarray(RANDOM.normal(size=(6, 4)), jnp.float32)
    found = collect(run, [x], params)
    _, all_h, h = run(params, x)
    check(found["layers"], all_h, (1,))
    check(found["experts"], jnp.stack([h, 2 * h]), (1,))


def test_a_weight_used_along_both_its_axes_has_no_moments() -> None:
    jax = pytest.importorskip("jax")
    w = jax.numpy.ones((4, 4))
    found = collect(lambda p, x: x @ p["w"] @ p["w"].T, [jax.numpy.ones((2, 4))], {"w": w})
    assert found == {}


def test_composed_models() -> None:
    pytest.importorskip("jax")
    from capibara import compose as ml

    model = ml.Model()
    model |= ml.Linear(5)(input="x", output="hidden")
    model += ml.Relu()
    model += ml.Linear(3)(output="y")
    x = RANDOM.normal(size=(7, 4)).astype(np.float32)
    backends: list[Any] = [ml.JaxBackend()]
    try:
        import torch  # noqa: F401
    except ImportError:
        pass
    else:
        backends.append(ml.TorchBackend())
    for backend in backends:
        compiled = ml.compile(model, backend, shapes={"x": [7, 4]})
        params = compiled.randomize_params(seed=0)
        found = collect(compiled, [{"x": backend.array(x)}], params)
        first = next(m for m in found.values() if len(m.second) == 4)
        check(first, x, first.axes)
        assert len(found) == 2
    compiled = ml.compile(model, ml.NumpyBackend(), shapes={"x": [7, 4]})
    with pytest.raises(CompressError, match="compiled for 'numpy'"):
        collect(compiled, [{"x": x}], compiled.randomize_params(seed=0))

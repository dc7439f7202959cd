"""Second moments of layers' inputs: against plain sums, from torch, JAX and composed models."""

from __future__ import annotations

import re
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
    with pytest.warns(RuntimeWarning, match=r"1\.weight: grouped"):
        found = collect(model, [x])
    assert set(found) == {"0.weight"}
    assert "grouped" in found.unseen["1.weight"]
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
    np.testing.assert_allclose(found["layers"].second, [second(h) for h in all_h], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["experts"].second, [second(h), second(2 * h)], rtol=1e-5, atol=1e-6)


def _ways() -> dict[str, Any]:
    """x [5, 4] times w, as [.., 4, 6] or its transpose, on ways that weights take; what comes out is x @ w."""
    jax = pytest.importorskip("jax")
    jnp, lax = jax.numpy, jax.lax

    @jax.custom_jvp
    def twice(x: Any, w: Any) -> Any:
        return x @ w

    @jax.custom_vjp
    def thrice(x: Any, w: Any) -> Any:
        return x @ w

    twice.defjvp(lambda p, t: (p[0] @ p[1], p[0] @ t[1]))
    thrice.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))
    last = lambda x, parts: jnp.concatenate([x @ p for p in parts], -1)  # noqa: E731
    return {
        "split": lambda w, x: last(x, jnp.split(w, 3, 1)),
        "slice": lambda w, x: last(x, [w[:, :2], w[:, 2:]]),
        "strided": lambda w, x: jnp.stack([x @ w[:, ::2], x @ w[:, 1::2]], -1).reshape(5, 6),
        "columns": lambda w, x: jnp.stack([x @ w[:, i : i + 1] for i in range(6)], -1).reshape(5, 6),
        "dynamic": lambda w, x: last(x, [lax.dynamic_slice_in_dim(w, i, 3, 1) for i in (jnp.int32(0), 3)]),
        "reversed": lambda w, x: (x[:, ::-1] @ w[::-1, ::-1])[:, ::-1],
        "taken": lambda w, x: x @ jnp.take(w, jnp.arange(6), axis=1),
        "chosen by the data": lambda w, x: x @ w[:, jnp.argsort(jnp.argsort(x[0, :1])) + jnp.arange(6)],
        "shuffled": lambda w, x: x[:, jnp.array([2, 0, 3, 1])] @ w[jnp.array([2, 0, 3, 1])],
        "joined": lambda w, x: (x @ jnp.concatenate([w, jnp.ones((4, 2)), w], 1))[:, 8:],
        "padded": lambda w, x: jnp.pad(x, ((0, 0), (1, 2))) @ jnp.pad(w, ((1, 2), (0, 0))),
        "broadcast": lambda w, x: jnp.einsum("bi,bio->bo", x, jnp.broadcast_to(w, (5, 4, 6))),
        "reshaped": lambda w, x: x @ w.reshape(2, 2, 3, 2).transpose(2, 3, 0, 1).reshape(6, 4).T,
        "converted": lambda w, x: x @ w.astype(jnp.bfloat16).astype(jnp.float32),
        "selected": lambda w, x: x @ jnp.where(jnp.arange(6) < 3, w, w),
        "written": lambda w, x: x @ jnp.zeros((4, 6)).at[:, :].set(w),
        "squeezed": lambda w, x: x @ jnp.squeeze(w[None, :, None], (0, 2)),
        "jit": lambda w, x: jax.jit(lambda w: jax.jit(jnp.matmul)(x, w))(w),
        "remat": lambda w, x: jax.checkpoint(lambda x, w: x @ w)(x, w),
        "custom_jvp": lambda w, x: twice(x, w),
        "custom_vjp": lambda w, x: thrice(x, w),
        "barrier": lambda w, x: x @ lax.optimization_barrier((w, x))[0],
        "scan": lambda w, x: lax.scan(lambda c, x: (c, x @ w), 0, x)[1],
        "carried": lambda w, x: lax.scan(lambda w, x: (w, x @ w), w, x)[1],
        "unrolled": lambda w, x: lax.scan(lambda c, w: (c, x @ w), 0, w.T[:, :, None])[1][..., 0].T,
        "while": lambda w, x: lax.while_loop(
            lambda s: s[0] < 1, lambda s: (s[0] + 1, s[1] + x @ w), (0, jnp.zeros((5, 6)))
        )[1],
        "cond": lambda w, x: lax.cond(x.sum() < 1e6, lambda w: x @ w, lambda w: x @ (2 * w), w),
        "vmap": lambda w, x: jax.vmap(lambda x: x @ w)(x),
    }


@pytest.mark.slow
def test_weights_are_followed_wherever_they_are_moved() -> None:
    jnp = pytest.importorskip("jax").numpy
    w = jnp.asarray(RANDOM.normal(size=(4, 6)), jnp.float32)
    x = jnp.asarray(RANDOM.normal(size=(5, 4)), jnp.float32)
    for name, way in _ways().items():
        np.testing.assert_allclose(way(w, x), x @ w, rtol=0.02, atol=0.02, err_msg=name)
        found = collect(lambda p, x, way=way: way(p["w"], x), [x], {"w": w})
        assert list(found) == ["w"], name
        assert found["w"].axes == (0,), name
        np.testing.assert_allclose(found["w"].second, second(x), rtol=1e-5, atol=1e-6, err_msg=name)


def test_parts_of_the_inputs_make_the_blocks_of_a_diagonal() -> None:
    jax = pytest.importorskip("jax")
    w = jax.numpy.asarray(RANDOM.normal(size=(4, 6)), jax.numpy.float32)
    x = jax.numpy.asarray(RANDOM.normal(size=(5, 4)), jax.numpy.float32)
    found = collect(lambda p, x: x[:, :1] @ p[0][:1] + x[:, 1:] @ p[0][1:], [x], [w])["0"]
    blocks = np.zeros((4, 4))
    blocks[:1, :1], blocks[1:, 1:] = second(x[:, :1]), second(x[:, 1:])
    np.testing.assert_allclose(found.second / found.second[0, 0], blocks / blocks[0, 0], rtol=1e-5)


def test_weights_that_were_not_seen_are_named_with_the_reason() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    some = lambda *shape: jnp.asarray(RANDOM.normal(size=shape), jnp.float32)  # noqa: E731
    params = {
        n: some(4, 4) for n in ("fine", "scaled", "called", "merged", "left", "unused", "table", "added")
    }
    params["vectors"] = some(3, 4)

    def run(p: Any, x: Any) -> Any:
        h = p["table"][jnp.argmax(x, -1)] + p["added"]
        h = (h * p["vectors"][0]) @ p["fine"] @ (2 * p["scaled"]) @ (p["left"] @ p["merged"])
        like = jax.ShapeDtypeStruct(h.shape, h.dtype)
        return jax.pure_callback(lambda x, w: np.asarray(x) @ np.asarray(w), like, h, p["called"])

    x = some(4, 4)
    with pytest.warns(RuntimeWarning, match="4 of 9 weights") as told:
        found = collect(run, [x], params)
    assert list(found) == ["fine"]
    for name, why in {
        "scaled": "changed by mul",
        "called": "is used in pure_callback",
        "merged": "changed by dot_general|multiplied with another weight",
        "left": "changed by dot_general|multiplied with another weight",
    }.items():
        assert name in str(told[0].message)
        assert re.search(why, found.unseen[name]), (name, found.unseen[name])
    for name in ("unused", "table", "added", "vectors"):
        assert found.unseen[name] == "it meets no inputs in a product"


def test_jax_convolutions() -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy
    w = jnp.asarray(RANDOM.normal(size=(3, 2, 5, 7)), jnp.float32)  # window, channels, outputs
    x = jnp.asarray(RANDOM.normal(size=(2, 9, 8, 5)), jnp.float32)

    def run(p: Any, x: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, p["w"], (2, 1), [(1, 0), (0, 0)], dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    found = collect(run, [x], {"w": w})["w"]
    assert found.axes == (0, 1, 2)
    padded = np.pad(np.asarray(x), ((0, 0), (1, 0), (0, 0), (0, 0)))
    windows = [
        padded[:, i : i + 3, j : j + 2].reshape(2, -1)
        for i in range(0, padded.shape[1] - 2, 2)
        for j in range(7)
    ]
    np.testing.assert_allclose(found.second, second(np.concatenate(windows)), rtol=1e-5, atol=1e-6)
    grouped = lambda p, x: jax.lax.conv_general_dilated(  # noqa: E731
        x, p["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=5
    )
    with pytest.warns(RuntimeWarning, match="w: grouped"):
        assert not collect(grouped, [x], {"w": w.reshape(3, 2, 1, 35)})


@pytest.mark.parametrize("kind", ["attention", pytest.param("ssm", marks=pytest.mark.slow)])
def test_every_layer_of_our_own_language_model(kind: str) -> None:
    jax = pytest.importorskip("jax")
    from capibara.config import ModularModelConfig
    from capibara.core import ModularCapibaraModel

    small = ["embed_dim=16", "num_layers=2", "num_heads=2", f'pattern=["{kind}"]', "max_sequence_length=8"]
    changes = [*(f"model.{s}" for s in small), "train.sequence_length=8"]
    model = ModularCapibaraModel(ModularModelConfig.from_toml("demo", changes))
    tokens = RANDOM.integers(0, 256, (2, 8)).astype(np.int32)
    found = collect(model.apply, [tokens], model.params)
    paths = jax.tree_util.tree_flatten_with_path(model.params)[0]
    layers = {".".join(str(k.key) for k in path) for path, _ in paths if path[-1].key == "weight"}
    layers = {name for name in layers if "_conv" not in name}
    assert set(found) == layers
    assert len(layers) > 7
    logits = np.asarray(model.apply(model.params, tokens), np.float64)
    table = np.asarray(model.params["embedding"]["weight"], np.float64)
    # What goes into the head is known from what comes out of it.
    check(found["embedding.weight"], logits @ np.linalg.pinv(table.T), (1,), 1e-3)
    assert found["blocks.mlp.down.weight"].count == 2 * tokens.size


def test_a_weight_used_along_both_its_axes_has_no_moments() -> None:
    jax = pytest.importorskip("jax")
    w = jax.numpy.ones((4, 4))
    with pytest.warns(RuntimeWarning, match="w: it is multiplied along different axes"):
        found = collect(lambda p, x: x @ p["w"] @ p["w"].T, [jax.numpy.ones((2, 4))], {"w": w})
    assert found == {}
    assert list(found.unseen) == ["w"]


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

"""VQbitLayer: the documented calls, state that is really written back, no tracer ever kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.errors import CapibaraError
from capibara.ops import OpShapeError, OpTypeError
from capibara.vq import VQbitLayer, vq_apply, vq_init_state
from capibara.vq.errors import TracedUpdateError, VQConfigError, VQInputError


@pytest.fixture
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(7), (2, 5, 4))


def test_the_documented_use():
    vqbit = VQbitLayer(codebook_size=64, embedding_dim=768, use_jax_native=True, use_tpu_optimizations=True)

    def vq_forward(x):
        quantized, _indices, metrics = vqbit(x)
        return quantized, metrics

    input_embeddings = jax.random.normal(jax.random.key(0), (2, 3, 768))
    quantized, metrics = jax.jit(vq_forward)(input_embeddings)
    assert quantized.shape == input_embeddings.shape
    assert set(metrics) == {"commitment_loss", "quantization_error", "perplexity", "usage"}


def test_a_call_is_the_nearest_code_and_leaves_the_state(x):
    layer = VQbitLayer(8, 4, seed=3)
    before = {name: np.asarray(v) for name, v in layer.state.items()}
    quantized, indices, _ = layer(x)
    distances = np.sum((np.asarray(x)[..., None, :] - before["codebook"]) ** 2, -1)
    np.testing.assert_array_equal(indices, np.argmin(distances, -1))
    np.testing.assert_allclose(quantized, before["codebook"][np.argmin(distances, -1)], rtol=1e-6, atol=1e-6)
    assert all(np.array_equal(before[name], layer.state[name]) for name in before)


def test_training_eagerly_writes_the_state(x):
    layer = VQbitLayer(8, 4)
    pure = layer.state
    first = layer.state["codebook"]
    metrics = layer.update(x)
    _, _, want, after = layer.apply(pure, x, train=True, key=jax.random.fold_in(jax.random.key(0), 1))
    assert layer.updates == 1
    assert not np.array_equal(first, layer.state["codebook"])
    for name in after:
        np.testing.assert_array_equal(layer.state[name], after[name])
    assert metrics["perplexity"] == want["perplexity"]
    layer(x, train=True)
    assert layer.updates == 2


def test_training_brings_the_error_down(x):
    layer = VQbitLayer(8, 4, decay=0.7, dead_code_threshold=0.2)
    errors = [float(layer.update(x)["quantization_error"]) for _ in range(40)]
    assert errors[-1] < 0.3 * errors[0]


def test_two_layers_with_one_seed_stay_equal(x):
    a, b, c = (VQbitLayer(16, 4, seed=s) for s in (1, 1, 2))
    for layer in (a, b, c):
        layer.update(x)
        layer.update(x)
    np.testing.assert_array_equal(a.state["codebook"], b.state["codebook"])
    assert not np.array_equal(a.state["codebook"], c.state["codebook"])


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad], ids=["jit", "vmap", "grad"])
def test_training_while_traced_is_refused_and_keeps_no_tracer(transform, x):
    layer = VQbitLayer(8, 4)
    before = layer.state["codebook"]
    with pytest.raises(TracedUpdateError, match=r"layer\.apply\(state, x, train=True"):
        transform(lambda x: jnp.sum(layer(x, train=True)[0]))(x)
    assert layer.state["codebook"] is before


def test_training_on_a_constant_inside_jit_is_refused_too(x):
    layer = VQbitLayer(8, 4)
    with pytest.raises(TracedUpdateError):
        jax.jit(lambda: layer(x, train=True)[0])()
    assert layer.updates == 0


def test_apply_under_jit_is_the_way(x):
    layer = VQbitLayer(8, 4)

    @jax.jit
    def step(state, x):
        return layer.apply(state, x, train=True, key=jax.random.key(1))[3]

    state = step(layer.state, x)
    want = vq_apply(layer.state, x, train=True, key=jax.random.key(1))[3]
    np.testing.assert_allclose(state["codebook"], want["codebook"], rtol=1e-5, atol=1e-6)
    # Donation needs the arrays of a state to be buffers of their own.
    jax.jit(lambda s: jax.tree.map(lambda v: v + 1, s), donate_argnums=0)(
        vq_init_state(jax.random.key(0), 8, 4)
    )


def test_grad_and_vmap(x):
    layer = VQbitLayer(8, 4)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(layer(x)[0] * 3))(x), np.full(x.shape, 3.0))
    np.testing.assert_array_equal(jax.vmap(lambda x: layer(x)[1])(x), layer(x)[1])


def test_use_tpu_optimizations_selects_the_implementation(x):
    on, off = VQbitLayer(8, 4), VQbitLayer(8, 4, use_tpu_optimizations=False)
    assert (on.implementation, off.implementation) == ("auto", "reference")
    np.testing.assert_array_equal(on(x)[1], off(x)[1])
    x = jnp.zeros((1 << 18, 4))
    loops = ["scan" in str(jax.make_jaxpr(lambda x, layer=layer: layer(x)[1])(x)) for layer in (on, off)]
    assert loops == [True, False]


def test_use_jax_native_false_gives_numpy_and_cannot_be_traced(x):
    layer, native = VQbitLayer(8, 4, use_jax_native=False), VQbitLayer(8, 4)
    found = layer(np.asarray(x).tolist())
    assert all(isinstance(leaf, np.ndarray | np.generic) for leaf in jax.tree.leaves(found))
    np.testing.assert_array_equal(found[1], native(x)[1])
    with pytest.raises(VQInputError, match="use_jax_native=True"):
        jax.jit(layer)(x)


def test_as_block_carries_the_settings():
    block = VQbitLayer(8, 4, decay=0.5, commitment_weight=2.0, dead_code_threshold=0.5).as_block()
    assert {"output", "indices", "commitment", "perplexity", "usage"} <= set(block.output_keys)
    with pytest.raises(VQConfigError, match="epsilon"):
        VQbitLayer(8, 4, epsilon=1e-3).as_block()


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"codebook_size": 0}, VQConfigError, "codebook_size must be at least 1"),
        ({"codebook_size": 2.0}, VQInputError, "codebook_size must be an integer"),
        ({"embedding_dim": True}, VQInputError, "embedding_dim must be an integer"),
        ({"decay": 1.1}, VQConfigError, "decay must lie in"),
        ({"epsilon": "small"}, VQInputError, "epsilon must be a number"),
        ({"commitment_weight": -0.1}, VQConfigError, "commitment_weight must lie in"),
        ({"dead_code_threshold": float("nan")}, VQConfigError, "dead_code_threshold must lie in"),
        ({"use_jax_native": 1}, VQInputError, "use_jax_native must be True or False"),
        ({"seed": -1}, VQConfigError, "seed must be at least 0"),
        ({"seed": 2**32}, VQConfigError, "seed must be at most 4294967295"),
    ],
)
def test_bad_settings(arguments, error, match):
    with pytest.raises(error, match=match) as caught:
        VQbitLayer(**{"codebook_size": 8, "embedding_dim": 4, **arguments})
    assert isinstance(caught.value, CapibaraError)


def test_bad_input():
    layer = VQbitLayer(8, 4)
    with pytest.raises(OpShapeError, match="the codebook's dim, 4"):
        layer(jnp.zeros((2, 3)))
    with pytest.raises(OpTypeError, match="floating-point"):
        layer(jnp.zeros((2, 4), jnp.int32))

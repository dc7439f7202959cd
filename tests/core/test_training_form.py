"""The model in training: precision, rematerialisation, dropout, codebooks that move, transformations of JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy_decoder import Decoder, as_float64
from small_models import quick_jit, small_config, small_params, small_tokens

from capibara.compose import InputError
from capibara.core import ModularCapibaraModel
from capibara.measure import count_flops

BF16 = {"precision.compute_dtype": "bfloat16"}


def build(kind: str, **changes: Any) -> tuple[ModularCapibaraModel, Any, Any]:
    model = ModularCapibaraModel(small_config(kind, **changes))
    return model, *small_params(model, 8)


@pytest.mark.parametrize("kind", ["grouped", "ssm"])
def test_bfloat16_is_close_to_float32(kind: str) -> None:
    tokens = small_tokens()
    out = {}
    for name, changes in (("float32", {}), ("bfloat16", BF16)):
        model, params, _ = build(kind, **changes)
        out[name] = quick_jit(lambda p, model=model: model.apply(p, tokens))(params)
        assert out[name].dtype == jnp.float32
        wrong = np.asarray(out[name]) - Decoder(model.config.model).forward(as_float64(params), {}, tokens)
        out[name + " error"] = float(np.sqrt(np.mean(wrong**2)))
    scale = float(jnp.std(out["float32"]))
    assert out["float32 error"] < 1e-5 * scale
    # bfloat16 has 8 bits: an error near the float32 one would mean that nothing was computed in it.
    assert 1e-4 * scale < out["bfloat16 error"] < 0.03 * scale


def test_parameters_and_gradients_stay_float32_under_bfloat16() -> None:
    model, params, state = build("mixed", **BF16)
    batch = {"tokens": small_tokens()}
    loss, (after, _) = jax.eval_shape(
        lambda p: model.loss(p, batch, state=state, key=jax.random.key(0)), params
    )
    gradient = jax.eval_shape(jax.grad(lambda p: model.loss(p, batch, state=state)[0]), params)
    assert loss.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    assert jax.tree.map(lambda a: (a.shape, a.dtype), after) == jax.tree.map(
        lambda a: (a.shape, a.dtype), state
    )


def gradients(kind: str, **changes: Any) -> Any:
    model, params, state = build(kind, **changes)
    batch = {"tokens": small_tokens(length=7)}
    return quick_jit(jax.value_and_grad(lambda p: model.loss(p, batch, state=state)[0]))(params)


@pytest.mark.parametrize("kind", ["grouped", pytest.param("remainder", marks=pytest.mark.slow)])
def test_remat_and_loops_change_nothing(kind: str) -> None:
    plain = gradients(kind, model__remat="none", model__scan_layers="unroll")
    for remat, mode in (("full", "scan"), ("dots", "unroll")):
        other = gradients(kind, model__remat=remat, model__scan_layers=mode)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), plain, other)


def test_remat_computes_again_what_it_says() -> None:
    def work(remat: str) -> int:
        model, params, _ = build("attention", model__remat=remat)
        batch = {"tokens": small_tokens()}
        return count_flops(jax.grad(lambda p: model.loss(p, batch, state={})[0]), params).total

    none, dots, full = (work(r) for r in ("none", "dots", "full"))
    # "dots" repeats attention's batched products only, "full" those with weights as well.
    assert none < dots < full


def test_dropout_follows_its_key() -> None:
    model, params, _ = build("attention", model__dropout_rate=0.5, model__num_layers=1)
    batch = {"tokens": small_tokens()}

    def loss(key: Any, train: bool) -> Any:
        return model.loss(params, batch, state={}, key=key, train=train)[0]

    trained = quick_jit(lambda key: loss(key, True))
    first, again, other = (float(trained(jax.random.key(k))) for k in (1, 1, 2))
    assert first == again
    assert first != other
    still = float(quick_jit(lambda: loss(None, False))())
    assert still not in (first, other)
    want = Decoder(model.config.model).loss(as_float64(params), {}, batch["tokens"])
    np.testing.assert_allclose(still, want, rtol=1e-6)
    with pytest.raises(InputError, match=r"dropout needs randomness.*key=jax\.random\.key"):
        loss(None, True)


def moved_codebook(settings: Any, before: dict[str, np.ndarray], x: np.ndarray, index: np.ndarray) -> Any:
    """The moving averages of van den Oord et al. (2017), appendix A.1, one vector after another."""
    counts, sums = np.zeros_like(before["cluster_size"]), np.zeros_like(before["codebook_sum"])
    for vector, code in zip(x.reshape(-1, x.shape[-1]), index, strict=True):
        counts[code] += 1
        sums[code] += vector
    size = settings.decay * before["cluster_size"] + (1 - settings.decay) * counts
    total = settings.decay * before["codebook_sum"] + (1 - settings.decay) * sums
    smoothed = (size + 1e-5) / (size.sum() + len(size) * 1e-5) * size.sum()
    return {"codebook": total / smoothed[:, None], "cluster_size": size, "codebook_sum": total}


def test_codebooks_move_in_training_only_and_come_back() -> None:
    model, params, state = build("vq", model__vq__decay=0.7, model__vq__dead_code_threshold=0.0)
    tokens = small_tokens()
    step = quick_jit(lambda state: model.loss(params, {"tokens": tokens}, state=state, train=True)[1])
    still = quick_jit(lambda state: model.loss(params, {"tokens": tokens}, state=state, train=False)[1])

    same, _ = still(state)
    jax.tree.map(np.testing.assert_array_equal, same, state)

    oracle = Decoder(model.config.model)
    wide = as_float64(state)
    for _ in range(2):
        state, metrics = step(state)
        oracle.loss(as_float64(params), wide, tokens)
        inner = wide["blocks"]["vq"]["quantiser"]
        layers = [
            moved_codebook(
                model.config.model.vq, {k: v[i] for k, v in inner.items()}, codes - offset, oracle.indices[i]
            )
            for i, (codes, offset) in enumerate(oracle.seen)
        ]
        wide = {"blocks": {"vq": {"quantiser": {k: np.stack([n[k] for n in layers]) for k in layers[0]}}}}
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), dict(state), wide)
        used = [len(np.unique(index)) / 5 for index in oracle.indices]
        np.testing.assert_allclose(metrics["codebook_usage"], np.mean(used), rtol=1e-6)
        shares = [np.bincount(index, minlength=5) / index.size for index in oracle.indices]
        perplexity = [np.exp(-sum(s * np.log(s) for s in share if s)) for share in shares]
        np.testing.assert_allclose(metrics["codebook_perplexity"], np.mean(perplexity), rtol=1e-5)


def test_dead_codes_are_put_on_inputs() -> None:
    model, params, state = build("vq", model__num_layers=1, model__vq__dead_code_threshold=0.5)
    quantiser = state["blocks"]["vq"]["quantiser"]
    quantiser["codebook"][0, 3] = 1000.0
    quantiser["cluster_size"][0, 3] = 0.0
    batch = {"tokens": small_tokens()}
    run = quick_jit(lambda key: model.loss(params, batch, state=state, key=key)[1][0])
    first, again, other = (
        run(jax.random.key(k))["blocks"]["vq"]["quantiser"]["codebook"][0, 3] for k in (1, 1, 2)
    )
    np.testing.assert_array_equal(first, again)
    oracle = Decoder(model.config.model)
    oracle.loss(as_float64(params), as_float64(state), batch["tokens"])
    codes, offset = oracle.seen[0]
    inputs = (codes - offset).reshape(-1, 8)
    for code in (first, other):
        assert np.min(np.abs(inputs - np.asarray(code)).max(-1)) < 1e-5
    assert np.any(first != other)


def test_vmap_over_batches_equals_a_loop() -> None:
    model, params, state = build("vq", model__num_layers=1)
    batches = np.stack([small_tokens(seed=s, length=6) for s in range(3)])

    def loss(tokens: Any) -> Any:
        return model.loss(params, {"tokens": tokens}, state=state, train=True)

    one = quick_jit(loss)
    many = quick_jit(jax.vmap(loss))(batches)
    for i, tokens in enumerate(batches):
        row = jax.tree.map(lambda x, i=i: x[i], many)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), row, one(tokens))


def test_vmap_over_models_equals_a_loop() -> None:
    model, params, _ = build("grouped")
    other, _ = small_params(model, 9)
    both = jax.tree.map(lambda a, b: np.stack([a, b]), params, other)
    tokens = small_tokens()
    logits = quick_jit(jax.vmap(lambda p: model.apply(p, tokens)))(both)
    oracle = Decoder(model.config.model)
    for i, p in enumerate((params, other)):
        want = oracle.forward(as_float64(p), {}, tokens)
        np.testing.assert_allclose(logits[i], want, rtol=2e-5, atol=2e-5)


def test_loss_has_no_side_effects_on_the_model() -> None:
    model, params, state = build("vq", model__num_layers=1)
    copies = jax.tree.map(np.copy, (params, state))
    quick_jit(lambda p, s: model.loss(p, {"tokens": small_tokens()}, state=s))(params, state)
    jax.tree.map(np.testing.assert_array_equal, (params, state), copies)
    assert model._params is None
    assert model._state is None

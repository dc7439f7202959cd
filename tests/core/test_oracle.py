"""The language model against a NumPy forward pass in float64: logits, losses, gradients."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from numpy_decoder import Decoder, as_float64
from small_models import FLOAT64, KINDS, quick_jit, small_config, small_params, small_tokens

from capibara.core import ModularCapibaraModel


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_equals_numpy_in_float32(kind: str) -> None:
    config = small_config(kind, model__scan_layers="unroll")
    model = ModularCapibaraModel(config)
    params, state = small_params(model, 1)
    tokens = small_tokens()
    loss, (_, metrics) = quick_jit(lambda p: model.loss(p, {"tokens": tokens}, state=state, train=False))(
        params
    )
    oracle = Decoder(config.model)
    want = oracle.loss(as_float64(params), as_float64(state), tokens)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    np.testing.assert_allclose(metrics["cross_entropy"], want - sum(oracle.commitments), rtol=1e-6)
    assert ("auxiliary_loss" in metrics) == bool(oracle.commitments)
    if oracle.commitments:
        np.testing.assert_allclose(metrics["auxiliary_loss"], sum(oracle.commitments), rtol=1e-5)
        assert min(oracle.commitments) > 0.01


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "kind", ["grouped", "ssm", "mamba", "vq", "experts", pytest.param("mixed", marks=pytest.mark.slow)]
)
def test_logits_and_gradients_equal_numpy_in_float64(kind: str) -> None:
    untied = {"model.tie_embeddings": False} if kind == "grouped" else {}
    config = small_config(kind, model__scan_layers="scan", **untied, **FLOAT64)
    tokens = small_tokens(length=8, seed=5)
    with jax.enable_x64(True):
        model = ModularCapibaraModel(config)
        params, state = small_params(model, 2)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float64")}

        def run(params: Any) -> Any:
            loss = jax.value_and_grad(
                lambda p: model.loss(p, {"tokens": tokens}, state=state, train=False)[0]
            )
            return model.apply(params, tokens[:, :-1], state=state)[0], loss(params)

        logits, (loss, gradient) = jax.tree.map(np.asarray, quick_jit(run)(params))
    assert logits.dtype == np.float64
    state = as_float64(state)
    oracle = Decoder(config.model)
    np.testing.assert_allclose(logits, oracle.forward(params, state, tokens[:, :-1]), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(loss, oracle.loss(params, state, tokens), rtol=1e-10)

    # Central differences of the oracle. A straight-through gradient is that of the surrogate, not of the output.
    surrogate = Decoder(config.model, surrogate=oracle.seen)
    np.testing.assert_allclose(surrogate.loss(params, state, tokens), loss, rtol=1e-10)
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(11)
    step = 1e-5
    for i, (path, given) in enumerate(jax.tree_util.tree_leaves_with_path(gradient)):
        direction = rng.normal(size=leaves[i].shape)
        direction /= np.linalg.norm(direction)

        def at(distance: float, i: int = i, direction: np.ndarray = direction) -> float:
            there = [leaf + distance * direction if j == i else leaf for j, leaf in enumerate(leaves)]
            return surrogate.loss(jax.tree.unflatten(treedef, there), state, tokens)

        want = (at(step) - at(-step)) / (2 * step)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose((given * direction).sum(), want, rtol=1e-6, atol=1e-9, err_msg=name)
        assert np.any(given != 0), f"{name} has no gradient"


def test_the_oracle_reads_every_parameter() -> None:
    config = small_config("mixed")
    params, state = as_float64(small_params(ModularCapibaraModel(config)))
    tokens = small_tokens(1, 5)
    leaves, treedef = jax.tree.flatten(params)
    base = Decoder(config.model).loss(params, state, tokens)
    for i in range(len(leaves)):
        other = [leaf + 0.1 * np.cos(np.arange(leaf.size)).reshape(leaf.shape) for leaf in leaves[i : i + 1]]
        tree = jax.tree.unflatten(treedef, [*leaves[:i], *other, *leaves[i + 1 :]])
        assert Decoder(config.model).loss(tree, state, tokens) != base

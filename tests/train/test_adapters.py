"""Low-rank adapters: what is trained, what it computes, and what stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_run import tiny_corpus

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.core.adapters import dequantise_base, is_adapter
from capibara.errors import ConfigError
from capibara.plan import plan
from capibara.sharding import Layout
from capibara.train import build_optimizer, learning_rate_schedule, train
from capibara.train.placement import Placement
from capibara.train.step import make_train_step
from capibara.train.trainable import joined, trained_part

SMALL = [
    *(
        "num_layers=2",
        "embed_dim=16",
        "num_heads=4",
        "num_kv_heads=2",
        "mlp_dim=24",
        "max_sequence_length=16",
        "train.sequence_length=16",
    ),
    *("optimizer.warmup_steps=0", "train.steps=20", "optimizer.weight_decay=0.1", "attention_bias=true"),
]
TOKENS = np.random.default_rng(0).integers(0, 256, (4, 17)).astype(np.int32)


def model_with(*settings: str) -> ModularCapibaraModel:
    return ModularCapibaraModel(ModularModelConfig.from_toml("demo", [*SMALL, *settings]))


PLAIN = model_with()
ADAPTED = model_with("finetune.method=lora", "finetune.rank=3", "finetune.alpha=6")


def named(tree: Any) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(at, simple=True, separator="."): leaf for at, leaf in flat}


def drawn(seed: int = 0) -> dict[str, Any]:
    """Parameters whose adapters change something."""
    params = ADAPTED.with_adapters(PLAIN.params)
    rng = np.random.default_rng(seed)

    def one(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        return jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) * 0.3 if name == "lora_b" else leaf

    return jax.tree_util.tree_map_with_path(one, params)


def test_fresh_adapters_change_nothing() -> None:
    params = ADAPTED.with_adapters(PLAIN.params)
    np.testing.assert_allclose(ADAPTED.apply(params, TOKENS[:, 1:]), PLAIN(TOKENS[:, 1:]), atol=2e-5)
    assert sum(jax.tree.leaves(ADAPTED.trainable)) == 14
    # Seven products a layer, of rank 3.
    sizes = 2 * 3 * ((16 + 16) + 2 * (16 + 8) + (16 + 16) + 3 * (16 + 24))
    assert ADAPTED.num_params - PLAIN.num_params == sizes


def test_merged_weights_compute_the_same() -> None:
    params = drawn()
    merged = ADAPTED.merged(params)
    assert merged.config.finetune.method == "full"
    assert named(merged.params).keys() == named(PLAIN.params).keys()
    expected = ADAPTED.apply(params, TOKENS[:, 1:])
    np.testing.assert_allclose(merged(TOKENS[:, 1:]), expected, atol=2e-5)
    assert np.abs(np.asarray(expected - PLAIN(TOKENS[:, 1:]))).max() > 0.05
    logits, _ = ADAPTED.decode(params, jnp.asarray(TOKENS[:, 1:]), ADAPTED.init_cache(4, 16))
    np.testing.assert_allclose(logits, expected, atol=2e-5)
    # By hand, of one weight: W + alpha / rank * a b.
    own, after = (named(tree["blocks"]["attention"]["query"]) for tree in (params, merged.params))
    change = np.einsum("ler,lrhd->lehd", own["lora_a"], own["lora_b"])
    np.testing.assert_allclose(after["weight"], own["weight"] + 6 / 3 * change, atol=1e-6)
    own, after = (named(tree["blocks"]["attention"]["out"]) for tree in (params, merged.params))
    change = np.einsum("lhdr,lre->lhde", own["lora_a"], own["lora_b"])
    np.testing.assert_allclose(after["weight"], own["weight"] + 6 / 3 * change, atol=1e-6)


@pytest.mark.slow
def test_gradients_are_those_of_the_merged_weights() -> None:
    params = drawn()
    batch = {"tokens": TOKENS}

    def of(model: ModularCapibaraModel, given: Any) -> Any:
        return jax.grad(lambda p: model.loss(p, batch, state={}, train=False)[0])(given)

    ours, theirs = of(ADAPTED, params), of(PLAIN, ADAPTED.merged(params).params)
    own, weight = params["blocks"]["mlp"]["up"], np.asarray(theirs["blocks"]["mlp"]["up"]["weight"])
    got = ours["blocks"]["mlp"]["up"]
    np.testing.assert_allclose(got["lora_a"], 2 * np.einsum("lio,lro->lir", weight, own["lora_b"]), atol=1e-5)
    np.testing.assert_allclose(got["lora_b"], 2 * np.einsum("lir,lio->lro", own["lora_a"], weight), atol=1e-5)


@pytest.mark.thin(2)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_step_trains_adapters_only(microbatches: int) -> None:
    config = ADAPTED.config
    optimizer = build_optimizer(config, param_axes=ADAPTED.param_axes)
    params = ADAPTED.with_adapters(PLAIN.params)
    before = {name: np.array(leaf) for name, leaf in named(params).items()}
    fresh = jax.tree.map(jnp.copy, params)
    state = Placement.of(config, jax.devices()[:1]).make_state(ADAPTED, optimizer, seed=0, params=fresh)
    adapters = sum(
        leaf.size for path, leaf in ((n.split("."), a) for n, a in before.items()) if is_adapter((*path,))
    )
    counts = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state))
    assert 2 * adapters <= counts <= 2 * adapters + 8

    step = make_train_step(ADAPTED, optimizer, schedule=learning_rate_schedule(config))
    batch = {"tokens": jnp.asarray(TOKENS.reshape(microbatches, -1, 17))}
    losses = []
    for _ in range(8):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.3
    for name, leaf in named(state.params).items():
        changed = bool((np.asarray(leaf) != before[name]).any())
        assert changed == is_adapter((*name.split("."),)), name


@pytest.mark.slow
def test_dropout_acts_in_training_only() -> None:
    model = model_with("finetune.method=lora", "finetune.dropout=0.5")
    params = jax.tree.map(lambda leaf: leaf + 0.1, model.params)
    tokens = TOKENS[:, 1:]
    still = model.apply(params, tokens)
    one, same, other = (
        model.apply(params, tokens, key=jax.random.key(seed), train=True) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other)
    assert not np.allclose(one, still)
    np.testing.assert_array_equal(model.apply(params, tokens, key=jax.random.key(0)), still)


def test_targets_choose_the_weights() -> None:
    model = model_with("finetune.method=lora", 'finetune.targets=["value", "down"]')
    assert {n.split(".")[-2] for n in named(model.params) if is_adapter((*n.split("."),))} == {
        "value",
        "down",
    }
    with pytest.raises(ValueError, match="expected each once"):
        model_with('finetune.targets=["value", "value"]')
    for more in ("finetune.dropout=0.1", "finetune.base=nf4"):
        with pytest.raises(
            ValueError, match=rf"{more.split('=')[0]}: got.*experts.*weights of attention alone.*query"
        ):
            model_with("finetune.method=lora", "experts.count=4", more)
        model_with("finetune.method=lora", "experts.count=4", more, 'finetune.targets=["query"]')
    with pytest.raises(ValueError, match=r"finetune\.targets"):
        model_with('finetune.targets=["lm_head"]')


MIXTURE = [
    *("experts.count=4", "experts.per_token=2", "experts.dim=8", "experts.shared_dim=12", "num_layers=3")
]
LOW = ("finetune.method=lora", "finetune.rank=3", "finetune.alpha=6")


@pytest.mark.slow
def test_experts_have_adapters_of_their_own() -> None:
    plain, model = (
        model_with(*MIXTURE, "experts.first_dense=1"),
        model_with(*MIXTURE, "experts.first_dense=1", *LOW),
    )
    params = model.with_adapters(plain.params)
    tokens = TOKENS[:, 1:]
    np.testing.assert_allclose(model.apply(params, tokens), plain(tokens), atol=2e-5)
    random = np.random.default_rng(0)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(random.normal(size=leaf.shape) * 0.3, jnp.float32)
        if path[-1].key.endswith("lora_b") else leaf, params,
    )  # fmt: skip
    merged = model.merged(params)
    assert named(merged.params).keys() == named(plain.params).keys()
    own, after = params["blocks"]["mlp"], merged.params["blocks"]["mlp"]
    for name in ("gate", "up", "down"):
        change = np.einsum("leir,lero->leio", own[f"{name}_lora_a"], own[f"{name}_lora_b"])
        np.testing.assert_allclose(after[name], own[name] + 6 / 3 * change, atol=1e-5)
    expected = model.apply(params, tokens)
    np.testing.assert_allclose(merged(tokens), expected, atol=5e-5)
    assert np.abs(np.asarray(expected - plain(tokens))).max() > 0.05
    logits, _ = model.decode(params, jnp.asarray(tokens), model.init_cache(4, 16))
    np.testing.assert_allclose(logits, expected, atol=5e-5)
    # Of each of two layers: attention, the shared layer, and two of four experts a token.
    attention, shared, expert = 3 * ((16 + 16) + 2 * (16 + 8) + 32), 3 * 3 * (16 + 12), 3 * 3 * (16 + 8)
    dense = 3 * 3 * (16 + 24)
    assert model.num_params - plain.num_params == 3 * attention + dense + 2 * (shared + 4 * expert)
    used = 3 * attention + dense + 2 * (shared + 2 * expert)
    assert model.flops_per_token(16, training=False) - plain.flops_per_token(16, training=False) == 2 * used


@pytest.mark.slow
def test_gradients_of_experts_are_those_of_the_merged_weights() -> None:
    plain, model = model_with(*MIXTURE), model_with(*MIXTURE, *LOW)
    random = np.random.default_rng(1)
    params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.asarray(random.normal(size=leaf.shape) * 0.3, jnp.float32)
        if path[-1].key.endswith("lora_b") else leaf, model.with_adapters(plain.params),
    )  # fmt: skip

    def of(one: ModularCapibaraModel, given: Any) -> Any:
        return jax.grad(lambda p: one.loss(p, {"tokens": TOKENS}, state={}, train=False)[0])(given)

    ours, theirs = of(model, params), of(plain, model.merged(params).params)
    own, got, want = (tree["blocks"]["mlp"] for tree in (params, ours, theirs))
    for name in ("gate", "up", "down"):
        a, b, slope = own[f"{name}_lora_a"], own[f"{name}_lora_b"], np.asarray(want[name])
        np.testing.assert_allclose(
            got[f"{name}_lora_a"], 2 * np.einsum("leio,lero->leir", slope, b), atol=2e-5
        )
        np.testing.assert_allclose(
            got[f"{name}_lora_b"], 2 * np.einsum("leir,leio->lero", a, slope), atol=2e-5
        )


def test_moments_of_a_mesh_are_those_of_adapters() -> None:
    mesh: Any = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    layout = Layout(mesh=(("data", 2), ("model", 4)))
    placement = Placement(tuple(jax.devices()[:1]), mesh, layout)
    optimizer = build_optimizer(ADAPTED.config, param_axes=ADAPTED.param_axes)
    state = placement.describe_state(ADAPTED, optimizer)
    moments = {name: leaf for name, leaf in named(state.opt_state).items() if leaf.ndim}
    assert len(moments) == 28
    sharded = next(leaf for name, leaf in moments.items() if name.endswith("up.lora_b"))
    assert "model" in str(sharded.sharding.spec)


def test_pairs_are_not_planned() -> None:
    paired = ADAPTED.config.with_overrides(["finetune.objective=dpo"])
    with pytest.raises(ConfigError, match=r"finetune\.objective=.dpo"):
        plan(paired, "v4:2x2x1", compile=False)


def test_operations_are_fewer_than_of_training_all() -> None:
    full, low = (model.flops_per_token(16) for model in (PLAIN, ADAPTED))
    adapters = ADAPTED.num_params - PLAIN.num_params
    assert (
        ADAPTED.flops_per_token(16, training=False)
        == PLAIN.flops_per_token(16, training=False) + 2 * adapters
    )
    scores = 2 * 4 * 4 * 4 * (17 / 2)  # of two layers: 4 operations × heads × their size × positions seen
    products = full / 3 - scores
    assert low == pytest.approx(2 * products + 3 * (scores + 2 * adapters))


@pytest.mark.thin(2)
@pytest.mark.parametrize("base", ["int8", "nf4"])
def test_a_base_in_fewer_bits(base: str) -> None:
    model = model_with("finetune.method=lora", "finetune.rank=3", "finetune.alpha=6", f"finetune.base={base}")
    params = model.with_adapters(PLAIN.params)
    kinds = {"int8": "int8", "nf4": "uint8"}
    codes = {name: leaf for name, leaf in named(params).items() if name.endswith("weight_codes")}
    assert {str(leaf.dtype) for leaf in codes.values()} == {kinds[base]}
    assert {name.split(".")[-2] for name in codes} == {"query", "key", "value", "out", "gate", "up", "down"}
    assert sum(leaf.nbytes for leaf in codes.values()) * (1 if base == "int8" else 2) == sum(
        leaf.size for name, leaf in named(PLAIN.params).items() if f"{name}_codes" in codes
    )
    # What the codes stand for, within half a step of each group of 64 along what is summed over.
    merged = named(model.merged(params).params)
    for name, leaf in named(PLAIN.params).items():
        if f"{name}_codes" not in codes:
            np.testing.assert_array_equal(merged[name], leaf)
            continue
        step = 1 / 254 if base == "int8" else (1 - 0.69619280) / 2
        assert float(jnp.abs(merged[name] - leaf).max()) <= step * float(jnp.abs(leaf).max()) + 1e-6
        assert float(jnp.abs(merged[name] - leaf).max()) > 0

    # Nothing but adapters has a gradient, and it is that beside the numbers that the codes stand for.
    rng = np.random.default_rng(3)
    params = jax.tree_util.tree_map_with_path(
        lambda at, leaf: (
            jnp.asarray(rng.normal(size=leaf.shape), jnp.float32) * 0.1
            if "lora" in jax.tree_util.keystr(at[-1:])
            else leaf
        ),
        params,
    )
    batch = {"tokens": TOKENS}
    # Merged weights, which are plain numbers, compute the same as codes with adapters beside them.
    np.testing.assert_allclose(
        model.merged(params)(TOKENS[:, 1:]), model.apply(params, TOKENS[:, 1:]), atol=2e-4
    )

    def gradients(model: ModularCapibaraModel, params: Any) -> Any:
        part = trained_part(model, params)
        return jax.jit(jax.grad(lambda part: model.loss(joined(part, params), batch, state={})[0]))(part)

    found = named(gradients(model, params))
    assert found
    assert all("lora_" in name for name in found)
    numbers = dequantise_base(params, model, model.without_adapters())
    expected = named(gradients(ADAPTED, numbers))
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        np.testing.assert_allclose(gradient, expected[name], rtol=1e-3, atol=1e-5, err_msg=name)
    assert model.num_params == ADAPTED.num_params
    assert model.flops_per_token(16) == ADAPTED.flops_per_token(16)


def test_a_base_in_fewer_bits_belongs_to_a_trained_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"finetune.base: got 'nf4', which needs finetune.method=lora"):
        model_with("finetune.base=nf4")
    model = model_with("finetune.method=lora", "finetune.base=nf4", f"checkpoint.directory={tmp_path}")
    with pytest.raises(ConfigError, match="stores the weights of a trained model in fewer bits"):
        train(model.config, model, tiny_corpus())

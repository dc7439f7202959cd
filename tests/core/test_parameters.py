"""Parameters: their paths, shapes and axes as a golden list, how they start, and that nothing makes them early."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from small_models import KINDS, small_config, small_params, small_tokens

from capibara.compose import InputError
from capibara.config import ModularModelConfig
from capibara.config.axes import LOGICAL_AXES
from capibara.core import ModularCapibaraModel

# A checkpoint written today must load tomorrow: a change here is a change of format.
ATTENTION = {
    "attention_norm.scale": ((8,), ("embed",)),
    "attention.query.weight": ((8, 4, 2), ("embed", "heads", "head_dim")),
    "attention.key.weight": ((8, 2, 2), ("embed", "kv_heads", "head_dim")),
    "attention.value.weight": ((8, 2, 2), ("embed", "kv_heads", "head_dim")),
    "attention.out.weight": ((4, 2, 8), ("heads", "head_dim", "embed")),
}
SSM = {
    "ssm_norm.scale": ((8,), ("embed",)),
    "ssm.value.weight": ((8, 4, 4), ("embed", "heads", "head_dim")),
    "ssm.gate.weight": ((8, 4, 4), ("embed", "heads", "head_dim")),
    "ssm.write.weight": ((8, 1, 3), ("embed", None, "state")),
    "ssm.read.weight": ((8, 1, 3), ("embed", None, "state")),
    "ssm.step.weight": ((8, 4), ("embed", "heads")),
    "ssm.step_bias": ((4,), ("heads",)),
    "ssm.log_rate": ((4,), ("heads",)),
    "ssm.skip": ((4, 1), ("heads", None)),
    "ssm.value_conv.weight": ((3, 4, 4), ("conv", "heads", None)),
    "ssm.value_conv.bias": ((4, 4), ("heads", None)),
    "ssm.write_conv.weight": ((3, 1, 3), ("conv", None, None)),
    "ssm.write_conv.bias": ((1, 3), (None, None)),
    "ssm.read_conv.weight": ((3, 1, 3), ("conv", None, None)),
    "ssm.read_conv.bias": ((1, 3), (None, None)),
    "ssm.norm.scale": ((16,), ("mlp",)),
    "ssm.out.weight": ((16, 8), ("mlp", "embed")),
}
VQ = {
    "vq_norm.scale": ((8,), ("embed",)),
    "vq.out.weight": ((8, 8), ("embed", None)),
}
MLP = {
    "mlp_norm.scale": ((8,), ("embed",)),
    "mlp.gate.weight": ((8, 12), ("embed", "mlp")),
    "mlp.up.weight": ((8, 12), ("embed", "mlp")),
    "mlp.down.weight": ((12, 8), ("mlp", "embed")),
}
ENDS = {"embedding.weight": ((11, 8), ("vocab", "embed")), "final_norm.scale": ((8,), ("embed",))}
HEAD = {"head.weight": ((8, 11), ("embed", "vocab"))}


def stacked(prefix: str, count: int, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {
        f"{prefix}.{path}": ((count, *shape), ("layers", *axes))
        for block in (*blocks, MLP)
        for path, (shape, axes) in block.items()
    }


GOLDEN = {
    "grouped": ENDS | stacked("blocks", 2, ATTENTION),
    "mixed": ENDS
    | stacked("blocks.layer_0", 1, ATTENTION)
    | stacked("blocks.layer_1", 1, SSM)
    | stacked("blocks.layer_2", 1, VQ)
    | stacked("last_blocks", 1, ATTENTION),
}


def leaves(tree: Any, path: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {".".join(path): tree}
    return {k: v for key, inner in tree.items() for k, v in leaves(inner, (*path, key)).items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", GOLDEN)
def test_paths_shapes_and_axes(kind: str, tied: bool) -> None:
    model = ModularCapibaraModel(small_config(kind, model__tie_embeddings=tied))
    want = GOLDEN[kind] | ({} if tied else HEAD)
    axes = leaves(model.param_axes)
    got = {".".join(p): (spec.shape, axes[".".join(p)]) for p, spec in model.compiled.params.items()}
    assert got == want
    assert model.num_params == sum(int(np.prod(shape)) for shape, _ in want.values())
    # The form that decodes reads the same ones.
    assert {p: s.shape for p, s in model.decoder.params.items()} == {
        p: s.shape for p, s in model.compiled.params.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_array_has_known_axes(kind: str) -> None:
    model = ModularCapibaraModel(small_config(kind))
    specs = {**model.compiled.params, **model.compiled.states, **model.decoder.states}
    for path, spec in specs.items():
        assert spec.axes is not None, path
        assert len(spec.axes) == len(spec.shape or ()), path
        assert {a for a in spec.axes if a is not None} <= LOGICAL_AXES.keys(), path
        named = [a for a in spec.axes if a is not None]
        assert len(set(named)) == len(named), f"{path} names an axis twice: {spec.axes}"


def test_init_gives_what_was_declared() -> None:
    model = ModularCapibaraModel(small_config("mixed", model__tie_embeddings=False))
    params, state = model.init(5)
    declared = {
        ".".join(p): (s.shape, s.dtype) for p, s in {**model.compiled.params, **model.compiled.states}.items()
    }
    got = {k: (v.shape, str(v.dtype)) for k, v in {**leaves(params), **leaves(state)}.items()}
    assert got == declared

    flat = {k: np.asarray(v) for k, v in {**leaves(params), **leaves(state)}.items()}
    for name, values in flat.items():
        assert np.isfinite(values).all(), name
        if name.endswith(("scale", "skip", "cluster_size")):
            assert (values == 1).all(), name
        elif name.endswith("conv.bias"):
            assert (values == 0).all(), name
        else:
            assert np.unique(values).size > values.size // 2, name
    # No two arrays start equal, and with unit counts the codebook is its own sum.
    drawn = [v for k, v in flat.items() if k.endswith("weight")]
    assert len({v.ravel()[:4].tobytes() for v in drawn}) == len(drawn)
    book = "blocks.layer_2.vq.quantiser.codebook"
    np.testing.assert_array_equal(flat[book], flat[f"{book}_sum"])
    np.testing.assert_allclose(np.linalg.norm(flat[book], axis=-1), 8**0.5, rtol=1e-5)
    # Step sizes between 1e-3 and 1e-1, decay rates between -16 and -1 (Gu and Dao, 2023).
    steps = np.log1p(np.exp(flat["blocks.layer_1.ssm.step_bias"].astype("float64")))
    assert ((steps > 0.99e-3) & (steps < 1.01e-1)).all()
    rates = np.exp(flat["blocks.layer_1.ssm.log_rate"])
    assert ((rates > 0.99) & (rates < 16.1)).all()

    again, _ = model.init(jax.random.key(5))
    jax.tree.map(np.testing.assert_array_equal, again, params)
    assert not np.array_equal(model.init(6)[0]["head"]["weight"], params["head"]["weight"])


def test_first_loss_is_that_of_guessing() -> None:
    config = ModularModelConfig.from_toml("demo", overrides=["model.num_layers=2", "model.embed_dim=96"])
    model = ModularCapibaraModel(config)
    tokens = np.random.default_rng(0).integers(0, 256, (4, 33)).astype("int32")
    loss, _ = jax.jit(lambda p: model.loss(p, {"tokens": tokens}, state={}))(model.params)
    assert np.log(256) - 0.1 < float(loss) < np.log(256) + 1.0


def test_own_parameters_are_made_late_and_can_be_set() -> None:
    model = ModularCapibaraModel(small_config("vq"))
    params, state = small_params(model)
    model.params = params
    assert model.params is params
    made = model.state
    assert model.state is made
    assert model.params is params
    model.state = state
    assert model.state is state
    np.testing.assert_array_equal(model(small_tokens()), model.forward({"tokens": small_tokens()}))


def test_the_large_configuration_allocates_nothing() -> None:
    before = {id(a) for a in jax.live_arrays()}
    config = ModularModelConfig.from_toml("production/tpu_v4.toml")
    model = ModularCapibaraModel(config)
    assert model.tpu_mesh_shape == (4, 8)
    assert model.tpu_memory_limit_gb == 32.0
    assert model.is_tpu_optimized is False
    d, layers, mlp, vocab, heads, kv, size = 2048, 24, 5632, 32768, 16, 8, 128
    block = d * size * (heads + 2 * kv) + heads * size * d + 3 * d * mlp + 2 * d
    assert model.num_params == vocab * d + layers * block + d
    assert "attention" in repr(model)
    assert str(model.num_params)[:4] in repr(model).replace(",", "")
    tokens = jax.ShapeDtypeStruct((2, 16), "int32")
    params = jax.eval_shape(lambda: model.init(0)[0])
    logits = jax.eval_shape(lambda p, t: model.apply(p, t), params, tokens)
    assert logits.shape == (2, 16, vocab)
    assert logits.dtype == np.float32
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"float32"}
    assert not [a for a in jax.live_arrays() if id(a) not in before and a.size > 1000]


@pytest.mark.parametrize("config", [None, "demo", {"model": {}}, small_config().model])
def test_config_of_another_type_is_refused(config: Any) -> None:
    with pytest.raises(InputError, match=r"config is .*expected a ModularModelConfig"):
        ModularCapibaraModel(config)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [
        (np.zeros((2, 3), "float32"), "tokens has dtype float32, expected an integer"),
        (np.zeros((2, 3), bool), "tokens has dtype bool"),
        (np.zeros(3, "int32"), r"tokens has shape \(3,\), expected \[batch, sequence\]"),
        (np.zeros((1, 2, 3), "int32"), r"tokens has shape \(1, 2, 3\)"),
        (3, r"tokens has shape \(\)"),
        ("text", "tokens has dtype"),
        ({"token": np.zeros((2, 3), "int32")}, r"inputs has the keys \['token'\], expected 'tokens'"),
        ({}, r"inputs has the keys \[\], expected 'tokens'"),
        ([[1, 2], [3]], "tokens"),
        (None, "tokens"),
    ],
)
def test_what_is_no_tokens_is_refused(tokens: Any, words: str) -> None:
    model = ModularCapibaraModel(small_config())
    params, _ = small_params(model)
    with pytest.raises(InputError, match=words):
        model.apply(params, tokens)
    with pytest.raises(InputError, match=words):
        model.loss(params, tokens, state={})


@pytest.mark.parametrize("shape", [(2, 1), (2, 0), (0, 5)])
def test_loss_of_nothing_is_refused(shape: tuple[int, int]) -> None:
    model = ModularCapibaraModel(small_config())
    with pytest.raises(InputError, match=r"at least one row of at least two tokens"):
        model.loss(small_params(model)[0], {"tokens": np.zeros(shape, "int32")}, state={})


def test_missing_and_misshapen_parameters_are_named() -> None:
    model = ModularCapibaraModel(small_config("grouped"))
    params, _ = small_params(model)
    broken = dict(params, final_norm={})
    with pytest.raises(InputError, match=r"params has no 'final_norm\.scale'.*init"):
        model.apply(broken, small_tokens())
    with pytest.raises(
        InputError, match=r"params\['embedding'\]\['weight'\] has shape \(8, 11\), expected \(11, 8\)"
    ):
        model.apply(dict(params, embedding={"weight": params["embedding"]["weight"].T}), small_tokens())
    with pytest.raises(InputError, match="params"):
        model.apply(None, small_tokens())  # pyright: ignore[reportArgumentType]


def test_loss_needs_the_state_that_the_model_has() -> None:
    model = ModularCapibaraModel(small_config("vq"))
    params, _ = small_params(model)
    with pytest.raises(InputError, match=r"state has no 'blocks\.vq\.quantiser\.codebook'"):
        model.loss(params, {"tokens": small_tokens()}, state={})


@pytest.mark.parametrize("wrong", ["a", 1.5, True, -1, 2**32])
def test_what_is_no_seed_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"seed=.* must be an integer"):
        ModularCapibaraModel(small_config("ssm")).init(wrong)


def test_parameters_that_are_first_used_inside_a_transformation_are_arrays():
    config = small_config("attention")
    model, other = ModularCapibaraModel(config), ModularCapibaraModel(config)
    jax.eval_shape(model.forward, jax.ShapeDtypeStruct((1, 4), "int32"))
    assert all(
        isinstance(leaf, jax.Array) and leaf.is_fully_addressable for leaf in jax.tree.leaves(model.params)
    )
    for ours, theirs in zip(jax.tree.leaves(model.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)

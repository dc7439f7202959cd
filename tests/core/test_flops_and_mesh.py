"""What a token costs, against the products that JAX's own program holds; and the model laid over a mesh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import jax
import pytest
from emulation import emulated
from small_models import small_config, small_params, small_tokens

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.core.flops import flops_per_token
from capibara.measure import count_flops


def counted(model: ModularCapibaraModel, length: int, training: bool = False) -> float:
    """Operations a token in the products of the model's jaxpr."""
    params, state = small_params(model)
    if training:
        tokens = small_tokens(2, length + 1)
        count = count_flops(
            jax.grad(lambda p: model.loss(p, {"tokens": tokens}, state=state, train=False)[0]), params
        )
    else:
        tokens = small_tokens(2, length)
        count = count_flops(lambda p: model.apply(p, tokens, state=state)[0], params)
    assert count.exact
    return count.total / (2 * length)


@pytest.mark.thin(3)
@pytest.mark.parametrize("kind", ["attention", "grouped", "multi_query", "vq", "untied", "latent"])
@pytest.mark.parametrize("mode", ["scan", "unroll"])
def test_flops_equal_those_of_the_program(kind: str, mode: str) -> None:
    model = ModularCapibaraModel(small_config(kind, model__scan_layers=mode))
    # With one token every pair is looked at, so causal attention is all of attention.
    assert counted(model, 1) == model.flops_per_token(1, training=False)
    m = model.config.model
    widths = m.resolved_head_dim + (m.latent.value_dim if m.latent.kv_rank else m.resolved_head_dim)
    pairs = 2 * m.num_heads * widths * (32 - 33 / 2) * m.block_kinds.count("attention")
    ideal = model.flops_per_token(32, training=False)
    # A program may compute scores above the diagonal; the ideal counts the lower half.
    assert ideal <= counted(model, 32) <= ideal + pairs


@pytest.mark.parametrize("head", ["none", "transform"])
def test_flops_of_an_encoder_equal_those_of_the_program(head: str) -> None:
    config = small_config(
        "grouped", model__causal=False, model__head=head, model__pooler=True, model__norm_placement="sum"
    )
    model = ModularCapibaraModel(config)
    assert counted(model, 7) == model.flops_per_token(7, training=False)


def test_training_flops_equal_those_of_the_program_without_attention() -> None:
    model = ModularCapibaraModel(small_config("vq"))
    # The gradient of the first layer's input is needed (the embedding), so backward is twice forward.
    assert counted(model, 8, training=True) == model.flops_per_token(8)
    assert model.flops_per_token(8) < 3 * model.flops_per_token(8, training=False)
    plain = ModularCapibaraModel(small_config("ssm"))
    assert plain.flops_per_token(8) == 3 * plain.flops_per_token(8, training=False)


def test_state_space_flops_are_products_convolutions_and_the_recurrence() -> None:
    model = ModularCapibaraModel(small_config("ssm"))
    inner, states, taps, layers = 16, 3, 3, 2
    other = layers * (2 * taps * (inner + 2 * states) + 6 * inner * states)
    assert counted(model, 1) == model.flops_per_token(1, training=False) - other
    # The recurrence costs the same a token however long the sequence is.
    assert model.flops_per_token(1) == model.flops_per_token(1000)
    grouped = ModularCapibaraModel(small_config("mamba"))
    other = layers * (2 * taps * (inner + 2 * 2 * states) + 6 * inner * states)
    assert counted(grouped, 1) == grouped.flops_per_token(1, training=False) - other


def test_a_token_pays_for_its_own_experts_and_the_router() -> None:
    wide = {"model.mlp_dim": 24}
    dense = ModularCapibaraModel(small_config("attention", **wide)).config.model
    m = ModularCapibaraModel(
        small_config(
            "attention",
            **wide,
            **{
                "model.num_layers": dense.num_layers + 1,
                "model.experts.count": 7,
                "model.experts.per_token": 2,
                "model.experts.dim": 5,
                "model.experts.shared_dim": 3,
                "model.experts.first_dense": dense.num_layers,
            },
        )
    ).config.model
    longer = dense.replace(num_layers=dense.num_layers + 1)
    d = m.embed_dim
    mixture = d * 7 + 3 * d * (2 * 5 + 3)
    expected = flops_per_token(longer, 9, training=False) + 2 * (mixture - 3 * d * 24)
    assert flops_per_token(m, 9, training=False) == expected


PROGRAM = textwrap.dedent(
    """
    import json, sys
    import jax, numpy as np
    from small_models import small_config, small_tokens
    from capibara.core import ModularCapibaraModel

    big = {"model.num_heads": 8, "model.num_kv_heads": 8, "model.head_dim": 2, "model.vocab_size": 16,
           "model.mlp_dim": 16, "model.embed_dim": 8, "train.batch_size": 32}
    mesh = {"tpu.enabled": True, "tpu.num_chips": 32, "tpu.topology": "4x8"}
    pattern, more = json.loads(sys.argv[1])
    changes = {"model.pattern": pattern, "model.num_layers": len(pattern), **big, **more}
    one = ModularCapibaraModel(small_config(**changes))
    many = ModularCapibaraModel(small_config(**changes, **mesh))
    assert one.mesh is None and dict(many.mesh.shape) == {"data": 4, "model": 8}, many.mesh
    assert not many.is_tpu_optimized
    params, state = many.init(0)
    single = jax.device_put(jax.tree.map(np.asarray, (params, state)), jax.devices()[0])
    same = one.init(0)
    tokens = {"tokens": small_tokens(8, 5)}
    if "model.ssm.groups" in more:
        tokens["segments"] = np.array([[1, 1, 2, 2, 2]] * 4 + [[0, 0, 3, 3, 0]] * 4)
    plain = jax.jit(lambda p, s: one.apply(p, tokens, state=s)[0])(*single)
    laid = jax.jit(lambda p, s: many.apply(p, tokens, state=s)[0])(params, state)
    out = {
        "error": float(np.abs(np.asarray(plain) - np.asarray(laid)).max()),
        "spread": float(np.asarray(plain).std()),
        "init": all(jax.tree.leaves(jax.tree.map(
            lambda a, b: bool(np.allclose(a, b, atol=1e-6)), jax.tree.map(np.asarray, same), (params, state)))),
        "devices": len(laid.sharding.device_set),
        "specs": {jax.tree_util.keystr(p, simple=True, separator="."): [str(a) for a in x.sharding.spec]
                  for p, x in jax.tree_util.tree_leaves_with_path(params)},
        "shards": {jax.tree_util.keystr(p, simple=True, separator="."): list(x.addressable_shards[0].data.shape)
                  for p, x in jax.tree_util.tree_leaves_with_path(params)},
    }
    print(json.dumps(out))
    """
)


def on_32_devices(pattern: list[str], **more: Any) -> dict[str, Any]:
    env = dict(os.environ, XLA_FLAGS=emulated(32), JAX_PLATFORMS="cpu")
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, json.dumps([pattern, more])],
        capture_output=True,
        text=True,
        env=env,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", [["attention"], ["attention", "ssm", "vq"]], ids="-".join)
def test_a_mesh_of_32_gives_the_logits_of_one_device(pattern: list[str]) -> None:
    got = on_32_devices(pattern)
    assert got["devices"] == 32
    assert got["init"], "the mesh changed what init draws"
    assert got["error"] < 1e-5 * got["spread"] + 1e-5
    prefix = "blocks." if len(pattern) == 1 else "blocks.layer_0."
    specs, shards = got["specs"], got["shards"]
    # Embedding dimensions go over "data", heads, inner features and vocabulary over "model".
    assert specs["embedding.weight"] == ["model", "data"]
    assert shards["embedding.weight"] == [2, 2]
    assert specs[prefix + "attention.query.weight"] == ["None", "data", "model", "None"]
    assert shards[prefix + "attention.query.weight"] == [1, 2, 1, 2]
    assert specs[prefix + "attention.out.weight"] == ["None", "model", "None", "data"]
    assert shards[prefix + "mlp.up.weight"] == [1, 2, 2]
    assert shards[prefix + "mlp.down.weight"] == [1, 2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("groups", [2, 8])
def test_groups_of_a_state_space_layer_on_a_mesh_of_32(groups: int) -> None:
    sizes = {"model.ssm.head_dim": 2, "model.ssm.groups": groups, "model.ssm.bias": True, "model.mlp": "none"}
    got = on_32_devices(["ssm"], **sizes)
    assert got["error"] < 1e-5 * got["spread"] + 1e-5
    # Eight heads over eight devices; groups only where there are as many.
    over = "model" if groups == 8 else "None"
    assert got["specs"]["blocks.ssm.value.weight"] == ["None", "data", "model", "None"]
    assert got["specs"]["blocks.ssm.write.weight"] == ["None", "data", over, "None"]
    assert got["specs"]["blocks.ssm.read.bias"] == ["None", over, "None"]
    assert got["specs"]["blocks.ssm.read_conv.weight"] == ["None", "None", over, "None"]
    assert got["specs"]["blocks.ssm.step.bias"] == ["None", "model"]


def test_too_few_devices_mean_no_mesh() -> None:
    model = ModularCapibaraModel(small_config("attention", **{"tpu.enabled": True}))
    assert model.mesh is None
    assert model.is_tpu_optimized is False
    assert model.tpu_mesh_shape == (4, 8)
    off = ModularCapibaraModel(small_config())
    assert off.is_tpu_optimized is False
    assert off.mesh is None


def test_flops_of_local_blocks_and_of_plain_layers():
    sizes = [
        "num_layers=1",
        "embed_dim=32",
        "num_heads=4",
        "num_kv_heads=4",
        "model.mlp_dim=48",
        "vocab_size=8",
    ]
    local = ModularModelConfig.from_toml("demo", [*sizes, 'model.pattern=["local"]', "model.window=5"]).model
    plain = ModularModelConfig.from_toml("demo", [*sizes, "model.mlp=plain"]).model
    usual = ModularModelConfig.from_toml("demo", sizes).model
    length, width = 12, usual.num_heads * usual.resolved_head_dim
    pairs = sum(min(i + 1, 5) for i in range(length)), sum(i + 1 for i in range(length))
    less = 4 * width * (pairs[1] - pairs[0]) / length
    assert flops_per_token(usual, length, False) - flops_per_token(local, length, False) == pytest.approx(
        less
    )
    less = 2 * 32 * 48
    assert flops_per_token(usual, length, False) - flops_per_token(plain, length, False) == pytest.approx(
        less
    )

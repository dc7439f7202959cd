"""What is read out of shapes: transformers as several libraries write them, against what their dimensions are."""

from __future__ import annotations

import math
from typing import Any

import pytest

from capibara.config import ModularModelConfig
from capibara.config.axes import AxisRules
from capibara.core import ModularCapibaraModel
from capibara.plan.sharding import ShardingStrategy, optimize_sharding_strategy
from capibara.plan.sharding.roles import assign_roles, embed_width
from capibara.plan.sharding.tree import read_tree

E, H, KV, D, F, V, L = 4096, 32, 8, 128, 11008, 32000, 4


def over_model(tree: Any, shape: tuple[int, ...] = (1, 8192), **settings: Any) -> ShardingStrategy:
    """One axis that only matrices can be cut over."""
    return optimize_sharding_strategy(tree, shape, (8,), axis_names=("model",), **settings)


def cut(strategy: ShardingStrategy) -> dict[str, tuple[str | None, ...]]:
    return {a.path: tuple(a.spec) for a in strategy if any(a.spec)}


def test_llama_with_heads_and_stacked_layers() -> None:
    tree = {
        "tok": (V, E),
        "blocks": {
            "wq": (L, E, H, D),
            "wk": (L, E, KV, D),
            "wv": (L, E, KV, D),
            "wo": (L, H, D, E),
            "w1": (L, E, F),
            "w3": (L, E, F),
            "w2": (L, F, E),
            "n1": (L, E),
            "n2": (L, E),
        },
        "norm": (E,),
        "out": (E, V),
    }
    strategy = over_model(tree)
    m = "model"
    assert cut(strategy) == {
        "blocks.wq": (None, None, m, None),
        "blocks.wk": (None, None, m, None),
        "blocks.wv": (None, None, m, None),
        "blocks.wo": (None, m, None, None),
        "blocks.w1": (None, None, m),
        "blocks.w3": (None, None, m),
        "blocks.w2": (None, m, None),
        "out": (None, m),
    }
    kinds = {a.path: a.kind for a in strategy}
    assert kinds["tok"] == "lookup"
    assert kinds["out"] == "head"
    assert kinds["blocks.n1"] == "vector"


def test_the_same_with_names_that_mean_nothing() -> None:
    block = {
        "a": (E, H, D),
        "b": (E, KV, D),
        "c": (E, KV, D),
        "d": (H, D, E),
        "e": (E, F),
        "f": (E, F),
        "g": (F, E),
        "h": (E,),
    }
    strategy = over_model({"a": (V, E), "b": [block, block], "z": (E,)})
    m = "model"
    expected = {
        "a": (None, m, None),
        "b": (None, m, None),
        "c": (None, m, None),
        "d": (m, None, None),
        "e": (None, m),
        "f": (None, m),
        "g": (m, None),
    }
    both = {f"b.{i}.{name}": spec for i in (0, 1) for name, spec in expected.items()}
    assert cut(strategy) == {"a": (m, None), **both}
    assert strategy.arrays[0].kind == "tied"


def test_torch_names_with_matrices_stored_out_by_in() -> None:
    tree: dict[str, Any] = {"model.embed_tokens.weight": (V, E), "lm_head.weight": (V, E)}
    for i in range(2):
        block = f"model.layers.{i}."
        tree |= {
            block + "self_attn.q_proj.weight": (E, E),
            block + "self_attn.k_proj.weight": (KV * D, E),
            block + "self_attn.v_proj.weight": (KV * D, E),
            block + "self_attn.o_proj.weight": (E, E),
            block + "mlp.gate_proj.weight": (F, E),
            block + "mlp.up_proj.weight": (F, E),
            block + "mlp.down_proj.weight": (E, F),
            block + "input_layernorm.weight": (E,),
        }
    found = cut(over_model(tree))
    for i in range(2):
        block = f"model.layers.{i}."
        into = [f"self_attn.{n}_proj" for n in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
        for name in into:
            assert found[f"{block}{name}.weight"] == ("model", None), name
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            assert found[f"{block}{name}.weight"] == (None, "model"), name
    assert found["lm_head.weight"] == ("model", None)
    assert not any("layernorm" in path for path in found)


def test_gpt2_with_fused_projections_and_biases() -> None:
    width, inner = 8192, 32768
    block = {
        "ln_1": {"scale": (width,), "bias": (width,)},
        "attn": {
            "c_attn": {"kernel": (width, 3 * width), "bias": (3 * width,)},
            "c_proj": {"kernel": (width, width), "bias": (width,)},
        },
        "mlp": {
            "c_fc": {"kernel": (width, inner), "bias": (inner,)},
            "c_proj": {"kernel": (inner, width), "bias": (width,)},
        },
    }
    tree = {
        "wte": {"embedding": (50304, width)},
        "wpe": {"embedding": (1024, width)},
        "h_0": block,
        "h_1": block,
    }
    strategy = over_model(tree, memory_limit_gb=64)
    found = cut(strategy)
    for i in (0, 1):
        assert found[f"h_{i}.attn.c_attn.kernel"] == (None, "model")
        assert found[f"h_{i}.attn.c_attn.bias"] == ("model",)
        assert found[f"h_{i}.attn.c_proj.kernel"] == ("model", None)
        assert found[f"h_{i}.mlp.c_fc.kernel"] == (None, "model")
        assert found[f"h_{i}.mlp.c_fc.bias"] == ("model",)
        assert found[f"h_{i}.mlp.c_proj.kernel"] == ("model", None)
        assert f"h_{i}.attn.c_proj.bias" not in found
    kinds = {a.path: a.kind for a in strategy}
    assert kinds["wte.embedding"] == "tied"
    assert kinds["wpe.embedding"] == "lookup"


def test_as_many_layers_as_heads() -> None:
    tree = {
        "wte": (50304, 768),
        "blocks": {
            **{name: {"w": (12, 768, 12, 64)} for name in "qkv"},
            "o": {"w": (12, 12, 64, 768)},
            "ln": (12, 768),
        },
    }
    leaves = read_tree(tree).leaves
    assert embed_width(leaves, (8, 1024)) == 768
    for leaf, role in zip(leaves, assign_roles(leaves, (8, 1024), 768), strict=True):
        assert role.stack == (0 if leaf.path == ("wte",) else 1), leaf
        assert role.repeats == (1 if leaf.path == ("wte",) else 12)


def test_experts_are_cut_between_experts() -> None:
    tree = {
        "embed": (V, E),
        "blocks": {
            "attn": {"q": (L, E, H, D), "o": (L, H, D, E)},
            "moe": {"gate": (L, 8, E, 1024), "up": (L, 8, E, 1024), "down": (L, 8, 1024, E)},
            "norm": (L, E),
        },
    }
    strategy = over_model(tree)
    found = cut(strategy)
    for name in ("gate", "up", "down"):
        assert found[f"blocks.moe.{name}"] == (None, "model", None, None)
    assert any("every expert" in said for said in strategy.assumptions)


@pytest.mark.parametrize(
    ("inside", "stacked"),
    [
        ({"up": (L, E, 1024), "down": (L, 1024, E), "norm": (L, E)}, True),
        ({"experts": {"up": (8, E, 1024), "down": (8, 1024, E)}}, False),
        ({"experts": {"up": (L, 8, E, 1024), "down": (L, 8, 1024, E)}}, True),
    ],
)
def test_a_first_dimension_counts_layers_or_experts(inside: dict[str, Any], stacked: bool) -> None:
    leaves = read_tree({"embed": (V, E), "blocks": inside}).leaves
    for leaf, role in zip(leaves, assign_roles(leaves, (8, 1024), E), strict=True):
        assert role.stack == (stacked and leaf.path[0] == "blocks"), leaf


@pytest.mark.parametrize("pattern", [["attention"], ["ssm"], ["attention", "ssm"], ["vq"]])
def test_shapes_alone_say_what_names_say(pattern: list[str]) -> None:
    """The shipped decoder: its parameters without names, against the table of its own logical names."""
    config = ModularModelConfig.from_toml(
        "production/tpu_v4",
        {"model.pattern": pattern, "model.num_layers": 2 * len(pattern)},
    )
    model = ModularCapibaraModel(config)
    settings: dict[str, Any] = {"accumulate_dtype": "bfloat16", "memory_limit_gb": 256}
    with_names = over_model(model, (1, 65536), rules=AxisRules(), **settings)
    shapes = {".".join(path): spec.shape for path, spec in model.compiled.params.items()}
    nested: dict[str, Any] = {}
    for path, spec in model.compiled.params.items():
        at = nested
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = spec.shape
    without = over_model(nested, (1, 65536), **settings)
    assert {a.path for a in without} == set(shapes)
    matrices = [
        a.path for a in without if a.kind != "vector" and "ssm" not in a.path and "quantiser" not in a.path
    ]
    assert matrices
    named = cut(with_names)
    for path in matrices:
        assert without[path] == with_names[path], path
        if ".mlp." in path:
            assert path in named, path


def test_the_residual_width() -> None:
    def width(tree: Any, shape: tuple[int, ...]) -> int:
        return embed_width(read_tree(tree).leaves, shape)

    assert width({"up": (64, 256), "down": (256, 64)}, (8, 16, 64)) == 64
    assert width({"up": (64, 256), "down": (256, 64)}, (8, 16)) == 64
    assert width({"q": (512, 8, 64), "o": (8, 64, 512), "norm": (512,)}, (8, 16)) == 512


def test_trees_that_are_none() -> None:
    from capibara.plan.errors import PlanError

    with pytest.raises(PlanError, match="holds no arrays"):
        read_tree({})
    with pytest.raises(PlanError, match=r"'a\.b'.*got str"):
        read_tree({"a": {"b": "text"}})
    with pytest.raises(PlanError, match="tuple of 2 logical axis names"):
        read_tree({"a": (4, 8)}, {"a": ("embed",)})
    with pytest.raises(PlanError, match="names 'b', which"):
        read_tree({"a": (4,)}, {"a": ("embed",), "b": ("mlp",)})


def test_attention_works_for_every_pair_of_positions() -> None:
    """4 · length · width for scores and mixing, half of it causal; where heads are seen, or the names say attention."""
    plain = {"mlp": {"up": (512, 2048), "down": (2048, 512)}}
    for attention in (
        {"q": (512, 8, 64), "o": (8, 64, 512)},
        {"attn": {"q_proj": (512, 512), "o_proj": (512, 512)}},
    ):
        leaves = read_tree({**plain, "attn": attention}).leaves
        roles = assign_roles(leaves, (4, 1024, 512), 512)
        flops = {leaf.path[-1]: role.flops for leaf, role in zip(leaves, roles, strict=True)}
        own = 2 * 1024 * 512
        assert max(flops.get("o", 0), flops.get("o_proj", 0)) == 2 * 512 * 512 + own
        assert min(flops.get("q", math.inf), flops.get("q_proj", math.inf)) == 2 * 512 * 512
        assert flops["down"] == flops["up"] == 2 * 512 * 2048
    model = ModularCapibaraModel(ModularModelConfig.from_toml("production/tpu_v4", {"model.num_layers": 2}))
    leaves = read_tree(model).leaves
    total = sum(role.flops for role in assign_roles(leaves, (8, 2048), 2048))
    assert total == pytest.approx(model.flops_per_token(2048, training=False), rel=1e-3)

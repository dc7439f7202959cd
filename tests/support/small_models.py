"""Small configurations of the language model, one for each kind of block and way of combining them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from capibara.config import ModularModelConfig

SMALL = {
    "model.vocab_size": 11,
    "model.embed_dim": 8,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.num_kv_heads": 4,
    "model.mlp_dim": 12,
    "model.ssm.head_dim": 4,
    "model.ssm.state_dim": 3,
    "model.ssm.conv_width": 3,
    "model.ssm.chunk_size": 4,
    "model.vq.codebook_size": 5,
}

KINDS: dict[str, dict[str, Any]] = {
    "attention": {"model.pattern": ["attention"]},
    "grouped": {"model.pattern": ["attention"], "model.num_kv_heads": 2},
    "multi_query": {"model.pattern": ["attention"], "model.num_kv_heads": 1, "model.head_dim": 6},
    "ssm": {"model.pattern": ["ssm"]},
    "mamba": {
        "model.pattern": ["ssm"],
        "model.mlp": "none",
        "model.residual": "accumulate",
        "model.ssm.groups": 2,
        "model.ssm.bias": True,
        "model.ssm.conv_bias": False,
        "model.ssm.step_min": 0.4,
        "model.ssm.step_max": 1.5,
    },
    "ungated": {
        "model.pattern": ["ssm", "attention"],
        "model.mlp": "none",
        "model.ssm.activation": "relu",
        "model.ssm.norm": False,
    },
    "vq": {"model.pattern": ["vq"]},
    "mixed": {"model.pattern": ["attention", "ssm", "vq"], "model.num_layers": 4, "model.num_kv_heads": 2},
    "remainder": {"model.pattern": ["attention", "ssm", "vq"], "model.num_layers": 5},
    "short": {"model.pattern": ["vq", "attention", "ssm"], "model.num_layers": 2},
    "experts": {"model.pattern": ["attention"], "model.experts.count": 4, "model.experts.dim": 5},
    "first dense": {
        "model.pattern": ["attention", "ssm"],
        "model.num_layers": 7,
        "model.experts.count": 5,
        "model.experts.per_token": 3,
        "model.experts.router": "sigmoid",
        "model.experts.normalise": False,
        "model.experts.scale": 1.5,
        "model.experts.shared_dim": 6,
        "model.experts.first_dense": 2,
    },
    "latent": {
        "model.pattern": ["attention"],
        "model.latent.kv_rank": 6,
        "model.latent.query_rank": 5,
        "model.latent.head_dim": 4,
        "model.latent.rotary_dim": 2,
        "model.latent.value_dim": 3,
        "model.rope.interleaved": True,
    },
    "untied": {"model.pattern": ["attention"], "model.tie_embeddings": False},
}

FLOAT64 = {f"precision.{k}_dtype": "float64" for k in ("param", "compute", "accumulate")}


# Tests run each program once or twice: compiling is what they wait for.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def small_config(kind: str = "attention", /, **changes: Any) -> ModularModelConfig:
    """A configuration by the name of its kind; ``changes`` write ``__`` for the dot: ``model__remat="full"``."""
    values = {**SMALL, **KINDS[kind], **{k.replace("__", "."): v for k, v in changes.items()}}
    return ModularModelConfig.from_toml("demo", overrides=[f"{k}={_toml(v)}" for k, v in values.items()])


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def small_tokens(batch: int = 2, length: int = 10, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 11, (batch, length)).astype("int32")


def small_params(model: Any, seed: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """``(params, state)`` drawn by NumPy: no zero bias and no unit scale that could hide a mistake.

    Compiling JAX's generators takes longer than compiling a small model, so only tests of ``init`` itself use it.
    """
    rng = np.random.default_rng(seed)
    params: dict[str, Any] = {}
    for path, spec in model.compiled.params.items():
        values = 0.4 * rng.normal(size=spec.shape)
        if path[-1] in ("scale", "skip"):
            values += 1.0
        _set(params, path, values.astype(spec.dtype))
    state: dict[str, Any] = {}
    for path, spec in model.compiled.states.items():
        values = (
            rng.uniform(0.5, 3.0, spec.shape) if path[-1] == "cluster_size" else rng.normal(size=spec.shape)
        )
        _set(state, path, values.astype(spec.dtype))
    _even(state)
    return params, state


def _set(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _even(tree: dict[str, Any]) -> None:
    """Make ``codebook_sum = codebook * cluster_size`` everywhere."""
    if "codebook_sum" in tree:
        tree["codebook_sum"] = tree["codebook"] * tree["cluster_size"][..., None]
        return
    for inner in tree.values():
        if isinstance(inner, dict):
            _even(inner)

"""The decoder that is compiled computes what it says, on a CPU with sizes to match."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from benchmarks._maxtext.decoder import Decoder, build

LIKE_V4 = {
    "width": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 16,
    "hidden": 64,
    "vocab": 96,
    "gated": False,
    "order": "parallel",
    "attention": "dense",
    "causal": False,
    "rotary": False,
    "head_norms": "qk",
    "embedding": "gather",
    "tied": True,
    "logits": "float32",
    "remat": "full",
    "batch": 2,
    "length": 24,
    "clip": False,
}
LIKE_V5P = LIKE_V4 | {
    "attention": "flash",
    "causal": True,
    "rotary": True,
    "head_norms": "qkv",
    "embedding": "one-hot",
    "remat": "dots",
    "clip": True,
}
LIKE_LLAMA = LIKE_V5P | {
    "gated": True,
    "order": "sequential",
    "kv_heads": 1,
    "head_norms": "",
    "tied": False,
    "logits": "bfloat16",
    "remat": "projections",
}
MODELS = {"v4": LIKE_V4, "v5p": LIKE_V5P, "llama": LIKE_LLAMA}


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))


def initial(config: Decoder) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    found = {}
    for name, (shape, _) in config.parameter_shapes().items():
        scale = 1.0 if name == "embedding" else (shape[1] if name.startswith("layer") else shape[0]) ** -0.5
        norm = name.endswith("norm")
        found[name] = (rng.normal(1.0, 0.1, shape) if norm else rng.normal(0.0, scale, shape)).astype(
            np.float32
        )
    return found


def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def rotate(x: np.ndarray) -> np.ndarray:
    """Pairs (i, i + half) as complex numbers, turned by position · 10000^(-i / half)."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(
        1j * np.arange(x.shape[1])[:, None, None] * 1e4 ** (-np.arange(half) / half)
    )
    return np.concatenate([turned.real, turned.imag], axis=-1)


def distance_bias(table: np.ndarray, length: int) -> np.ndarray:
    out = np.zeros((len(table), length, length))
    for q in range(length):
        for k in range(length):
            back = max(q - k, 0)
            bucket = back if back < 16 else min(31, 16 + int(np.log(back / 16) / np.log(128 / 16) * 16))
            out[:, q, k] = table[:, bucket]
    return out


def loss_by_hand(config: Decoder, p: dict[str, np.ndarray], tokens: np.ndarray, targets: np.ndarray) -> float:
    """In NumPy, with 64 bits."""
    p = {name: value.astype(np.float64) for name, value in p.items()}
    x = p["embedding"][tokens]
    for i in range(config.layers):
        w = {name.removeprefix("layer "): v[i] for name, v in p.items() if name.startswith("layer ")}

        def attend(x: np.ndarray, w: Any = w) -> np.ndarray:
            q, k, v = (np.einsum("ble,ehd->blhd", x, w[n]) for n in ("query", "key", "value"))
            if config.rotary:
                q, k = rotate(q), rotate(k)
            q, k, v = (
                norm(y, w[f"{n} norm"]) if n in config.head_norms else y
                for n, y in zip("qkv", (q, k, v), strict=True)
            )
            k, v = (np.repeat(y, config.heads // config.kv_heads, axis=2) for y in (k, v))
            scores = np.einsum("bqhd,bkhd->bhqk", q, k)
            if config.attention == "dense":
                scores = scores + distance_bias(w["distances"], config.length)
            scores = np.where(np.tri(config.length, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
            return np.einsum("blhd,hde->ble", out, w["out"])

        def feed(x: np.ndarray, w: Any = w) -> np.ndarray:
            up = x @ w["up"]
            gate = x @ w["gate"] if config.gated else None
            return (np.maximum(up, 0) if gate is None else gate / (1 + np.exp(-gate)) * up) @ w["down"]

        y = norm(x, w["norm"])
        if config.order == "parallel":
            x = x + attend(y) + feed(y)
        else:
            x = x + attend(y)
            x = x + feed(norm(x, w["second norm"]))
    logits = norm(x, p["norm"]) @ (p["embedding"].T if config.tied else p["output"]) / np.sqrt(config.width)
    logits -= logits.max(-1, keepdims=True)
    wanted = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return float(np.mean(np.log(np.exp(logits).sum(-1)) - wanted))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_the_model_written_out_and_steps_lower_it(name):
    config = Decoder(**MODELS[name])
    on = mesh()
    step = build(on, **MODELS[name]).lowered.compile()
    tokens, targets = np.random.default_rng(1).integers(0, config.vocab, (2, config.batch, config.length))
    start = initial(config)
    shapes = config.parameter_shapes()

    def place(values: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return {n: jax.device_put(v, NamedSharding(on, shapes[n][1])) for n, v in values.items()}

    zeros = {n: np.zeros_like(v) for n, v in start.items()}
    state = {
        "params": place(start),
        "first": place(zeros),
        "second": place(zeros),
        "count": jnp.zeros((), jnp.int32),
    }
    given = [jnp.asarray(x, jnp.int32) for x in (tokens, targets)]
    losses, sizes = [], []
    for _ in range(30):
        state, loss, size = step(state, *given)
        losses.append(float(loss))
        sizes.append(float(size))
    assert losses[0] == pytest.approx(loss_by_hand(config, start, tokens, targets), abs=2e-2)
    assert losses[-1] < losses[0]
    assert np.isfinite(sizes).all()
    assert int(state["count"]) == 30


@pytest.mark.slow
def test_the_backward_pass_computes_again_what_is_not_kept():
    products = {}
    for remat in ("dots", "projections", "full"):
        lowered = build(mesh(), **(LIKE_LLAMA | {"remat": remat})).lowered
        products[remat] = lowered.as_text().count("dot_general")
    # Kept in one and computed again in the next: the gate and the value it multiplies; query, key, value, and the
    # attention's output, which the feed-forward part reads.
    assert products["projections"] - products["dots"] == 2
    assert products["full"] - products["projections"] == 4


def test_parameters_and_moments_are_what_the_program_holds():
    workload = build(mesh(), **LIKE_V4)
    size = 4 * Decoder(**LIKE_V4).num_parameters
    kinds = workload.bytes_by_kind()
    assert kinds["parameters"] == size
    assert kinds["optimizer"] == 2 * size + 4

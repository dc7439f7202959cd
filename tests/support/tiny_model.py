"""A one-layer attention model in a page of JAX: the smallest thing that has the protocol of the real model.

It carries a non-trained state (a running mean of the token embedding and a count of calls), so that tests see
whether state is threaded through training, checkpoints and resuming.
"""

from __future__ import annotations

import types
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import capibara
from capibara.data import ByteTokenizer


class TinyModel:
    """Token and position embedding, one causal attention head, a residual, a tied head."""

    tokenizer = ByteTokenizer()

    def __init__(self, config: Any) -> None:
        self.config = config
        self.vocab = config.model.vocab_size
        self.width = config.model.embed_dim
        self.length = config.model.max_sequence_length
        self.dropout = config.model.dropout_rate

    def init(self, seed: int) -> tuple[Any, Any]:
        keys = jax.random.split(jax.random.key(seed), 6)
        shape = (self.width, self.width)
        params = {
            "embed": 0.05 * jax.random.normal(keys[0], (self.vocab, self.width)),
            "position": 0.05 * jax.random.normal(keys[1], (self.length, self.width)),
            "block": {
                name: jax.random.normal(key, shape) * self.width**-0.5
                for name, key in zip(("q", "k", "v", "o"), keys[2:], strict=True)
            },
            "scale": jnp.ones(self.width),
        }
        return params, {"mean": jnp.zeros(self.width), "calls": jnp.int32(0)}

    @cached_property
    def params(self) -> Any:
        return self.init(0)[0]

    @property
    def state(self) -> Any:
        return self.init(0)[1]

    @property
    def param_axes(self) -> Any:
        return {
            "embed": ("vocab", "embed"),
            "position": ("sequence", "embed"),
            "block": dict.fromkeys(("q", "k", "v", "o"), ("embed", "hidden")),
            "scale": ("embed",),
        }

    @property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def flops_per_token(self, sequence_length: int, training: bool = True) -> float:
        matrices = 4 * self.width**2 + self.vocab * self.width + sequence_length * self.width
        return (6.0 if training else 2.0) * matrices

    def apply(
        self, params: Any, inputs: Any, *, state: Any = None, key: Any = None, train: bool = False
    ) -> Any:
        tokens = inputs["tokens"] if isinstance(inputs, dict) else inputs
        logits, _ = self.decode(params, tokens, self.init_cache(*tokens.shape))
        return logits if state is None else (logits, state)

    def loss(
        self, params: Any, batch: Any, *, state: Any, key: Any = None, train: bool = True
    ) -> tuple[jax.Array, Any]:
        tokens = batch["tokens"]
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        logits, _ = self.decode(params, inputs, self.init_cache(*inputs.shape))
        if train and self.dropout and key is not None:
            kept = jax.random.bernoulli(key, 1 - self.dropout, logits.shape)
            logits = jnp.where(kept, logits, 0.0)
        log_probability = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)
        cross_entropy = -log_probability.mean()
        new_state = state
        if train:
            seen = jax.lax.stop_gradient(params["embed"][inputs].mean((0, 1)))
            new_state = {"mean": 0.9 * state["mean"] + 0.1 * seen, "calls": state["calls"] + 1}
        return cross_entropy, (new_state, {"cross_entropy": cross_entropy})

    def init_cache(self, batch_size: int, max_length: int) -> Any:
        shape = (batch_size, max_length, self.width)
        return {"k": jnp.zeros(shape), "v": jnp.zeros(shape), "position": jnp.int32(0)}

    def decode(
        self, params: Any, tokens: jax.Array, cache: Any, *, state: Any = None
    ) -> tuple[jax.Array, Any]:
        start, new = cache["position"], tokens.shape[1]
        positions = start + jnp.arange(new)
        x = params["embed"][tokens] + params["position"][positions]
        x = x * params["scale"]
        weights = params["block"]
        zero = jnp.int32(0)
        k = jax.lax.dynamic_update_slice(cache["k"], x @ weights["k"], (zero, start, zero))
        v = jax.lax.dynamic_update_slice(cache["v"], x @ weights["v"], (zero, start, zero))
        scores = jnp.einsum("bqd,bkd->bqk", x @ weights["q"], k) * self.width**-0.5
        visible = jnp.arange(k.shape[1])[None, :] <= positions[:, None]
        mixed = jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.where(visible, scores, -1e9)), v)
        logits = (x + mixed @ weights["o"]) @ params["embed"].T
        return logits, {"k": k, "v": v, "position": start + new}


def core_with_tiny_model() -> types.ModuleType:
    """A module to put in the place of ``capibara.core``; the real one's modules are still found."""
    module = types.ModuleType("capibara.core")
    module.__path__ = [str(Path(capibara.__file__).parent / "core")]
    module.ModularCapibaraModel = TinyModel  # pyright: ignore[reportAttributeAccessIssue]
    return module

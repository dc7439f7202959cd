"""The demo's decoder in Flax NNX with optax: a peer of the training benchmark.

The same sizes and arithmetic as :mod:`benchmarks.torch_decoder`, written the way a user of NNX would: layers unrolled,
``jax.nn.dot_product_attention``, one jitted step that updates the optimizer in place.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from capibara.config.sections import ModelSection, OptimizerSection

__all__ = ["NnxDecoder", "nnx_step"]


class Block(nnx.Module):
    def __init__(self, m: ModelSection, rngs: nnx.Rngs) -> None:
        d, self.heads, self.kv, self.size = m.embed_dim, m.num_heads, m.num_kv_heads, m.resolved_head_dim

        def linear(ins: int, outs: int) -> nnx.Linear:
            return nnx.Linear(ins, outs, use_bias=False, rngs=rngs)

        self.norm1 = nnx.RMSNorm(d, epsilon=m.norm_epsilon, rngs=rngs)
        self.norm2 = nnx.RMSNorm(d, epsilon=m.norm_epsilon, rngs=rngs)
        self.query = linear(d, self.heads * self.size)
        self.key = linear(d, self.kv * self.size)
        self.value = linear(d, self.kv * self.size)
        self.out = linear(self.heads * self.size, d)
        self.gate = linear(d, m.resolved_mlp_dim)
        self.up = linear(d, m.resolved_mlp_dim)
        self.down = linear(m.resolved_mlp_dim, d)

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        b, t, _ = x.shape
        h = self.norm1(x)
        q = rotate(self.query(h).reshape(b, t, self.heads, self.size), cos, sin)
        k = rotate(self.key(h).reshape(b, t, self.kv, self.size), cos, sin)
        v = self.value(h).reshape(b, t, self.kv, self.size)
        a = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.reshape(b, t, -1))
        h = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class NnxDecoder(nnx.Module):
    """Logits ``[batch, sequence, vocab]`` from tokens ``[batch, sequence]``."""

    def __init__(self, m: ModelSection, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Embed(m.vocab_size, m.embed_dim, rngs=rngs)
        self.blocks = nnx.List([Block(m, rngs) for _ in range(m.num_layers)])
        self.norm = nnx.RMSNorm(m.embed_dim, epsilon=m.norm_epsilon, rngs=rngs)
        self.size, self.theta = m.resolved_head_dim, m.rope_theta

    def __call__(self, tokens: jax.Array) -> jax.Array:
        half = jnp.arange(0, self.size, 2) / self.size
        angle = jnp.outer(jnp.arange(tokens.shape[1]), self.theta**-half)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.embedding.attend(self.norm(x))


def nnx_step(m: ModelSection, o: OptimizerSection, tokens: jax.Array) -> Any:
    """A function that takes one step on ``tokens [batch, sequence + 1]``, and returns the loss.

    Args:
        m: the sizes. o: learning rate, decay and clipping of AdamW.
    """
    model = NnxDecoder(m, nnx.Rngs(0))
    adamw = optax.adamw(o.learning_rate, o.beta1, o.beta2, weight_decay=o.weight_decay)
    optimizer = nnx.Optimizer(
        model, optax.chain(optax.clip_by_global_norm(o.grad_clip_norm), adamw), wrt=nnx.Param
    )

    @nnx.jit(donate_argnums=(0, 1))
    def step(model: NnxDecoder, optimizer: Any, tokens: jax.Array) -> jax.Array:
        def loss_of(model: NnxDecoder) -> jax.Array:
            logits = model(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return loss

    def one() -> jax.Array:
        return step(model, optimizer, tokens)

    one.parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))  # type: ignore[attr-defined]
    return one

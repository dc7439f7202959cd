"""A decoder's training step as PyTorch's FSDP runs it: products of bfloat16, AdamW, all sharded over ``data``.

The products are those of the published runs, forward and backward. Attention's kernel is not in it (a compiled program
says nothing of such a kernel's operations): its operands are made, and its result is an element-wise stand-in of the
same size.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.plan.workloads import Workload

__all__ = ["lower_step"]

_COMPUTE, _WIDE = jnp.bfloat16, jnp.float32


@jax.custom_vjp
def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def _dot_backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    rows = grad.reshape(-1, grad.shape[-1])
    return grad @ w.T, x.reshape(-1, x.shape[-1]).T @ rows


_dot.defvjp(lambda x, w: (x @ w, (x, w)), _dot_backward)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(_WIDE)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5) * scale).astype(_COMPUTE)


def lower_step(
    mesh: Mesh,
    *,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    inner: int,
    gated: bool,
    tied: bool,
    vocab: int,
    length: int,
    rows: int,
    microbatches: int,
    recompute: bool,
    stored: str,
) -> Workload:
    """Lower one optimizer step.

    Args:
      mesh: one axis, ``data``.
      inner: width of the feed-forward. gated: whether it has a gate (SwiGLU), otherwise GELU.
      tied: whether the table of embeddings is the last product's.
      rows: of all devices and microbatches together.
      recompute: whether each block is computed again in the backward pass; otherwise the results of products are kept.
      stored: dtype of parameters and moments.
    """
    keys = width * kv_heads // heads
    shapes: dict[str, Any] = {
        "table": (vocab, width),
        "norm": (width,),
        "blocks": {
            "norm_1": (layers, width),
            "norm_2": (layers, width),
            "qkv": (layers, width, width + 2 * keys),
            "out": (layers, width, width),
            "up": (layers, width, 2 * inner if gated else inner),
            "down": (layers, inner, width),
        },
    }
    if not tied:
        shapes["head"] = (vocab, width)

    def block(x: jax.Array, p: Any) -> jax.Array:
        q, k, v = jnp.split(_dot(_norm(x, p["norm_1"]), p["qkv"].astype(_COMPUTE)), [width, width + keys], -1)
        attended = q + jnp.repeat(k * v, heads // kv_heads, -1)
        x = x + _dot(attended, p["out"].astype(_COMPUTE))
        h = _dot(_norm(x, p["norm_2"]), p["up"].astype(_COMPUTE))
        if gated:
            gate, h = jnp.split(h, 2, -1)
            h = jax.nn.silu(gate) * h
        else:
            h = jax.nn.gelu(h)
        return x + _dot(h, p["down"].astype(_COMPUTE))

    kept = None if recompute else jax.checkpoint_policies.dots_saveable
    rematerialised = jax.checkpoint(block, policy=kept)
    by_rows = NamedSharding(mesh, PartitionSpec("data"))

    def turn(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return jax.lax.with_sharding_constraint(rematerialised(x, p), by_rows), None

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(turn, params["table"].astype(_COMPUTE)[tokens[:, :-1]], params["blocks"])
        head = params["table" if tied else "head"].astype(_COMPUTE)
        logits = _dot(_norm(x, params["norm"]), head.T).astype(_WIDE)
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - chosen).mean()

    def sharding(shape: tuple[int, ...]) -> NamedSharding:
        spec = {3: (None, "data"), 2: ("data",) if shape[0] == vocab else ()}.get(len(shape), ())
        return NamedSharding(mesh, PartitionSpec(*spec))

    def step(params: Any, first: Any, second: Any, tokens: jax.Array) -> tuple[Any, Any, Any]:
        def add(sums: Any, part: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, jax.grad(loss)(params, part)), None

        if microbatches == 1:
            grads = jax.grad(loss)(params, tokens[0])
        else:
            grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), tokens)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
        second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, grads)
        params = jax.tree.map(
            lambda p, m, v: p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), params, first, second
        )
        return params, first, second

    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.dtype(stored), sharding=sharding(shape)),
        shapes,
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    tokens = jax.ShapeDtypeStruct(
        (microbatches, rows // microbatches, length + 1),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec(None, "data")),
    )
    kept_as = jax.tree.map(lambda array: array.sharding, params)
    jitted = jax.jit(step, donate_argnums=(0, 1, 2), out_shardings=(kept_as,) * 3)
    kinds = {"parameters": params, "optimizer": (params, params), "batch": tokens}
    return Workload(jitted.lower(params, params, params, tokens), kinds)

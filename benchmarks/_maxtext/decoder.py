"""Decoders of the shapes that published rows were measured with, in plain JAX, as programs to compile ahead of time.

What decides a step's time is here as in the measured programs: which matrix products there are and in what order, what
is kept for the backward pass, how parameters, optimiser state and activations are laid over the mesh, and in which
number format each part is. What does not (tokenisers, dropout at rate 0, initial values) is not.

Parameters and Adam's moments are float32 and lie split over all devices: the model's width over ``fsdp``, heads, hidden
units and vocabulary over ``tensor``. Activations are bfloat16, sequences over ``fsdp``, width over ``tensor``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.plan.workloads import Workload

__all__ = ["Decoder", "build"]

BUCKETS = 32
LEARNING_RATE, BETA_1, BETA_2, EPSILON, DECAY = 3e-5, 0.9, 0.95, 1e-8, 0.1


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """One model and how it is trained.

    Attributes:
      width, layers, heads, kv_heads, head_dim, hidden, vocab: its size; ``hidden`` is that of the feed-forward part.
      gated: the feed-forward part multiplies two products of the input (SiLU of one), else it is a ReLU of one.
      order: attention and feed-forward both read the layer's input (``"parallel"``), or one the other's output.
      attention: ``"dense"`` (all scores at once, with a learned bias by distance) or ``"flash"`` (a kernel).
      causal: whether the kernel leaves out what the mask hides; the dense form computes it all either way.
      rotary: rotary positions.
      head_norms: which of ``"qkv"`` are normalised a head.
      embedding: rows are looked up (``"gather"``) or multiplied by a one-hot matrix (``"one-hot"``).
      tied: the embedding is also the output layer.
      logits: number format of the last product's operands.
      remat: what the backward pass computes again: ``"full"`` all of a layer, ``"dots"`` all but matrix products,
        ``"projections"`` all but the query, key, value, attention and feed-forward outputs.
      batch: sequences a device; ``length`` tokens each.
      clip: gradients are scaled down to a norm of 1.
    """

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int
    gated: bool
    order: Literal["parallel", "sequential"]
    attention: Literal["dense", "flash"]
    causal: bool
    rotary: bool
    head_norms: str
    embedding: Literal["gather", "one-hot"]
    tied: bool
    logits: Literal["float32", "bfloat16"]
    remat: Literal["full", "dots", "projections"]
    batch: int
    length: int
    clip: bool

    def parameter_shapes(self) -> dict[str, tuple[tuple[int, ...], P]]:
        """Shape and layout of every parameter; those of layers have the layer as their first axis."""
        e, h, g, d, m = self.width, self.heads, self.kv_heads, self.head_dim, self.hidden
        layer: dict[str, tuple[tuple[int, ...], P]] = {
            "norm": ((e,), P("fsdp")),
            "query": ((e, h, d), P("fsdp", "tensor", None)),
            "key": ((e, g, d), P("fsdp", "tensor", None)),
            "value": ((e, g, d), P("fsdp", "tensor", None)),
            "out": ((h, d, e), P("tensor", None, "fsdp")),
            "up": ((e, m), P("fsdp", "tensor")),
            "down": ((m, e), P("tensor", "fsdp")),
        }
        if self.gated:
            layer["gate"] = layer["up"]
        if self.order == "sequential":
            layer["second norm"] = layer["norm"]
        for part in self.head_norms:
            layer[f"{part} norm"] = ((d,), P(None))
        if self.attention == "dense":
            layer["distances"] = ((h, BUCKETS), P("tensor", None))
        shapes = {f"layer {n}": ((self.layers, *s), P(None, *spec)) for n, (s, spec) in layer.items()}
        shapes["embedding"] = ((self.vocab, e), P("tensor", "fsdp"))
        shapes["norm"] = ((e,), P("fsdp"))
        if not self.tied:
            shapes["output"] = ((e, self.vocab), P("fsdp", "tensor"))
        return shapes

    @property
    def num_parameters(self) -> int:
        """Numbers that are learned."""
        return sum(math.prod(shape) for shape, _ in self.parameter_shapes().values())


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    y = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return y.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary positions of [batch, length, heads, dim]."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None, :] for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _distance_bias(table: jax.Array, length: int) -> jax.Array:
    """A learned bias [heads, length, length] by how far back a key is: half of the buckets exact, half logarithmic."""
    back = jnp.maximum(jnp.arange(length)[:, None] - jnp.arange(length), 0)
    exact = BUCKETS // 2
    far = exact + (jnp.log(jnp.maximum(back, 1) / exact) / math.log(128 / exact) * exact).astype(jnp.int32)
    bucket = jnp.where(back < exact, back, jnp.minimum(far, BUCKETS - 1))
    return jnp.einsum(
        "hc,cqk->hqk", table.astype(jnp.bfloat16), jax.nn.one_hot(bucket, BUCKETS, axis=0, dtype=jnp.bfloat16)
    )


class _Model:
    """The decoder on a mesh."""

    def __init__(self, config: Decoder, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh

    def lay(self, x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def attend(self, q: jax.Array, k: jax.Array, v: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
        c = self.config
        if c.attention == "flash":
            from capibara.ops.attention import flash_attention

            kernel = partial(
                flash_attention, use_causal_mask=c.causal, scale=1.0, implementation="pallas_tpu"
            )
            spec = P("fsdp", "tensor")
            # Kernels do not say over which axes their results vary.
            over = jax.shard_map(
                kernel, mesh=self.mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False
            )
            return jnp.swapaxes(over(*(jnp.swapaxes(x, 1, 2) for x in (q, k, v))), 1, 2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        seen = jnp.tril(jnp.ones((c.length, c.length), bool))
        scores = scores + jnp.where(seen, _distance_bias(layer["distances"], c.length), -1e10).astype(
            jnp.bfloat16
        )
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)

    def attention(self, x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
        c = self.config
        heads = []
        for part, name in zip("qkv", ("query", "key", "value"), strict=True):
            y = jnp.einsum("ble,ehd->blhd", x, layer[name].astype(jnp.bfloat16))
            if c.rotary and part != "v":
                y = _rotate(y)
            if part in c.head_norms:
                y = _norm(y, layer[f"{part} norm"])
            heads.append(checkpoint_name(self.lay(y, "fsdp", None, "tensor", None), "projection"))
        query, key, value = heads
        y = self.lay(self.attend(query, key, value, layer), "fsdp", None, "tensor", None)
        y = jnp.einsum("blhd,hde->ble", y, layer["out"].astype(jnp.bfloat16))
        return checkpoint_name(self.lay(y, "fsdp", None, "tensor"), "projection")

    def feed_forward(self, x: jax.Array, layer: dict[str, jax.Array]) -> jax.Array:
        y = x @ layer["up"].astype(jnp.bfloat16)
        y = jax.nn.silu(x @ layer["gate"].astype(jnp.bfloat16)) * y if self.config.gated else jax.nn.relu(y)
        y = self.lay(y, "fsdp", None, "tensor") @ layer["down"].astype(jnp.bfloat16)
        return checkpoint_name(self.lay(y, "fsdp", None, "tensor"), "projection")

    def layer(self, x: jax.Array, layer: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        x = self.lay(x, "fsdp", None, "tensor")
        read = self.lay(_norm(x, layer["norm"]), "fsdp", None, "tensor")
        if self.config.order == "parallel":
            x = x + (self.feed_forward(read, layer) + self.attention(read, layer))
        else:
            x = x + self.attention(read, layer)
            x = x + self.feed_forward(self.lay(_norm(x, layer["second norm"]), "fsdp", None, "tensor"), layer)
        return self.lay(x, "fsdp", None, "tensor"), None

    def embed(self, table: jax.Array, tokens: jax.Array) -> jax.Array:
        table = table.astype(jnp.bfloat16)
        if self.config.embedding == "gather":
            return table[tokens]
        return jax.nn.one_hot(tokens, self.config.vocab, dtype=jnp.bfloat16) @ table

    def loss(self, params: dict[str, jax.Array], tokens: jax.Array, targets: jax.Array) -> jax.Array:
        c = self.config
        x = self.lay(self.embed(params["embedding"], tokens), "fsdp", None, "tensor")
        policies = jax.checkpoint_policies
        policy = {
            "full": None,
            "dots": policies.dots_with_no_batch_dims_saveable,
            "projections": policies.save_only_these_names("projection"),
        }[c.remat]
        layers = {name.removeprefix("layer "): p for name, p in params.items() if name.startswith("layer ")}
        # Nothing can be shared between a loop's passes, so that nothing has to be kept from being shared.
        x, _ = jax.lax.scan(jax.checkpoint(self.layer, prevent_cse=False, policy=policy), x, layers)
        x = _norm(x, params["norm"]).astype(c.logits)
        output = params["embedding"].T if c.tied else params["output"]
        logits = (x @ output.astype(c.logits)).astype(jnp.float32) / math.sqrt(c.width)
        logits = self.lay(logits, "fsdp", None, "tensor")
        wanted = jnp.sum(jnp.where(targets[..., None] == jnp.arange(c.vocab), logits, 0.0), axis=-1)
        return jnp.mean(jax.scipy.special.logsumexp(logits, axis=-1) - wanted)


def _norm_of(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(tree)))


def _adam(
    config: Decoder, state: dict[str, Any], grads: dict[str, jax.Array]
) -> tuple[dict[str, Any], jax.Array]:
    norm = _norm_of(grads)
    scale = 1.0 / jnp.maximum(norm, 1.0) if config.clip else 1.0
    count = state["count"] + 1
    first = jax.tree.map(lambda m, g: BETA_1 * m + (1 - BETA_1) * g * scale, state["first"], grads)
    second = jax.tree.map(lambda v, g: BETA_2 * v + (1 - BETA_2) * (g * scale) ** 2, state["second"], grads)
    a, b = (1 - beta ** count.astype(jnp.float32) for beta in (BETA_1, BETA_2))
    params = jax.tree.map(
        lambda p, m, v: p - LEARNING_RATE * (m / a / (jnp.sqrt(v / b) + EPSILON) + DECAY * p),
        state["params"],
        first,
        second,
    )
    return {"params": params, "first": first, "second": second, "count": count}, norm


def build(mesh: Mesh, **model: Any) -> Workload:
    """The train step of a :class:`Decoder` on a mesh with the axes ``fsdp`` and ``tensor``, lowered.

    Equivalent plain JAX: ``jax.jit(step, donate_argnums=0).lower(state, tokens, targets)``.
    """
    config = Decoder(**model)
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in config.parameter_shapes().items()
    }
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    state = {"params": params, "first": params, "second": params, "count": count}
    rows = config.batch * mesh.size
    tokens = jax.ShapeDtypeStruct((rows, config.length), jnp.int32, sharding=NamedSharding(mesh, P("fsdp")))

    def step(
        state: dict[str, Any], tokens: jax.Array, targets: jax.Array
    ) -> tuple[dict[str, Any], jax.Array, jax.Array]:
        loss, grads = jax.value_and_grad(_Model(config, mesh).loss)(state["params"], tokens, targets)
        state, norm = _adam(config, state, grads)
        return state, loss, norm

    layouts = jax.tree.map(lambda s: s.sharding, state)
    scalar = NamedSharding(mesh, P())
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(layouts, scalar, scalar))
        lowered = jitted.lower(state, tokens, tokens)
    kinds = {"parameters": params, "optimizer": (params, params, count), "batch": (tokens, tokens)}
    return Workload(lowered, kinds)

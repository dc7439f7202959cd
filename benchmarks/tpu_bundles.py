"""Scheduled bundles of the TPU attention kernels a block, against JAX's splash attention."""

from __future__ import annotations

from typing import Any

__all__ = ["attention"]


def attention(implementation: str, dim: int, block: int, backward: bool) -> tuple[Any, tuple[Any, ...]]:
    import jax
    import jax.numpy as jnp

    heads, length = 2, 4 * block
    x = jax.ShapeDtypeStruct((1, heads, length, dim), jnp.bfloat16)
    if implementation == "ours":
        from capibara.ops.attention import flash_attention

        def attend(q, k, v):
            return flash_attention(
                q, k, v, use_causal_mask=True, block_size=block, implementation="pallas_tpu"
            )
    else:
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        fused = implementation.endswith("fused")
        dq = (None, None) if fused else (block, block)
        sizes = splash.BlockSizes(block, block, block, block, block, block, *dq, use_fused_bwd_kernel=fused)
        mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
        kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)
        attend = jax.vmap(kernel)
    if not backward:
        return attend, (x, x, x)

    def gradients(q, k, v, g):
        return jax.vjp(attend, q, k, v)[1](g)

    return gradients, (x, x, x, x)

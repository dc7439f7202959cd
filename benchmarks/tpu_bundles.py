"""TPU attention kernels, bundles scheduled by the TPU compiler for a block, against JAX's splash attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks._bundles import KINDS, Kernel, NotCompiledError, count

LONG = "64 programs for TPUs, half a minute each where blocks are large"

__all__ = ["SHAPES", "attention", "compare", "run"]

# Sizes of heads and of blocks. Heads of 256 in blocks of 1,024 do not fit into the smallest chip's 16 MiB beside their
# gradients: there our blocks are smaller on all chips.
SHAPES = tuple((dim, block) for dim in (64, 128, 256) for block in (256, 512, 1024) if dim * block <= 1 << 17)
_PARTS = {False: ("output", "fwd"), True: ("query", "key_value", "dq", "dkv")}


def attention(peer: bool, dim: int, block: int, backward: bool) -> tuple[Any, tuple[Any, ...]]:
    """Causal attention in bfloat16, or its gradients, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp

    heads, length = 2, 4 * block
    x = jax.ShapeDtypeStruct((1, heads, length, dim), jnp.bfloat16)
    if peer:
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        sizes = splash.BlockSizes(block, block, block, block, block, block, block, block)
        mask = masks.MultiHeadMask([masks.CausalMask((length, length))] * heads)
        attend = jax.vmap(splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1))
    else:
        from capibara.ops.attention import flash_attention

        def attend(q: Any, k: Any, v: Any) -> Any:
            return flash_attention(
                q, k, v, use_causal_mask=True, block_size=block, implementation="pallas_tpu"
            )

    if not backward:
        return attend, (x, x, x)

    def gradients(q: Any, k: Any, v: Any, g: Any) -> Any:
        return jax.vjp(attend, q, k, v)[1](g)

    return gradients, (x, x, x, x)


def compare(kind: str, shapes: Sequence[tuple[int, int]], *, backward: bool = True) -> list[dict[str, Any]]:
    """Bundles of a block that is not masked, ours and splash attention's.

    Args:
      kind: of TPU, one of v4, v5e, v5p and v6e.
      shapes: pairs of a head's size and the size of blocks of queries and keys.
      backward: also count the backward pass, which here and there is two kernels; theirs is not the fused one, whose
        memory grows with the square of the length.

    Returns:
      One row for each shape and direction: ``ours`` and ``theirs`` in bundles, ``masked`` of ours on the diagonal. A
      program that the compiler refuses has ``ours`` or ``theirs`` None.
    """
    cases = [
        {"peer": peer, "dim": dim, "block": block, "backward": backward}
        for dim, block in shapes
        for peer in (False, True)
    ]
    found = count(kind, "benchmarks.tpu_bundles:attention", cases)
    rows = []
    for i, (dim, block) in enumerate(shapes):
        ours, theirs = found[2 * i : 2 * i + 2]
        for back in (False, True)[: 1 + backward]:
            mine = _kernels(ours, back)
            rows.append(
                {
                    "kind": kind,
                    "dim": dim,
                    "block": block,
                    "pass": "backward" if back else "forward",
                    "ours": sum(kernel.block for kernel in mine) or None,
                    "masked": sum(kernel.masked_block for kernel in mine) or None,
                    "theirs": sum(kernel.block for kernel in _kernels(theirs, back)) or None,
                }
            )
    return rows


def _kernels(found: dict[str, Kernel] | NotCompiledError, backward: bool) -> list[Kernel]:
    """The kernels of one direction in a program."""
    if isinstance(found, NotCompiledError):
        return []
    return [
        kernel
        for name, kernel in found.items()
        if any(name.endswith(f"_{part}") or f"_{part}_" in name for part in _PARTS[backward])
    ]


def run(
    kinds: Sequence[str] = tuple(KINDS), shapes: Sequence[tuple[int, int]] = SHAPES
) -> list[dict[str, Any]]:
    """Rows of ratios: splash attention's bundles / ours."""
    rows = []
    for kind in kinds:
        for row in compare(kind, shapes):
            what = f"{row['pass']}, {kind}, heads of {row['dim']}"
            shape = f"blocks of {row['block']}"
            if None in (row["ours"], row["theirs"]):
                print(f"{what}, {shape}: not compiled ({row})")
                continue
            rows.append(
                {
                    "what": what,
                    "shape": shape,
                    "peer": "splash attention",
                    "ratio": row["theirs"] / row["ours"],
                    "ours": row["ours"],
                    "masked": row["masked"],
                    "theirs": row["theirs"],
                }
            )
    return rows

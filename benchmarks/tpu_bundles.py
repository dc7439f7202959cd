"""TPU attention kernels, bundles scheduled by the TPU compiler for a block, against JAX's splash attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks._bundles import KINDS, Kernel, NotCompiledError, count

LONG = "108 programs for TPUs, half a minute each where blocks are large"

__all__ = ["SHAPES", "attention", "compare", "quantized", "run"]

SHAPES = tuple((dim, block) for dim in (64, 128, 256) for block in (256, 512, 1024))
_PARTS = {False: ("output", "fwd"), True: ("query", "key_value", "gradients", "dq", "dkv")}
_BLOCKS = 4  # of a sequence


def attention(of: str, dim: int, block: int, backward: bool) -> tuple[Any, tuple[Any, ...]]:
    """Causal attention in bfloat16, or its gradients, and the shapes of its arguments.

    Args:
      of: ``"ours"``, ``"splash"``, or ``"splash fused"`` with its one kernel for all three gradients.
      dim: of a head.
      block: queries and keys of a block.
    """
    import jax
    import jax.numpy as jnp

    heads, length = 2, _BLOCKS * block
    x = jax.ShapeDtypeStruct((1, heads, length, dim), jnp.bfloat16)
    if of != "ours":
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

        fused = of == "splash fused"
        last: dict[str, Any] = {} if fused else {"block_q_dq": block, "block_kv_dq": block}
        sizes = splash.BlockSizes(
            block, block, block, block, block, block, **last, use_fused_bwd_kernel=fused
        )
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


def quantized(table: bool) -> tuple[Any, tuple[Any, ...]]:
    """A product of 512 vectors with 2,048² codes of four bits, with or without a table of levels, and its arguments."""
    import jax
    import jax.numpy as jnp

    from capibara.ops.linalg import quantised_matmul

    shape = jax.ShapeDtypeStruct
    x, codes = shape((512, 2048), jnp.bfloat16), shape((2048, 1024), jnp.uint8)
    scales, levels = shape((2048, 32), jnp.float32), shape((16,), jnp.float32)
    arguments = (x, codes, scales, levels)[: 3 + table]
    return lambda *a: quantised_matmul(*a, group=64, implementation="pallas_tpu"), arguments


def _smaller(dim: int, block: int, backward: bool) -> float:
    """How many of our blocks stand for one of the size asked for: where it does not fit, ours are smaller."""
    import jax
    import jax.numpy as jnp

    from capibara.ops.attention import pallas_tpu
    from capibara.ops.attention.problem import prepare

    x = jax.ShapeDtypeStruct((1, 2, _BLOCKS * block, dim), jnp.bfloat16)
    problem, _ = prepare(x, x, x, use_causal_mask=True, block_size=block)
    plan = (pallas_tpu.gradient_plan if backward else pallas_tpu.output_plan)(problem, False)[0]
    return block * block / (plan.rows * plan.keys)


def compare(kind: str, shapes: Sequence[tuple[int, int]], *, backward: bool = True) -> list[dict[str, Any]]:
    """Bundles of a block that is not masked, ours and splash attention's.

    Args:
      kind: of TPU, one of v4, v5e, v5p and v6e.
      shapes: pairs of a head's size and the size of blocks of queries and keys.
      backward: also count the backward pass: ours is one kernel, splash attention's two (as by default) or one, whose
        memory grows with the square of the length.

    Returns:
      One row for each shape and direction: ``ours`` and ``theirs`` in bundles, ``masked`` of ours on the diagonal, and
      in the backward pass ``fused`` of splash attention's one kernel. Where our blocks are smaller than asked for, ours
      are the bundles of as many as have the same size. A program that the compiler refuses has None in its place.
    """
    programs = ("ours", "splash", "splash fused")[: 2 + backward]
    cases = [
        {"of": of, "dim": dim, "block": block, "backward": backward}
        for dim, block in shapes
        for of in programs
    ]
    found = count(kind, "benchmarks.tpu_bundles:attention", cases)
    rows = []
    for i, (dim, block) in enumerate(shapes):
        results = dict(zip(programs, found[len(programs) * i :], strict=False))
        for back in (False, True)[: 1 + backward]:
            mine, more = _kernels(results["ours"], back), _smaller(dim, block, back)
            row: dict[str, Any] = {
                "kind": kind,
                "dim": dim,
                "block": block,
                "pass": "backward" if back else "forward",
                "ours": round(more * sum(kernel.block for kernel in mine)) or None,
                "masked": round(more * sum(kernel.masked_block for kernel in mine)) or None,
                "theirs": sum(kernel.block for kernel in _kernels(results["splash"], back)) or None,
            }
            if back:
                row["fused"] = sum(kernel.block for kernel in _kernels(results["splash fused"], back)) or None
            rows.append(row)
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
            for peer, name in (("theirs", "splash attention"), ("fused", "splash attention, one kernel")):
                if peer not in row:
                    continue
                if None in (row["ours"], row[peer]):
                    print(f"{what}, {shape}: not compiled ({row})")
                    continue
                rows.append(
                    {
                        "what": what,
                        "shape": shape,
                        "peer": name,
                        "ratio": row[peer] / row["ours"],
                        "ours": row["ours"],
                        "masked": row["masked"],
                        "theirs": row[peer],
                    }
                )
    return rows

"""What blocks keep for their backward pass.

The counts are those of the residuals that JAX's differentiation of a block saves. A turn of the pattern (two blocks of
Gemma 2, six of Gemma 3) is rematerialised as a whole: of ``full`` only what comes into it is kept, and while its
backward pass runs, all of its blocks have their values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from typing import Any

from capibara.config import ModularModelConfig
from capibara.config.sections import FinetuneSection, ModelSection
from capibara.plan.memory.tiles import padded_bytes
from capibara.plan.memory.widths import Widths

__all__ = ["BlockType", "kept_of_turn", "recomputed_of_turn", "scanned_rows", "scanned_states", "turns_of"]

# Positions a chunk of the state-space recurrence, as it is without measurements of one's own.
CHUNK = 64
# Of the values that blocks without rematerialisation keep, those that recomputed ones have: the compiler computes what
# is elementwise where it is read. Where matrix products are kept, attention with a plain feed-forward layer has little
# else.
_RECOMPUTED, _RECOMPUTED_DOTS = 0.4, 0.1
# Of a block that is not attention: values as wide as its own inner width that it keeps with its matrix products kept,
# and without rematerialisation in the compute dtype and in that of accumulation.
_OWN = {"ssm": (2.0, 10.0, 7.0), "vq": (1.0, 4.0, 0.0)}


@dataclass(frozen=True)
class BlockType:
    """What a block's memory depends on: its kind, and whether its feed-forward layer is a mixture."""

    kind: str
    experts: bool


def turns_of(m: ModelSection) -> tuple[tuple[BlockType, ...], ...]:
    """The blocks of each turn of the pattern."""
    section: Any = m
    return _turns(section)


@lru_cache(maxsize=64)
def _turns(m: Any) -> tuple[tuple[BlockType, ...], ...]:
    from capibara.core.decoder import block_places  # imports JAX, which the rest here does not need

    blocks = [
        ((path[0], turn), BlockType(kind, number >= m.dense_blocks))
        for number, (kind, (path, turn)) in enumerate(zip(m.block_kinds, block_places(m), strict=True))
    ]
    return tuple(tuple(block for _, block in group) for _, group in groupby(blocks, key=lambda one: one[0]))


def kept_of_turn(turn: Sequence[BlockType], config: ModularModelConfig, remat: str, w: Widths) -> int:
    """Bytes that a turn keeps until its backward pass."""
    if remat == "full":
        return w.values(w.stream)
    return sum(_kept(block, config, remat, w) for block in turn)


def recomputed_of_turn(turn: Sequence[BlockType], config: ModularModelConfig, remat: str, w: Widths) -> int:
    """Bytes that the other blocks of a turn have in the backward pass of its largest one."""
    if remat == "none" or len(turn) == 1:
        return 0
    own = [
        (_kept(block, config, "none", w) - _kept(block, config, remat, w)) * _recomputed(block, remat)
        for block in turn
    ]
    return max(0, int(sum(own) - max(own)))


def _recomputed(block: BlockType, remat: str) -> float:
    products = remat == "dots" and block.kind in ("attention", "local") and not block.experts
    return _RECOMPUTED_DOTS if products else _RECOMPUTED


def _products(finetune: FinetuneSection, target: str) -> int:
    """How many plain products of a weight's shape a step has: an adapter's is one more, that with codes is none."""
    if finetune.method == "full" or target not in finetune.targets:
        return 1
    return 2 if finetune.base == "none" else 1


def _kept(block: BlockType, config: ModularModelConfig, remat: str, w: Widths) -> int:
    """Bytes that a block keeps.

    ``full``: what comes in. ``dots``: that and the results of its matrix products, but for the last, which only is
    added to; not those of experts, which are no plain products. ``none``: whatever the derivatives of its operations
    read: of each normalisation three values in the accumulation dtype and its result; of the feed-forward layer two
    products, what its activation function reads and gives, and their product; of attention queries and keys after
    their rotation (which is linear), values, and the result, by heads and joined.
    """
    m, stream = config.model, w.values(w.stream)
    if remat == "full":
        return stream
    layer = _layer(block, config, remat, w)
    count = partial(_products, config.finetune)
    if block.kind in ("attention", "local"):
        if remat == "dots":
            # Before a norm, the last product is read as well.
            streams = count("out") + (count("down") if m.norm_placement != "before" else 0)
            heads = count("query") * w.queries + (count("key") + count("value")) * w.keys
            return stream + w.products(streams * w.stream) + w.products(heads) + layer
        heads = w.values(3 * w.queries + 2 * w.keys)
        if m.qk_norm != "none":
            heads += 3 * w.tokens * (w.queries + w.keys) * w.accumulate
        return _normalised(m, w) + layer + heads
    with_products, narrow, wide = _OWN[block.kind]
    own = w.values(w.own[block.kind])
    if remat == "dots":
        # The last product of a block is only added to.
        last = w.products(w.stream) if m.mlp != "none" or m.norm_placement != "before" else 0
        return int(stream + last + layer + with_products * w.products(w.own[block.kind]))
    scan = (scanned_rows(w) + scanned_states(w)) if block.kind == "ssm" else 0
    whole = narrow * own + wide * own * w.accumulate / w.compute
    return int(_normalised(m, w) + layer + whole + scan)


def scanned_rows(w: Widths) -> int:
    """Bytes of a state-space block's channels as its recurrence takes them: in float32, in chunks, heads apart."""
    heads, width, _ = w.scan
    return padded_bytes((max(1, w.tokens // CHUNK), min(CHUNK, w.tokens), heads, width), 4)


def scanned_states(w: Widths) -> int:
    """Bytes of the states at the beginning of each chunk."""
    heads, width, states = w.scan
    return padded_bytes((max(1, w.tokens // CHUNK), heads, width, states), 4)


def _layer(block: BlockType, config: ModularModelConfig, remat: str, w: Widths) -> int:
    """Bytes that the feed-forward layer of a block keeps."""
    if not block.experts:
        plain = config.model.mlp == "plain"
        if remat != "dots":
            # What a plain layer's activation function reads and gives is one product's.
            narrow = plain and config.model.activation in ("silu", "relu")
            return int((4.0 if narrow else 6.5 if plain else 6.0) * w.values(w.inner))
        count = _products(config.finetune, "up") + (0 if plain else _products(config.finetune, "gate"))
        return count * w.products(w.inner)
    mixture = w.mixture
    assert mixture is not None
    shared = 2 * w.products(mixture.shared) if remat == "dots" else 6 * w.values(mixture.shared)
    scores = w.tokens * mixture.count * w.accumulate
    if remat == "dots":
        return scores + shared
    # Rows in the order of experts, both products, what goes into the third and what comes out of it; and the matrices,
    # gathered and in the compute dtype.
    rows = mixture.rows * (2 * w.stream + 6 * mixture.inner) * w.compute
    matrices = 3 * mixture.held * w.stream * mixture.inner * w.compute
    return 3 * scores + shared + rows + matrices


def _normalised(m: ModelSection, w: Widths) -> int:
    norms = (1 if m.mlp == "none" else 2) * (2 if m.norm_placement == "both" else 1)
    # In one dtype what is normalised is not a copy of what comes in.
    each = 5 * w.accumulate // 2 if w.one_dtype else 3 * w.accumulate + w.compute
    return w.tokens * w.stream * norms * each

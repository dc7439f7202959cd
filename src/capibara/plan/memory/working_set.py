"""The memory of a training step besides its arguments, at its peak.

Three moments compete:

*The loss.* Every layer's values for the backward pass are stored, and the logits exist twice, as the product's output
and in the accumulation dtype, together with the gathered vocabulary table. Many logits
(:func:`capibara.ops.loss.cross_entropy`) are those of one chunk, beside the gradient of the table.

*The backward pass of one block*, near the end of the loop. The stored values; the gradients of all blocks, which the
loop stacks; the derivative of the logits, because the product that computes the table's gradient from it is scheduled
last (in chunks: that gradient); and the working set of the block: its recomputed values and their derivatives, some as
wide as the residual stream, some as the feed-forward layer, and matrices: gathered weights, and gradients before they
are scattered.

In both cases there are copies of all blocks' parameters in the compute dtype: the compiler creates them once, before
the loop; with microbatches also of the tables. Where sums do not run beside computation, the gradients of all blocks of
a turn of the pattern wait for the reductions at its end, each whole along ``data``. Blocks of experts and state-space
blocks are counted buffer by buffer, as the compiler's reports list them.

*The update*, where moments are sharded and parameters replicated: the new parameters are gathered beside the old ones.

The counts below are the numbers of such values that are live together. Those of stored values are the residuals that
JAX's differentiation of a block saves. Those of a block's backward pass were fitted to the compiler's figures for the
programs of ``benchmarks/plan_memory.py`` (libtpu 0.0.42), in four sets: one for all meshes and slices; one for a
``model`` axis; one for it with compiler flags that do not split products into windows, so that the derivative of the
logits is not kept waiting; and one for v4 and v5e where more than 32 devices along ``data`` have fewer tokens each
than the stream is wide: there the float32 gradients of all matrices of a block, and of the vocabulary's table, wait for
an all-reduce at the end.

Attention is assumed to run as a kernel that stores no scores, as in a step compiled for a mesh.

Buffers in on-chip memory (64 to 128 MiB) are not subtracted: steps that need a few hundred MiB besides their
arguments are overestimated by up to a fourth, those that need a few MiB by up to 3×; none is underestimated for this
reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from capibara.config import ModularModelConfig
from capibara.plan.memory.arguments import Block, is_base, item_size, step_gradients
from capibara.plan.memory.kept import (
    BlockType,
    kept_of_turn,
    recomputed_of_turn,
    scanned_rows,
    scanned_states,
    turns_of,
)
from capibara.plan.memory.tiles import LANES, padded_rows
from capibara.plan.memory.widths import Widths
from capibara.plan.targets import Target
from capibara.sharding import Layout
from capibara.sharding.communication import FUSED

__all__ = ["WorkingSet", "working_set"]

_MANY_DEVICES = 32
# In one block's backward pass, at its fullest: values as wide as the stream and as the feed-forward layer; logits;
# feed-forward matrices, and tables of the vocabulary, in the compute dtype (a gradient in float32 counts twice).
_ALIVE = (10.5, 4.0, 1.4, 4.5, 0.0)
_ALIVE_PARTS = (9.0, 4.0, 1.4, 4.5, 0.0)
_ALIVE_WHOLE = (10.0, 4.0, 0.0, 6.0, 0.0)
_ALIVE_DEFERRED = (4.0, 2.0, 2.0, 9.0, 2.0)
# The same where the compute dtype is that of accumulation: what counts twice above counts once. From seven programs
# (v4, v5e, v5p; on more than 32 devices from none).
_ALIVE_ONE = (7.0, 3.0, 0.5, 3.0, 0.0)
_ALIVE_ONE_WHOLE = (7.0, 3.0, 0.0, 4.0, 0.0)
_ALIVE_ONE_DEFERRED = (3.0, 1.5, 1.0, 4.5, 1.0)
# The compiler's option for which products it cuts into windows, and from where on that is none.
_WINDOWS, _NO_WINDOWS_MIB = "xla_jf_spmd_threshold_for_windowed_einsum_mib", 10_000
# Of a block that is not attention: values as wide as its own inner width that its backward pass has beside the others'.
# Of a state-space block besides, in float32: what goes into its recurrence, what comes out, and their derivatives.
_OWN = {"ssm": 8.0, "vq": 2.0}
_SCANNED = 3.0
# Of the moments in the hosts' memory, what is here at the memory peak: the step begins by fetching them, and the
# compiler moves that later, on v4 nearly all of it (four programs, so the least certain of these figures).
_FETCHED, _FETCHED_V4 = 0.6, 0.2
# Of parameters that are replicated though their moments are not: copies that are kept while the new ones
# are gathered into their place.
_REPLACED = 0.2
# Where the loss takes many logits in chunks: how many chunks; and in a block's backward pass, logits in place of the
# counts above (of a rematerialised one), and tables of the vocabulary beside them (the table's gradient in float32,
# sometimes cast before), for a table that is whole on each device and for one sharded over ``model``.
_CHUNKS = 32
# Sums of the gradient of the table in the loss's loop over chunks, which adds to it in place.
_SUMS = 1
# Where the gradient of the head's table is left for the end: that and the logits', in float32, wait in the loop.
_ALIVE_LATE = (2.0, 2.0)
# That gradient, summed over microbatches beside a block's backward pass, where a device's part of it is no whole tiles:
# it is summed as a whole, and cut then.
_ALIVE_SLICED = 1.9
# Of a plain feed-forward layer, in the counts of a gated one.
_PLAIN = 0.67
# Vocabulary tables that are on their way where collectives run inside of fusions: of a head of its own, or of one that
# is the embedding.
_TABLES_AHEAD = {False: 2.0, True: 1.5}
# Feed-forward matrices where adapters alone are trained: those gathered. None if they are codes.
_FROZEN = 2.0
_ALIVE_CHUNKS, _ALIVE_CHUNKS_SHARDED = (0.0, 2.0), (0.0, 1.5)
_ALIVE_CHUNKS_CUDA = (0.13, 1.5)
_ALIVE_ONE_CHUNKS, _ALIVE_ONE_CHUNKS_SHARDED = (0.13, 0.8), (0.0, 0.4)
# Of a mixture: rows of a tile, into which the rows of a token's experts fit as they are only if they are as many; and
# the on-chip memory, in bytes, in which smaller rows and matrices stay.
_TILE_ROWS = 8
_ON_CHIP = {"v4": 128 << 20, "v5e": 128 << 20, "v5p": 64 << 20, "v6e": 128 << 20}


@dataclass(frozen=True)
class WorkingSet:
    """Bytes on one device.

    Attributes:
      kept: saved by the forward pass for the backward pass.
      copies: of parameters, mostly the blocks' in the compute dtype. fetched: moments from the hosts' memory.
      sums: of gradients over microbatches. stacked: gradients of the blocks of one microbatch.
      loss, block: the two moments' own needs, beside these.
      update: that of the update, beside the sums alone.
    """

    kept: int
    copies: int
    fetched: int
    sums: int
    stacked: int
    loss: int
    block: int
    update: int = 0

    @property
    def fullest(self) -> tuple[str, int, int, int]:
        """The memory peak, and the bytes of gradients, activations and temporaries at it."""
        block = self.block + self.fetched
        if self.update > self.kept + self.copies + max(self.loss, block + self.stacked):
            return "update", self.sums, 0, self.update
        if self.loss > block + self.stacked:
            return "loss", self.sums, self.kept, self.copies + self.loss
        return "backward", self.sums + self.stacked, self.kept, self.copies + block


def working_set(
    config: ModularModelConfig, layout: Layout, target: Target, w: Widths, arguments: tuple[Block, ...]
) -> WorkingSet:
    """The memory that the step needs besides its arguments.

    Args:
      config, layout, target: as for :func:`~capibara.plan.memory.estimate_memory`.
      w: one device's share of a microbatch. arguments: of the step.
    """
    m = config.model
    if target.platform == "cuda":
        # The GPU's compiler keeps products as JAX saves them, in the dtype of accumulation; the TPU's casts them first.
        w = replace(w, kept_products=w.accumulate)
    turns = turns_of(m)
    kept = sum(kept_of_turn(turn, config, layout.remat, w) for turn in turns)
    stored = item_size(config.precision.param_dtype)
    stacks = [b for b in arguments if b.kind == "parameters" and b.path[0].endswith("blocks")]
    # Codes are used as they are.
    parameters = sum(b.bytes for b in stacks if b.item_size == stored and not is_base(b.path))
    frozen = config.finetune.method != "full"
    gradients = step_gradients(config, layout)
    stacked = sum(_stacked(b) for b in gradients if b.path[0].endswith("blocks"))
    every = sum(b.bytes for b in gradients)
    logits = w.values(w.words)
    table = w.words * w.stream * w.compute
    stream, inner, words, matrices, tables = _alive(layout, target, w)
    chunks = _in_chunks(config, w)
    whole = not chunks and not frozen and not _shards_vocab(layout)
    lanes = _scatters_lanes(layout, w)
    ahead = not chunks and not frozen and _gathers_ahead(layout, target)
    if chunks:
        # The logits of one chunk, and the gradient of the table, which is a sum over chunks; in rows, so that it is
        # copied for a table that is stored in columns.
        sums = 2 if m.tie_embeddings and _lookup_copies(arguments) and target.pads_to_tiles else _SUMS
        if frozen:
            sums = 0
        scores = logits // _CHUNKS * w.accumulate // w.compute + sums * w.words * w.stream * w.accumulate
        chunked, sharded = (
            (_ALIVE_ONE_CHUNKS, _ALIVE_ONE_CHUNKS_SHARDED)
            if w.one_dtype
            else (_ALIVE_CHUNKS, _ALIVE_CHUNKS_SHARDED)
            if target.platform != "cuda"
            else (_ALIVE_CHUNKS_CUDA, _ALIVE_CHUNKS_SHARDED)
        )
        words, more = sharded if _shards_vocab(layout) else chunked
        words, tables = (0.0 if layout.remat == "none" else words), tables + more
        if len(turns[-1]) < len(m.pattern):
            # Blocks after the loop, beside whose backward pass the table's gradient is reduced.
            tables = 0.0
        if layout.microbatches > 1:
            tables += 1.0  # gathered once, before the loop over microbatches
    else:
        # In the compute dtype and, where that is another one, in that of accumulation.
        scores = logits if w.one_dtype else logits + logits * w.accumulate // w.compute
        if lanes is False and _sums_head(config, layout, target):
            words, tables = 0.0, max(tables, _ALIVE_SLICED)
        elif whole and _waits(config, layout, target):
            words, tables = max(words, _ALIVE_LATE[0]), max(tables, _ALIVE_LATE[1])
    if frozen:
        matrices = _FROZEN if config.finetune.base == "none" else 0.0
        tables = 1.0 if chunks else 0.0
    loss = scores + table + 2 * w.values(w.stream)
    if _sums_head(config, layout, target) and not chunks:
        loss += {None: logits + 2 * table, True: 2 * table, False: table}[lanes]
    elif whole and not ahead and layout.parameters == "sharded" and _sums_beside(layout):
        # In place of the gathered table.
        loss += table * w.accumulate // w.compute - table

    own = {kind: count * w.values(w.own[kind]) for kind, count in _OWN.items()}
    if "ssm" in m.block_kinds:
        scan = scanned_rows(w)
        own["ssm"] += scanned_states(w) + _SCANNED * scan
    if m.residual == "accumulate":
        stream *= w.accumulate / w.compute

    def peak(block: BlockType) -> int:
        """The working set of a block of this type."""
        if block.experts:
            return _experts_peak(w, layout, target)
        plain = _PLAIN if m.mlp == "plain" else 1.0
        return int(
            stream * w.values(w.stream)
            + plain * inner * w.values(w.inner)
            + plain * matrices * w.stream * (w.inner or w.own.get(block.kind, w.stream)) * w.compute
            + own.get(block.kind, 0.0)
        )

    block = max(
        max(map(peak, turn)) + recomputed_of_turn(turn, config, layout.remat, w)
        for turn in dict.fromkeys(turns)
    )
    sizes = layout.axis_sizes
    parts = _stored_parts(layout)
    if (
        max(map(len, turns)) > 1
        and parts * sizes.get("data", 1) > 1
        and target.platform != "cuda"
        and not _sums_beside(layout)
    ):
        # Of all blocks of a turn, for the reduction at its end.
        count = parts if "sharded" in (layout.parameters, layout.optimizer) else 1
        block = max(block, count * stacked // len(turns))
    block += int(words * logits + tables * table)
    if ahead:
        coming = int(_TABLES_AHEAD[m.tie_embeddings] * table)
        if not any(block.experts for turn in turns for block in turn):
            coming += parameters * w.compute // stored * parts // len(turns)
        block, loss = block + coming, loss + coming
    if layout.remat == "none":
        # The forward pass keeps them, gathered, in the compute dtype.
        parameters -= sum(b.bytes for b in stacks if _is_of_experts(b) and not is_base(b.path))
    if layout.microbatches > 1 and not frozen:
        # Tables are cast before the loop over microbatches, too.
        parameters += sum(
            b.bytes for b in arguments if b.kind == "parameters" and b.path[0] in ("embedding", "head")
        )
    copies = parameters * w.compute // stored if w.compute != stored else 0
    update = 0
    if layout.rules != layout.optimizer_rules and config.optimizer.name != "adafactor":
        # Gathered from the devices that have updated their parts of them.
        update = sum(b.bytes for b in arguments if b.kind == "parameters" and not is_base(b.path))
        copies += int(_REPLACED * update)
    if not chunks and target.pads_to_tiles:
        copies += _lookup_copies(arguments)
    fetched = int(
        (_FETCHED_V4 if target.generation == "v4" else _FETCHED)
        * sum(b.padded for b in arguments if b.on_host)
    )
    return WorkingSet(
        kept=kept,
        fetched=fetched,
        copies=copies,
        # At least float32.
        sums=every * max(4, stored) // stored if layout.microbatches > 1 else 0,
        stacked=stacked,
        loss=loss,
        block=block,
        update=update,
    )


def _stacked(gradient: Block) -> int:
    """Bytes of the gradients of a stack of blocks; those of experts are written by a kernel, row by row."""
    return padded_rows(gradient.shape, gradient.item_size) if _is_of_experts(gradient) else gradient.bytes


def _is_of_experts(block: Block) -> bool:
    return len(block.shape) == 4 and block.path[-1] in ("gate", "up", "down")


def _lookup_copies(arguments: tuple[Block, ...]) -> int:
    """Of a table that is stored in columns, because its rows would need padding: it and its moments are copied into
    rows, which a lookup reads."""
    return sum(
        block.count * padded_rows(block.shape, block.item_size)
        for block in arguments
        if block.path == ("embedding", "weight")
        and len(block.shape) > 1  # not the sums that Adafactor keeps
        and not block.on_host
        and block.padded < block.count * padded_rows(block.shape, block.item_size)
    )


def _experts_peak(w: Widths, layout: Layout, target: Target) -> int:
    """The working set of a mixture's backward pass.

    Beside the values of attention, at the fullest of these moments: the products by the second matrix (the derivative
    of its rows, two recomputed inner values and a new one), by the first ones (both results and the rows that went in,
    and the derivatives of both inner values), the sum over each token's experts, which with a ``model`` axis is
    float32, and the reduction of the matrices' gradients. Without an ``expert`` axis the derivative of the rows comes
    early: beside it there are the rows that went in, those that came out, and these in the order of tokens.

    Without rematerialisation the matrices are slices of those that the forward pass has kept.

    Args:
      w: of the device.
    """
    mixture = w.mixture
    assert mixture is not None
    stream, inner = (mixture.rows * width * w.compute for width in (w.stream, mixture.inner))
    matrix = mixture.held * w.stream * mixture.inner * w.compute
    among_experts = mixture.held < mixture.count
    # Of all devices along the expert axis.
    tokens = mixture.rows // mixture.top * w.stream
    gathered = 2 * tokens * w.compute if among_experts else 0
    attention = w.values(4 * w.stream + 2 * (w.queries + w.keys))
    # The rows of each token, in float32.
    each = mixture.rows * w.stream * w.accumulate
    ordered = 4 * stream + 3 * inner + 2 * matrix
    if layout.remat == "none" and not among_experts:
        return attention + tokens * w.accumulate + max(ordered, stream + 3 * matrix)
    on_chip = _ON_CHIP.get(target.generation, 0)
    moments = [
        2 * stream + 3 * inner + 3 * matrix + gathered,
        3 * stream + 2 * inner + 3 * matrix + gathered,
        stream + (4 if matrix <= on_chip else 5) * matrix,
    ]
    if _shards_vocab(layout):  # and with it each expert's matrices
        moments.append(each + stream + 3 * inner + 3 * matrix + gathered // 2)
    if not among_experts:
        moments.append(ordered)
    elif mixture.top < _TILE_ROWS and stream >= on_chip and _sums_beside(layout):
        # The sum over each token's experts waits: its rows are gathered in float32, and copied to tiles of their own.
        moments.append(each + ordered)
    return attention + tokens * w.accumulate + max(moments)


def _in_chunks(config: ModularModelConfig, w: Widths) -> bool:
    """Whether the loss takes its logits in chunks."""
    from capibara.ops.loss.api import reason_for_whole  # imports JAX, which the rest here does not need

    dtype = config.precision.compute_dtype
    return reason_for_whole(w.tokens, w.stream, w.words, dtype) is None


def _alive(layout: Layout, target: Target, w: Widths) -> tuple[float, float, float, float, float]:
    """The counts of this layout."""
    usual, parts, whole, deferred = (
        (_ALIVE_ONE, _ALIVE_ONE, _ALIVE_ONE_WHOLE, _ALIVE_ONE_DEFERRED)
        if w.one_dtype
        else (_ALIVE, _ALIVE_PARTS, _ALIVE_WHOLE, _ALIVE_DEFERRED)
    )
    if _shards_vocab(layout):
        return whole if _whole_products(layout) else parts
    few = w.tokens < w.stream and layout.num_devices > _MANY_DEVICES
    return deferred if few and _late(layout, target) else usual


def _sums_head(config: ModularModelConfig, layout: Layout, target: Target) -> bool:
    """Whether the gradient of the head's table (in the accumulation dtype) is beside the logits, or beside a block.

    The TPU compiler has it so where matrix products are kept and the gradient, which is not also the lookup's, is
    summed over microbatches: if it can scatter it (:func:`_scatters_lanes`) beside the logits, else beside a block.
    Found by schedules of 25 programs (v4, v5e, v5p, v6e; streams of 2048 to 5120 wide, 2048 to 6144 tokens).
    """
    own = not config.model.tie_embeddings and config.finetune.method == "full"
    summed = layout.microbatches > 1 and layout.remat == "dots" and not _shards_vocab(layout)
    return own and summed and target.platform != "cuda"


def _stored_parts(layout: Layout) -> int:
    """Parts of what is sharded over devices that have rows of their own; along ``data`` beside ``fsdp`` are copies."""
    sizes = layout.axis_sizes
    return sizes.get("fsdp", sizes.get("data", 1))


def _scatters_lanes(layout: Layout, w: Widths) -> bool | None:
    """Whether a device's part of what is sharded over the stream's width is whole tiles; None: nothing is sharded."""
    parts = _stored_parts(layout)
    if layout.parameters != "sharded" or parts == 1:
        return None
    return w.stream % (parts * LANES) == 0


def _sums_beside(layout: Layout) -> bool:
    """Whether gathers of weights or sums of gradients run inside of fusions."""
    return any(
        name.startswith(FUSED) and str(value).lower() == "true"
        for name, value in layout.compiler_options.items()
    )


def _gathers_ahead(layout: Layout, target: Target) -> bool:
    """Whether weights of the next turn and the head's are gathered, and their gradients summed, beside the work of
    this turn: a v5p and a v6e have the memory."""
    several = layout.remat == "dots" and layout.microbatches > 1
    sharded = layout.parameters == "sharded" and not _shards_vocab(layout)
    return _sums_beside(layout) and sharded and not several and target.generation in ("v5p", "v6e")


def _waits(config: ModularModelConfig, layout: Layout, target: Target) -> bool:
    """Whether the gradient of the head's table waits in the loop, with the derivative of the logits, both in float32.

    Of replicated parameters it does wherever sums run beside computation: it is reduced after the loop's gradients.
    """
    tied = config.model.tie_embeddings
    if layout.parameters == "replicated" and layout.remat != "none" and _sums_beside(layout):
        return True
    if layout.remat == "full":
        return _late(layout, target) and not tied
    early = layout.remat == "none" and tied
    return target.generation in ("v4", "v5e") and layout.microbatches == 1 and not early


def _late(layout: Layout, target: Target) -> bool:
    """Whether the compiler leaves gradients for the end."""
    return target.generation in ("v4", "v5e") and target.view == "chip" and layout.remat == "full"


def _shards_vocab(layout: Layout) -> bool:
    sizes = layout.axis_sizes
    return sizes.get("model", 1) * sizes.get("tensor", 1) > 1


def _whole_products(layout: Layout) -> bool:
    given = layout.compiler_options.get(_WINDOWS, "0")
    return given.isdigit() and int(given) >= _NO_WINDOWS_MIB

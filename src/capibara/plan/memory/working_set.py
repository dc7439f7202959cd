"""The memory of a training step besides its arguments, at its peak.

Two moments compete:

*The loss.* Every layer's values for the backward pass are stored, and the logits exist twice, as the product's output
and in the accumulation dtype, together with the gathered vocabulary table. Many logits
(:func:`capibara.ops.loss.cross_entropy`) are those of one chunk, beside the gradient of the table.

*The backward pass of one block*, near the end of the loop. The stored values; the gradients of all blocks, which the
loop stacks; the derivative of the logits, because the product that computes the table's gradient from it is scheduled
last (in chunks: that gradient); and the working set of the block: its recomputed values and their derivatives, some as
wide as the residual stream, some as the feed-forward layer, and matrices: gathered weights, and gradients before they
are scattered.

In both cases, and until the end, there are copies of all blocks' parameters in the compute dtype: the compiler
creates them once, before the loop.

The counts below are the numbers of such values that are live together. Those of stored values are the residuals that
JAX's differentiation of a block saves. Those of a block's backward pass were fitted to the compiler's figures for the
programs of ``benchmarks/plan_memory.py`` (libtpu 0.0.42), in three sets of four: one for all meshes and slices; one
for a ``model`` axis with compiler flags that do not split products into windows, so that the derivative of the logits
is not kept waiting; and one for v4 and v5e where more than 32 devices along ``data`` have fewer tokens each than the
stream is wide: there the float32 gradients of all matrices of a block, and of the vocabulary's table, wait for an
all-reduce at the end.

Attention is assumed to run as a kernel that stores no scores, as in a step compiled for a mesh.

Buffers in on-chip memory (64 to 128 MiB) are not subtracted: steps that need a few hundred MiB besides their
arguments are overestimated by up to a fourth, those that need a few MiB by up to 3×; none is underestimated for this
reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from capibara.config import ModularModelConfig
from capibara.plan.layout import Layout
from capibara.plan.memory.arguments import Block, item_size, part_of
from capibara.plan.slices import Slice

__all__ = ["WorkingSet", "working_set"]

_MANY_DEVICES = 32
_TILE = 128
# In one block's backward pass, at its fullest: values as wide as the stream and as the feed-forward layer; logits;
# feed-forward matrices, and tables of the vocabulary, in the compute dtype (a gradient in float32 counts twice).
_ALIVE = (10.5, 4.0, 1.4, 4.5, 0.0)
_ALIVE_WHOLE = (11.0, 4.0, 0.0, 6.0, 0.0)
_ALIVE_DEFERRED = (4.0, 2.0, 2.0, 9.0, 2.0)
# The same where the compute dtype is that of accumulation: what counts twice above counts once. From seven programs
# (v4, v5e, v5p; on more than 32 devices from none).
_ALIVE_ONE = (7.0, 3.0, 0.5, 3.0, 0.0)
_ALIVE_ONE_WHOLE = (7.0, 3.0, 0.0, 4.0, 0.0)
_ALIVE_ONE_DEFERRED = (3.0, 1.5, 1.0, 4.5, 1.0)
# The compiler's option for which products it cuts into windows, and from where on that is none.
_WINDOWS, _NO_WINDOWS_MIB = "xla_jf_spmd_threshold_for_windowed_einsum_mib", 10_000
# Of a block that is not attention: values as wide as its own inner width that it keeps with its matrix products kept,
# and without rematerialisation, and that its backward pass has beside the others'. A state-space block's recurrence
# keeps matrices between the tokens of a chunk in float32.
_OWN = {"ssm": (2.0, 36.0, 9.0), "vq": (1.0, 4.0, 2.0)}
# Of the moments in the hosts' memory, what is here at the memory peak: the step begins by fetching them, and the
# compiler moves that later, on v4 nearly all of it (four programs, so the least certain of these figures).
_FETCHED, _FETCHED_V4 = 0.6, 0.2
# Of parameters that are replicated though their moments are not: copies that are kept while the new ones
# are gathered into their place.
_REPLACED = 0.2
# Where the loss takes many logits in chunks: how many chunks; and in a block's backward pass, logits in place of the
# counts above (of a rematerialised one), and tables of the vocabulary beside them (the table's gradient in float32),
# for a table that is whole on each device and for one sharded over ``model``.
_CHUNKS = 32
_ALIVE_CHUNKS, _ALIVE_CHUNKS_SHARDED = (0.13, 1.5), (0.0, 1.5)
_ALIVE_ONE_CHUNKS, _ALIVE_ONE_CHUNKS_SHARDED = (0.13, 0.8), (0.0, 0.4)


@dataclass(frozen=True)
class WorkingSet:
    """Bytes on one device.

    Attributes:
      kept: saved by the forward pass for the backward pass.
      copies: of parameters, mostly the blocks' in the compute dtype. fetched: moments from the hosts' memory.
      sums: of gradients over microbatches. stacked: gradients of the blocks of one microbatch.
      loss, block: the two moments' own needs, beside these.
    """

    kept: int
    copies: int
    fetched: int
    sums: int
    stacked: int
    loss: int
    block: int

    @property
    def fullest(self) -> tuple[str, int, int]:
        """The memory peak, and the bytes of gradients and temporaries at it."""
        block = self.block + self.fetched
        if self.loss > block + self.stacked:
            return "loss", self.sums, self.copies + self.loss
        return "backward", self.sums + self.stacked, self.copies + block


@dataclass(frozen=True)
class _Widths:
    """One device's share of the model's widths, and bytes a number."""

    tokens: int
    stream: int
    inner: int
    queries: int
    keys: int
    head: int
    own: dict[str, int]
    words: int
    compute: int
    accumulate: int

    @property
    def one_dtype(self) -> bool:
        """Whether nothing is cast between computing and accumulating."""
        return self.compute == self.accumulate

    def values(self, width: float) -> int:
        """Bytes of one value of this width for every token, in the compute dtype."""
        return int(self.tokens * width * self.compute)


def working_set(
    config: ModularModelConfig, layout: Layout, target: Slice, rows: int, arguments: tuple[Block, ...]
) -> WorkingSet:
    """The memory that the step needs besides its arguments.

    Args:
      config, layout, target: as for :func:`~capibara.plan.memory.estimate_memory`.
      rows: sequences of a microbatch, on all devices. arguments: of the step.
    """
    w = _widths(config, layout, rows)
    kinds = config.model.block_kinds
    kept = sum(_kept(kind, layout.remat, w) for kind in kinds)
    stored = item_size(config.precision.param_dtype)
    stacks = [b for b in arguments if b.kind == "parameters" and b.path[0].endswith("blocks")]
    moments = [b for b in arguments if b.kind == "optimizer" and b.path[0].endswith("blocks")]
    parameters = sum(b.bytes for b in stacks)
    # Gradients lie as the moments they go into.
    stacked = sum(b.bytes // b.count for b in moments)
    every = sum(b.bytes // b.count for b in arguments if b.kind == "optimizer" and b.shape)
    logits = w.values(w.words)
    table = w.words * w.stream * w.compute
    stream, inner, words, matrices, tables = _alive(layout, target, w)
    if _in_chunks(config, w):
        # The logits of one chunk, and the gradient of the table, which is a sum over chunks.
        scores = (logits // _CHUNKS + w.words * w.stream * w.compute) * w.accumulate // w.compute
        chunked, sharded = (
            (_ALIVE_ONE_CHUNKS, _ALIVE_ONE_CHUNKS_SHARDED)
            if w.one_dtype
            else (_ALIVE_CHUNKS, _ALIVE_CHUNKS_SHARDED)
        )
        words, more = sharded if _shards_vocab(layout) else chunked
        words, tables = (0.0 if layout.remat == "none" else words), tables + more
    else:
        # In the compute dtype and, where that is another one, in that of accumulation.
        scores = logits if w.one_dtype else logits + logits * w.accumulate // w.compute
    loss = scores + table + 2 * w.values(w.stream)
    block = (
        stream * w.values(w.stream)
        + inner * w.values(w.inner)
        + words * logits
        + matrices * w.stream * w.inner * w.compute
        + tables * table
        + max(_OWN[kind][2] * w.values(w.own[kind]) if kind in _OWN else 0.0 for kind in kinds)
    )
    copies = parameters * w.compute // stored if w.compute != stored else 0
    if layout.rules != layout.optimizer_rules:
        copies += int(_REPLACED * sum(b.bytes for b in arguments if b.kind == "parameters"))
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
        block=int(block),
    )


def _in_chunks(config: ModularModelConfig, w: _Widths) -> bool:
    """Whether the loss takes its logits in chunks."""
    from capibara.ops.loss.api import reason_for_whole  # imports JAX, which the rest here does not need

    dtype = config.precision.compute_dtype
    return reason_for_whole(w.tokens, w.stream, w.words, dtype) is None


def _alive(layout: Layout, target: Slice, w: _Widths) -> tuple[float, float, float, float, float]:
    """The counts of this layout."""
    usual, whole, deferred = (
        (_ALIVE_ONE, _ALIVE_ONE_WHOLE, _ALIVE_ONE_DEFERRED)
        if w.one_dtype
        else (_ALIVE, _ALIVE_WHOLE, _ALIVE_DEFERRED)
    )
    if _shards_vocab(layout):
        return whole if _whole_products(layout) else usual
    few = w.tokens < w.stream and layout.num_devices > _MANY_DEVICES
    late = target.generation in ("v4", "v5e") and target.view == "chip" and layout.remat == "full"
    return deferred if few and late else usual


def _shards_vocab(layout: Layout) -> bool:
    sizes = layout.axis_sizes
    return sizes.get("model", 1) * sizes.get("tensor", 1) > 1


def _whole_products(layout: Layout) -> bool:
    given = layout.compiler_options.get(_WINDOWS, "0")
    return given.isdigit() and int(given) >= _NO_WINDOWS_MIB


def _widths(config: ModularModelConfig, layout: Layout, rows: int) -> _Widths:
    m, p = config.model, config.precision

    def share(sizes: tuple[int, ...], *names: str) -> tuple[int, ...]:
        return part_of(sizes, names, layout.mesh, layout.rules, "activations")

    mine, length = share((rows, config.train.sequence_length), "batch", "sequence")
    head = m.resolved_head_dim
    return _Widths(
        tokens=mine * length,
        stream=m.embed_dim,
        inner=share((m.resolved_mlp_dim,), "mlp")[0],
        queries=share((m.num_heads,), "heads")[0] * head,
        keys=share((m.num_kv_heads,), "kv_heads")[0] * head,
        head=head,
        own={"ssm": share((m.ssm.expand * m.embed_dim,), "mlp")[0], "vq": m.embed_dim},
        words=share((m.vocab_size,), "vocab")[0],
        compute=item_size(p.compute_dtype),
        accumulate=item_size(p.accumulate_dtype),
    )


def _kept(kind: str, remat: str, w: _Widths) -> int:
    """Bytes that a block keeps for its backward pass.

    ``full``: what comes in. ``dots``: that and the results of its matrix products, but for the last, which only is
    added to. ``none``: whatever the derivatives of its operations read: of each normalisation three values in the
    accumulation dtype and its result; of the feed-forward layer two products, what its activation function reads and
    gives, and their product; of attention queries, keys and values, before and after their rotation, padded to whole
    tiles, and the result.
    """
    stream, inner = w.values(w.stream), w.values(w.inner)
    if remat == "full":
        return stream
    if kind in ("attention", "local"):
        if remat == "dots":
            return 2 * stream + w.values(w.queries + 2 * w.keys) + 2 * inner
        wide = -(-w.head // _TILE) * _TILE / w.head
        heads = w.values(w.queries * (1 + 2 * wide) + w.keys * (1 + wide))
        return _normalised(w) + 6 * inner + heads
    with_products, whole, _ = _OWN[kind]
    own = w.values(w.own[kind])
    if remat == "dots":
        return int(2 * stream + 2 * inner + with_products * own)
    return int(_normalised(w) + 6 * inner + whole * own)


def _normalised(w: _Widths) -> int:
    values = w.tokens * w.stream
    # In one dtype what is normalised is not a copy of what comes in.
    return values * (5 * w.accumulate if w.one_dtype else 6 * w.accumulate + 2 * w.compute)

"""The loss chunk by chunk, without the whole array of logits.

Tokens are taken a chunk at a time; the logits of one chunk are all that is in memory. Where a gradient is wanted, that
of a chunk is computed with its loss, while its logits are there: three matrix products, as in the plain form, where
computing the logits again in the backward pass would be a fourth. This is possible because the loss is a sum: its
cotangent is one factor, by which the finished gradients are multiplied. (Losses of single tokens get their factors only
in the backward pass, and are computed again there.) The idea is that of Liger Kernel (Hsu et al. 2024,
arXiv:2410.10989).

Within a chunk the vocabulary is taken in blocks, first for the logits and the sum of their exponentials, and then for
the gradients. On a CPU blocks stay in its caches; and the gradient of the head, which is a sum over chunks, is added in
place block by block instead of being computed as a whole beside the sum. A TPU adds to that sum within the product, and
takes the whole vocabulary at once; there chunks of few logits are twice as long, since each reads and writes the sum.

XLA could split a loop over sharded tokens only by communicating in each of its steps. A program for several devices
whose arrays XLA splits therefore has the whole logits, each device its part of them; inside ``shard_map`` each device
runs the loop on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.jax_versions import varying_axes
from capibara.ops.loss.problem import LossProblem
from capibara.ops.loss.reference import unusable_labels
from capibara.ops.one_device import alike, on_one_device

__all__ = ["chunks", "forward", "vocab_block"]

# A chunk has a 32nd of the tokens, and at most 512 MiB of logits as float32. Products with fewer tokens are slow, and
# each chunk adds to the whole gradient of the head: where 256 tokens have at most 32 MiB of logits, they are worth it.
_PARTS = 32
_LARGEST = 1 << 27
# On TPUs a 16th of many tokens, with at most 128 MiB of logits.
_PARTS_TPU = 16
_LARGEST_TPU = 1 << 25
_MANY_TPU = 1 << 13
_FEWEST = 128
_FEWEST_LOGITS = 1 << 23
# Elements of a block: 2 MiB as float32, unless it had fewer entries of the vocabulary than are worth a product.
_BLOCK = 1 << 19
_NARROWEST = 2048
# Without gradients only a block of a chunk's logits is in memory. So a chunk may have many tokens, whose products are
# faster, and a block fewer entries.
_TOKENS_FORWARD = 1024
_NARROWEST_FORWARD = 1024

_Step = tuple[Any, ...]


def chunks(problem: LossProblem, *, tpu: bool = False, graded: bool = True) -> tuple[int, int]:
    """How many chunks, and the tokens of each; the last may be filled up.

    Args:
      tpu: for TPUs.
      graded: with gradients.
    """
    tokens = max(problem.tokens, 1)
    size = problem.chunk_size
    if size is None:
        fewest = 2 * _FEWEST if 2 * _FEWEST * problem.vocab <= _FEWEST_LOGITS else _FEWEST
        size = max(min(-(-tokens // _PARTS), _LARGEST // problem.vocab), fewest)
        if tpu and tokens >= _MANY_TPU:
            size = max(size, min(-(-tokens // _PARTS_TPU), _LARGEST_TPU // problem.vocab))
        if not tpu and not graded:
            size = max(size, min(tokens, _TOKENS_FORWARD))
    count = -(-tokens // size)
    return count, -(-tokens // count)


def vocab_block(problem: LossProblem, rows: int, *, tpu: bool = False, graded: bool = True) -> int:
    """Entries of the vocabulary that are computed at a time, for a chunk of ``rows`` tokens."""
    if tpu:
        return problem.vocab
    block = max(_BLOCK // max(rows, 1) // 128 * 128, _NARROWEST if graded else _NARROWEST_FORWARD)
    return problem.vocab if problem.vocab < 2 * block else block


def _over_vocab(problem: LossProblem, block: int, body: Callable[..., Any], carry: Any) -> Any:
    """``carry = body(start, size, carry)`` for each block of the vocabulary."""
    whole = problem.vocab // block
    if whole > 1:
        carry = lax.fori_loop(0, whole, lambda i, c: body(i * block, block, c), carry)
    elif whole:
        carry = body(0, block, carry)
    rest = problem.vocab - whole * block
    return body(whole * block, rest, carry) if rest else carry


def _dot(problem: LossProblem, a: Any, b: Any, over_a: Any, over_b: Any) -> jax.Array:
    return lax.dot_general(a, b, ((over_a, over_b), ((), ())), preferred_element_type=jnp.dtype(problem.wide))


def _over_tokens(problem: LossProblem, a: Any, b: Any) -> jax.Array:
    """``a.T @ b``, summed over the leading axes of both."""
    lead = tuple(range(a.ndim - 1))
    if len(lead) > 1 or a.size > 4 * _BLOCK:
        return _dot(problem, a, b, lead, lead)

    # On CPUs XLA's product with a transposed first operand takes up to twice as long as a copy and a plain product.
    def copied(a: Any, b: Any) -> jax.Array:
        return _dot(problem, lax.optimization_barrier(a.T), b, (1,), (0,))

    def plain(a: Any, b: Any) -> jax.Array:
        return _dot(problem, a, b, (0,), (0,))

    return lax.platform_dependent(a, b, cpu=copied, default=plain)


def _vocab_axis(problem: LossProblem) -> int:
    return 1 if problem.layout == "fv" else 0


def _logits(problem: LossProblem, hidden: Any, head: Any, start: Any, size: int) -> jax.Array:
    """``[*batch, size]``, of the vocabulary's entries from ``start``."""
    axis = _vocab_axis(problem)
    part = head if size == problem.vocab else lax.dynamic_slice_in_dim(head, start, size, axis)
    logits = _dot(problem, hidden, part, (hidden.ndim - 1,), (1 - axis,))
    return logits if problem.softcap is None else problem.softcap * jnp.tanh(logits / problem.softcap)


def _own_labels(problem: LossProblem, labels: Any) -> tuple[Any, Any, Any]:
    """Labels counted from this device's first entry of the vocabulary; which are ignored, and which are wrong."""
    ignored, wrong = unusable_labels(problem, labels)
    if problem.axes:
        labels = labels - problem.vocab * lax.axis_index(problem.axes).astype(labels.dtype)
    return labels, ignored, wrong


def _statistics(problem: LossProblem, block: int, hidden: Any, head: Any, labels: Any, keep: bool) -> _Step:
    """Of each token the logarithm of the sum of exponentials, the label's logit, the sum of logits; and the logits."""
    wide, lead = jnp.dtype(problem.wide), labels.shape
    zero = alike(jnp.zeros(lead, wide), hidden, head, labels)
    kept = alike(jnp.zeros((*lead, problem.vocab), wide), hidden, head, labels) if keep else None

    def body(start: Any, size: int, carry: Any) -> Any:
        high, total, chosen, every, kept = carry
        logits = _logits(problem, hidden, head, start, size)
        place = labels - start
        inside = (place >= 0) & (place < size)
        found = jnp.take_along_axis(logits, jnp.clip(place, 0, size - 1)[..., None], axis=-1)[..., 0]
        chosen = jnp.where(inside, found, chosen)
        now = jnp.maximum(high, lax.stop_gradient(jnp.max(logits, axis=-1)))
        base = jnp.where(jnp.isfinite(now), now, 0)
        total = total * jnp.exp(high - base) + jnp.sum(jnp.exp(logits - base[..., None]), axis=-1)
        if problem.label_smoothing:
            every = every + jnp.sum(logits, axis=-1)
        if kept is not None:
            kept = (
                logits
                if size == problem.vocab
                else lax.dynamic_update_slice_in_dim(kept, logits, start, kept.ndim - 1)
            )
        return now, total, chosen, every, kept

    high, total, chosen, every, kept = _over_vocab(
        problem, block, body, (zero - jnp.inf, zero, zero, zero, kept)
    )
    base = jnp.where(jnp.isfinite(high), high, 0)
    if problem.axes:
        most = lax.pmax(base, problem.axes)
        total = lax.psum(total * jnp.exp(base - most), problem.axes)
        base = most
    return jnp.log(total) + base, chosen, every, kept


def _losses(problem: LossProblem, log_sum: Any, chosen: Any, every: Any, ignored: Any, wrong: Any) -> Any:
    """This device's part of each token's loss: the parts of all devices with a part of the vocabulary add up."""
    smooth, shards = problem.label_smoothing, problem.shards
    loss = log_sum / shards - (1 - smooth) * chosen
    if smooth:
        loss = loss - smooth / (problem.vocab * shards) * every
    if problem.z_loss:
        loss = loss + problem.z_loss / shards * jnp.square(log_sum)
    return jnp.where(ignored, 0, jnp.where(wrong, jnp.nan, loss))


def _loss_step(problem: LossProblem, block: int, hidden: Any, head: Any, labels: Any) -> jax.Array:
    labels, ignored, wrong = _own_labels(problem, labels)
    log_sum, chosen, every, _ = _statistics(problem, block, hidden, head, labels, False)
    return _losses(problem, log_sum, chosen, every, ignored, wrong)


def _graded_step(
    problem: LossProblem, block: int, hidden: Any, head: Any, labels: Any, weights: Any, sums: Any
) -> _Step:
    """Losses, the gradient of their weighted sum in ``hidden``, and ``sums`` with that in ``head`` added."""
    labels, ignored, wrong = _own_labels(problem, labels)
    log_sum, chosen, every, logits = _statistics(problem, block, hidden, head, labels, True)
    loss = _losses(problem, log_sum, chosen, every, ignored, wrong)
    factor = jnp.where(ignored, 0, weights.astype(problem.wide))
    slope = factor * (1 + 2 * problem.z_loss * log_sum) if problem.z_loss else factor
    axis = _vocab_axis(problem)

    def body(start: Any, size: int, carry: Any) -> Any:
        by_hidden, sums = carry
        whole = size == problem.vocab
        own = logits if whole else lax.dynamic_slice_in_dim(logits, start, size, logits.ndim - 1)
        part = head if whole else lax.dynamic_slice_in_dim(head, start, size, axis)
        away = slope[..., None] * jnp.exp(own - log_sum[..., None])
        hit = lax.broadcasted_iota(labels.dtype, own.shape, own.ndim - 1) == (labels - start)[..., None]
        away = away - jnp.where(hit, ((1 - problem.label_smoothing) * factor)[..., None], 0)
        if problem.label_smoothing:
            away = away - (problem.label_smoothing / (problem.vocab * problem.shards) * factor)[..., None]
        if problem.softcap is not None:
            away = away * (1 - jnp.square(own / problem.softcap))
        away = away.astype(problem.dtype)
        by_hidden = by_hidden + _dot(problem, away, part, (away.ndim - 1,), (axis,))
        pair = (hidden, away) if problem.layout == "fv" else (away, hidden)
        product = _over_tokens(problem, *pair)
        if whole:
            return by_hidden, sums + product
        product = product + lax.dynamic_slice_in_dim(sums, start, size, axis)
        return by_hidden, lax.dynamic_update_slice_in_dim(sums, product, start, axis)

    start = alike(jnp.zeros(hidden.shape, problem.wide), hidden, head, labels, weights)
    by_hidden, sums = _over_vocab(problem, block, body, (start, sums))
    return loss, by_hidden.astype(hidden.dtype), sums


def _cut(problem: LossProblem, count: int, size: int, x: Any, fill: Any) -> Any:
    """``[*batch, …]`` as ``[count, size, …]``."""
    rest = x.shape[len(problem.batch) :]
    x = x.reshape(problem.tokens, *rest)
    more = count * size - problem.tokens
    if more:
        x = jnp.concatenate([x, jnp.full((more, *rest), fill, x.dtype)])
    return x.reshape(count, size, *rest)


def _joined(problem: LossProblem, x: Any) -> Any:
    rest = x.shape[2:]
    return x.reshape(-1, *rest)[: problem.tokens].reshape(*problem.batch, *rest)


def _whole_losses(problem: LossProblem, hidden: Any, head: Any, labels: Any) -> jax.Array:
    return _loss_step(problem, problem.vocab, hidden, head, labels)


def _chunked_losses(
    problem: LossProblem, hidden: Any, head: Any, labels: Any, *, tpu: bool = False
) -> jax.Array:
    count, size = chunks(problem, tpu=tpu, graded=False)
    # The whole vocabulary at once saves passes over the gradient of the head, which there is none of here. TPUs keep
    # the chunks that they have with gradients.
    block = vocab_block(problem, size, graded=tpu)
    if count == 1:
        return _joined(
            problem,
            _loss_step(
                problem,
                block,
                hidden.reshape(size, -1),
                head,
                labels.reshape(size),
            )[None],
        )
    given = _cut(problem, count, size, hidden, 0), _cut(problem, count, size, labels, problem.ignore_index)
    return _joined(problem, lax.map(lambda x: _loss_step(problem, block, x[0], head, x[1]), given))


def _no_sums(problem: LossProblem, *arrays: Any) -> jax.Array:
    return alike(jnp.zeros(arrays[1].shape, problem.wide), *arrays)


def _whole_graded(problem: LossProblem, hidden: Any, head: Any, labels: Any, weights: Any) -> _Step:
    sums = _no_sums(problem, hidden, head, labels, weights)
    return _graded_step(problem, problem.vocab, hidden, head, labels, weights, sums)


def _chunked_graded(
    problem: LossProblem, hidden: Any, head: Any, labels: Any, weights: Any, *, tpu: bool = False
) -> _Step:
    count, size = chunks(problem, tpu=tpu)
    fills = ((hidden, 0), (labels, problem.ignore_index), (weights, 0))
    given = [_cut(problem, count, size, x, fill) for x, fill in fills]
    block = vocab_block(problem, size, tpu=tpu)

    def step(sums: Any, x: Any) -> Any:
        loss, by_hidden, sums = _graded_step(problem, block, x[0], head, x[1], x[2], sums)
        return sums, (loss, by_hidden)

    sums = _no_sums(problem, hidden, head, labels, weights)
    if count == 1:
        sums, found = step(sums, [x[0] for x in given])
        found = tuple(x[None] for x in found)
    else:
        sums, found = lax.scan(step, sums, tuple(given))
    return *(_joined(problem, x) for x in found), sums


def _by_platform(problem: LossProblem, form: Callable[..., Any], graded: bool) -> Callable[..., Any]:
    """A form in chunks, on TPUs in theirs."""

    def sizes(tpu: bool) -> Any:
        found = chunks(problem, tpu=tpu, graded=graded)
        block = vocab_block(problem, found[1], tpu=tpu and graded, graded=graded or tpu)
        return found, block

    if sizes(False) == sizes(True):
        return partial(form, problem)
    forms: dict[str, Any] = {"tpu": partial(form, problem, tpu=True), "default": partial(form, problem)}
    return lambda *arrays: lax.platform_dependent(*arrays, **forms)


def _no_tangent(labels: Any) -> Any:
    return np.zeros(labels.shape, jax.dtypes.float0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses_of(problem: LossProblem, hidden: Any, head: Any, labels: Any) -> jax.Array:
    one, several = _by_platform(problem, _chunked_losses, False), partial(_whole_losses, problem)
    return on_one_device(one, several, hidden, head, labels)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _graded(problem: LossProblem, hidden: Any, head: Any, labels: Any, weights: Any) -> Any:
    one, several = _by_platform(problem, _chunked_graded, True), partial(_whole_graded, problem)
    return on_one_device(one, several, hidden, head, labels, weights)


def _graded_forward(problem: LossProblem, *arrays: Any) -> Any:
    return _graded(problem, *arrays), arrays


def _graded_backward(problem: LossProblem, arrays: Any, given: Any) -> Any:
    """The derivative of a gradient, from the whole array of logits."""
    hidden, head, labels, weights = arrays
    _, pull = jax.vjp(lambda *x: _whole_graded(problem, x[0], x[1], labels, x[2]), hidden, head, weights)
    by_hidden, by_head, by_weights = pull(tuple(given))
    return by_hidden, by_head, _no_tangent(labels), by_weights


_graded.defvjp(_graded_forward, _graded_backward)


def _losses_forward(problem: LossProblem, *arrays: Any) -> Any:
    return _losses_of(problem, *arrays), arrays


def _losses_backward(problem: LossProblem, arrays: Any, factors: Any) -> Any:
    # The losses' gradient with these factors is that of their sum with these weights.
    hidden, head, labels = arrays
    graded: Any = _graded(problem, hidden, head, labels, factors)
    _, by_hidden, by_head = graded
    return by_hidden, by_head.astype(head.dtype), _no_tangent(labels)


_losses_of.defvjp(_losses_forward, _losses_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(problem: LossProblem, hidden: Any, head: Any, labels: Any, weights: Any) -> jax.Array:
    return jnp.sum(_losses_of(problem, hidden, head, labels) * weights)


def _total_forward(problem: LossProblem, hidden: Any, head: Any, labels: Any, weights: Any) -> Any:
    graded: Any = _graded(problem, hidden, head, labels, weights)
    losses, by_hidden, by_head = graded
    # Of the arguments only their types are of use in the backward pass.
    kinds = jnp.zeros((), head.dtype), jnp.zeros((), weights.dtype)
    return jnp.sum(losses * weights), (losses, by_hidden, by_head, labels, kinds)


def _total_backward(problem: LossProblem, kept: Any, factor: Any) -> Any:
    losses, by_hidden, by_head, labels, (head, weights) = kept
    return (
        (factor * by_hidden).astype(by_hidden.dtype),
        (factor * by_head).astype(head.dtype),
        _no_tangent(labels),
        (factor * losses).astype(weights.dtype),
    )


_total.defvjp(_total_forward, _total_backward)


def _varying(*arrays: Any) -> list[Any]:
    """Inside ``shard_map``, arrays that vary over the same mesh axes: gradients are summed where they do not yet."""
    every = frozenset().union(*(varying_axes(jax.typeof(x)) for x in arrays))
    lacking = [tuple(sorted(every - varying_axes(jax.typeof(x)), key=str)) for x in arrays]
    return [lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, lacking, strict=True)]


def forward(problem: LossProblem, hidden: Any, head: Any, labels: Any, weights: Any) -> jax.Array:
    """The loss of each token, ``[*batch]``; or the sum of all, each times its weight."""
    loss: Any
    if problem.reduction == "none":
        loss = _losses_of(problem, *_varying(hidden, head, labels))
    else:
        loss = _total(problem, *_varying(hidden, head, labels, weights))
    return lax.psum(loss, problem.axes) if problem.axes else loss

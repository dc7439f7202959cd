"""Attention over a sequence that is sharded over devices: each has some positions, and the keys go round.

Ring Attention (Liu, Zaharia, Abbeel 2023, arXiv:2310.01889). A device keeps its queries. The keys and values of all
devices visit it, one after the other, while it computes with those that are there; the online softmax of
FlashAttention adds them up. So no device ever has more than its own part and one other. The backward pass goes round
once more: a part of the keys and values travels with the sums of its gradients, which are complete when it is home.

Positions are counted over the whole sequence. A part that a causal mask or a window hides completely is not computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.attention.problem import AttentionProblem, from_bhsd, prepare, to_bhsd
from capibara.ops.collective.rings import Axis, shift
from capibara.ops.one_device import alike

__all__ = ["ring_attention"]

_FLOOR = -1e30  # of the running maximum: finite, so that a row that sees nothing has no NaN
_KEYS = 1024  # positions whose scores are computed at once


class _Call(NamedTuple):
    """What does not vary: hashable."""

    problem: AttentionProblem
    axis: Axis


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    axis_name: Axis,
    use_causal_mask: bool = False,
    precision: Any = None,
    segment_ids: jax.Array | None = None,
    sinks: jax.Array | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
) -> jax.Array:
    """:func:`~capibara.ops.attention.flash_attention` of a sequence sharded over a mesh axis, inside ``jax.shard_map``.

    In plain JAX: gather the keys, values and segments along ``axis_name``, and attend with this device's queries.

    Args:
      query, key, value: this device's positions, equally many on each, in the order of ``lax.axis_index(axis_name)``.
      axis_name: a mesh axis, or several.
      segment_ids: ``int [batch, positions]``, of this device's positions.
      use_causal_mask, precision, sinks, window, softcap, scale, layout: as for ``flash_attention``; positions count
        over all devices.

    Returns:
      The output for this device's queries.

    Raises:
      OpShapeError, OpTypeError, OpValueError: as ``flash_attention``.
    """
    problem, arrays = prepare(
        query,
        key,
        value,
        use_causal_mask=use_causal_mask,
        precision=precision,
        segment_ids=segment_ids,
        sinks=sinks,
        window=window,
        softcap=softcap,
        scale=scale,
        layout=layout,
    )
    query, key, value, _, ids, _, sinks = alike(arrays, arrays)
    return _attend(_Call(problem, axis_name), query, key, value, ids, sinks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(call: _Call, query: Any, key: Any, value: Any, ids: Any, sinks: Any) -> jax.Array:
    return _forward(call, query, key, value, ids, sinks)[0]


def _forward(call: _Call, query: Any, key: Any, value: Any, ids: Any, sinks: Any) -> tuple[jax.Array, Any]:
    problem = call.problem
    q, k, v = _split(problem, query, key, value)
    wide = problem.accumulate_dtype
    shape = q.shape[:-1]
    best = jnp.full(shape, _FLOOR, wide)
    total = jnp.zeros(shape, wide)
    if sinks is not None:
        best = jnp.broadcast_to(_of_heads(problem, sinks), shape).astype(wide)
        total = jnp.ones(shape, wide)
    out = jnp.zeros((*shape, v.shape[-1]), wide)
    carry = alike((best, total, out), q, k, v)

    def add(carry: Any, k: Any, v: Any, visible: Any) -> tuple[Any, Any]:
        best, total, out = carry
        scores = jnp.where(visible, _scores(problem, q, k)[0], -jnp.inf)
        new = jnp.maximum(best, jnp.max(scores, axis=-1))
        weights, kept = jnp.exp(scores - new[..., None]), jnp.exp(best - new)
        total = total * kept + jnp.sum(weights, axis=-1)
        out = out * kept[..., None] + _dot(problem, "bgrqk,bgkd->bgrqd", weights, v)
        return (new, total, out), ()

    for there, visitors in _visits(call.axis, (k, v, ids)):

        def part(carry: Any, there: Any = there, visitors: Any = visitors) -> Any:
            keys, values, key_ids = visitors
            mask = partial(_visible, call, ids, key_ids, there)
            return _by_blocks(add, carry, keys, values, mask)[0]

        carry = _if_seen(call, there, part, carry)
    best, total, out = carry
    seen = jnp.where(total == 0, 1.0, total)
    out = _joined(problem, out / seen[..., None]).astype(query.dtype)
    # The logarithm of the sum of each row's weights; a row that sees nothing has none.
    return out, (query, key, value, ids, sinks, out, best + jnp.log(seen))


def _backward(call: _Call, kept: Any, gradient: jax.Array) -> tuple[Any, ...]:
    query, key, value, ids, sinks, out, sums = kept
    problem = call.problem
    q, k, v = _split(problem, query, key, value)
    wide = problem.accumulate_dtype
    do, o = (_grouped(problem, to_bhsd(x, problem.layout)).astype(wide) for x in (gradient, out))
    delta = jnp.sum(do * o, axis=-1)
    narrow_do = _grouped(problem, to_bhsd(gradient, problem.layout))

    def add(dq: Any, k: Any, v: Any, visible: Any) -> tuple[Any, Any]:
        scores, slope = _scores(problem, q, k)
        weights = jnp.where(visible, jnp.exp(scores - sums[..., None]), 0)
        dv = _dot(problem, "bgrqk,bgrqd->bgkd", weights, narrow_do)
        of_weights = _dot(problem, "bgrqd,bgkd->bgrqk", narrow_do, v)
        of_scores = weights * (of_weights - delta[..., None]) * problem.scale
        if slope is not None:
            of_scores = of_scores * slope
        dq = dq + _dot(problem, "bgrqk,bgkd->bgrqd", of_scores, k)
        return dq, (_dot(problem, "bgrqk,bgrqd->bgkd", of_scores, q), dv)

    dq = alike(jnp.zeros(q.shape, wide), q, k, v, do)
    home = alike((jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)), q, k, v, do)
    for there, visitors in _visits(call.axis, (k, v, ids)):

        def part(carry: Any, there: Any = there, visitors: Any = visitors) -> tuple[Any, Any]:
            dq, (dk, dv) = carry
            keys, values, key_ids = visitors
            mask = partial(_visible, call, ids, key_ids, there)
            dq, (more_k, more_v) = _by_blocks(add, dq, keys, values, mask)
            return dq, (dk + more_k, dv + more_v)

        dq, home = _if_seen(call, there, part, (dq, home))
        # On with the part that it belongs to; after the last step it is where it came from.
        home = jax.tree.map(lambda x: shift(x, call.axis, 1), home)
    dk, dv = home
    of_sinks = None
    if sinks is not None:
        weights = jnp.exp(_of_heads(problem, sinks).astype(wide) - sums)
        of_sinks = -jnp.sum(weights * delta, axis=(0, 3)).reshape(sinks.shape).astype(sinks.dtype)
    return (
        _joined(problem, dq).astype(query.dtype),
        from_bhsd(dk.astype(key.dtype), problem.layout),
        from_bhsd(dv.astype(value.dtype), problem.layout),
        None,
        of_sinks,
    )


_attend.defvjp(_forward, _backward)


def _visits(axis: Axis, arrays: Any) -> Iterator[tuple[jax.Array, Any]]:
    """``(index of the device that these arrays belong to, arrays)``, one's own first.

    The next ones are sent for before a part is computed with: the transfer does not depend on that.
    """
    size, here = lax.axis_size(axis), lax.axis_index(axis)
    for step in range(size):
        coming = jax.tree.map(lambda x: shift(x, axis, 1), arrays) if step < size - 1 else arrays
        yield (here - step) % size, arrays
        arrays = coming


def _if_seen(call: _Call, there: Any, part: Callable[[Any], Any], carry: Any) -> Any:
    """``part(carry)``, or ``carry`` if no query here sees a key of device ``there``."""
    problem, here = call.problem, lax.axis_index(call.axis)
    seen = None
    if problem.right is not None:  # the first key is not after the last query's window
        seen = there * problem.kv_len <= here * problem.q_len + problem.q_len - 1 + problem.right
    if problem.left is not None:
        reached = there * problem.kv_len + problem.kv_len - 1 >= here * problem.q_len - problem.left
        seen = reached if seen is None else seen & reached
    return part(carry) if seen is None else lax.cond(seen, part, lambda carry: carry, carry)


def _by_blocks(add: Callable[..., Any], carry: Any, k: Any, v: Any, mask: Callable[..., Any]) -> Any:
    """``add`` for some keys at a time, whose scores are computed at once; what it gives for each is connected."""
    length = k.shape[2]
    count = -(-length // _KEYS)
    if count < 2 or length % count:
        return add(carry, k, v, mask(0, length))
    size = length // count

    def step(carry: Any, block: Any) -> tuple[Any, Any]:
        start = block * size
        own = [lax.dynamic_slice_in_dim(x, start, size, 2) for x in (k, v)]
        return add(carry, *own, mask(start, size))

    carry, parts = lax.scan(step, carry, alike(jnp.arange(count), carry))
    return carry, jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], length, x.shape[-1]), parts
    )


def _visible(call: _Call, ids: Any, key_ids: Any, there: Any, start: Any, size: int) -> jax.Array:
    """Which of ``size`` keys of device ``there`` each query here sees: ``bool [batch|1, 1, 1, queries, size]``."""
    problem = call.problem
    rows = lax.axis_index(call.axis) * problem.q_len + jnp.arange(problem.q_len)[:, None]
    columns = there * problem.kv_len + start + jnp.arange(size)[None, :]
    seen = jnp.ones((problem.q_len, size), bool)
    if problem.left is not None:
        seen &= columns >= rows - problem.left
    if problem.right is not None:
        seen &= columns <= rows + problem.right
    seen = seen[None]
    if ids is not None:
        block = lax.dynamic_slice_in_dim(key_ids, start, size, 1)
        seen = seen & (ids[:, :, None] == block[:, None, :])
    return seen[:, None, None]


def _scores(problem: AttentionProblem, q: Any, k: Any) -> tuple[jax.Array, jax.Array | None]:
    """``[b, g, r, q, k]``, and with a soft cap its derivative."""
    scores = problem.scale * _dot(problem, "bgrqd,bgkd->bgrqk", q, k)
    if problem.softcap is None:
        return scores, None
    bent = jnp.tanh(scores / problem.softcap)
    return problem.softcap * bent, 1 - jnp.square(bent)


def _dot(problem: AttentionProblem, form: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product of operands in the dtype of the arrays, or of ``precision``, summed in the wide one."""
    narrow = problem.operand_dtype or problem.dtype
    return jnp.einsum(
        form,
        a.astype(narrow),
        b.astype(narrow),
        precision=problem.precision,
        preferred_element_type=problem.accumulate_dtype,
    )


def _split(problem: AttentionProblem, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    """Query ``[b, g, r, q, d]``, key and value ``[b, g, k, d]``."""
    q, k, v = (to_bhsd(x, problem.layout) for x in (query, key, value))
    return _grouped(problem, q), k, v


def _grouped(problem: AttentionProblem, x: Any) -> Any:
    batch, heads, length, dim = x.shape
    return x.reshape(batch, problem.kv_heads, heads // problem.kv_heads, length, dim)


def _joined(problem: AttentionProblem, x: Any) -> Any:
    batch, groups, served, length, dim = x.shape
    return from_bhsd(x.reshape(batch, groups * served, length, dim), problem.layout)


def _of_heads(problem: AttentionProblem, sinks: Any) -> Any:
    return sinks.reshape(1, problem.kv_heads, -1, 1)

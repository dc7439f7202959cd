"""The public attention function; reference.py defines it, the other files make it fast."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.attention import cpu, native, pallas_gpu, pallas_tpu, reference, specs, xla
from capibara.ops.attention.problem import AttentionProblem, alike_in_speed, prepare
from capibara.ops.explicit import automatic, explicit_sharding
from capibara.ops.one_device import alike
from capibara.ops.registry import Implementation, Op, public
from capibara.ops.tuning import Tuning

__all__ = ["flash_attention"]


def _reference_forward(problem: AttentionProblem, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    out = reference.attention(problem, *arrays)
    return out, jnp.zeros((problem.batch, problem.heads, 0))


def _reference_backward(
    problem: AttentionProblem, arrays: tuple[Any, ...], out: jax.Array, stat: jax.Array, out_grad: jax.Array
) -> tuple[Any, ...]:
    query, key, value, bias, query_ids, key_ids, sinks = arrays
    _, pull = jax.vjp(
        lambda q, k, v, b, s: reference.attention(problem, q, k, v, b, query_ids, key_ids, s),
        query,
        key,
        value,
        bias,
        sinks,
    )
    return pull(out_grad)


OP = Op(
    "flash_attention",
    prepare,
    [
        Implementation(
            "native",
            {"forward": native.forward, "backward": native.backward},
            ("cpu",),
            native.check,
            portable=False,
        ),
        Implementation(
            "cpu",
            {"forward": cpu.forward, "backward": cpu.backward},
            ("cpu",),
            cpu.check,
            tunables={"block_size": (16, 32, 64, 128, 256, 512)},
        ),
        Implementation(
            "pallas_tpu",
            {"forward": pallas_tpu.forward, "backward": pallas_tpu.backward},
            ("tpu",),
            pallas_tpu.check,
            tunables={"block_size": (128, 256, 512, 1024)},
        ),
        Implementation(
            "pallas_gpu",
            {"forward": pallas_gpu.forward, "backward": pallas_gpu.backward},
            (),
            pallas_gpu.check,
            tuned_on=("cuda",),
            tunables={"block_size": (16, 32, 64, 128)},
        ),
        Implementation(
            "xla",
            {"forward": xla.forward, "backward": xla.backward},
            tunables={"block_size": (64, 128, 256, 512, 1024)},
        ),
        Implementation("reference", {"forward": _reference_forward, "backward": _reference_backward}),
    ],
    Tuning(lambda: specs.SPECS, specs.arguments, alike_in_speed),
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(problem: AttentionProblem, *arrays: Any) -> jax.Array:
    return OP.run("forward", problem, *arrays)[0]


def _attend_forward(problem: AttentionProblem, *arrays: Any) -> tuple[jax.Array, Any]:
    # `stat` is one number a row (log-sum-exp or sum); what it means is the implementation's own business.
    out, stat = OP.run("forward", problem, *arrays)
    return out, (arrays, out, stat)


def _attend_backward(problem: AttentionProblem, residuals: Any, out_grad: jax.Array) -> tuple[Any, ...]:
    *gradients, of_sinks = OP.run("backward", problem, *residuals, out_grad)
    return *gradients, None, None, of_sinks


_attend.defvjp(_attend_forward, _attend_backward)


@public(OP)
def flash_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    block_size: int | None = None,
    use_causal_mask: bool = False,
    precision: str | jax.lax.Precision | None = None,
    bias: jax.Array | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    sinks: jax.Array | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    layout: str = "bhsd",
    implementation: str = "auto",
) -> jax.Array:
    """Softmax attention whose extra memory grows with the sequence, not with its square.

    In plain JAX, for ``layout="bhsd"`` and equal head counts::

        scores = scale * jnp.einsum("bhqd,bhkd->bhqk", query, key)
        scores = softcap * jnp.tanh(scores / softcap) + bias         # where given
        scores = jnp.where(visible, scores, -jnp.inf)                # causal mask, window, segments
        out = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores), value)

    With ``sinks``, the softmax is over one more score, and its weight is dropped::

        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, column], -1))[..., :-1]

    The backward pass keeps query, key, value, the output and one value per row, and recomputes the scores (Dao et al.
    2022, arXiv:2205.14135). Works under ``jit``, ``grad`` (also twice) and ``vmap``; forward-mode differentiation
    (``jvp``) is not defined for it. On a mesh with explicit axes (``jax.make_mesh``) the output is sharded like the
    query, with its last axis replicated.

    Args:
      query: ``[batch, heads, q_len, dim]`` (``layout="bhsd"``) or
        ``[batch, q_len, heads, dim]`` (``"bshd"``),
        floating point.
      key: Like ``query`` with ``kv_len`` positions and ``kv_heads`` heads, where ``kv_heads`` divides
        ``heads`` (grouped-query attention: query head ``h`` reads head ``h // (heads // kv_heads)``).
      value: Like ``key``; its last axis may differ in size.
      block_size: Query rows (and in the looped form keys) per block; ``None``: what ``capibara tune`` has measured
        here, otherwise the implementation's default. It affects speed and memory, not the result; only a hint to
        ``"native"``, whose blocks follow the processor's caches.
      use_causal_mask: Query ``i`` sees keys ``0 … i`` only (both counted from the start of their arrays).
      precision: ``None`` (the ``jax.default_matmul_precision`` in effect at the call, also for the backward pass),
        ``"bfloat16"`` or ``"float16"`` (operands are rounded to it, sums are float32), ``"float32"``/``"highest"``,
        ``"high"``, ``"default"``, or a ``jax.lax.Precision``.
      bias: Added to the scaled scores; ``[batch|1, heads|1, q_len|1, kv_len|1]``. Differentiable. ``-inf`` masks a
        key.
      segment_ids: ``int [batch, sequence]``, or a pair for query and key; positions see only those of equal id
        (ids are compared: in ``[1, 1, 2, 2, 1, 1]`` the last two positions see the first two).
      sinks: ``[heads]``, floating point: a logit of each query head that only adds to the softmax's denominator
        (gpt-oss, arXiv:2508.10925), so that a head's weights may sum to less than 1. Differentiable.
      window: ``n``: query ``i`` sees keys ``i - n + 1 … i + n - 1`` (with the causal mask: ``… i``).
        ``(left, right)``: keys ``i - left … i + right``, ``None`` meaning no limit.
      softcap: Limits scores to ``(-softcap, softcap)`` by ``softcap · tanh(scores / softcap)``, before the bias.
      scale: Factor on the scores; ``None`` means ``1 / sqrt(dim)``. Like ``softcap``, a constant known while tracing;
        for a learned factor, multiply the query by it and pass ``scale=1.0``.
      layout: Order of the axes of all four arrays.
      implementation: ``"auto"``, ``"native"``, ``"cpu"``, ``"pallas_tpu"``, ``"pallas_gpu"`` (for NVIDIA GPUs; both
        are interpreted, slowly, on other platforms), ``"xla"`` or ``"reference"``; see
        :func:`capibara.ops.explain`. No GPU has been measured yet: there ``"auto"`` chooses ``"pallas_gpu"`` only if
        ``capibara tune`` found it to be the fastest.

    Returns:
      The output, in the query's layout and dtype, with the value's last axis. The output of a query that sees no key
      is zero. A NaN propagates to all queries that see its key; masked keys are skipped where blocks allow it, so NaN
      may reach fewer queries than in the plain form, which multiplies masked keys by zero.

    Raises:
      OpShapeError: shapes do not match; OpTypeError: a wrong type or dtype; OpValueError: an option is out of range;
      NoImplementationError: the requested implementation does not support these sizes.
    """
    OP.check_name(implementation)
    options: dict[str, Any] = {
        "block_size": block_size,
        "use_causal_mask": use_causal_mask,
        "precision": precision,
        "window": window,
        "softcap": softcap,
        "scale": scale,
        "layout": layout,
        "implementation": implementation,
    }
    ids = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    if len(ids) == 2 and explicit_sharding(query, key, value, bias, *ids, sinks) is not None:
        return automatic(
            lambda q, k, v, b, i, j, s: flash_attention(
                q, k, v, bias=b, segment_ids=None if segment_ids is None else (i, j), sinks=s, **options
            ),
            (query, key, value, bias, *ids, sinks),
            kept=3,
        )
    problem, arrays = OP.prepare(
        query, key, value, bias=bias, segment_ids=segment_ids, sinks=sinks, **options
    )
    if 0 in (problem.batch, problem.heads, problem.q_len, problem.kv_len):
        return jnp.zeros((*query.shape[:3], problem.value_dim), problem.dtype)
    return _attend(problem, *alike(arrays, arrays))

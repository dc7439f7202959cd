"""Rotary positions (RoPE): queries and keys turned, so that their products depend on distances alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.explicit import Dims, over_explicit_axes
from capibara.ops.one_device import alike
from capibara.ops.registry import Implementation, Op, public
from capibara.ops.rotary import pallas_tpu, reference, xla
from capibara.ops.rotary.problem import prepare
from capibara.ops.rotary.table import rotary_table

__all__ = ["rotary"]


OP = Op(
    "rotary",
    prepare,
    [
        Implementation("pallas_tpu", {"forward": pallas_tpu.forward}, ("tpu",), pallas_tpu.check),
        Implementation("xla", {"forward": xla.forward}),
        Implementation("reference", {"forward": reference.forward}),
    ],
)


def _dims(query: Dims, key: Dims, *_: Dims) -> Any:
    return [query, key] if key else query


@public(OP)
@over_explicit_axes("query", "key", "positions", "cos", "sin", out=_dims)
def rotary(
    query: jax.Array,
    key: jax.Array | None = None,
    *,
    positions: jax.Array | None = None,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    dim: int | None = None,
    theta: float = 10000.0,
    frequencies: Sequence[float] | None = None,
    factor: float = 1.0,
    layout: str = "halves",
    implementation: str = "auto",
) -> Any:
    """Turn pairs of features by an angle that grows with the position: queries, or queries and keys.

    In plain JAX, for all features of ``"halves"``::

        angle = positions[:, None, None] * theta ** (-jnp.arange(0, features, 2) / features)
        a, b = jnp.split(query, 2, axis=-1)
        out = jnp.concatenate([a * cos(angle) - b * sin(angle), b * cos(angle) + a * sin(angle)], axis=-1)

    It is linear in the query and the key: the gradient is the same rotation backwards, and keeps no activations, only
    the tables. Arithmetic is in float32 (float64 for float64, or the dtype of given tables where it is wider). Works
    under ``jit``, ``vmap``, ``grad``, ``jvp`` (also twice, and in given tables) and on meshes.

    Args:
      query: ``[..., length, heads, features]``, floating point.
      key: None, or ``[..., length, key heads, features]``.
      positions: integers ``[length]`` or ``[..., length]``.
      cos, sin: ``[length, dim / 2]`` or ``[..., length, dim / 2]``, in place of positions.
      dim: number of features that are turned, the first of each head; None: all, or those of the tables.
      theta: base of the wavelengths: pair ``i`` turns by ``theta ** (-2 i / dim)`` radians a position.
      frequencies: ``dim / 2`` numbers in place of these turns, as models scaled to longer texts have them.
      factor: on cosines and sines made from positions, as YaRN has it.
      layout: ``"halves"``: pair ``i`` is features ``i`` and ``i + dim / 2`` (Llama); ``"pairs"``: ``2 i`` and
        ``2 i + 1`` (GPT-J, DeepSeek).
      implementation: ``"auto"``, ``"pallas_tpu"`` (one pass over whole heads; interpreted, slowly, on other platforms),
        ``"xla"`` (elementwise) or ``"reference"`` (a matrix for each position).

    Returns:
      The query turned, or (query, key), with their shapes and dtypes.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Source: Su et al. 2021, "RoFormer" (arXiv:2104.09864).
    """
    OP.check_name(implementation)
    problem, arrays = OP.prepare(
        query,
        key,
        positions=positions,
        cos=cos,
        sin=sin,
        dim=dim,
        theta=theta,
        frequencies=frequencies,
        factor=factor,
        layout=layout,
        implementation=implementation,
    )
    arrays = tuple(map(jnp.asarray, arrays))
    turned, rest = arrays[: len(problem.shapes)], arrays[len(problem.shapes) :]
    if problem.given:
        tables = tuple(table.astype(problem.wide) for table in rest)
    else:
        options = problem.frequencies, problem.factor
        tables = rotary_table(rest[0], problem.dim, problem.theta, problem.wide, *options)
    out = []
    for i, x in enumerate(turned):
        one = replace(problem, shapes=problem.shapes[i : i + 1], dtypes=problem.dtypes[i : i + 1])
        # Inside shard_map, what each device has of its own for tables that all share has its gradient summed there.
        out += OP.run("forward", one, *alike(tables, x, *tables), x) if x.size else [x]
    return out[0] if key is None else tuple(out)

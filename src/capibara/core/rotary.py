"""How fast the pairs of a head turn: RoPE (Su et al., 2021) and the ways of stretching it to longer texts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from capibara.config.sections import ModelSection, RopeSection
from capibara.ops.rotary.table import base_frequencies

__all__ = ["Turns", "attention_scale", "rotary_turns"]


@dataclass(frozen=True)
class Turns:
    """What a table of rotary positions is made of.

    Attributes:
      dim: features of a head that are turned.
      theta: base of the wavelengths.
      frequencies: radians a position, one for each of ``dim / 2`` pairs; ``None``: ``theta ** (-2 i / dim)``.
      factor: on cosines and sines.
    """

    dim: int
    theta: float
    frequencies: tuple[float, ...] | None
    factor: float


def rotary_turns(config: ModelSection, *, local: bool = False) -> Turns:
    """How the rotary positions of a configuration turn.

    Args:
      config: the ``[model]`` section.
      local: of local blocks, which may have a base of their own.
    """
    rope, dim = config.rope, config.rotary_dim
    if local and rope.local_theta is not None:
        return Turns(dim, rope.local_theta, None, 1.0)
    theta = config.rope_theta
    if rope.scaling == "none":
        return Turns(dim, theta, None, 1.0)
    plain = base_frequencies(dim, theta)
    if rope.scaling == "linear":
        return Turns(dim, theta, tuple(turn / rope.factor for turn in plain), 1.0)
    if rope.scaling == "llama3":
        return Turns(dim, theta, tuple(_llama3(turn, rope) for turn in plain), 1.0)
    factor = rope.attention_factor
    if factor is None:
        over = 1.0 if rope.mscale_all_dim is None else _grown(rope.factor, rope.mscale_all_dim)
        factor = _grown(rope.factor, rope.mscale or 1.0) / over
    return Turns(dim, theta, _yarn(plain, theta, rope), factor)


def _grown(factor: float, mscale: float) -> float:
    """YaRN's factor against the entropy of longer texts, on queries and on keys (arXiv:2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0


def attention_scale(config: ModelSection) -> float | None:
    """The factor on scores of a configuration; None: ``1 / sqrt(head_dim)``."""
    rope = config.rope
    if config.attention_scale is not None or rope.mscale_all_dim is None:
        return config.attention_scale
    return config.resolved_head_dim**-0.5 * _grown(rope.factor, rope.mscale_all_dim) ** 2


def _llama3(turn: float, rope: RopeSection) -> float:
    """Llama 3.1: by how often the wave fits into the original length; between the bounds a straight mixture."""
    assert rope.original_length is not None
    fits = rope.original_length * turn / (2 * math.pi)
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    kept = min(max((fits - low) / (high - low), 0.0), 1.0)
    return kept * turn + (1 - kept) * turn / rope.factor


def _yarn(plain: tuple[float, ...], theta: float, rope: RopeSection) -> tuple[float, ...]:
    """YaRN (Peng et al., 2023, arXiv:2309.00071): as :func:`_llama3`, but the mixture is straight in the index."""
    assert rope.original_length is not None
    pairs = len(plain)

    def index(turns: float) -> float:
        """The pair that turns so often in the original length."""
        return pairs * math.log(rope.original_length / (2 * math.pi * turns)) / math.log(theta)  # type: ignore[operator]

    first, last = index(rope.beta_fast), index(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or 0.001
    stretched = [min(max((i - first) / width, 0.0), 1.0) for i in range(pairs)]
    return tuple(
        turn * (1 - part) + turn / rope.factor * part for turn, part in zip(plain, stretched, strict=True)
    )

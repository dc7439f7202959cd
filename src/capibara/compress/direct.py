"""Matrices of an archive multiplied as they are stored: read as codes and scales, never decoded as a whole.

Tensors that were stored with ``int8``, ``int4`` or ``nf4`` come as :class:`QuantisedMatrix`, a pytree of their codes
and scales, which goes through ``jit`` and onto devices like other arrays; :meth:`QuantisedMatrix.matmul` is
:func:`capibara.ops.linalg.quantised_matmul`. Only this module of the room needs JAX.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.compress.codecs.fixed import Fixed, Parts
from capibara.compress.codecs.protocol import get_codec
from capibara.compress.container.reader import Archive
from capibara.compress.errors import CompressError
from capibara.compress.formats import NumberFormat, to_float
from capibara.ops.linalg.quantised import dequantise_matrix, quantised_matmul

__all__ = ["Piece", "QuantisedMatrix", "load_quantised"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Piece:
    """Rows that were stored together.

    Attributes:
      codes: int8 [rows, length], or uint8 [rows, ceil(length / 2)].
      scales: float32 [rows, groups].
      levels: float32 [16], or ``None`` where codes are the levels.
      row: int32 [count], rows of numbers that are kept exactly.
      column: int32 [count], their columns.
      change: float32 [count], by how much they differ from what their codes stand for.
      length: numbers of a row.
      group: numbers that share a scale.
    """

    codes: Any
    scales: Any
    levels: Any
    row: Any
    column: Any
    change: Any
    length: int = field(metadata={"static": True})
    group: int = field(metadata={"static": True})

    def matmul(self, x: Any, implementation: str) -> jax.Array:
        out = quantised_matmul(
            x, self.codes, self.scales, self.levels, group=self.group, implementation=implementation
        )
        if self.row.shape[0]:
            out = out.at[..., self.row].add((x[..., self.column] * self.change).astype(out.dtype))
        return out

    def numbers(self) -> jax.Array:
        """float32 [rows, length]."""
        found = dequantise_matrix(self.codes, self.scales, self.levels, inner=self.length, group=self.group)
        return found.at[self.row, self.column].add(self.change)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantisedMatrix:
    """A weight in codes of eight or four bits.

    Attributes:
      pieces: runs of rows along the weight's first axis.
      shape: of the weight.
      turned: groups of numbers that share a scale run along the weight's first axis, which is the layer's input: [in,
        out], as JAX's libraries have it. Else along the last: [out, in], as PyTorch has it.
    """

    pieces: tuple[Piece, ...]
    shape: tuple[int, ...] = field(metadata={"static": True})
    turned: bool = field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(int(leaf.nbytes) for leaf in jax.tree_util.tree_leaves(self))

    def matmul(self, x: Any, *, implementation: str = "auto") -> jax.Array:
        """``x @ W`` of a weight [in, out] (``turned``), ``x @ W.T`` of one [out, in].

        Args:
          x: [..., in]: float32, float64, bfloat16 or float16.
          implementation: as :func:`~capibara.ops.linalg.quantised_matmul` has it.

        Returns:
          [..., out] in ``x``'s dtype.

        Raises:
          OpShapeError, OpTypeError, OpValueError: an argument does not fit, by name.
        """
        if not self.turned:
            return jnp.concatenate([p.matmul(x, implementation) for p in self.pieces], axis=-1)
        out, at = None, 0
        if jnp.shape(x)[-1:] != self.shape[:1]:
            raise CompressError(f"x: got the shape {jnp.shape(x)}, expected [..., {self.shape[0]}]")
        for piece in self.pieces:
            part = piece.matmul(x[..., at : at + piece.length], implementation)
            out, at = part if out is None else out + part, at + piece.length
        assert out is not None
        return out

    def dequantise(self) -> jax.Array:
        """The weight as float32 [*shape]."""
        if self.turned:
            return jnp.concatenate([p.numbers().T for p in self.pieces])
        return jnp.concatenate([p.numbers() for p in self.pieces])

    def rows(self, indices: Any) -> jax.Array:
        """Rows of a table of embeddings [count, features], looked up before they become numbers.

        Args:
          indices: integers [...], from 0 to count - 1.

        Returns:
          float32 [..., features].

        Raises:
          CompressError: groups run along the first axis, or some numbers are kept exactly.
        """
        if self.turned or any(p.row.shape[0] for p in self.pieces):
            raise CompressError(
                "rows: groups run along the first axis, or some numbers are kept exactly. "
                "Remedy: dequantise()[indices]."
            )
        indices = jnp.asarray(indices)
        flat, at, out = indices.reshape(-1), 0, None
        for p in self.pieces:
            count = p.codes.shape[0]
            place = jnp.clip(flat - at, 0, count - 1)
            found = dequantise_matrix(
                p.codes[place], p.scales[place], p.levels, inner=p.length, group=p.group
            )
            out = found if out is None else jnp.where((flat >= at)[:, None], found, out)
            at += count
        assert out is not None
        return out.reshape(*indices.shape, self.shape[1])


def load_quantised(archive: str | os.PathLike[str] | Archive, name: str) -> QuantisedMatrix:
    """A matrix of an archive as it is stored, on JAX's default device.

    Args:
      archive: a ``.capi`` file, or an open one.
      name: of a tensor with two axes that was stored with ``int8``, ``int4`` or ``nf4``.

    Raises:
      KeyError: no tensor of that name.
      CompressError: another codec, or another number of axes.
      DamagedError: the payload is not what its codec writes.
    """
    if not isinstance(archive, Archive):
        with Archive(archive) as opened:
            return load_quantised(opened, name)
    entry = archive[name]
    codec = get_codec(entry.codec)
    if not isinstance(codec, Fixed) or len(entry.shape) != 2 or 0 in entry.shape:
        raise CompressError(
            f"{name}: stored as {entry.codec} with the shape {entry.shape}, expected int8, int4 or nf4 and a matrix. "
            "Remedy: archive.read(name)."
        )
    found = [
        codec.parts(payload, entry.format, shape, entry.settings) for shape, payload in archive.payloads(name)
    ]
    wide = {p.turned for p in found}
    if len(wide) != 1 or any(p.length != p.shape[0 if p.turned else 1] for p in found):
        raise CompressError(
            f"{name}: rows of the shape {entry.shape} are too short to have groups of their own. "
            "Remedy: archive.read(name)."
        )
    return QuantisedMatrix(tuple(_piece(p, entry.format) for p in found), entry.shape, wide.pop())


def _piece(parts: Parts, form: NumberFormat) -> Piece:
    row, column = np.divmod(parts.positions, max(parts.length, 1))
    stands = np.empty(len(row), np.float32)
    for index, (r, c) in enumerate(zip(row.tolist(), column.tolist(), strict=True)):
        code = parts.codes[r, c] if parts.levels is None else (parts.codes[r, c // 2] >> (4 * (c % 2))) & 15
        level = np.float32(code) if parts.levels is None else parts.levels[code]
        stands[index] = level * parts.scales[r, c // parts.group]
    change = to_float(parts.exact, form).astype(np.float32) - stands
    return Piece(
        jnp.asarray(parts.codes), jnp.asarray(parts.scales),
        None if parts.kind != "nf4" else jnp.asarray(parts.levels),
        jnp.asarray(row, jnp.int32), jnp.asarray(column, jnp.int32), jnp.asarray(change),
        parts.length, parts.group,
    )  # fmt: skip

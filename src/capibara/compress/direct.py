"""Multiply by matrices of an archive in their stored form: codes and scales, never decoded as a whole.

Tensors stored with ``int8``, ``int4`` or ``nf4`` are loaded as :class:`QuantisedMatrix` (or, with more than two axes,
as :class:`QuantisedStack`), pytrees of their codes and scales, which work with ``jit`` and can be placed on devices
like other arrays; :meth:`QuantisedMatrix.matmul` is :func:`capibara.ops.linalg.quantised_matmul`. Scales stay in the
eight bits of the file, so that they take as much memory as the file. :mod:`capibara.compress.jax_codes` runs whole
models this way.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.compress.codecs.fixed import Parts
from capibara.compress.coded import CodedWeight
from capibara.compress.container.reader import Archive
from capibara.compress.errors import CompressError
from capibara.compress.formats import NumberFormat
from capibara.compress.models.numbers import numpy_dtype
from capibara.compress.stored_codes import exact_changes, stored_layouts, stored_parts
from capibara.ops.linalg.quantised import dequantise_matrix, quantised_matmul, transposable

__all__ = ["Piece", "QuantisedMatrix", "QuantisedStack", "load_quantised"]

_STATIC: dict[str, Any] = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Piece:
    """Rows that were stored together.

    Attributes:
      codes: int8 [rows, length], or uint8 [rows, ceil(length / 2)].
      scale_codes: uint8 [rows, groups].
      table: float32 [256], the scale of each scale code.
      levels: float32 [16], or ``None`` if the codes are the levels.
      row: int32 [count], rows of the values that are kept exactly.
      column: int32 [count], their columns.
      change: float32 [count], their differences from the values of their codes.
      length: elements of a row.
      group: elements that share a scale.
    """

    codes: Any
    scale_codes: Any
    table: Any
    levels: Any
    row: Any
    column: Any
    change: Any
    length: int = field(metadata=_STATIC)
    group: int = field(metadata=_STATIC)

    @property
    def scales(self) -> jax.Array:
        """float32 [rows, groups]."""
        return self.table[self.scale_codes]

    def matmul(self, x: Any, implementation: str) -> jax.Array:
        out = quantised_matmul(
            x,
            self.codes,
            self.scale_codes,
            self.levels,
            group=self.group,
            scale_table=self.table,
            implementation=implementation,
        )
        if self.row.shape[0]:
            out = out.at[..., self.row].add((x[..., self.column] * self.change).astype(out.dtype))
        return out

    def numbers(self) -> jax.Array:
        """float32 [rows, length]."""
        found = dequantise_matrix(self.codes, self.scales, self.levels, inner=self.length, group=self.group)
        return found.at[self.row, self.column].add(self.change)

    def with_length(self, length: int) -> Piece | None:
        """The same values in longer or shorter rows; ``None`` if groups or bytes would have to be split."""
        if length == self.length:
            return self
        long, short = max(length, self.length), min(length, self.length)
        group = min(self.group, self.length)
        packed = self.codes.dtype == jnp.uint8
        if self.row.shape[0] or long % short or short % group or (packed and short % 2):
            return None
        rows = self.codes.shape[0] * self.length // length
        return replace(
            self,
            codes=self.codes.reshape(rows, -1),
            scale_codes=self.scale_codes.reshape(rows, -1),
            length=length,
            group=group,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantisedMatrix(CodedWeight):
    """A weight quantized to eight or four bits.

    Attributes:
      pieces: runs of rows along the weight's first axis.
      shape: of the weight.
      turned: groups that share a scale run along the weight's first axis, which is the layer's input: [in, out], as
        in JAX libraries. Otherwise along the last: [out, in], as in PyTorch.
      dtype: of the weight before it was compressed.
    """

    pieces: tuple[Piece, ...]
    shape: tuple[int, ...] = field(metadata=_STATIC)
    turned: bool = field(metadata=_STATIC)
    dtype: str = field(default="float32", metadata=_STATIC)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(int(leaf.nbytes) for leaf in jax.tree_util.tree_leaves(self))

    def matmul(self, x: Any, *, implementation: str = "auto") -> jax.Array:
        """``x @ W`` of a weight [in, out] (``turned``), ``x @ W.T`` of one [out, in].

        Args:
          x: [..., in]: float32, float64, bfloat16 or float16.
          implementation: as for :func:`~capibara.ops.linalg.quantised_matmul`.

        Returns:
          [..., out] in ``x``'s dtype.

        Raises:
          OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
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

    def transposed_matmul(self, x: Any) -> jax.Array:
        """The product along the other axis: ``x @ W`` of a weight [out, in], ``x @ W.T`` of one [in, out] (``turned``).

        It is the transpose of :meth:`matmul` as a linear function, and needs as little memory.

        Args:
          x: [..., out]: float32, float64, bfloat16 or float16.

        Returns:
          [..., in] in ``x``'s dtype.
        """
        x = jnp.asarray(x)
        out, inner = self.shape[::-1] if self.turned else self.shape
        if x.shape[-1:] != (out,):
            raise CompressError(f"x: got the shape {x.shape}, expected [..., {out}]")
        if 0 in x.shape:
            return jnp.zeros((*x.shape[:-1], inner), x.dtype)
        flat = x.reshape(-1, out)
        like = jax.ShapeDtypeStruct((len(flat), inner), x.dtype)
        form = transposable(str(x.dtype))
        (found,) = jax.linear_transpose(partial(self.matmul, implementation=form), like)(flat)
        return found.reshape(*x.shape[:-1], inner)

    def product(self, x: Any, axes: tuple[int, ...]) -> jax.Array | None:
        """``x [..., features]`` times the weight, summed over some of its axes; [..., the other axes].

        Args:
          axes: the first ones or the last ones, ascending; features are numbered over them in C order.

        Returns:
          ``None`` if the codes cannot be multiplied this way: use :meth:`dequantise`.
        """
        count, rank = len(axes), len(self.shape)
        first = axes == tuple(range(count))
        if not 0 < count < rank or not (first or axes == tuple(range(rank - count, rank))):
            return None
        cut = count if first else rank - count
        matrix = self._matrix(math.prod(self.shape[cut:]))
        if matrix is None:
            return None
        out = matrix.matmul(x) if first == self.turned else matrix.transposed_matmul(x)
        return out.reshape(*out.shape[:-1], *(self.shape[cut:] if first else self.shape[:cut]))

    def _matrix(self, length: int) -> QuantisedMatrix | None:
        """The same numbers with rows of that length."""
        if self.turned:
            return self if len(self.shape) == 2 else None
        joined = [p.with_length(length) for p in self.pieces]
        pieces = tuple(p for p in joined if p is not None)
        if len(pieces) < len(joined):
            return None
        return replace(self, pieces=pieces, shape=(math.prod(self.shape) // length, length))

    def reshape(self, shape: tuple[int, ...]) -> QuantisedMatrix | None:
        """The same codes in another shape; ``None`` if rows do not run along the last axes."""
        if self.turned:
            return self if tuple(shape) == self.shape else None
        return replace(self, shape=tuple(shape))

    def dequantise(self) -> jax.Array:
        """The weight as float32 [*shape]."""
        if self.turned:
            return jnp.concatenate([p.numbers().T for p in self.pieces])
        return jnp.concatenate([p.numbers() for p in self.pieces]).reshape(self.shape)

    def rows(self, indices: Any) -> jax.Array:
        """Rows of an embedding table [count, features], looked up before decoding.

        Args:
          indices: integers [...], from 0 to count - 1.

        Returns:
          float32 [..., features].

        Raises:
          CompressError: groups run along the first axis, or some values are kept exactly.
        """
        if not self.has_rows:
            raise CompressError(
                "rows: groups run along the first axis, or some numbers are kept exactly. "
                "Remedy: dequantise()[indices]."
            )
        indices = jnp.asarray(indices)
        flat, at, out = indices.reshape(-1), 0, None
        for p in self.pieces:
            count = p.codes.shape[0]
            place = jnp.clip(flat - at, 0, count - 1)
            scales = p.table[p.scale_codes[place]]
            found = dequantise_matrix(p.codes[place], scales, p.levels, inner=p.length, group=p.group)
            out = found if out is None else jnp.where((flat >= at)[:, None], found, out)
            at += count
        assert out is not None
        return out.reshape(*indices.shape, self.shape[1])

    @property
    def has_rows(self) -> bool:
        """Whether :meth:`rows` works."""
        rows = all(p.length == self.shape[-1] and not p.row.shape[0] for p in self.pieces)
        return rows and len(self.shape) == 2 and not self.turned


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantisedStack(CodedWeight):
    """A quantized weight of more than two axes, such as the matrices of several layers, one after another.

    Attributes:
      codes: int8 [count, rows, length], or uint8 [count, rows, ceil(length / 2)], for each index of the first axis.
      scale_codes: uint8 [count, rows, groups].
      tables: float32 [pieces, 256], for runs of ``each`` indices of the first axis.
      levels: float32 [pieces, 16], or ``None``.
      shape: of the weight.
      length, group: as in :class:`Piece`.
      each: number of indices of the first axis that were stored together.
      dtype: as in :class:`QuantisedMatrix`.
    """

    codes: Any
    scale_codes: Any
    tables: Any
    levels: Any
    shape: tuple[int, ...] = field(metadata=_STATIC)
    length: int = field(metadata=_STATIC)
    group: int = field(metadata=_STATIC)
    each: int = field(metadata=_STATIC)
    dtype: str = field(default="float32", metadata=_STATIC)

    nbytes = QuantisedMatrix.nbytes

    def layers(self) -> QuantisedMatrix:
        """A :class:`QuantisedMatrix` whose arrays have a leading axis, for ``lax.scan``."""
        alone = self.alone()
        nothing = np.zeros((self.shape[0], 0), np.int32)
        one = Piece(
            self.codes, self.scale_codes, alone.tables, alone.levels,
            nothing, nothing, nothing.astype(np.float32), self.length, self.group,
        )  # fmt: skip
        return QuantisedMatrix((one,), self.shape[1:], False, self.dtype)

    def alone(self) -> QuantisedStack:
        """The same with tables and levels for each index."""
        if self.each == 1:
            return self
        piece = np.arange(self.shape[0]) // self.each
        levels = None if self.levels is None else self.levels[piece]
        return replace(self, tables=self.tables[piece], levels=levels, each=1)

    def some(self, first: Any, count: int) -> QuantisedStack:
        """Indices of the first axis starting at ``first``, which may be traced."""

        def cut(array: Any) -> Any:
            return None if array is None else lax.dynamic_slice_in_dim(array, first, count)

        a = self.alone()
        codes, scales, tables, levels = map(cut, (a.codes, a.scale_codes, a.tables, a.levels))
        return replace(
            a, codes=codes, scale_codes=scales, tables=tables, levels=levels, shape=(count, *self.shape[1:])
        )

    def reshape(self, shape: tuple[int, ...]) -> QuantisedStack | QuantisedMatrix | None:
        """The same codes in another shape; ``None`` if the first axis would change."""
        shape = tuple(shape)
        if shape[:1] == self.shape[:1] and len(shape) > 1:
            return replace(self, shape=shape)
        if self.shape[0] == 1 and len(shape) > 1:
            one = jax.tree_util.tree_map(lambda a: a[0], self.layers())
            return one.reshape(shape)
        return None

    def dequantise(self) -> jax.Array:
        """The weight as float32 [*shape]."""
        return jax.vmap(QuantisedMatrix.dequantise)(self.layers())


def load_quantised(archive: str | os.PathLike[str] | Archive, name: str) -> QuantisedMatrix:
    """Load a matrix of an archive in its stored form, on JAX's default device.

    Args:
      archive: a ``.capi`` file, or an open one.
      name: of a two-dimensional tensor stored with ``int8``, ``int4`` or ``nf4``.

    Raises:
      KeyError: there is no tensor of that name.
      CompressError: another codec, or another number of axes.
      DamagedError: the payload is not what its codec writes.
    """
    if not isinstance(archive, Archive):
        with Archive(archive) as opened:
            return load_quantised(opened, name)
    found = load_codes(archive, name)
    if not isinstance(found, QuantisedMatrix):
        entry = archive[name]
        raise CompressError(
            f"{name}: {found or f'stored with the shape {entry.shape}'}, expected int8, int4 or nf4 and a matrix. "
            "Remedy: archive.read(name)."
        )
    return found


def load_codes(archive: Archive, name: str) -> QuantisedMatrix | QuantisedStack | str:
    """A tensor in its stored form; or the reason, as text, why it has to be decoded."""
    found = stored_parts(archive, name)
    if isinstance(found, str):
        return found
    entry = archive[archive[name].same_as or name]
    dtype = str(numpy_dtype(entry.format))
    first = found[0]
    # In NumPy until they are whole: JAX would compile a program for each shape.
    if len(entry.shape) == 2:
        pieces = tuple(_piece(p, entry.format) for p in found)
        return jax.device_put(QuantisedMatrix(pieces, entry.shape, first.turned, dtype))
    count = entry.shape[0]
    codes = np.concatenate([p.codes for p in found]).reshape(count, -1, first.codes.shape[1])
    scales = np.concatenate([p.scale_codes for p in found]).reshape(count, codes.shape[1], -1)
    levels = None if first.kind != "nf4" else np.stack([p.levels for p in found if p.levels is not None])
    form = (entry.shape, first.length, first.group, first.shape[0], dtype)
    tables = np.stack([p.table for p in found])
    return jax.device_put(QuantisedStack(codes, scales, tables, levels, *form))


def describe_codes(archive: Archive, name: str) -> QuantisedMatrix | QuantisedStack | str:
    """What :func:`load_codes` will give, its arrays as ``jax.ShapeDtypeStruct``; their numbers are not read."""
    found = stored_layouts(archive, name)
    if isinstance(found, str):
        return found
    entry = archive[archive[name].same_as or name]
    dtype = str(numpy_dtype(entry.format))
    first, like = found[0], jax.ShapeDtypeStruct
    kind = jnp.int8 if first.kind == "int8" else jnp.uint8
    stacked = len(entry.shape) > 2
    lead = (len(found),) if stacked else ()
    levels = like((*lead, 16), jnp.float32) if first.kind == "nf4" else None
    tables = like((*lead, 256), jnp.float32)
    if not stacked:
        pieces = tuple(
            Piece(
                like((p.rows, p.width), kind), like((p.rows, p.groups), jnp.uint8), tables, levels,
                like((p.exact,), jnp.int32), like((p.exact,), jnp.int32), like((p.exact,), jnp.float32),
                p.length, p.group,
            )
            for p in found
        )  # fmt: skip
        return QuantisedMatrix(pieces, entry.shape, first.turned, dtype)
    count = entry.shape[0]
    rows = sum(p.rows for p in found) // count
    codes, scales = like((count, rows, first.width), kind), like((count, rows, first.groups), jnp.uint8)
    form = (entry.shape, first.length, first.group, first.shape[0], dtype)
    return QuantisedStack(codes, scales, tables, levels, *form)


def _piece(parts: Parts, form: NumberFormat) -> Piece:
    """In host memory."""
    row, column, change = exact_changes(parts, form)
    return Piece(
        parts.codes, parts.scale_codes, parts.table, parts.levels if parts.kind == "nf4" else None,
        row.astype(np.int32), column.astype(np.int32), change,
        parts.length, parts.group,
    )  # fmt: skip

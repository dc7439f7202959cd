"""Lossless: the redundant bits of weights are entropy-coded, the others are packed.

Trained weights have few exponents, with uneven frequencies, and nearly random fractions. A value is split into a
*symbol* (the exponent, with the first bits of the fraction if they help: within one exponent, smaller values are more
frequent) and the *rest* (the sign and the remaining fraction). Symbols are entropy-coded
(:mod:`capibara.compress.entropy.rans`), the rest is packed unchanged.

Rows differ in scale, and one table of frequencies does not fit all of them well: rows are sorted into up to eight
classes by their mean exponent, each with its own table. Rows whose fractions end in zeros were converted from a
narrower type; those bits are not stored. The number of symbol bits and of classes is chosen per tensor for the
smallest payload. Integers are split in the same way: their distance from the smallest one or, if both signs occur,
their magnitude with the sign as the lowest bit.

All choices are stored in the payload's header, so that a reader only needs the tensor's dtype and shape.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.compress.codecs.executors import Executor, best_executor
from capibara.compress.codecs.in_place import InPlace
from capibara.compress.entropy import BLOCK, LANES
from capibara.compress.errors import DamagedError
from capibara.compress.formats import NumberFormat

__all__ = ["LOSSLESS", "decode", "encode", "row_length", "size_bound"]

STORED, CODED = 0, 1


def size_bound(form: NumberFormat, count: int) -> int:
    """The maximum number of bytes of a payload of ``count`` elements."""
    return 1 + count * form.bits // 8


def row_length(shape: tuple[int, ...]) -> int:
    """The length of a row: the last axis, or all but the first if that is short, or the whole tensor."""
    count = math.prod(shape)
    if len(shape) >= 2 and count:
        for length in (shape[-1], count // shape[0]):
            if length >= 32:
                return length
    return max(count, 1)


class Lossless(InPlace):
    """The codec as used by archives, single-threaded: the archive processes several chunks in parallel.

    Attributes:
      chunk: elements of a tensor that are encoded together. Larger chunks need fewer tables, smaller ones give more
        parallelism.
      cuts_rows: whether parts of rows can be encoded.
    """

    chunk = 1 << 20
    cuts_rows = True

    def may_hold(self, size: int, form: NumberFormat, count: int) -> bool:
        """Whether ``size`` payload bytes can hold ``count`` elements; checked before decoding."""
        return size == size_bound(form, count) or _may_be_coded(size, count)

    def encode_into(
        self,
        out: np.ndarray,
        bits: np.ndarray,
        form: NumberFormat,
        shape: tuple[int, ...],
        settings: Mapping[str, Any],
    ) -> int:
        """As :meth:`encode`, into a buffer of :meth:`size_bound` bytes; returns the number of bytes used."""
        return _encode_into(out, bits, form, shape, best_executor(), 1)

    def decode(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> np.ndarray:
        return decode(payload, form, shape)

    def decode_into(
        self,
        out: np.ndarray,
        payload: memoryview,
        form: NumberFormat,
        shape: tuple[int, ...],
        settings: Mapping[str, Any],
    ) -> None:
        """As :meth:`decode`, into an existing array [count]."""
        _decode_into(out, payload, form, shape, best_executor(), 1)

    def size_bound(self, form: NumberFormat, count: int, settings: Mapping[str, Any]) -> int:
        return size_bound(form, count)

    def error_bound(self, settings: Mapping[str, Any]) -> float | None:
        return 0.0

    def candidates(self, form: NumberFormat, shape: tuple[int, ...]) -> list[dict[str, Any]]:
        """Useful settings: the codec has none."""
        return [{}]


LOSSLESS = Lossless()


def _may_be_coded(size: int, count: int) -> bool:
    """Each block of numbers has its states, whatever it holds."""
    return -(-count // BLOCK) * 4 * LANES <= size


def _threads(count: int) -> int:
    """As many as are worth their start."""
    return max(1, min(os.cpu_count() or 1, count >> 18))


def encode(
    bits: np.ndarray,
    form: NumberFormat,
    shape: tuple[int, ...],
    executor: Executor | None = None,
    threads: int | None = None,
) -> bytes:
    """The payload of a tensor.

    Args:
      bits: [count] of ``form.unsigned``, in C order.
      shape: of the tensor, with ``count`` elements.
      executor: the engine to use; by default the fastest available one.
      threads: maximum number of threads, if the executor supports them; by default as many as are worth starting.
    """
    out = np.empty(size_bound(form, bits.size), np.uint8)
    size = _encode_into(out, bits, form, shape, executor or best_executor(), threads or _threads(bits.size))
    return out[:size].tobytes()


def _encode_into(
    out: np.ndarray,
    bits: np.ndarray,
    form: NumberFormat,
    shape: tuple[int, ...],
    executor: Executor,
    threads: int,
) -> int:
    bits = np.ascontiguousarray(bits, form.unsigned)
    end = 1 + bits.nbytes
    if len(bits) >= 64:
        rows, limit = bits.reshape(-1, row_length(shape)), bits.nbytes
        size = executor.encode_into(out[1 : 1 + limit], rows, form, threads)
        if size is not None:
            out[0] = CODED
            return 1 + size
    out[0] = STORED
    out[1:end] = bits.view(np.uint8)
    return end


def decode(
    payload: memoryview | bytes, form: NumberFormat, shape: tuple[int, ...], executor: Executor | None = None
) -> np.ndarray:
    """The bits of the tensor, [count] of ``form.unsigned``.

    Raises:
      DamagedError: the payload is not what :func:`encode` writes for this type and shape. Memory allocated before
        this is detected is bounded by the payload's size, at 2¹⁸ elements per 128 bytes.
    """
    count = math.prod(shape)
    if len(payload) == 0 or payload[0] > CODED:
        raise DamagedError("a tensor's payload has no known beginning: the file is damaged")
    if payload[0] == CODED and not _may_be_coded(len(payload), count):
        raise DamagedError(f"{len(payload)} bytes cannot hold {count} numbers: the file is damaged")
    if payload[0] == STORED and len(payload) != size_bound(form, count):
        raise DamagedError(f"a tensor of {count} numbers has {len(payload) - 1} bytes: the file is damaged")
    out = np.empty(count, form.unsigned)
    _decode_into(out, payload, form, shape, executor or best_executor(), _threads(count))
    return out


def _decode_into(
    out: np.ndarray,
    payload: memoryview | bytes,
    form: NumberFormat,
    shape: tuple[int, ...],
    executor: Executor,
    threads: int,
) -> None:
    data = np.frombuffer(payload, np.uint8)
    if len(data) == 0 or data[0] > CODED:
        raise DamagedError("a tensor's payload has no known beginning: the file is damaged")
    if data[0] == CODED:
        if out.size == 0:
            raise DamagedError("a tensor without numbers is coded: the file is damaged")
        executor.decode_tensor(data[1:], form, out.reshape(-1, row_length(shape)), threads)
        return
    if len(data) != size_bound(form, out.size):
        raise DamagedError(f"a tensor of {out.size} numbers has {len(data) - 1} bytes: the file is damaged")
    out.view(np.uint8)[:] = data[1:]

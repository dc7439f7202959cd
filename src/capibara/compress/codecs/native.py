"""The lossless codec in compiled code, through ctypes: neither JAX nor PyTorch is needed.

It is in the same library as the attention kernels (``python -m capibara.native`` builds it). A call processes a whole
tensor and releases Python's GIL, so several can run in parallel.
"""

from __future__ import annotations

import ctypes

import numpy as np

from capibara.compress.errors import DamagedError
from capibara.compress.formats import NumberFormat

__all__ = ["PAYLOAD", "NativeExecutor"]

# One of several payloads, as codec.h has it.
PAYLOAD = np.dtype(
    [("form", "<i4", 4), ("data", "<u8"), ("size", "<i8"), ("rows", "<i8"), ("length", "<i8"), ("out", "<u8"),
     ("crc32", "<u4"), ("outcome", "<i4")]
)  # fmt: skip

# As the outcomes are numbered in codec_decode.cc.
_DAMAGE = (
    "",
    "there are too few bytes for the number of elements",
    "a tensor's header is too long",
    "a tensor's elements are split at an invalid place",
    "a tensor's table of frequencies is invalid",
    "a row belongs to a missing group, or a group has no row",
    "more numbers are escaped than there are",
    "a tensor's payload ends too early",
    "a tensor's payload is longer than it states",
    "a block of coded symbols does not end where it should",
    "a block has a different number of escapes than its header states",
)
_NO_MEMORY = -2


class _Form(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int32) for name in ("bits", "exponent", "mantissa", "is_signed"))


class NativeExecutor:
    """Compiled code, if the library is available.

    Args:
      library: with the functions of ``codec.cc``.
    """

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        form = ctypes.POINTER(_Form)
        self._encode = library.capibara_codec_encode_tensor
        self._encode.argtypes = (form, pointer, size, size, number, pointer, size)
        self._encode.restype = size
        self._decode = library.capibara_codec_decode_tensor
        self._decode.argtypes = (form, pointer, size, size, size, number, pointer)
        self._decode.restype = number
        self._many = library.capibara_codec_decode_many
        self._many.argtypes = (pointer, size, number)
        self._many.restype = number
        self._forms: dict[str, _Form] = {}

    def _form(self, form: NumberFormat) -> _Form:
        if (found := self._forms.get(form.name)) is None:
            found = _Form(form.bits, form.exponent, form.mantissa, form.signed)
            self._forms[form.name] = found
        return found

    def decode_many(self, payloads: np.ndarray, threads: int) -> bool:
        """Compare checksums and decode several payloads in one call, so that threads need not wait for Python.

        Args:
          payloads: :data:`PAYLOAD` [count]: the fields of a :class:`NumberFormat` (bits, exponent, mantissa, signed),
            address and number of bytes, rows and their length, address of the output, the checksum. ``outcome`` is 0
            afterwards on success.
          threads: maximum number.

        Returns:
          Whether it was done; it is not if this machine has no faster checksums than zlib.
        """
        if payloads.dtype != PAYLOAD or not payloads.flags.c_contiguous:
            raise ValueError(f"payloads: expected {PAYLOAD} in C order, got {payloads.dtype}")
        return bool(self._many(payloads.ctypes.data, len(payloads), threads))

    def encode_tensor(
        self, rows: np.ndarray, form: NumberFormat, limit: int, threads: int = 1
    ) -> bytes | None:
        """As :meth:`capibara.compress.codecs.executors.Executor.encode_tensor`."""
        out = np.empty(limit, np.uint8)
        size = self.encode_into(out, rows, form, threads)
        return None if size is None else out[:size].tobytes()

    def encode_into(
        self, out: np.ndarray, rows: np.ndarray, form: NumberFormat, threads: int = 1
    ) -> int | None:
        """As :meth:`encode_tensor`, into a buffer whose size is the limit; returns the number of bytes used."""
        rows = np.ascontiguousarray(rows, form.unsigned)
        if out.dtype != np.uint8 or not out.flags.c_contiguous:
            raise ValueError(f"out: expected uint8 in C order, got {out.dtype}")
        size = self._encode(
            self._form(form), rows.ctypes.data, *rows.shape, threads, out.ctypes.data, len(out)
        )
        if size == _NO_MEMORY:
            raise MemoryError
        return None if size < 0 else size

    def decode_tensor(self, data: np.ndarray, form: NumberFormat, out: np.ndarray, threads: int = 1) -> None:
        """As :meth:`capibara.compress.codecs.executors.Executor.decode_tensor`."""
        if not out.flags.c_contiguous or out.dtype != form.unsigned or not data.flags.c_contiguous:
            raise ValueError(f"out: expected {form.unsigned} in C order, got {out.dtype}")
        code = self._decode(
            self._form(form), data.ctypes.data, len(data), *out.shape, threads, out.ctypes.data
        )
        if code == _NO_MEMORY:
            raise MemoryError
        if code:
            raise DamagedError(f"{_DAMAGE[code]}: the file is damaged")

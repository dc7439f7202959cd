"""Values rounded to multiples of a step, entropy-coded: the smallest files at a given error.

At moderate and high rates, uniform steps with an entropy coder come within a quarter of a bit of what any scalar or
vector quantiser can reach (H. Gish and J. Pierce, "Asymptotically efficient quantizing", IEEE Trans. Inf. Theory,
1968), whatever the distribution of values; a coder that models the scale of each row, like the lossless one,
preserves that for weights. The least squared error at a given size uses the same step for all values of equal weight;
a more sensitive tensor uses a smaller one.

If the second moments of a layer's inputs are known (``hessian``), each input may have its own step, and the effect of
rounding on the output is compensated (:mod:`capibara.compress.codecs.by_features`): half the error of the outputs, or
less, at equal size.

A decoded value is not the middle of its step but the mean of the values rounded to it, which is nearer to zero: that
mean is stored for the sixteen smallest multiples.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from capibara.compress.calibration.activations import from_matrix, stack_of
from capibara.compress.codecs import lossless
from capibara.compress.codecs.by_features import (
    Rounded,
    entry_gain,
    most_of_steps,
    pack_steps,
    read_steps,
    round_by_outputs,
)
from capibara.compress.codecs.in_place import DecodesInPlace
from capibara.compress.codecs.matrices import finite_matrix, get_axes, get_moments, get_number
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import NumberFormat, from_float, get_format, largest, to_float

__all__ = ["UNIFORM", "Uniform"]

_MEANS = 16
_BLOCK = 1 << 14
_HEAD = struct.Struct(
    f"<d{_MEANS}bB"
)  # the step, the means' offsets in 1/256 of it, and the bytes of a multiple
_BY_FEATURES = 0x80  # beside those bytes: steps of inputs follow
_TOP = 1 << 62
_WHOLE = {2: "I16", 4: "I32", 8: "I64"}


class Uniform(DecodesInPlace):
    """The codec ``"uniform"``.

    Settings:
      step: a finite number above 0; with a hessian, the geometric mean of the inputs' steps.
      hessian: E[x xᵀ] ``[features, features]`` of the layer's inputs; used in encoding and not stored. For one entry of
        a stack, ``[1, features, features]``: then its scale matters, and ``step`` is that for inputs with moments of 1,
        so that with one ``step`` for all entries the last bit of each reduces the error of the outputs equally.
      input_axes: the tensor's axes along which the inputs run; by default all but the first, or a vector's only one.
      damping: share of the mean moment that is added to the hessian's diagonal; 0.01 by default.

    Attributes:
      chunk: elements of a tensor that an archive encodes together.
      cuts_rows: whether parts of rows can be encoded.
      calibrated: whether a hessian is used.
    """

    chunk = 1 << 20
    cuts_rows = True
    calibrated = True

    def encode(
        self, bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> bytes:
        """The payload.

        Raises:
          CompressError: no ``step``, integers, NaN or infinity, or a hessian of the wrong size.
        """
        step = settings.get("step")
        if (
            not isinstance(step, float | int | np.floating | np.integer)
            or isinstance(step, bool)
            or not 1e-300 < step < 1e300
        ):
            raise CompressError(f"step: got {step!r}, expected a number between 1e-300 and 1e300")
        step, flat = float(step), bits.reshape(-1)
        if settings.get("hessian") is not None and flat.size:
            return self._encode_by_outputs(flat, form, shape, settings, step)
        top = 0.0
        for part in _floats(flat, form):
            if not np.isfinite(part).all():
                raise CompressError("values: NaN or infinite. Remedy: codec='lossless' for this tensor.")
            with np.errstate(over="ignore"):
                top = max(top, float(np.abs(np.rint(part / step)).max()))
        whole = np.empty(flat.size, _type_for(top, step, flat, form))
        sums = _Means()
        for part, multiples in zip(_floats(flat, form), _blocks(whole), strict=True):
            ratio = part / step
            multiples[:] = np.rint(ratio)
            sums.add(ratio)
        return _packed(step, sums.result(), whole, shape)

    def _encode_by_outputs(
        self,
        flat: np.ndarray,
        form: NumberFormat,
        shape: tuple[int, ...],
        settings: Mapping[str, Any],
        step: float,
    ) -> bytes:
        found = self.by_outputs(flat, form, shape, settings, [step])[0]
        if found is None:
            _type_for(math.inf, step, flat, form)
        assert found is not None
        return found[0]

    def by_outputs(
        self,
        flat: np.ndarray,
        form: NumberFormat,
        shape: tuple[int, ...],
        settings: Mapping[str, Any],
        steps: Sequence[float],
    ) -> list[tuple[bytes, float] | None]:
        """For each step, the payload that :meth:`encode` writes with a hessian, and the squared error of the outputs,
        for moments with mean 1, or for an entry of a stack as they are; ``None`` if the step is too small for the
        values.

        Raises:
          CompressError: integers, NaN or infinity, or a hessian of the wrong size.
        """
        axes = get_axes(settings, shape)
        matrix = finite_matrix(flat, form, shape, axes)
        hessian = get_moments(settings["hessian"], matrix.shape[1])
        damping = get_number(settings, "damping", 0.0, 1.0)
        damping = 0.01 if damping is None else damping
        level = 1.0
        if stack_of(settings["hessian"]) is not None:
            level = float(np.mean(hessian.diagonal())) or 1.0
            gain = entry_gain(hessian, damping) / math.sqrt(level)
            steps = [step * gain for step in steps]

        def means_of(blocks: Iterator[np.ndarray]) -> np.ndarray:
            sums = _Means()
            for ratio in blocks:
                sums.add(ratio)
            return sums.result()

        def stored(values: np.ndarray) -> np.ndarray:
            return to_float(_bits_of(values, form), form).astype(np.float64)

        def best(step: float, tried: Sequence[Rounded]) -> tuple[bytes, float] | None:
            found: tuple[float, bytes, float] | None = None
            for one in tried:
                if not (top := float(np.abs(one.multiples).max())) < _TOP:
                    continue
                whole = one.multiples.astype(_type_for(top, step, flat, form))
                if one.codes is None:
                    whole = np.ascontiguousarray(from_matrix(whole.T, shape, axes))
                    payload = _packed(step, one.means, whole, shape)
                else:
                    payload = _packed(step, one.means, whole, whole.shape, pack_steps(one.codes, axes))
                # A bit for each number halves the error.
                cost = 8 * len(payload) / flat.size + math.log2(max(one.error, 1e-300)) / 2
                if found is None or cost < found[0]:
                    found = cost, payload, one.error * level
            return None if found is None else found[1:]

        # As many steps together as fit into the cache with a small matrix, and few of a large one.
        together = max((1 << 20) // flat.size, 1)
        out: list[tuple[bytes, float] | None] = []
        for first in range(0, len(steps), together):
            some = steps[first : first + together]
            out += map(best, some, round_by_outputs(matrix, hessian, some, means_of, stored, damping))
        return out

    def decode_into(
        self,
        out: np.ndarray,
        payload: memoryview,
        form: NumberFormat,
        shape: tuple[int, ...],
        settings: Mapping[str, Any],
    ) -> None:
        """As :meth:`decode`, into an existing array [count]."""
        if len(payload) < _HEAD.size:
            raise DamagedError("a tensor's payload ends too early: the file is damaged")
        step, *means, size = _HEAD.unpack(payload[: _HEAD.size])
        by_features, size = bool(size & _BY_FEATURES), size & ~_BY_FEATURES
        # Of no numbers the type does not matter: what has none of any type is encoded.
        if not 0 < step < math.inf or size not in _WHOLE or not (form.is_float or not out.size):
            raise DamagedError("a tensor's step or type is invalid: the file is damaged")
        rest, offsets = payload[_HEAD.size :], np.append(np.array(means) / 256, 0.0)
        if by_features:
            axes, steps, rest = read_steps(rest, step, shape)
            features = len(steps)
            length = out.size // max(features, 1)
            whole = _multiples(np.empty(out.size * size, np.uint8), size, rest, (features, length))
            numbers, most = np.empty((features, length), form.unsigned), max(_BLOCK // max(length, 1), 1)
            for first in range(0, features, most):
                some = slice(first, first + most)
                block = whole.reshape(features, length)[some]
                numbers[some] = _restored(block, steps[some, None], offsets, form)
            out.reshape(shape)[...] = from_matrix(numbers.T, shape, axes)
            return
        # Multiples that are no longer than the numbers lie where these come to be, at the end: each is read before
        # a number takes its place.
        unused = out.nbytes - out.size * size
        room = np.empty(out.size * size, np.uint8) if unused < 0 else out.view(np.uint8)[unused:]
        whole = _multiples(room, size, rest, shape)
        for part, block in zip(_blocks(out), _blocks(whole), strict=True):
            part[:] = _restored(block, step, offsets, form)

    def may_hold(self, size: int, form: NumberFormat, count: int) -> bool:
        """Whether ``size`` payload bytes can hold ``count`` elements; checked before decoding."""
        rest = size - _HEAD.size
        for inner in map(get_format, _WHOLE.values()):
            # Before multiples that are not coded there may be steps.
            unused = rest - lossless.size_bound(inner, count)
            if lossless.LOSSLESS.may_hold(rest, inner, count) or 0 <= unused <= most_of_steps(count):
                return True
        return False

    def size_bound(self, form: NumberFormat, count: int, settings: Mapping[str, Any]) -> int:
        steps = 0 if settings.get("hessian") is None else most_of_steps(count)
        return _HEAD.size + steps + 1 + 8 * count

    def error_bound(self, settings: Mapping[str, Any]) -> float | None:
        """Relative errors are not bounded: a value below half a step becomes 0. Absolute ones are at most a step."""
        return None


def _blocks(flat: np.ndarray) -> Iterator[np.ndarray]:
    """Pieces of an array: floats are made of a few numbers at a time."""
    for first in range(0, len(flat), _BLOCK):
        yield flat[first : first + _BLOCK]


def _floats(flat: np.ndarray, form: NumberFormat) -> Iterator[np.ndarray]:
    """The numbers as float64, a few at a time."""
    for part in _blocks(flat):
        yield to_float(part, form).astype(np.float64)


def _type_for(top: float, step: float, flat: np.ndarray, form: NumberFormat) -> str:
    """The type of multiples up to ``top``."""
    if not top < _TOP:
        most = max(float(np.abs(part).max()) for part in _floats(flat, form))
        raise CompressError(f"step: got {step!r}, which is too small for numbers up to {most!r}")
    return "<i2" if top < 1 << 15 else "<i4" if top < 1 << 31 else "<i8"


class _Means:
    """By how many 256ths of a step the means of what falls to the smallest multiples lie off these."""

    def __init__(self) -> None:
        self._counts, self._offsets = np.zeros(_MEANS, np.int64), np.zeros(_MEANS)

    def add(self, ratio: np.ndarray) -> None:
        """Take in numbers, in steps."""
        magnitude = np.rint(ratio := np.abs(ratio))
        small = magnitude < _MEANS
        multiples = magnitude[small].astype(np.int64)
        self._counts += np.bincount(multiples, minlength=_MEANS)
        self._offsets += np.bincount(multiples, ratio[small] - multiples, minlength=_MEANS)

    def result(self) -> np.ndarray:
        """int [16]."""
        # Where nothing fell there is nothing to move; 0 has two sides.
        means = self._offsets / np.maximum(self._counts, 1)
        means[0] = 0
        return np.clip(np.rint(means * 256), -127, 127).astype(int)


def _packed(
    step: float, means: np.ndarray, whole: np.ndarray, shape: tuple[int, ...], steps: bytes = b""
) -> bytes:
    size = whole.dtype.itemsize
    inner = get_format(_WHOLE[size])
    head = _HEAD.pack(step, *means.tolist(), size | (_BY_FEATURES if steps else 0))
    return head + steps + lossless.encode(whole.reshape(-1).view(inner.unsigned), inner, shape)


def _multiples(room: np.ndarray, size: int, payload: memoryview, shape: tuple[int, ...]) -> np.ndarray:
    """Decoded, in ``room``, uint8."""
    inner = get_format(_WHOLE[size])
    lossless.LOSSLESS.decode_into(room.view(inner.unsigned), payload, inner, shape, {})
    whole = room.view(f"<i{size}")
    if whole.size and int(whole.min()) == np.iinfo(whole.dtype).min:
        raise DamagedError("a multiple is out of range: the file is damaged")
    return whole


def _restored(
    multiples: np.ndarray, step: float | np.ndarray, offsets: np.ndarray, form: NumberFormat
) -> np.ndarray:
    """Bits of multiples; ``offsets`` [17]: by how many steps numbers lie off them."""
    magnitude = np.abs(multiples)
    with np.errstate(over="ignore"):
        values = np.copysign((magnitude + offsets[np.minimum(magnitude, _MEANS)]) * step, multiples)
        return _bits_of(values, form)


def _bits_of(values: np.ndarray, form: NumberFormat) -> np.ndarray:
    """Numbers, float64, as bits of a type; what is past its largest one as that: only finite numbers are rounded."""
    values = np.clip(values, -largest(form), largest(form))
    bits = from_float((values if form.bits == 64 else values.astype(np.float32)).reshape(-1), form)
    return bits.reshape(values.shape)


UNIFORM = Uniform()

"""Networks that can be merged: a chain of steps over NumPy arrays.

A batch of dense inputs is [q, features], one of images [q, channels, *places], as in PyTorch; so are the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from capibara.compress.errors import CompressError

__all__ = ["Apply", "Convolution", "Dense", "Flatten", "Linear", "Pool", "Relu", "Step", "run"]

_CHUNK = 1 << 23  # numbers in the unfolded windows of one batch


def _check(weight: np.ndarray, bias: np.ndarray | None, what: str, dimensions: str, good: bool) -> None:
    if not isinstance(weight, np.ndarray) or not np.issubdtype(weight.dtype, np.floating):
        raise CompressError(
            f"{what}: the weight is {type(weight).__name__}, expected a NumPy array of floats"
        )
    if not good or not weight.size:
        raise CompressError(
            f"{what}: the weight has shape {weight.shape}, expected {dimensions}, none of them 0"
        )
    if bias is not None and (not isinstance(bias, np.ndarray) or bias.shape != weight.shape[:1]):
        raise CompressError(f"{what}: the bias has shape {np.shape(bias)}, expected {weight.shape[:1]}")
    if not np.isfinite(weight).all() or (bias is not None and not np.isfinite(bias).all()):
        raise CompressError(f"{what}: NaN or infinite weights cannot be merged.")


@dataclass(frozen=True)
class Dense:
    """``x @ weight.T + bias`` of inputs [q, …, in].

    Attributes:
      weight: float [out, in].
      bias: float [out], or ``None``.

    Raises:
      CompressError: wrong shapes or dtypes, NaN or infinity.
    """

    weight: np.ndarray
    bias: np.ndarray | None = None

    def __post_init__(self) -> None:
        _check(self.weight, self.bias, "Dense", "[out, in]", np.ndim(self.weight) == 2)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self._fits(x)
        out = x @ self.weight.T
        return out if self.bias is None else out + self.bias

    def _fits(self, x: np.ndarray) -> None:
        if x.ndim < 2 or x.shape[-1] != self.weight.shape[1]:
            raise CompressError(
                f"inputs: a dense layer with weight {self.weight.shape} is given {x.shape}, expected "
                f"[q, {self.weight.shape[1]}]"
            )

    def windows(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """The inputs of each output, as rows."""
        self._fits(x)
        yield x.reshape(-1, x.shape[-1])


@dataclass(frozen=True)
class Convolution:
    """A convolution (cross-correlation) in any number of dimensions, of inputs [q, in, *places].

    Attributes:
      weight: float [out, in, *taps].
      bias: float [out], or ``None``.
      stride: for each dimension.
      padding: zeros before and after, for each dimension.
      dilation: for each dimension.

    Raises:
      CompressError: wrong shapes or dtypes, NaN or infinity, settings of the wrong length.
    """

    weight: np.ndarray
    bias: np.ndarray | None = None
    stride: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check(self.weight, self.bias, "Convolution", "[out, in, *taps]", np.ndim(self.weight) >= 3)
        spatial = self.weight.ndim - 2
        defaults: dict[str, Any] = {"stride": 1, "padding": (0, 0), "dilation": 1}
        for name, default in defaults.items():
            value: tuple[Any, ...] = tuple(getattr(self, name)) or (default,) * spatial
            if len(value) != spatial:
                raise CompressError(
                    f"{name}: got {value!r}, expected {spatial} entries, one for each dimension"
                )
            if name == "padding":
                good = all(len(pair) == 2 and min(pair) >= 0 for pair in value)
            else:
                good = all(isinstance(number, int) and number >= 1 for number in value)
            if not good:
                raise CompressError(
                    f"{name}: got {value!r}, expected integers, pairs of them for the padding"
                )
            object.__setattr__(self, name, value)

    def _unfold(self, x: np.ndarray) -> np.ndarray:
        """[q, *places, in, *taps], a view."""
        spatial = self.weight.ndim - 2
        if x.ndim != self.weight.ndim or x.shape[1] != self.weight.shape[1]:
            raise CompressError(
                f"inputs: a convolution with weight {self.weight.shape} is given {x.shape}, expected "
                f"[q, {self.weight.shape[1]}] and {spatial} dimensions of places"
            )
        x = np.pad(x, ((0, 0), (0, 0), *self.padding))
        taps = self.weight.shape[2:]
        reach = tuple((t - 1) * d + 1 for t, d in zip(taps, self.dilation, strict=True))
        if any(have < need for have, need in zip(x.shape[2:], reach, strict=True)):
            raise CompressError(f"inputs: places {x.shape[2:]} with padding, smaller than the taps {reach}")
        view = sliding_window_view(x, reach, axis=tuple(range(2, 2 + spatial)))
        pick = [slice(None), slice(None), *(slice(None, None, s) for s in self.stride)]
        view = view[(*pick, *(slice(None, None, d) for d in self.dilation))]
        return np.moveaxis(view, 1, 1 + spatial)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        view = self._unfold(x)
        spatial = self.weight.ndim - 2
        axes = list(range(1 + spatial, view.ndim))
        out = np.tensordot(view, self.weight, (axes, list(range(1, self.weight.ndim))))
        if self.bias is not None:
            out = out + self.bias
        return np.moveaxis(out, -1, 1)

    def windows(self, x: np.ndarray) -> Iterator[np.ndarray]:
        """The inputs of each output, [rows, in · taps], in bounded pieces."""
        view = self._unfold(x)
        width = math.prod(self.weight.shape[1:])
        each = max(1, _CHUNK // max(1, view[0].size)) if len(view) else 1
        for start in range(0, len(view), each):
            yield view[start : start + each].reshape(-1, width)


@dataclass(frozen=True)
class Relu:
    """``max(x, 0)``."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return np.maximum(x, 0)


@dataclass(frozen=True)
class Flatten:
    """[q, …] to [q, features]."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(len(x), -1)


@dataclass(frozen=True)
class Pool:
    """The maximum or the mean of windows of each channel, without padding; inputs [q, channels, *places].

    Attributes:
      kind: ``"max"`` or ``"mean"``.
      size: of the window, for each dimension.
      stride: for each dimension; the size unless given.
    """

    kind: str
    size: tuple[int, ...]
    stride: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in ("max", "mean"):
            raise CompressError(f"kind: got {self.kind!r}, expected 'max' or 'mean'")
        stride = tuple(self.stride) or tuple(self.size)
        if len(stride) != len(self.size) or not stride or min(*stride, *self.size) < 1:
            raise CompressError(
                f"stride: got {stride!r} for size {self.size!r}, expected as many numbers above 0"
            )
        object.__setattr__(self, "stride", stride)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        spatial = len(self.size)
        view = sliding_window_view(x, self.size, axis=tuple(range(2, 2 + spatial)))
        view = view[(slice(None), slice(None), *(slice(None, None, s) for s in self.stride))]
        axes = tuple(range(view.ndim - spatial, view.ndim))
        return view.max(axes) if self.kind == "max" else view.mean(axes)


@dataclass(frozen=True)
class Apply:
    """Any other function of a batch.

    Attributes:
      function: from array to array.
      homogeneous: it acts on each channel separately, ``function(a x) = a function(x)`` for ``a > 0``, so that
        channels may be merged through it, and it does not increase the distance between inputs.
    """

    function: Callable[[np.ndarray], np.ndarray]
    homogeneous: bool = False

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return self.function(x)


Linear = Dense | Convolution
Step = Dense | Convolution | Relu | Flatten | Pool | Apply


def run(steps: Sequence[Step], x: np.ndarray) -> np.ndarray:
    """The outputs of the steps, one after another."""
    for step in steps:
        x = step(x)
    return x

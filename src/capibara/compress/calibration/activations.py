"""Second moments of the inputs of each linear layer, which determine the cost of an error in a weight.

A layer computes y = W x. An error D in its weight changes the output by D x, and over the inputs of a calibration
set the mean square of this is tr(D S Dᵀ), with S = E[x xᵀ]: the *second moments* [features, features]. That one
matrix is all that an activation-aware method needs of the data: a truncated SVD in its metric (ASVD, SVD-LLM), the
order and feedback of GPTQ (there it is called the Hessian), and the scores of Wanda, |W| times the root of its
diagonal.

A weight may be stored as in torch, [out, in], as in JAX, [in, out], or as a convolution [out, in, height, width];
``axes`` are its axes along which the inputs run. Features are numbered in C order over these axes, in their order in
the weight, regardless of the axes between them.

Inputs are found by observing a model while it runs, not by layer names: for a torch module every matrix product and
convolution with a parameter (:mod:`.torch_watch`), for a JAX function every ``dot_general`` with a leaf of its
parameters (:mod:`.jax_watch`). All rows have equal weight, including those of padding tokens: omit these from the
batches.

A *stack* is a weight of which each entry along the first axis is a separate weight: the layers that a ``scan`` iterates
over, or experts. Each entry has its own moments, [entries, features, features], up to 2 GiB for all stacks of a model;
beyond that the entries of a stack share their mean.
"""

from __future__ import annotations

import functools
import math
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compress.calibration.blas import one_thread
from capibara.compress.errors import CompressError
from capibara.errors import MissingExtraError

__all__ = ["Collected", "Metric", "Moments", "as_matrix", "collect", "from_matrix", "moments", "stack_of"]

_ROWS = 1 << 11  # of inputs that are multiplied in float32
_SEPARATE = 1 << 28  # elements of the moments of all stacks' entries: 2 GiB, as those of 16,384 features take


@dataclass(frozen=True)
class Moments:
    """The second moments of a layer's inputs.

    Attributes:
      second: E[x xᵀ], float64 [features, features], symmetric; the mean over ``count`` inputs. For a stack, float64
        [entries, features, features]: the sum over an entry's inputs divided by the mean number of inputs of an entry,
        so that entries with few inputs have less weight, and ``second.mean(0)`` is E[x xᵀ] of all inputs.
      count: the number of inputs; for a stack, of all entries.
      axes: the axes of the weight along which inputs run, ascending: ``(1,)`` for torch's [out, in], ``(0,)`` for
        JAX's [in, out], ``(1, 2, 3)`` for a convolution [out, in, height, width].
    """

    second: np.ndarray
    count: int
    axes: tuple[int, ...] = (1,)

    def settings(self) -> dict[str, Any]:
        """Settings for archives and codecs that support calibration: ``hessian`` and ``input_axes`` (not stored).

        For a stack, ``hessian`` is a tuple of matrices whose diagonals have a mean of 1 over all entries; an archive
        encodes each entry with its own.
        """
        return {"hessian": stack_of(self.second) or self.second, "input_axes": list(self.axes)}

    def error(self, weight: np.ndarray, other: np.ndarray) -> float:
        """The relative error of the layer's output, sqrt(tr(D S Dᵀ) / tr(W S Wᵀ)); 0 if the output is 0 as well."""
        metric = Metric(tuple(self.second) if self.second.ndim == 3 else self.second, self.axes)
        w = np.asarray(weight, np.float64)
        whole, wrong = metric.square(w), metric.square(np.asarray(other, np.float64) - w)
        return math.sqrt(wrong / whole) if whole > 0 else 0.0 if wrong == 0 else math.inf


@dataclass(frozen=True)
class Metric:
    """The metric that weighs a weight's error by its effect on the layer's output.

    Attributes:
      second: float64 [features, features], E[x xᵀ]; of a stack a tuple of these, one for each entry.
      axes: of the weight, along which inputs run.
    """

    second: np.ndarray | tuple[np.ndarray, ...]
    axes: tuple[int, ...]

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Metric:
        """From settings as returned by :meth:`Moments.settings`."""
        second = stack_of(settings["hessian"]) or np.asarray(settings["hessian"], np.float64)
        return cls(second, tuple(settings["input_axes"]))

    def square(self, weight: np.ndarray) -> float:
        """tr(W S Wᵀ) over the mean of S's diagonal: the sum of squares if S is the identity. For a stack, the sum of
        tr(W S Wᵀ) over its entries, not normalised."""
        if isinstance(self.second, tuple):
            entries = zip(self.entries(weight), self.second, strict=True)
            return sum(_weighed(rows, s) for rows, s in entries)
        scale = float(np.trace(self.second)) / len(self.second) or 1.0
        return _weighed(as_matrix(weight, self.axes), self.second) / scale

    def entries(self, weight: np.ndarray) -> np.ndarray:
        """The matrices of a stack: [entries, out, features]."""
        return as_matrix(weight, self.axes).reshape(len(self.second), -1, len(self.second[0]))

    def of_rows(self, start: int, stop: int, rows: int) -> Metric:
        """That of some rows along a tensor's first axis, of which it has ``rows``."""
        if isinstance(self.second, tuple):
            return Metric(self.second[start:stop], self.axes)
        if self.axes[0] != 0:
            return self
        inner = max(len(self.second) // rows, 1)
        block = slice(start * inner, stop * inner)
        return Metric(self.second[block, block], self.axes)


def _weighed(rows: np.ndarray, second: np.ndarray) -> float:
    """tr(W S Wᵀ), at least 0."""
    with one_thread(len(second)):
        return max(float(((rows @ second) * rows).sum()), 0.0)


def stack_of(hessian: Any) -> tuple[np.ndarray, ...] | None:
    """The moments of each entry of a stack, or ``None`` where they are those of one matrix.

    Args:
      hessian: [entries, features, features], which is divided by the mean of all diagonals; a tuple of matrices, which
        comes back as it is; or [features, features].
    """
    if isinstance(hessian, tuple) and hessian and getattr(hessian[0], "ndim", 0) == 2:
        return hessian
    if getattr(hessian, "ndim", 0) != 3:
        return None
    second = np.asarray(hessian, np.float64)
    mean = float(np.trace(second, axis1=1, axis2=2).mean()) / max(second.shape[-1], 1)
    return tuple(second / mean if mean > 0 else second)


def as_matrix(weight: np.ndarray, axes: Iterable[int]) -> np.ndarray:
    """A weight as [out, features]: ``axes`` last, the others before them, both in their order."""
    axes = tuple(axes)
    others = [a for a in range(weight.ndim) if a not in axes]
    features = math.prod(weight.shape[a] for a in axes)
    return weight.transpose(*others, *axes).reshape(math.prod(weight.shape[a] for a in others), features)


def from_matrix(matrix: np.ndarray, shape: tuple[int, ...], axes: Iterable[int]) -> np.ndarray:
    """The reverse of :func:`as_matrix`: [out, features] in the shape of the weight."""
    axes = tuple(axes)
    order = [a for a in range(len(shape)) if a not in axes] + list(axes)
    return matrix.reshape([shape[a] for a in order]).transpose(np.argsort(order))


def moments(inputs: Any, axes: Iterable[int] = (1,)) -> Moments:
    """The moments of given inputs.

    Equivalent NumPy: ``x = inputs.reshape(-1, features).astype("float64"); x.T @ x / len(x)``.

    Args:
      inputs: [..., features], a NumPy, JAX or torch array, or an iterable of such arrays.
      axes: as in :class:`Moments`.

    Raises:
      CompressError: no inputs, different numbers of features, NaN or infinity.
    """
    summed = Sums()
    for x in [inputs] if hasattr(inputs, "shape") else inputs:
        summed.add("inputs", np.asarray(x), tuple(axes))
    found = summed.result()
    if "inputs" not in found:
        raise CompressError("inputs: got no rows, expected arrays [..., features]")
    return found["inputs"]


class Collected(dict[str, Moments]):
    """Moments by the name of the weight, as :func:`collect` returns them.

    Attributes:
      unseen: name → reason, for each matrix, stack or convolution without moments.
    """

    def __init__(self, found: Mapping[str, Moments], unseen: Mapping[str, str]) -> None:
        super().__init__(found)
        self.unseen = dict(unseen)


class Unseen:
    """Weights that a watcher could not follow, by name."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def lose(self, name: str, why: str) -> None:
        """Record that the weight seems to have inputs that are not observed. The first reason is kept."""
        self.reasons.setdefault(name, why)


@dataclass(frozen=True)
class Watched:
    """The result of a watcher.

    Attributes:
      batches: their number.
      sums: of the inputs.
      unseen: the weights that it could not follow.
      names: of every weight with two or more axes.
    """

    batches: int
    sums: Sums
    unseen: Unseen
    names: list[str]


def _gram(x: np.ndarray, largest: float) -> np.ndarray:
    """xᵀ x in float64, of [rows, features] up to ``largest``; of narrower floats few rows at a time in float32, whose
    squares have room there."""
    with one_thread(x.shape[1]):
        if x.dtype.itemsize > 4 or x.dtype.kind != "f" or not 1e-12 < largest < 1e12:
            x = x.astype(np.float64)
            return x.T @ x
        out = np.zeros((x.shape[1], x.shape[1]))
        for first in range(0, len(x), _ROWS):
            some = x[first : first + _ROWS].astype(np.float32, copy=False)
            out += some.T @ some
        return out


class Sums:
    """Adds up x xᵀ for layers by name, and for each entry of a stack; for the watchers."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, np.ndarray]] = {}
        self._counts: dict[str, int] = {}
        self._entries: dict[str, int] = {}  # of stacks; the others have one
        self._separate = 0  # elements of the sums of stacks
        self._last = np.zeros((0, 0)), np.zeros((0, 0))  # inputs, and their product
        self.axes: dict[str, tuple[int, ...]] = {}
        self.twofold: set[str] = set()

    def add(
        self,
        name: str,
        inputs: np.ndarray,
        axes: tuple[int, ...],
        order: np.ndarray | None = None,
        features: int | None = None,
        entry: tuple[int, int] | None = None,
    ) -> None:
        """Add inputs [..., features].

        Args:
          name: of the weight.
          inputs: the factor that it is multiplied by.
          axes: of the weight, along which inputs run.
          order: the feature index of each input, if they are in a different order or incomplete: moments between
            features that never occur together are taken as 0.
          features: their number, if an order is given.
          entry: the index of the stack's entry that they are multiplied by, and the number of entries; ``None`` if that
            is not a single one. Entries have separate moments as long as all inputs have an entry.
        """
        if inputs.ndim < 1 or inputs.shape[-1] < 1:
            raise CompressError(f"{name}: got inputs of the shape {inputs.shape}, expected [..., features]")
        x = inputs.reshape(-1, inputs.shape[-1])
        # Several weights often have the same inputs, one after another.
        if not np.array_equal(x, self._last[0]):
            largest = float(np.abs(x).max(initial=0))
            if not math.isfinite(largest):
                raise CompressError(
                    f"{name}: its inputs are NaN or infinite. Remedy: calibrate with finite data."
                )
            self._last = x.copy(), _gram(x, largest)  # what is given may be written to
        if self.axes.setdefault(name, axes) != axes:
            # A tied weight that one layer uses along rows and another along columns: neither's moments are its own.
            self.twofold.add(name)
        if name in self.twofold or not len(x):
            return
        product = self._last[1]
        if order is not None and not np.array_equal(order, np.arange(features or 0)):
            product = np.zeros((features or 0, features or 0))
            product[np.ix_(order, order)] = self._last[1]
        sums = self._sums.setdefault(name, {})
        if (known := next(iter(sums.values()), None)) is not None and len(known) != len(product):
            raise CompressError(f"{name}: got inputs of {len(product)} features after some of {len(known)}")
        at = self._place(name, len(product), entry)
        sums[at] = np.add(sums[at], product, out=sums[at]) if at in sums else product.copy()
        self._counts[name] = self._counts.get(name, 0) + len(x)

    def _place(self, name: str, features: int, entry: tuple[int, int] | None) -> int:
        """Where inputs are added up: at their entry, or with all others of the weight."""
        index, count = entry or (0, 1)
        if self._entries.setdefault(name, count) == 1:
            return 0
        sums, size = self._sums[name], features**2
        fits = count * size <= _SEPARATE and (index in sums or self._separate + size <= _SEPARATE)
        if count == self._entries[name] and fits:
            self._separate += 0 if index in sums else size
            return index
        self._entries[name] = 1
        self._separate -= len(sums) * size
        if sums:
            total = functools.reduce(np.add, sums.values())
            sums.clear()
            sums[0] = total
        return 0

    def result(self) -> dict[str, Moments]:
        out = {}
        for name, sums in self._sums.items():
            count, entries = self._counts.get(name, 0), self._entries.get(name, 1)
            if name in self.twofold or not count:
                continue
            one = next(iter(sums.values()))
            second = np.zeros((entries, *one.shape))
            for at, total in sums.items():
                second[at] = (total + total.T) * (entries / (2 * count))
            out[name] = Moments(second if entries > 1 else second[0], count, self.axes[name])
        return out


def collect(model: Any, batches: Iterable[Any], params: Any = None, *, names: Any = None) -> Collected:
    """Collect the moments of every linear layer of a model, by the name of its weight.

    Args:
      model: a ``torch.nn.Module`` (called without gradients, in evaluation mode; its mode is restored afterwards); a
        model compiled by :func:`capibara.compose.compile` for JAX or torch; or a JAX function ``model(params,
        batch)``.
      batches: its inputs, one batch after another. For a module: a tensor, a tuple of positional arguments, or a
        mapping of keyword arguments. For a composed model: its ``data``. For a function: its second argument.
      params: the parameters, nested dictionaries, lists or any pytree; not for a torch module, which has its own.
      names: ``names(path) -> str`` for a pytree's leaves, from the tuple of their keys; by default joined by dots.

    Returns:
      name → moments; as in ``state_dict()``, or the path in ``params`` joined by dots. Weights without inputs, and
      those used along different axes in different places, are missing; :attr:`Collected.unseen` has the reason, with
      a warning unless they are merely looked up, added or not used. Weights that a loop iterates over, and experts,
      stacked along the first axis, have moments for each entry, [entries, features, features]; but the mean, [features,
      features], if an input meets several entries (heads), if they are stacked along another axis, or if all stacks
      together would take more than 2 GiB.

    Raises:
      CompressError: no batches, missing or superfluous ``params``, inputs with NaN or infinity.
      MissingExtraError: the model needs a package that is not installed.
    """
    batches = iter(batches)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        if params is not None:
            raise CompressError("params: a torch module has its own. Remedy: leave params out.")
        from capibara.compress.calibration.torch_watch import watch_module

        return _some(watch_module(model, batches))
    if params is None:
        raise CompressError(
            f"params: got None for a {type(model).__name__}, expected its parameters "
            "(only a torch.nn.Module has its own)"
        )
    backend = getattr(getattr(model, "backend", None), "type", None)
    run = model if backend is None else model.evaluate
    if backend == "torch":
        from capibara.compress.calibration.torch_watch import watch_function

        return _some(watch_function(run, params, batches, names or join))
    if backend not in (None, "jax"):
        raise CompressError(
            f"model: got one compiled for {backend!r}. Remedy: ml.compile(model, ml.JaxBackend()) or ml.TorchBackend()."
        )
    try:
        from capibara.compress.calibration.jax_watch import watch_jax
    except ImportError:
        raise MissingExtraError("jax", "train", "Calibrating with a JAX function") from None

    return _some(watch_jax(run, params, batches, names or join))


def join(path: tuple[Any, ...]) -> str:
    """The keys to a leaf as a name: ``layers.0.weight``."""
    return ".".join(map(str, path))


def _some(found: Watched) -> Collected:
    if not found.batches:
        raise CompressError("batches: got none, expected at least one to call the model with")
    moments = found.sums.result()
    twofold = dict.fromkeys(found.sums.twofold, "it is multiplied along different axes in different places")
    lost = {n: why for n, why in {**found.unseen.reasons, **twofold}.items() if n not in moments}
    if lost:
        told = "; ".join(f"{name}: {why}" for name, why in lost.items())
        warnings.warn(
            f"moments: {len(lost)} of {len(found.names)} weights have none, and are compressed without data. "
            f"{told}. Remedy: use them directly in matrix products or convolutions.",
            RuntimeWarning,
            stacklevel=3,
        )
    unused = {n: "it meets no inputs in a product" for n in found.names if n not in moments}
    return Collected(moments, {**unused, **lost})

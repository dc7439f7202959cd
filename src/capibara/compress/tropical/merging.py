"""Merge the neurons of each hidden layer, layer by layer, starting at the input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from capibara.compress.errors import CompressError
from capibara.compress.tropical import clusters, fitting
from capibara.compress.tropical.bounds import hausdorff_bounds
from capibara.compress.tropical.calibration import (
    Data,
    columns_of,
    put_columns,
    put_rows,
    reads,
    rows_of,
    unread,
)
from capibara.compress.tropical.network import Apply, Convolution, Dense, Flatten, Linear, Pool, Relu, Step
from capibara.compress.tropical.report import LayerReport, Merged
from capibara.errors import did_you_mean

__all__ = ["merge_neurons", "merge_steps"]


@dataclass(frozen=True)
class _Options:
    keep: Any
    method: str
    fit: bool
    refine: int
    seed: int


def _options(keep: Any, method: str, fit: bool, refine: int, seed: int) -> _Options:
    def whole(value: Any) -> bool:
        return isinstance(value, int | np.integer) and not isinstance(value, bool)

    if isinstance(keep, float | np.floating):
        if not 0 < keep <= 1:
            raise CompressError(f"keep: got {keep!r}, expected a share of the neurons above 0 and at most 1")
    elif (
        not isinstance(keep, Sequence) or isinstance(keep, str) or not all(whole(n) and n >= 1 for n in keep)
    ):
        raise CompressError(
            f"keep: got {keep!r}, expected a share (0.1), or how many neurons for each hidden layer ([26])"
        )
    if method not in clusters.METHODS:
        raise CompressError(
            f"method: got {method!r}, expected one of {clusters.METHODS}.{did_you_mean(str(method), clusters.METHODS)}"
        )
    if not whole(refine) or refine < 0:
        raise CompressError(f"refine: got {refine!r}, expected a number of steps, an integer of at least 0")
    if not whole(seed) or seed < 0:
        raise CompressError(f"seed: got {seed!r}, expected an integer, at least 0")
    if refine and not fit:
        raise CompressError(
            f"refine: got {refine!r} with fit=False. Remedy: refine moves what is fitted: fit=True."
        )
    return _Options(keep, method, bool(fit), int(refine), int(seed))


def _pairs(steps: Sequence[Step]) -> list[tuple[int, int]]:
    """Indices of linear steps with ReLU and nothing else but what scales with its input between them."""
    linear = [i for i, step in enumerate(steps) if isinstance(step, Linear)]
    pairs = []
    for i, j in pairwise(linear):
        between = steps[i + 1 : j]
        if not any(isinstance(step, Relu) for step in between):
            continue
        if any(isinstance(step, Apply) and not step.homogeneous for step in between):
            continue
        first, second = steps[i], steps[j]
        assert isinstance(first, Linear)
        assert isinstance(second, Linear)
        flat = any(isinstance(step, Flatten) for step in between)
        neurons, reads = first.weight.shape[0], second.weight.shape[1]
        spread = (
            isinstance(first, Convolution) and isinstance(second, Dense) and flat and reads % neurons == 0
        )
        if spread or (neurons == reads and (flat or isinstance(first, Dense) == isinstance(second, Dense))):
            pairs.append((i, j))
    return pairs


def _tolerance(dtype: np.dtype) -> float:
    """How far rounding, here and in the layers before, may have parted equal directions."""
    return max(8 * float(np.finfo(dtype).eps), 1e-10)


def merge_steps(
    steps: Sequence[Step],
    keep: float | Sequence[int],
    method: str = "paths",
    inputs: np.ndarray | None = None,
    fit: bool = True,
    refine: int = 0,
    seed: int = 0,
) -> Merged:
    """:func:`merge_neurons` for a chain of steps."""
    options = _options(keep, method, fit, refine, seed)
    original, now = list(steps), list(steps)
    pairs = _pairs(original)
    if not pairs:
        raise CompressError(
            "network: no hidden layer can be merged. Expected linear steps with ReLU, and only pooling and flattening "
            "besides, between them."
        )
    if not isinstance(options.keep, float | np.floating) and len(options.keep) != len(pairs):
        raise CompressError(
            f"keep: {len(options.keep)} numbers, but {len(pairs)} hidden layers can be merged "
            f"(steps {', '.join(str(i) for i, _ in pairs)})"
        )
    inputs = _examples(inputs, options)
    data = None if inputs is None else Data(original, now, inputs)
    reports = []
    for number, (i, j) in enumerate(pairs):
        reports.append(_merge_pair(now, i, j, number, options, data))
    norms = None
    if all(isinstance(step, Dense | Relu) for step in original):
        norms = tuple(
            (i, *_norms(before), *_norms(after))
            for i, (before, after) in enumerate(zip(original, now, strict=True))
            if isinstance(before, Dense) and isinstance(after, Dense)
        )
    return Merged(now, tuple(reports), norms)


def _examples(inputs: np.ndarray | None, options: _Options) -> np.ndarray | None:
    if inputs is None:
        return None
    if not options.fit:
        raise CompressError(
            "inputs: given with fit=False. Remedy: they are what is fitted to; leave them out, or fit."
        )
    if inputs.dtype.kind not in "fiub" or inputs.ndim < 2 or not inputs.size:
        raise CompressError(
            f"inputs: got shape {inputs.shape} of {inputs.dtype}, expected examples [q, …] of numbers, at least one"
        )
    inputs = inputs if inputs.dtype.kind == "f" and inputs.dtype.itemsize >= 4 else inputs.astype(np.float32)
    if not np.isfinite(inputs).all():
        raise CompressError("inputs: NaN or infinite numbers. Remedy: leave those examples out.")
    return inputs


def _norms(step: Dense) -> tuple[float, float]:
    norm = float(np.linalg.norm(step.weight.astype(np.float64), 2))
    return norm, 0.0 if step.bias is None else float(np.linalg.norm(step.bias.astype(np.float64)))


def _merge_pair(
    now: list[Step], i: int, j: int, number: int, options: _Options, data: Data | None
) -> LayerReport:
    """Merge the neurons of step i of the chain, in place."""
    before, after = now[i], now[j]
    assert isinstance(before, Linear)
    assert isinstance(after, Linear)
    neurons, out = len(before.weight), len(after.weight)
    if isinstance(options.keep, float | np.floating):
        count = max(1, int(options.keep * neurons + 1e-9))
    else:
        count = int(options.keep[number])
        if count > neurons:
            raise CompressError(f"keep: {count} neurons of the {neurons} that step {i} has")
    rows, columns = rows_of(before), columns_of(after, neurons)
    shift = np.zeros(out) if after.bias is None else after.bias.astype(np.float64)
    groups = clusters.group(
        rows, columns, count, options.method, options.seed, _tolerance(before.weight.dtype)
    )
    if groups.count == neurons:
        return LayerReport(i, neurons, neurons, np.zeros(out), 0.0, data.error(i, j) if data else None)
    if groups.count:
        merged, joined = clusters.join(rows, columns, groups)
    else:  # nothing reaches the outputs: a layer needs one neuron all the same
        merged, joined = np.zeros((1, rows.shape[1])), np.zeros((1, columns.shape[1]))
    between = now[i + 1 : j]
    simple = isinstance(before, Dense) and all(isinstance(step, Relu | Flatten) for step in between)
    new_shift = shift
    if options.fit and groups.count and data is None:
        if options.refine:
            merged, joined = fitting.refine_sphere(rows, columns, merged, joined, options.refine)
        else:
            joined = fitting.fit_sphere(rows, columns, merged, joined)
    elif options.fit and groups.count and data is not None:
        if options.refine and simple:
            read, wanted = data.whole(i, j)
            if before.bias is not None:
                read = np.concatenate([read, np.ones((len(read), 1))], axis=1)
            merged, joined, new_shift = fitting.refine_data(
                read, wanted, merged, joined, shift, options.refine
            )
        else:
            now[i] = put_rows(before, merged)
            now[j] = put_columns(after, joined, shift)
            matrix, new_shift = fitting.fit_data(data.parts(i, j), reads(joined, out), shift)
            joined = unread(matrix, len(merged))
    # Rows as long as they were on average, so that number formats of little range hold them.
    scale = float(np.mean(np.linalg.norm(rows, axis=1))) or 1.0
    now[i] = first = put_rows(before, merged * scale)
    now[j] = second = put_columns(after, joined / scale, new_shift)
    merged, joined = rows_of(first), columns_of(second, len(merged))  # as they were rounded
    new_shift = np.zeros(out) if second.bias is None else second.bias.astype(np.float64)
    places = columns.shape[1] // out
    pooled = any(isinstance(step, Pool | Apply) for step in between)
    bounds = hausdorff_bounds(
        rows, columns, merged, joined, new_shift - shift, groups, places, places == 1 and not pooled
    )
    error = fitting.sphere_error(rows, columns, merged, joined)
    return LayerReport(i, neurons, len(merged), bounds, error, data.error(i, j) if data else None)


def merge_neurons(
    network: Any,
    keep: float | Sequence[int],
    *,
    method: str = "paths",
    inputs: Any = None,
    fit: bool = True,
    refine: int = 0,
    seed: int = 0,
) -> Merged:
    """Merge neurons of a ReLU network into a smaller one that computes nearly the same function.

    Each hidden layer's neurons are grouped (see :mod:`~capibara.compress.tropical.clusters`), each group becomes one
    neuron, and the next layer is fitted to the remaining neurons (:mod:`~capibara.compress.tropical.fitting`). The
    result is an ordinary smaller network: it is faster, and needs no decoder. Neurons whose rows are positive
    multiples of each other merge exactly, and neurons that reach no output are dropped, so fewer than ``keep`` may
    remain.

    Args:
      network: a list of ``(weight, bias)`` pairs of arrays, weight [out, in], bias [out] or ``None``, with ReLU between
        them; a list of steps (:mod:`~capibara.compress.tropical.network`), which may be convolutions; or a
        ``torch.nn.Sequential`` (also nested) of linear and convolution layers, ReLU, pooling, flattening, batch
        normalisation and dropout. Batch normalisation after a layer is folded into it. Layers that are not followed
        by ReLU stay as they are.
      keep: the share of each hidden layer's neurons to keep, rounded down, at least one neuron; or the number, for
        each hidden layer that can be merged.
      method: ``"paths"`` or ``"directions"``.
      inputs: examples [q, …] without labels, to which the next layer is fitted by least squares. Without them, it is
        fitted over all directions.
      fit: ``False`` uses the sums of the groups' columns for the next layer.
      refine: gradient steps on the same error that also adjust the merged rows. On data only for dense layers; others
        are only fitted.
      seed: of k-means.

    Returns:
      A :class:`Merged` with the network, of the same kind and dtype, and a report with Hausdorff bounds.

    Raises:
      CompressError: a network without a hidden layer that can be merged, or a wrong argument.

    Sources: Zhang, Naitzat and Lim, ICML 2018; G. Smyrnis and P. Maragos, "Multiclass neural network minimization via
    tropical Newton polytope approximation", ICML 2020; Misiakos, Smyrnis, Retsinas and Maragos, ICLR 2022.
    """
    options: dict[str, Any] = {"method": method, "fit": fit, "refine": refine, "seed": seed}
    if _is_torch_module(network):
        from capibara.compress.tropical import torch_modules

        return torch_modules.merge(network, keep, inputs, options)
    if not isinstance(network, list | tuple) or not network:
        raise CompressError(
            f"network: got {type(network).__name__}, expected a list of (weight, bias) pairs or of steps, or a "
            "torch.nn.Sequential"
        )
    examples = None if inputs is None else np.asarray(inputs)
    if all(isinstance(step, Step) for step in network):
        return merge_steps(network, keep, inputs=examples, **options)
    steps = _steps_of_pairs(network)
    found = merge_steps(steps, keep, inputs=examples, **options)
    pairs = [(step.weight, step.bias) for step in found.network if isinstance(step, Dense)]
    layers = tuple(replace(layer, index=layer.index // 2) for layer in found.layers)
    assert found.norms is not None
    norms = tuple((index // 2, *rest) for index, *rest in found.norms)
    return replace(found, network=pairs, layers=layers, norms=norms)


def _steps_of_pairs(pairs: Sequence[Any]) -> list[Step]:
    steps: list[Step] = []
    for number, pair in enumerate(pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise CompressError(
                f"network: entry {number} is {type(pair).__name__}, expected a (weight, bias) pair of arrays"
            )
        weight = np.asarray(pair[0])
        if weight.ndim != 2:
            raise CompressError(
                f"network: the weight of entry {number} has shape {weight.shape}, expected [out, in]. "
                "Remedy: a convolution is Convolution(weight, bias, …), in a list of steps."
            )
        layer = Dense(weight, None if pair[1] is None else np.asarray(pair[1]))
        if steps and isinstance(last := steps[-2], Dense) and len(last.weight) != weight.shape[1]:
            raise CompressError(
                f"network: entry {number} reads {weight.shape[1]} numbers, but the one before makes {len(last.weight)}"
            )
        steps += [layer, Relu()]
    return steps[:-1]


def _is_torch_module(network: Any) -> bool:
    return any(
        kind.__module__.startswith("torch.") and kind.__name__ == "Module" for kind in type(network).__mro__
    )

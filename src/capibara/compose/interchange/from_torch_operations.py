"""The table of :func:`capibara.compose.from_torch`: for each ATen operation the primitives that compute it.

A function gets the step (the model, and what the trace knows of shapes and kinds) and the operation's arguments as
torch's schema has them, with ports, numbers and arrays in the place of tensors. It returns the result's port, or a
tuple where the operation has several results (None for one that has no counterpart). The overloads of an operation
share one entry: ``add`` is ``aten::add.Tensor`` and ``aten::add.Scalar``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from capibara.compose import primitives as p
from capibara.compose.interchange.from_torch_elements import ELEMENTS, times, two
from capibara.compose.interchange.from_torch_indexing import INDEXING
from capibara.compose.interchange.from_torch_moves import MOVES
from capibara.compose.interchange.from_torch_recurrent import RECURRENT, Blank
from capibara.compose.interchange.from_torch_sizes import Refused, is_open
from capibara.compose.interchange.from_torch_windows import WINDOWS
from capibara.compose.primitives import reductions

__all__ = ["TABLE", "Refused"]


# ---- products -------------------------------------------------------------------------------------------------


def _matmul(step: Any, left: Any, right: Any) -> Any:
    return step.put(p.MatrixMultiply(), left=left, right=right)


def _addmm(step: Any, bias: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = times(step, _matmul(step, left, right), alpha)
    return step.put(p.Add(), left=product, right=times(step, bias, beta))


def _linear(step: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    product = _matmul(step, x, step.put(p.SwapAxes(0, 1), input=weight))
    return product if bias is None else step.put(p.Add(), left=product, right=bias)


def _embedding(step: Any, table: Any, indices: Any, *_: Any) -> Any:
    return step.put(p.Lookup(), table=table, indices=indices)


def _trilinear(
    step: Any, a: Any, b: Any, c: Any, new_a: Any, new_b: Any, new_c: Any, summed: Any, _unroll: int = 1
) -> Any:
    product: Any = None
    for x, axes in ((a, new_a), (b, new_b), (c, new_c)):
        for axis in sorted(axes):
            x = step.put(p.ExpandDims(axis), input=x)
        product = x if product is None else step.put(p.Multiply(), left=product, right=x)
    return step.put(p.Sum(tuple(summed)), input=product)


# ---- normalisation --------------------------------------------------------------------------------------------


def _affine(step: Any, x: Any, weight: Any, bias: Any) -> Any:
    if weight is not None:
        x = step.put(p.ChannelMultiply(), input=x, values=weight)
    return x if bias is None else step.put(p.ChannelAdd(), input=x, values=bias)


def _batch_norm(
    step: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, _momentum: Any, epsilon: float
) -> Any:
    if not isinstance(mean, np.ndarray) or not isinstance(variance, np.ndarray):
        raise Refused("statistics that are not buffers")
    x = step.put(p.ChannelAdd(), input=x, values=-mean)
    x = step.put(p.ChannelMultiply(), input=x, values=1 / np.sqrt(variance + epsilon))
    return _affine(step, x, weight, bias), None, None


def _batch_norm_in_training(
    step: Any,
    x: Any,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    _train: bool,
    momentum: float,
    epsilon: float,
) -> Any:
    """The mode is that of the compiled model's call. ``mean``, ``variance``: states."""
    out, after, spread = step.all(p.BatchNormalise(momentum, epsilon), input=x, mean=mean, variance=variance)
    return _affine(step, out, weight, bias), None, None, after, spread


def _own_batch_norm(
    step: Any, x: Any, weight: Any, bias: Any, _train: bool, _momentum: float, epsilon: float
) -> Any:
    """With the statistics of the batch, in either mode."""
    axes = (0, *range(2, len(step.shape)))
    low = step.put(p.Subtract(), left=x, right=step.put(p.Mean(axes, True), input=x))
    spread = step.put(p.Add(), left=step.put(p.Variance(axes, 0, True), input=x), right=epsilon)
    x = step.put(p.Divide(), left=low, right=step.put(p.Sqrt(), input=spread))
    return _affine(step, x, weight, bias), None, None


def _dropout(step: Any, x: Any, rate: float, train: bool | None = True) -> Any:
    if not train or rate == 0:
        return x, None
    if rate == 1:
        return step.put(p.Multiply(), left=x, right=0.0), None
    return step.put(p.Dropout(float(rate)), input=x), None


def _group_norm(
    step: Any, x: Any, weight: Any, bias: Any, _n: Any, _c: Any, _s: Any, groups: int, epsilon: float
) -> Any:
    x = step.put(p.GroupNormalise(groups, epsilon), input=x)
    return _affine(step, x, weight, bias), None, None


def _layer_norm(step: Any, x: Any, shape: Any, weight: Any, bias: Any, epsilon: float) -> Any:
    if len(shape) == 1:
        scale = {} if weight is None else {"scale": weight}
        x = step.put(p.Normalise("layer", epsilon, weight is not None), input=x, **scale)
    else:
        axes = tuple(range(-len(shape), 0))
        low = step.put(p.Subtract(), left=x, right=step.put(p.Mean(axes, True), input=x))
        spread = step.put(p.Add(), left=step.put(p.Variance(axes, 0, True), input=x), right=epsilon)
        x = step.put(p.Divide(), left=low, right=step.put(p.Sqrt(), input=spread))
        if weight is not None:
            x = step.put(p.Multiply(), left=x, right=weight)
    return x if bias is None else step.put(p.Add(), left=x, right=bias), None, None


# ---- reductions and choices -----------------------------------------------------------------------------------


def _reduce(make: Any, kind: str | None = None) -> Any:
    def run(step: Any, x: Any, axes: Any = None, keepdim: bool = False, **_: Any) -> Any:
        axes = None if axes is None or axes == [] else axes if isinstance(axes, int) else tuple(axes)
        return step.put(make(axes, keepdim), input=step.cast(0, x, kind))

    return run


def _variance(step: Any, x: Any, axes: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    count = 1 if correction is None else correction
    return step.put(p.Variance(None if not axes else tuple(axes), int(count), keepdim), input=x)


def _norm(step: Any, x: Any, order: Any = 2, axes: Any = None, keepdim: bool = False, **_: Any) -> Any:
    axes = None if not axes and axes != 0 else axes if isinstance(axes, int) else tuple(axes)
    if order == 2:
        return step.put(p.Sqrt(), input=step.put(p.Sum(axes, keepdim), input=step.put(p.Square(), input=x)))
    size = step.put(p.Absolute(), input=x)
    if order == 1:
        return step.put(p.Sum(axes, keepdim), input=size)
    if order == float("inf"):
        return step.put(p.Max(axes, keepdim), input=size)
    raise Refused(f"ord={order}; 1, 2 and infinity are known")


def _where(step: Any, condition: Any, left: Any, right: Any) -> Any:
    return step.put(p.Where(), cond=condition, input1=step.cast(1, left), input2=step.cast(2, right))


def _logic(make: Callable[[], Any]) -> Any:
    def run(step: Any, *values: Any) -> Any:
        values = tuple(step.cast(i, v, "bool") for i, v in enumerate(values))
        ports = {"input": values[0]} if len(values) == 1 else {"left": values[0], "right": values[1]}
        return step.put(make(), **ports)

    return run


def _bitwise(make: Callable[[], Any]) -> Any:
    def run(step: Any, *values: Any) -> Any:
        if step.kind != "bool":
            raise Refused("bits of integers; booleans are known")
        return _logic(make)(step, *values)

    return run


# ---- constants ------------------------------------------------------------------------------------------------


def _filled(value: Any) -> Any:
    def run(step: Any, *args: Any, **_: Any) -> Any:
        number = args[1] if value is None else value
        dtype = {"float": "float64", "int": "int64", "bool": "bool"}[step.kind]
        shape = step.result.shape
        if is_open(number):
            return step.broadcast(step.turned(number, step.kind_of(number), step.kind), shape)
        if None in step.shape:
            return Blank(number, cache(lambda: step.broadcast(np.full((), number, dtype), shape)))
        return np.full(step.shape, number, dtype)

    return run


def _filled_like(step: Any, x: Any, value: Any, **_: Any) -> Any:
    if is_open(value):
        return _filled(None)(step, x, value)
    return step.turned(step.put(p.FullLike(value), input=x), step.kind_at(0), step.kind)


def _scalar(step: Any, value: Any, **_: Any) -> Any:
    if is_open(value):
        return step.turned(value, step.kind_of(value), step.kind)
    return np.asarray(value, {"float": "float64", "int": "int64", "bool": "bool"}[step.kind])


def _arange(step: Any, *args: Any, **_: Any) -> Any:
    if None in step.shape or not all(isinstance(n, int | float) for n in args):
        start, stop, every = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
        if isinstance(start, float) or isinstance(stop, float) or not isinstance(every, int):
            raise Refused("a step that is left open, or bounds of floats with sizes that are")
        ends = {"start": step.size(start), "stop": step.size(stop)}
        ports = {k: n for k, n in ends.items() if not isinstance(n, int)}
        given = {k: None if k in ports else n for k, n in ends.items()}
        return step.turned(
            step.put(p.Arange(given["stop"], given["start"], every), **ports), "int", step.kind
        )
    return np.arange(*args).astype("float64" if step.kind == "float" else "int64")


TABLE: dict[str, Any] = {
    # comparisons and logic
    "eq": two(p.Equal, "same"),
    "ne": two(p.NotEqual, "same"),
    "lt": two(p.Less, "same"),
    "le": two(p.LessEqual, "same"),
    "gt": two(p.Greater, "same"),
    "ge": two(p.GreaterEqual, "same"),
    "logical_not": _logic(p.LogicalNot),
    "logical_and": _logic(p.LogicalAnd),
    "logical_or": _logic(p.LogicalOr),
    "logical_xor": _logic(p.LogicalXor),
    "bitwise_not": _bitwise(p.LogicalNot),
    "bitwise_and": _bitwise(p.LogicalAnd),
    "bitwise_or": _bitwise(p.LogicalOr),
    "where": _where,
    # products and tables
    "mm": _matmul,
    "bmm": _matmul,
    "matmul": _matmul,
    "addmm": _addmm,
    "baddbmm": _addmm,
    "linear": _linear,
    "embedding": _embedding,
    "_trilinear": _trilinear,
    # normalisation, and what has a module of its own
    "_native_batch_norm_legit_no_training": _batch_norm,
    "_native_batch_norm_legit_functional": _batch_norm_in_training,
    "_native_batch_norm_legit": _own_batch_norm,
    "native_dropout": _dropout,
    "native_group_norm": _group_norm,
    "native_layer_norm": _layer_norm,
    **WINDOWS,
    **RECURRENT,
    **INDEXING,
    **ELEMENTS,
    **MOVES,
    # reductions
    "sum": _reduce(p.Sum),
    "mean": _reduce(p.Mean),
    "amax": _reduce(p.Max),
    "amin": _reduce(p.Min),
    "prod": _reduce(p.Prod),
    "linalg_vector_norm": _norm,
    "var": _variance,
    "any": _reduce(reductions.Any, "bool"),
    "all": _reduce(reductions.All, "bool"),
    # constants
    "full": _filled(None),
    "ones": _filled(1),
    "zeros": _filled(0),
    "empty": _filled(0),
    "scalar_tensor": _scalar,
    "arange": _arange,
    "full_like": _filled_like,
    "ones_like": lambda s, x, **_: s.put(p.OnesLike(), input=x),
    "zeros_like": lambda s, x, **_: s.put(p.ZerosLike(), input=x),
}
"""By the operation's name without its overload."""

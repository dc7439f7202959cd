"""The table of :func:`capibara.compose.from_torch`: for each ATen operation the primitives that compute it.

A function gets the step (the model, and what the trace knows of shapes and kinds) and the operation's arguments as
torch's schema has them, with ports, numbers and arrays in the place of tensors. It returns the result's port, or a
tuple where the operation has several results (None for one that has no counterpart). The overloads of an operation
share one entry: ``add`` is ``aten::add.Tensor`` and ``aten::add.Scalar``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from capibara.compose import primitives as p
from capibara.compose.interchange.from_torch_moves import MOVES, Refused
from capibara.compose.primitives import reductions

__all__ = ["TABLE", "Refused"]


def _one(make: Callable[[], Any]) -> Any:
    def run(step: Any, x: Any, *_: Any, **__: Any) -> Any:
        return step.put(make(), input=step.cast(0, x))

    return run


def _two(make: Callable[[], Any], kind: str | None = None) -> Any:
    def run(step: Any, left: Any, right: Any, *, alpha: Any = 1) -> Any:
        want = kind
        if want == "same":  # comparisons: the operands meet in the wider of their kinds
            kinds = {step.kind_at(0), step.kind_at(1)} - {None}
            want = next(k for k in ("float", "int", "bool") if k in kinds)
            want = "int" if want == "bool" else want
        left, right = step.cast(0, left, want), step.cast(1, right, want)
        if alpha != 1:
            right = step.put(p.Multiply(), left=right, right=alpha)
        return step.put(make(), left=left, right=right)

    return run


def _subtract_from(step: Any, x: Any, other: Any, alpha: Any = 1) -> Any:
    x = step.cast(0, x)
    return step.put(p.Subtract(), left=step.cast(1, other), right=_times(step, x, alpha))


def _times(step: Any, x: Any, factor: Any) -> Any:
    return x if factor == 1 else step.put(p.Multiply(), left=x, right=factor)


def _divide(step: Any, left: Any, right: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return _two(p.Divide)(step, left, right)
    if rounding_mode == "floor":
        return _two(p.FloorDivide)(step, left, right)
    raise Refused(f"rounding_mode={rounding_mode!r}; None and 'floor' are known")


def _power(step: Any, base: Any, exponent: Any) -> Any:
    if isinstance(exponent, int | float) and step.kind == "float":
        known = {2: p.Square, 0.5: p.Sqrt, 1: p.Buffer, -1: p.Reciprocal}.get(exponent)
        if known is not None:
            return step.put(known(), input=step.cast(0, base))
    return _two(p.Power)(step, base, exponent)


def _rsqrt(step: Any, x: Any) -> Any:
    return step.put(p.Reciprocal(), input=step.put(p.Sqrt(), input=step.cast(0, x)))


def _clamp(step: Any, x: Any, low: Any = None, high: Any = None) -> Any:
    for bound in (low, high):
        if not (bound is None or isinstance(bound, int | float)):
            raise Refused("bounds that are arrays; numbers are known")
    return step.put(p.Clip(low, high), input=step.cast(0, x))


def _elu(step: Any, x: Any, alpha: Any = 1.0, scale: Any = 1.0, input_scale: Any = 1.0) -> Any:
    inner = _times(step, x, input_scale)
    return _times(step, step.put(p.Elu(float(alpha)), input=inner), scale)


def _softplus(step: Any, x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    # Beyond the threshold torch gives x itself, which differs by less than exp(-threshold) / beta.
    if threshold < 20:
        raise Refused(f"threshold={threshold}; 20 and more are known")
    made = step.put(p.Softplus(), input=_times(step, x, beta))
    return _times(step, made, 1 / beta)


def _log_softmax(step: Any, x: Any, axis: int, *_: Any) -> Any:
    top = step.put(p.Max(axis, True), input=x)
    low = step.put(p.Subtract(), left=x, right=step.put(p.StopGradient(), input=top))
    total = step.put(p.Sum(axis, True), input=step.put(p.Exp(), input=low))
    return step.put(p.Subtract(), left=low, right=step.put(p.Log(), input=total))


def _log1p(step: Any, x: Any) -> Any:
    # Near 0: 2 artanh(z) with z = x / (2 + x), whose series is exact to rounding after z⁹ for |x| < 0.02.
    x = step.cast(0, x)
    near = step.put(p.Less(), left=step.put(p.Absolute(), input=x), right=0.02)
    small = step.put(p.Where(), cond=near, input1=x, input2=0.0)
    z = step.put(p.Divide(), left=small, right=step.put(p.Add(), left=small, right=2.0))
    square = step.put(p.Square(), input=z)
    total: Any = 1 / 9
    for n in (7, 5, 3, 1):
        total = step.put(p.Add(), left=step.put(p.Multiply(), left=square, right=total), right=1 / n)
    series = step.put(p.Multiply(), left=step.put(p.Multiply(), left=z, right=2.0), right=total)
    rest = step.put(p.Where(), cond=near, input1=1.0, input2=x)
    log = step.put(p.Log(), input=step.put(p.Add(), left=rest, right=1.0))
    return step.put(p.Where(), cond=near, input1=series, input2=log)


def _gelu(step: Any, x: Any, *, approximate: str = "none") -> Any:
    return step.put(p.Gelu(approximate == "tanh"), input=x)


# ---- products -------------------------------------------------------------------------------------------------


def _matmul(step: Any, left: Any, right: Any) -> Any:
    return step.put(p.MatrixMultiply(), left=left, right=right)


def _addmm(step: Any, bias: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    product = _times(step, _matmul(step, left, right), alpha)
    return step.put(p.Add(), left=product, right=_times(step, bias, beta))


def _linear(step: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    product = _matmul(step, x, step.put(p.SwapAxes(0, 1), input=weight))
    return product if bias is None else step.put(p.Add(), left=product, right=bias)


def _embedding(step: Any, table: Any, indices: Any, *_: Any) -> Any:
    return step.put(p.Lookup(), table=table, indices=indices)


def _convolution(
    step: Any,
    x: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    _output_padding: Any,
    groups: int,
) -> Any:
    space = len(step.shape) - 2
    if transposed or space not in (1, 2):
        raise Refused(f"{'transposed' if transposed else f'{space} dimensions of space'}; 1 or 2 are known")
    make: Any = p.PrimitiveConvolution1D if space == 1 else p.PrimitiveConvolution2D
    row = [tuple(n) * (space if len(n) == 1 else 1) for n in (stride, padding, dilation)]
    out = step.put(make(*row, groups), input=x, weight=weight)
    return out if bias is None else step.put(p.ChannelAdd(), input=out, values=bias)


# ---- normalisation --------------------------------------------------------------------------------------------


def _affine(step: Any, x: Any, weight: Any, bias: Any) -> Any:
    if weight is not None:
        x = step.put(p.ChannelMultiply(), input=x, values=weight)
    return x if bias is None else step.put(p.ChannelAdd(), input=x, values=bias)


def _batch_norm(
    step: Any, x: Any, weight: Any, bias: Any, mean: Any, variance: Any, _momentum: Any, epsilon: float
) -> Any:
    if not isinstance(mean, np.ndarray) or not isinstance(variance, np.ndarray):
        raise Refused("statistics that are no buffers")
    x = step.put(p.ChannelAdd(), input=x, values=-mean)
    x = step.put(p.ChannelMultiply(), input=x, values=1 / np.sqrt(variance + epsilon))
    return _affine(step, x, weight, bias), None, None


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


# ---- pooling --------------------------------------------------------------------------------------------------


def _pool(make: Any, average: bool) -> Any:
    def run(
        step: Any, x: Any, kernel: Any, stride: Any = (), padding: Any = (0,), *more: Any, **options: Any
    ) -> Any:
        names = (
            ("ceil_mode", "count_include_pad", "divisor_override") if average else ("dilation", "ceil_mode")
        )
        given = dict(zip(names, more, strict=False)) | options
        space = make.space
        if given.get("ceil_mode") or given.get("divisor_override") is not None:
            raise Refused("ceil_mode and divisor_override")
        if len(step.shape) != space + 2:
            raise Refused(f"an input of {len(step.shape)} dimensions; {space + 2}, a batch, are known")
        row = [
            tuple(n) * (space if len(n) == 1 else 1)
            for n in (kernel, stride or kernel, padding, given.get("dilation", (1,)))
        ]
        last = {"count_padding": bool(given.get("count_include_pad", True))} if average else {}
        out = step.put(make(*row, **last), input=x)
        return out if average else (out, None)

    return run


def _adaptive(make: Any, average: bool) -> Any:
    def run(step: Any, x: Any, sizes: Any) -> Any:
        row = tuple(step.given(0).shape)[-len(sizes) :]
        if any(not isinstance(n, int) or n % m for n, m in zip(row, sizes, strict=True)):
            raise Refused(f"windows of unequal size: {row} to {tuple(sizes)}")
        kernel = tuple(n // m for n, m in zip(row, sizes, strict=True))
        out = step.put(make(kernel), input=x)
        return out if average else (out, None)

    return run


# ---- reductions and choices -----------------------------------------------------------------------------------


def _reduce(make: Any, kind: str | None = None) -> Any:
    def run(step: Any, x: Any, axes: Any = None, keepdim: bool = False, **_: Any) -> Any:
        axes = None if axes is None or axes == [] else axes if isinstance(axes, int) else tuple(axes)
        return step.put(make(axes, keepdim), input=step.cast(0, x, kind))

    return run


def _variance(step: Any, x: Any, axes: Any = None, *, correction: Any = None, keepdim: bool = False) -> Any:
    count = 1 if correction is None else correction
    return step.put(p.Variance(None if not axes else tuple(axes), int(count), keepdim), input=x)


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
            raise Refused("bits of whole numbers; truth values are known")
        return _logic(make)(step, *values)

    return run


# ---- constants ------------------------------------------------------------------------------------------------


def _filled(value: Any) -> Any:
    def run(step: Any, *args: Any, **_: Any) -> Any:
        number = args[1] if value is None else value
        if None in step.shape:
            raise Refused("a size that is left open")
        dtype = {"float": "float64", "int": "int64", "bool": "bool"}[step.kind]
        return np.full(step.shape, number, dtype)

    return run


def _scalar(step: Any, value: Any, **_: Any) -> Any:
    return np.asarray(value, {"float": "float64", "int": "int64", "bool": "bool"}[step.kind])


def _arange(step: Any, *args: Any, **_: Any) -> Any:
    if None in step.shape or not all(isinstance(n, int | float) for n in args):
        raise Refused("a size that is left open")
    return np.arange(*args).astype("float64" if step.kind == "float" else "int64")


TABLE: dict[str, Any] = {
    # elements
    **{
        name: _one(make)
        for name, make in {
            "relu": p.Relu,
            "silu": p.Silu,
            "sigmoid": p.Sigmoid,
            "tanh": p.Tanh,
            "exp": p.Exp,
            "log": p.Log,
            "sqrt": p.Sqrt,
            "sin": p.Sine,
            "cos": p.Cosine,
            "neg": p.Negate,
            "abs": p.Absolute,
            "sign": p.Sign,
            "floor": p.Floor,
            "ceil": p.Ceil,
            "reciprocal": p.Reciprocal,
        }.items()
    },
    "leaky_relu": lambda step, x, slope=0.01: step.put(p.LeakyRelu(float(slope)), input=x),
    "gelu": _gelu,
    "log1p": _log1p,
    "elu": _elu,
    "softplus": _softplus,
    "hardtanh": lambda s, x, a=-1.0, b=1.0: _clamp(s, x, a, b),
    "clamp": _clamp,
    "rsqrt": _rsqrt,
    "pow": _power,
    "isnan": lambda s, x: s.put(p.IsNan(), input=x),
    "add": _two(p.Add),
    "sub": _two(p.Subtract),
    "mul": _two(p.Multiply),
    "div": _divide,
    "rsub": _subtract_from,
    "minimum": _two(p.Minimum),
    "maximum": _two(p.Maximum),
    "remainder": _two(p.Modulo),
    "_softmax": lambda step, x, axis, *_: step.put(p.Softmax(axis), input=x),
    "_safe_softmax": lambda step, x, axis, *_: step.put(p.Softmax(axis), input=x),
    "_log_softmax": _log_softmax,
    # comparisons and logic
    "eq": _two(p.Equal, "same"),
    "ne": _two(p.NotEqual, "same"),
    "lt": _two(p.Less, "same"),
    "le": _two(p.LessEqual, "same"),
    "gt": _two(p.Greater, "same"),
    "ge": _two(p.GreaterEqual, "same"),
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
    "convolution": _convolution,
    # normalisation and pooling
    "_native_batch_norm_legit_no_training": _batch_norm,
    "native_group_norm": _group_norm,
    "native_layer_norm": _layer_norm,
    "max_pool2d_with_indices": _pool(p.PrimitiveMaxPool2D, False),
    "avg_pool1d": _pool(p.PrimitiveAvgPool1D, True),
    "avg_pool2d": _pool(p.PrimitiveAvgPool2D, True),
    "_adaptive_avg_pool2d": _adaptive(p.PrimitiveAvgPool2D, True),
    "adaptive_avg_pool1d": _adaptive(p.PrimitiveAvgPool1D, True),
    "adaptive_max_pool2d": _adaptive(p.PrimitiveMaxPool2D, False),
    **MOVES,
    # reductions
    "sum": _reduce(p.Sum),
    "mean": _reduce(p.Mean),
    "amax": _reduce(p.Max),
    "amin": _reduce(p.Min),
    "var": _variance,
    "any": _reduce(reductions.Any, "bool"),
    "all": _reduce(reductions.All, "bool"),
    "argmax": lambda s, x, axis=None, keepdim=False: s.put(p.ArgMax(axis, keepdim), input=x),
    # constants
    "full": _filled(None),
    "ones": _filled(1),
    "zeros": _filled(0),
    "scalar_tensor": _scalar,
    "arange": _arange,
    "full_like": lambda s, x, value, **_: s.turned(s.put(p.FullLike(value), input=x), s.kind_at(0), s.kind),
    "ones_like": lambda s, x, **_: s.put(p.OnesLike(), input=x),
    "zeros_like": lambda s, x, **_: s.put(p.ZerosLike(), input=x),
}
"""By the operation's name without its overload."""

"""Array functions of PyTorch under the names of :mod:`capibara.compose.backends.numpy_space`.

Integers stay int32, as on the other backends; PyTorch by itself would widen sums and positions to int64.
"""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import torch

from capibara.compose.backends.conversion import place_of

Axis = int | tuple[int, ...] | None
Tensor = torch.Tensor


def _dtype(name: Any) -> torch.dtype:
    return name if isinstance(name, torch.dtype) else getattr(torch, str(name))


def _device(like: Any) -> Any:
    return like.device if isinstance(like, Tensor) else torch.get_default_device()


def asarray(x: Any, dtype: Any = None, like: Any = None) -> Any:
    if isinstance(x, Tensor):
        return x if dtype is None else x.to(_dtype(dtype))
    if dtype is None:
        dtype = "bool" if isinstance(x, bool) else "int32" if isinstance(x, int) else None
        if dtype is None and isinstance(x, float):
            floating = isinstance(like, Tensor) and like.dtype.is_floating_point
            dtype = like.dtype if floating else torch.get_default_dtype()
    return torch.as_tensor(x, dtype=None if dtype is None else _dtype(dtype), device=_device(like))


def constant(value: float, like: Any) -> Any:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


def stop(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x


def _pair(a: Any, b: Any) -> tuple[Any, Any]:
    if isinstance(a, Tensor):
        return a, b if isinstance(b, Tensor) else asarray(b, like=a)
    return asarray(a, like=b), asarray(b, like=b)


def _of(name: str) -> Any:
    function = getattr(torch, name)

    def run(*args: Any) -> Any:
        like = next((a for a in args if isinstance(a, Tensor)), None)
        return function(*(asarray(a, like=like) for a in args))

    return run


add, subtract, multiply, divide = _of("add"), _of("subtract"), _of("multiply"), _of("divide")
negative, power, exp, expm1, log, log1p = (
    _of("neg"),
    _of("pow"),
    _of("exp"),
    _of("expm1"),
    _of("log"),
    _of("log1p"),
)
sqrt, tanh, sin, cos, erf, sigmoid = (_of(n) for n in ("sqrt", "tanh", "sin", "cos", "erf", "sigmoid"))
maximum, minimum = _of("maximum"), _of("minimum")
round, floor, ceil = _of("round"), _of("floor"), _of("ceil")
isnan, isinf, remainder = _of("isnan"), _of("isinf"), _of("remainder")
logical_and, logical_or = _of("logical_and"), _of("logical_or")
logical_xor, logical_not = _of("logical_xor"), _of("logical_not")
left_shift, right_shift = _of("bitwise_left_shift"), _of("bitwise_right_shift")
matmul = torch.matmul


def sign(x: Any) -> Any:
    return torch.where(x != x, x.detach(), torch.sign(x))  # PyTorch alone makes 0 of NaN


def floor_divide(a: Any, b: Any) -> Any:
    a, b = _pair(a, b)
    return torch.floor_divide(a.detach(), b.detach())  # PyTorch has no derivative of it, not even 0


def softplus(x: Any) -> Any:
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device))


def relu(x: Any) -> Any:
    return torch.relu(x)


def where(condition: Any, a: Any, b: Any) -> Any:
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        a = asarray(a, like=condition)
    a, b = _pair(a, b)
    return torch.where(asarray(condition), a, b)


def _axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    return tuple(place_of(a, ndim) for a in ((axis,) if isinstance(axis, int) else axis))


def sum(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    axes = _axes(axis, x.ndim)
    return torch.sum(x, dim=axes, keepdim=keepdims, dtype=x.dtype) if axes else x


def prod(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    for a in sorted(_axes(axis, x.ndim), reverse=True):
        x = torch.prod(x, dim=a, keepdim=keepdims, dtype=x.dtype)
    return x


def amax(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    axes = _axes(axis, x.ndim)
    return torch.amax(x, dim=axes, keepdim=keepdims) if axes else x


def amin(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    axes = _axes(axis, x.ndim)
    return torch.amin(x, dim=axes, keepdim=keepdims) if axes else x


def any(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    axes = _axes(axis, x.ndim)
    return torch.any(x, dim=axes, keepdim=keepdims) if axes else x.bool()


def all(x: Any, axis: Axis = None, keepdims: bool = False) -> Any:
    axes = _axes(axis, x.ndim)
    return torch.all(x, dim=axes, keepdim=keepdims) if axes else x.bool()


def _place(x: Any, axis: int | None, keepdims: bool, best: Any) -> Any:
    at = best(x.int() if x.dtype == torch.bool else x, dim=axis, keepdim=keepdims and axis is not None)
    if axis is None and keepdims:
        at = at.reshape((1,) * x.ndim)
    return at.int()


def argmax(x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    return _place(x, axis, keepdims, torch.argmax)


def argmin(x: Any, axis: int | None = None, keepdims: bool = False) -> Any:
    return _place(x, axis, keepdims, torch.argmin)


def argsort(x: Any, axis: int = -1, descending: bool = False) -> Any:
    return torch.argsort(x, dim=axis, descending=descending, stable=True).int()


def cumsum(x: Any, axis: int) -> Any:
    return torch.cumsum(x, dim=axis, dtype=x.dtype)


def reshape(x: Any, shape: Any) -> Any:
    return torch.reshape(x, tuple(shape))


def transpose(x: Any, axes: Any = None) -> Any:
    return torch.permute(x, tuple(range(x.ndim))[::-1] if axes is None else tuple(axes))


def swapaxes(x: Any, a: int, b: int) -> Any:
    return torch.swapaxes(x, a, b)


def broadcast_to(x: Any, shape: Any) -> Any:
    return torch.broadcast_to(x, tuple(shape))


def _alike(rows: Any) -> list[Any]:
    like = next((r for r in rows if isinstance(r, Tensor)), None)
    return [asarray(r, like=like) for r in rows]


def concatenate(rows: Any, axis: int | None = 0) -> Any:
    rows = _alike(rows)
    if axis is None:
        rows, axis = [r.reshape(-1) for r in rows], 0
    return torch.cat(rows, dim=axis)


def stack(rows: Any, axis: int = 0) -> Any:
    return torch.stack(_alike(rows), dim=axis)


def getitem(x: Any, index: Any) -> Any:
    # PyTorch has no slices that step backwards: those dimensions are turned round first.
    row = index if isinstance(index, tuple) else (index,)
    if builtins.any(isinstance(i, slice) and (i.step or 1) < 0 for i in row):
        row, x = _forward_slices(row, x)
    row = tuple(i.long() if isinstance(i, Tensor) and i.dtype == torch.int32 else i for i in row)
    return x[row]


def _forward_slices(row: tuple[Any, ...], x: Any) -> tuple[tuple[Any, ...], Any]:
    used = len([i for i in row if i is not None and i is not Ellipsis])
    out, dim = [], 0
    for i in row:
        if i is Ellipsis:
            dim += x.ndim - used
        elif isinstance(i, slice) and (i.step or 1) < 0:
            start, stop, step = i.indices(x.shape[dim])
            picked = arange(start, stop, step, "int64", x)
            x = torch.index_select(x, dim, picked)
            i, dim = slice(None), dim + 1
        elif i is not None:
            dim += 1
        out.append(i)
    return tuple(out), x


def _inside(indices: Any, size: Any) -> Any:
    if isinstance(size, torch.SymInt):  # being traced
        last: Any = size - 1
        return torch.minimum(indices.long().clamp(min=0), torch.scalar_tensor(last, dtype=torch.int64))
    return indices.long().clamp(0, size - 1)


def take(x: Any, indices: Any, axis: int) -> Any:
    at = _inside(asarray(indices, like=x), x.shape[axis])
    axis %= x.ndim
    picked = torch.index_select(x, axis, at.reshape(-1))
    return picked.reshape(*x.shape[:axis], *at.shape, *x.shape[axis + 1 :])


def take_along_axis(x: Any, indices: Any, axis: int) -> Any:
    at = _inside(indices, x.shape[axis])
    if builtins.any(
        isinstance(n, torch.SymInt) for n in x.shape
    ):  # being traced: the other would close the size
        return torch.gather(x, axis % x.ndim, at)
    return torch.take_along_dim(x, at, dim=axis)


def scatter(x: Any, indices: Any, updates: Any, axis: int, add: bool) -> Any:
    at = _inside(asarray(indices, like=x), x.shape[axis])
    axis %= x.ndim
    rows = updates.reshape(*x.shape[:axis], at.numel(), *x.shape[axis + 1 :])  # not -1: others may be 0
    run = torch.index_add if add else torch.index_copy
    return run(x, axis, at.reshape(-1), rows)


def scatter_along_axis(x: Any, indices: Any, updates: Any, axis: int, add: bool) -> Any:
    at = _inside(indices, x.shape[axis])
    return (torch.scatter_add if add else torch.scatter)(x, axis % x.ndim, at, updates)


def astype(x: Any, dtype: Any) -> Any:
    return asarray(x, dtype)


def full(shape: Any, value: Any, dtype: Any, like: Any = None) -> Any:
    return torch.full(tuple(shape), value, dtype=_dtype(dtype), device=_device(like))


def arange(start: Any, stop: Any, step: Any = 1, dtype: Any = "int32", like: Any = None) -> Any:
    if builtins.any(isinstance(n, torch.SymInt) for n in (start, stop, step)):
        return torch.arange(start, stop, step, device=_device(like)).to(_dtype(dtype))  # being traced
    # By NumPy, because PyTorch refuses empty and backward ranges, and counts floats in its default dtype.
    return torch.from_numpy(np.arange(start, stop, step)).to(_device(like), _dtype(dtype))


def eye(rows: int, columns: int, dtype: Any, like: Any = None) -> Any:
    return torch.eye(rows, columns, dtype=_dtype(dtype), device=_device(like))


def tiny(x: Any) -> float:
    return torch.finfo(x.dtype).tiny


def wide(x: Any, accumulate: str = "float32") -> str:
    return str(torch.promote_types(x.dtype, _dtype(accumulate))).removeprefix("torch.")


def is_float(x: Any) -> bool:
    return x.dtype.is_floating_point if isinstance(x, Tensor) else isinstance(x, float)


def is_bool(x: Any) -> bool:
    return x.dtype == torch.bool if isinstance(x, Tensor) else isinstance(x, bool)


def dtype_of(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def cholesky(x: Any) -> Any:
    out, failed = torch.linalg.cholesky_ex(x)
    # As on JAX: NaN for what is not positive definite.
    return torch.where((failed > 0)[..., None, None], torch.nan, out)


def eigvalsh(x: Any) -> Any:
    return torch.linalg.eigvalsh((x + x.mT) / 2)


def solve_triangular(matrix: Any, right: Any, transposed: bool) -> Any:
    own = torch.tril(matrix)
    own = own.mT if transposed else own
    if right.ndim < matrix.ndim:
        return torch.linalg.solve_triangular(own, right[..., None], upper=transposed)[..., 0]
    return torch.linalg.solve_triangular(own, right, upper=transposed)


def svd_rows(x: Any) -> tuple[Any, Any]:
    _, size, rows = torch.linalg.svd(x, full_matrices=False)
    return size, rows


def searchsorted(order: Any, values: Any, right: bool) -> Any:
    return torch.searchsorted(order.contiguous(), values.contiguous(), right=right)


def bincount(x: Any, length: int) -> Any:
    return torch.bincount(x.reshape(-1).long(), minlength=length).int()


def unique(x: Any) -> tuple[Any, Any, Any]:
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return values, inverse.int(), counts.int()


def from_numpy(x: Any, like: Any = None) -> Any:
    return torch.from_numpy(x).to(_device(like))


def to_numpy(x: Any) -> Any:
    return x.detach().cpu().numpy() if isinstance(x, Tensor) else x

"""What devices compute together: each one's arrays are a row, and NumPy has them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from capibara.ops import collective
from fuzz_ops.case import EPS, Arg, Family, Generator, Over, compare, floats, pick
from fuzz_ops.ways import over_devices

__all__ = ["OPERATIONS"]

Group = list[int]
NO_DEVICES = frozenset({"shard_map", "unchecked", "vmap", "value", "jit", "grad", "grad2"})


def _mesh(rng: Generator) -> tuple[tuple[int, ...], tuple[str, ...], Any, list[Group]]:
    """Sizes, names, what to give as ``axis_name``, and the devices that communicate, in order."""
    kind = pick(rng, "one", "one", "two", "row", "column", "eight")
    if kind in ("one", "eight"):
        n = 8 if kind == "eight" else pick(rng, 1, 2, 3, 4)
        return (n,), ("x",), pick(rng, None, "x", ("x",)), [list(range(n))]
    sizes, names = (2, 2), ("x", "y")
    if kind == "two":
        turned = (("y", "x"), [[0, 2, 1, 3]])
        axis, groups = pick(rng, (None, [[0, 1, 2, 3]]), (("x", "y"), [[0, 1, 2, 3]]), turned)
        return sizes, names, axis, groups
    return (sizes, names, "x", [[0, 2], [1, 3]]) if kind == "row" else (sizes, names, "y", [[0, 1], [2, 3]])


def _grouped(groups: list[Group], function: Callable[..., Any]) -> Callable[..., list[np.ndarray]]:
    """``function(lists of the arrays of a group) -> a list of results for each device`` on stacked arrays."""

    def oracle(*stacked: Any) -> list[np.ndarray]:
        found: dict[int, Any] = {}
        for group in groups:
            outs = function(*([x[d] for d in group] for x in stacked))
            found.update(dict(zip(group, outs, strict=True)))
        each = [found[d] for d in range(len(stacked[0]))]
        return [np.stack(x) for x in zip(*each, strict=True)]

    return oracle


def _family(
    label: str,
    rng: Generator,
    mesh: Any,
    local: Any,
    oracle: Any,
    args: tuple[Arg, ...],
    same: bool = False,
    **more: Any,
) -> Family:
    sizes, names, _, groups = mesh
    count = int(np.prod(sizes))
    over = Over(local, sizes, names, same=same and len(groups) == 1, mapped=more.pop("mapped", False))
    args = tuple(Arg((count, *a.shape), a.dtype, a.kind) for a in args)
    refused = frozenset({"explicit"}) | more.pop("refused", frozenset())
    return Family(f"{label} on {sizes}", over_devices(over), oracle, args, refused=refused, over=over, **more)


def _number(dtype: str) -> dict[str, Any]:
    return {"x64": dtype == "float64", "tolerance": 32 * EPS[dtype]}


KINDS: dict[str, Callable[..., Any]] = {
    "sum": lambda x: np.sum(x, 0),
    "mean": lambda x: np.mean(x, 0),
    "max": lambda x: np.max(x, 0),
    "min": lambda x: np.min(x, 0),
    "product": lambda x: np.prod(x, 0),
}


def _whole(rng: Generator) -> Family:
    """An array that lies over a mesh with explicit axes."""
    kind, dtype = pick(rng, *KINDS), floats(rng, narrow=False)
    axis, size, dim = pick(rng, ("a", 2, "a"), ("b", 2, "b"), (None, 4, ("a", "b")))
    rows, columns = pick(rng, 1, 2, 3), pick(rng, 1, 4)
    if rng.random() < 0.2:
        # Not split: it has been reduced already.
        return Family(
            f"async_all_reduce of an array that is not split, {kind!r}",
            lambda x: collective.async_all_reduce(x, kind),
            lambda x: [x],
            (Arg((rows, columns), dtype),),
            x64=dtype == "float64",
            differentiable=(0,),
            refused=NO_DEVICES,
            specs=((None, None),),
        )
    return Family(
        f"async_all_reduce({dtype}[{size} × {rows}, {columns}] over {dim}, {kind!r}, axis_name={axis!r})",
        lambda x: collective.async_all_reduce(x, kind, axis_name=axis),
        lambda x: [KINDS[kind](x.reshape(size, rows, columns))],
        (Arg((size * rows, columns), dtype),),
        moods=("normal", "normal"),
        x64=dtype == "float64",
        tolerance=32 * EPS[dtype],
        differentiable=(0,),
        refused=NO_DEVICES,
        specs=((dim, None),),
    )


def all_reduce(rng: Generator) -> Family:
    if rng.random() < 0.25:
        return _whole(rng)
    mesh, kind = _mesh(rng), pick(rng, "sum", "mean", "max", "min", "product", "sum", "mean")
    if rng.random() < 0.2:
        mesh = ((n := pick(rng, 2, 3, 4),), ("x",), "x", [list(range(n))])
        mapped = True
    else:
        mapped = mesh[0][0] < 8 and len(mesh[0]) == 1 and mesh[2] is not None
    integers = rng.random() < 0.12
    dtype = "int32" if integers else floats(rng)
    compressed = not integers and kind in ("sum", "mean") and rng.random() < 0.3
    name = "auto" if compressed else pick(rng, "auto", "auto", "ring", "xla", "reference")
    options: dict[str, Any] = {
        "reduction_op": kind,
        "use_compression": compressed,
        "overlap_compute": bool(rng.random() < 0.6),
        "axis_name": mesh[2],
        "block_size": pick(rng, 256, 256, 4),
        "bucket_bytes": pick(rng, 4194304, 16),
        "implementation": name,
    }
    shapes = [pick(rng, (), (1,), (5,), (2, 3), (0, 3)) for _ in range(pick(rng, 1, 2, 3))]
    oracle = _grouped(
        mesh[3], lambda *arrays: [[np.asarray(KINDS[kind](np.stack(x))) for x in arrays] for _ in arrays[0]]
    )
    if integers and kind == "mean":
        dtype_out = None
    else:
        dtype_out = (dtype,) * len(shapes)

    def exact(*arrays: Any) -> list[np.ndarray]:
        outs = oracle(*arrays)
        return outs if not integers or kind == "mean" else [x.astype(np.int32) for x in outs]

    count = len(mesh[3][0])
    per = 1.0 if kind == "mean" else float(count)
    return _family(
        f"async_all_reduce({dtype}{shapes}, {options})",
        rng,
        mesh,
        lambda *arrays: collective.async_all_reduce(list(arrays), **options),
        exact,
        tuple(Arg(s, dtype, range(-3, 4) if integers else "normal") for s in shapes),
        same=True,
        mapped=mapped,
        moods=("normal",) if kind in ("max", "min", "product") else ("normal", "normal", "zeros", "ties"),
        x64=dtype == "float64",
        tolerance=0.02 if compressed else 16 * EPS.get(dtype, EPS["float32"]) * count,
        gradient_tolerance=32 * EPS.get(dtype, 0) * count,
        # Rounding is by the largest of a block, on each device and once on the sum.
        magnitude=None
        if not compressed
        else lambda *arrays: [per * max(float(np.max(np.abs(x), initial=0)) for x in arrays)] * len(shapes),
        differentiable=() if integers else tuple(range(len(shapes))),
        # Of the greatest there is no second derivative to speak of.
        twice=not integers
        and dtype in ("float32", "float64")
        and kind in ("sum", "mean", "product")
        and not compressed,
        dtypes=dtype_out,
    )


def _ring(rng: Generator) -> bool:
    return bool(rng.random() < 0.5)


def gather(rng: Generator) -> Family:
    dtype = floats(rng)
    if rng.random() < 0.2:
        dim, axis = pick(rng, "a", "b"), int(rng.integers(2))
        spec: list[Any] = [None, None]
        spec[axis] = dim
        return Family(
            f"optimized_all_gather({dtype}[2, 4] over {spec}, {axis})",
            lambda x: collective.optimized_all_gather(x, axis, axis_name=None),
            lambda x: [x],
            (Arg((2, 4), dtype),),
            x64=dtype == "float64",
            tolerance=EPS[dtype],
            differentiable=(0,),
            refused=NO_DEVICES,
            specs=(tuple(spec),),
        )
    mesh = _mesh(rng)
    shape = pick(rng, (1,), (4,), (2, 3), (3, 1, 2))
    axis, ring = int(rng.integers(-len(shape), len(shape))), _ring(rng)
    return _family(
        f"optimized_all_gather({dtype}{shape}, {axis}, {ring}, axis_name={mesh[2]!r})",
        rng,
        mesh,
        lambda x: collective.optimized_all_gather(x, axis, ring, axis_name=mesh[2]),
        _grouped(mesh[3], lambda x: [[np.concatenate(x, axis)] for _ in x]),
        (Arg(shape, dtype),),
        **_number(dtype),
        differentiable=(0,),
        twice=dtype in ("float32", "float64"),
        dtypes=(dtype,),
    )


def scatter(rng: Generator) -> Family:
    mesh, dtype, kind = _mesh(rng), floats(rng), pick(rng, "sum", "sum", "mean", "max", "min", "product")
    count, ring = len(mesh[3][0]), _ring(rng)
    shape = [pick(rng, 1, 3) for _ in range(pick(rng, 1, 2, 3))]
    axis = int(rng.integers(-len(shape), len(shape)))
    shape[axis] = count * pick(rng, 1, 2)
    return _family(
        f"reduce_scatter({dtype}{shape}, {axis}, {kind!r}, {ring}, axis_name={mesh[2]!r})",
        rng,
        mesh,
        lambda x: collective.reduce_scatter(x, axis, kind, ring, axis_name=mesh[2]),
        _grouped(mesh[3], lambda x: [[y] for y in np.split(KINDS[kind](np.stack(x)), len(x), axis)]),
        (Arg(tuple(shape), dtype),),
        moods=("normal",) if kind in ("max", "min", "product") else ("normal", "zeros", "ties"),
        x64=dtype == "float64",
        tolerance=16 * EPS[dtype] * count,
        differentiable=(0,),
        twice=dtype in ("float32", "float64") and kind in ("sum", "mean", "product"),
        dtypes=(dtype,),
    )


def to_all(rng: Generator) -> Family:
    mesh, dtype, ring = _mesh(rng), floats(rng), _ring(rng)
    count = len(mesh[3][0])
    shape = [pick(rng, 1, 3) for _ in range(pick(rng, 1, 2, 3))]
    split, concat = (int(rng.integers(-len(shape), len(shape))) for _ in range(2))
    shape[split] = count * pick(rng, 1, 2)

    def exchange(x: Any) -> Any:
        parts = [np.split(y, len(x), split) for y in x]
        return [[np.concatenate([p[i] for p in parts], concat)] for i in range(len(x))]

    return _family(
        f"all_to_all({dtype}{shape}, {split}, {concat}, {ring}, axis_name={mesh[2]!r})",
        rng,
        mesh,
        lambda x: collective.all_to_all(x, split, concat, ring, axis_name=mesh[2]),
        _grouped(mesh[3], exchange),
        (Arg(tuple(shape), dtype),),
        **_number(dtype),
        differentiable=(0,),
        twice=dtype in ("float32", "float64"),
        dtypes=(dtype,),
    )


def gather_matmul(rng: Generator) -> Family:
    mesh, dtype = _mesh(rng), floats(rng)
    lead, rows, inner, columns = pick(rng, (), (), (2,)), pick(rng, 1, 2, 3), pick(rng, 1, 4), pick(rng, 1, 3)
    precision = pick(rng, None, "highest")
    oracle = _grouped(mesh[3], lambda x, w: [[np.concatenate(x, -2) @ v] for v in w])
    return _family(
        f"all_gather_matmul({dtype}{(*lead, rows, inner)}, {(inner, columns)}, axis_name={mesh[2]!r})",
        rng,
        mesh,
        lambda x, w: collective.all_gather_matmul(x, w, axis_name=mesh[2], precision=precision),
        oracle,
        (Arg((*lead, rows, inner), dtype), Arg((inner, columns), dtype)),
        **_number(dtype),
        magnitude=lambda *arrays: oracle(*map(abs, arrays)),
        differentiable=(0, 1),
        twice=dtype in ("float32", "float64"),
        dtypes=(dtype,),
    )


def matmul_scatter(rng: Generator) -> Family:
    mesh, dtype = _mesh(rng), floats(rng)
    count = len(mesh[3][0])
    lead, rows, inner, columns = pick(rng, (), (), (2,)), pick(rng, 1, 2), pick(rng, 1, 4), pick(rng, 1, 3)
    oracle = _grouped(
        mesh[3],
        lambda x, w: [[y] for y in np.split(sum(a @ b for a, b in zip(x, w, strict=True)), len(x), -2)],
    )
    return _family(
        f"matmul_reduce_scatter({dtype}{(*lead, count * rows, inner)}, {(inner, columns)}, axis_name={mesh[2]!r})",
        rng,
        mesh,
        lambda x, w: collective.matmul_reduce_scatter(x, w, axis_name=mesh[2]),
        oracle,
        (Arg((*lead, count * rows, inner), dtype), Arg((inner, columns), dtype)),
        **_number(dtype),
        magnitude=lambda *arrays: oracle(*map(abs, arrays)),
        differentiable=(0, 1),
        twice=dtype in ("float32", "float64"),
        dtypes=(dtype,),
    )


def residual(rng: Generator) -> Family:
    dtype = pick(rng, "float32", "float64", "bfloat16", "int32")
    shapes = [pick(rng, (), (4,), (2, 3), (0,)) for _ in range(pick(rng, 1, 2))]
    wide = "float64" if dtype == "float64" else "float32"
    integers = dtype == "int32"
    return Family(
        f"zero_residual({dtype}{shapes})",
        lambda *arrays: collective.zero_residual({str(i): x for i, x in enumerate(arrays)}),
        lambda *arrays: [np.zeros(x.shape) for x in arrays],
        tuple(Arg(s, dtype, range(-3, 4) if integers else "normal") for s in shapes),
        x64=dtype == "float64",
        # What is 0 whatever it is given does not vary over a mesh, and has no gradient.
        differentiable=(),
        check=lambda arrays, got: (
            None
            if all(x.dtype == (np.dtype("float32") if integers else wide) or integers for x in got)
            and all(compare(x, np.zeros(y.shape), 0) is None for x, y in zip(got, arrays, strict=True))
            else f"{[(x.dtype.name, x.shape) for x in got]}"
        ),
    )


OPERATIONS = {
    "collective.async_all_reduce": all_reduce,
    "collective.optimized_all_gather": gather,
    "collective.reduce_scatter": scatter,
    "collective.all_to_all": to_all,
    "collective.all_gather_matmul": gather_matmul,
    "collective.matmul_reduce_scatter": matmul_scatter,
    "collective.zero_residual": residual,
}

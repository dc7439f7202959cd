"""TPU kernels of ``grouped_matmul`` against JAX's megablox and ragged_dot, in cycles: of bundles or of copies.

A core starts one bundle of instructions a cycle while copies between memory (HBM) and the core go on beside it. So the
cycles of a kernel are the larger of two figures: all bundles that the TPU compiler schedules, and all bytes that the
kernel's pipeline copies, by the clock and the bandwidth of ``capibara.plan.slices``. This is a lower bound for either
side, as if copies overlapped with the bundles perfectly, and no measured time.

How many steps the kernels take depends on the sizes of the groups, which are arguments. So bundles are counted from
the compiler's dump for one step of each kind (a tile within a group, a part of a tile, …), and multiplied by how often
the kernel takes it for the same drawn sizes, uneven as a router's are. XLA's kernel for ``ragged_dot`` is a kernel of
the same form, whose tile sizes its program states; its grid is taken to be megablox's. The few operations that list
the steps before the kernel are not counted, for neither.

A v4 or v5p chip has two cores that share its memory, and a grid's parallel axis is split over them. Counted are all
steps on one core with half of the chip's bandwidth, for every kernel alike: a split halves bundles and bytes. That an
odd number of tiles does not split into halves is left out.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import numpy as np

from benchmarks._bundles import KINDS, NotCompiledError, Part, parts
from benchmarks._copies import Operand, bytes_per_cycle, copied

LONG = "380 programs for TPUs, up to half a minute each"

__all__ = ["PASSES", "SHAPES", "TILINGS", "Cost", "Shape", "compare", "operands", "program", "run"]


@dataclass(frozen=True)
class Shape:
    """Experts of a published model: ``[rows, inner] @ [groups, inner, columns]``."""

    name: str
    rows: int
    inner: int
    columns: int
    groups: int

    def sizes(self) -> np.ndarray:
        """Uneven, as a router's are."""
        random = np.random.default_rng(0)
        return random.multinomial(self.rows, random.dirichlet(np.full(self.groups, 8.0)))


@dataclass(frozen=True)
class Cost:
    """What a kernel takes for one product.

    Attributes:
      bundles: of instructions, of all steps.
      copied: bytes, of all steps.
      cycles: of the bundles or of the copies, whichever are more.
    """

    bundles: int
    copied: int
    cycles: float


_MODELS = (
    ("Mixtral 8x7B, in", 4096, 14336, 8),
    ("Mixtral 8x7B, out", 14336, 4096, 8),
    ("Qwen3-30B-A3B, in", 2048, 768, 128),
    ("Qwen3-30B-A3B, out", 768, 2048, 128),
    ("gpt-oss-20b", 2880, 2880, 32),
)
SHAPES = tuple(Shape(name, rows, *sizes) for name, *sizes in _MODELS for rows in (4096, 16384))
PASSES = ("forward", "transposed", "outer")
TILINGS = ((128, 4096, 512), (256, 2048, 512), (512, 1024, 1024))


def _tiling(shape: Shape, inner: int, columns: int, wanted: tuple[int, int, int]) -> tuple[int, int, int]:
    """Tile sizes of megablox near those that are wanted, none larger than its dimension."""
    deep = min(wanted[1], inner)
    while inner % deep:
        deep -= 128 if deep % 128 == 0 else deep % 128
        if deep <= 0:
            deep = inner
    return wanted[0], deep, min(wanted[2], columns)


def _sides(shape: Shape, way: str) -> tuple[int, int]:
    """Inner and columns of the product that is computed in a pass."""
    return (shape.columns, shape.inner) if way == "transposed" else (shape.inner, shape.columns)


@contextmanager
def _planned_for(kind: str) -> Iterator[None]:
    """Our kernels choose tiles for the chip of this process, here for the described one."""
    from capibara.ops.linalg import grouped_tpu

    core = grouped_tpu.V6E_CORE if kind == "v6e" else grouped_tpu.ANY_CORE
    with mock.patch.object(grouped_tpu, "device_core", return_value=core):
        yield


def _plan(kind: str, shape: Shape, way: str, dtype: str) -> Any:
    import jax

    from capibara.ops.linalg import grouped, grouped_tpu

    given = [
        jax.ShapeDtypeStruct(size, kind)
        for size, kind in (
            ((shape.rows, shape.inner), dtype),
            ((shape.groups, shape.inner, shape.columns), dtype),
            ((shape.groups,), "int32"),
        )
    ]
    with _planned_for(kind):
        problem, _ = grouped.OP.prepare(*given)
        if way == "outer":
            return grouped_tpu.outer_plan(problem, shape.inner, shape.columns)
        return grouped_tpu.product_plan(problem.back if way == "transposed" else problem)


def program(
    of: str,
    way: str,
    rows: int,
    inner: int,
    columns: int,
    groups: int,
    dtype: str,
    tiling: tuple[int, int, int] | None = None,
    kind: str = "",
) -> tuple[Any, tuple[Any, ...]]:
    """One kernel, and the shapes of its arguments.

    Args:
      of: ``"ours"``, ``"megablox"`` or ``"ragged_dot"``.
      way: ``"forward"``; ``"transposed"``, the gradient of the rows; ``"outer"``, that of the matrices.
      rows, inner, columns, groups: of the forward product.
      tiling: of megablox.
      kind: of TPU, for ours.
    """
    import importlib

    import jax
    import jax.numpy as jnp

    from capibara.ops.linalg import grouped, grouped_tpu

    def array(*shape: int, kind: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(kind))

    lhs, rhs, sizes = array(rows, inner), array(groups, inner, columns), array(groups, kind="int32")
    ahead = array(rows, columns)
    if of == "ours":
        problem, _ = grouped.OP.prepare(lhs, rhs, sizes)
        now = problem.back if way == "transposed" else problem
        compute = grouped_tpu.outer if way == "outer" else grouped_tpu.forward

        def kernel(*arrays: Any) -> Any:
            with _planned_for(kind):
                return compute(now, *arrays)

        left, right = {"forward": (lhs, rhs), "transposed": (ahead, rhs), "outer": (lhs, ahead)}[way]
        return kernel, (left, right, sizes)
    if tiling is not None:
        tiling = (tiling[0], tiling[1], tiling[2])  # a list where it has come as JSON
    mega: Any = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
    if way == "outer":
        return lambda a, b, s: mega.tgmm(a.swapaxes(0, 1), b, s, a.dtype, tiling), (lhs, ahead, sizes)
    back = way == "transposed"
    if of == "megablox":
        return lambda a, b, s: mega.gmm(a, b, s, a.dtype, tiling, transpose_rhs=back), (
            ahead if back else lhs,
            rhs,
            sizes,
        )
    numbers = jax.lax.RaggedDotDimensionNumbers((((1,), (2 if back else 1,)), ((), ())), [0], [0])
    return lambda a, b, s: jax.lax.ragged_dot_general(a, b, s, numbers), (
        ahead if back else lhs,
        rhs,
        sizes,
    )


def _runs(sizes: np.ndarray, rows: int, tall: int) -> list[tuple[int, int]]:
    """The rows of a tile that each visit is for, of groups in order."""
    found, start = [], 0
    for size in sizes:
        end = start + int(size)
        at = start
        while at < end:
            edge = min(end, (at // tall + 1) * tall)
            found.append((at % tall, edge - at // tall * tall))
            at = edge
        start = end
    return found


def _visits(sizes: np.ndarray, rows: int, tall: int, empty: bool) -> tuple[np.ndarray, np.ndarray]:
    """The group and the tile of each visit, of groups in order; ``empty`` ones are visited once or not at all."""
    groups, tiles, start = [], [], 0
    for group, size in enumerate(sizes):
        end = start + int(size)
        if size:
            found = range(start // tall, -(-end // tall))
        else:
            found = [min(start, rows - 1) // tall] * empty
        groups += [group] * len(found)
        tiles += found
        start = end
    return np.array(groups, int), np.array(tiles, int)


def operands(
    of: str, way: str, sizes: np.ndarray, rows: int, inner: int, columns: int, tile: tuple[int, int, int]
) -> tuple[Operand, Operand, Operand]:
    """Both inputs and the output of a kernel, and the blocks that its steps take.

    Args:
      of, way: as for :func:`program`.
      sizes: of the groups, ``rows`` in all.
      rows, inner, columns: of the product that the kernel computes.
      tile: its rows, inner and columns.
    """
    tall, deep, wide = tile
    group, tiles = _visits(sizes, rows, tall, way == "outer")
    down, across, groups = -(-inner // deep), -(-columns // wide), len(sizes)
    if way == "outer":
        if of == "ours":
            k, c, v = np.indices((down, across, len(group))).reshape(3, -1)
        else:
            c, k, v = np.indices((across, down, len(group))).reshape(3, -1)
        return (
            Operand((rows, inner), (tall, deep), (tiles[v], k)),
            Operand((rows, columns), (tall, wide), (tiles[v], c)),
            Operand((groups, inner, columns), (1, deep, wide), (group[v], k, c)),
        )
    c, v, k = np.indices((across, len(group), down)).reshape(3, -1)
    return (
        Operand((rows, inner), (tall, deep), (tiles[v], k)),
        Operand((groups, inner, columns), (1, deep, wide), (group[v], k, c)),
        Operand((rows, columns), (tall, wide), (tiles[v], c)),
    )


def _cost(
    kind: str, of: str, shape: Shape, way: str, dtype: str, tile: tuple[int, int, int], bundles: int
) -> Cost:
    import jax.numpy as jnp

    arrays = operands(of, way, shape.sizes(), shape.rows, *_sides(shape, way), tile)
    moved = copied(arrays, jnp.dtype(dtype).itemsize)
    return Cost(bundles, moved, max(bundles, moved / bytes_per_cycle(kind)))


def _bodies(part: Part) -> tuple[Part, ...]:
    """The conditions of a step: those around all of them are always met."""
    products = [each for each in part.inside if each.products]
    if len(products) == 1 and any(each.products for each in products[0].inside):
        return _bodies(products[0])
    return part.inside


def _ours(shape: Shape, way: str, part: Part, plan: Any) -> int:
    """Bundles of all steps of our kernels."""
    inner, columns = _sides(shape, way)
    bodies = _bodies(part)
    across = -(-columns // plan.columns) * (-(-inner // plan.inner) if way == "outer" else 1)
    several = [p for p in bodies if p.products and p.has_loop]
    whole = [p for p in bodies if p.products and not p.has_loop]
    others = [p for p in bodies if not p.products]
    (pieces,), (body,) = several, whole
    loops = [p for p in pieces.within() if p.loop and p.products]
    small = [p for p in pieces.inside if p.products and not p.loop and not p.has_loop]
    (large,), (rest,) = loops, small
    step = part.bundles - pieces.bundles - body.bundles
    # Other conditions: what a group or a tile begins and ends with; small ones stand in every step.
    once = [p for p in others if p.bundles > 40] if way == "outer" else [max(others, key=lambda p: p.bundles)]
    step -= sum(p.bundles for p in once)
    total, sizes = 0, shape.sizes()
    filled = int((sizes > 0).sum())
    runs = _runs(sizes, shape.rows, plan.rows)
    for low, high in runs:
        total += step * plan.slabs
        if (low, high) == (0, plan.rows):
            total += body.bundles * plan.slabs
            continue
        begin = low // plan.unit * plan.unit
        big, little = plan.parts
        count = (high - begin + big - little - 1) // big
        total += plan.slabs * (pieces.bundles - large.bundles - rest.bundles + count * large.bundles)
        total += plan.slabs * rest.bundles * (begin + count * big < high)
    if way == "outer":
        total += shape.groups * sum(p.bundles for p in once) + (shape.groups - filled) * step
    else:
        total += sum(p.bundles for p in once) * len(set(_partial_tiles(sizes, plan.rows)))
    return across * total


def _partial_tiles(sizes: np.ndarray, tall: int) -> list[int]:
    """Tiles with rows of several groups."""
    found, start = [], 0
    for size in sizes:
        end = start + int(size)
        found += [edge // tall for edge in (start, end) if edge % tall]
        start = end
    return found


def _theirs(shape: Shape, way: str, part: Part, tiling: tuple[int, int, int]) -> int:
    """Bundles of all steps of megablox's kernels, or of XLA's."""
    inner, columns = _sides(shape, way)
    tall, deep, wide = tiling
    sizes = shape.sizes()
    visits, across = len(_runs(sizes, shape.rows, tall)), -(-columns // wide)
    every = _bodies(part)
    bodies = [p for p in every if p.products]
    if way == "outer":
        empty = int((sizes == 0).sum())
        (body,) = bodies
        once = [p for p in every if not p.products and p.bundles > 40]
        step = part.bundles - body.bundles - sum(p.bundles for p in once)
        total = visits * (step + body.bundles) + empty * step + shape.groups * sum(p.bundles for p in once)
        return across * -(-inner // deep) * total
    slabs = -(-inner // deep)
    if slabs == 1 or len(bodies) < 2:
        return across * visits * slabs * part.bundles
    last, more = max(bodies, key=lambda p: p.bundles), min(bodies, key=lambda p: p.bundles)
    start = [p for p in every if not p.products and p.bundles > 40]
    step = part.bundles - sum(p.bundles for p in (last, more, *start))
    each = slabs * step + (slabs - 1) * more.bundles + last.bundles + sum(p.bundles for p in start)
    return across * visits * each


def compare(
    kind: str,
    shapes: Sequence[Shape],
    ways: Sequence[str] = PASSES,
    dtype: str = "bfloat16",
    tilings: Sequence[tuple[int, int, int]] = TILINGS,
) -> list[dict[str, Any]]:
    """Cycles, bundles and bytes of whole products, ours and theirs.

    Args:
      kind: of TPU, one of v4, v5e, v5p and v6e.
      shapes: the products; those that differ in their number of rows alone share megablox's programs.
      ways: passes, among ``forward``, ``transposed`` and ``outer``.
      tilings: rows, inner and columns of megablox's tiles, made smaller where the product is.

    Returns:
      One row for each shape and pass, with a :class:`Cost` for each kernel: ``ours``; ``megablox`` with the tile sizes
      of fewest cycles, ``tiling``, and the ``fewest_bundles`` with any of them; ``ragged_dot`` (None in the pass
      ``outer``, for which XLA has no kernel that skips the rows of other groups).
    """
    cases: list[dict[str, Any]] = []
    places: dict[str, int] = {}

    def ask(**case: Any) -> int:
        key = repr(case)
        if key not in places:
            places[key] = len(cases)
            cases.append(case)
        return places[key]

    wanted = []
    for shape, way in itertools.product(shapes, ways):
        inner, columns = _sides(shape, way)
        same: dict[str, Any] = {
            "way": way,
            "inner": shape.inner,
            "columns": shape.columns,
            "groups": shape.groups,
            "dtype": dtype,
        }
        least = min(each.rows for each in shapes)
        ours = ask(of="ours", rows=shape.rows, kind=kind, **same)
        each = {_tiling(shape, inner, columns, tiling) for tiling in tilings}
        theirs = [(t, ask(of="megablox", rows=least, tiling=t, **same)) for t in sorted(each)]
        ragged = None if way == "outer" else ask(of="ragged_dot", rows=shape.rows, **same)
        wanted.append((shape, way, ours, theirs, ragged))
    found = parts(kind, "benchmarks.tpu_grouped:program", cases)
    rows = []
    for shape, way, ours, theirs, ragged in wanted:
        counted = {}
        for tiling, place in theirs:
            if not isinstance(found[place], NotCompiledError):
                bundles = _theirs(shape, way, _only(found[place]), tiling)
                counted[tiling] = _cost(kind, "megablox", shape, way, dtype, tiling, bundles)
        if not counted:
            raise found[theirs[0][1]]
        best = min(counted, key=lambda t: counted[t].cycles)
        plan = _plan(kind, shape, way, dtype)
        bundles = _ours(shape, way, _only(found[ours]), plan)
        row = {
            "kind": kind,
            "shape": shape,
            "pass": way,
            "ours": _cost(kind, "ours", shape, way, dtype, (plan.rows, plan.inner, plan.columns), bundles),
            "megablox": counted[best],
            "tiling": best,
            "fewest_bundles": min(each.bundles for each in counted.values()),
            "ragged_dot": None,
        }
        if ragged is not None and not isinstance(found[ragged], NotCompiledError):
            text = found[ragged]["program"]
            tiles = re.search(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"', text)
            if tiles is not None:
                tall, deep, wide = map(int, tiles.groups())
                bundles = _theirs(shape, way, _only(found[ragged]), (tall, deep, wide))
                row["ragged_dot"] = _cost(kind, "ragged_dot", shape, way, dtype, (tall, deep, wide), bundles)
        rows.append(row)
    return rows


def _only(found: Any) -> Part:
    """The kernel that multiplies."""
    if isinstance(found, NotCompiledError):
        raise found
    (part,) = (part for part in found["kernels"].values() if part.products)
    return part


def run(kinds: Sequence[str] = tuple(KINDS), shapes: Sequence[Shape] = SHAPES) -> list[dict[str, Any]]:
    """Rows of ratios: their cycles / ours."""
    rows = []
    for kind, way in itertools.product(kinds, PASSES):
        for row in compare(kind, shapes, (way,)):
            rows += [
                {
                    "what": f"grouped_matmul, {way}, {kind}",
                    "shape": f"{row['shape'].name}, {row['shape'].rows} rows",
                    "peer": peer,
                    "ratio": row[peer].cycles / row["ours"].cycles,
                    "ours": asdict(row["ours"]),
                    "theirs": asdict(row[peer]),
                    **({"tiling": row["tiling"]} if peer == "megablox" else {}),
                }
                for peer in ("megablox", "ragged_dot")
                if row[peer] is not None
            ]
    return rows

"""Bytes that pipelines of grouped products copy: counted as a walk over the kernels' own grids and index maps finds."""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from jax.experimental import pallas

from benchmarks._copies import Operand, bytes_per_cycle, copied
from benchmarks.tpu_grouped import operands
from capibara.ops.linalg import grouped_tpu, grouped_tpu_kernel
from capibara.ops.linalg.grouped import OP

GROUPS = (40, 0, 7, 25, 0, 24, 0)  # 96 rows: in part of a tile, at its edges, in none
ROWS, INNER, COLUMNS = sum(GROUPS), 64, 80
TILES = ((32, 32, 32), (32, 64, 80))


def walk(*_: Any, grid_spec: Any, out_shape: Any, **__: Any) -> Any:
    """In place of ``pallas_call``: bytes of both inputs and of the output, step by step."""

    def call(*arguments: Any) -> list[int]:
        scalars = jax.tree.map(np.asarray, arguments[: grid_spec.num_scalar_prefetch])
        arrays = [x for x in arguments[grid_spec.num_scalar_prefetch :] if x is not None]
        specs = [*(spec for spec in grid_spec.in_specs if spec is not None), grid_spec.out_specs]
        found = [0] * len(specs)
        before: list[Any] = [None] * len(specs)
        for step in itertools.product(*(range(int(size)) for size in grid_spec.grid)):
            for i, (spec, array) in enumerate(zip(specs, [*arrays, out_shape], strict=True)):
                place = tuple(map(int, spec.index_map(*step, *scalars)))
                if place != before[i]:
                    block = [size or 1 for size in spec.block_shape]
                    ends = zip(place, block, array.shape, strict=True)
                    sides = [min((at + 1) * size, whole) - at * size for at, size, whole in ends]
                    found[i] += math.prod(sides) * array.dtype.itemsize
                before[i] = place
        return found

    return call


def visits_of(of: Any, problem: Any, tall: int, sizes: np.ndarray) -> grouped_tpu.Visits:
    """In one program, which compiles faster."""

    def listed(sizes: jax.Array) -> Any:
        found = of(problem, tall, sizes)
        return found.count, found.scalars

    return grouped_tpu.Visits(*jax.jit(listed)(sizes))


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("way", ["forward", "transposed", "outer"])
@pytest.mark.parametrize("of", ["ours", "megablox"])
def test_bytes_are_those_of_the_kernels_own_index_maps(
    monkeypatch: pytest.MonkeyPatch, of: str, way: str, tile: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(pallas, "pallas_call", walk)
    dtype, transposed = jnp.dtype("bfloat16"), way == "transposed"
    matrix = (COLUMNS, INNER) if transposed else (INNER, COLUMNS)
    shapes = (ROWS, INNER), (ROWS, COLUMNS), (len(GROUPS), *matrix)
    lhs, ahead, rhs = (device_array(np.zeros(shape), dtype) for shape in shapes)
    sizes = np.array(GROUPS, np.int32)
    if of == "ours":
        problem, _ = OP.prepare(lhs, rhs, sizes, transpose_rhs=transposed)
        plan = grouped_tpu.Plan(*tile, INNER // tile[1], (16, 8), 8, transposed, jax.lax.Precision.DEFAULT)
        if way == "outer":
            visits = visits_of(grouped_tpu.outer_visits, problem, tile[0], sizes)
            found = grouped_tpu_kernel.outer(plan, visits, lhs, ahead, len(GROUPS), dtype, False)
        else:
            visits = visits_of(grouped_tpu.product_visits, problem, tile[0], sizes)
            found = grouped_tpu_kernel.product(plan, visits, lhs, rhs, dtype, False)
    else:
        mega: Any = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
        # Not under jit, because the walk needs the sizes; the list of steps as one program, which compiles faster.
        fixed = ("m", "tm", "num_nonzero_groups", "visit_empty_groups")
        listed = jax.jit(mega.make_group_metadata, static_argnames=fixed)
        monkeypatch.setattr(mega, "make_group_metadata", listed)
        if way == "outer":
            found = mega.tgmm.__wrapped__(lhs.T, ahead, sizes, dtype, tile)
        else:
            found = mega.gmm.__wrapped__(lhs, rhs, sizes, dtype, tile, transpose_rhs=transposed)
    counted = operands(of, way, sizes, ROWS, INNER, COLUMNS, tile)
    assert [copied([each], dtype.itemsize) for each in counted] == list(found)
    assert copied(counted, dtype.itemsize) == sum(found)


def test_a_block_beyond_its_array_is_copied_as_far_as_the_array_goes() -> None:
    # Blocks 0, 1, 1, 0 of five rows: three of 3 or 2 rows of 2.
    assert Operand((5, 2), (3, 2), (np.array([0, 1, 1, 0]), np.zeros(4, int))).elements == (3 + 2 + 3) * 2


def test_a_core_has_its_share_of_the_chips_bandwidth() -> None:
    assert bytes_per_cycle("v5e") == pytest.approx(819e9 / 1.503e9, rel=1e-3)
    assert bytes_per_cycle("v4") == pytest.approx(1.2e12 / 2 / 1.049e9, rel=1e-3)

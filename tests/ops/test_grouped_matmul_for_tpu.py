"""The TPU kernels of grouped_matmul: interpreted against the reference, compiled, and their bundles counted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from jax.experimental.pallas import tpu as pltpu
from tpu_compiler import ask, needs_libtpu
from tpu_kinds import few_or_all

from benchmarks._bundles import read_part
from benchmarks.tpu_grouped import SHAPES, TILINGS, compare
from capibara.ops import NoImplementationError, explain
from capibara.ops.linalg import grouped_matmul, grouped_tpu
from capibara.ops.linalg.grouped import OP
from capibara.ops.linalg.specs import GroupedSpec, grouped_arguments

SPECS = (
    GroupedSpec("no tile is full", 300, 128, 192, (100, 0, 150, 30)),
    GroupedSpec("many sizes", 1100, 128, 192, (1, 2, 0, 600, 64, 65, 127, 128)),
    GroupedSpec("one group has all", 640, 192, 128, (0, 640, 0)),
    GroupedSpec("no rows in any group", 640, 128, 128, (0, 0, 0)),
    GroupedSpec("more than there is", 1000, 128, 192, (18, -3, 900, 400)),
    GroupedSpec("whole tiles", 1024, 128, 128, (512, 512)),
)


def results(implementation: str, lhs: Any, rhs: Any, sizes: Any, ahead: Any, transposed: bool) -> Any:
    """The product and both gradients."""

    @jax.jit
    def run(lhs: Any, rhs: Any, sizes: Any, ahead: Any) -> Any:
        def product(lhs: Any, rhs: Any) -> Any:
            return grouped_matmul(lhs, rhs, sizes, transpose_rhs=transposed, implementation=implementation)

        out, pull = jax.vjp(product, lhs, rhs)
        return (out, *pull(ahead))

    return run(lhs, rhs, sizes, ahead)


def check_spec(spec: GroupedSpec, dtype: Any, transposed: bool, atol: float) -> None:
    random = np.random.default_rng(0)
    lhs, rhs, sizes = grouped_arguments(spec, random)
    ahead = random.normal(size=(spec.rows, spec.columns))
    rhs = rhs.swapaxes(1, 2) if transposed else rhs
    given = [device_array(x, dtype) for x in (lhs, rhs, ahead)]
    # NaN where no group is: it must not get anywhere.
    last = int(np.maximum(sizes, 0).sum())
    given[0] = given[0].at[last:].set(jnp.nan)
    found = results("pallas_tpu", given[0], given[1], sizes, given[2], transposed)
    exact = [x.astype(jnp.float32) for x in given]
    wanted = results("reference", exact[0], exact[1], sizes, exact[2], transposed)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == dtype
        scale = max(1.0, float(jnp.max(jnp.abs(want))))
        rtol = 1e-2 if dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=rtol, atol=atol * scale)
    assert not np.asarray(found[0][last:].astype(jnp.float32)).any()


@pytest.mark.parametrize(
    ("spec", "dtype", "transposed"),
    [
        (SPECS[0], jnp.bfloat16, True),
        *(
            pytest.param(spec, dtype, transposed, marks=pytest.mark.slow)
            for spec, dtype, transposed in (
                (SPECS[1], jnp.float32, False),
                (SPECS[1], jnp.bfloat16, True),
                (SPECS[2], jnp.bfloat16, False),
                (SPECS[3], jnp.float32, False),
                (SPECS[4], jnp.float32, True),
                (SPECS[5], jnp.float32, False),
            )
        ),
    ],
    ids=lambda x: x.name if isinstance(x, GroupedSpec) else getattr(x, "__name__", str(x)),
)
def test_interpreted_against_the_reference(spec: GroupedSpec, dtype: Any, transposed: bool) -> None:
    check_spec(spec, dtype, transposed, 0.01 if dtype == jnp.bfloat16 else 2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("transposed", [False, True])
def test_sums_over_slabs_of_the_inner_dimension(monkeypatch: Any, transposed: bool) -> None:
    def planned(problem: Any) -> Any:
        plan = grouped_tpu.Plan(
            256, 64, 128, problem.inner // 64, (128, 64), 8, False, jax.lax.Precision.DEFAULT
        )
        return replace(plan, transposed=problem.transpose_rhs)

    monkeypatch.setattr(grouped_tpu, "product_plan", planned)
    for spec in (SPECS[0], SPECS[1]):
        check_spec(spec, jnp.float32, transposed, 2e-6)


@pytest.mark.slow
def test_vmap_and_second_derivatives() -> None:
    random = np.random.default_rng(1)
    lhs, rhs = random.normal(size=(2, 256, 128)), random.normal(size=(2, 3, 128, 128))
    sizes = jnp.array([[100, 0, 156], [0, 20, 30]], jnp.int32)
    lhs, rhs = (device_array(x / 16, jnp.float32) for x in (lhs, rhs))

    def loss(implementation: str, lhs: Any, rhs: Any) -> Any:
        out = jax.vmap(lambda *a: grouped_matmul(*a, implementation=implementation))(lhs, rhs, sizes)
        return jnp.sum(out**3)

    def twice(implementation: str) -> Any:
        first = jax.grad(lambda *a: loss(implementation, *a), (0, 1))
        return jax.jit(jax.grad(lambda *a: sum(jnp.sum(x**2) for x in first(*a)), (0, 1)))(lhs, rhs)

    for got, want in zip(twice("pallas_tpu"), twice("reference"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5 * float(jnp.max(jnp.abs(want))))


@pytest.mark.slow
def test_in_the_tpu_interpreter_nothing_is_read_that_was_not_written(capfd: Any) -> None:
    drawn = grouped_arguments(SPECS[0], np.random.default_rng(0))
    (lhs, rhs), sizes = (device_array(x, jnp.float32) for x in drawn[:2]), drawn[2]
    ahead = jnp.ones((SPECS[0].rows, SPECS[0].columns), jnp.float32)
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", random_seed=1)
    pltpu.reset_tpu_interpret_mode_state()
    with pltpu.force_tpu_interpret_mode(params):
        found = jax.block_until_ready(results("pallas_tpu", lhs, rhs, sizes, ahead, False))
    pltpu.reset_tpu_interpret_mode_state()
    assert "RACE" not in capfd.readouterr().out
    for got, want in zip(found, results("reference", lhs, rhs, sizes, ahead, False), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def shapes(rows: int, inner: int, columns: int, groups: int, dtype: Any = jnp.bfloat16) -> list[Any]:
    sizes = ((rows, inner), dtype), ((groups, inner, columns), dtype), ((groups,), jnp.int32)
    return [jax.ShapeDtypeStruct(shape, kind) for shape, kind in sizes]


def test_what_it_declines() -> None:
    assert explain(grouped_matmul, *shapes(4096, 4096, 14336, 8), platform="tpu").chosen == "pallas_tpu"
    for size, options, why in (
        (shapes(64, 256, 256, 4), {}, "128 rows or more, not 64"),
        (shapes(256, 100, 256, 4), {}, "128 inner or more, a multiple of 64, not 100"),
        (shapes(256, 256, 200, 4), {}, "columns or more, a multiple of 64, not 200"),
        (shapes(256, 256, 256, 4, jnp.float16), {}, "float32 or bfloat16, not float16"),
        (shapes(256, 256, 256, 4), {"accumulate_dtype": "bfloat16"}, "sums in float32, not bfloat16"),
        (shapes(256, 256, 256, 4, jnp.float32), {"precision": "BF16_BF16_F32_X3"}, "takes a precision"),
        (shapes(256, 64 * 4099, 256, 4), {}, "no tile of matrices of 262336"),
    ):
        found = explain(grouped_matmul, *size, **options, platform="tpu")
        assert found.chosen == "xla"
        assert why in found.reasons["pallas_tpu"]
        with pytest.raises(NoImplementationError, match=why):
            jax.eval_shape(lambda *a, o=options: grouped_matmul(*a, **o, implementation="pallas_tpu"), *size)


@pytest.mark.parametrize("precision", [None, "default", "high", "highest", jax.lax.Precision.HIGH])
def test_precisions(precision: Any) -> None:
    problem, _ = OP.prepare(*shapes(256, 256, 256, 4, jnp.float32), precision=precision)
    exact = precision in ("high", "highest", jax.lax.Precision.HIGH)
    wanted = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    assert grouped_tpu.product_plan(problem).precision == wanted
    # In full the compiler stores parts of the operands beside the blocks.
    large, _ = OP.prepare(*shapes(4096, 4096, 14336, 8, jnp.float32), precision=precision)
    plan = grouped_tpu.product_plan(large)
    assert (plan.rows, plan.inner, plan.columns) == ((512, 512, 768) if exact else (128, 4096, 256))


@pytest.mark.parametrize("kind", ["TPU v6 lite", "TPU v5 lite", "TPU v4"])
def test_tiles_are_larger_where_a_chip_has_more_memory(monkeypatch: Any, kind: str) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    found = grouped_tpu.device_core()
    assert found is (grouped_tpu.V6E_CORE if kind == "TPU v6 lite" else grouped_tpu.ANY_CORE)
    plan = grouped_tpu.product_plan(OP.prepare(*shapes(4096, 4096, 14336, 8))[0])
    assert (plan.rows, plan.inner, plan.columns) == (256, 4096, 1024 if kind == "TPU v6 lite" else 512)


SCRIPT = r"""
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from capibara.ops import explain
from capibara.ops.linalg import grouped_matmul

*few, kind = sys.argv[1:]
more = {"chip_config_name": "megacore"} if kind.startswith("v4") else {}
device = topologies.get_topology_desc(platform="tpu", topology_name=kind, **more).devices[0]
one = SingleDeviceSharding(device)
rows, inner, columns, groups = 1024, 576, 1024, 16
out = {}
for dtype in (jnp.bfloat16, jnp.float32)[: 1 if few else 2]:
    shapes = ((rows, inner), dtype), ((groups, inner, columns), dtype), ((groups,), jnp.int32)
    given = [jax.ShapeDtypeStruct(shape, kind, sharding=one) for shape, kind in shapes]

    def loss(lhs, rhs, sizes, precision=None):
        return jnp.sum(grouped_matmul(lhs, rhs, sizes, precision=precision).astype(jnp.float32) ** 2)

    for precision in (None, "highest")[: 1 + (dtype == jnp.float32)]:
        gradient = jax.grad(lambda *a: loss(*a, precision), (0, 1))
        compiled = jax.jit(gradient).lower(*given).compile()
        out[f"{dtype.dtype.name} {precision}"] = {
            "explain": explain(grouped_matmul, *given, platform="tpu").chosen,
            "kernels": sum("custom-call(" in x and "capibara_grouped" in x for x in compiled.as_text().splitlines()),
            "memory": compiled.memory_analysis().temp_size_in_bytes,
        }
if not few:  # float32 in full needs more on-chip memory
    shapes = ((4096, 4096), jnp.float32), ((8, 4096, 14336), jnp.float32), ((8,), jnp.int32)
    given = [jax.ShapeDtypeStruct(shape, kind, sharding=one) for shape, kind in shapes]
    compiled = jax.jit(lambda *a: grouped_matmul(*a, precision="highest")).lower(*given).compile()
    assert "capibara_grouped" in compiled.as_text()
print(json.dumps(out))
"""


@needs_libtpu
@pytest.mark.parametrize("kind", few_or_all("v5e"))
def test_compiled_for_tpus(kind: str) -> None:
    for name, found in ask(SCRIPT, *kind.split()).items():
        assert found["explain"] == "pallas_tpu", name
        assert found["kernels"] == 3, name  # the product, and both gradients
        # Two arrays of the result's size in float32; all groups' products of columns in float32 would be 36 MiB.
        assert found["memory"] < 16 << 20, (name, found)


def test_parts_of_a_dump() -> None:
    product = "  : > { %1 = vmatmul.bf16.gmra.mxu0 %v1 }"
    text = "\n".join(
        f"{hex(i):>6} {bundle}"
        for i, bundle in enumerate(
            (
                "LB: > { %5 = sadd.s32 1, %s1 } /* Start region 2 */",
                "  : > { %6 = sbr.rel (%p1_p2) target = $region4 }",
                "LB: >> { %7 = vadd.f32 %v1, %v2 } /* Start region 3 */",
                product,
                "  : >> { %8 = sbr.rel (%p3_p2) target = $region3 }",
                product,
                "PF: > { %9 = sbr.rel (%p4_p2) target = $region2 } /* Start/End empty region 4 */",
            )
        )
    )
    grid = read_part("k", text)
    (body,) = grid.inside
    (loop,) = body.inside
    assert (grid.bundles, grid.products, grid.loop) == (7, 2, True)
    assert (body.bundles, body.products, body.loop, body.has_loop) == (4, 2, False, True)
    assert (loop.bundles, loop.products, loop.loop) == (3, 1, True)
    with pytest.raises(ValueError, match="no loop"):
        read_part("k", "    0 : { %1 = smov 0 }")


@pytest.mark.slow
@needs_libtpu
def test_fewer_cycles_on_one_kind_of_chip() -> None:
    shape = next(shape for shape in SHAPES if shape.inner == 768 and shape.rows == 4096)
    (row,) = compare("v5e", [shape], ("forward",), tilings=TILINGS[:1])
    check_cycles(row)


def check_cycles(row: dict[str, Any]) -> None:
    """Copied bytes and scheduled bundles, whichever take longer, against both peers'."""
    assert row["ours"].cycles <= row["megablox"].cycles, row
    if row["ragged_dot"] is not None:
        assert row["ours"].cycles <= row["ragged_dot"].cycles, row


# The table of docs/benchmarks.md. ``python -m benchmarks tpu_grouped`` compares everything.
COMPARED = tuple(
    (kind, name, way)
    for kind in ("v4", "v5e", "v5p", "v6e")
    for name, way in (
        ("Mixtral 8x7B, in", "forward"),
        ("Mixtral 8x7B, in", "transposed"),
        ("Mixtral 8x7B, in", "outer"),
        ("Mixtral 8x7B, out", "forward"),
        ("Qwen3-30B-A3B, in", "forward"),
        ("Qwen3-30B-A3B, in", "transposed"),
        ("Qwen3-30B-A3B, in", "outer"),
        ("gpt-oss-20b", "forward"),
        ("gpt-oss-20b", "transposed"),
        ("gpt-oss-20b", "outer"),
    )
)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(("kind", "name", "way"), COMPARED)
def test_fewer_cycles(kind: str, name: str, way: str) -> None:
    shape = next(shape for shape in SHAPES if shape.name == name and shape.rows == 4096)
    (row,) = compare(kind, [shape], (way,))
    check_cycles(row)

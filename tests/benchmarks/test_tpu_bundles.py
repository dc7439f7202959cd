"""Bundles that the TPU compiler schedules for attention kernels: counted right, fewer than splash attention's."""

from __future__ import annotations

import pytest
from tpu_compiler import needs_libtpu

from benchmarks._bundles import KINDS, count, read_kernel
from benchmarks.tpu_bundles import SHAPES, compare

TARGET = 0.97


def dump(*bundles: str) -> str:
    """A dump as the compiler writes it, with labels and regions where bundles name them."""
    lines = ["= control target key start", "LB: loop body", "= control target key end", ""]
    return "\n".join([*lines, *(f"{hex(i):>6} {bundle}" for i, bundle in enumerate(bundles))])


def test_a_block_is_the_shortest_condition_with_products():
    product, other = "  : > { %1 = vmatmul.bf16.gmra.mxu0 %v1 }", "  : > { %2 = vadd.f32 %v1, %v2 }"
    spill = "  : > { %3 = vst [vmem:[#allocation7_spill] sm:$0xff] %v1 ;; %4 = vld [vmem:[%s1]] }"
    text = dump(
        "  : { %0 = smov 0 }",
        "LB: > { %5 = sadd.s32 1, %s1 } /* Start region 2 :: Start region 3 */",
        "  : > { %6 = sbr.rel (%p1_p2) target = $region4 }",  # the first block starts
        other,
        "PF: > { %7 = sbr.rel (!%p2_p2) target = $region5 } /* Start/End empty region 4 */",
        product,
        other,
        other,
        "PF: > { %8 = sbr.rel (%p3_p2) target = $region6 } /* Start/End empty region 5 */",
        product,
        spill,
        "PF: > { %9 = sbr.rel (%p4_p2) target = $region2 } /* Start/End empty region 6 */",
        "  : { %10 = smov 0 }",
    )
    kernel = read_kernel("k", text)
    assert kernel.bundles == 13
    assert kernel.bodies == (3, 2)
    assert (kernel.block, kernel.masked_block) == (2, 3)
    assert kernel.spills == (0, 1)
    assert kernel.step == 11 - 1 - 3 - 2  # the loop without its conditions


@pytest.mark.parametrize(
    ("bundles", "why"),
    [
        (("  : { %1 = vmatmul.bf16.gmra.mxu0 %v1 }",), "no loop"),
        (
            ("LB: > { } /* Start region 1 */", "  : > { %1 = sbr.rel (%p1_p2) target = $region1 }"),
            "no matrix product",
        ),
        (
            (
                "LB: > { } /* Start region 1 */",
                "  : > { %1 = sbr.rel (%p1_p2) target = $region4 }",
                "LB: >> { %2 = vmatmul.bf16.gmra.mxu0 %v1 } /* Start region 3 */",
                "  : >> { %3 = sbr.rel (%p1_p2) target = $region3 }",
                "PF: > { %4 = sbr.rel (%p1_p2) target = $region1 } /* Start/End empty region 4 */",
            ),
            "a loop inside",
        ),
    ],
)
def test_what_cannot_be_counted_is_refused(bundles, why):
    with pytest.raises(ValueError, match=why):
        read_kernel("k", dump(*bundles))


@pytest.mark.slow
@needs_libtpu
def test_forward_on_one_kind_of_chip():
    (row,) = compare("v6e", [(128, 512)], backward=False)
    assert row["ours"] <= TARGET * row["theirs"], row


# Where the target is not met, against splash attention's one kernel: what is.
REACHED_FUSED = {
    ("v4", 128, 256): 1.06,
    ("v4", 256, 512): 0.98,
    ("v5e", 256, 256): 1.07,
    ("v5e", 128, 512): 1.01,
    ("v5e", 256, 512): 1.03,
    ("v5e", 128, 1024): 1.01,
    ("v5e", 256, 1024): 1.03,
    ("v5p", 256, 256): 1.07,
    ("v5p", 128, 512): 0.99,
    ("v5p", 256, 512): 1.04,
    ("v5p", 128, 1024): 1.01,
    ("v5p", 256, 1024): 1.02,
    ("v6e", 256, 1024): 1.02,
}


@pytest.mark.slow
@needs_libtpu
def test_one_kernel_for_all_gradients_on_one_kind_of_chip():
    _, row = compare("v6e", [(128, 256)])
    assert row["ours"] <= TARGET * row["fused"] < row["theirs"], row


@pytest.mark.slow
@needs_libtpu
def test_a_table_of_levels_is_looked_up_in_a_register():
    cases = [{"table": table} for table in (False, True)]
    found = count("v6e", "benchmarks.tpu_bundles:quantized", cases)
    without, with_table = (next(iter(kernels.values())).block for kernels in found)
    assert with_table <= 1.6 * without  # 2.1 by selecting from the levels, one bit of a code after the other


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("block", sorted({block for _, block in SHAPES}))
@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_and_sizes(kind, block):
    for row in compare(kind, [shape for shape in SHAPES if shape[1] == block]):
        assert row["ours"] <= TARGET * row["theirs"], row
        if row.get("fused") is not None:  # heads of 256 in blocks of 1,024 do not fit into v4's memory
            limit = REACHED_FUSED.get((kind, row["dim"], block), TARGET)
            assert row["ours"] <= limit * row["fused"], row

"""Operations of matrix products and convolutions, against counting one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.plan import PlanError
from capibara.plan.program import read_program
from capibara.plan.program.flops import real_taps

HLO = Path(__file__).parent / "hlo"


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 30),
    st.integers(1, 12),
    st.integers(1, 6),
    st.integers(-4, 12),
    st.integers(1, 7),
    st.integers(1, 5),
)
def test_taps_on_real_elements_are_those_counted_one_by_one(
    size: int, out: int, window: int, stride: int, low: int, base: int, dilation: int
) -> None:
    elements = {i * base for i in range(size)}
    pairs = sum(o * stride + k * dilation - low in elements for o in range(out) for k in range(window))
    assert real_taps(size, out, window, stride, low, base, dilation) == pairs


def program(lines: str) -> str:
    return f"HloModule test, is_scheduled=true\n\nENTRY %main {{\n{lines}\n}}\n"


# Shapes and windows as the TPU's compiler writes them for einsums of attention; the operations are those of the einsum.
@pytest.mark.parametrize(
    ("lines", "flops"),
    [
        # bsd,dhk->bshk with 2 × 256 tokens, d = 512, 4 heads of 128: heads are windows over padding.
        (
            "  %a = bf16[2,256,512,1]{2,1,3,0} parameter(0)\n  %b = bf16[512,4,128,1]{2,0,1,3} parameter(1)\n"
            "  ROOT %c = bf16[2,256,4,128]{3,1,2,0} convolution(%a, %b), window={size=1x4 pad=0_0x3_3 "
            "rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f",
            2 * 2 * 256 * 512 * 4 * 128,
        ),
        # bhst,bthk->bhsk: batch and heads are dilated dimensions.
        (
            "  %a = bf16[2,4,256,256]{2,3,1,0} parameter(0)\n  %b = bf16[2,256,4,128]{3,1,2,0} parameter(1)\n"
            "  ROOT %c = bf16[2,4,256,128]{3,2,1,0} convolution(%a, %b), window={size=2x4 stride=1x3 lhs_dilate=2x4}, "
            "dim_labels=01bf_0i1o->01bf",
            2 * 2 * 4 * 256 * 256 * 128,
        ),
        # A plain product.
        (
            "  %a = bf16[8,16]{1,0} parameter(0)\n  %b = bf16[16,32]{1,0} parameter(1)\n"
            "  ROOT %c = bf16[8,32]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            2 * 8 * 16 * 32,
        ),
        # Batched, two dimensions contracted.
        (
            "  %a = f32[3,8,4,5]{3,2,1,0} parameter(0)\n  %b = f32[3,4,5,7]{3,2,1,0} parameter(1)\n"
            "  ROOT %c = f32[3,8,7]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2,3}, "
            "rhs_batch_dims={0}, rhs_contracting_dims={1,2}",
            2 * 3 * 8 * 7 * 20,
        ),
        # An image, 3 × 3 with one pixel of padding: the corners see 4 pixels, edges 6, the inside 9.
        (
            "  %a = f32[1,5,5,3]{3,2,1,0} parameter(0)\n  %b = f32[3,3,3,8]{3,2,1,0} parameter(1)\n"
            "  ROOT %c = f32[1,5,5,8]{3,2,1,0} convolution(%a, %b), window={size=3x3 pad=1_1x1_1}, "
            "dim_labels=b01f_01io->b01f",
            2 * 3 * 8 * (4 * 4 + 12 * 6 + 9 * 9),
        ),
        # Depthwise: the kernel's input features are those of one group.
        (
            "  %a = f32[2,10,6]{2,1,0} parameter(0)\n  %b = f32[4,1,6]{2,1,0} parameter(1)\n"
            "  ROOT %c = f32[2,7,6]{2,1,0} convolution(%a, %b), window={size=4}, dim_labels=b0f_0io->b0f, "
            "feature_group_count=6",
            2 * 2 * 7 * 6 * 4,
        ),
        # Its kernel's gradient: groups of the batch.
        (
            "  %a = f32[6,10,2]{2,1,0} parameter(0)\n  %b = f32[7,2,6]{2,1,0} parameter(1)\n"
            "  ROOT %c = f32[1,4,6]{2,1,0} convolution(%a, %b), window={size=7}, dim_labels=b0f_0io->b0f, "
            "batch_group_count=6",
            2 * 1 * 4 * 6 * 7 * 2,
        ),
        # A GPU's call of a matrix library.
        (
            "  %a = bf16[64,128]{1,0} parameter(0)\n  %b = bf16[128,32]{1,0} parameter(1)\n"
            '  ROOT %c = (bf16[64,32]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", '
            'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
            2 * 64 * 128 * 32,
        ),
    ],
)
def test_operations_are_those_of_the_closed_form(lines: str, flops: int) -> None:
    assert read_program(program(lines)).flops == flops


def test_a_windowed_matrix_product_counts_its_loop() -> None:
    """Two products of [8·2048, 2048] with [2048, 8192] and back, three layers, on 8 devices: each layer runs two
    loops whose counters step by 2 up to 4, with two collective-permutes each way in a turn."""
    facts = read_program((HLO / "v4_windowed.txt").read_text())
    assert facts.flops == 3 * 2 * 2 * 8 * 2048 * 2048 * 8192 // 8
    assert facts.unknown == ()
    permutes = [c for c in facts.collectives if c.kind == "collective-permute"]
    assert {c.trips for c in permutes} <= {3, 6}
    assert all(c.asynchronous for c in permutes)
    assert all(len(c.groups) == 8 for c in permutes)


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (
            "  %a = f32[2,3]{1,0} parameter(0)\n  ROOT %c = f32[2,2]{1,0} dot(%a, %a), lhs_contracting_dims={7}",
            "lhs_contracting_dims",
        ),
        (
            "  %a = f32[2,3]{1,0} parameter(0)\n  ROOT %c = f32[2,2]{1,0} convolution(%a, %a), window={size=1}, "
            "dim_labels=bf_io->bf0",
            "dim_labels do not fit",
        ),
        ("  ROOT %c = f32[2,2]{1,0} dot(%a, %b), lhs_contracting_dims={1}", "not an array of the program"),
        (
            "  %a = f32[2,3,4]{2,1,0} parameter(0)\n  ROOT %c = f32[2,4,4]{2,1,0} convolution(%a, %a), "
            "window={size=2x2}, dim_labels=b0f_0io->b0f",
            "spatial dimensions|dim_labels",
        ),
    ],
)
def test_products_that_contradict_themselves_are_refused(lines: str, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        read_program(program(lines))


@pytest.mark.parametrize(
    "window",
    [
        "stride=-x1",
        "stride=_x_",
        "stride=99999999999999999999999x1",
        "pad=-x_",
        "pad=_1x1_1",
        "pad=99999999999999999999999_1x1_1",
        "lhs_dilate=99999999999999999999999x1",
        "rhs_dilate=99999999999999999999999x1",
    ],
)
def test_windows_that_are_none(window):
    text = program(
        "  %a = f32[1,8,8,4] parameter(0)\n  %b = f32[3,3,4,4] parameter(1)\n"
        f"  ROOT %c = f32[1,8,8,4] convolution(%a, %b), window={{size=3x3 {window}}}, dim_labels=b01f_01io->b01f"
    )
    with pytest.raises(PlanError, match="is not a valid convolution"):
        read_program(text)

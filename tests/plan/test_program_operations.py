"""What a program's text says of its operations: arrays that a loop reads again, padding to a TPU's tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tpu_compiler import ask, needs_libtpu

from capibara.plan.program import OperationFacts, read_operations


def product_of(function, *arguments) -> OperationFacts:
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text
    (found,) = [one for one in read_operations(text) if one.flops]
    return found


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape).astype("float32"))


# Wide enough that XLA does not make one kernel of the loop.
SIZE = 400
X, W, MANY, FOUR = normal(300, SIZE), normal(SIZE, SIZE), normal(300, 32, 32), normal(4, SIZE, SIZE)
ALL = SIZE * SIZE * 4 - SIZE * SIZE * 4 // 300  # it is read once


@pytest.mark.parametrize(
    ("what", "function", "arguments", "expected"),
    [
        ("an argument", lambda x, w: jax.lax.map(lambda row: row[None] @ w, x), (X, W), ALL),
        ("a constant", lambda x: jax.lax.map(lambda row: row[None] @ W, x), (X,), ALL),
        (
            "computed within the loop",
            lambda x, w: jax.lax.map(lambda row: row[None] @ jnp.tanh(w), x),
            (X, W),
            ALL,
        ),
        (
            "one of four, 75 times each",
            lambda x, w: jax.lax.map(lambda one: one[0][None] @ w[one[1]], (x, jnp.arange(300) % 4)),
            (X, FOUR),
            SIZE * SIZE * 4 - 4 * SIZE * SIZE * 4 // 300,
        ),
        ("another slice each time", lambda x: jax.lax.map(lambda one: one @ one, x), (MANY,), 0),
        (
            "what the loop changes",
            lambda x: jax.lax.fori_loop(0, 300, lambda _, h: jnp.tanh(h @ h), x),
            (W,),
            0,
        ),
        ("no loop", lambda x, w: x @ w, (X, W), 0),
    ],
)
def test_what_a_loop_reads_again(what, function, arguments, expected):
    found = product_of(function, *arguments)
    # Where XLA makes one kernel of the loop, what is sliced is read there, too, and written for the product.
    times = 3 if found.opcode == "call" and what.startswith("one of") else 1
    # The places of slices are arrays, too.
    assert found.reread / found.products == pytest.approx(times * expected, abs=32)


def tiled(rows: int, depth: int, columns: int) -> int:
    """Written out."""
    up = {8: lambda n: (n + 7) // 8 * 8, 128: lambda n: (n + 127) // 128 * 128}
    one = 2 * up[8](rows) * up[128](depth) * up[128](columns)
    other = 2 * up[128](rows) * up[128](depth) * up[8](columns)
    return min(one, other)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 300), st.integers(1, 300), st.integers(1, 300))
def test_tiles_of_a_product(rows, depth, columns):
    text = f"""HloModule m, is_scheduled=true

ENTRY %main {{
  %a = f32[{rows},{depth}]{{1,0}} parameter(0)
  %b = f32[{depth},{columns}]{{1,0}} parameter(1)
  ROOT %dot = f32[{rows},{columns}]{{1,0}} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""
    (found,) = read_operations(text)
    assert found.flops == 2 * rows * depth * columns
    assert found.tiled_flops == pytest.approx(tiled(rows, depth, columns), rel=1e-6, abs=1)
    assert found.tiled_flops >= 2 * rows * depth * columns


def test_tiles_of_batches():
    """Batches are products of their own."""
    found = product_of(
        lambda a, b: jnp.einsum("bij,bjk->bik", a, b), normal(12, 80, 256), normal(12, 256, 128)
    )
    assert (found.flops, found.tiled_flops) == (12 * 2 * 80 * 256 * 128, 12 * 2 * 80 * 256 * 128)
    found = product_of(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), normal(12, 80, 64), normal(12, 64, 128))
    assert found.tiled_flops == 2 * 12 * 2 * 80 * 64 * 128


ON_A_TPU = """
import json
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from capibara.plan.program import read_operations, read_program

device = topologies.get_topology_desc(platform="tpu", topology_name="v4:2x2x1").devices[0]
one = SingleDeviceSharding(device)


def compiled(rows, depth, columns):
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, depth), (depth, columns))]
    text = jax.jit(lambda a, b: a @ b, in_shardings=one, out_shardings=one).lower(*shapes).compile().as_text()
    found = [one for one in read_operations(text) if one.flops]
    sums = [sum(getattr(one, name) * one.trips for one in found) for name in ("flops", "tiled_flops")]
    return [read_program(text).cycles, *sums]


print(json.dumps([[compiled(*shape) for shape in pair] for pair in (
    ((4096, 130, 130), (4096, 256, 256)),
    ((4096, 72, 72), (4096, 128, 128)),
    ((4096, 140, 140), (4096, 256, 256)),
    ((2048, 520, 520), (2048, 640, 640)),
)]))
"""


@needs_libtpu
def test_padding_costs_what_the_compiler_of_a_tpu_says():
    """The part of the time that is padding, against the compiler's cycles for a product without any."""
    errors = []
    for (cycles, flops, tiles), (whole_cycles, whole_flops, whole_tiles) in ask(ON_A_TPU):
        assert whole_flops == whole_tiles
        # As many operations at the rate of the product without padding.
        saved = 1 - whole_cycles * flops / whole_flops / cycles
        errors.append(abs((1 - flops / tiles) / saved - 1))
    assert float(np.median(errors)) <= 0.15  # each was within 13 %


# Of programs for an H200: cuDNN's calls, and a vector's product with a matrix, which XLA multiplies and sums.
CONVOLUTION = """HloModule jit_f, is_scheduled=true

ENTRY %main.1 (x: f32[4,16,16,8], k: f32[8,3,3,32]) -> f32[4,16,16,32] {
  %x = f32[4,16,16,8]{3,2,1,0} parameter(0)
  %k = f32[8,3,3,32]{3,2,1,0} parameter(1)
  %cudnn-conv.1 = (f32[4,16,16,32]{3,2,1,0}, u8[131]{0}) custom-call(%x, %k), LABELS, TARGET
  ROOT %gte = f32[4,16,16,32]{3,2,1,0} get-tuple-element(%cudnn-conv.1), index=0
}
"""
CONVOLUTION = CONVOLUTION.replace("LABELS", "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_i01o->b01f")
CONVOLUTION = CONVOLUTION.replace("TARGET", 'custom_call_target="__cudnn$convForward"')
BACKWARD = (
    CONVOLUTION.replace("convForward", "convBackwardInput")
    .replace("(f32[4,16,16,32]{3,2,1,0}, u8[131]{0})", "(f32[4,16,16,8]{3,2,1,0}, u8[131]{0})")
    .replace("%x = f32[4,16,16,8]", "%x = f32[4,16,16,32]")
)
FILTER = (
    CONVOLUTION.replace("convForward", "convBackwardFilter")
    .replace("(f32[4,16,16,32]{3,2,1,0}, u8[131]{0})", "(f32[8,3,3,32]{3,2,1,0}, u8[131]{0})")
    .replace("%k = f32[8,3,3,32]", "%k = f32[4,16,16,32]")
)
# Of 3 × 3 taps those that meet the input: 16 outputs with 3 taps, less one at each edge.
CONVOLUTION_FLOPS = 2 * 4 * (16 * 3 - 2) ** 2 * 8 * 32


@pytest.mark.parametrize("text", [CONVOLUTION, BACKWARD, FILTER], ids=["forward", "input", "filter"])
def test_convolutions_of_a_library(text: str):
    (found,) = [one for one in read_operations(text) if one.flops]
    assert found.flops == CONVOLUTION_FLOPS


@pytest.mark.parametrize(
    ("target", "mask", "products"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 4),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 2),
        ("__cudnn$fmhaSoftmaxBackward", "CAUSAL", 5),
    ],
)
def test_attention_of_a_library(target: str, mask: str, products: int):
    shape = '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["4", "16", "2048", "2048"]}'
    dots = '"bmm1_dot_dimension_numbers": {"lhs_contracting_dimensions": ["3"]}'
    text = f"""HloModule jit_f, is_scheduled=true

ENTRY %main.1 (q: bf16[4,2048,16,64]) -> bf16[4,16,2048,64] {{
  %q = bf16[4,2048,16,64]{{3,2,1,0}} parameter(0)
  %fwd.4 = (bf16[4,16,2048,64]{{3,1,2,0}}, u8[256]{{0}}) custom-call(%q, %q, %q), custom_call_target="{target}", CONFIG
  ROOT %gte = bf16[4,16,2048,64]{{3,1,2,0}} get-tuple-element(%fwd.4), index=0
}}
""".replace(
        "CONFIG",
        f'backend_config={{"cudnn_fmha_backend_config": {{{shape}, "mask_type": "{mask}", {dots}}}}}',
    )
    (found,) = [one for one in read_operations(text) if one.flops]
    assert found.flops == products * 4 * 16 * 2048 * 2048 * 64


SUMMED = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused (x: f32[128], w: f32[128,256]) -> f32[256] {
  %x = f32[128]{0} parameter(0)
  %w = f32[128,256]{1,0} parameter(1)
  %wide = f32[128,256]{1,0} broadcast(%x), dimensions={0}
  %each = f32[128,256]{1,0} multiply(%wide, %w)METADATA
  %zero = f32[] constant(0)
  ROOT %reduce = f32[256]{0} reduce(%each, %zero), dimensions={0}, to_apply=%addMETADATA
}

ENTRY %main.1 (x: f32[128], w: f32[128,256]) -> f32[256] {
  %x = f32[128]{0} parameter(0)
  %w = f32[128,256]{1,0} parameter(1)
  ROOT %input_reduce_fusion = f32[256]{0} fusion(%x, %w), kind=kInput, calls=%fusedMETADATA
}
""".replace("METADATA", ', metadata={op_name="jit(f)/dot_general"}')


def test_a_product_that_became_a_sum():
    (found,) = read_operations(SUMMED)
    assert (found.flops, found.products, found.dtype) == (2 * 128 * 256, 1, "f32")
    assert found.tiled_flops == found.flops


def test_sums_that_are_no_product():
    """A sum of its own, and the second part of a product that was cut along its contracted side."""
    assert read_operations(SUMMED.replace("dot_general", "reduce_sum"))[0].flops == 0
    assert read_operations(SUMMED.replace("multiply(%wide, %w)", "copy(%w)"))[0].flops == 0


FUSED = """HloModule m, is_scheduled=true

%inner (p: f32[8,16], q: f32[16,4]) -> f32[4] {
  %p = f32[8,16]{1,0} parameter(0)
  %q = f32[16,4]{1,0} parameter(1)
  %e = f32[8,16]{1,0} exponential(%p), metadata={op_name="a" stack_frame_id=3}
  %d = f32[8,4]{1,0} dot(%e, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={stack_frame_id=1}
  %t = f32[8,4]{0,1} transpose(%d), dimensions={1,0}, metadata={stack_frame_id=2}
  %z = f32[] constant(0)
  ROOT %r = f32[4]{0} reduce(%t, %z), dimensions={0}, to_apply=%sum, metadata={source_file="a.py" source_line=7}
}

%plain (p: f32[8,16]) -> f32[8,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %a = f32[8,16]{1,0} add(%p, %p), metadata={stack_frame_id=5}
  ROOT %s = f32[8,16]{1,0} rsqrt(%a), metadata={stack_frame_id=6}
}

ENTRY %main (x: f32[8,16], w: f32[16,4]) -> f32[4] {
  %x = f32[8,16]{1,0} parameter(0)
  %w = f32[16,4]{1,0} parameter(1)
  %norm = f32[8,16]{1,0} fusion(%x), kind=kLoop, calls=%plain
  ROOT %out = f32[4]{0} fusion(%norm, %w), kind=kOutput, calls=%inner
}
"""


def test_work_by_the_place_that_it_comes_from():
    """Of a fusion with a product its FLOPs, of another its elements: a root counts four, a function ten."""
    found = {one.name: one for one in read_operations(FUSED)}
    assert found["out"].elementwise == 10 * 8 * 16 + 8 * 4
    assert found["out"].parts == (("1", 2 * 8 * 16 * 4),)
    assert found["norm"].elementwise == (1 + 4) * 8 * 16
    assert found["norm"].parts == (("6", 4 * 8 * 16), ("5", 8 * 16))
    without = FUSED.replace("dot(%e, %q)", "slice(%e)")
    out = {one.name: one for one in read_operations(without)}["out"]
    assert out.parts == (("3", 10 * 8 * 16), ("a.py:7", 8 * 4))

"""Reading what the compiler reports of its buffers."""

from __future__ import annotations

import linecache

import pytest

from capibara.plan.compiler.buffers import (
    MOST_BUFFERS,
    buffers_of_message,
    padding_of,
    read_buffers,
    read_heap,
)

# The forms of libtpu 0.0.42's reports, cut down to one of each kind of line.
ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
allocation 1: size 4096, parameter 1, shape |f32[4,100]| at ShapeIndex {}, maybe-live-out:
 value: <1 param.1 @0> (size=4096,offset=0): f32[4,100]{1,0:T(4,128)}
allocation 2: size 8192, parameter 0, shape |f32[8,96,2]| at ShapeIndex {}, maybe-live-out:
allocation 3: size 2048, parameter 2, shape |s32[4,128]| at ShapeIndex {}:
allocation 4: size 512, maybe-live-out:
allocation 5: size 9000, preallocated-temp:
 value: <10 saved.1{2} @0> (size=4000,offset=0): bf16[2,1000]{1,0:T(8,128)(2,1)}
 value: <11 logits.1 @0> (size=5000,offset=4000): f32[1250]{0:T(1024)}
 value: <12 body.1{0} (phi) @0> (size=3000,offset=4000): f32[750]{0:T(1024)}
 value: <13 body.2{0} (phi) @0> (size=3000,offset=4000): f32[750]{0:T(1024)}
 value: <14 small.1 @0> (size=1000,offset=8000): f32[250]{0:T(1024)}
allocation 6: size 100000, color 3, preallocated-temp:
 value: <15 chip.1 @0> (size=100000,offset=0): f32[25000]{0:T(1024)S(3)}
"""
RANGES = """HloLiveRange (max 60):
  InstructionSequence:
    0:param.1
  BufferLiveRange:
    param.1{}:0-60
    saved.1{2}:5-50
    logits.1{}:6-20
    body.1{0}:22-40
    body.2{0}:21-45
    small.1{}:24-30
    chip.1{}:1-60
  Live ranges at 6 (peak):
    saved.1{2}: 4000 bytes (cumulative: 4000 bytes)
"""
PROGRAM = """HloModule jit_step, is_scheduled=true

FileNames
1 "/somewhere/step.py"
2 "<capibara.compose Model 907>"

FunctionNames
1 "step"
2 "blocks_block"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=2 end_column=2}
2 {file_name_id=2 function_name_id=2 line=3 end_line=3 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=1 parent_frame_id=3}


%body (x: f32[2]) -> f32[2] {
  %p = f32[2]{0} parameter(0), metadata={op_name="never"}
}

ENTRY %main (a: f32[8,96,2]) -> f32[] {
  %param.0 = f32[8,96,2]{2,1,0} parameter(0), metadata={op_name="state.params['blocks']['mlp']['weight']"}
  %param.1 = f32[4,100]{1,0} parameter(1), metadata={op_name="state.opt_state[1].mu['head']['weight']"}
  %param.2 = s32[4,128]{1,0} parameter(2), metadata={op_name="batch['tokens']"}
  %saved.1 = bf16[2,1000]{1,0} fusion(%param.0), metadata={op_name="jit(step)/jvp()/while" stack_frame_id=1}
  ROOT %logits.1 = f32[1250]{0} fusion(%saved.1), metadata={op_name="jit(step)/dot_general" stack_frame_id=3}
}
"""


@pytest.fixture
def dump(tmp_path):
    stem = tmp_path / "module_0000.jit_step.after_optimizations"
    stem.with_name(f"{stem.name}-buffer-assignment.txt").write_text(ASSIGNMENT)
    stem.with_name(f"{stem.name}-live-range.txt").write_text(RANGES)
    stem.with_name(f"{stem.name}.txt").write_text(PROGRAM)
    return tmp_path


def test_the_fullest_moment_is_found(dump):
    # 4000 + 5000 at instruction 6; later 4000 + 3000 (once, though two names have it) + 1000.
    temporaries = [b for b in read_buffers(dump) if b["kind"] == "temporary"]
    assert [(b["bytes"], b["shape"]) for b in temporaries] == [(5000, "f32[1250]"), (4000, "bf16[2,1000]")]


def test_names_shared_by_one_place_count_once(dump):
    path = next(dump.glob("*assignment.txt"))
    # The moment of instruction 24 is now the fullest: 4000 + 3000 + 3000, where the two bodies are one buffer.
    path.write_text(
        path.read_text()
        .replace("size=5000", "size=100")
        .replace("(size=1000,offset=8000)", "(size=3000,offset=8000)")
    )
    temporaries = [b for b in read_buffers(dump) if b["kind"] == "temporary"]
    assert [b["bytes"] for b in temporaries] == [4000, 3000, 3000]


def test_arguments_have_their_kind_their_padding_and_their_place(dump):
    found = {b["kind"]: b for b in read_buffers(dump)}
    assert found["parameters"]["bytes"] == 8192
    assert found["parameters"]["padding"] == 8192 - 8 * 96 * 2 * 4
    assert found["parameters"]["place"] == "blocks/mlp/weight"
    assert found["optimizer"]["place"] == "head/weight"
    assert found["batch"]["padding"] == 0
    assert found["output"]["bytes"] == 512


def test_what_lies_on_the_chip_is_not_memory(dump):
    assert all(b["bytes"] < 100000 for b in read_buffers(dump))
    assert read_heap(dump) == 9000


def test_operations_are_named_by_the_line_of_the_model(dump):
    source = ["def blocks_block(x):\n", "    a = 1\n", "    mlp_up_product = ops.dense(x, a)\n"]
    linecache.cache["<capibara.compose Model 907>"] = (1, None, source, "<capibara.compose Model 907>")
    try:
        logits = next(b for b in read_buffers(dump) if b["shape"] == "f32[1250]")
    finally:
        del linecache.cache["<capibara.compose Model 907>"]
    assert logits["place"] == "blocks/mlp_up_product"
    assert logits["op_name"] == "jit(step)/dot_general"


def test_a_folder_without_a_report_has_no_buffers(tmp_path):
    assert read_buffers(tmp_path) == ()
    assert read_buffers(tmp_path / "missing") == ()
    assert read_heap(tmp_path) is None


def test_a_report_without_its_neighbours_is_read_as_far_as_it_goes(dump):
    next(dump.glob("*live-range.txt")).unlink()
    next(dump.glob("*optimizations.txt")).unlink()
    found = read_buffers(dump)
    assert max(b["bytes"] for b in found if b["kind"] == "temporary") == 5000
    assert {b["kind"] for b in found} == {"arguments", "output", "temporary"}


def test_garbage_is_no_error_and_the_list_is_bounded(tmp_path):
    report = tmp_path / "m.after_optimizations-buffer-assignment.txt"
    report.write_bytes(b"\xff\xfeallocation x\nallocation 3: size\n" + b"a" * 3_000_000 + b"\n")
    assert read_buffers(tmp_path) == ()
    report.write_text(
        "".join(f"allocation {i}: size {512 + i}, parameter {i}, shape |f32[2]| at\n" for i in range(500))
    )
    found = read_buffers(tmp_path)
    assert len(found) == MOST_BUFFERS
    assert found[0]["bytes"] == 512 + 499


@pytest.mark.parametrize(
    ("size", "shape", "padding"),
    [(4096, "f32[4,100]", 2496), (2048, "bf16[8,128]", 0), (512, "pred[100]", 412), (512, "u32[]", 508)],
)
def test_padding_is_what_the_array_itself_does_not_take(size, shape, padding):
    assert padding_of(size, shape) == padding


def test_padding_of_a_tuple_is_not_known():
    assert padding_of(512, "(f32[2], f32[2])") == 0


MESSAGE = """RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 21.98G of 15.48G hbm. Exceeded by 6.50G.

Largest program allocations in hbm:

  1. Size: 4.00G
     Operator: op_name="jit(step)/transpose(jvp())/dot_general"
     Shape: f32[8,2048,65536]{2,1,0:T(8,128)}
     Unpadded size: 4.00G
     XLA label: fusion.3 = fusion(...), kind=kOutput
     Allocation type: HLO temp
     ==========================

  2. Size: 512.00M
     Operator: op_name="state.params['head']['weight']"
     Shape: f32[1000,64]{1,0:T(8,128)}
     Unpadded size: 256.00M
     Extra memory due to padding: 256.00M (2.0x expansion)
     XLA label: param.3
     Allocation type: argument
"""


def test_a_refusal_that_lists_its_allocations_is_read():
    first, second = buffers_of_message(MESSAGE)
    assert first == {
        "bytes": 4 << 30,
        "shape": "f32[8,2048,65536]",
        "op_name": "jit(step)/transpose(jvp())/dot_general",
        "kind": "temporary",
        "padding": 0,
        "place": "",
    }
    assert (second["kind"], second["bytes"], second["padding"]) == ("parameters", 512 << 20, 256 << 20)
    assert buffers_of_message("no list here") == ()

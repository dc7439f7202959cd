"""Traces of GPUs: runs, operations with several kernels, and CUDA graphs. The kernels are those of an H200."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from jax.profiler import ProfileData

from capibara.jax_versions import loaded_programs
from capibara.observe.errors import ProfileError
from capibara.observe.profile.gpu import align_kernels
from capibara.observe.profile.modules import module_digest, module_name, module_number, traced_modules
from capibara.observe.profile.protobuf import protobuf_fields
from capibara.observe.profile.trace import read_trace

# A step of training of a decoder with 6 layers: its program's operations in their order, and the kernels of each CUDA
# graph that one run started, as recorded.
STEP = json.loads((Path(__file__).parent / "h200_training_step.json").read_text())


def names_of(kernels: list[str], schedule: list[tuple[str, str]]) -> tuple[list[str], list[bool]]:
    places, first = align_kernels(kernels, schedule)
    return [schedule[place][0] if place >= 0 else "" for place in places], first


def test_each_operation_of_a_recorded_step_is_found_as_often_as_it_ran():
    found: Counter[str] = Counter()
    for graph in STEP["graphs"]:
        schedule = [
            (name, kind) for name, kind, trips in STEP["schedule"] if trips in (None, graph["starts"])
        ]
        names, first = names_of(graph["kernels"], schedule)
        assert "" not in names
        for name, begins in zip(names, first, strict=True):
            found[name] += begins * graph["starts"]
    trips = {name: often for name, _, often in STEP["schedule"] if often}
    # Loops' counters and slices that XLA needs no kernel for are not among them.
    missing = {name for name in trips if not found[name]}
    assert all("slice" in name or "copy" in name or "bitcast" in name for name in missing), missing
    assert {name: often for name, often in found.items() if often != trips.get(name, often)} == {}


def test_products_of_a_library_are_found_by_their_order():
    names, first = names_of(
        [
            "loop_add_fusion",
            "Memset 0",
            "nvjet_a",
            "void splitK_reduce",
            "memcpy128",
            "nvjet_b",
            "loop_add_fusion_1",
        ],
        [
            ("loop_add_fusion", "compute"),
            ("custom-call.4", "kernel"),
            ("copy.2", "copy"),
            ("custom-call.9", "kernel"),
            ("loop_add_fusion.1", "compute"),
        ],
    )
    assert names == [
        "loop_add_fusion",
        "custom-call.4",  # the counter that it needs in memory
        "custom-call.4",
        "custom-call.4",
        "copy.2",
        "custom-call.9",
        "loop_add_fusion.1",
    ]
    assert first == [True, True, False, False, True, True, True]


def test_a_kernel_that_stands_for_others_with_the_same_code():
    schedule = [(f"wrapped_sine.{number}", "compute") for number in range(1, 4)]
    assert names_of(["wrapped_sine_1"] * 3, schedule)[0] == [name for name, _ in schedule]


def test_exchanges_between_devices():
    schedule = [
        ("all-gather-start.1", "collective"),
        ("custom-call.4", "kernel"),
        ("all-reduce-start", "collective"),
    ]
    kernels = ["ncclDevKernel_AllGather_RING_LL", "nvjet_a", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"]
    assert names_of(kernels, schedule) == ([name for name, _ in schedule], [True] * 3)


def test_kernels_of_nothing_in_the_program():
    assert align_kernels(["ncclDevKernel"], [("loop_add_fusion", "compute")]) == ([-1], [True])
    assert align_kernels([], []) == ([], [])


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_what_is_in_order_is_found(data: st.DataObject):
    """Operations of which some are in the graph, each with the kernels that it has."""
    kinds = data.draw(st.lists(st.sampled_from(["fusion", "product", "copy"]), min_size=1, max_size=12))
    schedule, kernels, expected = [], [], []
    for number, kind in enumerate(kinds):
        name = {"fusion": "loop_fusion", "product": "custom-call", "copy": "copy"}[kind] + f".{number}"
        schedule.append((name, {"fusion": "compute", "product": "kernel", "copy": "copy"}[kind]))
        if kind == "fusion" and not data.draw(st.booleans()):
            continue  # in another graph
        mine = {"fusion": [f"loop_fusion_{number}"], "product": ["Memset 0", "nvjet"], "copy": ["memcpy32"]}[
            kind
        ]
        kernels += mine
        expected += [name] * len(mine)
    assert names_of(kernels, schedule)[0] == expected


def event(start: int, length: int, scope: int, op: str, kernel: int, program: int = 5) -> str:
    return (
        f"events {{ metadata_id: {kernel} offset_ps: {start}000 duration_ps: {length}000\n"
        f'  stats {{ metadata_id: 1 str_value: "{op}" }} stats {{ metadata_id: 2 int64_value: {program} }}\n'
        f"  stats {{ metadata_id: 3 uint64_value: {scope} }} }}\n"
    )


def space(events: str, scopes: dict[int, int]) -> bytes:
    kernels = ["nvjet", "Memset 0", "loop_add_fusion_2", "loop_add_fusion", "MemcpyH2D"]
    text = 'planes { name: "/host:__ScopeRangeCallStack__"\n'
    text += "".join(
        f"stats {{ metadata_id: {one} uint64_value: {outer} }}\n" for one, outer in scopes.items()
    )
    text += '}\nplanes { name: "/device:GPU:0"\n'
    for number, name in enumerate(("hlo_op", "program_id", "scope_range_id"), 1):
        text += f'stat_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }}\n'
    for number, name in enumerate(kernels, 1):
        text += f'event_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }}\n'
    text += f'lines {{ name: "Stream #14(Compute)" timestamp_ns: 0\n{events} }} }}\n'
    return ProfileData.text_proto_to_serialized_xspace(text)


OPERATIONS = {5: {"dot.3": "kernel", "loop_add_fusion": "compute", "loop_add_fusion.2": "compute"}}


@pytest.mark.usefixtures("reader")
def test_runs_operations_and_graphs(tmp_path: Path):
    """Two runs (scopes 100 and 200) of a product with a counter, and of a graph with two additions."""
    events = ""
    for run in (100, 200):
        at = run * 10
        events += event(at, 1, run + 1, "dot.3", 2) + event(at + 5, 60, run + 1, "dot.3", 1)
        events += event(at + 70, 10, run + 2, "command_buffer_7", 4) + event(
            at + 80, 10, run + 2, "command_buffer_7", 3
        )
    # A copy from the host belongs to no program.
    events += "events { metadata_id: 5 offset_ps: 3000000 duration_ps: 1000 }\n"
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(space(events, {101: 100, 102: 100, 201: 200, 202: 200}))
    trace = read_trace(path, OPERATIONS, trips={5: dict.fromkeys(OPERATIONS[5], 1)})
    assert trace.runs == {5: 2}
    assert trace.counts == {
        (5, "dot.3"): (2, 122.0),
        (5, "loop_add_fusion"): (2, 20.0),
        (5, "loop_add_fusion.2"): (2, 20.0),
    }
    assert trace.in_graphs == {5}
    assert not trace.unnamed
    assert not trace.unclear
    assert trace.busy_ns == 2 * 81
    # From the first to the last of a run: 4 before the product's kernel and 5 before the graph.
    assert trace.within_ns == 2 * 9
    assert trace.events == 8


@pytest.mark.usefixtures("reader")
def test_a_loop_within_a_run(tmp_path: Path):
    """A graph that is started in each of three turns of a loop, which has a scope of its own."""
    events = "".join(event(20 * turn, 10, 20 + turn, "command_buffer_7", 3) for turn in range(3))
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(space(events, {20: 11, 21: 11, 22: 11, 11: 10}))
    operations = {5: {"loop_add_fusion": "compute", "loop_add_fusion.2": "compute"}}
    trace = read_trace(path, operations, trips={5: {"loop_add_fusion": 1, "loop_add_fusion.2": 3}})
    assert trace.runs == {5: 1}
    assert trace.counts == {(5, "loop_add_fusion.2"): (3, 30.0)}


@pytest.mark.usefixtures("reader")
def test_a_copy_ends_before_what_comes_after_it(tmp_path: Path):
    """Its end was recorded when the host, which was in a callback, went on."""
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(space(event(0, 4000, 11, "copy.9", 5) + event(20, 10, 12, "dot.3", 1), {11: 10, 12: 10}))
    trace = read_trace(path, {5: {"copy.9": "copy", "dot.3": "kernel"}})
    assert trace.counts == {(5, "copy.9"): (1, 20.0), (5, "dot.3"): (1, 10.0)}
    assert trace.busy_ns == 30


@pytest.mark.usefixtures("reader")
def test_kernels_without_an_operation_keep_their_time(tmp_path: Path):
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(space(event(0, 10, 11, "command_buffer_7", 1), {11: 10}))
    trace = read_trace(path, {5: {"loop_add_fusion": "compute"}})
    assert trace.counts == {}
    assert trace.unnamed == {(5, "nvjet"): (1, 10.0)}
    assert trace.busy_ns == 10


@pytest.mark.usefixtures("reader")
def test_a_trace_that_does_not_say_the_runs(tmp_path: Path):
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(space(event(0, 10, 0, "dot.3", 1) + event(20, 10, 0, "dot.3", 1), {}))
    trace = read_trace(path, OPERATIONS)
    assert trace.unclear == {5}
    assert trace.counts == {(5, "dot.3"): (2, 20.0)}


def programs_of(*functions: Any) -> list[bytes]:
    """The serialized modules that JAX holds for some functions."""
    known = {id(one) for one in loaded_programs()}
    for function in functions:
        jax.block_until_ready(function())
    return [
        module.as_serialized_hlo_module_proto()
        for program in loaded_programs()
        if id(program) not in known
        for module in program.hlo_modules()
        if module.name == "jit_a_program"
    ]


def test_a_program_is_found_by_what_it_consists_of(tmp_path: Path):
    x, y = np.ones((8, 8), np.float32), np.ones((8, 8), np.int32)

    def a_program(x):
        return jnp.tanh(x * 2) + 1

    first, second = jax.jit(a_program), jax.jit(a_program)
    protos = programs_of(lambda: first(x), lambda: second(y))
    assert len(protos) == 2
    assert len({module_digest(proto) for proto in protos}) == 2
    # The plugin's copy has another number, which is field 5; the last one counts where there are two.
    renumbered = protos[0] + b"\x28\xac\x82\x01"
    assert module_digest(renumbered) == module_digest(protos[0])
    held = bytes([0x0A]) + _length(len(renumbered)) + renumbered  # HloProto.hlo_module
    octal = "".join(f"\\{byte:03o}" for byte in held)
    text = (
        'planes { name: "/host:metadata" event_metadata { key: 1 value { id: 1 name: "jit_a_program(16684)" '
        f'stats {{ metadata_id: 9 bytes_value: "{octal}" }} }} }} }}'
    )
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    (found,) = traced_modules(path).items()
    assert found[0] == 16684
    assert module_name(found[1]) == "jit_a_program"
    assert module_digest(found[1]) == module_digest(protos[0])
    path.write_bytes(b"")
    assert traced_modules(path) == {}


def _length(value: int) -> bytes:
    out = b""
    while value >= 128:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


@given(st.binary(max_size=60))
def test_messages_that_are_none(data: bytes):
    for read in (module_digest, module_number, module_name, lambda data: list(protobuf_fields(data))):
        try:
            read(data)
        except ProfileError as error:
            assert "a message" in str(error) or "a shape" in str(error)  # noqa: PT017

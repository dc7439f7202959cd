"""Whole programs: collectives, what is in flight beside what, kernels, bytes, facts as JSON, texts that are none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.plan import PlanError
from capibara.plan.program import ProgramFacts, mesh_axes_of, read_program
from capibara.plan.slices import parse_slice

HLO = Path(__file__).parent / "hlo"
TEXTS = sorted(path.name for path in HLO.glob("*.txt"))


def facts_of(name: str) -> ProgramFacts:
    return read_program((HLO / name).read_text())


def program(lines: str, before: str = "", options: str = ", is_scheduled=true, num_partitions=8") -> str:
    return f"HloModule test{options}\n\n{before}\nENTRY %main {{\n{lines}\n}}\n"


def test_asynchronous_gathers_of_a_scanned_layer() -> None:
    """Three layers of two weights of 1024 × 4096 bfloat16, each gathered over 8 devices beside work."""
    facts = facts_of("v4_async_gather.txt")
    assert facts.num_devices == 8
    assert facts.flops == 3 * 2 * 2 * 4096 * 1024 * 4096 // 8
    assert facts.unknown == ()
    assert [(c.kind, c.bytes, c.group_size, c.trips) for c in facts.collectives] == [
        ("all-gather", 1024 * 4096 * 2, 8, 3)
    ] * 2
    assert all(c.asynchronous for c in facts.collectives)
    # What is scheduled between start and end: counted here from the schedule, once more.
    (loop,) = [event for event in facts.schedule if event[0] == "loop"]
    assert loop[1] == 3
    for index, collective in enumerate(facts.collectives):
        events = list(loop[2])
        between = events[events.index(("start", index)) : events.index(("done", index))]
        cycles = sum(facts.pieces[at].cycles or 0 for kind, at in between if kind == "piece")
        assert collective.cycles_hidden == cycles
    assert max(c.cycles_hidden for c in facts.collectives) > 0


def test_collectives_that_the_compiler_fused_with_work_count_once() -> None:
    """One layer's forward pass on v5e: five gathers in one piece, two spread over several fusions."""
    facts = facts_of("v5e_async_fusions.txt")
    gathers = [c for c in facts.collectives if c.kind == "all-gather"]
    assert len(gathers) == len(facts.collectives) == 7
    assert sum(c.asynchronous for c in gathers) == 2
    # q, k, v, o of 512 × 512 and three weights of 512 × 2048, in bfloat16
    assert sum(c.bytes for c in gathers) == (4 * 512 * 512 + 3 * 512 * 2048) * 2
    assert all(c.cycles_hidden > 0 for c in gathers if c.asynchronous)
    tokens, layer = 16 * 256, 4 * 512 * 512 + 3 * 512 * 2048
    assert facts.flops * 8 == 2 * tokens * layer + 2 * 2 * tokens * 256 * 512


def test_exchanges_that_run_on_cores_of_their_own() -> None:
    """TPU7x gathers on its sparse cores, called beside the work: two weights of 1024 × 4096, three layers."""
    facts = facts_of("v7x_async_calls.txt")
    assert facts.unknown == ()
    assert not facts.kernels
    assert [(c.kind, c.bytes, c.trips, c.asynchronous) for c in facts.collectives] == [
        ("all-gather", 1024 * 4096 * 2, 3, True)
    ] * 2
    assert facts.flops == 3 * 2 * 2 * 4096 * 1024 * 4096 // 8


def test_an_all_reduce_of_which_each_keeps_a_part_is_a_reduce_scatter() -> None:
    text = program(
        "  %a = f32[64,128]{1,0} parameter(0)\n"
        "  ROOT %f = f32[8,128]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1",
        before="""%add {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}

%all-reduce-scatter.1 {
  %p = f32[64,128]{1,0} parameter(0)
  %r = f32[64,128]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %i = u32[] partition-id()
  %z = u32[] constant(0)
  ROOT %d = f32[8,128]{1,0} dynamic-slice(%r, %i, %z), dynamic_slice_sizes={8,128}
}
""",
    )
    (collective,) = read_program(text).collectives
    assert (collective.kind, collective.bytes, collective.group_size) == ("reduce-scatter", 64 * 128 * 4, 4)
    assert mesh_axes_of(collective.groups, (("data", 2), ("model", 4))) == ("model",)


@pytest.mark.parametrize(
    ("operation", "kind", "size", "moved"),
    [
        (
            "f32[64,16]{1,0} all-gather(%a), replica_groups=[2,4]<=[8], dimensions={0}",
            "all-gather",
            4,
            64 * 16 * 4,
        ),
        ("f32[16,16]{1,0} all-reduce(%a), replica_groups={}, to_apply=%add", "all-reduce", 8, 16 * 16 * 4),
        (
            "f32[4,16]{1,0} reduce-scatter(%a), replica_groups=[2,4]<=[8], dimensions={0}",
            "reduce-scatter",
            4,
            1024,
        ),
        (
            "f32[16,16]{1,0} all-to-all(%a), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}",
            "all-to-all",
            2,
            1024,
        ),
        (
            "f32[16,16]{1,0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            2,
            1024,
        ),
    ],
)
def test_each_kind_of_collective(operation: str, kind: str, size: int, moved: int) -> None:
    text = program(f"  %a = f32[16,16]{{1,0}} parameter(0)\n  ROOT %c = {operation}")
    (collective,) = read_program(text).collectives
    assert (collective.kind, collective.group_size, collective.bytes) == (kind, size, moved)
    assert not collective.asynchronous


def test_generic_asynchronous_operations_wrap_collectives() -> None:
    text = program(
        """  %a = f32[16,16]{1,0} parameter(0)
  %s = ((f32[16,16]{1,0}), f32[4,16]{1,0}) async-start(%a), calls=%wrapped
  %w = f32[16,16]{1,0} fusion(%a), kind=kLoop, calls=%work, backend_config={"window_config":{"estimated_cycles":"70"}}
  %d = f32[4,16]{1,0} async-done(%s)
  ROOT %t = (f32[4,16]{1,0}, f32[16,16]{1,0}) tuple(%d, %w)""",
        before="""%wrapped {
  %p = f32[16,16]{1,0} parameter(0)
  ROOT %r = f32[4,16]{1,0} reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}
}

%work {
  %p = f32[16,16]{1,0} parameter(0)
  ROOT %n = f32[16,16]{1,0} negate(%p)
}
""",
    )
    facts = read_program(text)
    (collective,) = facts.collectives
    assert collective.kind == "reduce-scatter"
    assert collective.asynchronous
    assert collective.cycles_hidden == 70
    assert facts.cycles == 70
    assert facts.schedule == (("start", 0), ("piece", 0), ("done", 0))


def test_the_largest_integer_is_no_number_of_cycles() -> None:
    """What the compiler writes of a scatter that it has no model of."""
    said = '{"window_config":{"estimated_cycles":"9223372036854775807","cost_model_type":"COST_MODEL_TYPE_INVALID"}}'
    text = program(
        f"""  %a = f32[16,16]{{1,0}} parameter(0)
  ROOT %w = f32[16,16]{{1,0}} fusion(%a), kind=kCustom, calls=%work, backend_config={said}""",
        before="""%work {
  %p = f32[16,16]{1,0} parameter(0)
  ROOT %n = f32[16,16]{1,0} negate(%p)
}
""",
    )
    facts = read_program(text)
    assert facts.cycles == 0
    assert facts.hbm_bytes == 2 * 16 * 16 * 4


def test_kernels_count_by_their_own_statement() -> None:
    """Causal attention, 8 heads of 1024 × 128 in blocks of 512: three of four pairs of blocks are worked on."""
    facts = facts_of("v4_flash_attention.txt")
    scores = 8 * 3 * 512 * 512
    assert sorted(kernel.flops or 0 for kernel in facts.kernels) == [
        2 * scores * 2 * 128,
        2 * scores * 3 * 128,
        2 * scores * 4 * 128,
    ]
    assert all(kernel.bytes > 0 and kernel.trips == 1 for kernel in facts.kernels)
    assert facts.flops == 2 * scores * 9 * 128
    assert facts.unknown == ()


def test_a_kernel_that_states_nothing_is_named() -> None:
    text = program(
        "  %a = f32[16,128]{1,0:T(8,128)} parameter(0)\n"
        '  ROOT %k = f32[16,128]{1,0:T(8,128)} custom-call(%a), custom_call_target="tpu_custom_call"'
    )
    facts = read_program(text)
    (kernel,) = facts.kernels
    assert kernel.flops is None
    assert kernel.bytes == 2 * 16 * 128 * 4
    assert any("the kernel k (tpu_custom_call) states no operations" in words for words in facts.unknown)


def test_bytes_are_those_of_main_memory_and_of_slices() -> None:
    """A layer cut out of a stack, a result kept on the chip, an update in place."""
    text = program(
        """  %stack = f32[10,64,128]{2,1,0:T(8,128)} parameter(0)
  %i = s32[] parameter(1)
  %near = f32[64,128]{1,0:T(8,128)S(1)} fusion(%stack, %i), kind=kLoop, calls=%cut
  ROOT %new = f32[10,64,128]{2,1,0:T(8,128)} fusion(%stack, %near, %i), kind=kLoop, calls=%put""",
        before="""%cut {
  %p = f32[10,64,128]{2,1,0:T(8,128)} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %s = f32[1,64,128]{2,1,0:T(8,128)} dynamic-slice(%p, %i, %z, %z), dynamic_slice_sizes={1,64,128}
  ROOT %b = f32[64,128]{1,0:T(8,128)S(1)} bitcast(%s)
}

%put {
  %p = f32[10,64,128]{2,1,0:T(8,128)} parameter(0)
  %u = f32[64,128]{1,0:T(8,128)S(1)} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  %b = f32[1,64,128]{2,1,0:T(8,128)} bitcast(%u)
  ROOT %d = f32[10,64,128]{2,1,0:T(8,128)} dynamic-update-slice(%p, %b, %i, %z, %z)
}
""",
    )
    cut, put = read_program(text).pieces
    layer = 64 * 128 * 4
    index = 4  # the scalar i
    assert cut.hbm_bytes == layer + index
    assert put.hbm_bytes == layer + index


def test_copies_between_memories_go_on_beside_work() -> None:
    text = program(
        """  %a = f32[64,128]{1,0:T(8,128)} parameter(0)
  %s = (f32[64,128]{1,0:T(8,128)S(1)}, f32[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %h = (f32[64,128]{1,0:T(8,128)S(5)}, f32[64,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %d = f32[64,128]{1,0:T(8,128)S(1)} copy-done(%s)
  %e = f32[64,128]{1,0:T(8,128)S(5)} copy-done(%h)
  ROOT %t = (f32[64,128]{1,0:T(8,128)S(1)}, f32[64,128]{1,0:T(8,128)S(5)}) tuple(%d, %e)"""
    )
    facts = read_program(text)
    assert facts.schedule == (("copy", 0), ("copy", 1), ("copied", 0), ("copied", 1))
    assert [(piece.hbm_bytes, piece.host_bytes) for piece in facts.pieces] == [(32768, 0), (32768, 32768)]
    assert all(piece.asynchronous for piece in facts.pieces)


@pytest.mark.parametrize("name", TEXTS)
def test_facts_survive_json(name: str) -> None:
    facts = facts_of(name)
    assert ProgramFacts.from_json(facts.to_json()) == facts


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"format":1}', '{"format":99}', "null", "x" * 100, "[" * 100_000]
)
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="program facts"):
        ProgramFacts.from_json(text)


@pytest.mark.parametrize("name", [name for name in TEXTS if name.startswith("v")])
def test_no_piece_is_faster_by_the_compilers_cycles_than_the_chip(name: str) -> None:
    """The clocks that peaks give, against the compiler: no product of matrices beats the peak."""
    clock = parse_slice({"v4": "v4:2x2x2", "v5e": "v5e:2x4", "v7x": "v7x:2x2x1"}[name.partition("_")[0]])
    for piece in facts_of(name).pieces:
        if piece.cycles and piece.flops:
            assert piece.flops / (piece.cycles / clock.clock_hz) < 1.001 * clock.chip.peak("bfloat16")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "begin with 'HloModule'"),
        ("module @jit_f { func.func public @main() }", "begin with 'HloModule'"),
        ("HloModule x\n\n%a {\n  %p = f32[] parameter(0)\n", "broken off within the computation 'a'"),
        ("HloModule x\n\n%a {\n  ROOT %p = f32[] parameter(0)\n}\n", "no ENTRY"),
        ("HloModule x\n\nENTRY %a {\n}\n", "no ENTRY"),
        ("HloModule x\n\n%a {\n}\n%a {\n}\n", "stands twice"),
        ("HloModule x\n\n{\n}\n", "opens no computation"),
    ],
)
def test_texts_that_are_no_programs_are_refused(text: str, what: str) -> None:
    with pytest.raises(PlanError, match=what):
        read_program(text)


def test_replica_groups_beyond_reason_are_refused() -> None:
    """Each line names as many devices as there may be, in a new way."""
    lines = "\n".join(
        f"  %c{n} = f32[16]{{0}} all-reduce(%a), "
        f"replica_groups=[{2**n},{2 ** (16 - n)}]<=[{2**m},{2 ** (16 - m)}]T(1,0)"
        for n in range(16)
        for m in range(16)
    )
    with pytest.raises(PlanError, match="replica groups name more than"):
        read_program(program(f"  %a = f32[16]{{0}} parameter(0)\n{lines}"))


def test_something_else_than_text_is_refused() -> None:
    with pytest.raises(PlanError, match="must be the string"):
        read_program(b"HloModule")  # pyright: ignore[reportArgumentType]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(TEXTS), st.data())
def test_broken_texts_give_facts_or_a_plan_error(name: str, data: st.DataObject) -> None:
    """Lines lost, doubled and cut, characters replaced: an answer or a PlanError, nothing else."""
    lines = (HLO / name).read_text().split("\n")
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(lines) - 1))
        match data.draw(st.integers(0, 4)):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, lines[data.draw(st.integers(0, len(lines) - 1))])
            case 2:
                lines[at] = lines[at][: data.draw(st.integers(0, max(0, len(lines[at]))))]
            case 3:
                old = data.draw(st.sampled_from(["(", ")", "{", "}", "[", "]", "=", ",", "%", "1", '"', ":"]))
                lines[at] = lines[at].replace(
                    old, data.draw(st.sampled_from(["", "(", "}", "9", '"', "%x"])), 1
                )
            case _:
                lines[at] = "  ROOT " + lines[at].strip()
        if not lines:
            return
    text = "\n".join(lines)
    try:
        facts = read_program(text)
    except PlanError:
        return
    assert ProgramFacts.from_json(facts.to_json()) == facts


def test_facts_can_be_changed_as_data() -> None:
    facts = facts_of("v4_async_gather.txt")
    assert replace(facts, name="other").pieces == facts.pieces

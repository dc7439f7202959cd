"""Layouts with stages, divided positions and divided experts: which there are, their figures, and the compiler's."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

import pytest
from tpu_compiler import needs_libtpu

from capibara.config import ModularModelConfig
from capibara.plan import PlanError, estimate_memory, parse_slice, plan
from capibara.plan.compiler import ProgramCache, compile_program
from capibara.plan.memory.arguments import step_arguments
from capibara.plan.own import why_not
from capibara.plan.program import read_program
from capibara.plan.program.facts import ProgramFacts
from capibara.plan.search.analytic import Estimate, estimate_time
from capibara.plan.search.space import layouts
from capibara.plan.stages import stage_of
from capibara.plan.time import predict_step
from capibara.plan.work import TrainWork
from capibara.sharding import Layout


def config(*settings: str) -> ModularModelConfig:
    return ModularModelConfig.from_toml(
        "demo",
        ["model.num_layers=4", "model.embed_dim=256", "model.num_heads=4", "model.num_kv_heads=4",
         "model.vocab_size=2048", "model.scan_layers=scan", "model.max_sequence_length=65536", "train.batch_size=8",
         "train.sequence_length=512", *settings],
    )  # fmt: skip


def of(axis: str, found: list[Layout]) -> list[Layout]:
    return [layout for layout in found if axis in layout.axis_sizes]


EXPERTS = ("model.experts.count=4", "model.experts.per_token=2")


@pytest.mark.parametrize("topology", ["v5e:2x2", "v4-32", "v5e:4x8"])
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("train.sequence_length=8192",),
        ("train.sequence_length=3072", "train.batch_size=12", "model.num_layers=6"),
        EXPERTS,
        ("model.pattern=local,attention", "model.window=64"),
        ("finetune.method=lora", "finetune.rank=4"),
    ],
)
def test_every_layout_can_be_trained(topology, settings):
    """By the trainer's own checks, which know nothing of the search."""
    task, target = TrainWork(config(*settings)), parse_slice(topology)
    found = list(layouts(task.config, target))
    assert len(set(found)) == len(found)
    for layout in found:
        assert why_not(task, layout, target) == ""
        rough = task.rough(layout, target)
        assert rough.seconds > 0
        assert rough.hbm_bytes > 0
        assert min(rough.compute, rough.traffic, rough.communication) >= 0


def test_which_axes_there_are():
    target = parse_slice("v5e:4x4")
    short = list(layouts(config(), target))
    assert not of("context", short)  # 512 positions are few as they are
    assert {layout.stages for layout in of("pipeline", short)} == {2, 4}
    long = list(layouts(config("train.sequence_length=4096"), target))
    assert {layout.axis_sizes["context"] for layout in of("context", long)} == {2, 4, 8}
    for layout in of("context", long):  # one row at a time on each device
        assert layout.microbatches * layout.axis_sizes["data"] == 8
    # Stages have microbatches enough, where the batch has: of eight rows on four devices each there are two.
    assert {layout.microbatches for layout in of("pipeline", short) if layout.stages == 4} == {2, 4, 8}
    assert not of("pipeline", list(layouts(config("model.num_layers=5"), target)))
    assert {k.stages for k in of("pipeline", list(layouts(config("model.num_layers=6"), target)))} == {2}
    # Adapters have stages as their layers have, and scans of a state-space layer need all positions.
    adapted = config("finetune.method=lora", "finetune.rank=4")
    assert of("pipeline", list(layouts(adapted, target))) == of("pipeline", short)
    hybrid = config("model.pattern=attention,ssm", "train.sequence_length=4096")
    assert not of("context", list(layouts(hybrid, target)))
    assert {k.axis_sizes["expert"] for k in of("expert", list(layouts(config(*EXPERTS), target)))} == {2, 4}


def test_a_plan_without_the_compiler_takes_a_second_or_two():
    large = ModularModelConfig.from_toml(
        "production/tpu_v4",
        ["train.batch_size=1024", "train.sequence_length=8192", "model.max_sequence_length=8192"],
    )
    assert len(list(layouts(large, parse_slice("v5e-64")))) < 2000
    plan(large, "v5e-64", compile=False)
    began = time.process_time()  # not of the other processes of a busy machine
    plan(large, "v5e-64", compile=False)
    assert time.process_time() - began < 5


def test_a_stage_holds_its_blocks_and_all_else_whole():
    """By the rules that divide the arrays of the trainer: ``layers`` lie along ``pipeline``."""
    settings = config("model.vocab_size=4096")
    for mesh in ((("pipeline", 4), ("data", 1), ("model", 1)), (("pipeline", 2), ("data", 2), ("model", 1))):
        layout = Layout(mesh=mesh, microbatches=4)
        whole = step_arguments(settings, layout)
        one, inner = stage_of(settings, layout)
        stage = step_arguments(one, inner)
        assert one.model.num_layers * layout.stages == settings.model.num_layers
        assert sum(b.bytes for b in whole) == sum(b.bytes for b in stage)
        found = estimate_memory(settings, layout, parse_slice("v5e:2x2"))
        assert found.parameters == sum(b.bytes for b in whole if b.kind == "parameters")
        assert found.inputs == sum(b.bytes for b in whole if b.kind == "inputs")
    with pytest.raises(PlanError, match="equal stages"):
        estimate_memory(config("model.num_layers=5"), Layout(mesh=(("pipeline", 4),)), parse_slice("v5e:2x2"))


def test_a_stage_keeps_the_inputs_of_a_few_microbatches():
    target = parse_slice("v5e:2x2")
    mesh = (("pipeline", 4), ("data", 1), ("model", 1))
    row = 512 * 256 * 4  # positions × width, float32

    def activations(rows: int) -> int:
        one_row = Layout(mesh=mesh, microbatches=rows)
        return estimate_memory(config(f"train.batch_size={rows}"), one_row, target).activations

    assert activations(8) == activations(64)
    assert activations(64) - activations(2) == (7 - 3) * row


def test_the_bubble_and_what_goes_from_stage_to_stage_cost_time():
    target = parse_slice("v5e:2x2")
    settings = config("train.batch_size=64")
    mesh = (("pipeline", 4), ("data", 1), ("model", 1))
    found = [estimate_time(settings, Layout(mesh=mesh, microbatches=m), target) for m in (4, 8, 16)]
    ticks = [(m + 3) / m for m in (4, 8, 16)]
    assert found[0].compute / ticks[0] == pytest.approx(found[2].compute / ticks[2])
    assert [each.compute for each in found] == sorted((each.compute for each in found), reverse=True)
    # 64 × 512 positions, 256 values each, of two bytes, there and back, in so many ticks.
    sent = 64 * 512 * 256 * 2 * 2 * ticks[1] / target.link_bandwidth
    assert found[1].communication > sent
    # Beside the whole model on every device, a stage has a fourth of the blocks' optimizer state.
    whole = estimate_time(settings, Layout(mesh=(("data", 4),), parameters="replicated"), target)
    assert found[2].compute > whole.compute


def test_a_stage_of_one_block_scans_nothing():
    target = parse_slice("v4:2x2x1")
    mesh = (("pipeline", 4), ("data", 1), ("model", 1))

    def parts(layers: int, remat: Literal["none", "full"]) -> Estimate:
        settings = config(f"model.num_layers={layers}", "train.batch_size=64")
        return estimate_time(settings, Layout(mesh=mesh, microbatches=8, remat=remat), target)

    # The input of its block is the stage's own, which is kept: computing the block again costs nothing.
    assert parts(4, "full") == parts(4, "none")
    assert parts(8, "full").compute > parts(8, "none").compute
    # Nothing is cut out of arrays of several blocks: two take more than twice as long as one.
    assert parts(8, "none").memory > 2 * parts(4, "none").memory
    # Of rows too few for the arithmetic, the products wait for the weights of each microbatch.
    few = config(
        "train.batch_size=8", "model.embed_dim=1024", "model.num_heads=8", "train.sequence_length=16"
    )
    found = estimate_time(few, Layout(mesh=mesh, microbatches=8, remat="none"), target)
    one, inner = stage_of(few, Layout(mesh=mesh, microbatches=8, remat="none"))
    sizes = sum(b.bytes for b in step_arguments(one, inner) if b.kind == "parameters") // 4
    assert found.compute > 8 * sizes * (2 * 2 + 2 * 4) / (target.chip.hbm_bandwidth or 0.0)


def test_positions_that_are_divided_go_round_a_ring():
    target = parse_slice("v5e:2x2")
    settings = config("train.batch_size=4", "train.sequence_length=8192")
    rows, ring = (
        Layout(mesh=mesh, parameters="replicated", remat="none", microbatches=m)
        for mesh, m in (((("data", 4), ("model", 1)), 1), ((("data", 1), ("context", 4), ("model", 1)), 4))
    )
    a, b = (estimate_time(settings, layout, target) for layout in (rows, ring))
    # The last device sees all positions, where an equal share of a triangle is half of them.
    flops = 3 * 4 * 4 * 4 * 64 * 8192 * (8192 - 8193 / 2) * 4 / 4
    peak = target.chip.peak("bfloat16") * 0.75
    assert b.compute - a.compute == pytest.approx(flops / peak, rel=0.01)
    assert b.memory > a.memory
    # A window of a few positions reaches into one other part, and that is computed as a whole.
    local = settings.with_overrides(["model.pattern=local", "model.window=128"])
    c, d = (estimate_time(local, layout, target) for layout in (rows, ring))
    seen = 128 - 128 * 127 / 2 / 8192
    assert d.compute - c.compute == pytest.approx(flops / peak * (4096 - seen) / (8192 - 8193 / 2), rel=0.01)
    # Activations are divided, the scores of attention are more.
    whole, divided = (estimate_memory(settings, layout, target) for layout in (rows, ring))
    assert divided.activations * 4 == pytest.approx(whole.activations, rel=0.01)


def test_a_long_row_is_divided_where_heads_and_rows_are_not():
    """One row on four devices: of three heads none can be divided."""
    settings = config("model.num_heads=3", "model.num_kv_heads=3", "model.embed_dim=192", "model.num_layers=1",
                      "train.batch_size=1", "train.sequence_length=32768")  # fmt: skip
    found = plan(settings, "v5e:2x2", compile=False)
    assert found.best.layout.axis_sizes["context"] == 4
    # Where rows and heads can be divided, they are.
    free = config("train.batch_size=4", "train.sequence_length=32768")
    assert "context" not in plan(free, "v5e:2x2", compile=False).best.layout.axis_sizes


def test_blocks_are_divided_where_heads_and_rows_are_not():
    settings = config(
        "model.num_heads=3", "model.num_kv_heads=3", "model.embed_dim=192", "train.batch_size=2"
    )
    found = plan(settings, "v5e:2x2", compile=False, top=1000)
    assert {candidate.layout.stages for candidate in found.candidates} == {2, 4}
    # Else only where a stage has one block, which needs no scan; the compiler finds that faster, too.
    assert plan(config("model.num_layers=8"), "v5e:2x2", compile=False).best.layout.stages == 1


def test_adapters_in_stages_take_less_time_and_memory():
    """Without gradients of the weights: of four passes' products one is left out, and nothing is summed over stages."""
    target = parse_slice("v5e:2x2")
    layout = Layout(mesh=(("pipeline", 4), ("data", 1), ("model", 1)), microbatches=16)
    full, low = config("train.batch_size=64"), config("train.batch_size=64", *LORA)
    both = [estimate_time(one, layout, target) for one in (full, low)]
    assert both[1].compute / both[0].compute == pytest.approx(3 / 4, rel=0.08)
    # Embedding and head, in float32, are no longer summed over the stages.
    links = target.links(layout.axis_sizes)
    assert both[0].communication - both[1].communication == pytest.approx(
        links.reduce(2048 * 256 * 4, ("pipeline",)), rel=0.05
    )
    # In bfloat16 from stage to stage and back, in 19 ticks for 16 microbatches, each with one link of the two; and the
    # last stage's parts to the others and back, with both.
    stream = 64 * 512 * 256 * 2
    sent = 19 / 16 * 2 * stream / target.link_bandwidth
    assert both[1].communication == pytest.approx(sent + 2 * links.gather(stream, ("pipeline",)))
    memory = [estimate_memory(one, layout, target) for one in (full, low)]
    assert memory[1].optimizer < memory[0].optimizer / 10
    assert memory[1].gradients < memory[0].gradients / 10


LORA = ("finetune.method=lora", "finetune.rank=4")
CASES = {
    "context": (("train.batch_size=2",), Layout(mesh=(("data", 2), ("context", 2), ("model", 1)))),
    "pipeline": ((), Layout(mesh=(("pipeline", 4), ("data", 1), ("model", 1)), microbatches=8)),
    "expert": (EXPERTS, Layout(mesh=(("data", 2), ("expert", 2), ("model", 1)))),
}


def executed(facts: ProgramFacts, kind: str) -> tuple[int, int]:
    """How many collectives of a kind run in a step, loops and all, and their bytes."""

    def walk(events: Iterable[Any], times: int) -> Iterator[tuple[int, int]]:
        for event in events:
            if event[0] == "loop":
                yield from walk(event[2], times * event[1])
            elif event[0] in ("collective", "start") and facts.collectives[event[1]].kind == kind:
                yield times, times * int(facts.collectives[event[1]].bytes)

    found = list(walk(facts.schedule, 1))
    return sum(count for count, _ in found), sum(size for _, size in found)


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("axis", CASES)
def test_the_compiler_takes_them(axis, tmp_path):
    settings, layout = CASES[axis]
    target = parse_slice("v5e:2x2")
    task = TrainWork(config(*settings))
    program = compile_program(task.job(layout, target), cache=ProgramCache(tmp_path))
    assert program.status == "ok", program.message
    assert program.memory is not None
    facts = read_program(program.text)
    found = predict_step(facts, target, layout.mesh, places=program.coordinates)
    assert 0 < found.communication < found.seconds
    # One note for all steps of a ring, not one each.
    assert len(facts.unknown) <= 6
    if axis == "pipeline":
        # Forward and backward, in every tick but those in which nothing comes: 1 row, 512 positions, 256 values; and of
        # each microbatch a quarter of the last stage's to each other stage, and its gradient back.
        sends, parts = 2 * (8 + 4 - 1), 2 * 8 * (4 - 1)
        size = 512 * 256 * 4
        assert executed(facts, "collective-permute") == (sends + parts, sends * size + parts * size // 4)
    assert (executed(facts, "collective-permute")[0] > 0) == (axis != "expert")
    assert axis != "expert" or executed(facts, "all-gather")[0] > 0
    estimate = estimate_memory(task.config, layout, target)
    assert program.memory.kinds["parameters"] == estimate.parameters
    assert abs(program.memory.kinds["optimizer"] - estimate.optimizer) < 64
    # Small programs are overestimated: their buffers lie on the chip.
    assert program.memory.total < estimate.total * 1.1


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    ("axis", "settings"),
    [
        ("context", ("model.num_layers=1", "train.batch_size=1", "train.sequence_length=8192")),
        ("pipeline", ("train.batch_size=2",)),
    ],
)
def test_the_compiler_chooses_them(axis, settings, tmp_path):
    """Where three heads and few rows do not divide over four devices."""
    odd = config("model.num_heads=3", "model.num_kv_heads=3", "model.embed_dim=192", *settings)
    found = plan(odd, "v5e:2x2", max_compiles=2, cache=tmp_path)
    assert found.best.memory_source == "compiler"
    assert found.best.layout.axis_sizes[axis] > 1
    assert not found.refused

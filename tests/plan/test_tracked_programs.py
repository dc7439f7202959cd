"""Training steps compiled for a v4-32 without a TPU: overlap, optimizer state, and fingerprints that show a change."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from tpu_compiler import needs_libtpu
from tracked_programs import CONFIG, FILE, LAYOUTS, PROGRAMS, compiled

from capibara.config import ModularModelConfig
from capibara.plan import Fingerprint, check_fingerprints, estimate_memory
from capibara.plan.compiler import CompiledProgram, ProgramCache
from capibara.plan.program import overlap_by_kind, overlaps, read_program
from capibara.plan.slices import GENERATIONS, parse_slice
from capibara.plan.time import predict_step
from capibara.sharding import WHOLE_PRODUCTS, Layout
from capibara.sharding.communication import flags_of, whole_products
from capibara.train.options import asynchronous_options, flags_note

SHARDED = "train on v4-32, fsdp 32"
WITHOUT = "train on v4-32, fsdp 32, without options"
_SIZES = {"f32": 4, "s32": 4, "u32": 4, "bf16": 2}


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> dict[str, CompiledProgram]:
    return compiled(PROGRAMS, ProgramCache(tmp_path_factory.mktemp("programs")))


def kinds_of(program: CompiledProgram):
    return overlap_by_kind(overlaps(read_program(program.text)))


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, (_, layout) in LAYOUTS.items() if layout.flags])
def test_gathers_run_beside_products(programs, name) -> None:
    """With the options of the trainer each gather of parameters is a start and a done around products."""
    target, layout = LAYOUTS[name]
    gathers = kinds_of(programs[name])["all-gather"]
    if target.generation == "v4":
        assert gathers.asynchronous == gathers.collectives > 0
    else:  # small ones wait
        assert gathers.asynchronous > gathers.collectives / 2
    if (
        layout.parameters == "sharded"
    ):  # otherwise they are gathered after the update, with nothing left to compute
        assert gathers.hidden > 0.5
        # Those beside other work than products are not waited for either.
        facts = read_program(programs[name].text)
        step = predict_step(facts, target, layout.mesh, places=programs[name].coordinates)
        waits = sum(part.seconds for part in step.parts if part.label.startswith("all-gather"))
        assert waits < 0.01 * step.seconds


@needs_libtpu
@pytest.mark.slow
def test_without_options_gathers_wait_and_the_step_takes_longer(programs) -> None:
    gathers = kinds_of(programs[WITHOUT])["all-gather"]
    assert gathers.collectives
    assert gathers.asynchronous == 0
    seconds = {}
    for name in (SHARDED, WITHOUT):
        target, layout = LAYOUTS[name]
        facts = read_program(programs[name].text)
        seconds[name] = predict_step(facts, target, layout.mesh, places=programs[name].coordinates).seconds
    assert seconds[SHARDED] < 0.75 * seconds[WITHOUT]


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_optimizer_state_on_a_chip_is_what_the_plan_says(programs, name) -> None:
    """Summed from the parameters of the compiled program, whose shapes are those of one device."""
    target, layout = LAYOUTS[name]
    text = programs[name].text
    entry = text[text.index("\nENTRY ") :]
    held = 0
    for dtype, dims in re.findall(
        r"= (\w+)\[([\d,]*)\]\S* parameter\(\d+\).*?op_name=\"state\.opt_state[^\"]*\"", entry
    ):
        size = _SIZES[dtype]
        for n in dims.split(",") if dims else ():
            size *= int(n)
        held += size
    memory = programs[name].memory
    assert memory is not None
    planned = estimate_memory(CONFIG, layout, target)
    assert held == planned.optimizer == memory.kinds["optimizer"]
    # Two moments in float32 and a few counts, in as many parts as the axes that shard parameters have devices: all,
    # or with an axis for it those along fsdp. (Scales of norms are not cut along the model axis.)
    layer = 4 * 1024 * 1024 + 3 * 1024 * 2816 + 2 * 1024
    everything = 8 * (8192 * 1024 + 4 * layer + 1024)
    parts = layout.axis_sizes.get("fsdp", target.num_devices)
    assert everything / parts <= held <= everything / parts * 1.002 + 8


@needs_libtpu
@pytest.mark.slow
def test_fingerprints_are_as_they_were(programs) -> None:
    """If a change is meant: ``make fingerprints``, and commit the file."""
    found = {name: Fingerprint.of(program) for name, program in programs.items()}
    check = check_fingerprints(FILE, found)
    if check.missing and not check.same and not check.changes:
        pytest.skip(str(check))
    assert check.passed, str(check)
    assert not check.missing, str(check)


def test_options_of_the_trainer_and_of_the_shipped_configuration_are_those_that_are_tracked() -> None:
    config = ModularModelConfig.from_toml("production/tpu_v4")
    assert Layout.from_config(config).compiler_options == dict(WHOLE_PRODUCTS)
    for kind, more in (("TPU v4", {}), ("TPU v6 lite", whole_products("v6e")), ("TPU v99", {})):
        device = SimpleNamespace(platform="tpu", device_kind=kind)
        assert asynchronous_options(device) == {**WHOLE_PRODUCTS, **more}
    assert all(layout.compiler_options in ({}, dict(WHOLE_PRODUCTS)) for _, layout in LAYOUTS.values())


@pytest.mark.parametrize(
    ("flags", "platform", "devices", "said"),
    [
        (("xla_a=1",), "tpu", 32, None),
        ((), "tpu", 1, None),
        ((), "tpu", 32, "tpu.flags is empty"),
        (("xla_a=1",), "cpu", 32, "left out on cpu"),
        ((), "cpu", 32, None),
    ],
)
def test_a_run_says_what_its_options_lack(flags, platform, devices, said) -> None:
    placement = SimpleNamespace(devices=(SimpleNamespace(platform=platform),) * devices)
    note = flags_note(flags, placement)
    assert note is None if said is None else said in str(note)


def test_the_file_has_every_program() -> None:
    nothing = {name: Fingerprint("", {}, {}) for name in PROGRAMS}
    check = check_fingerprints(FILE, nothing)
    assert check.missing.keys() == PROGRAMS.keys()
    assert all("known of" in why for why in check.missing.values()), check


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_plan_has_the_options_of_its_generation(generation: str) -> None:
    target = parse_slice(
        {"v4": "v4-32", "v5p": "v5p:2x2x2", "v7x": "v7x:2x2x1"}.get(generation, f"{generation}:4x4")
    )
    fused = "xla_tpu_enable_async_collective_fusion_fuse_all_gather" in whole_products(generation)
    assert fused == (generation in ("v5p", "v6e"))
    (first,) = target.flag_choices((("data", target.num_devices), ("model", 1)))
    assert first == flags_of(whole_products(generation))
    assert len(target.flag_choices((("data", 1), ("model", target.num_devices)))) == 2

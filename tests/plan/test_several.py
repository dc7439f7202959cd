"""Several slices: how they are named, what each computes, and what they exchange."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest
from tpu_compiler import needs_libtpu

from capibara.cli import main
from capibara.config import ModularModelConfig
from capibara.errors import ConfigError
from capibara.hardware import get_chip
from capibara.hardware.meshes import arrange_devices
from capibara.plan import PlanError, parse_slice, plan, step_work
from capibara.plan.attribution import Attribution, Spent
from capibara.plan.compiler import ProgramCache, compile_program
from capibara.plan.memory.least import LeastMemory
from capibara.plan.planned import read_planned
from capibara.plan.program import read_program
from capibara.plan.program.groups import mesh_axes_of
from capibara.plan.several import Several
from capibara.plan.time import StepTime
from capibara.plan.time.network import Exchange
from capibara.plan.work import TrainWork
from capibara.sharding import Layout, across_slices

TINY = (
    *("model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=4"),
    *("model.vocab_size=512", "train.batch_size=16", "train.sequence_length=128"),
)


def tiny(*settings: str) -> ModularModelConfig:
    return ModularModelConfig.from_toml("demo", [*TINY, *settings])


@pytest.mark.parametrize(
    ("text", "count", "one"),
    [("2xv5p:4x4x4", 2, "v5p:4x4x4"), ("8xv4-128", 8, "v4:4x4x4"), ("32xV5E-256", 32, "v5e:16x16")],
)
def test_names(text, count, one):
    found = Several.read(text)
    assert found is not None
    assert (found.count, found.target.text, found.text) == (count, one, f"{count}x{one}")
    assert found.bandwidth == get_chip(found.target.generation).dcn_bandwidth
    assert found.source


@pytest.mark.parametrize("text", ["v5p:4x4x4", "v4-32", "4x8", "2x2x4"])
def test_one_slice_is_none(text):
    assert Several.read(text) is None
    with pytest.raises(PlanError, match="the network between several slices"):
        Several.read(text, dcn_gbps=50)


@pytest.mark.parametrize(
    ("text", "rate", "message"),
    [
        ("0xv5p:4x4x4", None, "got 0 slices, expected 1 to 1024"),
        ("5000xv5p:4x4x4", None, "got 5000 slices"),
        ("2xv5p:5x5x5", None, "no slice of v5p has this grid"),
        ("2xv5p:4x4x4", 0, "dcn_gbps=0 must be a number of gigabits"),
        ("2xv5p:4x4x4", float("nan"), "dcn_gbps=nan must be"),
        ("2xv5p:4x4x4", "50", "dcn_gbps='50' must be"),
        ("2xv5p:4x4x4", True, "dcn_gbps=True must be"),
    ],
)
def test_bad_input(text, rate, message):
    with pytest.raises(PlanError, match=message):
        Several.read(text, dcn_gbps=rate)


def test_published_rates():
    """Gbit/s for each chip, as the documentation of TPU7x compares them, and of a host of 8 v5e chips: 2 × 100."""
    for generation, rate in (("v5p", 50), ("v6e", 100), ("v7x", 100), ("v5e", 2 * 100 / 8)):
        assert get_chip(generation).dcn_bandwidth == rate * 1e9 / 8
    # PaLM, section 4.1: 81 Tbit/s over two pods of 3,072 chips.
    assert get_chip("v4").dcn_bandwidth == pytest.approx(81e12 / 8 / 6144, rel=1e-3)


@dataclass(frozen=True)
class Sizes:
    shape: dict[str, int]


def parts(layout: Layout, names: tuple[str, ...], kind: Any, rules: Any) -> list[int]:
    spec = rules.spec(names, Sizes(layout.axis_sizes), (1024,) * len(names), kind=kind)
    out = []
    for entry in spec:
        cut = 1
        for axis in [entry] if isinstance(entry, str) else entry or ():
            cut *= layout.axis_sizes[axis]
        out.append(cut)
    return out


@pytest.mark.parametrize(
    "layout",
    [
        Layout(mesh=(("data", 4), ("model", 2))),
        Layout(mesh=(("data", 8), ("model", 1)), parameters="replicated"),
        Layout(mesh=(("data", 8),), parameters="replicated", optimizer="sharded"),
        Layout(mesh=(("data", 2), ("expert", 2), ("model", 2))),
        Layout(mesh=(("fsdp", 4), ("model", 2))),
        Layout(mesh=(("data", 1), ("model", 8))),
    ],
    ids=str,
)
def test_each_slice_has_the_whole_model_and_its_share_of_the_rows(layout):
    whole = across_slices(layout, 2)
    assert whole.num_devices == 2 * layout.num_devices
    assert whole.mesh[0] == ("data", 2)  # outermost, so that a slice's devices stand together
    for rules in ("rules", "optimizer_rules"):
        for names in (
            ("embed", "mlp"),
            ("vocab", "embed"),
            ("experts", "embed", "mlp"),
            ("heads", "head_dim", "embed"),
        ):
            one = parts(layout, names, "parameters", getattr(layout, rules))
            assert parts(whole, names, "parameters", getattr(whole, rules)) == one
    (rows,) = parts(layout, ("batch",), "activations", layout.rules)
    assert parts(whole, ("batch",), "activations", whole.rules) == [2 * rows]
    assert across_slices(layout, 1) == layout


def test_parameters_over_data_and_fsdp_are_refused():
    with pytest.raises(ConfigError, match="one of the axes data and fsdp"):
        across_slices(Layout(mesh=(("data", 2), ("fsdp", 2))), 2)


@pytest.mark.parametrize("slices", [1, 2, 3, 8])
def test_seconds_of_an_exchange(slices):
    """Against a ring that is followed step by step: each of S chips sends one S-th of the array, 2 (S - 1) times."""
    size, rate = 3e9, 6.25e9
    holds = [
        {chip: {chip} for chip in range(slices)} for _ in range(slices)
    ]  # chunk → whose sums, for each chip
    holds = [{chunk: {chip} for chunk in range(slices)} for chip in range(slices)]
    sent = 0.0
    for step in range(slices - 1):
        moving = [(chip, (chip - step) % slices) for chip in range(slices)]
        parts = [holds[chip][chunk] for chip, chunk in moving]
        for (chip, chunk), part in zip(moving, parts, strict=True):
            holds[(chip + 1) % slices][chunk] = holds[(chip + 1) % slices][chunk] | part
        sent += size / slices
    for step in range(slices - 1):
        moving = [(chip, (chip + 1 - step) % slices) for chip in range(slices)]
        parts = [holds[chip][chunk] for chip, chunk in moving]
        for (chip, chunk), part in zip(moving, parts, strict=True):
            holds[(chip + 1) % slices][chunk] = part
        sent += size / slices
    assert all(whose == set(range(slices)) for chip in holds for whose in chip.values())
    found = Exchange(slices=slices, bytes=size, bandwidth=rate)
    assert found.seconds == pytest.approx(sent / rate, rel=1e-4)


def test_the_range_of_a_step_with_an_exchange():
    time = StepTime(
        seconds=3.0, low=2.7, high=4.0, compute=2.0, memory=0.5, communication=0.5, hidden=0.1, parts=()
    )
    short = Exchange(slices=2, bytes=1e9, bandwidth=1e9, pieces=10)
    with_short = short.added_to(time)
    assert with_short.seconds == with_short.compute + with_short.memory + with_short.communication
    assert with_short.seconds == pytest.approx(4.0)
    assert with_short.low == pytest.approx(2.7 + 0.1)  # but the last layer's, beside the backward pass
    assert with_short.high == pytest.approx(5.0)
    assert with_short.parts[0].label == "gradients between slices"
    long = Exchange(slices=2, bytes=10e9, bandwidth=1e9, pieces=10)
    assert long.added_to(time).low == pytest.approx(2.7 + 10 - 2 / 3 * 2.7)
    assert Exchange(slices=1, bytes=1e9, bandwidth=1e9).added_to(time) == time


@pytest.mark.parametrize("parameters", ["sharded", "replicated"])
def test_a_plan_over_two_slices(parameters, tmp_path):
    kept = ("tpu.parameters", "tpu.optimizer")
    config = tiny(f"tpu.parameters={parameters}")
    half = tiny("train.batch_size=8", f"tpu.parameters={parameters}")
    one = plan(half, "v5e:2x2", compile=False, keep=kept, top=1000)
    two = plan(config, "2xv5e:2x2", compile=False, keep=kept, dcn_gbps=0.5)
    assert (two.slices, two.num_chips, two.target) == (2, 8, one.target)
    assert two.best.exchange is not None
    same = next(each for each in one.candidates if each.layout == two.best.layout)
    assert two.best.memory == same.memory
    assert two.best.step_seconds == pytest.approx(same.step_seconds + two.best.exchange.seconds)
    assert two.best.tokens == config.train.batch_size * config.train.sequence_length
    assert two.best.mfu == pytest.approx((same.mfu or 0) * same.step_seconds / two.best.step_seconds)
    assert two.best.usd_per_hour == pytest.approx(2 * (same.usd_per_hour or 0))
    # The layout that it prints is one that trains.
    trained = ModularModelConfig.from_toml("demo", [*TINY, *two.overrides()])
    assert Layout.from_config(trained) == two.best.training_layout
    assert trained.tpu.num_chips == 8
    assert trained.tpu.mesh_axes[0] == "data"
    assert any("0.5 Gbit/s a chip [given]" in note and "none of it hidden" in note for note in two.notes)
    assert "2 slices, each v5e:2x2 (4 chips" in str(two)
    data = json.loads(json.dumps(two.to_json()))
    assert (data["slices"], data["candidates"][0]["chips"]) == (2, 8)
    # So does the file of --json, which training takes (--plan).
    (tmp_path / "plan.json").write_text(json.dumps({"fits": True, **data}))
    planned = read_planned(tmp_path / "plan.json")
    assert planned.layout == two.best.training_layout
    assert planned.config.train.batch_size == config.train.batch_size
    compiled = replace(two, candidates=(replace(two.best, memory_source="compiler"),))
    with pytest.raises(PlanError, match=r"only the plan of one slice.*train\.batch_size=8"):
        compiled.lock(tmp_path / "plan.lock")
    script = two.export("maxtext")
    assert "dcn_data_parallelism=2" in script
    assert "compile_topology=v5e-4 compile_topology_num_slices=2" in script
    assert "SLICES = 2" in two.export("jax")


def test_more_microbatches_exchange_more():
    several = Several.read("2xv5e:2x2")
    assert several is not None
    one = several.exchange(tiny(), Layout(mesh=(("data", 4),)))
    four = several.exchange(tiny(), Layout(mesh=(("data", 4),), microbatches=4))
    assert four.bytes == 4 * one.bytes


def test_the_best_of_several_slices_is_compiled():
    """One that was only scheduled may promise more, and does not come first."""

    @dataclass(frozen=True)
    class Program:
        complete: bool

    several = Several.read("2xv5e:2x2")
    assert several is not None
    one = plan(tiny("train.batch_size=8"), "v5e:2x2", compile=False).best
    programs: list[Any] = [Program(False), Program(True), Program(True)]
    mixed = [
        replace(one, program=program, time=replace(one.time, seconds=one.time.seconds * times))
        for program, times in zip(programs, (1, 3, 2), strict=True)
    ]
    joined = several.joined(mixed, tiny("train.batch_size=8"))
    assert [each.program for each in joined] == [programs[2], programs[0], programs[1]]


def test_what_cannot_be_shared_is_refused():
    with pytest.raises(PlanError, match=r"train\.batch_size=16 must be a multiple of the 3 slices"):
        plan(tiny(), "3xv5e:2x2", compile=False)
    with pytest.raises(PlanError, match="improve: changes are compiled for one slice"):
        plan(tiny(), "2xv5e:2x2", improve=1)
    import jax

    array = jax.ShapeDtypeStruct((8, 8), "float32")
    with pytest.raises(PlanError, match=r"compiled as it is.*plan it on v5e:2x2"):
        plan(step_work(lambda x, y: x @ y, (array, array)), "2xv5e:2x2", compile=False)


def test_the_command(capsys):
    arguments = ["plan", "--no-compile", "--topology", "2xv5e:2x2", "--top", "1000", *TINY]
    assert main([*arguments, "--json"]) == 0
    published = json.loads(capsys.readouterr().out)["candidates"]
    assert published[0]["exchange"]["bandwidth"] == 3.125e9
    assert main([*arguments, "--dcn-gbps", "2.5", "--json"]) == 0
    slower = json.loads(capsys.readouterr().out)["candidates"][0]
    # A tenth of the rate: ten times as long, up to the delay of a message.
    same = next(each for each in published if each["layout"] == slower["layout"])
    assert slower["exchange"]["seconds"] == pytest.approx(10 * same["exchange"]["seconds"], rel=0.01)
    assert main(["plan", "--no-compile", "--topology", "v5e:2x2", "--dcn-gbps", "5", *TINY]) == 2
    assert "write 2xv5e:2x2 for two" in capsys.readouterr().err
    for more, said in (
        (["--tokens", "1e9"], "'2xv5e:2x2' is several slices of one kind, which are planned alone"),
        (["--tokens", "1e9", "--dcn-gbps", "5"], "--dcn-gbps cannot be combined with --tokens"),
        (["--layout", "model.remat=full"], "layout: one of your own is compared on one slice"),
    ):
        assert main([*arguments, *more]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.slow
@needs_libtpu
def test_compiled_figures_of_several_slices_have_the_exchange(tmp_path, monkeypatch):
    """What is told of a plan is of the step of all slices, and of its best layout."""
    asked: list[Layout] = []

    def least(task, target, layout, program, **more):
        asked.append(layout)
        return LeastMemory(layout=layout, limit_bytes=1, hbm_bytes=1, seconds=2.0)

    monkeypatch.setattr("capibara.plan.planning.find_least_memory", least)
    found = plan(tiny(), "2xv5e:2x2", cache=tmp_path, max_compiles=2, least_memory=True)
    exchange, where = found.best.exchange, found.where
    assert exchange is not None
    assert where is not None
    assert found.least_memory is not None
    assert asked == [found.best.layout]
    assert found.least_memory.seconds == pytest.approx(2.0 + exchange.seconds)
    assert where.seconds == pytest.approx(found.best.step_seconds)
    for table in (where.parts, where.lines, where.passes):
        assert sum(one.seconds for one in table) == pytest.approx(where.seconds)


def test_where_time_goes_has_what_is_waited_for():
    one = Attribution(3.0, (Spent("blocks", 3.0),), (Spent("model.py:1", 3.0),), (Spent("forward", 3.0),))
    more = one.and_waiting("gradients between slices", 4.0)
    assert more.seconds == 7.0
    for table in (more.parts, more.lines, more.passes):
        assert (table[0].name, table[0].seconds) == ("[gradients between slices]", 4.0)
        assert sum(each.seconds for each in table) == more.seconds


def test_one_of_a_kind_is_a_slice():
    one, plain = (plan(tiny(), name, compile=False) for name in ("1xv5e:2x2", "v5e:2x2"))
    assert one.to_json() == plain.to_json()


def test_devices_of_several_slices_stand_slice_by_slice():
    @dataclass(frozen=True)
    class Device:
        id: int
        slice_index: int
        platform: str = "cpu"
        device_kind: str = "cpu"
        process_index: int = 0

    devices = [Device(n, n % 2) for n in range(8)]
    found = arrange_devices((2, 2, 2), devices)
    assert [[d.slice_index for d in part.flat] for part in found] == [[0] * 4, [1] * 4]
    assert sorted(d.id for d in found.flat) == list(range(8))
    # An axis that the slices do not divide: the order of the devices.
    assert [d.id for d in arrange_devices((1, 8), devices).flat] == list(range(8))


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("microbatches", [1, 4])
def test_the_compiled_step_exchanges_as_many_bytes(microbatches, tmp_path):
    """A mesh whose outer axis stands for two slices: the bytes that the real compiler sums along it in a step."""
    config = ModularModelConfig.from_toml(
        "production/tpu_v4",
        [
            *("model.num_layers=4", "model.embed_dim=512", "model.num_heads=4", "model.num_kv_heads=4"),
            *(
                "model.mlp_dim=2048",
                "model.vocab_size=8192",
                "train.batch_size=32",
                "train.sequence_length=512",
            ),
        ],
    )
    layout = Layout(mesh=(("data", 2), ("fsdp", 4)), microbatches=microbatches)
    program = compile_program(
        TrainWork(config).job(layout, parse_slice("v4:2x2x2")), cache=ProgramCache(tmp_path)
    )
    summed = 0.0
    for one in read_program(program.text).collectives:
        axes = mesh_axes_of(one.groups, layout.mesh)
        if one.kind == "all-reduce" and "data" in axes:
            # Over both axes it is summed inside a slice first, so that a quarter of it goes between slices.
            summed += one.bytes * one.trips / (4 if "fsdp" in axes else 1)
    target = parse_slice("v4:2x2x1")
    expected = Several(target, 2, 1e9, "").exchange(
        config, Layout(mesh=(("data", 4),), microbatches=microbatches)
    )
    assert summed == pytest.approx(expected.bytes, rel=0.06)

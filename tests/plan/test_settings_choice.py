"""Settings of the program that a plan chooses: the fastest of those that are compiled, alone and together."""

from __future__ import annotations

import itertools
import json
import random
import shlex
from dataclasses import replace

import jax
import pytest
from tpu_compiler import needs_libtpu

from capibara.cli import main
from capibara.config import ModularModelConfig
from capibara.plan import PlanError, parse_slice, plan, plan_slices, planning, step_work
from capibara.plan import improvements as engine
from capibara.plan.candidate import Candidate
from capibara.plan.compiler import CompiledProgram, Memory, ProgramCache, compile_program
from capibara.plan.lock import check_lock
from capibara.plan.planned import read_planned
from capibara.plan.program_settings import PROGRAM_SETTINGS, program_changes
from capibara.plan.report.table import choice_lines
from capibara.plan.settings_choice import choose_settings
from capibara.plan.sizes import size_text
from capibara.plan.time import StepTime
from capibara.plan.work import TrainWork
from capibara.sharding import Layout

TARGET = parse_slice("v5e:2x2")
SMALL = (
    *("model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=4"),
    *("model.vocab_size=512", "train.batch_size=8", "train.sequence_length=128"),
    "precision.compute_dtype=bfloat16",
)
UNROLL, EXCHANGE = "model.scan_layers=unroll", "precision.exchange=compute"
ALONE_AND_TOGETHER = [(EXCHANGE,), (UNROLL,), (EXCHANGE, UNROLL)]
LIMIT = 100 << 20


def config(*settings: str) -> ModularModelConfig:
    return ModularModelConfig.from_toml("demo", [*SMALL, *settings])


def layout(**axes: int) -> Layout:
    return Layout(mesh=tuple(axes.items()), remat="none")


def best(where: Layout, seconds: float = 1.0) -> Candidate:
    """A plan's best candidate, whose schedule takes what its cycles do."""
    time = StepTime(seconds, seconds, seconds, seconds, 0.0, 0.0, 0.0, ())
    program = CompiledProgram(status="ok", message=f"{seconds} {seconds}")
    return Candidate(
        layout=where,
        target=TARGET,
        memory={"parameters": 1},
        memory_source="compiler",
        time=time,
        tokens=1024,
        program=program,
    )


def settings_of(given: dict) -> tuple[str, ...]:
    found = [EXCHANGE] if given["precision"]["exchange"] == "compute" else []
    return tuple([*found, UNROLL] if given["model"]["scan_layers"] == "unroll" else found)


@pytest.fixture
def compiler(monkeypatch):
    """A compiler by a table: settings → seconds of the schedule, seconds by cycles, MiB; and what it compiled."""
    takes: dict[tuple[str, ...], tuple[float, float, int]] = {}
    compiled: list[tuple[str, ...]] = []

    def compile_programs(jobs, *, schedule, started, **_):
        for number, job in enumerate(jobs):
            started(number)
            settings = settings_of(job.params["config"])
            if settings not in takes:
                yield number, CompiledProgram(status="error", message="it fails\n  at once" + 999 * "!\n")
                continue
            glance, cycles, mib = takes[settings]
            if not schedule:
                compiled.append(settings)
            memory = Memory(arguments=mib << 20, outputs=0, aliased=0, temporaries=0)
            yield (
                number,
                CompiledProgram(
                    status="ok", memory=memory, message=f"{glance} {cycles}", complete=not schedule
                ),
            )

    def predict_step(facts, *_, cycles, **__):
        return StepTime(float(facts.split()[cycles]), 0, 0, 0, 0, 0, 0, ())

    monkeypatch.setattr(engine, "compile_programs", compile_programs)
    monkeypatch.setattr(CompiledProgram, "text", property(lambda self: self.message))
    monkeypatch.setattr(engine, "read_program", str)
    monkeypatch.setattr(engine, "predict_step", predict_step)
    return takes, compiled


@pytest.mark.parametrize("seed", range(40))
def test_the_fastest_of_those_compiled_is_chosen(seed, compiler):
    takes, compiled = compiler
    draw = random.Random(seed)
    # Cycles are up to a tenth off what schedules say, and some programs do not fit.
    for settings in ALONE_AND_TOGETHER:
        cycles = draw.uniform(0.6, 1.2)
        takes[settings] = (cycles * draw.uniform(0.9, 1.1), cycles, draw.choice([10, 10, 10, 500]))
    found = choose_settings(config(), best(layout(data=4, model=1)), limit_bytes=LIMIT)
    measured = {(): 1.0, **{each: takes[each][1] for each in compiled if takes[each][2] == 10}}
    fastest = min(measured, key=lambda each: measured[each])
    assert {one.settings for one in found.tried} == measured.keys() - {()}
    assert {one.settings for one in found.refused} == {each for each in takes if takes[each][2] == 500}
    if 1 / measured[fastest] < 1.005:  # not worth a change
        fastest = ()
    assert found.settings == fastest
    assert found.speed == pytest.approx(1 / measured[fastest])
    assert settings_of(found.config.to_dict()) == fastest
    assert found.effects.keys() == {each.partition("=")[0] for each in fastest}
    assert (found.program is None) == (fastest == ())


@pytest.mark.parametrize("order", list(itertools.permutations((0.7, 0.8, 1.1))))
def test_where_schedules_are_right_it_is_the_fastest_of_all(order, compiler):
    takes, compiled = compiler
    takes.update(
        {settings: (each, each, 10) for settings, each in zip(ALONE_AND_TOGETHER, order, strict=True)}
    )
    found = choose_settings(config(), best(layout(data=4)), limit_bytes=LIMIT)
    assert found.settings == ALONE_AND_TOGETHER[order.index(0.7)]
    # Two at a time; the slowest is not compiled, which is what takes long.
    assert {takes[each][1] for each in compiled} == {0.7, 0.8}


def test_what_fails_is_told_and_the_rest_is_chosen(compiler):
    takes, _ = compiler
    takes[(EXCHANGE,)] = (0.9, 0.9, 10)
    takes[(UNROLL,)] = (0.5, 0.5, 500)
    found = choose_settings(config(), best(layout(data=4)), limit_bytes=LIMIT)
    assert found.settings == (EXCHANGE,)
    lines = "\n".join(choice_lines(found, TARGET))
    assert f"{EXCHANGE}: 11.1% more tokens per second" in lines
    assert "precision.exchange changes: each device's part of a linear layer's gradient is rounded" in lines
    assert f"not chosen: {UNROLL}: it takes {size_text(500 << 20)} a device" in lines
    assert f"not chosen: {EXCHANGE} {UNROLL}: it fails at once!" in lines
    assert max(map(len, lines.splitlines())) < 400
    assert json.loads(json.dumps(found.to_json()))["settings"] == [EXCHANGE]
    nothing = choose_settings(config(), best(layout(data=4), 0.1), limit_bytes=LIMIT)
    assert nothing.settings == ()
    assert nothing.config == config()
    assert "no others that were compiled" in choice_lines(nothing, TARGET)[0]
    # Less than half a percent is not chosen, and the lines do not contradict themselves.
    takes[(EXCHANGE,)] = (0.997, 0.997, 10)
    first, second, *_ = choice_lines(
        choose_settings(config(), best(layout(data=4)), limit_bytes=LIMIT), TARGET
    )
    assert "no others that were compiled give 0.5% more tokens per second" in first
    assert f"compiled, too: {EXCHANGE}: +0.3%" in second


def test_what_is_kept_stays(compiler):
    takes, compiled = compiler
    takes.update(dict.fromkeys(ALONE_AND_TOGETHER, (0.5, 0.5, 10)))
    where = best(layout(data=4))
    found = choose_settings(config(), where, limit_bytes=LIMIT, keep=["model.scan_layers"])
    assert found.settings == (EXCHANGE,)
    compiled.clear()
    assert choose_settings(config(), where, limit_bytes=LIMIT, keep=PROGRAM_SETTINGS).settings == ()
    assert choose_settings(config(UNROLL, EXCHANGE), where, limit_bytes=LIMIT).tried == ()
    assert compiled == []


@pytest.mark.parametrize(
    ("settings", "axes", "words"),
    [
        (
            ["model.experts.count=4", "model.experts.per_token=2", "model.experts.dim=16"],
            {"data": 4},
            "experts",
        ),
        (["model.pattern=['ssm','attention']"], {"data": 4}, "ssm blocks"),
        (["model.pattern=['local','attention']", "model.window=16"], {"data": 4}, "local blocks"),
        (["precision.compute_dtype=float16"], {"data": 4}, "products of float16"),
        (["finetune.method=lora"], {"data": 4}, "adapters"),
        ([], {"data": 64}, "64 devices along 'data'"),
        ([], {"data": 2, "context": 2}, "2 devices along 'context'"),
    ],
)
def test_what_was_not_tested_is_proposed_and_not_chosen(settings, axes, words):
    several = config("model.num_layers=4", *settings)
    changes = {each.name: each for each in program_changes(several, layout(**axes))}
    assert changes["precision.exchange"].reason.endswith(f"was not tested with {words}")
    assert changes["precision.exchange"].proposed
    assert changes["model.scan_layers"].reason == ""


def test_many_blocks_are_not_compiled_one_by_one(compiler):
    takes, compiled = compiler
    takes[(EXCHANGE,)] = (0.5, 0.5, 10)
    deep = config("model.num_layers=48")
    found = choose_settings(deep, best(layout(data=4)), limit_bytes=LIMIT)
    assert found.settings == (EXCHANGE,)
    assert compiled == [(EXCHANGE,)]
    assert "48 blocks take long to compile one by one" in found.untried["model.scan_layers"]
    # One device has no gradients to exchange, and products of float32 nothing to narrow.
    assert list(program_changes(config("model.scan_layers=unroll"), layout(data=1))) == []
    assert list(program_changes(config(UNROLL, "precision.compute_dtype=float32"), layout(data=4))) == []


@pytest.mark.parametrize(
    ("settings", "axes"),
    [
        (["model.num_layers=1"], {"data": 4}),
        (["model.pattern=['ssm','attention']"], {"data": 4}),  # two blocks, each once
        ([], {"pipeline": 2, "data": 2}),
    ],
)
def test_what_is_not_in_a_loop_is_not_unrolled(settings, axes):
    """The program would be the same."""
    assert "model.scan_layers" not in {
        each.name for each in program_changes(config(*settings), layout(**axes))
    }
    twice = config(*settings, f"model.num_layers={2 * config(*settings).model.num_layers}")
    assert "model.scan_layers" in {each.name for each in program_changes(twice, layout(**axes))}


def test_a_choice_needs_the_compiler_and_settings():
    with pytest.raises(PlanError, match=r"choose_settings: the compiler knows .* nothing is compiled here"):
        plan(config(), TARGET, compile=False, choose_settings=True)
    with pytest.raises(PlanError, match="choose_settings: settings are compiled for one slice"):
        plan(config(), "2xv5e:2x2", choose_settings=True)
    with pytest.raises(PlanError, match=r"choose_settings: the compiler knows"):
        plan_slices(config(), ["v5e:2x2", "v5e:2x4"], compile=False, choose_settings=True)
    work = step_work(lambda x: x, (jax.ShapeDtypeStruct((8, 8), "float32"),), batch_argnums=())
    with pytest.raises(PlanError, match="no settings to choose"):
        plan(work, "v5e:1x1", choose_settings=True)


def test_settings_of_the_program_can_be_kept():
    found = plan(
        config(UNROLL), TARGET, compile=False, keep=["model.scan_layers", "model.remat", "precision.exchange"]
    )
    kept = "model.remat=none, model.scan_layers=unroll, precision.exchange=accumulate"
    assert f"kept as given: {kept}" in found.notes
    assert plan(config(), TARGET, compile=False, keep="model.scan_layers").considered > found.considered
    with pytest.raises(PlanError, match=r"keep: got 'model.num_layers', expected .*model.scan_layers"):
        plan(config(), TARGET, compile=False, keep=["model.num_layers"])


@pytest.mark.parametrize(
    "other",
    [["--no-compile"], ["--check", "plan.lock"], ["--serve", "--prompt-length", "8", "--output-length", "8"]],
)
def test_options_that_do_not_go_with_it(other, capsys):
    assert main(["plan", "--config", "demo", "--choose-settings", *other]) == 2
    assert "--choose-settings" in capsys.readouterr().err


@pytest.mark.slow
@needs_libtpu
def test_the_command_trains_what_was_compiled(tmp_path, capsys, monkeypatch):
    """Printed command, JSON and lockfile, read back, lower to the program whose time is told."""
    lock, cache = tmp_path / "plan.lock", str(tmp_path / "programs")
    asked = ["plan", "--config", "demo", "--topology", "v5e:2x2", *SMALL, "--max-compiles", "1"]
    asked += ["model.num_layers=3"]  # no stages of a pipeline, in which nothing is chosen
    asked += ["--choose-settings", "--cache", cache]
    assert main([*asked, "--lock", str(lock), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    first = told["candidates"][0]
    assert first["settings"] == told["settings_choice"]["settings"] != []
    # By the compiler's own figures: none of those compiled is faster, and the second row is the configured program.
    times = [each["step_seconds"] for each in told["settings_choice"]["tried"]]
    assert first["step_seconds"] == pytest.approx(min(times))
    second = told["candidates"][1]
    assert (second["settings"], second["layout"]) == ([], first["layout"])
    assert second["step_seconds"] == pytest.approx(first["step_seconds"] * told["settings_choice"]["speed"])
    assert second["program_hash"] != first["program_hash"]

    def digest(found: ModularModelConfig) -> str:
        job = TrainWork(found).job(Layout.from_config(found), TARGET)
        return compile_program(job, cache=ProgramCache(tmp_path / "other"), schedule=True).program_hash

    assert main([*asked, "--export", "jax", "--output", str(tmp_path / "shardings.py")]) == 0
    printed = capsys.readouterr().out
    command = next(line for line in printed.splitlines() if line.split()[:1] == ["run"])
    words = shlex.split(command.partition("run")[2])
    assert words[:4] == ["capibara", "train", "--config", "demo"]
    assert set(first["settings"]) <= set(words)
    assert digest(ModularModelConfig.from_toml("demo", words[4:])) == first["program_hash"]
    # What --plan reads, of either file.
    (tmp_path / "plan.json").write_text(json.dumps(told))
    for file in (lock, tmp_path / "plan.json"):
        assert digest(read_planned(file).config) == first["program_hash"]
        for setting in first["settings"]:
            assert read_planned(file).settings()[setting.partition("=")[0]] == setting.partition("=")[2]
    assert check_lock(lock, cache=cache).passed
    exported: dict = {"__name__": "shardings"}
    exec((tmp_path / "shardings.py").read_text(), exported)
    assert exported["UNROLLED"] == (UNROLL in first["settings"])
    assert exported["GRADIENT_DTYPE"] == ("bfloat16" if EXCHANGE in first["settings"] else "float32")
    # Given by hand, they are kept, and said to be; nor are changes of them proposed.
    fixed: set[str] = set()
    monkeypatch.setattr(planning, "find_improvements", lambda *_, **more: fixed.update(more["fixed"]) or ())
    assert main([*asked, "--improve", "model.scan_layers=scan", "precision.exchange=accumulate"]) == 0
    assert fixed == set(PROGRAM_SETTINGS)
    printed = capsys.readouterr().out
    assert "note: kept as given: model.scan_layers=scan, precision.exchange=accumulate" in printed
    assert "the configured settings of the program" in printed


def test_another_layout_is_compared_with_the_chosen_settings(compiler, monkeypatch):
    """A plan whose best candidate has settings of its own: the row of the user's layout differs by them."""
    from capibara.plan.own import OwnLayout
    from capibara.plan.result import Plan

    pick = replace(best(layout(data=4), 0.5), settings=(UNROLL,))
    mine = best(layout(data=4))
    found = Plan(
        work="a model",
        target=TARGET,
        limit_bytes=LIMIT,
        candidates=(pick, mine),
        own=OwnLayout(mine.layout, mine),
    )
    monkeypatch.setattr(Plan, "where", None)
    text = str(found)
    assert "beside the pick; other settings" in text
    header, first, second = text.splitlines()[2:5]
    assert header.endswith("settings")
    assert first.endswith(UNROLL)
    assert not second.endswith(UNROLL)
    assert found.overrides()[0] == UNROLL

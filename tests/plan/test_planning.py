"""Plans as a whole: estimates in this process, compiled ones in others, refusals, and any step function."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tpu_compiler import needs_libtpu

from capibara.config import ModularModelConfig
from capibara.plan import (
    CompilerMissingError,
    DoesNotFitError,
    PlanError,
    parse_slice,
    plan,
    step_work,
)
from capibara.plan.compiler import ProgramCache, compile_program
from capibara.plan.compiler.limits import LIMIT, limit_option
from capibara.plan.lock import check_lock
from capibara.plan.memory.least import find_least_memory
from capibara.plan.search.best_first import search
from capibara.plan.work import Rough, TrainWork
from capibara.sharding import Layout


def tiny(*settings: str) -> ModularModelConfig:
    return ModularModelConfig.from_toml(
        "demo",
        ["model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=4",
         "model.vocab_size=512", "model.scan_layers=scan", "train.batch_size=8", "train.sequence_length=128",
         *settings],
    )  # fmt: skip


def test_an_estimate_needs_no_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("CAPIBARA_LIBTPU", str(tmp_path))
    found = plan(tiny(), "v4:2x2x1", compile=False, top=3)
    assert len(found.candidates) == 3
    assert found.compiled == 0
    assert {c.memory_source for c in found.candidates} == {"analytic"}
    assert [c.step_seconds for c in found.candidates] == sorted(c.step_seconds for c in found.candidates)
    assert "nothing was compiled" in str(found)
    assert all(part.source == "estimate" for part in found.best.time.parts)
    json.dumps(found.to_json(), allow_nan=False)
    with pytest.raises(CompilerMissingError):
        plan(tiny(), "v4:2x2x1", compile=True)


def test_a_data_file_is_opened_once(monkeypatch, tmp_path):
    from capibara.data import packed
    from capibara.data.records import read_records
    from capibara.plan.memory.remedies import changes

    path, opened = tmp_path / "sums.jsonl", []
    path.write_text('{"prompt": "1+1=", "completion": "2."}\n')
    monkeypatch.setattr(packed, "read_records", lambda path: (opened.append(path), read_records(path))[1])
    config, target = tiny().with_overrides({"data.paths": [str(path)]}), parse_slice("v5e:2x4")
    work = TrainWork(config)
    rough = [work.rough(layout, target) for layout in work.layouts(target)]
    assert len(rough) > 50
    assert "packed" in work.title
    assert work.job(next(work.layouts(target)), target).params["packed"]
    assert len(opened) == 1
    assert len(changes(config, Layout(mesh=(("data", 8), ("model", 1))), target)) > 1
    assert len(opened) == 2


def test_without_a_compiler_the_plan_is_an_estimate_that_says_so(monkeypatch, tmp_path, capsys):
    from capibara.cli import main

    monkeypatch.setenv("CAPIBARA_LIBTPU", str(tmp_path))
    found = plan(tiny(), "v4:2x2x1")
    assert {c.memory_source for c in found.candidates} == {"analytic"}
    (note,) = [note for note in found.notes if "nothing was compiled" in note]
    assert "CAPIBARA_LIBTPU" in note
    monkeypatch.delenv("CAPIBARA_LIBTPU")
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert main(["plan", "--topology", "v5e:2x2"]) == 0
    out, _ = capsys.readouterr()
    assert "[an estimate]" in out
    assert "pip install 'capibara-jax[plan]'" in out
    # What only the compiler can give is not put in its place.
    for option in (["--explain"], ["--lock", str(tmp_path / "plan.lock")]):
        assert main(["plan", "--topology", "v5e:2x2", *option]) == 2
        assert "not installed" in capsys.readouterr().err


def test_names_paths_and_configurations(tmp_path):
    path = tmp_path / "model.toml"
    tiny().to_toml(path)
    one, two = plan(str(path), "v5e:2x2", compile=False), plan(tiny(), "v5e:2x2", compile=False)
    assert one.to_json() == two.to_json()
    assert plan("production/tpu_v4", "v4-32", compile=False).num_chips == 16


def test_memory_decides(monkeypatch):
    """With less memory what is rematerialised or cut into microbatches comes first."""
    config = ModularModelConfig.from_toml("production/tpu_v4")
    free, tight = (plan(config, "v4-32", compile=False, memory_limit_gb=limit) for limit in (None, 5.0))
    assert tight.best.hbm_bytes <= 5 * 2**30 < free.best.hbm_bytes
    assert tight.step_seconds > free.step_seconds
    with pytest.raises(DoesNotFitError, match=r"takes at least .* GiB a device .*chips"):
        plan(config, "v4-32", compile=False, memory_limit_gb=0.05)


def test_what_cannot_be_planned():
    with pytest.raises(PlanError, match="no mesh of 16 devices divides the work"):
        plan(tiny("train.batch_size=3", "model.num_heads=1", "model.num_kv_heads=1"), "v4-32", compile=False)
    with pytest.raises(PlanError, match="memory_limit_gb=-1"):
        plan(tiny(), compile=False, memory_limit_gb=-1)
    for workers in (0, -1, True):
        with pytest.raises(PlanError, match="workers="):
            plan(tiny(), compile=False, workers=workers)
    with pytest.raises(DoesNotFitError, match="nothing fits"):
        plan(tiny(), compile=False, memory_limit_gb=1e-12)
    with pytest.raises(PlanError, match="max_compiles=0"):
        plan(tiny(), compile=False, max_compiles=0)
    with pytest.raises(PlanError, match="step_work"):
        plan(lambda x: x, "v4-32")  # type: ignore[arg-type]


def test_prices(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text(
        '[[price]]\nchip = "v4"\nregion = "home"\nterm = "on-demand"\nusd_per_chip_hour = 36.0\nas_of = 2026-01-01\n'
        'source = "contract"\n'
    )
    best = plan(tiny(), "v4:2x2x1", compile=False, prices=path).best
    assert best.usd_per_hour == 4 * 36
    assert best.usd_per_step == pytest.approx(4 * best.step_seconds / 100)
    unknown = plan(tiny(), "v4:2x2x1", compile=False, region="moon")
    assert unknown.best.usd_per_step is None
    assert any("no price" in note for note in unknown.notes)


class Known:
    """A piece of work whose layouts take known times, for the search alone."""

    title, tokens, flops = "known", None, None

    def __init__(self, real: dict[Layout, tuple[float, int]], rough: dict[Layout, Rough]) -> None:
        self.real, self.guesses = real, rough

    def layouts(self, target):
        return iter(self.real)

    def rough(self, layout, target):
        return self.guesses[layout]

    def job(self, layout, target):
        return layout


@pytest.fixture
def compiled_at_once(monkeypatch):
    from capibara.plan.compiler import CompiledProgram, Memory

    def compile_programs(jobs, **_):
        for number, layout in enumerate(jobs):
            size = layout.microbatches << 20
            memory = Memory(arguments=0, outputs=0, aliased=0, temporaries=size)
            yield number, CompiledProgram(status="ok", memory=memory, message=str(layout.microbatches))

    monkeypatch.setattr("capibara.plan.search.best_first.compile_programs", compile_programs)


def test_the_search_learns_from_what_it_compiled(compiled_at_once):
    """Rough figures of one mesh are twice too good; the best stands in the other."""
    layouts = [
        Layout(mesh=(("data", d), ("model", 4 // d)), microbatches=m) for d in (4, 1) for m in range(1, 9)
    ]
    real = {k: (10.0 - k.microbatches / 10 + (5 if dict(k.mesh)["data"] == 4 else 0), 0) for k in layouts}
    rough = {
        k: Rough({"all": k.microbatches << 20}, t / (2 if dict(k.mesh)["data"] == 4 else 1), 0.0, 0.0)
        for k, (t, _) in real.items()
    }
    found = search(
        Known(real, rough), parse_slice("v4:2x2x1"), lambda program, k: real[k][0], limit_bytes=1 << 30, max_compiles=5
    )  # fmt: skip
    best = min(real, key=lambda k: real[k][0])
    assert found.fitting[0].layout == best
    assert len(found.compiled) <= 5
    assert found.considered == 16


@pytest.fixture
def scheduled_first(monkeypatch):
    """A compiler that schedules at a glance; what it was asked to compile, and what of that fails."""
    from capibara.plan.compiler import CompiledProgram, Memory

    asked: list[Layout] = []
    failing: list[Layout] = []
    known: list[Layout] = []

    def compile_programs(jobs, *, schedule, **_):
        for number, layout in enumerate(jobs):
            whole = not schedule or layout in known
            if not schedule:
                asked.append(layout)
            if whole and layout in failing:
                yield number, CompiledProgram(status="error", message="no registers are left")
                continue
            memory = Memory(arguments=0, outputs=0, aliased=0, temporaries=layout.microbatches << 20)
            yield number, CompiledProgram(status="ok", memory=memory, complete=whole)

    monkeypatch.setattr("capibara.plan.search.best_first.compile_programs", compile_programs)
    return SimpleNamespace(asked=asked, failing=failing, known=known)


_TWO_STAGES = [
    Layout(mesh=(("data", 4),), remat=remat, microbatches=count)
    for remat in ("none", "full")
    for count in range(1, 5)
]


def _in_two_stages(glances: dict[Layout, float], cycles: dict[Layout, float], most: int = 8):
    known = Known(dict.fromkeys(glances, (0.0, 0)), {k: Rough({"all": 1}, 1.0, 0.0, 0.0) for k in glances})
    return search(
        known,
        parse_slice("v4:2x2x1"),
        lambda program, k: cycles[k],
        glance_of=lambda program, k: glances[k],
        limit_bytes=1 << 30,
        max_compiles=most,
    )


def test_what_is_scheduled_is_compiled_while_it_may_be_the_best(scheduled_first):
    """Cycles make what is recomputed slower than rooflines say, as much in all layouts."""
    glances = {k: 1 + k.microbatches / 8 + (0.05 if k.remat == "none" else 0.0) for k in _TWO_STAGES}
    cycles = {k: t * (1.2 if k.remat == "none" else 1.4) for k, t in glances.items()}
    found = _in_two_stages(glances, cycles)
    best = min(cycles, key=lambda k: cycles[k])
    assert glances[best] > min(glances.values())
    assert found.fitting[0].layout == best
    # The two whose ratios teach all others; no other promises as much.
    assert len(scheduled_first.asked) == len(found.compiled) == 2
    assert {k.remat for k in scheduled_first.asked} == {"none", "full"}
    assert len(found.scheduled) > 2
    for one in found.scheduled:
        assert one.seconds == pytest.approx(cycles[one.layout])
        assert one.glance == glances[one.layout]
    # A compiled program in the cache changes nothing of what is chosen.
    scheduled_first.known += [k for k in _TWO_STAGES if k.microbatches < 3]
    assert _in_two_stages(glances, cycles).fitting[0].layout == best


def test_a_rematerialisation_of_which_nothing_was_compiled_is_given_more_room(scheduled_first):
    """The schedules of two kinds are better, but cycles are kinder to the third."""
    none, full, dots = (Layout(mesh=(("data", 4),), remat=remat) for remat in ("none", "full", "dots"))
    glances = {none: 1.0, full: 1.02, dots: 1.03}
    found = _in_two_stages(glances, {none: 1.3, full: 1.33, dots: 1.25})
    assert scheduled_first.asked == [none, full, dots]
    assert found.fitting[0].layout == dots


def test_what_fails_when_it_is_compiled_gives_way(scheduled_first):
    glances = {k: 1 + k.microbatches / 8 + (0.5 if k.remat == "none" else 0.0) for k in _TWO_STAGES}
    first, second, third = sorted(glances, key=lambda k: glances[k])[:3]
    scheduled_first.failing += [first, second]
    found = _in_two_stages(glances, glances)
    assert found.fitting[0].layout == third
    assert [c.layout for c in found.compiled if c.program.status == "error"] == [first, second]
    assert set(scheduled_first.asked[:2]) == {first, second}


@pytest.mark.parametrize("most", [1, 2, 3])
def test_no_more_is_compiled_than_may_be(scheduled_first, most):
    glances = dict.fromkeys(_TWO_STAGES, 1.0)
    found = _in_two_stages(glances, {k: 1.0 - n / 1000 for n, k in enumerate(_TWO_STAGES)}, most)
    assert len(found.compiled) + len(found.scheduled) <= most
    assert len(scheduled_first.asked) <= most
    assert found.fitting
    if most == 1:
        assert found.scheduled == []


def _searched(rough: dict[Layout, float], real: dict[Layout, float], **more) -> list[Layout]:
    guesses = {k: Rough({"all": k.microbatches << 20}, t, 0.0, 0.0) for k, t in rough.items()}
    known = Known({k: (t, 0) for k, t in real.items()}, guesses)
    target = parse_slice("v4:2x2x1")
    found = search(known, target, lambda program, k: real[k], limit_bytes=1 << 30, **more)
    return [c.layout for c in found.compiled]


def test_a_mesh_that_looks_far_slower_is_not_compiled(compiled_at_once):
    near, far = (Layout(mesh=(("data", d), ("model", 4 // d))) for d in (4, 1))
    assert _searched({near: 1.0, far: 1.7}, {near: 1.0, far: 1.7}) == [near, far]
    assert _searched({near: 1.0, far: 1.8}, {near: 1.0, far: 1.8}) == [near]


def test_only_the_best_is_tried_with_other_flags(compiled_at_once):
    layouts = [Layout(mesh=(("data", d), ("model", 4 // d))) for d in (4, 1)]
    others = [replace(k, flags=(("xla_some", "true"),)) for k in layouts]
    times = dict(zip(layouts + others, (1.0, 1.02, 0.9, 0.5), strict=True))
    assert _searched(dict.fromkeys(times, 1.0), times) == [*layouts, others[0]]


def test_layouts_that_are_nearly_as_good_are_compiled_while_there_is_room(compiled_at_once):
    first, second, third = (Layout(mesh=(("data", 4),), microbatches=m) for m in (1, 2, 4))
    rough, real = {first: 1.0, second: 1.03, third: 1.2}, {first: 1.0, second: 0.95, third: 0.5}
    assert _searched(rough, real) == [first, second]
    assert _searched(rough, real, max_compiles=1) == [first]


def test_each_rematerialisation_is_compiled_before_the_rough_order_is_believed(compiled_at_once):
    """Rough figures have what is recomputed a third too slow; on another mesh nothing is tried twice for it."""
    none, dots, full = (Layout(mesh=(("data", 4), ("model", 1)), remat=r) for r in ("none", "dots", "full"))
    more = [replace(full, microbatches=m) for m in (2, 4)]
    other = [replace(k, mesh=(("data", 1), ("model", 4))) for k in (none, full)]
    rough = {none: 1.0, dots: 1.2, full: 1.33, more[0]: 1.34, more[1]: 1.6}
    real = {none: 1.0, dots: 1.2, full: 1.0, more[0]: 0.95, more[1]: 1.3}
    assert _searched(rough, real, max_compiles=1) == [none]
    assert _searched(rough, real) == [none, dots, full, more[0]]
    # Slower there without rematerialisation, so slower with it: it is not compiled there.
    rough |= {other[0]: 1.1, other[1]: 1.45}
    real |= {other[0]: 1.65, other[1]: 1.6}
    assert _searched(rough, real) == [none, dots, full, other[0], more[0]]
    # What looks far slower is left out.
    assert _searched({none: 1.0, full: 1.8}, {none: 1.0, full: 0.5}) == [none]


def test_batches_divide_into_any_number_of_microbatches():
    """960 rows over 64 devices are 3 microbatches of 5 rows, or 5 of 3."""
    from capibara.plan.memory.remedies import changes

    work, target = TrainWork(tiny("train.batch_size=960")), parse_slice("v4-128")
    counts = {k.microbatches for k in work.layouts(target) if k.axis_sizes == {"data": 64, "model": 1}}
    assert counts == {1, 3, 5, 15}
    layout = Layout(mesh=(("data", 64), ("model", 1)))
    remedies = {each.layout.microbatches for each in changes(work.config, layout, target)}
    assert {1, 3, 5, 15} <= remedies


def test_settings_that_are_kept():
    config = tiny("model.remat=none", "train.gradient_accumulation_steps=2", "tpu.flags=xla_some=true")
    keep = ("model.remat", "train.gradient_accumulation_steps", "tpu.flags")
    found = plan(config, "v4:2x2x1", compile=False, keep=keep, top=1000)
    assert {(c.layout.remat, c.layout.microbatches, c.layout.flags) for c in found.candidates} == {
        ("none", 2, (("xla_some", "true"),))
    }
    assert len({c.layout for c in found.candidates}) == len(found.candidates) > 3
    assert (
        "kept as given: model.remat=none, train.gradient_accumulation_steps=2, tpu.flags=xla_some=true"
        in found.notes
    )
    assert {c.layout.remat for c in plan(config, "v4:2x2x1", compile=False, top=1000).candidates} == {
        *("none", "dots", "full")
    }
    meshed = tiny("tpu.topology=2x2", "tpu.num_chips=4")
    found = plan(meshed, "v4:2x2x1", compile=False, keep=("tpu.topology",), top=1000)
    assert {c.layout.mesh for c in found.candidates} == {(("data", 2), ("model", 2))}
    with pytest.raises(PlanError, match=r"no layout of 8 devices has tpu.topology=2x2"):
        plan(meshed, "v4:2x2x2", compile=False, keep=("tpu.topology",))
    with pytest.raises(PlanError, match=r"keep: got 'train.steps', expected some of model.remat"):
        plan(config, "v4:2x2x1", compile=False, keep=("train.steps",))
    with pytest.raises(DoesNotFitError, match=r"with model.remat=none.*train.batch_size"):
        plan(config, "v4:2x2x1", compile=False, keep=("model.remat",), memory_limit_gb=0.001)


def test_a_limit_goes_to_the_compiler_and_to_training():
    work, target = TrainWork(tiny()), parse_slice("v4:2x2x1")
    layout = next(work.layouts(target))
    # Without a limit a program may use what a device has, whatever the compiler assumes.
    assert work.job(layout, target).to_json()["compiler_options"][LIMIT] == str(int(30.75 * 1024))
    assert work.job(layout, parse_slice("v5p:2x2x1")).options[LIMIT] == str(int(95.73 * 1024))
    assert LIMIT not in layout.compiler_options
    found = plan(tiny(), target, compile=False, memory_limit_gb=2.5)
    assert {c.layout.compiler_options[LIMIT] for c in found.candidates} == {"2560"}
    assert f"{LIMIT}=2560" in " ".join(found.overrides())
    assert work.job(found.best.layout, target).options[LIMIT] == "2560"
    for limit in (None, 64.0):
        best = plan(tiny(), target, compile=False, memory_limit_gb=limit).best
        assert LIMIT not in best.layout.compiler_options
    assert limit_option(1) == (LIMIT, "1")


def test_advice_names_a_slice_that_exists():
    """96 chips are no slice of v4."""
    from capibara.plan.refusals import does_not_fit

    task, target = TrainWork(tiny()), parse_slice("v4:2x4x4")
    text = does_not_fit(task, target, 1 << 30, 3 << 30, {}, "estimated")
    assert "A slice such as v4:4x4x8 (128 chips, v4-256), a smaller" in text
    text = does_not_fit(task, target, 1 << 20, 1 << 30, {}, "estimated")
    assert "More than the 4096 chips of a v4 pod" in text


def test_a_part_of_a_host_is_priced_with_a_note():
    found = plan(tiny(), "v4:1x1x2", compile=False)
    assert any("v4:1x1x2 is a part of a host, which is rented as v4:2x2x1 (4 chips" in n for n in found.notes)
    assert not any("part of a host" in n for n in plan(tiny(), "v4:2x2x1", compile=False).notes)


@pytest.fixture
def small_programs(monkeypatch):
    """A compiler that needs 100 MiB, or 90 with a limit from there; a refusal says 5 MiB too little."""
    from capibara.plan.compiler import CompiledProgram, Memory

    asked: list[int] = []

    def compile_program(job, *, cache=None):
        asked.append(int(job.options[LIMIT]))
        if asked[-1] < 90:
            return CompiledProgram(status="oom", needed_bytes=max(60, min(asked[-1] + 9, 85)) << 20)
        memory = Memory(arguments=50 << 20, outputs=0, aliased=0, temporaries=40 << 20)
        return CompiledProgram(status="ok", memory=memory)

    def of(temporaries: int) -> CompiledProgram:
        memory = Memory(arguments=50 << 20, outputs=0, aliased=0, temporaries=temporaries << 20)
        return CompiledProgram(status="ok", memory=memory)

    monkeypatch.setattr("capibara.plan.memory.least.compile_program", compile_program)
    monkeypatch.setattr("capibara.plan.memory.least.read_program", lambda text: None)
    monkeypatch.setattr(CompiledProgram, "text", "")
    monkeypatch.setattr(
        "capibara.plan.memory.least.predict_step", lambda *_, **__: SimpleNamespace(seconds=2.0)
    )
    return asked, of


def test_the_least_memory_is_looked_for_from_below(small_programs):
    asked, of = small_programs
    work, target = TrainWork(tiny()), parse_slice("v4:2x2x1")
    layout = next(work.layouts(target))
    found = find_least_memory(work, target, layout, of(50))
    assert found is not None
    assert asked == sorted(asked)
    assert asked[0] == 50
    assert found.limit_bytes == asked[-1] << 20
    assert 90 << 20 <= found.limit_bytes < 95 << 20
    assert (found.hbm_bytes, found.seconds) == (90 << 20, 2.0)
    assert found.layout.compiler_options[LIMIT] == str(asked[-1])
    json.dumps(found.to_json())
    # Where the compiler cannot do with less there is nothing to say.
    assert find_least_memory(work, target, layout, of(40)) is None


def test_only_the_compiler_knows_the_least_memory():
    with pytest.raises(PlanError, match="least_memory: only the compiler"):
        plan(tiny(), "v4:2x2x1", compile=False, least_memory=True)


@pytest.mark.slow
@needs_libtpu
def test_the_compiler_keeps_to_a_limit(tmp_path):
    """It refuses a program that takes more, and with --least-memory it makes one smaller, or says that it cannot."""
    config = tiny("train.batch_size=64")
    free = plan(config, "v4:1x1x1", max_compiles=1, cache=tmp_path, least_memory=True)
    if (least := free.least_memory) is not None:
        assert least.hbm_bytes <= least.limit_bytes < free.best.hbm_bytes
    else:
        assert any("cannot fit the best layout into less memory" in note for note in free.notes)
    work, target = TrainWork(config), parse_slice("v4:1x1x1")
    held = sum(free.best.memory[kind] for kind in ("parameters", "optimizer"))
    small = replace(free.best.layout, flags=(*free.best.layout.flags, limit_option(held)))
    refused = compile_program(work.job(small, target), cache=ProgramCache(tmp_path))
    assert refused.status == "oom"
    assert f"available HBM ({held >> 20}" in refused.message or "xceeded hbm capacity" in refused.message


def test_the_search_goes_on_until_something_fits(compiled_at_once):
    """The compiler's sizes are 100 times what was thought."""
    layouts = [Layout(mesh=(("data", 4),), microbatches=m) for m in range(1, 9)]
    rough = {k: Rough({"all": k.microbatches << 13}, 1.0 / k.microbatches, 0.0, 0.0) for k in layouts}
    found = search(
        Known(dict.fromkeys(layouts, (1.0, 0)), rough),
        parse_slice("v4:2x2x1"),
        lambda program, k: 1.0,
        limit_bytes=3 << 20,
        max_compiles=4,
    )
    assert found.fitting
    assert all(c.layout.microbatches <= 3 for c in found.fitting)


@needs_libtpu
def test_a_compiled_plan_and_its_lock(tmp_path):
    config = tiny("train.batch_size=4")
    found = plan(config, "v4:1x1x2", max_compiles=2, cache=tmp_path / "cache")
    assert found.candidates
    best = found.best
    assert best.memory_source == "compiler"
    assert {"parameters", "optimizer"} <= set(best.memory)
    work = TrainWork(config)
    # Parameters in float32, over both devices or whole.
    from capibara.core.model import ModularCapibaraModel

    count = ModularCapibaraModel(config).num_params * 4
    held = best.memory["parameters"]
    assert count / 2 <= held <= count
    assert best.time.low <= best.step_seconds <= best.time.high
    assert sum(part.seconds for part in best.time.parts) == pytest.approx(best.step_seconds, rel=0.02)
    assert work.flops == best.flops
    found.lock(tmp_path / "plan.lock")
    check = check_lock(tmp_path / "plan.lock", cache=tmp_path / "cache")
    assert check.passed
    assert not check.changed
    data = json.loads((tmp_path / "plan.lock").read_text())
    (tmp_path / "plan.lock").write_text(json.dumps({**data, "hbm_bytes": data["hbm_bytes"] // 2}))
    check = check_lock(tmp_path / "plan.lock", cache=tmp_path / "cache")
    assert not check.passed
    assert "DRIFT  HBM" in str(check)
    # What the program does is compared, too; a difference is reported, and passes.
    changed = {**data["figures"], "FLOPs": data["figures"]["FLOPs"] * 2, "all-gather": 99}
    (tmp_path / "plan.lock").write_text(json.dumps({**data, "figures": changed}))
    check = check_lock(tmp_path / "plan.lock", cache=tmp_path / "cache")
    assert check.passed
    assert [each.partition(":")[0] for each in check.changed] == ["FLOPs", "all-gather"]
    assert "(-50.0%)" in str(check)
    del data["figures"]  # as in lockfiles of earlier versions
    (tmp_path / "plan.lock").write_text(json.dumps(data))
    assert not check_lock(tmp_path / "plan.lock", cache=tmp_path / "cache").changed


def linear_step(params, x, y):
    import jax
    import jax.numpy as jnp

    def loss(params):
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def described(*shape: int):
    import jax

    return jax.ShapeDtypeStruct(shape, "float32")


ARGS = ({"w": described(512, 256), "b": described(256)}, described(64, 512), described(64, 256))


def test_a_step_function_is_exported(tmp_path):
    work = step_work(linear_step, ARGS, tokens=64, folder=tmp_path)
    # A product forward; backward only that of the weights: 2 × 64 × 512 × 256 each.
    assert work.flops == 2 * 2 * 64 * 512 * 256
    found = plan(work, "v5e:2x2", compile=False)
    assert found.best.memory["state"] <= (512 * 256 + 256) * 4
    from jax.sharding import PartitionSpec as P

    layout = Layout(mesh=(("data", 2), ("model", 2)))
    params, x, _ = work.specs(layout)
    assert params == {"w": P("data", "model"), "b": P(None)} or params["w"] == P("model", "data")
    assert x == P("data", None)
    named = step_work(
        linear_step, ARGS, axes=({"w": ("embed", "mlp"), "b": None}, None, None), folder=tmp_path
    )
    assert named.specs(layout)[0]["w"] == P("data", "model")


def test_estimates_of_a_step_function_say_what_they_leave_out(tmp_path):
    found = plan(step_work(linear_step, ARGS, folder=tmp_path), "v5e:2x2", compile=False)
    assert any("memory is that of the step's arguments" in note for note in found.notes)
    assert not any("arguments" in note for note in plan(tiny(), "v5e:2x2", compile=False).notes)
    odd = step_work(lambda p, x: p, (described(7, 255), described(3, 5)), folder=tmp_path)
    with pytest.raises(PlanError, match="batch_argnums") as error:
        plan(odd, "v5e:2x2", compile=False)
    assert "train." not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_argnums": (7,)}, "batch_argnums has 7, but args has 2 entries"),
        ({"donate_argnums": (-3,)}, "donate_argnums has -3"),
        ({"donate_argnums": (True,)}, "donate_argnums has True"),
        ({"tokens": -3}, "tokens=-3"),
        ({"tokens": 0}, "tokens=0"),
        ({"axes": 5}, "axes is int"),
        ({"args": described(8, 256)}, "args is ShapeDtypeStruct"),
        ({"args": ()}, "args is tuple"),
        ({"args": ({}, None)}, "no arrays"),
        ({"folder": "/dev/null/x"}, "cannot be written into /dev/null"),
    ],
)
def test_wrong_arguments_of_a_step(change, message, tmp_path):
    with pytest.raises(PlanError, match=message):
        step_work(
            **{
                "step": lambda p, x: p,
                "args": (described(8, 256), described(4, 4)),
                "folder": tmp_path,
                **change,
            }
        )


def test_arguments_count_from_the_end_too(tmp_path):
    def step(p, x):
        return p

    args = (described(8, 256), described(4, 4))
    work = step_work(step, args, batch_argnums=(-1,), donate_argnums=(-2,), folder=tmp_path)
    assert work.kinds == {"state": (0,), "batch": (1,)}
    assert work.donated == (0,)


def test_what_inner_functions_close_over_is_found(tmp_path):
    """JAX keeps it with the inner function, not with the step."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    for constant in (jnp.zeros((256, 256)), np.zeros((256, 256), "float32")):
        inner = jax.jit(lambda x, constant=constant: x @ constant)
        for step in (inner, lambda x, inner=inner: jax.lax.cond(x[0, 0] > 0, inner, lambda y: y * 2.0, x)):
            with pytest.raises(PlanError, match="closes over 1 concrete arrays"):
                step_work(step, (described(8, 256),), folder=tmp_path)
    small = jnp.zeros(16)
    assert step_work(jax.jit(lambda x: x + small), (described(8, 16),), folder=tmp_path).shapes == ((8, 16),)


def test_steps_that_cannot_be_exported(tmp_path):
    import jax.numpy as jnp

    constant = jnp.zeros((256, 256))
    with pytest.raises(
        PlanError, match=r"closes over 1 concrete arrays \(float32\[256, 256\].*Make them arguments"
    ):
        step_work(lambda x: x @ constant, (described(8, 256),), folder=tmp_path)
    with pytest.raises(PlanError, match="cannot be traced"):
        step_work(linear_step, (ARGS[0], described(64, 3), ARGS[2]), folder=tmp_path)
    with pytest.raises(PlanError, match="one name a dimension"):
        step_work(linear_step, ARGS, axes=({"w": ("embed",), "b": None}, None, None), folder=tmp_path)
    with pytest.raises(PlanError, match="axes has 1 entries"):
        step_work(linear_step, ARGS, axes=(None,), folder=tmp_path)
    with pytest.raises(PlanError, match="expected a function"):
        step_work(3, ARGS, folder=tmp_path)  # type: ignore[arg-type]


@needs_libtpu
def test_a_step_function_is_compiled(tmp_path):
    work = step_work(linear_step, ARGS, folder=tmp_path)
    found = plan(work, "v5e:1x2", max_compiles=1, cache=tmp_path)
    assert found.compiled == 1
    assert found.best.memory_source == "compiler"
    assert found.best.hbm_bytes < 4 << 20
    with pytest.raises(PlanError, match="configuration"):
        found.lock(tmp_path / "x.lock")
    work.path.write_bytes(b"something else")
    with pytest.raises(PlanError, match="SHA-256 differs"):
        plan(work, "v5e:1x2", max_compiles=1, cache=tmp_path / "other")


def test_a_refusal_says_which_figures_are_estimates():
    """The compiler's total and estimated kinds need not agree: they stand apart."""
    from capibara.plan.refusals import does_not_fit

    task, target = TrainWork(tiny()), parse_slice("v5e:1x1")
    text = does_not_fit(task, target, 1 << 30, 5 << 30, {"parameters": 4 << 30}, "by the compiler")
    assert "at least 5.00 GiB a device (by the compiler; estimated: parameters 4.00 GiB)" in text
    text = does_not_fit(task, target, 1 << 30, 5 << 30, {"parameters": 4 << 30}, "estimated")
    assert "(estimated; parameters 4.00 GiB)" in text


@pytest.mark.parametrize("keep", [None, 5, {"model.remat": "full"}, [["a"]]])
def test_what_to_keep_is_names(keep):
    with pytest.raises(PlanError, match="keep: got"):
        plan(tiny(), "v5e:2x2", compile=False, keep=keep)


def test_a_kept_mesh_has_its_axes_in_any_order():
    meshes = [
        plan(
            tiny("tpu.topology=2x2", "tpu.num_chips=4", f"tpu.mesh_axes={axes}"),
            "v5e:2x2",
            compile=False,
            keep=["tpu.topology", "tpu.mesh_axes"],
        ).best.layout.mesh
        for axes in ("data,model", "model,data")
    ]
    assert meshes == [(("data", 2), ("model", 2)), (("model", 2), ("data", 2))]
    with pytest.raises(PlanError, match="a plan knows the mesh axes data, model"):
        plan(
            tiny("tpu.topology=2x2", "tpu.num_chips=4", "tpu.mesh_axes=data,context"),
            "v5e:2x2",
            compile=False,
            keep=["tpu.topology", "tpu.mesh_axes"],
        )


def test_of_two_limits_the_lower_one_is_the_compilers():
    from capibara.plan.compiler.limits import within

    target = parse_slice("v5e:2x2")
    layout = Layout(mesh=(("data", 4), ("model", 1)))
    for own, limit, expected in (
        ("99999", 1 << 30, "1024"),
        ("512", 1 << 30, "512"),
        ("99999", 1 << 50, None),
    ):
        found = within(replace(layout, flags=((LIMIT, own),)), limit, target).compiler_options[LIMIT]
        assert found == (expected or str(target.usable_hbm_bytes >> 20))
    assert LIMIT not in within(layout, 1 << 50, target).compiler_options

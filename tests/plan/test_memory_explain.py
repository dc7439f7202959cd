"""Why a layout does not fit, and what does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from capibara.config import ModularModelConfig
from capibara.plan import PlanError, parse_slice
from capibara.plan.compiler import CompiledProgram, Memory, find_compiler
from capibara.plan.errors import CompilationError, CompilerMissingError
from capibara.plan.memory import estimate_memory, explain, explain_oom
from capibara.plan.memory.naming import named
from capibara.plan.memory.remedies import changes
from capibara.sharding import Layout

PRODUCTION = (
    Path(__file__).parents[2] / "src" / "capibara" / "config" / "configs_toml" / "production" / "tpu_v4.toml"
)
TARGET = parse_slice("v5e:2x2")
GIB = 2**30


def config(layers=8, batch=32):
    whole = ModularModelConfig.from_toml(PRODUCTION)
    return whole.replace(
        model=whole.model.replace(num_layers=layers), train=whole.train.replace(batch_size=batch)
    )


def layout(**more):
    return Layout(mesh=(("data", 2), ("model", 2)), **{"remat": "none", **more})


# ---- what is proposed ----------------------------------------------------------------------------------------------


def test_everything_proposed_is_another_layout_that_an_estimate_lets_fit():
    found = changes(config(), layout(), TARGET)
    assert estimate_memory(config(), layout(), TARGET).total > TARGET.usable_hbm_bytes
    assert len(found) > 5
    for change in found:
        assert change.estimate.total <= change.target.usable_hbm_bytes
        assert (change.layout, change.target) != (layout(), TARGET)
        assert change.layout.num_devices == change.target.num_devices
        assert estimate_memory(config(), change.layout, change.target).total == change.estimate.total
    assert len({(c.layout, c.target) for c in found}) == len(found)
    words = " | ".join(c.words for c in found)
    for said in ("remat dots", "microbatches", "along model", "hosts' memory", "chips"):
        assert said in words


def test_what_is_replicated_can_be_sharded():
    given = Layout(mesh=(("data", 4), ("model", 1)), remat="full", parameters="replicated", microbatches=8)
    found = changes(config(24), given, TARGET)
    assert any(c.words.startswith("shard the parameters") for c in found)


def test_more_chips_are_proposed_however_small_the_microbatches_are():
    """A refused plan's least layout has as many microbatches as a device has rows: more devices have fewer rows."""
    given = Layout(mesh=(("data", 1), ("model", 1)), remat="full", microbatches=32, offload="optimizer")
    found = [c for c in changes(config(64), given, parse_slice("v5e:1x1")) if "chips" in c.words]
    assert found
    assert {c.layout.offload for c in found if "on the devices" in c.words} == {"none"}
    for change in found:
        rows, left = divmod(32, change.layout.microbatches)
        assert not left
        assert rows % change.layout.axis_sizes["data"] == 0


def test_a_batch_of_one_row_a_device_cannot_be_cut():
    found = changes(config(8, 2), layout(), TARGET)
    assert not any("microbatches" in c.words and "along" not in c.words for c in found)


# ---- what the compiler made itself -----------------------------------------------------------------------------------


def buffer(shape, kind="temporary", op_name="", place=""):
    return {"bytes": 1, "shape": shape, "op_name": op_name, "kind": kind, "padding": 0, "place": place}


def test_arrays_of_the_compiler_are_named_by_what_they_have_the_shape_of():
    found = named(
        [
            buffer("f32[24,128,512]", "parameters", "state.params['up']", "blocks/up"),
            buffer("f32[24,512,128]"),
            buffer("bf16[24,128,512]"),
            buffer("bf16[24,4,128]", op_name="jit(step)/jvp()/while"),
            buffer("bf16[24,4,128]", op_name="jit(step)/transpose(jvp())/while"),
            buffer("f32[24,128,512]", op_name="jit(step)/dot_general", place="blocks/product"),
            buffer("f32[7]"),
            buffer("(f32[24,128,512], f32[])"),
        ]
    )
    assert [each["place"] for each in found] == [
        "blocks/up",
        "a gradient, or a copy, of the shape of blocks/up",
        "a copy in bfloat16 of the shape of blocks/up",
        "kept for the backward pass",
        "",
        "blocks/product",
        "",
        "",
    ]


# ---- what is said --------------------------------------------------------------------------------------------------

BUFFERS = (
    {
        "bytes": 6 * GIB,
        "shape": "bf16[8,1000]",
        "op_name": "jit(step)/transpose(jvp())/while",
        "kind": "temporary",
        "padding": GIB,
        "place": "blocks",
    },
    {"bytes": GIB, "shape": "f32[9]", "op_name": "x", "kind": "parameters", "padding": 0, "place": ""},
    {"bytes": GIB, "shape": "f32[9]", "op_name": "x", "kind": "parameters", "padding": 0, "place": ""},
)
REFUSED = CompiledProgram(status="oom", needed_bytes=20 * GIB, message="RESOURCE_EXHAUSTED", buffers=BUFFERS)


@pytest.fixture
def compiler(monkeypatch):
    """A compiler that takes rematerialised layouts on four chips, and times them by their microbatches."""
    asked = []

    def compile_programs(jobs, *, started, **_):
        # Done in another order than asked for, as a pool does.
        for number, job in reversed(list(enumerate(jobs))):
            started(number)
            yield number, compiled(job)

    def compiled(job):
        given = Layout.from_json(job.params["layout"])
        asked.append(given)
        if given.remat == "full" and job.slice == TARGET:
            memory = Memory(arguments=GIB, outputs=0, aliased=0, temporaries=2 * GIB)
            return SimpleNamespace(
                status="ok", memory=memory, text=given.microbatches, coordinates=(), buffers=BUFFERS
            )
        return REFUSED

    monkeypatch.setattr(explain, "compile_programs", compile_programs)
    monkeypatch.setattr(explain, "read_program", lambda text: text)
    monkeypatch.setattr(
        explain, "predict_step", lambda facts, *_, **__: SimpleNamespace(seconds=1.0 + 0.1 * facts)
    )
    return asked


def test_only_what_was_compiled_is_named_the_fastest_first(compiler, tmp_path):
    report = explain_oom(config(), layout(), TARGET, remedies=2, max_compiles=8, cache=tmp_path)
    assert compiler.count(layout()) == 1
    assert report.needed_bytes == 20 * GIB
    assert report.limit_bytes == TARGET.usable_hbm_bytes
    assert len(report.remedies) == 2
    assert all(r.layout.remat == "full" and r.hbm_bytes == 3 * GIB for r in report.remedies)
    seconds = [r.seconds for r in report.remedies]
    assert seconds == sorted(seconds)
    assert report.remedies[0].chip_seconds == pytest.approx(4 * seconds[0])
    assert "remat dots" in report.refused
    assert len(compiler) == 1 + len(report.remedies) + len(report.refused)


def test_the_text_names_buffers_padding_and_remedies(compiler, tmp_path):
    text = str(explain_oom(config(), layout(), TARGET, remedies=1, max_compiles=8, cache=tmp_path))
    assert "takes 20.00 GiB a device" in text
    assert "6.00 GiB bf16[8,1000] temporary, 17% padding: blocks" in text
    assert "2 × 1.00 GiB f32[9] parameters: x" in text
    assert "Padding to tiles takes 1.00 GiB" in text
    assert "What fits (compiled):" in text
    assert "s a step on 4 chips" in text


def test_it_travels(compiler, tmp_path):
    report = explain_oom(config(), layout(), TARGET, remedies=1, max_compiles=8, cache=tmp_path)
    data = json.loads(json.dumps(report.to_json()))
    assert data["needed_bytes"] == 20 * GIB
    assert data["padding_bytes"] == GIB
    assert Layout.from_json(data["remedies"][0]["layout"]) == report.remedies[0].layout


def test_nothing_found_is_said(compiler, tmp_path):
    report = explain_oom(config(), layout(), TARGET, max_compiles=0, cache=tmp_path)
    assert report.remedies == ()
    assert "No change was compiled." in str(report)
    report = explain_oom(config(), layout(), TARGET, max_compiles=1, cache=tmp_path)
    assert report.refused == ("remat dots",)
    assert "No change that was compiled fits.\nDoes not fit either: remat dots" in str(report)
    for wrong in (0, True):
        with pytest.raises(PlanError, match=f"workers={wrong}"):
            explain_oom(config(), layout(), TARGET, workers=wrong, cache=tmp_path)


def test_a_remedy_whose_compiler_dies_costs_only_itself(compiler, monkeypatch, tmp_path):
    takes = vars(explain)["compile_programs"]

    def compile_programs(jobs, **rest):
        jobs = list(jobs)
        for number, program in takes(jobs, **rest):
            if Layout.from_json(jobs[number].params["layout"]).remat == "dots":
                program = CompiledProgram(status="error", message="ended with exit code -9")
            yield number, program

    monkeypatch.setattr(explain, "compile_programs", compile_programs)
    report = explain_oom(config(), layout(), TARGET, remedies=2, max_compiles=8, cache=tmp_path)
    assert len(report.remedies) == 2
    assert any("exit code -9" in each for each in report.refused)


def test_changes_are_compiled_side_by_side_and_only_as_long_as_wanted(compiler, monkeypatch, tmp_path):
    takes, calls, seen = vars(explain)["compile_programs"], [], []

    def compile_programs(jobs, **rest):
        jobs = list(jobs)
        calls.append((len(jobs), rest["workers"]))
        return takes(jobs, **rest)

    monkeypatch.setattr(explain, "compile_programs", compile_programs)
    report = explain_oom(
        config(), layout(), TARGET, remedies=2, max_compiles=8, workers=3, cache=tmp_path,
        progress=lambda event, given, program: seen.append((event, given, program is None)),
    )  # fmt: skip
    # The layout itself and two changes, of which one is refused; then as many as are still wanted.
    assert calls[0] == (3, 3)
    assert len(calls) > 1
    assert all(count <= 2 and workers == 3 for count, workers in calls[1:])
    assert len(report.remedies) == 2
    assert sum(count for count, _ in calls) == 1 + len(report.remedies) + len(report.refused)
    assert len(seen) == 2 * sum(count for count, _ in calls)
    assert {(event, without) for event, _, without in seen} == {("start", True), ("done", False)}


def test_remedies_keep_to_a_lower_limit(compiler, tmp_path):
    """What fits the device, and not what it may use of it, is explained; and is not a remedy."""
    given = {"remedies": 1, "max_compiles": 2, "cache": tmp_path}
    with pytest.raises(PlanError, match=r"takes 3\.00 GiB of 4\.00 GiB"):
        explain_oom(config(), layout(remat="full"), TARGET, memory_limit_gb=4, **given)
    report = explain_oom(config(), layout(remat="full"), TARGET, memory_limit_gb=2.5, **given)
    assert (report.needed_bytes, report.limit_bytes) == (3 * GIB, 2.5 * GIB)
    assert report.remedies == ()
    assert "takes 3.00 GiB a device; a device may use 2.50 GiB of its 15.75 GiB." in str(report)
    assert "6.00 GiB bf16[8,1000]" in str(report)
    for change in changes(config(), layout(), TARGET, 4 * GIB):
        assert change.estimate.total <= 4 * GIB
    with pytest.raises(PlanError, match="memory_limit_gb=0"):
        explain_oom(config(), layout(), TARGET, memory_limit_gb=0)


def test_a_layout_that_fits_needs_no_explanation(compiler, tmp_path):
    with pytest.raises(PlanError, match=r"fits v5e:2x2 .*3\.00 GiB of 15\.75 GiB"):
        explain_oom(config(), layout(remat="full"), TARGET, cache=tmp_path)


def test_another_failure_is_not_taken_for_memory(tmp_path):
    broken = CompiledProgram(status="error", message="ValueError: axes")
    with pytest.raises(CompilationError, match="ValueError: axes"):
        explain_oom(config(), layout(), TARGET, program=broken, cache=tmp_path)


@pytest.mark.parametrize(("name", "value"), [("remedies", -1), ("max_compiles", 1.5), ("remedies", True)])
def test_wrong_counts_are_refused(name, value, tmp_path):
    with pytest.raises(PlanError, match=f"{name}={value!r}"):
        explain_oom(config(), layout(), TARGET, cache=tmp_path, **{name: value})


@pytest.mark.slow
def test_the_real_compiler_refuses_explains_and_takes(tmp_path):
    try:
        find_compiler()
    except CompilerMissingError as error:
        pytest.skip(str(error))
    report = explain_oom(config(4, 64), layout(), TARGET, remedies=1, max_compiles=2, cache=tmp_path)
    assert report.needed_bytes > report.limit_bytes
    kinds = {each["kind"] for each in report.buffers}
    assert {"temporary", "parameters", "optimizer"} <= kinds
    assert any(each["place"].startswith("blocks") for each in report.buffers if each["kind"] == "temporary")
    (remedy,) = report.remedies
    assert remedy.hbm_bytes <= report.limit_bytes
    assert remedy.seconds > 0

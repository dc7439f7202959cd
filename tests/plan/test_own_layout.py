"""A layout of one's own beside the pick: read, refused with a reason, estimated, compiled."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest
from tpu_compiler import needs_libtpu

from capibara.cli import main
from capibara.config import ModularModelConfig
from capibara.errors import ConfigError
from capibara.plan import DoesNotFitError, PlanError, parse_slice, plan
from capibara.plan.own import OwnLayout, read_layout, why_not
from capibara.plan.sizes import size_text
from capibara.plan.work import TrainWork
from capibara.sharding import Layout

SMALL = (
    *("model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=4"),
    *("model.vocab_size=512", "train.batch_size=8", "train.sequence_length=128"),
)
FOUR = (("data", 4), ("model", 1))


def small(*settings: str) -> ModularModelConfig:
    return ModularModelConfig.from_toml("demo", [*SMALL, *settings])


def test_a_layout_is_read_from_all_that_holds_one(tmp_path):
    mine = Layout(mesh=FOUR, remat="dots", microbatches=2, flags=(("xla_some", "1"),))
    task = TrainWork(small())
    path = tmp_path / "plan.lock"
    data = {"layout": mine.to_json(), "config": task.config.to_dict(), "topology": "v5e:2x2"}
    path.write_text(json.dumps(data))
    words = mine.overrides()
    for given in (mine, words, shlex.join(words), str(path), path):
        assert read_layout(given, task) == mine
    # The number of chips follows from the mesh; what is not given is the configuration's.
    short = read_layout("topology=4x1 remat=dots", TrainWork(small("tpu.parameters=replicated")))
    assert short == Layout(mesh=FOUR, remat="dots", parameters="replicated")
    # Rows that do not divide are a reason, not an error.
    assert read_layout("tpu.topology=4x1 gradient_accumulation_steps=3", task).microbatches == 3


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("model.num_layers=4", PlanError, "layout: model.num_layers is not a setting of a layout"),
        ("model.remat=some", ConfigError, "model.remat: got 'some'"),
        ("tpu.topology=4xx", ConfigError, "got '4xx'"),
        ("tpu.topology=4x1 tpu.num_chips=8", ConfigError, "expected num_chips = 8"),
        ("tpu.topology=2x2x1", ConfigError, "mesh_axes"),
        ("tpu.flags=xla_dump_to=/tmp", ConfigError, "flags"),
        ("gradient_accumulation_steps=0", ConfigError, "gradient_accumulation_steps: got 0"),
        ("wings=2", ConfigError, "no such setting"),
        ("none.lock", PlanError, "the plan 'none.lock' cannot be read"),
        ("'", PlanError, "Quote it as for a shell"),
        ("", PlanError, "expected key=value settings"),
        ([], PlanError, "expected key=value settings"),
        (3, PlanError, "layout: got 3, expected a Layout"),
        ({"model.remat": "dots"}, PlanError, "expected a Layout"),
        (Layout(mesh=FOUR, flags=(("xla_dump_to", "/tmp"),)), ConfigError, "flags"),
    ],
)
def test_what_is_not_a_layout(given, error, words):
    with pytest.raises(error, match=words):
        plan(small(), "v5e:2x2", compile=False, layout=given)


def test_settings_are_not_those_of_a_step_function():
    import jax
    import jax.numpy as jnp

    from capibara.plan import step_work

    array = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    work = step_work(lambda p, x: p - x.mean(), (array, array))
    with pytest.raises(PlanError, match=r"layout: got 'model.remat=dots', but a step function"):
        plan(work, "v5e:2x2", compile=False, layout="model.remat=dots")
    mine = Layout(mesh=FOUR, parameters="replicated")
    found = plan(work, "v5e:2x2", compile=False, layout=mine, top=1)
    assert found.own is not None
    assert found.own.candidate is not None
    assert found.own.candidate.layout == mine


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(mesh=(("data", 8),)), "its mesh has 8 devices, and v5e:2x2 (4 chips, v5litepod-4) has 4"),
        (Layout(mesh=FOUR, microbatches=4), "train.batch_size=8 must be a multiple of 4 microbatches × 4"),
        (Layout(mesh=(("wings", 4),)), "nothing is cut along 'wings'"),
        (Layout(mesh=(("pipeline", 4),)), "which divide model.num_layers=2 blocks into equal stages"),
        (Layout(mesh=(("context", 4),)), "train.sequence_length=126 must be a multiple of the 4 devices"),
    ],
)
def test_a_layout_that_cannot_be_divided_has_a_reason(layout, reason):
    config, target = small("train.sequence_length=126"), parse_slice("v5e:2x2")
    assert reason in why_not(TrainWork(config), layout, target)
    found = plan(config, target, compile=False, layout=layout)
    assert found.own is not None
    assert reason in found.own.reason
    assert found.own.candidate is None
    (line,) = [line for line in str(found).splitlines() if line.strip().startswith("yours")]
    assert line.strip() == f"yours  {layout}: {found.own.reason}"
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert reason in data["own"]["reason"]
    assert data["own"]["candidate"] is None
    assert data["own"]["beside_best"] == {}
    # The plan is what it would be without it.
    assert found.candidates == plan(config, target, compile=False).candidates


def test_a_layout_of_ones_own_stands_beside_the_pick():
    config = ModularModelConfig.from_toml("production/tpu_v4")
    words = "tpu.topology=16x1 model.remat=full gradient_accumulation_steps=4"
    found = plan(config, "v4-32", compile=False, top=2, layout=words)
    own, best = found.own, found.best
    assert own is not None
    assert own.candidate is not None
    assert len(found.candidates) == 3
    assert found.candidates[-1] is own.candidate
    beside = own.beside(best)
    assert beside["step_seconds"] == pytest.approx(own.candidate.step_seconds / best.step_seconds)
    assert beside["step_seconds"] > 1
    assert beside["tokens_per_second"] == pytest.approx(1 / beside["step_seconds"])
    assert beside["usd_per_step"] == pytest.approx(beside["step_seconds"])
    assert beside["hbm_bytes"] < 1
    text = str(found)
    assert [row.split()[0] for row in text.splitlines()[3:6]] == ["1", "2", "yours"]
    (line,) = [line for line in text.splitlines() if line.strip().startswith("yours  ") and "beside" in line]
    assert f"{own.candidate.step_seconds:.3g} s a step (+{beside['step_seconds'] - 1:.1%})" in line
    assert line.endswith("other remat, microbatches")
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert data["own"]["beside_best"] == pytest.approx(beside)
    assert data["own"]["overrides"] == own.layout.overrides()
    # What is the pick itself says so, and is there once.
    same = plan(config, "v4-32", compile=False, top=2, layout=best.layout)
    assert same.own is not None
    assert same.own.candidate is same.best
    assert len(same.candidates) == 2
    assert "yours  is the pick" in str(same)
    assert "1 yours" in str(same)


def test_a_layout_that_does_not_fit_says_what_it_takes():
    words = "tpu.topology=4x1 tpu.parameters=replicated"
    every = plan(small(), "v5e:2x2", compile=False, top=1000).candidates
    least = min(c.hbm_bytes for c in every) + (1 << 20)
    found = plan(small(), "v5e:2x2", compile=False, layout=words, memory_limit_gb=least / 2**30)
    assert found.own is not None
    assert found.own.candidate is not None
    assert found.own.reason.startswith("it takes ")
    assert (
        f"a device (estimated), and a device may use {size_text(least)} of its 15.75 GiB" in found.own.reason
    )
    assert found.own.candidate not in found.candidates
    # The limit is among its flags, as among those of the others.
    assert found.own.layout.compiler_options["xla_tpu_max_hbm_size_mib"] == str(least >> 20)


def test_where_nothing_else_can_run_it_is_the_pick():
    """Three rows over four devices: only the positions can be divided."""
    config = small("train.batch_size=3", "model.num_heads=1", "model.num_kv_heads=1", "model.num_layers=1")
    mine = Layout(mesh=(("context", 4),), remat="none", parameters="replicated")
    found = plan(config, "v5e:2x2", compile=False, layout=mine)
    assert found.own is not None
    assert found.own.candidate in found.candidates


def test_what_is_kept_is_kept_beside_ones_own():
    config = small("model.remat=none")
    mine = Layout(mesh=FOUR, remat="dots")
    found = plan(config, "v5e:2x2", compile=False, layout=mine, keep=("model.remat",), top=1000)
    assert found.own is not None
    assert found.own.candidate is not None
    assert {c.layout.remat for c in found.candidates} == {"none"}
    free = plan(config, "v5e:2x2", compile=False, layout=mine, top=1000)
    assert free.own is not None
    assert free.own.candidate in free.candidates


def test_a_refusal_of_the_compiler_is_a_reason(monkeypatch):
    from capibara.plan import planning
    from capibara.plan.compiler import CompiledProgram

    programs = [
        CompiledProgram(status="oom", needed_bytes=20 << 30, message="out of memory"),
        CompiledProgram(status="error", message="no such option"),
    ]
    monkeypatch.setattr(planning, "candidate_of", lambda *_, **__: (programs[0], None))
    task, target = TrainWork(small()), parse_slice("v5e:2x2")
    arguments = (task, target, Layout(mesh=FOUR), target.usable_hbm_bytes, None, None, None)
    own = planning._own(*arguments)  # type: ignore[arg-type]
    assert own.reason == "it takes 20.00 GiB a device (by the compiler), and a device has 15.75 GiB"
    del programs[0]
    assert planning._own(*arguments).reason == "no such option"  # type: ignore[arg-type]


def test_the_command(capsys, tmp_path):
    arguments = ["plan", "--no-compile", "--topology", "v5e:2x2", *SMALL]
    assert main([*arguments, "--layout", "tpu.topology=2x2", "--top", "1"]) == 0
    out = capsys.readouterr().out
    assert "yours  data 2 × model 2" in out
    assert "beside the pick" in out
    assert main([*arguments, "--layout", "tpu.topology=8x1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "its mesh has 8 devices" in found["own"]["reason"]
    assert main([*arguments, "--layout", "model.remat=some"]) == 2
    assert "model.remat: got 'some'" in capsys.readouterr().err
    assert main(["plan", "--check", str(tmp_path / "x.lock"), "--layout", "model.remat=dots"]) == 2
    assert "--layout cannot be combined with --check" in capsys.readouterr().err
    served = ("--serve", "--prompt-length", "8", "--output-length", "8")
    assert main(["plan", *served, "--layout", "model.remat=dots"]) == 2
    assert "--layout cannot be combined with --serve" in capsys.readouterr().err
    report = tmp_path / "plan.html"
    assert main([*arguments, "--layout", "tpu.topology=2x2", "--report", str(report)]) == 0
    assert "beside the pick" in report.read_text()


@pytest.mark.slow
@needs_libtpu
def test_a_compiled_layout_of_ones_own(tmp_path):
    mine = Layout(mesh=(("data", 1), ("model", 2)), parameters="replicated", remat="full")
    found = plan(small(), "v4:1x1x2", max_compiles=1, cache=tmp_path, layout=mine, top=1)
    own = found.own
    assert own is not None
    assert own.candidate is not None
    assert own.candidate.memory_source == "compiler"
    assert own.candidate.program_hash != found.best.program_hash or own.candidate is found.best
    assert found.best.step_seconds <= own.candidate.step_seconds
    with pytest.raises(DoesNotFitError):
        plan(small(), "v4:1x1x2", max_compiles=1, cache=tmp_path, layout=mine, memory_limit_gb=0.001)


def test_the_first_is_compiled_where_others_are_only_scheduled():
    """A layout without machine code may promise more than one that was compiled."""
    from capibara.plan.compiler import CompiledProgram
    from capibara.plan.narrowed import Narrowed
    from capibara.plan.planning import _with_own

    found = plan(small(), "v5e:2x2", compile=False, top=3).candidates
    parts = CompiledProgram(status="ok", complete=False)
    promised = replace(found[0], program=parts)
    assert promised.scheduled
    own = OwnLayout(found[2].layout, found[2])
    narrowed = Narrowed(TrainWork(small()), 1 << 30)
    for others in ([found[1], promised], [promised], [replace(found[2], program=parts)]):
        merged = _with_own(others, own, narrowed)
        assert not merged[0].scheduled
        assert merged.count(found[2]) == 1
        assert [c.layout for c in merged[1:]] == [
            c.layout for c in sorted(merged[1:], key=lambda c: c.step_seconds)
        ]
    assert _with_own([found[1], promised], own, narrowed)[0] is found[1]
    assert _with_own([promised], own, narrowed)[0] is own.candidate

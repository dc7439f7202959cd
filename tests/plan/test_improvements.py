"""Changes of settings that a plan may not choose: what is proposed, and what of it is named."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tpu_compiler import needs_libtpu

from capibara.config import ModularModelConfig
from capibara.plan import PlanError, parse_slice, plan, step_work
from capibara.plan import improvements as module
from capibara.plan.candidate import Candidate
from capibara.plan.compiler import CompiledProgram, Memory
from capibara.plan.improvements import find_improvements
from capibara.plan.time import StepTime
from capibara.sharding import Layout

TARGET = parse_slice("v5e:2x2")
LAYOUT = Layout(mesh=(("data", 4), ("model", 1)), remat="none", microbatches=2)


def config(*settings: str) -> ModularModelConfig:
    return ModularModelConfig.from_toml(
        "demo",
        ["model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=4",
         "model.vocab_size=500", "train.batch_size=8", "train.sequence_length=128", *settings],
    )  # fmt: skip


def best(tokens: int = 8 * 128, seconds: float = 1.0) -> Candidate:
    time = StepTime(seconds, seconds, seconds, seconds, 0.0, 0.0, 0.0, ())
    return Candidate(
        layout=LAYOUT,
        target=TARGET,
        memory={"parameters": 1},
        memory_source="compiler",
        time=time,
        tokens=tokens,
    )


@pytest.fixture
def compiler(monkeypatch):
    """A compiler for which each proposal takes the seconds and MiB of a table; others do not fit."""
    asked: list[dict] = []
    takes: dict[str, tuple[float, int]] = {}

    def compile_programs(jobs, *, started, **_):
        for number, job in reversed(list(enumerate(jobs))):
            started(number)
            given = job.params["config"]
            asked.append({"config": given, "layout": Layout.from_json(job.params["layout"])})
            what = next((key for key in takes if key in _changed(given, asked[-1]["layout"])), None)
            if what is None:
                yield number, CompiledProgram(status="oom", needed_bytes=1 << 40)
                continue
            memory = Memory(arguments=takes[what][1] << 20, outputs=0, aliased=0, temporaries=0)
            yield number, CompiledProgram(status="ok", memory=memory, message=str(takes[what][0]))

    def _changed(given, layout) -> str:
        base = config().to_dict()
        words = [
            f"{section}.{key}"
            for section, table in given.items()
            if isinstance(table, dict)
            for key, value in table.items()
            if value != base.get(section, {}).get(key)
        ]
        return " ".join([*words, f"{layout.microbatches} microbatches"])

    monkeypatch.setattr(module, "compile_programs", compile_programs)
    monkeypatch.setattr(CompiledProgram, "text", property(lambda self: self.message))
    monkeypatch.setattr(module, "read_program", float)
    monkeypatch.setattr(
        module, "predict_step", lambda seconds, *_, **__: StepTime(seconds, 0, 0, 0, 0, 0, 0, ())
    )
    return asked, takes


@pytest.fixture
def compiled(compiler, monkeypatch):
    """That compiler, which first schedules; the texts of what it was asked to compile."""
    whole, found = vars(module)["compile_programs"], []

    def compile_programs(jobs, *, schedule, **more):
        for number, program in whole(jobs, schedule=schedule, **more):
            if not schedule:
                found.append(program.message)
            yield number, replace(program, complete=not schedule) if program.fits else program

    monkeypatch.setattr(module, "compile_programs", compile_programs)
    return found


def test_only_what_promises_most_is_compiled(compiler, compiled):
    _, takes = compiler
    takes.update(
        {
            "precision.compute_dtype": (0.5, 10),
            "model.vocab_size": (0.9, 10),
            "4 microbatches": (1.85, 10),
            "train.batch_size": (1.6, 5000),
        }
    )
    found = find_improvements(config(), best(), limit_bytes=100 << 20, most=1)
    assert [one.settings for one in found] == [("precision.compute_dtype=bfloat16",)]
    assert sorted(compiled) == ["0.5", "0.9"]  # two at a time
    compiled.clear()
    assert len(find_improvements(config(), best(), limit_bytes=100 << 20, most=3)) == 3
    assert sorted(compiled) == ["0.5", "0.9", "1.85"]
    # Beside a plan whose cycles are twice its roofline all take twice as long.
    compiled.clear()
    slow = replace(best(), program=CompiledProgram(status="ok", message="0.5"))
    (first, *_) = find_improvements(config(), slow, limit_bytes=100 << 20, most=1)
    assert first.speed == 2.0
    assert sorted(compiled) == ["0.5", "0.9"]


def test_a_change_is_named_once(compiler, compiled):
    """A batch in another number of microbatches is the same change: it takes no other one's place."""
    _, takes = compiler
    takes.update({"4 microbatches": (1.9, 10), "train.batch_size": (1.6, 10), "model.vocab_size": (0.99, 10)})
    found = find_improvements(config(), best(), limit_bytes=100 << 20, most=2)
    assert [(one.settings, one.layout.microbatches) for one in found] == [
        (("train.batch_size=16",), 2),
        (("model.vocab_size=512",), 2),
    ]
    assert [one.speed for one in found] == pytest.approx([2 / 1.6, 1 / 0.99])


def test_what_helps_most_is_named_first(compiler):
    asked, takes = compiler
    takes.update(
        {
            "precision.compute_dtype": (0.5, 10),
            "model.vocab_size": (0.9, 10),
            "model.scan_layers": (1.2, 10),
            "4 microbatches": (1.85, 10),
            "train.batch_size": (1.6, 5000),
        }
    )
    found = find_improvements(config(), best(), limit_bytes=100 << 20, most=3)
    assert [one.settings for one in found] == [
        ("precision.compute_dtype=bfloat16",),
        ("model.vocab_size=512",),
        ("train.batch_size=16",),
    ]
    # Twice the tokens in 1.85 s; what takes more memory than there is, or more time, is not named.
    assert [one.speed for one in found] == pytest.approx([2.0, 1 / 0.9, 2 / 1.85])
    assert found[2].layout.microbatches == 4
    assert found[2].tokens == 2 * 8 * 128
    assert json.loads(json.dumps(found[0].to_json()))["speed"] == 2.0
    # All were compiled in the planned mesh.
    assert {each["layout"].mesh for each in asked} == {LAYOUT.mesh}
    assert len(find_improvements(config(), best(), limit_bytes=100 << 20, most=1)) == 1


def test_nothing_that_is_so_already_is_proposed(compiler):
    asked, _ = compiler
    given = config(
        "precision.compute_dtype=bfloat16",
        "precision.exchange=compute",
        "model.vocab_size=512",
        "model.mlp_dim=256",
        "model.scan_layers=unroll",
    )
    assert find_improvements(given, best(), limit_bytes=1 << 40) == ()
    assert {each["config"]["train"]["batch_size"] for each in asked} == {16}
    assert sorted(each["layout"].microbatches for each in asked) == [2, 4]


def test_sizes_of_published_weights_are_not_proposed(compiler):
    asked, _ = compiler
    told: list[str] = []
    find_improvements(
        config(),
        best(),
        limit_bytes=1 << 40,
        fixed={"model.vocab_size", "model.mlp_dim"},
        progress=lambda event, what, program: told.append(f"{event} {what}"),
    )
    assert {each["config"]["model"]["vocab_size"] for each in asked} == {500}
    assert "start precision.compute_dtype=bfloat16, 2 microbatches" in told
    assert len(set(told)) == len(told) == 2 * len(asked)


@pytest.mark.parametrize("improve", [-1, True, 1.5])
def test_bad_numbers(improve):
    with pytest.raises(PlanError, match="improve"):
        plan(config(), "v5e:2x2", compile=False, improve=improve)


def test_it_needs_the_compiler_and_settings():
    import jax

    with pytest.raises(PlanError, match="nothing is compiled"):
        plan(config(), "v5e:2x2", compile=False, improve=1)
    work = step_work(lambda x: x, (jax.ShapeDtypeStruct((8, 8), "float32"),), batch_argnums=())
    with pytest.raises(PlanError, match="no settings to change"):
        plan(work, "v5e:1x1", improve=1)


@pytest.mark.slow
@needs_libtpu
def test_bfloat16_is_proposed_by_the_compiler(tmp_path):
    found = plan(
        config("model.scan_layers=unroll", "model.vocab_size=512", "model.mlp_dim=256"),
        "v5e:2x2",
        max_compiles=1,
        improve=3,
        cache=tmp_path,
    )
    names = {setting.partition("=")[0] for one in found.improvements for setting in one.settings}
    assert names <= {"precision.compute_dtype", "train.batch_size"}
    assert found.improvements
    assert all(one.speed > 1 for one in found.improvements)
    assert "more tokens per second" in str(found)
    assert found.to_json()["improvements"]

"""The command ``capibara plan``: what it refuses, and when."""

from __future__ import annotations

import json
import re

import pytest
from tpu_compiler import needs_libtpu

from capibara.cli import main
from capibara.plan import CompilerMissingError, DoesNotFitError

TINY = (
    *("model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=4"),
    *("model.vocab_size=512", "train.batch_size=8", "train.sequence_length=128"),
)


def said(capsys, *arguments: str) -> str:
    """What a refusal says; nothing was compiled or written for it."""
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "ignored",
    [
        ["--topology", "v5e:2x2"],
        ["--config", "production/tpu_v4"],
        ["model.num_layers=3"],
        ["--no-compile"],
        ["--explain"],
        ["--least-memory"],
        ["--report", "x.html"],
        ["--lock", "y.lock"],
        ["--term", "spot"],
        ["--max-compiles", "2"],
        ["--workers", "1"],
    ],
)
def test_a_check_ignores_nothing(ignored, capsys, tmp_path):
    assert "cannot be combined with --check" in said(capsys, "--check", str(tmp_path / "x.lock"), *ignored)


def test_options_of_other_plans(capsys):
    assert "--tolerance is for --check" in said(capsys, "--tolerance", "0.1")
    serving = ("--serve", "--prompt-length", "8", "--output-length", "8")
    for option in (["--explain"], ["--least-memory"], ["--top", "2"], ["--tolerance", "0.1"]):
        assert f"{option[0]} cannot be combined with --serve" in said(capsys, *serving, *option)


def test_files_that_cannot_be_written_are_refused_before_planning(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("capibara.plan.plan", None, raising=False)
    assert ".html or .png" in said(capsys, "--report", str(tmp_path / "plan.pdf"))
    for option, name in (("--report", "none/plan.html"), ("--lock", "none/plan.lock"), ("--lock", "")):
        assert "a folder that exists" in said(capsys, option, str(tmp_path / name) if name else "")
    assert "a folder that exists" in said(capsys, "--lock", str(tmp_path))


def test_a_file_that_fails_at_last_is_no_traceback(capsys, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device", "plan.html")

    monkeypatch.setattr("capibara.plan.report.page.write_report", full)
    arguments = ("--no-compile", "--topology", "v5e:2x2", "--report", str(tmp_path / "plan.html"), *TINY)
    assert "plan.html cannot be written: No space left on device" in said(capsys, *arguments, "--json")


@pytest.mark.parametrize(
    "option", ["--topology", "--config", "--model", "--region", "--term", "--prices", "--cache", "--check"]
)
def test_an_empty_text_is_not_the_default(option, capsys):
    assert f"{option}: got '', expected a value" in said(capsys, option, "")


@pytest.mark.parametrize("limit", ["0", "nan", "inf", "-1"])
def test_a_limit_is_a_number_of_gib(limit, capsys):
    assert f"--memory-limit: got {limit}, expected GiB above 0" in said(capsys, f"--memory-limit={limit}")


@pytest.mark.parametrize(
    ("topology", "nearest"),
    [("v4-192", "v4:4x4x8 (128 chips, v4-256)"), ("v4:5x5x5", "v4:4x4x4"), ("v5e:4x6", "v5e:4x8")],
)
def test_slices_that_nobody_can_rent_are_refused(topology, nearest, capsys):
    for more in ((), ("--serve", "--prompt-length", "8", "--output-length", "8")):
        words = said(capsys, "--topology", topology, "--no-compile", *more)
        assert f"topology={topology!r}: no slice of " in words
        assert nearest in words


def test_settings_given_by_hand_are_kept(capsys):
    given = (
        "model.remat=none",
        "gradient_accumulation_steps=2",
        "tpu.flags=xla_enable_async_all_gather=false",
    )
    arguments = ("--no-compile", "--topology", "v5e:2x2", *TINY)
    assert main(["plan", *arguments, *given]) == 0
    out = capsys.readouterr().out
    assert "note: kept as given: model.remat=none, train.gradient_accumulation_steps=2, tpu.flags=xla_" in out
    for setting in ("model.remat=none", "train.gradient_accumulation_steps=2", given[2]):
        assert f" {setting}" in out.partition("run ")[2]
    # Those of the configuration's file are what a plan replaces.
    assert main(["plan", *arguments, "--json"]) == 0
    assert not any("kept" in note for note in json.loads(capsys.readouterr().out)["notes"])
    assert "no layout of 4 devices has tpu.topology=8x1" in said(
        capsys, *arguments, "tpu.topology=8x1", "tpu.num_chips=8"
    )
    # What follows from the slice is replaced.
    assert main(["plan", *arguments, "tpu.enabled=false"]) == 0
    assert "note: replaced by the plan's own: tpu.enabled=false by true" in capsys.readouterr().out
    served = ("--serve", "--no-compile", "--prompt-length", "8", "--output-length", "8")
    assert main(["plan", *served, "--topology", "v5e:2x2", *TINY, "model.remat=none"]) == 0
    assert "model.remat: settings of training, without effect here" in capsys.readouterr().err
    # A limit by its setting is one, too; the option comes first.
    for more, limit in (((), 2), (("--memory-limit", "3"), 3)):
        assert main(["plan", *arguments, "--json", "tpu.memory_limit_gb=2", *more]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["limit_bytes"] == limit << 30
        assert f"xla_tpu_max_hbm_size_mib={limit << 10}" in " ".join(found["candidates"][0]["overrides"])


def test_an_estimate(capsys):
    assert main(["plan", "--no-compile", "--topology", "v5e:2x2", *TINY]) == 0
    assert "nothing was compiled" in capsys.readouterr().out
    assert main(["plan", "--no-compile", "--topology", "v5e:2x2", "--memory-limit", "1e-12", *TINY]) == 1
    assert "nothing fits" in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_files_that_stay_unwritten_are_named(as_json, capsys, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise DoesNotFitError("nothing fits")

    monkeypatch.setattr("capibara.plan.plan", refuse)
    report, lock, script = (tmp_path / name for name in ("plan.html", "plan.lock", "run.sh"))
    files = ["--report", str(report), "--lock", str(lock), "--export", "maxtext", "--output", str(script)]
    more = ["--json"] if as_json else []
    assert main(["plan", "--topology", "v5e:2x2", *files, *more, *TINY]) == 1
    out, err = capsys.readouterr()
    for option, path in (("report", report), ("lock", lock), ("output", script)):
        assert f"--{option} {path}: not written, for no layout is within the limits" in err
        assert not path.exists()
    if as_json:
        assert json.loads(out) == {"fits": False, "error": "nothing fits"}


def test_an_explanation_keeps_to_the_limit_and_the_workers(capsys, monkeypatch, tmp_path):
    from capibara.plan import DoesNotFitError
    from capibara.sharding import Layout

    refusal = DoesNotFitError("nothing fits: it is too large")
    refusal.layout = Layout(mesh=(("data", 1), ("model", 1)))
    asked = {}

    def explain_oom(config, layout, target, **rest):
        asked.update(rest, layout=layout, slice=target.text)
        return "the largest buffers"

    def plan(*_, **rest):
        assert (rest["memory_limit_gb"], rest["workers"]) == (0.25, 3)
        raise refusal

    monkeypatch.setattr("capibara.plan.plan", plan, raising=False)
    monkeypatch.setattr("capibara.plan.memory.explain_oom", explain_oom, raising=False)
    arguments = ("--explain", "--topology", "v5e:1x1", "--memory-limit", "0.25", "--workers", "3")
    assert main(["plan", *arguments, "--cache", str(tmp_path), *TINY]) == 1
    out, err = capsys.readouterr()
    assert "the largest buffers" in out
    assert "nothing fits" in err
    assert (asked["layout"], asked["slice"]) == (refusal.layout, "v5e:1x1")
    assert (asked["memory_limit_gb"], asked["workers"], asked["cache"]) == (0.25, 3, str(tmp_path))


@pytest.mark.slow
@needs_libtpu
def test_an_explanation_by_the_real_compiler(capsys, tmp_path):
    """A model of 20 MB with its moments, and 5 MiB a device: more devices help."""
    model = ("model.embed_dim=128", "model.vocab_size=8192", "model.num_layers=2", "train.batch_size=16")
    arguments = ("--explain", "--topology", "v5e:1x1", "--memory-limit", "0.02", "--max-compiles", "2")
    assert main(["plan", *arguments, "--cache", str(tmp_path), "--json", *TINY, *model]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert "may use 20.48 MiB of its 15.75 GiB" in found["error"]
    told = found["explanation"]
    assert told["needed_bytes"] > told["limit_bytes"] == int(0.02 * 2**30)
    largest = max(told["buffers"], key=lambda each: each["bytes"])
    assert largest["bytes"] == 8192 * 128 * 4
    assert any("embedding" in each["place"] for each in told["buffers"])
    assert 0 <= told["padding_bytes"] < told["needed_bytes"]
    assert told["remedies"] or told["refused"]
    for remedy in told["remedies"]:
        assert remedy["hbm_bytes"] <= told["limit_bytes"]
        assert remedy["seconds"] > 0
        assert remedy["chips"] > 1


@pytest.mark.parametrize("topology", ["v5e:2x2,v4:2x2x1", "2xv5e:2x2", "v5e:2x2"])
def test_every_kind_of_target_is_planned_without_no_compile(topology, capsys, monkeypatch):
    def missing(target):
        raise CompilerMissingError("there is none")

    monkeypatch.setattr("capibara.plan.planning.compiler_for", missing)
    monkeypatch.setattr("capibara.plan.compiler.compiler_for", missing)
    assert main(["plan", "--topology", topology, "--json", *TINY]) == 0
    assert any("there is none" in note for note in json.loads(capsys.readouterr().out)["notes"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--topology", "2xv5e:2x2", "--lock", "x.lock"],
            r"only the plan of one slice can be locked.*train\.batch_size=4",
        ),
        (["--topology", "h100:8", "--export", "jax"], r"plan for GPUs \(h100:8\) is not exported"),
        (
            ["--topology", "v5e:2x2", "--export", "maxtext", "model.pattern=ssm"],
            r"no setting for ssm blocks \(model\.pattern\)",
        ),
        (["--topology", "v5e:2x2", "--tokens", "1e9", "--export", "jax"], "cannot be combined with --tokens"),
    ],
)
def test_what_cannot_be_written_down_is_refused_before_planning(arguments, words, capsys, monkeypatch):
    monkeypatch.setattr("capibara.plan.plan", None)
    assert re.search(words, said(capsys, *arguments, *TINY))

"""Several slices in one plan: the cheapest for a deadline, the fastest for a budget, and what rules the others out."""

from __future__ import annotations

import functools
import json
import re

import pytest
from tpu_compiler import needs_libtpu

from capibara.cli import main
from capibara.config import ModularModelConfig
from capibara.errors import ConfigError
from capibara.plan import Plan, PlanError, parse_slice, plan, plan_slices
from capibara.plan.planned import read_planned

SLICES = ["v4-32", "v5e-64", "v6e-16", "v5e:2x2"]
PRODUCTION = ModularModelConfig.from_toml("production/tpu_v4")
TINY = (
    *("model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=4"),
    *("model.vocab_size=512", "train.batch_size=8", "train.sequence_length=128"),
)


@pytest.fixture
def planned_once(monkeypatch):
    """Estimates of the same slice are the same: each is made once in this file."""
    from capibara.plan import comparison

    def once(work, target, **rest):
        settings = {name: value for name, value in rest.items() if name not in ("progress",)}
        key = repr((target, settings))
        if key not in PLANS:
            PLANS[key] = plan(work, target, **rest)
        return PLANS[key]

    monkeypatch.setattr(comparison, "plan", once)


PLANS: dict[str, Plan] = {}


@functools.cache
def hours_and_dollars(topology: str, tokens: float) -> tuple[float, float]:
    """Of a plan of that slice alone."""
    best = plan(PRODUCTION, topology, compile=False, top=1).best
    assert best.tokens_per_second is not None
    assert best.price is not None
    hours = tokens / best.tokens_per_second / 3600
    return hours, hours * best.price.usd_per_chip_hour * best.target.num_chips


def chosen(**limits) -> tuple[str, list[str]]:
    found = plan_slices(PRODUCTION, SLICES, compile=False, top=1, **limits)
    assert found.chosen is found.rows[0]
    assert found.fits
    return found.rows[0].target.text, [row.target.text for row in found.rows if row.reason]


def test_the_best_slice_for_a_job(planned_once):
    """Every choice follows from the hours and dollars of plans that are made one by one."""
    tokens = 2e10
    jobs = {name: hours_and_dollars(name, tokens) for name in SLICES}
    texts = {name: parse_slice(name).text for name in SLICES}
    cheapest = min(jobs, key=lambda name: jobs[name][1])
    fastest = min(jobs, key=lambda name: jobs[name][0])
    slowest = max(jobs, key=lambda name: jobs[name][0])
    assert len({cheapest, fastest, slowest}) == 3
    assert chosen(tokens=tokens) == (texts[cheapest], [])
    assert chosen() == (texts[cheapest], [])
    # A deadline that the cheapest just misses; one that the slowest misses.
    deadline = jobs[cheapest][0] * 0.99
    within = {name: job for name, job in jobs.items() if job[0] <= deadline}
    best = min(within, key=lambda name: within[name][1])
    late = [texts[name] for name in SLICES if name not in within]
    assert chosen(tokens=tokens, deadline_hours=deadline) == (texts[best], late)
    assert chosen(tokens=tokens, deadline_hours=jobs[slowest][0] * 0.99)[1] == [texts[slowest]]
    # A budget for all of them, and one that the fastest exceeds.
    most = max(dollars for _, dollars in jobs.values())
    assert chosen(tokens=tokens, budget=most * 1.01) == (texts[fastest], [])
    less = jobs[fastest][1] * 0.99
    within = {name: job for name, job in jobs.items() if job[1] <= less}
    best = min(within, key=lambda name: within[name][0])
    assert chosen(tokens=tokens, budget=less)[0] == texts[best]
    # With both the cheapest that keeps to both.
    both = chosen(tokens=tokens, deadline_hours=jobs[slowest][0] * 0.99, budget=most * 1.01)
    assert both == (texts[cheapest], [texts[slowest]])
    found = plan_slices(PRODUCTION, SLICES, compile=False, top=1, tokens=tokens)
    for row in found.rows:
        name = next(name for name, text in texts.items() if text == row.target.text)
        assert (row.hours, row.dollars) == pytest.approx(jobs[name])


def test_where_nothing_suffices_it_says_what_would(planned_once):
    tokens = 2e10
    jobs = {name: hours_and_dollars(name, tokens) for name in SLICES}
    found = plan_slices(PRODUCTION, SLICES, compile=False, top=1, tokens=tokens, deadline_hours=1)
    assert not found.fits
    assert found.chosen is None
    (hours,) = re.findall(r"a deadline of ([\d,.]+) hours would allow v5e:8x8", found.advice)
    fastest = min(hours for hours, _ in jobs.values())
    assert fastest <= float(hours) < fastest + 0.011
    # The value as it is printed is enough.
    again = plan_slices(PRODUCTION, SLICES, compile=False, top=1, tokens=tokens, deadline_hours=float(hours))
    assert again.chosen is not None
    assert again.chosen.target.text == "v5e:8x8"
    assert "no slice is within the limits: a deadline of" in str(found)
    # Both limits at once: only slices that are not worse in both are named.
    found = plan_slices(PRODUCTION, SLICES, compile=False, top=1, tokens=tokens, deadline_hours=1, budget=1)
    pairs = re.findall(r"a deadline of ([\d,.]+) hours and a budget of \$([\d,.]+) would", found.advice)
    best = [
        job
        for job in jobs.values()
        if not any(o != job and o[0] <= job[0] and o[1] <= job[1] for o in jobs.values())
    ]
    told = [(float(hours), float(usd.replace(",", ""))) for hours, usd in pairs]
    assert told == [pytest.approx(job, abs=0.011) for job in sorted(best)]
    for row in found.rows:
        assert dict(row.over).keys() == {"max_hours", "max_cost"}


def test_a_slice_on_which_nothing_fits_is_a_row():
    found = plan_slices(PRODUCTION, ["v5e:1x1", "v4-32", "v4-32"], compile=False, memory_limit_gb=3)
    assert [(row.target.text, row.plan is None) for row in found.rows] == [
        ("v4:2x2x4", False),
        ("v5e:1x1", True),
    ]
    assert found.rows[1].reason.startswith("nothing fits: ")
    text = str(found)
    assert "ruled out  v5e:1x1: nothing fits: " in text
    # One that the batch cannot be divided over is one, too.
    odd = ModularModelConfig.from_toml("demo", [*TINY, "train.batch_size=3", "model.num_layers=1"])
    found = plan_slices(odd, ["v4:4x4x4", "v5e:1x1"], compile=False)
    assert [row.target.text for row in found.rows] == ["v5e:1x1", "v4:4x4x4"]
    assert found.rows[1].plan is None
    assert not plan_slices(PRODUCTION, ["v5e:1x1"], compile=False, memory_limit_gb=0.1).fits


def test_a_layout_of_ones_own_on_each_slice():
    """Of four devices it can run on one of the two."""
    tiny = ModularModelConfig.from_toml("demo", TINY)
    found = plan_slices(tiny, ["v5e:2x2", "v5e:2x4"], compile=False, layout="tpu.topology=4x1")
    lines = str(found).splitlines()
    (fits,) = [line for line in lines if line.startswith("v5e:2x2: yours  ")]
    assert "beside the pick" in fits or "is the pick" in fits
    (other,) = [line for line in lines if line.startswith("v5e:2x4: yours  ")]
    assert "its mesh has 4 devices" in other
    data = {row["topology"]: row["own"] for row in found.to_json()["slices"]}
    assert data["v5e:2x2"]["reason"] is None
    assert data["v5e:2x4"]["candidate"] is None


def test_a_slice_without_a_price_is_a_row(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text(
        '[[price]]\nchip = "v4"\nregion = "home"\nterm = "on-demand"\nusd_per_chip_hour = 36.0\nas_of = 2026-01-01\n'
        'source = "contract"\n'
    )
    found = plan_slices(PRODUCTION, ["v5e-64", "v4-32"], compile=False, region="home", prices=path)
    assert [(row.target.text, bool(row.reason)) for row in found.rows] == [
        ("v4:2x2x4", False),
        ("v5e:8x8", True),
    ]
    assert found.rows[1].usd_per_hour is None
    assert found.rows[0].usd_per_hour == 16 * 36


@pytest.mark.parametrize(
    ("topologies", "limits", "words"),
    [
        ([], {}, "topologies: got no slice"),
        (3, {}, "topologies: got 3"),
        (["v4-32", "v4-33"], {}, "v4-33"),
        (["v4-32"], {"tokens": 0}, "tokens=0: expected a finite number above 0"),
        (["v4-32"], {"tokens": 1e9, "budget": float("nan")}, "budget=nan"),
        (["v4-32"], {"tokens": 1e9, "deadline_hours": "soon"}, "deadline_hours='soon'"),
        (["v4-32"], {"budget": 5}, "give its tokens, too"),
        (["v4-32"], {"max_compiles": 0}, "max_compiles=0"),
        (["v4-32", "v5e:2x2"], {"memory_limit_gb": -1}, "memory_limit_gb=-1"),
    ],
)
def test_what_cannot_be_compared(topologies, limits, words):
    with pytest.raises((PlanError, ConfigError, ValueError), match=re.escape(words)):
        plan_slices(PRODUCTION, topologies, compile=False, **limits)


def test_one_plan_is_of_one_slice():
    with pytest.raises(PlanError, match=r"topology: got list, expected one slice.*plan_slices"):
        plan(PRODUCTION, ["v4-32", "v5e-64"], compile=False)  # type: ignore[arg-type]


def test_the_command(capsys, tmp_path):
    arguments = ["plan", "--no-compile", "--topology", "v5e:2x2,v5e:2x4", "--tokens", "1e9", *TINY]
    assert main([*arguments, "--deadline", "100"]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if re.match(r"[12] +v5e", line)]
    assert len(rows) == 2
    assert "the cheapest slice within 100 hours for 1e+09 tokens" in out
    chosen = out.partition("chosen  ")[2].split()[0]
    assert chosen == rows[0].split()[1]
    assert "run     capibara train --config demo" in out
    assert main([*arguments, "--budget", "0.001", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert "a budget of $" in found["advice"]
    assert {"max_cost"} == set(found["slices"][0]["over"])
    assert main([*arguments, "--budget", "0.001"]) == 1
    assert "no slice is within the limits: a budget of $" in capsys.readouterr().out
    # What is printed is a plan that training reads.
    assert main([*arguments, "--json"]) == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    data = json.loads(path.read_text())
    assert data["fits"]
    planned = read_planned(path)
    assert planned.topology == data["slices"][0]["topology"]
    best = data["slices"][0]["candidate"]["layout"]
    assert [list(pair) for pair in planned.layout.mesh] == best["mesh"]
    # One slice alone may have limits, too.
    assert (
        main(
            ["plan", "--no-compile", "--topology", "v5e:2x2", "--tokens", "1e9", "--deadline", "1e-9", *TINY]
        )
        == 1
    )
    assert "v5e:2x2: takes " in capsys.readouterr().out
    report = tmp_path / "plan.html"
    assert main([*arguments, "--report", str(report)]) == 0
    assert "v5e:" in report.read_text()


def test_files_that_stay_unwritten_are_named(capsys, tmp_path):
    report = tmp_path / "plan.html"
    report.write_text("the last plan")
    arguments = ["plan", "--no-compile", "--topology", "v5e:2x2,v5e:2x4", "--tokens", "1e9", *TINY]
    for json_too in ([], ["--json"]):
        assert main([*arguments, "--budget", "0.001", "--report", str(report), *json_too]) == 1
        err = capsys.readouterr().err
        assert f"--report {report}: not written, for no layout is within the limits" in err
    assert report.read_text() == "the last plan"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--deadline", "3"], "--deadline needs --tokens N"),
        (["--budget", "3"], "--budget needs --tokens N"),
        (["--tokens", "0"], "--tokens: got 0, expected a number above 0"),
        (["--tokens", "1e9", "--budget", "nan"], "--budget: got nan"),
        (["--topology", "v4-32,v5e-64", "--where"], "--where is for one slice"),
        (["--topology", "v4-32,v5e-64", "--explain"], "--explain is for one slice"),
        (["--topology", "v4-32,"], "--topology: got 'v4-32,', expected slices separated by single commas"),
        (["--topology", "v4-32,,v5e:2x2"], "Remove the comma that names no slice"),
        (
            ["--serve", "--prompt-length", "8", "--output-length", "8", "--topology", "v5e:2x2,"],
            "Remove the comma that names no slice",
        ),
        (["--check", "x.lock", "--tokens", "1e9"], "--tokens cannot be combined with --check"),
        (
            ["--serve", "--prompt-length", "8", "--output-length", "8", "--tokens", "9"],
            "cannot be combined with --serve",
        ),
    ],
)
def test_what_the_command_refuses(more, words, capsys):
    assert main(["plan", *more]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
@needs_libtpu
def test_compiled_slices(tmp_path, capsys):
    arguments = ["plan", "--topology", "v5e:1x1,v4:1x1x1", "--tokens", "1e9", "--max-compiles", "1", *TINY]
    lock = tmp_path / "plan.lock"
    assert main([*arguments, "--cache", str(tmp_path), "--lock", str(lock), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["candidate"]["memory_source"] for row in found["slices"]] == ["compiler"] * 2
    assert json.loads(lock.read_text())["topology"] == found["slices"][0]["topology"]

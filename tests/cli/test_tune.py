"""``capibara tune``: what it measures, prints and keeps, and how it answers wrong usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from capibara import cli
from capibara.ops import explain, list_ops, tuner, tuning, tuning_cache, use_tuning
from capibara.ops.tuner import Outcome
from capibara.ops.tuning_cache import Entry
from capibara.ops.tuning_programs import Programs


@pytest.fixture
def measured(monkeypatch):
    """Outcomes in place of measurements, which take long; every case that was asked for is recorded."""
    seen: list[tuple[str, str, str, str | None]] = []

    def tune_case(case: Any, *, implementation: str | None = None, note: Any, **_: Any) -> Outcome:
        seen.append((case.op.name, case.spec.name, case.dtype, implementation))
        note("working")
        outcome = Outcome(case, key=f"{case.op.name}|{case.dtype}|n={len(seen)}", default="xla", candidates=3)
        if case.op.name == "selective_scan":
            outcome.entry = Entry(None, {"xla": {"chunk_size": 32}}, {"xla": 1.25, "": 1.25}, 15, "0.10.2")
            outcome.seconds = {"heuristic": {"forward": 0.5}, "choice": {"forward": 0.4}}
        return outcome

    monkeypatch.setattr(tuner, "tune_case", tune_case)
    return seen


def entries(folder: Path) -> dict[str, Entry]:
    path, device = tuning.tuning_file(folder)
    assert path is not None
    return tuning_cache.read(path, device)


def test_a_table_and_a_file(measured, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    assert cli.main(["tune", "selective_scan", "tropical_matmul", "--cache", str(tmp_path)]) == 0
    out = capsys.readouterr()
    assert "xla: chunk_size=32 (1.25×)" in out.out
    assert "written to" in out.out
    assert "\x1b[" not in out.out
    assert out.err == ""
    kept = entries(tmp_path)
    assert {key.partition("|")[0] for key in kept} == {"selective_scan", "tropical_matmul"}
    assert len(kept) == len(measured)
    assert {name for name, *_ in measured} == {"selective_scan", "tropical_matmul"}


def test_json_is_one_object(measured, tmp_path, capsys):
    assert cli.main(["tune", "selective_scan", "--json", "--specs", "small", "--cache", str(tmp_path)]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["file"] == str(tuning.tuning_file(tmp_path)[0])
    assert facts["device"]["platform"] == "cpu"
    first = facts["cases"][0]
    assert (first["parameters"], first["gain"]) == ({"xla": {"chunk_size": 32}}, 1.25)
    assert facts["not_reached"] == []
    assert "versions" in facts["machine"]


def test_everything_that_can_be_tuned_by_default(measured, tmp_path):
    assert cli.main(["tune", "--cache", str(tmp_path)]) == 0
    assert {name for name, *_ in measured} == {n for n, op in list_ops().items() if op.tuning is not None}
    assert all(dtype == "float32" for _, _, dtype, _ in measured)


def test_key_value_changes_the_sizes(measured, tmp_path, monkeypatch):
    sizes = []
    real = tuner.cases

    def cases(op: Any, tag: str, dtype: str, changes: Any) -> Any:
        sizes.append(changes)
        return real(op, tag, dtype, changes)

    monkeypatch.setattr(tuner, "cases", cases)
    words = ["tune", "dtype=bfloat16", "flash_attention", "q_len=64", "batch=1", "implementation=xla"]
    assert cli.main([*words, "--dry-run", "--cache", str(tmp_path)]) == 0
    assert sizes == [{"q_len": 64, "batch": 1}]
    assert {(dtype, implementation) for _, _, dtype, implementation in measured} == {("bfloat16", "xla")}
    assert entries(tmp_path) == {}


def test_a_wrong_implementation_is_exit_code_1(measured, tmp_path, capsys, monkeypatch):
    def wrong(case: Any, **_: Any) -> Outcome:
        return Outcome(
            case, key="a|b|n=1", candidates=1, wrong_results={"xla block_size=64": "3 of 4 numbers differ"}
        )

    monkeypatch.setattr(tuner, "tune_case", wrong)
    assert cli.main(["tune", "selective_scan", "--cache", str(tmp_path)]) == 1
    assert "xla block_size=64: 3 of 4 numbers differ" in capsys.readouterr().out.replace("\n", " ")
    assert entries(tmp_path) == {}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["flash_atention"], "Did you mean 'flash_attention'"),
        (["cached_attention"], "no operation 'cached_attention' that can be tuned"),
        (["q_len=64"], "sizes are those of an operation"),
        (["flash_attention", "q_len=many"], "q_len must be an integer, got 'many'"),
        (["flash_attention", "q_len=-1"], "must be at least 0"),
        (["flash_attention", "lenght=3"], "no field 'lenght'"),
        (["flash_attention", "q_len=1", "q_len=2"], "q_len was given twice"),
        (["flash_attention", "dtype=int4"], "dtype must be one of"),
        (["flash_attention", "implementation=gpu"], "there is no implementation 'gpu'"),
        (["--max-seconds", "0"], "--max-seconds must be above 0"),
        (["--max-seconds", "nan"], "--max-seconds must be above 0"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_a_reason(measured, words, text, capsys, tmp_path):
    assert cli.main(["tune", *words, "--cache", str(tmp_path)]) == 2
    assert text in capsys.readouterr().err
    assert measured == []


def test_switched_off_there_is_nowhere_to_write(measured, capsys, monkeypatch):
    monkeypatch.setenv("CAPIBARA_TUNING", "0")
    assert cli.main(["tune", "selective_scan"]) == 2
    assert "--cache DIR" in capsys.readouterr().err
    assert cli.main(["tune", "selective_scan", "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out


@pytest.mark.slow
def test_measured_in_earnest_and_used(tmp_path, capsys):
    """A tiny problem; whatever turns out to be fast, the file says what `explain` then answers."""
    sizes = ["batch=1", "length=9", "heads=1", "width=2", "groups=1", "states=2"]
    words = ["tune", "selective_scan", *sizes, "--max-seconds", "200", "--json", "--cache", str(tmp_path)]
    assert cli.main(words) == 0
    facts = json.loads(capsys.readouterr().out)
    (case,) = facts["cases"]
    assert case["candidates"] >= 2
    assert (case["wrong"], case["failed"]) == ({}, {})
    assert list(entries(tmp_path)) == [case["key"]]
    op = list_ops()["selective_scan"]
    (measured,) = tuner.cases(
        op, "large", changes={n: int(v) for n, _, v in (s.partition("=") for s in sizes)}
    )
    programs = Programs(measured, 0)
    args, kwargs = programs.filled(programs.arrays)
    use_tuning(tmp_path)
    try:
        found = explain("selective_scan", *args, **kwargs)
    finally:
        use_tuning()
    assert dict(found.parameters) == case["parameters"].get("xla", {})


def test_doctor_mentions_the_measurements(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("CAPIBARA_TUNING", "0")
    use_tuning()
    cli.main(["doctor"])
    assert "Tuning: switched off" in capsys.readouterr().out
    use_tuning(tmp_path)
    try:
        cli.main(["doctor"])
        assert "'capibara tune'" in capsys.readouterr().out
        path, device = tuning.tuning_file(tmp_path)
        assert path is not None
        kept = {"op|float32|n=4": Entry("xla", jax="0.10.0"), "op|float32|n=8": Entry(jax="0.10.0")}
        tuning_cache.write(path, device, kept)
        use_tuning(tmp_path)
        cli.main(["doctor", "--json"])
        facts = json.loads(capsys.readouterr().out)["tuning"]
        assert (facts["entries"], facts["faster"], facts["jax"], facts["file"]) == (
            2,
            1,
            ["0.10.0"],
            str(path),
        )
        cli.main(["doctor"])
        text = capsys.readouterr().out
        assert "2 kinds of problems measured" in text
        assert "measured with JAX 0.10.0" in text
    finally:
        use_tuning()

"""``capibara doctor``: what it prints, as tables and as JSON, and its exit code."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import jax
import pytest

from capibara.cli import doctor
from capibara.measure import installation


def call(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    return doctor.run(parser.parse_args(arguments))


def test_json_is_one_object_with_what_is_so(capsys):
    assert call("--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"] is True
    assert facts["backend"] == jax.default_backend()
    assert len(facts["devices"]) == len(jax.devices())
    assert facts["versions"]["jax"] == jax.__version__
    assert {name["name"] for name in facts["import_names"]} == {"capibara", "mithril", "independent_core"}
    for found in facts["backend_info"]["implementations"].values():
        assert found["chosen"] not in found["not_chosen"]
    assert facts["optimization_status"]["tpu_optimized"] is False  # never switched on here


def test_tables_name_devices_implementations_and_reasons(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert call() == 0
    text = capsys.readouterr().out
    assert "flash_attention" in text
    assert "comes before it" in text
    assert jax.devices()[0].device_kind in text
    assert "Everything that Capibara needs works here." in text
    assert "\x1b[" not in text  # no colour codes into a pipe


def test_colour_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")  # a dumb one has no colours however much they are wanted
    monkeypatch.delenv("NO_COLOR", raising=False)
    call()
    assert "\x1b[" in capsys.readouterr().out


def test_a_broken_backend_is_reported_with_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(installation, "backend_error", lambda: "no [tpu] here")
    monkeypatch.setenv("COLUMNS", "200")
    assert call("--json") == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"] is False
    assert facts["devices"] == []
    assert call() == 1
    text = capsys.readouterr().out
    assert "FAILED" in text
    assert "no [tpu] here" in text  # square brackets are text, not markup
    assert "Not working: backend" in text


def test_a_broken_operation_is_reported_with_exit_code_1(capsys, monkeypatch):
    import capibara.jax

    def broken():
        raise RuntimeError("kernel table is empty")

    monkeypatch.setattr(capibara.jax, "get_backend_info", broken)
    assert call("--json") == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["checks"][-1]["name"] == "operations"
    assert "kernel table is empty" in facts["error_message"]


def test_without_jax_it_still_answers(tmp_path):
    """A folder that shadows JAX with a module that cannot be imported."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text(
        "raise ModuleNotFoundError(\"No module named 'jax'\", name='jax')\n"
    )
    code = (
        "import sys, argparse; sys.path.insert(0, sys.argv.pop(1))\n"
        "from capibara.cli import doctor\n"
        "parser = argparse.ArgumentParser(); doctor.add_arguments(parser)\n"
        "sys.exit(doctor.run(parser.parse_args(sys.argv[1:])))\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, done.stderr
    facts = json.loads(done.stdout)
    assert facts["ok"] is False
    assert facts["checks"][0]["name"] == "import jax"
    assert "pip install" in facts["error_message"]


@pytest.mark.parametrize("argument", ["--jsn", "extra"])
def test_wrong_usage_is_exit_code_2(argument):
    with pytest.raises(SystemExit) as stopped:
        call(argument)
    assert stopped.value.code == 2

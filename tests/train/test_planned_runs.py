"""``capibara train --plan``: layouts from files that plans wrote, or that somebody else did."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emulation import emulated
from tiny_run import TEXT, python, tiny_config

from capibara.cli import train as verb
from capibara.config import ModularModelConfig
from capibara.plan import PlanError
from capibara.plan.planned import read_planned, train_command
from capibara.sharding import Layout

ENTRY = Path(__file__).parent.parent / "support" / "tiny_cli.py"
LAYOUT = Layout(
    mesh=(("data", 2), ("model", 2)), microbatches=2, flags=(("xla_enable_async_all_gather", "true"),)
)


def written(folder: Path, kind: str, **changes: Any) -> Path:
    """A plan's file as ``capibara plan`` writes it."""
    config = tiny_config(folder / "run", "batch_size=8").to_dict()
    if kind == "lock":
        data: dict[str, Any] = {
            "format": 1,
            "work": "a model",
            "config": config,
            "topology": "v4:2x2x1",
            "view": "chip",
            "limit_bytes": 1 << 34,
            "layout": LAYOUT.to_json(),
            "versions": {"jax": "0"},
            "program_hash": "abc",
            "hbm_bytes": 1 << 30,
            "step_seconds": 0.5,
        }
    else:
        candidates = [{"layout": LAYOUT.to_json()}, {"layout": Layout(mesh=(("data", 4),)).to_json()}]
        data = {"fits": True, "topology": "v4:2x2x1", "config": config, "candidates": candidates}
    path = folder / f"plan.{kind}"
    path.write_text(json.dumps({**data, **changes}))
    return path


@pytest.mark.parametrize("kind", ["lock", "json"])
def test_a_plan_is_read(tmp_path: Path, kind: str) -> None:
    planned = read_planned(written(tmp_path, kind))
    assert planned.layout == LAYOUT == Layout.from_config(planned.config)
    assert planned.config.tpu.enabled
    assert planned.topology == "v4:2x2x1"
    assert planned.config.model.embed_dim == 16
    assert planned.differences(planned.config) == []
    other = planned.config.with_overrides(["embed_dim=32", "train.steps=99", "tpu.enabled=false"])
    assert planned.differences(other) == [
        "model.embed_dim is 32, planned 16",
        "tpu.enabled is False, planned True",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"config": None},
        {"config": {"model": {"wings": 2}}},
        {"config": [1]},
        {
            "topology": None,
            "layout": {"mesh": [["da ta", 4]]},
            "candidates": [{"layout": {"mesh": [["da ta", 4]]}}],
        },
        {"layout": {"mesh": [["data", 10**9]]}, "candidates": [{"layout": {"mesh": [["data", 10**9]]}}]},
        {"layout": {"mesh": [["data", 0]]}, "candidates": []},
        {"topology": "\x1b]0;title\x07v4:2x2x1"},
        {"layout": {"mesh": "data"}, "candidates": [3]},
        {"layout": 1, "candidates": {}},
        {
            "layout": {"mesh": [["data", 4]], "flags": [["xla_dump_to", "x"]]},
            "candidates": [{"layout": {"mesh": [["data", 4]], "flags": [["xla_dump_to", "x"]]}}],
        },
        {"layout": {"mesh": [["data", 4]], "microbatches": 3}, "fits": False},
    ],
)
@pytest.mark.parametrize("kind", ["lock", "json"])
def test_files_that_are_no_plans(tmp_path: Path, kind: str, change: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match=r"is not a valid plan file: .*capibara plan --lock FILE"):
        read_planned(written(tmp_path, kind, **change))


def test_files_that_are_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    for content in (
        b"",
        b"[" * 100_000,
        b"3",
        b"\xff\xfe",
        b'{"a": 1}',
        b'{"layout": {"mesh": [["data", 2]]}}',
    ):
        path.write_bytes(content)
        with pytest.raises(PlanError, match="is not a valid plan file"):
            read_planned(path)
    for place in (tmp_path / "missing", tmp_path, "a\0b"):
        with pytest.raises(PlanError, match="cannot be read"):
            read_planned(place)
    with open(path, "wb") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(PlanError, match="larger than"):
        read_planned(path)


def test_the_command_line_gives_what_was_planned(tmp_path: Path) -> None:
    awkward = 'runs/it\'s a "test", = $HOME'
    config = ModularModelConfig.from_toml(
        "demo",
        {
            "checkpoint.directory": awkward,
            "train.batch_size": 8,
            "model.pattern": ["ssm", "attention"],
            "data.paths": ["a b", "c,d", "1"],
            "train.max_seconds": None,
            "optimizer.learning_rate": 1e-4,
            "model.head_dim": 64,
        },
    )
    line = train_command(config, LAYOUT, "demo")
    # What a shell makes of it, and what the parser makes of that.
    tell = "import json, sys; print(json.dumps(sys.argv[1:]))"
    script = f'capibara() {{ "{sys.executable}" -c "{tell}" "$@"; }}\n{line}\n'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, timeout=60)
    word, *rest = json.loads(done.stdout)
    assert word == "train"
    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    args = parser.parse_args(rest)
    texts, settings = verb.split_items(args.items)
    assert texts == []
    assert ModularModelConfig.from_toml(args.config, settings) == config.with_overrides(LAYOUT.settings())


@pytest.mark.slow
def test_train_takes_a_plan(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    path = written(tmp_path, "lock")

    def run(devices: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        flags = emulated(devices, quick=True)
        text = str(tmp_path / "text.txt")
        return python(str(ENTRY), "train", text, "--plan", str(path), *arguments, env={"XLA_FLAGS": flags})

    done = run(4, "train.steps=3", "eval_every=3", "--directory", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "plan for v4:2x2x1: data 2 × model 2, parameters sharded" in done.stdout
    assert "on 4 devices" in done.stdout
    assert "do not hold" not in done.stdout + done.stderr
    kept = ModularModelConfig.from_toml(tmp_path / "run" / "config.toml")
    assert Layout.from_config(kept) == LAYOUT
    done = run(1, "model.embed_dim=32")
    assert done.returncode == 2
    assert "tpu.num_chips=4" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_names_no_folder_of_ours(tmp_path: Path) -> None:
    precious = {"directory": str(tmp_path / "precious"), "resume": False, "keep": 1}
    path = written(tmp_path, "lock")
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "config": {**data["config"], "checkpoint": precious}}))
    planned = read_planned(path)
    assert planned.config.checkpoint.directory == precious["directory"]
    config = verb.of_plan(planned, str(path))
    assert config.checkpoint.directory == f"runs/{path.stem}"
    assert config.checkpoint.resume
    assert config.model == planned.config.model
    assert Layout.from_config(config) == planned.layout

"""Layouts of models with experts: every mesh that a plan offers trains, with the losses of one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from emulation import emulated
from other_process import run_apart
from tiny_run import tiny_config

from capibara.plan import parse_slice
from capibara.plan.work import TrainWork
from capibara.sharding import Layout

SETTINGS = (
    *("model.num_heads=4", "model.num_kv_heads=2", "model.embed_dim=32", "model.max_sequence_length=8"),
    *("model.experts.count=8", "model.experts.dim=16", "model.experts.per_token=2", "batch_size=16"),
    *("train.sequence_length=8", "steps=3", "log_every=1", "eval_every=3", "eval_batches=1"),
)

SCRIPT = """
import json, sys
from pathlib import Path
import jax
from tiny_run import tiny_config, tiny_corpus
from capibara.core import ModularCapibaraModel
from capibara.sharding import Layout
from capibara.train import read_losses, train
from capibara.train.progress import SilentReporter

base, settings = Path(sys.argv[1]), json.loads(sys.argv[2])

def run(name, *more, devices=None):
    config = tiny_config(base / name, *settings, *more)
    report = train(config, ModularCapibaraModel(config), tiny_corpus(), devices=devices, measure_utilisation=False,
                   reporter=SilentReporter())
    return report.devices, list(read_losses(base / name / "metrics.jsonl").values())

out = [run("one", devices=jax.devices()[:1])]
for number, layout in enumerate(json.loads(sys.argv[3])):
    out.append(run(str(number), *Layout.from_json(layout).overrides()))
print("RESULT", json.dumps(out))
"""


def offered() -> dict[tuple[Any, ...], Layout]:
    """A layout of each mesh and way of sharding that a plan considers, the fastest of them by its estimate."""
    work, target = TrainWork(tiny_config("unused", *SETTINGS)), parse_slice("v5e:2x4")
    found: dict[tuple[Any, ...], Layout] = {}
    for layout in sorted(work.layouts(target), key=lambda one: work.rough(one, target).seconds):
        if layout.offload == "none":
            found.setdefault((layout.mesh, layout.parameters, layout.optimizer), layout)
    return found


def check(layouts: list[Layout], folder: Path) -> None:
    laid = json.dumps([layout.to_json() for layout in layouts])
    (devices, want), *rest = run_apart(
        SCRIPT, str(folder), json.dumps(SETTINGS), laid, XLA_FLAGS=emulated(8, quick=True)
    )
    assert (devices, len(want)) == (1, 3)
    assert len(rest) == len(layouts)
    for layout, (devices, losses) in zip(layouts, rest, strict=True):
        assert devices == 8
        np.testing.assert_allclose(losses, want, rtol=2e-5, err_msg=str(layout))


@pytest.mark.slow
def test_an_expert_axis_is_offered_and_trains(tmp_path: Path) -> None:
    layouts = offered()
    sizes = {dict(mesh).get("expert", 1) for mesh, *_ in layouts}
    assert sizes == {1, 2, 4, 8}
    check([layouts[(("data", 1), ("expert", 8), ("model", 1)), "sharded", "as parameters"]], tmp_path)


@pytest.mark.slow
def test_every_mesh_that_is_offered_trains(tmp_path: Path) -> None:
    check(list(offered().values()), tmp_path)

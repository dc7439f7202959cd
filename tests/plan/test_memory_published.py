"""The estimate against the TPU compiler for published models: families, experts, adapters, packed rows.

``memory_published.json`` has what the compiler said (``measure_memory``). The counts of experts, of turns with several
blocks and of untied heads were fitted to the rows that are not *held out*; those of adapters to all that have them.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from published import CONFIGS, model_type
from published_models import published_folder
from tpu_compiler import needs_libtpu

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.families import read_config
from capibara.plan import parse_slice
from capibara.plan.compiler import find_compiler
from capibara.plan.memory import estimate_memory, measure_memory
from capibara.plan.slices import Slice
from capibara.plan.work import TrainWork
from capibara.sharding import Layout

DATA = json.loads((Path(__file__).parent / "memory_published.json").read_bytes())
CASES: list[dict[str, Any]] = DATA["cases"]


def name_of(case: dict[str, Any]) -> str:
    mesh = " ".join(f"{axis} {size}" for axis, size in case["mesh"] if size > 1)
    words = (case["model"], case["slice"], mesh, case["remat"], case["microbatches"], *case["settings"])
    return "-".join(map(str, words))


def step_of(case: dict[str, Any], folder: Path) -> tuple[ModularModelConfig, Layout]:
    """The settings of ``capibara train --model``, and the layout."""
    config, _ = read_config(
        published_folder(case["model"], folder),
        overrides=[
            "precision.param_dtype=float32",
            "precision.compute_dtype=bfloat16",
            f"train.batch_size={case['batch']}",
            f"train.sequence_length={case['sequence']}",
            *case["settings"],
        ],
    )
    mesh = tuple((axis, size) for axis, size in case["mesh"])
    # Those of plans.
    flags = slice_of(case).flag_choices(mesh)[0]
    layout = Layout(mesh=mesh, remat=case["remat"], microbatches=case["microbatches"], flags=flags)
    return config, layout


def slice_of(case: dict[str, Any]) -> Slice:
    """Also of grids that the compiler knows and nobody can rent."""
    generation, _, grid = case["slice"].partition(":")
    return Slice(generation, tuple(map(int, grid.split("x"))))


@pytest.fixture(scope="module")
def ratios(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Estimate over compiler's figure, of all cases; the arguments are compared at once."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for number, case in enumerate(CASES):
        config, layout = step_of(case, folder / str(number))
        estimate = estimate_memory(config, layout, slice_of(case))
        assert estimate.arguments == pytest.approx(case["arguments"], rel=0.002, abs=64 * 512), name_of(case)
        found[name_of(case)] = estimate.total / case["total"]
    return found


def test_estimates_are_within_a_tenth_of_the_compiler(ratios: dict[str, float]) -> None:
    assert {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > 0.10} == {}
    assert statistics.median(abs(ratio - 1) for ratio in ratios.values()) < 0.03


def test_the_cases_are_many() -> None:
    adapted = [case for case in CASES if "finetune.method=lora" in case["settings"]]
    mixtures = [case for case in CASES if dict(case["mesh"]).get("expert", 1) > 1]
    assert len(adapted) >= 8
    assert len(mixtures) >= 8
    assert len({case["model"] for case in CASES}) >= 14
    assert {case["remat"] for case in mixtures} >= {"dots", "full"}
    assert sum(case["held_out"] for case in CASES) >= 10


SMALL = {model_type(name): name for name in reversed(CONFIGS) if model_type(name) != "bert"}


@pytest.mark.parametrize("name", SMALL.values())
def test_a_small_model_of_each_family_is_planned(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type(name), **CONFIGS[name]}))
    config, _ = read_config(tmp_path, overrides=["train.batch_size=8", "train.sequence_length=32"])
    work, target = TrainWork(config), parse_slice("v5e:2x2")
    layouts = list(work.layouts(target))
    assert layouts
    for layout in layouts[:: len(layouts) // 8 + 1]:
        rough = work.rough(layout, target)
        assert rough.hbm_bytes > 0
        assert rough.seconds > 0
    alone = estimate_memory(config, Layout(mesh=(("data", 1),)), parse_slice("v5e:1x1"))
    assert alone.parameters == 4 * ModularCapibaraModel(config).num_params
    assert alone.optimizer == 2 * alone.parameters + 8


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("case", CASES[::9], ids=name_of)
def test_the_compiler_still_says_so(case: dict[str, Any], tmp_path: Path) -> None:
    config, layout = step_of(case, tmp_path)
    found = measure_memory(TrainWork(config).job(layout, slice_of(case)))
    assert found.arguments == pytest.approx(case["arguments"], rel=0.001)
    if find_compiler().version == DATA["versions"]["libtpu"]:
        assert found.total == pytest.approx(case["total"], rel=0.05)

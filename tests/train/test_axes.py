"""Steps over combinations of mesh axes are those of one device: losses, gradient norms and parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import axes_cases
import pytest
from emulation import emulated
from other_process import run_apart

CODE = Path(axes_cases.__file__).read_text()


@pytest.fixture(scope="module")
def everything() -> Any:
    return run_apart(CODE, "all", XLA_FLAGS=emulated(8, quick=True))


def check(name: str, found: dict[str, Any]) -> None:
    kind, axes, _ = axes_cases.CASES[name]
    # Of adapters, whose second factor begins as 0, pairs give some elements gradients that are hardly more than
    # rounding: "pairs with adapters, fsdp", which has no stages, differs by as much.
    rough = kind == "deep pairs, adapters"
    assert found["loss"] < (1e-5 if rough else 2e-6)
    assert found["norm"] < (1e-4 if rough else 2e-6)
    # Adam divides by the size of the gradient, so that where there is hardly any its rounding is seen. With more
    # layers there are smaller gradients: so it is of "deep, fsdp", which has no stages.
    assert found["params"] < (1e-3 if rough else 3e-4 if kind.startswith("deep") else 1e-4)
    assert found["moved"] > 5e-3
    # The keys go round a ring, microbatches from stage to stage.
    assert (found["permutes"] > 0) == bool({"context", "pipeline"} & axes.keys())
    sharded = {"fsdp", "model", "expert", "pipeline"} & axes.keys()
    assert (found["part"] < 0.75) == bool(sharded)


@pytest.mark.slow  # about twenty programs over eight devices
@pytest.mark.parametrize("name", axes_cases.CASES)
def test_a_mesh_trains_as_one_device_does(everything: Any, name: str) -> None:
    check(name, everything[name])


@pytest.mark.parametrize("name", axes_cases.FEW)
def test_a_few(name: str) -> None:
    check(name, run_apart(CODE, "few", XLA_FLAGS=emulated(8, quick=True))[name])

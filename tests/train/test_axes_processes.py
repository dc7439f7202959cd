"""Fifty steps over 4 processes of 8 devices each are those of one device: losses, gradient norms and parameters."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import axes_cases
import numpy as np
import pytest
from tiny_run import QUICK_COMPILE

from capibara.launch import launch_processes

PROGRAM = Path(axes_cases.__file__).parent / "axes_processes.py"
STEPS = 50


@pytest.mark.slow  # 32 devices that exchange over sockets
@pytest.mark.parametrize("name", axes_cases.SPREAD)
def test_fifty_steps_of_four_processes_are_those_of_one_device(tmp_path: Path, name: str) -> None:
    kind, _, _ = axes_cases.SPREAD[name]
    losses, norms, params, alone = axes_cases.run(kind, {"data": 1}, {}, STEPS)
    assert alone["moved"] > 0.02  # it learns, so that equal losses say something of the optimizer
    flags = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILE}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        command = [sys.executable, str(PROGRAM), str(tmp_path), str(STEPS), name]
        code = launch_processes(command, 4, devices=8, environment=environment, out=out, err=err)
    assert code == 0, (tmp_path / "err").read_text()[-4000:]
    with np.load(tmp_path / "found.npz") as found:
        assert len(found["losses"]) == len(found["norms"]) == STEPS
        np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
        np.testing.assert_allclose(found["norms"], norms, rtol=1e-4)
        for key, value in params.items():
            np.testing.assert_allclose(found[f"params/{key}"], value, atol=1e-3, err_msg=key)
        assert found["part"] < 0.5

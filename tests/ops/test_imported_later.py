"""Operations that a start without tracing does not import, and that are there in any other process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from capibara.ops import list_ops

LATER = """
import sys
from capibara.lazy import trace_later
trace_later()
import capibara.cli._models, capibara.serve.engine, capibara.serve.engine.early
import capibara.serve.engine.engine
import capibara.compose.backends.jax_cpu, capibara.compose.backends.jax_ops
from capibara import ops
late = "jax.extend", "capibara.ops.attention", "capibara.ops.layers."
early = [name for name in sys.modules if name.startswith(late)]
assert not early, early
"""


def run(script: str) -> str:
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize("how", ["ops.import_all()", "ops.list_ops()", "ops.explain('selective_scan')"])
def test_a_start_imports_none_until_it_is_asked(how: str) -> None:
    asked = f"""
try:
    {how}
except ops.OpTypeError:  # an operation without its arguments
    pass
print(*sorted(ops.registry._OPS))
assert "jax.extend" in sys.modules
"""
    assert run(LATER + asked).split() == sorted(list_ops())


def test_any_other_process_has_them_before_it_traces() -> None:
    script = """
import sys
import capibara.ops
print(*sorted(capibara.ops.registry._OPS))
before = set(sys.modules)
capibara.ops.import_all()
assert set(sys.modules) == before
"""
    assert run(script).split() == sorted(list_ops())


@pytest.mark.parametrize(
    "name", ["linalg.qr", "rotary.rotary", "attention.flash_attention", "linalg.qr_factors.qr"]
)
def test_a_name_is_the_function_whatever_was_imported_before(name: str) -> None:
    module, _, function = name.rpartition(".")
    script = f"""
from capibara.lazy import trace_later
trace_later()
import capibara.ops.linalg.qr_factors, capibara.ops.rotary.table
import capibara.ops.{module} as module
assert callable(module.{function}) and "{function}" in dir(module)
assert module.{function}.__capibara_op__
"""
    run(script)

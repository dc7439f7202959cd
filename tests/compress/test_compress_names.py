"""The names of the package, which are found when they are asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

import capibara.compress


def test_every_name_is_there_and_listed() -> None:
    assert len(set(capibara.compress.__all__)) == len(capibara.compress.__all__)
    for name in capibara.compress.__all__:
        assert name in dir(capibara.compress)
        found = getattr(capibara.compress, name)
        assert getattr(found, "__name__", name) == name
    with pytest.raises(AttributeError, match="no attribute 'compress'"):
        capibara.compress.compress


def test_importing_it_is_light_and_names_do_not_need_jax() -> None:
    code = """
import sys
import capibara.compress
assert not {"numpy", "jax", "torch"} & set(sys.modules), "heavy"
assert not [m for m in sys.modules if m.startswith("capibara.compress.")]
sys.modules["jax"] = None  # as if it were not installed
from capibara.compress import ModelCompressionAPI, Archive, merge_neurons, load_sharded
try:
    capibara.compress.load_quantised
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "capibara.compress.load_quantised" in done.stdout
    assert "jax" in done.stdout


def test_everything_can_be_taken_without_jax() -> None:
    code = """
import sys
sys.modules["jax"] = None
from capibara.compress import *
assert merge_neurons and Archive
assert "load_quantised" not in globals()
"""
    subprocess.run([sys.executable, "-c", code], check=True)

"""Zeros that take memory where they are written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import native
from capibara.memory.zeros import zeros_on_demand

kernels = pytest.mark.skipif(native.problem() is not None, reason="no native library")


def made(described: Any) -> Any:
    return jax.jit(lambda: zeros_on_demand(described))()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "float16", "uint32"])
@pytest.mark.parametrize(
    "shape", [(), (0,), (3,), (1 << 18,), ((1 << 18) + 5, 1), (7, 300, 401), (3 << 20,)], ids=str
)
def test_they_are_zero_also_in_memory_that_was_used(shape: tuple[int, ...], dtype: str):
    for _ in range(3):
        # What is dropped is handed out again.
        full = jax.block_until_ready(jnp.full((4 << 20,), 7, dtype))
        del full
        found = made([jax.ShapeDtypeStruct(shape, dtype)] * 3)
        for one in found:
            assert one.shape == shape
            assert one.dtype == dtype
            assert not np.asarray(one).any()
        assert not shape or len({one.unsafe_buffer_pointer() for one in found if one.size}) in (0, 3)


def test_trees_and_arrays_as_descriptions():
    found = made({"a": jnp.ones((3, 4)), "b": (jnp.ones(5, jnp.int32), None)})
    assert jax.tree.structure(found) == jax.tree.structure({"a": 0, "b": (0, None)})
    assert found["a"].shape == (3, 4)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(found))
    assert made({}) == {}


def test_programs_own_them():
    """One that is given them to donate writes into them, and changes nothing else."""
    first, other = made([jax.ShapeDtypeStruct((1 << 20,), jnp.float32)] * 2)
    where = first.unsafe_buffer_pointer()
    changed = jax.jit(lambda x: x.at[12_345].set(3.0), donate_argnums=0)(first)
    assert changed.unsafe_buffer_pointer() == where
    assert float(changed.sum()) == 3.0
    assert not np.asarray(other).any()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@kernels
def test_they_take_no_memory_before():
    described = [jax.ShapeDtypeStruct((32 << 20,), jnp.float32)] * 2  # 256 MiB
    made([jax.ShapeDtypeStruct((1,), jnp.float32)])
    before = resident()
    found = jax.block_until_ready(made(described))
    assert resident() - before < 32 << 20
    full = jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(found[0]))
    assert resident() - before > 96 << 20
    del full


def test_without_kernels(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(native, "problem", lambda: "none")
    text = jax.jit(lambda: zeros_on_demand([jax.ShapeDtypeStruct((8,), jnp.int8)])).lower().as_text()
    assert "custom_call" not in text

"""Kernels that XLA cannot split, with arrays along explicit axes of a mesh: another form runs, on every platform."""

from __future__ import annotations

import os
import subprocess
import sys

from emulation import emulated

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from capibara.ops import tropical
from capibara.ops.attention import paged_attention

mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
split = NamedSharding(mesh, P("x"))
rng = np.random.default_rng(0)
a, b = (rng.integers(-9, 9, size=shape).astype(np.float32) for shape in ((16, 30), (30, 64)))
got = jax.jit(tropical.matmul)(jax.device_put(a, split), b)
np.testing.assert_array_equal(got, (a[:, :, None] + b).max(1))
assert got.sharding.spec[0] == "x", got.sharding

query = rng.normal(size=(4, 2, 4, 128)).astype(np.float32)
pages = [jnp.asarray(rng.normal(size=(16, 4, 2, 128)), jnp.float32) for _ in range(2)]
table, lengths = jnp.asarray(rng.permutation(12).reshape(4, 3)), jnp.asarray([2, 7, 12, 5])
got = jax.jit(paged_attention)(jax.device_put(query, split), *pages, table, lengths)
want = paged_attention(jnp.asarray(query), *pages, table, lengths, implementation="reference")
np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
"""


def test_arrays_along_explicit_axes():
    environment = {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": emulated(2, quick=True),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]

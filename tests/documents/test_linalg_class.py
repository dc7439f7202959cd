"""The linear algebra snippets of the documents, with their imports, names and arguments."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from capibara.ops import OpWarning


@pytest.fixture
def matrices() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype("float32") for shape in ((40, 60), (60, 20))]


def test_document_1(matrices):
    from capibara.jax.tpu_v4.backend import TpuV4LinalgOps

    matrix_a, matrix_b = (jnp.asarray(x) for x in matrices)
    linalg_ops = TpuV4LinalgOps()
    result = linalg_ops.optimized_gemm(a=matrix_a, b=matrix_b, precision="bfloat16", use_async=True)
    np.testing.assert_allclose(result, matrices[0] @ matrices[1], atol=0.2)


def test_document_2(matrices):
    from capibara.jax.tpu_v4.backend import TpuV4LinalgOps

    matrix_a, matrix_b = (jnp.asarray(x) for x in matrices)
    linalg_ops = TpuV4LinalgOps()
    result = linalg_ops.optimized_gemm(
        a=matrix_a, b=matrix_b, precision="bfloat16", use_async=True, chunk_size=1024
    )
    np.testing.assert_allclose(result, matrices[0] @ matrices[1], atol=0.2)

    matrix = matrix_a
    # Ten of 40 singular values, all that it has.
    matrix = matrix[:, :10] @ jnp.ones((10, 60)).at[:, :10].set(jnp.eye(10))
    with pytest.warns(OpWarning, match=r"finds the 10 largest of 40 singular values.*Remedy: rank="):
        u, s, v = linalg_ops.fast_svd(matrix, compute_uv=True, use_randomized=True)
    np.testing.assert_allclose(s, np.linalg.svd(matrix, compute_uv=False)[:10], rtol=1e-4)
    np.testing.assert_allclose((u * s) @ v, matrix, atol=1e-3)


def test_kernels_has_the_same_class():
    from capibara.jax.tpu_v4 import backend, kernels

    assert kernels.TpuV4LinalgOps is backend.TpuV4LinalgOps

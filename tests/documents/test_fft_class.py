"""The Fourier transform snippet of the documents, with its imports, names and arguments."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from capibara.ops import OpWarning


def test_document_2():
    from capibara.jax.tpu_v4.backend import TpuV4FFTOps

    rng = np.random.default_rng(0)
    signal = (rng.normal(size=(2, 64)) + 1j * rng.normal(size=(2, 64))).astype(np.complex64)
    want = np.fft.fft(signal)

    fft_ops = TpuV4FFTOps()

    def transform(signal):
        return fft_ops.radix_optimized_fft(
            signal,
            radix_factors=[2, 4, 8],
            use_parallel=True,
            precision="bfloat16",
        )

    with pytest.warns(OpWarning) as caught:  # without a TPU, on one device
        fft_result = transform(signal)
    said = " ".join(str(each.message) for each in caught)
    assert "radix_factors=[2, 4, 8] and precision='bfloat16' have no effect" in said
    assert "use_parallel=True has no effect" in said
    assert np.linalg.norm(fft_result - want) < 0.02 * np.linalg.norm(want)
    with pytest.warns(OpWarning, match="implementation='matmul'"):
        np.testing.assert_allclose(jax.jit(transform)(signal), fft_result, atol=1e-4)


def test_kernels_has_the_same_class():
    from capibara.jax.tpu_v4 import backend, kernels

    assert kernels.TpuV4FFTOps is backend.TpuV4FFTOps

"""The attention snippets of the documents, with their imports, names and arguments."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.ops import OpWarning
from capibara.ops.attention import flash_attention


@pytest.fixture
def arrays() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (1, 2, 24, 8)) for key in keys)


def test_document_1(arrays):
    from capibara.jax.tpu_v4.backend import TpuV4AttentionOps

    q, k, v = arrays
    attention_ops = TpuV4AttentionOps()
    attention_result = attention_ops.flash_attention(
        query=q, key=k, value=v, block_size=128, use_causal_mask=True
    )
    want = flash_attention(q, k, v, use_causal_mask=True, implementation="reference")
    np.testing.assert_allclose(attention_result, want, rtol=1e-5, atol=1e-5)


def test_document_2(arrays):
    from capibara.jax.tpu_v4.backend import TpuV4AttentionOps

    q, k, v = arrays
    attention_ops = TpuV4AttentionOps()
    attention_output = attention_ops.flash_attention(
        query=q,  # [batch, heads, seq_len, head_dim]
        key=k,
        value=v,
        block_size=128,
        use_causal_mask=True,
        precision="bfloat16",
    )
    want = flash_attention(q, k, v, use_causal_mask=True, implementation="reference")
    np.testing.assert_allclose(attention_output, want, atol=0.05)

    input_embeddings = jnp.ones((2, 5, 24))
    with pytest.warns(OpWarning, match=r"dropout_rate=0.1 has no effect without a key.*Remedy: key="):
        mha_output = attention_ops.fused_multihead_attention(
            x=input_embeddings, num_heads=12, use_bias=True, dropout_rate=0.1
        )
    assert mha_output.shape == (2, 5, 24)
    assert np.all(np.isfinite(mha_output))


def test_kernels_are_the_same_classes():
    from capibara.jax.tpu_v4 import backend, kernels

    assert kernels.TpuV4AttentionOps is backend.TpuV4AttentionOps
    assert set(backend.__all__) == set(kernels.__all__)

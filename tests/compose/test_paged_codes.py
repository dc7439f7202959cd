"""``PagedCodesAttention``: pages of int8 codes, on every backend, against the numbers that they are of.

It is only used to decode, and rounding has no gradient, so that values are compared alone.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from torch_oracle import HAS_TORCH, torch

from capibara.compose.backends import jax_ops, numpy_ops
from capibara.ops.attention import paged_attention
from capibara.ops.attention.paged import code_rows
from capibara.ops.errors import OpShapeError, OpTypeError

torch_ops: Any = importlib.import_module("capibara.compose.backends.torch_ops") if HAS_TORCH else None
ROWS, CHUNKS, CHUNK = 1, 1, 3
SHAPE: dict[str, Any] = {"rows": ROWS, "chunks": CHUNKS, "chunk": CHUNK}
PAGES, SIZE, HEADS, KV, DIM = 6, 2, 4, 2, 8
STARTS, COUNTS = np.array([3, 1], np.int32), np.array([1, 2], np.int32)
TABLE = np.array([[4, 1], [2, 5]], np.int32)


def coded(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales = np.abs(x).max(-1).astype(np.float32) / 127
    return np.rint(x / np.where(scales == 0, 1, scales)[..., None]).astype(np.int8), scales


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def drawn(width: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    tokens = ROWS + CHUNKS * CHUNK
    arrays = {
        "query": random.normal(size=(1, tokens, HEADS, DIM)),
        "key": random.normal(size=(1, tokens, KV, DIM)),
        "value": random.normal(size=(1, tokens, KV, DIM)),
    }
    arrays["key"][0, 1, 0] = 0  # a row of zeros has no scale
    pools = [coded(random.normal(size=(PAGES, SIZE, KV, width))) for _ in range(2)]
    for codes, _ in pools:
        codes[..., DIM:] = 0
    arrays |= {"key_pages": pools[0][0], "value_pages": pools[1][0]}
    arrays |= {"key_scales": pools[0][1], "value_scales": pools[1][1]}
    floats = {key: x.astype(np.float32) if x.dtype.kind == "f" else x for key, x in arrays.items()}
    return floats | {"page_table": TABLE, "starts": STARTS, "counts": COUNTS}


def expected(x: dict[str, np.ndarray], window: int | None) -> tuple[np.ndarray, ...]:
    """Token by token, with every row decoded."""
    pools = [x[name].copy() for name in ("key_pages", "value_pages", "key_scales", "value_scales")]
    out = np.zeros_like(x["query"])
    firsts = [0, ROWS]
    for sequence, (first, start, count) in enumerate(zip(firsts, STARTS, COUNTS, strict=True)):
        for i in range(count):
            page, place = TABLE[sequence, (start + i) // SIZE], (start + i) % SIZE
            for which, name in enumerate(("key", "value")):
                codes, scales = coded(x[name][0, first + i])
                pools[which][page, place, :, :DIM], pools[which][page, place, :, DIM:] = codes, 0
                pools[2 + which][page, place] = scales
        for i in range(count):
            seen = range(max(0, start + i + 1 - (window or 99)), start + i + 1)
            where = [(TABLE[sequence, at // SIZE], at % SIZE) for at in seen]
            keys, values = (
                np.stack([pools[w][at][:, :DIM] * pools[2 + w][at][:, None] for at in where]) for w in (0, 1)
            )
            for head in range(HEADS):
                own = head // (HEADS // KV)
                weights = softmax(keys[:, own] @ x["query"][0, first + i, head] / np.sqrt(DIM))
                out[0, first + i, head] = weights @ values[:, own]
    return out, *pools


BACKENDS: dict[str, Any] = {"jax": (jax_ops, jnp.asarray), "numpy": (numpy_ops, np.asarray)}
if HAS_TORCH:
    BACKENDS["torch"] = (torch_ops, torch.tensor)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("width", "window"), [(DIM, None), (DIM, 2), (128, None)])
def test_codes_are_those_of_the_numbers(backend: str, width: int, window: int | None) -> None:
    ops, array = BACKENDS[backend]
    given = drawn(width)
    found = ops.paged_codes_attention(*map(array, given.values()), window=window, softcap=None, **SHAPE)
    want = expected(given, window)
    assert [str(x.dtype).removeprefix("torch.") for x in found] == [
        "float32",
        "int8",
        "int8",
        "float32",
        "float32",
    ]
    np.testing.assert_allclose(np.asarray(found[0]), want[0], rtol=1e-5, atol=1e-5)
    for a, b in zip(found[1:], want[1:], strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["auto", "xla", "reference"])
def test_scales_of_the_operation(implementation: str) -> None:
    """The same as of pages that are decoded before."""
    random = np.random.default_rng(0)
    query = jnp.asarray(random.normal(size=(2, 1, HEADS, DIM)), jnp.float32)
    numbers = [jnp.asarray(random.normal(size=(PAGES, SIZE, KV, DIM)), jnp.float32) for _ in range(2)]
    (keys, of_keys), (values, of_values) = map(code_rows, numbers)
    decoded = [codes * scales[..., None] for codes, scales in ((keys, of_keys), (values, of_values))]
    rest = jnp.asarray(TABLE), jnp.asarray([3, 4], jnp.int32)
    want = paged_attention(query, decoded[0], decoded[1], *rest)
    found = paged_attention(query, keys, values, *rest, of_keys, of_values, implementation=implementation)
    np.testing.assert_allclose(found, want, rtol=2e-6, atol=2e-6)
    for codes, scales, x in ((keys, of_keys, numbers[0]), (values, of_values, numbers[1])):
        assert float(jnp.max(jnp.abs(codes * scales[..., None] - x) / scales[..., None])) < 0.5001
    for name in ("pallas_tpu", "native"):
        with pytest.raises(NotImplementedError, match="pages of numbers, not of codes"):
            paged_attention(query, keys, values, *rest, of_keys, of_values, implementation=name)
    for wrong in (of_keys[:-1], of_keys.astype(jnp.float16), None):
        with pytest.raises(OpShapeError, match="key_scales must be float32"):
            paged_attention(query, keys, values, *rest, wrong, of_values)
    with pytest.raises(OpTypeError, match="must be int8 where there are scales"):
        paged_attention(query, numbers[0], numbers[1], *rest, of_keys, of_values)
    with pytest.raises(OpTypeError, match="or int8 with key_scales"):
        paged_attention(query, keys, values, *rest)

"""cached_attention: against the definition in NumPy, and decoding against the whole sequence at once."""

# NumPy arrays go in where the signatures say jax.Array, and wrong types go in on purpose.
# pyright: reportArgumentType=false

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array

from capibara.ops import OpShapeError, OpTypeError, OpValueError
from capibara.ops.attention import cached, cached_attention, flash_attention

IMPLEMENTATIONS = ("xla", "reference")


def oracle(q, k, v, positions, scale=None, window=None, softcap=None, sinks=None):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    group = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(*q.shape[:3]):
        at = positions[b, t]
        low = 0 if window is None else max(0, at - window + 1)
        if low > at or low >= k.shape[1]:
            continue
        s = scale * k[b, low : at + 1, h // group] @ q[b, t, h]
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
        last = [] if sinks is None else [sinks[h]]
        w = np.exp(np.append(s, last) - max([s.max(), *last]))
        out[b, t, h] = (w / w.sum())[: len(s)] @ v[b, low : at + 1, h // group]
    return out


def arrays(batch=2, new=3, heads=4, kv_heads=2, cache=9, dim=5, value_dim=3, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((batch, new, heads, dim), (batch, cache, kv_heads, dim), (batch, cache, kv_heads, value_dim))
    return [rng.normal(size=s).astype(np.float32) for s in shapes]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"window": 2},
        {"softcap": 0.5},
        {"window": 4, "softcap": 2.0},
        {"sinks": np.array([0.5, -2.0, 9.0, -np.inf], np.float32), "window": 3},
    ],
)
def test_value_is_the_definition(options, implementation):
    q, k, v = arrays()
    positions = np.array([[0, 1, 2], [4, 6, 8]], np.int32)
    got = cached_attention(q, k, v, device_array(positions), **options, implementation=implementation)
    np.testing.assert_allclose(got, oracle(q, k, v, positions, **options), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (3, [[3, 4, 5], [3, 4, 5]]),
        (jnp.int32(3), [[3, 4, 5], [3, 4, 5]]),
        (np.array([[1], [4]]), [[1, 2, 3], [4, 5, 6]]),
        (np.array([[2, 2, 7]]), [[2, 2, 7], [2, 2, 7]]),
    ],
)
def test_the_forms_of_positions(given, meant):
    q, k, v = arrays()
    np.testing.assert_allclose(
        cached_attention(q, k, v, given), oracle(q, k, v, np.array(meant)), rtol=2e-5, atol=2e-6
    )


def test_what_lies_past_the_position_is_not_read():
    q, k, v = arrays(new=1)
    k[:, 4:], v[:, 4:] = 1e4, 1e4
    got = cached_attention(q, k, v, 3)
    np.testing.assert_allclose(
        got, cached_attention(q, k[:, :4], v[:, :4], jnp.int32(3)), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_slots_that_were_never_written_may_hold_anything(implementation, bad):
    q, k, v = arrays()
    starts = np.array([[1], [4]])

    def loss(q, k, v):
        out = cached_attention(q, k, v, starts, implementation=implementation)
        return jnp.sum(jnp.sin(out)), out

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
    (_, want), wanted = run(q, k, v)
    for b, stop in enumerate((4, 7)):
        k[b, stop:], v[b, stop:] = bad, bad
    (_, got), grads = run(q, k, v)
    np.testing.assert_array_equal(got, want)
    for g, w in zip(grads, wanted, strict=True):
        np.testing.assert_array_equal(g, w)


def test_prefill_and_steps_equal_the_whole_sequence():
    rng = np.random.default_rng(1)
    q = device_array(rng.normal(size=(2, 7, 4, 5)), jnp.float32)
    k, v = (device_array(rng.normal(size=(2, 7, 2, 5)), jnp.float32) for _ in range(2))
    sinks = jnp.linspace(-1.0, 1.0, 4)
    want = flash_attention(q, k, v, use_causal_mask=True, layout="bshd", sinks=sinks)
    cache_k, cache_v = (jnp.pad(x[:, :4], ((0, 0), (0, 8), (0, 0), (0, 0))) for x in (k, v))
    step = jax.jit(partial(cached_attention, sinks=sinks))
    np.testing.assert_allclose(step(q[:, :4], cache_k, cache_v, 0), want[:, :4], rtol=1e-5, atol=1e-5)
    for t in range(4, 7):
        cache_k, cache_v = cache_k.at[:, t].set(k[:, t]), cache_v.at[:, t].set(v[:, t])
        got = step(q[:, t : t + 1], cache_k, cache_v, t)
        np.testing.assert_allclose(got[:, 0], want[:, t], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("new", [4, 10, 11])
def test_long_prefills_in_blocks(monkeypatch, new):
    monkeypatch.setattr(cached, "BLOCK", 4)
    q, k, v = arrays(new=new, cache=12)
    positions, sinks = np.broadcast_to(np.arange(new), (2, new)), np.linspace(-1, 1, 4)
    got = cached_attention(q, k, v, 0, sinks=sinks)
    np.testing.assert_allclose(got, oracle(q, k, v, positions, sinks=sinks), rtol=2e-5, atol=2e-6)


def test_vmap():
    q, k, v = arrays()
    got = jax.vmap(lambda q: cached_attention(q, k, v, 5))(jnp.stack([q, -q]))
    np.testing.assert_allclose(got[1], cached_attention(-q, k, v, 5), rtol=1e-5, atol=1e-6)


def test_bfloat16_keeps_its_dtype_and_sums_wide():
    q, k, v = (device_array(x, jnp.bfloat16) for x in arrays(cache=64))
    got = cached_attention(q, k, v, 40)
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    want = oracle(wide[0], wide[1], wide[2], np.broadcast_to([40, 41, 42], (2, 3)))
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-2, atol=1e-2)


def test_empty():
    q, k, v = arrays(new=0)
    assert cached_attention(q, k, v, 0).shape == (2, 0, 4, 3)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"query": np.zeros((2, 3, 4))}, OpShapeError, "query must be"),
        ({"query": None}, OpTypeError, "query must be an array"),
        ({"key_cache": np.zeros((2, 9, 2, 5), np.int32)}, OpTypeError, "key_cache must be floating"),
        ({"key_cache": np.zeros((2, 8, 2, 5))}, OpShapeError, "the same batch, positions and heads"),
        (
            {"key_cache": np.zeros((2, 9, 3, 5)), "value_cache": np.zeros((2, 9, 3, 3))},
            OpShapeError,
            "4 query heads",
        ),
        ({"query": np.zeros((2, 3, 4, 6))}, OpShapeError, "must have the batch"),
        ({"query_positions": 1.5}, OpTypeError, "must be integers"),
        ({"query_positions": np.zeros((2, 2), np.int32)}, OpShapeError, r"\(2, 2\)"),
        ({"window": 0}, OpValueError, "at least 1"),
        ({"window": 1 << 31}, OpValueError, r"below 2\^31"),
        ({"window": 1.5}, OpTypeError, "window must be an int"),
        ({"softcap": -1.0}, OpValueError, "softcap"),
        ({"implementation": "xl"}, OpValueError, "Did you mean 'xla'"),
    ],
)
def test_bad_input(change, error, match):
    q, k, v = arrays()
    call = {"query": q, "key_cache": k, "value_cache": v, "query_positions": 0, **change}
    with pytest.raises(error, match=match):
        cached_attention(**call)

"""paged_attention against the definition on shuffled pages; fused_multihead_attention against NumPy."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from paged_oracle import definition, in_pages

from capibara.ops import OpShapeError, OpTypeError, OpValueError, OpWarning, explain
from capibara.ops.attention import (
    cached_attention,
    flash_attention,
    fused_multihead_attention,
    multihead_attention_params,
    paged,
    paged_attention,
    write_pages,
)

LENGTHS = np.array([7, 0, 12, 3], np.int32)
PAGE, TABLE, PAGES = 3, 4, 20


def made(new: int = 2) -> dict[str, Any]:
    return in_pages(
        LENGTHS, kv_heads=2, heads=4, dim=5, value_dim=3, page_size=PAGE, new=new, table=TABLE, pages=PAGES
    )


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 2},
        {"softcap": 0.5},
        {"sinks": np.array([0.5, -2.0, 9.0, -np.inf])},
        {"sinks": np.array([1.0, 0.0, -1.0, 3.0]), "window": 2, "softcap": 0.5},
    ],
)
@pytest.mark.parametrize("block", [1, 6, 256])
def test_paged_value_is_the_definition(monkeypatch, options, implementation, block):
    monkeypatch.setattr(paged, "BLOCK", block)
    case = made()
    with jax.enable_x64(True):
        step = jax.jit(partial(paged_attention, **options, implementation=implementation))
        got = step(*map(device_array, (case["query"], *case["pages"], case["table"], LENGTHS)))
    for b, length in enumerate(LENGTHS):
        keys, values = case["whole"][b]
        want = definition(case["query"][b], keys, values, length, **options)
        np.testing.assert_allclose(got[b], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_gradients_do_not_see_what_was_never_written(implementation):
    case = made()  # with NaN wherever nothing was written
    table, lengths = device_array(case["table"]), device_array(LENGTHS)

    def loss(query, key, value):
        out = paged_attention(query, key, value, table, lengths, implementation=implementation)
        return jnp.sum(jnp.sin(out))

    given = [device_array(x, jnp.float32) for x in (case["query"], *case["pages"])]
    run = jax.jit(jax.grad(loss, (0, 1, 2)))
    for g, w in zip(run(*given), run(*map(jnp.nan_to_num, given)), strict=True):
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_gradients_with_sinks_are_those_of_gathered_pages(implementation):
    case = in_pages([7, 5, 12, 3], kv_heads=2, heads=4, dim=5, value_dim=3, page_size=PAGE, new=2)
    table, lengths = device_array(case["table"]), device_array(case["lengths"])
    sinks = device_array([0.5, -2.0, 3.0, 1.0], jnp.float32)

    def paged_loss(query, key, value, sinks):
        out = paged_attention(query, key, value, table, lengths, sinks=sinks, implementation=implementation)
        return jnp.sum(jnp.sin(out))

    def gathered_loss(query, key, value, sinks):
        keys, values = (x[table].reshape(len(table), -1, *x.shape[2:]) for x in (key, value))
        out = cached_attention(query, keys, values, (lengths - 2)[:, None], sinks=sinks)
        return jnp.sum(jnp.sin(out))

    query, key, value = (device_array(np.nan_to_num(x), jnp.float32) for x in (case["query"], *case["pages"]))
    given = query, key, value, sinks
    got, want = (jax.jit(jax.grad(f, (0, 1, 2, 3)))(*given) for f in (paged_loss, gathered_loss))
    for g, w in zip(got, want, strict=True):
        assert np.any(w)
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)


def test_no_array_has_the_positions_of_the_table():
    """Whatever room a table has, a few pages are gathered at a time: with sinks, with codes and without."""
    case = in_pages([7, 12], kv_heads=2, heads=4, dim=8, value_dim=8, page_size=4, new=1, table=1000)
    query, key, value = (device_array(x, jnp.float32) for x in (case["query"], *case["pages"]))
    table, lengths = device_array(case["table"]), device_array(case["lengths"])
    sinks, scales = jnp.zeros(4), jnp.ones(key.shape[:3])
    codes = key.astype(jnp.int8), value.astype(jnp.int8)
    for given in (
        (query, key, value, table, lengths),
        (query, key, value, table, lengths, None, None, sinks),
        (query, *codes, table, lengths, scales, scales, sinks),
    ):
        temporary = {}
        for name in ("xla", "reference"):
            program = jax.jit(partial(paged_attention, implementation=name)).lower(*given).compile()
            sizes = program.memory_analysis()
            assert sizes is not None
            temporary[name] = sizes.temp_size_in_bytes
        gathered = 2 * 1000 * 4 * 2 * 8 * 4  # of the keys alone
        assert temporary["xla"] < gathered / 2 < temporary["reference"]


def test_decoding_into_pages_gives_what_the_whole_sequence_gives():
    rng = np.random.default_rng(1)
    q, k, v = (device_array(rng.normal(size=(2, 11, h, 4)), jnp.float32) for h in (4, 2, 2))
    want = flash_attention(q, k, v, use_causal_mask=True, layout="bshd")
    pages = (jnp.zeros((9, 4, 2, 4)), jnp.zeros((9, 4, 2, 4)))
    table = device_array([[8, 0, 3], [5, 2, 7]], jnp.int32)
    lengths = jnp.zeros(2, jnp.int32)
    step = jax.jit(paged_attention)
    for start, stop in ((0, 6), (6, 7), (7, 8), (8, 11)):
        pages = write_pages(*pages, table, lengths, k[:, start:stop], v[:, start:stop])
        lengths = lengths + (stop - start)
        got = step(q[:, start:stop], *pages, table, lengths)
        np.testing.assert_allclose(got, want[:, start:stop], rtol=1e-5, atol=1e-5)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "implementation", [pytest.param("xla", marks=pytest.mark.slow), "reference", "pallas_tpu"]
)
def test_pools_whose_rows_are_padded(implementation):
    """What pads a row is NaN here, and neither read nor given back; what is written is padded with zeros."""
    shape = {"kv_heads": 2, "heads": 4, "dim": 64, "value_dim": 80, "page_size": 4, "new": 2}
    case = in_pages(LENGTHS, **shape)
    query = device_array(case["query"], jnp.float32)
    pages = [device_array(x, jnp.float32) for x in case["pages"]]
    table, lengths = device_array(case["table"]), device_array(LENGTHS)
    key, value = (
        jnp.pad(x, ((0, 0),) * 3 + ((0, 128 - x.shape[3]),), constant_values=jnp.nan) for x in pages
    )
    got = paged_attention(query, key, value, table, lengths, value_dim=80, implementation=implementation)
    assert got.shape == (4, 2, 4, 80)
    for b, length in enumerate(LENGTHS):
        keys, values = case["whole"][b]
        want = definition(case["query"][b], keys, values, length)
        np.testing.assert_allclose(got[b], want, rtol=1e-5, atol=1e-5)

    def loss(query, key, value):
        out = paged_attention(query, key, value, table, lengths, value_dim=80, implementation=implementation)
        return jnp.sum(jnp.sin(out))

    wanted = jax.grad(loss, (0, 1, 2))(
        query, *(jnp.nan_to_num(x[..., :d]) for x, d in zip(pages, (64, 80), strict=True))
    )
    for g, w in zip(jax.grad(loss, (0, 1, 2))(query, key, value), wanted, strict=True):
        np.testing.assert_allclose(g[..., : w.shape[3]], w, rtol=1e-5, atol=1e-5)
        assert not np.any(g[..., w.shape[3] :])
    new = jnp.ones((4, 1, 2, 64)), jnp.ones((4, 1, 2, 80))
    written = write_pages(key, value, table, lengths - 1, new[0], new[1])
    for had, put, d in zip(pages, written, (64, 80), strict=True):
        first = put[table[0, 1], 6 % 4]
        np.testing.assert_array_equal(first, np.pad(np.ones((2, d)), ((0, 0), (0, 128 - d))))
        np.testing.assert_array_equal(put[table[0, 0], :, :, :d], had[table[0, 0]])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.uint16, jnp.uint32])
def test_lengths_and_tables_of_any_integers(dtype):
    """Before a sequence of one position two new ones begin at -1, and a page has more positions than bytes count."""
    rng = np.random.default_rng(2)
    q, key, value = (rng.normal(size=shape) for shape in ((2, 2, 2, 8), (3, 256, 2, 8), (3, 256, 2, 8)))
    table, lengths = device_array([[2], [1]], dtype), device_array([1, 100], dtype)
    pages = (device_array(key, jnp.float32), device_array(value, jnp.float32))
    for implementation in ("xla", "reference"):
        got = paged_attention(
            device_array(q, jnp.float32), *pages, table, lengths, implementation=implementation
        )
        for b, (page, length) in enumerate(((2, 1), (1, 100))):
            want = definition(q[b], key[page, :length], value[page, :length], length)
            np.testing.assert_allclose(got[b], want, rtol=1e-5, atol=1e-6)
    written, _ = write_pages(*pages, table, lengths, jnp.ones((2, 3, 2, 8)), jnp.ones((2, 3, 2, 8)))
    key[2, 1:4] = key[1, 100:103] = 1
    np.testing.assert_array_equal(written, key.astype(np.float32))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("past", [0, 1, 100])
def test_what_is_past_the_table_is_not_seen(monkeypatch, past, implementation):
    monkeypatch.setattr(paged, "BLOCK", 6)  # two pages together, and three in the table
    case = in_pages([9], kv_heads=1, heads=1, dim=4, value_dim=4, page_size=3, new=2, table=3, pages=3)
    query, key, value = (device_array(x, jnp.float32) for x in (case["query"], *case["pages"]))
    lengths = device_array([9 + past], jnp.int32)
    got = paged_attention(
        query, key, value, device_array(case["table"]), lengths, implementation=implementation
    )
    # New positions after the table see all of it.
    keys, values = case["whole"][0]
    for t in range(2):
        seen = min(9 + past - 1 + t, 9)
        want = definition(case["query"][0, t : t + 1], keys[:seen], values[:seen], seen)
        np.testing.assert_allclose(got[0, t], want[0], rtol=1e-5, atol=1e-6)


def test_what_has_no_page_is_not_written():
    pages = (jnp.zeros((2, 2, 1, 1)), jnp.zeros((2, 2, 1, 1)))
    ones = jnp.ones((1, 3, 1, 1))
    got, _ = write_pages(*pages, device_array([[1, -1]]), device_array([1]), ones, ones)
    np.testing.assert_array_equal(got[..., 0, 0], [[0, 0], [0, 1]])  # the other two would be in page -1
    past, _ = write_pages(*pages, device_array([[1]]), device_array([2]), ones, ones)
    assert not np.any(past)


def test_paged_under_vmap_in_bfloat16_empty_and_explained():
    case = made(1)
    key, value = (jnp.nan_to_num(device_array(x, jnp.bfloat16)) for x in case["pages"])
    q = device_array(case["query"], jnp.bfloat16)
    table, lengths = device_array(case["table"]), device_array(LENGTHS)
    got = jax.vmap(paged_attention, (0, None, None, None, None))(
        jnp.stack([q, -q]), key, value, table, lengths
    )
    assert got.dtype == jnp.bfloat16
    want = paged_attention(-q, key, value, table, lengths, implementation="reference")
    np.testing.assert_allclose(np.asarray(got[1], np.float32), np.asarray(want, np.float32), atol=0.03)
    assert paged_attention(q[:0], key, value, table[:0], lengths[:0]).shape == (0, 1, 4, 3)
    assert explain(paged_attention, q, key, value, table, lengths, platform="tpu").chosen == "xla"


@pytest.mark.parametrize(
    ("place", "change", "error", "match"),
    [
        (0, jnp.zeros((4, 1, 3, 5)), OpShapeError, "divides the query's"),
        (1, jnp.zeros((3, 3, 2)), OpShapeError, "key_pages must be"),
        (2, jnp.zeros((2, 3, 2, 3)), OpShapeError, "the same pages"),
        (3, jnp.zeros((4, 2)), OpTypeError, "page_table must be an integer"),
        (3, jnp.zeros((3, 2), int), OpShapeError, "page_table must be"),
        (4, jnp.zeros((3,), int), OpShapeError, "lengths must have shape"),
    ],
)
def test_paged_bad_input(place, change, error, match):
    call = [
        jnp.zeros((4, 1, 4, 5)),
        jnp.zeros((3, 3, 2, 5)),
        jnp.zeros((3, 3, 2, 3)),
        jnp.zeros((4, 2), int),
        jnp.ones(4, int),
    ]
    call[place] = change
    with pytest.raises(error, match=match):
        paged_attention(*call)


@pytest.mark.parametrize(
    ("value_dim", "error"), [(2, OpValueError), (128, OpValueError), (0, OpValueError), (3.0, OpTypeError)]
)
def test_the_length_of_a_value_is_that_of_the_pool_or_pads_to_it(value_dim, error):
    call = (jnp.zeros((4, 1, 4, 5)), jnp.zeros((3, 3, 2, 5)), jnp.zeros((3, 3, 2, 3)), jnp.zeros((4, 2), int))
    with pytest.raises(error, match="value_dim"):
        paged_attention(*call, jnp.ones(4, int), value_dim=value_dim)


@pytest.mark.parametrize("use_bias", [True, False])
def test_a_layer_is_its_definition(use_bias):
    x = np.random.default_rng(0).normal(size=(2, 5, 6)).astype(np.float32)
    params = multihead_attention_params(jax.random.key(1), 6, 3, use_bias=use_bias)
    params = {name: p + 0.1 for name, p in params.items()}
    got = fused_multihead_attention(device_array(x), 3, use_bias, params=params, use_causal_mask=True)
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    q, k, v = np.einsum("bse,ethd->tbshd", x, p["qkv_kernel"]) + (
        p["qkv_bias"][:, None, None] if use_bias else 0
    )
    s = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(2) + np.triu(np.full((5, 5), -np.inf), 1)
    w = np.exp(s - s.max(-1, keepdims=True))
    w /= w.sum(-1, keepdims=True)
    want = np.einsum("bhqk,bkhd,hde->bqe", w, v, p["out_kernel"]) + (p["out_bias"] if use_bias else 0)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_dropout_needs_a_key_keeps_the_mean_and_is_the_keys():
    x = jnp.ones((2, 64, 24))
    params = multihead_attention_params(jax.random.key(1), 24, 12)
    with pytest.warns(OpWarning, match="key"):
        whole = fused_multihead_attention(x, 12, True, 0.25, params=params)
    np.testing.assert_array_equal(whole, fused_multihead_attention(x, 12, params=params))
    dropped = fused_multihead_attention(x, 12, True, 0.25, params=params, key=jax.random.key(2))
    zero = np.asarray(dropped == 0)
    assert 0.2 < zero.mean() < 0.3
    np.testing.assert_allclose(dropped[~zero], whole[~zero] / 0.75, rtol=1e-6)
    again = fused_multihead_attention(x, 12, True, 0.25, params=params, key=jax.random.key(3))
    assert np.any((again == 0) != zero)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"num_heads": 5}, OpValueError, "num_heads=5 must divide"),
        ({"num_heads": 2.0}, OpTypeError, "num_heads must be an int"),
        ({"dropout_rate": 1.0}, OpValueError, "below 1"),
        ({"x": jnp.ones((5, 6))}, OpShapeError, "x must be"),
        ({"x": jnp.ones((1, 5, 6), int)}, OpTypeError, "floating point"),
        ({"params": {}}, OpShapeError, "multihead_attention_params"),
        ({"layout": "bhsd"}, OpValueError, "layout"),
    ],
)
def test_layer_bad_input(change, error, match):
    with pytest.raises(error, match=match):
        fused_multihead_attention(**{"x": jnp.ones((1, 5, 6)), "num_heads": 3, **change})


def test_a_layer_takes_parameters_that_lie_differently():
    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    specs = {"qkv_kernel": P("a"), "out_kernel": P(None, None, "a"), "qkv_bias": P(), "out_bias": P("b")}
    params = multihead_attention_params(jax.random.key(0), 8, 2)
    laid = {name: jax.device_put(value, NamedSharding(mesh, specs[name])) for name, value in params.items()}
    x = jax.random.normal(jax.random.key(1), (2, 5, 8))
    key = jax.random.key(2)
    ids = device_array([[0, 0, 1, 1, 1], [0, 1, 1, 1, 2]], jnp.int32)
    with jax.set_mesh(mesh):
        there = jax.device_put(x, NamedSharding(mesh, P("b", "a")))
        lies = jax.device_put(ids, NamedSharding(mesh, P("b")))
        got = fused_multihead_attention(there, 2, dropout_rate=0.5, params=laid, key=key, segment_ids=lies)
    want = fused_multihead_attention(x, 2, dropout_rate=0.5, params=params, key=key, segment_ids=ids)
    assert jax.typeof(got).sharding.spec == P("b", "a", None)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)

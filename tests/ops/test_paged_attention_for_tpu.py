"""The TPU kernel of attention over pages: interpreted against the definition, and compiled for TPUs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from paged_oracle import arrays, check_nan_and_infinity, definition, in_pages
from tpu_compiler import ask, needs_libtpu
from tpu_kinds import few_or_all

from capibara.ops import NoImplementationError, explain
from capibara.ops.attention import paged_attention, paged_tpu

KERNEL = partial(paged_attention, implementation="pallas_tpu")
# Heads of 128 elements, unless a shape says otherwise.
SHAPES = {
    "one head": {"kv_heads": 1, "heads": 4, "page_size": 8},
    "grouped": {"kv_heads": 2, "heads": 6, "page_size": 4, "new": 2},
    "parts of a head": {"kv_heads": 8, "heads": 8, "dim": 256, "value_dim": 128, "page_size": 2},
    "many heads": {"kv_heads": 8, "heads": 8, "page_size": 1, "value_dim": 256},
    "heads of 64": {"kv_heads": 2, "heads": 6, "dim": 64, "value_dim": 64, "page_size": 4, "new": 2},
    "heads of 80 and 96": {"kv_heads": 8, "heads": 8, "dim": 80, "value_dim": 96, "page_size": 2},
    "one head of 96": {"kv_heads": 1, "heads": 4, "dim": 96, "value_dim": 128, "page_size": 8},
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 3},
    {"softcap": 0.7, "scale": 0.3},
    {"window": 3, "sinks": np.array([0.5, -2.0, 9.0, -np.inf, 0.0, 1.0, 2.0, 3.0], np.float32)},
)
QUICK = ("grouped", "parts of a head", "heads of 64")  # with options, and in bfloat16


@pytest.fixture(autouse=True)
def _two_pages_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that there are several blocks, of which a window leaves some out."""
    monkeypatch.setattr(paged_tpu, "_together", lambda problem: min(2, problem.table))


def check(case: dict[str, Any], got: jax.Array, tolerance: float = 1e-5, **options: Any) -> None:
    assert got.shape == (*case["query"].shape[:3], case["pages"][1].shape[3])
    for b, (keys, values) in enumerate(case["whole"]):
        want = definition(case["query"][b], keys, values, len(keys), **options)
        np.testing.assert_allclose(np.asarray(got[b], np.float64), want, rtol=tolerance, atol=tolerance)


@pytest.mark.thin(9)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param(shape, options, marks=[pytest.mark.slow] * (bool(options) and shape not in QUICK))
        for shape in SHAPES
        for options in OPTIONS
    ],
)
def test_interpreted_value_is_the_definition(shape, options):
    case = in_pages([7, 0, 12, 3, 8], **SHAPES[shape])
    if "sinks" in options:
        options = options | {"sinks": options["sinks"][: SHAPES[shape]["heads"]]}
    check(case, jax.jit(partial(KERNEL, **options))(*arrays(case)), **options)


@pytest.mark.parametrize(
    "shape", [s if s in QUICK else pytest.param(s, marks=pytest.mark.slow) for s in SHAPES]
)
def test_bfloat16_is_that_of_the_reference(shape):
    case = in_pages([7, 0, 12, 3], **SHAPES[shape])
    given_arrays = arrays(case, jnp.bfloat16)
    got = KERNEL(*given_arrays)
    assert got.dtype == jnp.bfloat16
    check(case, got, 0.04)
    want = paged_attention(*given_arrays, implementation="reference")
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.02)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 17), min_size=1, max_size=4),
    new=st.integers(1, 3),
    window=st.none() | st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_any_lengths(lengths, new, window, seed):
    case = in_pages(lengths, kv_heads=2, heads=2, page_size=4, new=new, seed=seed)
    check(case, KERNEL(*arrays(case), window=window), window=window)


def test_nan_and_infinity_stay_with_their_sequence_and_head():
    check_nan_and_infinity(KERNEL, 128)


@pytest.mark.slow
def test_gradient_vmap_and_what_it_refuses():
    case = in_pages([5, 9], kv_heads=2, heads=4, page_size=4)
    query, key, value, table, lengths = arrays(case)
    key, value = jnp.nan_to_num(key), jnp.nan_to_num(value)

    def loss(implementation: str, *given_arrays: jax.Array) -> jax.Array:
        query, key, value = given_arrays
        return jnp.sum(
            jnp.sin(paged_attention(query, key, value, table, lengths, implementation=implementation))
        )

    for got, want in zip(
        *(
            jax.grad(partial(loss, name), (0, 1, 2))(query, key, value)
            for name in ("pallas_tpu", "reference")
        ),
        strict=True,
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    several = jax.vmap(KERNEL, (0, None, None, None, None))(
        jnp.stack([query, -query]), key, value, table, lengths
    )
    np.testing.assert_allclose(several[1], KERNEL(-query, key, value, table, lengths), rtol=1e-5, atol=1e-6)
    assert explain(paged_attention, query, key, value, table, lengths, platform="tpu").chosen == "pallas_tpu"
    for change, why in (
        ((query.astype(jnp.bfloat16), key, value), "throughout"),
        ((query[..., :60], key[..., :60], value), "multiple of 8 up to 128, or of 128, not 60"),
        ((jnp.tile(query, 2)[..., :192], jnp.tile(key, 2)[..., :192], value), "or of 128, not 192"),
        ((jnp.tile(query, (1, 1, 3, 1))[:, :, :12], jnp.tile(key, (1, 1, 3, 1)), jnp.tile(value, (1, 1, 3, 1))),
         "key heads, not 6"),
        ((query, key[:, :3], value[:, :3]), "multiple of 8 rows"),
        ((jnp.tile(query, 2), jnp.tile(key, 2), jnp.tile(value, 2)), "heads of 128 numbers where there are 2"),
    ):  # fmt: skip
        with pytest.raises(NoImplementationError, match=why):
            KERNEL(*change, table, lengths)
        assert explain(paged_attention, *change, table, lengths, platform="tpu").chosen == "xla"


def test_on_v5p_heads_are_of_128(monkeypatch):
    monkeypatch.setattr(paged_tpu, "_on_v5p", lambda: True)
    for shape, chosen in (("one head", "pallas_tpu"), ("heads of 64", "xla")):
        given_arrays = arrays(in_pages([5, 9], **SHAPES[shape]))
        assert explain(paged_attention, *given_arrays, platform="tpu").chosen == chosen


@pytest.mark.parametrize(
    ("batch", "table", "fits"), [(1024, 128, True), (1025, 1, False), (1, 1 << 18, False)]
)
def test_rows_of_the_table_are_padded(batch, table, fits):
    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype)

    pool, numbers = shape(64, 16, 8, 128), shape(batch, table, dtype=jnp.int32)
    given_arrays = (shape(batch, 1, 8, 128), pool, pool, numbers, shape(batch, dtype=jnp.int32))
    chosen = explain(paged_attention, *given_arrays, platform="tpu").chosen
    assert chosen == ("pallas_tpu" if fits else "xla")


class TestInTheTpuInterpreter:
    """Which has a TPU's memories: it finds what is read before its copy has come, and what nothing has written."""

    PARAMS = pltpu.InterpretParams(
        detect_races=True, dma_execution_mode="on_wait", uninitialized_memory="nan", random_seed=1
    )

    @pytest.fixture(autouse=True)
    def _fresh(self) -> Iterator[None]:
        pltpu.reset_tpu_interpret_mode_state()
        yield
        pltpu.reset_tpu_interpret_mode_state()

    @pytest.mark.parametrize(
        "options", [{}, {"window": 4}, {"sinks": np.array([0.5, -2.0, 9.0, 1.0], np.float32)}]
    )
    def test_no_races(self, options, capfd):
        # Its interpreter has no view of 16-bit rows as words, so this is in float32.
        case = in_pages([7, 0, 21, 3, 16], kv_heads=2, heads=4, page_size=4, new=2)
        with pltpu.force_tpu_interpret_mode(self.PARAMS):
            got = jax.block_until_ready(KERNEL(*arrays(case), **options))
        assert "RACE" not in capfd.readouterr().out
        check(case, got, **options)


SCRIPT = r"""
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from capibara.ops import explain
from capibara.ops.attention import paged_attention

*few, kind = sys.argv[1:]
more = {"chip_config_name": "megacore"} if kind.startswith("v4") else {}
one = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=kind, **more).devices[0])
out = {}


def up(n, unit):
    return -(-n // unit) * unit


def measure(name, batch, new, heads, kv_heads, dim, page_size, table, dtype, wide=None, pages=512, **options):

    def shape(s, d):
        return jax.ShapeDtypeStruct(s, d, sharding=one)

    pool = shape((pages, page_size, kv_heads, wide or dim), dtype)
    query, table, lengths = (batch, new, heads, dim), (batch, table), (batch,)
    given = (shape(query, dtype), pool, pool, *(shape(s, jnp.int32) for s in (table, lengths)))
    answer = explain(paged_attention, *given, platform="tpu", **options)
    compiled = jax.jit(lambda *a: paged_attention(*a, **options)).lower(*given).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    out[name] = {
        "explain": answer.chosen, "kernel": "capibara_attention_paged" in text, "temp": memory.temp_size_in_bytes,
        "padded": batch * kv_heads * up(new * (heads // kv_heads), 8) * up(dim, 128) * dtype.dtype.itemsize,
    }


for dtype in (jnp.bfloat16, jnp.float32)[: 1 if few else 2]:
    shapes = [(1, 128, 16), (2, 128, 16), (4, 128, 2), (8, 128, 16), (8, 256, 32), (24, 128, 5)]
    shapes += [(8, 64, 16), (2, 80, 16), (1, 96, 16)]
    shapes = shapes[1::3] if few else shapes
    # Of these XLA would copy the pages where they are float32.
    for kv_heads, dim, page_size in shapes + [(1, 256, 64)] * (dtype == jnp.bfloat16):
        name = f"{dtype.dtype.name} {kv_heads}x{dim} pages of {page_size}"
        measure(name, 4, 1, 8 * kv_heads, kv_heads, dim, page_size, 64, dtype)
if not few:
    measure("many sequences", 256, 1, 32, 8, 128, 16, 256, jnp.bfloat16)
measure("many short sequences", 1024, 1, 64, 8, 128, 16, 2, jnp.bfloat16)
with jax.enable_x64(True):
    measure("64 bits", 4, 1, 32, 8, 128, 16, 64, jnp.bfloat16, window=20)
measure("many new ones", 4, 16, 32, 8, 128, 16, 64, jnp.bfloat16, window=100, softcap=30.0)
# Pools as serving has them, of 32 MiB and more, with rows padded for heads of 64 and 80.
measure("64 padded", 8, 1, 32, 8, 64, 16, 128, jnp.bfloat16, wide=128, pages=1024, value_dim=64)
measure("80 padded", 8, 1, 8, 2, 80, 16, 128, jnp.bfloat16, wide=128, pages=4096, value_dim=80)
measure("with sinks", 4, 1, 32, 8, 128, 16, 64, jnp.bfloat16, sinks=jnp.zeros(32, jnp.bfloat16))
measure("odd heads", 4, 1, 32, 8, 60, 16, 64, jnp.bfloat16)
print(json.dumps(out))
"""


@needs_libtpu
@pytest.mark.parametrize("kind", few_or_all("v4"))
def test_compiled_for_tpus_it_copies_no_pool(kind):
    found = ask(SCRIPT, *kind.split())
    assert found.pop("odd heads")["explain"] == "xla"
    for name, one in found.items():
        assert one["explain"] == "pallas_tpu", name
        assert one["kernel"], name
        if kind.startswith("v5p") and int(name.partition("x")[2].partition(" ")[0] or 128) < 128:
            continue  # there narrow pools are copied, and a process that computes on it takes no kernel
        # The queries in another order, padded to eight rows for each key head, and the output likewise; no pages.
        assert one["temp"] <= 2 * one["padded"] + (1 << 17), (name, one)

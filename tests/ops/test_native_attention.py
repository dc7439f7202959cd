"""The compiled attention kernels: values, gradients, instruction sets, meshes, a library that is not there."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import make, oracle
from device_arrays import device_array
from emulation import emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import instruction_sets

from capibara import native
from capibara.measure import count_flops
from capibara.native import build, library
from capibara.ops import explain
from capibara.ops.attention import flash_attention
from capibara.ops.attention.specs import SPECS, AttentionSpec

pytestmark = pytest.mark.skipif(
    build.find_compiler() is None, reason="no C++ compiler: there is no native library to test"
)
# Tests of this file compile on the first call of each shape; what runs is the same code at any level.
FAST: Any = {"xla_backend_optimization_level": 0}


def _spec(batch: int, heads: int, q_len: int, dim: int, **rest: Any) -> AttentionSpec:
    return AttentionSpec(f"{batch} × {heads} × {q_len} × {dim}", batch, heads, q_len, dim, **rest)


def _without_blocks(spec: AttentionSpec) -> AttentionSpec:
    return dataclasses.replace(spec, options={k: v for k, v in spec.options.items() if k != "block_size"})


CAUSAL = {"use_causal_mask": True}
CHECKED = (
    *(_without_blocks(spec) for spec in SPECS if "large" not in spec.tags),
    # More than a tile of keys (128), a tile of rows and a chunk of rows; last axes that fill no vector.
    _spec(1, 2, 300, 9, options=CAUSAL),
    _spec(2, 4, 131, 33, kv_heads=2, value_dim=17, options={**CAUSAL, "layout": "bshd"}),
    _spec(1, 1, 260, 8, kv_len=140),
    _spec(1, 1, 7, 3, kv_len=400, options={"window": (3, 200)}),
    _spec(1, 2, 290, 4, options={**CAUSAL, "window": 130}),
    _spec(1, 1, 400, 5, kv_len=90, sinks=True, options={"window": 20}),
    # More than a tile with what is added to the scores; biases that rows, keys, heads or the batch share.
    _spec(2, 4, 150, 9, kv_heads=2, bias=(True, False, True, False), options={**CAUSAL, "softcap": 3.0}),
    _spec(2, 2, 140, 5, bias=(False, True, False, True), segments=True, options={"window": (90, 100)}),
    _spec(2, 2, 70, 5, kv_len=130, bias=(False, False, True, True), options={"layout": "bshd"}),
    _spec(1, 2, 60, 5, bias=(False, False, False, False), options=CAUSAL),
    _spec(2, 2, 150, 6, segments=True, sinks=True, options={**CAUSAL, "softcap": 50.0}),
)


def _run(arrays: dict[str, Any], options: dict[str, Any], implementation: str = "native") -> jax.Array:
    return flash_attention(**arrays, **options, implementation=implementation)


def _float32(arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: device_array(x, jnp.float32) for name, x in arrays.items()}


def _gradient_and_value(options: dict[str, Any]) -> Any:
    @partial(jax.jit, static_argnums=1, compiler_options=FAST)
    def both(a: dict[str, jax.Array], implementation: str) -> Any:
        out, pull = jax.vjp(lambda a: _run(a, options, implementation), a)
        return out, pull(jnp.cos(jnp.arange(out.size)).reshape(out.shape).astype(out.dtype))[0]

    return both


def test_the_library_is_there_and_says_its_instruction_set():
    assert native.problem() is None
    assert native.isa() in ("avx512", "avx2", "neon", "baseline")


@pytest.mark.thin(9)
@pytest.mark.parametrize("spec", CHECKED, ids=lambda s: s.name)
def test_value_and_gradient(spec):
    arrays, options = make(spec)
    both = _gradient_and_value(options)
    out, gradient = both(_float32(arrays), "native")
    np.testing.assert_allclose(out, oracle(arrays, options), rtol=1e-5, atol=2e-6)
    with jax.enable_x64(True):
        _, want = both({name: device_array(x) for name, x in arrays.items()}, "reference")
    for name in arrays:
        assert gradient[name].dtype == jnp.float32
        np.testing.assert_allclose(gradient[name], want[name], rtol=2e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_numbers_of_16_bits_are_widened_and_the_results_rounded(dtype, layout):
    spec = _spec(2, 4, 137, 19, kv_heads=2, value_dim=8, bias=(False, True, False, True), segments=True)
    arrays, options = make(spec)
    options |= {**CAUSAL, "softcap": 5.0}
    if layout == "bshd":
        arrays |= {name: arrays[name].swapaxes(1, 2) for name in ("query", "key", "value")}
        options["layout"] = layout
    narrow = {name: device_array(x, dtype) for name, x in arrays.items()}
    wide = {name: x.astype(jnp.float32) for name, x in narrow.items()}
    both = _gradient_and_value(options)
    eps = float(jnp.finfo(dtype).eps)
    out, gradient = both(narrow, "native")
    want, wanted = both(wide, "native")
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(jnp.float32), want, rtol=eps, atol=1e-6)
    for name, x in gradient.items():
        assert x.dtype == dtype
        # The row's products with the output are taken of what was rounded.
        scale = float(jnp.max(jnp.abs(wanted[name])))
        np.testing.assert_allclose(
            x.astype(jnp.float32), wanted[name], rtol=4 * eps, atol=2 * eps * scale, err_msg=name
        )


def test_operands_are_rounded_as_the_caller_asks():
    arrays, options = make(_spec(1, 2, 40, 8, options=CAUSAL))
    narrow = _float32(arrays)
    rounded = {name: x.astype(jnp.bfloat16).astype(jnp.float32) for name, x in narrow.items()}
    got = _run(narrow, {**options, "precision": "bfloat16"})
    np.testing.assert_array_equal(got, _run(rounded, options))
    assert got.dtype == jnp.float32


def test_segments_by_numbers_of_64_bits():
    arrays, options = make(_spec(1, 1, 12, 4))
    with jax.enable_x64(True):
        ids = device_array([[0] * 5 + [1 << 32] * 7])
        got = _run(
            {n: device_array(x, jnp.float32) for n, x in arrays.items()}, {**options, "segment_ids": ids}
        )
    small = {**options, "segment_ids": np.asarray([[0] * 5 + [1] * 7], np.int32)}
    np.testing.assert_allclose(got, oracle(arrays, small), rtol=1e-5, atol=2e-6)


def test_scores_near_and_far_from_0_in_one_row():
    # Where lengths bound the scores of a block, weights are taken relative to 0; elsewhere to the row's maximum.
    arrays, options = make(_spec(1, 1, 300, 4))
    for far in (0, 1, 2):
        for factor in (200.0, -200.0):
            changed = {name: x.copy() for name, x in arrays.items()}
            changed["query"] = np.abs(changed["query"]) + 0.2
            changed["key"][:, :, 128 * far : 128 * (far + 1)] = factor
            both = _gradient_and_value(options)
            out, gradient = both(_float32(changed), "native")
            np.testing.assert_allclose(out, oracle(changed, options), rtol=2e-4, atol=1e-5)
            with jax.enable_x64(True):
                _, want = both({name: device_array(x) for name, x in changed.items()}, "reference")
            for name in arrays:
                np.testing.assert_allclose(gradient[name], want[name], rtol=2e-3, atol=2e-4, err_msg=name)


@settings(max_examples=12, deadline=None)
@given(
    q_len=st.integers(1, 290),
    kv_len=st.integers(1, 290),
    dim=st.integers(1, 20),
    value_dim=st.integers(1, 20),
    group=st.integers(1, 3),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 200) | st.tuples(st.integers(0, 150), st.integers(0, 150)),
    layout=st.sampled_from(["bhsd", "bshd"]),
)
def test_any_sizes(q_len, kv_len, dim, value_dim, group, causal, window, layout):
    options = {"use_causal_mask": causal, "window": window, "layout": layout}
    spec = AttentionSpec("", 1, group, q_len, dim, 1, kv_len, value_dim, options=options)
    arrays, options = make(spec)
    got = jax.jit(lambda a: _run(a, options), compiler_options=FAST)(_float32(arrays))
    reference = jax.jit(lambda a: _run(a, options, "reference"), compiler_options=FAST)(_float32(arrays))
    np.testing.assert_allclose(got, reference, rtol=3e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [None, (False, True, True, True)])
def test_second_gradient(bias):
    arrays, options = make(AttentionSpec("", 1, 2, 9, 3, bias=bias, sinks=bias is None, options=CAUSAL))

    def bent(a: dict[str, jax.Array], implementation: str) -> jax.Array:
        inner = jax.grad(lambda a: jnp.sum(_run(a, options, implementation) ** 2))(a)
        return jnp.sum(jnp.stack([jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(inner)]))

    got, want = (
        jax.jit(jax.grad(lambda a, n=name: bent(a, n)), compiler_options=FAST)(_float32(arrays))
        for name in ("native", "reference")
    )
    for name in arrays:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-3, atol=1e-4)


def test_vmap_adds_an_axis_that_may_be_missing_from_an_argument():
    arrays, options = make(AttentionSpec("", 2, 2, 9, 4, options=CAUSAL))
    narrow = _float32(arrays)
    queries = jnp.stack([narrow["query"], -narrow["query"], 2 * narrow["query"]])

    def loss(query: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.sum(_run({"query": query, "key": key, "value": narrow["value"]}, options) ** 2)

    gradient = jax.value_and_grad(loss, (0, 1))
    got = jax.jit(jax.vmap(gradient, (0, None)))(queries, narrow["key"])
    for i in range(3):
        want = gradient(queries[i], narrow["key"])
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(b[i], a, rtol=1e-5, atol=1e-5)


def test_vmap_of_a_bias_that_heads_share_and_of_segments():
    arrays, options = make(_spec(2, 2, 9, 4, bias=(True, False, True, True), options=CAUSAL))
    narrow = _float32(arrays)
    biases = jnp.stack([narrow["bias"], jnp.sin(narrow["bias"])])
    ids = device_array([[[0] * 4 + [1] * 5] * 2, [[0] * 6 + [1] * 3] * 2], jnp.int32)

    def loss(bias: jax.Array, ids: jax.Array) -> jax.Array:
        return jnp.sum(_run({**narrow, "bias": bias}, {**options, "segment_ids": ids}) ** 2)

    gradient = jax.value_and_grad(loss)
    got = jax.jit(jax.vmap(gradient))(biases, ids)
    for i in range(2):
        for a, b in zip(gradient(biases[i], ids[i]), got, strict=True):
            np.testing.assert_allclose(b[i], a, rtol=1e-5, atol=1e-5)


def test_the_bias_gradient_is_computed_only_where_it_is_asked_for():
    arrays, options = make(_spec(1, 2, 16, 4, bias=(False, True, True, True)))
    narrow = _float32(arrays)
    loss = lambda q, b: jnp.sum(_run({**narrow, "query": q, "bias": b}, options))  # noqa: E731
    for wanted, there in ((0, False), (1, True)):
        step = jax.jit(jax.grad(loss, wanted), compiler_options=FAST)
        text = step.lower(narrow["query"], narrow["bias"]).compile().as_text()
        assert text is not None
        assert ("capibara_attention_bias" in text) == there


def test_a_bias_that_hides_all_of_a_row_makes_it_zero():
    arrays, options = make(_spec(1, 1, 20, 4, bias=(False, False, True, True)))
    arrays["bias"][:, :, 3] = -np.inf
    arrays["bias"][:, :, 5] = np.finfo(np.float32).min
    both = _gradient_and_value(options)
    (out, gradient), (want, wanted) = (both(_float32(arrays), name) for name in ("native", "reference"))
    assert not np.any(out[:, :, 3])
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)
    for name in ("query", "key", "value"):
        np.testing.assert_allclose(gradient[name], wanted[name], rtol=2e-5, atol=1e-5, err_msg=name)


def test_a_row_that_sees_nothing_is_zero_with_zero_gradient():
    # Rows beyond the keys and the window.
    arrays, options = make(AttentionSpec("", 1, 1, 60, 5, kv_len=8, options={"window": 4}))
    out, pull = jax.vjp(lambda a: _run(a, options), _float32(arrays))
    (gradient,) = pull(jnp.ones_like(out))
    assert np.any(out[:, :, 10])
    assert not np.any(out[:, :, 11:])
    assert not np.any(gradient["query"][:, :, 11:])
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_what_is_not_finite_spreads_as_in_the_reference(bad, where):
    arrays, options = make(AttentionSpec("", 1, 2, 40, 8, options=CAUSAL))
    arrays[where][0, 1, 17, 3] = bad
    narrow = _float32(arrays)
    got, want = (np.asarray(_run(narrow, options, name)) for name in ("native", "reference"))
    assert np.all(np.isfinite(got[0, 0]))
    np.testing.assert_array_equal(np.isnan(got[0, 1, 17:]), np.isnan(want[0, 1, 17:]))
    # A row that does not see the bad number may still meet it as 0 * inf, but only where the reference does.
    assert np.all(np.isnan(want) >= np.isnan(got))
    finite = np.isfinite(want[0, 1, 17:]) & np.isfinite(got[0, 1, 17:])
    np.testing.assert_allclose(got[0, 1, 17:][finite], want[0, 1, 17:][finite], rtol=1e-5, atol=1e-5)


def test_huge_scores_neither_overflow_nor_vanish():
    arrays, options = make(AttentionSpec("", 1, 1, 60, 3, options=CAUSAL))
    arrays["query"] *= 1e3
    narrow = {name: x.astype(np.float32) for name, x in arrays.items()}
    want = oracle({n: x.astype(np.float64) for n, x in narrow.items()}, options)
    np.testing.assert_allclose(_run(narrow, options), want, rtol=2e-3, atol=2e-3)


def test_the_result_does_not_depend_on_who_does_which_item():
    arrays, options = make(AttentionSpec("", 3, 4, 200, 16, options=CAUSAL))
    run = jax.jit(jax.value_and_grad(lambda a: jnp.sum(_run(a, options) ** 2)))
    first = run(_float32(arrays))
    for _ in range(5):
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(run(_float32(arrays))), strict=True):
            np.testing.assert_array_equal(a, b)


def test_memory_of_the_gradient_grows_with_the_sequence_not_its_square():
    def temporary(length: int) -> int:
        x = jax.ShapeDtypeStruct((1, 1, length, 8), jnp.float32)
        loss = lambda q: jnp.sum(_run({"query": q, "key": q, "value": q}, CAUSAL))  # noqa: E731
        analysis = jax.jit(jax.grad(loss)).lower(x).compile(FAST).memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary(4096) <= 2 * temporary(2048) + 4096
    assert temporary(4096) < 4096 * 4096 * 4 / 50


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_its_arithmetic_is_counted(layout):
    q, k = (jax.ShapeDtypeStruct((2, 6, 6, 8), jnp.float32) for _ in range(2))
    v = jax.ShapeDtypeStruct((2, 6, 6, 4), jnp.float32)
    attend = partial(flash_attention, window=(2, 0), layout=layout, implementation="native")
    pairs = 2 * 6 * (1 + 2 + 3 + 3 + 3 + 3)
    count = count_flops(attend, q, k, v)
    assert count.exact
    assert count.total == 2 * pairs * (8 + 4)
    gradient = jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2))
    assert count_flops(gradient, q, k, v).total == count.total + 2 * pairs * (3 * 8 + 2 * 4)


def test_explain_says_native_or_what_it_lacks():
    x = jax.ShapeDtypeStruct((1, 2, 16, 8), jnp.float32)
    assert explain(flash_attention, x, x, x, platform="cpu").chosen == "native"
    assert explain(flash_attention, x, x, x, platform="tpu").chosen == "pallas_tpu"
    ids = jnp.zeros((1, 16), jnp.int32)
    more = {"softcap": 2.0, "segment_ids": ids, "bias": jnp.ones((1, 1, 1, 16)), "precision": "bfloat16"}
    for name, value in more.items():
        assert explain(flash_attention, x, x, x, platform="cpu", **{name: value}).chosen == "native"
    half = jax.ShapeDtypeStruct((1, 2, 16, 8), jnp.bfloat16)
    assert explain(flash_attention, half, half, half, platform="cpu").chosen == "native"
    # A hint, which must not cost the kernel.
    assert explain(flash_attention, x, x, x, platform="cpu", block_size=8).chosen == "native"
    with jax.enable_x64(True):
        wide = jax.ShapeDtypeStruct((1, 2, 16, 8), jnp.float64)
        found = explain(flash_attention, wide, wide, wide, platform="cpu")
    assert "float32, not float64" in found.reasons["native"]
    arrays = (jnp.ones((1, 2, 16, 8)),) * 3
    got = flash_attention(*arrays, block_size=8, implementation="native")
    np.testing.assert_allclose(got, flash_attention(*arrays, implementation="reference"), rtol=1e-6)


def test_arrays_that_do_not_fit_together_are_an_error_not_a_crash():
    attributes = {"layout": 0, "left": 1, "right": 0, "scale": 1.0, "softcap": 0.0}
    x, y = jnp.ones((1, 2, 4, 8)), jnp.ones((1, 2, 4, 9))
    none, ids = (jnp.zeros((0,)), *(jnp.zeros((0,), jnp.int32),) * 2), jnp.zeros((1, 4), jnp.int32)
    out = (jax.ShapeDtypeStruct(x.shape, jnp.float32), jax.ShapeDtypeStruct((1, 2, 4), jnp.float32))

    def refused(results: Any, *arrays: Any) -> None:
        with pytest.raises(Exception, match="capibara attention"):
            jax.block_until_ready(native.call("capibara_attention_forward", results, *arrays, **attributes))

    for arrays in ((x, y, x), (x, x, y), (x[0], x, x), (x, x[:, :1], x), (x, x, x.astype(jnp.bfloat16))):
        refused(out, *arrays, *none)
    refused(out, *(x.astype(jnp.float16),) * 3, *none)
    refused(out[:1] * 2, x, x, x, *none)
    for bias in (jnp.ones((1, 2, 4, 3)), jnp.ones((2, 1, 1, 1)), jnp.ones((4, 4))):
        refused(out, x, x, x, bias, *none[1:])
    for pair in ((ids, none[2]), (ids, ids[:, :3])):
        refused(out, x, x, x, none[0], *pair)


SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from capibara import native
from capibara.ops import explain
from capibara.ops.attention import flash_attention

rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.normal(size=(4, 2, 150, 20)), jnp.float32) for _ in range(3))
loss = lambda name: lambda q, k, v: jnp.sum(
    jnp.sin(flash_attention(q, k, v, use_causal_mask=True, implementation=name)))
"""


def _python(code: str, **environment: str) -> str:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + code],
        capture_output=True,
        text=True,
        env=env,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", instruction_sets())
def test_every_instruction_set_of_this_processor(name):
    code = """
got = jax.grad(loss("native"), (0, 1, 2))(q, k, v)
want = jax.jit(jax.grad(loss("reference"), (0, 1, 2)))(q, k, v)
for a, b in zip(got, want):
    np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
print(native.isa())
"""
    assert _python(code, CAPIBARA_NATIVE_ISA=name) == name


def test_without_the_library_the_xla_form_runs_and_the_reason_is_given():
    out = _python("print(explain(flash_attention, q, k, v))", CAPIBARA_NATIVE="0")
    assert out.startswith("flash_attention on cpu: cpu")
    assert "not native: CAPIBARA_NATIVE=0 is set" in out


def test_with_several_devices_the_form_that_xla_can_partition_runs():
    code = """
from jax.sharding import NamedSharding, PartitionSpec as P
print(explain(flash_attention, q, k, v, use_causal_mask=True))
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
parted = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in (q, k, v)]
step = jax.jit(jax.value_and_grad(loss("auto"), (0, 1, 2)))
program = step.lower(*parted).compile()
assert "all-gather" not in program.as_text(), program.as_text()
value, gradients = program(*parted)
want, wanted = step(q, k, v)
np.testing.assert_allclose(value, want, rtol=1e-5)
for a, b in zip(gradients, wanted):
    assert a.sharding.is_equivalent_to(parted[0].sharding, 4)
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
"""
    out = _python(code, XLA_FLAGS=emulated(4))
    assert out.startswith("flash_attention on cpu: cpu")
    assert "not native: there are 4 CPU devices" in out


def test_a_library_from_other_sources_is_refused(monkeypatch):
    monkeypatch.setattr(library, "source_digest", lambda: "another")
    found, reason = library._load.__wrapped__()
    assert found is None
    assert reason is not None
    assert "other sources" in reason
    assert "python -m capibara.native" in reason


@pytest.mark.parametrize(("here", "said"), [(None, "unknown"), (2, r"0\.2"), (1003, r"1\.3")])
def test_a_library_for_a_newer_interface_is_refused_before_xla_sees_it(monkeypatch, here, said):
    monkeypatch.setattr(library, "_interface", lambda: here)
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: pytest.fail("registered"))
    found, reason = library._load.__wrapped__()
    assert found is None
    assert reason is not None
    assert re.search(f"foreign function interface, this jaxlib's is {said}", reason)


@pytest.mark.parametrize("content", [None, b"", b"\x7fELF not a library"])
def test_a_library_that_is_missing_or_damaged_is_refused(monkeypatch, tmp_path, content):
    path = tmp_path / "libcapibara.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(library, "LIBRARY", path)
    found, reason = library._load.__wrapped__()
    assert found is None
    assert reason is not None
    assert ("not built" if content is None else "does not load") in reason


def test_a_build_that_fails_says_why_and_leaves_the_old_library(monkeypatch, tmp_path):
    path = tmp_path / "libcapibara.so"
    path.write_bytes(b"the old one")
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(build.NativeBuildError, match="failed with status 1"):
        build.build(path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX")
    with pytest.raises(build.NativeBuildError, match=r"no C\+\+ compiler.*set CXX"):
        build.build(path)
    assert [p.name for p in tmp_path.iterdir()] == ["libcapibara.so"]
    assert path.read_bytes() == b"the old one"

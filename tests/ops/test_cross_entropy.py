"""cross_entropy's implementations against NumPy in float64: values, gradients, memory, meshes, bad arguments."""

# NumPy arrays go in where the signatures say jax.Array, and wrong types go in on purpose.
# pyright: reportArgumentType=false

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import emulated
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.ops import OpShapeError, OpTypeError, OpValueError, explain
from capibara.ops.loss import cross_entropy, xla
from capibara.ops.loss.problem import prepare
from capibara.ops.loss.specs import SPECS, LossSpec, arguments
from capibara.ops.tagged import tagged

NAMES = ("xla", "reference")
QUICK: Any = {"xla_backend_optimization_level": 0}


def oracle(
    hidden: Any,
    head: Any,
    labels: Any,
    weights: Any = None,
    layout: str = "fv",
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    chunk_size: int | None = None,
) -> tuple[Any, Any, Any]:
    """The definition, token by token in float64; and the gradients of the (summed) result in hidden states and head."""
    hidden, head = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    table = head if layout == "vf" else head.T
    flat, targets = hidden.reshape(-1, hidden.shape[-1]), np.asarray(labels).reshape(-1)
    factors = np.ones(len(targets)) if weights is None else np.asarray(weights, np.float64).reshape(-1)
    factors = np.where(targets == -100, 0, factors)
    if reduction == "mean":
        factors = factors / (factors.sum() or 1)
    losses, by_hidden, by_table = np.zeros(len(targets)), np.zeros_like(flat), np.zeros_like(table)
    for i, (x, label) in enumerate(zip(flat, targets, strict=True)):
        if label == -100:
            continue
        raw = table @ x
        logits = raw if softcap is None else softcap * np.tanh(raw / softcap)
        log_sum = np.log(np.exp(logits - logits.max()).sum()) + logits.max()
        target = np.full(len(table), label_smoothing / len(table))
        target[label] += 1 - label_smoothing
        losses[i] = factors[i] * (log_sum - target @ logits + z_loss * log_sum**2)
        away = (1 + 2 * z_loss * log_sum) * np.exp(logits - log_sum) - target
        away *= factors[i] * (1 if softcap is None else 1 - (logits / softcap) ** 2)
        by_hidden[i] = away @ table
        by_table += np.outer(away, x)
    out = losses.reshape(labels.shape) if reduction == "none" else losses.sum()
    return out, by_hidden.reshape(hidden.shape), by_table if layout == "vf" else by_table.T


def total(hidden: Any, head: Any, labels: Any, **options: Any) -> tuple[Any, Any]:
    out = cross_entropy(hidden, head, labels, **options)
    return jnp.sum(out), out


def graded(name: str, *arrays: Any, **options: Any) -> tuple[Any, Any, Any]:
    found = partial(total, implementation=name, **options)
    (_, out), grads = jax.value_and_grad(found, (0, 1), has_aux=True)(*arrays)
    return out, *grads


@pytest.mark.thin(3)
@pytest.mark.parametrize("spec", tagged(SPECS, "small"), ids=lambda s: s.name)
def test_every_implementation_is_the_definition(spec: LossSpec) -> None:
    arrays, options = arguments(spec, np.random.default_rng(0))
    want = oracle(*arrays, **options)

    def every(*arrays: Any) -> Any:
        return [graded(name, *arrays, **options) for name in NAMES]

    with jax.enable_x64(True):
        for found in jax.jit(every, compiler_options=QUICK)(*arrays):
            for got, told in zip(found, want, strict=True):
                assert got.dtype == jnp.float64
                np.testing.assert_allclose(got, told, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_types(dtype: str, name: str) -> None:
    arrays, options = arguments(SPECS[1], np.random.default_rng(1))
    hidden, head = (np.asarray(x, jnp.dtype(dtype)) for x in arrays[:2])
    want = oracle(hidden, head, arrays[2], **options)  # of the rounded arrays
    run = jax.jit(partial(graded, name, **options), compiler_options=QUICK)
    loss, by_hidden, by_head = run(hidden, head, arrays[2])
    assert (loss.dtype, by_hidden.dtype, by_head.dtype) == (jnp.float32, hidden.dtype, head.dtype)
    np.testing.assert_allclose(loss, want[0], rtol=1e-5)
    slack = float(jnp.finfo(dtype).eps)
    for got, told in zip((by_hidden, by_head), want[1:], strict=True):
        np.testing.assert_allclose(
            np.asarray(got, np.float64), told, atol=max(4 * slack, 1e-5) * np.abs(told).max()
        )


@pytest.mark.parametrize("name", NAMES)
def test_weights_have_the_losses_as_their_gradient(name: str) -> None:
    (hidden, head, labels), _ = arguments(SPECS[0], np.random.default_rng(2))
    weights = np.random.default_rng(3).uniform(0.5, 2, size=labels.shape)
    losses, _, _ = oracle(hidden, head, labels, reduction="none")
    counted = np.where(labels == -100, 0, weights)
    value = (losses * counted).sum() / counted.sum()
    want = np.where(labels == -100, 0, losses - value) / counted.sum()

    def run(weights: Any) -> Any:
        return cross_entropy(hidden, head, labels, weights=weights, implementation=name, chunk_size=8)

    got = jax.grad(run)(jnp.asarray(weights, jnp.float32))
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_against_torch() -> None:
    torch = pytest.importorskip("torch")
    (hidden, head, labels), _ = arguments(SPECS[0], np.random.default_rng(4))
    logits = torch.tensor(hidden.reshape(-1, hidden.shape[-1]) @ head)
    for smooth in (0.0, 0.3):
        want = torch.nn.functional.cross_entropy(
            logits, torch.tensor(labels.reshape(-1)).long(), label_smoothing=smooth
        )
        got = cross_entropy(hidden, head, labels, label_smoothing=smooth, implementation="xla")
        np.testing.assert_allclose(got, float(want), rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_labels_outside_make_their_loss_not_a_number(name: str) -> None:
    (hidden, head, _), _ = arguments(LossSpec("", (5,), 3, 4), np.random.default_rng(5))
    for kind in (np.int32, np.int8, np.int64):
        labels = np.array([0, 4, -1, -100, 3], kind)
        got = cross_entropy(hidden, head, labels, reduction="none", implementation=name)
        np.testing.assert_array_equal(np.isnan(got), [False, True, True, False, False])
        assert got[3] == 0


@pytest.mark.parametrize("name", NAMES)
def test_logits_that_are_not_finite(name: str) -> None:
    """As ``jax.nn.logsumexp`` has them: an entry that cannot occur has no part, an infinite one all of it."""
    hidden = np.ones((1, 1), np.float32)
    head = np.array([[0.0, -np.inf, 1.0, np.inf]], np.float32)
    run = partial(cross_entropy, hidden, implementation=name)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(run(head[:, :3], np.array([2])), np.log1p(np.exp(-1.0)), rtol=1e-6)
        assert run(head[:, :3], np.array([1])) == np.inf
        assert run(head, np.array([0])) == np.inf
        assert np.isnan(run(head, np.array([3])))


@settings(deadline=None, max_examples=8, derandomize=True)
@given(data=st.data())
def test_chunks_do_not_matter(data: st.DataObject) -> None:
    tokens, vocab = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 30))
    spec = LossSpec("", (tokens,), 3, vocab, {"reduction": data.draw(st.sampled_from(["mean", "none"]))})
    seed, size = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 50))
    arrays, options = arguments(spec, np.random.default_rng(seed))
    want = oracle(*arrays, **options)
    run = jax.jit(partial(graded, "xla", chunk_size=size, **options), compiler_options=QUICK)
    for got, told in zip(run(*arrays), want, strict=True):
        np.testing.assert_allclose(got, told, rtol=2e-5, atol=2e-5)


def compiled(n: int, f: int, v: int, layout: str, *, gradient: bool, **options: Any) -> Any:
    shapes = ((n, f), (f, v) if layout == "fv" else (v, f))
    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    run: Any = partial(cross_entropy, layout=layout, **options)
    run = jax.value_and_grad(run, (0, 1)) if gradient else run
    lowered = jax.jit(run).lower(*given, jax.ShapeDtypeStruct((n,), jnp.int32))
    return lowered.compile(compiler_options=QUICK)


@pytest.mark.parametrize("layout", ["fv", "vf"])
def test_memory_at_128k(layout: str) -> None:
    n, f, v = 4096, 64, 131072
    for gradient in (False, True):
        used = compiled(n, f, v, layout, gradient=gradient).memory_analysis().temp_size_in_bytes
        assert used < 4 * n * v / 8


def test_under_checkpoint_and_without_the_heads_gradient() -> None:
    (hidden, head, labels), _ = arguments(LossSpec("", (24,), 4, 9), np.random.default_rng(6))
    _, want, _ = oracle(hidden, head, labels)

    def run(hidden: Any) -> Any:
        loss = partial(cross_entropy, head=head, labels=labels, implementation="xla", chunk_size=8)
        return jax.checkpoint(lambda x: loss(x * 1.0))(hidden)

    np.testing.assert_allclose(jax.jit(jax.grad(run))(hidden), want, atol=1e-6)


def test_what_runs() -> None:
    def chosen(n: int, v: int) -> str:
        given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((n, 8), (8, v))]
        return explain(cross_entropy, *given, jax.ShapeDtypeStruct((n,), jnp.int32)).chosen

    assert chosen(2048, 256) == "reference"  # the demo
    assert chosen(4096, 131072) == "xla"


SHARDED = r"""
import json
import jax, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from capibara.ops.loss import cross_entropy, xla
from capibara.ops.loss.problem import prepare
import re, numpy as np

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
laid = lambda *spec: NamedSharding(mesh, P(*spec))
given = (
    jax.ShapeDtypeStruct((4, 64, 32), jnp.float32, sharding=laid("data")),
    jax.ShapeDtypeStruct((32, 4096), jnp.float32, sharding=laid(None, "model")),
    jax.ShapeDtypeStruct((4, 64), jnp.int32, sharding=laid("data")),
)

def text(function):
    step = jax.jit(jax.value_and_grad(function, (0, 1)))
    return step.lower(*given).compile().as_text()

def mapped(hidden, head, labels):
    def local(*arrays):
        found = cross_entropy(*arrays, axis_name="model", reduction="sum", implementation="xla", chunk_size=16)
        return jax.lax.psum(found, "data")
    specs = (P("data"), P(None, "model"), P("data"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(hidden, head, labels)

out = {}
for name, function in {
    "plain": lambda *a: cross_entropy(*a, implementation="reference"),
    "split": lambda *a: cross_entropy(*a, implementation="xla"),
    "mapped": mapped,
}.items():
    found = text(function)
    out[name] = [len(re.findall(r"= f32\[[^=]*all-gather", found)), "f32[32,4096]" in found]
print(json.dumps(out))
"""


@pytest.mark.slow
def test_a_sharded_head_is_not_gathered() -> None:
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": emulated(8, quick=True)}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], env=environ, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == {name: [0, False] for name in ("plain", "split", "mapped")}


X, W, Y = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32), np.ones(2, np.int32)


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        ((X, W.T, Y), {}, OpShapeError, r"head must be \[features, vocab\].*Remedy: layout='vf'"),
        ((X, W, Y), {"layout": "vf"}, OpShapeError, r"head must be \[vocab, features\].*layout='fv'"),
        ((X, W[None], Y), {}, OpShapeError, r"got shape \(1, 3, 4\)"),
        ((X, W[:, :0], Y), {}, OpShapeError, "no vocabulary"),
        ((X, W, Y[:1]), {}, OpShapeError, r"labels must be \(2,\)"),
        ((X, W, Y.astype(np.float32)), {}, OpTypeError, "labels must be integers, got float32"),
        ((X.astype(int), W, Y), {}, OpTypeError, "hidden must be float32"),
        ((X, [1.0], Y), {}, OpTypeError, "head must be an array, got list"),
        ((X, W, Y), {"weights": X}, OpShapeError, r"weights must be \(2,\)"),
        ((X, W, Y), {"weights": Y}, OpTypeError, "weights must be float32"),
        ((X, W, Y), {"layout": "fvv"}, OpValueError, "Did you mean 'fv'"),
        ((X, W, Y), {"reduction": "avg"}, OpValueError, "reduction must be 'mean', 'sum', 'none'"),
        ((X, W, Y), {"reduction": None}, OpTypeError, "reduction must be"),
        ((X, W, Y), {"softcap": 0.0}, OpValueError, "softcap must be finite and above 0"),
        ((X, W, Y), {"label_smoothing": 1.0}, OpValueError, "label_smoothing must be at least 0 and below 1"),
        ((X, W, Y), {"label_smoothing": "a"}, OpTypeError, "label_smoothing must be a Python number"),
        ((X, W, Y), {"z_loss": float("nan")}, OpValueError, "z_loss must be finite"),
        ((X, W, Y), {"ignore_index": 1.5}, OpTypeError, "ignore_index must be an int"),
        ((X, W, Y), {"ignore_index": 2**40}, OpValueError, "an integer of 32 bits"),
        ((X, W, Y), {"chunk_size": 0}, OpValueError, "chunk_size must be at least 1"),
        ((X, W, Y), {"axis_name": "model"}, OpValueError, "no axis 'model' is bound here"),
        ((X, W, Y), {"implementation": "xlaa"}, OpValueError, "Did you mean 'xla'"),
    ],
)
def test_arguments_that_do_not_fit(arrays: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cross_entropy(*arrays, **options)


@pytest.mark.thin(2)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_chunks_for_tpus_have_the_same_losses_and_gradients(softcap: float | None) -> None:
    random = np.random.default_rng(7)
    hidden = jnp.asarray(random.normal(size=(3, 3000, 8)), jnp.float32)
    head = jnp.asarray(random.normal(size=(5000, 8)), jnp.float32)
    labels = jnp.asarray(random.integers(0, 5000, size=(3, 3000)), jnp.int32)
    weights = jnp.asarray(random.random((3, 3000)), jnp.float32)
    problem, _ = prepare(hidden, head, labels, layout="vf", softcap=softcap, implementation="xla")
    assert xla.chunks(problem) != xla.chunks(problem, tpu=True)
    # Without gradients, where a chunk's logits are not kept, chunks are longer; TPUs keep theirs.
    assert xla.chunks(problem, graded=False) == (9, 1000) != xla.chunks(problem)
    assert xla.chunks(problem, tpu=True, graded=False) == xla.chunks(problem, tpu=True)
    assert xla.vocab_block(problem, 282) < xla.vocab_block(problem, 282, tpu=True) == 5000

    @jax.jit
    def both(*given: Any) -> Any:
        graded = [xla._chunked_graded(problem, *given, tpu=tpu) for tpu in (False, True)]
        return graded, [xla._chunked_losses(problem, *given[:3], tpu=tpu) for tpu in (False, True)]

    graded, losses = both(hidden, head, labels, weights)
    for want, got in zip(*graded, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5, atol=1e-5)

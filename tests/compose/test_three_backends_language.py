"""The operations of language models on NumPy and PyTorch against those of JAX: values and gradients in float64."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import numpy as np
import pytest
from torch_oracle import HAS_TORCH, torch

from capibara.compose.backends import jax_ops, numpy_gradients, numpy_ops
from capibara.compose.errors import InputError

torch_ops: Any = importlib.import_module("capibara.compose.backends.torch_ops") if HAS_TORCH else None


def draw(*shape: int, low: float = -1.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(low, 1.0, shape)


Q, K, V = draw(2, 5, 4, 6), draw(2, 5, 2, 6, seed=1), draw(2, 5, 2, 6, seed=2)
CACHE_K, CACHE_V = draw(2, 2, 9, 6, seed=3), draw(2, 2, 9, 6, seed=4)
X, STEP, RATE = draw(2, 7, 4, 3), draw(2, 7, 4, low=0.1), -draw(4, low=0.2)
WRITE, READ, MEMORY = draw(2, 7, 2, 5, seed=1), draw(2, 7, 2, 5, seed=2), draw(2, 4, 3, 5)
AT = np.array(3, "int32")
SINKS = np.array([0.5, -1.0, 2.0, -0.2])
SEGMENTS = np.array([[1, 1, 1, 2, 0], [0, 0, 5, 5, 5]], "int32")
SLOTS = np.array([[-1, -1, 4, 5, 6], [0, 1, 2, -1, -1]], "int32")
LONG_SEGMENTS = np.array([[1, 1, 1, 2, 2, 0, 0], [0, 0, 5, 5, 3, 3, 3]], "int32")
LONG_SLOTS = np.array([[-1, 4, -1, -1, 5, 6, -1], [-1] * 7], "int32")
KEY_VALUE, SHARED = draw(2, 5, 4, 7), draw(2, 5, 1, 2)
LATENT = [Q, draw(2, 5, 3), SHARED, draw(3, 4, 7), draw(2, 1, 9, 5)]
# So wide that keys and values are computed, where the other's weight is absorbed.
WIDE_LATENT = [Q, draw(2, 5, 8), SHARED, draw(8, 4, 7), draw(2, 1, 9, 10)]
WIDE = {"accumulate": "float64"}
# One token of each of two sequences, of which the second takes no part, and two of at most three of a third.
TABLE, STATES_AT = np.array([[3, 1], [-1, -1], [4, 0]], "int32"), np.array([1, -1, 3], "int32")
STEP_OF = [np.array([2, 0, 0], "int32"), np.array([1, 0, 2], "int32")]
STEP_SHAPE = {"rows": 2, "chunks": 1, "chunk": 3}
CASES: dict[str, tuple[str, list[np.ndarray], dict[str, Any]]] = {
    "causal": ("attention", [Q, K, V], {"causal": True, "window": None, "softcap": None}),
    "free": ("attention", [Q, K, V], {"causal": False, "window": None, "softcap": None}),
    "window": ("attention", [Q, K, V], {"causal": True, "window": 2, "softcap": None}),
    "free_window": ("attention", [Q, K, V], {"causal": False, "window": 2, "softcap": None}),
    "softcap": ("attention", [Q, K, V], {"causal": True, "window": 3, "softcap": 0.7}),
    "cached": ("cached_attention", [Q, K, V, CACHE_K, CACHE_V, AT], {"window": None, "softcap": None}),
    "cached_window": ("cached_attention", [Q, K, V, CACHE_K, CACHE_V, AT], {"window": 3, "softcap": 0.5}),
    "segments": ("segment_attention", [Q, K, V, SEGMENTS], {"causal": True, "window": 3, "softcap": None}),
    "ragged": ("ragged_cached_attention", [Q, K, V, CACHE_K, CACHE_V, SLOTS], {"window": 3, "softcap": None}),
    "sinks": ("attention", [Q, K, V, SINKS], {"causal": True, "window": 2, "softcap": None}),
    "segments_sinks": (
        "segment_attention",
        [Q, K, V, SEGMENTS, SINKS],
        {"causal": True, "window": None, "softcap": 0.7},
    ),
    "cached_sinks": (
        "cached_attention",
        [Q, K, V, CACHE_K, CACHE_V, AT, SINKS],
        {"window": 3, "softcap": None},
    ),
    "ragged_sinks": (
        "ragged_cached_attention",
        [Q, K, V, CACHE_K, CACHE_V, SLOTS, SINKS],
        {"window": 3, "softcap": None},
    ),
    "latent": ("latent_attention", [Q, KEY_VALUE, SHARED], {"causal": True, "window": 2, "softcap": 0.7}),
    "latent_segments": (
        "segment_latent_attention",
        [Q, KEY_VALUE, SHARED, SEGMENTS],
        {"causal": True, "window": None, "softcap": None},
    ),
    "latent_cached": ("cached_latent_attention", [*LATENT, AT], {"window": 3, "softcap": None, **WIDE}),
    "latent_ragged": (
        "ragged_cached_latent_attention",
        [*WIDE_LATENT, SLOTS],
        {"window": None, "softcap": 0.7, "scale": 0.3, **WIDE},
    ),
    "paged": (
        "paged_attention",
        [*(x[:1] for x in (Q, K, V)), draw(5, 2, 2, 128), draw(5, 2, 2, 128, seed=1), TABLE, *STEP_OF],
        {"window": 2, "softcap": None, **STEP_SHAPE},
    ),
    "paged_sinks": (
        "paged_attention",
        [*(x[:1] for x in (Q, K, V)), draw(5, 2, 2, 6), draw(5, 2, 2, 6, seed=1), TABLE, *STEP_OF, SINKS],
        {"window": None, "softcap": 0.7, **STEP_SHAPE},
    ),
    "latent_paged": (
        "paged_latent_attention",
        [Q[:1], draw(1, 5, 3), SHARED[:1], draw(3, 4, 7), draw(5, 2, 1, 5), TABLE, *STEP_OF],
        {"window": 3, "softcap": None, **STEP_SHAPE, **WIDE},
    ),
    "paged_conv": (
        "paged_conv",
        [X[:1, :5], draw(3, 4, 3), draw(4, 2, 4, 3), STATES_AT, *STEP_OF],
        STEP_SHAPE,
    ),
    "paged_scan": (
        "paged_scan",
        [
            *(x[:1, :5] for x in (X, STEP)),
            RATE,
            *(x[:1, :5] for x in (WRITE, READ)),
            draw(4, *MEMORY.shape[1:]),
            STATES_AT,
            *STEP_OF,
        ],
        {"chunk_size": None, **STEP_SHAPE},
    ),
    "ragged_positions": ("ragged_positions", [SEGMENTS, np.array([3, 0], "int32")], {}),
    "scan": ("selective_scan", [X, STEP, RATE, WRITE, READ], {"chunk_size": 4}),
    "continued": ("continued_scan", [X, STEP, RATE, WRITE, READ, MEMORY], {"chunk_size": 3}),
    "conv": ("causal_conv", [X, draw(3, 4, 3), draw(4, 3)], {}),
    "cached_conv": ("cached_conv", [X, draw(3, 4, 3), draw(2, 2, 4, 3), draw(4, 3)], {}),
    "conv_without_bias": ("causal_conv", [X, draw(3, 4, 3)], {}),
    "segment_conv": ("segment_conv", [X, draw(3, 4, 3), LONG_SEGMENTS, draw(4, 3)], {}),
    "ragged_conv": ("ragged_cached_conv", [X, draw(3, 4, 3), draw(2, 2, 4, 3), LONG_SLOTS], {}),
    "segment_scan": ("segment_scan", [X, STEP, RATE, WRITE, READ, LONG_SEGMENTS], {"chunk_size": 4}),
    "ragged_scan": (
        "ragged_continued_scan",
        [X, STEP, RATE, WRITE, READ, MEMORY, LONG_SLOTS],
        {"chunk_size": None},
    ),
    "norm_in_groups": ("rms_norm", [draw(3, 6), draw(6)], {"epsilon": 1e-5, "groups": 2, **WIDE}),
    "rotary": ("rotary_table", [np.arange(5, dtype="int32")], {"dim": 6, "theta": 100.0, **WIDE}),
    "rotate": ("rotate", [draw(2, 5, 3, 4), draw(5, 2), draw(5, 2, seed=1)], {}),
    "rotate_by_row": ("rotate", [draw(2, 5, 3, 4), draw(2, 5, 2), draw(2, 5, 2, seed=1)], {}),
    "rotate_neighbours": (
        "rotate",
        [draw(2, 5, 3, 7), draw(5, 2), draw(5, 2, seed=1)],
        {"interleaved": True, "last": True},
    ),
    "positions": ("positions", [np.zeros((2, 5), "int32"), AT], {}),
    "dense": ("dense", [draw(2, 3, 4), draw(4, 5)], WIDE),
    "project": ("project", [draw(2, 3, 4), draw(4, 2, 5)], WIDE),
    "merge": ("merge", [draw(2, 3, 2, 4), draw(2, 4, 5)], WIDE),
    "quantised": (
        "quantised_product",
        [draw(2, 3, 5), np.arange(-15, 15, dtype="int8").reshape(6, 5), draw(6, 2)],
        {"kind": "int8", "ins": 1, "outs": (2, 3), "group": 4},
    ),
    "quantised_pairs": (
        "quantised_product",
        [draw(2, 2, 3), np.arange(60, 75, dtype="uint8").reshape(5, 3), draw(5, 2)],
        {"kind": "nf4", "ins": 2, "outs": (5,), "group": 4},
    ),
    "unembed": ("unembed", [draw(2, 3, 4), draw(6, 4)], WIDE),
    "lookup": ("lookup", [draw(6, 4), np.array([[0, 5, 5], [9, -3, 2]], "int32")], {}),
    "rms_norm": ("rms_norm", [draw(3, 4), draw(4)], {"epsilon": 1e-5, **WIDE}),
    "layer_norm": ("layer_norm", [draw(3, 4), draw(4)], {"epsilon": 1e-5, **WIDE}),
    "group_merge": ("group_merge", [draw(3, 4, 2)], {}),
    "decay": ("decay", [draw(3, 4)], {}),
}


def rows(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def weights(x: np.ndarray) -> np.ndarray | None:
    return np.cos(np.arange(x.size) + 0.3).reshape(x.shape) if x.dtype.kind == "f" else None


def by_jax(op: str, arrays: list[np.ndarray], options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    real = [i for i, a in enumerate(arrays) if a.dtype.kind == "f"]
    with jax.enable_x64(True):

        def run(*floats: Any) -> Any:
            given = list(arrays)
            for i, value in zip(real, floats, strict=True):
                given[i] = value
            return rows(getattr(jax_ops, op)(*given, **options))

        out, pull = jax.vjp(run, *(jax.numpy.asarray(arrays[i]) for i in real))
        zero = [np.zeros(o.shape, jax.dtypes.float0) for o in out]
        back = pull(
            tuple(z if (w := weights(np.asarray(o))) is None else w for o, z in zip(out, zero, strict=True))
        )
        return [np.asarray(o) for o in out], [np.asarray(b) for b in back]


def by_numpy(op: str, arrays: list[np.ndarray], options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    out = getattr(numpy_ops, op)(*arrays, **options)
    given = tuple(weights(o) for o in rows(out))
    real = tuple(i for i, a in enumerate(arrays) if a.dtype.kind == "f")
    several = isinstance(out, tuple)
    back = getattr(numpy_gradients, op)(given if several else given[0], out, *arrays, wanted=real, **options)
    return list(rows(out)), list(back)


def by_torch(op: str, arrays: list[np.ndarray], options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    tensors = [torch.tensor(a) for a in arrays]
    real = [t.requires_grad_(True) for t in tensors if t.is_floating_point()]
    out = rows(getattr(torch_ops, op)(*tensors, **options))
    pairs = [(o, torch.tensor(weights(o.detach().numpy()))) for o in out if o.requires_grad]
    back = torch.autograd.grad([o for o, _ in pairs], real, [w for _, w in pairs]) if real else []
    return [o.detach().numpy() for o in out], [b.numpy() for b in back]


@pytest.mark.thin(12)
@pytest.mark.parametrize("name", CASES)
def test_as_on_jax(name: str) -> None:
    want, back = by_jax(*CASES[name])
    for run in (by_numpy, by_torch) if HAS_TORCH else (by_numpy,):
        out, found = run(*CASES[name])
        assert len(out) == len(want)
        assert len(found) == len(back)
        for a, b in zip((*out, *found), (*want, *back), strict=True):
            assert a.dtype == b.dtype
            assert a.shape == b.shape
            # JAX's own quantised products are summed in float32.
            rtol, atol = (1e-5, 1e-5) if name.startswith("quantised") else (1e-10, 1e-12)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


RETURNING = np.array([[1, 1, 2, 1, 1, 0, 1], [0, 7, 0, 7, 7, 5, 7]], "int32")


def convolved_by_run(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Position by position and tap by tap, back to the first change of numbers."""
    out = np.empty_like(x)
    for row, t in np.ndindex(ids.shape):
        out[row, t] = bias
        for back in range(len(weight)):
            if back > t or len(set(ids[row, t - back : t + 1].tolist())) > 1:
                break
            out[row, t] += x[row, t - back] * weight[-1 - back]
    return out


def scanned_by_run(ids: np.ndarray) -> np.ndarray:
    """The recurrence of ``X``, from a state of zeros wherever the number changes."""
    out = np.zeros_like(X)
    for row in range(len(ids)):
        state = np.zeros((4, 3, 5))
        for t, number in enumerate(ids[row]):
            if t and number != ids[row, t - 1]:
                state[:] = 0
            for head in range(4):
                if number:
                    state[head] *= np.exp(STEP[row, t, head] * RATE[head])
                    state[head] += STEP[row, t, head] * np.outer(X[row, t, head], WRITE[row, t, head // 2])
                out[row, t, head] = state[head] @ READ[row, t, head // 2]
    return out


def outputs(op: str, arrays: list[np.ndarray], **options: Any) -> list[np.ndarray]:
    """The output of each backend."""
    with jax.enable_x64(True):
        found = [np.asarray(getattr(jax_ops, op)(*map(jax.numpy.asarray, arrays), **options))]
    found.append(getattr(numpy_ops, op)(*arrays, **options))
    if HAS_TORCH:
        found.append(getattr(torch_ops, op)(*map(torch.tensor, arrays), **options).numpy())
    return found


@pytest.mark.parametrize("ids", [RETURNING, LONG_SEGMENTS, RETURNING[:, :1], RETURNING[:, :0]])
def test_a_segment_is_a_run_of_equal_numbers(ids: np.ndarray) -> None:
    weight, bias, length = draw(3, 4, 3), draw(4, 3), ids.shape[1]
    want = convolved_by_run(X[:, :length], weight, bias, ids)
    for found in outputs("segment_conv", [X[:, :length], weight, ids, bias]):
        np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12)
    want = scanned_by_run(ids)[:, :length]
    scanned = [X[:, :length], STEP[:, :length], RATE, WRITE[:, :length], READ[:, :length], ids]
    for found in outputs("segment_scan", scanned, chunk_size=4):
        np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12)


def test_attention_compares_numbers_of_segments() -> None:
    ids, own = np.array([[1, 1, 2, 2, 1]] * 2, "int32"), [0, 1, 4]
    options = {"causal": True, "window": None, "softcap": None}
    want = outputs("attention", [Q[:, own], K[:, own], V[:, own]], **options)[1]
    for found in outputs("segment_attention", [Q, K, V, ids], **options):
        np.testing.assert_allclose(found[:, own], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("at", [-1, 5, 9])
def test_a_full_cache_is_refused(at: int) -> None:
    for ops, make in ((numpy_ops, np.asarray), *([(torch_ops, torch.tensor)] if HAS_TORCH else [])):
        arrays = [make(a) for a in (Q, K, V, CACHE_K, CACHE_V, np.array(at, "int32"))]
        with pytest.raises(InputError, match=r"need .* places, the cache has 9"):
            ops.cached_attention(*arrays, window=None, softcap=None)


def test_rules_written_by_hand_are_those_of_the_tape() -> None:
    """Each rule against the derivative of the operation run on traced arrays."""
    x, y = draw(3, 4), draw(3, 4, seed=1)
    given: dict[str, tuple[list[np.ndarray], dict[str, Any]]] = {
        "dense": ([x, draw(4, 5)], WIDE),
        "add": ([x, y[:1]], {}),
        "subtract": ([x, y[:, :1]], {}),
        "multiply": ([x, y[0]], {}),
        "reshape": ([x], {"shape": (2, 6)}),
        "softmax": ([x], {"axis": 0}),
    }
    for op in numpy_gradients.RULES:
        arrays, options = given.get(op, ([x], {}))
        out = getattr(numpy_ops, op)(*arrays, **options)
        w = weights(out)
        by_rule = getattr(numpy_gradients, op)(w, out, *arrays, **options)
        places = tuple(range(len(arrays)))
        by_tape = numpy_gradients._traced(getattr(numpy_ops, op), w, tuple(arrays), places, options)
        for a, b in zip(by_rule, by_tape, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14, err_msg=op)
        assert getattr(numpy_gradients, op)(None, out, *arrays, **options) == (None,) * len(arrays)


def test_nothing_else_is_an_operation() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        numpy_gradients.nonsense  # type: ignore[attr-defined]

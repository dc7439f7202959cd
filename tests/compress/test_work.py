"""How much is done to compress a model: programs traced and compiled, tensors coded. Counted, since times vary."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.compress.allocation import allocate, survey
from capibara.compress.calibration import activations, blas, jax_watch
from capibara.compress.calibration.activations import collect
from capibara.compress.calibration.gptq import feed_back
from capibara.compress.calibration.jax_programs import Programs
from capibara.compress.codecs.low_rank import LOW_RANK, estimated_gain, may_gain
from capibara.compress.codecs.uniform import UNIFORM
from capibara.compress.compressing import Compression
from capibara.compress.container import ArchiveWriter
from capibara.compress.container.writer import Tensor
from capibara.compress.errors import CompressError
from capibara.compress.formats import get_format
from capibara.compress.model_api import ModelCompressionAPI
from capibara.compress.models.adapters import adapt
from capibara.compress.models.source import Tensors
from capibara.compress.profile import CompressionProfile

F32 = get_format("F32")


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def net(layers: int) -> tuple[list[Any], np.ndarray]:
    return [jnp.asarray(draw(64, 64, seed=i)) / 8 for i in range(layers)], draw(32, 64, seed=99)


def apply(params: Any, x: Any) -> Any:
    for w in params:
        x = x / (1e-3 + jnp.sqrt((x * x).mean(-1, keepdims=True)))
        x = x + jax.nn.silu(x @ w)
    return x


@pytest.mark.thin(2)
@pytest.mark.parametrize("layers", [3, 7])
def test_a_function_is_traced_as_often_for_many_tensors_as_for_few(layers: int) -> None:
    params, x = net(layers)
    calls = []

    def counted(params: Any, x: Any) -> Any:
        calls.append(1)
        return apply(params, x)

    made = ModelCompressionAPI(CompressionProfile(target_compression_ratio=6.0)).compress(
        params, x, apply=counted
    )
    assert len(calls) <= 2  # to run it, and to watch it
    expected, found = apply(params, x), apply(made.model, x)
    error = float(jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected))
    assert made.stats.output_error == pytest.approx(error, rel=1e-3)


def test_a_function_that_jax_cannot_trace_is_run_as_it_is() -> None:
    params, x = net(2)

    def in_numpy(params: Any, x: Any) -> np.ndarray:
        return np.tanh(np.tanh(np.asarray(x) @ np.asarray(params[0])) @ np.asarray(params[1]))

    with pytest.warns(UserWarning, match="cannot trace the model"):
        made = ModelCompressionAPI(CompressionProfile(target_compression_ratio=6.0)).compress(
            params, jnp.asarray(x), apply=in_numpy
        )
    expected = in_numpy(params, x)
    error = np.linalg.norm(in_numpy(made.model, x) - expected) / np.linalg.norm(expected)
    assert made.stats.output_error == pytest.approx(float(error), rel=1e-5)


def test_layers_that_read_alike_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Programs] = []

    def programs() -> Programs:
        made.append(Programs())
        return made[-1]

    monkeypatch.setattr(jax_watch, "Programs", programs)
    for layers, batches in ((3, 1), (6, 2)):
        params, x = net(layers)
        found = collect(lambda p, x: apply(p, x), [x] * batches, params)
        assert len(found) == layers
        h = x.astype(np.float64)
        for name, w in zip(found, params, strict=True):
            h = h / (1e-3 + np.sqrt((h * h).mean(-1, keepdims=True)))
            np.testing.assert_allclose(found[name].second, h.T @ h / len(h), rtol=1e-4, atol=1e-4)
            y = h @ np.asarray(w, np.float64)
            h = h + y / (1 + np.exp(-y))
    assert len(made[0]) == len(made[1]) <= 3


def test_programs_that_differ_in_what_they_call_are_not_shared() -> None:
    """The same operations with other constants, functions and shapes."""
    tables = [jnp.asarray(draw(4, 4, seed=i)) for i in range(3)]

    def run(p: Any, x: Any) -> Any:
        out = []
        for table in tables:
            like = jax.ShapeDtypeStruct(x.shape, x.dtype)
            x = jax.pure_callback(lambda x, t=table: np.asarray(x) * np.asarray(t), like, x)
            x = jax.jit(lambda x, t=table: jnp.sin(x) * t)(x)
            out.append(x @ p)
        return out[0][:2] + jnp.tanh(out[1][:2]), jnp.tanh(out[2])

    p, x = {"w": jnp.asarray(draw(4, 4, seed=8))}, draw(4, 4, seed=9)
    expected, h = np.zeros((4, 4)), x.astype(np.float64)
    for table in tables:
        h = np.sin(h * np.asarray(table)) * np.asarray(table)
        expected += h.T @ h / 12
    found = collect(lambda p, x: run(p["w"], x), [x], p)["w"]
    np.testing.assert_allclose(found.second, expected, rtol=1e-4, atol=1e-5)


def test_inputs_of_several_weights_are_multiplied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = activations._gram
    monkeypatch.setattr(activations, "_gram", lambda *given: made.append(1) or real(*given))
    params = {n: jnp.asarray(draw(8, 6, seed=i)) for i, n in enumerate("qkv")}
    x, y = draw(5, 8, seed=4), draw(5, 8, seed=5)
    found = collect(lambda p, x: (x[0] @ p["q"], x[0] @ p["k"], x[1] @ p["v"]), [(x, y)], params)
    for name, given in (("q", x), ("k", x), ("v", y)):
        np.testing.assert_allclose(found[name].second, given.T @ given / 5, rtol=1e-5, atol=1e-6)
    assert len(made) == 2


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e4, 1e30])
def test_moments_do_not_lose_what_inputs_have(dtype: str, scale: float) -> None:
    if dtype == "float16" and scale not in (1e-4, 1.0):
        pytest.skip("float16 has no such numbers")
    x = (draw(5000, 6) * np.array([1, 1e-2, 1, 1, 1e2, 1]) * scale).astype(jnp.dtype(dtype))
    wide = x.astype(np.float64)
    found = activations.moments(x if dtype == "float64" else jnp.asarray(x)).second
    expected = wide.T @ wide / 5000
    norms = np.sqrt(np.diag(expected))
    np.testing.assert_allclose(
        found / (norms[:, None] * norms), expected / (norms[:, None] * norms), atol=1e-6
    )


# ---- coding ---------------------------------------------------------------------------------------------------------


def count_coded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Elements of each call to ``uniform``."""
    coded: list[int] = []
    encode, by_outputs = type(UNIFORM).encode, type(UNIFORM).by_outputs

    def counted(self: Any, bits: np.ndarray, form: Any, shape: Any, settings: Any) -> bytes:
        coded.append(bits.size)
        return encode(self, bits, form, shape, settings)

    def counted_by_outputs(
        self: Any, flat: np.ndarray, form: Any, shape: Any, settings: Any, steps: Any
    ) -> Any:
        coded.extend([flat.size] * (len(steps) - 1))  # encode calls it for a single one
        return by_outputs(self, flat, form, shape, settings, steps)

    monkeypatch.setattr(type(UNIFORM), "encode", counted)
    monkeypatch.setattr(type(UNIFORM), "by_outputs", counted_by_outputs)
    return coded


@pytest.mark.parametrize("with_data", [False, True])
def test_what_was_coded_for_a_ratio_is_not_coded_again_to_be_written(
    monkeypatch: pytest.MonkeyPatch, with_data: bool
) -> None:
    params, x = net(3)
    coded = count_coded(monkeypatch)
    profile = CompressionProfile(target_compression_ratio=6.0, strategy="uniform")
    work = Compression(profile, adapt(params, apply), x if with_data else None)
    chosen = work.allocate(6.0)
    assert len(chosen.points) == 3
    coded.clear()
    made = work.write(chosen)
    assert not coded
    assert made.stats.compression_ratio == pytest.approx(6, rel=0.01)
    # Other weights are coded anew, whatever is at hand of those.
    other = {n: np.ascontiguousarray(work.adapter.tensors.read(n)[::-1]) for n in work.adapter.tensors.forms}
    changed = work.write(chosen, Tensors(work.adapter.tensors.forms, other.__getitem__))
    assert coded
    back = np.asarray(changed.model[0]).reshape(-1)
    original = np.asarray(params[0]).reshape(-1)[::-1]
    assert np.linalg.norm(back - original) < 0.2 * np.linalg.norm(original)


def test_a_large_tensor_is_coded_whole_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    w = {"w": draw(640, 512)}
    coded = count_coded(monkeypatch)
    made = ModelCompressionAPI(CompressionProfile(target_compression_ratio=6.0, strategy="uniform")).compress(
        w
    )
    assert made.stats.compression_ratio == pytest.approx(6, rel=0.01)
    assert coded.count(640 * 512) <= 2
    assert sum(coded) < 7 * 640 * 512


def smooth(rows: int, features: int) -> np.ndarray:
    """A matrix that few directions make up, and some noise."""
    rng = np.random.default_rng(0)
    base = rng.normal(size=(rows, 12)) @ rng.normal(size=(12, features))
    return (base + 0.02 * rng.normal(size=base.shape)).astype(np.float32)


def test_low_rank_is_coded_when_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    w = smooth(400, 128)
    source = Tensors({"w": (F32, w.shape)}, lambda _: w.reshape(-1).view(np.uint32))
    coded = []
    encode = type(LOW_RANK).encode

    def counted(self: Any, bits: np.ndarray, *given: Any) -> bytes:
        coded.append(bits.size)
        return encode(self, bits, *given)

    monkeypatch.setattr(type(LOW_RANK), "encode", counted)
    found = survey(source)
    points = [p for p in found.curves["w"].points if p.codec == "low_rank"]
    assert len(points) > 2
    assert all(p.estimated for p in points)
    assert not coded
    for ratio in (12.0, 20.0):
        chosen = allocate(found, ratio)
        point = chosen.points["w"]
        assert (point.codec, point.estimated) == ("low_rank", False)
        payload = encode(LOW_RANK, w.reshape(-1).view(np.uint32), F32, w.shape, point.settings)
        assert point.size == len(payload)
        assert point.payloads == (payload,)
        back = LOW_RANK.decode(memoryview(payload), F32, w.shape, {}).view(np.float32).reshape(w.shape)
        assert point.error == pytest.approx(float(((back - w).astype(np.float64) ** 2).sum()), rel=1e-6)
    assert len(coded) <= 5


@pytest.mark.parametrize("shape", [(40, 40), (90, 24), (24, 90)])
@pytest.mark.parametrize("decay", [0.7, 0.9, 0.98, 1.0])
@pytest.mark.parametrize("calibrated", [False, True])
def test_no_gain_of_low_rank_is_ruled_out(shape: tuple[int, int], decay: float, calibrated: bool) -> None:
    rng, least = np.random.default_rng(0), min(shape)
    w = (rng.normal(size=(shape[0], least)) * decay ** np.arange(least)) @ rng.normal(size=(least, shape[1]))
    mixing = rng.normal(size=(shape[1], shape[1])) * 0.9 ** np.arange(shape[1])
    hessian = mixing @ mixing.T if calibrated else None
    for bits in (1.0, 3.0, 5.0):
        assert may_gain(w, bits, hessian) or estimated_gain(w, bits, hessian) <= 0
    assert may_gain(np.ones((20, 30)), 3.0)


def test_flat_spectra_are_ruled_out_without_a_decomposition() -> None:
    assert not may_gain(draw(64, 96), 3.0)
    assert not may_gain(draw(96, 64), 3.0, np.eye(64))


def test_payloads_fit_their_chunks(tmp_path: Path) -> None:
    w = draw(8, 8)
    tensor = Tensor("w", w.reshape(-1).view(np.uint32), F32, w.shape, "uniform", {"step": 0.1}, (b"a", b"b"))
    with ArchiveWriter(tmp_path / "a.capi") as archive:
        with pytest.raises(CompressError, match="w: payloads: got 2, expected one for each of 1 chunks"):
            archive.add_many([tensor])
        archive.add_many([Tensor("v", w.reshape(-1).view(np.uint32), F32, w.shape)])


def test_small_products_take_one_thread_and_give_the_others_back() -> None:
    if (found := blas._library()) is None:
        pytest.skip("NumPy has another library than OpenBLAS")
    before, get = found[0](), found[0]
    with blas.one_thread(2000):
        assert get() == before
    seen = []
    feed_back(draw(8, 40), np.eye(40), lambda j, columns: seen.append(get()) or columns[0])
    assert set(seen) == {1}
    with blas.one_thread(1024), pytest.raises(RuntimeError), blas.one_thread(3):
        raise RuntimeError
    assert get() == before
    with blas.one_thread(1):
        done = []
        other = threading.Thread(
            target=lambda: feed_back(draw(8, 40), np.eye(40), lambda j, c: done.append(get()) or c[0])
        )
        other.start()
        other.join()
        assert set(done) == {1}
        assert get() == 1
    assert get() == before


def test_another_library_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "_library", lambda: None)
    with blas.one_thread(4):
        assert blas._inside == 0

"""Stacked weights (layers of a scan, experts): each entry has moments of its own, and is coded with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.compress import samples
from capibara.compress.allocation import survey
from capibara.compress.calibration import activations, layers
from capibara.compress.calibration.activations import Metric, Moments, collect, stack_of
from capibara.compress.calibration.layers import layer_moments
from capibara.compress.codecs.protocol import CODECS
from capibara.compress.codecs.uniform import UNIFORM
from capibara.compress.container import Archive, ArchiveWriter
from capibara.compress.curves import measure, squared_error
from capibara.compress.errors import CompressError
from capibara.compress.formats import get_format
from capibara.compress.model_api import ModelCompressionAPI
from capibara.compress.models.adapters import adapt
from capibara.compress.models.source import Tensors
from capibara.compress.profile import CompressionProfile
from capibara.compress.samples import settings_of_sample, take_sample

F32 = get_format("F32")
LAYERS, WIDTH = 3, 4


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def second(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x, np.float64).reshape(-1, x.shape[-1])
    return x.T @ x / len(x)


def states(w: np.ndarray, x: np.ndarray, order: Any) -> dict[int, np.ndarray]:
    """What each layer of h ← tanh(h w) is given."""
    found, h = {}, x.astype(np.float64)
    for i in order:
        found[i] = h
        h = np.tanh(h @ w[i])
    return found


def layer(h: Any, w: Any) -> tuple[Any, None]:
    return jnp.tanh(h @ w), None


def _while(w: Any, x: Any) -> Any:
    return jax.lax.while_loop(lambda s: s[0] < LAYERS, lambda s: (s[0] + 1, layer(s[1], w[s[0]])[0]), (0, x))[
        1
    ]


LOOPS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "scan": (lambda w, x: jax.lax.scan(layer, x, w)[0], False),
    "reverse": (lambda w, x: jax.lax.scan(layer, x, w, reverse=True)[0], True),
    "unrolled": (lambda w, x: jax.lax.scan(layer, x, w, unroll=3)[0], False),
    "jit": (jax.jit(lambda w, x: jax.lax.scan(jax.checkpoint(layer), x, w)[0]), False),
    "indexed": (lambda w, x: layer(layer(layer(x, w[0])[0], w[1])[0], w[2])[0], False),
    "while": (_while, False),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_each_layer_of_a_loop_has_moments_of_its_own(loop: str) -> None:
    run, backwards = LOOPS[loop]
    w, batches = draw(LAYERS, WIDTH, WIDTH), [draw(5, WIDTH, seed=1), draw(7, WIDTH, seed=2)]
    found = collect(lambda p, x: run(p["w"], x), batches, {"w": jnp.asarray(w)})["w"]
    order = range(LAYERS)[::-1] if backwards else range(LAYERS)
    seen = [states(w, x, order) for x in batches]
    expected = np.stack([second(np.concatenate([s[i] for s in seen])) for i in range(LAYERS)])
    np.testing.assert_allclose(found.second, expected, rtol=1e-4, atol=1e-5)
    assert (found.axes, found.count) == ((1,), LAYERS * 12)


def test_experts_that_meet_few_inputs_count_less() -> None:
    w, x = draw(3, 4, 5), draw(9, 4, seed=1)

    def run(p: Any, x: Any) -> Any:
        return x[:6] @ p["w"][0], x[6:8] @ p["w"][1], x[8:] @ p["w"][2]

    found = collect(run, [x], {"w": jnp.asarray(w)})["w"]
    for i, some in enumerate((x[:6], x[6:8], x[8:])):
        np.testing.assert_allclose(found.second[i], second(some) * len(some) / 3, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.second.mean(0), second(x), rtol=1e-5, atol=1e-6)
    assert found.count == 9


def test_experts_of_a_batched_product() -> None:
    w, x = draw(3, 4, 5), draw(3, 6, 4, seed=1)
    found = collect(lambda p, x: jnp.einsum("ebi,eio->ebo", x, p["w"]), [x], {"w": jnp.asarray(w)})["w"]
    np.testing.assert_allclose(found.second, [second(one) for one in x], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "shape", "axes"),
    [
        ("bd,hdk->bhk", (2, 4, 3), (1,)),  # heads: all have the same inputs
        ("bd,dhk->bhk", (4, 2, 3), (0,)),
        ("bhk,hkd->bd", (2, 3, 4), (0, 1)),
        ("ebi,ieo->ebo", (4, 2, 3), (0,)),  # experts along another axis than the first
    ],
)
def test_one_matrix_where_entries_have_no_inputs_of_their_own(
    rule: str, shape: tuple[int, ...], axes: tuple[int, ...]
) -> None:
    of = {"bd,": (6, 4), "bhk": (6, 2, 3), "ebi": (2, 6, 4)}
    x = draw(*of[rule[:3]], seed=1)
    found = collect(lambda p, x: jnp.einsum(rule, x, p["w"]), [x], {"w": jnp.asarray(draw(*shape))})
    (one,) = found.values()
    flat = x.reshape(6, -1) if rule[:3] == "bhk" else x
    np.testing.assert_allclose(one.second, second(flat), rtol=1e-5, atol=1e-6)
    assert one.axes == axes


def test_entries_share_their_mean_beyond_a_total(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, x = draw(LAYERS, WIDTH, WIDTH), draw(LAYERS, WIDTH, WIDTH, seed=3), draw(8, WIDTH, seed=1)

    def run(p: Any, x: Any) -> Any:
        return jax.lax.scan(layer, jax.lax.scan(layer, x, p["a"])[0], p["b"])[0]

    params = {"a": jnp.asarray(a), "b": jnp.asarray(b)}
    apart = collect(run, [x], params)
    for most, kept in ((2 * LAYERS, "ab"), (2 * LAYERS - 1, "a"), (LAYERS, "a"), (LAYERS - 1, "")):
        monkeypatch.setattr(activations, "_SEPARATE", most * WIDTH**2)
        found = collect(run, [x], params)
        for name in "ab":
            one, mean = found[name], apart[name].second.mean(0)
            assert one.second.ndim == 2 + (name in kept), (most, name)
            np.testing.assert_allclose(one.second.mean(0) if one.second.ndim > 2 else one.second, mean)
            assert one.count == LAYERS * 8
    # What was freed is there for others, and one entry is not a stack.
    sums = activations.Sums()
    monkeypatch.setattr(activations, "_SEPARATE", 2 * WIDTH**2)
    for entry in ((0, 2), None):
        sums.add("a", x, (1,), entry=entry)
    for i in range(2):
        sums.add("b", x, (1,), entry=(i, 2))
    sums.add("c", x, (1,), entry=(0, 1))
    assert {n: m.second.ndim for n, m in sums.result().items()} == {"a": 2, "b": 3, "c": 2}


def test_torch_stacks() -> None:
    torch = pytest.importorskip("torch")

    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.batched = torch.nn.Parameter(torch.from_numpy(draw(3, 4, 4)))
            self.looped = torch.nn.Parameter(torch.from_numpy(draw(3, 4, 5, seed=3)))
            self.rows = torch.nn.Parameter(torch.from_numpy(draw(3, 5, 5, seed=4)))

        def forward(self, x: Any) -> Any:
            self.h = torch.bmm(x, self.batched)
            self.y = [h @ self.looped[i] for i, h in enumerate(self.h)]
            return [torch.nn.functional.linear(y, w) for y, w in zip(self.y, self.rows, strict=True)]

    model, x = Experts(), torch.from_numpy(draw(3, 6, 4, seed=1))
    found = collect(model, [x])
    inputs = {"batched": x, "looped": model.h, "rows": torch.stack(model.y)}
    for name, given in inputs.items():
        expected = np.stack([second(one) for one in given.detach().numpy()])
        np.testing.assert_allclose(found[name].second, expected, rtol=1e-4, atol=1e-5, err_msg=name)
    assert [m.axes for m in found.values()] == [(1,), (1,), (2,)]


# ---- archives -------------------------------------------------------------------------------------------------------


def skewed(features: int, seed: int) -> np.ndarray:
    """Moments of inputs that lie mostly in a few directions, others for each seed."""
    rng = np.random.default_rng(seed)
    mixing = rng.normal(size=(features, features)) * 0.85 ** np.arange(features)
    return (mixing @ mixing.T) * 4.0**seed


def stack(entries: int = 3, shape: tuple[int, int] = (40, 48), axis: int = 1) -> tuple[np.ndarray, Moments]:
    features = shape[axis - 1]
    moments = np.stack([skewed(features, i) for i in range(entries)])
    return draw(entries, *shape), Moments(moments, 100, (axis,))


def written(
    path: Path, weight: np.ndarray, settings: dict[str, Any], codec: str = "uniform"
) -> tuple[int, np.ndarray]:
    """Bytes of an archive's payloads, and what it gives back."""
    with ArchiveWriter(path) as archive:
        archive.add(
            "w", weight.reshape(-1).view(np.uint32), F32, weight.shape, codec=codec, settings=settings
        )
    with Archive(path) as archive:
        assert not any(isinstance(v, tuple | list) for v in archive["w"].settings.values())
        return archive["w"].coded_bytes, archive.read("w").view(np.float32).reshape(weight.shape)


@pytest.mark.parametrize("axis", [1, 2])
def test_an_archive_codes_each_entry_with_its_own_moments(tmp_path: Path, axis: int) -> None:
    weight, known = stack(axis=axis)
    settings = {"step": 0.2, **known.settings()}
    size, back = written(tmp_path / "a.capi", weight, settings)
    scale = np.trace(known.second.mean(0)) / known.second.shape[-1]
    expected = 0
    for i, one in enumerate(weight):
        own = known.second[i] / scale
        level = np.trace(own) / len(own)
        damped = own / level + 0.01 * np.eye(len(own))
        factor = np.linalg.cholesky(np.linalg.inv(damped)).T
        step = 0.2 * np.exp(np.log(factor.diagonal()).mean()) / math.sqrt(level)
        given = {"step": step, "hessian": own, "input_axes": [axis - 1]}
        payload = UNIFORM.encode(one.reshape(-1).view(np.uint32), F32, one.shape, given)
        alone = UNIFORM.decode(memoryview(payload), F32, one.shape, {}).view(np.float32)
        np.testing.assert_allclose(back[i].reshape(-1), alone, rtol=1e-6)
        expected += len(payload)
    assert abs(size - expected) <= 3 * len(weight)
    with Archive(tmp_path / "a.capi") as archive:
        np.testing.assert_array_equal(archive.read("w", slice(1, 2)).view(np.float32)[0], back[1])


def test_outputs_at_equal_bytes_are_nearer_than_with_the_mean_of_all(tmp_path: Path) -> None:
    weight, known = stack(4, (96, 160))
    errors = {}
    for name, given in (
        ("apart", known.settings()),
        ("mean", Moments(known.second.mean(0), 1, (1,)).settings()),
    ):
        points = []
        for step in 2.0 ** np.arange(-5, 1.1):
            size, back = written(tmp_path / "a.capi", weight, {"step": float(step), **given})
            lost = sum(
                np.sum((d.T @ s) * d.T)
                for d, s in zip(back - weight, known.second.astype(float), strict=True)
            )
            points.append((8 * size / weight.size, math.log2(lost) / 2))
        bits, logs = np.array(sorted(points)).T
        errors[name] = np.interp([2, 3, 4], bits, logs)
    assert (errors["mean"] - errors["apart"] > 0.5).all()


@pytest.mark.parametrize(("codec", "settings"), [("low_rank", {"rank": 8}), ("sparse", {"density": 0.5})])
def test_other_codecs_take_the_moments_of_an_entry_too(
    tmp_path: Path, codec: str, settings: dict[str, Any]
) -> None:
    weight, known = stack(3, (40, 48), 2)
    _, back = written(tmp_path / "a.capi", weight, {**settings, **known.settings()}, codec)
    for i, one in enumerate(weight):
        given = {**settings, "hessian": known.second[i]}
        payload = CODECS[codec].encode(one.reshape(-1).view(np.uint32), F32, one.shape, given)
        alone = CODECS[codec].decode(memoryview(payload), F32, one.shape, {}).view(np.float32)
        np.testing.assert_allclose(back[i].reshape(-1), alone, rtol=1e-3, atol=1e-5)


def test_errors_of_a_stack_are_those_of_its_entries() -> None:
    weight, known = stack()
    other = weight + draw(*weight.shape, seed=5) / 9
    metric = Metric.of(known.settings())
    found = squared_error(
        weight.reshape(-1).view("u4"), other.reshape(-1).view("u4"), F32, metric, weight.shape
    )
    lost = [
        np.sum((d.T @ s) * d.T) for d, s in zip((other - weight).astype(float), known.second, strict=True)
    ]
    whole = [np.sum((w.T @ s) * w.T) for w, s in zip(weight.astype(float), known.second, strict=True)]
    assert found == pytest.approx(sum(lost) / np.trace(known.second.mean(0)) * 40, rel=1e-5)
    assert known.error(weight, other) == pytest.approx(math.sqrt(sum(lost) / sum(whole)), rel=1e-5)
    point = measure(
        "uniform", {"step": 0.2, **known.settings()}, weight.reshape(-1).view("u4"), F32, weight.shape, metric
    )
    sizes = [UNIFORM.by_outputs(
        w.reshape(-1).view("u4"), F32, (1, *w.shape), {**known.settings(), "hessian": s}, [0.2]
    )[0] for w, s in zip(weight, (known.settings()["hessian"][i : i + 1] for i in range(3)), strict=True)]  # fmt: skip
    assert point.size == sum(len(one[0]) for one in sizes if one)
    assert point.error == pytest.approx(sum(one[1] for one in sizes if one), rel=1e-6)


@pytest.mark.parametrize("axes", [(1,), (2,), (1, 2)])
@pytest.mark.parametrize("entries", [2, 7, 10])
def test_samples_of_stacks_have_the_moments_of_their_entries(
    monkeypatch: pytest.MonkeyPatch, axes: tuple[int, ...], entries: int
) -> None:
    monkeypatch.setattr(samples, "_SAMPLE", 200)
    monkeypatch.setattr(samples, "_OUTPUTS", 2)
    shape = (entries, 6, 8, 9)
    features = math.prod(shape[a] for a in axes)
    moments = tuple(np.eye(features) * (1 + i) for i in range(entries))
    known = {"hessian": moments, "input_axes": list(axes)}
    numbers = np.arange(math.prod(shape), dtype=np.uint32)
    some, found = take_sample(numbers, shape, Metric(moments, axes))
    taken = settings_of_sample(known, shape, found)["hessian"]
    parts = Metric(taken, axes).entries(some.reshape(found))
    whole = Metric(moments, axes).entries(numbers.reshape(shape))
    assert len(parts) == len(taken) <= entries
    for part, one in zip(parts, taken, strict=True):
        rows = {tuple(r) for r in whole[int(one[0, 0]) - 1].tolist()}
        assert {tuple(r) for r in part.tolist()} <= rows
    same = settings_of_sample(known, shape, shape)
    assert same["hessian"] is moments


# ---- models ---------------------------------------------------------------------------------------------------------


def stacked_model() -> tuple[dict[str, Any], Callable[[Any, Any], Any], np.ndarray]:
    """Layers whose inputs lie in other directions each, and a batch."""
    rng = np.random.default_rng(0)
    width, count = 48, 3
    turns = np.stack([np.linalg.qr(rng.normal(size=(width, width)))[0] for _ in range(count)])
    mixes = turns * (0.85 ** np.arange(width)) @ turns.transpose(0, 2, 1) * 3
    params = {"w": jnp.asarray(rng.normal(size=(count, width, 96)) / 7, jnp.float32)}

    def apply(p: Any, x: Any) -> Any:
        def one(h: Any, given: Any) -> tuple[Any, Any]:
            w, mix = given
            y = (h @ mix) @ w
            return h + jnp.tanh(y[:, :width]) * y[:, width:] / 4, y

        return jax.lax.scan(one, x, (p["w"], jnp.asarray(mixes, jnp.float32)))

    return params, apply, rng.normal(size=(256, width)).astype(np.float32)


def test_stacked_layers_come_out_as_near_as_separate_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    params, apply, x = stacked_model()
    api = ModelCompressionAPI(
        CompressionProfile(target_compression_ratio=9.0, smallest=1000, strategy="uniform")
    )

    def error(p: Any, run: Any) -> float:
        made = api.compress(p, x, apply=run).stats
        assert made.compression_ratio == pytest.approx(9, rel=0.02)
        assert made.output_error is not None
        return made.output_error

    stacked = error(params, apply)
    separate = error(list(params["w"]), lambda p, x: apply({"w": jnp.stack(p)}, x))
    monkeypatch.setattr(activations, "_SEPARATE", 0)
    pooled = error(params, apply)
    assert stacked < 1.1 * separate
    assert stacked < 0.85 * pooled


def test_layers_of_a_model_have_a_matrix_for_each_entry_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    params, apply, x = stacked_model()
    adapter = adapt(params, apply)
    found = layer_moments(adapter, [jnp.asarray(x)])["w"]
    known = collect(apply, [x], params)["w"]
    scale = np.trace(known.second.mean(0)) / 48
    share = 48 / (48 + 256)
    for one, own in zip(found["hessian"], known.second / scale, strict=True):
        drawn = (1 - share) * own + share * np.trace(own) / 48 * np.eye(48)
        np.testing.assert_allclose(one, drawn, rtol=1e-6, atol=1e-9)
    monkeypatch.setattr(layers, "_SMALL", 48 * 96 + 1)
    joined = layer_moments(adapter, [jnp.asarray(x)])["w"]["hessian"]
    share = 48 / (48 + 3 * 256)
    mean = known.second.mean(0)
    np.testing.assert_allclose(
        joined, (1 - share) * mean + share * np.trace(mean) / 48 * np.eye(48), rtol=1e-6, atol=1e-9
    )


def test_an_entry_without_inputs_is_kept_coarsely() -> None:
    params = {"w": jnp.asarray(draw(3, 48, 96))}
    apply = lambda p, x: jnp.stack([x @ p["w"][0], x @ p["w"][2]])  # noqa: E731
    x = draw(64, 48, seed=1)
    made = ModelCompressionAPI(CompressionProfile(target_compression_ratio=6.0, strategy="uniform")).compress(
        params, x, apply=apply
    )
    errors = [
        float(np.linalg.norm(a - b) / np.linalg.norm(b))
        for a, b in zip(made.model["w"], params["w"], strict=True)
    ]
    assert errors[0] == pytest.approx(errors[2], rel=0.3)
    assert 2 * errors[0] < errors[1] < 1


def test_surveys_know_how_many_chunks_a_stack_has() -> None:
    weight, known = stack(8)
    source = Tensors({"w": (F32, weight.shape)}, lambda _: weight.reshape(-1).view(np.uint32))
    found = [survey(source, codecs=["uniform"], smallest=100, moments={"w": m.settings()}).index
             for m in (known, Moments(known.second.mean(0), 1, (1,)))]  # fmt: skip
    assert found[0] - found[1] > 7 * 20


# ---- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hessian", "axes"),
    [
        (np.ones((2, 40, 40)), [1]),
        (np.ones((3, 3, 3)), [0]),
        (tuple(np.ones((4, 40, 40))), [1]),
        (np.ones((3, 40, 40)), [0, 1]),
    ],
)
def test_moments_of_other_stacks_are_refused(tmp_path: Path, hessian: Any, axes: list[int]) -> None:
    weight, _ = stack()
    with pytest.raises(CompressError, match=r"^hessian: got those of \d entries for the shape \(3, 40, 48\)"):
        written(tmp_path / "a.capi", weight, {"step": 0.1, "hessian": hessian, "input_axes": axes})


def test_a_codec_takes_one_entry() -> None:
    weight, known = stack()
    with pytest.raises(
        CompressError, match=r"^hessian: got those of 3 entries of a stack, which are coded one by one"
    ):
        UNIFORM.encode(
            weight.reshape(-1).view(np.uint32), F32, weight.shape, {"step": 0.1, **known.settings()}
        )


@pytest.mark.parametrize("hessian", [None, [[1.0]], np.eye(3), (), (1.0, 2.0), [np.eye(2)]])
def test_what_is_not_a_stack(hessian: Any) -> None:
    assert stack_of(hessian) is None

"""Whole models: smaller, measured, saved, loaded and run; and what the result says about itself is true."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from capibara.compress.codecs import engine, fixed_search
from capibara.compress.compressed import CompressedModel
from capibara.compress.container import Archive, ArchiveWriter
from capibara.compress.errors import ArchiveError, CompressError, TargetError
from capibara.compress.formats import get_format
from capibara.compress.model_api import ModelCompressionAPI
from capibara.compress.profile import CompressionProfile
from capibara.compress.statistics import CompressionStats
from capibara.native.loading import open_library


def api(**fields) -> ModelCompressionAPI:
    return ModelCompressionAPI(CompressionProfile(**fields))


def tree(seed: int = 0) -> dict:
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return (rng.normal(size=shape) / shape[-1] ** 0.5).astype(np.float32)

    return {"first": {"w": normal(96, 64), "b": normal(96)}, "second": [normal(80, 96), np.arange(4)]}


def some(value: float | None) -> float:
    assert value is not None
    return value


def relative(a: np.ndarray, b: np.ndarray) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.sqrt(((a - b) ** 2).sum() / (b**2).sum()))


def run_tree(params, x):
    return np.maximum(x @ params["first"]["w"].T + params["first"]["b"], 0) @ params["second"][0].T


def test_ratios_are_met_and_errors_grow_with_them():
    model, errors = tree(), []
    for ratio in (2, 4, 6, 8, 10):
        made = api(target_compression_ratio=ratio).compress(model)
        assert made.stats.compression_ratio == pytest.approx(ratio, rel=0.02)
        assert made.stats.compressed_bytes == made.path.stat().st_size
        assert relative(made.model["first"]["w"], model["first"]["w"]) == pytest.approx(
            {t.name: t.error for t in made.stats.tensors}["first.w"], rel=1e-6
        )
        np.testing.assert_array_equal(made.model["second"][1], model["second"][1])
        errors.append(made.stats.weight_error)
    assert errors == sorted(errors)
    assert errors[0] < 1e-3 < 0.05 < errors[-1]


def test_without_loss_every_bit_comes_back():
    model = tree()
    model["first"]["w"][0, :2] = [np.nan, -0.0]
    made = api(mode="lossless").compress(model)
    assert made.model["first"]["w"].tobytes() == model["first"]["w"].tobytes()
    assert (made.stats.weight_error, made.stats.fidelity) == (0, 1)
    assert {t.codec for t in made.stats.tensors} == {"lossless"}


def test_validation_data_lower_the_outputs_error():
    rng = np.random.default_rng(1)
    model = tree()
    x = rng.normal(size=(64, 64)).astype(np.float32)
    x[:, 8:] *= 0.01
    model["second"].append(rng.normal(size=(80, 96)).astype(np.float32))  # never used
    blind = api(target_compression_ratio=9).compress(model)
    seeing = api(target_compression_ratio=9).compress(model, x, apply=run_tree)
    blind_error = relative(run_tree(blind.model, x), run_tree(model, x))
    assert seeing.stats.output_error == pytest.approx(relative(seeing(x), run_tree(model, x)), rel=1e-4)
    assert some(seeing.stats.output_error) < 0.7 * blind_error
    assert seeing.stats.compression_ratio == pytest.approx(9, rel=0.02)


def test_accuracy_is_measured_with_classes():
    model = tree()
    x = np.random.default_rng(1).normal(size=(50, 64)).astype(np.float32)
    classes = run_tree(model, x).argmax(-1)
    classes[:10] += 1
    made = api(target_compression_ratio=8).compress(model, [(x, classes)], apply=run_tree)
    stats = made.stats
    assert stats.original_accuracy == 0.8
    assert stats.accuracy == np.mean(run_tree(made.model, x).argmax(-1) == classes)
    assert stats.fidelity == some(stats.accuracy) / 0.8


def test_a_threshold_and_a_ratio_that_exclude_each_other_come_with_the_frontier():
    with pytest.raises(TargetError, match=r"0\.99 cannot be had at a ratio of 8") as error:
        api(target_compression_ratio=8, preserve_accuracy_threshold=0.99).compress(tree())
    frontier = error.value.frontier
    assert len(frontier) >= 2
    assert frontier[0][1] >= 0.99 > frontier[-1][1]
    assert [p[1] for p in frontier] == sorted((p[1] for p in frontier), reverse=True)
    ratio, fidelity = frontier[0]
    made = api(target_compression_ratio=ratio, preserve_accuracy_threshold=0.99).compress(tree())
    assert made.stats.fidelity == pytest.approx(fidelity, abs=2e-3)


def test_what_is_saved_is_loaded(tmp_path):
    model = tree()
    made = api(target_compression_ratio=2.2, exclude=("first.*",)).compress(model)
    path = made.save(tmp_path / "model.capi")
    made.save(path)
    made_bytes = made.path.read_bytes()
    del made
    gc.collect()
    loaded = CompressedModel.load(path)
    assert path.read_bytes() == made_bytes
    assert loaded.profile == CompressionProfile(target_compression_ratio=2.2, exclude=("first.*",))
    np.testing.assert_array_equal(loaded.model["first"]["w"], model["first"]["w"])
    assert loaded.stats.compression_ratio == pytest.approx(2.2, rel=0.02)
    assert loaded.stats.weight_error > 0
    assert "ratio 2." in str(loaded.stats)
    with pytest.raises(CompressError, match=r"CompressedModel\.load\(path, model\)"):
        loaded(np.ones((1, 64)))
    x = np.ones((2, 64), np.float32)
    runs = CompressedModel.load(path, tree(seed=5), apply=run_tree)
    np.testing.assert_array_equal(runs(x), run_tree(loaded.model, x))
    with pytest.raises(CompressError, match=r"does not hold its tensors: missing \['other'\]"):
        CompressedModel.load(path, {"other": np.ones(3)})


def test_the_temporary_archive_goes_with_the_model():
    made = api(mode="lossless").compress(tree())
    path = made.path
    assert path.exists()
    del made
    gc.collect()
    assert not path.exists()


def test_archives_that_something_else_wrote(tmp_path):
    with ArchiveWriter(tmp_path / "a.capi", {"format": "pt"}) as archive:
        archive.add("w", np.zeros(100, np.uint32), get_format("F32"), (10, 10))
    loaded = CompressedModel.load(tmp_path / "a.capi")
    assert loaded.profile is None
    assert loaded.model["w"].shape == (10, 10)
    for key, text in (("capibara.stats", "[1]"), ("capibara.profile", '{"a": 1}'), ("capibara.profile", "{")):
        with ArchiveWriter(tmp_path / "b.capi", {key: text}) as archive:
            archive.add("w", np.zeros(100, np.uint32), get_format("F32"), (10, 10))
        with pytest.raises(ArchiveError):
            CompressedModel.load(tmp_path / "b.capi")
    with ArchiveWriter(tmp_path / "c.capi", {"capibara.structure": '{"dict": {"x": "y"}}'}) as archive:
        archive.add("w", np.zeros(100, np.uint32), get_format("F32"), (10, 10))
    with pytest.raises((ArchiveError, CompressError, KeyError)):
        CompressedModel.load(tmp_path / "c.capi").model


def test_tied_weights_are_stored_once_and_stay_tied():
    jnp = pytest.importorskip("jax.numpy")
    w = jnp.asarray(tree()["first"]["w"])
    made = api(target_compression_ratio=8).compress({"embed": w, "head": w})
    assert made.model["embed"] is made.model["head"]
    with Archive(made.path) as archive:
        assert archive["head"].same_as == "embed"
    assert made.stats.compression_ratio == pytest.approx(8, rel=0.02)


def test_torch_modules_are_modules_again(tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64))
    x = torch.randn(32, 64)
    made: Any = api(target_compression_ratio=6).compress(model, x)
    assert all(isinstance(made, kind) for kind in (torch.nn.Module, CompressedModel))
    assert list(made.state_dict()) == list(model.state_dict())
    error = relative(made(x).detach().numpy(), model(x).detach().numpy())
    assert made.stats.output_error == pytest.approx(error, rel=1e-3)
    made(x).square().sum().backward()
    path = made.save(tmp_path / "m.capi")
    assert all(p.grad is not None for p in made.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert next(made.to(torch.float64).parameters()).dtype == torch.float64
    outer = torch.nn.Sequential(made)
    state = {k: torch.zeros_like(v) for k, v in outer.state_dict().items()}
    assert set(state) == {f"0.{n}" for n in model.state_dict()}
    outer.load_state_dict(state)
    assert not any(p.any() for p in made.parameters())
    loaded = CompressedModel.load(path, model)
    assert relative(loaded(x).detach().numpy(), model(x).detach().numpy()) == pytest.approx(error, rel=1e-3)


@pytest.mark.slow
def test_a_small_convolutional_network():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 24, 3, padding=1), torch.nn.BatchNorm2d(24), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(24, 48, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(),
        torch.nn.Linear(192, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10),
    )  # fmt: skip
    x = torch.randn(8, 3, 16, 16)
    models = api().progressive_compression(model, x, ratios=(2, 4, 6, 8, 10))
    assert [m.stats.compression_ratio for m in models] == pytest.approx([2, 4, 6, 8, 10], rel=0.02)
    errors = [some(m.stats.output_error) for m in models]
    assert errors == sorted(errors)
    assert model.training


def test_composed_models_and_jax_trees():
    jax = pytest.importorskip("jax")
    ml = pytest.importorskip("capibara.compose")
    model = ml.Model()
    model |= ml.Linear(96)(input="x", output="h")
    model += ml.Relu()
    model += ml.Linear(64)(output="y")
    compiled = ml.compile(model, ml.JaxBackend(), shapes={"x": [None, 64]})
    params = compiled.randomize_params(seed=0)
    x = {"x": jax.random.normal(jax.random.key(0), (16, 64))}
    made = api(target_compression_ratio=7).compress((compiled, params), x)
    assert jax.tree.structure(made.model) == jax.tree.structure(params)
    error = relative(made(x)["y"], compiled.evaluate(params, x)["y"])
    assert made.stats.output_error == pytest.approx(error, rel=1e-3)
    assert made.stats.compression_ratio == pytest.approx(7, rel=0.02)


def test_progressive_compression_stops_at_the_threshold():
    work = api(preserve_accuracy_threshold=0.9)
    models = work.progressive_compression(tree(), ratios=(2, 4, 6, 8, 10))
    assert 1 <= len(models) < 5
    assert all(m.stats.fidelity >= 0.9 for m in models)
    with pytest.raises(TargetError):
        work.progressive_compression(tree(), ratios=(12,))
    with pytest.raises(CompressError, match="ratios: got"):
        work.progressive_compression(tree(), ratios=(4, 2))


def test_the_analysis_expects_what_comes_out():
    model = tree()
    report = api().analyze_compressibility(model)
    assert report.original_bytes == 4 * (96 * 64 + 96 + 80 * 96) + 8 * 4
    expected = dict(report.frontier)
    made = api(target_compression_ratio=6.0).compress(model)
    assert made.stats.weight_error == pytest.approx(expected[6.0], rel=0.05)
    lossless = api(mode="lossless").compress(model)
    assert report.lossless_ratio == pytest.approx(lossless.stats.compression_ratio, rel=0.03)
    assert report.best_ratio(expected[6.0]) == pytest.approx(6.0)
    assert report.best_ratio(0.0) >= 1
    assert 4 < report.best_ratio((expected[4.0] + expected[6.0]) / 2) < 6
    may = {t.name: t.may_lose for t in report.tensors}
    assert may == {"first.w": True, "first.b": False, "second.0": True, "second.1": False}
    assert sum(t.sensitivity for t in report.tensors) == pytest.approx(1)
    assert "ratio 6" in str(report)
    with pytest.raises(CompressError, match="error: got -1"):
        report.best_ratio(-1)


def test_a_strategy_that_is_a_codec_uses_no_other():
    made = api(strategy="uniform", target_compression_ratio=6).compress(tree())
    assert {t.codec for t in made.stats.tensors if t.error} == {"uniform"}
    made = api(strategy="lossless").compress(tree())
    assert made.stats.weight_error == 0


@pytest.mark.slow  # XLA compiles the codec for each shape
@pytest.mark.parametrize("has_accelerator", [False, True])
def test_the_strategy_jax_gives_the_same_bytes(has_accelerator, monkeypatch):
    pytest.importorskip("jax")
    monkeypatch.setattr(engine, "on_accelerator", lambda _: has_accelerator)
    monkeypatch.setattr(fixed_search, "on_accelerator", lambda _: has_accelerator)
    # On the CPU compiled code does what JAX would have to compile a program for, for every shape.
    expected = "native" if open_library()[0] is not None and not has_accelerator else "jax"
    model = {"w": tree()["second"][0]}
    plain = api(target_compression_ratio=6).compress(model)
    forced = api(strategy="jax", target_compression_ratio=6).compress(model)
    assert (plain.stats.executor != "jax", forced.stats.executor) == (True, expected)
    with Archive(plain.path) as a, Archive(forced.path) as b:
        assert [(e.name, e.codec, [c.crc32 for c in e.chunks]) for e in a] == [
            (e.name, e.codec, [c.crc32 for c in e.chunks]) for e in b
        ]


def test_the_exact_codec_for_devices_needs_no_ratio():
    made = api(strategy="exponent", mode="lossless").compress(tree())
    assert made.model["first"]["w"].tobytes() == tree()["first"]["w"].tobytes()


def test_a_small_model_in_the_shape_of_llama():
    rng = np.random.default_rng(0)

    def weight(*shape):
        return (
            rng.normal(size=shape) * np.exp(rng.normal(size=(shape[0], 1)) / 3) / shape[-1] ** 0.5
        ).astype("f4")

    embed = weight(256, 64)
    model = {
        "model": {
            "embed_tokens": {"weight": embed},
            "layers": [
                {"self_attn": {n: {"weight": weight(64, 64)} for n in ("q_proj", "k_proj", "v_proj", "o_proj")},
                 "mlp": {"gate_proj": {"weight": weight(128, 64)}, "up_proj": {"weight": weight(128, 64)},
                         "down_proj": {"weight": weight(64, 128)}},
                 "input_layernorm": {"weight": np.ones(64, np.float32)}}
                for _ in range(2)
            ],
        },
        "lm_head": {"weight": embed},
    }  # fmt: skip
    models = api(strategy="uniform").progressive_compression(model, ratios=(2, 4, 6, 8, 10))
    assert [m.stats.compression_ratio for m in models] == pytest.approx([2, 4, 6, 8, 10], rel=0.02)
    errors = [m.stats.weight_error for m in models]
    assert errors == sorted(errors)
    with Archive(models[0].path) as archive:
        assert archive["lm_head.weight"].same_as == "model.embed_tokens.weight"


def test_the_model_that_comes_back_is_ones_own():
    made = api().compress(tree())
    taken = api().decompress(made)
    taken["first"]["w"][:] = 0
    assert made.model["first"]["w"].any()
    with pytest.raises(CompressError, match="compressed: got dict"):
        api().decompress({})  # type: ignore[arg-type]


def test_stats_are_plain_values():
    stats = api().compress(tree()).stats
    assert isinstance(stats, CompressionStats)
    values = stats.as_dict()
    assert values["compression_ratio"] == stats.compression_ratio
    assert values["tensors"][0]["shape"] == [96, 64]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"strategy": "unifrom"}, "Did you mean 'uniform'"),
        ({"mode": "agressive"}, "Did you mean 'aggressive'"),
        ({"target_compression_ratio": 1.0}, "target_compression_ratio: got 1.0"),
        ({"target_compression_ratio": "4"}, "target_compression_ratio: got '4'"),
        ({"target_compression_ratio": 4.0, "mode": "lossless"}, "has no target ratio"),
        ({"preserve_accuracy_threshold": 0}, "preserve_accuracy_threshold: got 0"),
        ({"preserve_accuracy_threshold": 1.5}, "preserve_accuracy_threshold: got 1.5"),
        ({"exclude": "*.bias"}, "exclude: got"),
        ({"smallest": -1}, "smallest: got -1"),
    ],
)
def test_profiles_that_are_none(fields, message):
    with pytest.raises(CompressError, match=message):
        CompressionProfile(**fields)


@pytest.mark.parametrize("mode", ["conservative", "balanced", "aggressive"])
def test_modes_have_a_ratio_of_their_own(mode):
    profile = CompressionProfile(mode=mode)
    assert profile.ratio == {"conservative": 2, "balanced": 4, "aggressive": 8}[mode]
    assert CompressionProfile(mode=mode, target_compression_ratio=3).ratio == 3
    assert CompressionProfile(**profile.as_dict()) == profile


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "validation_data: got int"),
        ([], "there is no batch"),
        (["x"], "a batch of type str"),
        ([(np.ones((2, 64), np.float32), np.ones(3, int))], "targets are int64"),
        (
            [(np.ones((2, 64), np.float32), np.ones(2, int)), np.ones((2, 64), np.float32)],
            "some batches have targets",
        ),
    ],
)
def test_validation_data_that_are_none(data, message):
    with pytest.raises(CompressError, match=message):
        api().compress(tree(), data, apply=run_tree)


def test_a_profile_of_another_kind():
    with pytest.raises(CompressError, match="profile: got dict"):
        ModelCompressionAPI({})  # type: ignore[arg-type]

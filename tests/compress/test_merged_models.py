"""The strategy "tropical": a ratio is met by merging neurons, and what comes out is an ordinary smaller network."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from capibara.compress.archive_files import compress_files
from capibara.compress.compressed import CompressedModel
from capibara.compress.container import Archive
from capibara.compress.errors import CompressError, TargetError
from capibara.compress.merged_models import relu_chain
from capibara.compress.model_api import ModelCompressionAPI
from capibara.compress.profile import CompressionProfile


def api(ratio: float | None = 4.0, **fields: Any) -> ModelCompressionAPI:
    return ModelCompressionAPI(
        CompressionProfile(strategy="tropical", target_compression_ratio=ratio, **fields)
    )


def pairs(sizes: tuple[int, ...] = (64, 300, 10)) -> list[Any]:
    """A network with neurons that are nearly copies of each other, as trained ones have."""
    rng = np.random.default_rng(0)
    out = []
    for i, (n, m) in enumerate(itertools.pairwise(sizes)):
        kinds = m if i == len(sizes) - 2 else 20
        w = np.concatenate([rng.normal(size=(kinds, n)), rng.normal(size=(kinds, 1))], 1)
        w = w[np.arange(m) % kinds] * rng.uniform(0.5, 2, size=(m, 1)) + rng.normal(size=(m, n + 1)) / 50
        out.append((w[:, :-1].astype(np.float32) / n**0.5, w[:, -1].astype(np.float32) / n**0.5))
    return out


def data() -> np.ndarray:
    """Inputs that lie mostly in a few directions."""
    return (np.random.default_rng(1).normal(size=(300, 64)) * 0.9 ** np.arange(64)).astype(np.float32)


def relative(a: Any, b: Any) -> float:
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b)))


@pytest.mark.parametrize("ratio", [2.0, 4.0, 8.0])
def test_the_file_is_as_small_as_asked_with_as_many_neurons_as_fit(ratio: float) -> None:
    model = pairs()
    made = api(ratio).compress(model)
    original = sum(a.nbytes for pair in model for a in pair)
    assert made.stats.original_bytes == original
    assert original / made.path.stat().st_size == pytest.approx(made.stats.compression_ratio, rel=0.002)
    assert ratio * 0.98 <= made.stats.compression_ratio < ratio * 1.12  # a neuron is 300 bytes
    (w, b), (readout, _) = made.model
    assert len(w) == len(b) == readout.shape[1] < 300
    assert made.merged is not None
    assert made.merged.layers[0].kept == len(w)
    assert made.stats.weight_error == made.merged.layers[0].sphere_error
    x = data()
    assert relative(made(x), relu_chain(model, x)) < 0.2


def test_validation_data_are_fitted_to() -> None:
    model, x = pairs(), data()
    blind, seeing = api(15.0).compress(model), api(15.0).compress(model, x)
    expected = relu_chain(model, x)
    assert seeing.stats.output_error == pytest.approx(relative(seeing(x), expected), rel=1e-3)
    assert relative(seeing(x), expected) < 0.9 * relative(blind(x), expected)
    classes = expected.argmax(-1)
    judged = api(15.0).compress(model, [(x, classes)])
    assert judged.stats.accuracy == np.mean(judged(x).argmax(-1) == classes)


def test_what_is_saved_is_loaded(tmp_path: Any) -> None:
    model, x = pairs(), data()
    made = api().compress(model)
    path = made.save(tmp_path / "m.capi")
    loaded = CompressedModel.load(path, model)
    np.testing.assert_array_equal(loaded(x), made(x))
    assert loaded.stats.compression_ratio == pytest.approx(made.stats.compression_ratio)
    alone = CompressedModel.load(path).model
    np.testing.assert_array_equal(relu_chain(alone, x), made(x))
    with Archive(path) as archive:
        assert {e.codec for e in archive} == {"lossless"}
    with pytest.raises(CompressError, match="is a merged ReLU network"):
        CompressedModel.load(path, {"w": np.ones(3)})


def test_arrays_of_jax() -> None:
    jax = pytest.importorskip("jax")
    model = jax.tree.map(jax.numpy.asarray, pairs())
    made = api().compress(model, jax.numpy.asarray(data()))
    assert all(isinstance(a, jax.Array) for a in jax.tree.leaves(made.model))
    assert jax.jit(relu_chain)(made.model, data()).shape == (300, 10)


def as_torch() -> Any:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 24, 3, padding=1, bias=False), torch.nn.BatchNorm2d(24), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Flatten(), torch.nn.Linear(384, 120), torch.nn.ReLU(), torch.nn.Linear(120, 5),
    )  # fmt: skip
    return model.eval()


def test_torch_networks_become_smaller_ones(tmp_path: Any) -> None:
    torch = pytest.importorskip("torch")
    model, x = as_torch(), torch.randn(200, 1, 8, 8)
    made: Any = api(3.0).compress(model, x)
    assert 2.94 <= made.stats.compression_ratio < 3.3
    small = made.module
    assert small[0].weight.shape[0] < 24
    assert small[5].weight.shape[1] == 16 * small[0].weight.shape[0]
    assert isinstance(small[1], torch.nn.Identity)
    expected = relative(made(x).detach(), model(x).detach())
    assert made.stats.output_error == pytest.approx(expected, rel=1e-3)
    assert expected < 0.6
    made(x).sum().backward()
    loaded: Any = CompressedModel.load(made.save(tmp_path / "m.capi"), as_torch())
    torch.testing.assert_close(loaded(x), made(x))
    assert loaded.module[5].in_features == small[5].in_features
    assert loaded.module[0].bias is not None


def test_one_ratio_after_another_and_thresholds() -> None:
    models = api(None).progressive_compression(pairs(), ratios=(2, 4, 8))
    errors = [m.stats.weight_error for m in models]
    assert errors == sorted(errors)
    assert len({len(m.model[0][0]) for m in models}) == 3
    with pytest.raises(TargetError, match="cannot be had") as error:
        api(15.0, preserve_accuracy_threshold=0.99).compress(pairs(), data())
    assert len(error.value.frontier) > 1


def test_there_are_no_codes_to_run_in() -> None:
    made = api().compress(as_torch(), decode="auto")
    assert made.merged is not None
    assert made.running.quantized == ()
    with pytest.raises(CompressError, match="can run quantized"):
        api().compress(pairs(), decode=False)


def test_networks_that_are_none() -> None:
    with pytest.raises(
        CompressError, match="got dict, and the strategy 'tropical' merges neurons of ReLU networks"
    ):
        api().compress({"w": np.ones((64, 64), np.float32)})
    torch = pytest.importorskip("torch")
    smooth = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    with pytest.raises(CompressError, match="no hidden layer can be merged"):
        api().compress(smooth)
    with pytest.raises(CompressError, match="got Linear"):
        api().compress(torch.nn.Linear(64, 64))
    with pytest.raises(CompressError, match="with one neuron in each hidden layer"):
        api(5000.0).compress(pairs())
    with pytest.raises(CompressError, match="expected arrays"):
        api().compress(as_torch(), {"input": torch.randn(3, 1, 8, 8)})
    for fields in ({"exclude": ("a",)}, {"smallest": 1}, {"mode": "lossless", "ratio": None}):
        with pytest.raises(CompressError, match="'tropical' merges neurons of all hidden layers"):
            api(**fields)  # type: ignore[arg-type]
    with pytest.raises(CompressError, match="no estimate beforehand"):
        api().analyze_compressibility(pairs())
    with pytest.raises(CompressError, match="is not tuned for"):
        api().compress_with_fine_tuning(pairs(), data())
    with pytest.raises(CompressError, match="does not say how its tensors are connected"):
        compress_files([], strategy="tropical")

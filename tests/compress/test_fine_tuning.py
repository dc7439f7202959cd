"""Fine-tuning straight through the rounding: outputs get nearer, the ratio holds, and the model stays as it was."""

from __future__ import annotations

import numpy as np
import pytest

from capibara.compress.errors import CompressError
from capibara.compress.model_api import ModelCompressionAPI
from capibara.compress.models import adapt
from capibara.compress.models.gradients import distance, gradients
from capibara.compress.profile import CompressionProfile

jax = pytest.importorskip("jax")
jnp = jax.numpy

API = ModelCompressionAPI(CompressionProfile(strategy="uniform", target_compression_ratio=12))


def run(params, x):
    return jnp.maximum(x @ params["a"], 0) @ params["b"] + params["c"]


def params():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "a": jax.random.normal(keys[0], (64, 96)) / 8, "b": jax.random.normal(keys[1], (96, 64)) / 10,
        "c": jax.random.normal(keys[2], (64,)),
    }  # fmt: skip


def test_jax_parameters():
    model = params()
    x = jax.random.normal(jax.random.key(5), (128, 64))
    plain = API.compress(model, x, apply=run)
    losses = []
    tuned = API.compress_with_fine_tuning(
        model, x, apply=run, validation_data=x, steps=15, learning_rate=1e-3,
        progress=lambda step, loss: losses.append(loss),
    )  # fmt: skip
    assert plain.stats.output_error is not None
    assert tuned.stats.output_error is not None
    assert tuned.stats.output_error < 0.9 * plain.stats.output_error
    assert tuned.stats.compression_ratio == pytest.approx(12, rel=0.02)
    assert len(losses) == 15
    assert losses[-1] < losses[0]
    np.testing.assert_array_equal(model["a"], params()["a"])


@pytest.mark.parametrize("own", [False, True])
def test_what_tuning_makes_worse_is_left_as_it_was(own):
    x = jax.random.normal(jax.random.key(5), (128, 64))
    plain = API.compress(params(), None if own else x, apply=run)
    data = (x, run(params(), x)) if own else x
    with pytest.warns(RuntimeWarning, match="without them .*: the result is that without. Remedy: a lower"):
        tuned = API.compress_with_fine_tuning(
            params(), data, apply=run, validation_data=None if own else x, steps=3, learning_rate=0.5,
            loss=distance if own else None,
        )  # fmt: skip
    found = float(distance(run(tuned.model, x), run(params(), x)))
    assert found == pytest.approx(float(distance(run(plain.model, x), run(params(), x))), rel=0.2)


def test_torch_modules_with_a_loss_of_ones_own():
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.randn(128, 64)
    classes = model(x).argmax(-1)
    plain = API.compress(model, (x, classes))
    tuned = API.compress_with_fine_tuning(
        model, (x, classes), loss=torch.nn.functional.cross_entropy, steps=12, learning_rate=1e-3,
        validation_data=(x, classes),
    )  # fmt: skip
    assert plain.stats.accuracy is not None
    assert tuned.stats.accuracy is not None
    assert tuned.stats.accuracy > plain.stats.accuracy
    assert tuned.stats.compression_ratio == pytest.approx(12, rel=0.02)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_gradients_are_those_of_jax_and_tied_ones_add_up():
    w = jnp.arange(6.0).reshape(2, 3)
    adapter = adapt({"one": w, "two": w}, apply=lambda p, x: x @ p["one"] * 2 + x @ p["two"])
    x, y = jnp.ones((4, 2)), jnp.zeros((4, 3))
    value, slopes = gradients(adapter, adapter.model, x, y, distance)
    expected = jax.value_and_grad(lambda w: ((x @ w * 3 - y) ** 2).mean())(w)
    assert value == pytest.approx(float(expected[0]))
    assert set(slopes) == {"one"}
    np.testing.assert_allclose(slopes["one"], expected[1], rtol=1e-6)


def test_what_cannot_be_tuned():
    x = np.ones((2, 64), np.float32)
    with pytest.raises(CompressError, match="there are targets, but no loss"):
        API.compress_with_fine_tuning(params(), (x, np.ones(2, int)), apply=run)
    with pytest.raises(CompressError, match="steps: got 0"):
        API.compress_with_fine_tuning(params(), x, apply=run, steps=0)
    with pytest.raises(CompressError, match="learning_rate: got -1"):
        API.compress_with_fine_tuning(params(), x, apply=run, learning_rate=-1)
    with pytest.raises(CompressError, match="it loses nothing"):
        ModelCompressionAPI(CompressionProfile(mode="lossless")).compress_with_fine_tuning(
            params(), x, apply=run
        )
    numpy_only = {k: np.asarray(v) for k, v in params().items()}
    with pytest.raises(CompressError, match=r"expected a torch\.nn\.Module or arrays of JAX"):
        API.compress_with_fine_tuning(
            numpy_only, x, apply=lambda p, x: np.maximum(x @ p["a"], 0) @ p["b"], steps=1
        )
    with pytest.raises(CompressError, match="loss: nan at step 1"):
        API.compress_with_fine_tuning(params(), x, apply=run, loss=lambda y, _: y.sum() * jnp.nan, steps=1)

"""Trained models at many ratios: each file meets its ratio, and the error grows with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from capibara.compress.model_api import ModelCompressionAPI
from capibara.compress.profile import CompressionProfile

pytestmark = pytest.mark.slow
RATIOS = (2, 4, 6, 8, 10)


def check(models: list[Any], errors: list[float]) -> None:
    sizes = [m.stats.original_bytes / m.path.stat().st_size for m in models]
    assert sizes == pytest.approx(RATIOS, rel=0.02)
    assert errors == sorted(errors)
    assert 0 < errors[0] < 0.1 * errors[-1]
    assert errors[-1] < 0.5


def test_a_decoder_in_the_shape_of_llama() -> None:
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    from capibara.config import ModularModelConfig
    from capibara.core import ModularCapibaraModel

    sizes = {"embed_dim": 96, "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 256}
    config = ModularModelConfig.from_toml("demo").with_overrides({f"model.{k}": v for k, v in sizes.items()})
    model = ModularCapibaraModel(config)
    params, state = model.init(0)
    text = np.frombuffer(
        b"".join(b"line %d of a text that is easy to learn. " % (i * i) for i in range(400)), np.uint8
    )
    rows = np.lib.stride_tricks.sliding_window_view(text.astype(np.int32), 49)
    tool = optax.adam(3e-3)

    @jax.jit
    def step(params: Any, memory: Any, tokens: Any) -> Any:
        found = jax.value_and_grad(lambda p: model.loss(p, {"tokens": tokens}, state=state, train=False)[0])
        loss, slopes = found(params)
        updates, memory = tool.update(slopes, memory)
        return optax.apply_updates(params, updates), memory, loss

    memory, losses, random = tool.init(params), [], np.random.default_rng(0)
    for _ in range(40):
        params, memory, loss = step(params, memory, rows[random.integers(0, len(rows), 8)])
        losses.append(float(loss))
    assert losses[-1] < 0.6 * losses[0]
    api = ModelCompressionAPI(CompressionProfile())
    models = api.progressive_compression((model, params), ratios=RATIOS)
    check(models, [m.stats.weight_error for m in models])
    held = rows[::997, :-1]
    expected = model.apply(params, held)

    def error(made: Any) -> float:
        return float(np.linalg.norm(made(held) - expected) / np.linalg.norm(expected))

    outputs = [error(m) for m in models]
    assert outputs == sorted(outputs)
    assert outputs[-1] < 0.5


def test_a_convolutional_network_in_torch() -> None:
    torch = pytest.importorskip("torch")
    datasets = pytest.importorskip("sklearn.datasets")
    found = datasets.load_digits()
    images = torch.tensor(found.data, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    labels = torch.tensor(found.target)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten(),
        torch.nn.Linear(1024, 96), torch.nn.ReLU(), torch.nn.Linear(96, 10),
    )  # fmt: skip
    tool = torch.optim.Adam(model.parameters(), 2e-3)
    for first in [*range(0, 1400, 50)] * 3:
        tool.zero_grad()
        torch.nn.functional.cross_entropy(
            model(images[first : first + 50]), labels[first : first + 50]
        ).backward()
        tool.step()
    model.eval()
    api = ModelCompressionAPI(CompressionProfile())
    models = api.progressive_compression(model, [(images[1400:], labels[1400:])], ratios=RATIOS)
    check(models, [m.stats.output_error or 0.0 for m in models])
    assert (models[0].stats.original_accuracy or 0) > 0.8
    assert (models[-1].stats.fidelity or 0) > 0.95

"""Modules of PyTorch as models: sizes that are left open, training, and what goes wrong."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from capibara import compose as ml
from capibara.errors import MissingExtraError

torch = pytest.importorskip("torch")

from torch_modules import arrays, real, tree

nn: Any = torch.nn
f: Any = torch.nn.functional

# Torch says so of its own speed.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


# ---- sizes that are left open -----------------------------------------------------------------------------------


@pytest.mark.thin(4)
@pytest.mark.parametrize(
    ("make", "shape", "others", "opened"),
    [
        (lambda: nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True), (2, 5, 3), (4, 5, 3), {0: "batch"}),
        (lambda: nn.GRU(3, 4), (5, 2, 3), (5, 1, 3), {1: "batch"}),
        (
            lambda: nn.ConvTranspose2d(2, 3, 3, 2, 1, 1),
            (2, 2, 5, 6),
            (3, 2, 7, 4),
            {0: "batch", 2: "height", 3: "width"},
        ),
        (
            lambda: nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.AdaptiveAvgPool2d(1)),
            (2, 2, 9, 9),
            (1, 2, 8, 11),
            {0: "batch", 2: "height", 3: "width"},
        ),
    ],
)
def test_open_sizes(make: Any, shape: Any, others: Any, opened: dict[int, str]) -> None:
    torch.manual_seed(0)
    module = make().double().eval()
    dims = {axis: torch.export.Dim(name, min=2 if axis == 0 else 4) for axis, name in opened.items()}
    dims = {axis: torch.export.Dim(name) for axis, name in opened.items()} if len(opened) == 1 else dims
    imported = ml.from_torch(module, (real(*shape),), dynamic_shapes=(dims,))
    backend = ml.NumpyBackend(dtype="float64")
    compiled = ml.compile(imported.model, backend)
    for size in (shape, others):
        x = real(*size, seed=5)
        found = compiled.evaluate(
            tree(backend, imported.params), {compiled.input_keys[0]: backend.array(x.numpy())}
        )
        with torch.no_grad():
            expected = arrays(module(x))
        for key, want in zip(compiled.output_keys, expected, strict=True):
            np.testing.assert_allclose(found[key], want.numpy(), rtol=1e-10, atol=1e-10)


# ---- training ---------------------------------------------------------------------------------------------------


def test_batch_normalisation_trains_as_in_torch() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, momentum=0.2), nn.ReLU()).double()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    imported = ml.from_torch(module, (real(4, 2, 5, 5),), training=True)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert set(imported.state) == {"item_1_running_mean", "item_1_running_var"}
    backend = ml.NumpyBackend(dtype="float64")
    compiled = ml.compile(imported.model, backend)
    params, state = tree(backend, imported.params), tree(backend, imported.state)
    for key, value in compiled.init_state().items():
        np.testing.assert_array_equal(value, imported.state[key])
    for step in range(2):
        x = real(4, 2, 5, 5, seed=step)
        given = {"input": backend.array(x.numpy())}
        module.zero_grad()
        expected = module(x)
        weight = real(*expected.shape, seed=9)
        expected.backward(weight)
        found, gradients, state = compiled.evaluate(
            params, given, {"output": backend.array(weight.numpy())}, state=state, train=True
        )
        np.testing.assert_allclose(found["output"], expected.detach().numpy(), rtol=1e-10, atol=1e-10)
        for name in ("running_mean", "running_var"):
            want = getattr(module[1], name).numpy()
            np.testing.assert_allclose(state[f"item_1_{name}"], want, rtol=1e-10)
        for name, parameter in module.named_parameters():
            part, key = name.split(".")
            got = gradients[f"item_{part}"][key]
            np.testing.assert_allclose(got, parameter.grad.numpy(), rtol=1e-8, atol=1e-9)
    module.eval()
    x = real(3, 2, 5, 5, seed=7)
    with torch.no_grad():
        want = module(x[:1].expand(4, -1, -1, -1)).numpy()
    found, after = compiled.evaluate(
        params, {"input": backend.array(x[:1].expand(4, -1, -1, -1).numpy().copy())}, state=state
    )
    np.testing.assert_allclose(found["output"], want, rtol=1e-10, atol=1e-10)
    for key, value in after.items():
        np.testing.assert_array_equal(value, state[key])


def test_dropout_drops_in_training_only() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.25)).double()
    x = real(200, 4)
    backend = ml.NumpyBackend(dtype="float64")
    imported = ml.from_torch(module, (x,), training=True)
    assert module.training
    compiled = ml.compile(imported.model, backend)
    params, given = tree(backend, imported.params), {"input": backend.array(x.numpy())}
    plain = module[0](x).detach().numpy()
    np.testing.assert_allclose(compiled.evaluate(params, given)["output"], plain, rtol=1e-10)
    found = compiled.evaluate(params, given, key=backend.get_random_key(), train=True)["output"]
    kept = found != 0
    np.testing.assert_allclose(found[kept], plain[kept] / 0.75, rtol=1e-10)
    assert 0.68 < kept.mean() < 0.82  # 800 draws: more than four deviations to either side


# ---- what goes wrong --------------------------------------------------------------------------------------------


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Linear(2, 2)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        MissingExtraError, match=r"from_torch needs the package 'torch'.*capibara-jax\[torch\]"
    ):
        ml.from_torch(module, (None,))


def test_the_line_that_calls_an_unknown_operation_is_named() -> None:
    class Net(nn.Module):
        def forward(self, x):
            x = x + 1
            return torch.lgamma(x)

    line = Net.forward.__code__.co_firstlineno + 2
    with pytest.raises(
        ml.UnsupportedTorchError, match=rf"aten::lgamma in .*test_from_torch_training\.py:{line}\)"
    ):
        ml.from_torch(Net(), (torch.zeros(2),))


def test_an_argument_that_is_unknown_is_named_with_its_line() -> None:
    class Net(nn.Module):
        def forward(self, x):
            return torch.div(x, 2, rounding_mode="trunc")

    with pytest.raises(
        ml.UnsupportedTorchError, match=r"test_from_torch_training\.py:\d+\): rounding_mode='trunc'"
    ):
        ml.from_torch(Net(), (torch.zeros(2),))


def test_training_must_be_a_bool() -> None:
    with pytest.raises(ml.WiringError, match="training='yes'"):
        ml.from_torch(nn.ReLU(), (torch.zeros(2),), training="yes")  # type: ignore[arg-type]

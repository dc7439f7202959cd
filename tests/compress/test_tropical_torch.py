"""Merged PyTorch modules: the same structure, fewer neurons, nearly the same outputs."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

from capibara.compress.errors import CompressError
from capibara.compress.tropical import merge_neurons

torch = pytest.importorskip("torch")
nn = torch.nn


def images(generator: int = 0) -> Any:
    torch.manual_seed(generator)
    model = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 16, 3, padding="same"), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Conv2d(16, 12, 3, stride=2, padding=1, dilation=1, bias=False),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(48, 20),
        nn.ReLU(),
        nn.Linear(20, 5),
        nn.Softmax(-1),
    )
    norm = model[0][1]
    with torch.no_grad():
        for tensor in (norm.weight, norm.bias, norm.running_mean):
            tensor.copy_(torch.randn(16))
        norm.running_var.uniform_(0.5, 2)
    return model


def test_a_network_of_every_kind_of_layer() -> None:
    model = images().eval()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(200, 3, 12, 12)
    found = merge_neurons(model, 0.5, inputs=x)
    small = found.network
    assert type(small) is type(model)
    assert [layer.kept for layer in found.layers] == [8, 6, 10]
    assert small[0][0].weight.shape == (8, 3, 3, 3)
    assert isinstance(small[0][1], nn.Identity)
    assert small[1].weight.shape == (6, 8, 3, 3)
    assert small[6].weight.shape == (10, 24)
    assert small[6].in_features == 24
    assert small[8].weight.shape == (5, 10)
    assert not small.training
    for name, tensor in model.state_dict().items():  # the given one is as it was
        assert torch.equal(tensor, before[name])
    unfitted = merge_neurons(model, 0.5, fit=False).network
    want = model(x)
    assert (want - small(x)).norm() < 0.5 * (want - unfitted(x)).norm()
    # It is a module like any other: its state loads, and it trains.
    small.train()(x).sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())


def test_without_merging_it_computes_the_same() -> None:
    """The steps that were made of the modules, against the modules."""
    model = images(3).eval()
    x = torch.randn(10, 3, 12, 12)
    found = merge_neurons(model, 1.0, inputs=x)
    torch.testing.assert_close(found.network(x), model(x), rtol=1e-4, atol=1e-6)
    assert all(layer.data_error is not None and layer.data_error < 1e-5 for layer in found.layers)


def test_copies_of_channels_merge_exactly() -> None:
    torch.manual_seed(1)
    narrow = nn.Conv1d(4, 6, 3, stride=2, dilation=2, padding=1)
    factors = torch.rand(8, 1, 1, 1) * 3 + 0.1
    wide, last = nn.Conv1d(4, 48, 3, stride=2, dilation=2, padding=1), nn.Linear(48 * 4, 3)
    with torch.no_grad():
        wide.weight.copy_((factors * narrow.weight).reshape(48, 4, 3))
        wide.bias.copy_((factors[:, :, 0, 0] * narrow.bias).reshape(48))
    model = nn.Sequential(wide, nn.ReLU(), nn.AvgPool1d(2), nn.Flatten(), last)
    found = merge_neurons(model, 1 / 8)
    x = torch.randn(30, 4, 18)
    want = model(x)
    assert found.network[0].out_channels == 6
    assert ((found.network(x) - want).norm() / want.norm()).item() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_are_kept(dtype: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3, bias=False)).to(dtype)
    x = torch.randn(100, 6, dtype=dtype)
    small = merge_neurons(model, 0.5, inputs=x).network
    assert {p.dtype for p in small.parameters()} == {dtype}
    want = model(x).double()
    assert (small(x).double() - want).norm() < 0.2 * want.norm()
    # Fitting found a shift for a layer that had none.
    assert small[2].bias is not None
    assert merge_neurons(model, 0.5).network[2].bias is None


def test_what_cannot_be_merged_says_so() -> None:
    with pytest.raises(CompressError, match="got Linear, expected a torch"):
        merge_neurons(nn.Linear(3, 3), 0.5)
    with pytest.raises(CompressError, match="no hidden layer"):
        merge_neurons(nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3)), 0.5)
    shared = nn.Linear(3, 3)
    with pytest.raises(CompressError, match="share"):
        merge_neurons(nn.Sequential(shared, nn.ReLU(), shared), 0.5)
    # Groups of channels, and normalisation that is no part of a layer before it.
    grouped = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.ReLU())
    with pytest.raises(CompressError, match="no hidden layer"):
        merge_neurons(grouped, 0.5)
    normed = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2))
    with pytest.raises(CompressError, match="no hidden layer"):
        merge_neurons(normed, 0.5)


def test_other_layers_run_as_they_would_in_evaluation() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.BatchNorm1d(6), nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 30), nn.GELU(), nn.Linear(30, 2)
    )
    model[0].running_mean.fill_(2.0)
    x = torch.randn(200, 6) + 2
    found = merge_neurons(model, 0.5, inputs=x.numpy())
    assert [layer.index for layer in found.layers] == [1]
    assert found.network.training
    want, have = model.eval()(x), found.network.eval()(x)
    assert (want - have).norm() < 0.5 * (want - want.mean(0)).norm()
    assert np.isfinite(found.layers[0].hausdorff_bounds).all()

"""More of torch's layers and operations as composed models, each against torch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from capibara import compose as ml

torch = pytest.importorskip("torch")

from torch_modules import Calls, arrays, real, tree, whole

nn: Any = torch.nn
f: Any = torch.nn.functional

# Torch says so of its own speed.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


def written(x):
    z = x.clone()
    z[:, 1:3] = x[:, :2] * 2
    z[1] = 0.5
    return z


CAUSAL = torch.ones(3, 3, dtype=torch.bool).triu(1)
PADDED = torch.tensor([[False, False, True], [False, False, False]])
HIDDEN = torch.tensor([[False, False, False], [True, False, True], [True, True, True]])
TIES = torch.tensor([[1.0, 1.0, 0.0], [1.0, 2.0, 0.0], [1.0, 3.0, 4.0]], dtype=torch.float64)
EDGES = torch.tensor(
    [0.0, 1e-9, 0.0999, 0.1, -0.1, 5.0, -6.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64
)
HALVES = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 0.49999999999999994, 1e300, -2.7], dtype=torch.float64)

Case = tuple[Callable[[], Any], tuple[Any, ...]]
CASES: dict[str, Case] = {
    # recurrent layers
    "lstm": (lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), (real(2, 5, 3),)),
    "lstm_without_bias": (lambda: nn.LSTM(3, 4, bias=False), (real(5, 2, 3),)),
    "lstm_unbatched": (lambda: nn.LSTM(3, 4), (real(5, 3),)),
    "lstm_projected": (lambda: nn.LSTM(3, 4, proj_size=2), (real(3, 2, 3),)),
    "lstm_state": (
        lambda: Calls(lambda net, x, h, c: net(x, (h, c)), net=nn.LSTM(3, 4, 2)),
        (real(5, 2, 3), real(2, 2, 4), real(2, 2, 4, seed=4)),
    ),
    "gru": (lambda: nn.GRU(3, 4, 2, batch_first=True, bidirectional=True), (real(2, 5, 3),)),
    "gru_state": (lambda: nn.GRU(3, 4, bias=False), (real(5, 2, 3), real(1, 2, 4))),
    "rnn": (lambda: nn.RNN(3, 4, 2, batch_first=True), (real(2, 5, 3),)),
    "rnn_relu": (lambda: nn.RNN(3, 4, nonlinearity="relu"), (real(3, 2, 3),)),
    "cells": (
        lambda: Calls(lambda a, b, x: (*a(x), b(x)), a=nn.LSTMCell(3, 4), b=nn.GRUCell(3, 4)),
        (real(2, 3),),
    ),
    # attention
    "heads": (
        lambda: Calls(lambda net, x: net(x, x, x), net=nn.MultiheadAttention(8, 2, batch_first=True)),
        (real(2, 3, 8),),
    ),
    "heads_masked": (
        lambda: Calls(
            lambda net, x: net(x, x, x, attn_mask=CAUSAL, need_weights=False)[0],
            net=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        (real(2, 3, 8),),
    ),
    "heads_padded": (
        lambda: Calls(
            lambda net, x: net(x, x, x, key_padding_mask=PADDED)[0],
            net=nn.MultiheadAttention(8, 2, batch_first=True),
        ),
        (real(2, 3, 8),),
    ),
    "heads_of_two": (
        lambda: Calls(
            lambda net, x, y: net(x, y, y, average_attn_weights=False),
            net=nn.MultiheadAttention(8, 2, kdim=4, vdim=4, add_bias_kv=True),
        ),
        (real(3, 2, 8), real(5, 2, 4)),
    ),
    "encoder_masked": (
        lambda: Calls(
            lambda net, x: net(x, src_mask=CAUSAL, src_key_padding_mask=PADDED),
            net=nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        ),
        (real(2, 3, 8),),
    ),
    "transformer": (
        lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
        (real(2, 3, 8), real(2, 4, 8)),
    ),
    "attention": (
        lambda: Calls(
            lambda q, k, m: (
                f.scaled_dot_product_attention(q, k, k, attn_mask=m, scale=0.7),
                f.scaled_dot_product_attention(q, q, q, is_causal=True),
                f.scaled_dot_product_attention(q, q, q, attn_mask=HIDDEN),
            )
        ),
        (real(2, 2, 3, 4), real(2, 2, 5, 4), real(2, 1, 3, 5)),
    ),
    "attention_grouped": (
        lambda: Calls(lambda q, k: f.scaled_dot_product_attention(q, k, k, enable_gqa=True)),
        (real(2, 4, 3, 4), real(2, 2, 5, 4)),
    ),
    # normalisation and tables
    "norms": (
        lambda: nn.Sequential(nn.InstanceNorm2d(3, affine=True), nn.BatchNorm2d(3), nn.Dropout(0.5)),
        (real(2, 3, 4, 4),),
    ),
    "own_statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (real(4, 3, 2),)),
    "rms": (lambda: nn.RMSNorm(4), (real(2, 3, 4),)),
    "embedding": (lambda: nn.Embedding(7, 3, padding_idx=0), (whole(7, 2, 3),)),
    "bilinear": (lambda: nn.Bilinear(3, 4, 2), (real(5, 3), real(5, 4))),
    "weight_norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), (real(2, 3),)),
    # convolutions
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, padding="same", dilation=2), (real(1, 2, 9),)),
    "conv_even": (lambda: nn.Conv2d(2, 4, (2, 4), padding="same", groups=2), (real(1, 2, 9, 8),)),
    "conv_reflect": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (real(1, 2, 5, 5),)),
    "conv_circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (real(1, 2, 5),)),
    "conv_unbatched": (lambda: nn.Conv2d(2, 3, 3), (real(2, 5, 5),)),
    "transposed1": (lambda: nn.ConvTranspose1d(2, 3, 3, 2, 1, 1), (real(2, 2, 5),)),
    "transposed2": (
        lambda: nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), dilation=(2, 1), groups=2),
        (real(2, 4, 5, 4),),
    ),
    "transposed_cropped": (lambda: nn.ConvTranspose1d(2, 3, 2, 2, 2, bias=False), (real(2, 2, 6),)),
    # pooling and resolutions
    "pool_up": (
        lambda: Calls(
            lambda x: (
                f.max_pool2d(x, 3, 2, 1, ceil_mode=True),
                f.max_pool2d(x, 2, 3, 0, 1, True),
                f.max_pool1d(x[0], 3, 2, 1, 1, True),
                f.avg_pool2d(x, 3, 2, 1, True, False),
                f.avg_pool2d(x, (3, 2), (2, 3), (1, 0), True, True),
                f.avg_pool2d(x, 2, 2, 0, True, True, 5),
                f.avg_pool1d(x[0], 3, 2, 1, True),
                f.avg_pool2d(x[0], 2),
            )
        ),
        (real(1, 2, 8, 7),),
    ),
    "pool_adaptive": (
        lambda: Calls(
            lambda x: (
                f.adaptive_avg_pool2d(x, (3, 4)),
                f.adaptive_max_pool2d(x, (3, 2)),
                f.adaptive_avg_pool1d(x[0], 4),
                f.adaptive_max_pool1d(x[0], 1),
                f.adaptive_avg_pool2d(x[0], (1, 5)),
            )
        ),
        (real(1, 2, 7, 9),),
    ),
    "resolutions": (
        lambda: Calls(
            lambda x: (
                f.interpolate(x, size=(5, 7)),
                f.interpolate(x, scale_factor=1.7),
                f.interpolate(x, size=(5, 7), mode="bilinear", align_corners=True),
                f.interpolate(x, scale_factor=(1.5, 2.0), mode="bilinear"),
                f.interpolate(x[0], size=5, mode="linear"),
                f.interpolate(x[0], scale_factor=3),
                f.pixel_shuffle(x.repeat(1, 2, 1, 1), 2),
            )
        ),
        (real(1, 2, 3, 4),),
    ),
    # picking
    "gather": (
        lambda: Calls(lambda x, i: (x.gather(1, i), x.gather(0, i % 3), torch.take_along_dim(x, i, 1))),
        (real(3, 4), whole(4, 3, 2)),
    ),
    "index_select": (
        lambda: Calls(lambda x, i: (x.index_select(1, i), x[:, i], x[i])),
        (real(4, 4, 2), whole(4, 5)),
    ),
    "index_rows": (lambda: Calls(lambda x, i, j: x[i, j]), (real(3, 4, 2), whole(3, 5), whole(4, 5))),
    "index_apart": (
        lambda: Calls(lambda x, i: x[:, i, :, torch.tensor([0, 1, 0])]),
        (real(3, 4, 2, 3), whole(4, 3)),
    ),
    "index_negative": (
        lambda: Calls(lambda x, i, j: (x[i - 2, j - 3], x[i - 2], x[[0, -1], [-3, 2]])),
        (real(3, 4), whole(3, 5), whole(4, 5)),
    ),
    "index_spread": (
        lambda: Calls(lambda x, i: (x[i[:, None], torch.arange(2)[None]], x[torch.arange(2), i])),
        (real(3, 4), whole(3, 2)),
    ),
    "extremes": (
        lambda: Calls(
            lambda x: (
                *x.max(1),
                *x.min(-1, keepdim=True),
                x.max(),
                x.min(),
                x.argmax(),
                x.argmax(1),
                x.argmin(0, keepdim=True),
            )
        ),
        (real(3, 4, 2),),
    ),
    "order": (
        lambda: Calls(
            lambda x: (
                *x.topk(2, -1),
                *x.topk(2, 0, largest=False),
                *x.sort(1),
                x.sort(0, descending=True)[0],
                x.argsort(),
                x.cumsum(1),
                x.cumsum(0),
            )
        ),
        (real(4, 5),),
    ),
    "order_of_equal": (
        lambda: Calls(lambda x: (*x.sort(stable=True, dim=0, descending=True), *x.sort(stable=True))),
        (TIES,),
    ),
    "whole_numbers": (
        lambda: Calls(
            lambda i: (
                *i.topk(2),
                *i.sort(),
                i.cumsum(1),
                i.max(0)[0],
                (i + 1) * 2 // 3,
                i / 2,
                i.clamp(1, 3),
            )
        ),
        (whole(40, 5, 6),),
    ),
    "moved": (
        lambda: Calls(
            lambda x: (
                x.flip(1),
                x.roll(1, 0),
                x.repeat(2, 1, 3),
                x.tril(),
                x.diagonal(1),
                x.repeat_interleave(2, 0),
                torch.rot90(x),
                written(x),
                torch.chunk(x, 2, 1)[1],
            )
        ),
        (real(4, 4),),
    ),
    # products and elements
    "einsum": (
        lambda: Calls(
            lambda x, y, z: (
                torch.einsum("bhqd,bhkd->bhqk", x, y),
                torch.einsum("bhqd,ek->bqek", x, z),
                torch.einsum("bhii->bh", x @ y.mT @ torch.ones(5, 3, dtype=x.dtype)),
                torch.einsum("bhqd,bhkd,ke->be", x, y, z),
            )
        ),
        (real(2, 2, 3, 4), real(2, 2, 5, 4), real(5, 5)),
    ),
    "erf": (lambda: Calls(torch.erf), (EDGES,)),
    "rounding": (
        lambda: Calls(lambda x: (x.round(), x.trunc(), x.expm1(), torch.fmod(x, -0.7))),
        (HALVES,),
    ),
    "elements": (
        lambda: Calls(
            lambda x, y: (
                x.exp2(),
                y.log2(),
                y.log10(),
                x.tan(),
                x.sinh(),
                x.cosh(),
                torch.hypot(x, y),
                (x / 0).isinf(),
                (x / 0).isfinite(),
                f.hardswish(x),
                f.mish(x),
                f.celu(x),
                f.logsigmoid(x),
                f.glu(x, 1),
                x.clamp(min=y - 1),
                torch.clamp(x, -y, y),
                x.prod(1),
                x.norm(dim=1),
                x.norm(),
                f.normalize(x),
                torch.linalg.vector_norm(x, 1, 0),
                torch.logsumexp(x, 1),
                f.cosine_similarity(x, y),
            )
        ),
        (real(3, 4), real(3, 4, seed=8).abs() + 0.5),
    ),
    "losses": (
        lambda: Calls(
            lambda x, i: (f.cross_entropy(x, i), f.mse_loss(x, x * 2), f.smooth_l1_loss(x, x * 3)),
        ),
        (real(3, 4), whole(4, 3)),
    ),
}


def built(case: str) -> Any:
    torch.manual_seed(0)
    make, inputs = CASES[case]
    module = make().double().eval()
    with torch.no_grad():
        return module, ml.from_torch(module, inputs), arrays(module(*inputs))


def compared(case: str, backend: Any, tolerance: float) -> None:
    _, imported, expected = built(case)
    compiled = ml.compile(imported.model, backend, inference=True)
    given = zip(compiled.input_keys, CASES[case][1], strict=True)
    found = compiled.evaluate(tree(backend, imported.params), {k: backend.array(a.numpy()) for k, a in given})
    assert len(compiled.output_keys) == len(expected)
    for key, want in zip(compiled.output_keys, expected, strict=True):
        got = np.asarray(backend.to_numpy(found[key]))
        assert got.shape == tuple(want.shape), key
        assert got.dtype.kind == want.numpy().dtype.kind, key
        np.testing.assert_allclose(got, want.numpy(), rtol=tolerance, atol=tolerance, err_msg=key)


@pytest.mark.thin(12)
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_torch_in_float64(case: str) -> None:
    compared(case, ml.NumpyBackend(dtype="float64"), 1e-10)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "case",
    [
        "lstm",
        "gru",
        "heads_padded",
        "transposed2",
        "index_apart",
        "order",
        "einsum",
        "attention",
        "pool_adaptive",
    ],
)
def test_values_are_those_of_torch_in_float32_on_jax(case: str) -> None:
    compared(case, ml.JaxBackend(), 1e-5)


@pytest.mark.parametrize("case", ["gru", "transposed1", "resolutions", "moved"])
def test_values_are_those_of_torch_on_torch(case: str) -> None:
    compared(case, ml.TorchBackend(dtype="float64"), 1e-10)


@pytest.mark.parametrize("case", ["lstm", "gru", "transposed2", "heads_padded", "weight_norm", "norms"])
def test_gradients_are_those_of_torch(case: str) -> None:
    module, imported, _ = built(case)
    inputs = CASES[case][1]
    outputs = arrays(module(*inputs))
    weights = [real(*out.shape, seed=i) for i, out in enumerate(outputs)]
    torch.autograd.backward(outputs, weights)
    backend = ml.NumpyBackend(dtype="float64")
    compiled = ml.compile(imported.model, backend)
    given = {k: backend.array(a.numpy()) for k, a in zip(compiled.input_keys, inputs, strict=True)}
    cotangents = {k: backend.array(w.numpy()) for k, w in zip(compiled.output_keys, weights, strict=True)}
    _, gradients = compiled.evaluate(tree(backend, imported.params), given, cotangents)
    count = 0
    for name, parameter in module.named_parameters():
        at = gradients
        for part in name.split("."):
            at = at[part if part[0].isalpha() else f"item_{part}"]
        np.testing.assert_allclose(np.asarray(at), parameter.grad.numpy(), rtol=1e-9, atol=1e-10)
        count += 1
    assert count


def test_gradients_of_elements_are_those_of_torch() -> None:
    x = real(3, 40).requires_grad_(True)
    index = whole(40, 3, 7)

    def function(x, i):
        return (
            torch.erf(x) + torch.expm1(x) + torch.sinh(x) + x.gather(1, i).sum() + x.sort(1)[0] * x.cumsum(1)
        )

    function(x, index).sum().backward()
    imported = ml.from_torch(Calls(function), (x.detach(), index))
    backend = ml.NumpyBackend(dtype="float64")
    compiled = ml.compile(imported.model, backend, trainable_keys=["x"])
    given = backend.array(x.detach().numpy())
    ones = {"output": backend.array(np.ones((3, 40)))}
    _, gradients = compiled.evaluate({"x": given}, {"y": index.numpy().astype("int32")}, ones)
    np.testing.assert_allclose(gradients["x"], x.grad.numpy(), rtol=1e-10, atol=1e-10)

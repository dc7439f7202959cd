"""Torch modules as composed models: their values against torch itself, in float64 and float32, on three backends."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from capibara import compose as ml
from capibara.compose import UnsupportedTorchError, from_torch

torch = pytest.importorskip("torch")
nn: Any = torch.nn

pytestmark = pytest.mark.filterwarnings("error")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.places = nn.Embedding(5, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(x.mean(1))


class Activations(nn.Module):
    def forward(self, x):
        f = torch.nn.functional
        rows = [
            f.relu(x), f.gelu(x), f.gelu(x, approximate="tanh"), f.silu(x), torch.tanh(x), torch.sigmoid(x),
            f.leaky_relu(x, 0.2), f.elu(x, 1.5), f.softplus(x), f.hardtanh(x), f.softmax(x, 1),
            f.log_softmax(x, -1), f.selu(x), f.softplus(x, beta=2.0),
        ]  # fmt: skip
        return torch.stack(rows)


class Elements(nn.Module):
    def forward(self, x, y):
        a = (x * 2 + 1 - y / 3) ** 2 + x.abs().sqrt() + (y.abs() + 1).rsqrt() + torch.exp(-x) + 2 - 3 * x
        b = torch.where(x > y, x, y * 0.5) + torch.where(x <= 0.0, 1.0, x) + (y.abs() + 1) ** 1.5
        c = torch.minimum(x, y) + (x == y) * x + (x != y).to(x.dtype) + torch.clamp(x, -0.5, 0.5)
        return a, b, c, 1 / (x * x + 1)


class Shapes(nn.Module):
    def forward(self, x):
        a, b = x.split([1, 3], dim=2)
        parts = torch.cat([b, a], 2).permute(2, 0, 1).reshape(4, -1)
        rows = torch.stack([x[:, 1], x[:, -1]], 1).transpose(0, 1).flatten(1)
        mask = torch.ones(3, 3, dtype=torch.bool).tril()
        hidden = x[:, :, 1:].unsqueeze(1).squeeze(1).masked_fill(~mask, 0.0)
        return (
            parts,
            rows,
            hidden,
            x[:, ::2],
            x[:, :1].expand(-1, 5, -1),
            torch.full((2,), 3.0, dtype=x.dtype) + x.sum(),
        )


class Reductions(nn.Module):
    def forward(self, x):
        return (
            x.sum(), x.sum(1), x.mean((0, 2), keepdim=True), x.amax(2), x.var(1), x.std(2), x.amin((0, 1)),
            x.var(0, unbiased=False),
        )  # fmt: skip


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(3, 3), nn.Flatten())

    def forward(self, x):
        return torch.erfc(self.deep(x)) + torch.linalg.det(x) + torch.erfc(x)


class Sorted(nn.Module):
    def forward(self, x):
        return x.sort()[0]


class Masked(nn.Module):
    def forward(self, x):
        return x[x > 0]


def random(*shape: int):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def conv_net():
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, 2, 1, groups=2),
        nn.GroupNorm(3, 6), nn.AvgPool2d(2, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip
    net.double()(random(4, 2, 8, 8))  # statistics that are not 0 and 1
    return net


CASES = {
    "mlp": lambda: (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 3)), (random(5, 4),)),
    "conv": lambda: (conv_net(), (random(2, 2, 8, 8),)),
    "conv1d": lambda: (
        nn.Sequential(nn.Conv1d(2, 4, 3, dilation=2), nn.BatchNorm1d(4), nn.MaxPool1d(2), nn.AvgPool1d(2)),
        (random(2, 2, 16),),
    ),
    "adaptive": lambda: (nn.Sequential(nn.AdaptiveAvgPool2d((2, 4))), (random(2, 3, 8, 8),)),
    "encoder": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (random(2, 3, 8),)),
    "encoder_first": lambda: (
        nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", norm_first=True),
        (random(3, 2, 8),),
    ),
    "attention": lambda: (Attention(), (random(2, 3, 8),)),
    "words": lambda: (Words(), (torch.tensor([[1, 2, 3], [4, 10, 0]]),)),
    "norms": lambda: (nn.Sequential(nn.LayerNorm((3, 4)), nn.LayerNorm(4, bias=False)), (random(2, 3, 4),)),
    "activations": lambda: (Activations(), (random(3, 4),)),
    "elements": lambda: (Elements(), (random(3, 4), random(4, 4)[:3] * 2)),
    "shapes": lambda: (Shapes(), (random(2, 3, 4),)),
    "reductions": lambda: (Reductions(), (random(2, 3, 4),)),
}

BACKENDS = {"jax": ml.JaxBackend, "numpy": ml.NumpyBackend, "torch": ml.TorchBackend}


def ran(imported: Any, backend: Any, arrays: tuple) -> list[np.ndarray]:
    compiled = ml.compile(imported.model, backend, inference=True)
    inputs = {k: backend.array(np.asarray(a)) for k, a in zip(compiled.input_keys, arrays, strict=True)}
    params = _tree(backend, imported.params)
    result = compiled.evaluate(params, inputs)
    return [np.asarray(backend.to_numpy(result[k])) for k in compiled.output_keys]


def _tree(backend, params):
    return {k: _tree(backend, v) if isinstance(v, dict) else backend.array(v) for k, v in params.items()}


@cache
def traced(case: str) -> Any:
    """Tracing is what takes the time."""
    torch.manual_seed(0)
    module, inputs = CASES[case]()
    module.double().eval()
    with torch.no_grad():
        return from_torch(module, inputs), inputs, module(*inputs)


RUNS = [
    *((case, "jax", "float64") for case in CASES),
    *((case, "jax", "float32") for case in ("mlp", "conv", "encoder", "words")),
    *((case, "numpy", "float64") for case in CASES if case not in ("encoder_first", "adaptive")),
    *((case, "torch", "float64") for case in ("mlp", "conv", "attention", "shapes")),
]


@pytest.mark.thin(9)
@pytest.mark.parametrize(("case", "backend", "dtype"), RUNS)
def test_values_are_those_of_torch(case: str, backend: str, dtype: str) -> None:
    imported, inputs, expected = traced(case)
    expected = expected if isinstance(expected, tuple) else (expected,)
    results = ran(imported, BACKENDS[backend](dtype=dtype), tuple(i.numpy() for i in inputs))
    tolerance = 1e-10 if dtype == "float64" else 2e-5
    assert len(results) == len(expected)
    for got, want in zip(results, expected, strict=True):
        assert got.shape == tuple(want.shape)
        np.testing.assert_allclose(got, want.numpy(), rtol=tolerance, atol=tolerance)


def test_parameters_have_the_names_of_torch() -> None:
    module = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    imported = from_torch(module, (torch.randn(2, 3, 8),))
    weight = imported.params["layers"]["item_1"]["linear1"]["weight"]
    np.testing.assert_array_equal(weight, module.layers[1].linear1.weight.detach().numpy())
    compiled = ml.compile(imported.model)
    assert "layers.item_1.self_attn.out_proj.bias" in compiled.shapes
    assert module.training  # left as it was
    started = compiled.randomize_params(seed=0)["layers"]["item_1"]["linear1"]["weight"]
    np.testing.assert_array_equal(np.asarray(started), weight)


def test_a_shared_weight_is_one_parameter() -> None:
    imported = from_torch(Words(), (torch.tensor([[1, 2]]),))
    assert set(imported.params) in ({"places", "table"}, {"places", "head"})


def test_an_open_batch() -> None:
    torch.manual_seed(0)
    batch = torch.export.Dim("batch")
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3))
    imported = from_torch(module, (torch.randn(2, 1, 6, 6),), dynamic_shapes=({0: batch},))
    compiled = ml.compile(imported.model, ml.JaxBackend())
    for count in (1, 5):
        x = torch.randn(count, 1, 6, 6)
        got = compiled.evaluate(imported.params, {compiled.input_keys[0]: x.numpy()})["output"]
        np.testing.assert_allclose(np.asarray(got), module(x).detach().numpy(), rtol=2e-5, atol=2e-5)


def test_gradients_are_those_of_torch() -> None:
    torch.manual_seed(0)
    module, inputs = conv_net().eval(), (random(2, 2, 8, 8),)
    module(*inputs).sum().backward()
    imported = from_torch(module, inputs)
    backend = ml.JaxBackend(dtype="float64")
    compiled = ml.compile(imported.model, backend)
    params = _tree(backend, imported.params)
    x = {compiled.input_keys[0]: backend.array(inputs[0].numpy())}
    _, gradients = compiled.evaluate(params, x, output_gradients={"output": backend.ones(2, 3)})
    for name, parameter in module.named_parameters():
        part, key = name.split(".")
        got = np.asarray(gradients[f"item_{part}"][key])
        np.testing.assert_allclose(got, parameter.grad.numpy(), rtol=1e-10, atol=1e-10)


def test_every_unknown_operation_is_named_with_its_module() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Unknown()

        def forward(self, x):
            return torch.lgamma(self.inner(x))

    with pytest.raises(UnsupportedTorchError) as caught:
        from_torch(Outer(), (torch.randn(3, 3),))
    text = str(caught.value)
    for word in (
        "aten::erfc",
        "in inner (",
        "test_from_torch.py:",
        "aten::lgamma",
        "the module itself",
        "det",
    ):
        assert word in text


@pytest.mark.parametrize(
    ("module", "inputs", "words"),
    [
        (nn.Conv3d(2, 3, 3), (torch.zeros(1, 2, 5, 5, 5),), "3 dimensions of space"),
        (Sorted(), (torch.zeros(2, 1025),), "1,025 elements; up to 1,024"),
        (Masked(), (torch.zeros(2, 3),), "a mask, which picks"),
    ],
)
def test_what_an_operation_cannot_do_is_said(module, inputs, words: str) -> None:
    with pytest.raises(UnsupportedTorchError, match=words):
        from_torch(module, inputs)


@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_log1p_is_exact_near_zero(backend: str) -> None:
    class Log1p(nn.Module):
        def forward(self, x):
            return torch.log1p(x)

    x = torch.tensor([0.0, 1e-18, -1e-12, 0.0199, -0.0201, 3.0, -0.9, float("inf")], dtype=torch.float64)
    (got,) = ran(from_torch(Log1p(), (x,)), BACKENDS[backend](dtype="float64"), (x.numpy(),))
    np.testing.assert_allclose(got, np.log1p(x.numpy()), rtol=1e-13)


def test_a_module_that_changes_its_buffers_is_refused() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count.add_(1.0)
            return x + self.count

    with pytest.raises(UnsupportedTorchError, match="changes count in place"):
        from_torch(Counter(), (torch.zeros(2),))


def test_bad_arguments() -> None:
    with pytest.raises(ml.WiringError, match=r"must be a torch\.nn\.Module"):
        from_torch(lambda x: x, (torch.zeros(1),))
    with pytest.raises(ml.WiringError, match="must be a tuple"):
        from_torch(nn.ReLU(), torch.zeros(1))
    with pytest.raises(ml.WiringError, match="cannot trace"):
        from_torch(nn.Linear(3, 2), (torch.zeros(1, 4),))

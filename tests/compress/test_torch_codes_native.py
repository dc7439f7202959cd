"""Products of few vectors with a PyTorch layer's codes in compiled code, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from capibara.compress.codecs.fixed import Parts
from capibara.compress.formats import get_format
from capibara.native.loading import open_library

torch: Any = pytest.importorskip("torch")
from capibara.compress import torch_codes

RANDOM = np.random.default_rng(5)
pytestmark = pytest.mark.skipif(
    open_library()[0] is None, reason=f"no native library to test: {open_library()[1]}"
)


def make(kind: str, rows: int, length: int, group: int, exact: int = 0) -> tuple[Any, np.ndarray]:
    """A piece, and its matrix [rows, length] in float64."""
    table = RANDOM.normal(size=256).astype(np.float32)
    scale_codes = RANDOM.integers(0, 256, (rows, -(-length // group)), np.uint8)
    spread = np.repeat(table[scale_codes].astype(np.float64), group, 1)[:, :length]
    if kind == "int8":
        codes, levels = RANDOM.integers(-127, 128, (rows, length), np.int8), None
        matrix = codes * spread
    else:
        four = RANDOM.integers(0, 16, (rows, length + length % 2), np.uint8)
        levels = np.sort(RANDOM.normal(size=16)).astype(np.float32)
        codes = four[:, ::2] | four[:, 1::2] << 4
        matrix = levels.astype(np.float64)[four[:, :length]] * spread
    positions = np.sort(RANDOM.choice(rows * length, exact, replace=False)).astype(np.int64)
    numbers = RANDOM.normal(size=exact).astype(np.float32)
    matrix.reshape(-1)[positions] = numbers
    parts = Parts(
        kind, (rows, length), length, group, False, codes, scale_codes, table, levels, positions,
        numbers.view(np.uint32),
    )  # fmt: skip
    return torch_codes.CodedPiece(parts, get_format("F32")), matrix


@pytest.mark.parametrize("way", ["native", "slabs"])
@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize(
    ("rows", "length", "group", "exact"), [(9, 192, 64, 0), (7, 75, 32, 5), (5, 33, 7, 2)]
)
def test_products_and_gradients(
    way: str, kind: str, rows: int, length: int, group: int, exact: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "slabs":
        monkeypatch.setattr(torch_codes, "_kernels", lambda: None)
    piece, matrix = make(kind, rows, length, group, exact)
    for count in (1, 3, 8, 9):
        for across in (False, True):
            w = matrix if across else matrix.T
            x = RANDOM.normal(size=(count, len(w))).astype(np.float32)
            # Not contiguous: a layer may be given a part of a larger array.
            given = torch.from_numpy(np.repeat(x, 2, 1))[:, ::2].requires_grad_()
            out = torch_codes._Product.apply(given, piece, across)
            bound = 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(w)) * max(1.0, np.sqrt(length) / 4)
            assert (np.abs(out.detach().numpy() - x.astype(np.float64) @ w) <= bound + 1e-6).all()
            back = RANDOM.normal(size=out.shape).astype(np.float32)
            (slope,) = torch.autograd.grad(out, given, torch.from_numpy(back))
            np.testing.assert_allclose(slope.numpy(), back @ w.T, rtol=1e-4, atol=1e-4 * np.abs(w).max())


def test_tables_of_earlier_versions_are_read() -> None:
    """They had only the scales that occur."""
    piece, matrix = make("int8", 6, 40, 8)
    state = piece.state_dict()
    used, places = np.unique(state["scale_codes"].numpy(), return_inverse=True)
    earlier = state | {
        "table": state["table"][torch.from_numpy(used.astype(np.int64))],
        "scale_codes": torch.from_numpy(places.reshape(state["scale_codes"].shape).astype(np.uint8)),
    }
    other, _ = make("int8", 6, 40, 8)
    other.load_state_dict(earlier)
    np.testing.assert_allclose(other.numbers(0, 6).numpy(), matrix, rtol=1e-6)


def test_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    piece, matrix = make("int8", 6, 40, 8)
    x = torch.randn(2, 40)
    assert piece.by_kernel(x, False) is not None
    assert piece.by_kernel(torch.randn(9, 40), False) is None  # many
    assert piece.by_kernel(x[:0], False) is None
    assert piece.by_kernel(x.double(), False) is None
    assert piece.by_kernel(x.to("meta"), False) is None
    monkeypatch.setattr(torch_codes, "_WORTH_THREADS", 1)
    large, wide = make("nf4", 1100, 1024, 64)
    y = torch.randn(1, 1024)
    np.testing.assert_allclose(large.by_kernel(y, False), y.numpy() @ wide.T, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(piece.by_kernel(x, False), x.numpy() @ matrix.T, rtol=1e-4, atol=1e-2)


def test_what_traces_sees_operations_of_torch() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    piece, matrix = make("nf4", 6, 40, 8)
    traced = make_fx(lambda x: torch_codes._Product.apply(x, piece, False))(torch.randn(2, 40))
    other = torch.randn(2, 40)
    np.testing.assert_allclose(traced(other).detach(), other.numpy() @ matrix.T, rtol=1e-4, atol=1e-4)

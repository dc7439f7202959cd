"""A compressed torch module stands in for the original: names, attributes, functional calls and export."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capibara.compress import CompressedModel, CompressionProfile, ModelCompressionAPI
from capibara.compress.container import ArchiveWriter
from capibara.compress.errors import CompressError
from capibara.compress.formats import get_format

torch = pytest.importorskip("torch")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 64}
        self.first = torch.nn.Linear(64, 96)
        self.last = torch.nn.Linear(96, 5)
        self.shift = torch.nn.Parameter(torch.ones(5))
        self.register_buffer("scale", torch.full((5,), 2.0))

    @property
    def device(self) -> Any:
        return self.shift.device

    def forward(self, x: Any) -> Any:
        return self.last(torch.relu(self.first(x))) * self.scale + self.shift

    def generate(self, x: Any, *, steps: int) -> Any:
        return torch.stack([self(x)] * steps)


def compressed(**options: Any) -> Any:
    torch.manual_seed(0)
    api = ModelCompressionAPI(CompressionProfile(strategy="int8", smallest=64))
    return api.compress(Net(), **options)


def test_names_are_those_of_the_original_everywhere() -> None:
    small, net = compressed(), Net()
    assert list(small.state_dict()) == list(net.state_dict())
    assert [n for n, _ in small.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert [n for n, _ in small.named_buffers()] == ["scale"]
    whole = torch.nn.Sequential(small)
    assert list(whole.state_dict()) == [f"0.{n}" for n in net.state_dict()]
    whole.load_state_dict({f"0.{n}": v for n, v in net.state_dict().items()})
    x = torch.randn(3, 64)
    torch.testing.assert_close(small(x), net(x))
    double = copy.deepcopy(small).double()
    torch.testing.assert_close(double(x.double()), net.double()(x.double()))
    assert small.shift.dtype == torch.float32
    assert not small.eval().module.training


@pytest.mark.parametrize("names", ["named_parameters", "state_dict"])
def test_functional_calls(names: str) -> None:
    small, x = compressed(), torch.randn(3, 64)
    own = dict(small.named_parameters()) if names == "named_parameters" else small.state_dict()
    before = small(x).detach()
    zeros = {n: torch.zeros_like(v) for n, v in own.items()}
    assert not torch.func.functional_call(small, zeros, (x,)).any()
    torch.testing.assert_close(small(x).detach(), before)
    loss = lambda p: torch.func.functional_call(small, p, (x,)).sum()  # noqa: E731
    grads = torch.func.grad(loss)({n: v.detach() for n, v in small.named_parameters()})
    torch.testing.assert_close(grads["shift"], torch.full((5,), 3.0))
    assert grads["first.weight"].any()


def test_what_else_the_original_has_is_there() -> None:
    small, x = compressed(), torch.randn(3, 64)
    assert small.config == {"width": 64}
    assert small.device == torch.device("cpu")
    torch.testing.assert_close(small.generate(x, steps=2)[1], small(x))
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = small.nothing_like_it


@pytest.mark.parametrize("decode", [True, False])
def test_export(decode: bool) -> None:
    small, x = compressed(decode=decode), torch.randn(3, 64)
    program = torch.export.export(small, (x,), dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    torch.export.save(program, file := io.BytesIO())
    file.seek(0)
    loaded, more = torch.export.load(file).module(), torch.randn(7, 64)
    torch.testing.assert_close(loaded(more), small(more))
    torch.testing.assert_close(program.module()(x), small(x))
    if not decode:
        assert small.running.quantized
        # Codes are exported, and not the numbers that they stand for.
        stored = [*program.state_dict.values(), *program.constants.values()]
        assert sum(v.nbytes for v in stored if v.dtype == torch.float32) < 64 * 96


@pytest.mark.parametrize("rows", [None, 40])
def test_export_of_a_table_in_codes(rows: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from capibara.compress.container import writer

    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(100, 64)

        def forward(self, words: Any) -> Any:
            return self.table(words) * 2

    if rows is not None:  # several pieces
        monkeypatch.setattr(writer, "CHUNK", rows * 64)
    torch.manual_seed(0)
    api = ModelCompressionAPI(CompressionProfile(strategy="int8", smallest=64))
    small = api.compress(Words(), decode=False)
    assert small.running.quantized
    assert len(small.table.coded.pieces) == (1 if rows is None else 3)
    words = torch.tensor([[0, 99, 41], [5, 39, 40]])
    program = torch.export.export(small, (words,)).module()
    torch.testing.assert_close(program(words), small(words))
    with pytest.raises(IndexError, match="expected 0 to 99"):
        small(words - 1)
    if rows is None:
        for wrong in (words - 1, words + 1):
            with pytest.raises((IndexError, RuntimeError)):
                program(wrong)


def test_models_of_a_folder(tmp_path: Path) -> None:
    net = Net()
    state = {n: v.numpy() for n, v in net.state_dict().items()}
    form = get_format("F32")

    def write(path: Path, names: list[str]) -> None:
        with ArchiveWriter(path, {"made": path.name}) as archive:
            for name in names:
                archive.add(name, state[name].reshape(-1).view(np.uint32), form, state[name].shape)

    with pytest.raises(CompressError, match=r"no \*\.capi file"):
        CompressedModel.load(tmp_path)
    for i in range(2):
        write(tmp_path / f"model-{i}.capi", list(state)[i::2])
    for name, array in CompressedModel.load(tmp_path).model.items():
        np.testing.assert_array_equal(array, state[name])
    x = torch.randn(3, 64)
    torch.testing.assert_close(CompressedModel.load(tmp_path, Net())(x), net(x))
    jax = pytest.importorskip("jax")
    from capibara.compress import load_sharded

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for shardings in (sharding, dict.fromkeys(state, sharding), lambda name, shape: sharding):
        arrays = load_sharded(tmp_path, shardings)
        assert set(arrays) == set(state)
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, state[name])
    with pytest.raises(CompressError, match="there is none for"):
        load_sharded(tmp_path, {"shift": sharding})
    write(tmp_path / "again.capi", ["shift"])
    for load in (CompressedModel.load, lambda path: load_sharded(path, sharding)):
        with pytest.raises(CompressError, match="'shift' is in"):
            load(tmp_path)
    (tmp_path / "one").mkdir()
    write(tmp_path / "one" / "model.capi", list(state))
    assert set(load_sharded(tmp_path / "one", sharding)) == set(CompressedModel.load(tmp_path / "one").model)

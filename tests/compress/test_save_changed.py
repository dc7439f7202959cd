"""Saving a module that was trained, loaded or rebuilt after it was compressed: the file holds what the module does."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from capibara.compress.compressed import CompressedModel
from capibara.compress.container import Archive
from capibara.compress.model_api import ModelCompressionAPI
from capibara.compress.profile import CompressionProfile

torch: Any = pytest.importorskip("torch")


class Tied(torch.nn.Module):
    """An embedding that is the head as well, and a layer between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(90, 64)
        self.middle = torch.nn.Linear(64, 64)
        self.norm = torch.nn.BatchNorm1d(64)
        self.head = torch.nn.Linear(64, 90, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Any) -> Any:
        return self.head(self.norm(self.middle(self.embed(tokens))))


def compressed(strategy: str = "int8", decode: bool = True, model: Any = None) -> Any:
    torch.manual_seed(0)
    profile = CompressionProfile(strategy=strategy, smallest=1024)
    return ModelCompressionAPI(profile).compress(model or Tied(), decode=decode)


def change(tensor: Any) -> None:
    # As optimizers of some packages do; a tensor's counter of versions does not see it.
    tensor.data.add_(0.5)


def same(a: Any, b: Any) -> None:
    a, b = a.state_dict(), b.state_dict()
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0)


def decoded(made: Any) -> Any:
    from capibara.compress.torch_codes import decoded_module

    return decoded_module(made.module)


def codecs(path: Path) -> dict[str, str]:
    with Archive(path) as archive:
        return {e.name: e.codec if e.same_as is None else f"= {e.same_as}" for e in archive}


@pytest.mark.filterwarnings("error")
def test_what_was_not_changed_is_the_same_file(tmp_path: Path) -> None:
    for made in (compressed(), compressed(decode=False)):
        made.eval()(torch.arange(9))
        for what in (made, copy.deepcopy(made), made.half()):
            assert what.save(tmp_path / "m.capi").read_bytes() == made.path.read_bytes()


def test_a_trained_tensor_is_saved_without_loss(tmp_path: Path) -> None:
    made = compressed()
    before = made.path.read_bytes()
    change(made.module.middle.weight)
    with pytest.warns(
        UserWarning, match=r"1 tensors \(middle.weight\) have changed since compression.*Remedy"
    ):
        path = made.save(tmp_path / "m.capi")
    assert codecs(path) == {**codecs(made.path), "middle.weight": "lossless"}
    assert made.path.read_bytes() == before
    with Archive(path) as new, Archive(made.path) as old:
        # What stayed is not rounded a second time.
        for chunk, kept in zip(new["embed.weight"].chunks, old["embed.weight"].chunks, strict=True):
            assert chunk[2:] == kept[2:]
        assert [problem for _, problem in new.verify() if problem] == []
    again: Any = CompressedModel.load(path, Tied())
    same(again, made)
    # What was measured is no longer true; what was aimed at is.
    assert again.profile == made.profile
    assert np.isnan(again.stats.weight_error)


def test_a_step_of_training(tmp_path: Path) -> None:
    made = compressed()
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    made(torch.arange(20)).square().mean().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match=r"3 tensors \(embed.weight, middle.weight, head.weight\)"):
        path = made.save(tmp_path / "m.capi")
    assert codecs(path)["head.weight"] == "= embed.weight"
    same(CompressedModel.load(path, Tied()), made)


@pytest.mark.filterwarnings("error")
def test_what_lost_nothing_before_needs_no_warning(tmp_path: Path) -> None:
    made = compressed()
    made.train()(torch.arange(20))  # moves the running statistics
    path = made.save(tmp_path / "m.capi")
    assert codecs(path) == codecs(made.path)
    same(CompressedModel.load(path, Tied()), made)


@pytest.mark.filterwarnings("error")
def test_another_codec_without_loss_stays(tmp_path: Path) -> None:
    made = compressed("exponent")
    change(made.module.middle.weight)
    path = made.save(tmp_path / "m.capi")
    assert codecs(path)["middle.weight"] == codecs(made.path)["middle.weight"]
    same(CompressedModel.load(path, Tied()), made)


def test_other_types_and_names(tmp_path: Path) -> None:
    made = compressed()
    made.double()
    change(made.module.middle.weight)
    with pytest.warns(UserWarning, match=r"3 tensors \(middle.weight, embed.weight, head.weight\)"):
        path = made.save(tmp_path / "m.capi")
    same(CompressedModel.load(path, Tied().double()), made)
    made = compressed()
    made.module.middle = torch.nn.Linear(64, 64, bias=False)
    made.module.extra = torch.nn.Linear(3, 2)
    made.module.head.weight = torch.nn.Parameter(made.module.head.weight.detach() + 1)
    with pytest.warns(UserWarning, match=r"2 tensors \(middle.weight, head.weight\)"):
        path = made.save(tmp_path / "m.capi")
    held = CompressedModel.load(path).model
    assert held.keys() == made.state_dict().keys()
    for name, value in made.state_dict().items():
        np.testing.assert_array_equal(held[name], value.numpy())


def test_quantized(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 64))
    made = compressed(decode=False, model=model)
    assert made.running.quantized == ("0.weight", "2.weight")
    change(made.module[0].bias)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        path = made.save(tmp_path / "m.capi")
    assert codecs(path) == codecs(made.path)
    same(CompressedModel.load(path, model, decode=False), made)
    # Codes of another model, which has the same names.
    other = compressed(
        decode=False, model=torch.nn.Sequential(*map(copy.deepcopy, model)).requires_grad_(False)
    )
    other.module[2].coded.pieces[0].codes += 1
    made.load_state_dict(other.state_dict())
    with pytest.warns(UserWarning, match=r"1 tensors \(2.weight\)"):
        path = made.save(tmp_path / "m.capi")
    again: Any = CompressedModel.load(path, model)
    same(again, decoded(made))


def test_over_its_own_file(tmp_path: Path) -> None:
    made: Any = CompressedModel.load(compressed().save(tmp_path / "m.capi"), Tied())
    size = made.stats.compressed_bytes
    change(made.module.middle.weight)
    with pytest.warns(UserWarning, match="where the archive had"):
        assert made.save(made.path) == made.path
    assert made.stats.compressed_bytes == made.path.stat().st_size > size
    same(CompressedModel.load(made.path, Tied()), made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.save(tmp_path / "again.capi")  # nothing is different now
    assert (tmp_path / "again.capi").read_bytes() == made.path.read_bytes()


def test_a_tree_is_saved_as_it_was_compressed(tmp_path: Path) -> None:
    tree = {"w": np.random.default_rng(0).normal(size=(90, 90)).astype(np.float32)}
    made = compressed(model=tree)
    made.model["w"][:] = 0
    assert made.save(tmp_path / "m.capi").read_bytes() == made.path.read_bytes()

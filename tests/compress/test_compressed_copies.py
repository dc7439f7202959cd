"""Copies of compressed models, and names of their parts."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import numpy as np
import pytest

from capibara.compress.compressed import CompressedModel
from capibara.compress.errors import CompressError
from capibara.compress.model_api import ModelCompressionAPI
from capibara.compress.profile import CompressionProfile

API = ModelCompressionAPI(CompressionProfile(target_compression_ratio=3))


def compressed_tree() -> CompressedModel:
    return API.compress({"w": np.random.default_rng(0).normal(size=(90, 90)).astype(np.float32)})


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy])
def test_a_copy_keeps_the_file_of_one_that_is_gone(how, tmp_path) -> None:
    first = compressed_tree()
    path, kept = first.path, how(first)
    del first
    gc.collect()
    assert path.exists()
    np.testing.assert_array_equal(
        CompressedModel.load(kept.save(tmp_path / "a.capi")).model["w"], kept.model["w"]
    )
    del kept
    gc.collect()
    assert not path.exists()


def test_pickling_says_what_to_do_instead() -> None:
    with pytest.raises(CompressError, match=r"Remedy: save\(path\)"):
        pickle.dumps(compressed_tree())


def test_a_deep_copy_of_a_module_has_numbers_of_its_own() -> None:
    torch = pytest.importorskip("torch")
    made: Any = API.compress(torch.nn.Linear(90, 90))
    other = copy.deepcopy(made)
    with torch.no_grad():
        other.module.weight.zero_()
    assert type(other) is type(made)
    assert made.module.weight.abs().sum() > 0
    assert list(dict(other.named_parameters())) == list(dict(made.named_parameters()))
    other.load_state_dict(made.state_dict())
    assert torch.equal(other.module.weight, made.module.weight)


def test_a_part_of_the_original_may_be_called_module() -> None:
    torch = pytest.importorskip("torch")

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(90, 90)

        def forward(self, x):
            return self.module(x)

    made: Any = API.compress(Wrapped())
    state = {name: torch.zeros_like(value) for name, value in made.state_dict().items()}
    assert list(state) == ["module.weight", "module.bias"]
    made.load_state_dict(state)
    assert made.module.module.weight.abs().sum() == 0
    parent = torch.nn.Sequential(made)
    parent.load_state_dict({f"0.{name}": torch.ones_like(value) for name, value in state.items()})
    assert bool((made.module.module.weight == 1).all())
    with pytest.raises(RuntimeError, match="nonsense"):
        made.load_state_dict({**state, "nonsense": torch.zeros(1)})


@pytest.mark.parametrize("given", [{"mode": []}, {"exclude": 5}, {"exclude": None}])
def test_settings_of_the_wrong_kind(given) -> None:
    with pytest.raises(CompressError, match=next(iter(given))):
        CompressionProfile(**given)


def test_ratios_that_are_one_number() -> None:
    with pytest.raises(CompressError, match="ratios: got 5"):
        API.progressive_compression({"w": np.ones((8, 8), np.float32)}, ratios=5)  # type: ignore[arg-type]

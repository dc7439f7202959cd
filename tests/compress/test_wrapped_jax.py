"""A compressed JAX model has the attributes and methods of the original, with its own numbers."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np
import pytest

from capibara.compress import CompressionProfile, ModelCompressionAPI
from capibara.compress.errors import CompressError


@pytest.mark.parametrize("decode", [True, False])
def test_of_jax_models_what_else_the_original_has_is_there(decode: bool) -> None:
    jax = pytest.importorskip("jax")
    jnp = jax.numpy

    @dataclasses.dataclass(frozen=True)
    class Tree:
        weight: Any
        config: dict[str, int]
        device: str = "cpu:0"

        def __call__(self, x: Any) -> Any:
            return jnp.tanh(x @ self.weight)

        def generate(self, x: Any, *, steps: int) -> Any:
            return jnp.stack([self(x + i) for i in range(steps)])

    jax.tree_util.register_dataclass(Tree, ["weight"], ["config", "device"])

    class Holder:
        config: ClassVar = {"width": 64}
        device = "cpu:0"

        def __init__(self, params: Any) -> None:
            self.params = params

        def apply(self, params: Any, x: Any) -> Any:
            return jnp.tanh(x @ params["weight"])

        def generate(self, x: Any, *, steps: int) -> Any:
            return jnp.stack([self.apply(self.params, x + i) for i in range(steps)])

        @functools.cached_property
        def total(self) -> Any:
            return self.params["weight"].sum()

        @property
        def slow(self) -> Any:
            raise AssertionError("nobody asked for it")

    weight = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), "float32")
    api = ModelCompressionAPI(CompressionProfile(strategy="int4", smallest=64))
    for model in (Tree(weight, {"width": 64}), Holder({"weight": weight})):
        if isinstance(model, Holder):
            assert np.isfinite(model.total)
        small = api.compress(model, decode=decode)
        assert small.config == {"width": 64}
        assert small.device == "cpu:0"
        x = jnp.ones((3, 64))
        both = small.generate(x, steps=2)
        # Its own numbers, and not the original's.
        np.testing.assert_allclose(both[0], small(x), rtol=1e-4, atol=1e-5)
        assert np.abs(both[0] - model.generate(x, steps=1)[0]).max() > 1e-3
        with pytest.raises(AttributeError, match="nothing_like_it"):
            _ = small.nothing_like_it
        if decode and isinstance(model, Holder):
            np.testing.assert_allclose(small.total, small.model["weight"].sum(), rtol=1e-5)
            assert small.total != model.total
        assert copy.deepcopy(small).config == {"width": 64}
    nested = api.compress({"weight": weight}, apply=lambda params, x: x @ params["weight"])
    assert not hasattr(nested, "keys")


def test_methods_that_jax_cannot_trace_say_so() -> None:
    jax = pytest.importorskip("jax")

    class Holder:
        def __init__(self, params: Any) -> None:
            self.params = params

        def apply(self, params: Any, x: Any) -> Any:
            return x @ params["weight"]

        def sign(self, x: Any) -> Any:
            return 1 if self.apply(self.params, x).sum() > 0 else -1

    model = Holder({"weight": jax.numpy.ones((64, 64))})
    api = ModelCompressionAPI(CompressionProfile(strategy="int8", smallest=64))
    assert api.compress(model).sign(jax.numpy.ones(64)) == 1
    with pytest.raises(CompressError, match="decode=True"):
        api.compress(model, decode=False).sign(jax.numpy.ones(64))

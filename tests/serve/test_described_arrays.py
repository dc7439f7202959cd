"""A model's arrays before they are there, against those that are traced."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from small_models import KINDS, SMALL

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.serve.engine.arrays import describe_arrays


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_as_they_would_be_made(kind: str, dtype: str):
    changes: dict[str, Any] = SMALL | KINDS[kind] | {"precision.param_dtype": dtype}
    model = ModularCapibaraModel(ModularModelConfig.from_dict({}, changes))
    found, expected = describe_arrays(model), jax.eval_shape(lambda: model.init(0))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for own, traced in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (own.shape, own.dtype, own.weak_type) == (traced.shape, traced.dtype, traced.weak_type)

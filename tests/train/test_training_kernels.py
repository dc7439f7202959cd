"""Steps that take the compiled kernels for training are those of plain JAX."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import native
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.train import step as steps
from capibara.train.optimizer import build_optimizer
from capibara.train.state import TrainState

SIZES = [
    "model.embed_dim=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.mlp_dim=80",
    "model.num_layers=2",
]
FORMS = {
    "unrolled": ["model.scan_layers=unroll"],
    "scanned": ["model.scan_layers=scan"],
    "products are kept": ["model.scan_layers=scan", "model.remat=dots"],
    "all is computed again": ["model.scan_layers=unroll", "model.remat=full"],
    "two microbatches": ["train.gradient_accumulation_steps=2"],
}


def trained(overrides: list[str], count: int) -> tuple[list[dict[str, float]], Any, str]:
    """Metrics of each step, the parameters at the end, and the program."""
    config = ModularModelConfig.from_toml("demo", overrides=[*SIZES, "train.batch_size=16", *overrides])
    model = ModularCapibaraModel(config)
    params, state = model.init(0)
    optimizer = build_optimizer(config, param_axes=model.param_axes)
    now = TrainState.create(params, state, optimizer.init(params), seed=0)
    parts = config.train.gradient_accumulation_steps
    step = steps.make_train_step(model, optimizer)
    shape = (parts, 16 // parts, config.train.sequence_length + 1)
    random = np.random.default_rng(0)
    batches = [{"tokens": jnp.asarray(random.integers(0, 256, shape), jnp.int32)} for _ in range(count)]
    program = step.lower(now, batches[0]).as_text()
    metrics = []
    for batch in batches:
        now, found = step(now, batch)
        metrics.append({name: float(value) for name, value in found.items()})
    return metrics, now.params, program


@pytest.mark.thin(3)
@pytest.mark.skipif(native.problem() is not None, reason=f"no native kernels here: {native.problem()}")
@pytest.mark.parametrize("form", FORMS)
def test_steps_are_those_of_plain_jax(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    got, params, program = trained(FORMS[form], 4)
    for target in (
        "products",
        "products_of_rows",
        "products_of_matrices",
        "rms_norm_backward",
        "gated",
        "turned",
    ):
        assert f"capibara_{target}" in program
    monkeypatch.setattr(steps, "training_kernels", contextlib.nullcontext)
    want, plain, other = trained(FORMS[form], 4)
    assert "capibara_products" not in other
    for one, two in zip(got, want, strict=True):
        assert one == pytest.approx(two, rel=2e-5)
    # Adam divides by the size of the gradient: where there is hardly any, its rounding is seen.
    for one, two in zip(jax.tree.leaves(params), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, two, atol=2e-4)

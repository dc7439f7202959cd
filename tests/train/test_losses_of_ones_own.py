"""A loss of one's own for a model that has one, and settings of the optimizer beside those of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from tiny_model import TinyModel
from tiny_run import tiny_config

from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError
from capibara.train import TpuDistributedTrainer
from capibara.train.frameworks import WithLoss, as_model
from capibara.train.functional import of_pair
from capibara.train.losses import cross_entropy
from capibara.train.options import check_axes, chosen_optimizer


@pytest.mark.parametrize("weighted", [False, True])
def test_no_token_counts_as_predicted_from_another_text(weighted: bool) -> None:
    random = np.random.default_rng(0)
    table = random.normal(size=(11, 11)).astype(np.float32)
    model = SimpleNamespace(apply=lambda params, inputs, **_: (jax.numpy.array(params)[inputs["tokens"]], {}))
    batch: dict[str, Any] = {
        "tokens": random.integers(0, 11, (4, 9)).astype(np.int32),
        "segments": np.array([[1] * 9, [1] * 4 + [2] * 5, [1] * 3 + [0] * 6, [0] * 9], np.int32),
    }
    if weighted:
        batch["weights"] = random.random((4, 9)).astype(np.float32)
    summed = total = 0.0
    for row, segments in enumerate(batch["segments"]):
        for at in range(1, 9):
            if segments[at] == segments[at - 1] != 0:
                logits, target = table[batch["tokens"][row, at - 1]], batch["tokens"][row, at]
                weight = batch["weights"][row, at] if weighted else 1.0
                summed += weight * (np.log(np.exp(logits).sum()) - logits[target])
                total += weight
    loss = jax.jit(lambda batch: WithLoss(model, cross_entropy).loss(table, batch, state={})[0])(batch)
    assert float(loss) == pytest.approx(summed / total, rel=1e-5)


class OnMesh(TinyModel):
    """What the trainer knows Capibara's own model by."""

    pretrained = tokenizer_files = None
    state: Any = None  # pyright: ignore

    def __init__(self, config: Any, *, mesh: Any = None, rules: Any = None) -> None:
        super().__init__(config)
        self.mesh, self.backend = mesh, SimpleNamespace(rules=rules)

    def on_mesh(self, mesh: Any, rules: Any = None) -> OnMesh:
        return OnMesh(self.config, mesh=mesh, rules=rules)


@pytest.mark.parametrize("kind", [OnMesh, pytest.param(ModularCapibaraModel, marks=pytest.mark.slow)])
def test_a_model_with_another_loss_comes_back_as_it_was_given(kind: Any) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    options: dict[str, Any] = {"loss": cross_entropy, "use_gradient_checkpointing": True}
    made = TpuDistributedTrainer(kind(tiny_config("unused")), mesh, **options)
    assert made.model.config.model.remat == "full"
    assert made.model.loss_of is cross_entropy
    after = made.trained()
    assert type(after) is kind
    jax.tree.map(np.testing.assert_array_equal, after.params, made.params)


def test_axes_are_asked_of_the_model_under_the_loss() -> None:
    def mesh(axis: str) -> Any:
        return SimpleNamespace(shape={axis: 2})

    plain = TinyModel(tiny_config("unused"))
    with pytest.raises(ConfigError, match="positions of Capibara's own models"):
        check_axes(WithLoss(plain, cross_entropy), mesh("context"), named=False)
    check_axes(WithLoss(plain, cross_entropy), mesh("model"), named=False)  # it names its dimensions


def test_a_loss_and_names_for_a_model_of_functions() -> None:
    model = of_pair(lambda key: {"w": jax.numpy.ones((2, 3))}, lambda params, inputs: inputs @ params["w"])

    def other(outputs: Any, targets: Any) -> Any:
        return outputs.sum(-1)

    named = as_model(model, loss=other, axes={"w": ("embed", "mlp")})
    assert named.loss_of is other
    assert named.param_axes == {"w": ("embed", "mlp")}
    assert as_model(named).loss_of is other
    assert as_model(named).param_axes == {"w": ("embed", "mlp")}


def test_a_learning_rate_alone_does_not_change_the_optimizer() -> None:
    lion = TinyModel(tiny_config("unused", "optimizer.name=lion"))
    rest: dict[str, Any] = {"weight_decay": None, "max_grad_norm": None}
    with pytest.raises(ConfigError, match=r"learning_rate: .*optimizer\.name=lion.*optimizer='lion'"):
        chosen_optimizer(lion, lion, optimizer=None, learning_rate=1e-4, **rest)
    for optimizer in ("lion", "adamw"):
        chosen_optimizer(lion, lion, optimizer=optimizer, learning_rate=1e-4, **rest)
    adamw = TinyModel(tiny_config("unused"))
    chosen_optimizer(adamw, adamw, optimizer=None, learning_rate=1e-4, **rest)

"""The loss from hidden states and the head, against the loss from the model's logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import emulated
from other_process import run_apart
from small_models import quick_jit, small_config, small_params, small_tokens

from capibara.core import ModularCapibaraModel
from capibara.ops.loss import api

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied, with a soft cap": ("grouped", {"model.logit_softcap": 2.0}),
    "untied, with dropout": ("untied", {"model.dropout_rate": 0.3}),
    "codebooks": ("short", {"model.dropout_rate": 0.2, "model.logit_softcap": 5.0}),
}


def from_logits(model: ModularCapibaraModel, params: Any, tokens: Any, state: Any, key: Any) -> Any:
    inputs = {"tokens": tokens[:, :-1]}
    outputs, after = model.compiled.apply(params, inputs, state=state, key=key, train=True)
    chosen = jnp.take_along_axis(outputs["logits"], tokens[:, 1:, None], axis=-1)[..., 0]
    loss = jnp.mean(jax.nn.logsumexp(outputs["logits"], axis=-1) - chosen)
    return loss + outputs.get("auxiliary_loss", 0.0), after


@pytest.mark.thin(6)
@pytest.mark.parametrize("few", [api.FEW_LOGITS, 0], ids=["whole", "chunks"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_the_loss_of_the_logits(case: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FEW_LOGITS", few)
    kind, changes = CASES[case]
    model = ModularCapibaraModel(small_config(kind, **changes))
    params, state = small_params(model, 3)
    tokens, key = small_tokens(), jax.random.key(5)

    def both(params: Any) -> Any:
        def ours(params: Any) -> Any:
            loss, (after, _) = model.loss(params, {"tokens": tokens}, state=state, key=key)
            return loss, after

        def plain(params: Any) -> Any:
            return from_logits(model, params, tokens, state, key)

        return [jax.value_and_grad(f, has_aux=True)(params) for f in (ours, plain)]

    ours, plain = quick_jit(both)(params)
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6 * (1 + float(np.abs(want).max())))


@pytest.mark.parametrize("tied", [True, False])
def test_a_step_holds_a_part_of_many_logits(tied: bool) -> None:
    changes = {"model.vocab_size": 65536, "model.tie_embeddings": tied, "model.num_layers": 1}
    model = ModularCapibaraModel(small_config(**changes))
    params = jax.eval_shape(lambda: model.init(0)[0])
    tokens = jax.ShapeDtypeStruct((8, 513), jnp.int32)
    run = quick_jit(jax.grad(lambda p, t: model.loss(p, {"tokens": t}, state={})[0]))
    held: Any = run.lower(params, tokens).compile().memory_analysis()
    assert held.temp_size_in_bytes < 8 * 512 * 65536 * 4 / 8


ON_A_MESH = """
import json, warnings
warnings.simplefilter("error")
import jax, numpy as np
import jax.numpy as jnp
from jax.sharding import Mesh
from capibara.core import ModularCapibaraModel
from capibara.ops.loss import api
from small_models import quick_jit, small_config, small_params, small_tokens
api.FEW_LOGITS = 0
out = {}
for tied in (True, False):
    config = small_config(model__vocab_size=64, model__tie_embeddings=tied)
    params, state = small_params(ModularCapibaraModel(config))
    tokens = small_tokens(4, 9)
    weights = jnp.asarray(np.random.default_rng(1).random((4, 8)), jnp.float32)
    def both(model):
        def scored(params, tokens):
            losses = model.token_losses(params, tokens, state=state)
            return jnp.sum(losses * weights), losses
        return jax.value_and_grad(scored, has_aux=True)
    want = quick_jit(both(ModularCapibaraModel(config)))(params, tokens)
    for axes in ({"data": 4}, {"data": 2, "model": 2}, {"data": 2, "context": 2}):
        mesh = Mesh(np.array(jax.devices()).reshape(*axes.values()), tuple(axes))
        model = ModularCapibaraModel(config, mesh=mesh)
        laid = jax.device_put(params, model.compiled.propose_shardings()["params"])
        got = quick_jit(both(model))(laid, tokens)
        far = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - np.asarray(b))) / jnp.max(jnp.abs(b))), got, want)
        whole = "f32[4,8,64]" in str(jax.make_jaxpr(both(model))(laid, tokens))
        out[f"{tied} {axes}"] = [max(jax.tree.leaves(far)), whole]
print("RESULT" + json.dumps(out))
"""


@pytest.mark.slow
def test_losses_of_tokens_on_a_mesh_are_those_of_one_device() -> None:
    found = run_apart(ON_A_MESH, XLA_FLAGS=emulated(4))
    assert len(found) == 6
    for case, (far, whole) in found.items():
        assert far < 1e-5, case
        assert not whole, case  # no array of all logits

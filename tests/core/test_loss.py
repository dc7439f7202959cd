"""The loss from hidden states and the head, against the loss from the model's logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


@pytest.mark.thin(3)
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

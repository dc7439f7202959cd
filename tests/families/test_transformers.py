"""Models of published families against Hugging Face's own, in this process: every gradient, and folders they load."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import transformers_oracle as oracle
from published import DECODERS, draw, tokens
from safetensors.numpy import load_file

from capibara.core import ModularCapibaraModel

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", DECODERS)
def test_all_gradients_and_folders_both_ways(name: str, tmp_path: Path) -> None:
    import jax
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = oracle.build(name)
        theirs.save_pretrained(tmp_path / "theirs")
        ours = ModularCapibaraModel.from_pretrained(tmp_path / "theirs")
        text = tokens()
        np.testing.assert_allclose(ours(text), oracle.logits(theirs, text), rtol=0, atol=1e-4)

        padded, mask = np.where(np.arange(text.shape[1]) < 5, 0, text), np.ones_like(text)
        mask[0, :5] = 0
        mask[-1, -7:] = 0
        given = {"tokens": padded, "segments": mask}
        found = np.asarray(ours(given))
        np.testing.assert_allclose(
            found[mask == 1], oracle.logits(theirs, padded, mask)[mask == 1], rtol=0, atol=1e-4
        )

        loss, expected = oracle.gradients(theirs, text)
        (found, _), gradients = jax.value_and_grad(
            lambda p: ours.loss(p, {"tokens": text}, state={}, train=False), has_aux=True
        )(ours.params)
        assert abs(float(found) - loss) < 1e-4
        params, ours.params = ours.params, gradients
        ours.save_pretrained(tmp_path / "gradients")
        written = load_file(tmp_path / "gradients" / "model.safetensors")
        for tensor, gradient in expected.items():
            np.testing.assert_allclose(written[tensor], gradient, rtol=1e-4, atol=1e-4, err_msg=tensor)

        # A folder of other weights, which their reader loads.
        ours.params = jax.tree.map(lambda x: x * 0.5, params)
        ours.save_pretrained(tmp_path / "ours")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
        np.testing.assert_allclose(ours(text), oracle.logits(loaded, text), rtol=0, atol=1e-4)
        # And one whose config.json nobody has written before.
        family, ours.pretrained = ours.pretrained.family.name, None
        ours.save_pretrained(tmp_path / "fresh", family=family)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fresh", attn_implementation="eager").eval()
        np.testing.assert_allclose(ours(text), oracle.logits(loaded, text), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "mixtral", "qwen3_moe"])
def test_the_drawn_weights_are_those_of_the_record(name: str, tmp_path: Path) -> None:
    model = oracle.build(name)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == oracle.stored(model).keys()
    for tensor, numbers in written.items():
        np.testing.assert_array_equal(numbers, draw(tensor, numbers.shape))

"""Direct preference optimisation: its formula, its batches, and runs that go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import quick_jit, small_config
from tiny_run import tiny_config

from capibara.compose.errors import InputError
from capibara.core import ModularCapibaraModel
from capibara.core.preferences import dpo_loss, pair_log_probs
from capibara.data import ByteTokenizer, DocumentError, pair_rows, pairs_of
from capibara.errors import ConfigError
from capibara.ops.loss import api
from capibara.train import DataError, ResumeMismatchError, train
from capibara.train.examples import load_data
from capibara.train.preferences import PairCorpus

pytest.importorskip("grain")
pytest.importorskip("optax")

DPO = {"finetune.objective": "dpo", "finetune.beta": 0.3}


def pairs(count: int = 30) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}? ", "chosen": "yes" if n % 2 else "no", "rejected": "?"} for n in range(count)]


def written(folder: Path) -> str:
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, pairs())))
    return str(path)


def test_the_formula() -> None:
    rng = np.random.default_rng(0)
    policy, reference, beta = rng.normal(size=(5, 2)), rng.normal(size=(5, 2)), 0.7
    margin = beta * ((policy[:, 0] - reference[:, 0]) - (policy[:, 1] - reference[:, 1]))
    np.testing.assert_allclose(dpo_loss(policy, reference, beta), np.log1p(np.exp(-margin)), rtol=1e-5)
    # Its derivative: minus beta times how wrong the sigmoid is, the other way round for the rejected answer.
    found = jax.grad(lambda p: jnp.sum(dpo_loss(p, reference, beta)))(jnp.asarray(policy, "float32"))
    wrong = beta / (1 + np.exp(margin))
    np.testing.assert_allclose(found, np.stack([-wrong, wrong], 1), rtol=1e-5)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("few", "compute", "tolerance"),
    [
        (api.FEW_LOGITS, "float32", 1e-5),
        (0, "float32", 1e-5),
        pytest.param(0, "bfloat16", 2e-2, marks=pytest.mark.slow),
    ],
    ids=["whole", "chunks", "chunks in bfloat16"],
)
def test_a_row_is_two_texts(
    few: int, compute: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradient of packed pairs, against each answer computed by itself."""
    monkeypatch.setattr(api, "FEW_LOGITS", few)
    small = {"model.num_layers": 1, "precision.compute_dtype": compute}
    plain = ModularCapibaraModel(small_config("grouped", **small))
    model = ModularCapibaraModel(plain.config.with_overrides(DPO))
    params = jax.tree.map(lambda leaf: leaf * 2, plain.init(0)[0])
    # Of each pair the chosen and the rejected text, and how long the prompt is.
    pairs = [([1, 2, 3, 4, 5], [1, 2, 7], 2), ([6, 6, 8], [6, 1, 9, 10, 3, 2], 1)]
    tokens, segments, weights = np.zeros((3, 2, 12), np.int32)
    for row, (*texts, prompt) in enumerate(pairs):
        start = 0
        for number, text in enumerate(texts, start=1):
            own = slice(start, start + len(text))
            tokens[row, own], segments[row, own] = text, number
            weights[row, start + prompt : own.stop] = 1
            start = own.stop
    reference = np.array([[-3.0, -1.5], [-4.0, -12.0]], np.float32)
    batch = {"tokens": tokens, "segments": segments, "weights": weights, "reference": reference}

    def alone(params: Any) -> jax.Array:
        sums = []
        for *texts, prompt in pairs:
            for text in texts:
                scores = jax.nn.log_softmax(plain.apply(params, np.array([text]))[0])
                sums.append(sum(scores[i - 1, text[i]] for i in range(prompt, len(text))))
        return jnp.stack(sums).reshape(2, 2)

    def by_hand(params: Any) -> jax.Array:
        change = alone(params) - reference
        return jnp.mean(jnp.log1p(jnp.exp(-0.3 * (change[:, 0] - change[:, 1]))))

    both = quick_jit(
        lambda p: (
            jax.value_and_grad(lambda p: model.loss(p, batch, state={}, train=False), has_aux=True)(p),
            jax.value_and_grad(by_hand)(p),
            pair_log_probs(model, p, batch, state={}),
            alone(p),
        )
    )
    ((loss, (_, metrics)), found), (want, expected), log_probs, apart = both(params)
    np.testing.assert_allclose(log_probs, apart, rtol=tolerance)
    assert float(loss) == pytest.approx(float(want), rel=tolerance)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * (float(jnp.abs(b).max()) + 0.05))
    chosen = sum(len(text) - prompt for text, _, prompt in pairs)
    assert float(metrics["cross_entropy"]) == pytest.approx(-float(log_probs[:, 0].sum()) / chosen, rel=1e-3)
    with pytest.raises(InputError, match="has no 'reference'"):
        model.loss(params, {k: v for k, v in batch.items() if k != "reference"}, state={})


def test_pairs_of_records() -> None:
    found = pairs_of([("here", {"prompt": "ab", "chosen": "cd", "rejected": "e"})], ByteTokenizer())
    rows = pair_rows(found, 9)
    assert bytes(rows["tokens"][0].astype(np.uint8)) == b"abcdabe\0\0\0"
    assert rows["segments"][0].tolist() == [1, 1, 1, 1, 2, 2, 2, 0, 0, 0]
    assert rows["positions"][0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 0, 0]
    assert rows["weights"][0].tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 0, 0]
    # Of a row of six each answer has three.
    assert bytes(pair_rows(found, 5)["tokens"][0].astype(np.uint8)) == b"abcabe"
    with pytest.raises(DocumentError, match=r"here has the keys \['text'\], expected 'prompt', 'chosen'"):
        pairs_of([("here", {"text": "x"})], ByteTokenizer())


@pytest.mark.parametrize("method", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_a_run_learns_and_goes_on(tmp_path: Path, method: str) -> None:
    settings = {**DPO, "finetune.method": method, "data.validation_fraction": 0.2, "train.eval_every": 4}
    settings |= {
        "train.gradient_accumulation_steps": 2,
        "optimizer.learning_rate": 1e-2,
        "train.log_every": 1,
    }
    config = tiny_config(tmp_path / "run", "model.vocab_size=256").with_overrides(settings)
    config = config.with_overrides({"data.paths": [written(tmp_path)]})
    corpus = load_data(config.data, objective="dpo")
    assert isinstance(corpus, PairCorpus)
    assert str(corpus).endswith("30 pairs of answers; 24 to train on, 6 held out")
    model = ModularCapibaraModel(config)
    report = train(config.with_overrides({"train.steps": 8}), model, corpus)
    assert report.unit == "pair"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "train"]
    # Before the first step the model is its own reference.
    assert steps[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert steps[-1]["accuracy"] > 0.5
    assert steps[-1]["loss"] < np.log(2)

    before = (tmp_path / "run" / "reference.npy").read_bytes()
    assert train(config, model, corpus).step == 12
    assert (tmp_path / "run" / "reference.npy").read_bytes() == before
    (tmp_path / "run" / "reference.npy").write_bytes(before[:-4] + b"\0\0\0\0")
    longer = config.with_overrides({"train.steps": 16})
    with pytest.raises(ResumeMismatchError, match=r"of the pairs: it has changed"):
        train(longer, model, corpus)
    (tmp_path / "run" / "reference.npy").unlink()
    with pytest.raises(ResumeMismatchError, match=r"of the pairs: No such file"):
        train(longer, model, corpus)


def test_what_does_not_go_together(tmp_path: Path) -> None:
    section = tiny_config("unused").with_overrides({"data.paths": [written(tmp_path)]})
    with pytest.raises(ConfigError, match=r"is a preference.* finetune\.objective=dpo"):
        load_data(section.data)
    with pytest.raises(DataError, match=r"data\.packing do not go with finetune\.objective=dpo"):
        load_data(section.with_overrides({"data.packing": "documents"}).data, objective="dpo")
    with pytest.raises(DataError, match=r"needs data\.paths with records"):
        load_data(tiny_config("unused").data, objective="dpo")
    corpus = load_data(section.data, objective="dpo")
    with pytest.raises(DocumentError, match="leave no room for an answer"):
        corpus.batches(batch_size=2, sequence_length=5, seed=0)

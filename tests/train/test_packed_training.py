"""Training on packed documents: what counts, over microbatches and devices, and going on as if never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from other_process import run_apart
from small_models import small_config
from tiny_run import tiny_config

from capibara.core import ModularCapibaraModel
from capibara.data import PackedBatches
from capibara.errors import ConfigError
from capibara.train import DataError, train
from capibara.train.examples import PackedCorpus, load_data
from capibara.train.progress import SilentReporter
from capibara.train.signals import StopFlag
from capibara.train.state import TrainState
from capibara.train.step import make_eval_step, microbatch, train_step

pytest.importorskip("grain")
optax = pytest.importorskip("optax")


def sums(folder: Path, count: int = 120, most: int = 5) -> Path:
    lines = [{"prompt": f"{n}+{n}=", "completion": f"{2 * n}." * (1 + n % most)} for n in range(count)]
    path = folder / "sums.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def losses(folder: Path) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [loss for line in lines if line["kind"] == "train" for loss in line["losses"]]


def packed(path: Path, *settings: str) -> PackedCorpus:
    corpus = load_data(tiny_config("unused", *settings).with_overrides({"data.paths": [str(path)]}).data)
    assert isinstance(corpus, PackedCorpus)
    return corpus


def test_microbatches_count_by_their_tokens() -> None:
    """However a batch is cut, its gradient is that of the mean over all tokens that count."""
    model = ModularCapibaraModel(small_config("grouped", **{"model.num_layers": 1}))
    rng = np.random.default_rng(0)
    batch = {
        "tokens": rng.integers(0, 11, (4, 9)).astype(np.int32),
        "segments": np.array([[1] * 9, [1] * 4 + [2] * 5, [1] * 3 + [0] * 6, [0] * 9], np.int32),
        "weights": (rng.random((4, 9)) < 0.6).astype(np.float32),
    }
    batch["weights"][1, 4] = batch["weights"][:, 0] = 0
    batch["weights"] *= batch["segments"] > 0
    params, _ = model.init(0)

    def gradient_of(parts: int) -> Any:
        # A step of plain descent at rate 1 tells the gradient.
        optimizer = optax.sgd(1.0)
        state = TrainState.create(params, {}, optimizer.init(params), seed=0)
        after, metrics = jax.jit(train_step(model, optimizer))(state, microbatch(batch, parts))
        return jax.tree.map(lambda a, b: a - b, params, after.params), metrics

    whole, metrics = gradient_of(1)
    for parts in (2, 4):
        cut, cut_metrics = gradient_of(parts)
        assert float(cut_metrics["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-5)
        for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6)


class After(SilentReporter):
    """Asks for a stop after some steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.flag = steps, StopFlag()

    def step(self, step: int, loss: float) -> None:
        self.flag.requested |= step >= self.steps


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    path = sums(tmp_path)
    config = tiny_config(tmp_path / "whole").with_overrides({"data.paths": [str(path)]})
    model, corpus = ModularCapibaraModel(config), packed(path)
    assert train(config, model, corpus).validation_bits_per_byte is not None
    cut = config.with_overrides({"checkpoint.directory": str(tmp_path / "cut")})
    after = After(3)
    stopped = train(cut, model, corpus, reporter=after, stop=after.flag).step
    assert 3 <= stopped < 12
    newest = max((tmp_path / "cut" / "checkpoints").glob("*/meta.json"))
    told = json.loads(newest.read_text())
    batches = corpus.batches(batch_size=4, sequence_length=16, seed=config.train.seed)
    assert told["position"] == batches.position(stopped)
    train(cut, model, corpus)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_held_out_documents_are_weighed_by_their_tokens(tmp_path: Path) -> None:
    corpus = packed(sums(tmp_path, 60, most=2), "data.validation_fraction=0.3")
    assert [len(one) for one in (*corpus.train, *corpus.held_out)] == [42, 18]
    batches = corpus.validation_batches(batch_size=4, sequence_length=16, max_batches=100)
    model = ModularCapibaraModel(tiny_config("unused"))
    params, _ = model.init(0)
    evaluate = make_eval_step(model)
    counts = [batch["weights"][:, 1:].sum() for batch in batches]
    found = np.average([float(evaluate(params, {}, batch)) for batch in batches], weights=counts)
    # Each document by itself, without packing.
    total, number = 0.0, 0
    apply = jax.jit(model.apply)
    (source,), (held,) = corpus.sources, corpus.held_out
    for at in held:
        own = slice(source.starts[at], source.starts[at + 1])
        tokens, answers = source.tokens[own], source.answers[own] if source.answers is not None else None
        assert answers is not None
        scores = jax.nn.log_softmax(
            apply(params, np.pad(tokens, (0, 17 - len(tokens)))[None]).astype("float32")
        )
        for i in range(1, len(tokens)):
            if answers[i]:
                total -= float(scores[0, i - 1, tokens[i]])
                number += 1
    assert number == sum(counts)
    assert found == pytest.approx(total / number, rel=1e-2)  # the model computes in bfloat16


def test_what_is_packed(tmp_path: Path) -> None:
    path = sums(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": "some text"}\n' * 30)
    (tmp_path / "a.txt").write_text("words " * 50)

    def kind(*settings: str, paths: list[str]) -> bool:
        section = (
            tiny_config("unused").with_overrides({"data.paths": paths}).with_overrides(list(settings)).data
        )
        return isinstance(load_data(section), PackedCorpus)

    texts = [str(tmp_path / "a.jsonl"), str(tmp_path / "a.txt")]
    assert not kind(paths=texts)
    assert kind("data.packing=documents", paths=texts)
    assert kind("data.weights=[1,3]", paths=texts)
    assert kind(paths=[*texts, str(path)])
    with pytest.raises(DataError, match=r"data\.weights has 1 numbers, expected one for each of the 2 paths"):
        kind("data.weights=[1]", paths=texts)
    with pytest.raises(DataError, match=r"data.packing=documents needs data.paths"):
        kind("data.packing=documents", paths=[])
    with pytest.raises(ConfigError, match=r"data\.packing=windows reads all text in a row"):
        kind("data.packing=windows", "data.weights=[1,2]", paths=texts)
    told = packed(path)
    assert "of them trained on; 114 documents to train on, 6 held out" in str(told)
    assert "trained on" not in str(packed(path, "data.learn=all"))
    assert packed(path, "data.learn=all").fingerprint != told.fingerprint


READ = """
import json, sys
from capibara.data import PackedBatches
from capibara.train.examples import load_data
from tiny_run import tiny_config

settings, position, step, last, seed, number, count = json.loads(sys.argv[1])
corpus = load_data(tiny_config("unused").with_overrides(settings).data)
batches = PackedBatches(
    corpus.sources, batch_size=4, sequence_length=16, weights=corpus.weights, seed=seed, chosen=corpus.train,
    reader=number, readers=count,
)
batches.seek(step, position)
found = [{key: array.tolist() for key, array in batches.batch(at).items()} for at in range(step, last)]
print("RESULT", json.dumps(found))
"""


@pytest.mark.slow
def test_other_readers_go_on_where_a_run_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkpoint's position, readers in 1, 2 and 4 processes have the batches that the run goes on with."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"Text {n}. " * (1 + n % 7) for n in range(80)]
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "b.parquet")
    settings: dict[str, Any] = {
        "data.paths": [str(sums(tmp_path)), str(tmp_path / "b.parquet")],
        "data.weights": [3, 1],
    }
    config = tiny_config(tmp_path / "run").with_overrides(settings)
    corpus = load_data(config.data)
    assert isinstance(corpus, PackedCorpus)
    model = ModularCapibaraModel(config)
    after = After(5)
    stopped = train(config, model, corpus, reporter=after, stop=after.flag).step
    newest = max(
        (tmp_path / "run" / "checkpoints").glob("*/meta.json"), key=lambda path: int(path.parent.name)
    )
    told = json.loads(newest.read_text())

    given: dict[int, dict[str, np.ndarray]] = {}
    real = PackedBatches.batch

    def noted(self: PackedBatches, step: int) -> dict[str, np.ndarray]:
        given[step] = real(self, step)
        return given[step]

    monkeypatch.setattr(PackedBatches, "batch", noted)
    last = train(config, model, corpus).step
    assert stopped < last == 12
    for count in (1, 2, 4):
        parts = [
            run_apart(
                READ, json.dumps([settings, told["position"], stopped, last, config.train.seed, n, count])
            )
            for n in range(count)
        ]
        for at in range(stopped, last):
            for key, array in given[at].items():
                found = np.concatenate([np.asarray(part[at - stopped][key], array.dtype) for part in parts])
                assert found.tobytes() == array.tobytes(), (count, at, key)

"""From text to a tokenizer, to a model that reads with it, and on to one that is trained further."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from tiny_run import TEXT, TINY

import capibara.measure
from capibara.cli import main
from capibara.train import checkpoint_store

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(autouse=True)
def rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capibara.measure, "matmul_rate", lambda dtype="float32": 1e11)


@pytest.mark.slow
def test_from_text_to_a_model_that_is_trained_further(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text, tok, run, out = (str(tmp_path / name) for name in ("text.txt", "tok", "run", "out"))
    Path(text).write_text(TEXT)
    learn = [
        "tokenizer",
        "train",
        text,
        "--output",
        tok,
        "--vocab-size",
        "300",
        "--special",
        "<|user|>",
        "--json",
    ]
    assert main(learn) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tokens"] == 300
    assert told["bytes_per_token"] > 1.5
    assert main(learn) == 2
    assert "has a tokenizer.json already" in capsys.readouterr().err
    settings = (Path(tok) / "tokenizer_config.json").read_text()
    template = {"chat_template": TEMPLATE}
    (Path(tok) / "tokenizer_config.json").write_text(json.dumps(json.loads(settings) | template))

    small = [*TINY, f"data.tokenizer={tok}", "train.eval_batches=1", "train.batch_size=2"]
    train = ["train", text, *small, "--directory", run, "--json"]
    assert main(train) == 2
    assert "model.vocab_size=300" in capsys.readouterr().err
    assert main([*train, "model.vocab_size=304"]) == 0
    assert json.loads(capsys.readouterr().out)["unit"] == "token"

    ask = ["generate", "--checkpoint", run, "--length", "6", "--temperature", "0", "--json"]
    assert main([*ask, "--prompt", "Sentence 1"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main([*ask, "--chat", "--prompt", "Sentence 1", "--system", "s"]) == 0
    talked = json.loads(capsys.readouterr().out)
    assert talked["finish"] == ("length" if talked["tokens"] == 6 else "stop")
    monkeypatch.setattr("sys.stdin", io.StringIO("Sentence 1\n\nagain\n"))
    assert main([*ask[:-1], "--chat", "--system", "s"]) == 0
    assert capsys.readouterr().out.startswith(f"{talked['text']}\n")

    assert main(["export", run, out]) == 0
    capsys.readouterr()
    assert (Path(out) / "tokenizer.json").read_bytes() == (Path(tok) / "tokenizer.json").read_bytes()
    assert main([*ask[:1], "--model", out, *ask[3:], "--prompt", "Sentence 1"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == first["text"]

    # Trained further from either; the second goes on from the first's parameters, so that its loss is lower.
    further = ["train.steps=3", "optimizer.warmup_steps=1", "train.eval_every=3", "train.batch_size=2"]
    for source in (out, run):
        directory = str(tmp_path / f"further-{Path(source).name}")
        assert main(["train", text, "--model", source, *further, "--directory", directory, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["step"] == 3
        found = checkpoint_store(directory).newest()
        assert found is not None
        assert (found.tokenizer_path / "tokenizer.json").is_file()
    assert (found.meta.get("pretrained") is None) == (source == run)

    assert main(["train", text, "--model", run, f"data.tokenizer={tok}"]) == 2
    assert "which has its own" in capsys.readouterr().err

    # With adapters; an export has them in its weights.
    low = [*further, "finetune.method=lora", "finetune.rank=2", "optimizer.learning_rate=0.01"]
    adapted, merged = str(tmp_path / "adapted"), str(tmp_path / "merged")
    assert main(["train", text, "--model", out, *low, "--directory", adapted, "--json"]) == 0
    assert main(["export", adapted, merged]) == 0
    capsys.readouterr()
    before, after = (load_file(Path(path) / "model.safetensors") for path in (out, merged))
    changed = {name for name in before if (before[name] != after[name]).any()}
    assert before.keys() == after.keys()
    assert all("proj" in name for name in changed)
    assert len(changed) == 7
    texts = []
    for where in (["--checkpoint", adapted], ["--model", merged]):
        assert main(["generate", *where, *ask[3:], "--prompt", "Sentence 1"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]


def test_what_cannot_be_combined_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line, words in (
        (["train", "--model", "x", "--config", "demo"], "--config cannot be combined with --model"),
        (["generate", "--config", "demo", "--system", "s"], "--system is for conversations"),
        (["generate", "--model", str(tmp_path)], "config.json"),
        (["train", "--model", str(tmp_path)], "there is no checkpoint"),
        (["tokenizer", "train", "--output", str(tmp_path), "--vocab-size", "3"], "vocab_size=3"),
    ):
        assert main(line) == 2, line
        assert words in capsys.readouterr().err

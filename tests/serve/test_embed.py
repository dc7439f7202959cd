"""Vectors of texts: against each text by itself, and MiniLM against Hugging Face's own implementation."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from minilm import needs_weights, weights
from published import CONFIGS, write_folder
from transformers_oracle import recorded_facts

from capibara.cli import main
from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError
from capibara.families import FamilyError, Pretrained, read_config, read_embedding_files
from capibara.serve import Embedder
from capibara.serve.embed import _arrays, _batches, _shape_of
from capibara.serve.pooling import POOLINGS, EmbeddingSettings, pool, read_embedding_settings

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnop", "the", "capybara", "##s", "swim", "."]
TEXTS = ["The capybaras swim.", "a b c", "", "p o n m l k j i h g f e d c b a " * 5, "the capybara"]
MODULES = [
    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder as sentence-transformers publishes one."""
    tokenizers = pytest.importorskip("tokenizers")
    shapes = {tensor: tuple(shape) for tensor, shape in recorded_facts()["bert"]["shapes"].items()}
    path = write_folder(
        tmp_path_factory.mktemp("published") / "model", {"model_type": "bert", **CONFIGS["bert"]}, shapes
    )
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.enable_padding(length=128)  # as files have it; texts are not padded here
    made.save(str(path / "tokenizer.json"))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True})
    )
    (path / "modules.json").write_text(json.dumps(MODULES))
    (path / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 40, "do_lower_case": False})
    )
    prompts = {"prompts": {"query": "the ", "document": ""}, "default_prompt_name": None}
    (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return path


@pytest.fixture(scope="module")
def embedder(folder: Path) -> Embedder:
    return Embedder.from_pretrained(folder)


def pooled(states: np.ndarray, pooling: str) -> np.ndarray:
    kinds = {"mean": states.mean(0), "cls": states[0], "last": states[-1], "max": states.max(0)}
    return kinds[pooling]


def test_texts_together_are_texts_alone(embedder: Embedder) -> None:
    assert (embedder.pooling, embedder.normalise, embedder.max_length) == ("mean", True, 40)
    tokens = embedder.tokenizer.encode_batch(TEXTS, most=40)
    assert tokens[0].tolist() == [2, 20, 21, 22, 23, 24, 3]
    assert tokens[2].tolist() == [2, 3]
    assert len(tokens[3]) == 40
    assert tokens[3][-1] == 3  # what is cut off is the text's own
    vectors = embedder.embed(TEXTS)
    assert vectors.shape == (5, 32)
    assert vectors.dtype == np.float32
    for ids, vector in zip(tokens, vectors, strict=True):
        want = pooled(np.asarray(embedder.model.hidden(embedder.params, ids[None]))[0], "mean")
        np.testing.assert_allclose(vector, want / np.linalg.norm(want), rtol=0, atol=1e-5)
    # One row each.
    np.testing.assert_allclose(embedder.embed(TEXTS, batch_tokens=1), vectors, rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        embedder.embed(["capybara"], prompt="query"), embedder.embed(["the capybara"]), atol=1e-6
    )
    assert embedder.embed([]).shape == (0, 32)
    assert not embedder.embed_tokens([[], [2, 3]])[0].any()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling(pooling: str) -> None:
    rng = np.random.default_rng(3)
    hidden = rng.normal(size=(2, 7, 5)).astype(np.float32)
    texts = np.array([[0, 0, 0, 1, 1, -1, -1], [2, -1, -1, -1, -1, -1, -1]])
    hidden[texts == -1], hidden[0, 4] = np.inf, np.nan
    starts, lengths = np.array([0, 3, 7, 0]), np.array([3, 2, 1, 0])
    given = [jnp.asarray(one) for one in (hidden, texts, starts, lengths)]
    found = np.asarray(pool(*given, pooling=pooling, normalise=False))
    for number in (0, 2):  # the other one has a NaN, which reaches no text but its own
        np.testing.assert_allclose(found[number], pooled(hidden[texts == number], pooling), rtol=1e-6)
    assert np.isnan(found[1]).all() == (pooling != "cls")
    assert not found[3].any()
    unit = np.asarray(pool(*given, pooling=pooling, normalise=True))
    np.testing.assert_allclose(np.linalg.norm(unit[[0, 2]], axis=1), 1, rtol=1e-6)


def test_the_work_of_pooling_is_linear() -> None:
    work = []
    for size in (1024, 4096):
        given = [jnp.zeros((size // 128, 128, 8)), jnp.zeros((size // 128, 128), jnp.int32)]
        given += [jnp.zeros(size // 8, jnp.int32)] * 2
        traced = jax.jit(pool, static_argnames=("pooling", "normalise"))
        compiled = traced.lower(*given, pooling="mean", normalise=True).compile()
        analysis = compiled.cost_analysis()
        work.append((analysis or {}).get("bytes accessed", 0) + (analysis or {}).get("flops", 0))
    assert 0 < work[1] < 5 * work[0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=40), st.integers(1, 900), st.sampled_from([16, 100, 300, 512]))
def test_every_token_has_one_place(lengths: list[int], batch_tokens: int, most: int) -> None:
    rows = [np.full(min(length, most), at + 1, np.int32) for at, length in enumerate(lengths)]
    sizes = np.array([len(row) for row in rows], np.int64)
    seen: list[int] = []
    for width, members in _batches(sizes, most, batch_tokens):
        shape = _shape_of(width, members)
        chosen, (tokens, texts, positions, starts, counts) = _arrays(rows, members, shape)
        assert width <= most
        assert len(members) == 1 or len(members) * width <= batch_tokens
        assert np.count_nonzero(texts >= 0) == sizes[chosen].sum() == counts.sum()
        for number, text in enumerate(chosen):
            at, end = divmod(int(starts[number]), width)
            here = (at, slice(end, end + counts[number]))
            assert counts[number] == sizes[text]
            np.testing.assert_array_equal(tokens[here], rows[text])
            assert (texts[here] == number).all()
            np.testing.assert_array_equal(positions[here], np.arange(len(rows[text])))
        seen += chosen.tolist()
    assert sorted(seen) == np.flatnonzero(sizes).tolist()


def test_a_decoder_gives_its_last_state() -> None:
    from small_models import small_config, small_params

    model = ModularCapibaraModel(small_config("grouped", model__vocab_size=256))
    model.params, _ = small_params(model, 1)
    embedder = Embedder(model)
    assert embedder.pooling == "last"
    text = "otter"
    want = np.asarray(model.hidden(model.params, model.tokenizer.encode(text)[None].astype(np.int32)))[0, -1]
    np.testing.assert_allclose(embedder.embed([text, "beaver"])[0], want, rtol=0, atol=1e-5)


def test_wrong_arguments(embedder: Embedder) -> None:
    model = embedder.model
    calls: dict[str, Any] = {
        "pooling: got 'first', expected one of mean, cls, last, max": lambda: Embedder(
            model, pooling="first"
        ),
        "max_length: got 97, expected an integer from 1 to": lambda: Embedder(model, max_length=97),
        "texts: got a string": lambda: embedder.embed("text"),
        "prompt: got 'querry', the model has query, document.*Did you mean 'query'": lambda: embedder.embed(
            ["a"], prompt="querry"
        ),
        "batch_tokens: got 0": lambda: embedder.embed(["a"], batch_tokens=0),
        "tokens: a text has 41, expected at most 40": lambda: embedder.embed_tokens([[2] * 41]),
        r"tokens\[1\] must be a sequence of token ids, got .* float64": lambda: embedder.embed_tokens(
            [[2], [3.5]]
        ),
        r"tokens\[0\] must be a sequence of token ids": lambda: embedder.embed_tokens([[[2], [3, 4]]]),
        r"tokens\[0\] must be a sequence .* got shape \(\)": lambda: embedder.embed_tokens([2, 3]),
        r"tokens\[1\] has the token id 10000000000, .* are 0 to": lambda: embedder.embed_tokens(
            [[], [10**10]]
        ),
        r"tokens\[0\] has the token id -1": lambda: embedder.embed_tokens([[-1, 2]]),
        r"texts\[1\]: got int, expected a string": lambda: embedder.embed(["a", 3]),  # pyright: ignore
        r"texts\[1\]: has half of a character at 2": lambda: embedder.embed(["a", "ab\ud800"]),
        "normalise: got 1, expected True or False": lambda: Embedder(model, normalise=1),  # pyright: ignore
        "max_length: got '8', expected an integer": lambda: Embedder(model, max_length="8"),  # pyright: ignore
        "most=2: .*puts 2 tokens around a text, expected at least 3": lambda: Embedder(
            model, max_length=2
        ).embed(["a"]),
    }
    for match, call in calls.items():
        with pytest.raises(ConfigError, match=match):
            call()


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("modules.json", "{", "is not JSON"),
        ("modules.json", "7", "expected a list of objects"),
        (
            "modules.json",
            [*MODULES[:2], {"type": "sentence_transformers.models.Dense"}],
            "Dense.*not supported",
        ),
        (
            "modules.json",
            [MODULES[0], {**MODULES[1], "path": "../1_Pooling"}],
            "expected the name of a folder",
        ),
        ("modules.json", [{**MODULES[0], "path": "0_Transformer"}, MODULES[1]], "the Transformer is in"),
        ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, "weightedmean.*not supported"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "expected one of",
        ),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
        ("1_Pooling/config.json", {"pooling_mode": ["mean"]}, "got the pooling"),
        ("sentence_bert_config.json", {"max_seq_length": "all"}, "max_seq_length: got 'all'"),
        ("config_sentence_transformers.json", {"prompts": {"query": 7}}, "an object of texts"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "default_prompt_name"),
        ("config_sentence_transformers.json", [], "holds list, expected an object"),
    ],
)
def test_what_folders_say(name: str, content: Any, match: str, tmp_path: Path) -> None:
    assert read_embedding_settings(tmp_path) is None
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "modules.json").write_text(json.dumps(MODULES))
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "lasttoken"}))
    assert read_embedding_settings(tmp_path) == EmbeddingSettings("last", True)
    (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError, match=match):
        read_embedding_settings(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "modules.json")
    with pytest.raises(ConfigError, match=r"not a regular file.*Remedy"):
        read_embedding_settings(tmp_path)


def test_the_verb(folder: Path, tmp_path: Path, embedder: Embedder, capsys: Any) -> None:
    lines, out = tmp_path / "texts.jsonl", tmp_path / "vectors.npy"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    assert main(["embed", str(folder), str(lines), "the capybara", "-o", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["texts"], told["dimension"], told["pooling"], told["normalised"]) == (6, 32, "mean", True)
    np.testing.assert_allclose(np.load(out), embedder.embed([*TEXTS, "the capybara"]), atol=1e-6)
    assert main(["embed", str(folder), "a b c", "--json", "--pooling", "cls", "--no-normalise"]) == 0
    told = json.loads(capsys.readouterr().out)
    states = embedder.model.hidden(embedder.params, embedder.tokenizer.encode("a b c")[None])
    np.testing.assert_allclose(told["vectors"][0], states[0, 0], rtol=1e-4, atol=1e-4)
    for arguments, said in (
        ([str(folder), "a"], "--output is missing"),
        ([str(folder), str(tmp_path / "none.txt"), "--json"], "No such file"),
        ([str(tmp_path), "a", "--json"], "there is no checkpoint"),
        ([str(tmp_path), "a", "--json", "--dtype", "float32"], "--dtype is for folders"),
    ):
        assert main(["embed", *arguments]) == 2
        assert said in capsys.readouterr().err
    for arguments in (
        ["generate", "--model", str(folder), "--prompt", "a"],
        ["train", "--model", str(folder), str(lines)],
        ["plan", "--model", str(folder), "--topology", "v5e:2x2", "--no-compile"],
        ["plan", "--model", str(folder), "--serve", "--prompt-length", "8", "--output-length", "8"],
    ):
        assert main(arguments) == 2
        assert "model.causal: got false, an encoder" in capsys.readouterr().err


def test_a_run_and_an_export_make_the_same_vectors(
    folder: Path, tmp_path: Path, embedder: Embedder, capsys: Any
) -> None:
    """The files of sentence-transformers go with the model: into a run, a folder and a compressed file."""
    names = ["modules.json", "1_Pooling/config.json", "sentence_bert_config.json"]
    names.append("config_sentence_transformers.json")
    want = embedder.embed(["a b c " * 20, "the capybara"])
    assert main(["import", str(folder), str(tmp_path / "run")]) == 0
    (tmp_path / "again").mkdir()
    (tmp_path / "again" / "sentence_bert_config.json").write_text("{}")
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "again")]) == 0
    assert main(["compress", str(tmp_path / "run"), str(tmp_path / "model.capi")]) == 0
    assert main(["export", str(tmp_path / "model.capi"), str(tmp_path / "third")]) == 0
    for where in ("again", "third"):
        assert all((tmp_path / where / name).read_bytes() == (folder / name).read_bytes() for name in names)
    for where in ("run", "again", "third"):
        capsys.readouterr()
        line = ["embed", str(tmp_path / where), "a b c " * 20, "the capybara", "--json"]
        assert main(line) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["pooling"], told["normalised"], told["max_length"]) == ("mean", True, 40)
        np.testing.assert_allclose(told["vectors"], want, rtol=0, atol=1e-5)
        assert main(["embed", str(tmp_path / where), "capybara", "--json", "--prompt", "query"]) == 0
        told = json.loads(capsys.readouterr().out)
        np.testing.assert_allclose(told["vectors"][0], want[1], rtol=0, atol=1e-5)
    model = ModularCapibaraModel.from_pretrained(folder)
    assert Embedder.of(model, normalise=False, max_length=7).max_length == 7


def test_files_that_go_with_a_model_are_untrusted(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "model")
    whole = read_embedding_files(tmp_path / "model")
    assert len(whole) == 4
    modules, large = tmp_path / "model" / "modules.json", tmp_path / "model" / "sentence_bert_config.json"
    large.write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(FamilyError, match=r"sentence_bert_config\.json: is too large"):
        ModularCapibaraModel.from_pretrained(tmp_path / "model")
    large.unlink()
    os.mkfifo(large)
    with pytest.raises(FamilyError, match="is not a regular file"):
        ModularCapibaraModel.from_pretrained(tmp_path / "model")
    large.unlink()
    for place in ("..", "../model", "/etc", "a/b", "config.json", "x\0", "x" * 300, 7, None):
        modules.write_text(json.dumps([MODULES[0], {**MODULES[1], "path": place}]))
        assert set(read_embedding_files(tmp_path / "model")) == {
            "modules.json",
            "config_sentence_transformers.json",
        }
    modules.write_bytes(b"\xff\xfe")
    with pytest.raises(FamilyError, match=r"modules\.json: is not JSON in UTF-8"):
        read_embedding_files(tmp_path / "model")
    modules.write_text("[" * 100_000)
    assert "modules.json" in read_embedding_files(tmp_path / "model")
    # A run's record can say anything, and an export writes what it says.
    _, source = read_config(folder)
    record = dataclasses.replace(source, embedding=whole).to_json()
    assert Pretrained.from_json(record, "here").embedding == whole
    names = (
        "../x",
        "/x",
        "x/../../config.json",
        "../config.json",
        "config.json",
        "model.safetensors/config.json",
    )
    wrong: list[Any] = [
        [],
        7,
        "x",
        {"modules.json": 7},
        {"modules.json": "x" * (2 << 20)},
        {"modules.json": "\ud800"},
    ]
    for embedding in [*wrong, *({name: "{}"} for name in names), {f"{i}/config.json": "" for i in range(99)}]:
        with pytest.raises(FamilyError, match="here: the record of the model's origin: embedding"):
            Pretrained.from_json(record | {"embedding": embedding}, "here")


@needs_weights
@pytest.mark.slow
def test_minilm_is_the_reference_implementation() -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    import pydoc_data.topics

    path = weights()
    assert path is not None
    texts = [" ".join(text.split()) for text in pydoc_data.topics.topics.values()][:24]
    texts += [text[: 20 + 3 * i] for i, text in enumerate(texts)]
    embedder = Embedder.from_pretrained(path.parent)
    assert embedder.model.num_params == 22_713_216
    assert (embedder.pooling, embedder.normalise, embedder.max_length) == ("mean", True, 256)

    theirs = transformers.BertModel.from_pretrained(path.parent).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent)
    given = tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        states = theirs(**given).last_hidden_state
    mask = given["attention_mask"][..., None]
    mean = (states * mask).sum(1) / mask.sum(1)
    want = torch.nn.functional.normalize(mean, dim=1).numpy()
    np.testing.assert_allclose(embedder.embed(texts), want, rtol=0, atol=1e-4)
    jax.clear_caches()

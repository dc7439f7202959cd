"""Adapters of one model beside each other, against models with the adapters in their weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from published import write_folder
from transformers_oracle import recorded_facts

from capibara.core import ModularCapibaraModel
from capibara.data import ByteTokenizer
from capibara.errors import ConfigError
from capibara.families import FamilyError, save_adapter
from capibara.serve import AdapterRoom, Engine, Request, RequestError, Sampling, Speculation

FACTS = recorded_facts()["qwen3, tied, one key head"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "one": {"finetune.rank": 3, "finetune.alpha": 6.0, "finetune.targets": ["query", "out", "down"]},
    "two": {"finetune.rank": 4, "finetune.alpha": 2.0, "finetune.targets": ["key", "value", "gate", "up"]},
}
SIZES: dict[str, Any] = {"max_batch": 4, "page_size": 4, "prefill_tokens": 8, "prefill_chunks": 2}


def adapted(folder: Path, name: str, seed: int) -> ModularCapibaraModel:
    model = ModularCapibaraModel.from_pretrained(
        folder, overrides={"finetune.method": "lora", **ADAPTERS[name]}
    )
    random = np.random.default_rng(seed)

    def one(path: Any, leaf: jax.Array) -> jax.Array:
        last = jax.tree_util.keystr(path[-1:], simple=True)
        return (
            jnp.asarray(random.normal(size=leaf.shape) * 0.3, leaf.dtype) if last.endswith("lora_b") else leaf
        )

    model.params = jax.tree_util.tree_map_with_path(one, model.params)
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("adapters")
    found = {"": write_folder(where / "base", FACTS["config"], FACTS["shapes"])}
    for seed, name in enumerate(ADAPTERS):
        model = adapted(found[""], name, seed)
        assert model.pretrained is not None
        save_adapter(model, model.params, where / name, model.pretrained.family)
        found[name] = where / name
    return found


@pytest.fixture(scope="module")
def merged(folders: dict[str, Path]) -> dict[str, ModularCapibaraModel]:
    """Models with the adapters in their weights."""
    models = {"": ModularCapibaraModel.from_pretrained(folders[""])}
    return models | {
        name: ModularCapibaraModel.from_pretrained(folders[""], adapter=folders[name]).merged()
        for name in ADAPTERS
    }


def engine_of(folders: dict[str, Path], **more: Any) -> Engine:
    model = ModularCapibaraModel.from_pretrained(folders[""])
    options: dict[str, Any] = {"adapters": AdapterRoom(rank=5), "pages": 60, "warm": False, **SIZES, **more}
    return Engine(model, tokenizer=ByteTokenizer(), **options)


@pytest.fixture
def engine(folders: dict[str, Path]) -> Iterator[Engine]:
    with engine_of(folders) as engine:
        for name in ADAPTERS:
            engine.load_adapter(name, folders[name])
        yield engine


def requests(count: int) -> list[Request]:
    random = np.random.default_rng(0)
    start = random.integers(1, 61, 12)
    found = []
    for number in range(count):
        prompt = random.integers(1, 61, random.integers(1, 24))
        if number % 2:
            prompt[:12] = start[: len(prompt)]  # what is the same is another thing under another adapter
        options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "sampling": Sampling(temperature=0.0)}
        found.append(Request(tuple(prompt.tolist()), adapter=("", "one", "two")[number % 3], **options))
    return found


def tokens(stream: Any) -> list[int]:
    pieces = list(stream)
    assert pieces[-1].error is None
    return [token for piece in pieces for token in piece.tokens]


def whole(model: ModularCapibaraModel, request: Request) -> list[int]:
    """By the whole text each time, in one shape."""
    run = jax.jit(lambda row: model.apply(model.params, row))
    text = list(request.prompt)
    for _ in range(request.max_tokens or 0):
        row = np.zeros((1, 48), np.int32)
        row[0, : len(text)] = text
        text.append(int(np.argmax(np.asarray(run(row))[0, len(text) - 1])))
    return text[len(request.prompt) :]


def test_texts_are_those_of_merged_models(engine: Engine, merged: dict[str, ModularCapibaraModel]) -> None:
    assert engine.adapters() == ["one", "two"]
    asked = requests(18)
    streams = [engine.submit(request) for request in asked]
    written = [tokens(stream) for stream in streams]
    assert written == [whole(merged[request.adapter], request) for request in asked]
    assert engine.statistics().cached_prompt_tokens > 0
    assert engine.statistics().pages_used == 0


@pytest.mark.slow
def test_adapters_of_experts(tmp_path: Path) -> None:
    facts = recorded_facts()["mixtral"]
    folders = {"": write_folder(tmp_path / "base", facts["config"], facts["shapes"])}
    models = {"": ModularCapibaraModel.from_pretrained(folders[""])}
    for seed, name in enumerate(ADAPTERS):
        made = adapted(folders[""], name, seed)
        assert made.pretrained is not None
        save_adapter(made, made.params, tmp_path / name, made.pretrained.family)
        models[name] = made.merged()
    asked = requests(9)
    with engine_of(folders) as engine:
        for name in ADAPTERS:
            engine.load_adapter(name, tmp_path / name)
        streams = [engine.submit(request) for request in asked]
        assert [tokens(s) for s in streams] == [whole(models[r.adapter], r) for r in asked]


@pytest.mark.slow
def test_with_guesses_and_few_pages(
    folders: dict[str, Path], merged: dict[str, ModularCapibaraModel]
) -> None:
    asked = requests(30)
    with engine_of(folders, pages=14, speculation=Speculation(3, longest=2)) as engine:
        for name in ADAPTERS:
            engine.load_adapter(name, folders[name])
        streams = [engine.submit(request) for request in asked]
        assert [tokens(s) for s in streams] == [whole(merged[r.adapter], r) for r in asked]


def test_adapters_come_and_go(
    engine: Engine, folders: dict[str, Path], merged: dict[str, ModularCapibaraModel]
) -> None:
    prompt = tuple(range(1, 14))
    options: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True, "sampling": Sampling(temperature=0.0)}
    request = Request(prompt, adapter="one", **options)
    stream = engine.submit(request)
    engine.unload_adapter("one")
    assert tokens(stream) == whole(merged["one"], request)  # it has begun
    with pytest.raises(RequestError, match=r"adapter 'one' is not loaded; there are \['two'\]"):
        engine.submit(request)
    # Another one of the same name: nothing that was computed with the first is used.
    engine.load_adapter("one", folders["two"])
    again = Request(prompt, adapter="one", **options)
    assert tokens(engine.submit(again)) == whole(merged["two"], again)
    before = engine.statistics().compilations
    engine.load_adapter("three", folders["one"])
    assert tokens(engine.submit(Request(prompt, adapter="three", **options))) == whole(merged["one"], request)
    assert engine.statistics().compilations == before


def test_what_is_no_adapter_of_this_engine(engine: Engine, folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapter 'none' is not loaded"):
        engine.unload_adapter("none")
    with pytest.raises(ConfigError, match="expected one that differs from the model's"):
        engine.load_adapter("capibara", folders["one"])
    with pytest.raises(FamilyError, match=r"adapter_config\.json"):
        engine.load_adapter("x", tmp_path)
    with engine_of(folders, adapters=AdapterRoom(rank=3, targets=("query", "out"), most=1)) as small:
        with pytest.raises(ConfigError, match="has rank 4, and there is room for 3"):
            small.load_adapter("two", folders["two"])
        with pytest.raises(ConfigError, match="adapts down, and there is room for"):
            small.load_adapter("one", folders["one"])
    with engine_of(folders, adapters=None) as without:
        with pytest.raises(ConfigError, match="without room for any"):
            without.load_adapter("one", folders["one"])
        with pytest.raises(RequestError, match="adapter 'one' is not loaded; there are none"):
            without.submit(Request((1,), adapter="one"))
    with engine_of(folders, adapters=AdapterRoom(most=1)) as one:
        one.load_adapter("one", folders["one"])
        with pytest.raises(ConfigError, match="there are 1 already"):
            one.load_adapter("two", folders["two"])


def test_clients_ask_for_adapters_by_their_names(engine: Engine, folders: dict[str, Path]) -> None:
    from starlette.testclient import TestClient

    from capibara.serve.http import Keys, ServerSettings, create_app

    app = create_app(engine, ServerSettings(Keys(), load_adapters=True))
    client = TestClient(app)
    found = client.get("/v1/models").json()["data"]
    assert [(model["id"], model.get("parent")) for model in found] == [
        ("capibara", None), ("one", "capibara"), ("two", "capibara"),
    ]  # fmt: skip
    body = {"prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    texts = {}
    for name in ("capibara", "one", "two"):
        answer = client.post("/v1/completions", json=body | {"model": name}).json()
        assert answer["model"] == name
        texts[name] = answer["choices"][0]["text"]
        request = Request(
            (5, 6, 7),
            6,
            ignore_eos=True,
            sampling=Sampling(temperature=0.0),
            adapter=name.replace("capibara", ""),
        )
        assert texts[name] == "".join(piece.text for piece in engine.submit(request))
    assert len(set(texts.values())) == 3
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "one"}).status_code == 200
    gone = client.post("/v1/completions", json=body | {"model": "one"})
    assert gone.status_code == 404
    given = {"lora_name": "again", "lora_path": str(folders["one"])}
    assert client.post("/v1/load_lora_adapter", json=given).json()["loaded"] == "again"
    answer = client.post("/v1/completions", json=body | {"model": "again"}).json()
    assert answer["choices"][0]["text"] == texts["one"]
    for wrong in (
        {"lora_name": "x"},
        {"lora_name": "x", "lora_path": "/nowhere"},
        {"lora_name": "capibara", "lora_path": "/"},
    ):
        assert client.post("/v1/load_lora_adapter", json=wrong).status_code == 400
    closed = TestClient(create_app(engine))
    assert closed.post("/v1/load_lora_adapter", json=given).status_code == 404


def test_adapters_from_the_command_line(folders: dict[str, Path]) -> None:
    import argparse

    from capibara.cli.serve import _adapters, add_arguments

    model = ModularCapibaraModel.from_pretrained(folders[""])
    parser = argparse.ArgumentParser()
    add_arguments(parser)

    def of(*words: str) -> Any:
        return _adapters(parser.parse_args(["model", *words]), model)

    assert of() == ({}, None)
    assert of("--load-adapters") == ({}, AdapterRoom(16))
    given = [f"{name}={folders[name]}" for name in ADAPTERS]
    named, room = of("--adapter", given[0], "--adapter", given[1])
    assert (list(named), room) == (["one", "two"], AdapterRoom(4))
    assert of("--adapter", given[0], "--adapter-rank", "9")[1] == AdapterRoom(9)
    for wrong in ("one", "=x", "one="):
        with pytest.raises(ConfigError, match="expected NAME=FOLDER"):
            of("--adapter", wrong)

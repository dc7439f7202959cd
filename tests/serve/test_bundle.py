"""Programs that are compiled before: an engine reads them, or says why they do not fit."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest
from emulation import emulated
from other_process import run_apart
from small_models import KINDS, SMALL
from tpu_compiler import needs_libtpu

from capibara.cli import main
from capibara.compilation import read_packed
from capibara.compilation.counting import count_compilations
from capibara.compilation.errors import PackedProgramError
from capibara.compress import CompressionProfile, ModelCompressionAPI
from capibara.compress.coded import is_coded
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError
from capibara.serve import AdapterRoom, Engine, Request, Sampling, Speculation, load_compressed
from capibara.serve.engine.arrays import describe_arrays
from capibara.serve.engine.bundle import ProgramBundle, write_bundle
from capibara.serve.engine.steps import EngineSizes

SETTINGS = {"model.vocab_size": 256, "model.max_sequence_length": 64, "train.sequence_length": 32}
ASKED = [
    Request((1, 2, 3), max_tokens=6, sampling=Sampling(temperature=0.0), logprobs=1),
    Request((9,), 4, seed=1),
]


def model_of(more: dict[str, Any] | None = None) -> ModularCapibaraModel:
    settings = SMALL | KINDS["grouped"] | SETTINGS | (more or {})
    return ModularCapibaraModel(ModularModelConfig.from_dict({}, settings))


def texts(engine: Engine) -> list[list[int]]:
    streams = [engine.submit(request) for request in ASKED]
    return [[token for piece in stream for token in piece.tokens] for stream in streams]


def sizes_of(model: Any, **more: Any) -> EngineSizes:
    given = {"max_batch": 1, "page_size": 4, "prefill_tokens": 8, "prefill_chunks": 1}
    return EngineSizes.of(model, **(given | more))


def bundle_of(folder: Path, model: Any) -> ProgramBundle:
    """Of a model that has no arrays yet."""
    return write_bundle(
        folder, model, *describe_arrays(model), sizes_of(model), target="this machine", writable=256, pages=20
    )


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> ProgramBundle:
    return bundle_of(tmp_path_factory.mktemp("bundle") / "programs", model_of())


def test_an_engine_compiles_nothing(bundle: ProgramBundle) -> None:
    model = model_of()
    jax.block_until_ready(model.params)
    with count_compilations() as counts:
        engine = Engine(model, bundle=ProgramBundle.read(bundle.folder))
    with engine:
        # For each program JAX is asked twice: for its key, and then for the program, which it has.
        assert (counts.programs, counts.hits) == (2 * len(bundle.files), len(bundle.files))
        assert engine._sizes == bundle.sizes
        found = texts(engine)
        assert engine.statistics().compilations == 0
    with Engine(model, max_batch=1, page_size=4, prefill_tokens=8, prefill_chunks=1, warm=False) as engine:
        assert texts(engine) == found


@pytest.mark.parametrize("kind", ["folder", "archive"])
def test_models_that_are_read_take_their_own(kind: str, tmp_path: Path) -> None:
    """Their arrays are on a device that somebody chose, which JAX writes into programs."""
    model = model_of({"model.embed_dim": 32})
    if kind == "folder":
        model.save_pretrained(tmp_path / "tiny")
    else:
        packed = ModelCompressionAPI(CompressionProfile(strategy="int8")).compress(model, decode="auto")
        packed.save(tmp_path / "model.capi")

    def read() -> tuple[Any, Any, Any]:
        if kind == "folder":
            found = ModularCapibaraModel.from_pretrained(tmp_path / "tiny")
            return found, found.params, found.state
        loaded = load_compressed(tmp_path / "model.capi", model.config, decode="auto")
        assert any(map(is_coded, jax.tree.leaves(loaded.params, is_leaf=is_coded)))
        return loaded.model, loaded.params, loaded.state

    own, params, state = read()
    bundle = write_bundle(
        tmp_path / "programs", own, params, state, sizes_of(own), target="here", writable=256, pages=20
    )
    own, params, state = read()
    with Engine(own, params, state=state, bundle=ProgramBundle.read(bundle.folder)) as engine:
        found = texts(engine)
        assert engine.statistics().compilations == 0
    sizes: dict[str, Any] = {"max_batch": 1, "page_size": 4, "prefill_tokens": 8, "prefill_chunks": 1}
    with Engine(own, params, state=state, warm=False, **sizes) as engine:
        assert texts(engine) == found


def test_what_does_not_fit_is_refused_with_the_reason(
    bundle: ProgramBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str, model: Any, **more: Any) -> None:
        with pytest.raises(PackedProgramError, match=message):
            Engine(model, bundle=bundle, **more)

    model = model_of()
    refused(
        r"float32\[8, 12\] in the file, .*: float32\[8, 24\] here",
        model_of({"model.mlp_dim": 24}),
    )
    refused("compiled from another program", model_of({"model.rope_theta": 123.0}))
    refused("is for 0 guessed tokens, asked for are 2", model, speculation=Speculation(2))
    refused("no programs with adapters", model, adapters=AdapterRoom(4))
    with monkeypatch.context() as patch:
        patch.setattr("capibara.serve.engine.bundle._devices", lambda model: ["another"])
        refused("programs run on another, and an array of the model lies on .*[Cc]pu", model)
    with pytest.raises(
        PackedProgramError, match="is for a mesh of data 1 × model 2, the model has one device"
    ):
        Engine(model, bundle=dataclasses.replace(bundle, mesh={"data": 1, "model": 2}))
    with monkeypatch.context() as flags:
        flags.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        refused("XLA_FLAGS: .* in the file, --xla_cpu_enable_fast_math=true here", model)


def test_what_is_damaged_is_refused(bundle: ProgramBundle, tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    shutil.copytree(bundle.folder, folder)
    index = folder / "bundle.json"
    content = index.read_text()
    file = next(iter(bundle.files.values()))[0]
    (folder / file).write_bytes((folder / file).read_bytes()[:-1] + b"x")
    with pytest.raises(PackedProgramError, match="has the SHA-256"):
        Engine(model_of(), bundle=ProgramBundle.read(folder))
    (folder / file).unlink()
    with pytest.raises(PackedProgramError, match=r"No such file.*Write the bundle again"):
        Engine(model_of(), bundle=ProgramBundle.read(folder))
    good = json.loads(content)
    for wrong in (
        "{",
        "[]",
        "[" * 99_999,
        json.dumps(good | {"sizes": good["sizes"] | {"pages": 1 << 40}}),
        json.dumps(good | {"sizes": good["sizes"] | {"max_batch": 0}}),
        json.dumps(good | {"sizes": {"max_batch": 1}}),
        json.dumps(good | {"mesh": [1]}),
        json.dumps(good | {"mesh": {"data": 0}}),
        json.dumps(good | {"mesh": {"data": float("inf")}}),
        json.dumps(good | {"version": float("inf")}),
        json.dumps(good | {"sizes": good["sizes"] | {"max_batch": 2_000_000_000}}),
        json.dumps(good | {"sizes": good["sizes"] | {"prefill_chunks": 1_000_000_000}}),
    ):
        index.write_text(wrong)
        with pytest.raises(PackedProgramError, match=r"is damaged\. Write the bundle again"):
            ProgramBundle.read(folder)
    index.write_text(json.dumps(good | {"programs": {"a": {"file": "../a", "sha256": "0"}}}))
    with pytest.raises(PackedProgramError, match="outside its folder"):
        ProgramBundle.read(folder)
    index.write_text(json.dumps(good | {"version": 99}))
    with pytest.raises(PackedProgramError, match="has version 99, expected 1"):
        ProgramBundle.read(folder)
    index.write_text(content)
    with pytest.raises(PackedProgramError, match="has the SHA-256"):
        ProgramBundle.read(folder, sha256="0" * 64)
    index.chmod(0o666)
    with pytest.raises(PackedProgramError, match="others may write to it"):
        ProgramBundle.read(folder)
    with pytest.raises(PackedProgramError, match="No such file"):
        ProgramBundle.read(tmp_path)


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="holds something else"):
        bundle_of(tmp_path, model_of())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ConfigError, match="max_length: the pages of one text take"):
        model = model_of()
        arrays = describe_arrays(model)
        more: dict[str, Any] = {"target": "a small chip", "writable": 256, "memory_bytes": 1000}
        write_bundle(tmp_path / "new", model, *arrays, sizes_of(model), **more)


@pytest.mark.slow
def test_an_earlier_bundle_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    folder, model = tmp_path / "programs", model_of()
    first = bundle_of(folder, model)

    def interrupted(done: int, _: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    arrays = describe_arrays(model)
    more: dict[str, Any] = {"target": "this machine", "writable": 256, "pages": 30}
    with pytest.raises(KeyboardInterrupt):
        write_bundle(folder, model, *arrays, sizes_of(model), progress=interrupted, **more)
    assert ProgramBundle.read(folder) == first
    assert len(list(folder.iterdir())) == 1 + len(first.files)
    # What a killed process left is no bundle, and in nobody's way.
    (folder / "bundle.json").unlink()
    before = os.umask(0o002)
    try:
        second = write_bundle(folder, model, *arrays, sizes_of(model), **more)
    finally:
        os.umask(before)
    assert second.sizes.pages == 31
    assert len(list(folder.iterdir())) == 1 + len(second.files)


def published(path: Path) -> Path:
    model = model_of({"model.head_dim": 128, "model.num_heads": 4, "model.num_kv_heads": 4})
    model.save_pretrained(path / "tiny")
    return path / "tiny"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--compile-for", "v4:2x2x1"], "needs --output FOLDER"),
        (["--compile-for", "v9:2x2", "-o", "x"], "v9"),
        (
            ["--compile-for", "v4:2x2x1", "-o", "x", "--draft-model", "m"],
            "cannot be combined with --draft-model",
        ),
        (["-o", "x"], "--output goes with --compile-for"),
        (["--tensor-parallel", "0"], "expected devices from 1"),
        (["--bundle", "nowhere"], "No such file"),
        (["--compile-for", "here", "-o", "x", "--pages", "0"], "--pages: got 0"),
        (["--compile-for", "here", "-o", "x", "--guess", "-1"], "--guess: got -1"),
        (["--compile-for", "here", "-o", "x", "--max-batch", "0"], "--max-batch: got 0"),
        (["--tensor-parallel", "4096"], "needs 4096 devices, there are"),
    ],
)
def test_what_the_command_line_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], message: str
) -> None:
    assert main(["serve", str(published(tmp_path)), "--port", "0", *given]) == 2
    assert message in capsys.readouterr().err


START = """
import json, sys
from capibara.cli import main
try:
    code = main(["serve", *sys.argv[1:], "--port", "0"])
except SystemExit as ended:
    code = ended.code
print("RESULT", json.dumps(code))
"""


@needs_libtpu
@pytest.mark.slow
def test_a_laptop_compiles_for_a_host_of_tpus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is read of the model but its settings; each time the same programs come out."""
    folder = published(tmp_path)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    given = ["serve", str(folder), "--compile-for", "v4:2x2x1", "--max-batch", "1", "--max-length", "64"]
    for name in ("a", "b"):
        assert main([*given, "-o", str(tmp_path / name), "--quiet"]) == 0
    said = capfd.readouterr().out
    assert "programs for v4:2x2x1" in said
    one, other = (ProgramBundle.read(tmp_path / name) for name in ("a", "b"))
    assert (one.sizes, one.mesh) == (other.sizes, {"data": 1, "model": 4})
    for name, (file, _) in one.files.items():
        packed, again = (read_packed(each.folder / each.files[name][0]) for each in (one, other))
        assert packed.stablehlo == again.stablehlo
        assert packed.environment["platform"] == "tpu"
        assert packed.environment["topology"].startswith("4 × TPU v4")
        assert file.endswith(".caprog")
    # Four devices of another kind are not what it is for.
    shutil.rmtree(folder)
    folder = published(tmp_path)
    assert run_apart(START, str(folder), "--bundle", str(one.folder), XLA_FLAGS=emulated(4, quick=True)) == 2


@needs_libtpu
@pytest.mark.slow
def test_slices_that_no_bundle_is_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = published(tmp_path)
    given = ["serve", str(folder), "-o", str(tmp_path / "x"), "--quiet", "--compile-for"]
    assert main([*given, "v4:2x2x4"]) == 2
    assert "has 4 hosts, and a model is served by one process" in capfd.readouterr().err
    assert main([*given, "v4:2x2x1", "--tensor-parallel", "2"]) == 2
    assert "has 4 devices, and the programs are for all of them" in capfd.readouterr().err
    assert main([*given, "v5e:1x1", "--max-batch", "4096", "--pages", "99999999"]) == 2
    assert "does not fit the memory of a device of v5e:1x1" in capfd.readouterr().err

"""A fuzzer of folders of models and files of data: ``make fuzz-folders``, or with ``FUZZ="--cases N --seed S"``.

Each case damages one file of a small folder, or replaces it by what an attacker would write: settings, headers of
safetensors, indexes, tokenizers, chat templates, quantized folders, GGUF files, adapters, links, files of records, runs
of our own, and folders that the command line is given. Allowed are a :class:`~capibara.errors.CapibaraError` that names
the file and the remedy, or a folder that is read. Anything else is a finding: another exception, more than 20 seconds,
2 GiB more, a file opened that is not in the folder, or a message that is too long or would change a terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np
from folder_damage import (
    OUTSIDE,
    SECRET,
    TEMPLATES,
    damaged_bytes,
    damaged_gguf,
    damaged_json,
    damaged_tensors,
    evil_tokenizer,
    gguf_with,
    json_bomb,
)
from published import CONFIGS, model_type, write_folder
from safetensors.numpy import load_file, save_file
from transformers_oracle import recorded_facts

import capibara
from capibara.cli import main as command
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.data import FileTokenizer, read_tokenizer_files
from capibara.data.tokenizer_file import byte_tokenizer_files
from capibara.errors import CapibaraError
from capibara.families import (
    TensorFiles,
    load_params,
    open_tensors,
    read_config,
    save_adapter,
    tokenizer_files_of,
)
from capibara.serve.load import find_checkpoint, load_model, save_pretrained_run
from capibara.train.examples import load_data

SECONDS, MEMORY = 20, 2 << 30
BOMB = 8 << 20  # bytes of a file that would become many times as many
REMEDY = re.compile(
    r"(?i)remedy|expected|must be|known: |instead of|start over|"
    r"\b(restore|correct|use|give|train|raise|convert|leave)\b"
)
BASES = ("llama", "gpt2", "mixtral", "phi3", "qwen3, tied, one key head")
LORA = {"finetune.method": "lora", "finetune.rank": 3, "finetune.alpha": 6.0}


class TooSlowError(BaseException):
    """A case took longer than it may."""


class FoundError(BaseException):
    """A case did what it may not."""


class Opened:
    """The files that Python code opens, while it is watched."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.outside: list[str] = []
        own = {sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(capibara.__file__).parents[1])}
        if compiled := jax.config.values["jax_compilation_cache_dir"]:
            own.add(compiled)
        self._allowed = (*own, "/proc/", "/sys/", "/dev/null", "/dev/urandom", str(Path(__file__).parent))
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.folder is None or event != "open" or not isinstance(args[0], str | bytes):
            return
        name = os.path.abspath(os.fsdecode(args[0]))
        if not name.startswith((str(self.folder), *self._allowed)):
            self.outside.append(name)


@contextmanager
def limited(seconds: int = SECONDS) -> Iterator[None]:
    """End what takes longer."""

    def end(number: int, frame: FrameType | None) -> None:
        raise TooSlowError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def refused_before_memory(most: int) -> Iterator[None]:
    """A file is refused before more than ``most`` bytes are allocated."""
    tracemalloc.start()
    try:
        with contextlib.suppress(CapibaraError):
            yield
            raise FoundError("a bomb is read")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    if peak > most:
        raise FoundError(f"{peak >> 20} MiB before a bomb is refused")


class Base:
    """A small folder that is well."""

    def __init__(self, name: str, folder: Path, tokenizer: dict[str, bytes]) -> None:
        facts = recorded_facts()[name]
        self.folder = write_folder(folder, facts["config"] | {"vocab_size": 256}, facts["shapes"])
        # As many tokens as bytes, so that the tokenizer fits.
        tensors = load_file(folder / "model.safetensors")
        old = facts["config"]["vocab_size"]
        for key, array in tensors.items():
            if array.shape[0] == old and array.ndim == 2:
                tensors[key] = np.resize(array, (256, array.shape[1]))
        save_file(tensors, folder / "model.safetensors")
        for file, content in tokenizer.items():
            (folder / file).write_bytes(content)
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = (folder / "model.safetensors").read_bytes()
        self.model = ModularCapibaraModel.from_pretrained(folder)
        self.source: Any = self.model.pretrained


class Folders:
    """Small folders to damage; each method is a kind of case."""

    def __init__(self, place: Path, bases: int = len(BASES)) -> None:
        self.place = place
        self.tokenizer = byte_tokenizer_files()
        settings = json.loads(self.tokenizer["tokenizer_config.json"])
        settings |= {"eos_token": "a", "add_bos_token": True, "bos_token": {"content": "b"}}
        settings["chat_template"] = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        self.tokenizer["tokenizer_config.json"] = json.dumps(settings).encode()
        self.tokenizer |= {
            "special_tokens_map.json": b'{"eos_token": {"content": "a"}, "pad_token": "c"}',
            "generation_config.json": b'{"eos_token_id": [97, 98], "pad_token_id": 0}',
            "added_tokens.json": b'{"x": 1}',
        }
        self.configs = [{"model_type": model_type(name), **values} for name, values in CONFIGS.items()]
        self.bases = [Base(name, place / f"base{n}", self.tokenizer) for n, name in enumerate(BASES[:bases])]
        (place / SECRET).write_text(SECRET)
        shutil.copy(self.bases[0].folder / "model.safetensors", place / f"{SECRET}.safetensors")
        self._adapters()
        self._runs()
        self.folder = place / "model"  # what a case reads

    def _adapters(self) -> None:
        self.adapted = []
        for base in self.bases[:2]:
            model = ModularCapibaraModel.from_pretrained(base.folder, overrides=LORA)
            folder = Path(f"{base.folder}-adapter")
            if base.source.family.name == "gpt2":
                model = ModularCapibaraModel.from_pretrained(
                    base.folder, overrides={**LORA, "finetune.targets": ["up", "down"]}
                )
            save_adapter(model, model.params, folder, base.source.family)
            self.adapted.append((base, folder))

    def _runs(self) -> None:
        run = self.place / "whole-run"
        base = self.bases[0]
        self.compressed = self.place / "quantized"
        base.model.save_pretrained(self.compressed, quantize="int4")
        base.model.save_pretrained(self.place / "whole.gguf", quantize="q8_0")
        self.gguf_file = (self.place / "whole.gguf").read_bytes()
        save_pretrained_run(ModularCapibaraModel.from_pretrained(base.folder), run)
        self.run = run

    def _copy(self, base: Base) -> Path:
        """A folder of its own for a case."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(base.folder, self.folder)
        return self.folder

    def outside(self) -> dict[str, int]:
        """What is beside the folder that a case reads: names, and when they were changed."""
        return {
            e.name: e.stat().st_mtime_ns for e in os.scandir(self.place) if not e.name.startswith("model")
        }

    # ---- kinds of cases ------------------------------------------------------------------------------------

    def settings(self, rng: random.Random) -> None:
        """``config.json``."""
        base = rng.choice(self.bases)
        folder = self._copy(base)
        if rng.random() < 0.02:
            (folder / "config.json").write_bytes(json_bomb(rng, BOMB))
            with refused_before_memory(4 * BOMB):
                read_config(folder)
            return
        config = rng.choice([base.config, rng.choice(self.configs)])
        (folder / "config.json").write_bytes(damaged_json(rng, config))
        if rng.random() < 0.1:
            ModularCapibaraModel.from_pretrained(folder)
        else:
            read_config(folder)

    def tensors(self, rng: random.Random) -> None:
        """``model.safetensors``."""
        base = rng.choice(self.bases)
        folder = self._copy(base)
        (folder / "model.safetensors").write_bytes(damaged_tensors(rng, base.weights))
        with TensorFiles(folder) as files:
            load_params(files, base.source.family, base.model)

    def indexes(self, rng: random.Random) -> None:
        """``model.safetensors.index.json``, and the files that it names."""
        base = rng.choice(self.bases)
        folder = self._copy(base)
        if rng.random() < 0.04:
            (folder / "model.safetensors.index.json").write_bytes(json_bomb(rng, BOMB))
            # What is reserved to read a file of 64 MiB counts, and is not touched.
            with refused_before_memory((64 << 20) + 2 * BOMB), TensorFiles(folder):
                pass
            return
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        parts = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
        where = {name: parts[n % 2] for n, name in enumerate(tensors)}
        for part in parts:
            save_file({name: array for name, array in tensors.items() if where[name] == part}, folder / part)
        index: dict[str, Any] = {"metadata": {"total_size": len(base.weights)}, "weight_map": where}
        action = rng.random()
        if action < 0.4:
            for _ in range(rng.choice([1, 1, len(where)])):
                where[rng.choice(list(where))] = rng.choice(OUTSIDE)
        text = json.dumps(index).encode() if action < 0.3 else damaged_json(rng, index)
        (folder / "model.safetensors.index.json").write_bytes(text)
        if action > 0.9:
            part = folder / rng.choice(parts)
            part.write_bytes(damaged_tensors(rng, part.read_bytes()))
        with TensorFiles(folder) as files:
            assert all(file.path.parent == folder for file, _ in files.tensors.values())
            load_params(files, base.source.family, base.model)

    def links(self, rng: random.Random) -> None:
        """A file that is a link, a folder, or a pipe."""
        base = rng.choice(self.bases)
        folder = self._copy(base)
        path = folder / rng.choice(
            ["config.json", "model.safetensors", "model.safetensors.index.json", *self.tokenizer]
        )
        path.unlink(missing_ok=True)
        kind = rng.randrange(7)
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.mkdir()
        elif kind == 2:
            path.symlink_to(path)
        elif kind == 3 and path.name in os.listdir(base.folder):  # as in a cache of Hugging Face
            path.symlink_to(Path("..") / base.folder.name / path.name)
        else:
            path.symlink_to(rng.choice(["/dev/zero", "/dev/urandom", "nowhere", "..", f"../{SECRET}"]))
        model = ModularCapibaraModel.from_pretrained(folder)
        if model.tokenizer_files:
            FileTokenizer(model.tokenizer_files, folder).encode("Capibara")

    def tokenizers(self, rng: random.Random) -> None:
        """``tokenizer.json`` and the files beside it."""
        names = [name for name in self.tokenizer if name.endswith(".json")]
        name = rng.choice(["tokenizer.json", *names])
        value = json.loads(self.tokenizer[name])
        if evil := name == "tokenizer.json" and rng.random() < 0.5:
            evil_tokenizer(rng, value)
        content = json.dumps(value).encode() if evil else damaged_json(rng, value)
        folder = self._copy(self.bases[0])
        (folder / name).write_bytes(content)
        found = FileTokenizer(read_tokenizer_files(folder), folder)
        tokens = found.encode("Capibaras swim 🏊 ﷺ 株" + "a" * rng.choice([0, 100, 2000]) + "!")
        found.decode(tokens)
        stream = found.stream()
        "".join([*map(stream.push, tokens[:8].tolist()), stream.finish()])
        if rng.random() < 0.05 and found.template is not None:
            found.chat([{"role": "user", "content": "x"}])

    def templates(self, rng: random.Random) -> None:
        """``chat_template.jinja``."""
        template = rng.choice(TEMPLATES)
        if rng.random() < 0.3:
            at = rng.randrange(len(template))
            template = template[:at] + rng.choice(["{{", "}}", "{%", "%}", "'", "__"]) + template[at:]
        files = {**self.tokenizer, "chat_template.jinja": template.encode()}
        text = FileTokenizer(files, self.folder).chat([{"role": "user", "content": f"../{SECRET}"}])
        if "root:" in text or "<class" in text or "<module" in text:
            raise FoundError(f"a template wrote {text!r:.200}")

    def adapters(self, rng: random.Random) -> None:
        """``adapter_config.json`` and ``adapter_model.safetensors``."""
        base, whole = rng.choice(self.adapted)
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(whole, self.folder)
        if rng.random() < 0.6:
            path = self.folder / "adapter_config.json"
            path.write_bytes(damaged_json(rng, json.loads(path.read_text())))
        else:
            path = self.folder / "adapter_model.safetensors"
            path.write_bytes(damaged_tensors(rng, path.read_bytes()))
        ModularCapibaraModel.from_pretrained(base.folder, adapter=self.folder)

    def records(self, rng: random.Random) -> None:
        """Files of JSON Lines, whole and compressed, and Parquet."""
        texts = [{"text": f"Text {n}"} for n in range(5)]
        prompts = [{"prompt": f"{n}? ", "completion": "yes"} for n in range(5)]
        pairs = [{"prompt": f"{n}? ", "chosen": "yes", "rejected": "no"} for n in range(5)]
        talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
        kinds: list[list[dict[str, Any]]] = [texts, prompts, pairs]
        if rng.random() < 0.2:
            kinds = [[{"messages": talk}] * 3, [{"prompt": talk[:1], "completion": talk[1:]}] * 3]
        lines = rng.choice(kinds)
        suffix = rng.choice([".jsonl", ".jsonl", ".jsonl.gz", ".parquet"])
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        path = self.folder / f"data{suffix}"
        if suffix == ".parquet":
            content = _parquet(rng, lines)
        elif rng.random() < 0.1:
            content = b'{"text": "' + b"x" * (70 << 20) + b'"}'
        else:
            parts = [
                damaged_json(rng, one) if rng.random() < 0.3 else json.dumps(one).encode() for one in lines
            ]
            content = rng.choice([b"\n", b"\r\n", b"\n\n", b"\x00\n", b"\n\xef\xbb\xbf"]).join(parts)
        if suffix == ".jsonl.gz":
            content = gzip.compress(content, 1)
        if rng.random() < 0.4:
            content = damaged_bytes(rng, content)
        path.write_bytes(content)
        settings = {"data.paths": [str(path)], "data.packing": rng.choice(["auto", "documents"])}
        objective = "dpo" if lines is pairs and rng.random() < 0.7 else "next_token"
        if objective == "dpo":
            settings["data.packing"] = "auto"
        section = ModularModelConfig.from_toml("demo", settings).data
        load_data(section, objective=objective, tokenizer=FileTokenizer(self.tokenizer, self.folder))

    def runs(self, rng: random.Random) -> None:
        """A run of our own: manifest, record, settings and the arrays' files, with or without checksums that fit."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.run, self.folder)
        (checkpoint,) = (self.folder / "checkpoints").iterdir()
        files = sorted(p for p in checkpoint.rglob("*") if p.is_file())
        path = rng.choice(
            [checkpoint / name for name in ("manifest.json", "meta.json", "config.toml")] * 4 + files
        )
        if path.suffix == ".json":
            try:
                value = json.loads(path.read_text())
            except ValueError:
                value = {}
            if path.name == "manifest.json" and rng.random() < 0.2:
                value["files"][f"../../../{SECRET}"] = [
                    len(SECRET),
                    hashlib.sha256(SECRET.encode()).hexdigest(),
                ]
                path.write_text(json.dumps(value))
            else:
                path.write_bytes(damaged_json(rng, value))
        else:
            path.write_bytes(damaged_bytes(rng, path.read_bytes() or b"x"))
        if path.name != "manifest.json" and rng.random() < 0.7:
            manifest = checkpoint / "manifest.json"
            value = json.loads(manifest.read_text())
            content = path.read_bytes()
            name = path.relative_to(checkpoint).as_posix()
            value["files"][name] = [len(content), hashlib.sha256(content).hexdigest()]
            manifest.write_text(json.dumps(value))
        load_model(find_checkpoint(self.folder))

    def quantized(self, rng: random.Random) -> None:
        """The ``quantization_config`` and the tensors of a folder in the form of compressed-tensors."""
        values = json.loads((self.compressed / "config.json").read_text())
        whole = (self.compressed / "model.safetensors").read_bytes()
        if rng.random() < 0.6:
            text = damaged_json(rng, values["quantization_config"])
            with contextlib.suppress(ValueError, RecursionError):
                values["quantization_config"] = json.loads(text)
        else:
            whole = damaged_tensors(rng, whole)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        (self.folder / "config.json").write_text(json.dumps(values))
        (self.folder / "model.safetensors").write_bytes(whole)
        _, source = read_config(self.folder)
        base = self.bases[0]
        with open_tensors(self.folder, source) as files:
            load_params(files, base.source.family, base.model)

    def gguf(self, rng: random.Random) -> None:
        """A GGUF file: bytes of its header, numbers in it, parts of it elsewhere, its end, values of other types."""
        path = self.place / "model.gguf"
        if rng.random() < 0.05:
            bomb = {"llama.x": struct.pack("<IIQ", 9, 0, BOMB) + bytes(BOMB)}
            path.write_bytes(gguf_with(self.gguf_file, bomb))
            with refused_before_memory(6 * BOMB):
                read_config(path)
            return
        damaged, end = bytearray(self.gguf_file), self.gguf_file.rindex(b".weight") + 64
        at = rng.randrange(4, end)
        action = rng.choice(["bytes", "long", "int", "cut", "copy", "value", "value"])
        if action == "value":
            damaged = bytearray(damaged_gguf(rng, self.gguf_file))
        elif action == "bytes":
            for _ in range(rng.randrange(1, 5)):
                damaged[rng.randrange(end)] = rng.randrange(256)
        elif action == "cut":
            damaged = damaged[: rng.randrange(len(damaged))]
        elif action == "copy":
            start, size = rng.randrange(end), rng.randrange(1, 60)
            damaged[at : at + size] = damaged[start : start + size]
        else:
            value = rng.choice([0, 1, 255, len(damaged), 1 << 31, 1 << 32, 1 << 40, 1 << 63, (1 << 64) - 1])
            kind, most = ("<Q", 1 << 64) if action == "long" else ("<I", 1 << 32)
            struct.pack_into(kind, damaged, at, value % most)
        path.write_bytes(damaged)
        config, source = read_config(path)
        if files := tokenizer_files_of(path):
            FileTokenizer(files, path).encode("Capibaras swim 🏊")
        base = self.bases[0]
        with open_tensors(path, source) as tensors:
            if config.model == base.model.config.model and source.family is base.source.family:
                load_params(tensors, base.source.family, base.model)

    def verbs(self, rng: random.Random) -> None:
        """``capibara import``, of a folder with any of these."""
        kind = rng.choice([self.settings, self.tensors, self.indexes, self.tokenizers, self.links])
        with contextlib.suppress(CapibaraError, AssertionError):
            kind(rng)
        run = self.place / "model-run"
        shutil.rmtree(run, ignore_errors=True)
        out, told = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            code = command(["import", str(self.folder), str(run), "--json"])
        if code not in (0, 2) or (code == 0) != bool(out.getvalue()):
            raise FoundError(f"import ends with {code}: {told.getvalue()[:300]!r}")
        if code:
            raise CapibaraError(told.getvalue().strip())


def _parquet(rng: random.Random, lines: list[dict[str, Any]]) -> bytes:
    """The lines as Parquet, some of them with columns of other types."""
    import pyarrow as pa
    from pyarrow import parquet

    columns: dict[str, Any] = {key: [one[key] for one in lines] for key in lines[0]}
    if rng.random() < 0.5:
        others: list[Any] = [
            list(range(len(lines))),
            [None] * len(lines),
            [b"\xff\xfe"] * len(lines),
            [[["x"]]] * len(lines),
            [{"text": float("nan")}] * len(lines),
            [2**60] * len(lines),
        ]
        columns[rng.choice([*columns, "other"])] = rng.choice(others)
    stream = io.BytesIO()
    parquet.write_table(
        pa.table(columns),
        stream,
        compression=rng.choice(["none", "snappy", "zstd", "gzip"]),
        write_page_checksum=rng.random() < 0.5,
    )
    return stream.getvalue()


WEIGHTS = {
    "settings": 6,
    "tensors": 5,
    "indexes": 3.5,
    "links": 0.25,
    "tokenizers": 3,
    "quantized": 1.5,
    "gguf": 2,
    "templates": 0.25,
    "adapters": 0.2,
    "records": 1,
    "runs": 0.3,
    "verbs": 0.3,
}


def run(
    cases: int,
    seed: int,
    report: Callable[[str], None] = print,
    *,
    first: int = 0,
    only: str | None = None,
    bases: int = len(BASES),
) -> tuple[Counter[str], list[str]]:
    """How many cases ended how, and what was found."""
    ends: Counter[str] = Counter()
    findings: list[str] = []
    opened = Opened()
    # A process that has run other tests has had much memory already.
    most = _most_memory() + MEMORY

    def found(text: str) -> None:
        findings.append(ascii(f"case {number} ({kind}): {text}")[1:-1])
        report(findings[-1])

    with tempfile.TemporaryDirectory(prefix="capibara-folders-") as place, contextlib.chdir(place):
        folders = Folders(Path(place), bases)
        outside = folders.outside()
        for number in range(first, first + cases):
            rng = random.Random(f"{seed} {number}")
            (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
            if only not in (None, kind):
                continue
            begun = time.perf_counter()
            # The case prepares its files itself: in the place, nowhere else.
            opened.folder, opened.outside = Path(place), []
            try:
                with limited():
                    getattr(folders, kind)(rng)
            except CapibaraError as error:
                ends[f"{kind}: refused"] += 1
                if problem := _unclear(str(error), place):
                    found(f"{problem}: {error!s:.400}")
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                found(f"{type(error).__name__}: {error!s:.300} at {_where(error)}")
            else:
                ends[f"{kind}: read"] += 1
            finally:
                opened.folder = None
            if opened.outside:
                found(f"opened {opened.outside[0]}")
            if folders.outside() != outside:
                found("changed what is outside of the folder")
                outside = folders.outside()
            if (took := time.perf_counter() - begun) > SECONDS:
                found(f"{took:.0f} s")
            if _most_memory() > most:
                found(f"more than {MEMORY >> 30} GiB")
                break
    return ends, findings


def _most_memory() -> int:
    """The most bytes of memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _unclear(message: str, place: str) -> str | None:
    """What a message lacks."""
    if not message.strip() or len(message) > 4000:
        return f"a message of {len(message)} characters"
    if re.search(r"[^\n\x20-\x7e\x80-\ud7ff\ue000-\U0010ffff]", message):
        return "a message that would change a terminal"
    if place not in message and not re.search(r"\bmodel(-run)?/", message):  # the folder in which it runs
        return "a message without the file"
    if not REMEDY.search(message):
        return "a message without a remedy"
    return None


def _where(error: BaseException) -> str:
    """The last place in Capibara that an error came through."""
    trace, place = error.__traceback__, "?"
    while trace is not None:
        code = trace.tb_frame.f_code
        if "capibara" in code.co_filename:
            place = f"{Path(code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def main() -> int:
    """Run the fuzzer; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first case")
    parser.add_argument("--kind", choices=WEIGHTS, help="only cases of this kind")
    args = parser.parse_args()
    begun = time.perf_counter()
    ends, findings = run(args.cases, args.seed, first=args.first, only=args.kind)
    memory = _most_memory() / 2**20
    print(f"{sum(ends.values()):,} cases in {time.perf_counter() - begun:.0f} s, {memory:,.0f} MiB at most")
    for end, count in sorted(ends.items()):
        print(f"  {end:24}{count:,}")
    print(f"{len(findings)} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

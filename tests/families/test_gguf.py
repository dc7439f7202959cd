"""GGUF files: the package ``gguf`` and transformers read what we wrote as we read it; damage is an error."""

from __future__ import annotations

import random
import re
import struct
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folder_damage import gguf_value, gguf_with
from published import tokens, write_folder
from safetensors.numpy import load_file
from transformers_oracle import recorded_facts

from capibara.core import ModularCapibaraModel
from capibara.families import FamilyError, read_config
from capibara.families.gguf import GgufFile
from capibara.families.gguf.blocks import KINDS
from capibara.families.gguf.names import ARCHITECTURES, of_family
from capibara.families.gguf.reading import GgufTensors
from capibara.families.gguf.tokens import gguf_tokenizer_files

gguf = pytest.importorskip("gguf")

# What llama.cpp's code says of these families has to be what their config.json says.
_HEADS_OF_GEMMA = {"query_pre_attn_scalar": 8}
NAMES = {
    "llama": {},
    "llama 3.1, one key head, tied": {},
    "llama with biases": {},
    "mistral, no window": {},
    "mixtral": {},
    "qwen2": {},
    "qwen3, tied, one key head": {},
    "qwen3_moe": {},
    "gemma2": _HEADS_OF_GEMMA,
    "gemma3": _HEADS_OF_GEMMA,
    "phi3, heads turned in part": {},
    "olmo2, stretched": {},
    "gpt2, untied": {},
}
QUICK = ("llama 3.1, one key head, tied", "qwen3_moe", "gemma3", "gpt2, untied")


def published(name: str, folder: Path, **changes: Any) -> Path:
    facts = recorded_facts()[name]
    return write_folder(folder, facts["config"] | NAMES.get(name, {}) | changes, facts["shapes"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS.values() if kind.decode])
def test_blocks_are_decoded_as_the_package_decodes(kind: Any) -> None:
    raw = np.random.default_rng(3).integers(0, 256, (9, kind.size), np.uint8)
    halves = {"Q6_K": [208]}.get(kind.name, [0, 2] if kind.name.endswith(("_1", "_K")) else [0])
    for at in halves:  # scales that are numbers
        raw[:, at : at + 2] = np.random.default_rng(at).standard_normal((9, 1)).astype("<f2").view(np.uint8)
    expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind.name])
    assert kind.decode is not None
    np.testing.assert_array_equal(kind.decode(raw), expected.reshape(9, kind.block))


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in NAMES]
)
def test_a_folder_goes_out_and_in(name: str, tmp_path: Path) -> None:
    folder = published(name, tmp_path / "model")
    model = ModularCapibaraModel.from_pretrained(folder)
    model.save_pretrained(tmp_path / "model.gguf")
    back = ModularCapibaraModel.from_pretrained(tmp_path / "model.gguf")
    back.save_pretrained(tmp_path / "out")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    for tensor, array in before.items():
        if "gemma" in name and "norm" in tensor:  # 1 was added, and has rounded
            np.testing.assert_allclose(after[tensor], array, rtol=0, atol=2e-7)
        else:
            assert after[tensor].tobytes() == array.tobytes(), tensor

    # The package reads what was written, under the names that llama.cpp has.
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    assert model.pretrained is not None
    arch = of_family(model.pretrained.family.name)
    known = {theirs: ours for ours, theirs in gguf.MODEL_ARCH_NAMES.items()}[arch.name]
    names = gguf.get_tensor_name_map(known, model.config.model.num_layers)
    ours = {tensor.name for tensor in reader.tensors} - {"rope_freqs.weight"}
    assert ours == {f"{names.get_name(n.rpartition('.')[0])}.{n.rpartition('.')[2]}" for n in _merged(before)}


def _merged(names: Any) -> set[str]:
    """Names of tensors, those of experts as one."""
    parts = [name.split(".experts.") for name in names]
    return {f"{a}.experts.{b[0].partition('.')[2]}" if b else a for a, *b in parts}


@pytest.mark.parametrize("quantize", ["q8_0", "q4_0", "f16", "bf16"])
def test_quantized_values_are_those_of_the_package(quantize: str, tmp_path: Path) -> None:
    config = recorded_facts()["qwen2"]["config"]
    model = ModularCapibaraModel.from_pretrained(published("qwen2", tmp_path / "model"))
    model.save_pretrained(tmp_path / "model.gguf", quantize=quantize)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    kinds = {tensor.tensor_type.name for tensor in reader.tensors}
    assert quantize.upper() in kinds
    with GgufFile(tmp_path / "model.gguf") as file:
        for name, tensor in stored.items():
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            count = int(np.prod(expected.shape))
            found = file.values(name, 0, count)
            kind = file.tensors[name].kind
            if kind.name == "BF16":
                found = (found.astype(np.uint32) << 16).view(np.float32)
            elif kind.plain is not None and kind.plain.numpy is not None:
                found = found.view(kind.plain.numpy).astype(np.float32)
            np.testing.assert_array_equal(found.reshape(expected.shape), expected)
            # Elements in the middle of blocks.
            np.testing.assert_array_equal(
                file.values(name, 5, min(count, 70)), file.values(name, 0, count)[5 : min(count, 70)]
            )
    read, source = read_config(tmp_path / "model.gguf")
    assert read.precision.param_dtype == ("float16" if quantize == "f16" else "bfloat16")
    assert source.values["vocab_size"] == config["vocab_size"]
    assert bool(source.notes) is (quantize[0] == "q")


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["f32", "q8_0"])
@pytest.mark.parametrize(
    "name", ["llama", "mistral, no window", "qwen2", "qwen3", "qwen3_moe", "phi3", "gemma2", "gemma3", "gpt2"]
)
def test_transformers_computes_the_same(name: str, quantize: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import transformers_oracle as oracle

    folder = published(name, tmp_path / "model", **(_HEADS_OF_GEMMA if "gemma" in name else {}))
    ModularCapibaraModel.from_pretrained(folder).save_pretrained(tmp_path / "model.gguf", quantize=quantize)
    ours = ModularCapibaraModel.from_pretrained(tmp_path / "model.gguf", dtype="float32")
    text = tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path,
            gguf_file="model.gguf",
            # Its reader leaves some keys out (the size of heads, the vocabulary), and takes Mistral's for Llama's.
            config=None if "mistral" in name else transformers.AutoConfig.from_pretrained(folder),
            attn_implementation="eager",
            dtype="float32",
        ).eval()
        found = oracle.logits(theirs, text)
    # Of Gemma with these sharper scores, float32 of either is 1.5e-4 from float64.
    np.testing.assert_allclose(ours(text), found, rtol=0, atol=3e-4 if "gemma" in name else 1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("mistral, a window", {}, "window=5"),
        ("gpt2, another activation", {}, "activation='relu'"),
        ("gemma2", {"query_pre_attn_scalar": 24}, "attention_scale"),
        ("qwen3 with biases", {}, "attention_bias=True"),
        ("qwen3_moe, weights as they are, tied", {}, "normalise=False"),
    ],
)
def test_what_a_file_cannot_say(name: str, changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    model = ModularCapibaraModel.from_pretrained(published(name, tmp_path / "model", **changes))
    with pytest.raises(FamilyError, match=f"does not support .*{told}"):
        model.save_pretrained(tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_window_that_no_text_is_longer_than(tmp_path: Path) -> None:
    folder = published("mistral, a window", tmp_path / "model", sliding_window=96)
    model = ModularCapibaraModel.from_pretrained(folder)
    model.save_pretrained(tmp_path / "model.gguf")
    back = ModularCapibaraModel.from_pretrained(tmp_path / "model.gguf")
    np.testing.assert_array_equal(model(tokens()), back(tokens()))


# ---- files that are not what they should be ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file, written through the package, with values of every type."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"context_length": 16, "embedding_length": 32, "block_count": 1, "feed_forward_length": 64}
    for key, value in (sizes | {"attention.head_count": 2, "attention.head_count_kv": 1}).items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_bool("general.flag", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 2.0])
    draws = np.random.default_rng(0)
    shapes = {"token_embd": (3, 32), "output_norm": (32,), "blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32)}
    for name, shape in shapes.items():
        array = draws.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", array)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_values_of_every_type(small: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(small)
    with GgufFile(tmp_path / "a.gguf") as file:
        assert file.version == 3
        assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-6
        assert file.metadata["general.flag"] is True
        assert file.metadata["tokenizer.ggml.tokens"] == ["a", "bc", ""]
        np.testing.assert_array_equal(file.metadata["tokenizer.ggml.scores"], [0.5, -1.0, 2.0])
        assert file.tensors["blk.0.attn_k.weight"].shape == (16, 32)


def test_any_damage_is_one_error(small: bytes, tmp_path: Path) -> None:
    """Random bytes of the header, numbers that are too large in every place, cut files: an error of ours, or a file."""
    draws = random.Random(0)
    path = tmp_path / "a.gguf"
    header = small.index(b"blk.0.attn_k.weight") + 64
    huge = [(1 << 64) - 1, 1 << 63, 1 << 40, 1 << 32, len(small), 0]
    refused = 0
    for number in range(400):
        damaged = bytearray(small)
        if number % 4 == 0:
            for _ in range(draws.randrange(1, 4)):
                damaged[draws.randrange(header)] = draws.randrange(256)
        elif number % 4 == 1:
            struct.pack_into("<Q", damaged, draws.randrange(8, header), draws.choice(huge))
        elif number % 4 == 2:
            struct.pack_into("<I", damaged, draws.randrange(4, header), draws.choice(huge) & 0xFFFFFFFF)
        else:
            damaged = damaged[: draws.randrange(len(damaged))]
        path.write_bytes(damaged)
        try:
            read_config(path)
            with GgufTensors(path) as files:
                for name, (file, stored) in files.tensors.items():
                    count = int(np.prod(stored.shape))
                    assert np.asarray(file.numbers(name)[0:count]).nbytes <= 8 * len(small)
        except FamilyError:
            refused += 1
    assert refused > 200


def _changed(small: bytes, before: bytes, after: bytes, count: int = 1) -> bytes:
    assert before in small
    return small.replace(before, after, count)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda b: b"GGML" + b[4:], "does not begin with the letters GGUF"),
        (lambda b: b[:4] + b"\0\0\0\3" + b[8:], "big-endian"),
        (lambda b: b[:4] + b"\1" + b[5:], "version 1"),
        (lambda b: b[:8] + b"\xff" * 8 + b[16:], "more than fit in the file"),
        (lambda b: b[:400], "ends before its header does"),
        (lambda b: b[:-40], "does not hold|is smaller than"),
        (lambda b: _changed(b, b"blk.0.attn_k", b"blk.0.attn_q"), "twice"),
        (lambda b: _changed(b, b"blk.0.attn_k", b"blk.0.attn_x"), "no place for the tensor"),
        (lambda b: _changed(b, b"llama.block_count", b"llama.block_cOunt"), "'block_count' is missing"),
        (lambda b: _changed(b, b"llama", b"lamas"), "general.architecture: got 'lamas'"),
    ],
)
def test_a_file_that_is_no_model(small: bytes, change: Any, told: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(change(small))
    with pytest.raises(FamilyError, match=told):
        read_config(path)
        GgufTensors(path)


WRONG = {
    "general.architecture": ("u32", [1, 2]),
    "general.alignment": ("str", ["a"]),
    "split.count": ("u16", [1, 1]),
    "llama.expert_count": ("u32", [2, 2]),
    "llama.block_count": ("str", ["a"]),
    "llama.rope.scaling.type": ("f32", [0.5, 0.5]),
    "tokenizer.ggml.bos_token_id": ("str", "a"),
    "tokenizer.ggml.model": ("u32", [1, 2]),
    "tokenizer.ggml.pre": ("str", ["a", "b"]),
    "tokenizer.ggml.tokens": ("u8", [1]),
    "tokenizer.ggml.token_type": ("str", ["a"] * 3),
    "tokenizer.ggml.merges": ("u32", 1),
    "tokenizer.ggml.scores": ("str", ["a"] * 3),
    "tokenizer.ggml.add_bos_token": ("u8", 1),
    "tokenizer.ggml.add_space_prefix": ("f32", 1.0),
    "tokenizer.chat_template": ("bool", 1),
    "tokenizer.huggingface.json": ("u32", [1]),
}


@pytest.mark.parametrize("key", WRONG)
def test_values_of_other_types(key: str, small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    llama = {"tokenizer.ggml.model": gguf_value("str", "llama")}
    path.write_bytes(gguf_with(small, llama))
    read_config(path)
    path.write_bytes(gguf_with(small, llama | {key: gguf_value(*WRONG[key])}))
    with pytest.raises(FamilyError, match=re.escape(f"{key.removeprefix('llama.')}: got")) as found:
        read_config(path)
        gguf_tokenizer_files(path)
    assert "expected" in str(found.value)


def test_arrays_are_refused_before_they_are_lists(small: bytes, tmp_path: Path) -> None:
    size = 8 << 20
    array = struct.pack("<IIQ", 9, 0, size) + bytes(size)
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf_with(small, {"llama.rope.dimension_sections": array}))
    tracemalloc.start()
    with pytest.raises(FamilyError, match="got an array of 8388608 elements, expected at most 4096"):
        read_config(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 * size  # a list takes 8 bytes for each


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FamilyError, match="No such file"):
        read_config(tmp_path / "none.gguf")


def test_formats_that_are_not_decoded(small: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    at = small.index(b"blk.0.attn_k.weight") + len(b"blk.0.attn_k.weight") + 4 + 16
    path.write_bytes(small[:at] + struct.pack("<I", 10) + small[at + 4 :])
    with pytest.raises(FamilyError, match="is stored as Q2_K, expected one of F32"):
        read_config(path)


def test_every_family_has_a_place_for_its_tensors() -> None:
    for arch in ARCHITECTURES:
        for theirs, ours in (*arch.inside.items(), *arch.outside.items()):
            inside = theirs in arch.inside
            name = f"{arch.block}3.{ours}.weight" if inside else f"{ours}.weight"
            there, expert = arch.to_file(name.replace("{expert}", "2"))
            assert there == (f"blk.3.{theirs}.weight" if inside else f"{theirs}.weight")
            assert (expert == 2) is ("{expert}" in ours)
            assert arch.to_folder(there) == name
    with pytest.raises(FamilyError, match="no place for the tensor"):
        of_family("llama").to_file("model.layers.0.self_attn.rotary_emb.inv_freq")

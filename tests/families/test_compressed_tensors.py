"""Quantized folders in the form of compressed-tensors: its own package and transformers decode what we decode."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from published import tokens, write_folder
from quantized_folders import CONFIG, shapes
from safetensors.numpy import load_file, save_file

from capibara.core import ModularCapibaraModel
from capibara.families import FAMILIES as FAMILIES_BY_NAME
from capibara.families import FamilyError, open_tensors, read_config
from capibara.families.compressed.packing import pack_rows, unpack_rows
from capibara.families.compressed.writing import Quantizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModularCapibaraModel:
    folder = write_folder(tmp_path_factory.mktemp("model"), CONFIG, shapes())
    return ModularCapibaraModel.from_pretrained(folder)


@pytest.fixture
def int4(model: ModularCapibaraModel, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "out", quantize="int4")
    return tmp_path / "out"


CASES = [("int4", False, 64), ("int4", True, 64), ("int8", False, None), ("w8a8", False, None)]


def test_packed_words() -> None:
    draws = np.random.default_rng(0)
    for bits in (4, 8):
        for length in (1, 7, 8, 33):
            codes = draws.integers(-(1 << (bits - 1)), 1 << (bits - 1), (3, length)).astype(np.int8)
            words = pack_rows(codes, bits)
            np.testing.assert_array_equal(unpack_rows(words, bits, length), codes)
            # By the definition: the value of a row's words as one integer.
            whole = int.from_bytes(words[1].tobytes(), "little")
            first = [(whole >> (bits * i)) & ((1 << bits) - 1) for i in range(length)]
            np.testing.assert_array_equal(np.array(first) - (1 << (bits - 1)), codes[1])


@pytest.mark.slow  # importing the package takes seconds
def test_words_of_odd_widths_are_those_of_the_package() -> None:
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in range(2, 9):
        codes = np.random.default_rng(bits).integers(-(1 << (bits - 1)), 1 << (bits - 1), (5, 43))
        theirs = helpers.pack_to_int32(torch.from_numpy(codes.astype(np.int8)), bits).numpy()
        np.testing.assert_array_equal(unpack_rows(theirs, bits, 43), codes)
        if bits in (4, 8):
            np.testing.assert_array_equal(pack_rows(codes.astype(np.int8), bits), theirs)


@pytest.mark.thin(2)
@pytest.mark.parametrize(("quantize", "asymmetric", "group"), CASES)
def test_a_folder_goes_out_and_in(
    model: ModularCapibaraModel, tmp_path: Path, quantize: str, asymmetric: bool, group: int | None
) -> None:
    model.save_pretrained(tmp_path / "out", quantize=quantize, asymmetric=asymmetric)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    assert weights["group_size"] == group
    assert weights["symmetric"] is not asymmetric
    back = ModularCapibaraModel.from_pretrained(tmp_path / "out")
    assert back.pretrained is not None
    assert "decoded" in back.pretrained.notes[0]
    for part, limit in (("mlp", 0.12 if quantize == "int4" else 0.01), ("final_norm", 0.0)):
        a, b = (m.params["blocks"][part]["up"]["weight"] if part == "mlp" else m.params[part]["scale"]
                for m in (model, back))  # fmt: skip
        assert np.linalg.norm(np.asarray(a) - np.asarray(b)) <= limit * np.linalg.norm(np.asarray(a))
    # Decoded, it leaves as any other folder does.
    back.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    text = tokens(vocab=61)[:, :6]
    again = ModularCapibaraModel.from_pretrained(tmp_path / "plain")
    np.testing.assert_array_equal(back(text), again(text))


@pytest.mark.slow  # transformers is imported
@pytest.mark.parametrize(("quantize", "asymmetric", "group"), CASES)
def test_transformers_computes_the_same(
    model: ModularCapibaraModel, tmp_path: Path, quantize: str, asymmetric: bool, group: int | None
) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    import transformers_oracle as oracle

    model.save_pretrained(tmp_path / "out", quantize=quantize, asymmetric=asymmetric)
    ours = ModularCapibaraModel.from_pretrained(tmp_path / "out")
    text = tokens()
    # With activations of 8 bits its own model computes other numbers, and it does not take packed zero points into a
    # model that stays quantized: its decoded weights are compared.
    ways = [True] if quantize == "w8a8" or asymmetric else [True, False]
    for decoded in ways:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = transformers.AutoModelForCausalLM.from_pretrained(
                tmp_path / "out",
                quantization_config=transformers.CompressedTensorsConfig(dequantize=decoded),
                attn_implementation="eager",
            ).eval()
            found = oracle.logits(theirs, text)
        np.testing.assert_allclose(ours(text), found, rtol=0, atol=1e-4)


FAMILIES = [
    "mistral, no window",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "mixtral",
    "qwen3_moe",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_computes_the_same_of_every_family(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    import transformers_oracle as oracle

    facts = oracle.recorded_facts()[name]
    folder = write_folder(tmp_path / "model", facts["config"], facts["shapes"])
    ModularCapibaraModel.from_pretrained(folder).save_pretrained(tmp_path / "out", quantize="int4")
    ours = ModularCapibaraModel.from_pretrained(tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", attn_implementation="eager"
        ).eval()
        found = oracle.logits(theirs, tokens())
    np.testing.assert_allclose(ours(tokens()), found, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_decoded_as_the_package_decodes(model: ModularCapibaraModel, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    from compressed_tensors.quantization import QuantizationScheme

    for quantize, asymmetric, _ in CASES:
        out = tmp_path / f"{quantize}{asymmetric}"
        model.save_pretrained(out, quantize=quantize, asymmetric=asymmetric)
        config = json.loads((out / "config.json").read_text())["quantization_config"]
        scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
        compressor = compressors.BaseCompressor.get_value_from_registry(config["format"])
        stem = "model.layers.1.mlp.down_proj."
        parts = {
            name.removeprefix(stem): torch.from_numpy(array)
            for name, array in load_file(out / "model.safetensors").items()
            if name.startswith(stem)
        }
        expected = compressor.decompress(parts, scheme)["weight"].numpy()
        ours = ModularCapibaraModel.from_pretrained(out).params["blocks"]["mlp"]["down"]["weight"][1]
        np.testing.assert_allclose(np.asarray(ours).T, expected, rtol=1e-6, atol=0)


def rewritten(folder: Path, **changes: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    for name, array in changes.items():
        if array is None:
            del tensors[name]
        else:
            tensors[name] = array
    save_file(tensors, folder / "model.safetensors")
    return folder


STEM = "model.layers.0.mlp.up_proj."


@pytest.mark.parametrize(
    ("name", "array", "told"),
    [
        ("weight_scale", None, "weight_scale: is missing"),
        ("weight_shape", None, "weight_shape: is missing"),
        ("weight_shape", np.array([128, 1 << 40]), "does not fit"),
        ("weight_shape", np.array([128, -64]), "does not fit"),
        ("weight_shape", np.array([1 << 40, 64]), "does not fit"),
        ("weight_shape", np.array([128.0, 64.0], np.float32), "weight_shape: is F32"),
        ("weight_scale", np.ones((128, 2), np.float32), "weight_scale: is F32"),
        ("weight_packed", np.zeros((128, 8), np.float32), "weight_packed: is F32"),
        ("weight_packed", np.zeros((128, 7), np.int32), "does not fit"),
        ("weight_packed", np.zeros((2, 128, 8), np.int32), "expected two dimensions"),
        ("weight_g_idx", np.zeros(63, np.int32), "weight_g_idx: is I32"),
        ("weight_g_idx", np.full(64, 7, np.int32), "names a group that is not there"),
    ],
)
def test_parts_that_do_not_fit(int4: Path, name: str, array: Any, told: str) -> None:
    rewritten(int4, **{STEM + name: array})
    _, source = read_config(int4)
    with pytest.raises(FamilyError, match=told), open_tensors(int4, source) as files:
        np.asarray(files.tensors[f"{STEM}weight"][0].numbers(f"{STEM}weight")[0:64])


def test_groups_in_another_order(int4: Path) -> None:
    down = "model.layers.0.mlp.down_proj."
    before = load_file(int4 / "model.safetensors")
    place = np.arange(128, dtype=np.int32) % 2
    rewritten(int4, **{f"{down}weight_g_idx": place})
    found = ModularCapibaraModel.from_pretrained(int4).params["blocks"]["mlp"]["down"]["weight"][0]
    codes = unpack_rows(before[f"{down}weight_packed"], 4, 128)
    np.testing.assert_array_equal(np.asarray(found).T, codes * before[f"{down}weight_scale"][:, place])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"quant_method": "gptq"}, "quant_method: got 'gptq'"),
        ({"format": "marlin-24"}, "format: got 'marlin-24'"),
        ({"config_groups": {}}, "config_groups"),
        ({"config_groups": {"a": {"weights": {"type": "float", "num_bits": 8}}}}, "weights.type"),
        ({"config_groups": {"a": {"weights": {"num_bits": 64}}}}, "num_bits"),
        ({"config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "block"}}}}, "strategy"),
        ({"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 0}}}}, "group_size"),
        ({"config_groups": {"a": {"weights": {}}, "b": {"weights": {"num_bits": 4}}}}, "2 schemes"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"transform_config": {"a": 1}}, "transform_config"),
    ],
)
def test_schemes_that_are_not_decoded(int4: Path, change: dict[str, Any], told: str) -> None:
    path = int4 / "config.json"
    values = json.loads(path.read_text())
    values["quantization_config"] |= change
    path.write_text(json.dumps(values))
    with pytest.raises(FamilyError, match=told):
        read_config(int4)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"quantize": "int3"}, "quantize: got 'int3'.*expected one of int4, int8, w8a8"),
        ({"format": "compressed-tensors"}, "needs quantize"),
        ({"format": "safetensors", "quantize": "int4"}, "expected none"),
        ({"format": "onnx"}, "format: got 'onnx'"),
        ({"format": "gguf"}, r"ends with \.gguf"),
        ({"quantize": "w8a8", "asymmetric": True}, "asymmetric"),
        ({"asymmetric": True}, "asymmetric"),
    ],
)
def test_arguments_that_do_not_fit(
    model: ModularCapibaraModel, tmp_path: Path, arguments: dict[str, Any], told: str
) -> None:
    with pytest.raises(FamilyError, match=told):
        model.save_pretrained(tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "bert", "mamba2"])
def test_families_without_such_matrices(family: str) -> None:
    with pytest.raises(FamilyError, match=f"{family}.* linear layers"):
        Quantizer("int4", FAMILIES_BY_NAME[family], {"a.weight": (64, 64)})

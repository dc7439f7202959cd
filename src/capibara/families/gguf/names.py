"""Architectures of llama.cpp, and which of a file's tensors is which tensor of a published folder.

llama.cpp changes some tensors: it interleaves the halves of heads for rotary positions in its ``llama``, adds 1 to
Gemma's scales, transposes GPT-2's matrices, and stacks the experts of a block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from capibara.families.errors import FamilyError

__all__ = ["ARCHITECTURES", "Architecture", "Change", "find_architecture", "of_family"]


@dataclass(frozen=True)
class Change:
    """How a tensor of a folder becomes one of a file, and back.

    Attributes:
      name: ``"rotary"``, ``"offset"`` or ``"transposed"``.
      there, back: of an array and a number of heads; ``"offset"`` of float32, the others of bits of any width.
    """

    name: str
    there: Callable[[np.ndarray, int], np.ndarray]
    back: Callable[[np.ndarray, int], np.ndarray]


def _halves(array: np.ndarray, heads: int, first: int, second: int) -> np.ndarray:
    """Rows of each head as [first, second], the other way round."""
    apart = array.reshape(heads, first, second, *array.shape[1:])
    return apart.swapaxes(1, 2).reshape(array.shape)


def _size(array: np.ndarray, heads: int) -> int:
    return array.shape[0] // heads // 2


_ROTARY = Change(
    "rotary",
    lambda array, heads: _halves(array, heads, 2, _size(array, heads)),
    lambda array, heads: _halves(array, heads, _size(array, heads), 2),
)
_OFFSET = Change("offset", lambda array, _: array + np.float32(1), lambda array, _: array - np.float32(1))
_TRANSPOSED = Change("transposed", lambda array, _: array.T, lambda array, _: array.T)

# Changes that depend on a number of heads: which one.
_HEADS = {"attn_q": "num_heads", "attn_k": "num_kv_heads"}

_COMMON = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_GATED = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_GEMMA = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _experts(layer: str, gate: str, up: str, down: str) -> dict[str, str]:
    names = {"gate": gate, "up": up, "down": down}
    return {"ffn_gate_inp": f"{layer}.gate"} | {
        f"ffn_{ours}_exps": f"{layer}.experts.{{expert}}.{theirs}" for ours, theirs in names.items()
    }


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, for one family.

    Attributes:
      name: ``general.architecture``. family: the ``model_type``.
      outside, inside: for tensors outside of blocks and in each, their names there → here, without the last part
        (``.weight``, ``.bias``) and without ``blk.0.`` and ``model.layers.0.``.
      block: what stands before the names in a block here.
      changes: name there → how the tensor is changed.
    """

    name: str
    family: str
    inside: Mapping[str, str]
    outside: Mapping[str, str]
    changes: Mapping[str, Change]
    block: str = "model.layers."

    @cached_property
    def _theirs(self) -> dict[str, str]:
        return {ours: theirs for theirs, ours in (*self.inside.items(), *self.outside.items())}

    def to_file(self, name: str) -> tuple[str, int | None]:
        """The name in a file of a folder's tensor, and which expert of it that is.

        Raises:
          FamilyError: llama.cpp has no place for it.
        """
        stem, _, last = name.rpartition(".")
        expert = None
        prefix = ""
        if match := re.fullmatch(re.escape(self.block) + r"(\d+)\.(.*)", stem):
            prefix, stem = f"blk.{match[1]}.", match[2]
        if match := re.fullmatch(r"(.*\.experts\.)(\d+)(\..*)", stem):
            stem, expert = f"{match[1]}{{expert}}{match[3]}", int(match[2])
        if (found := self._theirs.get(stem)) is None:
            raise FamilyError(f"llama.cpp's {self.name} has no place for the tensor {name}")
        return f"{prefix}{found}.{last}", expert

    def to_folder(self, name: str) -> str | None:
        """The name in a folder of a file's tensor, with ``{expert}`` if it has those of all; ``None``: unknown."""
        stem, _, last = name.rpartition(".")
        if last not in ("weight", "bias"):
            return None
        if match := re.fullmatch(r"blk\.(\d{1,6})\.(.*)", stem):
            found = self.inside.get(match[2])
            return None if found is None else f"{self.block}{int(match[1])}.{found}.{last}"
        found = self.outside.get(stem)
        return None if found is None else f"{found}.{last}"

    def change(self, name: str) -> Change | None:
        """How a tensor of a file, by its name there, is changed."""
        *_, stem, last = f".{name}".split(".")
        found = self.changes.get(stem)
        return None if found is _TRANSPOSED and last == "bias" else found

    def heads_of(self, name: str) -> str:
        """The setting that has the number of heads of a file's tensor."""
        return _HEADS.get(name.split(".")[-2], "num_heads")


def _make() -> Iterator[Architecture]:
    rotary = dict.fromkeys(_HEADS, _ROTARY)
    dense = _ATTENTION | _NORMS | _GATED
    yield Architecture("llama", "llama", dense, _COMMON, rotary)
    yield Architecture("llama", "mistral", dense, _COMMON, rotary)
    mixture = _ATTENTION | _NORMS | _experts("block_sparse_moe", "w1", "w3", "w2")
    yield Architecture("llama", "mixtral", mixture, _COMMON, rotary)
    yield Architecture("qwen2", "qwen2", dense, _COMMON, {})
    yield Architecture("qwen3", "qwen3", dense | _HEAD_NORMS, _COMMON, {})
    mixture = _ATTENTION | _NORMS | _HEAD_NORMS | _experts("mlp", "gate_proj", "up_proj", "down_proj")
    yield Architecture("qwen3moe", "qwen3_moe", mixture, _COMMON, {})
    offset = dict.fromkeys((*_GEMMA, *_HEAD_NORMS, "output_norm"), _OFFSET)
    yield Architecture("gemma2", "gemma2", _ATTENTION | _GEMMA | _GATED, _COMMON, offset)
    yield Architecture("gemma3", "gemma3_text", _ATTENTION | _GEMMA | _HEAD_NORMS | _GATED, _COMMON, offset)
    fused = {"attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
    fused |= {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
    yield Architecture("phi3", "phi3", fused | _NORMS, _COMMON, {})
    after = {k: v for k, v in _GEMMA.items() if k.startswith("post")}
    yield Architecture("olmo2", "olmo2", _ATTENTION | _HEAD_NORMS | after | _GATED, _COMMON, {})
    yield Architecture(
        "gpt2",
        "gpt2",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        {
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), _TRANSPOSED),
        "transformer.h.",
    )


ARCHITECTURES = tuple(_make())


def find_architecture(name: object, mixture: bool, where: object) -> Architecture:
    """The architecture of a file.

    Args:
      name: ``general.architecture``. mixture: whether it has experts.

    Raises:
      FamilyError: there is none of this name.
    """
    for one in ARCHITECTURES:
        if one.name == name and ("ffn_gate_inp" in one.inside) == mixture:
            return one
    known = ", ".join(dict.fromkeys(one.name for one in ARCHITECTURES))
    raise FamilyError(
        f"{where}: general.architecture: got {name!r:.80}{' with experts' if mixture else ''}, expected one of {known}"
    )


def of_family(family: str) -> Architecture:
    """The architecture of a family.

    Raises:
      FamilyError: llama.cpp has none for it.
    """
    for one in ARCHITECTURES:
        if one.family == family:
            return one
    known = ", ".join(one.family for one in ARCHITECTURES)
    raise FamilyError(f"family: GGUF cannot hold {family!r}, expected one of {known}")

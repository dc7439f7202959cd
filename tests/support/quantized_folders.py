"""Small models whose folders are quantized: the shapes of a llama, and a DeepSeek-V3 in eight-bit blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from published import SIZES, draw, write_folder
from safetensors.numpy import save_file
from transformers_oracle import recorded_facts

__all__ = ["CONFIG", "FACTS", "NAME", "blocks_folder", "shapes", "shapes_of"]

# A llama whose matrices have groups of 64.
CONFIG: dict[str, Any] = {
    **SIZES,
    "model_type": "llama",
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 61,
}


def shapes() -> dict[str, tuple[int, ...]]:
    block = {
        "input_layernorm.weight": (64,),
        "self_attn.q_proj.weight": (64, 64),
        "self_attn.k_proj.weight": (32, 64),
        "self_attn.v_proj.weight": (32, 64),
        "self_attn.o_proj.weight": (64, 64),
        "post_attention_layernorm.weight": (64,),
        "mlp.gate_proj.weight": (128, 64),
        "mlp.up_proj.weight": (128, 64),
        "mlp.down_proj.weight": (64, 128),
    }
    outside = {
        "model.embed_tokens.weight": (61, 64),
        "model.norm.weight": (64,),
        "lm_head.weight": (61, 64),
    }
    return outside | {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in block.items()}


NAME = "deepseek_v3"
FACTS = recorded_facts()[NAME]
BLOCK = (16, 12)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
# As the model's own folders have it: not the embeddings, the head and the router.
WHOLE = ("embed_tokens", "lm_head", "norm", ".gate.")


def shapes_of(more: int) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(shape) for name, shape in FACTS["shapes"].items()}
    last = {name: shape for name, shape in shapes.items() if ".layers.2." in name}
    further = {
        name.replace(".2.", f".{3 + i}.", 1): shape for i in range(more) for name, shape in last.items()
    }
    return shapes | further | ({"model.layers.3.eh_proj.weight": (32, 64)} if more else {})


def blocks_folder(folder: Path, more: int = 1, changes: Any = None) -> dict[str, np.ndarray]:
    """A folder of eight-bit blocks, with other tensors in the place of some (None: without them); what its matrices
    are, decoded by NumPy."""
    config = {
        **FACTS["config"],
        "quantization_config": FP8,
        "num_nextn_predict_layers": more,
        "dtype": "bfloat16",
    }
    tensors: dict[str, np.ndarray] = {}
    decoded: dict[str, np.ndarray] = {}
    for name, shape in shapes_of(more).items():
        values = draw(name, shape)
        if any(part in name for part in WHOLE):
            kind = np.float32 if name.endswith("bias") else ml_dtypes.bfloat16
            tensors[name] = values.astype(kind)
            decoded[name] = tensors[name].astype(np.float32)
            continue
        rows, columns = (-(-size // block) for size, block in zip(shape, BLOCK, strict=True))
        scales = np.exp(draw(name + "_scale_inv", (rows, columns))).astype(np.float32)
        spread = np.repeat(np.repeat(scales, BLOCK[0], 0), BLOCK[1], 1)[: shape[0], : shape[1]]
        tensors[name] = (values / spread).astype(ml_dtypes.float8_e4m3fn)
        tensors[name + "_scale_inv"] = scales
        decoded[name] = tensors[name].astype(np.float32) * spread
    write_folder(folder, config, {})
    tensors |= changes or {}
    save_file({name: one for name, one in tensors.items() if one is not None}, folder / "model.safetensors")
    return decoded

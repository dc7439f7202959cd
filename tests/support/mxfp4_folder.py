"""A small gpt-oss whose experts are in MXFP4, and the numbers that the format's definition says they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from published import SIZES, draw
from safetensors.numpy import save_file

from capibara.core import ModularCapibaraModel
from capibara.families import FAMILIES, read_config
from capibara.families.loading import placed_tensors

__all__ = ["CONFIG", "QUANTIZED", "numbers", "random_blocks", "write_mxfp4"]

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
QUANTIZED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
CONFIG: dict[str, Any] = {
    **SIZES,
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "num_hidden_layers": 2,
    "head_dim": 8,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 5,
    "torch_dtype": "bfloat16",
}


def numbers(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """From the definition, one number at a time."""
    found = np.empty((*blocks.shape[:-1], 32), np.float64)
    for *place, byte in np.ndindex(*blocks.shape):
        for half, code in enumerate((int(blocks[*place, byte]) & 15, int(blocks[*place, byte]) >> 4)):
            value = E2M1[code & 7] * (-1 if code & 8 else 1)
            found[(*place, 2 * byte + half)] = value * 2.0 ** (int(scales[tuple(place)]) - 127)
    return found.reshape(*blocks.shape[:-2], -1)


def random_blocks(
    *shape: int, low: int = 110, high: int = 130, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return (
        rng.integers(0, 256, (*shape, 16), dtype=np.uint8),
        rng.integers(low, high, shape, dtype=np.uint8),
    )


def write_mxfp4(folder: Path, packed: bool, **changes: Any) -> dict[str, np.ndarray]:
    """A folder of the model with its experts packed, or the same numbers in bfloat16."""
    folder.mkdir()
    config = CONFIG | changes | ({"quantization_config": QUANTIZED} if packed else {})
    (folder / "config.json").write_text(json.dumps(config))
    settings, _ = read_config(folder)
    tensors: dict[str, np.ndarray] = {}
    for one in placed_tensors(FAMILIES["gpt_oss"], ModularCapibaraModel(settings)):
        if not one.name.endswith(("gate_up_proj", "down_proj")):
            tensors[one.name] = draw(one.name, one.shape).astype(jnp.bfloat16)
            continue
        experts, into, out = one.shape
        blocks, scales = random_blocks(
            experts, out, into // 32, low=122, high=125, seed=sum(map(ord, one.name))
        )
        if packed:
            tensors |= {f"{one.name}_blocks": blocks, f"{one.name}_scales": scales}
        else:
            tensors[one.name] = numbers(blocks, scales).swapaxes(1, 2).astype(jnp.bfloat16)
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, folder / "model.safetensors")
    return tensors

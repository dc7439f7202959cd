"""Small random models of published families: their ``config.json``, and weights that need no framework to be drawn.

Of each family there are several: one key head and several, tied heads and untied ones, windows shorter than the texts.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_ONE_KEY_HEAD = {"num_key_value_heads": 1}
_TIED = {"tie_word_embeddings": True}
_WIDE = {"num_key_value_heads": 4, "head_dim": 16}
_LLAMA3 = {
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 24,
    },
}
_YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}}
_MSCALE = {"rope_scaling": _YARN["rope_scaling"] | {"mscale": 1.0, "mscale_all_dim": 0.707}}
_LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0}
_GPT_OSS = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
_QWEN3_MOE = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
_GROUPS = {"n_group": 4, "topk_group": 2}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96} | dict.fromkeys(
    ("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0
)
_BERT = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 96,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_MAMBA2 = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 12,
    "n_groups": 1,
    "chunk_size": 8,
}
_NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**SIZES},
    "llama 3.1, one key head, tied": {**SIZES, **_LLAMA3, **_ONE_KEY_HEAD, **_TIED},
    "llama with biases": {**SIZES, **_WIDE, **_YARN, "attention_bias": True, "mlp_bias": True},
    "mistral, a window": {**SIZES, "sliding_window": 5, "head_dim": 16},
    "mistral, no window": {**SIZES, **_ONE_KEY_HEAD, "sliding_window": None},
    "mistral, tied": {**SIZES, **_TIED, "sliding_window": 9, "rms_norm_eps": 1e-5},
    "mixtral": {**SIZES, **_MIXTRAL},
    "mixtral, a window, tied": {**SIZES, **_MIXTRAL, **_TIED, "sliding_window": 5},
    "mixtral, one key head": {**SIZES, **_MIXTRAL, **_ONE_KEY_HEAD, "num_experts_per_tok": 1},
    "qwen2": {**SIZES},
    "qwen2, tied, one key head": {**SIZES, **_TIED, **_ONE_KEY_HEAD, **_YARN},
    "qwen2, windows": {**SIZES, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {**SIZES, "head_dim": 16},
    "qwen3, tied, one key head": {**SIZES, **_TIED, **_ONE_KEY_HEAD, "head_dim": 8},
    "qwen3 with biases": {**SIZES, **_WIDE, **_LINEAR, "attention_bias": True},
    "qwen3_moe": {**SIZES, **_QWEN3_MOE, "norm_topk_prob": True},
    "qwen3_moe, weights as they are, tied": {**SIZES, **_QWEN3_MOE, **_TIED, **_ONE_KEY_HEAD},
    "qwen3_moe, a dense layer, a window": {
        **SIZES,
        **_QWEN3_MOE,
        "mlp_only_layers": [0],
        "use_sliding_window": True,
        "sliding_window": 6,
        "attention_bias": True,
    },
    "gemma2": {**SIZES, "head_dim": 8, "sliding_window": 5},
    "gemma2, one key head": {**SIZES, **_ONE_KEY_HEAD, "head_dim": 16, "query_pre_attn_scalar": 24},
    "gemma2, untied": {
        **SIZES,
        "tie_word_embeddings": False,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "sliding_window": 7,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
    },
    "gemma3": {**SIZES, "num_hidden_layers": 8, "head_dim": 8, "sliding_window": 5},
    "gemma3, all seen": {
        **SIZES,
        **_ONE_KEY_HEAD,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "full_attention"],
    },
    "gemma3, stretched": {
        **SIZES,
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "gemma3, the older name of stretching": {
        **SIZES,
        "head_dim": 8,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {"type": "linear", "factor": 8.0},
    },
    "phi3": {**SIZES},
    "phi3, a window": {**SIZES, **_ONE_KEY_HEAD, "sliding_window": 5},
    "phi3, heads turned in part": {**SIZES, **_TIED, "partial_rotary_factor": 0.5},
    "olmo2": {**SIZES},
    "olmo2, tied, one key head": {**SIZES, **_TIED, **_ONE_KEY_HEAD},
    "olmo2, stretched": {**SIZES, **_YARN, "num_key_value_heads": 4},
    # Texts of 24 are whole chunks of 8, and no whole chunks of 7 and 256.
    "mamba2": {**_MAMBA2, **_NO_IDS},
    "mamba2, groups, tied": {
        **_MAMBA2,
        **_NO_IDS,
        **_TIED,
        "expand": 4,
        "num_heads": 16,
        "n_groups": 4,
        "chunk_size": 7,
        "time_step_limit": [0.5, 2.0],
        "layer_norm_epsilon": 1e-3,
    },
    "mamba2 with biases": {
        **_MAMBA2,
        **_NO_IDS,
        "n_groups": 2,
        "use_bias": True,
        "use_conv_bias": True,
        "conv_kernel": 3,
        "residual_in_fp32": False,
        "chunk_size": 256,
        "layer_norm_epsilon": 1e-2,
    },
    "mamba2 without any": {
        **_MAMBA2,
        **_NO_IDS,
        "n_groups": 2,
        "use_conv_bias": False,
        "expand": 1,
        "num_heads": 4,
    },
    "gpt_oss": {**SIZES, **_GPT_OSS},
    "gpt_oss, one key head, tied": {
        **SIZES,
        **_GPT_OSS,
        **_ONE_KEY_HEAD,
        **_TIED,
        "rope_scaling": {**_YARN["rope_scaling"], "truncate": False},
        "rope_theta": 1e4,
        "swiglu_limit": 0.5,
    },
    "gpt_oss, all seen, no biases": {
        **SIZES,
        **_GPT_OSS,
        **_WIDE,
        "layer_types": ["full_attention"] * 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "attention_bias": False,
        "num_experts_per_tok": 1,
        "swiglu_alpha": 1.0,
    },
    "deepseek_v2": {**SIZES, **_LATENT, **_MSCALE, **_GROUPS, "topk_method": "group_limited_greedy"},
    "deepseek_v2, queries from the input": {**SIZES, **_LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v2, biases, no dense layer, tied": {
        **SIZES,
        **_LATENT,
        **_TIED,
        "first_k_dense_replace": 0,
        "attention_bias": True,
        "n_shared_experts": 1,
    },
    "deepseek_v3": {**SIZES, **_LATENT, **_GROUPS, "num_nextn_predict_layers": 0},
    "deepseek_v3, queries from the input, stretched": {
        **SIZES,
        **_LATENT,
        **_MSCALE,
        **_GROUPS,
        "q_lora_rank": None,
        "first_k_dense_replace": 2,
        "num_nextn_predict_layers": 0,
    },
    "deepseek_v3, halves turned, one group": {
        **SIZES,
        **_LATENT,
        **_ONE_GROUP,
        **_TIED,
        "first_k_dense_replace": 0,
        "rope_interleave": False,
        "norm_topk_prob": False,
        "attention_bias": True,
        "num_nextn_predict_layers": 0,
    },
    "gpt2": {**_GPT2, **_NO_IDS},
    "gpt2, untied": {**_GPT2, **_NO_IDS, "tie_word_embeddings": False, "n_inner": 48},
    "gpt2, another activation": {**_GPT2, **_NO_IDS, "activation_function": "relu", "n_head": 2},
    "bert": {**_BERT, **_NO_IDS, "architectures": ["BertModel"]},
    "bert, masked words": {
        **_BERT,
        **_NO_IDS,
        "architectures": ["BertForMaskedLM"],
        "hidden_act": "relu",
        "type_vocab_size": 3,
    },
    "bert, pretraining, one head": {
        **_BERT,
        **_NO_IDS,
        "architectures": ["BertForPreTraining"],
        "hidden_act": "gelu_new",
        "num_attention_heads": 1,
        "layer_norm_eps": 1e-5,
    },
}
ENCODERS = frozenset(name for name, config in CONFIGS.items() if "hidden_dropout_prob" in config)
"""Those that have no next token."""
DECODERS = tuple(name for name in CONFIGS if name not in ENCODERS)


def model_type(name: str) -> str:
    """The ``model_type`` of one of :data:`CONFIGS`."""
    first = name.partition(" ")[0].rstrip(",")
    return {"gemma3": "gemma3_text"}.get(first, first)


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor's numbers, from its name: large enough for scores and logits that differ."""
    numbers = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape).astype(np.float32)
    if len(shape) > 1:
        return numbers * np.float32(2.0 * shape[-1] ** -0.5 if "wte" not in name else 0.5)
    is_scale = "norm" in name.lower() or ".ln_" in name
    return (1 if is_scale and name.endswith("weight") else 0) + 0.3 * numbers


def write_folder(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    """A folder as its users have it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: draw(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def token_types(config: Mapping[str, Any], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """The input ``token_types`` of an encoder, if it has several."""
    return {"token_types": np.random.default_rng(8).integers(0, config.get("type_vocab_size", 2), shape)}


def tokens(rows: int = 2, length: int = 24, vocab: int = 61) -> np.ndarray:
    """Texts to compare on."""
    return np.random.default_rng(7).integers(0, vocab, (rows, length))

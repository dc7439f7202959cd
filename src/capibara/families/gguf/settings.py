"""The keys of a GGUF file that say how a model computes ↔ a family's ``config.json``.

Some facts are not in the file but in llama.cpp's code, such as which layers of Gemma have a window; they are here in
:data:`_FIXED` and :func:`_gemma`. What a model's settings ask for and a file cannot say is found by reading back what
was written (:mod:`capibara.families.gguf.writing`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from capibara.config.sections import ModelSection
from capibara.families.errors import FamilyError
from capibara.families.gguf.metadata import plain_values
from capibara.families.gguf.names import Architecture
from capibara.families.keys import Keys

__all__ = ["frequency_factors", "metadata_of", "values_of"]

_EPSILON = {"gpt2": "layer_norm_epsilon"}
_FACTORS = "rope_freqs.weight"  # a tensor: by how much each frequency is divided

# What llama.cpp's code says of a family.
_FIXED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"use_sliding_window": False, "attention_bias": False},
    "qwen3_moe": {"use_sliding_window": False, "attention_bias": False, "norm_topk_prob": True},
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {"tie_word_embeddings": True},
    "gpt2": {"activation_function": "gelu_new"},
}


def values_of(
    metadata: Mapping[str, Any],
    tensors: Collection[str],
    arch: Architecture,
    vocabulary: int,
    where: object,
    factors: Callable[[], np.ndarray] | None = None,
) -> dict[str, Any]:
    """The ``config.json`` of a file.

    Args:
      metadata: of the file. tensors: the names of its tensors.
      vocabulary: rows of the embedding table.
      where: the file, for errors.
      factors: reads the factors of rotary frequencies, if the file has them.

    Raises:
      FamilyError: a key is missing, or asks for what Capibara does not do.
    """
    keys = Keys(plain_values(metadata, f"{arch.name}.", where), where)
    heads, width = keys.whole("attention.head_count"), keys.whole("embedding_length")
    size = keys.whole("attention.key_length", None) or width // heads
    if keys.whole("attention.value_length", None) not in (None, size):
        raise keys.wrong("attention.value_length", f"that of keys, {size}")
    keys.whole("vocab_size", None)
    length = keys.whole("context_length")
    fixed = _FIXED.get(arch.family, {})
    values: dict[str, Any] = {"model_type": arch.family, "vocab_size": vocabulary} | fixed
    values["tie_word_embeddings"] = "output.weight" not in tensors
    if arch.family == "gpt2":
        values |= {
            "n_embd": width,
            "n_layer": keys.whole("block_count"),
            "n_head": heads,
            "n_inner": keys.whole("feed_forward_length", None),
            "n_positions": length,
            "layer_norm_epsilon": keys.number("attention.layer_norm_epsilon"),
        }
        keys.only("attention.head_count_kv", None, heads)
        keys.take("rope.dimension_count", None)
        keys.finish()
        return values
    values |= {
        "hidden_size": width,
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.whole("attention.head_count_kv", None) or heads,
        "head_dim": size,
        "intermediate_size": keys.whole("feed_forward_length", None)
        or keys.whole("expert_feed_forward_length"),
        "max_position_embeddings": length,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
    }
    if arch.family in ("qwen2", "olmo2", "phi3", "mixtral") and size * heads == width:
        del values["head_dim"]
    values |= _read_rope(keys, arch, size, factors)
    values |= _read_extras(keys, arch, tensors, size, width, heads)
    keys.finish()
    return values


def _read_rope(
    keys: Keys, arch: Architecture, size: int, factors: Callable[[], np.ndarray] | None
) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    part = keys.whole("rope.dimension_count", None) or size
    if part != size:
        if arch.family != "phi3":
            raise keys.wrong("rope.dimension_count", f"the size of a head, {size}")
        found["partial_rotary_factor"] = part / size
    kind = keys.take("rope.scaling.type", "none")
    original = keys.whole("rope.scaling.original_context_length", None)
    factor = keys.number("rope.scaling.factor", None)
    keys.take("rope.scaling.finetuned", None)
    keys.only("rope.scaling.attn_factor", None, 1.0)
    keys.only("rope.scaling.yarn_ext_factor", None, 1.0)
    keys.only("rope.scaling.yarn_attn_factor", None, 1.0)
    keys.only("rope.scaling.yarn_log_multiplier", None, 0.0)
    fast = keys.number("rope.scaling.yarn_beta_fast", None)
    slow = keys.number("rope.scaling.yarn_beta_slow", None)
    if (old := keys.number("rope.scale_linear", None)) not in (None, 1.0) and kind == "none":
        kind, factor = "linear", old
    if factors is not None:
        if kind != "none":
            raise keys.wrong("rope.scaling.type", f"none, because there is {_FACTORS}")
        scaling = _stretched(factors(), found["rope_theta"], original or 8192, keys.where)
        return found | {"rope_scaling": scaling}
    if kind == "linear" and factor not in (None, 1.0):
        found["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        if factor is None:
            raise keys.wrong("rope.scaling.factor", "a number, because rope.scaling.type is yarn")
        given = {"original_max_position_embeddings": original, "beta_fast": fast, "beta_slow": slow}
        scaling = {"rope_type": "yarn", "factor": factor}
        found["rope_scaling"] = scaling | {k: v for k, v in given.items() if v is not None}
    elif kind not in ("none", "linear"):
        raise keys.wrong("rope.scaling.type", "none, linear or yarn")
    return found


def _read_extras(
    keys: Keys, arch: Architecture, tensors: Collection[str], size: int, width: int, heads: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if arch.family == "llama":
        found["attention_bias"] = "blk.0.attn_q.bias" in tensors
        found["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
        keys.only("expert_count", None, 0)
    if arch.family in ("mixtral", "qwen3_moe"):
        count = "num_local_experts" if arch.family == "mixtral" else "num_experts"
        found |= {count: keys.whole("expert_count"), "num_experts_per_tok": keys.whole("expert_used_count")}
        keys.only("expert_gating_func", None, 1)  # softmax
        keys.only("expert_weights_norm", None, True)
        keys.only("expert_weights_scale", None, 1.0)
        keys.only("expert_shared_count", None, 0)
        dim = keys.whole("expert_feed_forward_length", None)
        if arch.family == "qwen3_moe":
            found["moe_intermediate_size"] = dim or keys.whole("feed_forward_length")
        elif dim is not None:
            found["intermediate_size"] = dim
    if arch.family in ("gemma2", "gemma3_text"):
        found |= _gemma(keys, arch, size, width, heads)
    if arch.family == "phi3":
        keys.take("attention.sliding_window", None)  # which llama.cpp passes over
    return found


def _gemma(keys: Keys, arch: Architecture, size: int, width: int, heads: int) -> dict[str, Any]:
    """Of Gemma, llama.cpp knows the largest model by its number of layers."""
    second = arch.family == "gemma2"
    largest = keys.whole("block_count") == (46 if second else 62)
    found: dict[str, Any] = {
        "query_pre_attn_scalar": width // heads if largest else size,
        "sliding_window": keys.whole("attention.sliding_window", 4096 if second else 1024),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0 if second else None),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0 if second else None),
    }
    period = keys.whole("attention.sliding_window_pattern", 2 if second else 6)
    base = keys.number("rope.freq_base_swa", 10000.0)
    if not second:
        return found | {"sliding_window_pattern": period, "rope_local_base_freq": base}
    if period != 2:
        raise keys.wrong("attention.sliding_window_pattern", "2")
    return found


def metadata_of(model: ModelSection, arch: Architecture) -> dict[str, int | float | str]:
    """The keys of a file for a model's settings; integers are written as u32, floats as f32."""
    size = model.resolved_head_dim
    experts = model.experts
    found: dict[str, Any] = {
        "context_length": model.max_sequence_length,
        "embedding_length": model.embed_dim,
        "block_count": model.num_layers,
        "feed_forward_length": model.resolved_expert_dim
        if arch.family == "mixtral"
        else model.resolved_mlp_dim,
        "attention.head_count": model.num_heads,
        "attention.head_count_kv": model.num_kv_heads,
        f"attention.{_EPSILON.get(arch.family, 'layer_norm_rms_epsilon')}": float(model.norm_epsilon),
        "vocab_size": model.vocab_size,
    }
    if arch.family == "gpt2":
        return {f"{arch.name}.{key}": value for key, value in found.items()}
    rope = model.rope
    found |= {
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": round(size * rope.fraction),
        "rope.freq_base": float(model.rope_theta),
    }
    if rope.scaling in ("linear", "yarn"):
        found |= {"rope.scaling.type": rope.scaling, "rope.scaling.factor": float(rope.factor)}
    if rope.scaling in ("llama3", "yarn") and rope.original_length is not None:
        found["rope.scaling.original_context_length"] = rope.original_length
    if rope.scaling == "yarn":
        found["rope.scaling.yarn_beta_fast"] = float(rope.beta_fast)
        found["rope.scaling.yarn_beta_slow"] = float(rope.beta_slow)
    if experts.count:
        found |= {"expert_count": experts.count, "expert_used_count": experts.per_token}
        if arch.family == "qwen3_moe":
            found["expert_feed_forward_length"] = model.resolved_expert_dim
    if arch.family in ("gemma2", "gemma3_text"):
        if model.window is not None:
            found["attention.sliding_window"] = model.window
        for key, value in (("attn", model.attention_softcap), ("final", model.logit_softcap)):
            if value is not None:
                found[f"{key}_logit_softcapping"] = float(value)
    return {f"{arch.name}.{key}": value for key, value in found.items()}


def frequency_factors(model: ModelSection) -> np.ndarray | None:
    """What llama.cpp divides the frequencies of rotary positions by, float32 [head size / 2]; ``None``: nothing.

    Llama 3's stretching is in files as these factors.
    """
    rope = model.rope
    if rope.scaling != "llama3" or rope.original_length is None:
        return None
    return _factors(
        model.rope_theta,
        model.resolved_head_dim,
        rope.factor,
        rope.low_frequency_factor,
        rope.high_frequency_factor,
        rope.original_length,
    )


def _factors(theta: float, size: int, factor: float, low: float, high: float, original: int) -> np.ndarray:
    waves = 2 * np.pi * theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    smooth = np.clip((original / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def _stretched(found: np.ndarray, theta: float, original: int, where: object) -> dict[str, Any]:
    """``rope_scaling`` for factors that are in a file: Llama 3's bounds are always 1 and 4."""
    factor = float(str(np.float32(found.max(initial=1))))
    if np.isfinite(factor) and factor >= 1:
        expected = _factors(theta, 2 * len(found), factor, 1.0, 4.0, original)
        if np.allclose(found, expected, rtol=1e-4, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": original,
            }
    raise FamilyError(
        f"{where}: {_FACTORS}: got factors other than those of Llama 3, which Capibara does not do. Remedy: the "
        "model's folder (Hugging Face)"
    )

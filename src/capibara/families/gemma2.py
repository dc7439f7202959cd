"""Gemma 2 (Gemma Team, 2024): norms on both sides, every second layer local, bounded scores and logits."""

from __future__ import annotations

import math
from typing import Any

from capibara.config.sections import ModelSection
from capibara.families.family import DECODER, GATED, HEADS, Family, norms
from capibara.families.keys import Keys
from capibara.families.rope import read_rope, write_rope
from capibara.families.sizes import read_sizes, write_sizes
from capibara.families.windows import layer_types, read_pattern

__all__ = ["FAMILY", "NORMS", "read_common", "write_common"]

NORMS = norms(
    input_layernorm="attention_norm",
    post_attention_layernorm="attention_post_norm",
    pre_feedforward_layernorm="mlp_norm",
    post_feedforward_layernorm="mlp_post_norm",
)


_WINDOW = 4096


def read_common(keys: Keys) -> dict[str, Any]:
    """What Gemma 2 and 3 share."""
    keys.only("use_bidirectional_attention", None, False)
    sizes = read_sizes(
        keys,
        tied=True,
        head_dim=256,
        kv_heads=4,
        length=8192,
        act="hidden_activation",
        default_act="gelu_pytorch_tanh",
    )
    # The first files say this twice; the key without "size" is the one that counts.
    keys.take("sliding_window_size", None)
    # And name the activation function twice.
    keys.take("hidden_act", None)
    bias = keys.flag("attention_bias", False)
    return sizes | {
        "norm_offset": True,
        "norm_placement": "both",
        "attention_scale": 1 / math.sqrt(keys.number("query_pre_attn_scalar", 256.0)),
        "attention_softcap": keys.number("attn_logit_softcapping", None),
        "logit_softcap": keys.number("final_logit_softcapping", None),
        "embedding_scale": math.sqrt(sizes["embed_dim"]),
        "attention_bias": bias,
        "attention_output_bias": bias,
    }


def write_common(model: ModelSection) -> dict[str, Any]:
    """The keys that :func:`read_common` reads."""
    scale = model.attention_scale or 1 / math.sqrt(model.resolved_head_dim)
    return write_sizes(model, act="hidden_activation") | {
        "query_pre_attn_scalar": _whole(scale**-2),
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.logit_softcap,
        "attention_bias": model.attention_bias,
        "sliding_window": model.window or _WINDOW,  # its own classes need one, also where no layer is local
        "layer_types": layer_types(model),
    }


def _whole(value: float) -> float | int:
    near = round(value)
    return near if math.isclose(near, value, rel_tol=1e-12) else value


def _read(keys: Keys) -> dict[str, Any]:
    keys.values = {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": _WINDOW,
    } | dict(keys.values)
    count = keys.layers()
    kinds = ["attention" if i % 2 else "local" for i in range(count)]
    return read_common(keys) | read_rope(keys) | read_pattern(keys, default=kinds)


def _write(model: ModelSection) -> dict[str, Any]:
    return write_common(model) | write_rope(model)


FAMILY = Family(
    name="gemma2",
    architecture="Gemma2ForCausalLM",
    read=_read,
    write=_write,
    outside=DECODER,
    inside=(*NORMS, *HEADS, *GATED),
)

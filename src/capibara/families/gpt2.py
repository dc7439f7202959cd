"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm, matrices that are not transposed."""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families.family import ACTIVATIONS, Family, joined
from capibara.families.keys import Keys
from capibara.families.sizes import activation_name
from capibara.families.tensors import Rule

__all__ = ["FAMILY"]

_QKV = ("attention.query", "attention.key", "attention.value")
_BLOCK = "transformer.h.{layer}."


def _read(keys: Keys) -> dict[str, Any]:
    keys.only("scale_attn_weights", True)
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.only("add_cross_attention", False)
    width, heads = keys.whole("n_embd"), keys.whole("n_head")
    act = (
        keys.choice("activation_function", ACTIVATIONS)
        if "activation_function" in keys.values
        else "gelu_tanh"
    )
    return {
        "vocab_size": keys.whole("vocab_size", least=2),
        "embed_dim": width,
        "num_layers": keys.layers("n_layer"),
        "num_heads": heads,
        "num_kv_heads": heads,
        "mlp_dim": keys.whole("n_inner", None) or 4 * width,
        "max_sequence_length": keys.whole("n_positions", 1024),
        "norm": "layer",
        "norm_epsilon": keys.number("layer_norm_epsilon", 1e-5),
        "mlp": "plain",
        "activation": act,
        "mlp_bias": True,
        "attention_bias": True,
        "attention_output_bias": True,
        "positions": "learned",
        "tie_embeddings": keys.flag("tie_word_embeddings", True),
    }


def _write(model: ModelSection) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "n_embd": model.embed_dim,
        "n_layer": model.num_layers,
        "n_head": model.num_heads,
        "n_inner": model.resolved_mlp_dim,
        "n_positions": model.max_sequence_length,
        "layer_norm_epsilon": model.norm_epsilon,
        "activation_function": {"gelu_tanh": "gelu_new"}.get(model.activation, activation_name(model)),
        "tie_word_embeddings": model.tie_embeddings,
    }


def _normed(theirs: str, ours: str) -> tuple[Rule, ...]:
    return (
        Rule.of(f"{theirs}.weight", (f"{ours}.scale", "d -> d")),
        Rule.of(f"{theirs}.bias", (f"{ours}.bias", "d -> d")),
    )


def _linear(theirs: str, ours: str) -> tuple[Rule, ...]:
    return (
        Rule.of(f"{theirs}.weight", (f"{ours}.weight", "in out -> in out")),
        Rule.of(f"{theirs}.bias", (f"{ours}.bias", "d -> d")),
    )


FAMILY = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    read=_read,
    write=_write,
    outside=(
        Rule.of("transformer.wte.weight", ("embedding.weight", "vocab embed -> vocab embed")),
        Rule.of("transformer.wpe.weight", ("position_embedding.weight", "place embed -> place embed")),
        *_normed("transformer.ln_f", "final_norm"),
        Rule.of("lm_head.weight", ("head.weight", "out in -> in out")),
    ),
    inside=(
        *_normed(f"{_BLOCK}ln_1", "attention_norm"),
        joined(
            f"{_BLOCK}attn.c_attn.weight",
            *(f"{path}.weight" for path in _QKV),
            form="embed (heads dim) -> embed heads dim",
            axis=1,
        ),
        joined(
            f"{_BLOCK}attn.c_attn.bias", *(f"{path}.bias" for path in _QKV), form="(heads dim) -> heads dim"
        ),
        Rule.of(
            f"{_BLOCK}attn.c_proj.weight",
            ("attention.out.weight", "(heads dim) embed -> heads dim embed"),
        ),
        Rule.of(f"{_BLOCK}attn.c_proj.bias", ("attention.out.bias", "d -> d")),
        *_normed(f"{_BLOCK}ln_2", "mlp_norm"),
        *_linear(f"{_BLOCK}mlp.c_fc", "mlp.up"),
        *_linear(f"{_BLOCK}mlp.c_proj", "mlp.down"),
    ),
    # Masks that older versions stored with the weights.
    idle=(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
    prefix="transformer.",
)

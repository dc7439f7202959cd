"""Keys that nearly all decoders share: sizes, the activation function, tied heads."""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families.family import ACTIVATIONS
from capibara.families.keys import Keys

__all__ = ["activation_name", "read_sizes", "write_sizes"]


def read_sizes(
    keys: Keys,
    *,
    epsilon: float = 1e-6,
    tied: bool = False,
    head_dim: int | None = None,
    kv_heads: int | None = None,
    length: int = 2048,
    act: str = "hidden_act",
    default_act: str = "silu",
) -> dict[str, Any]:
    """The settings for the sizes.

    Args:
      keys: of the file. epsilon, tied, head_dim, length, default_act: what a file means that says nothing of them.
      kv_heads: so too, by default as many as heads; null is that in every family.
      act: the key of the activation function.
    """
    heads = keys.whole("num_attention_heads")
    absent = None if "num_key_value_heads" in keys.values else kv_heads
    settings: dict[str, Any] = {
        "vocab_size": keys.whole("vocab_size", least=2),
        "embed_dim": keys.whole("hidden_size"),
        "num_layers": keys.layers(),
        "num_heads": heads,
        "num_kv_heads": keys.whole("num_key_value_heads", absent) or heads,
        "mlp_dim": keys.whole("intermediate_size"),
        "max_sequence_length": keys.whole("max_position_embeddings", length),
        "norm_epsilon": keys.number("rms_norm_eps", epsilon),
        "tie_embeddings": keys.flag("tie_word_embeddings", tied),
        "activation": keys.choice(act, ACTIVATIONS, ACTIVATIONS[default_act])
        if act in keys.values
        else ACTIVATIONS[default_act],
    }
    size = keys.whole("head_dim", head_dim)
    if size is not None and size * heads != settings["embed_dim"]:
        settings["head_dim"] = size
    return settings


def write_sizes(model: ModelSection, *, act: str = "hidden_act") -> dict[str, Any]:
    """The keys for the sizes."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "intermediate_size": model.resolved_mlp_dim,
        "max_position_embeddings": model.max_sequence_length,
        "rms_norm_eps": model.norm_epsilon,
        "tie_word_embeddings": model.tie_embeddings,
        "head_dim": model.resolved_head_dim,
        act: activation_name(model),
    }


def activation_name(model: ModelSection) -> str:
    """The name of the activation function (of swiglu_clamped, the one that its family's files have)."""
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    names |= {"gelu_tanh": "gelu_pytorch_tanh", "swiglu_clamped": "silu"}
    return names[model.activation]

"""What a family of published models is: keys of its ``config.json`` ↔ settings, names of its tensors ↔ parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from capibara.families.keys import Keys
from capibara.families.tensors import Rule

__all__ = ["ACTIVATIONS", "DECODER", "GATED", "HEADS", "Family", "experts", "joined", "norms"]

# Names of activation functions, as settings.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}

_HEADS = "(heads dim) embed -> embed heads dim"
_BIAS = "(heads dim) -> heads dim"
_MATRIX = "out in -> in out"
_VECTOR = "d -> d"

# Names that most families share.
DECODER = (
    Rule.of("model.embed_tokens.weight", ("embedding.weight", "vocab embed -> vocab embed")),
    Rule.of("model.norm.weight", ("final_norm.scale", _VECTOR)),
    Rule.of("lm_head.weight", ("head.weight", _MATRIX)),
)
_BLOCK = "model.layers.{layer}."
HEADS = (
    *(
        rule
        for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"))
        for rule in (
            Rule.of(f"{_BLOCK}self_attn.{theirs}.weight", (f"attention.{ours}.weight", _HEADS)),
            Rule.of(f"{_BLOCK}self_attn.{theirs}.bias", (f"attention.{ours}.bias", _BIAS)),
        )
    ),
    Rule.of(
        f"{_BLOCK}self_attn.o_proj.weight",
        ("attention.out.weight", "embed (heads dim) -> heads dim embed"),
    ),
    Rule.of(f"{_BLOCK}self_attn.o_proj.bias", ("attention.out.bias", _VECTOR)),
)
GATED = tuple(
    rule
    for part in ("gate", "up", "down")
    for rule in (
        Rule.of(f"{_BLOCK}mlp.{part}_proj.weight", (f"mlp.{part}.weight", _MATRIX)),
        Rule.of(f"{_BLOCK}mlp.{part}_proj.bias", (f"mlp.{part}.bias", _VECTOR)),
    )
)


def joined(name: str, *paths: str, form: str = _MATRIX, axis: int = 0) -> Rule:
    """A tensor that holds several parameters of one form."""
    return Rule.of(name, *((path, form) for path in paths), axis=axis)


def norms(**names: str) -> tuple[Rule, ...]:
    """Rules for scales: ``norms(input_layernorm="attention_norm")``."""
    return tuple(
        Rule.of(f"{_BLOCK}{theirs}.weight", (f"{ours}.scale", _VECTOR)) for theirs, ours in names.items()
    )


def experts(layer: str, **names: str) -> tuple[Rule, ...]:
    """Rules for a mixture: its router, and for each matrix of an expert a tensor: ``experts("mlp", gate="w1")``."""
    return (
        Rule.of(f"{_BLOCK}{layer}.gate.weight", ("mlp.router", "experts embed -> embed experts")),
        *(
            Rule.of(f"{_BLOCK}{layer}.experts.{{expert}}.{theirs}.weight", (f"mlp.{ours}", _MATRIX))
            for ours, theirs in names.items()
        ),
    )


@dataclass(frozen=True)
class Family:
    """A family of published models.

    Attributes:
      name: ``model_type`` in its ``config.json``. architecture: of the class that its users load.
      read: the settings of ``[model]`` that a ``config.json`` asks for, nested like the section.
      write: the keys for a section of settings.
      outside, inside: rules for tensors outside of blocks and in each block.
      idle: names of tensors that folders have and nobody needs, as regular expressions.
      prefix: what names begin with, which some folders leave out.
      bare: whether a model of these settings is written without the prefix.
      tied: names of the tensors that are the table of embeddings where heads are tied.
      former: ends of names in older files, and what they are now.
      unused: regular expressions for what a folder may have besides, such as heads of other tasks; where the model has
        no place for them they are left out, and ``Pretrained.notes`` names them.
      further: the key of ``config.json`` for the number of layers after those of the model (``num_hidden_layers``),
        which predict tokens further ahead. They are left out, and ``Pretrained.notes`` says so.
      missing: settings of ``[model]`` for a folder that lacks a tensor, by its name.
    """

    name: str
    architecture: str
    read: Callable[[Keys], dict[str, Any]]
    write: Callable[[Any], dict[str, Any]]
    outside: tuple[Rule, ...]
    inside: tuple[Rule, ...]
    idle: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    prefix: str = ""
    bare: Callable[[Any], bool] = lambda model: False
    tied: tuple[str, ...] = ("lm_head.weight",)
    former: tuple[tuple[str, str], ...] = ()
    unused: tuple[str, ...] = ()
    further: str = ""
    missing: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

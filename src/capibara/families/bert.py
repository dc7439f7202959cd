"""BERT (Devlin et al., 2019), arXiv:1810.04805: an encoder; MiniLM, BGE, E5, GTE and others have its form.

Which layers stand on it is said by ``architectures``: a pooler (``BertModel``), a head for masked words
(``BertForMaskedLM``), or both (``BertForPreTraining``). Heads of other tasks are left out, and the notes say so.
"""

from __future__ import annotations

from typing import Any

from capibara.config.sections import ModelSection
from capibara.families.family import ACTIVATIONS, Family
from capibara.families.keys import Keys
from capibara.families.sizes import activation_name
from capibara.families.tensors import Rule

__all__ = ["FAMILY"]

_BLOCK = "bert.encoder.layer.{layer}."
# Of each architecture: what scores the vocabulary, and whether there is a pooler.
_ARCHITECTURES = {
    "BertModel": ("none", True),
    "BertForMaskedLM": ("transform", False),
    "BertForPreTraining": ("transform", True),
    "BertForNextSentencePrediction": ("none", True),
    "BertForSequenceClassification": ("none", True),
    "BertForMultipleChoice": ("none", True),
    "BertForTokenClassification": ("none", False),
    "BertForQuestionAnswering": ("none", False),
}


def _read(keys: Keys) -> dict[str, Any]:
    for key, value in (
        ("add_cross_attention", False),
        ("is_decoder", False),
        ("is_encoder_decoder", False),
        ("position_embedding_type", "absolute"),
        ("directionality", "bidi"),
        ("pooler_type", "first_token_transform"),
    ):
        keys.only(key, value)
    for key in (
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
    ):
        keys.take(key, None)  # of the first implementation, whose pooler was this one too
    named = keys.take("architectures", None) or ["BertModel"]
    if not isinstance(named, list) or not isinstance(named[0], str) or named[0] not in _ARCHITECTURES:
        raise keys.wrong("architectures", f"a list of one of {', '.join(_ARCHITECTURES)}")
    head, pooler = _ARCHITECTURES[named[0]]
    if head == "transform":
        keys.only("tie_word_embeddings", True)
    keys.flag("tie_word_embeddings", True)
    heads = keys.whole("num_attention_heads", 12)
    return {
        "vocab_size": keys.whole("vocab_size", 30522, least=2),
        "embed_dim": keys.whole("hidden_size", 768),
        "num_layers": keys.whole("num_hidden_layers", 12),
        "num_heads": heads,
        "num_kv_heads": heads,
        "mlp_dim": keys.whole("intermediate_size", 3072),
        "max_sequence_length": keys.whole("max_position_embeddings", 512),
        "norm": "layer",
        "norm_epsilon": keys.number("layer_norm_eps", 1e-12),
        "norm_placement": "sum",
        "embedding_norm": True,
        "causal": False,
        "mlp": "plain",
        "activation": keys.choice("hidden_act", ACTIVATIONS, "gelu"),
        "mlp_bias": True,
        "attention_bias": True,
        "attention_output_bias": True,
        "positions": "learned",
        "token_types": keys.whole("type_vocab_size", 2),
        "head": head,
        # A key of our own: a folder may have been saved without the pooler that its architecture has.
        "pooler": keys.flag("add_pooling_layer", pooler),
    }


def _write(model: ModelSection) -> dict[str, Any]:
    made = (model.head, model.pooler)
    architecture = next((name for name, one in _ARCHITECTURES.items() if one == made), "BertModel")
    if made == ("none", False):
        architecture = "BertModel"
    return {
        "architectures": [architecture],
        "vocab_size": model.vocab_size,
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.resolved_mlp_dim,
        "max_position_embeddings": model.max_sequence_length,
        "layer_norm_eps": model.norm_epsilon,
        "hidden_act": {"gelu_tanh": "gelu_new"}.get(model.activation, activation_name(model)),
        "type_vocab_size": max(1, model.token_types),
        "tie_word_embeddings": model.tie_embeddings,
    } | ({} if _ARCHITECTURES[architecture] == made else {"add_pooling_layer": model.pooler})


def _both(theirs: str, ours: str, form: str = "out in -> in out", bias: str = "d -> d") -> tuple[Rule, ...]:
    return (
        Rule.of(f"{theirs}.weight", (f"{ours}.weight", form)),
        Rule.of(f"{theirs}.bias", (f"{ours}.bias", bias)),
    )


def _norm(theirs: str, ours: str) -> tuple[Rule, ...]:
    return (
        Rule.of(f"{theirs}.LayerNorm.weight", (f"{ours}.scale", "d -> d")),
        Rule.of(f"{theirs}.LayerNorm.bias", (f"{ours}.bias", "d -> d")),
    )


def _table(theirs: str, ours: str) -> Rule:
    return Rule.of(f"bert.embeddings.{theirs}.weight", (f"{ours}.weight", "entry embed -> entry embed"))


FAMILY = Family(
    name="bert",
    architecture="BertModel",
    read=_read,
    write=_write,
    outside=(
        _table("word_embeddings", "embedding"),
        _table("position_embeddings", "position_embedding"),
        _table("token_type_embeddings", "type_embedding"),
        *_norm("bert.embeddings", "embedding_norm"),
        *_both("bert.pooler.dense", "pooler"),
        Rule.of("cls.predictions.bias", ("head_bias", "vocab -> vocab")),
        *_both("cls.predictions.transform.dense", "transform"),
        *_norm("cls.predictions.transform", "transform_norm"),
    ),
    inside=(
        *(
            rule
            for name in ("query", "key", "value")
            for rule in _both(
                f"{_BLOCK}attention.self.{name}",
                f"attention.{name}",
                "(heads dim) embed -> embed heads dim",
                "(heads dim) -> heads dim",
            )
        ),
        *_both(f"{_BLOCK}attention.output.dense", "attention.out", "embed (heads dim) -> heads dim embed"),
        *_norm(f"{_BLOCK}attention.output", "attention_norm"),
        *_both(f"{_BLOCK}intermediate.dense", "mlp.up"),
        *_both(f"{_BLOCK}output.dense", "mlp.down"),
        *_norm(f"{_BLOCK}output", "mlp_norm"),
    ),
    # Numbers from 0 on, zeros, and a second name of the bias.
    idle=(
        r"bert\.embeddings\.(position_ids|token_type_ids)",
        r"cls\.predictions\.decoder\.bias",
    ),
    prefix="bert.",
    bare=lambda model: model.head == "none",
    tied=("cls.predictions.decoder.weight",),
    former=((".LayerNorm.gamma", ".LayerNorm.weight"), (".LayerNorm.beta", ".LayerNorm.bias")),
    unused=(r"bert\.pooler\..*", r"cls\..*", r"classifier\..*", r"qa_outputs\..*"),
    missing={"bert.pooler.dense.weight": {"pooler": False}},
)

"""Mamba-2 (Dao and Gu, 2024): state-space layers without attention and without feed-forward layers."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from capibara.config.sections import ModelSection
from capibara.families.family import ACTIVATIONS, Family, joined
from capibara.families.keys import Keys
from capibara.families.tensors import Rule

__all__ = ["FAMILY"]

# A state has no length; this is the most that other settings may ask for.
_LENGTH = 1_048_576
# Where no step is as large; JSON has no infinity.
_NO_LIMIT = 1e6
_BLOCK = "backbone.layers.{layer}."
_MIXER = f"{_BLOCK}mixer."
# Tensors of ``in_proj`` and ``conv1d`` hold these, in this order.
_PROJECTED = ("ssm.gate", "ssm.value", "ssm.write", "ssm.read")
_CONVOLVED = ("ssm.value_conv", "ssm.write_conv", "ssm.read_conv")
# How a new model is drawn; the length of a chunk, which is speed only; where the gate stands, which the models' own
# implementation does not read (it is before the norm); and a rank that this architecture does not have.
_IDLE = (
    "chunk_size",
    "norm_before_gate",
    "rescale_prenorm_residual",
    "time_step_floor",
    "time_step_init_scheme",
    "time_step_max",
    "time_step_min",
    "time_step_rank",
    "time_step_scale",
)


def _limit(keys: Keys, value: object) -> float:
    """A number of at least 0, also as newer files write infinity: ``{"__float__": "Infinity"}``."""
    if isinstance(value, Mapping) and dict(value) == {"__float__": "Infinity"}:
        return math.inf
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (0 <= value <= sys.float_info.max or value == math.inf)  # an integer may be larger
    ):
        raise keys.wrong("time_step_limit", "two numbers of at least 0")
    return float(value)


def _limits(keys: Keys) -> dict[str, float]:
    value = keys.take("time_step_limit", (0.0, math.inf))
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise keys.wrong("time_step_limit", "two numbers of at least 0")
    least, largest = (_limit(keys, one) for one in value)
    return ({"step_min": least} if least else {}) | ({} if largest >= _NO_LIMIT else {"step_max": largest})


def _read(keys: Keys) -> dict[str, Any]:
    # The models' own implementation normalises whatever this says.
    keys.only("rms_norm", True)
    for key in _IDLE:
        keys.take(key, None)
    width, head, expand = keys.whole("hidden_size"), keys.whole("head_dim", 64), keys.whole("expand", 2)
    for key, expected in (("num_heads", expand * width // head), ("intermediate_size", expand * width)):
        if keys.whole(key, expected) != expected:
            raise keys.wrong(key, f"{expected}, as hidden_size, expand and head_dim say")
    return {
        "vocab_size": keys.whole("vocab_size", least=2),
        "embed_dim": width,
        "num_layers": keys.whole("num_hidden_layers"),
        "pattern": ["ssm"],
        "mlp": "none",
        "positions": "none",
        "max_sequence_length": _LENGTH,
        "norm_epsilon": keys.number("layer_norm_epsilon", 1e-5),
        "residual": "accumulate" if keys.flag("residual_in_fp32", True) else "compute",
        "tie_embeddings": keys.flag("tie_word_embeddings", False),
        "ssm": {
            "state_dim": keys.whole("state_size", 128),
            "head_dim": head,
            "expand": expand,
            "conv_width": keys.whole("conv_kernel", 4),
            "groups": keys.whole("n_groups", 8),
            "activation": keys.choice("hidden_act", ACTIVATIONS, "silu")
            if "hidden_act" in keys.values
            else "silu",
            "bias": keys.flag("use_bias", False),
            "conv_bias": keys.flag("use_conv_bias", True),
            **_limits(keys),
        },
    }


def _write(model: ModelSection) -> dict[str, Any]:
    s = model.ssm
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    written = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.num_layers,
        "num_heads": s.expand * model.embed_dim // s.head_dim,
        "head_dim": s.head_dim,
        "state_size": s.state_dim,
        "expand": s.expand,
        "conv_kernel": s.conv_width,
        "n_groups": s.groups,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(s.activation, names[s.activation]),
        "use_bias": s.bias,
        "use_conv_bias": s.conv_bias,
        "layer_norm_epsilon": model.norm_epsilon,
        "residual_in_fp32": model.residual == "accumulate",
        "tie_word_embeddings": model.tie_embeddings,
        "chunk_size": s.chunk_size or 256,
    }
    if s.step_min or s.step_max is not None:
        written["time_step_limit"] = [s.step_min, _NO_LIMIT if s.step_max is None else s.step_max]
    return written


_HEADS, _BIAS = "(heads dim) embed -> embed heads dim", "(heads dim) -> heads dim"

FAMILY = Family(
    name="mamba2",
    architecture="Mamba2ForCausalLM",
    read=_read,
    write=_write,
    outside=(
        Rule.of("backbone.embeddings.weight", ("embedding.weight", "vocab embed -> vocab embed")),
        Rule.of("backbone.norm_f.weight", ("final_norm.scale", "d -> d")),
        Rule.of("lm_head.weight", ("head.weight", "out in -> in out")),
    ),
    inside=(
        Rule.of(f"{_BLOCK}norm.weight", ("ssm_norm.scale", "d -> d")),
        Rule.of(
            f"{_MIXER}in_proj.weight",
            *((f"{path}.weight", _HEADS) for path in _PROJECTED),
            ("ssm.step.weight", "heads embed -> embed heads"),
        ),
        Rule.of(
            f"{_MIXER}in_proj.bias",
            *((f"{path}.bias", _BIAS) for path in _PROJECTED),
            ("ssm.step.bias", "heads -> heads"),
        ),
        joined(
            f"{_MIXER}conv1d.weight",
            *(f"{path}.weight" for path in _CONVOLVED),
            form="(heads dim) () width -> width heads dim",
        ),
        joined(f"{_MIXER}conv1d.bias", *(f"{path}.bias" for path in _CONVOLVED), form=_BIAS),
        Rule.of(f"{_MIXER}dt_bias", ("ssm.step_bias", "heads -> heads")),
        Rule.of(f"{_MIXER}A_log", ("ssm.log_rate", "heads -> heads")),
        Rule.of(f"{_MIXER}D", ("ssm.skip", "(heads one) -> heads one")),
        Rule.of(f"{_MIXER}norm.weight", ("ssm.norm.scale", "d -> d")),
        Rule.of(f"{_MIXER}out_proj.weight", ("ssm.out.weight", "out in -> in out")),
        Rule.of(f"{_MIXER}out_proj.bias", ("ssm.out.bias", "d -> d")),
    ),
    idle=(),
)

"""The sections of :class:`~capibara.config.ModularModelConfig`: one frozen, hashable class per TOML table.

A field defines its type, range, default and meaning in one place; the error messages, the TOML writer and
``describe()`` are derived from that. Constraints between fields are in each class's ``_rules``. Types are strict:
neither ``"6"`` nor ``true`` is an integer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from capibara.config.flags import flag_problem
from capibara.config.problems import (
    FORMER_NAMES,
    NAME_PATTERN,
    PATH_PATTERN,
    Problem,
    SettingsError,
    problems_from_validation,
)

__all__ = [
    "BlockKind",
    "CheckpointSection",
    "DTypeName",
    "DataSection",
    "ExpertsSection",
    "FinetuneSection",
    "GenerateSection",
    "LatentSection",
    "ModelSection",
    "OptimizerSection",
    "PrecisionSection",
    "RopeSection",
    "SSMSection",
    "Section",
    "TPUSection",
    "TrainSection",
    "VQSection",
]

BlockKind = Literal["attention", "local", "ssm", "vq"]
DTypeName = Literal["bfloat16", "float16", "float32", "float64"]

_Width = Annotated[int, Field(ge=1, le=1_048_576)]
_Length = Annotated[int, Field(ge=1, le=16_777_216)]
_Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
_Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
_Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
_Name = Annotated[str, Field(min_length=1, pattern=NAME_PATTERN)]
_Flag = Annotated[str, Field(min_length=1, max_length=256)]
# A path may not be empty or hold control characters (a NUL ends a C string, a newline breaks logs).
_Path = Annotated[str, Field(min_length=1, pattern=PATH_PATTERN)]


def _listed(**limits: Any) -> Any:
    """A TOML list for a tuple field: the list itself converts, its entries stay strict."""
    return Field(strict=False, **limits)


class Section(BaseModel):
    """Base class of sections: frozen, strict, no unknown keys, actionable errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise SettingsError(problems_from_validation(error, type(self))) from None
        broken = list(self._rules())
        if broken:
            raise SettingsError(broken)

    def _rules(self) -> Iterator[Problem]:
        """Yield what is wrong between fields that are each right alone."""
        yield from ()

    def replace(self, **changes: Any) -> Any:
        """A validated copy with some fields changed (``model_copy(update=…)`` does not validate)."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})


class SSMSection(Section):
    """``[model.ssm]``: the selective state-space block."""

    state_dim: _Width = Field(default=32, description="size N of the recurrent state of one channel")
    head_dim: _Width = Field(
        default=32, description="channels that share one decay; divides expand * embed_dim"
    )
    expand: Annotated[int, Field(ge=1, le=64)] = Field(default=2, description="inner width / embed_dim")
    conv_width: Annotated[int, Field(ge=1, le=64)] = Field(
        default=4, description="taps of the causal convolution"
    )
    groups: _Width = Field(
        default=1, description="groups of heads, each with write and read vectors and a norm of its own"
    )
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = Field(
        default="silu", description="after the convolution"
    )
    bias: bool = Field(default=False, description="biases of the projections in and out")
    conv_bias: bool = Field(default=True, description="a bias of the convolution")
    norm: bool = Field(default=True, description="RMSNorm of the gated values before the output projection")
    step_min: Annotated[float, Field(ge=0.0, le=1e6)] = Field(default=0.0, description="least step size")
    step_max: Annotated[float, Field(gt=0.0, le=1e6)] | None = Field(
        default=None, description="largest step size; default: no limit"
    )
    chunk_size: _Length | None = Field(
        default=None,
        description="tokens computed as one block of the scan; none: as measured by `capibara tune`, or a heuristic",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_former_names(cls, data: Any) -> Any:
        """Accept the names that configurations and checkpoints of earlier versions have."""
        if not isinstance(data, dict):
            return data
        return {new if (new := FORMER_NAMES.get(k, k)) not in data else k: v for k, v in data.items()}

    def _rules(self) -> Iterator[Problem]:
        if self.step_max is not None and self.step_max < self.step_min:
            yield Problem("step_max", f"got {self.step_max}, expected at least step_min = {self.step_min}")


class RopeSection(Section):
    """``[model.rope]``: rotary positions beyond ``rope_theta``."""

    scaling: Literal["none", "linear", "llama3", "yarn"] = Field(
        default="none",
        description="how wavelengths are stretched: not, all (linear), or long ones only (llama3, yarn)",
    )
    factor: Annotated[float, Field(ge=1.0, le=1e6)] = Field(
        default=1.0, description="how far long wavelengths are stretched"
    )
    original_length: _Length | None = Field(
        default=None, description="longest sequence before stretching; llama3 and yarn need it"
    )
    low_frequency_factor: Annotated[float, Field(gt=0.0, le=1e6)] = Field(
        default=1.0, description="llama3: waves that fit less often into original_length are stretched fully"
    )
    high_frequency_factor: Annotated[float, Field(gt=0.0, le=1e6)] = Field(
        default=4.0, description="llama3: waves that fit more often into original_length stay as they are"
    )
    beta_fast: Annotated[float, Field(gt=0.0, le=1e6)] = Field(
        default=32.0, description="yarn: pairs that turn more often in original_length stay as they are"
    )
    beta_slow: Annotated[float, Field(gt=0.0, le=1e6)] = Field(
        default=1.0, description="yarn: pairs that turn less often in original_length are stretched fully"
    )
    truncate: bool = Field(default=True, description="yarn: round both bounds to whole pairs")
    attention_factor: Annotated[float, Field(gt=0.0, le=1e3)] | None = Field(
        default=None, description="yarn: factor on cosines and sines; default: 0.1 log(factor) + 1"
    )
    mscale: Annotated[float, Field(gt=0.0, le=1e3)] | None = Field(
        default=None,
        description="yarn: attention_factor is (0.1 mscale log(factor) + 1) / (0.1 mscale_all_dim log(factor) + 1)",
    )
    mscale_all_dim: Annotated[float, Field(gt=0.0, le=1e3)] | None = Field(
        default=None,
        description="yarn: with mscale; scores are multiplied by (0.1 mscale_all_dim log(factor) + 1)², too",
    )
    interleaved: bool = Field(
        default=False, description="rotate pairs of adjacent features instead of one feature from each half"
    )
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=1.0, description="part of each head that is turned"
    )
    local_theta: Annotated[float, Field(gt=1.0, le=1e12)] | None = Field(
        default=None,
        description="base of the wavelengths of local blocks, never stretched; default: as the others",
    )

    def _rules(self) -> Iterator[Problem]:
        if self.scaling in ("llama3", "yarn") and self.original_length is None:
            yield Problem(
                "original_length", f"is missing; scaling={self.scaling!r} needs the length before stretching"
            )
        for one, other in (("mscale", "mscale_all_dim"), ("mscale_all_dim", "mscale")):
            value = getattr(self, one)
            if value is None:
                continue
            if self.scaling != "yarn":
                yield Problem(one, f"got {value}, which needs scaling='yarn', not {self.scaling!r}")
            elif getattr(self, other) is None:
                yield Problem(other, f"is missing; {one} = {value} needs both. Give it, or leave {one} out")
            elif self.attention_factor is not None:
                yield Problem(one, f"got {value}, but attention_factor is given. Remove one of them")
        if self.scaling == "llama3" and self.high_frequency_factor <= self.low_frequency_factor:
            yield Problem(
                "high_frequency_factor",
                f"got {self.high_frequency_factor}, expected more than low_frequency_factor = "
                f"{self.low_frequency_factor}",
            )


class LatentSection(Section):
    """``[model.latent]``: multi-head latent attention, whose keys and values are computed from one short vector."""

    kv_rank: _Width | None = Field(
        default=None,
        description="size of that vector, which the cache holds; none: blocks have plain attention",
    )
    query_rank: _Width | None = Field(
        default=None, description="size of a vector that queries are computed from; default: from the input"
    )
    head_dim: _Width = Field(default=128, description="features of a query and a key without positions")
    rotary_dim: _Width = Field(default=64, description="features with rotary positions; keys share them")
    value_dim: _Width = Field(default=128, description="features of a value")
    epsilon: Annotated[float, Field(gt=0.0, le=0.1)] = Field(
        default=1e-6, description="added under the root of these vectors' norms"
    )

    def _rules(self) -> Iterator[Problem]:
        if self.kv_rank is None and self.query_rank is not None:
            yield Problem("query_rank", f"got {self.query_rank}, but attention is not latent. Set kv_rank")
        if self.rotary_dim % 2:
            yield Problem("rotary_dim", f"got {self.rotary_dim}, expected an even number: RoPE turns pairs")


class ExpertsSection(Section):
    """``[model.experts]``: feed-forward layers of which each token uses a few."""

    count: Annotated[int, Field(ge=0, le=65_536)] = Field(
        default=0, description="experts of a block; 0: blocks have one feed-forward layer"
    )
    per_token: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=2, description="experts that a token uses"
    )
    dim: _Width | None = Field(default=None, description="hidden width of an expert; default: mlp_dim")
    router: Literal["softmax", "sigmoid"] = Field(
        default="softmax", description="scores: softmax over all experts, or the sigmoid of each"
    )
    normalise: bool = Field(default=True, description="the weights of a token's experts sum to 1")
    scale: Annotated[float, Field(gt=0.0, le=1e3)] = Field(
        default=1.0, description="factor on the weights, after that"
    )
    groups: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=1, description="parts of equal size that the experts have; divides count"
    )
    top_groups: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=1, description="groups that a token's experts are chosen from, those with the highest scores"
    )
    group_score: Literal["max", "top2"] = Field(
        default="max", description="a group's score: its highest, or the sum of its two highest"
    )
    logit_bias: bool = Field(
        default=False, description="a bias of the router's scores, before the softmax or the sigmoids"
    )
    choice_bias: bool = Field(
        default=False,
        description="a number for each expert is added to the scores for choosing; it is stored and not trained",
    )
    shared_dim: _Width | None = Field(
        default=None, description="hidden width of a layer that every token uses besides; default: none"
    )
    first_dense: Annotated[int, Field(ge=0, le=4096)] = Field(
        default=0, description="blocks before the first one with experts"
    )

    def _rules(self) -> Iterator[Problem]:
        if self.count and self.per_token > self.count:
            yield Problem("per_token", f"got {self.per_token}, expected at most count = {self.count}")
        if self.top_groups > self.groups:
            yield Problem("top_groups", f"got {self.top_groups}, expected at most groups = {self.groups}")
        elif self.count % self.groups:
            yield Problem("groups", f"got {self.groups}, expected a divisor of count = {self.count}")
        elif (
            self.count
            and (most := self.count // self.groups * self.top_groups) < self.per_token <= self.count
        ):
            yield Problem(
                "per_token",
                f"got {self.per_token}, expected at most {most}: top_groups = {self.top_groups} of groups = "
                f"{self.groups} have no more experts",
            )
        for key in ("shared_dim", "first_dense", "dim", "logit_bias", "choice_bias"):
            if not self.count and (value := getattr(self, key)):
                yield Problem(key, f"got {value}, but there are no experts. Set count, or remove it")


class VQSection(Section):
    """``[model.vq]``: the vector-quantised bottleneck."""

    codebook_size: Annotated[int, Field(ge=2, le=16_777_216)] = Field(
        default=256, description="number of code vectors"
    )
    decay: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.99, description="decay of the moving averages"
    )
    commitment_weight: Annotated[float, Field(ge=0.0, le=1000.0)] = Field(
        default=0.25, description="weight of the commitment loss"
    )
    dead_code_threshold: Annotated[float, Field(ge=0.0, le=1e9)] = Field(
        default=1.0,
        description="codes with an average count of vectors per step below this are redrawn; 0: never",
    )


class ModelSection(Section):
    """``[model]``: the language model, a decoder or (``causal = false``) an encoder."""

    vocab_size: Annotated[int, Field(ge=2, le=16_777_216)] = Field(
        default=256, description="number of token ids"
    )
    embed_dim: _Width = Field(default=192, description="width of the residual stream")
    num_layers: Annotated[int, Field(ge=1, le=4096)] = Field(default=6, description="number of blocks")
    pattern: Annotated[tuple[BlockKind, ...], _listed(min_length=1, max_length=4096)] = Field(
        default=("attention",), description="kinds of block, cycled until there are num_layers"
    )
    num_heads: _Width = Field(default=6, description="query heads")
    num_kv_heads: _Width = Field(default=6, description="key and value heads; divides num_heads")
    head_dim: _Width | None = Field(
        default=None, description="width of a head; default: embed_dim / num_heads"
    )
    window: _Length | None = Field(
        default=None, description="positions that a query of a local block sees, its own included"
    )
    causal: bool = Field(
        default=True,
        description="a position sees itself and earlier ones; false: all of its text (an encoder)",
    )
    attention_bias: bool = Field(default=False, description="biases of queries, keys and values")
    attention_output_bias: bool = Field(default=False, description="a bias after the heads are joined")
    attention_scale: Annotated[float, Field(gt=0.0, le=1e3)] | None = Field(
        default=None, description="factor on scores; default: 1 / sqrt(head_dim)"
    )
    attention_softcap: Annotated[float, Field(gt=0.0, le=1e6)] | None = Field(
        default=None, description="bound on scores, softcap * tanh(score / softcap); default: none"
    )
    attention_sinks: bool = Field(
        default=False,
        description="a learned logit of each query head in the softmax's denominator (arXiv:2508.10925)",
    )
    qk_norm: Literal["none", "head", "all"] = Field(
        default="none", description="RMSNorm of queries and keys: none, of each head, over all heads"
    )
    mlp: Literal["gated", "plain", "none"] = Field(
        default="gated",
        description="activation(x gate) * (x up), or activation(x up), times down; none: blocks have no feed-forward "
        "layer",
    )
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "swiglu_clamped"] = Field(
        default="silu",
        description="of the feed-forward layer; gelu is exact, gelu_tanh its approximation; swiglu_clamped, of gated "
        "ones: g sigmoid(activation_alpha g) (u + 1), g the gate up to activation_limit, u the rest within it",
    )
    activation_limit: Annotated[float, Field(gt=0.0, le=1e6)] = Field(
        default=7.0, description="of swiglu_clamped"
    )
    activation_alpha: Annotated[float, Field(gt=0.0, le=1e3)] = Field(
        default=1.702, description="of swiglu_clamped"
    )
    mlp_bias: bool = Field(default=False, description="biases of the feed-forward layer")
    mlp_dim: _Width | None = Field(
        default=None,
        description="hidden width of the feed-forward layer; default: 8/3 embed_dim rounded up to 64",
    )
    max_sequence_length: _Length = Field(
        default=256, description="longest sequence, and size of the decoding cache"
    )
    tie_embeddings: bool = Field(
        default=True, description="the output head is the transposed token embedding"
    )
    embedding_scale: Annotated[float, Field(gt=0.0, le=1e6)] | None = Field(
        default=None, description="factor on embeddings before the first block; default: none"
    )
    embedding_norm: bool = Field(default=False, description="normalise embeddings before the first block")
    token_types: Annotated[int, Field(ge=0, le=65_536)] = Field(
        default=0, description="encoders: kinds of token, each with a learned vector that is added; 0: none"
    )
    head: Literal["linear", "transform", "none"] = Field(
        default="linear",
        description="what scores the vocabulary: a matrix; in encoders also a layer, a norm and a matrix with a bias "
        "(transform), or nothing: the outputs are hidden states",
    )
    pooler: bool = Field(
        default=False, description="encoders: a layer on the first token's state, tanh(x W + b)"
    )
    logit_softcap: Annotated[float, Field(gt=0.0, le=1e6)] | None = Field(
        default=None, description="bound on logits, softcap * tanh(logit / softcap); default: none"
    )
    positions: Literal["rotary", "learned", "none"] = Field(
        default="rotary",
        description="how attention knows positions: RoPE, a learned vector each, not at all",
    )
    rope_theta: Annotated[float, Field(gt=1.0, le=1e12)] = Field(
        default=10000.0, description="base of RoPE's wavelengths"
    )
    norm: Literal["rms", "layer"] = Field(default="rms", description="RMSNorm, or LayerNorm with a bias")
    norm_offset: bool = Field(default=False, description="scales of RMSNorm say how far they are from 1")
    norm_placement: Literal["before", "after", "both", "sum"] = Field(
        default="before",
        description="of each layer: x + f(norm(x)), x + norm(f(x)), x + norm(f(norm(x))), norm(x + f(x))",
    )
    norm_epsilon: Annotated[float, Field(gt=0.0, le=0.1)] = Field(
        default=1e-5, description="added under the norms' root"
    )
    residual: Literal["compute", "accumulate"] = Field(
        default="compute", description="which precision dtype the residual stream has"
    )
    dropout_rate: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.0, description="after each block, in training"
    )
    remat: Literal["none", "dots", "full"] = Field(
        default="none", description="what backward recomputes: nothing, all but matrix products, everything"
    )
    scan_layers: Literal["auto", "scan", "unroll"] = Field(
        default="auto", description="whether repeated blocks compile to one loop body"
    )
    rope: RopeSection = Field(default=RopeSection(), description="rotary positions")
    latent: LatentSection = Field(default=LatentSection(), description="multi-head latent attention")
    experts: ExpertsSection = Field(default=ExpertsSection(), description="mixtures of experts")
    ssm: SSMSection = Field(default=SSMSection(), description="the state-space block")
    vq: VQSection = Field(default=VQSection(), description="the vector-quantised bottleneck")

    @property
    def resolved_head_dim(self) -> int:
        """``head_dim``, or ``embed_dim // num_heads`` if omitted; of latent attention, that of a query."""
        if self.latent.kv_rank is not None:
            return self.latent.head_dim + self.latent.rotary_dim
        return self.head_dim if self.head_dim is not None else self.embed_dim // self.num_heads

    @property
    def resolved_mlp_dim(self) -> int:
        """``mlp_dim``, or ``8/3 * embed_dim`` rounded up to a multiple of 64 if omitted."""
        return self.mlp_dim if self.mlp_dim is not None else -(-8 * self.embed_dim // (3 * 64)) * 64

    @property
    def feedforward_dim(self) -> int:
        """:attr:`resolved_mlp_dim`, or 0 if blocks have no feed-forward layer."""
        return 0 if self.mlp == "none" else self.resolved_mlp_dim

    @property
    def widest_dim(self) -> int:
        """The width of the feed-forward layer; of a state-space layer if blocks have none."""
        return self.feedforward_dim or self.ssm.expand * self.embed_dim

    @property
    def resolved_expert_dim(self) -> int:
        """``experts.dim``, or :attr:`resolved_mlp_dim` if omitted."""
        return self.experts.dim if self.experts.dim is not None else self.resolved_mlp_dim

    @property
    def dense_blocks(self) -> int:
        """How many blocks, from the first on, have one feed-forward layer and no experts."""
        return self.experts.first_dense if self.experts.count else self.num_layers

    @property
    def block_kinds(self) -> tuple[BlockKind, ...]:
        """The kind of every block: ``pattern`` cycled to ``num_layers`` entries."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    @property
    def attends(self) -> bool:
        """Whether a block is attention, so that decoding needs a cache as long as the text."""
        return not {"attention", "local"}.isdisjoint(self.block_kinds)

    @property
    def rotary_dim(self) -> int:
        """Features of a head that rotary positions turn; 0: there are none."""
        if self.positions != "rotary":
            return 0
        if self.latent.kv_rank is not None:
            return self.latent.rotary_dim
        return int(self.resolved_head_dim * self.rope.fraction)

    def _rules(self) -> Iterator[Problem]:
        heads, kv_heads, width = self.num_heads, self.num_kv_heads, self.embed_dim
        if "local" in self.block_kinds and self.window is None:
            yield Problem("window", "is missing; local blocks need the number of positions that a query sees")
        if "local" not in self.block_kinds:
            for key, value in (("window", self.window), ("rope.local_theta", self.rope.local_theta)):
                if value is not None:
                    yield Problem(
                        key,
                        f"got {value}, but no block is local: pattern = {list(self.pattern)!r}. Remove it",
                    )
        if self.activation == "swiglu_clamped":
            for key, only, value in (
                ("mlp", "gated", self.mlp),
                ("head", "linear", self.head.replace("none", "linear")),
            ):
                if value != only:
                    yield Problem(
                        key, f"got {value!r}, expected {only!r}: activation = 'swiglu_clamped' has two inputs"
                    )
        if self.norm == "layer" and self.norm_offset:
            yield Problem("norm_offset", f"got {self.norm_offset}, expected false: only RMSNorm has it")
        yield from self._encoder_rules()
        if self.mlp == "none" and self.mlp_bias:
            yield Problem("mlp_bias", "got True, but mlp='none': there is no feed-forward layer. Remove it")
        if self.experts.count:
            if self.experts.first_dense >= self.num_layers:
                yield Problem(
                    "experts.first_dense",
                    f"got {self.experts.first_dense}, expected less than num_layers = {self.num_layers}",
                )
            if self.mlp != "gated":
                yield Problem("mlp", f"got {self.mlp!r}, expected 'gated': experts are")
        if self.attends and self.latent.kv_rank is not None:
            yield from self._latent_rules()
        elif self.attends:
            if heads % kv_heads:
                fitting = [n for n in range(1, min(heads, 4096) + 1) if heads % n == 0]
                yield Problem(
                    "num_kv_heads",
                    f"got {kv_heads}, expected a divisor of num_heads = {heads} ({_shortened(fitting)}). "
                    "Set both together",
                )
            if self.head_dim is None and width % heads:
                yield Problem(
                    "embed_dim",
                    f"got {width}, expected a multiple of num_heads = {heads} (such as "
                    f"{-(-width // heads) * heads}), because head_dim is not set. "
                    "Change one of them or set head_dim",
                )
            elif self.rotary_dim % 2 and self.rope.fraction < 1:
                yield Problem(
                    "rope.fraction",
                    f"got {self.rope.fraction}, which is {self.rotary_dim} of {self.resolved_head_dim} features of a "
                    "head, expected an even number: RoPE turns pairs",
                )
            elif self.rotary_dim % 2:
                how = "given" if self.head_dim is not None else f"= embed_dim {width} / num_heads {heads}"
                yield Problem(
                    "head_dim",
                    f"got {self.resolved_head_dim} ({how}), expected an even number: RoPE turns pairs",
                )
        if self.latent.kv_rank is not None and not self.attends:
            yield Problem(
                "latent.kv_rank",
                f"got {self.latent.kv_rank}, but no block is attention: pattern = {list(self.pattern)!r}. Remove it",
            )
        inner, groups = self.ssm.expand * width, self.ssm.groups
        if "ssm" in self.block_kinds and inner % self.ssm.head_dim:
            yield Problem(
                "ssm.head_dim",
                f"got {self.ssm.head_dim}, expected a divisor of ssm.expand * embed_dim = "
                f"{self.ssm.expand} * {width} = {inner}",
            )
        elif "ssm" in self.block_kinds and (inner // self.ssm.head_dim) % groups:
            yield Problem(
                "ssm.groups",
                f"got {groups}, expected a divisor of the number of heads, ssm.expand * embed_dim / ssm.head_dim = "
                f"{inner // self.ssm.head_dim}",
            )

    def _encoder_rules(self) -> Iterator[Problem]:
        if not self.causal:
            if "ssm" in self.block_kinds:
                yield Problem("causal", "got false, but blocks with ssm read a text in one direction")
            return
        for key, without in (("token_types", 0), ("pooler", False)):
            if (value := getattr(self, key)) != without:
                yield Problem(
                    key, f"got {value!r}, which only encoders have. Set causal = false, or remove it"
                )
        if self.head != "linear":
            yield Problem("head", f"got {self.head!r}, which only encoders have. Set causal = false")

    def _latent_rules(self) -> Iterator[Problem]:
        """Of settings that latent attention does not have."""
        for key, only in (
            ("causal", True),
            ("num_kv_heads", self.num_heads),
            ("head_dim", None),
            ("qk_norm", "none"),
            ("attention_sinks", False),
            ("positions", "rotary"),
            ("rope.fraction", 1.0),
        ):
            at, _, inner = key.partition(".")
            value = getattr(getattr(self, at), inner) if inner else getattr(self, at)
            if value != only:
                yield Problem(
                    key, f"got {value!r}, expected {only!r} with latent.kv_rank = {self.latent.kv_rank}"
                )


def _shortened(values: list[int], most: int = 12) -> str:
    shown = ", ".join(map(str, values[:most]))
    return shown if len(values) <= most else f"{shown}, …"


class PrecisionSection(Section):
    """``[precision]``: the dtypes of parameters, arithmetic and sums.

    ``float64`` needs JAX's 64-bit mode (``JAX_ENABLE_X64=1``); training and generation refuse it otherwise.
    """

    param_dtype: DTypeName = Field(default="float32", description="of parameters and optimizer state")
    compute_dtype: DTypeName = Field(default="float32", description="of activations and matrix products")
    accumulate_dtype: DTypeName = Field(default="float32", description="of sums, softmax, norms and the loss")
    exchange: Literal["accumulate", "compute"] = Field(
        default="accumulate",
        description="which of these the devices' parts of a linear layer's gradient have while a mesh sums them",
    )


class TPUSection(Section):
    """``[tpu]``: the device mesh that the model is designed for, and the sharding of training over it.

    ``capibara plan`` finds these settings, with ``model.remat`` and ``train.gradient_accumulation_steps``; see
    :class:`capibara.sharding.Layout`.
    """

    enabled: bool = Field(
        default=False,
        description="whether a run uses this mesh; otherwise as many local devices as divide a batch",
    )
    num_chips: Annotated[int, Field(ge=1, le=1_048_576)] = Field(
        default=32, description="devices in the mesh"
    )
    topology: Annotated[str, Field(min_length=1, max_length=64)] = Field(
        default="4x8", description="shape of the mesh, one size per axis"
    )
    mesh_axes: Annotated[tuple[_Name, ...], _listed(min_length=1, max_length=8)] = Field(
        default=("data", "model"), description="names of the mesh axes, one per size in topology"
    )
    memory_limit_gb: Annotated[float, Field(gt=0.0, le=4096.0)] = Field(
        default=32.0, description="memory a device may use, in GiB"
    )
    parameters: Literal["sharded", "replicated"] = Field(
        default="sharded", description="parameters over data axes: sharded over their devices, or replicated"
    )
    optimizer: Literal["as parameters", "sharded"] = Field(
        default="as parameters",
        description="optimizer state over data axes: like the parameters, or always sharded",
    )
    offload: Literal["none", "optimizer"] = Field(
        default="none", description="what is stored in host memory between steps"
    )
    flags: Annotated[tuple[_Flag, ...], _listed(max_length=64)] = Field(
        default=(), description="options of the TPU's compiler, name=value"
    )

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """``topology`` as integers: ``"4x8"`` is ``(4, 8)``."""
        from capibara.hardware.topology import parse_topology

        return parse_topology(self.topology).shape

    def _rules(self) -> Iterator[Problem]:
        from capibara.hardware.topology import TopologyError, parse_topology

        try:
            topology = parse_topology(self.topology)
        except TopologyError as error:
            yield Problem("topology", str(error))
            return
        if topology.size != self.num_chips:
            product = " x ".join(map(str, topology.shape))
            yield Problem(
                "topology",
                f"got {self.topology!r}, which is {product} = {topology.size} chips, expected num_chips = "
                f"{self.num_chips}. Change one of them",
            )
        if len(self.mesh_axes) != len(topology.shape):
            yield Problem(
                "mesh_axes",
                f"got {len(self.mesh_axes)} names {list(self.mesh_axes)!r}, expected {len(topology.shape)}, "
                f"one for each number in topology {self.topology!r}",
            )
        if len(set(self.mesh_axes)) != len(self.mesh_axes):
            yield Problem("mesh_axes", f"got {list(self.mesh_axes)!r}, expected names that differ")
        for flag in self.flags:
            if (problem := flag_problem(flag)) is not None:
                yield Problem("flags", problem)
        names = [flag.partition("=")[0] for flag in self.flags]
        if len(set(names)) != len(names):
            yield Problem("flags", f"got {names!r}, expected each option once")


class TrainSection(Section):
    """``[train]``: the training loop."""

    steps: _Count = Field(default=800, description="optimizer steps")
    batch_size: Annotated[int, Field(ge=1, le=1_048_576)] = Field(default=16, description="sequences a step")
    sequence_length: _Length = Field(default=256, description="tokens a sequence")
    seed: _Seed = Field(default=0, description="of initial parameters, data order and dropout")
    eval_every: _Count = Field(default=200, description="steps between validations")
    eval_batches: _Count = Field(default=8, description="batches a validation")
    log_every: _Count = Field(default=10, description="steps between lines in metrics.jsonl")
    tensorboard: bool = Field(default=False, description="also write files for TensorBoard")
    gradient_accumulation_steps: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=1, description="parts that a batch is split into to save memory; divides batch_size"
    )
    max_seconds: Annotated[float, Field(gt=0.0, le=1e9)] | None = Field(
        default=None, description="time limit; default: none"
    )
    ema: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.0, description="decay of a moving average of the parameters, as 0.999; 0: none is kept"
    )
    validate_ema: bool = Field(
        default=False, description="validate with the averaged parameters; checkpoint.keep_best goes by them"
    )

    def _rules(self) -> Iterator[Problem]:
        if self.validate_ema and not self.ema:
            yield Problem(
                "validate_ema", "got true, but train.ema = 0: there is no average. Set it, as 0.999"
            )
        if self.batch_size % self.gradient_accumulation_steps:
            yield Problem(
                "gradient_accumulation_steps",
                f"got {self.gradient_accumulation_steps}, expected a divisor of batch_size = "
                f"{self.batch_size}",
            )


class OptimizerSection(Section):
    """``[optimizer]``: the method, a learning rate with warm-up and decay, clipping.

    AdamW (arXiv:1711.05101), Lion (arXiv:2302.06675), Adafactor (arXiv:1804.04235), Muon (arXiv:2502.16982) for
    matrices with Adam and Nesterov's momentum for all else, or plain momentum.
    """

    name: Literal["adamw", "lion", "adafactor", "muon", "sgd"] = Field(
        default="adamw",
        description="the method; adafactor's rate is relative to the size of the parameters, muon takes adamw's",
    )
    learning_rate: Annotated[float, Field(gt=0.0, le=10.0)] = Field(default=2e-3, description="highest rate")
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] = Field(
        default=50, description="steps from 0 to learning_rate, in a straight line"
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="how the rate falls after the warm-up; constant: not at all"
    )
    final_learning_rate_fraction: _Fraction = Field(
        default=0.1, description="rate at the last step / learning_rate"
    )
    weight_decay: Annotated[float, Field(ge=0.0, le=10.0)] = Field(
        default=0.1, description="decoupled, on matrices"
    )
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.9, description="decay of the first moment, of momentum"
    )
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.95, description="decay of the second moment"
    )
    grad_clip_norm: Annotated[float, Field(ge=0.0, le=1e9)] = Field(
        default=1.0, description="largest global norm of the gradients; 0: not clipped"
    )

    def _rules(self) -> Iterator[Problem]:
        for key in _IGNORED.get(self.name, ()):
            value, usual = getattr(self, key), type(self).model_fields[key].default
            if value != usual:
                names = get_args(type(self).model_fields["name"].annotation)
                users = ", ".join(name for name in names if key not in _IGNORED.get(name, ()))
                yield Problem(
                    key, f"got {value}, but {self.name} has no such decay. Leave it out, or use {users}"
                )


_IGNORED = {"sgd": ("beta2",), "adafactor": ("beta1", "beta2")}
"""Settings that an optimizer does not have."""


class DataSection(Section):
    """``[data]``: the text."""

    paths: Annotated[tuple[_Path, ...], _listed(max_length=65_536)] = Field(
        default=(), description="files or folders; empty: CPython's own documentation text"
    )
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = Field(
        default=0.05, description="part held out"
    )
    tokenizer: _Path = Field(
        default="bytes", description="bytes, or a folder with a tokenizer.json; with --model: the model's"
    )
    packing: Literal["auto", "windows", "documents"] = Field(
        default="auto",
        description="rows are windows of all text in a row, or whole documents that do not see one another; auto: "
        "documents for conversations, prompts, Parquet and weights",
    )
    long_documents: Literal["split", "cut"] = Field(
        default="split",
        description="packed documents longer than a row: go on in another row, or lose their end",
    )
    learn: Literal["answers", "all"] = Field(
        default="answers", description="of conversations and prompts: the answers alone, or every token"
    )
    weights: Annotated[tuple[Annotated[float, Field(gt=0.0, le=1e9)], ...], _listed(max_length=65_536)] = (
        Field(
            default=(),
            description="how often documents of each path are drawn, relative to one another; empty: each "
            "document once, then again",
        )
    )

    def _rules(self) -> Iterator[Problem]:
        if self.weights and self.packing == "windows":
            yield Problem(
                "weights", "got some, but data.packing=windows reads all text in a row. Leave one out"
            )


class CheckpointSection(Section):
    """``[checkpoint]``: saved states."""

    directory: _Path = Field(default="runs/demo", description="folder of the run")
    every_steps: _Count = Field(default=200, description="steps between checkpoints")
    keep: Annotated[int, Field(ge=1, le=100_000)] = Field(
        default=2, description="newest checkpoints that stay"
    )
    keep_every: Annotated[int, Field(ge=0, le=1_000_000_000)] = Field(
        default=0, description="checkpoints whose step is a multiple of this stay too; 0: none"
    )
    keep_best: bool = Field(
        default=False, description="save whenever the validation improves, and keep the best checkpoint"
    )
    resume: bool = Field(default=True, description="go on from the newest checkpoint in the folder")
    asynchronous: bool = Field(
        default=True, description="write checkpoints while training goes on, from a copy of the state"
    )
    slow_seconds: Annotated[float, Field(gt=0.0, le=1e9)] = Field(
        default=60.0,
        description="a checkpoint that takes longer to write, and ten times as long as any before, is reported",
    )
    wait_seconds: Annotated[float, Field(gt=0.0, le=1e9)] = Field(
        default=1800.0,
        description="how long the next checkpoint, or the end of the run, waits for one that is being written",
    )
    memory_every_steps: Annotated[int, Field(ge=0, le=1_000_000_000)] = Field(
        default=0,
        description="steps between copies in the memory of capibara launch --restarts, to go on from; 0: none",
    )


AdapterTarget = Literal[
    "query", "key", "value", "out", "query_down", "query_up", "latent_down", "latent_up", "gate", "up", "down"
]


class FinetuneSection(Section):
    """``[finetune]``: which parameters are trained."""

    method: Literal["full", "lora"] = Field(
        default="full", description="full: all; lora: low-rank products beside the weights (arXiv:2106.09685)"
    )
    rank: Annotated[int, Field(ge=1, le=65_536)] = Field(default=8, description="of the products")
    alpha: Annotated[float, Field(gt=0.0, le=1e6)] = Field(
        default=16.0, description="their factor is alpha / rank"
    )
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = Field(
        default=0.0, description="of their inputs, in training"
    )
    targets: Annotated[tuple[AdapterTarget, ...], _listed(min_length=1, max_length=11)] = Field(
        default=get_args(AdapterTarget),
        description="the weights: of attention query, key, value, out; of latent attention query or query_down and "
        "query_up, latent_down, latent_up, out; of the feed-forward layer gate, up, down",
    )
    base: Literal["none", "int8", "nf4"] = Field(
        default="none",
        description="lora: store these weights, which are not trained, in 8 or 4 bits (arXiv:2305.14314)",
    )

    objective: Literal["next_token", "dpo"] = Field(
        default="next_token",
        description="what is learnt: texts and answers; or dpo: to prefer chosen answers to rejected ones "
        "(arXiv:2305.18290)",
    )
    beta: Annotated[float, Field(gt=0.0, le=1e3)] = Field(
        default=0.1, description="dpo: how strongly the model is held to what it was before"
    )

    def _rules(self) -> Iterator[Problem]:
        if self.base != "none" and self.method != "lora":
            yield Problem("base", f"got {self.base!r}, which needs finetune.method=lora")
        if len(set(self.targets)) != len(self.targets):
            yield Problem("targets", f"got {list(self.targets)!r}, expected each once")


class GenerateSection(Section):
    """``[generate]``: sampling."""

    max_tokens: _Count = Field(default=400, description="tokens to write")
    temperature: Annotated[float, Field(ge=0.0, le=100.0)] = Field(
        default=0.7, description="0: always the likeliest token"
    )
    top_k: Annotated[int, Field(ge=0, le=16_777_216)] = Field(
        default=0, description="draw from the k likeliest; 0: all"
    )
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = Field(
        default=0.95, description="draw from the fewest tokens with this much probability; 1: all"
    )
    seed: _Seed = Field(default=0, description="of the draws")

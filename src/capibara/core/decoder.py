"""The language model, a decoder or an encoder, as a composed model.

Tokens are embedded, pass ``num_layers`` blocks whose kinds follow ``pattern``, are normalised and scored against
the vocabulary. Every block adds to the residual stream: ``x + f(norm(x))``, or with the norm elsewhere
(``norm_placement``). In an encoder (``causal = false``) positions see later ones too. The blocks of one period of the
pattern are one body, which is repeated; if the pattern does not divide ``num_layers``, the remaining blocks follow it.
Blocks before the first one with experts stand before them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from capibara.compose import (
    Adapter,
    Add,
    Buffer,
    Cast,
    ClampedSwiGLU,
    Divide,
    Dropout,
    Embedding,
    Experts,
    FeedForward,
    GatedMLP,
    Gelu,
    Indexer,
    LatentSelfAttention,
    LayerNorm,
    Linear,
    Model,
    Multiply,
    PagedPositions,
    Positions,
    RaggedPositions,
    Relu,
    Repeat,
    RMSNorm,
    RotaryTable,
    SelfAttention,
    Silu,
    StateSpace,
    Sum,
    Take,
    Tanh,
    Unembed,
)
from capibara.compose.initializers import Constant, Normal, Scaled, zeros
from capibara.compose.logical.shapes import Dim
from capibara.compose.primitives.experts import EXPERT_MATRICES
from capibara.compose.primitives.paged import Pools, StepShape
from capibara.config.sections import FinetuneSection, ModelSection
from capibara.core.rotary import attention_scale, rotary_turns

__all__ = ["block_places", "build_decoder", "build_entry", "build_exit", "build_stage", "groups_of"]

_METRICS = ("commitment", "perplexity", "usage")
_Sums = dict[str, list[Any]]


def build_decoder(
    config: ModelSection,
    *,
    cached: bool = False,
    head: bool = True,
    finetune: FinetuneSection | None = None,
    ragged: bool = False,
    paged: StepShape | None = None,
    page_width: int | None = None,
    page_codes: bool = False,
) -> Model:
    """The logical model of a configuration.

    Input ``tokens int [batch, sequence]``, output ``logits [batch, sequence, vocab]`` in the accumulation dtype;
    with ``vq`` blocks also the scalar ``auxiliary_loss`` and the sums over blocks ``perplexity`` and ``usage``. With
    ``token_types`` there is the input ``token_types int [batch, sequence]``, and a pooler gives
    ``pooled [batch, embed]``.

    Args:
        config: the ``[model]`` section.
        cached: build the decoding form, which reads and writes caches, recurrent states and ``position`` as states.
            Its parameters are those of the other form, under the same paths.
        head: score against the vocabulary, and pool. Without it (or with ``model.head = "none"``) the output is
            ``hidden [batch, sequence, embed]``, what the head is given, in the compute dtype.
        finetune: the ``[finetune]`` section; by default all parameters are trained, and there are no adapters.
        ragged: rows hold several texts, or padding: with the inputs ``segments`` and ``positions``, both
            ``int [batch, sequence]``; in the decoding form ``segments`` alone, which is 0 for padding, and the state
            ``position`` is ``[batch]``.
        paged: build the form that decodes many sequences at once, whose states lie in pools
            (:mod:`capibara.compose.primitives.paged`): ``tokens [1, shape.tokens]``, and the inputs ``page_table``,
            ``starts``, ``counts``, ``slots`` and ``outputs int [outputs]``, the tokens whose logits are wanted:
            ``logits [1, outputs, vocab]``. Its parameters are those of the other forms.
        page_width: size of a row of a page; None for the heads' own. page_codes: pages are int8 codes with scales.
    """
    model = Model(name="decoder")
    model.add_input("tokens", ("batch", "sequence"), "int", ("batch", "sequence"))
    embedding = _lookup(model, config)
    if paged is not None:
        places, shared = _paged_places(model, config, paged)
    else:
        places, shared = _counted(model, cached=cached, ragged=ragged)
    if config.attends and config.rotary_dim:
        shared |= _tables(model, config, config.block_kinds, places)
    at = _embedded(model, config, embedding.output, places)
    # Nothing is differentiated in decoding, and a rematerialised block hides from the cache where it stands.
    remat = "none" if cached or paged else config.remat
    sizes = {name: Dim(name=name) for name in ("pages", "page_size", "states")}
    pools = None if paged is None else Pools(paged, **sizes, width=page_width, coded=page_codes)
    form = _Form(Dim(name="cache") if cached else None, ragged, pools)
    sums: _Sums = {name: [] for name in _METRICS}
    for group in groups_of(config):
        mode = config.scan_layers if group.turns > 1 or group.name == "blocks" else "unroll"
        body = _turn(config, group.kinds, form, _adapters(finetune), group.dense)
        repeated = Repeat(body, group.turns, mode=mode, remat=remat)
        at = _place(model, repeated, group.name, at, shared, sums)
    if paged is not None:  # the head is large, and most tokens of a prompt are not scored
        at = model.add(Take(1), "scored", input=at, indices="outputs").output
    _finish(model, config, at, embedding.weight, head=head)
    _expose_sums(model, sums)
    return model


def build_entry(config: ModelSection, *, ragged: bool = False) -> Model:
    """What comes before the first block, as a model of its own: its ``output`` is the residual stream."""
    model = Model(name="entry")
    model.add_input("tokens", ("batch", "sequence"), "int", ("batch", "sequence"))
    embedding = _lookup(model, config)
    places, _ = _counted(model, cached=False, ragged=ragged)
    at = _embedded(model, config, embedding.output, places)
    model.add(Buffer(), "passed_on", input=at, output="output")
    model.expose("output")
    return model


def build_stage(
    config: ModelSection, stages: int, *, finetune: FinetuneSection | None = None, ragged: bool = False
) -> Model:
    """One of ``stages`` equal parts of the repeated blocks, as a model of its own.

    Inputs ``stream float [batch, sequence, embed]`` (a state with ``residual="accumulate"``) and those of the form,
    output ``output``, the stream after these blocks; and the sums over ``vq`` blocks as of the whole model. Its
    parameters are a part of the stack ``blocks``.
    """
    model = Model(name="stage")
    _add_stream(model, config)
    model.add_input("tokens", ("batch", "sequence"), "int", ("batch", "sequence"))
    places, shared = _counted(model, cached=False, ragged=ragged)
    if config.attends and config.rotary_dim:
        shared |= _tables(model, config, config.block_kinds, places)
    (group,) = groups_of(config)
    body = _turn(config, group.kinds, _Form(None, ragged), _adapters(finetune), group.dense)
    repeated = Repeat(body, group.turns // stages, mode=config.scan_layers, remat=config.remat)
    sums: _Sums = {name: [] for name in _METRICS}
    at = _place(model, repeated, group.name, "stream", shared, sums)
    model.add(Buffer(), "passed_on", input=at, output="output")
    model.expose("output")
    _expose_sums(model, sums)
    return model


def build_exit(config: ModelSection, *, head: bool = True) -> Model:
    """What comes after the last block, as a model of its own: from ``stream`` (as of :func:`build_stage`) to ``logits``
    or ``hidden``.

    With tied embeddings and a head there is the input ``table [vocab, embed]``.
    """
    model = Model(name="exit")
    _add_stream(model, config)
    if head and config.tie_embeddings:
        model.add_input("table", (config.vocab_size, config.embed_dim), "float", ("vocab", "embed"))
    _finish(model, config, "stream", "table", head=head)
    return model


def _add_stream(model: Model, config: ModelSection) -> None:
    shape, axes = ("batch", "sequence", config.embed_dim), ("batch", "sequence", "embed")
    if config.residual == "accumulate":  # inputs are cast to the dtype of arithmetic, states are not
        model.add_state("stream", shape, Constant(0), axes=axes)
    else:
        model.add_input("stream", shape, "float", axes)


def _counted(model: Model, *, cached: bool, ragged: bool) -> tuple[Any, dict[str, Any]]:
    """The position of each token, and what blocks are given of them."""
    if ragged:
        return _ragged_places(model, cached)
    if cached:
        model.add_state("position", (), Constant(0), kind="int", dtype="int32")
    counted = model.add(Positions(), "positions", like="tokens", start="position" if cached else 0)
    if not cached:
        return counted.output, {}
    model.update_state("position", counted.end)
    return counted.output, {"position": "position"}


def _lookup(model: Model, config: ModelSection) -> Any:
    # Tied, the table also scores: rows of variance 1/d keep first logits near 1, and the lookup is scaled up to
    # unit variance by the first normalisation.
    table = Embedding(config.vocab_size, config.embed_dim, init=Normal(config.embed_dim**-0.5))
    return model.add(table, "embedding", input="tokens")


def _embedded(model: Model, config: ModelSection, at: Any, places: Any) -> Any:
    """The residual stream before the first block."""
    if config.embedding_scale is not None:
        at = model.add(Multiply(), "embedding_scaled", left=at, right=config.embedding_scale).output
    if config.positions == "learned":
        learned = Embedding(
            config.max_sequence_length, config.embed_dim, axes=(None, "embed"), init=Normal(0.02)
        )
        model.add(learned, "position_embedding", input=places)
        at = model.add(Add(), "embedded", left=at, right=learned.output).output
    if config.token_types:
        model.add_input("token_types", ("batch", "sequence"), "int", ("batch", "sequence"))
        types = Embedding(config.token_types, config.embed_dim, axes=(None, "embed"), init=Normal(0.02))
        model.add(types, "type_embedding", input="token_types")
        at = model.add(Add(), "typed", left=at, right=types.output).output
    if config.embedding_norm:
        at = model.add(_norm(config), "embedding_norm", input=at).output
    if config.residual == "accumulate":
        at = model.add(Cast("accumulate"), "stream", input=at).output
    return at


def _finish(model: Model, config: ModelSection, at: Any, table: Any, *, head: bool) -> None:
    """What comes after the last block: the outputs ``logits`` or ``hidden``, and ``pooled``."""
    scored = head and config.head != "none"
    if config.norm_placement != "sum":  # otherwise the last block has normalised them
        at = model.add(_norm(config), "final_norm", input=at).output
    if config.residual == "accumulate":
        at = model.add(Cast("compute"), "final", input=at).output
    if scored:
        _score(model, config, at, table)
    else:
        model.add(Buffer(), "hidden_states", input=at, output="hidden")
        model.expose("hidden")
    if head and config.pooler:
        _pool(model, config, at)


def _place(model: Model, block: Any, name: str, at: Any, shared: dict[str, Any], sums: _Sums) -> Any:
    """Add a block, or several that are repeated, to the stream; ``sums`` gets its metrics."""
    known = {key: shared[key] for key in block.input_keys if key in shared}
    model.add(block, name, input=at, **known)
    for metric in _METRICS:
        for key in block.output_keys:
            if key.startswith(metric):
                port = block.port(key)
                if isinstance(block, Repeat):
                    port = model.add(Sum(), f"{name}_{key}_sum", input=port).output
                sums[metric].append(port)
    return block.output


def _expose_sums(model: Model, sums: _Sums) -> None:
    """The sums over blocks ``auxiliary_loss``, ``perplexity`` and ``usage``, if there are any."""
    for metric, ports in sums.items():
        if not ports:
            continue
        total = ports[0]
        for i, port in enumerate(ports[1:]):
            total = model.add(Add(), f"{metric}_total_{i}", left=total, right=port).output
        name = "auxiliary_loss" if metric == "commitment" else metric
        model.add(Sum(), f"{metric}_total", input=total, output=name)
        model.expose(name)


def _ragged_places(model: Model, cached: bool) -> tuple[Any, dict[str, Any]]:
    """The position of each token of rows with texts of their own, and what blocks are given of them."""
    model.add_input("segments", ("batch", "sequence"), "int", ("batch", "sequence"))
    if not cached:
        model.add_input("positions", ("batch", "sequence"), "int", ("batch", "sequence"))
        return "positions", {"segments": "segments"}
    model.add_state("position", ("batch",), Constant(0), axes=("batch",), kind="int", dtype="int32")
    counted = model.add(RaggedPositions(), "positions", segments="segments", start="position")
    model.update_state("position", counted.end)
    return counted.output, {"slots": counted.slots}


def _paged_places(model: Model, config: ModelSection, shape: StepShape) -> tuple[Any, dict[str, Any]]:
    """The position of each token of a step of many sequences, and what blocks are given of them."""
    for name in ("starts", "counts"):
        model.add_input(name, ("sequences",), "int")
    given = ["starts", "counts"]
    if config.attends:
        model.add_input("page_table", ("sequences", "table"), "int")
        given.append("page_table")
    if "ssm" in config.block_kinds:
        model.add_input("slots", ("sequences",), "int")
        given.append("slots")
    model.add_input("outputs", ("outputs",), "int")
    counted = model.add(PagedPositions(*shape.parts), "positions", like="tokens", starts="starts")
    return counted.output, {key: key for key in given}


def _pool(model: Model, config: ModelSection, hidden: Any) -> None:
    """The output ``pooled``: a layer on the state of the first token of each row."""
    first = model.add(Indexer((slice(None), 0)), "first", input=hidden)
    layer = Linear(config.embed_dim, axes=("embed", None), inputs=config.embed_dim)
    model.add(layer, "pooler", input=first.output)
    model.add(Tanh(), "pooler_bound", input=layer.output, output="pooled")
    model.expose("pooled")


def _score(model: Model, config: ModelSection, hidden: Any, table: Any) -> None:
    """The output ``logits``: the hidden states against every entry of the vocabulary."""
    transform = config.head == "transform"
    if transform:
        layer = Linear(config.embed_dim, axes=("embed", None), inputs=config.embed_dim)
        model.add(layer, "transform", input=hidden)
        active = model.add(_ACTIVATIONS[config.activation](), "transform_active", input=layer.output)
        hidden = model.add(_norm(config), "transform_norm", input=active.output).output
    if config.tie_embeddings:
        head = model.add(Unembed(), "head", input=hidden, table=table)
    else:
        linear = Linear(config.vocab_size, False, axes=("embed", "vocab"), init=Scaled(1.0))
        head = model.add(linear, "head", input=hidden)
    scores = head.output
    if transform:
        model.add_parameter("head_bias", (config.vocab_size,), zeros, axes=("vocab",))
        scores = model.add(Add(), "head_biased", left=scores, right="head_bias").output
    if config.logit_softcap is None:
        model.add(Cast("accumulate"), "logits_cast", input=scores, output="logits")
    else:
        cap = config.logit_softcap
        wide = model.add(Cast("accumulate"), "logits_cast", input=scores)
        small = model.add(Divide(), "logits_divided", left=wide.output, right=cap)
        bound = model.add(Tanh(), "logits_bound", input=small.output)
        model.add(Multiply(), "logits_capped", left=bound.output, right=cap, output="logits")
    model.expose("logits")


@dataclass(frozen=True)
class _Form:
    """In which form blocks are built.

    ``cache`` is the size of their caches, in the decoding form; ``ragged``: for rows with texts of their own;
    ``paged``: for many sequences whose states lie in pools.
    """

    cache: Dim | None
    ragged: bool
    paged: Pools | None = None


@dataclass(frozen=True)
class _Group:
    """Blocks that are repeated together: ``turns`` times those of ``kinds``, with or without experts."""

    name: str
    kinds: tuple[str, ...]
    turns: int
    dense: bool


def groups_of(config: ModelSection) -> list[_Group]:
    """All blocks, in order."""
    kinds, first = config.block_kinds, config.experts.first_dense
    dense = not config.experts.count
    groups = []
    if first:
        turn, turns = (kinds[:1], first) if len(set(kinds[:first])) == 1 else (kinds[:first], 1)
        groups.append(_Group("first_blocks", turn, turns, True))
    rest = kinds[first:]
    period = min(len(config.pattern), len(rest))
    turns = len(rest) // period
    groups.append(_Group("blocks", rest[:period], turns, dense))
    if left := rest[turns * period :]:
        groups.append(_Group("last_blocks", left, 1, dense))
    return groups


def block_places(config: ModelSection) -> list[tuple[tuple[str, ...], int]]:
    """For each block the path of its parameters, and its index in the stacks that they are."""
    return [
        ((group.name, *((f"layer_{i}",) if len(group.kinds) > 1 else ())), turn)
        for group in groups_of(config)
        for turn in range(group.turns)
        for i in range(len(group.kinds))
    ]


def _tables(model: Model, config: ModelSection, kinds: tuple[str, ...], places: Any) -> dict[str, Any]:
    """The tables of rotary positions that blocks of these kinds read, by the blocks' input keys."""
    own = config.rope.local_theta is not None  # of local blocks
    wanted = []
    if "attention" in kinds or not own:
        wanted.append(("rotary", "", False))
    if "local" in kinds and own:
        wanted.append(("local_rotary", "local_", True))
    tables = {}
    for name, prefix, local in wanted:
        turns = rotary_turns(config, local=local)
        table = RotaryTable(turns.dim, turns.theta, frequencies=turns.frequencies, factor=turns.factor)
        model.add(table, name, positions=places)
        tables |= {f"{prefix}cos": table.cos, f"{prefix}sin": table.sin}
    return tables


def _norm(config: ModelSection) -> Model:
    if config.norm == "layer":
        return LayerNorm(config.norm_epsilon, axis="embed")
    return RMSNorm(config.norm_epsilon, offset=float(config.norm_offset), axis="embed")


def _adapters(finetune: FinetuneSection | None) -> dict[str, Adapter]:
    """The adapter of each target."""
    if finetune is None or finetune.method == "full":
        return {}
    base = None if finetune.base == "none" else finetune.base
    adapter = Adapter(finetune.rank, finetune.alpha / finetune.rank, finetune.dropout, base)
    return dict.fromkeys(finetune.targets, adapter)


def _turn(
    config: ModelSection, kinds: tuple[str, ...], form: _Form, low: dict[str, Adapter], dense: bool
) -> Model:
    """The blocks of one turn of the pattern, in a row.

    ``low`` are the adapters of their weights; ``dense`` blocks have no experts.
    """
    mlp = partial(_mlp if dense else _experts, low=low)
    blocks = [_BLOCKS[kind](config, form, low, mlp) for kind in kinds]
    if len(blocks) == 1:
        return blocks[0]
    turn = Model()
    turn.add_input("input", ("batch", "sequence", config.embed_dim), "float")
    at: Any = "input"
    exposed = []
    for i, block in enumerate(blocks):
        given = {key: key for key in block.input_keys if key != "input"}
        metrics = {key: f"{key}_{i}" for key in _METRICS if key in block.output_keys}
        exposed += metrics.values()
        output = {"output": "output"} if i == len(blocks) - 1 else {}
        turn.add(block, f"layer_{i}", input=at, **given, **metrics, **output)
        at = block.output
    turn.expose("output", *exposed)
    return turn


def _residual(
    model: Model, config: ModelSection, name: str, at: Any, block: Any, output: str, **given: Any
) -> Any:
    """``output = at + dropout(block(norm(at)))``, or with the norm after the block, both, or after the sum."""
    before, summed = at, config.norm_placement == "sum"
    if config.residual == "accumulate":
        before = model.add(Cast("compute"), f"{name}_input", input=at).output
    if config.norm_placement in ("before", "both"):
        before = model.add(_norm(config), f"{name}_norm", input=before).output
    model.add(block, name, input=before, **given)
    branch = block.output
    if config.norm_placement in ("after", "both"):
        branch = model.add(_norm(config), f"{name}_post_norm", input=branch).output
    if config.dropout_rate:
        branch = model.add(Dropout(config.dropout_rate), f"{name}_dropout", input=branch).output
    residual = model.add(
        Add(), f"{name}_residual", left=at, right=branch, **({} if summed else {"output": output})
    )
    if summed:
        model.add(_norm(config), f"{name}_norm", input=residual.output, output=output)


_ACTIVATIONS = {
    "silu": Silu,
    "gelu": lambda: Gelu(approximate=False),
    "gelu_tanh": Gelu,
    "relu": Relu,
}


def _activation(config: ModelSection) -> Callable[[], Any]:
    """What makes the block between the products of a feed-forward layer."""
    if config.activation == "swiglu_clamped":
        return partial(ClampedSwiGLU, config.activation_limit, config.activation_alpha)
    return _ACTIVATIONS[config.activation]


def _mlp(config: ModelSection, low: dict[str, Adapter]) -> Model:
    layer, parts = (
        (GatedMLP, ("gate", "up", "down")) if config.mlp == "gated" else (FeedForward, ("up", "down"))
    )
    return layer(
        config.resolved_mlp_dim,
        config.embed_dim,
        activation=_activation(config),
        use_bias=config.mlp_bias,
        adapters={part: low[part] for part in parts if part in low},
    )


def _experts(config: ModelSection, low: dict[str, Adapter]) -> Model:
    e = config.experts
    return Experts(
        config.embed_dim,
        config.resolved_expert_dim,
        e.count,
        e.per_token,
        router=e.router,
        normalise=e.normalise,
        scale=e.scale,
        groups=e.groups,
        top_groups=e.top_groups,
        group_score=e.group_score,
        choice_bias=e.choice_bias,
        shared=e.shared_dim,
        activation=config.activation,
        limit=config.activation_limit,
        alpha=config.activation_alpha,
        use_bias=config.mlp_bias,
        logit_bias=e.logit_bias,
        adapters={part: low[part] for part in EXPERT_MATRICES if part in low},
    )


# What makes the feed-forward layer of a block.
_MakeMLP = Callable[[ModelSection], Model]


def _with_mlp(
    block: Model, config: ModelSection, name: str, mixer: Model, mlp: _MakeMLP, **given: Any
) -> None:
    """The two layers of a block: the one that it is named for, and the feed-forward layer, if there is one."""
    if config.mlp == "none":
        _residual(block, config, name, "input", mixer, "output", **given)
        return
    _residual(block, config, name, "input", mixer, "mixed", **given)
    _residual(block, config, "mlp", "mixed", mlp(config), "output")


def _attention(
    config: ModelSection, form: _Form, low: dict[str, Adapter], mlp: _MakeMLP, *, local: bool = False
) -> Model:
    block = Model()
    block.add_input("input", ("batch", "sequence", config.embed_dim), "float", ("batch", "sequence", "embed"))
    parts = _latent_attention if config.latent.kv_rank is not None else _grouped_attention
    attention = parts(
        config,
        low,
        window=config.window if local else None,
        softcap=config.attention_softcap,
        scale=attention_scale(config),
        use_bias=config.attention_bias,
        output_bias=config.attention_output_bias,
        cached=form.cache is not None,
        cache_size=form.cache,
        ragged=form.ragged,
        paged=form.paged,
    )
    own = local and config.rope.local_theta is not None
    given = {
        k: f"local_{k}" if own and k in ("cos", "sin") else k for k in attention.input_keys if k != "input"
    }
    _with_mlp(block, config, "attention", attention, mlp, **given)
    block.expose("output")
    return block


def _latent_attention(config: ModelSection, low: dict[str, Adapter], **settings: Any) -> Model:
    latent = config.latent
    assert latent.kv_rank is not None
    parts = ("query", "query_down", "query_up", "latent_down", "latent_up", "out")
    return LatentSelfAttention(
        config.embed_dim,
        config.num_heads,
        latent.kv_rank,
        latent.query_rank,
        latent.head_dim,
        latent.rotary_dim,
        latent.value_dim,
        interleaved=config.rope.interleaved,
        norm_epsilon=latent.epsilon,
        adapters={part: low[part] for part in parts if part in low},
        **settings,
    )


def _grouped_attention(config: ModelSection, low: dict[str, Adapter], **settings: Any) -> Model:
    return SelfAttention(
        config.embed_dim,
        config.num_heads,
        config.num_kv_heads,
        config.resolved_head_dim,
        causal=config.causal,
        rotary_dim=config.rotary_dim,
        interleaved=config.rope.interleaved,
        qk_norm=None if config.qk_norm == "none" else config.qk_norm,
        norm_epsilon=config.norm_epsilon,
        norm_offset=float(config.norm_offset),
        sinks=config.attention_sinks,
        adapters={part: low[part] for part in ("query", "key", "value", "out") if part in low},
        **settings,
    )


def _local(config: ModelSection, form: _Form, low: dict[str, Adapter], mlp: _MakeMLP) -> Model:
    return _attention(config, form, low, mlp, local=True)


def _ssm(config: ModelSection, form: _Form, low: dict[str, Adapter], mlp: _MakeMLP) -> Model:
    block = Model()
    block.add_input("input", ("batch", "sequence", config.embed_dim), "float", ("batch", "sequence", "embed"))
    s = config.ssm
    ssm = StateSpace(
        config.embed_dim,
        s.state_dim,
        s.head_dim,
        s.expand,
        s.conv_width,
        s.chunk_size,
        groups=s.groups,
        activation=_ACTIVATIONS[s.activation],
        use_bias=s.bias,
        conv_bias=s.conv_bias,
        step_limits=(s.step_min or None, s.step_max),
        norm=s.norm,
        epsilon=config.norm_epsilon,
        cached=form.cache is not None,
        ragged=form.ragged,
        paged=form.paged,
    )
    given = {key: key for key in ssm.input_keys if key != "input"}
    _with_mlp(block, config, "ssm", ssm, mlp, **given)
    block.expose("output")
    return block


class _Bottleneck(Model):
    """Quantise, then project: only what a code can say passes this branch."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
        from capibara.vq.vqbit.vqbit_layer import VQbitLayer

        v = config.vq
        layer = VQbitLayer(
            v.codebook_size,
            config.embed_dim,
            decay=v.decay,
            commitment_weight=v.commitment_weight,
            dead_code_threshold=v.dead_code_threshold,
        )
        self.add_input("input", ("batch", "sequence", config.embed_dim), "float")
        named = {key: key for key in _METRICS}
        quantiser = self.add(layer.as_block(), "quantiser", input="input", **named)
        self.add(
            Linear(config.embed_dim, False, axes=("embed", None)),
            "out",
            input=quantiser.output,
            output="output",
        )
        self.expose("output", *_METRICS)


def _vq(config: ModelSection, form: _Form, low: dict[str, Adapter], mlp: _MakeMLP) -> Model:
    block = Model()
    block.add_input("input", ("batch", "sequence", config.embed_dim), "float", ("batch", "sequence", "embed"))
    named = {key: key for key in _METRICS}
    _with_mlp(block, config, "vq", _Bottleneck(config), mlp, **named)
    block.expose("output", *_METRICS)
    return block


_BLOCKS = {"attention": _attention, "local": _local, "ssm": _ssm, "vq": _vq}

"""The decoder as a composed model.

Tokens are embedded, pass ``num_layers`` blocks whose kinds follow ``pattern``, are normalised and scored against
the vocabulary. Every block adds to the residual stream: ``x + f(norm(x))``. The blocks of one period of the pattern
are one body, which is repeated; if the pattern does not divide ``num_layers``, the remaining blocks follow it.
"""

from __future__ import annotations

from typing import Any

from capibara.compose import (
    Add,
    Cast,
    Dropout,
    Embedding,
    Linear,
    Model,
    Positions,
    Repeat,
    RMSNorm,
    RotaryTable,
    SelfAttention,
    StateSpace,
    Sum,
    SwiGLU,
    Unembed,
)
from capibara.compose.initializers import Constant, Normal, Scaled
from capibara.compose.logical.shapes import Dim
from capibara.config.sections import ModelSection
from capibara.vq.vqbit.vqbit_layer import VQbitLayer

__all__ = ["build_decoder"]

_METRICS = ("commitment", "perplexity", "usage")


def build_decoder(config: ModelSection, *, cached: bool = False) -> Model:
    """The logical model of a configuration.

    Input ``tokens int [batch, sequence]``, output ``logits [batch, sequence, vocab]`` in the accumulation dtype;
    with ``vq`` blocks also the scalar ``auxiliary_loss`` and the sums over blocks ``perplexity`` and ``usage``.

    Args:
        config: the ``[model]`` section.
        cached: build the decoding form, which reads and writes caches, recurrent states and ``position`` as states.
            Its parameters are those of the other form, under the same paths.
    """
    cache = Dim(name="cache") if cached else None
    kinds = config.block_kinds
    turn = min(len(config.pattern), len(kinds))
    turns, left = divmod(len(kinds), turn)
    # Nothing is differentiated in decoding, and a rematerialised block hides from the cache where it stands.
    remat = "none" if cached else config.remat

    model = Model(name="decoder")
    model.add_input("tokens", ("batch", "sequence"), "int", ("batch", "sequence"))
    # Tied, the table also scores: rows of variance 1/d keep first logits near 1, and the lookup is scaled up to
    # unit variance by the first normalisation.
    embedding = model.add(
        Embedding(config.vocab_size, config.embed_dim, init=Normal(config.embed_dim**-0.5)),
        "embedding",
        input="tokens",
    )
    shared: dict[str, Any] = {}
    if cached:
        model.add_state("position", (), Constant(0), kind="int", dtype="int32")
    places = model.add(Positions(), "positions", like="tokens", start="position" if cached else 0)
    if "attention" in kinds:
        rotary = RotaryTable(config.resolved_head_dim, config.rope_theta)
        table = model.add(rotary, "rotary", positions=places.output)
        shared = {"cos": table.cos, "sin": table.sin}
    if cached:
        shared["position"] = "position"
        model.update_state("position", places.end)

    at: Any = embedding.output
    sums: dict[str, list[Any]] = {name: [] for name in _METRICS}

    def place(block: Any, name: str, at: Any) -> Any:
        known = {k: v for k, v in shared.items() if k in block.input_keys}
        model.add(block, name, input=at, **known)
        for metric in _METRICS:
            for key in block.output_keys:
                if key.startswith(metric):
                    port = block.port(key)
                    if isinstance(block, Repeat):
                        port = model.add(Sum(), f"{name}_{key}_sum", input=port).output
                    sums[metric].append(port)
        return block.output

    body = _turn(config, kinds[:turn], cache)
    at = place(Repeat(body, turns, mode=config.scan_layers, remat=remat), "blocks", at)
    if left:
        rest = _turn(config, kinds[turns * turn :], cache)
        at = place(Repeat(rest, 1, mode="unroll", remat=remat), "last_blocks", at)

    norm = model.add(RMSNorm(config.norm_epsilon, axis="embed"), "final_norm", input=at)
    if config.tie_embeddings:
        head = model.add(Unembed(), "head", input=norm.output, table=embedding.weight)
    else:
        linear = Linear(config.vocab_size, False, axes=("embed", "vocab"), init=Scaled(1.0))
        head = model.add(linear, "head", input=norm.output)
    model.add(Cast("accumulate"), "logits_cast", input=head.output, output="logits")
    model.expose("logits")
    for metric, ports in sums.items():
        if not ports:
            continue
        total = ports[0]
        for i, port in enumerate(ports[1:]):
            total = model.add(Add(), f"{metric}_total_{i}", left=total, right=port).output
        name = "auxiliary_loss" if metric == "commitment" else metric
        model.add(Sum(), f"{metric}_total", input=total, output=name)
        model.expose(name)
    return model


def _turn(config: ModelSection, kinds: tuple[str, ...], cache: Dim | None) -> Model:
    """The blocks of one turn of the pattern, in a row; ``cache`` is the size of their caches, in the decoding form."""
    blocks = [_BLOCKS[kind](config, cache) for kind in kinds]
    if len(blocks) == 1:
        return blocks[0]
    turn = Model()
    turn.add_input("input", ("batch", "sequence", config.embed_dim), "float")
    at: Any = "input"
    exposed = []
    for i, block in enumerate(blocks):
        given = {key: key for key in ("cos", "sin", "position") if key in block.input_keys}
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
    """``output = at + dropout(block(norm(at)))``."""
    norm = model.add(RMSNorm(config.norm_epsilon, axis="embed"), f"{name}_norm", input=at)
    model.add(block, name, input=norm.output, **given)
    branch = block.output
    if config.dropout_rate:
        branch = model.add(Dropout(config.dropout_rate), f"{name}_dropout", input=branch).output
    model.add(Add(), f"{name}_residual", left=at, right=branch, output=output)


def _mlp(config: ModelSection) -> SwiGLU:
    return SwiGLU(config.resolved_mlp_dim, config.embed_dim)


def _attention(config: ModelSection, cache: Dim | None) -> Model:
    block = Model()
    block.add_input("input", ("batch", "sequence", config.embed_dim), "float", ("batch", "sequence", "embed"))
    attention = SelfAttention(
        config.embed_dim,
        config.num_heads,
        config.num_kv_heads,
        config.resolved_head_dim,
        cached=cache is not None,
        cache_size=cache,
    )
    given = {k: k for k in attention.input_keys if k != "input"}
    _residual(block, config, "attention", "input", attention, "mixed", **given)
    _residual(block, config, "mlp", "mixed", _mlp(config), "output")
    block.expose("output")
    return block


def _ssm(config: ModelSection, cache: Dim | None) -> Model:
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
        epsilon=config.norm_epsilon,
        cached=cache is not None,
    )
    _residual(block, config, "ssm", "input", ssm, "mixed")
    _residual(block, config, "mlp", "mixed", _mlp(config), "output")
    block.expose("output")
    return block


class _Bottleneck(Model):
    """Quantise, then project: only what a code can say passes this branch."""

    def __init__(self, config: ModelSection) -> None:
        super().__init__()
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


def _vq(config: ModelSection, cache: Dim | None) -> Model:
    block = Model()
    block.add_input("input", ("batch", "sequence", config.embed_dim), "float", ("batch", "sequence", "embed"))
    named = {key: key for key in _METRICS}
    _residual(block, config, "vq", "input", _Bottleneck(config), "mixed", **named)
    _residual(block, config, "mlp", "mixed", _mlp(config), "output")
    block.expose("output", *_METRICS)
    return block


_BLOCKS = {"attention": _attention, "ssm": _ssm, "vq": _vq}

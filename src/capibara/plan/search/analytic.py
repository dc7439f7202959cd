"""A rough estimate of a training step's time, in microseconds, to rank layouts before compiling.

The roofline of the FLOPs, of the optimizer's memory traffic, and of the bytes that sharding sends. It is used to
choose what to compile, and not reported if a compiler is available.

Communication (each a ring over the axis; Xu et al., "GSPMD", arXiv:2105.04663; the table in "How to Scale Your Model",
part 5): sharded parameters are gathered for the forward and again for the backward pass of every microbatch and their
gradients reduce-scattered; replicated ones have their gradients all-reduced; with an ``fsdp`` axis parameters are
sharded over that one alone, and the gradients of each part all-reduced over ``data``; a ``model`` axis all-reduces the
residual stream twice a layer forward and five times backward, as programs compiled for it do; an ``expert`` axis
gathers tokens for the experts and scatters their sums. Parameters that are not trained have no gradients.

Along a ``context`` axis keys and values go round, forward, when a block is computed again, and backward with the sums
of their gradients (:mod:`capibara.ops.attention.ring`); the gradients of parameters, which each device has, are
all-reduced over it. The device with the last positions sees all others, and all wait for it. Stages of a ``pipeline``
are estimated as models of their own (:mod:`capibara.plan.stages`), which are computed once more for the backward pass
and wait in the bubble; activations and their gradients go from one to the next in each tick.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from capibara.config import ModularModelConfig
from capibara.plan.slices import Slice
from capibara.plan.stages import stage_of, ticks
from capibara.plan.targets import Target
from capibara.plan.time.prediction import start_seconds
from capibara.sharding import Layout, Links, links_of

if TYPE_CHECKING:
    from capibara.compose import CompiledModel

__all__ = ["Estimate", "estimate_time", "model_specs", "step_flops"]

# What the matrix units reach of their peak in blocks of usual sizes, as the compiler's own cycles have it.
_REACHED = 0.75
# Of the time of gathers of parameters, what stays visible behind the arithmetic of neighbouring layers.
_EXPOSED = 0.4
# Of a layer in a microbatch, forward and backward, what does not depend on its sizes: on TPUs that of its operations.
_LAYER_SECONDS = 1e-4
_LAYER_OPERATIONS = 60
# Reads and writes of a moment update per parameter: parameter and two moments in and out, and the gradient.
_OPTIMIZER_BYTES = 4 * 7
# Passes over a block's activations (in bfloat16, residual stream and feed-forward) that its elementwise work, norms and
# copies take, forward and backward, as the compiler's cycles have it for the shipped production step on v4.
_PASSES = 90
_LOSS_PASSES = 8
# What is left of these passes, and of a layer's operations, where it is not one of several that are scanned: slices of
# arrays of all layers, and updates of them, are the rest.
_ALONE = 0.3
# The same over the rows of products with experts.
_EXPERT_PASSES = 30
# Over the scores of attention round a ring, in float32, forward and backward; and again where a block is computed
# again. Without a ring a kernel keeps them on the chip.
_RING_PASSES, _RING_PASSES_AGAIN = 12, 4


@dataclass(frozen=True)
class Estimate:
    """Seconds of one step: FLOPs, memory traffic and communication, without overlap.

    ``update``: of the memory traffic that of the optimizer, which is once a step.
    """

    compute: float
    memory: float
    communication: float
    update: float = 0.0

    @property
    def seconds(self) -> float:
        """The sum of all parts."""
        return self.compute + self.memory + self.communication


def model_specs(config: ModularModelConfig) -> CompiledModel:
    """The model's parameters as specifications, on the backend that needs no device."""
    model: Any = config.model
    finetune: Any = config.finetune
    return _specs(model, finetune)


@lru_cache(maxsize=16)
def _specs(model: Any, finetune: Any) -> CompiledModel:
    from capibara.compose import NumpyBackend, compile
    from capibara.core.decoder import build_decoder

    return compile(build_decoder(model, finetune=finetune), NumpyBackend())


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters: all, of experts, trained, and those that are codes (which no one gathers)."""

    every: int
    experts: int
    trained: int
    codes: int


def count_parameters(config: ModularModelConfig) -> Parameters:
    """Of a model, by what happens to them in a step."""
    model: Any = config.model
    finetune: Any = config.finetune
    return _counted(model, finetune)


@lru_cache(maxsize=64)
def _counted(model: Any, finetune: Any) -> Parameters:
    from capibara.core.adapters import is_adapter

    every = experts = trained = codes = 0
    for path, spec in _specs(model, finetune).params.items():
        count = math.prod(spec.sizes({}, "a parameter"))
        every += count
        experts += count if "experts" in (spec.axes or ()) else 0
        trained += count if finetune.method == "full" or is_adapter(path) else 0
        codes += count if path[-1] in ("weight_codes", "weight_scales") else 0
    return Parameters(every, experts, trained, codes)


def step_flops(config: ModularModelConfig, *, training: bool = True) -> float:
    """Floating-point operations of one optimizer step, without rematerialisation (the usual base of utilisation).

    Args:
      training: False: of its forward pass alone.
    """
    from capibara.core.adapters import adapter_products
    from capibara.core.flops import flops_per_token

    tokens = config.train.batch_size * config.train.sequence_length
    adapters = None
    if config.finetune.method != "full":
        adapters = adapter_products(model_specs(config).params, config.model.experts)
    return flops_per_token(config.model, config.train.sequence_length, training, adapters=adapters) * tokens


def estimate_time(
    config: ModularModelConfig, layout: Layout, target: Target, *, link_bandwidth: float | None = None
) -> Estimate:
    """The rough time of one step.

    Args:
      link_bandwidth: bytes a second, one way, over one link, instead of the target's.

    Raises:
      PlanError: the model cannot be divided into so many stages.
      ConfigError: ``link_bandwidth`` is not a rate.
    """
    if layout.stages > 1:
        return _of_stages(config, layout, target, link_bandwidth)
    return _without_stages(config, layout, target, link_bandwidth)


def _without_stages(
    config: ModularModelConfig,
    layout: Layout,
    target: Target,
    link_bandwidth: float | None,
    *,
    alone: bool = False,
) -> Estimate:
    """The rough time of one step without a pipeline, or of one stage.

    Args:
      alone: it has one block, which nothing scans: its weights are not cut out of arrays of all blocks, and its
        gradients and what it keeps are not put into such arrays.
    """
    devices = layout.num_devices
    sizes = layout.axis_sizes
    data, model, expert, context = (sizes.get(axis, 1) for axis in ("data", "model", "expert", "context"))
    # Over ``fsdp``, where the mesh has it, and not over ``data`` parameters are sharded: along that are copies.
    sharded = "sharded" in (layout.parameters, layout.optimizer)
    fsdp = sizes.get("fsdp", 1)
    copies, data = (data, fsdp) if "fsdp" in sizes and sharded else (1, data * fsdp)
    m, t = config.model, config.train
    batch = copies * data * expert  # devices that have rows of their own
    tokens = t.batch_size * t.sequence_length / batch / context
    repeated = {"none": 1.0, "dots": 1.05, "full": 4 / 3}[layout.remat]
    compute = step_flops(config) * repeated / devices / (target.chip.peak("bfloat16") * _REACHED)

    bandwidth = target.chip.hbm_bandwidth or 1e12
    counts = count_parameters(config)
    # On a device, with its part of the experts but nothing cut over the data axes.
    dense, mixture = (counts.every - counts.experts) / model, counts.experts / model / expert
    whole = dense + mixture
    trained = whole if counts.trained == counts.every else counts.trained / model
    held = dense / (data * expert) + mixture / data if sharded else whole
    held *= trained / whole
    memory = update = held * _OPTIMIZER_BYTES / bandwidth
    mixed = m.num_layers - m.dense_blocks
    widths = m.num_layers * m.embed_dim + m.dense_blocks * m.widest_dim / model
    passes = _PASSES * (_ALONE if alone else 1.0)
    memory += passes * repeated * tokens * widths * 2 / bandwidth
    # Rows of experts: with an axis for them those of all devices along it, most of which are nothing.
    rows = tokens * expert * m.experts.per_token * mixed
    inner = m.embed_dim + (m.resolved_expert_dim if mixed else 0) / model
    memory += _EXPERT_PASSES * repeated * rows * inner * 2 / bandwidth
    memory += _LOSS_PASSES * tokens * m.vocab_size / model * 4 / bandwidth
    # Each microbatch reads the weights, forward and twice backward, and walks through its accumulated gradients.
    weights = layout.microbatches * 3 * whole * 2 / bandwidth
    memory += layout.microbatches * held * 4 * 3 / bandwidth if layout.microbatches > 1 else 0.0
    if alone:
        # The products read weights, and write gradients, as they go: each takes the longer of this and its arithmetic.
        written = layout.microbatches * held * 4 * 2 / bandwidth
        compute = max(compute * 2 / 3, weights * 2 / 3) + max(compute / 3, weights / 3, written)
    else:
        memory += weights
    # It also goes through a chain of small operations a layer.
    chain = _LAYER_OPERATIONS * start_seconds(target) if isinstance(target, Slice) else _LAYER_SECONDS
    memory += layout.microbatches * m.num_layers * chain * (_ALONE if alone else 1.0)
    count = layout.microbatches

    # The data and expert axes together are one ring.
    sizes = {"model": model, "expert": expert, "context": context, "data": data, "copies": copies}
    links = _links(target, {**sizes, "batch": data * expert}, link_bandwidth)

    def ring(size: float, axis: str) -> float:
        return links.gather(size, (axis,))

    # Parameters travel in the type of the arithmetic and behind neighbouring layers; gradients in float32, waited for.
    # Codes stay where they are.
    gathered = ring((dense - counts.codes / model) * 2, "batch") + ring(mixture * 2, "data")
    share = trained / whole
    reduced = share * (ring(dense * 4, "batch") + ring(mixture * 4, "data"))
    if layout.parameters == "sharded":
        communication = count * (2 * _EXPOSED * gathered + reduced)
    elif layout.optimizer == "sharded":
        communication = count * reduced + reduced
    else:
        communication = count * 2 * reduced
    if copies > 1:
        # The gradients of each part are all-reduced over its copies.
        communication += count * 2 * ring(held * 4, "copies")
    # Partial sums of the residual stream, in float32, each an all-reduce (a scatter and a gather): forward one after
    # attention and one after the feed-forward; backward one of what the products before each of them read (query, key
    # and value; gate and up); one more where the block is computed again.
    reduces = {"none": 4, "dots": 4, "full": 5}[layout.remat]
    communication += reduces * m.num_layers * 2 * ring(tokens * m.embed_dim * 4, "model")
    # Tokens of all devices along the expert axis are gathered, and the sums scattered back; the other way round for
    # their gradients; and both again where the block is computed again.
    exchanges = {"none": 4, "dots": 6, "full": 6}[layout.remat]
    communication += exchanges * mixed * ring(tokens * expert * m.embed_dim * 2, "expert")
    if context > 1:
        # Each device has the gradients of its positions, of whatever part of the parameters it holds.
        communication += count * 2 * ring((held if sharded else trained) * 4, "context")
        again = layout.remat != "none"
        more = _of_ring(config, tokens, model, context)
        compute += more.products / (target.chip.peak("bfloat16") * _REACHED)
        memory += (_RING_PASSES + again * _RING_PASSES_AGAIN) * more.scores * 4 / bandwidth
        # In bfloat16 forward and backward, and the sums of gradients in float32; all one way round.
        sent = (2 + again) * 2 + 4
        communication += _EXPOSED * 2 * ring(more.keys * context * sent, "context")
    if layout.offload == "optimizer":
        # Moments travel to the hosts and back over PCIe, about 10 GB/s a chip each way.
        memory += held * 8 * 2 / 10e9
    return Estimate(compute, memory, communication, update)


@dataclass(frozen=True)
class _Ring:
    """Of the attention of all layers, on the device with the last positions: floating-point operations beyond those
    of an equal share, scores, and its elements of keys and values."""

    products: float
    scores: float
    keys: float


def _of_ring(config: ModularModelConfig, tokens: float, model: int, context: int) -> _Ring:
    from capibara.core.flops import attention_scores

    m, length = config.model, config.train.sequence_length
    head = m.resolved_head_dim
    products = scores = 0.0
    for kind in m.block_kinds:
        window = min(length, m.window or length) if kind == "local" else length
        # Whole parts are computed, or none of one; so is what a causal mask or a window hides in them.
        part = length // context
        seen = min(length, part * (1 + math.ceil((window - 1) / part)))
        scores += tokens * m.num_heads / model * seen
        products += 3 * tokens * (2 * m.num_heads * 2 * head * seen / model)
    equal = 3 * tokens * attention_scores(m, length) / model
    keys = m.num_layers * tokens * 2 * max(m.num_kv_heads / model, 1) * head
    return _Ring(max(0.0, products - equal), scores, keys)


def _links(target: Target, sizes: dict[str, int], link_bandwidth: float | None) -> Links:
    """The links of a mesh; hops are nothing beside the sizes of a step."""
    if link_bandwidth is None:
        return target.links(sizes)
    return replace(links_of(target.chip, sizes, link_bandwidth), hop_seconds=0.0)


def _of_stages(
    config: ModularModelConfig, layout: Layout, target: Target, link_bandwidth: float | None
) -> Estimate:
    """The rough time with a pipeline: of one stage, in all of its ticks."""
    one, inner = stage_of(config, layout)
    alone = one.model.num_layers == 1
    if alone and inner.remat == "full":
        # The block's input is that of the stage: when this is computed again, nothing of the block is to be kept.
        inner = replace(inner, remat="none")
    found = _without_stages(one, inner, target, link_bandwidth, alone=alone)
    m, t = config.model, config.train
    peak = target.chip.peak("bfloat16") * _REACHED
    bandwidth = target.chip.hbm_bandwidth or 1e12
    sizes = layout.axis_sizes
    model = sizes.get("model", 1)
    tokens = t.batch_size * t.sequence_length * model / inner.num_devices  # of a device
    # Scores and losses are divided among the stages.
    others = 1 - 1 / layout.stages
    frozen = config.finetune.method != "full"  # without gradients of weights outside of adapters
    head = 2 * m.embed_dim * m.vocab_size * tokens / model  # forward
    scored = (2 if frozen else 3) * head
    compute = found.compute - others * scored / peak
    memory = (
        found.memory - found.update - others * _LOSS_PASSES * tokens * m.vocab_size / model * 4 / bandwidth
    )
    # Besides what its rematerialisation repeats, a stage's forward pass is repeated as a whole.
    compute += (step_flops(one, training=False) / inner.num_devices - head) / peak
    memory += _PASSES / 3 * tokens * (one.model.num_layers * m.embed_dim) * 2 / bandwidth
    # Forward an activation in bfloat16 and backward its gradient, over one link; and of the last stage's output a part
    # to each stage, and its gradient back, over all of its links.
    wait = ticks(layout)
    stream = tokens * m.embed_dim
    links = _links(target, sizes, link_bandwidth)
    link = links.bandwidth if links.switched else links.bandwidth / 2  # one of a ring's two
    communication = found.communication + wait * 2 * stream * 2 / link
    communication += links.gather(stream * 4, ("pipeline",))

    def whole(communication: float) -> Estimate:
        busy = max(memory, 0.0) * wait + found.update
        return Estimate(max(compute, 0.0) * wait, busy, communication, found.update)

    if frozen:
        return whole(communication)
    # Embedding and head are on every stage.
    outer = count_parameters(config).every - layout.stages * (
        count_parameters(config).every - count_parameters(one).every
    ) / (layout.stages - 1)
    communication += links.reduce(outer / model * 4, ("pipeline",))
    return whole(communication)

"""A rough estimate of a training step's time, in microseconds, to rank layouts before compiling.

The roofline of the FLOPs, of the optimizer's memory traffic, and of the bytes that sharding sends. It is used to
choose what to compile, and not reported if a compiler is available.

Communication (each a ring over the axis; Xu et al., "GSPMD", arXiv:2105.04663; the table in "How to Scale Your Model",
part 5): sharded parameters are gathered for the forward and again for the backward pass of every microbatch and their
gradients reduce-scattered; replicated ones have their gradients all-reduced; a ``model`` axis all-reduces the residual
stream twice a layer forward and five times backward, as programs compiled for it do.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from capibara.config import ModularModelConfig
from capibara.plan.layout import Layout
from capibara.plan.slices import Slice

if TYPE_CHECKING:
    from capibara.compose import CompiledModel

__all__ = ["Estimate", "estimate_time", "model_specs", "step_flops"]

# What the matrix units reach of their peak in blocks of usual sizes, as the compiler's own cycles have it.
_REACHED = 0.75
# Of the time of gathers of parameters, what stays visible behind the arithmetic of neighbouring layers.
_EXPOSED = 0.4
# Of a layer in a microbatch, forward and backward, what does not depend on its sizes.
_LAYER_SECONDS = 1e-4
# Reads and writes of a moment update per parameter: parameter and two moments in and out, and the gradient.
_OPTIMIZER_BYTES = 4 * 7
# Passes over a block's activations (in bfloat16, residual stream and feed-forward) that its elementwise work, norms and
# copies take, forward and backward, as the compiler's cycles have it for the shipped production step on v4.
_PASSES = 90
_LOSS_PASSES = 8


@dataclass(frozen=True)
class Estimate:
    """Seconds of one step: FLOPs, memory traffic and communication, without overlap."""

    compute: float
    memory: float
    communication: float

    @property
    def seconds(self) -> float:
        """The sum of all parts."""
        return self.compute + self.memory + self.communication


def model_specs(config: ModularModelConfig) -> CompiledModel:
    """The model's parameters as specifications, on the backend that needs no device."""
    model: Any = config.model
    return _specs(model)


@lru_cache(maxsize=16)
def _specs(model: Any) -> CompiledModel:
    from capibara.compose import NumpyBackend, compile
    from capibara.core.decoder import build_decoder

    return compile(build_decoder(model), NumpyBackend())


def step_flops(config: ModularModelConfig) -> float:
    """Floating-point operations of one optimizer step, without rematerialisation (the usual base of utilisation)."""
    from capibara.core.flops import flops_per_token

    tokens = config.train.batch_size * config.train.sequence_length
    return flops_per_token(config.model, config.train.sequence_length) * tokens


def estimate_time(config: ModularModelConfig, layout: Layout, target: Slice) -> Estimate:
    """The rough time of one step."""
    devices = layout.num_devices
    sizes = layout.axis_sizes
    data, model = sizes.get("data", 1), sizes.get("model", 1)
    m, t = config.model, config.train
    tokens = t.batch_size * t.sequence_length / data
    repeated = {"none": 1.0, "dots": 1.05, "full": 4 / 3}[layout.remat]
    compute = step_flops(config) * repeated / devices / (target.chip.peak("bfloat16") * _REACHED)

    bandwidth = target.chip.hbm_bandwidth or 1e12
    params = model_specs(config).num_params
    held = (
        params
        / model
        / (data if layout.optimizer_rules == layout.rules and layout.parameters == "sharded" else 1)
    )
    if layout.parameters == "replicated" and layout.optimizer == "sharded":
        held = params / model / data
    memory = held * _OPTIMIZER_BYTES / bandwidth
    widths = m.embed_dim + m.resolved_mlp_dim / model
    memory += _PASSES * repeated * m.num_layers * tokens * widths * 2 / bandwidth
    memory += _LOSS_PASSES * tokens * m.vocab_size / model * 4 / bandwidth
    # Weights are read for each microbatch, forward and twice backward.
    memory += layout.microbatches * 3 * (params / model) * 2 / bandwidth

    # Every microbatch walks through its accumulated gradients, and through a chain of small operations a layer.
    if layout.microbatches > 1:
        memory += layout.microbatches * held * 4 * 3 / bandwidth
    memory += layout.microbatches * m.num_layers * _LAYER_SECONDS
    count = layout.microbatches

    def ring(size: float, axis: int) -> float:
        # Two neighbours share one link; a longer ring is sent both ways round.
        links = target.link_bandwidth * min(axis - 1, 2)
        return size * (axis - 1) / axis / links if axis > 1 else 0.0

    # Parameters travel in the type of the arithmetic and behind neighbouring layers; gradients in float32, waited for.
    whole = params / model
    gathered, reduced = ring(whole * 2, data), ring(whole * 4, data)
    if layout.parameters == "sharded":
        communication = count * (2 * _EXPOSED * gathered + reduced)
    elif layout.optimizer == "sharded":
        communication = count * reduced + reduced
    else:
        communication = count * 2 * reduced
    # Partial sums of the residual stream, in float32, each an all-reduce (a scatter and a gather): forward one after
    # attention and one after the feed-forward; backward one for each product that its inputs went into (query, key,
    # value, gate, up), which XLA does not add up before; one more where the block is computed again.
    reduces = {"none": 7, "dots": 7, "full": 8}[layout.remat]
    communication += reduces * m.num_layers * 2 * ring(tokens * m.embed_dim * 4, model)
    if layout.offload == "optimizer":
        # Moments travel to the hosts and back over PCIe, about 10 GB/s a chip each way.
        memory += held * 8 * 2 / 10e9
    return Estimate(compute, memory, communication)

"""A selective state-space layer: attention's work with a state of fixed size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capibara.compose import primitives as p
from capibara.compose.errors import WiringError
from capibara.compose.initializers import Constant, LogUniform, Scaled, ones, zeros
from capibara.compose.library.layers import Linear, RMSNorm
from capibara.compose.logical.arguments import flag, number, whole
from capibara.compose.logical.block import Block
from capibara.compose.logical.model import Model
from capibara.compose.primitives.paged import Pools

__all__ = ["StateSpace"]


class StateSpace(Model):
    """Selective state-space layer (Mamba-2: Dao and Gu, 2024): ``input [batch, sequence, embed]`` → the same shape.

    The input is projected to values, gates, write and read vectors and step sizes; values, writes and reads pass a
    short causal convolution and an activation; each head keeps a ``head_dim × state_dim`` memory that decays by
    ``exp(-step · exp(log_rate))`` and takes in ``step · value ⊗ write`` at each position.

    Args:
        dimension: size of the input and output.
        state_dim: columns of a head's memory. head_dim: rows. expand: inner size over ``dimension``.
        conv_width: taps of the short convolution. chunk_size: positions computed at once (speed only); None: what
            ``capibara tune`` has measured, or a heuristic.
        groups: how many write and read vectors a position has; each serves as many adjacent heads. The normalisation
            is of each group's heads by themselves.
        activation: after the convolution, a block class such as ``Gelu`` or a function that makes a block.
        use_bias: of the projections in and out. conv_bias: of the convolution.
        step_limits: least and largest step size; None for no limit.
        norm: normalise the gated values before the output projection. epsilon: of that.
        cached: decode from a recurrent state: adds the states ``memory``, ``value_tail``, ``write_tail``,
            ``read_tail``.
        ragged: rows hold several texts, or texts of different lengths: the input ``segments int [batch, sequence]``
            numbers them (:class:`~capibara.compose.primitives.SegmentScan`), or with a recurrent state ``slots`` says
            what is padding (:class:`~capibara.compose.primitives.RaggedContinuedScan`).
    """

    def __init__(
        self,
        dimension: int,
        state_dim: int = 64,
        head_dim: int = 64,
        expand: int = 2,
        conv_width: int = 4,
        chunk_size: int | None = None,
        *,
        groups: int = 1,
        activation: Callable[[], Block] = p.Silu,
        use_bias: bool = False,
        conv_bias: bool = True,
        step_limits: tuple[float | None, float | None] = (None, None),
        norm: bool = True,
        epsilon: float = 1e-5,
        cached: bool = False,
        ragged: bool = False,
        paged: Pools | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        sizes = {
            "dimension": dimension,
            "state_dim": state_dim,
            "head_dim": head_dim,
            "expand": expand,
            "conv_width": conv_width,
            "groups": groups,
            **({} if chunk_size is None else {"chunk_size": chunk_size}),
        }
        for key, size in sizes.items():
            whole(key, size)
        for key, value in (
            ("use_bias", use_bias),
            ("conv_bias", conv_bias),
            ("norm", norm),
            ("ragged", ragged),
        ):
            flag(key, value)
        for key, limit in zip(("least", "largest"), step_limits, strict=True):
            number(f"step_limits: {key}", limit, optional=True)
        inner = expand * dimension
        if inner % head_dim:
            raise WiringError(
                f"head_dim={head_dim} does not divide the inner size {inner} (expand={expand} times "
                f"dimension={dimension}): choose one that does"
            )
        heads = inner // head_dim
        if heads % groups:
            raise WiringError(
                f"groups={groups} does not divide the number of heads, {heads}: each group serves the same number"
            )
        self.add_input("input", ("batch", "sequence", dimension), "float", ("batch", "sequence", "embed"))
        rows: dict[str, Any] = {}
        if paged is not None:
            rows = _add_slot_inputs(self)
        elif ragged:
            rows = {"slots": "slots"} if cached else {"segments": "segments"}
            self.add_input(next(iter(rows)), ("batch", "sequence"), "int")

        shared = "kv_heads" if groups > 1 else None
        for key in ("value", "gate", "write", "read"):
            of_group = key in ("write", "read")
            count, size = (groups, state_dim) if of_group else (heads, head_dim)
            axes = ("embed", shared, "state") if of_group else ("embed", "heads", "head_dim")
            projection = _Heads(dimension, count, size, axes, use_bias)
            self.add(projection, key, input="input", output=f"{key}_heads")
        self.add(Linear(heads, use_bias, axes=("embed", "heads")), "step", input="input", output="step_raw")

        self.add_parameter("step_bias", (heads,), LogUniform(1e-3, 1e-1, "softplus_inverse"), axes=("heads",))
        self.add(p.Add(), left="step_raw", right="step_bias", output="step_biased")
        step = "step_size"
        self.add(p.Softplus(), input="step_biased", output=step)
        if step_limits != (None, None):
            self.add(p.Clip(*step_limits), "step_limited", input=step, output="step_bounded")
            step = "step_bounded"
        # Kept in the parameter dtype: the decay over a long sequence is a large power of it.
        self.add_parameter("log_rate", (heads,), LogUniform(1.0, 16.0), axes=("heads",), keep_dtype=True)
        self.add(p.Decay(), input="log_rate", output="rate")

        for key, count, size, axis in (
            ("value", heads, head_dim, "heads" if heads > 1 else None),
            ("write", groups, state_dim, shared),
            ("read", groups, state_dim, shared),
        ):
            conv = _ShortConv(count, size, conv_width, axis, activation, conv_bias, cached, ragged, paged)
            self.add(conv, f"{key}_conv", input=f"{key}_heads", output=f"{key}_mixed", **rows)

        recurrence = {
            "input": "value_mixed",
            "step": step,
            "rate": "rate",
            "write": "write_mixed",
            "read": "read_mixed",
            "output": "recalled",
            **rows,
        }
        if paged is not None:
            self.add_state(
                "memories",
                (paged.states, heads, head_dim, state_dim),
                zeros,
                axes=(None, "heads", "head_dim", "state"),
                dtype="float32",
            )
            scan = self.add(
                p.PagedScan(*paged.shape.parts, chunk_size), "scan", memories="memories", **recurrence
            )
            self.update_state("memories", scan.next_memories)
        elif cached:
            self.add_state(
                "memory",
                ("batch", heads, head_dim, state_dim),
                zeros,
                axes=("batch", "heads", "head_dim", "state"),
                dtype="float32",
            )
            op = p.RaggedContinuedScan if ragged else p.ContinuedScan
            scan = self.add(op(chunk_size), "scan", memory="memory", **recurrence)
            self.update_state("memory", scan.next_memory)
        else:
            op = p.SegmentScan if ragged else p.SelectiveScan
            self.add(op(chunk_size), "scan", **recurrence)

        self.add_parameter("skip", (heads, 1), ones, axes=("heads", None))
        self.add(p.Multiply(), left="value_mixed", right="skip", output="direct")
        self.add(p.Add(), left="recalled", right="direct", output="mixed")
        self.add(p.Silu(), input="gate_heads", output="open")
        self.add(p.Multiply(), left="mixed", right="open", output="gated")
        self.add(p.GroupMerge(), input="gated", output="flat")
        if norm:
            self.add(RMSNorm(epsilon, groups=groups, axis="mlp"), "norm", input="flat", output="normed")
        out = Linear(dimension, use_bias, axes=("mlp", "embed"))
        self.add(out, "out", input="normed" if norm else "flat", output="output")
        self.expose("output")


def _add_slot_inputs(model: Model) -> dict[str, str]:
    """Add the inputs that say where the states of sequences are; their names, as connections."""
    names = ("slots", "starts", "counts")
    for name in names:
        model.add_input(name, ("sequences",), "int")
    return {name: name for name in names}


class _Heads(Model):
    """A projection onto heads: ``[*b, dimension]`` → ``[*b, heads, size]``."""

    def __init__(
        self, dimension: int, heads: int, size: int, axes: tuple[str | None, ...], use_bias: bool
    ) -> None:
        super().__init__()
        self.add_input("input", "*b in", "float")
        self.add_parameter("weight", (dimension, heads, size), Scaled(1.0), axes=axes)
        product = "product" if use_bias else "output"
        self.add(p.Project(), "product", input="input", weight="weight", output=product)
        if use_bias:
            self.add_parameter("bias", (heads, size), zeros, axes=axes[1:])
            self.add(p.Add(), "sum", left="product", right="bias", output="output")
        self.expose("output")


class _ShortConv(Model):
    """A depthwise causal convolution over heads, then an activation: ``[batch, sequence, heads, size]``, same out."""

    def __init__(
        self,
        heads: int,
        size: int,
        width: int,
        axis: str | None,
        activation: Callable[[], Block],
        use_bias: bool,
        cached: bool,
        ragged: bool,
        paged: Pools | None,
    ) -> None:
        super().__init__()
        self.add_input("input", ("batch", "sequence", heads, size), "float")
        self.add_parameter("weight", (width, heads, size), Scaled(1.0), axes=("conv", axis, None))
        given = {"input": "input", "weight": "weight", "output": "mixed"}
        if use_bias:
            self.add_parameter("bias", (heads, size), Constant(0.0), axes=(axis, None))
            given["bias"] = "bias"
        if paged is not None:
            given |= _add_slot_inputs(self)
        elif ragged:
            key = "slots" if cached else "segments"
            self.add_input(key, ("batch", "sequence"), "int")
            given[key] = key
        if paged is not None:
            self.add_state(
                "tails", (paged.states, width - 1, heads, size), zeros, axes=(None, None, axis, None)
            )
            conv = self.add(
                p.PagedConv(*paged.shape.parts, use_bias=use_bias), "conv", tails="tails", **given
            )
            self.update_state("tails", conv.next_tails)
        elif cached:
            self.add_state("tail", ("batch", width - 1, heads, size), zeros, axes=("batch", None, axis, None))
            op = p.RaggedCachedConv if ragged else p.CachedConv
            conv = self.add(op(use_bias=use_bias), "conv", tail="tail", **given)
            self.update_state("tail", conv.next_tail)
        else:
            op = p.SegmentConv if ragged else p.CausalConv
            self.add(op(use_bias=use_bias), "conv", **given)
        self.add(activation(), input="mixed", output="output")
        self.expose("output")

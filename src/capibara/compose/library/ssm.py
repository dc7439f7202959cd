"""A selective state-space layer: attention's work with a state of fixed size."""

from __future__ import annotations

from capibara.compose import primitives as p
from capibara.compose.errors import WiringError
from capibara.compose.initializers import Constant, LogUniform, Scaled, ones, zeros
from capibara.compose.library.layers import Linear, RMSNorm
from capibara.compose.logical.arguments import whole
from capibara.compose.logical.model import Model

__all__ = ["StateSpace"]


class StateSpace(Model):
    """Selective state-space layer (Mamba-2: Dao and Gu, 2024): ``input [batch, sequence, embed]`` → the same shape.

    The input is projected to values, gates, write and read vectors and step sizes; values, writes and reads pass a
    short causal convolution; each head keeps a ``head_dim × state_dim`` memory that decays by
    ``exp(-step · exp(log_rate))`` and takes in ``step · value ⊗ write`` at each position.

    Args:
        dimension: size of the input and output.
        state_dim: columns of a head's memory. head_dim: rows. expand: inner size over ``dimension``.
        conv_width: taps of the short convolution. chunk_size: positions computed at once (speed only); None: what
            ``capibara tune`` has measured, or a heuristic.
        epsilon: of the normalisation before the output projection.
        cached: decode from a recurrent state: adds the states ``memory``, ``value_tail``, ``write_tail``,
            ``read_tail``.
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
        epsilon: float = 1e-5,
        cached: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        sizes = {
            "dimension": dimension,
            "state_dim": state_dim,
            "head_dim": head_dim,
            "expand": expand,
            "conv_width": conv_width,
            **({} if chunk_size is None else {"chunk_size": chunk_size}),
        }
        for key, size in sizes.items():
            whole(key, size)
        inner = expand * dimension
        if inner % head_dim:
            raise WiringError(
                f"head_dim={head_dim} does not divide the inner size {inner} (expand={expand} times "
                f"dimension={dimension}): choose one that does"
            )
        heads = inner // head_dim
        self.add_input("input", ("batch", "sequence", dimension), "float", ("batch", "sequence", "embed"))

        self.add(_Heads(dimension, heads, head_dim), "value", input="input", output="value_heads")
        self.add(_Heads(dimension, heads, head_dim), "gate", input="input", output="gate_heads")
        self.add(
            _Heads(dimension, 1, state_dim, ("embed", None, "state")),
            "write",
            input="input",
            output="write_heads",
        )
        self.add(
            _Heads(dimension, 1, state_dim, ("embed", None, "state")),
            "read",
            input="input",
            output="read_heads",
        )
        self.add(Linear(heads, False, axes=("embed", "heads")), "step", input="input", output="step_raw")

        self.add_parameter("step_bias", (heads,), LogUniform(1e-3, 1e-1, "softplus_inverse"), axes=("heads",))
        self.add(p.Add(), left="step_raw", right="step_bias", output="step_biased")
        self.add(p.Softplus(), input="step_biased", output="step_size")
        # Kept in the parameter dtype: the decay over a long sequence is a large power of it.
        self.add_parameter("log_rate", (heads,), LogUniform(1.0, 16.0), axes=("heads",), keep_dtype=True)
        self.add(p.Decay(), input="log_rate", output="rate")

        for key, count, size in (("value", heads, head_dim), ("write", 1, state_dim), ("read", 1, state_dim)):
            conv = _ShortConv(count, size, conv_width, cached)
            self.add(conv, f"{key}_conv", input=f"{key}_heads", output=f"{key}_mixed")

        recurrence = {
            "input": "value_mixed",
            "step": "step_size",
            "rate": "rate",
            "write": "write_mixed",
            "read": "read_mixed",
            "output": "recalled",
        }
        if cached:
            self.add_state(
                "memory",
                ("batch", heads, head_dim, state_dim),
                zeros,
                axes=("batch", "heads", "head_dim", "state"),
                dtype="float32",
            )
            scan = self.add(p.ContinuedScan(chunk_size), "scan", memory="memory", **recurrence)
            self.update_state("memory", scan.next_memory)
        else:
            self.add(p.SelectiveScan(chunk_size), "scan", **recurrence)

        self.add_parameter("skip", (heads, 1), ones, axes=("heads", None))
        self.add(p.Multiply(), left="value_mixed", right="skip", output="direct")
        self.add(p.Add(), left="recalled", right="direct", output="mixed")
        self.add(p.Silu(), input="gate_heads", output="open")
        self.add(p.Multiply(), left="mixed", right="open", output="gated")
        self.add(p.GroupMerge(), input="gated", output="flat")
        self.add(RMSNorm(epsilon, axis="mlp"), "norm", input="flat", output="normed")
        self.add(Linear(dimension, False, axes=("mlp", "embed")), "out", input="normed", output="output")
        self.expose("output")


class _Heads(Model):
    """A projection onto heads: ``[*b, dimension]`` → ``[*b, heads, size]``."""

    def __init__(
        self,
        dimension: int,
        heads: int,
        size: int,
        axes: tuple[str | None, ...] = ("embed", "heads", "head_dim"),
    ) -> None:
        super().__init__()
        self.add_input("input", "*b in", "float")
        self.add_parameter("weight", (dimension, heads, size), Scaled(1.0), axes=axes)
        self.add(p.Project(), "product", input="input", weight="weight", output="output")
        self.expose("output")


class _ShortConv(Model):
    """A depthwise causal convolution over heads, then silu: ``[batch, sequence, heads, size]``, same shape out."""

    def __init__(self, heads: int, size: int, width: int, cached: bool) -> None:
        super().__init__()
        axis = "heads" if heads > 1 else None
        self.add_input("input", ("batch", "sequence", heads, size), "float")
        self.add_parameter("weight", (width, heads, size), Scaled(1.0), axes=("conv", axis, None))
        self.add_parameter("bias", (heads, size), Constant(0.0), axes=(axis, None))
        if cached:
            self.add_state("tail", ("batch", width - 1, heads, size), zeros, axes=("batch", None, axis, None))
            conv = self.add(
                p.CachedConv(),
                "conv",
                input="input",
                weight="weight",
                bias="bias",
                tail="tail",
                output="mixed",
            )
            self.update_state("tail", conv.next_tail)
        else:
            self.add(p.CausalConv(), "conv", input="input", weight="weight", bias="bias", output="mixed")
        self.add(p.Silu(), input="mixed", output="output")
        self.expose("output")

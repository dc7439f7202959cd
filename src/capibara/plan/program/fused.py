"""The contents of fusions: operations, and collectives that the compiler fused with work or with slicing."""

from __future__ import annotations

from dataclasses import dataclass, field

from capibara.compilation.collectives import COLLECTIVES
from capibara.plan.program.flops import instruction_flops, operand_shape, tiled_flops
from capibara.plan.program.kernels import NOTES, custom_call_target
from capibara.plan.program.text import Computation, Instruction, Module

__all__ = ["COLLECTIVES", "DONES", "STARTS", "Fused", "FusedComputations"]

STARTS = {f"{kind}-start": kind for kind in COLLECTIVES}
DONES = {f"{kind}-done" for kind in COLLECTIVES}
_DEPTH = 64


@dataclass
class Fused:
    """Sum of a fused computation and those inside it.

    Attributes:
      flops: of matrix products and convolutions. tiled: those that a TPU's tiles take.
      largest: those of the largest of them.
      dtype: element type of its operands.
      exchange: a collective, with the computation that contains it.
      kernel: a call of foreign code.
      starts, ends: whether an asynchronous collective begins or ends here (it may also appear in fusions between).
      slices: whether something is sliced: an all-reduce of which each device keeps one part is a reduce-scatter.
    """

    flops: int = 0
    tiled: int = 0
    largest: int = 0
    dtype: str = ""
    exchange: tuple[Instruction, Computation] | None = None
    kernel: Instruction | None = None
    starts: bool = False
    ends: bool = False
    slices: bool = False


@dataclass
class FusedComputations:
    """Fused computations of a program, each summed once."""

    module: Module
    known: dict[str, Fused] = field(default_factory=dict)

    def get(self, name: str, depth: int = 0) -> Fused:
        """Sum up a fused computation and those inside it."""
        known = self.known.get(name)
        if known is not None:
            return known
        out = self.known[name] = Fused()
        computation = self.module.computations.get(name)
        if computation is None or depth > _DEPTH:
            return out
        for instruction in computation.instructions:
            opcode = instruction.opcode
            if opcode in ("fusion", "call"):
                called = instruction.called()
                for target in called.get("calls", []) + called.get("to_apply", []):
                    self._add(out, self.get(target, depth + 1))
            elif opcode in ("convolution", "dot", "reduce"):
                flops = instruction_flops(instruction, computation)
                out.flops += flops
                out.tiled += tiled_flops(instruction, computation)
                if flops > out.largest:
                    out.largest, out.dtype = flops, operand_shape(instruction, computation, 0).dtype
            elif opcode in COLLECTIVES or opcode in STARTS:
                out.exchange = (instruction, computation)
            elif opcode in ("dynamic-slice", "reduce-scatter"):
                out.slices = True
            elif opcode == "custom-call":
                target = custom_call_target(instruction)
                out.starts |= target == "AsyncCollectiveStart"
                out.ends |= target == "AsyncCollectiveDone"
                if target not in NOTES and not target.startswith("AsyncCollective"):
                    out.kernel = instruction
        return out

    @staticmethod
    def _add(out: Fused, inner: Fused) -> None:
        out.flops += inner.flops
        out.tiled += inner.tiled
        if inner.largest > out.largest:
            out.largest, out.dtype = inner.largest, inner.dtype
        out.exchange = out.exchange or inner.exchange
        out.kernel = out.kernel or inner.kernel
        out.starts |= inner.starts
        out.ends |= inner.ends

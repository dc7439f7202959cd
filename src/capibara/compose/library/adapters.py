"""Low-rank adapters (LoRA: Hu et al., arXiv:2106.09685): a trained product beside a weight that is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capibara.compose import primitives as p
from capibara.compose.errors import WiringError
from capibara.compose.initializers import Constant, Scaled, ones, zeros
from capibara.compose.logical.arguments import choice, number, whole
from capibara.compose.logical.model import Block, Model

__all__ = ["BASE_GROUP", "Adapter", "part_adapters"]

BASE_GROUP = 64
"""Elements of a quantized weight that share a scale."""


@dataclass(frozen=True)
class Adapter:
    """What is added to a layer's product: ``scale * (dropout(x) @ a) @ b``.

    ``a [in, rank]`` is drawn, ``b [rank, out]`` begins at zero, so that a new adapter changes nothing. A layer with one
    has the parameters ``lora_a`` and ``lora_b`` beside its ``weight``.

    Args:
        rank: of the product, at least 1. scale: usually written ``alpha / rank``.
        dropout: of the adapter's input, in training.
        base: how the layer's own weight is stored: None, as ever; ``"int8"`` or ``"nf4"`` (QLoRA: Dettmers et al.,
            arXiv:2305.14314), as ``weight_codes`` and ``weight_scales`` in the place of ``weight``, which are never
            decoded as a whole (:class:`~capibara.compose.primitives.QuantisedProduct`).
    """

    rank: int
    scale: float = 1.0
    dropout: float = 0.0
    base: str | None = None

    def __post_init__(self) -> None:
        whole("rank", self.rank)
        number("scale", self.scale)
        number("dropout", self.dropout)
        choice("base", self.base, ("int8", "nf4"), optional=True)
        if not 0 <= self.dropout < 1:
            raise WiringError(f"dropout={self.dropout!r} must be at least 0 and below 1")

    def add_base(
        self,
        model: Model,
        output: str,
        *,
        ins: tuple[Any, ...],
        outs: tuple[int, ...],
        out_axes: tuple[str | None, ...],
    ) -> None:
        """Add the layer's own product with its quantized weight, from ``input`` to ``output``.

        Args:
            model: the layer. output: the product.
            ins, outs: sizes of what the weight sums over, and of its result, all known; out_axes: logical names.
        """
        assert self.base is not None
        if not all(isinstance(size, int) for size in (*ins, *outs)):
            raise WiringError(
                f"base={self.base!r} needs a layer whose sizes are known: give its inputs' size"
            )
        product = p.QuantisedProduct(self.base, ins, outs, BASE_GROUP)
        rows, inner = math.prod(outs), math.prod(ins)
        axes = (out_axes[0], None)
        # All zeros: seven is the code of it, twice in a byte.
        nothing, kind = (zeros, "int8") if self.base == "int8" else (Constant(0x77), "uint8")
        width = inner if self.base == "int8" else -(-inner // 2)
        model.add_parameter("weight_codes", (rows, width), nothing, axes=axes, dtype=kind, keep_dtype=True)
        groups = (rows, -(-inner // BASE_GROUP))
        model.add_parameter("weight_scales", groups, ones, axes=axes, dtype="float32", keep_dtype=True)
        model.add(
            product, "product", input="input", codes="weight_codes", scales="weight_scales", output=output
        )

    def join(
        self,
        model: Model,
        product: str,
        output: str,
        *,
        ins: tuple[Any, ...],
        outs: tuple[Any, ...],
        in_axes: tuple[str | None, ...],
        out_axes: tuple[str | None, ...],
        down: Block,
        up: Block,
    ) -> None:
        """Add an adapter to a layer: ``output = product + …`` of its ``input``.

        Args:
            model: the layer. product: its own product. output: the sum.
            ins, outs: sizes of what the weight sums over, and of its result; in_axes, out_axes: their logical names.
            down: a block with ``input`` and ``weight`` for ``a``. up: one for ``b``.
        """
        at = "input"
        if self.dropout:
            model.add(p.Dropout(self.dropout), "lora_dropout", input=at, output="lora_input")
            at = "lora_input"
        drawn = Scaled(1.0, fan_in=len(ins))
        model.add_parameter("lora_a", (*ins, self.rank), drawn, axes=(*in_axes, None))
        model.add_parameter("lora_b", (self.rank, *outs), zeros, axes=(None, *out_axes))
        model.add(down, "lora_down", input=at, weight="lora_a", output="lora_inner")
        model.add(up, "lora_up", input="lora_inner", weight="lora_b", output="lora_product")
        model.add(p.Multiply(), "lora_scaled", left="lora_product", right=self.scale, output="lora_change")
        model.add(p.Add(), "lora_sum", left=product, right="lora_change", output=output)


def part_adapters(given: Mapping[str, Adapter] | None, names: tuple[str, ...]) -> dict[str, Adapter | None]:
    """The adapter of each of a layer's parts."""
    if unknown := [name for name in given or () if name not in names]:
        raise WiringError(f"adapters: got {unknown[0]!r}, expected any of {', '.join(names)}")
    return {name: (given or {}).get(name) for name in names}

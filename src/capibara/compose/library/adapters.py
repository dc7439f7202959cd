"""Low-rank adapters (LoRA: Hu et al., arXiv:2106.09685): a trained product beside a weight that is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capibara.compose import primitives as p
from capibara.compose.errors import WiringError
from capibara.compose.initializers import Scaled, zeros
from capibara.compose.logical.arguments import number, whole
from capibara.compose.logical.model import Block, Model

__all__ = ["Adapter", "part_adapters"]


@dataclass(frozen=True)
class Adapter:
    """What is added to a layer's product: ``scale * (dropout(x) @ a) @ b``.

    ``a [in, rank]`` is drawn, ``b [rank, out]`` begins at zero, so that a new adapter changes nothing. A layer with one
    has the parameters ``lora_a`` and ``lora_b`` beside its ``weight``.

    Args:
        rank: of the product, at least 1. scale: usually written ``alpha / rank``.
        dropout: of the adapter's input, in training.
    """

    rank: int
    scale: float = 1.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        whole("rank", self.rank)
        number("scale", self.scale)
        number("dropout", self.dropout)
        if not 0 <= self.dropout < 1:
            raise WiringError(f"dropout={self.dropout!r} must be at least 0 and below 1")

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

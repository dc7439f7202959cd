"""A block of compose inside a model whose parameters are stored in Mithril's layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from capibara.compose import primitives as p
from capibara.compose.initializers import Scaled
from capibara.compose.logical.block import Block
from capibara.compose.logical.model import Model

__all__ = ["stored"]


def stored(
    model: Model,
    block: Block,
    *,
    turned: Iterable[str] = (),
    renamed: Mapping[str, str] | None = None,
    spread: int = 0,
    whole: Iterable[str] = (),
    hidden: Iterable[str] = (),
) -> None:
    """Add a block, with its inputs, outputs and parameters as the model's own.

    Args:
        model: the model. block: the block.
        turned: weights that are the transpose of the block's: ``[out, in]`` for its ``[in, out]``.
        renamed: other names for parameters.
        spread: parameters ``[c]`` are stored as ``[1, c, 1 …]`` with that many dimensions after the channels.
        whole: parameters that are not. hidden: outputs that are not the model's.
    """
    joined: dict[str, Any] = {}
    for key, wire in block.wires.items():
        root = wire.find()
        if root.role != "param" or root.declaration is None:
            continue
        own = (renamed or {}).get(key, key)
        if key in turned:
            model.add_parameter(own, (f"{own}_out", f"{own}_in"), Scaled(1.0, fan_in=1, skip=1))
            joined[key] = p.Transpose()(model.port(own))
        elif spread and key not in whole:
            init = root.declaration.init
            model.add_parameter(own, (1, f"{own}_channels", *(1,) * spread), init)
            joined[key] = p.Squeeze((0, *range(2, 2 + spread)))(model.port(own))
        else:
            joined[key] = own
    outputs = [k for k in block.output_keys if k not in hidden]
    joined |= {key: key for key in (*block.input_keys, *outputs)}
    model.add(block, "inner", **joined)
    model.expose(*outputs)

"""The trace of a module of PyTorch, and what its operations are called and where they come from.

For :mod:`.from_torch`.
"""

from __future__ import annotations

import operator
import os
import re
import warnings
from collections.abc import Mapping
from typing import Any

from capibara.compose.errors import WiringError
from capibara.compose.interchange.from_torch_operations import TABLE
from capibara.compose.interchange.from_torch_recurrent import LAYERS

__all__ = ["entry_of", "is_getitem", "is_size", "name_of", "place_of", "trace"]


def trace(
    module: Any, inputs: tuple[Any, ...], keywords: Mapping[str, Any] | None, dynamic: Any, training: bool
) -> Any:
    """The module as a program of core operations and whole recurrent layers; the module stays as it was.

    Raises:
        WiringError: ``torch.export`` cannot trace it.
    """
    import torch

    modes = [(part, part.training) for part in module.modules()]
    # Projected states are not a layer that compose has: such layers are traced step by step.
    kept = () if any(getattr(part, "proj_size", 0) for part, _ in modes) else LAYERS
    try:
        module.train(training)
        with warnings.catch_warnings(), torch.no_grad():
            # torch.export warns of what it uses itself.
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            # Its recurrent layers keep a list of their weights, and renew it while they are traced.
            warnings.filterwarnings(
                "ignore", r"The tensor attributes? self\.[\w.]*_flat_weights\[", UserWarning
            )
            program = torch.export.export(module, inputs, dict(keywords or {}), dynamic_shapes=dynamic)
            table = torch.export.default_decompositions()
            for name in kept:
                table.pop(getattr(torch.ops.aten, name).input, None)
            table.pop(torch.ops.aten._safe_softmax.default, None)
            return program.run_decompositions(table)
    except Exception as error:
        raise WiringError(
            f"torch.export cannot trace this {type(module).__name__}: {type(error).__name__}: {error}"
        ) from error
    finally:
        for part, mode in modes:
            part.training = mode


def place_of(node: Any) -> str:
    """The module that an operation comes from, and the line of code outside of torch that called for it."""
    import torch

    stack = list((node.meta.get("nn_module_stack") or {}).values())
    name = (stack[-1][0] if stack else "") or "the module itself"
    home = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    own = [(file, line) for file, line in frames if not file.startswith(home)]
    return f"{name} ({own[-1][0]}:{own[-1][1]})" if own else name


def name_of(node: Any) -> str:
    """As in ``aten::add.Tensor``."""
    target = node.target
    return getattr(target, "_name", None) or str(target)


def entry_of(node: Any) -> Any:
    """The function that puts primitives in the operation's place, if there is one."""
    space, _, rest = name_of(node).partition("::")
    return TABLE.get(rest.split(".")[0]) if space == "aten" else None


def is_getitem(node: Any) -> bool:
    return node.target is operator.getitem


def is_size(node: Any) -> bool:
    """It computes a size or checks one: nothing is computed of that, sizes are read off the trace."""
    value = node.meta.get("val")
    if isinstance(value, int | float) or type(value).__name__ in ("SymInt", "SymBool", "SymFloat"):
        return True
    return value is None and ("assert" in name_of(node) or "sym_constrain" in name_of(node))

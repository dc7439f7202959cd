"""Operations: one public function each, several implementations, one plain oracle.

Its submodules are the categories and hold the functions; :func:`explain` says which implementation of one runs
for given arguments, and why the others do not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from capibara.jax_versions import require_supported_jax

require_supported_jax()  # first: an old JAX would fail below, less clearly

from capibara.lazy import on_demand, traces_later

if TYPE_CHECKING:
    from capibara.ops import (
        attention,
        collective,
        conv,
        fft,
        linalg,
        loss,
        rotary,
        scan,
        tropical,
        vq,
    )
    from capibara.ops import (
        layers as layers,
    )
    from capibara.ops.errors import NoImplementationError, OpShapeError, OpTypeError, OpValueError, OpWarning
    from capibara.ops.explaining import Explanation, explain
    from capibara.ops.registry import list_ops
    from capibara.ops.tuning import use_tuning

__all__ = [
    "Explanation",
    "NoImplementationError",
    "OpShapeError",
    "OpTypeError",
    "OpValueError",
    "OpWarning",
    "attention",
    "collective",
    "conv",
    "explain",
    "fft",
    "import_all",
    "linalg",
    "list_ops",
    "loss",
    "rotary",
    "scan",
    "tropical",
    "use_tuning",
    "vq",
]

_CATEGORIES = ("attention", "collective", "conv", "fft", "linalg", "loss", "rotary", "scan", "tropical", "vq")
_OTHERS = ("layers", "linalg.chained", "rows")
_HOMES = {
    **dict.fromkeys((*_CATEGORIES, "layers"), ()),
    "errors": ("NoImplementationError", "OpShapeError", "OpTypeError", "OpValueError", "OpWarning"),
    "explaining": ("Explanation", "explain"),
    "registry": ("list_ops",),
    "tuning": ("use_tuning",),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)


def import_all() -> None:
    """Import every operation, and the kernels that the layers of models take on CPUs.

    Importing this package does so, except after :func:`capibara.lazy.trace_later`: a module that is imported while JAX
    traces a function may bring a setting of JAX, and then that function is traced again.
    """
    for name in (*_CATEGORIES, *_OTHERS):
        module = importlib.import_module(f"{__name__}.{name}")
        for function in module.__all__:
            getattr(module, function)


if not traces_later():
    import_all()

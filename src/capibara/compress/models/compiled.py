"""A model that is run again and again with other numbers, compiled once where JAX can trace it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from capibara.compress.models.adapters import Adapter, AppliedAdapter, TreeAdapter

__all__ = ["compiled_run"]


def compiled_run(adapter: Adapter) -> Callable[[Any, Any], Any]:
    """:meth:`Adapter.run`, of which JAX compiles one program for each shape of the inputs.

    A function of arrays that is not compiled is traced or run operation by operation at each call, which takes longer
    than the arithmetic. What JAX cannot trace (NumPy on the way, branches on values, outputs that are not arrays) is
    run as it is, from then on.

    Args:
      adapter: of the model; of a torch module, or of arrays that are not JAX's, its own method comes back.
    """
    jax = sys.modules.get("jax")
    tree = adapter.tree if isinstance(adapter, AppliedAdapter) else adapter
    if jax is None or not isinstance(tree, TreeAdapter):
        return adapter.run
    if not all(isinstance(a, jax.Array) for a in adapter.arrays.values()):
        return adapter.run
    function = jax.jit(lambda arrays, inputs: adapter.run(tree.with_arrays(arrays), inputs))
    traceable = True

    def run(model: Any, inputs: Any) -> Any:
        nonlocal traceable
        if traceable:
            try:
                return function(adapter.arrays if model is adapter.model else tree.read_arrays(model), inputs)
            except (jax.errors.JAXTypeError, jax.errors.JAXIndexError, TypeError):
                traceable = False
        return adapter.run(model, inputs)

    return run

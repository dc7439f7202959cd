"""A model's forward pass, compiled before its first call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from capibara.compilation.configuration import TpuCompilationConfig
from capibara.compilation.jitted import OptimizedJit, create_tpu_optimized_jit

__all__ = ["create_jitted_forward"]


def create_jitted_forward(
    model_fn: Callable[..., Any],
    input_shapes: Sequence[Any],
    *,
    optimization_level: str = "default",
    use_bfloat16: bool = False,
    enable_async_collective: bool = False,
    memory_optimization: bool = False,
    dtype: Any = "float32",
    **options: Any,
) -> OptimizedJit:
    """Compile a forward pass for its typical inputs.

    Args:
      model_fn: from arrays to arrays, such as ``model.forward``. Arrays that it holds become constants of the
        program.
      input_shapes, dtype: as for :meth:`OptimizedJit.compile`: one entry for each program.
      optimization_level, use_bfloat16, enable_async_collective, memory_optimization: as for
        :class:`TpuCompilationConfig`.
      options: its other arguments.

    Returns:
      The function. Calls with those inputs compile nothing; other inputs are compiled when they come, and
      ``recompilations`` says why.

    Raises:
      CompilationOptionError: an option or an entry is invalid.

    Equivalent JAX without options: ``jax.jit(model_fn)``, and ``.lower(…).compile()`` of it for each shape.
    """
    config = TpuCompilationConfig(
        optimization_level=optimization_level,
        use_bfloat16=use_bfloat16,
        enable_async_collective=enable_async_collective,
        memory_optimization=memory_optimization,
        **options,
    )
    forward: OptimizedJit = create_tpu_optimized_jit(model_fn, config=config)
    forward.compile(input_shapes=input_shapes, dtype=dtype)
    return forward

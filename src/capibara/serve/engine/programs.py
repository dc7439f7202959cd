"""The programs of an engine: steps of a few shapes, and choosing tokens from what they give.

They are compiled for the arrays that they are called with, so that nothing is compiled while requests are answered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from capibara.compress.jax_codes import is_coded, quantized
from capibara.core.paged import StepShape
from capibara.errors import ConfigError
from capibara.memory.budget import device_budget
from capibara.ops.linalg.few_rows import few_rows
from capibara.serve.row_sampling import Changes, choose, rows_of
from capibara.serve.sampling import Sampling

__all__ = ["GREEDY", "MOST_SCORES", "Programs", "no_changes", "page_bytes", "pages_in_memory"]

GREEDY = Sampling(temperature=0.0)
MOST_SCORES = 20
"""The most alternatives that are given with a token."""
_MEMORY_PART = 0.5  # of what is free, for pages


class Programs:
    """Compiles what an engine runs, once each.

    Args:
      model: a :class:`capibara.core.ModularCapibaraModel`. params, state: its.
      writable: only token ids below this are chosen.

    Attributes:
      compilations: how many programs were compiled.
    """

    def __init__(self, model: Any, params: Any, state: Any, *, writable: int) -> None:
        self._model = model
        # As a plain list, without arrays that hold nothing: going through nested weights for each step, codes above
        # all, takes as long as some of its products.
        self._leaves, self._tree = jax.tree.flatten((params, state))
        self._weights = [leaf for leaf in self._leaves if leaf.size]
        self._writable, self._vocabulary = writable, model.config.model.vocab_size
        self._steps: dict[StepShape, Any] = {}
        self._choices: dict[tuple[int, bool, int], Any] = {}
        self.compilations = 0

    def step(self, shape: StepShape, cache: Any, inputs: Any) -> tuple[jax.Array, Any]:
        """Compute a step: ``(logits, cache)``; the cache that is given is used up."""
        program = self._steps.get(shape) or self._compiled_step(shape, cache, inputs)
        return program(self._weights, cache, inputs)

    def forget(self, shape: StepShape) -> None:
        """Compile the program of such a step anew for the next one."""
        self._steps.pop(shape, None)

    def _compiled_step(self, shape: StepShape, cache: Any, inputs: Any) -> Any:
        model = self._model

        whole = self._tree.unflatten(self._leaves)
        coded = any(map(is_coded, jax.tree_util.tree_leaves(whole, is_leaf=is_coded)))

        def decoded(params: Any, state: Any, cache: Any, inputs: Any) -> Any:
            # Products with codes are found by what they are in plain JAX.
            with contextlib.nullcontext() if coded else few_rows():
                return model.decode_pages(params, inputs, cache, shape, state=state)

        run = quantized(decoded) if coded else decoded

        def step(weights: list[Any], cache: Any, inputs: Any) -> Any:
            given = iter(weights)
            every = [next(given) if leaf.size else jnp.zeros(leaf.shape, leaf.dtype) for leaf in self._leaves]
            params, state = self._tree.unflatten(every)
            return run(params, state, cache, inputs)

        # The cache stays where it is, and logits are wanted whole.
        places = None if model.mesh is None else (self._whole(), jax.tree.map(lambda x: x.sharding, cache))
        with model.backend.scope():
            jitted = jax.jit(step, donate_argnums=1, out_shardings=places)
            self._steps[shape] = jitted.lower(self._weights, cache, inputs).compile()
        self.compilations += 1
        return self._steps[shape]

    def choose(self, logits: Any, rows: Any, changes: Changes | None, *, top: int) -> Any:
        """Choose a token for each row: :func:`capibara.serve.row_sampling.choose`."""
        key = logits.shape[0], changes is not None, top
        program = self._choices.get(key) or self._compiled_choice(key, logits.dtype)
        return program(logits, rows, changes)

    def _compiled_choice(self, key: tuple[int, bool, int], dtype: Any) -> Any:
        writable, vocabulary = self._writable, self._vocabulary
        size, changed, top = key

        def chosen(logits: jax.Array, rows: Any, changes: Any) -> Any:
            if writable < vocabulary:
                logits = jnp.where(jnp.arange(vocabulary) < writable, logits, -jnp.inf)
            return choose(logits, rows, changes, top=min(top, vocabulary))

        rows = rows_of([GREEDY] * size, [0] * size, [0] * size)
        changes = no_changes(size, vocabulary) if changed else None
        logits = jax.ShapeDtypeStruct((size, vocabulary), dtype, sharding=self._whole())
        with self._model.backend.scope():
            self._choices[key] = jax.jit(chosen).lower(logits, rows, changes).compile()
        self.compilations += 1
        return self._choices[key]

    def _whole(self) -> NamedSharding | None:
        """Where an array is that all devices of a mesh have."""
        mesh = self._model.mesh
        return None if mesh is None else NamedSharding(mesh, PartitionSpec())

    def warm(
        self,
        shapes: Sequence[StepShape],
        cache: Any,
        inputs: Callable[[StepShape], Any],
        progress: Callable[[int, int], object] | None,
    ) -> None:
        """Compile all that steps of these shapes need."""
        kinds = [(changed, top) for changed in (False, True) for top in (0, MOST_SCORES)]
        sizes = sorted({len(inputs(shape)["outputs"]) for shape in shapes})
        total = len(shapes) + len(kinds) * len(sizes)
        dtype = jnp.dtype(self._model.config.precision.accumulate_dtype)
        work: list[Callable[[], Any]] = [
            lambda shape=shape: self._compiled_step(shape, cache, inputs(shape)) for shape in shapes
        ]
        work += [
            lambda size=size, kind=kind: self._compiled_choice((size, *kind), dtype)
            for size in sizes
            for kind in kinds
        ]
        for done, compile_one in enumerate(work, start=1):
            compile_one()
            if progress is not None:
                progress(done, total)


def no_changes(rows: int, vocabulary: int) -> Changes:
    """Changes that leave all logits as they are."""
    return Changes(
        np.zeros((rows, vocabulary), np.float32),
        np.zeros((rows, vocabulary), np.int32),
        np.zeros((rows, vocabulary), bool),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.float32),
        np.ones(rows, np.float32),
    )


def page_bytes(model: Any, page_size: int, dtype: Any) -> int:
    """Bytes of a page of all blocks together."""
    of_one = jax.eval_shape(lambda: model.init_pages(1, page_size, 1, dtype=dtype))
    return sum(
        x.size * x.dtype.itemsize
        for path, x in jax.tree_util.tree_leaves_with_path(of_one)
        if str(getattr(path[-1], "key", "")).endswith("pages")
    )


def pages_in_memory(model: Any, page_size: int, dtype: Any, *, least: int, most: int) -> int:
    """How many pages fit into half of the memory that is free, at most ``most``.

    Raises:
      ConfigError: fewer than ``least``.
    """
    size = page_bytes(model, page_size, dtype)
    if not size:
        return most
    free = int(device_budget().free() * _MEMORY_PART)
    if free // size < least:
        raise ConfigError(
            f"max_length: the pages of one text take {size * least:,} bytes, and half of the memory that is free is "
            f"{free:,}. Choose a smaller max_length or cache_dtype."
        )
    return min(most, free // size)

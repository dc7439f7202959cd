"""The programs of an engine: steps of a few shapes, and choosing tokens from what they give.

They are compiled for the arrays that they are called with, so that nothing is compiled while requests are answered.
"""

from __future__ import annotations

import contextlib
import threading
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
      writable: see above. compilations: how many programs were compiled because a step needed them.
    """

    def __init__(self, model: Any, params: Any, state: Any, *, writable: int) -> None:
        self._model = model
        # As a plain list, without arrays that hold nothing: going through nested weights for each step, codes above
        # all, takes as long as some of its products.
        self._state = state
        self._leaves, self._tree = jax.tree.flatten((params, state))
        self._weights = self.weights_of(params)
        self.writable, self._vocabulary = writable, model.config.model.vocab_size
        self._steps: dict[StepShape, Any] = {}
        self._choices: dict[tuple[int, bool, int], Any] = {}
        self._scores: dict[int, Any] = {}
        self._lock = threading.RLock()  # one program is compiled at a time, and none twice
        self.compilations = 0

    def weights_of(self, params: Any) -> list[Any]:
        """The parameters as programs take them."""
        return [leaf for leaf in jax.tree.leaves((params, self._state)) if leaf.size]

    def step(
        self, shape: StepShape, cache: Any, inputs: Any, weights: list[Any] | None = None
    ) -> tuple[jax.Array, Any]:
        """Compute a step: ``(logits, cache)``; the cache that is given is used up.

        Args:
          weights: other ones than those that the programs were made for (:meth:`weights_of`).
        """
        program = self._steps.get(shape)
        if program is None:
            with self._lock:
                self.compilations += shape not in self._steps
                program = self._compiled_step(shape, cache, inputs)
        return program(self._weights if weights is None else weights, cache, inputs)

    def forget(self, shape: StepShape) -> None:
        """Compile the program of such a step anew for the next one."""
        self._steps.pop(shape, None)

    def _compiled_step(self, shape: StepShape, cache: Any, inputs: Any) -> Any:
        with self._lock:
            if shape not in self._steps:
                self._steps[shape] = self._compile_step(shape, cache, inputs)
            return self._steps[shape]

    def _compile_step(self, shape: StepShape, cache: Any, inputs: Any) -> Any:
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
            return jitted.lower(self._weights, cache, inputs).compile()

    def choose(self, logits: Any, rows: Any, changes: Changes | None, *, top: int) -> Any:
        """Choose a token for each row: :func:`capibara.serve.row_sampling.choose`."""
        key = logits.shape[0], changes is not None, top
        program = self._choices.get(key)
        if program is None:
            with self._lock:
                self.compilations += key not in self._choices
                program = self._compiled_choice(key, logits.dtype)
        return program(logits, rows, changes)

    def _compiled_choice(self, key: tuple[int, bool, int], dtype: Any) -> Any:
        with self._lock:
            if key not in self._choices:
                self._choices[key] = self._compile_choice(key, dtype)
            return self._choices[key]

    def _compile_choice(self, key: tuple[int, bool, int], dtype: Any) -> Any:
        writable, vocabulary = self.writable, self._vocabulary
        size, changed, top = key

        def chosen(logits: jax.Array, rows: Any, changes: Any) -> Any:
            if writable < vocabulary:
                logits = jnp.where(jnp.arange(vocabulary) < writable, logits, -jnp.inf)
            return choose(logits, rows, changes, top=min(top, vocabulary))

        rows = rows_of([GREEDY] * size, [0] * size, [0] * size)
        changes = no_changes(size, vocabulary) if changed else None
        logits = jax.ShapeDtypeStruct((size, vocabulary), dtype, sharding=self._whole())
        with self._model.backend.scope():
            return jax.jit(chosen).lower(logits, rows, changes).compile()

    def score(self, logits: Any, targets: Any) -> Any:
        """The logarithms of probability of given tokens: ``(logprobs, top_logprobs, top_tokens)``.

        Args:
          logits: ``[rows, vocab]``. targets: int32 ``[rows]``.
        """
        size = logits.shape[0]
        program = self._scores.get(size)
        if program is None:
            with self._lock:
                self.compilations += size not in self._scores
                program = self._compiled_score(size, logits.dtype)
        return program(logits, targets)

    def _compiled_score(self, size: int, dtype: Any) -> Any:
        writable, vocabulary = self.writable, self._vocabulary

        def scores(logits: jax.Array, targets: jax.Array) -> Any:
            if writable < vocabulary:
                logits = jnp.where(jnp.arange(vocabulary) < writable, logits, -jnp.inf)
            own = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
            top = jax.lax.top_k(own, min(MOST_SCORES, vocabulary))
            return jnp.take_along_axis(own, targets[:, None], axis=1)[:, 0], *top

        with self._lock:
            if size not in self._scores:
                logits = jax.ShapeDtypeStruct((size, vocabulary), dtype, sharding=self._whole())
                targets = jax.ShapeDtypeStruct((size,), jnp.int32)
                with self._model.backend.scope():
                    self._scores[size] = jax.jit(scores).lower(logits, targets).compile()
            return self._scores[size]

    def _whole(self) -> NamedSharding | None:
        """Where an array is that all devices of a mesh have."""
        mesh = self._model.mesh
        return None if mesh is None else NamedSharding(mesh, PartitionSpec())

    def to_compile(
        self, shapes: Sequence[StepShape], cache: Any, inputs: Callable[[StepShape], Any]
    ) -> tuple[list[Callable[[], Any]], list[Callable[[], Any]]]:
        """What compiles all that steps of these shapes need: for the first two with plain requests, and the rest."""
        kinds = [(changed, top) for changed in (False, True) for top in (0, MOST_SCORES)]
        sizes = {shape: len(inputs(shape)["outputs"]) for shape in shapes}
        dtype = jnp.dtype(self._model.config.precision.accumulate_dtype)
        # The arrays themselves are given to the steps that run meanwhile.
        described = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=None if self._model.mesh is None else x.sharding
            ),
            cache,
        )

        def step(shape: StepShape) -> Callable[[], Any]:
            return lambda: self._compiled_step(shape, described, inputs(shape))

        def choice(size: int, kind: tuple[bool, int]) -> Callable[[], Any]:
            return lambda: self._compiled_choice((size, *kind), dtype)

        every = sorted(set(sizes.values()))
        early = [sizes[shape] for shape in shapes[:2]]
        first = [*map(step, shapes[:2]), *(choice(size, kinds[0]) for size in early)]
        rest = [
            choice(size, kind) for kind in kinds for size in every if kind != kinds[0] or size not in early
        ]
        # Of a step without rows every token may be scored.
        scored = {sizes[shape] for shape in shapes if not shape.rows}
        rest += [lambda size=size: self._compiled_score(size, dtype) for size in sorted(scored)]
        return first, [*map(step, shapes[2:]), *rest]


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

"""The programs of an engine: steps of a few shapes, and choosing tokens from what they give.

They are compiled for the arrays that they are called with, so that nothing is compiled while requests are answered.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from capibara import ops
from capibara.compilation.untraced import UntracedPrograms
from capibara.compress.coded import is_coded
from capibara.core import ModularCapibaraModel
from capibara.core.paged import StepShape
from capibara.errors import ConfigError
from capibara.jax_versions import process_settings, trace_context
from capibara.memory.budget import device_budget
from capibara.memory.zeros import zeros_on_demand
from capibara.ops.registry import for_platform
from capibara.serve.engine.layers import by_kernels, has_panels, products_of_few_rows, without_panels
from capibara.serve.engine.several import TokenLoop, Written, one_token, several_tokens
from capibara.serve.engine.steps import EngineSizes
from capibara.serve.row_sampling import Changes, Chosen, SamplingRows, choose, choose_alone, rows_of
from capibara.serve.sampling import GREEDY

__all__ = [
    "MOST_SCORES",
    "Programs",
    "kept_programs",
    "no_changes",
    "page_bytes",
    "pages_in_memory",
    "run_each",
]

MOST_SCORES = 20
"""The most alternatives that are given with a token."""
_LONGEST_COMPILATION_S = 600.0
_lowering_lock = threading.RLock()  # of a setting of the whole process
_MEMORY_PART = 0.5  # of what is free, for pages


class Programs:
    """Compiles what an engine runs, once each.

    Args:
      model: a :class:`capibara.core.ModularCapibaraModel`. params, state: its; descriptions of arrays will do where
        nothing is run.
      writable: only token ids below this are chosen.
      make: makes a program of its name and of what JAX lowered; by default it is compiled.
      untraced: programs of earlier processes, for such a model.

    Attributes:
      writable: see above. compilations: how many programs were compiled because a step needed them.
    """

    def __init__(
        self,
        model: Any,
        params: Any,
        state: Any,
        *,
        writable: int,
        make: Callable[[str, Any], Any] | None = None,
        untraced: UntracedPrograms | None = None,
    ) -> None:
        self._model, self._untraced = model, untraced
        self._make = make or (lambda _, lowered: lowered.compile())
        # As a plain list, without arrays that hold nothing: going through nested weights for each step, codes above
        # all, takes as long as some of its products.
        self._state = state
        self._leaves, self._tree = jax.tree.flatten((params, state))
        self._weights = self.weights_of(params)
        # JAX writes programs that are packed and compared another way for arrays whose device somebody chose.
        self._described: list[Any] | None = None
        if make is not None and model.mesh is None:
            self._described = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in self._weights]
        self._alone = model.mesh is None and model.backend.platform == "cpu"
        self.writable, self._vocabulary = writable, model.config.model.vocab_size
        self._steps: dict[StepShape, Any] = {}
        self._choices: dict[tuple[int, bool, int], Any] = {}
        self._scores: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._making: dict[tuple[str, Any], threading.Lock] = {}
        self.compilations = 0
        self._waits_since: float | None = None
        self._waited_until = 0.0

    def weights_of(self, params: Any) -> list[Any]:
        """The parameters as programs take them."""
        return [leaf for leaf in jax.tree.leaves((params, self._state)) if leaf.size]

    def adopt(self, other: Programs) -> bool:
        """Take what another has compiled, if it is for the same model, with arrays of the same shapes; whether it is.

        Args:
          other: for an engine of the same sizes.
        """

        def kinds(programs: Programs) -> list[Any]:
            return [(leaf.shape, leaf.dtype) for leaf in programs._leaves]

        def facts(programs: Programs) -> tuple[Any, ...]:
            return programs._model.config, programs._model.mesh, programs._tree, programs.writable

        same = facts(self) == facts(other) and kinds(self) == kinds(other)
        if same:
            self._untraced = other._untraced
            with self._lock:
                self._steps |= other._steps
                self._choices |= other._choices
                self._scores |= other._scores
        return same

    def describe_cache(self, sizes: EngineSizes) -> Any:
        """The pools of an engine as ``jax.ShapeDtypeStruct``."""
        return self._model.describe_pages(sizes.pages, sizes.page_size, sizes.slots, dtype=sizes.cache_dtype)

    def empty_cache(self, sizes: EngineSizes) -> Any:
        """The pools of an engine: all zeros, each part made on its device."""
        described = self.describe_cache(sizes)
        places = None if self._model.mesh is None else jax.tree.map(lambda x: x.sharding, described)

        def zeros() -> Any:
            # Most of it is written late, or never: a start should not wait until all of it is.
            if self._alone:
                return zeros_on_demand(described)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), described)

        program = self._program("cache", zeros, (), described, out_shardings=places)
        return None if program is None else program()

    def step(
        self,
        shape: StepShape,
        cache: Any,
        inputs: Any,
        weights: list[Any] | None = None,
        *,
        loop: TokenLoop | None = None,
    ) -> tuple[jax.Array, Any, Written | None]:
        """Compute a step: ``(logits, cache, written)``; the cache that is given is used up.

        A program that :meth:`chooses` also gives the tokens that :meth:`choose` would without changes: another program
        for that takes several percent of the time of a small model's step. Elsewhere ``written`` is ``None``.

        Args:
          weights: other ones than those that the programs were made for (:meth:`weights_of`).
          loop: how tokens are chosen, by default the likeliest, and how many where the program
            :meth:`writes_several`, by default one. The logits are those of the last.
        """
        program = self._steps.get(shape)
        if program is None:
            with self._waiting(shape not in self._steps):
                program = self._compiled_step(shape, cache, inputs)
        given = [self._weights if weights is None else weights, cache, inputs]
        if self.chooses(shape):
            given.append(TokenLoop.once(shape.sequences) if loop is None else loop)
        return program(*given)

    def chooses(self, shape: StepShape) -> bool:
        """Whether the program of such a step chooses tokens: of steps with rows, on one CPU device."""
        return self._alone and shape.rows > 0

    def writes_several(self, shape: StepShape) -> bool:
        """Whether one call can write several tokens of each row: steps that choose tokens of rows alone."""
        return self.chooses(shape) and not shape.chunks

    def early(self, sizes: EngineSizes) -> list[StepShape]:
        """The shapes of steps that a plain request cannot do without.

        On one CPU device the program of a prompt can also write a text alone. Elsewhere, and where this thread has
        settings of JAX that others have not, the steps of a row alone are among them: a text would wait for what
        chooses their tokens, or go on in another precision.
        """
        if self._alone and _settings_hold_elsewhere():
            return sizes.early
        return [sizes.plain[0], *sizes.early]

    def has_step(self, shape: StepShape) -> bool:
        """Whether a step of this shape finds its program there."""
        return shape in self._steps

    def forget(self, shape: StepShape) -> None:
        """Compile the program of such a step anew for the next one."""
        self._steps.pop(shape, None)

    @contextlib.contextmanager
    def _waiting(self, compiling: bool) -> Iterator[None]:
        """While a step waits for a program."""
        with self._lock:
            self.compilations += compiling
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waited_until = time.monotonic()
            self._waits_since = None

    def waited_until(self) -> float:
        """When a step last stopped waiting for a program, by ``time.monotonic()``: now, if one waits.

        One that has waited for ten minutes waits for nothing that comes.
        """
        since = self._waits_since
        return self._waited_until if since is None else min(time.monotonic(), since + _LONGEST_COMPILATION_S)

    def _once(self, kind: str, table: dict[Any, Any], key: Any, compile_one: Callable[[], Any]) -> Any:
        """A program of a table; threads that want the same one wait for the first of them."""
        with self._lock:
            making = self._making.setdefault((kind, key), threading.Lock())
        with making:
            if key not in table:
                table[key] = compile_one()
            return table[key]

    def _program(
        self, name: str, function: Callable[..., Any], arguments: tuple[Any, ...], outputs: Any, **how: Any
    ) -> Any:
        """A function as a program for such arguments: of an earlier process, or made now.

        Args:
          outputs: a tree as it gives one. how: as for ``jax.jit``.
        """

        def lower() -> jax.stages.Lowered:
            ops.import_all()

            # A function of its own for each time: JAX would give the program that it has of another.
            @functools.wraps(function)
            def fresh(*given: Any) -> Any:
                return function(*given)

            with self._lowering():
                return jax.jit(fresh, **how).lower(*arguments)

        with self._model.backend.scope():
            if self._untraced is None:
                return self._make(name, lower())
            found = self._untraced.get(name, arguments, outputs)
            return self._untraced.make(name, arguments, outputs, lower) if found is None else found

    def _compiled_step(self, shape: StepShape, cache: Any, inputs: Any) -> Any:
        return self._once("step", self._steps, shape, lambda: self._compile_step(shape, cache, inputs))

    def _compile_step(self, shape: StepShape, cache: Any, inputs: Any) -> Any:
        model = self._model

        whole = self._tree.unflatten(self._leaves)
        coded = any(map(is_coded, jax.tree_util.tree_leaves(whole, is_leaf=is_coded)))
        panels = has_panels(whole)

        def decoded(params: Any, state: Any, cache: Any, inputs: Any) -> Any:
            with products_of_few_rows(coded=coded, panels=panels):
                return model.decode_pages(without_panels(params), inputs, cache, shape, state=state)

        run: Callable[..., Any] = decoded
        if coded:
            from capibara.compress.jax_codes import quantized

            run = quantized(decoded)

        def step(weights: list[Any], cache: Any, inputs: Any, sampling: SamplingRows | None = None) -> Any:
            given = iter(weights)
            every = [next(given) if leaf.size else jnp.zeros(leaf.shape, leaf.dtype) for leaf in self._leaves]
            params, state = self._tree.unflatten(every)
            logits, cache = run(params, state, cache, inputs)
            if sampling is None:
                return logits, cache, None
            return logits, cache, choose_alone(self._writable_only(logits).astype(jnp.float32), sampling)

        if self._alone:
            step = by_kernels(step, shape.tokens)
        given, written = [self._described or self._weights, cache, inputs], None
        if self.writes_several(shape):
            step, written = several_tokens(step, self._logits(shape.rows)), Written(0, 0, 0)
        elif self.chooses(shape):
            step, written = one_token(step), Written(0, 0, None)
        if self.chooses(shape):
            given.append(TokenLoop.once(shape.sequences))

        # The cache stays where it is, and logits are wanted whole.
        places = (
            None if model.mesh is None else (self._whole(), jax.tree.map(lambda x: x.sharding, cache), None)
        )
        name = f"step of {shape.rows} + {shape.chunks} × {shape.chunk}"
        outputs = (0, cache, written)
        return self._program(name, step, tuple(given), outputs, donate_argnums=1, out_shardings=places)

    def _logits(self, count: int) -> jax.ShapeDtypeStruct:
        """What a step gives for so many tokens."""
        dtype = jnp.dtype(self._model.config.precision.accumulate_dtype)
        return jax.ShapeDtypeStruct((count, self._vocabulary), dtype, sharding=self._whole())

    def _writable_only(self, logits: jax.Array) -> jax.Array:
        if self.writable >= self._vocabulary:
            return logits
        return jnp.where(jnp.arange(self._vocabulary) < self.writable, logits, -jnp.inf)

    def choose(self, logits: Any, rows: Any, changes: Changes | None, *, top: int) -> Any:
        """Choose a token for each row: :func:`capibara.serve.row_sampling.choose`.

        Args:
          top: how many alternatives are scored. 0: nothing is scored, and all but ``tokens`` are ``None``.
        """
        key = logits.shape[0], changes is not None, top
        program = self._choices.get(key)
        if program is None:
            with self._waiting(key not in self._choices):
                program = self._compiled_choice(key)
        return program(logits, rows, changes)

    def _compiled_choice(self, key: tuple[int, bool, int]) -> Any:
        return self._once("choice", self._choices, key, lambda: self._compile_choice(key))

    def _compile_choice(self, key: tuple[int, bool, int]) -> Any:
        vocabulary = self._vocabulary
        size, changed, top = key

        def chosen(logits: jax.Array, rows: Any, changes: Any) -> Any:
            found = choose(self._writable_only(logits), rows, changes, top=min(top, vocabulary))
            return found if top else Chosen(found.tokens, None, None, None)

        rows = rows_of([GREEDY] * size, [0] * size, [0] * size)
        changes = no_changes(size, vocabulary) if changed else None
        name = f"choice of {size}{' changed' if changed else ''}{f', {top} scored' if top else ''}"
        outputs = Chosen(0, *[0 if top else None] * 3)
        return self._program(name, chosen, (self._logits(size), rows, changes), outputs)

    def score(self, logits: Any, targets: Any) -> Any:
        """The logarithms of probability of given tokens: ``(logprobs, top_logprobs, top_tokens)``.

        Args:
          logits: ``[rows, vocab]``. targets: int32 ``[rows]``.
        """
        size = logits.shape[0]
        program = self._scores.get(size)
        if program is None:
            with self._waiting(size not in self._scores):
                program = self._compiled_score(size)
        return program(logits, targets)

    def _compiled_score(self, size: int) -> Any:
        return self._once("score", self._scores, size, lambda: self._compile_score(size))

    def _compile_score(self, size: int) -> Any:
        vocabulary = self._vocabulary

        def scores(logits: jax.Array, targets: jax.Array) -> Any:
            logits = self._writable_only(logits)
            own = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
            top = jax.lax.top_k(own, min(MOST_SCORES, vocabulary))
            return jnp.take_along_axis(own, targets[:, None], axis=1)[:, 0], *top

        targets = jax.ShapeDtypeStruct((size,), jnp.int32)
        return self._program(f"scores of {size}", scores, (self._logits(size), targets), (0, 0, 0))

    @contextlib.contextmanager
    def _lowering(self) -> Iterator[None]:
        """JAX's settings while a function is lowered, which it is for one platform alone.

        Kernels hold the places in source files that led to them: without these, a program is the same wherever it was
        asked for, in this process or another.
        """
        name = "jax_traceback_in_locations_limit"
        platform, mesh = self._model.backend.platform, self._model.mesh
        kind = None if mesh is None else next(iter(mesh.devices.flat)).device_kind
        alone = for_platform(platform, kind) if platform in ("cpu", "tpu") else contextlib.nullcontext()
        with _lowering_lock, self._model.backend.scope(), alone:
            before = getattr(jax.config, name)
            jax.config.update(name, 0)
            try:
                yield
            finally:
                jax.config.update(name, before)

    def _whole(self) -> NamedSharding | None:
        """Where an array is that all devices of a mesh have."""
        mesh = self._model.mesh
        return None if mesh is None else NamedSharding(mesh, PartitionSpec())

    def to_compile(
        self,
        shapes: Sequence[StepShape],
        cache: Any,
        inputs: Callable[[StepShape], Any],
        *,
        early: Sequence[StepShape] = (),
        apart: bool = False,
    ) -> tuple[list[Callable[[], Any]], list[Callable[[], Any]]]:
        """What compiles all that steps of these shapes need: the early ones with plain requests, and the rest.

        Args:
          apart: whether tokens are chosen by programs of their own even where those of steps choose them.
        """
        kinds = [(changed, top) for changed in (False, True) for top in (0, MOST_SCORES)]
        sizes = {shape: len(inputs(shape)["outputs"]) for shape in shapes}
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
            return lambda: self._compiled_choice((size, *kind))

        every = sorted(set(sizes.values()))
        # A step is of use once its plain requests can go on.
        first: list[Callable[[], Any]] = []
        rest: list[Callable[[], Any]] = []
        plain = set[int]()
        for shape in [*early, *(shape for shape in shapes if shape not in early)]:
            work = first if shape in early else rest
            work.append(step(shape))
            if sizes[shape] not in plain and (apart or not self.chooses(shape)):
                plain.add(sizes[shape])
                work.append(choice(sizes[shape], kinds[0]))
        rest += [choice(size, kind) for kind in kinds[1:] for size in every]
        # Of a step without rows every token may be scored.
        scored = {sizes[shape] for shape in shapes if not shape.rows}
        rest += [lambda size=size: self._compiled_score(size) for size in sorted(scored)]
        return first, rest


def kept_programs(model: Any, params: Any, state: Any, *, writable: int) -> UntracedPrograms | None:
    """The programs of earlier processes for such a model on one CPU device; ``None`` where they are not kept.

    They are known by settings and sources: what else a process changes of a model or of operations, they lack.

    Args:
      model, params, state, writable: as for :class:`Programs`.
    """
    if type(model) is not ModularCapibaraModel or model.mesh is not None or model.backend.platform != "cpu":
        return None
    settings = model.config.to_dict()
    facts = {
        **{section: settings[section] for section in ("model", "precision", "finetune")},
        "weights": str(jax.tree.structure((params, state))),
        "writable": writable,
    }
    return UntracedPrograms.here(facts)


def run_each(work: Sequence[Callable[[], Any]], *, together: bool) -> Iterator[None]:
    """Run functions that make programs, and say when each is done.

    Args:
      together: two at a time, in threads, where settings of JAX and contexts hold as in this one: one is traced, in
        Python, while XLA is at another.
    """
    if together and _settings_hold_elsewhere():
        with ThreadPoolExecutor(2, thread_name_prefix="capibara-programs") as pool:
            running = [pool.submit(contextvars.copy_context().run, each) for each in work]
            try:
                for one in running:
                    one.result()
                    yield
            finally:  # after an error nobody wants the others
                for one in running:
                    one.cancel()
            return
    for each in work:
        each()
        yield


def _settings_hold_elsewhere() -> bool:
    """Whether other threads trace and compile as this one does: JAX's contexts are of a thread, and others cannot be
    given them."""
    with ThreadPoolExecutor(1, thread_name_prefix="capibara-settings") as pool:
        return pool.submit(_settings_here).result() == _settings_here()


def _settings_here() -> tuple[Any, ...]:
    """What JAX traces and compiles by in this thread."""
    return trace_context(), process_settings()


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
    """Bytes of a page of all blocks together on one device."""
    of_one = model.describe_pages(1, page_size, 1, dtype=dtype)
    return sum(
        math.prod(x.shape if model.mesh is None else x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for path, x in jax.tree_util.tree_leaves_with_path(of_one)
        if str(getattr(path[-1], "key", "")).endswith(("pages", "scales"))
    )


def pages_in_memory(
    model: Any, page_size: int, dtype: Any, *, least: int, most: int, free: int | None = None
) -> int:
    """How many pages fit into half of the memory that is free, at most ``most``.

    Args:
      free: bytes of a device that are free; by default of this machine's.

    Raises:
      ConfigError: fewer than ``least``.
    """
    size = page_bytes(model, page_size, dtype)
    if not size:
        return most
    free = int((device_budget().free() if free is None else max(0, free)) * _MEMORY_PART)
    if free // size < least:
        raise ConfigError(
            f"max_length: the pages of one text take {size * least:,} bytes, and half of the memory that is free is "
            f"{free:,}. Choose a smaller max_length or cache_dtype."
        )
    return min(most, free // size)

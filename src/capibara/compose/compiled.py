"""Compiled models: a pure function, and what is needed to call it.

:func:`capibara.compose.compile` turns a logical model into a :class:`CompiledModel`. Its
:meth:`~CompiledModel.apply` is a pure function of parameters, inputs, state and randomness, so that ``jax.jit``,
``jax.grad`` and ``jax.vmap`` compose with it as with any function written by hand.
"""

from __future__ import annotations

import linecache
import os
import tempfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import TYPE_CHECKING, Any

from capibara.compose.checks import check_call, check_float64, checked_cotangents, cotangent
from capibara.compose.errors import CompileError
from capibara.compose.graph import Path
from capibara.compose.model import Model
from capibara.compose.randomness import as_key, check_key
from capibara.compose.sharding import constrain, param_shardings
from capibara.compose.specs import ArraySpec, ModelSpecs, shape_text
from capibara.errors import did_you_mean

if TYPE_CHECKING:
    import jax

__all__ = ["ArraySpec", "CompiledModel", "Program"]


@dataclass
class Program:
    """What :func:`~capibara.compose.pipeline.compile` made of a model, before there is anything to call.

    Attributes:
        source: the generated module. constants: the values of its constants.
        specs: shapes, dtypes and axes.
        jit, inference, check_shapes: as asked for (``check_shapes``: ``safe_shapes``).
        effects: number of operations before and after the passes, and what each of these did.
        fixed: keys of the inputs that were given their value.
    """

    source: str
    constants: dict[str, Any]
    specs: ModelSpecs
    jit: bool
    inference: bool = False
    check_shapes: bool = True
    effects: dict[str, int] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()


_counter = 0


class CompiledModel:
    """A pure function with named parameters, inputs, outputs and states. Made by :func:`compile`.

    Attributes:
        source: the generated Python source.
        inputs, outputs: :class:`ArraySpec` by key.
        params, states: :class:`ArraySpec` by path (a tuple of names).
    """

    def __init__(
        self,
        model: Model,
        backend: Any,
        program: Program,
        file_path: str | os.PathLike[str] | None = None,
    ) -> None:
        global _counter
        specs = program.specs
        self.model = model
        self.backend = backend
        self.source = program.source
        self.effects = program.effects
        self.inference = program.inference
        self._program = program
        self.inputs = specs.inputs
        self.outputs = specs.outputs
        self.params = specs.params
        self.states = specs.states
        self.jit = program.jit
        self._jitted: dict[Any, Any] = {}
        self._makers: dict[Any, Any] = {}
        _counter += 1
        # A name that tracebacks and inspect.getsource resolve, through linecache.
        filename = f"<capibara.compose {type(model).__name__} {_counter}>"
        if file_path is not None:
            filename = str(file_path)
            _write(FilePath(file_path), self.source)
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(True), filename)
        namespace: dict[str, Any] = {"__name__": f"capibara_model_{_counter}"}
        exec(_builtin_compile(self.source, filename, "exec"), namespace)
        if program.constants and not getattr(backend, "ops_module", "").endswith("torch_ops"):
            namespace["constants"] = program.constants  # as they were given, on their device
        if getattr(backend, "mesh", None) is not None:
            namespace["shard"] = lambda x, names: constrain(x, names, backend.mesh, backend.rules)
        self.function = namespace["forward"]

    # ---- keys and shapes ----------------------------------------------------------------------------------

    @property
    def input_keys(self) -> list[str]:
        return list(self.inputs)

    @property
    def output_keys(self) -> list[str]:
        return list(self.outputs)

    @property
    def shapes(self) -> dict[str, tuple[int | str, ...] | None]:
        """Shapes of inputs, outputs and parameters (by dotted path); a name stands for a free size."""
        params = {".".join(path): spec.shape for path, spec in self.params.items()}
        return (
            {k: s.shape for k, s in self.inputs.items()}
            | {k: s.shape for k, s in self.outputs.items()}
            | params
        )

    @property
    def param_axes(self) -> dict[str, Any]:
        """Logical axis names, nested like the parameters."""
        return _nest({path: spec.axes for path, spec in self.params.items()})

    @property
    def state_axes(self) -> dict[str, Any]:
        """Logical axis names, nested like the state."""
        return _nest({path: spec.axes for path, spec in self.states.items()})

    @property
    def num_params(self) -> int:
        """Number of trainable scalars."""
        import math

        return sum(math.prod(spec.sizes({}, ".".join(path))) for path, spec in self.params.items())

    # ---- arrays to start from -----------------------------------------------------------------------------

    def init(self, key: Any, **sizes: int) -> dict[str, Any]:
        """Fresh parameters: a nested dict of arrays, sharded over the backend's mesh if it has one.

        Each array's randomness comes from ``key`` and its own path, so that it does not change when other
        parameters come or go.

        Args:
            key: a JAX PRNG key. sizes: values for free sizes, by name.

        Raises:
            InputError: ``key`` is no key. CompileError: a size is not known, or no free size.
        """
        return self._make(self.params, check_key(key), sizes, "parameter")

    def randomize_params(self, seed: int | jax.Array = 0) -> dict[str, Any]:
        """:meth:`init` with the key of a seed: a whole number from 0 to 2³² − 1, or a JAX key.

        Raises:
            InputError: ``seed`` is neither.
        """
        return self.init(as_key(seed))

    def init_state(self, key: Any | None = None, **sizes: int) -> dict[str, Any]:
        """The state to start with: ``{}`` for a model without any.

        Args:
            key: a JAX PRNG key, for states that start at random; by default that of seed 0.
            sizes: values for free sizes, by name: ``init_state(batch=4, cache=256)``.
        """
        return self._make(self.states, as_key(0) if key is None else check_key(key), sizes, "state")

    def _make(
        self, specs: dict[Path, ArraySpec], key: Any, sizes: Mapping[str, int], what: str
    ) -> dict[str, Any]:
        import jax

        free = {n for s in specs.values() for n in s.shape or () if isinstance(n, str)}
        for name in sizes:
            if name not in free:
                raise CompileError(
                    f"{name!r} is no free size of a {what}; the free sizes are {sorted(free)}."
                    f"{did_you_mean(name, free)}"
                )
        shapes = {path: spec.sizes(sizes, f"the {what} {'.'.join(path)}") for path, spec in specs.items()}

        def make(key: Any) -> dict[str, Any]:
            arrays = {}
            for path, spec in specs.items():
                salt = getattr(spec.init, "salt", None)
                name = path if salt is None else (*path[:-1], salt)
                own = jax.random.fold_in(key, zlib.crc32(".".join(name).encode()))
                init, shape = spec.init, shapes[path]
                for count in reversed(shape[: spec.stack]):
                    init = _stacked(init, count)
                arrays[path] = init(own, shape[spec.stack :], spec.dtype)
            return _nest(arrays)

        with self.backend.scope():
            if not specs:
                return {}
            run = self._makers.get((what, frozenset(sizes.items())))
            if run is None:
                shardings = None
                if self.backend.mesh is not None:
                    axes = _nest({path: spec.axes for path, spec in specs.items()})
                    shardings = param_shardings(
                        jax.eval_shape(make, key), axes, self.backend.mesh, self.backend.rules
                    )
                run = jax.jit(make, out_shardings=shardings)
                # Kept, because compiling random generators takes longer than running them.
                self._makers[what, frozenset(sizes.items())] = run
            return run(key)

    # ---- running ------------------------------------------------------------------------------------------

    def apply(
        self,
        params: Mapping[str, Any],
        inputs: Mapping[str, Any],
        *,
        state: Mapping[str, Any] | None = None,
        key: Any | None = None,
        train: bool = False,
    ) -> Any:
        """The model as a pure function; composes with ``jax.jit``, ``jax.grad``, ``jax.vmap``.

        The backend's settings hold in it, and nowhere else. With ``float64`` in the backend's dtypes,
        transformations must be called within ``backend.scope()`` (or another ``jax.enable_x64(True)``).

        Args:
            params: as from :meth:`init`. inputs: arrays by input key.
            state: as from :meth:`init_state`; needed if the model has states.
            key: a JAX PRNG key; needed in training if the model draws random numbers.
            train: training mode (dropout, running statistics); a Python bool.

        Returns:
            Outputs by key; with ``state`` given, ``(outputs, next state)``.

        Raises:
            InputError: for missing or unknown keys, or shapes or kinds that do not fit; or float64 is needed in a
                transformation that runs without it.
        """
        self._check(params, inputs, state, key)
        with self.backend.scope():
            outputs, after = self.function(params, inputs, {} if state is None else state, key, train)
        return outputs if state is None else (outputs, after)

    def evaluate(
        self,
        params: Mapping[str, Any],
        inputs: Mapping[str, Any],
        output_gradients: Mapping[str, Any] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        key: Any | None = None,
        train: bool = False,
    ) -> Any:
        """Run the compiled model; with ``output_gradients`` also the gradients of the parameters.

        Args:
            output_gradients: the cotangents of outputs, by key, each a float array of its output's shape (or a
                number, for a scalar output). Outputs that are left out count as zero; integers and bools have no
                gradient, and are left out. Equivalent JAX: ``jax.vjp`` with respect to ``params``.
            params, inputs, state, key, train: as in :meth:`apply`.

        Returns:
            ``outputs``, or ``(outputs, gradients)`` when ``output_gradients`` is given; each followed by the next
            state when ``state`` is given.

        Raises:
            InputError: as :meth:`apply`, and for cotangents that are not those of an output.
        """
        self._check(params, inputs, state, key)
        mode = (output_gradients is not None, train)
        run = self._jitted.get(mode)
        if run is None:
            run = self._runner(*mode)
            self._jitted[mode] = run
        if output_gradients is not None:
            output_gradients = checked_cotangents(output_gradients, self.outputs)
        with self.backend.scope():
            outputs, after, gradients = run(params, dict(inputs), state or {}, key, output_gradients)
        result = (outputs,) if output_gradients is None else (outputs, gradients)
        if state is not None:
            result = (*result, after)
        return result[0] if len(result) == 1 else result

    def _runner(self, with_gradients: bool, train: bool) -> Any:
        import jax

        def run(params: Any, inputs: Any, state: Any, key: Any, cotangents: Any) -> Any:
            if not with_gradients:
                outputs, after = self.function(params, inputs, state, key, train)
                return outputs, after, None
            outputs, pull, after = jax.vjp(
                lambda p: self.function(p, inputs, state, key, train), params, has_aux=True
            )
            given = {k: cotangent(k, v, cotangents.get(k)) for k, v in outputs.items()}
            return outputs, after, pull(given)[0]

        return jax.jit(run) if self.jit else run

    def _check(self, params: Any, inputs: Any, state: Any, key: Any) -> None:
        check_call(inputs, params, state, self.inputs, self.params, self.states)
        if key is not None:
            check_key(key)
        if self.backend.needs_x64:
            check_float64(params, inputs, state, key)

    def __repr__(self) -> str:
        ins = ", ".join(
            f"{k}: {shape_text(s.shape) if s.shape is not None else '?'}" for k, s in self.inputs.items()
        )
        outs = ", ".join(
            f"{k}: {shape_text(s.shape) if s.shape is not None else '?'}" for k, s in self.outputs.items()
        )
        return f"CompiledModel(({ins}) -> ({outs}), {len(self.params)} parameters, {self.backend!r})"


def _stacked(init: Any, count: int) -> Any:
    import jax

    def stacked(key: Any, shape: tuple[int, ...], dtype: str) -> Any:
        return jax.vmap(lambda k: init(k, shape, dtype))(jax.random.split(key, count))

    return stacked


def _nest(values: Mapping[Path, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return tree


def _write(path: FilePath, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent or ".", prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _builtin_compile(source: str, filename: str, mode: str) -> Any:
    import builtins

    return builtins.compile(source, filename, mode)

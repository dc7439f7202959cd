"""Compiled models: a pure function, and the methods to call it.

:func:`capibara.compose.compile` turns a logical model into a :class:`CompiledModel`. Its
:meth:`~CompiledModel.apply` is a pure function of parameters, inputs, state and randomness, so that ``jax.jit``,
``jax.grad`` and ``jax.vmap`` work with it as with any hand-written function.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from capibara.compose.errors import CompileError, InputError, PicklingError
from capibara.compose.logical.model import Model
from capibara.compose.physical.checks import as_dicts, check_call, check_float64, checked_cotangents
from capibara.compose.physical.explicit import automatic_mesh, is_explicit, run_automatic
from capibara.compose.physical.lowering import lower
from capibara.compose.physical.misfit import explaining
from capibara.compose.physical.params_file import load_params, save_params
from capibara.compose.physical.randomness import as_key, check_key
from capibara.compose.physical.report import summary
from capibara.compose.physical.running import direct, whole
from capibara.compose.physical.sharding import check_devices, constrain
from capibara.compose.physical.specs import ArraySpec, ModelSpecs, nest, shape_text
from capibara.compose.physical.starting import (
    fresh,
    on_backend,
    propose_shardings,
    with_initialisers,
)
from capibara.files import replace_file

if TYPE_CHECKING:
    import jax

__all__ = ["ArraySpec", "CompiledModel", "Program"]


@dataclass
class Program:
    """The result of :func:`~capibara.compose.physical.pipeline.compile`, before a callable is created.

    Attributes:
        source: the generated module. constants: the values of its constants.
        specs: shapes, dtypes and axes.
        jit, inference, check_shapes: as requested (``check_shapes``: ``safe_shapes``).
        effects: number of operations before and after the passes, and the effect of each pass.
        fixed: keys of the inputs with a constant value.
        functions: blocks' own functions, by the name of the operation.
        left_out: parameters of the logical model that the compiled one does not need.
        parts: operations that run per device of a mesh, and those partitioned by XLA, as lines of text.
    """

    source: str
    constants: dict[str, Any]
    specs: ModelSpecs
    jit: bool
    inference: bool = False
    check_shapes: bool = True
    effects: dict[str, int] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()
    functions: dict[str, Any] = field(default_factory=dict)
    left_out: tuple[tuple[str, ...], ...] = ()
    parts: tuple[str, ...] = ()


_counter = 0


class CompiledModel:
    """A pure function with named parameters, inputs, outputs and states, created by :func:`compile`.

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
        self._met_explicit = False
        self._makers: dict[Any, Any] = {}
        _counter += 1
        # A name that tracebacks and inspect.getsource resolve, through linecache.
        filename = f"<capibara.compose {type(model).__name__} {_counter}>"
        if file_path is not None:
            filename = str(file_path)
            replace_file(file_path, self.source)
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(True), filename)
        namespace: dict[str, Any] = {"__name__": f"capibara_model_{_counter}"}
        exec(_builtin_compile(self.source, filename, "exec"), namespace)
        if program.constants and not getattr(backend, "ops_module", "").endswith("torch_ops"):
            namespace["constants"] = program.constants  # as they were given, on their device
        mesh = None
        if getattr(backend, "mesh", None) is not None:
            mesh = automatic_mesh(backend.mesh)
            namespace["shard"] = lambda x, names: constrain(x, names, mesh, backend.rules)
        if hasattr(backend, "knows_platform"):
            from capibara.compose.backends.jax_tpu import choose_forms

            namespace["ops"] = choose_forms(namespace["ops"], backend, mesh)
        namespace["registered"] = {**getattr(backend, "registered_ops", {}), **program.functions}
        self.namespace = namespace
        self.function = namespace["forward"]
        self._forward, self._backward = self._direct()

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

    def get_shapes(self, symbolic: bool = True) -> dict[str, tuple[int | str | None, ...] | None]:
        """:attr:`shapes` and those of states; with ``symbolic=False`` a free size is None, not a name."""
        states = {".".join(path): spec.shape for path, spec in self.states.items()}
        shapes = self.shapes | states
        if symbolic:
            return dict(shapes)
        return {
            k: None if s is None else tuple(n if isinstance(n, int) else None for n in s)
            for k, s in shapes.items()
        }

    @property
    def fixed(self) -> tuple[str, ...]:
        """Inputs with a constant value (``constant_keys``)."""
        return self._program.fixed

    def summary(self, *, verbose: bool = True) -> str:
        """Print a table of inputs, outputs, parameters and states with shapes, and of the simplification.

        Args:
            verbose: print the table (it is returned in any case), as :meth:`Model.summary` does.

        Returns:
            The table as text.
        """
        if not isinstance(verbose, bool):
            raise InputError(f"verbose={verbose!r} must be True or False")
        text = summary(self)
        if verbose:
            print(text)
        return text

    @property
    def param_axes(self) -> dict[str, Any]:
        """Logical axis names, nested like the parameters."""
        return nest({path: spec.axes for path, spec in self.params.items()})

    @property
    def state_axes(self) -> dict[str, Any]:
        """Logical axis names, nested like the state."""
        return nest({path: spec.axes for path, spec in self.states.items()})

    @property
    def num_params(self) -> int:
        """Number of trainable scalars."""
        import math

        return sum(math.prod(spec.sizes({}, ".".join(path))) for path, spec in self.params.items())

    def on_mesh(self, mesh: Any, rules: Any | None = None) -> CompiledModel:
        """The same program for a mesh: parameters and activations are sharded over it.

        Args:
            mesh: a ``jax.sharding.Mesh``. rules: the mesh axis of each logical axis; by default ``AxisRules()``.

        Raises:
            CompileError: the backend is not JAX, or the model has an unknown axis name.
        """
        if not self._in_jax:
            raise CompileError(
                f"on_mesh: {self.backend!r} has no meshes. Compile the model with a JaxBackend"
            )
        backend = type(self.backend)(
            policy=self.backend.policy,
            jit=self.backend.jit_default,
            device_mesh=automatic_mesh(mesh),
            rules=rules,
            precision=self.backend.precision,
            debug=self.backend.debug,
        )
        groups = {
            "input": self.inputs,
            "output": self.outputs,
            "parameter": self.params,
            "state": self.states,
        }
        backend.check_axes(
            {f"{what} {k!r}": s.axes for what, group in groups.items() for k, s in group.items()}
        )
        return type(self)(self.model, backend, self._program)

    # ---- arrays to start from -----------------------------------------------------------------------------

    def init(self, key: Any, **sizes: int) -> dict[str, Any]:
        """Fresh parameters: a nested dict of arrays, sharded over the backend's mesh if it has one.

        Each array's random values depend on ``key`` and its own path, so that they do not change when other
        parameters are added or removed.

        Args:
            key: a JAX PRNG key. sizes: values for free sizes, by name.

        Raises:
            InputError: ``key`` is not a key. CompileError: a size is not known, or not a free size.
        """
        return fresh(self, self.params, check_key(key), sizes, "parameter")

    def randomize_params(
        self, seed: int | jax.Array = 0, *, init: Any | None = None, **sizes: int
    ) -> dict[str, Any]:
        """:meth:`init` with the key of a seed: an integer from 0 to 2³² − 1, or a JAX key.

        Args:
            seed: the seed. sizes: values for free sizes, by name.
            init: other initialisers: one for all parameters, or a dict by dotted name or pattern (``{"*.bias": 0.1,
                "layer_0.weight": Normal(0.01)}``; the first match applies). A number fills the array.

        Raises:
            InputError: ``seed`` is neither. CompileError: a pattern matches no parameter, or its value is not an
            initialiser.
        """
        specs = self.params if init is None else with_initialisers(self.params, init)
        return fresh(self, specs, as_key(seed), sizes, "parameter")

    def init_state(self, key: Any | None = None, **sizes: int) -> dict[str, Any]:
        """The initial state: ``{}`` for a model without states.

        Args:
            key: a JAX PRNG key, for randomly initialised states; by default that of seed 0.
            sizes: values for free sizes, by name: ``init_state(batch=4, cache=256)``.
        """
        return fresh(self, self.states, as_key(0) if key is None else check_key(key), sizes, "state")

    def save_params(self, path: str | os.PathLike[str], params: Mapping[str, Any]) -> None:
        """Write parameters to a safetensors file, atomically: :func:`.params_file.save_params`."""
        save_params(path, params, self.params, self._program.left_out)

    def load_params(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Read parameters written by :meth:`save_params` onto the backend, and check them against the model.

        Raises:
            FileNotFoundError: there is no such file. InputError: it does not hold this model's parameters.
        """
        arrays = nest(load_params(path, self.params))
        return on_backend(self, arrays)

    def propose_shardings(self) -> dict[str, Any]:
        """Propose shardings over the backend's mesh, by logical axis names and the backend's rules.

        Returns:
            ``{"params": …, "inputs": …, "states": …}``, each nested like the arrays, with a
            ``jax.sharding.NamedSharding`` for each. New parameters have these shardings already.

        Raises:
            CompileError: the backend has no mesh.
        """
        return propose_shardings(self)

    def lower(
        self,
        inputs: Mapping[str, Any] | None = None,
        *,
        gradients: bool = False,
        train: bool = False,
        **sizes: int,
    ) -> Any:
        """Lower :meth:`evaluate` for the backend's mesh, device or platform, which need not be present.

        Nothing is computed and no arrays are created. Equivalent JAX: ``jax.jit(…).lower(jax.ShapeDtypeStruct(…),
        …)``, with parameters, inputs and states sharded according to :meth:`propose_shardings`. For TPUs that are not
        present, create the mesh from the devices of ``jax.experimental.topologies.get_topology_desc`` (which needs
        the package ``libtpu``, in the extra ``plan``); ``.compile()`` on the result then compiles for them.

        Args:
            inputs: a ``jax.ShapeDtypeStruct`` for inputs with another dtype or sharding.
            gradients: include the gradients of the parameters, for a cotangent of every float output.
            train: as in :meth:`apply`. sizes: values for free sizes, by name.

        Returns:
            A ``jax.stages.Lowered``; ``.as_text()``, ``.compile()``, ``.cost_analysis()`` …

        Raises:
            CompileError: a size is not known, or the backend is not JAX. InputError: as :meth:`evaluate`.
        """
        return lower(self, inputs, gradients, train, sizes)

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

        The backend's settings apply only inside it. With ``float64`` in the backend's dtypes, transformations must be
        called within ``backend.scope()`` (or another ``jax.enable_x64(True)``).

        Args:
            params: as from :meth:`init`. inputs: arrays by input key.
            state: as from :meth:`init_state`; needed if the model has states.
            key: a JAX PRNG key; needed in training if the model draws random numbers.
            train: training mode (dropout, running statistics); a Python bool.

        Returns:
            Outputs by key; with ``state`` given, ``(outputs, next state)``.

        Raises:
            InputError: missing or unknown keys, or wrong shapes or kinds; or a transformation that needs float64 runs
                without it.
        """
        if is_explicit(params, inputs, state, key):
            return run_automatic(
                lambda p, x, s, k: self.apply(p, x, state=s, key=k, train=train), params, inputs, state, key
            )
        self._check(params, inputs, state, key)
        self._check_inference(None, train)
        with self.backend.scope():
            outputs, after = self._run(params, inputs, {} if state is None else state, key, train)
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
                number, for a scalar output). Omitted outputs count as zero; integers and booleans have no gradient,
                and are omitted. Equivalent JAX: ``jax.vjp`` with respect to ``params``.
            params, inputs, state, key, train: as in :meth:`apply`.

        Returns:
            ``outputs``, or ``(outputs, gradients)`` if ``output_gradients`` is given; each followed by the next state
            if ``state`` is given.

        Raises:
            InputError: as for :meth:`apply`, and for cotangents that do not match an output.
        """
        if state is None and key is None and not train and not self._met_explicit:
            run = self._forward if output_gradients is None else self._backward
            if run is not None:
                try:
                    if output_gradients is None:
                        return run(params, inputs)
                    return run(params, inputs, output_gradients)
                except TypeError:
                    pass  # something that JAX cannot take: what that is is said below
                except ValueError:
                    if not is_explicit(params, inputs, output_gradients):
                        check_devices(self.backend.mesh, params=params, inputs=inputs)
                        self._check(params, inputs, state, key)  # keys that JAX cannot sort
                        raise
        if self._in_jax and is_explicit(params, inputs, output_gradients, state, key):
            return self._evaluate_explicit(params, inputs, output_gradients, state, key, train)
        params, state = as_dicts(params), as_dicts(state)
        self._check(params, inputs, state, key)
        self._check_inference(output_gradients, train)
        mode = (output_gradients is not None, train)
        run = self._jitted.get(mode)
        if run is None:
            self.backend.check_present()
            run = whole(self, *mode)
            if self.jit:
                import jax

                run = jax.jit(run)
            self._jitted[mode] = run
        if output_gradients is not None:
            output_gradients = checked_cotangents(output_gradients, self.outputs)
        with self.backend.scope():
            outputs, after, gradients = run(params, dict(inputs), state or {}, key, output_gradients)
        result = (outputs,) if output_gradients is None else (outputs, gradients)
        if state is not None:
            result = (*result, after)
        return result[0] if len(result) == 1 else result

    def _evaluate_explicit(self, *arrays: Any) -> Any:
        """:meth:`evaluate` of arrays with explicit mesh axes: converted, and the results back again."""

        def run(params: Any, inputs: Any, cotangents: Any, state: Any, key: Any) -> Any:
            self._met_explicit = False
            return self.evaluate(params, inputs, cotangents, state=state, key=key, train=arrays[-1])

        try:
            return run_automatic(run, *arrays[:-1])
        finally:
            self._met_explicit = True  # what meets them once will again: no call is tried in vain

    @property
    def _in_jax(self) -> bool:
        return getattr(self.backend, "ops_module", "").endswith("jax_ops")

    def _direct(self) -> tuple[Any, Any]:
        return direct(self)

    def _run(self, params: Any, inputs: Any, *more: Any) -> Any:
        with explaining(self.model, inputs):
            return self.function(params, inputs, *more)

    def _check_inference(self, output_gradients: Any, train: bool) -> None:
        if not isinstance(train, bool):
            raise InputError(
                f"train is {type(train).__name__}, expected True or False: each is a separate program, so it "
                "cannot be an array"
            )
        if not self.inference:
            return
        if output_gradients is not None:
            raise InputError(
                "output_gradients: the model was compiled with inference=True and has no gradients; compile it without"
            )
        if train:
            raise InputError(
                "train=True: the model was compiled with inference=True and cannot be trained; compile it without"
            )

    def _check(self, params: Any, inputs: Any, state: Any, key: Any) -> None:
        check_call(
            inputs,
            params,
            state,
            self.inputs,
            self.params,
            self.states,
            left_out=self._program.left_out,
            shapes=self._program.check_shapes,
        )
        if key is not None:
            check_key(key)
        if self.backend.needs_x64:
            check_float64(params, inputs, state, key)

    def __deepcopy__(self, memo: Any) -> CompiledModel:
        return self  # nothing in it changes

    def __copy__(self) -> CompiledModel:
        return self

    def __reduce__(self) -> Any:
        raise PicklingError(
            "a compiled model cannot be pickled: write its logical model with to_json(model), its parameters with "
            "save_params, and compile it again; or keep its source with file_path"
        )

    def __repr__(self) -> str:
        ins = ", ".join(
            f"{k}: {shape_text(s.shape) if s.shape is not None else '?'}" for k, s in self.inputs.items()
        )
        outs = ", ".join(
            f"{k}: {shape_text(s.shape) if s.shape is not None else '?'}" for k, s in self.outputs.items()
        )
        return f"CompiledModel(({ins}) -> ({outs}), {len(self.params)} parameters, {self.backend!r})"


def _builtin_compile(source: str, filename: str, mode: str) -> Any:
    import builtins

    return builtins.compile(source, filename, mode)

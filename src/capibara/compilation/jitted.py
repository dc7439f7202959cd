"""``jax.jit`` whose programs can be compiled ahead of time, looked at, and asked why there is another one.

``jax.jit`` compiles when a call needs a program that is not there, silently. :class:`OptimizedJit` computes what
selects the program (:mod:`~capibara.compilation.signature`), keeps the programs itself
(``jit(f).lower(…).compile(…)``), and so knows which argument made it compile again.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from capibara.compilation.bfloat16 import Rewritten, with_bfloat16_products
from capibara.compilation.changes import Recompilation, nearest
from capibara.compilation.collectives import collectives_of
from capibara.compilation.configuration import TpuCompilationConfig
from capibara.compilation.errors import (
    CompilationOptionError,
    CompilationOptionWarning,
    RecompilationWarning,
)
from capibara.compilation.inputs import Fixed, entries, fixed_values, input_descriptions
from capibara.compilation.last_call import LastCall
from capibara.compilation.lowering import compile_lowered, platform_of
from capibara.compilation.options import compiler_options
from capibara.compilation.persistent_cache import keep_compiled
from capibara.compilation.programs import CompiledCalls, Program
from capibara.compilation.signature import (
    Signature,
    argument_names,
    checked_names,
    checked_numbers,
    has_tracer,
    names_at,
    signature_of,
    static_both_ways,
)
from capibara.jax_versions import outside_transformations, watch_program_keys

__all__ = ["OptimizedJit", "create_tpu_optimized_jit"]


def create_tpu_optimized_jit(
    function: Callable[..., Any] | None = None,
    *,
    config: TpuCompilationConfig | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    donate_argnums: int | Sequence[int] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
) -> Any:
    """Compile a function with the options of a configuration. A decorator, or a function of a function.

    Args:
      function: pure, as for ``jax.jit``; None: returns a decorator.
      config: the options; None: as ``jax.jit``.
      static_argnums, static_argnames: arguments that are compiled into the program; they must be hashable.
      donate_argnums: arguments whose memory the results may take, whether they are passed by position or by name; they
        cannot be used after the call.
      in_shardings, out_shardings: as for ``jax.jit``; None leaves them to the arguments and to XLA.

    Returns:
      An :class:`OptimizedJit`, or a decorator that makes one.

    Raises:
      CompilationOptionError: ``config`` is not a configuration, ``function`` cannot be called, or it has no such
        arguments.

    Equivalent JAX without options: ``jax.jit(function, static_argnums=…, donate_argnums=…)``.
    """
    if config is not None and not isinstance(config, TpuCompilationConfig):
        raise CompilationOptionError(f"config: got {config!r:.100}, expected a TpuCompilationConfig.")
    settings = config or TpuCompilationConfig()
    given = {"in_shardings": in_shardings, "out_shardings": out_shardings}

    def decorate(function: Callable[..., Any]) -> OptimizedJit:
        return OptimizedJit(
            function,
            settings,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            donate_argnums=donate_argnums,
            shardings={name: value for name, value in given.items() if value is not None},
        )

    return decorate if function is None else decorate(function)


class OptimizedJit:
    """A compiled function; :func:`create_tpu_optimized_jit` makes it. Calls may come from several threads.

    Inside another transformation (``jit``, ``grad``, ``vmap``) it is the plain function: the outermost program has
    the options, as JAX has it for compiler options.

    Attributes:
      function: the plain function.
      config: the options.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        config: TpuCompilationConfig,
        *,
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Iterable[str] = (),
        donate_argnums: int | Sequence[int] = (),
        shardings: dict[str, Any] | None = None,
    ) -> None:
        if not callable(function):
            raise CompilationOptionError(f"function: got {function!r:.100}, expected a function.")
        self.function, self.config = function, config
        self._declared = checked_numbers(function, "static_argnums", static_argnums)
        self._static_argnums, self._static_argnames = static_both_ways(
            function, self._declared, checked_names(function, "static_argnames", static_argnames)
        )
        self._donate_argnums = checked_numbers(function, "donate_argnums", donate_argnums)
        if both := sorted({*self._donate_argnums} & {*self._static_argnums}):
            raise CompilationOptionError(
                f"donate_argnums: got {both}, which are static: they have no memory to give. Leave them out."
            )
        self._shardings = shardings or {}
        self._programs: dict[Signature, Future[Program]] = {}
        self._recompilations: list[Recompilation] = []
        self._lock = threading.Lock()
        self._calls = 0
        self._last: LastCall | None = None
        self._warned: set[str] = set()
        # Only its name and documentation: attributes of the function may have the names of those above.
        functools.update_wrapper(self, function, updated=())

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a method: the object is the first argument, static or a tree of arrays."""
        return self if instance is None else functools.partial(self, instance)

    @property
    def name(self) -> str:
        """The function's name."""
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, from a program that is compiled if there is none yet.

        Raises:
          CompilationOptionError: ``strict`` and the platform does not have an option; an option that XLA does not
            know.
          TypeError: an argument is neither static nor an array.
          FloatingPointError: a result has a NaN, with ``jax_debug_nans``.
        """
        import jax

        if jax.config.jax_disable_jit:  # pyright: ignore
            return self.function(*args, **kwargs)
        if not outside_transformations():
            return self._inside(args, kwargs)
        dynamic, others, static = self._split(args, kwargs)
        leaves, tree = jax.tree.flatten((dynamic, others))
        last = self._last
        if last is None or not last.matches(leaves, tree, static):
            if has_tracer(leaves):  # that has left its transformation: JAX's error says so
                return self._inside(args, kwargs)
            program = self._program(signature_of(dynamic, others, static), args, kwargs, asked=False)
            self._last = last = LastCall(leaves, tree, static, program)
        self._calls += 1
        try:
            return last.program.compiled(*dynamic, **others)
        except Exception as error:
            # With jax_debug_nans or jax_debug_infs; inside JAX, ``jax.jit`` does the following.
            if type(error).__name__ != "InternalFloatingPointError":
                raise
            self._find_operation(args, kwargs)
            raise FloatingPointError(f"{self.name}: a result has NaNs or infinities ({error})") from None

    def _find_operation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run the function one operation at a time: JAX raises for the one that made the NaN."""
        import jax

        if not any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves((args, kwargs))):
            with jax.disable_jit():
                self.function(*args, **kwargs)

    def compile(
        self,
        *,
        input_shapes: Sequence[Any],
        static_argnums: int | Sequence[int] = (),
        static_args: Fixed | None = None,
        dtype: Any = "float32",
    ) -> CompiledCalls:
        """Compile ahead of time; later calls with these shapes compile nothing.

        Args:
          input_shapes: one entry for each program: a shape, for a function of one input (apart from
            ``static_argnums``); a tuple of shapes for several. One shape for each input of a function is one program.
            Arrays, ``jax.ShapeDtypeStruct`` (with a dtype and sharding of their own) and trees of them may stand in
            place of a shape.
          static_argnums: arguments that stay the same from call to call and are not in ``input_shapes``. Arrays and
            trees of arrays, such as parameters, are inputs of the program, which is compiled for their shapes; all
            other values are compiled in.
          static_args: their values, by number. One that is left out is taken from the model (an object with
            ``params`` and ``apply``) that the function uses: its ``params``.
          dtype: of inputs that are given by their shape.

        Returns:
          A function with the same arguments that never compiles; calls of this object use the programs too.

        Raises:
          CompilationOptionError: an entry is not one of these; or a static argument has no value.
        """
        positions = tuple(
            sorted({*checked_numbers(self.function, "static_argnums", static_argnums), *self._declared})
        )
        if isinstance(input_shapes, str) or not isinstance(input_shapes, Sequence) or not input_shapes:
            raise CompilationOptionError(
                f"input_shapes: got {input_shapes!r:.100}, expected a list of shapes such as [(32, 512, 768)]."
            )
        fixed = fixed_values(self.function, positions, static_args)
        constants = {position for position, (_, arrays) in fixed.items() if not arrays}
        if wrong := sorted(set(self._static_argnums) & (fixed.keys() - constants)):
            raise CompilationOptionError(
                f"static_args: got arrays for the arguments {wrong}, which were declared static: such values are "
                "compiled in. Leave them out of the static_argnums of create_tpu_optimized_jit."
            )
        if not constants <= set(self._static_argnums):
            self._declared = tuple(sorted({*self._declared, *constants}))
            self._static_argnums, self._static_argnames = static_both_ways(
                self.function, self._declared, self._static_argnames
            )
        programs: list[Program] = []
        args: tuple[Any, ...] = ()
        for entry in entries(self.function, input_shapes, len(fixed)):
            inputs = list(input_descriptions(entry, dtype))
            total = len(inputs) + len(fixed)
            args = tuple(
                fixed[n][0] if n in fixed else inputs.pop(0) if inputs else None for n in range(total)
            )
            programs.append(self._program(self._sign(args, {}), args, {}, asked=True))
        return CompiledCalls(tuple(programs), self._split, self._dynamic_names(len(args)))

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs that there are, in the order in which they were compiled."""
        done = [future for future in list(self._programs.values()) if future.done()]
        return tuple(future.result() for future in done if future.exception() is None)

    @property
    def recompilations(self) -> tuple[Recompilation, ...]:
        """The programs that calls needed beyond the first one and those compiled ahead of time, with the reasons."""
        return tuple(self._recompilations)

    def explain(self, platform: str | None = None) -> str:
        """The options and their effects, the programs, and the reason of each recompilation.

        Args:
          platform: for the effects; default: that of the programs, or JAX's own.
        """
        programs = self.programs
        if platform is None and programs:
            platform = programs[-1].platform
        compiled = sum(not program.from_cache for program in programs)
        lines = [f"{self.name}: {self._calls} calls, {len(programs)} programs, {compiled} compiled by XLA"]
        lines += [f"  {line}" for line in self.config.explain(platform).splitlines()]
        for program in programs:
            lines += [str(program), *(f"  {note}" for note in program.notes)]
        return "\n".join([*lines, *map(str, self._recompilations)])

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """``jax.jit(…).lower(…)`` of the function with its options; arguments may be ``jax.ShapeDtypeStruct``."""
        return self._lower(args, kwargs, Rewritten())

    # ---- one call -----------------------------------------------------------------------------------------

    def _inside(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (found := self.config) != TpuCompilationConfig() and "inside" not in self._warned:
            self._warned.add("inside")
            warnings.warn(
                f"{self.name} was called inside another transformation, whose outermost program decides how it is "
                f"compiled: the options of {type(found).__name__} have no effect in this call. Apply "
                "create_tpu_optimized_jit to the outermost function.",
                CompilationOptionWarning,
                stacklevel=3,
            )
        return self.function(*args, **kwargs)

    def _sign(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
        return signature_of(*self._split(args, kwargs))

    def _split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[tuple[str, type, Any], ...]]:
        """The arguments that are not static, by position and by name; and names, types and values of those that are."""
        if not self._static_argnums and not self._static_argnames:
            return args, kwargs, ()
        names = self._names(len(args))
        static = [(names[number], args[number]) for number in self._static_argnums if number < len(args)]
        static += [(name, kwargs[name]) for name in self._static_argnames if name in kwargs]
        typed = tuple((name, type(value), value) for name, value in static)
        dynamic = tuple(value for number, value in enumerate(args) if number not in self._static_argnums)
        others = {name: value for name, value in kwargs.items() if name not in self._static_argnames}
        return dynamic, others, typed

    def _names(self, count: int) -> tuple[str, ...]:
        return argument_names(self.function, count)

    def _dynamic_names(self, count: int) -> tuple[str, ...]:
        return tuple(n for i, n in enumerate(self._names(count)) if i not in self._static_argnums)

    # ---- one program --------------------------------------------------------------------------------------

    def _program(
        self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], *, asked: bool
    ) -> Program:
        """The program, compiled by this thread unless another one is at it."""
        with self._lock:
            known = [
                one for one, future in self._programs.items() if not (future.done() and future.exception())
            ]
            if (future := self._programs.get(signature)) is not None and signature in known:
                mine = False
            else:
                mine, future = True, Future[Program]()
                self._programs[signature] = future
        if not mine:
            return future.result()
        try:
            program = self._compile(signature, args, kwargs)
        except BaseException as error:
            with self._lock:
                del self._programs[signature]
            future.set_exception(error)
            raise
        future.set_result(program)
        if known and not asked:
            self._recompiled(program, known, len(args))
        return program

    def adopt(self, program: Program) -> None:
        """Use a program that was loaded from a file for calls with its signature."""
        future: Future[Program] = Future()
        future.set_result(program)
        with self._lock:
            self._programs[program.signature] = future
            self._last = None

    def _compile(self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
        platform = platform_of(signature, self._shardings)
        effects = self.config.effects(platform)
        options = compiler_options(effects)
        for effect in effects:
            if not effect.applied and str(effect) not in self._warned:
                self._warned.add(str(effect))
                warnings.warn(str(effect), CompilationOptionWarning, stacklevel=4)
        notes: list[str] = []
        begin = time.perf_counter()
        rewritten = Rewritten()
        lowered = self._lower(args, kwargs, rewritten)
        if self.config.use_bfloat16:
            notes.append(str(rewritten))
        found: list[bool] = []
        with self._cached(notes), watch_program_keys(lambda _, there: found.append(there)):
            refused = notes[bool(self.config.use_bfloat16) :]
            compiled = compile_lowered(lowered, options, self.name)
        if refused and refused[0] not in self._warned:
            self._warned.add(refused[0])
            warnings.warn(f"cache_compiled_functions: {refused[0]}", CompilationOptionWarning, stacklevel=4)
        if self.config.enable_async_collective and platform != "cpu":
            notes.append(collectives_of(compiled.as_text()))
        return Program(
            function=self.name,
            signature=signature,
            platform=platform,
            effects=effects,
            options=options,
            notes=tuple(notes),
            seconds=time.perf_counter() - begin,
            from_cache=found[-1:] == [True],
            compiled=compiled,
            lowered_text=lowered.as_text,
        )

    def _cached(self, notes: list[str]) -> Any:
        if not self.config.cache_compiled_functions:
            return contextlib.nullcontext()
        return keep_compiled(
            notes.append,
            folder=self.config.cache_directory,
            max_bytes=self.config.cache_bytes,
            min_seconds=0.0,
        )

    def _lower(self, args: tuple[Any, ...], kwargs: dict[str, Any], rewritten: Rewritten) -> Any:
        import jax

        function = self.function
        static = {n: args[n] for n in self._static_argnums if n < len(args)}
        named = {name: kwargs[name] for name in self._static_argnames if name in kwargs}

        # A function of its own for each program: JAX finds nothing that it compiled with other options.
        def program(*dynamic: Any, **others: Any) -> Any:
            rest = iter(dynamic)
            full = [static[n] if n in static else next(rest) for n in range(len(dynamic) + len(static))]
            return function(*full, **others, **named)

        traced = with_bfloat16_products(program, rewritten) if self.config.use_bfloat16 else program
        traced.__name__ = traced.__qualname__ = self.name
        dynamic = tuple(value for number, value in enumerate(args) if number not in static)
        where = {number: place for place, number in enumerate(n for n in range(len(args)) if n not in static)}
        donated = tuple(where[number] for number in self._donate_argnums if number in where)
        others = {name: value for name, value in kwargs.items() if name not in named}
        by_name = tuple(name for name in names_at(function, self._donate_argnums) if name in others)
        jitted = jax.jit(traced, donate_argnums=donated, donate_argnames=by_name, **self._shardings)
        return jitted.lower(*dynamic, **others)

    def _recompiled(self, program: Program, known: list[Signature], count: int) -> None:
        changes = nearest(known, program.signature, self._dynamic_names(count))
        found = Recompilation(self.name, changes, len(known), program.seconds)
        with self._lock:
            self._recompilations.append(found)
        if self.config.warn_on_recompilation:
            warnings.warn(str(found), RecompilationWarning, stacklevel=4)

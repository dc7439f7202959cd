"""Performance rules: a few patterns that are slow in JAX and can be recognised reliably.

``jit-in-loop`` (warning)
    ``jax.jit`` of a lambda, a ``functools.partial`` or a function defined in the loop, built anew on every
    turn of a loop. JAX caches compiled programs by function object, so each turn traces and compiles again.
    Loops over a literal list of variants are left alone, and so are functions that use the loop variable.
``jit-rebuilt-per-call`` (info)
    the same inside a function that the file calls in a loop, with the jitted function called on the spot.
``array-update-in-loop`` (info)
    ``x = x.at[i].set(…)`` in a Python loop over ``i``: one dispatch and one copy of ``x`` a turn (or, under
    jit, a program that grows with the loop). One indexed update, ``jax.lax.fori_loop`` or ``jax.vmap`` does
    it at once.
``host-sync-in-loop`` (info)
    ``float(…)``, ``.item()``, ``numpy.asarray(…)``, ``jax.device_get(…)`` or ``.block_until_ready()`` on the
    result of a jitted function on every turn of the loop that calls it: the host waits, and the device idles
    while the next step is dispatched. Under an ``if`` (every so many steps), or in a loop that measures time,
    it is meant.
``numpy-in-jit`` (warning)
    a NumPy function called on a traced argument of a jitted function: it fails, or leaves the compiled
    program.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from capibara.migrate.findings import Findings
from capibara.migrate.scopes import Context
from capibara.migrate.walker import Program

__all__ = ["PerformanceRules"]

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_JIT = {"jax.jit", "jax.pmap", "jax.experimental.pjit.pjit"}
_UPDATES = {"set", "add", "multiply", "mul", "divide", "div", "power", "min", "max", "apply"}
_SHORT_LOOP = 8
# NumPy functions that only look at static properties, or build constants.
_STATIC_NUMPY = {
    "shape",
    "ndim",
    "size",
    "dtype",
    "result_type",
    "promote_types",
    "issubdtype",
    "can_cast",
    "iscomplexobj",
    "isscalar",
    "finfo",
    "iinfo",
}
_CLOCKS = {"time.time", "time.perf_counter", "time.monotonic", "time.perf_counter_ns", "timeit.default_timer"}


@dataclass(slots=True)
class PerformanceRules:
    """Looks for slow patterns in one program."""

    program: Program
    findings: Findings
    jitted_names: set[str] = field(default_factory=set)
    called_on_the_spot: set[int] = field(default_factory=set)
    called_in_loops: set[tuple[int, str]] = field(default_factory=set)  # scope that binds it, name

    def check(self) -> None:
        for call, context in self.program.of_type(ast.Call):
            if isinstance(call.func, ast.Call):
                self.called_on_the_spot.add(id(call.func))
            if context.loops and isinstance(call.func, ast.Name):
                owner, _ = self.program.resolver.visible(call.func.id, context)
                self.called_in_loops.add((id(owner), call.func.id))
        self._collect_jitted_names()
        for call, context in self.program.of_type(ast.Call):
            self._jit_construction(call, context)
        for statement, context in self.program.of_type(ast.Assign):
            self._array_update(statement, context)
        for kind in (ast.For, ast.While):
            for loop, context in self.program.of_type(kind):
                self._host_sync(loop, context)
        self._numpy_in_jit()

    def _paths(self, node: ast.expr, context: Context) -> set[str]:
        return set(self.program.resolver.paths(node, context))

    def _jit_call(self, node: ast.expr, context: Context) -> ast.Call | None:
        """The call that gives jit its options: ``jax.jit(…)`` or ``partial(jax.jit, …)``."""
        if not isinstance(node, ast.Call):
            return None
        if self._paths(node.func, context) & _JIT:
            return node
        is_partial = bool(node.args) and "functools.partial" in self._paths(node.func, context)
        return node if is_partial and self._paths(node.args[0], context) & _JIT else None

    def _jit_decorator(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, context: Context
    ) -> ast.expr | None:
        for decorator in function.decorator_list:
            if self._paths(decorator, context) & _JIT or self._jit_call(decorator, context):
                return decorator
        return None

    def _collect_jitted_names(self) -> None:
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef):
            for function, context in self.program.of_type(kind):
                if self._jit_decorator(function, context) is not None:
                    self.jitted_names.add(function.name)
        for statement, context in self.program.of_type(ast.Assign):
            value = statement.value
            if isinstance(value, ast.Call) and self._paths(value.func, context) & _JIT:
                self.jitted_names.update(t.id for t in statement.targets if isinstance(t, ast.Name))

    # jit-in-loop, jit-rebuilt-per-call

    def _jit_construction(self, call: ast.Call, context: Context) -> None:
        if not (self._paths(call.func, context) & _JIT) or not call.args:
            return
        target = call.args[0]
        if context.loops:
            loop = context.loops[-1]
            if self._is_new_each_time(target, context, loop) and not self._is_variant_loop(call, loop):
                self.findings.add(
                    call,
                    context,
                    "notice",
                    "warning",
                    "jit-in-loop",
                    "jax.jit",
                    "jax.jit of a function that is new on every turn of this loop: compiled each time",
                    "build the jitted function once, before the loop",
                )
            return
        function = next((f for f in reversed(context.functions) if not isinstance(f, ast.Lambda)), None)
        if function is None or (id(context.scope.parent), function.name) not in self.called_in_loops:
            return
        if id(call) in self.called_on_the_spot and self._is_new_each_time(target, context, function):
            self.findings.add(
                call,
                context,
                "notice",
                "info",
                "jit-rebuilt-per-call",
                "jax.jit",
                f"jax.jit is created again in every call of {function.name}, which is called in a loop",
                "build the jitted function once, at module level or in the caller",
            )

    def _is_new_each_time(self, target: ast.expr, context: Context, around: ast.AST) -> bool:
        if isinstance(target, ast.Lambda):
            return True
        if isinstance(target, ast.Call):
            return "functools.partial" in self._paths(target.func, context)
        if isinstance(target, ast.Name):
            return any(
                isinstance(node, ast.FunctionDef) and node.name == target.id
                for node in _own_statements(around)
            )
        return False

    def _is_variant_loop(self, call: ast.Call, loop: ast.For | ast.AsyncFor | ast.While) -> bool:
        """A loop that compiles one program for each of a few variants: that is what it is for."""
        if isinstance(loop, ast.While):
            return False
        if isinstance(loop.iter, (ast.List, ast.Tuple, ast.Set, ast.Dict)):
            return True
        names = _names(loop.target)
        # Anything computed in the loop may depend on the variant as well.
        for statement in _own_statements(loop):
            binds = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.FunctionDef))
            if binds and _loads(statement) & names:
                names |= _bound_by(statement)
        return bool(_loads(call) & names)

    # array-update-in-loop

    def _array_update(self, statement: ast.Assign, context: Context) -> None:
        loop = next((loop for loop in reversed(context.loops) if isinstance(loop, ast.For)), None)
        if loop is None or len(statement.targets) != 1:
            return
        target, value = statement.targets[0], statement.value
        if not isinstance(target, ast.Name) or not isinstance(value, ast.Call):
            return
        update = value.func
        if not (isinstance(update, ast.Attribute) and update.attr in _UPDATES):
            return
        indexed = update.value
        if not (
            isinstance(indexed, ast.Subscript)
            and isinstance(indexed.value, ast.Attribute)
            and indexed.value.attr == "at"
            and isinstance(indexed.value.value, ast.Name)
            and indexed.value.value.id == target.id
        ):
            return
        if not (_loads(indexed.slice) & _names(loop.target)) or _is_short(loop):
            return
        self.findings.add(
            statement,
            context,
            "notice",
            "info",
            "array-update-in-loop",
            "jax.numpy.ndarray.at",
            f"{target.id} is updated element by element in a Python loop: one dispatch and one copy a turn",
            "update all indices at once, or use jax.lax.fori_loop or jax.vmap",
        )

    # host-sync-in-loop

    def _host_sync(self, loop: ast.For | ast.While, context: Context) -> None:
        results = self._jit_results(loop)
        if not results or self._measures_time(loop, context):
            return
        for node in _unconditional(loop.body):
            found = self._synchronises(node, context, results)
            if found:
                self.findings.add(
                    node,
                    context,
                    "notice",
                    "info",
                    "host-sync-in-loop",
                    found,
                    f"{found} waits for the device on every turn of the loop that calls the jitted function",
                    "collect the arrays and convert them after the loop, or only every so many steps",
                )

    def _jit_results(self, loop: ast.For | ast.While) -> set[str]:
        names: set[str] = set()
        for node in _unconditional(loop.body):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                function = node.value.func
                if isinstance(function, ast.Name) and function.id in self.jitted_names:
                    for target in node.targets:
                        names |= _names(target)
        return names

    def _measures_time(self, loop: ast.AST, context: Context) -> bool:
        around = context.functions[-1] if context.functions else loop
        return any(
            isinstance(node, ast.Call) and self._paths(node.func, context) & _CLOCKS
            for node in ast.walk(around)
        )

    def _synchronises(self, node: ast.AST, context: Context, results: set[str]) -> str:
        if not isinstance(node, ast.Call):
            return ""
        if isinstance(node.func, ast.Attribute) and node.func.attr in {"item", "block_until_ready"}:
            if isinstance(node.func.value, ast.Name) and node.func.value.id in results:
                return f".{node.func.attr}()"
            return ""
        if len(node.args) != 1 or not (isinstance(node.args[0], ast.Name) and node.args[0].id in results):
            return ""
        if isinstance(node.func, ast.Name) and node.func.id in {"float", "int"}:
            return f"{node.func.id}()"
        waiting = {"numpy.asarray", "numpy.array", "jax.device_get", "jax.block_until_ready"}
        return next(iter(sorted(self._paths(node.func, context) & waiting)), "")

    # numpy-in-jit

    def _numpy_in_jit(self) -> None:
        traced: dict[int, set[str]] = {}
        for kind in (ast.FunctionDef, ast.AsyncFunctionDef):
            for function, context in self.program.of_type(kind):
                decorator = self._jit_decorator(function, context)
                if decorator is not None:
                    traced[id(function)] = self._traced_arguments(function, decorator)
        for call, context in self.program.of_type(ast.Call):
            names = traced.get(id(context.functions[-1])) if context.functions else None
            if not names or not call.args or not isinstance(call.args[0], ast.Name):
                continue
            for path in self._paths(call.func, context):
                is_numpy = path.startswith("numpy.") and path.rpartition(".")[2] not in _STATIC_NUMPY
                if is_numpy and call.args[0].id in names:
                    self.findings.add(
                        call,
                        context,
                        "notice",
                        "warning",
                        "numpy-in-jit",
                        path,
                        f"{path} on the traced argument {call.args[0].id!r} of a jitted function",
                        f"use jax.numpy.{path.removeprefix('numpy.')}",
                    )

    def _traced_arguments(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, decorator: ast.expr
    ) -> set[str]:
        """The parameters that jit traces; none when the static ones cannot be read off the decorator."""
        arguments = [*function.args.posonlyargs, *function.args.args]
        traced = {argument.arg for argument in [*arguments, *function.args.kwonlyargs]}
        if isinstance(decorator, ast.Call):
            for keyword in decorator.keywords:
                if keyword.arg not in {"static_argnums", "static_argnames", "static_broadcasted_argnums"}:
                    continue
                try:
                    static = ast.literal_eval(keyword.value)
                except ValueError:
                    return set()
                for item in static if isinstance(static, (tuple, list, set)) else (static,):
                    if isinstance(item, int) and -len(arguments) <= item < len(arguments):
                        traced.discard(arguments[item].arg)
                    elif isinstance(item, str):
                        traced.discard(item)
        # A parameter that is assigned again is something else from there on.
        return traced - {name for statement in _own_statements(function) for name in _bound_by(statement)}


def _own_statements(around: ast.AST) -> Iterator[ast.stmt]:
    """All statements inside a loop or function, not those of functions and classes defined in it."""
    stack = list(reversed(getattr(around, "body", [])))
    while stack:
        node = stack.pop()
        if not isinstance(node, ast.stmt):
            continue
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        for handler in reversed(getattr(node, "handlers", [])):
            stack.extend(reversed(handler.body))
        for name in ("finalbody", "orelse", "body"):
            stack.extend(reversed(getattr(node, name, [])))


def _unconditional(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Every node that runs on each turn: no branch, no inner loop, no inner function."""
    skipped = (
        ast.If,
        ast.For,
        ast.While,
        ast.Try,
        ast.FunctionDef,
        ast.AsyncFunctionDef,
        ast.ClassDef,
        ast.Lambda,
        ast.IfExp,
        ast.Match,
    )
    stack: list[ast.AST] = list(reversed(body))
    while stack:
        node = stack.pop()
        if isinstance(node, skipped):
            continue
        yield node
        stack.extend(reversed(list(ast.iter_child_nodes(node))))


def _names(target: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(target) if isinstance(node, ast.Name)}


def _loads(node: ast.AST) -> set[str]:
    return {
        part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)
    }


def _bound_by(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef):
        return {statement.name}
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign, ast.For)):
        targets = [statement.target]
    return {name for target in targets for name in _names(target)}


def _is_short(loop: ast.For) -> bool:
    """A loop with so few turns, known from the source, that unrolling it is fine."""
    if isinstance(loop.iter, (ast.List, ast.Tuple)):
        return len(loop.iter.elts) <= _SHORT_LOOP
    if (
        isinstance(loop.iter, ast.Call)
        and isinstance(loop.iter.func, ast.Name)
        and loop.iter.func.id == "range"
    ):
        last = loop.iter.args[1 if len(loop.iter.args) > 1 else 0] if loop.iter.args else None
        return isinstance(last, ast.Constant) and isinstance(last.value, int) and last.value <= _SHORT_LOOP
    return False

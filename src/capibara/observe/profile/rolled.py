"""A change of loops in Python that start a program in each turn: they become one program.

A ``for`` loop over ``range(…)``, an array or a list of numbers whose body only computes (assigns names, calls functions
that return something) is what ``jax.lax.scan`` runs: the names that the body assigns are its carry. The first turn runs
in Python, so that all of them have values. The others are one program, if that gives the same as the script's own loop.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from typing import Any

from capibara.jax_versions import outside_transformations
from capibara.observe.profile.drawn import refuse_random_numbers

__all__ = ["LOOP_NAME", "Rolled", "compile_rolled"]

LOOP_NAME = "__capibara_loop__"
_TURN = "__capibara_turn_"
_LEAST_TURNS = 20
_SIMPLE = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Pass, ast.Expr)


def compile_rolled(tree: ast.Module, effects: Callable[[ast.AST], str], note: Callable[[str], None]) -> None:
    """Rewrite the loops of a script that only compute.

    ``for i in over: body`` becomes::

        def __turn(i, a, b):              # the names that the body assigns
            body
            return a, b
        for i in __capibara_loop__[line].first(over):       # the first turn, or all of them, in Python
            body
            if __capibara_loop__[line].watched:
                __capibara_loop__[line].seen((i, a, b))     # of the first turn: from there the program goes on
        if __capibara_loop__[line].rest(): i, a, b = __capibara_loop__[line].run(__turn, …)

    Args:
      effects: says why a body may do more than compute, or nothing. note: called with the loops that are left.
    """
    _Rewriter(tree, effects, note).visit(tree)
    ast.fix_missing_locations(tree)


class _Rewriter(ast.NodeTransformer):
    def __init__(
        self, tree: ast.Module, effects: Callable[[ast.AST], str], note: Callable[[str], None]
    ) -> None:
        self._tree, self._effects, self._note = tree, effects, note
        self._within: list[ast.FunctionDef] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        self._within.append(node)
        self.generic_visit(node)
        self._within.pop()
        return node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> Any:
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        # Functions within a class's body do not see its names.
        node.body = [one if isinstance(one, ast.For) else self.visit(one) for one in node.body]
        return node

    def visit_For(self, node: ast.For) -> Any:
        why = self._why_not(node)
        if why:
            self._note(f"the loop in line {node.lineno} was left as it is: it {why}")
            return self.generic_visit(node)
        assert isinstance(node.target, ast.Name)
        names = sorted({*_assigned(node.body), node.target.id})
        changed = sorted(_assigned([one for one in node.body if isinstance(one, ast.AugAssign)]))
        turn = f"{_TURN}{node.lineno}"
        call = f"{LOOP_NAME}[{node.lineno}]"
        carried = ", ".join(names)
        made = ast.parse(
            f"def {turn}({carried}):\n    pass\n    return ({carried},)\n"
            f"for {node.target.id} in {call}.first(None):\n    pass\n"
            f"    if {call}.watched:\n        {call}.seen(({carried},))\n"
            f"if {call}.rest():\n    ({carried},) = {call}.run({turn}, {node.target.id!r}, {names!r}, {changed!r}, "
            f"({carried},))\n"
        ).body
        function, loop, run = made
        assert isinstance(function, ast.FunctionDef)
        assert isinstance(loop, ast.For)
        assert isinstance(loop.iter, ast.Call)
        function.body[:1] = _copies(node.body)
        loop.iter.args = [node.iter]
        loop.body[:1] = node.body
        for one in (function, loop, run):
            ast.copy_location(one, node)
        return [function, loop, run]

    def _why_not(self, node: ast.For) -> str:
        if node.orelse:
            return "has an else"
        if not isinstance(node.target, ast.Name):
            return "has several targets"
        for one in node.body:
            for part in ast.walk(one):
                if isinstance(part, ast.Break | ast.Continue | ast.Return):
                    return "may end a turn early"
                if isinstance(part, ast.NamedExpr | ast.Lambda | ast.FunctionDef | ast.Delete | ast.Starred):
                    return "defines functions, or deletes names"
            if not isinstance(one, _SIMPLE) or (
                isinstance(one, ast.Expr) and not isinstance(one.value, ast.Constant)
            ):
                return "does more than assign names"
        block = ast.Module(node.body, [])
        for part in ast.walk(block):
            if isinstance(part, ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store):
                return f"assigns to {ast.unparse(part)}"
        if not _assigned(node.body):
            return "assigns nothing"
        if any(isinstance(one, ast.AnnAssign) and one.value is None for one in node.body):
            return "declares a name that it gives no value"
        return self._effects(block) or self._shared({*_assigned(node.body), node.target.id})

    def _shared(self, names: set[str]) -> str:
        """Why other code may see or change what names hold from turn to turn, which it cannot in a program."""
        for function in self._within:
            for one in ast.walk(function):
                if isinstance(one, ast.Global | ast.Nonlocal) and not names.isdisjoint(one.names):
                    return f"assigns {', '.join(sorted(names & {*one.names}))}, a name of other functions too"
        for one in ast.walk(self._within[0] if self._within else self._tree):
            if (
                isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                and one not in self._within
            ):
                called = getattr(one, "name", "a lambda")
                if called.startswith(_TURN):
                    continue
                if shared := sorted(names & _free(one)):
                    return f"assigns {', '.join(shared)}, which {called} reads"
        return ""


def _free(function: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> set[str]:
    """Names that a function reads, or changes, of the code around it."""
    own = {one.arg for one in ast.walk(function.args) if isinstance(one, ast.arg)}
    own |= {
        one.id for one in ast.walk(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
    of_others: set[str] = set()
    read: set[str] = set()
    for one in ast.walk(function):
        if isinstance(one, ast.Global | ast.Nonlocal):
            of_others |= {*one.names}
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load):
            read.add(one.id)
    return (read - own) | of_others


def _copies(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    import copy

    return [copy.deepcopy(one) for one in body]


def _assigned(body: Sequence[ast.stmt]) -> set[str]:
    """The names that statements give values; those of comprehensions are known only within them."""
    found: set[str] = set()
    todo: list[ast.AST] = list(body)
    while todo:
        one = todo.pop()
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.add(one.id)
        if not isinstance(one, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            todo += ast.iter_child_nodes(one)
    return found


class Rolled:
    """The loops of a script by line, for :func:`compile_rolled`'s code.

    Args:
      note: called with what a loop was left as it is for. used: with what was changed.
      works: the lines of loops that are known to work; None: each is tried, and run in Python as well.
      same: whether two results are the same.
      found: called with each line that works.
    """

    def __init__(
        self,
        note: Callable[[str], None],
        used: Callable[[str], None],
        works: Sequence[int] | None,
        same: Callable[[Any, Any], bool],
        found: Callable[[int, bool], None],
    ) -> None:
        self.note, self.used, self.works, self.same, self.found = note, used, works, same, found
        self._loops: dict[int, _Loop] = {}

    def __getitem__(self, line: int) -> _Loop:
        return self._loops.setdefault(line, _Loop(self, line))


class _Loop:
    """One loop of the script.

    Attributes:
      watched: whether the values behind the next turn are wanted.
    """

    def __init__(self, all: Rolled, line: int) -> None:
        self._all, self._line = all, line
        self._left: Any = None
        self._start: tuple[Any, ...] | None = None
        self._programs: dict[Any, Any] = {}
        self._kept: list[Any] = []
        self._failed = False
        self.watched = False

    def first(self, over: Any) -> Any:
        """What the loop in Python goes over: the first item; all of it where that is to be compared, or has to be."""
        self._left, self._start, self.watched = None, None, False
        tries = self._all.works is None or self._line in self._all.works
        if self._failed or not tries or not outside_transformations():
            return over
        items = _items(over)
        if items is None or len(items) < _LEAST_TURNS:
            return over
        self._left = over, items
        if self._all.works is None:
            # The script's own loop says what is right: functions that it calls may read the names that it assigns.
            self.watched = True
            return over
        return over[:1] if isinstance(over, range | list | tuple) else iter([over[0]])

    def seen(self, values: tuple[Any, ...]) -> None:
        """Keep the values behind the first turn."""
        self.watched, self._start = False, _own(values)

    def rest(self) -> bool:
        """Whether a program has turns to run."""
        return self._left is not None

    def run(
        self,
        turn: Callable[..., tuple[Any, ...]],
        target: str,
        names: list[str],
        changed: list[str],
        values: tuple[Any, ...],
    ) -> Any:
        """The turns after the first; returns the values of all names behind them.

        Args:
          changed: names of which the body may change the object (``a += …``).
          values: of the names: behind the first turn, or, where the loop is tried, behind all of them.
        """
        import jax

        over, items = self._left
        start, self._left, self._start = self._start, None, None
        place = names.index(target)
        try:
            for name in changed:
                if not _is_assigned_anew(values[names.index(name)]):
                    raise TypeError(f"it changes what {name} holds, which other names may hold as well")
            if self._all.works is not None:
                return self._as_program(turn, place, items, values)
            if start is None:
                raise RuntimeError("its first turn was not finished")
            # What a function keeps in an object from turn to turn would be a value of the trace.
            with jax.checking_leaks(), refuse_random_numbers():
                found = self._as_program(turn, place, items, start)
            if not self._all.same(found, values):
                raise ValueError("as one program it gives other results")
        except Exception as error:
            self._failed = True
            text = str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
            self._all.note(f"the loop in line {self._line} was left as it is: {text}")
            self._all.found(self._line, False)
            if self._all.works is not None:
                for item in over[1:]:
                    values = turn(*values[:place], item, *values[place + 1 :])
            return values
        self._all.found(self._line, True)
        return values

    def _as_program(
        self, turn: Callable[..., tuple[Any, ...]], place: int, items: Any, values: tuple[Any, ...]
    ) -> Any:
        import jax
        import jax.numpy as jnp

        rest = items[1:]
        fixed = [jax.tree.leaves(one) != [] and not _computes(one) for one in values]
        if any(fixed):
            raise TypeError("it assigns a name that holds no arrays")
        # A program has what the body reads beside its names as constants: of other values it is another program.
        cells = [cell.cell_contents for cell in turn.__closure__ or ()]
        reads = [turn.__globals__.get(name) for name in turn.__code__.co_names]
        self._kept += [*cells, *reads]  # no other object gets their place
        key = turn.__code__, jax.tree.structure(values), tuple(map(id, [*cells, *reads]))
        if key not in self._programs:

            def program(values: tuple[Any, ...], rest: Any) -> tuple[Any, ...]:
                def step(carry: tuple[Any, ...], item: Any) -> tuple[tuple[Any, ...], None]:
                    after = turn(*carry[:place], item, *carry[place + 1 :])
                    return jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), carry, after), None

                # The dtypes and shapes that a turn gives: of the first one they may be others.
                given = jax.eval_shape(lambda v: turn(*v[:place], rest[0], *v[place + 1 :]), values)
                first = jax.tree.map(lambda a, to: jnp.asarray(a, to.dtype), values, given)
                return jax.lax.scan(step, first, rest)[0]

            self._programs[key] = jax.jit(program)
        found = self._programs[key](values, rest)
        turns = len(rest) + 1
        self._all.used(f"the loop in line {self._line} is one program: {turns:,} turns of lax.scan")
        # Python's loop leaves the last item as it is.
        last = items[-1]
        return (
            *found[:place],
            last.item() if not hasattr(last, "block_until_ready") else last,
            *found[place + 1 :],
        )


def _items(over: Any) -> Any:
    """What a loop goes over as an array; None if it is something else."""
    import jax
    import numpy as np

    if isinstance(over, range):
        limits = np.iinfo(np.int32)
        # The last bound itself is an int32 to NumPy.
        if (
            not over
            or not limits.min < min(over.start, over.stop) <= max(over.start, over.stop) <= limits.max
        ):
            return None
        return np.arange(over.start, over.stop, over.step, dtype=np.int32)
    # Others that have a shape, such as the columns of a table, may have another order of their own.
    if isinstance(over, jax.Array) or type(over) is np.ndarray:
        return over if over.ndim else None
    if isinstance(over, list | tuple) and over and all(type(one) in (int, float) for one in over):
        return np.asarray(over)
    return None


def _is_assigned_anew(value: Any) -> bool:
    """Whether ``value += …`` makes another object; NumPy's arrays, lists and dicts are changed themselves."""
    import jax
    import numpy as np

    return isinstance(value, jax.Array | np.generic | int | float | complex | tuple)


def _own(values: Any) -> Any:
    """Copies: a function may take its arguments' place (``donate_argnums``), and later turns change NumPy's arrays."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def copied(one: Any) -> Any:
        return (
            jnp.copy(one)
            if isinstance(one, jax.Array)
            else one.copy()
            if isinstance(one, np.ndarray)
            else one
        )

    return jax.tree.map(copied, values)


def _computes(value: Any) -> bool:
    import jax
    import numpy as np

    return all(
        isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float) for leaf in jax.tree.leaves(value)
    )

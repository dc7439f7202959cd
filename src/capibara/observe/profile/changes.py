"""Changes under which a script is run, unchanged itself, to measure what they save.

They stand for what its author would write: no float64, no callbacks, functions that are jitted once, functions and
loops under ``jax.jit``, arguments that are donated, turns of a loop together, no waiting for results, items prepared in
another thread. Each is installed before the script begins.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from capibara.errors import ConfigError
from capibara.files import read_bounded
from capibara.observe.profile import turns
from capibara.observe.profile.drawn import DrawnNumbers, refuse_random_numbers
from capibara.observe.profile.rolled import LOOP_NAME, Rolled, compile_rolled
from capibara.observe.profile.waits import AHEAD_NAME, Ahead, Reads, compile_ahead, no_wait

__all__ = [
    "KINDS",
    "OF_SOURCE",
    "Change",
    "Jitted",
    "changed_script",
    "compile_with_jit",
    "install",
    "jitted_functions",
    "rolled_loops",
    "wrap",
]

KINDS = (
    "x64_off",
    "no_debug_callbacks",
    "jit_once",
    "jit",
    "donate",
    "batch",
    "unroll",
    "no_wait",
    "ahead",
    "roll",
)
# Those for which the script is read and compiled with calls of ours in it.
OF_SOURCE = ("jit", "ahead", "roll")
_MOST_SOURCE = 16 * 2**20
# Calls that change something outside, or show something.
_EFFECTS = {"print", "open", "input", "append", "extend", "write", "update", "add", "setdefault", "pop"}


@dataclass(frozen=True)
class Jitted:
    """A function of the script of which it is known how it works under ``jax.jit``.

    Attributes:
      line: at which it begins.
      static: places of arguments that are fixed (``static_argnums``). names: likewise, ``static_argnames``.
    """

    line: int
    static: tuple[int, ...] = ()
    names: tuple[str, ...] = ()

    def with_fixed(self, other: Jitted) -> Jitted:
        """With the fixed arguments of both."""
        return replace(
            self,
            static=tuple(sorted({*self.static, *other.static})),
            names=tuple(sorted({*self.names, *other.names})),
        )

    @classmethod
    def from_data(cls, data: Any) -> Jitted:
        """From what JSON has of it; raises LookupError, TypeError or ValueError if it is something else."""
        return cls(int(data["line"]), tuple(map(int, data["static"])), tuple(map(str, data["names"])))


def jitted_functions(lines: Iterable[str]) -> tuple[Jitted, ...]:
    """What :func:`wrap` has told of the functions of a script, each line one of its texts: those that always worked.

    Raises:
      ConfigError: it is something else.
    """
    found: dict[int, Jitted | None] = {}
    for text in lines:
        try:
            data = json.loads(text)
            line, how = int(data["line"]), data["how"]
            how = None if how is None else Jitted.from_data(how)
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"functions under jax.jit: got {text!r:.100}, which wrap() did not write"
            ) from error
        # A function that is defined again closes over other values: what is fixed for one is fixed for all.
        before = found.get(line, how)
        found[line] = None if how is None or before is None else before.with_fixed(how)
    return tuple(how for how in found.values() if how is not None)


def rolled_loops(lines: Iterable[str]) -> tuple[int, ...]:
    """What ``"roll"`` has told of the loops of a script, each line one of its texts: those that always worked.

    Raises:
      ConfigError: it is something else.
    """
    found: dict[int, bool] = {}
    for text in lines:
        try:
            data = json.loads(text)
            line, works = int(data["loop"]), bool(data["works"])
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"loops as programs: got {text!r:.100}, which the change did not write"
            ) from error
        found[line] = found.get(line, True) and works
    return tuple(line for line, works in found.items() if works)


@dataclass(frozen=True)
class Change:
    """A change.

    Attributes:
      kind: one of :data:`KINDS`: ``"x64_off"`` keeps ``jax_enable_x64`` off, whatever the script asks for;
        ``"no_debug_callbacks"`` leaves out ``jax.debug.print`` and ``jax.debug.callback``; ``"jit_once"`` gives one
        jitted function for one function of the source with the same closure; ``"jit"`` puts functions under
        ``jax.jit``; ``"donate"`` lets the results of jitted functions take the place of their arguments; ``"batch"``
        and ``"unroll"`` compute several turns of compiled loops at once (:mod:`~capibara.observe.profile.turns`);
        ``"no_wait"`` and ``"ahead"`` let the host work while the devices do
        (:mod:`~capibara.observe.profile.waits`); ``"roll"`` makes programs of loops in Python
        (:mod:`~capibara.observe.profile.rolled`).
      lines: of the script; the functions that contain them are those for ``"jit"``.
      jitted: functions of ``"jit"``, as :class:`Jitted` says of each what is known to work. With them no call is made
        to find that out.
      loops: lines of loops of ``"roll"`` that are known to work; likewise.
    """

    kind: str
    lines: tuple[int, ...] = ()
    jitted: tuple[Jitted, ...] | None = None
    loops: tuple[int, ...] | None = None

    def to_json(self) -> str:
        """Text that :meth:`from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Change:
        """Read the output of :meth:`to_json`.

        Raises:
          ConfigError: it is something else.
        """
        try:
            data = json.loads(text)
            known = data["jitted"]
            jitted = None if known is None else tuple(map(Jitted.from_data, known))
            loops = data.get("loops")
            loops = None if loops is None else tuple(map(int, loops))
            made = cls(data["kind"], tuple(map(int, data["lines"])), jitted, loops)
        except (ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"change: got {text!r:.100}, which Change.to_json() did not write") from error
        if made.kind not in KINDS:
            raise ConfigError(f"change: got {made.kind!r:.100}, expected one of {', '.join(KINDS)}")
        return made


def install(
    change: Change,
    note: Callable[[str], None] = lambda _: None,
    used: Callable[[str], None] = lambda _: None,
    place: Callable[[], str] = lambda: "",
) -> Reads | None:
    """Put a change into this process's JAX. Those :data:`OF_SOURCE` are put into the script: :func:`changed_script`.

    Args:
      note: called with what is left as it is, in words. used: with what is changed.
      place: the line of the script that is being run, in words; empty where there is none.

    Returns:
      What counts the results that the script reads, for ``"no_wait"``.
    """
    if change.kind == "x64_off":
        _x64_off()
    elif change.kind == "no_debug_callbacks":
        _no_debug_callbacks()
    elif change.kind == "jit_once":
        _jit_once()
    elif change.kind == "donate":
        _donate()
    elif change.kind == "batch":
        turns.batch(note, used, place)
    elif change.kind == "unroll":
        turns.unroll(note, used, place)
    elif change.kind == "no_wait":
        return no_wait(used, place)
    return None


def _x64_off() -> None:
    import jax
    import jax.experimental

    update = jax.config.update

    def checked(name: str, val: Any) -> None:
        if name != "jax_enable_x64":
            update(name, val)

    @contextlib.contextmanager
    def off(*_: Any, **__: Any) -> Iterator[None]:
        yield

    update("jax_enable_x64", False)
    jax.config.update = checked
    for module in (jax, jax.experimental):
        for name in ("enable_x64", "disable_x64"):
            if name in vars(module):
                setattr(module, name, off)


def _no_debug_callbacks() -> None:
    import jax.debug

    def nothing(*_: Any, **__: Any) -> None:
        return None

    jax.debug.print = jax.debug.callback = nothing


_MISSING = object()


def _jit_once() -> None:
    import jax

    jit, made = jax.jit, {}

    @functools.wraps(jit)
    def once(fun: Any = None, /, **options: Any) -> Any:
        if fun is None:
            return functools.partial(once, **options)
        if not isinstance(fun, types.FunctionType):
            return jit(fun, **options)
        # The same code over the same values of other scopes, and of the module's names as they are now. They are kept,
        # so that no other object gets their place.
        cells = [cell.cell_contents if _filled(cell) else _MISSING for cell in fun.__closure__ or ()]
        reads = [fun.__globals__.get(name, _MISSING) for name in _read_names(fun.__code__)]
        kept = (
            fun.__code__,
            fun.__globals__,
            *cells,
            *reads,
            fun.__defaults__,
            *_in_order(fun.__kwdefaults__),
            *options.values(),
        )
        key = (tuple(map(id, kept[:1])), *map(_identity, kept[1:]), *options)
        if key not in made:
            made[key] = (kept, jit(fun, **options))
        return made[key][1]

    jax.jit = once


def _donate() -> None:
    import jax

    jit = jax.jit

    @functools.wraps(jit)
    def donating(fun: Any = None, /, **options: Any) -> Any:
        if fun is None:
            return functools.partial(donating, **options)
        plain = jit(fun, **options)
        own = {"donate_argnums", "donate_argnames", "static_argnums", "static_argnames"} & {*options}
        # Libraries, and the profiler itself, go on to use what they pass.
        if own or not isinstance(fun, types.FunctionType) or _of_library(fun.__code__.co_filename):
            return plain
        return _Donating(fun, plain, functools.partial(jit, **options))

    jax.jit = donating


def _of_library(file: str) -> bool:
    return any(part in file for part in ("/site-packages/", "/dist-packages/")) or file.startswith(
        str(Path(__file__).parents[2])
    )


class _Donating:
    """A jitted function whose arguments are donated that have a result of their shape and dtype each.

    A script that goes on to use such an argument fails: then this is no remedy for it.
    """

    def __init__(self, function: Callable[..., Any], plain: Any, jit: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function, self._plain, self._jit = function, plain, jit
        self._made: dict[tuple[int, ...], Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        import jax
        from jax.core import Tracer

        leaves = jax.tree.leaves((arguments, named))
        if named or any(isinstance(leaf, Tracer) for leaf in leaves):
            return self._plain(*arguments, **named)
        places = self._given_away(arguments)
        if places not in self._made:
            self._made[places] = self._jit(self._function, donate_argnums=places) if places else self._plain
        return self._made[places](*arguments)

    def _given_away(self, arguments: tuple[Any, ...]) -> tuple[int, ...]:
        import jax

        results = Counter(
            (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(self._plain.eval_shape(*arguments))
        )
        # What is given twice cannot be given away.
        times = Counter(map(id, jax.tree.leaves(arguments)))
        found = []
        for place, argument in enumerate(arguments):
            leaves = jax.tree.leaves(argument)
            fresh = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and times[id(leaf)] == 1]
            wanted = Counter((leaf.shape, leaf.dtype) for leaf in fresh)
            if leaves and len(fresh) == len(leaves) and wanted <= results:
                results -= wanted
                found.append(place)
        return tuple(found)


def _in_order(names: dict[str, Any] | None) -> list[Any]:
    return [part for pair in sorted((names or {}).items()) for part in pair]


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not _MISSING
    except ValueError:
        return False


def _read_names(code: types.CodeType) -> list[str]:
    """Names that code, and functions within it, may read of its module."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return [*code.co_names, *(name for one in inner for name in _read_names(one))]


def _identity(value: Any) -> Any:
    return (type(value), value) if isinstance(value, int | float | str | bytes | None) else id(value)


# --- changes of the script's source


def changed_script(
    path: Path,
    change: Change,
    note: Callable[[str], None],
    used: Callable[[str], None],
    found: Callable[[str], None],
) -> tuple[types.CodeType, dict[str, Any]]:
    """The code of a script with a change :data:`OF_SOURCE`, and the names that it needs.

    Args:
      path: the script. change: which.
      note: called with what is left as it is, in words. used: with what is changed.
      found: called with what works, in texts that :func:`jitted_functions` and :func:`rolled_loops` read.

    Raises:
      OSError: it cannot be read. SyntaxError: it is not Python.
    """
    if change.kind == "jit":
        return compile_with_jit(path, change.lines, note), wrap(note, change.jitted, found)
    tree = ast.parse(read_bounded(path, _MOST_SOURCE), str(path))
    if change.kind == "ahead":
        compile_ahead(tree)
        return compile(tree, str(path), "exec", dont_inherit=True), {AHEAD_NAME: Ahead(used)}

    def told(line: int, works: bool) -> None:
        found(json.dumps({"loop": line, "works": works}))

    compile_rolled(tree, _effects_of_block, note)
    loops = Rolled(note, used, change.loops, _same, told)
    return compile(tree, str(path), "exec", dont_inherit=True), {LOOP_NAME: loops}


def compile_with_jit(path: Path, lines: Sequence[int], note: Callable[[str], None]) -> types.CodeType:
    """The code of a script in which the functions that contain ``lines`` have the decorator of :func:`wrap`.

    Args:
      path: the script. lines: numbers from 1 on.
      note: is told in words what became of each.

    Raises:
      OSError: it cannot be read. SyntaxError: it is not Python.
    """
    tree = ast.parse(read_bounded(path, _MOST_SOURCE), str(path))
    chosen: dict[ast.FunctionDef, None] = {}
    for line in lines:
        inside = [
            one
            for one in ast.walk(tree)
            if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            and one.lineno <= line <= (one.end_lineno or one.lineno)
        ]
        function = max(inside, key=lambda one: one.lineno, default=None)
        if isinstance(function, ast.FunctionDef):
            chosen[function] = None
        else:
            note(f"line {line} is in no function that could be put under jax.jit")
    for function in chosen:
        if reason := _effects(function):
            note(f"{function.name} was left as it is: it {reason}")
            continue
        # Outermost and innermost decorators see the same function as before.
        place: ast.expr = ast.Call(ast.Name(_NAME, ast.Load()), [ast.Constant(function.lineno)], [])
        function.decorator_list.append(ast.fix_missing_locations(ast.copy_location(place, function)))
    return compile(tree, str(path), "exec", dont_inherit=True)


_NAME = "__capibara_jit__"


def _effects(function: ast.FunctionDef) -> str:
    """Why a function may do more than compute its result, or nothing."""
    own = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    made = {
        one.id for one in ast.walk(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)
    }
    return _effects_beside(function, made - own)


def _effects_of_block(block: ast.AST) -> str:
    """Why statements may do more than assign names, or nothing."""
    return _effects_beside(block, set())


def _effects_beside(node: ast.AST, local: set[str]) -> str:
    """Why code may do more than compute; what names hold that are only ``local`` it may change."""
    for one in ast.walk(node):
        if isinstance(one, ast.Global | ast.Nonlocal):
            return f"changes {', '.join(one.names)}"
        if isinstance(one, ast.Yield | ast.YieldFrom | ast.Await):
            return "is a generator"
        if isinstance(one, ast.Attribute | ast.Subscript) and isinstance(one.ctx, ast.Store | ast.Del):
            base = one.value
            if not (isinstance(base, ast.Name) and base.id in local):
                return f"assigns to {ast.unparse(one)}"
        if isinstance(one, ast.Call):
            called = one.func
            name = getattr(called, "id", getattr(called, "attr", ""))
            its_own = (
                isinstance(called, ast.Attribute)
                and isinstance(called.value, ast.Name)
                and called.value.id in local
            )
            if name in _EFFECTS and not its_own and not _is_update(called):
                return f"calls {name}()"
    return ""


def _is_update(called: ast.expr) -> bool:
    """``x.at[i].add(…)`` changes nothing."""
    return (
        isinstance(called, ast.Attribute)
        and isinstance(called.value, ast.Subscript)
        and isinstance(called.value.value, ast.Attribute)
        and called.value.value.attr == "at"
    )


def wrap(
    note: Callable[[str], None],
    jitted: Sequence[Jitted] | None = None,
    found: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The decorator that :func:`compile_with_jit` writes, under its name.

    Args:
      note: is told in words what became of each function.
      jitted: the functions that are put under ``jax.jit``, as it is known to work. Without it each is called once
        without and with it, and left as it was if that fails or gives other results.
      found: is told what works, and what does not, in texts that :func:`jitted_functions` reads.
    """

    def decorator(line: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        if jitted is None:
            return lambda function: _Tried(function, line, note, found)
        known = next((one for one in jitted if one.line == line), None)
        if known is None:
            return lambda function: function
        return lambda function: _Jitted(function, known)

    return {_NAME: decorator}


class _Jitted:
    """A function under ``jax.jit``."""

    def __init__(self, function: Callable[..., Any], how: Jitted) -> None:
        functools.update_wrapper(self, function)
        self._function, self._how = function, how
        self._jitted: Callable[..., Any] | None = None

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._jitted is None:
            # Not before: the script may set JAX's variables before it imports JAX.
            import jax

            self._jitted = jax.jit(
                self._function, static_argnums=self._how.static, static_argnames=self._how.names
            )
        # What was a plain value at the first call, and is an array now, cannot be fixed.
        fixed = [arguments[place] for place in self._how.static if place < len(arguments)]
        fixed += [named[name] for name in self._how.names if name in named]
        call = self._jitted if all(map(_hashable, fixed)) else self._function
        return call(*arguments, **named)


class _Tried:
    """A function that is jitted if that works and gives the same."""

    def __init__(
        self,
        function: Callable[..., Any],
        line: int,
        note: Callable[[str], None],
        found: Callable[[str], None],
    ) -> None:
        functools.update_wrapper(self, function)
        self._function, self._line, self._note, self._found = function, line, note, found
        self._call: Callable[..., Any] | None = None

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        if self._call is None:
            return self._first(arguments, named)
        return self._call(*arguments, **named)

    def _first(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        import jax
        from jax.core import Tracer

        result = self._function(*arguments, **named)
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((arguments, named, result))):
            return result  # part of a function that is jitted already
        name = self._function.__qualname__
        reason = ""
        # Without, and with, what a Python loop or a shape may need.
        for fixed in ((bool, str, type(None)), (bool, str, type(None), int)):
            static = [
                place
                for place, one in enumerate(arguments)
                if isinstance(one, fixed)
                or ((not jax.tree.leaves(one) or not _arrays(one)) and _hashable(one))
            ]
            names = [key for key, one in named.items() if isinstance(one, fixed) or not _arrays(one)]
            how = Jitted(self._line, tuple(static), tuple(names))
            jitted = _Jitted(self._function, how)
            try:
                with refuse_random_numbers():
                    other = jitted(*arguments, **named)
                if not _same(result, other):
                    reason = "gives other results"
                    break
            except DrawnNumbers as error:
                reason = f"does not work: {error}"
                break  # traced once, it would not draw again
            except Exception as error:
                reason = (
                    f"does not work: {str(error).strip().splitlines()[0][:200] if str(error) else error!r}"
                )
                continue
            self._call = jitted
            self._found(json.dumps({"line": self._line, "how": asdict(how)}))
            self._note(f"{name} is under jax.jit")
            return result
        self._call = self._function
        self._found(json.dumps({"line": self._line, "how": None}))
        self._note(f"{name} was left as it is: under jax.jit it {reason}")
        return result


def _arrays(value: Any) -> bool:
    import jax
    import numpy as np

    return all(
        isinstance(leaf, jax.Array | np.ndarray | np.generic | int | float | complex)
        for leaf in jax.tree.leaves(value)
    )


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _same(one: Any, other: Any) -> bool:
    import jax
    import numpy as np

    leaves, others = jax.tree.leaves(one), jax.tree.leaves(other)
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    return all(
        np.allclose(np.asarray(a), np.asarray(b), rtol=1e-3, atol=1e-4, equal_nan=True)
        if _arrays(a)
        else a is b or a == b
        for a, b in zip(leaves, others, strict=True)
    )

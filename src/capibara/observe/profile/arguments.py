"""The arguments that programs were compiled for, and which of them made JAX compile a function again.

They come from the call for which a program was compiled: then names, shapes, dtypes, shardings, static values and the
values that the function closes over are known. Of a program that was compiled before, or ahead of time, its text says
the names, shapes and dtypes of the arguments that it uses, as one device has them.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from capibara.compilation.changes import Change as ArgumentChange
from capibara.compilation.signature import OTHER_SETTINGS, argument_names, has_tracer, signature_of
from capibara.errors import CapibaraError
from capibara.jax_versions import CompiledCall
from capibara.plan.program.shapes import parse_shape

__all__ = [
    "FROM_CALL",
    "FROM_PROGRAM",
    "MOST_ARGUMENTS",
    "Argument",
    "ArgumentChange",
    "Call",
    "Recompiled",
    "changes_between",
    "describe_call",
    "nearest_changes",
    "pack_arguments",
    "program_arguments",
    "summarised",
    "unpack_arguments",
]

FROM_CALL, FROM_PROGRAM = "call", "program"
ARGUMENT_KINDS = ("array", "static", "closure", "parameter", "setting", "structure")
# Of all programs of a profile together.
MOST_ARGUMENTS = 1_000_000
_MOST_OF_ONE = 20_000
_MOST_CHANGES = 50
_MOST_FIELDS = 64
_MOST_SHOWN = 4
# Programs that a new one is compared with.
_MOST_COMPARED = 30
_LONGEST = 200
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), np.generic, np.dtype)
_EAGER = "jax._src.dispatch"  # of JAX's operations outside of jitted functions
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PARAMETER = re.compile(
    r"^\s+(?:ROOT )?%?[^\s%=(]+ = (\(.*?\)|[a-z]\w*\[[^\]]*\])\S* parameter\((\d+)\)(.*)$", re.MULTILINE
)
_SHARDING = re.compile(r"\bsharding=\{((?:[^{}]|\{[^{}]*\})*)\}")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_DTYPES = {
    "pred": "bool",
    "bf16": "bfloat16",
    **{f"f{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"s{bits}": f"int{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"c{bits}": f"complex{bits}" for bits in (64, 128)},
}


@dataclass(frozen=True)
class Argument:
    """Something that a program was compiled for.

    Attributes:
      name: ``"x"``, ``"params['w']"``; or of a setting of JAX.
      kind: ``"array"``, ``"static"`` for a static argument, ``"closure"`` for a value that the function closes over,
        ``"parameter"`` of one of JAX's operations outside of jitted functions, ``"setting"``; ``"structure"`` for the
        containers of an argument, and for which arguments were given by keyword.
      dtype: element type of an array (``"float32"``).
      shape: of an array. Where only the program's text is known, of the part that one device has.
      weak: whether its dtype yields to that of others, as that of Python's numbers does.
      sharding: where an array was put, as text; empty if JAX may move it.
      value: of what is not an array, as text.
    """

    name: str
    kind: str = "array"
    dtype: str = ""
    shape: tuple[int, ...] = ()
    weak: bool = False
    sharding: str = ""
    value: str = ""

    def __str__(self) -> str:
        if self.kind != "array":
            return self.value
        return f"{self.dtype}[{','.join(map(str, self.shape))}]" + (", weak" if self.weak else "")


@dataclass(frozen=True)
class Call:
    """What a program was compiled for, and when.

    Attributes:
      began: ``time.perf_counter()`` when compiling began. seconds: that it took.
      function: where the function is defined (``"model.py:12"``), or empty.
      arguments: of the call; None if it is not known.
    """

    began: float
    seconds: float
    function: str = ""
    arguments: tuple[Argument, ...] | None = None


@dataclass(frozen=True)
class Recompiled:
    """Programs of one function that were compiled although there was one already, for the same kind of reason.

    Attributes:
      program: their name (``"jit_step"``).
      function: where the function is defined (``"model.py:12"``; JAX's own: ``"jax/_src/…"``), or empty if it is not
        known, or one of JAX's operations.
      times: how many.
      seconds: compiling them, without tracing; 0 if they were compiled before the region.
      reason: ``"arguments"``: ``changes`` says which; ``"same arguments"``: the function was jitted anew, or something
        that cannot be compared changed; ``"new"``: there was no program of this name; ``"compiled earlier"``: the other
        profile began after it had been compiled.
      known: programs of this name that the first was compared with.
      changes: of the first of them, from the nearest known program; at most 50.
      left_out: changes beyond those.
    """

    program: str
    function: str
    times: int
    seconds: float
    reason: str
    known: int = 0
    changes: tuple[ArgumentChange, ...] = ()
    left_out: int = 0

    @property
    def cause(self) -> str:
        """The reason in words."""
        if self.reason == "arguments":
            return _in_words(self.changes, self.left_out) + (" (the first of them)" if self.times > 1 else "")
        return {
            "same arguments": "for the same arguments: jitted anew, or a value that it closes over changed",
            "new": "it is new",
            "compiled earlier": "the other profile began after it had been compiled",
        }[self.reason]

    def __str__(self) -> str:
        where = f" ({self.function})" if self.function else ""
        took = f", {self.seconds * 1e3:.2f} ms" if self.seconds else ""
        again = "compiled" if self.reason in ("new", "compiled earlier") else "compiled again"
        times = f" {self.times:,} times" if self.times > 1 else ""
        return f"{self.program}{where} was {again}{times}{took}: {self.cause}"


def _in_words(changes: Sequence[ArgumentChange], left_out: int) -> str:
    """Changes that are alike (thousands of parameters in another dtype) are told once."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for one in changes:
        alike.setdefault((one.what, one.before, one.after), []).append(one.where)
    shown = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {what} {before} -> {after}"
        for (what, before, after), names in list(alike.items())[:_MOST_SHOWN]
    ]
    more = sum(len(names) for names in list(alike.values())[_MOST_SHOWN:]) + left_out
    return "; ".join(shown) + (f"; and {more:,} more changes" if more else "")


# --- from a call


def describe_call(call: CompiledCall, known: dict[str, list[Any]]) -> tuple[str, tuple[Argument, ...]]:
    """Where the function of a call is defined, and what its program is compiled for.

    Args:
      call: for which a program is compiled.
      known: values by their text, to which this call's are added: two different ones with the same text are told apart.

    Raises:
      Exception: whatever the arguments' own code raises, such as that of a ``__repr__``.
    """
    if has_tracer((call.args, call.kwargs)):
        raise ValueError("the call is part of another transformation")
    names = argument_names(call.function, len(call.args))
    static = [(names[at], call.args[at]) for at in call.static_argnums if at < len(call.args)]
    static += [(name, call.kwargs[name]) for name in call.static_argnames if name in call.kwargs]
    kept = [at for at in range(len(call.args)) if at not in call.static_argnums]
    others = {name: value for name, value in call.kwargs.items() if name not in call.static_argnames}
    signature = signature_of(tuple(call.args[at] for at in kept), others)
    found = [
        Argument(
            _printable(path),
            dtype=leaf.dtype,
            shape=leaf.shape,
            weak=leaf.weak_type,
            sharding=_sharding_text(leaf.sharding),
        )
        for path, leaf in zip(signature.paths(tuple(names[at] for at in kept)), signature.leaves, strict=True)
    ]
    found += [Argument(name, "static", value=_value_text(value, known)) for name, value in static]
    given = [*((names[at], call.args[at]) for at in kept), *others.items()]
    if call.kwargs:
        named = ", ".join(sorted(map(str, call.kwargs)))
        found.append(Argument("arguments by keyword", "structure", value=_printable(named)))
    found += [one for name, value in given for one in _containers(name, value)]
    found += [one for name, value in given for one in _static_fields(name, value, known)]
    found += [
        Argument(name, kind, value=_value_text(value, known))
        for name, kind, value in _closed_over(call.function)
    ]
    found += [
        Argument(name, "setting", value=_value_text(value, known))
        for name, value in signature.settings
        if name != OTHER_SETTINGS
    ]
    return _defined(call.function), tuple(found[:_MOST_OF_ONE])


def _containers(name: str, value: Any) -> list[Argument]:
    """The lists, tuples and other containers of an argument, outermost first, if it is not an array itself."""
    import jax

    kinds: list[str] = []
    left = [jax.tree.structure(value)]
    while left and len(kinds) < _MOST_FIELDS:
        node = left.pop()
        if (about := node.node_data()) is not None:
            kinds.append(about[0].__name__)
            left += reversed(node.children())
    if not kinds:
        return []
    return [Argument(f"containers of {name}", "structure", value=_printable(", ".join(kinds)))]


def _static_fields(name: str, value: Any, known: dict[str, list[Any]]) -> list[Argument]:
    """What the classes in an argument give JAX beside their arrays: a dataclass's static fields, for instance."""
    import jax

    found: dict[str, Argument] = {}
    left = [jax.tree.structure(value)]
    while left and len(found) < _MOST_FIELDS:
        node = left.pop()
        about = node.node_data()
        if about is None:  # a leaf
            continue
        kind, fields = about
        if fields is not None and kind not in (dict, list, tuple):
            label = f"static fields of {kind.__name__} in {name}"
            label += f" ({len(found) + 1})" if label in found else ""
            found[label] = Argument(_printable(label), "static", value=_value_text(fields, known))
        left += reversed(node.children())
    return list(found.values())


def _defined(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if getattr(function, "__module__", "") == _EAGER:
        return ""
    if code is None:
        return ""
    place = f"{code.co_filename}:{code.co_firstlineno}"
    if str(getattr(function, "__module__", "")).partition(".")[0] == "jax":
        place = "jax" + place.rpartition("/jax")[2]
    return _printable(place)


def _closed_over(function: Any) -> list[tuple[str, str, Any]]:
    """Name, kind and value of plain values that a function closes over, without arrays, which are constants."""
    found: list[tuple[str, Any]] = []
    while isinstance(function, functools.partial):
        given = argument_names(function.func, len(function.args))
        found += [*zip(given, function.args, strict=True), *function.keywords.items()]
        function = function.func
    names: Any = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells: Any = getattr(function, "__closure__", None) or ()
    for name, cell in zip(names, cells, strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        # JAX's operations outside of a jitted function close over their parameters.
        if name == "params" and isinstance(value, dict) and function.__module__ == _EAGER:
            return [(str(one), "parameter", _plain(of)) for one, of in value.items() if _is_simple(of)]
        found.append((name, value))
    return [(str(name), "closure", _plain(value)) for name, value in found if _is_simple(value)]


def _is_simple(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) <= 64 and all(map(_is_simple, value))
    return isinstance(value, _SIMPLE)


def _plain(value: Any) -> Any:
    """NumPy's scalars, which JAX has in shapes, as Python's."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.item() if isinstance(value, np.generic) else value


def _sharding_text(sharding: Any) -> str:
    """``PartitionSpec('d',) over d=4`` rather than JAX's long form; devices only where they are not in their order."""
    from jax.sharding import Mesh

    if sharding is None:
        return ""
    mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
    if mesh is None or spec is None:
        return _printable(str(sharding))
    axes = "×".join(f"{name}={size}" for name, size in mesh.shape.items())
    # An abstract mesh has no devices.
    numbers = [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else []
    order = "" if numbers == list(range(len(numbers))) else f" on devices {numbers}"
    kind = getattr(sharding, "memory_kind", None)
    memory = f", {kind}" if kind and kind not in ("device", "unpinned_host") else ""
    return _printable(f"{spec} over {axes}{order}{memory}")


def _value_text(value: Any, known: dict[str, list[Any]]) -> str:
    text = _printable(_ADDRESS.sub("", repr(value)))
    same = known.setdefault(text, [])
    for number, other in enumerate(same):
        if other is value or (type(other) is type(value) and _equal(other, value)):
            return text if number == 0 else f"{text} #{number + 1}"
    if len(same) < 1000:
        same.append(value)
    return text if len(same) == 1 else f"{text} #{len(same)}"


def _equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except Exception:  # an object's own comparison
        return False


def _printable(text: str) -> str:
    shown = "".join(letter if letter.isprintable() else " " for letter in text[: 2 * _LONGEST])
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"


# --- from a program's text


def program_arguments(text: str) -> tuple[Argument, ...]:
    """The arguments of a compiled program as its text tells them: those that it uses, as one device has them."""
    at = text.find("\nENTRY ")
    if at < 0:
        return ()
    end = text.find("\n}", at)
    found: dict[int, list[Argument]] = {}
    for shape, number, rest in _PARAMETER.findall(text, at, end if end >= 0 else len(text)):
        name, sharding = _OP_NAME.search(rest), _SHARDING.search(rest)
        try:
            arrays = parse_shape(shape)
        except CapibaraError:
            continue
        called = _printable(re.sub(r"\\(.)", r"\1", name[1])) if name else f"argument {number}"
        found[int(number)] = [
            Argument(
                called if len(arrays) == 1 else f"{called}[{place}]",
                dtype=_DTYPES.get(one.dtype, one.dtype),
                shape=one.dims,
                sharding=_printable(sharding[1]) if sharding and len(arrays) == 1 else "",
            )
            for place, one in enumerate(arrays)
        ]
    return tuple(one for number in sorted(found) for one in found[number])[:_MOST_OF_ONE]


# --- comparing


def changes_between(
    before: Sequence[Argument], after: Sequence[Argument], *, same_source: bool = True
) -> list[ArgumentChange]:
    """What differs between the arguments of two programs.

    Args:
      before, after: of the two.
      same_source: whether both are of calls, or both of programs' texts. Otherwise only dtypes and shapes of arrays
        that both have are compared, and shapes only of those that were not sharded.
    """
    olds, news = ({(one.kind, one.name): one for one in side} for side in (before, after))
    found: list[ArgumentChange] = []
    for key in {**olds, **news}:
        old, new = olds.get(key), news.get(key)
        if old == new:
            continue
        kind, name = key
        if old is None or new is None:
            if same_source and kind != "setting":  # of another version of JAX
                what = "structure" if kind == "array" else f"{_WORDS[kind]}"
                found.append(ArgumentChange(name, what, _told(old), _told(new)))
        elif kind != "array":
            if same_source:
                found.append(ArgumentChange(name, _WORDS[kind], old.value, new.value))
        else:
            placed = old.sharding or new.sharding
            found += [
                ArgumentChange(name, what, *(_told(getattr(side, field)) for side in (old, new)))
                for what, field, compared in (
                    ("shape", "shape", same_source or not placed),
                    ("dtype", "dtype", True),
                    ("weak type", "weak", same_source),
                    ("sharding", "sharding", same_source),
                )
                if compared and getattr(old, field) != getattr(new, field)
            ]
    return found


_WORDS = {
    "static": "static value",
    "closure": "closed-over value",
    "parameter": "parameter",
    "setting": "setting",
    "structure": "structure",
}


def _told(value: Any) -> str:
    return "absent" if value is None else str(value) or "none"


def nearest_changes(
    known: Iterable[tuple[str, tuple[Argument, ...]]], source: str, arguments: tuple[Argument, ...]
) -> tuple[tuple[ArgumentChange, ...], int]:
    """The changes from the known program that has the fewest (of several such, the last), at most 50, and those beyond.

    Args:
      known: source and arguments of each. source, arguments: of the one that is compared with them.
    """
    best: list[ArgumentChange] | None = None
    for other, theirs in list(known)[-_MOST_COMPARED:]:
        found = changes_between(theirs, arguments, same_source=other == source)
        if best is None or len(found) <= len(best):
            best = found
    best = best or []
    return tuple(best[:_MOST_CHANGES]), max(0, len(best) - _MOST_CHANGES)


def summarised(found: Iterable[Recompiled]) -> tuple[Recompiled, ...]:
    """One entry for recompilations of a function by the same arguments, the longest first."""
    groups: defaultdict[Any, list[Recompiled]] = defaultdict(list)
    for one in found:
        places = frozenset((change.where, change.what) for change in one.changes)
        groups[one.program, one.function, one.reason, places].append(one)
    together = [
        replace(alike[0], times=sum(one.times for one in alike), seconds=sum(one.seconds for one in alike))
        for alike in groups.values()
    ]
    return tuple(sorted(together, key=lambda one: (-one.seconds, -one.times, one.program)))


# --- in files


def pack_arguments(
    programs: Sequence[tuple[str, tuple[Argument, ...]]],
) -> list[list[dict[str, Any]] | dict[str, Any]]:
    """Arguments of programs (name, arguments) for JSON: of several of one name, what differs from an earlier one."""
    first: dict[tuple[str, tuple[str, ...]], int] = {}
    packed: list[list[dict[str, Any]] | dict[str, Any]] = []
    for number, (name, arguments) in enumerate(programs):
        key = name, tuple(one.name for one in arguments)
        like = first.setdefault(key, number)
        if like == number or not arguments:
            packed.append([_packed(one) for one in arguments])
        else:
            theirs = programs[like][1]
            changed = {
                str(at): _packed(one)
                for at, (one, other) in enumerate(zip(arguments, theirs, strict=True))
                if one != other
            }
            packed.append({"like": like, "changed": changed})
    return packed


_DEFAULTS = {one.name: one.default for one in fields(Argument)}


def _packed(argument: Argument) -> dict[str, Any]:
    found = {name: getattr(argument, name) for name in _DEFAULTS}
    return {name: value for name, value in found.items() if value != _DEFAULTS[name]}


def unpack_arguments(packed: Sequence[Any]) -> list[tuple[Argument, ...]]:
    """Read the output of :func:`pack_arguments`.

    Raises:
      TypeError, ValueError, LookupError: it is something else, or has more arguments than profiles have.
    """
    found: list[tuple[Argument, ...]] = []
    total = 0
    for number, data in enumerate(packed):
        if isinstance(data, Mapping):
            if set(data) != {"like", "changed"} or not isinstance(data["changed"], Mapping):
                raise ValueError(
                    f"arguments: got {sorted(map(str, data))!r:.100}, expected 'like' and 'changed'"
                )
            like = data["like"]
            if not isinstance(like, int) or isinstance(like, bool) or not 0 <= like < number:
                raise ValueError(f"like: got {like!r:.100}, expected the number of an earlier program")
            total += len(found[like])
            _check_total(total)
            own = list(found[like])
            for at, one in data["changed"].items():
                if not (at.isascii() and at.isdigit() and len(at) < 10 and int(at) < len(own)):
                    raise ValueError(f"changed: got {at!r:.100}, expected the number of an argument")
                own[int(at)] = _unpacked(one)
            found.append(tuple(own))
        else:
            if not isinstance(data, list):
                raise TypeError(f"arguments: got {data!r:.100}, expected a list")
            total += len(data)
            _check_total(total)
            found.append(tuple(map(_unpacked, data)))
    return found


def _check_total(total: int) -> None:
    if total > MOST_ARGUMENTS:
        raise ValueError(f"arguments: got more than {MOST_ARGUMENTS:,} of all programs together")


def _unpacked(data: Any) -> Argument:
    if not isinstance(data, Mapping):
        raise TypeError(f"arguments: got {data!r:.100}, expected objects")
    made = Argument(**{**data, "shape": tuple(data.get("shape", ()))})
    for name, kind in (
        ("name", str),
        ("kind", str),
        ("dtype", str),
        ("weak", bool),
        ("sharding", str),
        ("value", str),
    ):
        value = getattr(made, name)
        if not isinstance(value, kind) or (isinstance(value, str) and not value.isprintable()):
            raise ValueError(f"{name}: got {value!r:.100}, expected printable text or a boolean")
    if made.kind not in ARGUMENT_KINDS:
        raise ValueError(f"kind: got {made.kind!r:.100}, expected one of {', '.join(ARGUMENT_KINDS)}")
    if not all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 2**63 for size in made.shape
    ):
        raise ValueError(f"shape: got {made.shape!r:.100}, expected sizes")
    return made

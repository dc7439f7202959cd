"""Code for several JAX versions: determine the branch that runs on the installed one.

Libraries bridge versions with ``try: … except ImportError``, ``if hasattr(jax, "tree")`` or
``if jax.__version_info__ >= (0, 4, 16)``. A name that JAX removed is harmless in the branch that is not taken, and an
error in the one that is. Tests are evaluated without running the file: ``hasattr`` on a JAX name and comparisons of
JAX's version with literals have a known answer here; a test that mentions JAX's version in any other way is
"undecided", and findings under it are notes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from capibara.migrate.scopes import Context, Guard, Resolver, dotted_parts

__all__ = ["BranchJudge", "block_guard", "branch_guards", "try_guards"]

Verdict = Literal["taken", "not taken", "undecided", "unrelated"]

# What each exception class stops: a missing module, a missing name in `from m import name`, a missing
# attribute, a call with an unknown keyword.
_CATCHES: dict[str, frozenset[str]] = {
    "ModuleNotFoundError": frozenset({"module"}),
    "ImportError": frozenset({"module", "name"}),
    "AttributeError": frozenset({"attribute"}),
    "TypeError": frozenset({"call"}),
}
_EVERYTHING = frozenset({"module", "name", "attribute", "call"})
_VERSION_PARSERS = {"parse", "version", "looseversion", "parse_version"}
_DEEPEST_TEST = 20  # nested deeper, a test is not a version test
_BROAD = {"Exception", "BaseException"}
_SWALLOWING_BLOCKS = {"suppress", "raises", "assertRaises", "assertRaisesRegex"}


def branch_guards(tests: Sequence[ast.expr], context: Context, *, polarity: bool) -> tuple[Guard, ...]:
    """Guards for code that runs only when every test is true (or false, for ``polarity=False``)."""
    return tuple(
        Guard("branch", id(test), test=test, context=context, polarity=polarity)
        for test in tests
        if _may_be_version_test(test)
    )


def _may_be_version_test(test: ast.expr) -> bool:
    """A quick look at the words in a test, so that ordinary branches cost nothing."""
    for node in ast.walk(test):
        word = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if word in {"hasattr", "TYPE_CHECKING"} or "version" in word.lower() or "JAX" in word:
            return True
    return False


def try_guards(node: ast.Try | ast.TryStar) -> tuple[tuple[Guard, ...], tuple[Guard, ...], tuple[Guard, ...]]:
    """Guards for the body, the handlers and the ``else`` of a ``try`` that serves as a fallback."""
    catches: frozenset[str] = frozenset()
    for handler in node.handlers:
        if _gives_up(handler):
            continue
        names = _exception_names(handler.type)
        for name in names:
            catches |= _CATCHES.get(name, frozenset())
        # `except Exception` around a training run is not a version fallback; around a few imports it is.
        if (handler.type is None or names & _BROAD) and all(map(_is_import_like, node.body)):
            catches |= _EVERYTHING
    if not catches:
        return (), (), ()
    key = id(node)
    return (
        (Guard("try-body", key, catches),),
        (Guard("try-handler", key, catches),),
        (Guard("try-else", key, catches),),
    )


def block_guard(expression: ast.expr, key: int) -> tuple[Guard, ...]:
    """A guard for the body of ``with contextlib.suppress(ImportError):`` or ``with pytest.raises(…):``."""
    if not isinstance(expression, ast.Call):
        return ()
    _, attributes = dotted_parts(expression.func)
    name = attributes[-1] if attributes else getattr(expression.func, "id", "")
    if name not in _SWALLOWING_BLOCKS:
        return ()
    catches: frozenset[str] = frozenset()
    for argument in expression.args:
        for caught in _exception_names(argument):
            catches |= _EVERYTHING if caught in _BROAD else _CATCHES.get(caught, frozenset())
    return (Guard("try-body", key, catches),) if catches else ()


def _gives_up(handler: ast.ExceptHandler) -> bool:
    """Whether the handler only reports: it ends by raising, so what failed stays failed."""
    return isinstance(handler.body[-1], ast.Raise)


def _exception_names(node: ast.expr | None) -> set[str]:
    elements = node.elts if isinstance(node, ast.Tuple) else [node]
    names: set[str] = set()
    for element in elements:
        if isinstance(element, ast.Name):
            names.add(element.id)
        elif isinstance(element, ast.Attribute):
            names.add(element.attr)
    return names


def _is_import_like(statement: ast.stmt) -> bool:
    return isinstance(statement, (ast.Import, ast.ImportFrom, ast.Pass)) or (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, (ast.Attribute, ast.Name, ast.Constant))
    )


@dataclass(slots=True)
class BranchJudge:
    """Decides version tests against the installed JAX.

    Args:
        resolver: name lookup for the file.
        exists: whether a dotted JAX name exists.
        versions: the installed version text of ``"jax"`` and ``"jaxlib"``.
    """

    resolver: Resolver
    exists: Callable[[str], bool]
    versions: dict[str, str]

    def verdict(self, guard: Guard) -> Verdict:
        """Whether the code under a branch guard runs on the installed JAX."""
        assert guard.test is not None
        assert guard.context is not None
        value = self._value(guard.test, guard.context)
        if value is None:
            return "undecided" if self._mentions_version(guard.test, guard.context) else "unrelated"
        return "taken" if value == guard.polarity else "not taken"

    def _value(self, test: ast.expr, context: Context, depth: int = 0) -> bool | None:
        """The truth of a version test, or None when it is not one or cannot be decided."""
        negated = False
        if depth > _DEEPEST_TEST:
            return None
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, negated = test.operand, not negated
        value: bool | None = None
        if isinstance(test, ast.BoolOp):
            values = [self._value(part, context, depth + 1) for part in test.values[:8]]
            decisive = isinstance(test.op, ast.Or)
            if decisive in values:
                value = decisive
            elif None not in values and len(values) == len(test.values):
                value = not decisive
        elif isinstance(test, ast.Call):
            value = self._hasattr(test, context)
        elif isinstance(test, ast.Compare) and len(test.ops) == 1:
            value = self._comparison(test, context)
        elif "typing.TYPE_CHECKING" in self.resolver.paths(test, context):
            value = False
        if value is None:
            return None
        return not value if negated else value

    def _hasattr(self, call: ast.Call, context: Context) -> bool | None:
        if not (isinstance(call.func, ast.Name) and call.func.id == "hasattr" and len(call.args) == 2):
            return None
        target, name = call.args
        if not (isinstance(name, ast.Constant) and isinstance(name.value, str)):
            return None
        paths = [path for path in self.resolver.paths(target, context) if path.split(".")[0] in self.versions]
        if len(paths) != 1:
            return None
        return self.exists(f"{paths[0]}.{name.value}")

    def _comparison(self, test: ast.Compare, context: Context) -> bool | None:
        operator = test.ops[0]
        left = self._version_operand(test.left, context)
        right = self._version_operand(test.comparators[0], context)
        if left is None or right is None or not (left[1] or right[1]):
            return None
        one, other = left[0], right[0]
        if isinstance(one, str) != isinstance(other, str):
            return None
        compare = {
            ast.Lt: lambda a, b: a < b,
            ast.LtE: lambda a, b: a <= b,
            ast.Gt: lambda a, b: a > b,
            ast.GtE: lambda a, b: a >= b,
            ast.Eq: lambda a, b: a == b,
            ast.NotEq: lambda a, b: a != b,
        }.get(type(operator))
        return None if compare is None else bool(compare(one, other))

    def _version_operand(self, node: ast.expr, context: Context) -> tuple[str | tuple[int, ...], bool] | None:
        """The value of one side of a comparison, and whether it is the installed version itself."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value, False
        if isinstance(node, ast.Tuple):
            numbers = [element.value for element in node.elts if isinstance(element, ast.Constant)]
            if len(numbers) == len(node.elts) and all(type(number) is int for number in numbers):
                return tuple(numbers), False  # type: ignore[arg-type]
            return None
        if isinstance(node, ast.Call):  # Version("0.4.1"), version.parse(jax.__version__)
            parser = dotted_parts(node.func)[1][-1:] or [getattr(node.func, "id", "")]
            if len(node.args) != 1 or parser[0].lower() not in _VERSION_PARSERS:
                return None
            argument = node.args[0]
            inner = None if isinstance(argument, ast.Call) else self._version_operand(argument, context)
            if inner is None or not isinstance(inner[0], str):
                return None
            return _numbers(inner[0]), inner[1]
        for path in self.resolver.paths(node, context):
            root, _, rest = path.partition(".")
            if root in self.versions:
                if rest in {"__version__", "version.__version__"}:
                    return self.versions[root], True
                if rest in {"__version_info__", "version.__version_info__"}:
                    return _numbers(self.versions[root])[:3], True
        return None

    def _mentions_version(self, test: ast.expr, context: Context) -> bool:
        for node in ast.walk(test):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
                if node.args and any(
                    path.split(".")[0] in self.versions for path in self.resolver.paths(node.args[0], context)
                ):
                    return True
            elif isinstance(node, ast.Attribute) and node.attr in {"__version__", "__version_info__"}:
                if any(path.split(".")[0] in self.versions for path in self.resolver.paths(node, context)):
                    return True
            elif isinstance(node, (ast.Name, ast.Attribute)):
                name = (node.id if isinstance(node, ast.Name) else node.attr).upper()
                if "JAX" in name and (
                    "VERSION" in name or name.startswith(("HAS_", "HAVE_", "USE_OLD", "IS_OLD"))
                ):
                    return True
        return False


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version text: ``"0.4.30.dev2"`` gives ``(0, 4, 30)``."""
    match = re.match(r"\d+(?:\.\d+)*", version.strip())
    return tuple(int(part) for part in match.group().split(".")) if match else ()

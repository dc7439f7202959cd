"""Which object does this name mean? Python's scoping rules, applied to an ``ast`` without running it.

A migration check that only searched for ``jax.tree_map`` as text would miss ``from jax import tree_map as
tm`` and would cry wolf at a local variable called ``jax``. So every name is looked up the way Python does it:
in its own scope, then in the enclosing functions (class bodies are skipped), then in the module. What a name
was bound *to* is kept as a dotted path when that can be read off the source (an import, or an assignment of
another such name), and as "opaque" otherwise (a parameter, a loop variable, the result of a call). Opaque
names yield no findings.

When several bindings could be in force, such as the two arms of ``try: import … except ImportError: import
…``, all of them are returned and a finding needs all of them to be wrong.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import Literal

__all__ = ["Binding", "Context", "Guard", "Meaning", "Resolver", "Scope", "dotted_parts"]

Position = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition in the source under which a piece of code runs, or fails without harm.

    ``try-body``: an exception there is caught (``catches`` says which kinds: module, name, attribute, call);
    ``try-handler`` and ``try-else``: runs only when the body failed, or only when it did not;
    ``branch``: runs only when ``test`` is true (``polarity``) or false.
    """

    kind: Literal["try-body", "try-handler", "try-else", "branch"]
    key: int
    catches: frozenset[str] = frozenset()
    test: ast.expr | None = None
    context: Context | None = None
    polarity: bool = True


@dataclass(frozen=True, slots=True)
class Context:
    """Where a node stands: its scope, the conditions around it, the loops and function that hold it."""

    scope: Scope
    guards: tuple[Guard, ...] = ()
    conditional: bool = False  # inside control flow of its own scope: a binding here may not happen
    lazy: bool = False  # an annotation that Python does not evaluate
    loops: tuple[ast.For | ast.AsyncFor | ast.While, ...] = ()  # of the same function, innermost last
    functions: tuple[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, ...] = ()


@dataclass(frozen=True, slots=True)
class Binding:
    """One place where a scope gives a name its value."""

    kind: Literal["path", "alias", "absent", "opaque"]
    end: Position
    context: Context
    path: str = ""  # kind "path": the imported dotted name
    value: ast.expr | None = None  # kind "alias": the assigned name or attribute chain


@dataclass(slots=True, eq=False)
class Scope:
    """A module, class, function, lambda or comprehension, with the names it binds."""

    kind: Literal["module", "class", "function", "comprehension"]
    parent: Scope | None = None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    module_names: set[str] = field(default_factory=set)  # declared `global` here
    outer_names: set[str] = field(default_factory=set)  # declared `nonlocal` here
    star_imports: list[str] = field(default_factory=list)

    def bind(self, name: str, binding: Binding) -> Binding:
        """Record a binding in the scope that owns the name (here, unless declared global or nonlocal)."""
        owner: Scope = self
        if name in self.module_names:
            owner = self.module
        elif name in self.outer_names:
            outer = self.parent
            while outer is not None and not (outer.kind == "function" and name in outer.bindings):
                outer = outer.parent
            owner = outer or self
        if owner is not self:  # whether and when that function is called is not known
            binding = replace(binding, context=replace(binding.context, conditional=True))
        owner.bindings.setdefault(name, []).append(binding)
        return binding

    @property
    def module(self) -> Scope:
        scope = self
        while scope.parent is not None:
            scope = scope.parent
        return scope


@dataclass(frozen=True, slots=True)
class Meaning:
    """One dotted path that an expression may denote, and how much of it an import already vouched for.

    ``bound`` is the part that comes from the binding: ``jax.numpy`` for ``jnp.sum`` after
    ``import jax.numpy as jnp``. A fault in that part is reported at the import and not at every use.
    """

    path: str
    bound: str
    guards: tuple[Guard, ...] = ()  # of the binding


def dotted_parts(node: ast.expr) -> tuple[ast.expr, list[str]]:
    """Split ``a.b.c`` into its root node and ``["b", "c"]``."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return node, names[::-1]


class Resolver:
    """Looks names up in the scopes of one file."""

    # Alias chains longer than this are not written by people; the bound also ends cycles such as `x = x.y`.
    MAX_ALIASES = 20
    MAX_MEANINGS = 8

    def meanings(self, node: ast.expr, context: Context, depth: int = 0) -> tuple[Meaning, ...]:
        """The dotted paths that ``node`` may denote, or ``()`` when that is not known."""
        root, attributes = dotted_parts(node)
        if not isinstance(root, ast.Name) or depth > self.MAX_ALIASES:
            return ()
        found = self._name(root, context, depth)
        if not attributes:
            return found
        return tuple(replace(meaning, path=".".join([meaning.path, *attributes])) for meaning in found)

    def paths(self, node: ast.expr, context: Context) -> tuple[str, ...]:
        return tuple(meaning.path for meaning in self.meanings(node, context))

    def is_bound(self, name: str, context: Context) -> bool:
        """Whether any visible scope binds ``name``."""
        return bool(self.visible(name, context)[1])

    def visible(self, name: str, context: Context) -> tuple[Scope | None, list[Binding]]:
        """The scope whose ``name`` is seen from ``context``, and the bindings there."""
        scope: Scope | None = context.scope
        if name in context.scope.module_names:
            scope = context.scope.module
        first = True
        while scope is not None:
            if (first or scope.kind != "class") and name in scope.bindings:
                return scope, scope.bindings[name]
            scope, first = scope.parent, False
        return None, []

    def _name(self, node: ast.Name, context: Context, depth: int) -> tuple[Meaning, ...]:
        scope, bindings = self.visible(node.id, context)
        if scope is None:
            return ()
        if scope is context.scope:
            bindings = _in_force(bindings, (node.lineno, node.col_offset), looping=bool(context.loops))
        if any(binding.kind in ("path", "alias") for binding in bindings):
            bindings = [binding for binding in bindings if not _is_stand_in(binding)]
        found: dict[str, Meaning] = {}
        for binding in bindings:
            if binding.kind == "path":
                found[binding.path] = Meaning(binding.path, binding.path, binding.context.guards)
            elif binding.kind == "alias" and binding.value is not None:
                targets = self.meanings(binding.value, binding.context, depth + 1)
                if not targets:
                    return ()
                for target in targets:
                    guards = (*binding.context.guards, *target.guards)
                    found[target.path] = Meaning(target.path, target.path, guards)
            else:
                return ()
        return tuple(found.values()) if len(found) <= self.MAX_MEANINGS else ()


def _is_stand_in(binding: Binding) -> bool:
    """A placeholder for a missing module: `x = None`, or whatever an `except ImportError` puts there."""
    if binding.kind == "absent":
        return True
    return binding.kind == "opaque" and any(guard.kind == "try-handler" for guard in binding.context.guards)


def _in_force(bindings: list[Binding], position: Position, *, looping: bool) -> list[Binding]:
    """The bindings that may be the latest ones when execution reaches ``position`` in the same scope."""
    if looping:  # a binding further down may come from the previous turn
        return bindings
    before = sorted((b for b in bindings if b.end <= position), key=lambda b: b.end)
    for index in range(len(before) - 1, -1, -1):
        if not before[index].context.conditional:
            return before[index:]
    return before

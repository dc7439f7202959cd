"""One pass over a syntax tree that records the scopes and, for every node, where it stands.

The walk keeps its own stack instead of recursing, so that a source nested (or chained: ``a + b + c + …``) a
thousand deep is fine. Rules run afterwards over the recorded nodes, when every scope is complete.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from capibara.migrate.guards import block_guard, branch_guards, try_guards
from capibara.migrate.scopes import Binding, Context, Resolver, Scope, dotted_parts

__all__ = ["Program", "walk"]

Node = TypeVar("Node", bound=ast.AST)
Item = tuple[ast.AST, Context]


@dataclass(slots=True)
class Program:
    """Everything the rules need to know about one source file."""

    module: Scope
    resolver: Resolver = field(default_factory=Resolver)
    by_type: dict[type[ast.AST], list[Item]] = field(default_factory=dict)
    stored_attributes: list[tuple[ast.Attribute, Context]] = field(default_factory=list)
    values: dict[int, ast.expr] = field(default_factory=dict)  # by id of the binding

    def value_of(self, node: ast.expr, context: Context) -> ast.expr:
        """The expression that a name was assigned, when it has one binding and that is an assignment."""
        if isinstance(node, ast.Name):
            _, bindings = self.resolver.visible(node.id, context)
            if len(bindings) == 1:
                return self.values.get(id(bindings[0]), node)
        return node

    def of_type(self, kind: type[Node]) -> Iterator[tuple[Node, Context]]:
        """The recorded nodes of one type, in source order, with their contexts."""
        for node, context in self.by_type.get(kind, ()):
            assert isinstance(node, kind)
            yield node, context


def walk(tree: ast.Module) -> Program:
    """Record every node of ``tree`` with its context, and every binding in its scope."""
    program = Program(Scope("module"))
    walker = _Walker(program, _has_lazy_annotations(tree))
    stack: list[Item] = [(tree, Context(program.module))]
    while stack:
        node, context = stack.pop()
        program.by_type.setdefault(type(node), []).append((node, context))
        stack.extend(reversed(list(walker.children(node, context))))
    return program


def _has_lazy_annotations(tree: ast.Module) -> bool:
    """Whether module-level annotations stay unevaluated (PEP 563 asked for, or PEP 649 built in)."""
    if sys.version_info >= (3, 14):
        return True
    return any(
        isinstance(statement, ast.ImportFrom)
        and statement.module == "__future__"
        and any(alias.name == "annotations" for alias in statement.names)
        for statement in tree.body
    )


class _Walker:
    """Gives the children of a node, each with its context, and records bindings on the way."""

    def __init__(self, program: Program, lazy_annotations: bool) -> None:
        self.program = program
        self.lazy_annotations = lazy_annotations
        self.special: dict[type[ast.AST], Callable[[Any, Context], Iterable[Item]]] = {
            ast.Import: self._import,
            ast.ImportFrom: self._import_from,
            ast.Assign: self._assign,
            ast.AnnAssign: self._annotated_assign,
            ast.AugAssign: self._augmented_assign,
            ast.NamedExpr: self._named_expression,
            ast.For: self._for,
            ast.AsyncFor: self._for,
            ast.While: self._while,
            ast.If: self._if,
            ast.IfExp: self._if,
            ast.BoolOp: self._bool_op,
            ast.Try: self._try,
            ast.TryStar: self._try,
            ast.ExceptHandler: self._handler,
            ast.With: self._with,
            ast.AsyncWith: self._with,
            ast.match_case: self._match_case,
            ast.FunctionDef: self._function,
            ast.AsyncFunctionDef: self._function,
            ast.Lambda: self._function,
            ast.ClassDef: self._class,
            ast.ListComp: self._comprehension,
            ast.SetComp: self._comprehension,
            ast.GeneratorExp: self._comprehension,
            ast.DictComp: self._comprehension,
            ast.Global: self._global,
            ast.Nonlocal: self._nonlocal,
            ast.Attribute: self._attribute,
        }

    def children(self, node: ast.AST, context: Context) -> Iterable[Item]:
        handler = self.special.get(type(node))
        if handler is not None:
            return handler(node, context)
        return _in(ast.iter_child_nodes(node), context)

    # Bindings.

    def _bind(self, name: str, node: ast.AST, context: Context, value: ast.expr | None = None) -> None:
        kind = "opaque"
        if isinstance(value, (ast.Name, ast.Attribute)):
            kind = "alias"
        elif isinstance(value, ast.Constant) and (value.value is None or isinstance(value.value, bool)):
            kind = "absent"
        binding = context.scope.bind(name, Binding(kind, _end(node), context, value=value))
        if value is not None:
            self.program.values[id(binding)] = value

    def _bind_target(self, target: ast.AST, statement: ast.AST, context: Context) -> None:
        """Bind every name in an assignment target to something unknown."""
        stack = [target]
        while stack:
            node = stack.pop()
            if isinstance(node, ast.Name):
                self._bind(node.id, statement, context)
            elif isinstance(node, (ast.Tuple, ast.List)):
                stack.extend(node.elts)
            elif isinstance(node, ast.Starred):
                stack.append(node.value)

    def _import(self, node: ast.Import, context: Context) -> Iterable[Item]:
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            path = alias.name if alias.asname else name
            context.scope.bind(name, Binding("path", _end(node), context, path=path))
        return ()

    def _import_from(self, node: ast.ImportFrom, context: Context) -> Iterable[Item]:
        for alias in node.names:
            if alias.name == "*":
                if not node.level and node.module:
                    context.scope.star_imports.append(node.module)
                continue
            name = alias.asname or alias.name
            if node.level or not node.module:
                self._bind(name, node, context)
            else:
                path = f"{node.module}.{alias.name}"
                context.scope.bind(name, Binding("path", _end(node), context, path=path))
        return ()

    def _assign(self, node: ast.Assign, context: Context) -> Iterable[Item]:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._bind(target.id, node, context, node.value)
            elif (
                isinstance(target, ast.Tuple)
                and isinstance(node.value, ast.Tuple)
                and len(target.elts) == len(node.value.elts)
                and all(isinstance(element, ast.Name) for element in target.elts)
            ):
                for element, value in zip(target.elts, node.value.elts, strict=True):
                    self._bind(element.id, node, context, value)  # type: ignore[attr-defined]
            else:
                self._bind_target(target, node, context)
        yield node.value, context
        yield from _in(node.targets, context)

    def _annotated_assign(self, node: ast.AnnAssign, context: Context) -> Iterable[Item]:
        if isinstance(node.target, ast.Name) and node.value is not None:
            self._bind(node.target.id, node, context, node.value)
        # Python never evaluates the annotation of a local variable.
        in_function = context.scope.kind == "function"
        yield node.annotation, self._annotation(context, always_lazy=in_function)
        if node.value is not None:
            yield node.value, context
        yield node.target, context

    def _augmented_assign(self, node: ast.AugAssign, context: Context) -> Iterable[Item]:
        self._bind_target(node.target, node, context)
        return _in((node.value, node.target), context)

    def _named_expression(self, node: ast.NamedExpr, context: Context) -> Iterable[Item]:
        scope = context.scope
        while scope.kind == "comprehension" and scope.parent is not None:
            scope = scope.parent
        # Evaluated or not, the walrus stands in the middle of an expression: never the certain latest value.
        inner = replace(context, scope=scope, conditional=True)
        self._bind(node.target.id, node, inner, node.value)
        return _in((node.value,), context)

    def _annotation(self, context: Context, *, always_lazy: bool = False) -> Context:
        lazy = context.lazy or always_lazy or self.lazy_annotations
        return replace(context, lazy=lazy)

    # Control flow.

    def _for(self, node: ast.For | ast.AsyncFor, context: Context) -> Iterable[Item]:
        inner = replace(context, conditional=True, loops=(*context.loops, node))
        self._bind_target(node.target, node.target, inner)
        yield node.iter, context
        yield node.target, inner
        yield from _in(node.body, inner)
        yield from _in(node.orelse, replace(context, conditional=True))

    def _while(self, node: ast.While, context: Context) -> Iterable[Item]:
        inner = replace(context, conditional=True, loops=(*context.loops, node))
        yield node.test, inner
        yield from _in(node.body, inner)
        yield from _in(node.orelse, replace(context, conditional=True))

    def _if(self, node: ast.If | ast.IfExp, context: Context) -> Iterable[Item]:
        yield node.test, context
        for polarity, part in ((True, node.body), (False, node.orelse)):
            guards = branch_guards((node.test,), context, polarity=polarity)
            inner = replace(context, guards=(*context.guards, *guards), conditional=True)
            yield from _in(part if isinstance(part, list) else (part,), inner)

    def _bool_op(self, node: ast.BoolOp, context: Context) -> Iterable[Item]:
        polarity = isinstance(node.op, ast.And)
        for index, value in enumerate(node.values):
            # Long chains are data, not version tests; the slice keeps the work linear.
            guards = branch_guards(node.values[max(0, index - 4) : index], context, polarity=polarity)
            yield value, replace(context, guards=(*context.guards, *guards))

    def _try(self, node: ast.Try | ast.TryStar, context: Context) -> Iterable[Item]:
        body, handler, orelse = try_guards(node)
        outer = replace(context, conditional=True)
        # `try: import jax` is how optional packages are imported: without a fallback it counts as certain.
        yield from _in(node.body, replace(outer, guards=(*context.guards, *body)))
        yield from _in(node.handlers, replace(outer, guards=(*context.guards, *handler)))
        yield from _in(node.orelse, replace(outer, guards=(*context.guards, *orelse)))
        yield from _in(node.finalbody, context)

    def _handler(self, node: ast.ExceptHandler, context: Context) -> Iterable[Item]:
        if node.name:
            self._bind(node.name, node, context)
        return _in(ast.iter_child_nodes(node), context)

    def _with(self, node: ast.With | ast.AsyncWith, context: Context) -> Iterable[Item]:
        guards = context.guards
        for item in node.items:
            yield item.context_expr, context
            guards = (*guards, *block_guard(item.context_expr, id(node)))
            if item.optional_vars is not None:
                self._bind_target(item.optional_vars, item.optional_vars, context)
                yield item.optional_vars, context
        yield from _in(node.body, replace(context, guards=guards))

    def _match_case(self, node: ast.match_case, context: Context) -> Iterable[Item]:
        inner = replace(context, conditional=True)
        for part in ast.walk(node.pattern):
            if isinstance(part, (ast.MatchAs, ast.MatchStar)) and part.name:
                self._bind(part.name, part, inner)
            elif isinstance(part, ast.MatchMapping) and part.rest:
                self._bind(part.rest, part, inner)
        return _in(ast.iter_child_nodes(node), inner)

    # Scopes.

    def _function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, context: Context
    ) -> Iterable[Item]:
        arguments = node.args
        yield from _in((*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)), context)
        scope = Scope("function", context.scope)
        if not isinstance(node, ast.Lambda):
            self._bind(node.name, node, context)
            yield from _in(node.decorator_list, context)
        inner = Context(
            scope,
            # The body runs later, when the `try` around its definition is long over.
            guards=tuple(guard for guard in context.guards if guard.kind != "try-body"),
            functions=(*context.functions, node),
        )
        for parameter in getattr(node, "type_params", ()):
            self._bind(parameter.name, parameter, inner)
            yield parameter, self._annotation(inner, always_lazy=True)
        start = replace(inner)
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for argument in (*every, arguments.vararg, arguments.kwarg):
            if argument is None:
                continue
            scope.bind(argument.arg, Binding("opaque", (0, 0), start))
            if argument.annotation is not None:
                yield argument.annotation, self._annotation(context)
        if isinstance(node, ast.Lambda):
            yield node.body, inner
            return
        if node.returns is not None:
            yield node.returns, self._annotation(context)
        yield from _in(node.body, inner)

    def _class(self, node: ast.ClassDef, context: Context) -> Iterable[Item]:
        self._bind(node.name, node, context)
        yield from _in(node.decorator_list, context)
        outer = context
        if getattr(node, "type_params", ()):
            outer = replace(context, scope=Scope("function", context.scope))
            for parameter in node.type_params:  # type: ignore[attr-defined]
                self._bind(parameter.name, parameter, outer)
                yield parameter, self._annotation(outer, always_lazy=True)
        yield from _in((*node.bases, *node.keywords), outer)
        inner = Context(Scope("class", outer.scope), guards=context.guards, functions=context.functions)
        yield from _in(node.body, inner)

    def _comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, context: Context
    ) -> Iterable[Item]:
        inner = replace(context, scope=Scope("comprehension", context.scope))
        for index, generator in enumerate(node.generators):
            self._bind_target(generator.target, generator.target, inner)
            # Python evaluates the first iterable outside the comprehension's own scope.
            yield generator.iter, context if index == 0 else inner
            yield generator.target, inner
            yield from _in(generator.ifs, inner)
        results = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
        yield from _in(results, inner)

    def _global(self, node: ast.Global, context: Context) -> Iterable[Item]:
        context.scope.module_names.update(node.names)
        return ()

    def _nonlocal(self, node: ast.Nonlocal, context: Context) -> Iterable[Item]:
        context.scope.outer_names.update(node.names)
        return ()

    def _attribute(self, node: ast.Attribute, context: Context) -> Iterable[Item]:
        """Record only the outermost attribute of a chain, and go on below its root."""
        if not isinstance(node.ctx, ast.Load):
            self.program.stored_attributes.append((node, context))
        root, _ = dotted_parts(node)
        return () if isinstance(root, ast.Name) else _in((root,), context)


def _in(nodes: Iterable[ast.AST], context: Context) -> Iterable[Item]:
    return ((node, context) for node in nodes)


def _end(node: ast.AST) -> tuple[int, int]:
    """Where a statement ends: what it binds is in force from there on."""
    line = getattr(node, "end_lineno", None) or getattr(node, "lineno", 0)
    column = getattr(node, "end_col_offset", None)
    return line, column if column is not None else getattr(node, "col_offset", 0)

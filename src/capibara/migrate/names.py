"""The name rules: does every ``jax.*`` name in the file exist in the installed JAX?

Codes: ``removed-name`` and ``removed-module`` (JAX once had it), ``unknown-name`` and ``unknown-module`` (JAX
never had it, as far as the table knows), ``deprecated-name`` (it warns, or is gone in a later release),
``changed-behaviour``, ``private-name``, ``submodule-not-imported``, ``removed-option`` and ``unknown-option``
(of ``jax.config.update``), ``removed-attribute`` (of arrays).
"""

from __future__ import annotations

import ast
import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import ModuleType

from capibara.migrate.findings import Findings, Kind
from capibara.migrate.history import Change, History
from capibara.migrate.installed import ROOTS, InstalledAPI, Lookup
from capibara.migrate.reachable import unreachable
from capibara.migrate.scopes import Context, Guard, Meaning
from capibara.migrate.walker import Program

__all__ = ["NameRules", "is_jax"]

# Packages whose import does not load JAX modules, so that `jax.x.y` can be judged from the file alone.
_NEUTRAL = set(sys.stdlib_module_names) | {
    *ROOTS,
    "numpy",
    "scipy",
    "absl",
    "matplotlib",
    "tqdm",
    "PIL",
    "pandas",
}


def is_jax(path: str) -> bool:
    return path.partition(".")[0] in ROOTS


@dataclass(slots=True)
class NameRules:
    """Checks imports and attribute chains of one program."""

    program: Program
    findings: Findings
    api: InstalledAPI
    history: History
    imported: set[str] = field(default_factory=set)
    only_neutral_imports: bool = True
    patched: set[str] = field(default_factory=set)
    mentioned: set[str] = field(default_factory=set)
    module_uses: list[tuple[ast.AST, Context, list[str]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for statement, _ in self.program.of_type(ast.Import):
            for alias in statement.names:
                self._note_import(alias.name)
        for statement, _ in self.program.of_type(ast.ImportFrom):
            if statement.level or not statement.module:
                self.only_neutral_imports = False
                continue
            self._note_import(statement.module)
            if is_jax(statement.module):
                self.imported.update(f"{statement.module}.{alias.name}" for alias in statement.names)
        for node, context in self.program.stored_attributes:  # `jax.foo = …` puts foo there
            paths = self.program.resolver.paths(node, context)
            self.patched.update(path for path in paths if self.api.exists(path.rpartition(".")[0]))

    def _note_import(self, module: str) -> None:
        root = module.partition(".")[0]
        if is_jax(root):
            self.imported.add(module)
        elif root not in _NEUTRAL:
            self.only_neutral_imports = False

    @property
    def uses_jax(self) -> bool:
        return bool(self.imported)

    # Imports.

    def check_imports(self) -> None:
        for statement, context in self.program.of_type(ast.Import):
            for alias in statement.names:
                if is_jax(alias.name):
                    self._import_module(alias, context, alias.name)
        for statement, context in self.program.of_type(ast.ImportFrom):
            if not statement.level and statement.module and is_jax(statement.module):
                self._import_from(statement, context, statement.module)

    def _import_module(self, node: ast.AST, context: Context, module: str) -> None:
        if self.api.is_module(module) is False:
            self._report_missing_module(node, context, module, module)
        else:
            self._report_present(node, context, "module", module, "", self.api.lookup(module))

    def _import_from(self, statement: ast.ImportFrom, context: Context, module: str) -> None:
        is_module = self.api.is_module(module)
        for alias in statement.names:
            path = f"{module}.{alias.name}"
            if alias.name == "*":
                path = module
            if is_module is False:
                self._report_missing_module(alias, context, module, path)
            elif is_module and alias.name != "*" and path not in self.patched:
                self._judge(alias, context, "name", path, "")
            elif is_module and alias.name == "*":
                self._report_present(alias, context, "module", module, "", self.api.lookup(module))

    def _report_missing_module(self, node: ast.AST, context: Context, module: str, path: str) -> None:
        """An import from a module that is not there; ``path`` is the name wanted from it."""
        module_change = self.history.find(module)
        change = self.history.exact(path) or module_change
        if module_change is not None and change is not None:
            since = module_change.removed if module_change.removed_by(self.api.version) else ""
            when = f"was removed in JAX {since}" if since else "does not exist in the installed JAX"
            self.findings.add(
                node,
                context,
                "module",
                "error",
                "removed-module",
                path,
                f"module {module} {when}",
                change.fix,
            )
            return
        parent, _, last = module.rpartition(".")
        while parent and not self.api.is_module(parent):
            parent, _, last = parent.rpartition(".")
        near = _nearest(last, self.api.public_names(self.api.module(parent))) if parent else ""
        fix = f"use {parent}.{near}" if near else ""
        message = f"there is no module {module} in JAX {self.api.versions['jax']}"
        self.findings.add(node, context, "module", "error", "unknown-module", path, message, fix)

    # Names in expressions.

    def check_names(self) -> None:
        for node, context in self._references():
            meanings = self.program.resolver.meanings(node, context)
            jax_meanings = [meaning for meaning in meanings if is_jax(meaning.path)]
            if not jax_meanings or len(jax_meanings) != len(meanings):
                continue
            if len(jax_meanings) > 1 and any(map(self._is_fine, jax_meanings)):
                continue  # one of several possible bindings is in order
            self._reference(node, context, jax_meanings[0])
        self._report_unreachable()
        self._star_names()

    def _references(self) -> Iterator[tuple[ast.expr, Context]]:
        for node, context in self.program.of_type(ast.Attribute):
            if isinstance(node.ctx, ast.Load):
                yield node, context
            elif isinstance(node.value, ast.Attribute):  # `a.b.c = 1` reads `a.b`
                yield node.value, context

    def _is_fine(self, meaning: Meaning) -> bool:
        return self.api.lookup(meaning.path).status != "missing" or meaning.path in self.patched

    def _reference(self, node: ast.expr, context: Context, meaning: Meaning) -> None:
        path, bound = meaning.path, meaning.bound
        if path == bound:
            return  # an alias by itself: reported where it was bound
        lookup = self.api.lookup(path)
        if lookup.status == "missing" and (lookup.path in self.patched or path in self.patched):
            return
        if lookup.status == "missing" and len(lookup.path) <= len(bound):
            # The import itself fails and was reported; say more only where the table knows this very name.
            change = self.history.names.get(path)
            if change is not None and change.removed_by(self.api.version):
                self._report_removed(
                    node, self._import_context(node, context), "attribute", path, change, lookup
                )
            return
        self._judge(node, context, "attribute", path, bound)

    def _import_context(self, node: ast.expr, context: Context) -> Context:
        """The use of a name from a guarded import is as guarded as the import."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name):
            _, bindings = self.program.resolver.visible(root.id, context)
            guards = tuple(guard for binding in bindings for guard in binding.context.guards)
            # Whatever the try around the import catches, this use is never reached when the import failed.
            guards = tuple(
                guard if guard.kind != "try-body" else _catching_everything(guard) for guard in guards
            )
            return replace(context, guards=(*context.guards, *guards))
        return context

    def _judge(self, node: ast.AST, context: Context, kind: Kind, path: str, bound: str) -> None:
        lookup = self.api.lookup(path)
        if lookup.status == "unknown":
            return
        if lookup.status == "missing":
            change = self.history.find(lookup.path)
            if change is not None and change.name != lookup.path and self.api.exists(change.name):
                change = None  # `import jax.config` is gone, the object jax.config is not
            if change is not None or _speaks_of_removal(lookup.message):
                self._report_removed(node, context, kind, lookup.path, change, lookup)
            else:
                self._report_unknown(node, context, kind, lookup)
            return
        self._report_present(node, context, kind, path, bound, lookup)
        if kind == "attribute":
            self._submodules(node, context, path, bound)

    def _report_removed(
        self, node: ast.AST, context: Context, kind: Kind, path: str, change: Change | None, lookup: Lookup
    ) -> None:
        since = f" in JAX {change.removed}" if change is not None and change.removed else ""
        message = f"{path} was removed{since}"
        if change is None:  # JAX's own words
            message = f"{path} was removed: {lookup.message}"
        fix = change.fix if change is not None else ""
        if change is not None and not fix and _speaks_of_removal(lookup.message):
            message = f"{message}: {lookup.message}"
        self.findings.add(node, context, kind, "error", "removed-name", path, message, fix)

    def _report_unknown(self, node: ast.AST, context: Context, kind: Kind, lookup: Lookup) -> None:
        head, _, last = lookup.path.rpartition(".")
        version = self.api.versions["jax"]
        if any(part.startswith("_") for part in lookup.path.split(".")):
            message = f"private name {lookup.path} does not exist in JAX {version}"
            self.findings.add(node, context, kind, "error", "private-name", lookup.path, message)
            return
        near = _nearest(last, self.api.public_names(lookup.parent))
        message = f"{head} has no {last!r} in JAX {version}"
        fix = f"use {head}.{near}" if near else ""
        self.findings.add(node, context, kind, "error", "unknown-name", lookup.path, message, fix)

    def _is_first(self, path: str) -> bool:
        """True once a file for each name: for what is worth saying, but not at every use."""
        first = path not in self.mentioned
        self.mentioned.add(path)
        return first

    def _report_present(
        self, node: ast.AST, context: Context, kind: Kind, path: str, bound: str, lookup: Lookup
    ) -> None:
        """The name is there: is it on its way out, or private?"""
        notice: Kind = "notice"
        change = None
        parts = path.split(".")
        for end in range(len(parts), 1, -1):  # the name itself or a module around it that is going
            change = change or self.history.exact(".".join(parts[:end]))
        if lookup.status == "deprecated":
            path = lookup.path
            message = lookup.message if path in lookup.message else f"{path} is deprecated: {lookup.message}"
            fix = change.fix if change is not None else ""
            self.findings.add(node, context, kind, "warning", "deprecated-name", path, message, fix)
        elif change is not None and not change.removed_by(self.api.version):
            if change.removed:
                message = f"{change.name} is removed in JAX {change.removed}"
                self.findings.add(
                    node, context, notice, "warning", "deprecated-name", path, message, change.fix
                )
            elif change.deprecated:
                message = f"{change.name} is deprecated since JAX {change.deprecated}"
                self.findings.add(node, context, notice, "info", "deprecated-name", path, message, change.fix)
        elif "_src" in parts and "_src" not in bound.split(".") and self._is_first(path):
            message = f"{path} is private to JAX and may change in any release"
            self.findings.add(node, context, notice, "info", "private-name", path, message)
        known = self.history.notices.get(path)
        if known is not None and not known.unless_keyword and self._is_first(path):
            self.findings.add(
                node,
                context,
                notice,
                "info",
                "changed-behaviour",
                path,
                f"{path} {known.message}",
                f"use {known.fix}",
            )

    def _submodules(self, node: ast.AST, context: Context, path: str, bound: str) -> None:
        """`jax.experimental.pallas.x` after a bare `import jax`: the submodule may not be loaded."""
        parts = path.split(".")
        modules = []
        for end in range(len(bound.split(".")) + 1, len(parts) + 1):
            module = ".".join(parts[:end])
            if not isinstance(self.api.lookup(module).value, ModuleType):
                break
            if module in sys.modules:  # and not a module that is also known under another name
                modules.append(module)
        if modules:
            self.module_uses.append((node, context, modules))

    def _report_unreachable(self) -> None:
        """Report each module that the file uses without importing it, once."""
        absent = unreachable(
            self.imported, {module for *_, modules in self.module_uses for module in modules}
        )
        for node, context, modules in self.module_uses:
            module = next((module for module in modules if module in absent), None)
            if module is None:
                continue
            absent.discard(module)
            severity = "warning" if self.only_neutral_imports else "info"
            message = f"{module} is a module that nothing in this file imports"
            fix = f"add `import {module}`"
            self.findings.add(
                node, context, "attribute", severity, "submodule-not-imported", module, message, fix
            )

    def _star_names(self) -> None:
        """After ``from jax.numpy import *``, a name bound nowhere that JAX is known to have removed there."""
        stars = [module for module in self.program.module.star_imports if is_jax(module)]
        if not stars:
            return
        for node, context in self.program.of_type(ast.Name):
            if not isinstance(node.ctx, ast.Load) or self.program.resolver.is_bound(node.id, context):
                continue
            for module in stars:
                change = self.history.names.get(f"{module}.{node.id}")
                if change is not None and change.removed_by(self.api.version):
                    lookup = self.api.lookup(change.name)
                    if lookup.status == "missing":
                        self._report_removed(node, context, "attribute", change.name, change, lookup)


def _catching_everything(guard: Guard) -> Guard:
    return replace(guard, catches=frozenset({"module", "name", "attribute", "call"}))


def _nearest(name: str, options: list[str]) -> str:
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.75)
    return near[0] if near else ""


def _speaks_of_removal(message: str) -> bool:
    return any(word in message for word in ("removed", "deprecated", "no longer"))

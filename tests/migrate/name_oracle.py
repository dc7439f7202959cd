"""An independent judge of JAX names, run in its own process: it imports and evaluates instead of analysing.

Reads paths of Python files on the command line. For every file it really executes each import of a JAX module,
and really evaluates each attribute chain whose root name is bound by such an import and by nothing else in the
file. Prints, for each file, the lines on which that failed, worked, or was not tried. Shares no code with the
checker and no cleverness: names that are bound in two ways, or by an import that failed, are not tried.
"""

from __future__ import annotations

import ast
import json
import sys
import warnings

Places = set[tuple[str, int]]


def collect(tree: ast.Module) -> tuple[list[tuple[str, str, int]], Places, Places, set[int]]:
    """The imports, the attribute chains, the names that only a star import can bind, and untried lines."""
    imports: list[tuple[str, str, int]] = []
    binders: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.split(".")[0]
                statement = f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")
                binders.setdefault(name, set()).add(statement if alias.asname else f"root {name}")
                if alias.name.split(".")[0] == "jax":
                    imports.append((name, statement, alias.lineno))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = alias.asname or alias.name
                statement = f"from {node.module} import {alias.name}" + (
                    f" as {alias.asname}" if alias.asname else ""
                )
                binders.setdefault(name, set()).add(statement)
                if not node.level and node.module and node.module.split(".")[0] == "jax":
                    imports.append((name, statement, alias.lineno))
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            binders.setdefault(node.name, set()).add("definition")
        elif isinstance(node, ast.arg):
            binders.setdefault(node.arg, set()).add("parameter")
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            binders.setdefault(node.id, set()).add("assignment")
        elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) and node.name:
            binders.setdefault(node.name, set()).add("capture")
        elif isinstance(node, ast.MatchMapping) and node.rest:
            binders.setdefault(node.rest, set()).add("capture")
    jax_names = {name for name, _, _ in imports}
    chains: set[tuple[str, int]] = set()
    unjudged: set[tuple[str, int]] = set()
    bare: set[tuple[str, int]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            text = ast.unparse(node)
            root = text.split(".")[0]
            # Only plain chains, and only roots that nothing but one import binds.
            if text.replace(".", "").replace("_", "").isalnum() and root in jax_names:
                (chains if len(binders[root]) == 1 else unjudged).add((text, node.lineno))
    if "*" in jax_names:
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in binders:
                bare.add((node.id, node.lineno))
    return imports, chains, bare, {line for _, line in unjudged}


def judge(path: str) -> dict:
    with open(path, encoding="utf-8") as file:
        imports, chains, bare, unjudged = collect(ast.parse(file.read()))
    scope: dict = {}
    failed: list[int] = []
    good: list[int] = []
    for name, statement, line in imports:
        try:
            exec(statement, scope)
        except ImportError:
            failed.append(line)
            scope.pop(name, None)
        else:
            good.append(line)
    for text, line in chains:
        if text.split(".")[0] not in scope:  # its import failed
            unjudged.add(line)
        else:
            try:
                eval(text, dict(scope))
            except AttributeError:
                failed.append(line)
            else:
                good.append(line)
    for name, line in bare:
        try:
            eval(name, dict(scope))
        except NameError:
            failed.append(line)
    return {"failed": sorted(set(failed)), "good": sorted(set(good)), "unjudged": sorted(unjudged)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({path: judge(path) for path in sys.argv[1:]}))

"""Determine in a fresh interpreter whether ``jax.a.b`` exists after a bare ``import jax``.

A submodule becomes an attribute of its package when something imports it. In this process the checker itself has
imported many, so a new interpreter imports what the checked file imports. That takes a second or two; it is done once
for all modules of a file, and not for re-exports that can be read in the package's source.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable

__all__ = ["unreachable"]

_PROBE = """
import importlib, json, sys, warnings
sys.path[:], imports, modules = json.load(sys.stdin)
warnings.simplefilter("ignore")
for name in ["jax", *imports]:
    try:
        importlib.import_module(name)
    except Exception:
        pass
absent = []
for module in modules:
    root, *names = module.split(".")
    try:
        value = importlib.import_module(root)
        for name in names:
            value = getattr(value, name)
    except AttributeError:
        absent.append(module)
print(json.dumps(absent))
"""

# What a bare `import jax` was found to offer, shared by all files that are checked.
_after_bare_import: dict[str, bool] = {}


def unreachable(imports: Iterable[str], modules: Iterable[str]) -> set[str]:
    """Those of ``modules`` that are not attributes after ``import jax`` and the given imports.

    Also empty if no interpreter can be started: then nothing is known or reported.
    """
    named = set(imports) - {"jax"}
    asked = {
        module
        for module in modules
        if not any(name == module or name.startswith(module + ".") for name in named)
        and module.rpartition(".")[2] not in _reexports(module.rpartition(".")[0])
    }
    new = sorted(asked - _after_bare_import.keys())
    if new:
        absent = _ask((), new)
        _after_bare_import.update((module, module not in absent) for module in new)
    left = sorted(module for module in asked if not _after_bare_import[module])
    return set(left if not named else _ask(sorted(named), left)) if left else set()


def _ask(imports: Iterable[str], modules: list[str]) -> list[str]:
    try:
        answer = subprocess.run(
            [sys.executable, "-P", "-c", _PROBE],
            input=json.dumps([sys.path, list(imports), modules]),
            capture_output=True,
            check=True,
            text=True,
            timeout=120,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        return json.loads(answer.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return []


@functools.lru_cache(maxsize=64)
def _reexports(package: str) -> frozenset[str]:
    """The names that a package's ``__init__`` imports at its top level."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return frozenset()
    with open(spec.origin, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    return frozenset(
        alias.asname or alias.name
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    )

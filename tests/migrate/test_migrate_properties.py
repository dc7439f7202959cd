"""Properties: no source crashes the checker, code without JAX yields nothing, and every way to spell a name counts."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import jax
import jax.numpy
import jax.random
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from capibara.migrate import check_migration_compatibility

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@functools.cache
def library_files() -> list[Path]:
    """Modules of the standard library, a few hundred of moderate size."""
    root = Path(os.__file__).parent
    return sorted(path for path in root.glob("*.py") if path.stat().st_size < 40_000)


@QUICK
@given(st.data())
def test_standard_library_modules_yield_nothing(data):
    path = data.draw(st.sampled_from(library_files()))
    assert check_migration_compatibility(path).issues == ()


@QUICK
@given(st.data())
def test_the_same_with_jax_imported_yields_no_jax_finding(data):
    """With JAX in the file every rule runs over the library's code."""
    path = data.draw(st.sampled_from(library_files()))
    text = path.read_text(encoding="utf-8", errors="replace")
    report = check_migration_compatibility(f"{text}\nimport jax, jax.numpy as jnp\n")
    assert [issue for issue in report.issues if issue.severity != "info"] == []


@QUICK
@given(st.data())
def test_damaged_modules_do_not_crash(data):
    lines = data.draw(st.sampled_from(library_files())).read_text(errors="replace").split("\n")
    start = data.draw(st.integers(0, len(lines)))
    stop = data.draw(st.integers(start, min(len(lines), start + 50)))
    text = "import jax\n" + "\n".join(lines[:start] + lines[stop:])
    for issue in check_migration_compatibility(text).issues:
        assert issue.code in {"syntax-error", "too-deep"} or issue.severity == "info"


@QUICK
@given(st.text())
def test_any_text_is_answered(text):
    report = check_migration_compatibility(text + "\n")
    assert all(issue.line >= 1 and issue.column >= 1 for issue in report.issues)


identifiers = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True).filter(
    lambda name: (
        name.isidentifier()
        and name not in {"as", "if", "in", "is", "or", "not", "and", "def", "del"}
        and name
        not in {"for", "try", "from", "with", "else", "elif", "pass", "async", "await", "class", "yield"}
        and name
        not in {"break", "raise", "while", "global", "import", "lambda", "return", "except", "assert"}
    )
)
MODULES = {"jax": jax, "jax.numpy": jax.numpy, "jax.random": jax.random}
OLD_NAMES = ["tree_map", "tree_multimap", "trapz", "DeviceArray", "KeyArray", "shuffle", "soft_pmap", "in1d"]


@QUICK
@given(
    module=st.sampled_from(sorted(MODULES)),
    name=st.one_of(st.sampled_from(OLD_NAMES), st.sampled_from(dir(jax.numpy) + dir(jax)), identifiers),
    alias=identifiers,
    way=st.sampled_from(["import", "import as", "from", "assigned", "in function"]),
)
def test_every_spelling_gets_the_verdict_of_getattr(module, name, alias, way):
    """Whether an error is reported depends on getattr alone, and not on how the name is reached."""
    alias = alias + "_"  # never one of the other names here
    source = {
        "import": f"import {module}\n{module}.{name}\n",
        "import as": f"import {module} as {alias}\n{alias}.{name}\n",
        "from": f"from {module} import {name} as {alias}\n{alias}\n",
        "assigned": f"import {module}\n{alias} = {module}\n{alias}.{name}\n",
        "in function": f"def f():\n    import {module} as {alias}\n    return lambda: {alias}.{name}\n",
    }[way]
    issues = check_migration_compatibility(source).issues
    errors = [issue for issue in issues if issue.severity == "error"]
    assert bool(errors) == (not hasattr(MODULES[module], name)), source
    assert all(issue.name == f"{module}.{name}" for issue in errors)

"""The checker: read a source, walk it once, apply the rules, weigh the findings."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from capibara.migrate.calls import CallRules
from capibara.migrate.findings import Findings
from capibara.migrate.guards import BranchJudge
from capibara.migrate.history import History
from capibara.migrate.installed import installed_api
from capibara.migrate.names import NameRules
from capibara.migrate.performance import PerformanceRules
from capibara.migrate.report import MigrationIssue, MigrationReport
from capibara.migrate.sources import MigrationInputError, MigrationPathError, Source, find_files, read_source
from capibara.migrate.walker import walk

__all__ = ["check_migration_compatibility", "check_paths"]


def check_migration_compatibility(
    source_code: str | os.PathLike[str],
    check_imports: bool = True,
    check_functions: bool = True,
    check_performance: bool = True,
) -> MigrationReport:
    """Check one source file, notebook or piece of source text against the installed JAX.

    The source is parsed, never executed. Every ``jax`` and ``jaxlib`` name in it is looked up in the
    installed packages; names that were removed, deprecated or misspelled are reported with their position and a fix.

    Args:
        source_code: a path, or source text. A string is a path when it is a single line that names an
            existing file or ends in ``.py``, ``.pyi`` or ``.ipynb``; any other string is source text.
        check_imports: check ``import`` and ``from … import`` statements.
        check_functions: check names in expressions, keywords and arguments of calls, config options.
        check_performance: look for a few slow patterns (see :mod:`capibara.migrate.performance`).

    Returns:
        A report; ``report.is_compatible`` is False when some line would fail. A file that is not valid Python
        yields a report with an error, not an exception.

    Raises:
        MigrationPathError: the file does not exist (also a ``FileNotFoundError``).
        MigrationInputError: a folder, a special file, or larger than 4 MiB (also a ``ValueError``).
        MigrationInputTypeError: not text and not a path (also a ``TypeError``).

    >>> report = check_migration_compatibility("import jax\\njax.tree_map(abs, [-1])\\n")
    >>> report.is_compatible
    False
    >>> print(report.issues[0])
    <source>:2:1: error: jax.tree_map was removed in JAX 0.6.0 [removed-name] Fix: use jax.tree.map
    """
    return _check(read_source(source_code), check_imports, check_functions, check_performance)


def check_paths(
    paths: Iterable[str | os.PathLike[str]],
    *,
    check_imports: bool = True,
    check_functions: bool = True,
    check_performance: bool = True,
) -> MigrationReport:
    """Check files and whole folders; the flags are those of :func:`check_migration_compatibility`.

    A named file is checked or refused with an error. A file found in a folder that is too large, cannot be read or is
    a broken link becomes a warning in the report.

    Raises:
        MigrationPathError: a path does not exist.
        MigrationInputError: no path was given, they hold no Python file, or a named file is refused.
    """
    flags = (check_imports, check_functions, check_performance)
    reports = []
    seen: set[str] = set()
    starts = list(paths)
    given = [Path(path) for path in starts]
    for start in starts:
        for path in find_files(start):
            real = os.path.realpath(path)  # not Path.resolve, which refuses links that go round in circles
            if real in seen:
                continue
            seen.add(real)
            try:
                reports.append(_check(read_source(path), *flags))
            except (MigrationInputError, MigrationPathError) as error:
                if path in given:
                    raise
                reports.append(_skipped(path, str(error), flags))
    if not reports:
        names = ", ".join(map(repr, map(str, given))) or "nothing"
        raise MigrationInputError(
            f"paths: found no Python file (.py, .pyi, .ipynb) under {names}; "
            "name a file or a folder that holds some"
        )
    return MigrationReport.merge(reports)


def _checks(flags: tuple[bool, bool, bool]) -> tuple[str, ...]:
    names = ("imports", "functions", "performance")
    return tuple(name for name, flag in zip(names, flags, strict=True) if flag)


def _skipped(path: Path, reason: str, flags: tuple[bool, bool, bool]) -> MigrationReport:
    issue = MigrationIssue(str(path), 1, 1, "warning", "not-checked", "", reason)
    return MigrationReport((issue,), (str(path),), installed_api().versions["jax"], _checks(flags))


def _check(
    source: Source, check_imports: bool, check_functions: bool, check_performance: bool
) -> MigrationReport:
    api, history = installed_api(), History.load()
    program = walk(source.tree)
    findings = Findings(source, BranchJudge(program.resolver, api.exists, api.versions))
    names = NameRules(program, findings, api, history)
    if names.uses_jax:
        if check_imports:
            names.check_imports()
        if check_functions:
            names.check_names()
            CallRules(program, findings, api, history).check()
        if check_performance:
            PerformanceRules(program, findings).check()
    return MigrationReport(
        issues=findings.issues(),
        files=(source.label,),
        jax_version=api.versions["jax"],
        checks=_checks((check_imports, check_functions, check_performance)),
    )

"""The result of a migration check: issues, and the report that contains them.

An issue is one place in the source that the installed JAX treats differently from what its author expected.
Its severity says what happens there:

``error``
    running that line fails (``AttributeError``, ``ImportError``, ``TypeError``), or the file cannot be read;
``warning``
    it runs today, with a deprecation warning or with a removal date, or it is slow for a reason that can be
    seen in the source;
``info``
    worth knowing: a fallback for another JAX version that is not taken here, a changed default, a private
    name.

A report is *compatible* if it contains no errors.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["SEVERITIES", "MigrationIssue", "MigrationReport", "Severity"]

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class MigrationIssue:
    """One finding.

    Attributes:
        path: the file as it was named, or ``"<source>"`` for source text.
        line: line number, from 1 (inside the cell, for a notebook).
        column: column in characters, from 1.
        severity: ``"error"``, ``"warning"`` or ``"info"``.
        code: a stable identifier of the kind of finding, such as ``"removed-name"``.
        name: the JAX name (or keyword, or config option) the finding is about; empty for a syntax error.
        message: what is wrong, in one sentence.
        fix: what to write instead; empty when there is no general answer.
        cell: number of the code cell, from 1, when the source is a notebook.
    """

    path: str
    line: int
    column: int
    severity: Severity
    code: str
    name: str
    message: str
    fix: str = ""
    cell: int | None = None

    def __str__(self) -> str:
        cell = f" cell {self.cell}," if self.cell is not None else ""
        where = f"{self.path}:{cell} line {self.line}, column {self.column}" if cell else self.location
        text = f"{where}: {self.severity}: {self.message} [{self.code}]"
        return f"{text} Fix: {self.fix}" if self.fix else text

    @property
    def location(self) -> str:
        """``path:line:column``, the form that editors and terminals turn into a link."""
        return f"{self.path}:{self.line}:{self.column}"

    @property
    def sort_key(self) -> tuple[str, int, int, int, str, str]:
        return (self.path, self.cell or 0, self.line, self.column, self.code, self.name)


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """All findings in the files that were checked, in the order of the source.

    Attributes:
        issues: the findings.
        files: the files that were read, as they were named.
        jax_version: the installed JAX that every name was looked up in.
        checks: the checks that ran: ``"imports"``, ``"functions"``, ``"performance"``.
    """

    issues: tuple[MigrationIssue, ...]
    files: tuple[str, ...]
    jax_version: str
    checks: tuple[str, ...] = field(default=("imports", "functions", "performance"))

    @property
    def is_compatible(self) -> bool:
        """True when nothing found would fail on the installed JAX (warnings and notes are allowed)."""
        return not self.with_severity("error")

    def with_severity(self, *severities: Severity) -> tuple[MigrationIssue, ...]:
        """The issues of the given severities, in order."""
        return tuple(issue for issue in self.issues if issue.severity in severities)

    @property
    def counts(self) -> dict[str, int]:
        """Number of issues of each severity, zeros included."""
        found = Counter(issue.severity for issue in self.issues)
        return {severity: found[severity] for severity in SEVERITIES}

    def to_dict(self) -> dict[str, Any]:
        """The report as plain lists and dicts (the content of :meth:`to_json`)."""
        return {
            "jax_version": self.jax_version,
            "is_compatible": self.is_compatible,
            "checks": list(self.checks),
            "files": list(self.files),
            "counts": self.counts,
            "issues": [asdict(issue) for issue in self.issues],
        }

    def to_json(self, *, indent: int | None = 2) -> str:
        """The report as a JSON object: version, files, counts and every issue with all of its fields."""
        return json.dumps(self.to_dict(), indent=indent)

    def summary(self) -> str:
        """One line: how many files, how many findings, against which JAX."""
        files = f"{len(self.files)} file{'s' * (len(self.files) != 1)}"
        if not self.issues:
            return f"{files} checked against JAX {self.jax_version}: nothing to change"
        counts = ", ".join(
            f"{number} {name}{'s' * (number != 1 and name != 'info')}"
            for name, number in self.counts.items()
            if number
        )
        return f"{files} checked against JAX {self.jax_version}: {counts}"

    def __str__(self) -> str:
        return "\n".join([*map(str, self.issues), self.summary()])

    @classmethod
    def merge(cls, reports: Iterable[MigrationReport]) -> MigrationReport:
        """Join the reports of several files into one.

        Raises:
            ValueError: when there is no report to join.
        """
        parts = list(reports)
        if not parts:
            raise ValueError("merge() needs at least one report, got none")
        return cls(
            issues=tuple(issue for part in parts for issue in part.issues),
            files=tuple(name for part in parts for name in part.files),
            jax_version=parts[0].jax_version,
            checks=parts[0].checks,
        )

"""From raw findings to issues: weigh each one by the guards around it.

Rules report what would happen if a line ran. Whether it runs is decided here, at the end, because a fallback in
``except ImportError`` is dead code exactly if nothing was found in its ``try``.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Literal

from capibara.migrate.guards import BranchJudge
from capibara.migrate.report import MigrationIssue, Severity
from capibara.migrate.scopes import Context
from capibara.migrate.sources import Source

__all__ = ["Findings", "Kind"]

# What fails: importing a module, `from m import name`, an attribute, a call; "notice" fails nothing.
Kind = Literal["module", "name", "attribute", "call", "notice"]


@dataclass(frozen=True, slots=True)
class _Raw:
    node: ast.AST
    context: Context
    kind: Kind
    severity: Severity
    code: str
    name: str
    message: str
    fix: str


@dataclass(slots=True)
class Findings:
    """Collects the findings of the rules in one source."""

    source: Source
    judge: BranchJudge
    raw: list[_Raw] = field(default_factory=list)

    def add(
        self,
        node: ast.AST,
        context: Context,
        kind: Kind,
        severity: Severity,
        code: str,
        name: str,
        message: str,
        fix: str = "",
    ) -> None:
        self.raw.append(_Raw(node, context, kind, severity, code, name, message, fix))

    def issues(self) -> tuple[MigrationIssue, ...]:
        """All findings as issues, weighed, without duplicates, in source order."""
        failed = self._failed_tries()
        found = {self._issue(raw, failed) for raw in self.raw} | set(self._parse_issues())
        return tuple(sorted(found, key=lambda issue: issue.sort_key))

    def _failed_tries(self) -> set[int]:
        """The `try` statements whose body stops with an exception that they catch."""
        return {
            guard.key
            for raw in self.raw
            if raw.severity == "error"
            for guard in raw.context.guards
            if guard.kind == "try-body" and raw.kind in guard.catches
        }

    def _issue(self, raw: _Raw, failed: set[int]) -> MigrationIssue:
        severity, reason = raw.severity, ""
        if severity != "info":
            reason = self._excuse(raw, failed)
            if reason:
                severity = "info"
            elif raw.context.lazy and severity == "error":
                severity, reason = "warning", "only in an annotation that is not evaluated"
        message = f"{raw.message} ({reason})" if reason else raw.message
        line, offset = getattr(raw.node, "lineno", 1), getattr(raw.node, "col_offset", 0)
        cell, line, column = self.source.locate(line, offset)
        return MigrationIssue(
            self.source.label, line, column, severity, raw.code, raw.name, message, raw.fix, cell
        )

    def _excuse(self, raw: _Raw, failed: set[int]) -> str:
        """Why the line does no harm on the installed JAX, or an empty string."""
        for guard in raw.context.guards:
            if guard.kind == "try-body" and raw.kind in guard.catches:
                return "caught: there is a fallback"
            if guard.kind == "try-handler" and guard.key not in failed:
                return "a fallback that is not taken here"
            if guard.kind == "try-else" and guard.key in failed:
                return "not reached here"
            if guard.kind == "branch":
                verdict = self.judge.verdict(guard)
                if verdict == "not taken":
                    return "in a branch that is not taken here"
                if verdict == "undecided":
                    return "under a test of the JAX version"
        return ""

    def _parse_issues(self) -> list[MigrationIssue]:
        issues = []
        for failure in self.source.failures:
            cell, line, column = self.source.locate(failure.line, failure.column)
            issues.append(
                MigrationIssue(
                    self.source.label,
                    line,
                    column,
                    failure.severity,
                    failure.code,
                    "",
                    failure.message,
                    failure.fix,
                    cell,
                )
            )
        return issues

"""Whole files in the style of older JAX code: the checker must find exactly what their comments say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from capibara.migrate import check_migration_compatibility

HERE = Path(__file__).parent
FIXTURES = sorted((HERE / "fixtures").glob("*.py.txt"))
NAME_CODES = {"removed-name", "removed-module", "unknown-name", "unknown-module", "private-name"}


def expected_findings(path: Path) -> set[tuple[int, str, str, str]]:
    expected = set()
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        match = re.search(r"# expect: (.*)$", line)
        for part in match[1].split(";") if match else ():
            severity, code, name = part.split()
            if code == "deprecated-mesh-context" and jax.__version_info__ < (0, 10, 1):
                continue  # the first release that warns
            expected.add((number, severity, code, name))
    return expected


@pytest.fixture(scope="module")
def oracle() -> dict[str, dict]:
    """Verdicts of a separate process that really imports and evaluates the names."""
    answer = subprocess.run(
        [sys.executable, str(HERE / "name_oracle.py"), *map(str, FIXTURES)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    return json.loads(answer.stdout)


def test_there_are_fixtures():
    assert len(FIXTURES) == 8


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_findings_are_exactly_those_expected(path):
    report = check_migration_compatibility(path)
    found = {(issue.line, issue.severity, issue.code, issue.name) for issue in report.issues}
    expected = expected_findings(path)
    assert found - expected == set(), "reported, but not expected"
    assert expected - found == set(), "expected, but not reported"
    assert report.is_compatible == (not any(severity == "error" for _, severity, _, _ in expected))


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_real_evaluation_agrees(path, oracle):
    """What fails when it is really imported or evaluated is reported; what works is not."""
    verdicts = oracle[str(path)]
    report = check_migration_compatibility(path)
    reported = {
        issue.line
        for issue in report.issues
        # "is private" is a note on a name that is there
        if issue.code in NAME_CODES and "may change" not in issue.message
    }
    assert set(verdicts["failed"]) - reported == set()
    # Where everything was tried and worked, nothing may be reported.
    assert reported - set(verdicts["failed"]) <= set(verdicts["unjudged"])
    if not expected_findings(path):
        assert verdicts["failed"] == []
        assert len(verdicts["good"]) > (50 if "plain" in path.name else 5)


def test_every_removed_name_in_the_fixtures_really_fails(oracle):
    """One process, one real lookup for each name reported as an error: all must fail."""
    names = sorted(
        {
            issue.name
            for path in FIXTURES
            for issue in check_migration_compatibility(path).issues
            if issue.severity == "error" and issue.code in NAME_CODES
        }
    )
    assert len(names) > 60
    script = (
        "import importlib, sys, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "for name in sys.argv[1:]:\n"
        "    module, _, last = name.rpartition('.')\n"
        "    try:\n"
        "        exec(f'from {module} import {last}', {})\n"
        "    except ImportError:\n"
        "        continue\n"
        "    print(name)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script, *names], capture_output=True, text=True, check=True
    )
    # `import jax.config` is what fails there; the object of that name exists.
    assert answer.stdout.split() == []

"""README, CONTRIBUTING and docs/ name what is there: verbs, options, files, settings, rooms, pages."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from capibara.cli import VERBS
from capibara.cli.train import split_items
from capibara.config import ModularModelConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> Iterator[str]:
    for match in re.finditer(rf"^( *)```{language}\n(.*?)^\1```", read(page), re.MULTILINE | re.DOTALL):
        yield match[2]


def commands() -> list[str]:
    lines = (line.strip() for page in PAGES for block in blocks(page, "bash") for line in block.splitlines())
    return sorted({line.partition(" | ")[0] for line in lines if line.startswith("capibara ")})


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_in_the_readme_and_on_a_page(verb: str):
    assert f"capibara {verb}" in " ".join(commands()), f"no command line shows capibara {verb}"
    readme = read(ROOT / "README.md")
    assert re.search(rf"`capibara [a-z`, ]*\b{verb}\b|capibara {verb}\b", readme)
    assert any(f"capibara {verb}" in read(page) for page in DOCS.glob("*.md"))


@pytest.mark.parametrize("line", commands())
def test_command_lines_are_understood(line: str):
    _, verb, *rest = shlex.split(line, comments=True)
    module = importlib.import_module(f"capibara.cli.{verb.replace('-', '_')}")
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    module.add_arguments(parser)
    if verb == "launch" and "--" in rest:
        rest, after = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
        if after[0] in VERBS:
            test_command_lines_are_understood(shlex.join(["capibara", *after]))
    args = parser.parse_intermixed_args(rest)
    if verb == "train":
        _, settings = split_items(args.items)
        ModularModelConfig.from_toml("demo", settings)


def test_toml_blocks_are_valid_settings():
    found = [block for page in PAGES for block in blocks(page, "toml")]
    assert found
    for block in found:
        ModularModelConfig.from_dict(tomllib.loads(block))


def test_every_setting_section_is_described():
    page = read(DOCS / "configure.md")
    assert all(f"`[{section}]`" in page for section in ModularModelConfig.model_fields)


def test_the_navigation_is_complete():
    listed = re.findall(r": (\S+\.md)$", read(ROOT / "mkdocs.yml"), re.MULTILINE)
    there = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(there)


def test_every_room_has_a_reference_page():
    rooms = re.findall(r"^\| `src/capibara/(\w+)` \|", read(ROOT / "CONTRIBUTING.md"), re.MULTILINE)
    assert {"families", "data"} <= set(rooms)
    pages = {page.stem for page in (DOCS / "api").glob("*.md")}
    assert set(rooms) - pages == {"cli", "native"}  # of verbs, and of kernels


def test_the_site_loads_nothing_from_elsewhere():
    text = read(ROOT / "mkdocs.yml")
    assert "font: false" in text
    assert not re.search(r"https?://", text)


def test_reference_pages_name_modules_with_public_names():
    names = [
        name for page in (DOCS / "api").glob("*.md") for name in re.findall(r"^::: (\S+)$", read(page), re.M)
    ]
    assert len(names) == len(set(names)) > 20
    for name in names:
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        assert spec.origin is not None, name
        assert "__all__" in read(Path(spec.origin)), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", read(page)):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_contributing_names_files_that_exist():
    text = read(ROOT / "CONTRIBUTING.md")
    prefixes = ("src/", "tests/", "docs/", "benchmarks/", ".ci/")
    paths = [name for name in re.findall(r"`([^`\s]+)`", text) if name.startswith(prefixes)]
    paths += [name for name in re.findall(r"`([\w.]+\.(?:md|toml|yml|py))`", text) if name != "api.py"]
    assert len(paths) > 30
    missing = [
        name for name in paths if "VERB" not in name and not (ROOT / name).exists() and name not in PLAIN
    ]
    assert not missing


# Named without a folder, because there is one in several folders.
PLAIN = ("__init__.py",)


def test_the_rooms_are_those_that_the_checker_knows():
    contract = PROJECT["tool"]["importlinter"]["contracts"][0]
    layers = [room.strip(" ()") for layer in contract["layers"] for room in layer.split("|")]
    there = {path.parent.name for path in (ROOT / "src/capibara").glob("*/__init__.py")}
    order = {room: number for number, room in enumerate(reversed(layers))}
    assert there <= set(order)
    described = re.findall(r"^\| `src/capibara/(\w+)` \|", read(ROOT / "CONTRIBUTING.md"), re.MULTILINE)
    assert described == re.findall(r"^\| `(\w+)` \| ", read(DOCS / "design.md"), re.MULTILINE)
    assert set(described) == there
    # Rooms side by side may stand in any order among themselves.
    beside = {"migrate", "native"}
    assert [room for room in described if room not in beside] == sorted(there - beside, key=order.__getitem__)


def test_every_benchmark_is_described():
    page = read(DOCS / "benchmarks.md")
    names = [path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py") if "\ndef run(" in read(path)]
    assert names
    assert [name for name in names if f"| `{name}` |" not in page] == []


def test_make_and_ci():
    targets = re.findall(r"^([a-z-]+):", read(ROOT / "Makefile"), re.MULTILINE)
    assert {"demo", "test", "test-all", "test-newest", "test-extras", "bench", "lint", "docs"} <= set(targets)
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    lines = [line.strip() for line in read(ROOT / ".ci/run").splitlines()]
    steps = [line for line in lines if line.startswith("make ")]
    checks = "make -j 2 --output-sync=target test-extras lint docs test-no-jax test-arm || failed=$?"
    assert steps == ["make setup-dev", checks, "make test-newest CAPIBARA_TEST_SAMPLE=20", "make test"]

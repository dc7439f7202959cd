"""``capibara doctor``: installed versions, devices, which implementations run and why the others do not.

Exit code 0 when everything that Capibara needs works, 1 when a required check failed. An optional package that
is missing, or an accelerator that JAX does not use, is shown but is not a failure.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from capibara.cli._json import print_json

if TYPE_CHECKING:
    from rich.table import Table

HELP = "Show what is installed, which devices are available and which implementations run."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")


def run(args: argparse.Namespace) -> int:
    facts = examine()
    if args.json:
        print_json(facts, indent=2)
    else:
        _show(facts)
    return 0 if facts["ok"] else 1


def examine() -> dict[str, Any]:
    """The whole report, ready for JSON. A part that fails is reported, and the others continue."""
    from capibara import __version__
    from capibara.measure.installation import check_installation, import_names

    report = check_installation()
    facts: dict[str, Any] = {
        "ok": report.jax_native_available,
        "capibara": __version__,
        "error_message": report.error_message,
        **report.to_dict(),
        "import_names": [vars(name) for name in import_names()],
        "backend_info": None,
        "optimization_status": None,
        "tuning": None,
    }
    if report.jax_native_available:
        _examine_overlay(facts)
    return facts


def _examine_overlay(facts: dict[str, Any]) -> None:
    try:
        import capibara.jax
        from capibara.jax import diagnostics

        report = diagnostics.check_installation()
        facts.update(report.to_dict(), ok=report.jax_native_available)
        facts["backend_info"] = capibara.jax.get_backend_info()
        facts["optimization_status"] = capibara.jax.get_optimization_status()
        facts["tuning"] = _examine_tuning()
    except Exception as error:
        # The doctor's work is to say what is broken, also when that is Capibara.
        failure = {
            "name": "operations",
            "ok": False,
            "detail": f"{type(error).__name__}: {error}",
            "remedy": "Reinstall capibara-jax",
            "required": True,
        }
        facts["checks"] = [*facts["checks"], failure]
        facts["ok"] = False
        facts["error_message"] = facts["error_message"] or f"operations: {failure['detail']}"


def _examine_tuning() -> dict[str, Any]:
    """The file of measurements: where it is, how many there are, and with which JAX they were made."""
    from capibara.ops.tuning import describe_tuning

    return describe_tuning()


def _tuning(found: dict[str, Any]) -> str:
    """The result of `_examine_tuning`, in a sentence."""
    if found["file"] is None:
        return "Tuning: switched off; every operation runs with its built-in choice"
    if not found["entries"]:
        return f"Tuning: nothing measured for {found['device']} yet; 'capibara tune' does ({found['file']})"
    older = [version for version in found["jax"] if version != found["jax_here"]]
    note = f"; measured with JAX {', '.join(older)}, here is {found['jax_here']}" if older else ""
    return (
        f"Tuning: {found['entries']} kinds of problems measured on {found['device']}, {found['faster']} with a choice "
        f"faster than the built-in one{note} ({found['file']})"
    )


def _show(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(file=sys.stdout, markup=False, highlight=False)
    console.print(Text(f"Capibara {facts['capibara']}", style="bold"), facts["python"], "on", facts["system"])
    for table in (_checks(facts), _devices(facts), _implementations(facts), _names(facts), _versions(facts)):
        if table is not None:
            console.print(table)
    if facts["optimization_status"] is not None:
        for name, why in facts["optimization_status"]["reasons"].items():
            on = facts["optimization_status"][name]
            console.print(
                Text(f"{name}: "), Text("yes" if on else "no", style="green" if on else "yellow"), why
            )
    if facts["tuning"] is not None:
        console.print(_tuning(facts["tuning"]), soft_wrap=True)
    if facts["ok"]:
        console.print(Text("Everything that Capibara needs works here.", style="bold green"))
    else:
        console.print(Text(f"Not working: {facts['error_message']}", style="bold red"))


def _table(title: str, *columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=box.SIMPLE, header_style="bold", title_style="bold cyan"
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _plain(value: object) -> Any:
    """Text shown literally: names and messages may contain what Rich would read as markup."""
    from rich.text import Text

    return Text("" if value is None else str(value))


def _checks(facts: dict[str, Any]) -> Table:
    from rich.text import Text

    table = _table("Checks", "", "check", "found", "remedy")
    for check in facts["checks"]:
        if check["ok"]:
            mark = Text("ok", style="green")
        else:
            mark = Text("FAILED", style="bold red") if check["required"] else Text("note", style="yellow")
        table.add_row(mark, _plain(check["name"]), _plain(check["detail"]), _plain(check["remedy"]))
    return table


def _devices(facts: dict[str, Any]) -> Table | None:
    if not facts["devices"]:
        return None
    table = _table("Devices", "id", "platform", "kind", "memory limit", "in use", "peak")
    for device in facts["devices"]:
        sizes = [device[f"memory_{what}_bytes"] for what in ("limit", "in_use", "peak")]
        shown = ["not reported" if size is None else f"{size / 2**30:.2f} GiB" for size in sizes]
        table.add_row(*map(_plain, (device["id"], device["platform"], device["kind"], *shown)))
    return table


def _implementations(facts: dict[str, Any]) -> Table | None:
    if facts["backend_info"] is None:
        return None
    from rich.text import Text

    table = _table(
        f"Implementations on {facts['backend_info']['name']}", "operation", "runs", "why not the others"
    )
    for name, found in facts["backend_info"]["implementations"].items():
        why = "\n".join(f"{other}: {reason}" for other, reason in found["not_chosen"].items())
        style = "yellow" if found["chosen"] == "reference" else "green"
        table.add_row(_plain(name), Text(found["chosen"], style=style), _plain(why))
    return table


def _names(facts: dict[str, Any]) -> Table:
    table = _table("Import names", "name", "answered by")
    for name in facts["import_names"]:
        if name["origin"] is None:
            who = "nobody"
        else:
            who = f"{'Capibara' if name['by_capibara'] else 'another package'}, {name['origin']}"
        table.add_row(_plain(name["name"]), _plain(who))
    return table


def _versions(facts: dict[str, Any]) -> Table:
    from rich.text import Text

    table = _table("Packages", "package", "version")
    for package, version in facts["versions"].items():
        table.add_row(
            _plain(package), Text("not installed", style="dim") if version is None else _plain(version)
        )
    return table

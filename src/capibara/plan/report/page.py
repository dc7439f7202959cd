"""A plan as a page: self-contained HTML, or the figure as PNG."""

from __future__ import annotations

import base64
import html
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from capibara.files import replace_file
from capibara.plan.errors import PlanError
from capibara.plan.report.picture import draw_plan
from capibara.plan.report.table import plan_text
from capibara.plan.report.where import where_tables

if TYPE_CHECKING:
    from capibara.plan.result import Plan

__all__ = ["write_report"]

_STYLE = """body{font-family:system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em}
pre{overflow-x:auto;background:#f6f6f6;padding:1em}img{max-width:100%}
table{border-collapse:collapse}td,th{padding:.2em .7em;border-bottom:1px solid #ddd;text-align:left}
td:nth-child(2){text-align:right;font-variant-numeric:tabular-nums}"""


def write_report(plan: Plan, path: str | os.PathLike[str]) -> Path:
    """Write ``.html`` (text, figure, the parts of the best candidate's time with their sources) or ``.png``.

    Raises:
      PlanError: the file name has another suffix, or no layout fits.
      MissingExtraError: matplotlib is not installed.
    """
    target = Path(path)
    if target.suffix.lower() not in (".html", ".png"):
        raise PlanError(f"path={str(target)!r} must end in .html or .png")
    if not plan.candidates:
        raise PlanError("the plan has no candidate to draw")
    picture = io.BytesIO()
    draw_plan(plan, picture)
    if target.suffix.lower() == ".png":
        replace_file(target, picture.getvalue())
    else:
        replace_file(target, _page(plan, picture.getvalue()))
    return target


def _where(plan: Plan) -> str:
    if plan.where is None:
        return ""
    tables = html.escape("\n".join(where_tables(plan.where)).strip("\n"))
    return f"<h2>By part of the model and source line</h2><pre>{tables}</pre>"


def _page(plan: Plan, picture: bytes) -> str:
    image = base64.b64encode(picture).decode()
    parts = "".join(
        f"<tr><td>{html.escape(part.label)}</td><td>{part.seconds:.4g} s</td><td>{html.escape(part.source)}</td></tr>"
        for part in plan.best.time.parts[:40]
    )
    unknown = "".join(f"<li>{html.escape(each)}</li>" for each in plan.best.time.unknown)
    title = html.escape(f"{plan.work} on {plan.target}")
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><pre>{html.escape(plan_text(plan, 130))}</pre>"
        f"<img alt='memory, time and mesh of the plan' src='data:image/png;base64,{image}'>"
        "<h2>Where the best candidate's time goes</h2>"
        f"<table><tr><th>part</th><th>a step</th><th>source</th></tr>{parts}</table>"
        + _where(plan)
        + (f"<h2>Not in the time</h2><ul>{unknown}</ul>" if unknown else "")
        + "</body></html>\n"
    )

"""Shows the cross-references of docstrings (``:func:`name```) as plain code on the reference pages."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):<code>(~?)([^<]*)</code>")


def _code(match: re.Match[str]) -> str:
    short, name = match.groups()
    return f"<code>{name.rpartition('.')[2] if short else name}</code>"


def on_page_content(html: str, **_: Any) -> str:
    """Called by MkDocs for every page."""
    return _ROLE.sub(_code, html)

"""Where JAX is not installed (``make test-no-jax``), the files that test against it are left out, by their imports."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_MISSING = [name for name in ("jax", "torch", "sklearn") if importlib.util.find_spec(name) is None]
_IMPORTS = re.compile(rf"^(import|from) ({'|'.join(_MISSING)})\b", re.MULTILINE) if _MISSING else None

collect_ignore = [
    path.name
    for path in Path(__file__).parent.glob("test_*.py")
    if _IMPORTS is not None and _IMPORTS.search(path.read_text(encoding="utf-8"))
]

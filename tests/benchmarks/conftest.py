"""The benchmarks are modules of the repository, not of the package: its root goes onto the import path."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

"""The command line with the tiny model in the real one's place: ``python tiny_cli.py train …``."""

import sys
import types
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tiny_model import TinyModel

import capibara.measure
from capibara.cli import main

# In place of the module, not in it: importing the real one would cost every start of a process.
core = types.ModuleType("capibara.core")
core.ModularCapibaraModel = TinyModel  # pyright: ignore[reportAttributeAccessIssue]
sys.modules["capibara.core"] = core
# The measurement takes a second of both cores; what it gives is tested where it is made.
capibara.measure.matmul_rate = lambda dtype="float32": 1e11

if __name__ == "__main__":
    sys.exit(main())

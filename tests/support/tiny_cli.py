"""The command line with the tiny model in the real one's place: ``python tiny_cli.py train …``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from tiny_model import core_with_tiny_model

import capibara.measure
from capibara.cli import main

# In place of the module, not in it: importing the real one would cost every start of a process.
sys.modules["capibara.core"] = core_with_tiny_model()
# The measurement takes a second of both cores; what it gives is tested where it is made.
capibara.measure.matmul_rate = lambda dtype="float32": 1e11

if __name__ == "__main__":
    sys.exit(main())

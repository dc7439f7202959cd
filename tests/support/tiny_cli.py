"""The command line with the tiny model in the real one's place: ``python tiny_cli.py train …``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import capibara.core
import capibara.measure
from tiny_model import TinyModel

from capibara.cli import main

capibara.core.ModularCapibaraModel = TinyModel
capibara.measure.matmul_rate = lambda dtype="float32": 1e11

if __name__ == "__main__":
    sys.exit(main())

"""ZipNN, run by an interpreter that has it: ``python _zipnn.py FILE FOLDER TYPE THREADS`` codes the bytes of a file.

It reads a letter a line, ``c`` (code) or ``d`` (decode) in memory, ``C`` to a file beside the given one or ``D`` from a
copy of it in the folder, does that, and answers with the seconds it took and the bytes that came out.
:mod:`benchmarks.compression` starts it where ``CAPIBARA_ZIPNN_PYTHON`` names such an interpreter.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time
from pathlib import Path


def main() -> None:
    path, folder, kind, threads = sys.argv[1:]
    zipnn = importlib.import_module("zipnn")
    data = Path(path).read_bytes()
    # It works in place: what it is given is taken anew each time.
    coder = zipnn.ZipNN(input_format="byte", bytearray_dtype=kind, threads=int(threads))
    coded, file, copied = b"", Path(path + ".znn"), Path(folder, kind + ".znn")
    for line in sys.stdin:
        what = line[0]
        given = bytearray(data if what in "cC" else coded)
        start = time.perf_counter()
        if what in "cC":
            made = coder.compress(given)
            if what == "C":
                file.write_bytes(made)
        else:
            made = coder.decompress(copied.read_bytes() if what == "D" else given)
        seconds = time.perf_counter() - start
        if what in "cC":
            coded = bytes(made)
            if what == "C" and not copied.exists():
                shutil.copyfile(file, copied)
                with copied.open("rb") as there:
                    os.fsync(there.fileno())  # or the system would write it while something is timed
        elif bytes(made) != data:
            raise SystemExit("what came back is not what was given")
        print(seconds, len(made), flush=True)


if __name__ == "__main__":
    main()

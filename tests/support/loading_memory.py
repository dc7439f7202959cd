"""Memory and bytes read while a folder is loaded: ``python loading_memory.py DATA MODEL FOLDER SMALL``. Prints JSON.

``DATA × MODEL`` emulated devices (1 × 1: no mesh). ``SMALL`` is a folder with the same kinds of tensors, loaded first,
so that compiled programs and imports are not counted.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import jax

from capibara.compress.container import file_bytes
from capibara.core import ModularCapibaraModel
from capibara.families import TensorFiles

watched: list[int] = []  # bytes that watching itself has read


def resident() -> int:
    """Bytes of this process that are in memory, and not pages of files."""
    with open("/proc/self/status") as status:
        text = status.read()
    watched.append(len(text))
    lines = dict(line.split(":", 1) for line in text.splitlines() if line.startswith("Rss"))
    return sum(int(lines[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem"))


def bytes_read() -> int:
    """Bytes that this process has read by system calls."""
    with open("/proc/self/io") as counts:
        return int(dict(line.split(": ") for line in counts)["rchar"])


def main(data: int, model: int, folder: str, small: str) -> dict[str, Any]:
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = None if data * model == 1 else jax.make_mesh((data, model), ("data", "model"), axis_types=auto)
    ModularCapibaraModel.from_pretrained(small, mesh=mesh)
    gc.collect()

    ranges: list[tuple[str, int, int]] = []
    real = file_bytes.FileBytes.read_into

    def counted(self: Any, out: Any, offset: int) -> None:
        ranges.append((str(self.path), offset, out.nbytes))
        real(self, out, offset)

    file_bytes.FileBytes.read_into = counted  # type: ignore[method-assign]
    before = most = resident()
    ended = threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.002):
            most = max(most, resident())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    read, begun = bytes_read() - sum(watched), time.perf_counter()
    loaded = ModularCapibaraModel.from_pretrained(folder, mesh=mesh)
    seconds, read = time.perf_counter() - begun, bytes_read() - sum(watched) - read
    ended.set()
    watcher.join()

    leaves = jax.tree.leaves(loaded.params)
    arrays = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    with TensorFiles(folder) as files:
        sizes = [stored.end - stored.start for _, stored in files.tensors.values()]
    ordered = sorted(one for one in ranges if one[1] > 8)  # without headers
    apart = all(a[0] != b[0] or a[1] + a[2] <= b[1] for a, b in pairwise(ordered))
    headers = sum(size for _, offset, size in ranges if offset <= 8)
    return {
        "arrays": arrays,
        "tensors": sum(sizes),
        "largest": max(sizes),
        "beyond": (most - before - arrays) / max(sizes),
        "apart": apart,
        "read": sum(size for _, _, size in ranges) - headers,
        "by the system": read,
        "seconds": seconds,
    }


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    print("RESULT", json.dumps(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5])))

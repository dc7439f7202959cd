"""Archives onto 2 × 4 emulated devices: ``python sharded_loading.py ARCHIVE``. Prints what was decoded, as JSON.

The archive holds ``rows`` [64, 48] in chunks of 8 rows, ``columns`` [16, 24], ``tied`` which is ``columns``, ``half``
(bfloat16 [8, 8]), ``scalar``, all counting up from 0.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.compress.codecs.protocol import CODECS
from capibara.compress.container import Archive
from capibara.compress.loading import load_sharded

SPECS = {
    "rows": P("x", "y"), "columns": P(None, ("x", "y")), "tied": P("x"), "half": P(("y", "x")), "scalar": P()
}  # fmt: skip


def main(path: str) -> None:
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    wanted = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    decoded: list[bytes] = []

    class Counting:
        """The codec, which notes every payload that it decodes."""

        def __init__(self, codec: Any) -> None:
            self.codec = codec

        def __getattr__(self, name: str) -> Any:
            found = getattr(self.codec, name)
            if not name.startswith("decode"):
                return found

            def noting(*args: Any) -> Any:
                decoded.append(bytes(next(a for a in args if isinstance(a, memoryview))))
                return found(*args)

            return noting

    CODECS["lossless"] = Counting(CODECS["lossless"])  # type: ignore[assignment]
    with Archive(path) as archive:
        seen: list[str] = []
        got = load_sharded(archive, wanted, progress=lambda name, size: seen.append(name))
        for name, array in got.items():
            assert array.sharding.is_equivalent_to(wanted[name], array.ndim), name
            expected = np.arange(array.size).reshape(array.shape)
            np.testing.assert_array_equal(np.asarray(array).astype(int), expected)
            for shard in array.addressable_shards:
                np.testing.assert_array_equal(np.asarray(shard.data).astype(int), expected[shard.index])
        assert seen == ["rows", "columns", "half", "scalar"], seen
        assert str(got["half"].dtype) == "bfloat16"
        one = load_sharded(archive, lambda name, shape: NamedSharding(mesh, P()))
        assert one["tied"] is one["columns"]
    print(json.dumps({"decoded": len(decoded), "distinct": len(set(decoded))}))


if __name__ == "__main__":
    main(sys.argv[1])

"""Moving the next items to the device while the current one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import numpy as np

from capibara.memory.errors import MemorySettingError

__all__ = ["copied_to_device", "prefetch_to_device"]

_END: Any = object()

_Item = TypeVar("_Item")


def copied_to_device(tree: _Item, sharding: Any = None) -> _Item:
    """Copies on the device.

    ``jax.device_put`` may use a NumPy array's own memory (on a CPU), or read it after it has returned (with
    ``may_alias=False``, too): a source that reuses its buffers would change what it has given. So NumPy arrays are
    copied first.
    """
    own = jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, tree)
    return jax.device_put(own, sharding)


def prefetch_to_device(
    items: Iterable[_Item],
    *,
    depth: int = 2,
    sharding: Any = None,
    reserve: Callable[[int], Any] | None = None,
) -> Generator[_Item, None, None]:
    """The items, each moved to the device before it is asked for; reading them goes on in the background, too.

    Equivalent plain JAX: ``map(jax.device_put, items)``. The order is kept, and an exception of ``items`` is raised
    where the item would have come.

    Args:
      items: pytrees of NumPy or JAX arrays.
      depth: the most items that are on the device besides the one in use; at least 1.
      sharding: as for ``jax.device_put``.
      reserve: called with the bytes of each item before it is moved, such as ``manager.reserve``.

    Raises:
      MemorySettingError: ``depth`` is not an integer from 1.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise MemorySettingError(f"depth: got {depth!r}, expected an integer from 1.")
    return _prefetch(iter(items), depth, sharding, reserve)


def _prefetch(source: Any, depth: int, sharding: Any, reserve: Any) -> Generator[Any, None, None]:
    def fetch() -> Any:
        item = next(source, _END)
        if item is _END:
            return _END
        if reserve is not None:
            reserve(sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(item)))
        return copied_to_device(item, sharding)

    with ThreadPoolExecutor(1, thread_name_prefix="capibara-feed") as worker:
        coming: deque[Future[Any]] = deque(worker.submit(fetch) for _ in range(depth))
        try:
            while (item := coming.popleft().result()) is not _END:
                coming.append(worker.submit(fetch))
                yield item
        finally:
            for future in coming:
                future.cancel()

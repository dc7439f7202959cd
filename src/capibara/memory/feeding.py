"""Moving the next items to the device while the current one is used."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from capibara.memory.errors import MemorySettingError

__all__ = ["bytes_on_a_device", "checked_depth", "copied_to_device", "prefetch_to_device"]

_END: Any = object()

_Item = TypeVar("_Item")


def copied_to_device(tree: _Item, sharding: Any = None) -> _Item:
    """Copies on the device.

    ``jax.device_put`` may use a NumPy array's own memory (on a CPU), or read it after it has returned (with
    ``may_alias=False``, too): a source that reuses its buffers would change what it has given. So NumPy arrays are
    copied first; and so are JAX arrays, of which it may return an alias that is deleted together with them.
    """
    own = jax.tree.map(_copied, tree)
    if sharding is not None:
        return jax.device_put(own, sharding)
    # Copies are where the arrays are: device_put without a place would gather sharded random keys on one device.
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else jax.device_put(leaf), own)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return np.array(leaf)
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def bytes_on_a_device(tree: Any, sharding: Any = None) -> int:
    """Bytes that copies of arrays take on one device: of a sharded array its largest part, not the whole.

    Args:
      tree: a pytree of NumPy or JAX arrays.
      sharding: of the copies, as for ``jax.device_put``.
    """
    leaves, structure = jax.tree.flatten(tree)
    if sharding is None or isinstance(sharding, Sharding | jax.Device):
        places = [sharding] * len(leaves)
    else:
        whole = jax.tree.broadcast(sharding, tree, is_leaf=lambda one: one is None)
        places = structure.flatten_up_to(whole)
    return sum(map(_part, leaves, places))


def _part(leaf: Any, place: Any) -> int:
    array = jax.random.key_data(leaf) if isinstance(leaf, jax.Array) and _is_key(leaf) else leaf
    size, shape = getattr(array, "nbytes", 0), getattr(leaf, "shape", ())
    place = getattr(place, "sharding", place)  # of a jax.experimental.layout.Format
    if place is None:
        place = getattr(leaf, "sharding", None)
    if not size or not isinstance(place, Sharding):
        return size
    return size * math.prod(place.shard_shape(shape)) // max(1, math.prod(shape))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


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
      reserve: called with the bytes that each item takes on one device before it is moved, such as ``manager.reserve``.

    Raises:
      MemorySettingError: ``depth`` is not an integer from 1.
    """
    return _prefetch(iter(items), checked_depth(depth), sharding, reserve)


def checked_depth(depth: Any) -> int:
    """How many items ahead.

    Raises:
      MemorySettingError: it is not an integer from 1.
    """
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
        raise MemorySettingError(f"depth: got {depth!r}, expected an integer from 1.")
    return depth


def _prefetch(source: Any, depth: int, sharding: Any, reserve: Any) -> Generator[Any, None, None]:
    def fetch() -> Any:
        item = next(source, _END)
        if item is _END:
            return _END
        if reserve is not None:
            reserve(bytes_on_a_device(item, sharding))
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

"""What holds a device's memory: the largest live arrays, with the variables that they are reachable from.

"Out of memory" is only useful together with who took it. Arrays are grouped by dtype and shape; names come from the
local and global variables of the functions that run now, and of the objects in them, one level deep. An array that is
reachable in another way only (a closure, a library's cache) has no name, and is listed all the same.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from capibara.measure.sizes import size_text

__all__ = ["Holder", "memory_holders"]

# Containers and other values of a variable that are looked into.
_MAX_PARTS = 100_000
_MAX_NAMES = 2


@dataclass(frozen=True)
class Holder:
    """Live arrays of one dtype and shape.

    Attributes:
      what: ``"8 × float32[1024, 1024]"``.
      size: bytes on the device, of all of them.
      names: where some of them are: ``"params['w'] in train (train.py:12)"``.
    """

    what: str
    size: int
    names: tuple[str, ...]

    def __str__(self) -> str:
        where = ", ".join(self.names) if self.names else "no variable of a running function holds it"
        return f"{size_text(self.size)}: {self.what} ({where})"


def memory_holders(
    device: Any, *, most: int = 5, label: Callable[[Any], str | None] | None = None
) -> tuple[Holder, ...]:
    """The largest groups of live arrays on a device.

    Args:
      device: a ``jax.Device``.
      most: number of groups.
      label: names an array that has an owner, such as a cache; None for others.
    """
    import jax

    # Arrays by where they are: several may share a buffer.
    groups: dict[str, dict[Any, list[Any]]] = {}
    sizes: dict[str, int] = {}
    kinds: dict[Any, str] = {}
    for array in jax.live_arrays():
        try:
            devices = array.sharding.device_set
            if device not in devices or array.is_deleted() or not array.size:
                continue
            # Not its parts: JAX makes these when asked for, and not safely beside threads that read the same array.
            place = array.unsafe_buffer_pointer() if len(devices) == 1 else ("several devices", id(array))
            size = array.nbytes // array.size * math.prod(array.sharding.shard_shape(array.shape))
        except Exception:
            # Deleted meanwhile, or without an address: an array less must not hide the error that is told.
            continue
        kind = kinds.setdefault(place, f"{array.dtype.name}{list(array.shape)}")
        places = groups.setdefault(kind, {})
        if place not in places:
            sizes[kind] = sizes.get(kind, 0) + size
        places.setdefault(place, []).append(array)
    largest = sorted(groups, key=lambda kind: -sizes[kind])[:most]
    names = _names({id(array) for kind in largest for arrays in groups[kind].values() for array in arrays})
    holders = []
    for kind in largest:
        found: dict[str, None] = {}
        for arrays in groups[kind].values():
            owners = [name for array in arrays if label is not None and (name := label(array))]
            known = owners or [names[id(array)] for array in arrays if id(array) in names]
            if known:
                found.setdefault(known[0])
        shown = tuple(found)[:_MAX_NAMES]
        if len(found) > _MAX_NAMES:
            shown += (f"{len(found) - _MAX_NAMES} more",)
        holders.append(Holder(f"{len(groups[kind])} × {kind}", sizes[kind], shown))
    return tuple(holders)


def _names(wanted: set[int]) -> dict[int, str]:
    """A name of each object by its ``id``: the first among the variables of the functions that run, innermost first."""
    names: dict[int, str] = {}
    done: set[int] = set()
    # Plain dicts of variables are looked at once each, though many functions share their module's.
    for frame in _frames():
        code = frame.f_code
        if code.co_filename == __file__:
            continue
        module = frame.f_locals is frame.f_globals
        place = f"{code.co_name} ({code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno})"
        if not module:
            _note(frame.f_locals, f" in {place}", wanted, names)
        if id(frame.f_globals) not in done:
            done.add(id(frame.f_globals))
            _note(frame.f_globals, f" of module {frame.f_globals.get('__name__')}", wanted, names)
    return names


def _frames() -> Iterator[Any]:
    for frame in sys._current_frames().values():
        inner = frame
        while inner is not None:
            yield inner
            inner = inner.f_back


def _note(variables: Mapping[str, Any], place: str, wanted: set[int], names: dict[int, str]) -> None:
    for name, value in list(variables.items()):
        for path, leaf in _reachable(value):
            if id(leaf) in wanted:
                names.setdefault(id(leaf), f"{name}{path}{place}")


def _reachable(value: Any) -> Iterator[tuple[str, Any]]:
    """Arrays of a variable: itself, leaves of a pytree, attributes of an object, and leaves of those."""
    import jax

    if isinstance(value, jax.Array):
        yield "", value
        return
    if isinstance(value, ModuleType | type):
        return
    yield from _leaves(value, "")
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        for name, inner in list(attributes.items()):
            yield from _leaves(inner, f".{name}")


def _leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    import jax

    if not isinstance(value, jax.Array | dict | list | tuple) and not hasattr(value, "__dataclass_fields__"):
        return
    # Each container once: what shares its parts again and again, or holds itself, has no end of leaves.
    waiting: list[tuple[str, Any]] = [(prefix, value)]
    seen: dict[int, Any] = {}  # kept, so that no other object has the id of one that is gone
    while waiting and len(seen) < _MAX_PARTS:
        path, part = waiting.pop()
        if isinstance(part, jax.Array):
            yield path, part
            continue
        if isinstance(part, Iterator | str | bytes | int | float) or id(part) in seen:
            continue
        seen[id(part)] = part
        root = iter([False])
        try:
            inner = jax.tree_util.tree_leaves_with_path(part, is_leaf=lambda _, root=root: next(root, True))
        except Exception:
            # A container of the user's that cannot be flattened (unsortable keys) must not hide the error that is told.
            continue
        waiting.extend((path + jax.tree_util.keystr(keys), each) for keys, each in reversed(inner))

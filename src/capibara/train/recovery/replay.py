"""One step computed twice, to find a device that computes wrongly without saying so.

Cores that return wrong results now and then, silently, are found in every large fleet (Hochschild et al., "Cores that
don't count", HotOS 2021; Dixit et al., "Silent data corruptions at scale", arXiv:2102.11245). The same program on the
same numbers gives the same bits on one device, so a difference is a fault; and copies of one array on several devices
have to be equal. What is compared is a sum over the bits of each device's part, weighted by odd numbers, so that a
change of any one number changes it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.train.errors import CorruptionError
from capibara.train.processes import Processes
from capibara.train.state import TrainState

__all__ = ["fingerprints", "replayed"]

_WIDTHS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}


@jax.jit
def _fingerprint(array: jax.Array) -> jax.Array:
    """uint32: the bits of all numbers, each times an odd number, summed modulo 2**32."""
    if array.dtype == jnp.bool_:
        array = array.astype(jnp.uint8)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag])
    if array.dtype.itemsize < 1 or jnp.dtype(array.dtype).name in ("int4", "uint4", "int2", "uint2"):
        array = array.astype(jnp.int8)
    bits = jax.lax.bitcast_convert_type(array, _WIDTHS[array.dtype.itemsize]).reshape(-1).astype(jnp.uint32)
    place = jnp.arange(bits.size, dtype=jnp.uint32)
    return jnp.sum(bits * (place * jnp.uint32(2654435761) * 2 + 1), dtype=jnp.uint32)


def fingerprints(tree: Any) -> dict[tuple[str, str, str], int]:
    """One number for the part of each array that each device of this process holds.

    Args:
      tree: a pytree of ``jax.Array``.

    Returns:
      ``(path, place in the array, device)`` → a sum over the bits.
    """
    found: dict[tuple[str, str, str], Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        for shard in leaf.addressable_shards:
            if shard.data.size:
                key = (jax.tree_util.keystr(path), str(shard.index), str(shard.device))
                found[key] = _fingerprint(shard.data)
    return {key: int(np.asarray(value)) for key, value in found.items()}


def replayed(
    train_step: Callable[..., tuple[TrainState, Any]], state: TrainState, batch: Any, *, step: int
) -> tuple[TrainState, Any]:
    """A step, computed twice; needs room for the state once more.

    Args:
      train_step: may donate the state. step: its number, for the message.

    Raises:
      CorruptionError: the results differ; ``devices`` names those on which they do.
    """
    first, _ = train_step(jax.tree.map(jnp.copy, state), batch)
    before = fingerprints(first)
    del first
    after, metrics = train_step(state, batch)
    now = fingerprints(after)
    again = {key for key, value in now.items() if before.get(key) != value}
    found = None
    if again:
        found = [_words(step, "was computed twice, and the results differ", again), _devices(again)]
    elif odd := _odd_copies(now):
        found = [_words(step, "left copies of one array that differ between devices", odd), _devices(odd)]
    # Each process sees its own devices, and all have to go back.
    if said := [one for one in Processes.here().all_say(found) if one is not None]:
        devices = sorted({device for _, names in said for device in names})
        raise CorruptionError(said[0][0], devices=tuple(devices))
    return after, metrics


def _odd_copies(found: dict[tuple[str, str, str], int]) -> set[tuple[str, str, str]]:
    """Of copies of one part of an array, those that differ from most; of two, both."""
    copies: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for (path, place, device), value in found.items():
        copies[path, place][device] = value
    odd = set()
    for (path, place), values in copies.items():
        counts = Counter(values.values())
        if len(counts) == 1:
            continue
        ((common, times), (_, second)) = counts.most_common(2)
        odd |= {(path, place, d) for d, value in values.items() if value != common or times == second}
    return odd


def _devices(keys: set[tuple[str, str, str]]) -> tuple[str, ...]:
    return tuple(sorted({device for _, _, device in keys}))


def _words(step: int, what: str, keys: set[tuple[str, str, str]]) -> str:
    devices = _devices(keys)
    path = min(path for path, _, _ in keys)
    where = f"{len({path for path, _, _ in keys})} arrays, the first {path}"
    return (
        f"step {step:,} {what}, on {', '.join(devices[:8])}{' …' if len(devices) > 8 else ''} ({where}). A device or "
        "its memory may be faulty. If its programs never give the same bits twice, pass recovery.replay_every=0."
    )

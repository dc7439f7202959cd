"""Programs over four devices that exchange more than they need, and the same programs that do not.

For a process of its own, with emulated devices: ``python planted_exchanges.py`` prints a verdict of each.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from planted_faults import Pair, Planted, Work, normal
from planted_verdicts import Verdict, f1, gain_error, judged

DEVICES = 4


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:DEVICES]), ("d",))


def put(x: Any, *spec: str | None) -> jax.Array:
    return jax.device_put(x, NamedSharding(mesh(), P(*spec)))


def turns(step: Callable[..., jax.Array], first: jax.Array, *rest: jax.Array, times: int = 8) -> Work:
    def work() -> jax.Array:
        carry = first
        for _ in range(times):
            carry = step(carry, *rest)
        return carry

    return work


def over(function: Callable[..., Any], inside: tuple[P, ...], out: P) -> Callable[..., Any]:
    return jax.jit(jax.shard_map(function, mesh=mesh(), in_specs=inside, out_specs=out, check_vma=False))


def gradients_summed_of_each_example(size: int) -> Pair:
    """Eight all-reduces in each step, where one that follows is as good; here it is none, as for one device each."""
    x, w = put(normal(8, 64, size, seed=1), None, "d"), put(normal(size, size))

    def step(each: bool, w: jax.Array, x: jax.Array) -> jax.Array:
        def add(one: jax.Array, at: jax.Array) -> tuple[jax.Array, None]:
            gradient = jnp.tanh(x[at] @ w).T @ x[at]
            return one + (jax.lax.pmean(gradient, "d") if each else gradient), None

        return w - 1e-3 * jax.lax.scan(add, jnp.zeros_like(w), jnp.arange(8))[0]

    specs = (P(), P(None, "d")), P()
    faulty, healthy = (turns(over(partial(step, each), *specs), w, x, times=3) for each in (True, False))
    return Pair(faulty, healthy, same=False)


def weights_gathered_for_each_step(size: int) -> Pair:
    """They would fit into each device."""
    x = put(normal(64, size, seed=1), "d")
    w = normal(4, size, size)
    step = jax.jit(lambda x, w: jax.lax.scan(lambda h, one: (jnp.tanh(h @ one), None), x, w)[0])

    def gathered(x: jax.Array, w: jax.Array) -> jax.Array:
        def layer(h: jax.Array, one: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(h @ jax.lax.all_gather(one, "d", tiled=True)), None

        return jax.lax.scan(layer, x, w)[0]

    return Pair(
        turns(over(gathered, (P("d"), P(None, "d")), P("d")), x, put(w, None, "d")), turns(step, x, put(w))
    )


def rows_and_columns_by_turns(size: int) -> Pair:
    """Element-wise work needs no other layout."""
    x = put(normal(4 * size, size), "d")

    def layer(moved: bool, x: jax.Array) -> jax.Array:
        if moved:
            x = jnp.tanh(jax.lax.all_to_all(x, "d", 1, 0, tiled=True))
            return jnp.tanh(jax.lax.all_to_all(x, "d", 0, 1, tiled=True))
        return jnp.tanh(jnp.tanh(x))

    faulty, healthy = (turns(over(partial(layer, moved), (P("d"),), P("d")), x) for moved in (True, False))
    return Pair(faulty, healthy)


def a_sum_that_each_device_needs_a_part_of(size: int) -> Pair:
    """The whole is on all devices after each step, and each goes on with its own rows."""
    x = put(normal(4 * size, size), "d")

    def step(whole: bool, x: jax.Array) -> jax.Array:
        scaled = x * jnp.float32(0.5)
        if whole:
            place = jax.lax.axis_index("d")
            every = jax.lax.all_gather(scaled, "d", tiled=True)
            scaled = jax.lax.dynamic_slice_in_dim(every, place * size, size)
        return jnp.tanh(scaled) + x

    faulty, healthy = (turns(over(partial(step, whole), (P("d"),), P("d")), x) for whole in (True, False))
    return Pair(faulty, healthy)


EXCHANGES = (
    Planted("communication", gradients_summed_of_each_example, (384, 512, 768)),
    Planted("communication", weights_gathered_for_each_step, (384, 512, 768)),
    Planted("communication", rows_and_columns_by_turns, (512, 768, 1024)),
    Planted("communication", a_sum_that_each_device_needs_a_part_of, (512, 768, 1024)),
)


def main() -> None:
    for planted in EXCHANGES:
        pair = planted.make(planted.sizes[0])
        if pair.same:
            np.testing.assert_allclose(
                np.asarray(pair.faulty()), np.asarray(pair.healthy()), rtol=1e-3, atol=1e-4
            )
    verdicts: list[Verdict] = [judged(planted, size) for planted in EXCHANGES for size in planted.sizes]
    said = [
        (
            one.planted.name,
            one.size,
            sorted(one.found),
            sorted(one.alarms),
            one.predicted,
            one.measured,
        )
        for one in verdicts
    ]
    print("RESULT" + json.dumps({"f1": f1(verdicts), "error": gain_error(verdicts), "verdicts": said}))


if __name__ == "__main__":
    main()

"""Scans against lax.scan, lax.associative_scan and the step-by-step state-space recurrence.

``parallel_scan`` is measured as it runs here and as the composition that accelerators get, on a step whose coefficients
differ at each position and on one with the same coefficient for each channel everywhere (which has half as much to
read); a plain ``a * x + 1`` over the same arrays is the limit that memory sets.

Both sides run with freed memory kept, as all benchmarks do when ``python -m benchmarks`` runs them and as ``capibara
train`` does (:mod:`capibara.train.memory`): every call returns arrays of 32 MiB, and where the C library hands such
buffers back to the operating system, mapping and zeroing their pages anew takes longer than any form of the scan.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np


def run(rounds: int = 9) -> list[dict[str, Any]]:
    """Rows of ratios: time of the peer / time of Capibara, so that above 1 Capibara is the faster."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from capibara.measure import interleaved
    from capibara.ops.scan import parallel_scan, selective_scan
    from capibara.ops.scan.specs import PARALLEL, SPECS, arguments
    from capibara.ops.tagged import tagged

    rng = np.random.default_rng(0)
    rows: list[dict[str, Any]] = []

    def compare(what: str, shape: tuple[int, ...], sides: dict[str, Callable[[], Any]]) -> None:
        table = interleaved(sides, rounds, 2)
        print(f"{what} {shape}\n{table}\n")
        mine, *others = sides
        rows.extend(
            {
                "what": what,
                "shape": "×".join(map(str, shape)),
                "milliseconds": table[mine].median * 1e3,
                "peer": peer,
                "peer_milliseconds": table[peer].median * 1e3,
                "ratio": table.ratio(peer, mine),
            }
            for peer in others
        )

    def step(h: Any, ax: Any) -> tuple[Any, Any]:
        h = ax[0] * h + ax[1]
        return h, h

    def associative(f: Any, init: Any, xs: Any) -> tuple[Any, Any]:
        del f

        def join(one: Any, then: Any) -> Any:
            return one[0] * then[0], then[0] * one[1] + then[1]

        a, x = xs
        h = lax.associative_scan(join, (a, x.at[0].add(a[0] * init)))[1]
        return h[-1], h

    def affine(f: Any, init: Any, xs: Any) -> tuple[Any, Any]:
        return parallel_scan(f, init, xs, implementation="affine")

    scans = {
        "capibara": parallel_scan,
        "the composition (affine)": affine,
        "lax.scan": lax.scan,
        "lax.associative_scan": associative,
    }

    def bound(function: Any, *arrays: Any) -> Callable[[], Any]:
        compiled = jax.jit(function)
        return lambda: compiled(*arrays)

    large = tagged(PARALLEL, "large")
    for shape in [(spec.steps, spec.rows, spec.width) for spec in large if not spec.matrix]:
        a = jnp.asarray(rng.uniform(0.5, 1, shape), jnp.float32)
        x = jnp.asarray(rng.normal(size=shape), jnp.float32)
        init = jnp.zeros(shape[1:])
        sides = {
            name: bound(lambda a, x, scan=scan, init=init: scan(step, init, (a, x)), a, x)
            for name, scan in scans.items()
        }
        compare(
            "parallel_scan, diagonal",
            shape,
            {**sides, "memory (a * x + 1)": bound(lambda a, x: a * x + 1, a, x)},
        )
        sides = {
            name: bound(
                jax.grad(
                    lambda a, x, scan=scan, init=init: jnp.sum(scan(step, init, (a, x))[1] ** 2), (0, 1)
                ),
                a,
                x,
            )
            for name, scan in scans.items()
        }
        compare("parallel_scan, diagonal, with gradient", shape, sides)

        def decay(h: Any, x: Any, a: Any = a[0]) -> tuple[Any, Any]:
            h = a * h + x
            return h, h

        sides = {
            name: bound(lambda x, scan=scans[name], init=init, step=decay: scan(step, init, x), x)
            for name in ("capibara", "the composition (affine)", "lax.scan")
        }
        everywhere = bound(lambda x, a=a[0]: a * x + 1, x)
        compare("parallel_scan, one decay", shape, {**sides, "memory (a * x + 1)": everywhere})

    spec = next(spec for spec in large if spec.matrix)
    shape = (spec.steps, spec.width)
    mix = jnp.asarray(np.linalg.qr(rng.normal(size=(spec.width, spec.width)))[0], jnp.float32)
    x = jnp.asarray(rng.normal(size=shape), jnp.float32)

    def dense(h: Any, x: Any) -> tuple[Any, Any]:
        h = h @ mix + x
        return h, h

    sides = {
        name: bound(lambda x, scan=scans[name]: scan(dense, x[0], x), x) for name in ("capibara", "lax.scan")
    }
    compare("parallel_scan, one matrix", shape, sides)

    spec = next(spec for spec in tagged(SPECS, "large") if spec.name == "long")
    inputs = [jnp.asarray(v, jnp.float32) for v in arguments(spec, rng)[0]]
    ways = {"capibara": "auto", "one position at a time": "reference"}
    shape = (spec.batch, spec.length, spec.heads, spec.width, spec.states)
    sides = {
        name: bound(lambda *v, way=way: selective_scan(*v, implementation=way), *inputs)
        for name, way in ways.items()
    }
    compare("selective_scan", shape, sides)
    sides = {
        name: bound(
            jax.grad(lambda *v, way=way: jnp.sum(selective_scan(*v, implementation=way)[0] ** 2), range(5)),
            *inputs,
        )
        for name, way in ways.items()
    }
    compare("selective_scan, with gradient", shape, sides)
    return rows


if __name__ == "__main__":
    from capibara.train.memory import keep_freed_memory

    keep_freed_memory()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    for row in run(parser.parse_args().rounds):
        print(row)

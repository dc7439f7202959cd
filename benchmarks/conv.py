"""Convolutions of images against lax.conv, in the default choice and with Winograd's algorithm asked for.

float32, the large shapes of ``capibara.ops.conv.specs``, timed in alternation in one process. Where ``"auto"`` takes
XLA's convolution it is the same program as the peer's, and the ratio shows how far measurements differ by chance.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import numpy as np

__all__ = ["run"]

PEER = "lax.conv_general_dilated"


def run(rounds: int = 15) -> list[dict[str, Any]]:
    """Rows of ratios: time of the peer / time of Capibara, so that above 1 Capibara is the faster."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    from capibara.measure import interleaved
    from capibara.ops import explain
    from capibara.ops.conv import winograd_conv2d
    from capibara.ops.conv.specs import SPECS
    from capibara.ops.tagged import tagged

    rows = []
    for spec in tagged(SPECS, "large"):
        rng = np.random.default_rng(0)
        x = jnp.asarray(rng.normal(size=spec.inputs), jnp.float32)
        w = jnp.asarray(rng.normal(size=spec.filters) / np.sqrt(np.prod(spec.filters[:3])), jnp.float32)
        step = spec.options.get("strides", 1)
        plain = partial(
            lax.conv_general_dilated,
            window_strides=(step, step) if isinstance(step, int) else step,
            padding=spec.options.get("padding", "SAME"),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        ours = partial(winograd_conv2d, **spec.options)
        sides = {"capibara": ours, PEER: plain}
        if spec.applies:
            sides["winograd"] = partial(ours, implementation="winograd")
        compiled = {name: jax.jit(side) for name, side in sides.items()}

        def pulled(side: Any, x: Any, w: Any) -> Any:
            y, pull = jax.vjp(side, x, w)
            return y, pull(y)

        both = {name: jax.jit(partial(pulled, side)) for name, side in sides.items()}
        exact = jax.jit(partial(plain, precision="highest"))
        with jax.enable_x64(True):
            wanted = np.asarray(exact(x.astype(jnp.float64), w.astype(jnp.float64)))
        for what, programs in (("forward", compiled), ("forward + backward", both)):
            table = interleaved({name: partial(program, x, w) for name, program in programs.items()}, rounds)
            print(f"{spec.name}, {what}\n{table}\n")
            for name in programs:
                if name == PEER:
                    continue
                rows.append(
                    {
                        "what": f"convolution, {what} ({spec.name}{', winograd' if name == 'winograd' else ''})",
                        "shape": " × ".join(map(str, spec.inputs)),
                        "implementation": name
                        if name == "winograd"
                        else explain(winograd_conv2d, x, w, **spec.options).chosen,
                        "largest_error": float(np.abs(np.asarray(compiled[name](x, w)) - wanted).max()),
                        "peer_error": float(np.abs(np.asarray(compiled[PEER](x, w)) - wanted).max()),
                        "ours_ms": 1e3 * statistics.median(table[name].seconds),
                        "peer": PEER,
                        "peer_ms": 1e3 * statistics.median(table[PEER].seconds),
                        "ratio": table.ratio(PEER, name),
                    }
                )
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    for row in run(parser.parse_args().rounds):
        print(row)

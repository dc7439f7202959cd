"""Fourier transforms, complex and real, against ``jax.numpy.fft`` on this machine's CPU.

float32, the large shapes of ``capibara.ops.fft.specs``, timed in alternation in one process. ``"auto"`` on a CPU is
``jax.numpy.fft``: those rows say what the function around it costs. The others are its form as matrix products.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

__all__ = ["run"]

PEER = "jax.numpy.fft"


def run(rounds: int = 9) -> list[dict[str, Any]]:
    """Rows of ratios: time of the peer / time of Capibara, so that above 1 Capibara is the faster."""
    import jax
    import jax.numpy as jnp

    from capibara.measure import interleaved
    from capibara.ops import explain
    from capibara.ops.fft import radix_optimized_fft
    from capibara.ops.fft.specs import SPECS
    from capibara.ops.tagged import tagged

    rows = []
    rng = np.random.default_rng(0)
    for spec in tagged(SPECS, "large"):
        numbers = rng.normal(size=(2, *spec.shape)).astype(np.float32)
        for real in (False, True):
            x = jnp.asarray(numbers[0] if real else numbers[0] + 1j * numbers[1])
            plain = jnp.fft.rfftn if real else jnp.fft.fftn
            forms = {
                PEER: jax.jit(lambda x, f=plain, axes=spec.axes: f(x, axes=axes)),
                **{
                    name: jax.jit(
                        lambda x, name=name, real=real, options=spec.options: radix_optimized_fft(
                            x, real=real, implementation=name, **options
                        )
                    )
                    for name in ("auto", "matmul")
                },
            }
            want = np.asarray(forms[PEER](x))
            for name, form in forms.items():
                if np.abs(np.asarray(form(x)) - want).max() > 1e-5 * np.abs(want).max():
                    raise RuntimeError(f"{name} computes something else than {PEER}: {spec.name}")
            sides = {name: (lambda form=form, x=x: form(x)) for name, form in forms.items()}
            table = interleaved(sides, rounds)
            what = "real" if real else "complex"
            print(f"{what} transform, {spec.name}\n{table}\n")
            chosen = explain(radix_optimized_fft, x, real=real, **spec.options).chosen
            rows += [
                {
                    "what": f"{what} transform ({spec.name}), {name}",
                    "shape": " × ".join(str(n) for n in spec.shape),
                    "implementation": chosen if name == "auto" else name,
                    "ours_ms": 1e3 * statistics.median(table[name].seconds),
                    "peer": PEER,
                    "peer_ms": 1e3 * statistics.median(table[PEER].seconds),
                    "ratio": table.ratio(PEER, name),
                }
                for name in ("auto", "matmul")
            ]
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    for row in run(parser.parse_args().rounds):
        print(row)

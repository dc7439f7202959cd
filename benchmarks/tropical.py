"""Max-plus matrix products against PyTorch, Numba, tropical-gemm and JAX, and against what the cores can do.

float32, 1024³: 2 · 1024³ operations, an addition and a maximum each. The right operand of the plain JAX form is
transposed, which is the form that XLA's CPU compiler makes fast. Peers that are not installed are left out, and named.

The last rows compare with loops that read no memory: on every core additions and maxima of registers, as many as
there are operations in the product. Additions and floating-point maxima may compete for the same units; the two other
loops take the maxima of the same bits as integers, and the sum as a fused ``x * 1 + y``, which is what the native
kernel does with 256-bit and with 512-bit vectors (see ``tropical_kernels.cc``).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from capibara.ops.tagged import tagged
from capibara.ops.tropical.specs import SPECS

__all__ = ["run"]

(SPEC,) = tagged(SPECS, "large")
SIZE = SPEC.a[-1]
OPERATIONS = 2 * SIZE**3
LOOPS = (
    "loop of float additions and float maxima",
    "loop of float additions and integer maxima",
    "loop of fused x * 1 + y and float maxima",
)

_LOOP = """
#include <stdint.h>
#include <thread>
#include <vector>
#ifdef __AVX512F__
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif
typedef float V __attribute__((vector_size(kLanes * 4)));
typedef int32_t I __attribute__((vector_size(kLanes * 4)));
// Ten independent maxima an iteration. The empty asm hides that x + y is the same every time, and keeps each maximum.
template <int kKind> static void loop(int64_t iterations, float* sink) {
  V best[10], x, y, one;
  for (int r = 0; r < kLanes; ++r) x[r] = sink[r], y[r] = sink[r + kLanes], one[r] = 1;
  asm volatile("" : "+v"(one));
#pragma GCC unroll 10
  for (int r = 0; r < 10; ++r) best[r] = x;
  for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 10
    for (int r = 0; r < 10; ++r) {
      asm volatile("" : "+v"(x));
      V term = kKind == 2 ? x * one + y : x + y;
      asm volatile("" : "+v"(term));
      if (kKind == 1) {
        const I a = (I)term, b = (I)best[r];
        best[r] = (V)(a > b ? a : b);
      } else {
        best[r] = term > best[r] ? term : best[r];
      }
      asm volatile("" : "+v"(best[r]));
    }
  }
#pragma GCC unroll 10
  for (int r = 0; r < 10; ++r) x += best[r];
  for (int r = 0; r < kLanes; ++r) sink[r] = x[r];
}
extern "C" void add_max(int kind, int threads, int64_t operations) {
  std::vector<std::thread> crew;
  const int64_t iterations = operations / (2 * 10 * kLanes) / threads;
  for (int i = 0; i < threads; ++i)
    crew.emplace_back([=] {
      float sink[2 * kLanes] = {1, 2, 3};
      (kind == 0 ? loop<0> : kind == 1 ? loop<1> : loop<2>)(iterations, sink);
    });
  for (auto& one : crew) one.join();
}
"""


def _loops(folder: Path) -> dict[str, Callable[[], Any]]:
    """The loops, compiled; none where there is no compiler for x86-64."""
    compiler = next((c for c in ("g++", "clang++") if shutil.which(c)), None)
    if compiler is None or os.uname().machine != "x86_64":
        print("left out: the loops of additions and maxima (no g++ or clang++, or not x86-64)")
        return {}
    source, made = folder / "add_max.cc", folder / "add_max.so"
    source.write_text(_LOOP, encoding="utf-8")
    command = [compiler, "-O3", "-march=native", "-shared", "-fPIC", "-pthread", "-o", made, source]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(made))
    threads = len(os.sched_getaffinity(0))
    call = library.add_max
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    return {name: lambda kind=kind: call(kind, threads, OPERATIONS) for kind, name in enumerate(LOOPS)}


def _numba_form() -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The fastest of the forms tried: four steps of the depth at once, so that a result is loaded once for four."""
    numba = importlib.import_module("numba")

    @numba.njit(parallel=True)
    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        rows, depth = a.shape
        columns = b.shape[1]
        out = np.full((rows, columns), np.float32(-np.inf), a.dtype)
        for part in numba.prange(rows // 4):
            for k in range(0, depth, 4):
                b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
                for i in range(4 * part, 4 * part + 4):
                    now = out[i]
                    x0, x1, x2, x3 = a[i, k], a[i, k + 1], a[i, k + 2], a[i, k + 3]
                    for j in range(columns):
                        four = max(max(x0 + b0[j], x1 + b1[j]), max(x2 + b2[j], x3 + b3[j]))
                        now[j] = max(now[j], four)
        return out

    return product


def _peers(a: np.ndarray, b: np.ndarray) -> dict[str, Callable[[], np.ndarray]]:
    peers: dict[str, Callable[[], np.ndarray]] = {}
    for name in ("numba", "tropical_gemm", "torch"):
        if importlib.util.find_spec(name) is None:
            print(f"left out: {name} (not installed)")
    if importlib.util.find_spec("numba") is not None:
        form = _numba_form()
        peers["numba, parallel"] = lambda: form(a, b)
    if importlib.util.find_spec("tropical_gemm") is not None:
        gemm = importlib.import_module("tropical_gemm")
        peers["tropical-gemm"] = lambda: gemm.maxplus_matmul_2d(a, b)
    return peers


def _jax_peers(a: Any, b: Any) -> dict[str, Callable[[], Any]]:
    import jax
    import jax.numpy as jnp

    naive = jax.jit(lambda a, b: jnp.max(a[:, :, None] + b[None], 1))
    transposed = jax.jit(lambda a, b: jnp.max(a[:, None, :] + b.T[None], -1))
    return {
        "jnp, B transposed": lambda: transposed(a, b),
        "jnp, naive": lambda: naive(a, b),
    }


def _torch_naive(a: np.ndarray, b: np.ndarray) -> dict[str, Callable[[], Any]]:
    if importlib.util.find_spec("torch") is None:
        return {}
    torch = importlib.import_module("torch")
    left, right = torch.from_numpy(a), torch.from_numpy(b)
    return {"PyTorch, naive": lambda: (left[:, :, None] + right[None]).amax(1).numpy()}


def run(rounds: int = 9) -> list[dict[str, Any]]:
    """Rows of ratios: time of the peer / time of Capibara, so that above 1 Capibara is the faster."""
    import jax
    import jax.numpy as jnp

    from capibara import native
    from capibara.measure import interleaved
    from capibara.ops import explain
    from capibara.ops.tropical import matmul

    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=shape).astype(np.float32) for shape in (SPEC.a, SPEC.b))
    left, right = jnp.asarray(a), jnp.asarray(b)
    below = -jnp.abs(left), -jnp.abs(right)  # of the shortest paths' kind: every sum has one sign
    chosen = explain(matmul, left, right).chosen

    def ours(*arrays: jax.Array, **options: Any) -> Callable[[], Any]:
        product = jax.jit(lambda a, b: matmul(a, b, **options))
        return lambda: product(*arrays)

    rows: list[dict[str, Any]] = []

    def compare(
        what: str, sides: dict[str, Callable[[], Any]], rounds: int, implementation: str, warmup: int = 2
    ) -> None:
        table = interleaved(sides, rounds, warmup)
        print(f"{what}\n{table}\n")
        mine, *others = sides
        rows.extend(
            {
                "what": what,
                "shape": f"{SIZE}³",
                "implementation": implementation,
                "gops": OPERATIONS / table[mine].median / 1e9,
                "peer": peer,
                "peer_gops": OPERATIONS / table[peer].median / 1e9,
                "ratio": table.ratio(peer, mine),
            }
            for peer in others
        )

    peers = {**_peers(a, b), **_jax_peers(left, right)}
    want = np.asarray(matmul(left, right, implementation="reference"))
    for name, peer in {**peers, **_torch_naive(a, b)}.items():
        if not np.array_equal(np.asarray(peer()), want):
            raise RuntimeError(f"{name} computes something else")
    compare("max-plus product", {"capibara": ours(left, right), **peers}, rounds, chosen)
    if slow := _torch_naive(a, b):  # seconds for each call: two are enough to see it
        compare("max-plus product", {"capibara": ours(left, right), **slow}, 2, chosen, 0)
    xla = {"capibara": ours(left, right, implementation="xla"), **_jax_peers(left, right)}
    compare("max-plus product without a compiler", xla, rounds, "xla")
    if importlib.util.find_spec("tropical_gemm") is not None:
        gemm = importlib.import_module("tropical_gemm")
        pair = {
            "capibara": ours(left, right, return_argmax=True),
            "tropical-gemm": lambda: gemm.maxplus_matmul_with_argmax(a, b),
        }
        compare("max-plus product with indices", pair, rounds, chosen)
    with tempfile.TemporaryDirectory() as folder:
        if chosen == "native" and (loops := _loops(Path(folder))):
            sets = f"native, {native.isa()}"
            compare("max-plus product", {"capibara": ours(left, right), **loops}, rounds, sets)
            compare("max-plus product of negative numbers", {"capibara": ours(*below), **loops}, rounds, sets)
            pair = {"capibara": ours(left, right, semiring="min_plus"), **loops}
            compare("min-plus product", pair, rounds, sets)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    for row in run(parser.parse_args().rounds):
        print(row)

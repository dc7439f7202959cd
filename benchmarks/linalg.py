"""Truncated singular values against scikit-learn's and JAX's; Cholesky updates and products against plain JAX, on CPU.

float32. The matrix to decompose has singular values ``j^-0.5``, a slow decay, so the smallest possible error of a rank
is known; what each reaches of it stands beside its time. ``jnp.linalg.svd`` takes minutes and is timed once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["run"]

SKLEARN = "sklearn.utils.extmath.randomized_svd"


def _matrix(size: int) -> tuple[np.ndarray, np.ndarray]:
    """A matrix and its singular values, largest first."""
    from scipy.linalg import hadamard

    rng = np.random.default_rng(0)
    values = (np.arange(1, size + 1) ** -0.5).astype(np.float32)
    turn = hadamard(size).astype(np.float32) / np.float32(size**0.5)
    left, right = (turn * rng.choice(np.asarray([-1, 1], np.float32), size)[:, None] for _ in range(2))
    return (left * values) @ right[:, rng.permutation(size)].T, values


def _error(matrix: np.ndarray, u: Any, s: Any, vh: Any) -> float:
    """The spectral norm of what is missing."""
    from scipy.sparse import linalg

    sparse: Any = linalg
    u, s, vh = (np.asarray(x) for x in (u, s, vh))

    def forward(x: np.ndarray) -> np.ndarray:
        x = x.ravel()
        return matrix @ x - u @ (s * (vh @ x))

    def backward(x: np.ndarray) -> np.ndarray:
        x = x.ravel()
        return matrix.T @ x - vh.T @ (s * (u.T @ x))

    rest = sparse.LinearOperator(matrix.shape, matvec=forward, rmatvec=backward, dtype=matrix.dtype)
    return float(sparse.svds(rest, k=1, return_singular_vectors=False, tol=1e-3)[0])


def _row(what: str, shape: str, table: Any, peer: str, **more: Any) -> dict[str, Any]:
    return {
        "what": what,
        "shape": shape,
        "ours_ms": 1e3 * statistics.median(table["capibara"].seconds),
        "peer": peer,
        "peer_ms": 1e3 * statistics.median(table[peer].seconds),
        "ratio": table.ratio(peer, "capibara"),
        **more,
    }


def _decompositions(rounds: int, whole: bool) -> list[dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    from capibara.measure import interleaved
    from capibara.ops.linalg import fast_svd
    from capibara.ops.linalg.specs import MATRICES
    from capibara.ops.tagged import tagged

    (spec,) = tagged(MATRICES, "large")
    size, rank = spec.shape[-1], spec.rank
    matrix, values = _matrix(size)
    there = jnp.asarray(matrix)
    sides: dict[str, Callable[[], Any]] = {"capibara": lambda: fast_svd(there, rank)}
    try:
        from sklearn.utils.extmath import randomized_svd
    except ImportError:
        print("scikit-learn is not installed: left out")
    else:
        sides[SKLEARN] = lambda: randomized_svd(matrix, rank, random_state=0)
    table = interleaved(sides, rounds)
    print(f"{table}\n")
    error = {name: _error(matrix, *side()) / float(values[rank]) for name, side in sides.items()}
    what, shape = f"fast_svd, rank {rank}", f"{size} × {size}"
    ours = {"error_over_optimal": error["capibara"]}
    rows = []
    if SKLEARN in sides:
        rows.append(_row(what, shape, table, SKLEARN, **ours, peer_error_over_optimal=error[SKLEARN]))
    if whole:
        plain = jax.jit(lambda a: jnp.linalg.svd(a, full_matrices=False)).lower(there).compile()
        start = time.perf_counter()
        jax.block_until_ready(plain(there))
        seconds = time.perf_counter() - start
        median = statistics.median(table["capibara"].seconds)
        rows.append(
            {"what": what, "shape": shape, "ours_ms": 1e3 * median, "peer": "jnp.linalg.svd"}
            | {"peer_ms": 1e3 * seconds, "ratio": seconds / median, **ours}
        )
    return rows


def _others(rounds: int) -> list[dict[str, Any]]:
    import jax
    import jax.numpy as jnp

    from capibara.measure import interleaved
    from capibara.ops.linalg import cholesky_update, optimized_gemm
    from capibara.ops.linalg.specs import FACTORS, GEMMS
    from capibara.ops.tagged import tagged

    rng = np.random.default_rng(1)

    def normal(*shape: int) -> Any:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    ((n,),) = (spec.vector for spec in tagged(FACTORS, "large"))
    root = normal(n, n)
    factor, vector = jnp.linalg.cholesky(root @ root.T / n + jnp.eye(n)), normal(n)
    again = jax.jit(lambda f, v: jnp.linalg.cholesky(f @ f.T + jnp.outer(v, v)))
    peer = "jnp.linalg.cholesky"
    table = interleaved(
        {"capibara": lambda: cholesky_update(factor, vector), peer: lambda: again(factor, vector)}, rounds
    )
    print(f"{table}\n")
    rows = [_row("cholesky_update", f"{n} × {n}", table, peer)]

    for spec in tagged(GEMMS, "large"):
        a, b = normal(*spec.a), normal(*spec.b)
        for precision in ("float32", "bfloat16"):
            peer = f"jnp.matmul in {precision}"
            left, right = a.astype(precision), b.astype(precision)
            plain = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type="float32"))
            sides = {
                "capibara": lambda x=left, y=right, n=spec.chunk_size: optimized_gemm(x, y, chunk_size=n),
                peer: lambda x=left, y=right, f=plain: f(x, y),
            }
            table = interleaved(sides, rounds)
            print(f"{table}\n")
            shape = " × ".join(map(str, (*spec.a, spec.b[-1])))
            rows.append(_row("optimized_gemm, four slabs", shape, table, peer))
    return rows


def _grouped(rounds: int) -> list[dict[str, Any]]:
    """Experts against a dense product of as many operations, and against ``jax.lax.ragged_dot``."""
    import jax
    import jax.numpy as jnp

    from capibara.measure import interleaved
    from capibara.ops.linalg import grouped_matmul
    from capibara.ops.linalg.specs import GROUPED, grouped_arguments
    from capibara.ops.tagged import tagged

    rng = np.random.default_rng(2)
    rows = []
    for spec in tagged(GROUPED, "large"):
        lhs, rhs, _ = (jnp.asarray(x, jnp.float32) for x in grouped_arguments(spec, rng))
        # Uneven, as a router is.
        shares = rng.dirichlet(np.full(len(spec.sizes), 8.0))
        sizes = jnp.asarray(rng.multinomial(spec.rows, shares), jnp.int32)
        ahead = jnp.asarray(rng.normal(size=(spec.rows, spec.columns)), jnp.float32)
        shape = f"{spec.rows} × {spec.inner} × {spec.columns}, {len(spec.sizes)} groups"
        ours = jax.jit(grouped_matmul)
        peers = {
            "dense product": jax.jit(lambda lhs, rhs, sizes: lhs @ rhs[0]),
            "jax.lax.ragged_dot": jax.jit(jax.lax.ragged_dot),
        }

        def slopes(f: Any, ahead: Any = ahead) -> Any:
            return jax.jit(lambda a, b, s: jax.vjp(lambda a, b: f(a, b, s), a, b)[1](ahead))

        def of_rows(f: Any, ahead: Any = ahead) -> Any:
            return jax.jit(lambda a, b, s: jax.vjp(lambda a: f(a, b, s), a)[1](ahead))

        def of_matrices(f: Any, ahead: Any = ahead) -> Any:
            return jax.jit(lambda a, b, s: jax.vjp(lambda b: f(a, b, s), b)[1](ahead))

        def dense(back: Any, ahead: Any = ahead) -> Any:
            # Of one matrix: zeros for the others would be work that a dense product does not have.
            return jax.jit(lambda a, b, s, back=back: back(lambda a, b, s: a @ b, ahead)(a, b[0], s))

        for what, mine, others in (
            ("grouped_matmul", ours, peers),
            ("grouped_matmul, gradients", slopes(ours), {"dense product": dense(slopes)}),
            ("grouped_matmul, gradient of the rows", of_rows(ours), {"dense product": dense(of_rows)}),
            (
                "grouped_matmul, gradient of the matrices",
                of_matrices(ours),
                {"dense product": dense(of_matrices)},
            ),
        ):
            table = interleaved(
                {
                    name: lambda f=f, x=lhs, y=rhs, s=sizes: f(x, y, s)
                    for name, f in {"capibara": mine, **others}.items()
                },
                rounds,
            )
            print(f"{table}\n")
            rows += [_row(what, shape, table, peer) for peer in others]
    return rows


def run(rounds: int = 5, whole: bool = True) -> list[dict[str, Any]]:
    """Rows of ratios: time of the peer / time of Capibara, so that above 1 Capibara is the faster."""
    return _others(rounds) + _grouped(rounds) + _decompositions(rounds, whole)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--without-jax-svd", action="store_true", help="leave out jnp.linalg.svd, which takes minutes"
    )
    args = parser.parse_args()
    for row in run(args.rounds, not args.without_jax_svd):
        print(row)

"""Collectives on emulated devices, run in a process of their own: ``python collective_checks.py ROWS COLUMNS CHECK…``.

Each check holds the rings, the compressed and XLA's forms against NumPy on the whole arrays.
"""

from __future__ import annotations

import re
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from capibara.ops import OpShapeError, OpValueError
from capibara.ops.collective import (
    all_gather_matmul,
    all_to_all,
    async_all_reduce,
    matmul_reduce_scatter,
    optimized_all_gather,
    reduce_scatter,
    zero_residual,
)

NUMPY = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "product": np.prod}
BOTH = ("data", "model")


def close(got: Any, want: Any, rtol: float = 2e-5, atol: float = 2e-5) -> None:
    np.testing.assert_allclose(
        np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=rtol, atol=atol
    )


def collectives(compiled: Any) -> list[tuple[str, str]]:
    """(kind, operand types) of each collective of a compiled program."""
    found = re.findall(
        r"= (.*?) (all-to-all|all-gather|all-reduce|collective-permute)(?:-start)?\(", compiled.as_text()
    )
    return [(kind, " ".join(sorted(set(re.findall(r"\b([a-z]+\d+)\[", types))))) for types, kind in found]


class Checks:
    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.mesh = Mesh(np.array(jax.devices()).reshape(rows, columns), BOTH)
        self.random = np.random.default_rng(0)

    def numbers(self, *shape: int) -> np.ndarray:
        return self.random.normal(size=shape).astype(np.float32)

    def mapped(self, function: Any, in_specs: Any, out_specs: Any, check_vma: bool = True) -> Any:
        return jax.jit(
            jax.shard_map(
                function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
            )
        )

    def all_reduce(self) -> None:
        n, columns = self.rows * self.columns, self.columns
        tree = {
            "w": self.numbers(n, 3, 5),
            "b": self.numbers(n, 1),
            "none": self.numbers(n, 0, 2),
            "k": self.random.integers(-3, 4, size=(n, 7)).astype(np.int32),
        }
        tree["w"][1, 0, 0], tree["b"][0, 0] = np.nan, np.inf
        for axis, groups, out in ((BOTH, (1, n), P()), ("model", (self.rows, columns), P("data"))):
            want = {
                op: {k: reduce(v.reshape(*groups, *v.shape[1:]), axis=1) for k, v in tree.items()}
                for op, reduce in NUMPY.items()
            }
            for options in (
                {"overlap_compute": False},
                {"overlap_compute": True},
                {"overlap_compute": True, "bucket_bytes": 1},
                {"implementation": "reference"},
            ):

                def every(t: Any, axis: Any = axis, options: Any = options) -> Any:
                    return {op: async_all_reduce(t, op, axis_name=axis, **options) for op in NUMPY}

                got = self.mapped(every, P(BOTH), out)(tree)
                for op in NUMPY:
                    for k, v in want[op].items():
                        close(got[op][k].reshape(v.shape), v, atol=1e-4)
        # Without a name: all axes of the shard_map around it.
        got = self.mapped(lambda x: async_all_reduce(x, "sum"), P(BOTH), P())(tree["k"])
        close(got[0], tree["k"].sum(0))

    def dtypes(self) -> None:
        x = self.numbers(self.rows * self.columns, 9)
        for kind, tolerance in ((jnp.bfloat16, 0.15), (jnp.float16, 0.02), (jnp.float32, 1e-5)):
            for compressed in (False, True):
                y = jnp.asarray(x, kind)
                got = self.mapped(lambda v, c=compressed: async_all_reduce(v, "sum", c), P(BOTH), P())(y)
                assert got.dtype == kind
                close(got[0], x.sum(0), atol=max(tolerance, 0.2 if compressed else 0), rtol=0.03)

    def compression(self) -> None:
        n = self.rows * self.columns
        tree = {
            "w": self.numbers(n, 70, 11),
            "b": 1e-4 * self.numbers(n, 3),
            "k": np.arange(n, dtype=np.int32),
        }
        for overlap in (False, True):
            run = self.mapped(
                lambda t, r, o=overlap: async_all_reduce(t, "mean", True, o, residual=r),
                (P(BOTH), P(BOTH)),
                (P(), P(BOTH)),
            )
            residual, total, out = zero_residual(tree), 0.0, tree
            steps = 12
            for _ in range(steps):
                out, residual = run(tree, residual)
                total = total + out["w"][0]
            want = tree["w"].mean(0)
            bound = 2 * np.abs(tree["w"]).max() / 127
            assert np.abs(out["w"][0] - want).max() < bound
            # What was lost stays within a step's rounding, so the mean over the steps comes closer and closer.
            assert np.abs(total / steps - want).max() < 2 * bound / steps
            # A small array has its own scale: it is not drowned by a large neighbour.
            close(out["b"][0], tree["b"].mean(0), atol=4e-6)
            close(out["k"][0], tree["k"].mean())
            # In sum: the residuals hold exactly what the sums lack.
            missing = np.asarray(residual["w"]).sum(0) + n * total - steps * tree["w"].sum(0)
            assert np.abs(missing).max() < 2e-3

            compiled = run.lower({"w": tree["w"]}, {"w": residual["w"]}).compile()
            seen = collectives(compiled)
            assert {types for _, types in seen} == {"s8"}, seen
            assert ("collective-permute" in {kind for kind, _ in seen}) == overlap, seen
            assert "all-gather" in {kind for kind, _ in seen}, seen
        bad = {"w": tree["w"].copy()}
        bad["w"][1, 0, 0] = np.inf
        run = self.mapped(
            lambda t, r: async_all_reduce(t, "sum", True, residual=r), (P(BOTH), P(BOTH)), (P(), P(BOTH))
        )
        out, residual = run(bad, zero_residual(bad))
        flat = np.asarray(out["w"][0]).reshape(-1)
        assert np.isnan(flat[:256]).all()
        assert np.isfinite(flat[256:]).all()
        assert np.isfinite(residual["w"]).all()

    def gradients(self) -> None:
        x, weights = self.numbers(self.rows * self.columns, 5), self.numbers(1, 5)
        reduced = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max, "min": jnp.min, "product": jnp.prod}
        cases = [(op, False, overlap) for op in NUMPY for overlap in (False, True)]
        cases += [("sum", True, True), ("mean", True, False)]
        run = self.mapped(lambda v: [async_all_reduce(v, *case) for case in cases], P(BOTH), P())
        _, pull = jax.vjp(run, x)
        for i, (op, _, _) in enumerate(cases):
            (got,) = pull([jnp.asarray(weights) * (i == j) for j in range(len(cases))])
            want = jax.grad(lambda v, op=op: jnp.sum(weights * reduced[op](v, axis=0, keepdims=True)))(x)
            close(got, want)
        batch = self.numbers(3, self.rows * self.columns, 4)
        run = self.mapped(jax.vmap(lambda v: async_all_reduce(v, "max")), P(None, BOTH), P())
        close(run(batch)[:, 0], batch.max(1))
        run = jax.vmap(self.mapped(lambda v: async_all_reduce(v, "sum", True), P(BOTH), P()))
        close(run(batch)[:, 0], batch.sum(1), atol=0.3, rtol=0)

    def movement(self) -> None:
        n = self.columns
        x = self.numbers(self.rows * n * 2, 3 * n, 4)
        for ring in (False, True):
            for dimension in (0, -1):
                ours = partial(
                    optimized_all_gather, axis=dimension, use_ring_algorithm=ring, axis_name="model"
                )
                theirs = partial(lax.all_gather, axis_name="model", axis=dimension % 3, tiled=True)
                self.same(ours, theirs, x)

            def every(v: Any, ring: bool = ring) -> Any:
                return [reduce_scatter(v, 1, op, ring, axis_name="model") for op in NUMPY]

            scattered = self.mapped(every, P(BOTH), P("data", "model"))(x)
            for op, got in zip(NUMPY, scattered, strict=True):
                want = NUMPY[op](x.reshape(self.rows, n, 2, 3 * n, 4), axis=1)
                close(got, want.reshape(got.shape), atol=1e-4)
            for dimension in (0, 1):
                ours = partial(
                    all_to_all,
                    split_axis=1,
                    concat_axis=dimension,
                    use_ring_algorithm=ring,
                    axis_name="model",
                )
                theirs = partial(
                    lax.all_to_all, axis_name="model", split_axis=1, concat_axis=dimension, tiled=True
                )
                self.same(ours, theirs, x)
        try:
            self.mapped(lambda v: all_to_all(v, 2, axis_name=BOTH), P(BOTH), P(BOTH))(x[:, :, :1])
        except OpShapeError as error:
            says = str(error)
        else:
            says = ""
        assert "multiple of the" in says

    def same(self, ours: Any, theirs: Any, *arrays: Any) -> None:
        """Values and gradients of two functions of arrays split over both axes."""
        a, b = (self.mapped(f, P(BOTH), P(BOTH)) for f in (ours, theirs))
        got, want = a(*arrays), b(*arrays)
        close(got, want)
        weights = self.numbers(*want.shape)
        places = tuple(range(len(arrays)))
        pulled = jax.grad(lambda *v: jnp.sum(weights * a(*v)), places)(*arrays)
        expected = jax.grad(lambda *v: jnp.sum(weights * b(*v)), places)(*arrays)
        for one, other in zip(pulled, expected, strict=True):
            close(one, other, atol=1e-4)

    def products(self) -> None:
        n = self.columns
        whole = self.rows * n

        def gather(x: Any, w: Any) -> Any:
            return lax.all_gather(x, "model", axis=x.ndim - 2, tiled=True) @ w

        def scatter(x: Any, w: Any) -> Any:
            return lax.psum_scatter(x @ w, "model", scatter_dimension=x.ndim - 2, tiled=True)

        gathered = partial(all_gather_matmul, axis_name="model")
        scattered = partial(matmul_reduce_scatter, axis_name="model")
        self.same(gathered, gather, self.numbers(whole * 3, 5), self.numbers(whole * 5, 2))
        self.same(gathered, gather, self.numbers(whole * 2, 3, 5), self.numbers(whole * 5, 2))
        self.same(scattered, scatter, self.numbers(whole * 2 * n, 5), self.numbers(whole * 5, 2))
        self.same(scattered, scatter, self.numbers(whole * 2, n, 5), self.numbers(whole * 5, 2))

    def placed(self) -> None:
        """On arrays that lie over a mesh, outside shard_map."""
        n, columns = self.rows * self.columns, self.columns
        x = self.numbers(n * 2, 3 * columns)
        split = jax.device_put(x, NamedSharding(self.mesh, P(BOTH)))
        other = jax.device_put(x, NamedSharding(self.mesh, P("data", "model")))
        whole = jax.device_put(x, NamedSharding(self.mesh, P()))
        tree = {"split": split, "other": other, "whole": whole}
        got = async_all_reduce(tree, "sum")
        close(got["split"], x.reshape(n, 2, -1).sum(0))
        close(got["other"], x.reshape(self.rows, -1, columns, 3).sum((0, 2)), atol=1e-4)
        close(got["whole"], x)
        got = async_all_reduce(other, "max", axis_name="model")
        close(got, x.reshape(n * 2, columns, 3).max(1))
        got, left = async_all_reduce(tree, "mean", True, residual=zero_residual(tree))
        close(got["split"], x.reshape(n, 2, -1).mean(0), atol=0.06, rtol=0)
        assert left["split"].sharding.is_equivalent_to(split.sharding, 2)
        for ring in (False, True):
            got = optimized_all_gather(other, 1, ring)
            close(got, x)
            assert got.sharding.is_equivalent_to(NamedSharding(self.mesh, P("data")), 2)
            close(optimized_all_gather(split, 0, ring), x)
            close(optimized_all_gather(whole, 0, ring), x)
        for bad in (
            lambda: async_all_reduce(split, axis_name="nothing"),
            lambda: jax.jit(async_all_reduce)(split),
            *([lambda: optimized_all_gather(split, 0, axis_name="data")] if self.rows > 1 else []),
        ):
            try:
                bad()
            except OpValueError:
                continue
            raise AssertionError("no error")


if __name__ == "__main__":
    checks = Checks(int(sys.argv[1]), int(sys.argv[2]))
    for check in sys.argv[3:]:
        start = time.perf_counter()
        getattr(checks, check)()
        print(check, "stands", f"{time.perf_counter() - start:.1f} s", flush=True)

"""Collectives on emulated devices, in a process of their own: ``python emulated_collectives.py ROWS COLUMNS CHECK…``.

Each check holds the rings, the compressed and XLA's forms of the small specs against NumPy on the whole arrays.
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
from capibara.ops.collective.specs import MOVES, PRODUCTS, REDUCES, gradients
from capibara.ops.tagged import tagged

NUMPY = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "product": np.prod}
BOTH = ("data", "model")
EXACT = tuple(spec for spec in tagged(REDUCES, "small") if not spec.compressed)
COMPRESSED = tuple(spec for spec in tagged(REDUCES, "small") if spec.compressed)


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
        trees = {spec.name: gradients(spec, n, self.random) for spec in EXACT}
        tree = trees["tree"]
        tree["w"][1, 0, 0], tree["b"][0, 0] = np.nan, np.inf
        for axis, groups, out in ((BOTH, (1, n), P()), ("model", (self.rows, columns), P("data"))):
            want = {
                op: jax.tree.map(lambda v, f=reduce, g=groups: f(v.reshape(*g, *v.shape[1:]), axis=1), trees)
                for op, reduce in NUMPY.items()
            }
            for options in (
                {"overlap_compute": False},
                {"overlap_compute": True},
                {"overlap_compute": True, "bucket_bytes": 1},
                {"implementation": "reference"},
            ):

                def every(given: Any, axis: Any = axis, options: Any = options) -> Any:
                    return {
                        op: {
                            name: async_all_reduce(t, op, axis_name=axis, **options)
                            for name, t in given.items()
                        }
                        for op in NUMPY
                    }

                got = self.mapped(every, P(BOTH), out)(trees)
                assert jax.tree.structure(got) == jax.tree.structure(want)
                for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                    close(one.reshape(other.shape), other, atol=1e-4)
        # Without a name: all axes of the shard_map around it.
        got = self.mapped(lambda x: async_all_reduce(x, "sum"), P(BOTH), P())(tree["k"])
        close(got[0], tree["k"].sum(0))

    def dtypes(self) -> None:
        n = self.rows * self.columns
        trees = {spec.name: gradients(spec, n, self.random) for spec in EXACT}
        floating = {name: {k: v for k, v in t.items() if v.dtype == np.float32} for name, t in trees.items()}
        for kind, tolerance in ((jnp.bfloat16, 0.15), (jnp.float16, 0.02), (jnp.float32, 1e-5)):
            for compressed in (False, True):
                given = jax.tree.map(lambda v, k=kind: jnp.asarray(v, k), floating)
                run = self.mapped(lambda t, c=compressed: async_all_reduce(t, "sum", c), P(BOTH), P())
                for got, v in zip(jax.tree.leaves(run(given)), jax.tree.leaves(floating), strict=True):
                    assert got.dtype == kind
                    close(got[0], v.sum(0), atol=max(tolerance, 0.2 if compressed else 0), rtol=0.03)

    def compression(self) -> None:
        for spec in COMPRESSED:
            tree = gradients(spec, self.rows * self.columns, self.random)
            if "b" in tree:
                tree["b"] *= np.float32(1e-4)
            for overlap in (False, True):
                self.compressed(tree, overlap)
            self.overflowing(tree["w"])

    def compressed(self, tree: dict[str, np.ndarray], overlap: bool) -> None:
        n = self.rows * self.columns
        run = self.mapped(
            lambda t, r: async_all_reduce(t, "mean", True, overlap, residual=r),
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
        if "b" in tree:  # A small array has its own scale: it is not drowned by a large neighbour.
            close(out["b"][0], tree["b"].mean(0), atol=4e-6)
        if "k" in tree:
            close(out["k"][0], tree["k"].mean(0))
        # In sum: the residuals hold exactly what the sums lack.
        missing = np.asarray(residual["w"]).sum(0) + n * total - steps * tree["w"].sum(0)
        assert np.abs(missing).max() < 2e-3

        compiled = run.lower({"w": tree["w"]}, {"w": residual["w"]}).compile()
        seen = collectives(compiled)
        assert {types for _, types in seen} == {"s8"}, seen
        assert ("collective-permute" in {kind for kind, _ in seen}) == overlap, seen
        assert "all-gather" in {kind for kind, _ in seen}, seen

    def overflowing(self, x: np.ndarray) -> None:
        """What is not finite takes its block of 256 with it, and is not remembered."""
        flat = x.copy().reshape(len(x), -1)
        flat[1, 0] = np.inf
        bad = {"w": flat.reshape(x.shape)}
        run = self.mapped(
            lambda t, r: async_all_reduce(t, "sum", True, residual=r), (P(BOTH), P(BOTH)), (P(), P(BOTH))
        )
        out, residual = run(bad, zero_residual(bad))
        flat = np.asarray(out["w"][0]).reshape(-1)
        assert np.isnan(flat[:256]).all()
        assert np.isfinite(flat[256:]).all()
        assert np.isfinite(residual["w"]).all()

    def gradients(self) -> None:
        (vector,) = (spec for spec in EXACT if spec.name == "vector")
        x = gradients(vector, self.rows * self.columns, self.random)["w"]
        weights = self.numbers(1, *vector.shapes["w"])
        reduced = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max, "min": jnp.min, "product": jnp.prod}
        cases = [(op, False, overlap) for op in NUMPY for overlap in (False, True)]
        cases += [("sum", True, True), ("mean", True, False)]
        run = self.mapped(lambda v: [async_all_reduce(v, *case) for case in cases], P(BOTH), P())
        _, pull = jax.vjp(run, x)
        for i, (op, _, _) in enumerate(cases):
            (got,) = pull([jnp.asarray(weights) * (i == j) for j in range(len(cases))])
            want = jax.grad(lambda v, op=op: jnp.sum(weights * reduced[op](v, axis=0, keepdims=True)))(x)
            close(got, want)
        batch = self.numbers(3, *x.shape)
        run = self.mapped(jax.vmap(lambda v: async_all_reduce(v, "max")), P(None, BOTH), P())
        close(run(batch)[:, 0], batch.max(1))
        run = jax.vmap(self.mapped(lambda v: async_all_reduce(v, "sum", True), P(BOTH), P()))
        close(run(batch)[:, 0], batch.sum(1), atol=0.3, rtol=0)

    def conventions(self) -> None:
        """Value and gradient of every function, with and without types, and along an axis of ``vmap``.

        The gradient of a function of all devices' arrays is its Jacobian's transpose, as that of ``lax.psum`` is:
        here central differences in NumPy, exact for what is linear, quadratic, or linear in each array.
        """
        n, shape = self.columns, (4, 3)
        functions: dict[str, tuple[Any, Any]] = {}
        for op, reduce in NUMPY.items():

            def scattered(xs: Any, reduce: Any = reduce) -> Any:
                return np.split(reduce(xs, axis=0), n)

            for way in ("ring", "xla", "reference"):
                functions[f"all-reduce {op} {way}"] = (
                    partial(async_all_reduce, reduction_op=op, implementation=way),
                    lambda xs, reduce=reduce: [reduce(xs, axis=0)] * n,
                )
            for ring in (False, True):
                functions[f"scatter {op} {ring}"] = (
                    partial(reduce_scatter, reduction_op=op, use_ring_algorithm=ring),
                    scattered,
                )
        for op in ("sum", "mean"):
            for overlap in (False, True):
                functions[f"compressed {op} {overlap}"] = (
                    partial(async_all_reduce, reduction_op=op, use_compression=True, overlap_compute=overlap),
                    lambda xs, op=op: [NUMPY[op](xs, axis=0)] * n,
                )
        for ring in (False, True):
            functions[f"gather {ring}"] = (
                partial(optimized_all_gather, use_ring_algorithm=ring),
                lambda xs: [np.concatenate(xs)] * n,
            )
            functions[f"exchange {ring}"] = (
                partial(all_to_all, concat_axis=1, use_ring_algorithm=ring),
                lambda xs: [
                    np.concatenate(parts, axis=1) for parts in zip(*(np.split(x, n) for x in xs), strict=True)
                ],
            )
        functions["gather, multiply"] = (
            lambda x, **axis: all_gather_matmul(x, x[:3, :2], **axis),
            lambda xs: [np.concatenate(xs) @ x[:3, :2] for x in xs],
        )
        functions["multiply, scatter"] = (
            lambda x, **axis: matmul_reduce_scatter(x, x[:3, :2], **axis),
            lambda xs: np.split(sum(x @ x[:3, :2] for x in xs), n),
        )
        x = self.random.normal(size=(self.rows, n, *shape))

        def oracle(name: str, x: np.ndarray) -> np.ndarray:
            return np.stack([np.stack(functions[name][1](row)) for row in x])

        weights = {name: self.random.normal(size=oracle(name, x).shape) for name in functions}

        def wanted(name: str) -> np.ndarray:
            grad = np.zeros(x.shape)
            for place in np.ndindex(x.shape):
                step = np.zeros(x.shape)
                step[place] = 2.0**-10
                change = oracle(name, x + step) - oracle(name, x - step)
                grad[place] = np.sum(weights[name] * change) / 2.0**-9
            return grad

        want, total = {name: oracle(name, x) for name in functions}, sum(map(wanted, functions))
        every: dict[str, Any] = {name: partial(f, axis_name="model") for name, (f, _) in functions.items()}

        def local(v: Any) -> dict[str, Any]:
            return {name: f(v[0, 0])[None, None] for name, f in every.items()}

        split = P("data", "model")
        forms: dict[Any, Any] = {
            check: jax.shard_map(local, mesh=self.mesh, in_specs=split, out_specs=split, check_vma=check)
            for check in (False, True)
        }
        by_vmap = jax.vmap(lambda v: {name: f(v) for name, f in every.items()}, axis_name="model")
        forms["vmap"] = jax.vmap(by_vmap)
        for form, run in forms.items():

            def both(v: Any, run: Any = run) -> Any:
                out, pull = jax.vjp(run, v)
                return out, *pull(weights)

            with jax.enable_x64(True):
                out, grad = jax.jit(both)(x)
            for name, value in want.items():
                rough = 0.1 if name.startswith("compressed") else 1e-9
                np.testing.assert_allclose(out[name], value, atol=rough, err_msg=f"{form} {name}")
            np.testing.assert_allclose(grad, total, atol=1e-9, err_msg=f"{form} gradient")

    def movement(self) -> None:
        n, specs = self.columns, tagged(MOVES, "small")
        # The first dimension of a whole array has every device's, one after the other.
        parts = [self.numbers(self.rows * n * s.part[0], *s.part[1:]) for s in specs]
        wholes = [self.numbers(self.rows * n * s.whole(n)[0], *s.whole(n)[1:]) for s in specs]
        for ring in (False, True):

            def gather(*given: Any, ring: bool = ring) -> Any:
                over = partial(optimized_all_gather, use_ring_algorithm=ring, axis_name="model")
                return [
                    [over(x, axis=i) for i in (s.axis, s.concat_axis)]
                    for s, x in zip(specs, given, strict=True)
                ]

            def plain_gather(*given: Any) -> Any:
                # Along a new axis, as XLA refuses to join along one of length 0.
                stacked = [list(lax.all_gather(x, "model")) for x in given]
                return [
                    [jnp.concatenate(every, axis=i) for i in (s.axis, s.concat_axis)]
                    for s, every in zip(specs, stacked, strict=True)
                ]

            self.same(gather, plain_gather, *parts)

            def scatter(*given: Any, ring: bool = ring) -> Any:
                return {
                    op: [
                        reduce_scatter(x, s.axis, op, ring, axis_name="model")
                        for s, x in zip(specs, given, strict=True)
                    ]
                    for op in NUMPY
                }

            for op, found in self.mapped(scatter, P(BOTH), P(BOTH))(*wholes).items():
                for s, x, got in zip(specs, wholes, found, strict=True):
                    want = NUMPY[op](x.reshape(self.rows, n, *s.whole(n)), axis=1)
                    pieces = np.stack(np.split(want, n, axis=s.axis % len(s.part) + 1), axis=1)
                    assert got.shape == (self.rows * n * s.part[0], *s.part[1:])
                    close(got, pieces.reshape(got.shape), atol=1e-4)

            def exchange(*given: Any, ring: bool = ring) -> Any:
                return [
                    all_to_all(x, s.axis, s.concat_axis, ring, axis_name="model")
                    for s, x in zip(specs, given, strict=True)
                ]

            def plain_exchange(*given: Any) -> Any:
                return [
                    lax.all_to_all(x, "model", s.axis % x.ndim, s.concat_axis, tiled=True)
                    for s, x in zip(specs, given, strict=True)
                ]

            self.same(exchange, plain_exchange, *wholes)
        try:
            self.mapped(lambda v: all_to_all(v, 2, axis_name=BOTH), P(BOTH), P(BOTH))(wholes[0][:, :, :1])
        except OpShapeError as error:
            says = str(error)
        else:
            says = ""
        assert "multiple of the" in says

    def same(self, ours: Any, theirs: Any, *arrays: Any) -> None:
        """Values and gradients of two functions of arrays split over both axes, which give trees of such."""
        a, b = (self.mapped(f, P(BOTH), P(BOTH)) for f in (ours, theirs))
        got, want = a(*arrays), b(*arrays)
        assert jax.tree.structure(got) == jax.tree.structure(want)
        weights = jax.tree.map(lambda v: self.numbers(*v.shape), want)
        every = tuple(range(len(arrays)))

        def loss(f: Any, *v: Any) -> Any:
            return sum(
                jnp.sum(w * y) for w, y in zip(jax.tree.leaves(weights), jax.tree.leaves(f(*v)), strict=True)
            )

        pulled, expected = (jax.jit(jax.grad(partial(loss, f), every))(*arrays) for f in (a, b))
        for atol, these, those in ((2e-5, got, want), (1e-4, pulled, expected)):
            for one, other in zip(jax.tree.leaves(these), jax.tree.leaves(those), strict=True):
                assert one.shape == other.shape
                close(one, other, atol=atol)

    def products(self) -> None:
        n, specs = self.columns, tagged(PRODUCTS, "small")

        def every(product: Any) -> Any:
            return lambda pairs: [product(x, w) for x, w in pairs]

        def gather(x: Any, w: Any) -> Any:
            return lax.all_gather(x, "model", axis=x.ndim - 2, tiled=True) @ w

        def scatter(x: Any, w: Any) -> Any:
            return lax.psum_scatter(x @ w, "model", scatter_dimension=x.ndim - 2, tiled=True)

        for ours, theirs, count in ((all_gather_matmul, gather, 1), (matmul_reduce_scatter, scatter, n)):
            pairs = [
                tuple(
                    self.numbers(self.rows * n * shape[0], *shape[1:]) for shape in (s.x(count), s.weight())
                )
                for s in specs
            ]
            self.same(every(partial(ours, axis_name="model")), every(theirs), pairs)

    def placed(self) -> None:
        """On arrays that are sharded over a mesh, outside shard_map."""
        n, columns = self.rows * self.columns, self.columns
        height, width = MOVES[0].part[:2]
        x = self.numbers(n * height, columns * width, *MOVES[0].part[2:])
        split = jax.device_put(x, NamedSharding(self.mesh, P(BOTH)))
        other = jax.device_put(x, NamedSharding(self.mesh, P("data", "model")))
        whole = jax.device_put(x, NamedSharding(self.mesh, P()))
        tree = {"split": split, "other": other, "whole": whole}
        got = async_all_reduce(tree, "sum")
        parts = x.reshape(n, height, *x.shape[1:])
        close(got["split"], parts.sum(0))
        blocks = x.reshape(self.rows, -1, columns, width, *x.shape[2:])
        close(got["other"], blocks.sum((0, 2)), atol=1e-4)
        close(got["whole"], x)
        got = async_all_reduce(other, "max", axis_name="model")
        close(got, x.reshape(len(x), columns, width, -1).max(1).reshape(got.shape))
        got, left = async_all_reduce(tree, "mean", True, residual=zero_residual(tree))
        close(got["split"], parts.mean(0), atol=0.06, rtol=0)
        assert left["split"].sharding.is_equivalent_to(split.sharding, x.ndim)
        for ring in (False, True):
            got = optimized_all_gather(other, 1, ring)
            close(got, x)
            assert got.sharding.is_equivalent_to(NamedSharding(self.mesh, P("data")), x.ndim)
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

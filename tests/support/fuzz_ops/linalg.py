"""Matrix products, factorisations and their updates."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from capibara.ops import linalg
from fuzz_ops.case import EPS, Ambiguous, Arg, Family, Generator, dtype_of, floats, pick

__all__ = ["OPERATIONS"]


def _wide(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _lead(rng: Generator) -> tuple[int, ...]:
    return pick(rng, (), (), (2,), (4,), (2, 1))


def gemm(rng: Generator) -> Family:
    rows, inner, columns = pick(rng, 1, 2, 4, 5), pick(rng, 0, 1, 4, 7, 8), pick(rng, 1, 3, 4)
    a_lead, b_lead = pick(rng, ((), ()), ((2,), ()), ((), (4,)), ((2, 1), (4,)), ((0,), ()), ((2,), (2,)))
    turned_a, turned_b = bool(rng.random() < 0.3), bool(rng.random() < 0.3)
    if rng.random() < 0.15:
        a_type = b_type = "int8"
        precision = None
    else:
        a_type = floats(rng)
        b_type = a_type if rng.random() < 0.8 or a_type == "float64" else pick(rng, "float32", "bfloat16")
        precision = pick(rng, None, None, "bfloat16", "float16", "float32", "float64", "int8")
    if precision == "float64" and a_type != "float64":
        precision = "float32"
    common = np.dtype("int32") if a_type == "int8" else jnp.promote_types(dtype_of(a_type), dtype_of(b_type))
    inside = precision or ("int32" if a_type == "int8" else common.name)
    name = pick(rng, "auto", "xla", "reference")
    options: dict[str, Any] = {
        "precision": precision,
        "use_async": bool(rng.random() < 0.5),
        "chunk_size": pick(rng, None, None, 1, 3, 4, 64),
        "transpose_a": turned_a,
        "transpose_b": turned_b,
        "implementation": name,
    }
    a_shape = (*a_lead, inner, rows) if turned_a else (*a_lead, rows, inner)
    b_shape = (*b_lead, columns, inner) if turned_b else (*b_lead, inner, columns)

    def oriented(a: Any, b: Any) -> tuple[Any, Any]:
        return (a.swapaxes(-1, -2) if turned_a else a), (b.swapaxes(-1, -2) if turned_b else b)

    def rounded(x: Any) -> Any:
        return x if precision in (None, "int8", "float64") else x.astype(dtype_of(inside)).astype(np.float64)

    def product(a: Any, b: Any) -> Any:
        a, b = oriented(a, b)
        if a_type == "int8":
            return (a.astype(np.int64) @ b.astype(np.int64)).astype(np.int32)
        return a @ b

    def oracle(a: Any, b: Any) -> list[np.ndarray]:
        if a_type == "int8":
            return [product(a, b)]
        return [product(rounded(a), rounded(b))]

    integers = precision == "int8"
    eps = max(EPS.get(inside, EPS["float32"]) if inside in EPS and precision else 0, EPS["float32"])
    if inside == "float64" and common.name == "float64":
        eps = EPS["float64"]
    out_eps = EPS.get(common.name, 0)

    def magnitude(a: Any, b: Any) -> list[np.ndarray]:
        if not integers:
            return oracle(abs(a), abs(b))
        # Each element is off by half a step of its row or column.
        a, b = oriented(abs(a), abs(b))
        size = a.max(-1, initial=0)[..., :, None] * b.max(-2, initial=0)[..., None, :]
        return [inner * size]

    tolerance = (
        1.0 / 100
        if integers
        else 4 * out_eps + 8 * (EPS["float64"] if eps == EPS["float64"] else EPS["float32"])
    )
    derivative = a_type != "int8"
    kind = range(-128, 128) if a_type == "int8" else "normal"
    # The gradient of rounded operands is that of the product at the rounded ones, rounded itself.
    return Family(
        f"optimized_gemm({a_type}{a_shape}, {b_type}{b_shape}, {options})",
        lambda a, b: linalg.optimized_gemm(a, b, **options),
        oracle,
        (Arg(a_shape, a_type, kind), Arg(b_shape, b_type, kind)),
        moods=("normal", "normal", "zeros", "ties")
        if precision == "float16"
        else ("normal", "normal", "zeros", "ties", "large", "small"),
        x64="float64" in (a_type, b_type),
        tolerance=tolerance,
        gradient_tolerance=None if precision is None or integers else 4 * max(EPS[inside], EPS[common.name]),
        magnitude=None if a_type == "int8" else magnitude,
        differentiable=(0, 1) if derivative else (),
        gradient=(
            lambda arrays, cotangents: _gemm_gradient(oriented, turned_a, turned_b, *arrays, *cotangents)
        )
        if derivative
        else None,
        twice=derivative and precision is None and common.name in ("float32", "float64"),
        dtypes=(common.name,),
    )


def _gemm_gradient(
    oriented: Any, turned_a: bool, turned_b: bool, a: Any, b: Any, out: Any
) -> list[np.ndarray]:
    left, right = oriented(a, b)
    grads = []
    for grad, like, turned in (
        (out @ right.swapaxes(-1, -2), a, turned_a),
        (left.swapaxes(-1, -2) @ out, b, turned_b),
    ):
        grad = grad.swapaxes(-1, -2) if turned else grad
        grad = grad.sum(tuple(range(grad.ndim - like.ndim)))
        ones = tuple(i for i, n in enumerate(like.shape) if n == 1 and grad.shape[i] != 1)
        grads.append(grad.sum(ones, keepdims=True) if ones else grad)
    return grads


def quantised(rng: Generator) -> Family:
    lead = pick(rng, (), (1,), (3,), (4,), (2, 2), (0,))
    rows, inner = pick(rng, 1, 4, 6), pick(rng, 1, 5, 8, 12)
    group = pick(rng, 1, 3, 4, 32)
    kind, dtype = pick(rng, "int8", "int4", "table"), floats(rng)
    name = pick(rng, "auto", "native", "xla", "reference")
    if name == "native" and dtype == "float64":
        name = "auto"  # it computes in float32
    if rng.random() < 0.04:
        # The kernel takes rows of whole registers.
        name, dtype, lead, rows, inner, group = "pallas_tpu", "float32", (2,), 128, 128, 32
    groups = -(-inner // group)
    four = kind != "int8"
    args = [
        Arg((*lead, inner), dtype),
        Arg((rows, -(-inner // 2)), "uint8", range(256))
        if four
        else Arg((rows, inner), "int8", range(-128, 128)),
        Arg((rows, groups), "float32"),
    ] + [Arg((16,), "float32", "fixed")] * (kind == "table")

    def oracle(x: Any, codes: Any, scales: Any, levels: Any = None) -> list[np.ndarray]:
        if four:
            codes = np.stack([codes & 15, codes >> 4], -1).reshape(rows, -1)[:, :inner]
            codes = codes.astype(np.float64) - 8 if levels is None else levels[codes]
        matrix = codes * np.repeat(scales, group, 1)[:, :inner]
        return [x @ matrix.T]

    def bound(x: Any, codes: Any, scales: Any, levels: Any = None) -> list[np.ndarray]:
        table = np.arange(-8.0, 8) if levels is None else levels
        if four:
            codes = np.stack([codes & 15, codes >> 4], -1).reshape(rows, -1)[:, :inner]
            codes = table[codes]
        matrix = np.abs(codes.astype(np.float64) * np.repeat(scales, group, 1)[:, :inner])
        return [np.abs(x) @ matrix.T]

    return Family(
        f"quantised_matmul({dtype}{(*lead, inner)}, {kind}, rows={rows}, group={group}, implementation={name!r})",
        lambda *arrays: linalg.quantised_matmul(*arrays, group=group, implementation=name),
        oracle,
        tuple(args),
        moods=("normal", "normal", "zeros", "ties"),
        x64=dtype == "float64",
        # Summed in float32 whatever is given.
        tolerance=4 * EPS[dtype] + 8 * EPS["float32"] if dtype != "float64" else 8 * EPS["float32"],
        magnitude=bound,
        differentiable=(0, 2, 3) if kind == "table" else (0, 2),
        twice=dtype in ("float32", "float64") and name != "pallas_tpu",
        dtypes=(dtype,),
    )


def grouped(rng: Generator) -> Family:
    rows, inner, columns, groups = (
        pick(rng, *each) for each in ((1, 4, 40), (1, 3, 8), (1, 2, 4), (1, 2, 4))
    )
    dtype, turned = floats(rng), bool(rng.random() < 0.5)
    name = pick(rng, "auto", "native" if dtype == "float32" else "auto", "cpu", "xla", "reference")
    shape = (groups, columns, inner) if turned else (groups, inner, columns)

    def oracle(lhs: Any, rhs: Any, sizes: Any) -> list[np.ndarray]:
        out, at = np.zeros((rows, columns)), 0
        for matrix, size in zip(rhs.swapaxes(1, 2) if turned else rhs, sizes, strict=True):
            end = min(at + max(int(size), 0), rows)
            out[at:end] = lhs[at:end] @ matrix
            at = end
        return [out]

    return Family(
        f"grouped_matmul({dtype}{(rows, inner)}, {shape}, transpose_rhs={turned}, implementation={name!r})",
        lambda *arrays: linalg.grouped_matmul(*arrays, transpose_rhs=turned, implementation=name),
        oracle,
        (Arg((rows, inner), dtype), Arg(shape, dtype), Arg((groups,), "int32", range(-1, rows + 1))),
        moods=("normal", "normal", "zeros", "ties"),
        x64=dtype == "float64",
        tolerance=4 * EPS[dtype] + 8 * EPS["float64" if dtype == "float64" else "float32"],
        magnitude=lambda lhs, rhs, sizes: oracle(abs(lhs), abs(rhs), sizes),
        differentiable=(0, 1),
        twice=dtype in ("float32", "float64"),
        dtypes=(dtype,),
    )


def _qr(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    q, r = np.linalg.qr(matrix)
    sign = np.where(np.diagonal(r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)
    return q * sign[..., None, :], r * sign[..., :, None]


def qr(rng: Generator) -> Family:
    lead = _lead(rng)
    name = pick(rng, "auto", "gram", "reference")
    rows, columns = (
        pick(rng, (8, 2), (12, 3), (4, 1), (16, 4))
        if name == "gram"
        else pick(rng, (4, 4), (5, 3), (8, 2), (1, 1), (3, 5), (4, 1), (1, 4))
    )
    dtype = floats(rng, narrow=rng.random() < 0.4)
    k = min(rows, columns)

    def oracle(matrix: Any) -> list[np.ndarray]:
        q, r = _qr(matrix)
        diagonal = np.abs(np.diagonal(r, axis1=-2, axis2=-1))
        if diagonal.size and diagonal.min() < 0.15 * max(1.0, diagonal.max()):
            raise Ambiguous  # columns that nearly depend on each other: no accuracy to hold it to
        return [q, r]

    wide = _wide(dtype)
    return (
        Family(
            f"qr({dtype}{(*lead, rows, columns)}, implementation={name!r})",
            lambda matrix: linalg.qr(matrix, implementation=name),
            oracle,
            (Arg((*lead, rows, columns), dtype),),
            fix=lambda arrays, rng: [arrays[0] + 2 * np.eye(rows, columns, dtype=arrays[0].dtype)],
            moods=("normal",),
            x64=dtype == "float64",
            tolerance=200 * EPS[wide],
            # What is given back for narrow matrices is narrow in the gradient alone.
            differentiable=(0,) if dtype in ("float32", "float64") and rows >= columns else (),
            twice=dtype in ("float32", "float64") and rows >= columns,
            dtypes=(wide, wide),
            together=True,
        )
        if k
        else qr(rng)
    )


def cholesky(rng: Generator) -> Family:
    lead, n, dtype = _lead(rng), pick(rng, 1, 2, 4, 5), floats(rng)
    name, downdate = pick(rng, "auto", "xla", "reference"), bool(rng.random() < 0.4)
    signed = bool(rng.random() < 0.3)

    def fix(arrays: list[np.ndarray], rng: Generator) -> list[np.ndarray]:
        factor, vector = (x.astype(np.float64) for x in arrays)
        sign = np.where(rng.random((*lead, n)) < 0.5, -1, 1) if signed else np.ones((*lead, n))
        # Off the diagonal small, or the factor is nearly singular; above it anything.
        lower = 0.4 * np.tril(factor, -1) + 3 * np.triu(factor, 1)
        lower[..., range(n), range(n)] = sign * rng.uniform(1.0, 2.0, size=(*lead, n))
        if downdate:
            vector = 0.3 * vector / np.maximum(1, np.linalg.norm(vector, axis=-1, keepdims=True))
        return [lower, vector]

    def oracle(factor: Any, vector: Any) -> list[np.ndarray]:
        lower = np.tril(factor)
        outer = vector[..., :, None] * vector[..., None, :]
        matrix = lower @ lower.swapaxes(-1, -2) + (-outer if downdate else outer)
        try:
            return [np.linalg.cholesky(matrix)]
        except np.linalg.LinAlgError:
            raise Ambiguous from None

    wide = _wide(dtype)
    return Family(
        f"cholesky_update({dtype}, {lead}, n={n}, downdate={downdate}, signed={signed}, implementation={name!r})",
        lambda factor, vector: linalg.cholesky_update(factor, vector, downdate=downdate, implementation=name),
        oracle,
        (Arg((*lead, n, n), dtype), Arg((*lead, n), dtype)),
        fix=fix,
        moods=("normal", "zeros", "ties"),
        x64=dtype == "float64",
        tolerance=200 * EPS[wide],
        differentiable=(0, 1) if dtype in ("float32", "float64") else (),
        twice=dtype in ("float32", "float64"),
        dtypes=(wide,),
        together=downdate,
    )


def svd(rng: Generator) -> Family:
    lead = _lead(rng)
    name = pick(rng, "auto", "auto", "reference", "xla")
    # Randomised: the matrix has the rank asked for, so the sketch finds it all.
    rows, columns, rank, over = pick(rng, (12, 8, 2, 3), (8, 10, 1, 4), (16, 8, 3, 4), (6, 5, 2, 2))
    randomised = bool(rng.random() < 0.7) or name == "xla"
    if rng.random() < 0.25 and name != "xla":
        rows, columns, rank = pick(rng, (4, 3, None), (3, 5, None), (1, 1, 1), (4, 4, 2))
    dtype, uv, bound = floats(rng), bool(rng.random() < 0.7), bool(rng.random() < 0.2)
    options: dict[str, Any] = {
        "compute_uv": uv,
        "use_randomized": randomised,
        "oversampling": over,
        "power_iterations": pick(rng, 2, 3),
        "with_error_bound": bound,
        "implementation": name,
    }
    k = min(rows, columns) if rank is None else rank

    def fix(arrays: list[np.ndarray], rng: Generator) -> list[np.ndarray]:
        # Singular values of 8, 4, 2 …, so that vectors are well determined, and nothing after those asked for.
        u, _ = np.linalg.qr(rng.normal(size=(*lead, rows, min(rows, columns))))
        v, _ = np.linalg.qr(rng.normal(size=(*lead, columns, min(rows, columns))))
        s = 8.0 * 0.5 ** np.arange(min(rows, columns)) * (1 + 0.1 * rng.random(min(rows, columns)))
        s[k:] *= 1e-3
        return [(u * s) @ v.swapaxes(-1, -2)]

    def call(matrix: Any) -> Any:
        out = linalg.fast_svd(matrix, rank, **options)
        if not uv:
            return out[:1] if bound else out
        u, s, vh = out[:3]
        return s, (u * s[..., None, :]) @ vh

    def oracle(matrix: Any) -> list[np.ndarray]:
        u, s, vh = np.linalg.svd(matrix, full_matrices=False)
        near = (u[..., :k] * s[..., None, :k]) @ vh[..., :k, :]
        return [s[..., :k], near] if uv else [s[..., :k]]

    wide = _wide(dtype)
    whole = k == min(rows, columns) or not randomised or rank is None
    return Family(
        f"fast_svd({dtype}{(*lead, rows, columns)}, {rank}, {options})",
        call,
        oracle,
        (Arg((*lead, rows, columns), dtype),),
        fix=fix,
        moods=("normal",),
        x64=dtype == "float64",
        # What is after the rank asked for, 1e-3 of it, fades by two powers an iteration.
        tolerance=400 * EPS[wide] if whole else max(400 * EPS[wide], 1e-6),
        differentiable=(0,) if dtype in ("float32", "float64") else (),
        twice=dtype in ("float32", "float64") and bool(whole),
    )


OPERATIONS = {
    "linalg.optimized_gemm": gemm,
    "linalg.quantised_matmul": quantised,
    "linalg.grouped_matmul": grouped,
    "linalg.qr": qr,
    "linalg.cholesky_update": cholesky,
    "linalg.fast_svd": svd,
}

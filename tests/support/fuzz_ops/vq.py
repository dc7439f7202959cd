"""Vector quantisation: distances to every code, and averages of what chose them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from capibara.ops import vq
from fuzz_ops.case import EPS, Ambiguous, Arg, Family, Generator, compare, floats, pick

__all__ = ["OPERATIONS"]


def _distances(x: Any, codebook: Any, metric: str) -> np.ndarray:
    """``[..., codes]``: squared distances, or 1 - cosine."""
    if metric == "euclidean":
        return np.sum((x[..., None, :] - codebook) ** 2, -1)

    def unit(v: Any) -> np.ndarray:
        size = np.linalg.norm(v, axis=-1, keepdims=True)
        return np.divide(v, size, out=np.zeros_like(v), where=size > 0)

    return 1 - unit(x) @ unit(codebook).T


def _nearest(x: Any, codebook: Any, metric: str) -> np.ndarray:
    """The nearest codes; refuses to say where two are as near but for rounding."""
    distance = _distances(x, codebook, metric)
    if codebook.shape[0] > 1:
        two = np.sort(distance, -1)[..., :2]
        size = 1 + np.max(np.abs(distance), initial=0) + np.max(x**2, initial=0)
        if np.any(two[..., 1] - two[..., 0] < 1e-4 * size):
            raise Ambiguous
    return distance.argmin(-1)


def nearest(rng: Generator) -> Family:
    lead, dim, codes = pick(rng, (), (1,), (4,), (2, 3), (0,)), pick(rng, 1, 2, 4), pick(rng, 1, 3, 4, 8)
    metric, distance, dtype = pick(rng, "euclidean", "cosine"), bool(rng.random() < 0.5), floats(rng)
    name = pick(rng, "auto", "cpu", "xla", "reference")
    special = not distance and rng.random() < 0.3
    tolerance = 32 * (EPS["float64"] if dtype == "float64" else EPS["float32"])

    def oracle(x: Any, codebook: Any) -> list[np.ndarray]:
        lost = ~np.isfinite(codebook).all(-1)
        broken = ~np.isfinite(x).all(-1)
        spoilt = np.isnan(codebook).any(-1)
        if (spoilt.any() and broken.any()) or lost.all():
            raise Ambiguous  # the description does not say which of the two counts
        with np.errstate(all="ignore"):
            table = _distances(
                np.where(broken[..., None], 0, x), np.where(lost[:, None], 0, codebook), metric
            )
        table = np.where(lost, np.inf, table)
        index = np.where(broken, 0, table.argmin(-1))
        if spoilt.any():
            index = np.full(index.shape, spoilt.argmax())
        found = np.take_along_axis(table, index[..., None], -1)[..., 0]
        return [index.astype(np.int32), found] if distance else [index.astype(np.int32)]

    def check(arrays: Any, got: Any) -> str | None:
        x, codebook = arrays
        want = oracle(x, codebook)
        index = got[0]
        if index.shape != want[0].shape or index.dtype != np.int32:
            return f"indices {index.dtype}{index.shape}"
        if index.size == 0:
            return None
        if index.min() < 0 or index.max() >= codes:
            return f"indices out of range: {index.tolist()}"
        plain = np.isfinite(x).all() and np.isfinite(codebook).all()
        whole = (
            plain
            and metric == "euclidean"
            and all(np.all(np.abs(v) < 8) and np.all(v == v.round()) for v in arrays)
        )
        if not plain or whole:
            # Small integers are computed with exactly: of equal distances the lowest index.
            table_ok = np.array_equal(index, want[0])
            if not table_ok and not plain:
                finite = np.isfinite(codebook).all(-1)
                safe = np.where(finite[:, None], codebook, 0)
                seen = np.isfinite(x).all(-1)
                table = np.where(finite, _distances(np.where(seen[..., None], x, 0), safe, metric), np.inf)
                taken = np.take_along_axis(table, index[..., None], -1)[..., 0]
                size = 1 + np.max(table, where=np.isfinite(table), initial=0)
                near = np.isfinite(taken) & (taken - table.min(-1) <= 1e-4 * size)
                table_ok = bool(np.all((index == want[0]) | (seen & near & ~np.isnan(codebook).any())))
            if not table_ok:
                return f"indices {index.tolist()}, expected {want[0].tolist()}"
        table = _distances(x, codebook, metric) if plain else None
        if table is not None:
            size = 1 + np.max(np.abs(table), initial=0) + np.max(x**2, initial=0)
            taken = np.take_along_axis(table, index[..., None], -1)[..., 0]
            if np.any(taken - table.min(-1) > tolerance * size):
                return f"indices {index.tolist()}, expected {want[0].tolist()}"
            if distance:
                return compare(got[1], taken, tolerance, size)
        return None

    def fix(arrays: list[np.ndarray], rng: Generator) -> list[np.ndarray]:
        """Where a distance is differentiated, another code must not come to be the nearest on the way."""
        if distance and codes > 1 and arrays[0].size:
            x, codebook = (v.astype(np.float64) for v in arrays)
            two = np.sort(_distances(x, codebook, metric), -1)[..., :2]
            if np.any(two[..., 1] - two[..., 0] < 0.02):
                raise Ambiguous
        return arrays

    return Family(
        f"nearest_code({dtype}{(*lead, dim)}, {(codes, dim)}, metric={metric!r}, distance={distance}, {name!r})",
        lambda x, c: vq.nearest_code(x, c, metric=metric, return_distance=distance, implementation=name),
        oracle,
        (Arg((*lead, dim), dtype), Arg((codes, dim), dtype)),
        moods=("special", "normal")
        if special
        else ("normal", "normal", "zeros", "ties", "small")
        if not distance
        else ("normal",),
        x64=dtype == "float64",
        tolerance=tolerance,
        gradient_tolerance=None if dtype in ("float32", "float64") else 8 * EPS[dtype],
        fix=fix,
        together=distance,
        differentiable=(0, 1) if distance else (),
        twice=distance and dtype in ("float32", "float64"),
        check=check,
    )


def _update(state: Any, x: Any, index: Any, decay: float, epsilon: float) -> list[np.ndarray]:
    """The new ``cluster_size``, ``codebook`` and ``codebook_sum``."""
    codebook, size, total = state
    codes, dim = codebook.shape
    counts, sums = np.zeros(codes), np.zeros((codes, dim))
    for i, v in zip(index.ravel(), x.reshape(-1, dim), strict=True):
        if -codes <= i < codes:
            counts[i] += 1
            sums[i] += v
    size = decay * size + (1 - decay) * counts
    total = decay * total + (1 - decay) * sums
    smooth = (size + epsilon) / (size.sum() + codes * epsilon) * size.sum()
    return [size, total / smooth[:, None], total]


def _state_args(codes: int, dim: int, *front: int) -> tuple[Arg, ...]:
    return (
        Arg((*front, codes, dim), "float32", "fixed"),
        Arg((*front, codes), "float32", "positive"),
        Arg((*front, codes, dim), "float32", "fixed"),
    )


def _state(arrays: Any) -> dict[str, Any]:
    return dict(zip(("codebook", "cluster_size", "codebook_sum"), arrays, strict=True))


def update(rng: Generator) -> Family:
    lead, dim, codes, dtype = (
        pick(rng, (1,), (4,), (2, 3), ()),
        pick(rng, 1, 2, 4),
        pick(rng, 1, 4, 8),
        floats(rng),
    )
    decay, epsilon, threshold = pick(rng, 0.99, 0.5, 0.0), pick(rng, 1e-5, 0.1), pick(rng, 0.0, 0.5, 1.0)
    keyed = bool(rng.random() < 0.4)
    options = {"decay": decay, "epsilon": epsilon, "dead_code_threshold": threshold}

    def call(*arrays: Any) -> Any:
        state, x, index, *key = arrays[:3], *arrays[3:]
        key = jax.random.wrap_key_data(key[0]) if key else None
        return vq.update_codebook(_state(state), x, index, key=key, **options)

    def oracle(*arrays: Any) -> list[np.ndarray]:
        return _update(arrays[:3], arrays[3], arrays[4], decay, epsilon)

    def check(arrays: Any, got: Any) -> str | None:
        """A code that is not used is put on one of the vectors."""
        want = oracle(*arrays)
        dead = want[0] < threshold
        if np.any(np.abs(want[0] - threshold) < 1e-5):
            return None
        vectors = arrays[3].reshape(-1, dim)
        for i in np.flatnonzero(dead):
            if not np.any(np.all(np.abs(got[1][i] - vectors) < 1e-5, -1)):
                return f"the dead code {i} is {got[1][i]}, none of the vectors"
            if abs(got[0][i] - 2 * threshold) > 1e-5:
                return f"the count of the dead code {i} is {got[0][i]}"
        alive = ~dead
        for x, y in zip(got, want, strict=True):
            wrong = compare(x[alive], y[alive], 1e-4, 1 + np.abs(y[alive]))
            if wrong:
                return wrong
        return None

    args = (
        *_state_args(codes, dim),
        Arg((*lead, dim), dtype),
        Arg(lead, "int32", range(-codes - 1, codes + 2)),
    )
    return Family(
        f"update_codebook({codes} × {dim}, {dtype}{(*lead, dim)}, key={keyed}, {options})",
        call,
        oracle,
        args + ((Arg((2,), "uint32", "key"),) if keyed else ()),
        moods=("normal", "zeros", "ties"),
        x64=dtype == "float64",
        tolerance=1e-5,
        magnitude=lambda *arrays: [1 + np.abs(y) for y in oracle(*arrays)],
        check=check if keyed and threshold else None,
        dtypes=("float32",) * 3,
    )


def quantise(scheme: str) -> Any:
    function = {
        "single": vq.vector_quantise,
        "product": vq.product_quantise,
        "residual": vq.residual_quantise,
    }[scheme]

    def family(rng: Generator) -> Family:
        count = 1 if scheme == "single" else pick(rng, 1, 2, 3)
        lead, part, codes, dtype = (
            pick(rng, (1,), (4,), (2, 3), ()),
            pick(rng, 1, 2, 4),
            pick(rng, 1, 4, 8),
            floats(rng),
        )
        dim = count * part if scheme == "product" else part
        front = () if scheme == "single" else (count,)
        metric, train, name = (
            pick(rng, "euclidean", "euclidean", "cosine"),
            bool(rng.random() < 0.5),
            pick(rng, "auto", "cpu", "xla", "reference"),
        )
        options: dict[str, Any] = {
            "train": train,
            "decay": pick(rng, 0.99, 0.5),
            "epsilon": pick(rng, 1e-5, 0.1),
            "commitment_weight": pick(rng, 0.25, 1.0, 0.0),
            "metric": metric,
            "implementation": name,
        }

        def call(*arrays: Any) -> Any:
            return function(_state(arrays[:3]), arrays[3], **options)

        def one(state: Any, x: Any) -> tuple[np.ndarray, np.ndarray, dict[str, float], list[np.ndarray]]:
            index = _nearest(x, state[0], metric)
            chosen = state[0][index]
            error = float(np.mean((x - chosen) ** 2))
            share = np.bincount(index.ravel(), minlength=codes) / index.size
            used = share[share > 0]
            metrics = {
                "commitment_loss": options["commitment_weight"] * error,
                "perplexity": float(np.exp(-np.sum(used * np.log(used)))),
                "quantization_error": error,
                "usage": float(np.mean(share > 0)),
            }
            after = _update(state, x, index, options["decay"], options["epsilon"])
            return chosen, index, metrics, after if train else [state[1], state[0], state[2]]

        def oracle(*arrays: Any) -> list[np.ndarray]:
            state, x = arrays[:3], arrays[3]
            if scheme == "single":
                out, index, metrics, after = one(state, x)
                return [out, index.astype(np.int32), *map(np.asarray, metrics.values()), *after]
            each, left = [], x
            for i in range(count):
                mine = x[..., i * part : (i + 1) * part] if scheme == "product" else left
                each.append(one([s[i] for s in state], mine))
                left = left - each[-1][0] if scheme == "residual" else left
            codes_ = [e[0] for e in each]
            out = np.concatenate(codes_, -1) if scheme == "product" else sum(codes_)
            metrics: dict[str, Any] = {n: np.mean([e[2][n] for e in each]) for n in each[0][2]}
            if scheme == "residual":
                metrics["commitment_loss"] = np.sum([e[2]["commitment_loss"] for e in each])
                metrics["quantization_error"] = np.asarray(each[-1][2]["quantization_error"])
            index = np.stack([e[1] for e in each], -1).astype(np.int32)
            after = [np.stack(s) for s in zip(*(e[3] for e in each), strict=True)]
            return [np.asarray(out), index, *map(np.asarray, metrics.values()), *after]

        def gradient(arrays: Any, cotangents: Any) -> list[np.ndarray]:
            """Straight through, and that of the commitment loss: the codes stand still."""
            x, state = arrays[3], arrays[:3]
            weight = options["commitment_weight"] * cotangents[1]
            if scheme == "single":
                chosen = one(state, x)[0]
                return [cotangents[0] + weight * 2 * (x - chosen) / x.size]
            left, pulled = x, np.zeros_like(x)
            for i in range(count):
                mine = slice(i * part, (i + 1) * part) if scheme == "product" else slice(None)
                v = x[..., mine] if scheme == "product" else left
                chosen = one([s[i] for s in state], v)[0]
                share = count if scheme == "product" else 1
                pulled[..., mine] += weight * 2 * (v - chosen) / (v.size * share)
                left = left - chosen if scheme == "residual" else left
            return [cotangents[0] + pulled]

        wide = dtype in ("float32", "float64")
        return Family(
            f"{scheme}_quantise({codes} × {part} × {count}, {dtype}{(*lead, dim)}, {options})",
            call,
            oracle,
            (*_state_args(codes, part, *front), Arg((*lead, dim), dtype)),
            moods=("normal", "normal", "small"),
            x64=dtype == "float64",
            tolerance=max(4 * EPS[dtype] * count, 1e-5) if wide else 8 * EPS[dtype] * count,
            # The state is float32 throughout.
            magnitude=lambda *arrays: [
                1 + np.abs(y) + np.max(np.abs(arrays[3]), initial=0) for y in oracle(*arrays)
            ],
            gradient_tolerance=1e-4 if wide else 8 * EPS[dtype],
            differentiable=(3,),
            weights=(1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
            gradient=gradient,
        )

    return family


def dequantise(rng: Generator) -> Family:
    scheme, count = pick(rng, "single", "product", "residual"), pick(rng, 1, 2, 3)
    lead, dim, codes, dtype = (
        pick(rng, (), (1,), (4,), (2, 3), (0,)),
        pick(rng, 1, 2, 4),
        pick(rng, 1, 4, 8),
        floats(rng),
    )
    integer = pick(rng, "int32", "uint8", "int32")
    single = scheme == "single"

    def oracle(codebook: Any, index: Any) -> list[np.ndarray]:
        def one(book: Any, i: Any) -> np.ndarray:
            good = (i >= 0) & (i < codes)
            return np.where(good[..., None], book[np.where(good, i, 0)], np.nan)

        if single:
            return [one(codebook, index)]
        each = [one(codebook[i], index[..., i]) for i in range(count)]
        return [np.concatenate(each, -1) if scheme == "product" else np.asarray(sum(each))]

    outside = rng.random() < 0.4
    low = -2 if integer == "int32" and outside else 0
    return Family(
        f"dequantise({dtype} {count} × {codes} × {dim}, {integer}{lead}, scheme={scheme!r})",
        lambda codebook, index: vq.dequantise(codebook, index, scheme=scheme),
        oracle,
        (
            Arg((codes, dim) if single else (count, codes, dim), dtype),
            Arg(lead if single else (*lead, count), integer, range(low, codes + 2 * outside)),
        ),
        x64=dtype == "float64",
        tolerance=4 * EPS[dtype],
        differentiable=(0,),
        twice=dtype in ("float32", "float64"),
        dtypes=(dtype,),
    )


def initial(rng: Generator) -> Family:
    codes, dim, count = pick(rng, 1, 4, 32), pick(rng, 1, 2, 16), pick(rng, None, None, 1, 3)
    front = () if count is None else (count,)

    def check(arrays: Any, got: Any) -> str | None:
        size, codebook, total = got
        if (
            codebook.shape != (*front, codes, dim)
            or size.shape != (*front, codes)
            or total.shape != codebook.shape
        ):
            return f"shapes {[x.shape for x in got]}"
        if any(x.dtype != np.float32 for x in got):
            return f"dtypes {[x.dtype for x in got]}"
        if not np.all(size == 1) or not np.array_equal(codebook, total):
            return "the codebook is not its sum by its counts"
        n = codebook.size
        if (
            not np.isfinite(codebook).all()
            or np.abs(codebook).max() > 7
            or abs(codebook.mean()) > 6 / np.sqrt(n)
        ):
            return f"not standard normal: mean {codebook.mean()}, largest {np.abs(codebook).max()}"
        if n >= 64 and not 0.6 < codebook.std() < 1.5:
            return f"not standard normal: deviation {codebook.std()}"
        return None

    return Family(
        f"initial_codebook_state({codes}, {dim}, codebooks={count})",
        lambda key: vq.initial_codebook_state(jax.random.wrap_key_data(key), codes, dim, codebooks=count),
        lambda key: [
            np.ones((*front, codes)),
            np.zeros((*front, codes, dim)),
            np.zeros((*front, codes, dim)),
        ],
        (Arg((2,), "uint32", "key"),),
        check=check,
    )


OPERATIONS = {
    "vq.nearest_code": nearest,
    "vq.vector_quantise": quantise("single"),
    "vq.product_quantise": quantise("product"),
    "vq.residual_quantise": quantise("residual"),
    "vq.update_codebook": update,
    "vq.dequantise": dequantise,
    "vq.initial_codebook_state": initial,
}

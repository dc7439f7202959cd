"""Every operation on 4 × 8 emulated devices: ``python mesh_cases.py few|all CATEGORY…``.

A case is a call on the whole arrays and how they lie on the mesh. Its value and the gradient of a sum over its results
are computed inside ``jax.shard_map`` (``manual``), or on arrays of a mesh whose axes are ``explicit``, and compared
with those of an oracle on the whole arrays (the operation's reference, or plain NumPy or JAX) on one device. Prints a
line of JSON: for each way and case the largest difference, relative to the oracle's largest number.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from mesh_runs import ALL, BOTH, EACH, RANDOM, SECOND, Case, draw, over, positive, run, same, simple

from capibara.ops import attention, collective, conv, fft, linalg, rotary, scan, tropical, vq
from capibara.ops import loss as loss_ops


def attention_cases() -> list[Case]:
    q, k = draw(4, 8, 6, 4), draw(4, 1, 6, 4)
    laid = (P(*BOTH), P("data"), P("data"))
    flash = partial(attention.flash_attention, use_causal_mask=True)
    reference = partial(flash, implementation="reference")
    cases = [
        Case(
            f"flash_attention {name}",
            partial(flash, implementation=name),
            reference,
            (q, k, k + 1),
            laid,
            P(*BOTH),
        )
        for name in ("auto", "cpu", "xla", "pallas_tpu", "pallas_gpu")
    ]

    def sunk(q: Any, k: Any, v: Any, sinks: Any, **options: Any) -> Any:
        return flash(q, k, v, sinks=sinks, **options)

    cases += [
        Case(
            f"flash_attention with sinks {name}",
            partial(sunk, implementation=name),
            partial(sunk, implementation="reference"),
            (q, k, k + 1, draw(8)),
            (*laid, P("model")),
            P(*BOTH),
        )
        for name in ("auto", "cpu", "xla", "pallas_tpu")
    ]
    params = attention.multihead_attention_params(jax.random.key(0), embed_dim=8, num_heads=2)

    def layer(x: Any, params: Any) -> Any:
        return attention.fused_multihead_attention(x, 2, params=params)

    cases.append(same("fused_multihead_attention", layer, (draw(32, 5, 8), params), (ALL, EACH)))
    new, cache = draw(32, 1, 4, 4), draw(32, 6, 2, 4)
    at = jnp.asarray(RANDOM.integers(0, 6, size=(32, 1)), jnp.int32)

    def decode(*arrays: Any, **options: Any) -> Any:
        return attention.cached_attention(*arrays[:4], sinks=arrays[4], **options)

    given = (new, cache, cache + 1, at, draw(4))
    cases.append(simple("cached_attention", decode, given, (ALL, ALL, ALL, ALL, EACH)))
    pages = draw(6, 2, 2, 4)
    table = jnp.asarray(RANDOM.integers(0, 6, size=(32, 3)), jnp.int32)
    lengths = jnp.asarray(RANDOM.integers(1, 7, size=32), jnp.int32)
    given = (new, pages, pages - 1, table, lengths)
    cases.append(simple("paged_attention", attention.paged_attention, given, (ALL, EACH, EACH, ALL, ALL)))
    # Each device has two pages of its own, and numbers them from 0.
    own = draw(64, 4, 2, 4)
    local = jnp.tile(jnp.array([[1, 0]], jnp.int32), (32, 1))
    local_lengths = jnp.asarray(RANDOM.integers(1, 6, size=32), jnp.int32)
    written = (own, own + 1, local, local_lengths, draw(32, 2, 2, 4), draw(32, 2, 2, 4))

    def write(keys: Any, values: Any, table: Any, lengths: Any, key: Any, value: Any) -> Any:
        rows = np.arange(32)[:, None]
        slots = jnp.asarray(lengths)[:, None] + jnp.arange(2)
        page = 2 * rows + jnp.take_along_axis(table, slots // 4, 1)
        return tuple(p.at[page, slots % 4].set(x) for p, x in ((keys, key), (values, value)))

    def write_own(keys: Any, values: Any, table: Any, *more: Any) -> Any:
        return attention.write_pages(keys, values, table + 2 * np.arange(32, dtype=np.int32)[:, None], *more)

    pair = (ALL, ALL)
    cases.append(
        Case(
            "write_pages",
            attention.write_pages,
            write,
            written,
            (ALL,) * 6,
            pair,
            own=True,
            whole=write_own,
        )
    )
    return cases


def scan_cases() -> list[Case]:
    a, x = positive(6, 32), draw(6, 32)

    def affine(h: Any, x: Any) -> Any:
        h = {"fast": 0.5 * h["fast"] + x, "slow": 0.9 * h["slow"] + h["fast"]}
        return h, jnp.tanh(h["slow"])

    def other(h: Any, x: Any) -> Any:
        h = jnp.tanh(h) + x
        return h, h * x

    init = {"fast": draw(32), "slow": draw(32)}
    scanned = (
        ("parallel_scan affine", affine, init, {"implementation": "affine", "num_segments": 2}),
        ("parallel_scan auto", affine, init, {}),
        ("parallel_scan sequential", other, draw(32), {"num_segments": 3}),
    )
    cases = [
        Case(
            name,
            partial(scan.parallel_scan, step, **options),
            partial(lax.scan, step),
            (first, x),
            (ALL, SECOND),
            (ALL, SECOND),
        )
        for name, step, first, options in scanned
    ]
    matrix, vectors = 0.3 * draw(3, 3), draw(5, 32, 3)
    selective = (draw(32, 7, 2, 3), positive(32, 7, 2), -positive(2), draw(32, 7, 1, 4), draw(32, 7, 1, 4))
    by_batch = (ALL, ALL, EACH, ALL, ALL)

    def a_step(x: Any, dt: Any, a: Any, b: Any, c: Any, state: Any) -> Any:
        return scan.selective_scan(x, dt, a, b, c, initial_state=state)

    def several(x: Any, dt: Any, a: Any, b: Any, c: Any) -> Any:
        return scan.selective_scan(
            x, dt, a, b, c, starts=jnp.arange(x.shape[1])[None] % 3 + 0 * x[..., 0, 0] == 0
        )

    def from_a_state(a: Any, x: Any, state: Any) -> Any:
        return scan.linear_recurrence(a, x, initial_state=state)

    def decayed(h: Any, x: Any) -> Any:
        return 0.5 * h + x, h

    return [
        *cases,
        simple("linear_recurrence", scan.linear_recurrence, (a, x), (SECOND, SECOND), (SECOND, ALL)),
        simple(
            "matrix_linear_recurrence",
            scan.matrix_linear_recurrence,
            (matrix, vectors),
            (EACH, SECOND),
            (SECOND, ALL),
        ),
        simple("selective_scan", scan.selective_scan, selective, by_batch, (ALL, ALL)),
        *(
            same(
                f"semiring_scan {name}",
                partial(scan.semiring_scan, semiring=name),
                (x, a),
                (SECOND, SECOND),
                SECOND,
            )
            for name in ("sum_product", "max_plus", "min_plus", "log_sum_exp")
        ),
        same("lif", scan.lif, (2 * draw(6, 32),), (SECOND,), (SECOND, ALL)),
        over("selective_scan a step", a_step, (*selective, draw(32, 2, 3, 4)), (*by_batch, ALL)),
        over("selective_scan a state", a_step, (*selective, draw(32, 2, 3, 4)), (EACH,) * 5 + (ALL,)),
        over("selective_scan of several texts", several, selective, by_batch),
        over("linear_recurrence from a state", from_a_state, (a, x, draw(32)), (EACH, EACH, ALL)),
        over("semiring_scan over its steps", scan.semiring_scan, (draw(32, 3), positive(32, 3)), (ALL, EACH)),
        over(
            "semiring_scan log_sum_exp apart",
            partial(scan.semiring_scan, semiring="log_sum_exp"),
            (x, a),
            (EACH, SECOND),
        ),
        *(
            over(
                f"parallel_scan {name} of a carry",
                partial(scan.parallel_scan, decayed, implementation=name),
                (draw(32), x),
                (ALL, EACH),
            )
            for name in ("auto", "affine")
        ),
    ]


def conv_cases() -> list[Case]:
    def plain(name: str, n: int) -> Case:
        function = getattr(conv, name)
        given = (draw(32, *(5,) * n, 2), draw(*(3,) * n, 2, 3))
        return same(name, function, given, (ALL, EACH))

    image, filters = draw(32, 6, 6, 2), draw(3, 3, 2, 3)
    return [
        simple("causal_conv1d", conv.causal_conv1d, (draw(32, 6, 3), draw(4, 3)), (ALL, EACH), (ALL, ALL)),
        *(
            Case(
                f"winograd_conv2d {name}",
                partial(conv.winograd_conv2d, implementation=name),
                partial(conv.winograd_conv2d, implementation="reference"),
                (image, filters),
                (ALL, EACH),
            )
            for name in ("auto", "winograd")
        ),
        over(
            "winograd_conv2d over its windows and channels",
            conv.winograd_conv2d,
            (draw(1, 4, 32, 4), draw(3, 3, 4, 2)),
            (P(None, None, "model"), P(None, None, "data")),
        ),
        over(
            "conv_transpose1d over its windows",
            conv.conv_transpose1d,
            (draw(2, 32, 2), draw(3, 2, 3)),
            (P(None, "model"), EACH),
        ),
        over(
            "conv1d over its channels",
            conv.conv1d,
            (draw(2, 8, 8), draw(3, 8, 4)),
            (P(None, None, "model"), P(None, None, "data")),
        ),
        over(
            "conv2d of groups",
            partial(conv.conv2d, groups=2, padding="VALID"),
            (draw(8, 5, 4, 2), draw(2, 2, 1, 6)),
            (P("data"), EACH),
        ),
        *(plain(f"conv{n}d", n) for n in (1, 2, 3)),
        *(plain(f"conv_transpose{n}d", n) for n in (1, 2, 3)),
    ]


def linalg_cases() -> list[Case]:
    a, b = draw(32, 4, 6), draw(6, 5)
    lower = jnp.linalg.cholesky(jnp.eye(3) * 4 + positive(32, 1, 1) * jnp.ones((3, 3)))

    def low_rank(matrix: Any, **options: Any) -> Any:
        u, s, vh = linalg.fast_svd(matrix, 2, **options)
        return s, (u * s[..., None, :]) @ vh

    def quantised(x: Any, scales: Any, **options: Any) -> Any:
        codes = jnp.arange(-15, 15, dtype=jnp.int8).reshape(5, 6)
        return linalg.quantised_matmul(x, codes, scales, group=3, **options)

    sizes = jnp.asarray(RANDOM.integers(0, 9, size=(32, 2)), jnp.int32)

    def grouped(x: Any, matrices: Any, sizes: Any, **options: Any) -> Any:
        return jax.vmap(partial(linalg.grouped_matmul, **options), (0, None, 0))(x, matrices, sizes)

    codes = jnp.asarray(RANDOM.integers(-15, 16, size=(5, 6)), jnp.int8)
    quantized = (a, codes, positive(5, 3))
    return [
        simple(
            "quantised_matmul codes", partial(linalg.quantised_matmul, group=2), quantized, (ALL, EACH, EACH)
        ),
        simple("optimized_gemm", linalg.optimized_gemm, (a, b), (ALL, EACH)),
        simple("optimized_gemm slabs", partial(linalg.optimized_gemm, chunk_size=4), (a, b), (ALL, EACH)),
        # Its gradient is that of the product without rounding, which a reference that rounds has not.
        same("optimized_gemm int8", partial(linalg.optimized_gemm, precision="int8"), (a, b), (ALL, EACH)),
        simple("qr", linalg.qr, (draw(32, 6, 3),), (ALL,), (ALL, ALL)),
        simple("qr gram", partial(linalg.qr, implementation="gram"), (draw(32, 8, 2),), (ALL,), (ALL, ALL)),
        simple("fast_svd", low_rank, (draw(32, 8, 6),), (ALL,), (ALL, ALL)),
        simple("cholesky_update", linalg.cholesky_update, (lower, draw(32, 3)), (ALL, ALL)),
        simple("grouped_matmul", grouped, (draw(32, 12, 6), draw(2, 6, 5), sizes), (ALL, EACH, ALL)),
        over(
            "grouped_matmul rows",
            linalg.grouped_matmul,
            (draw(32, 6), draw(2, 6, 5), 2 * sizes[0]),
            (ALL, EACH, EACH),
        ),
        simple("quantised_matmul", quantised, (a, draw(5, 2)), (ALL, EACH)),
    ]


def fft_cases() -> list[Case]:
    def parts(y: Any) -> Any:
        return y.real, y.imag

    def local(x: Any, **options: Any) -> Any:
        return parts(fft.radix_optimized_fft(x, **options))

    def split(x: Any, **options: Any) -> Any:
        return parts(fft.radix_optimized_fft(x, None, True, axis_name="model", **options))

    return [
        Case("local", local, lambda x: parts(jnp.fft.fft(x)), (draw(32, 12),), (ALL,), (ALL, ALL)),
        Case(
            "local matmul",
            partial(local, implementation="matmul"),
            lambda x: parts(jnp.fft.fft(x)),
            (draw(32, 14),),
            (ALL,),
            (ALL, ALL),
        ),
        *(
            Case(
                f"over devices, {rows} rows",
                partial(split, implementation=name),
                lambda x: parts(jnp.fft.fft(x)),
                (draw(rows, 64),),
                (P(*BOTH),),
                (P(*BOTH), P(*BOTH)),
                own=True,
            )
            for rows, name in ((4, "matmul"), (32, "auto"))
        ),
    ]


def loss_cases() -> list[Case]:
    hidden, head, weights = draw(32, 3, 4), draw(4, 24), 0.05 * positive(32, 3)
    labels = jnp.asarray(RANDOM.integers(-1, 24, size=(32, 3)), jnp.int32)

    def loss(hidden: Any, head: Any, labels: Any, weights: Any, **options: Any) -> Any:
        more = {"ignore_index": -1, "chunk_size": 2, "implementation": "xla"} | options
        return loss_ops.cross_entropy(hidden, head, labels, weights=weights, **more)

    def summed(axis_name: Any, *arrays: Any, **options: Any) -> Any:
        # Each device has a row of tokens and an eighth of the vocabulary.
        found = loss(
            *arrays, reduction="sum", axis_name=axis_name, z_loss=0.1, label_smoothing=0.2, **options
        )
        return found if axis_name is None else lax.psum(found, "data")

    given = (hidden, head, labels, weights)
    split = (P("data"), P(None, "model"), P("data"), P("data"))
    return [
        simple("cross_entropy", partial(loss, reduction="none", softcap=2.0), given, (ALL, EACH, ALL, ALL)),
        *(
            Case(
                f"cross_entropy over a sharded vocabulary, {name}",
                partial(summed, "model", implementation=name),
                partial(summed, None, implementation="reference"),
                given,
                split,
                EACH,
                own=True,
                whole=partial(summed, None),
            )
            for name in ("xla", "reference")
        ),
        over("cross_entropy of all", partial(loss, softcap=2.0), given, split),
    ]


def vq_cases() -> list[Case]:
    x, codebook = draw(64, 4), draw(8, 4)
    state = vq.initial_codebook_state(jax.random.key(0), 8, 4)
    several = vq.initial_codebook_state(jax.random.key(1), 8, 2, codebooks=2)
    whole = vq.initial_codebook_state(jax.random.key(2), 8, 4, codebooks=2)
    # The commitment loss is that of a device's own vectors: everything else is of all devices.
    metrics = {"commitment_loss": EACH, "quantization_error": EACH, "perplexity": EACH, "usage": EACH}

    def summed(function: Any, axis_name: Any, state: Any, x: Any) -> Any:
        out, index, found, new = function(state, x, train=True, axis_name=axis_name)
        loss = found["commitment_loss"]
        found = {**found, "commitment_loss": loss if axis_name is None else lax.pmean(loss, axis_name)}
        return out, index, found, new

    learned = [
        Case(
            name,
            partial(summed, f, BOTH),
            partial(summed, f, None),
            (s, x),
            (EACH, ALL),
            (ALL, ALL, metrics, EACH),
            own=True,
            whole=partial(summed, f, None),
        )
        for name, f, s in (
            ("vector_quantise", vq.vector_quantise, state),
            ("product_quantise", vq.product_quantise, several),
            ("residual_quantise", vq.residual_quantise, whole),
        )
    ]
    index = jnp.asarray(RANDOM.integers(0, 8, size=64), jnp.int32)
    move = vq.update_codebook
    return [
        simple(
            "nearest_code",
            partial(vq.nearest_code, return_distance=True),
            (x, codebook),
            (ALL, EACH),
            (ALL, ALL),
        ),
        simple("nearest_code cosine", partial(vq.nearest_code, metric="cosine"), (x, codebook), (ALL, EACH)),
        *learned,
        Case(
            "update_codebook",
            partial(move, axis_name=BOTH),
            move,
            (state, x, index),
            (EACH, ALL, ALL),
            EACH,
            own=True,
            whole=move,
        ),
        same("dequantise", vq.dequantise, (codebook, index), (EACH, ALL)),
    ]


def tropical_cases() -> list[Case]:
    a, b = draw(32, 3, 4), draw(32, 4, 5)
    a = a.at[3, 1].set(-jnp.inf)  # a row that nothing reaches
    graph = jnp.where(RANDOM.uniform(size=(32, 5, 5)) < 0.5, positive(32, 5, 5), jnp.inf)
    line, image = draw(32, 2, 7), draw(32, 2, 5, 5)
    product = tropical.matmul
    return [
        simple("matmul", product, (a, b), (ALL, ALL)),
        simple("matmul min_plus", partial(product, semiring="min_plus"), (-a, b), (ALL, ALL)),
        simple("matmul relaxed", partial(product, temperature=0.5), (draw(32, 3, 4), b), (ALL, ALL)),
        simple("matmul argmax", partial(product, return_argmax=True), (a, b), (ALL, ALL), (ALL, ALL)),
        simple(
            "matmul rows and columns",
            product,
            (draw(8, 3), draw(3, 16)),
            (P("data"), P(None, "model")),
            P("data", "model"),
        ),
        simple("matvec", tropical.matvec, (draw(32, 3, 4), draw(32, 4)), (ALL, ALL)),
        simple("closure", tropical.closure, (-graph,), (ALL,)),
        simple("shortest_paths", tropical.shortest_paths, (graph,), (ALL,)),
        simple("conv1d", tropical.conv1d, (line, draw(3, 2, 3)), (ALL, EACH)),
        simple("conv2d", tropical.conv2d, (image, draw(3, 2, 2, 2)), (ALL, EACH)),
        simple("polyval", tropical.polyval, (draw(5), draw(32)), (EACH, ALL)),
        same("pool", partial(tropical.pool, window=2), (line,), (ALL,)),
        same("scan", tropical.scan, (draw(6, 32), draw(6, 32)), (SECOND, SECOND), SECOND),
        over("scan over its steps", tropical.scan, (draw(32, 3), draw(32, 3)), (ALL, EACH)),
        over("matmul over what is added", product, (draw(4, 32), draw(32, 3)), (P("data"), P("model"))),
        over("closure by rows", tropical.closure, (-positive(8, 8),), (P("model"),)),
        over("shortest_paths by columns", tropical.shortest_paths, (positive(8, 8),), (P(None, "model"),)),
        over(
            "pool over its windows",
            partial(tropical.pool, window=2),
            (draw(2, 3, 32),),
            (P(None, None, BOTH),),
        ),
        over(
            "pool over windows that share elements",
            partial(tropical.pool, window=3, strides=1),
            (draw(2, 3, 32),),
            (P(None, None, "model"),),
        ),
        over("matmul of nothing", product, (draw(0, 5, 8), draw(8, 4)), (EACH, P("model"))),
    ]


def collective_cases() -> list[Case]:
    x = draw(32, 8)
    reduce = collective.async_all_reduce
    kinds = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max, "min": jnp.min, "product": jnp.prod}

    def reduced(function: Any, x: Any) -> Any:
        return function(x, 0)[None]

    wide, weight = draw(32, 16), draw(16, 12)
    row = P(None, "model")
    cases = [
        *(
            Case(
                f"async_all_reduce {kind}",
                partial(reduce, reduction_op=kind),
                partial(reduced, function),
                (0.1 * x + 1,),
                (ALL,),
                EACH,
            )
            for kind, function in kinds.items()
        ),
        Case(
            "async_all_reduce int8",
            partial(reduce, use_compression=True),
            partial(reduced, jnp.mean),
            (jnp.ones((32, 1)) * jnp.linspace(-127, 127, 128) / 4,),
            (ALL,),
            EACH,
            gradient=False,
        ),
        *(
            Case(
                f"optimized_all_gather ring={ring}",
                lambda x, ring=ring: collective.optimized_all_gather(x, 1, ring, axis_name="model"),
                lambda x: jnp.tile(x, (1, 8)),  # every device has the whole row
                (draw(4, 8),),
                (P(*BOTH),),
                P(*BOTH),
            )
            for ring in (False, True)
        ),
        *(
            Case(
                f"reduce_scatter ring={ring}",
                lambda x, ring=ring: collective.reduce_scatter(x, 2, "sum", ring, axis_name="model")[:, 0],
                lambda x: x.sum(1),
                (draw(4, 8, 8),),
                (P(*BOTH),),
                P(*BOTH),
            )
            for ring in (False, True)
        ),
        *(
            Case(
                f"all_to_all ring={ring}",
                lambda x, ring=ring: collective.all_to_all(x, 2, 1, ring, axis_name="model"),
                lambda x: x,
                (draw(4, 8, 16),),
                (P("data", "model"),),
                P("data", None, "model"),
            )
            for ring in (False, True)
        ),
        Case(
            "all_gather_matmul",
            partial(collective.all_gather_matmul, axis_name="model"),
            lambda x, w: x @ w,
            (wide, weight[:, :8]),
            (P("model"), P(None, "model")),
            row,
        ),
        Case(
            "matmul_reduce_scatter",
            partial(collective.matmul_reduce_scatter, axis_name="model"),
            lambda x, w: x @ w,
            (wide, weight),
            (row, P("model")),
            P("model"),
        ),
    ]
    return [replace(case, own=True) for case in cases]


def rotary_cases() -> list[Case]:
    query, key, angle = draw(32, 5, 2, 6), draw(32, 5, 1, 6), draw(32, 5, 2)
    positions = jnp.asarray(RANDOM.integers(0, 50, size=(32, 5)), jnp.int32)

    def from_positions(query: Any, key: Any, positions: Any, **options: Any) -> Any:
        return rotary.rotary(query, key, positions=positions, **options)

    def from_tables(query: Any, cos: Any, sin: Any, **options: Any) -> Any:
        return rotary.rotary(query, cos=cos, sin=sin, layout="pairs", **options)

    return [
        simple("rotary", from_positions, (query, key, positions), (ALL,) * 3, (ALL, ALL)),
        simple("rotary tables", from_tables, (query, jnp.cos(angle), jnp.sin(angle)), (ALL,) * 3),
        simple("rotary shared tables", from_tables, (query, draw(5, 2), draw(5, 2)), (ALL, EACH, EACH)),
    ]


CATEGORIES: dict[str, Callable[[], list[Case]]] = {
    "attention": attention_cases,
    "collective": collective_cases,
    "conv": conv_cases,
    "fft": fft_cases,
    "linalg": linalg_cases,
    "loss": loss_cases,
    "rotary": rotary_cases,
    "scan": scan_cases,
    "tropical": tropical_cases,
    "vq": vq_cases,
}


def one_each(cases: list[Case]) -> list[Case]:
    """The first case of each function that has both ways."""
    first: dict[str, Case] = {}
    for case in cases:
        if case.manual:
            first.setdefault(case.name.split()[0], case)
    return list(first.values())


if __name__ == "__main__":
    assert jax.device_count() == 32
    for name in sys.argv[2:]:
        cases = CATEGORIES[name]()
        print(json.dumps({name: run(one_each(cases) if sys.argv[1] == "few" else cases)}), flush=True)

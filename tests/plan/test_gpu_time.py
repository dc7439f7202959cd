"""Seconds on a host of GPUs: closed forms, and what was published of products and collectives on these GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capibara.plan import PlanError, parse_target
from capibara.plan.gpus import GPUS, GpuHost
from capibara.plan.program import Collective, Kernel, Piece, ProgramFacts, read_program
from capibara.plan.time import Constants, predict_step, time_of_each
from capibara.plan.time.gpu import GpuRates, model_of

HLO = Path(__file__).parent / "hlo" / "h100_all_reduce.txt"
EIGHT = (("data", 8),)
EVERY = (tuple(range(8)),)


def host(name: str = "h100", count: int = 8) -> GpuHost:
    found = parse_target(f"{name}:{count}")
    assert isinstance(found, GpuHost)
    return found


def piece(flops: int = 0, moved: int = 0, dtype: str = "bf16", on_host: int = 0) -> Piece:
    return Piece("p", "fusion", "", 1, None, flops, moved, on_host, dtype=dtype)


def exchange(kind: str, size: int, groups: Any = EVERY, asynchronous: bool = True) -> Collective:
    return Collective(kind, size, groups, len(groups[0]), 1, asynchronous, 0, "")


def facts(schedule: Any, pieces: Any = (), collectives: Any = (), kernels: Any = ()) -> ProgramFacts:
    return ProgramFacts("test", 8, 0, 0, 0, tuple(pieces), tuple(collectives), tuple(kernels), schedule, ())


def seconds(*args: Any, name: str = "h100", **options: Any) -> float:
    return predict_step(facts(*args), host(name), EIGHT, **options).seconds


# Batch, rows, columns, contracted, and the FLOP/s of cuBLAS on an H100, timed alone: bfloat16, and float32 by TF32
# (openxla/xla, xla/service/gpu/model/matmul_interpolator_data.h, sm_90).
MEASURED = [
    (4, 1024, 1024, 4096, 735943676490747, 237765556725785),
    (2, 4096, 1024, 2048, 713449716943521, 286677555112427),
    (4, 2048, 2048, 256, 394758023529411, 200999967053538),
    (2, 2048, 2048, 512, 447019910074937, 230614652920962),
    (2, 256, 4096, 2048, 462819751724137, 165140237465395),
    (1, 512, 4096, 4096, 644116271145770, 264212189286867),
    (2, 2048, 4096, 4096, 779348875095689, 320786271886174),
    (4, 2048, 2048, 4096, 779136806172370, 321542765401136),
    (1, 4096, 4096, 1024, 677439636593059, 309037697921444),
    (4, 1024, 4096, 2048, 718702693440428, 311503208144837),
    (4, 2048, 512, 4096, 730436614965986, 298181377997240),
    (4, 4096, 2048, 1024, 687861993493688, 298202080903986),
    (2, 4096, 2048, 2048, 733304984804507, 275585610792515),
    (1, 1024, 2048, 4096, 653525151552039, 266503307024075),
    (1, 2048, 4096, 2048, 715350982011992, 316600830834723),
    (2, 1024, 4096, 512, 445906073089701, 226719135135135),
    (4, 2048, 1024, 4096, 745015413610295, 302422553078378),
    (1, 512, 512, 512, 40721398058252, 25970922600619),
    (1, 512, 1024, 512, 80466263788968, 50686453172205),
    (2, 512, 512, 256, 43351979328165, 32201950095969),
]


@pytest.mark.parametrize("row", MEASURED)
@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_products_take_what_was_measured(row, dtype):
    batch, m, n, k, bfloat16, float32 = row
    size, rate = (2, bfloat16) if dtype == "bf16" else (4, float32)
    flops = 2 * batch * m * n * k
    moved = batch * (m * k + k * n + m * n) * size
    alone = replace(GpuRates(host(), EIGHT), worst=True)
    assert alone.piece(piece(flops, moved, dtype))[0] == pytest.approx(
        flops / rate, rel=0.25 if dtype == "bf16" else 0.37
    )


# Bytes and bus bandwidth of all-reduces over 8 H200 (Azure/AI-benchmarking-guide, ND_H200_v5_results.md).
REDUCED = [
    (1 << 16, 3.72), (1 << 18, 14.75), (1 << 20, 52.96), (1 << 22, 138.44), (1 << 24, 240.41), (1 << 26, 368.11),
    (1 << 28, 432.24), (1 << 30, 467.58), (1 << 33, 479.98),
]  # fmt: skip


@pytest.mark.parametrize(("size", "bus"), REDUCED)
def test_all_reduces_take_what_was_measured(size, bus):
    # nccl-tests counts what a ring would send.
    measured = 2 * 7 / 8 * size / (bus * 1e9)
    model = model_of(host("h200"))
    assert model.all_reduce(size, 8) == pytest.approx(measured, rel=0.35 if size < 1 << 20 else 0.25)


@pytest.mark.parametrize(("name", "bus"), [("h100", 480e9), ("h200", 480e9), ("b200", 830e9)])
def test_large_collectives_have_the_published_bandwidth(name, bus):
    model, size = model_of(host(name)), 64 << 30
    assert 2 * 7 / 8 * size / model.all_reduce(size, 8) == pytest.approx(bus, rel=0.01)
    ring = {"h100": 370e9, "h200": 370e9, "b200": 722e9}[name]
    assert 7 / 8 * size / model.gather(size, 8) == pytest.approx(ring, rel=0.01)
    # Two GPUs gain nothing from a switch that adds up; nothing exceeds the links.
    assert 2 * 1 / 2 * size / model.all_reduce(size, 2) == pytest.approx(ring, rel=0.01)
    links = host(name).chip.interconnect_bandwidth
    assert links is not None
    assert ring < links / 2


def test_small_collectives_have_the_measured_latency():
    # openxla/xla, collective_interpolator_data.h, sm_90: 64 KiB in 19.1 µs.
    assert model_of(host()).gather(1 << 16, 8) == pytest.approx(19.1e-6, rel=0.1)


@pytest.mark.parametrize("name", GPUS)
def test_one_product_and_one_fusion(name):
    chip, model = host(name).chip, model_of(host(name))
    shares = dict(model.products)
    assert chip.hbm_bandwidth is not None
    flops = 10**13
    took = seconds((("piece", 0),), [piece(flops, 1000)], name=name)
    assert took == pytest.approx(flops / (chip.peak("bfloat16") * shares["bfloat16"]) + model.launch)
    took = seconds((("piece", 0),), [piece(0, 10**9)], name=name)
    assert took == pytest.approx(10**9 / (0.865 * chip.hbm_bandwidth) + model.launch)
    # float32 products run as TF32, float8 ones at their own peak.
    for dtype, catalogue in (("f32", "tf32"), ("f8e4m3fn", "float8"), ("f64", "float64")):
        peak = chip.peak(catalogue) * shares.get(catalogue, shares["bfloat16"])
        assert seconds((("piece", 0),), [piece(flops, 0, dtype)], name=name) == pytest.approx(
            flops / peak + model.launch
        )


def test_more_of_anything_takes_longer():
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"):
        groups = tuple((n, (n + 1) % 8) for n in range(8)) if kind == "collective-permute" else EVERY
        times = [seconds((("collective", 0),), (), [exchange(kind, 10**n, groups)]) for n in range(3, 11)]
        assert times == sorted(times)
        assert times[0] < times[-1]
    works = [seconds((("piece", 0),), [piece(10**n, 10**n)]) for n in range(3, 15)]
    assert works == sorted(works)
    counted = [model_of(host()).all_reduce(1 << 28, n) for n in (1, 2, 4, 8)]
    assert counted[0] == 0.0
    # With the switch adding up, eight take no longer than four but for their latency.
    assert counted[1] < counted[2]
    assert counted[3] == pytest.approx(counted[2], rel=0.15)


def test_exchanges_overlap_with_work_and_wait_for_one_another():
    gather = exchange("all-gather", 8 << 30)
    alone = seconds((("collective", 0),), (), [gather])
    work = piece(0, 10**9)
    short = seconds((("piece", 0),), [work])
    hidden = facts((("start", 0), ("piece", 0), ("done", 0)), [work], [gather])
    time = predict_step(hidden, host(), EIGHT)
    assert time.seconds == pytest.approx(alone)
    assert time.communication == pytest.approx(alone - short)
    assert time.hidden == pytest.approx(short)
    assert time.low <= time.seconds < time.high == pytest.approx(alone + short, rel=0.01)
    # One link to the switch: two groups' exchanges of one device come one after the other.
    both = (("start", 0), ("start", 1), ("done", 0), ("done", 1))
    assert seconds(both, (), [gather, gather]) == pytest.approx(2 * alone)
    each = time_of_each(hidden, host(), EIGHT)
    assert sum(each.values()) == pytest.approx(time.seconds)


def test_kernels_copies_and_constants():
    kernel = Kernel("__gpu$xla.gpu.triton", 1, 10**13, 1000, "")
    model = model_of(host())
    at_peak = 10**13 / (989.5e12 * 0.79)
    assert seconds((("kernel", 0),), (), (), [kernel]) == pytest.approx(at_peak + model.launch)
    half = Constants(kernels=0.5, links=0.5, compute=0.5)
    assert seconds((("kernel", 0),), (), (), [kernel], constants=half) == pytest.approx(
        2 * at_peak + model.launch
    )
    size = 8 << 30
    whole = seconds((("collective", 0),), (), [exchange("all-gather", size)], constants=half)
    assert whole == pytest.approx(model.gather(2 * size, 8))
    copied = (("copy", 0), ("copied", 0))
    assert seconds(copied, [piece(0, 10**6, on_host=10**9)]) == pytest.approx(10**9 / 52e9)
    assert seconds(copied, [piece(0, 10**6, on_host=10**9)], host_bandwidth=1e9) == pytest.approx(1.0)


def test_a_program_for_an_h100_is_read():
    found = read_program(HLO.read_text())
    # x [2048, 1024] @ w [1024, 4096] @ v [4096, 1024] in bfloat16; the long dimension is sharded over two GPUs.
    assert found.num_devices == 2
    assert found.unknown == ()
    assert [p.flops for p in found.pieces] == [2 * 2048 * 1024 * 2048] * 2
    assert {p.dtype for p in found.pieces} == {"bf16"}
    sizes = {"x": 2048 * 1024 * 2, "w": 1024 * 2048 * 2, "y": 2048 * 2048 * 2}
    assert [p.hbm_bytes for p in found.pieces] == [sizes["x"] + sizes["w"] + sizes["y"]] * 2
    (reduce,) = found.collectives
    assert (reduce.kind, reduce.bytes, reduce.groups) == ("all-reduce", 2048 * 1024 * 2, ((0, 1),))
    mesh = (("data", 1), ("model", 2))
    time = predict_step(found, parse_target("h100:2"), mesh)
    product = 2 * 2048 * 1024 * 2048 / (989.5e12 * 0.79) + 3e-6
    # Around a ring of two, each GPU sends half of it twice.
    exchanged = 2048 * 1024 * 2 / (18 * 20.6e9) + 6e-6 + 2 * 2e-6
    assert time.compute == pytest.approx(2 * product)
    assert time.communication == pytest.approx(exchanged)
    assert time.seconds == pytest.approx(2 * product + exchanged)
    assert time.memory == time.hidden == 0.0
    assert [part.label for part in time.parts] == ["matrix products", "all-reduce over model"]


def test_what_cannot_be_timed():
    found = read_program(HLO.read_text())
    with pytest.raises(PlanError, match="compiled for 2 devices, but h100:8"):
        predict_step(found, parse_target("h100:8"), EIGHT)
    with pytest.raises(PlanError, match="has not the 2 devices"):
        predict_step(found, parse_target("h100:2"), EIGHT)
    with pytest.raises(PlanError, match="no model of the time on h20"):
        model_of(GpuHost("h20", 8))

"""``plan_serving``: the cheapest slice that answers as fast as it should, and how many requests it holds at once."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from capibara.config import ModularModelConfig
from capibara.errors import did_you_mean
from capibara.hardware import Price, UnknownPriceError, get_price
from capibara.plan.compiler import ProgramCache, find_compiler
from capibara.plan.errors import CompilationError, CompilerMissingError, DoesNotFitError, PlanError
from capibara.plan.serving.capacity import MeshSearch, Progress
from capibara.plan.serving.result import ServingOption, ServingPlan, ServingPoint, UnreachableTargetError
from capibara.plan.serving.task import ITEM_SIZES, Mesh, ServingTask
from capibara.plan.slices import Slice, parse_slice

__all__ = ["DEFAULT_SLICES", "plan_serving"]

DEFAULT_SLICES = (
    "v5e:2x2",
    "v5e:2x4",
    "v5e:4x4",
    "v6e:2x2",
    "v6e:2x4",
    "v4:2x2x1",
    "v4:2x2x2",
    "v5p:2x2x1",
    "v5p:2x2x2",
)
_LONGEST = 16_777_216


def plan_serving(
    config: ModularModelConfig | str | os.PathLike[str],
    topology: str | Slice | Iterable[str | Slice] | None = None,
    *,
    prompt_length: int,
    output_length: int,
    latency_ms_per_token: float | None = None,
    time_to_first_token_ms: float | None = None,
    dtype: str = "bfloat16",
    by_layer: bool = False,
    mesh: Mapping[str, int] | None = None,
    view: str | None = None,
    memory_limit_gb: float | None = None,
    compile: bool = True,
    max_compiles: int = 10,
    max_meshes: int = 1,
    max_slices: int = 3,
    max_concurrency: int = 4096,
    region: str | None = None,
    term: str = "on-demand",
    prices: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> ServingPlan:
    """Find how many requests a slice answers at once, how fast, and at what price; of several slices, the cheapest.

    The model's own steps are compiled: prefill, and decoding with a donated cache. Memory is the compiler's, times are
    predicted from the compiled programs (:mod:`capibara.plan.time`); greedy sampling on the device, nothing of the host
    is in them. A batch of requests of the same lengths begins together, as the model's cached form has it.

    Args:
      config: a configuration, its name or path.
      topology: one slice or several; by default the usual small ones of every generation, of which the ``max_slices``
        that look cheapest are compiled.
      prompt_length, output_length: tokens of a request and of its answer.
      latency_ms_per_token: milliseconds that may lie between two tokens of an answer.
      time_to_first_token_ms: milliseconds until the last request of a batch has its first token.
      dtype: of weights, arithmetic and cache: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
      by_layer: whether decoding has its layers unrolled and each layer's cache in arrays of its own
        (:func:`capibara.plan.workloads.decoding.split_layers`): less memory and time a token, minutes to compile.
      mesh: ``{"data": 1, "model": 4}``, for one slice; by default the most promising by arithmetic.
      view, memory_limit_gb: as :func:`capibara.plan.plan`.
      compile: whether to compile; without, and where there is no compiler, the figures are arithmetic and say so.
      max_compiles: programs to compile for one mesh (a few at least: prefill and decoding at several batches).
      max_meshes, max_slices: how many meshes of a slice, and how many slices of the default ones, to compile.
      max_concurrency: requests at a time beyond which nothing is looked for.
      region, term, prices: which price (see :func:`capibara.hardware.get_price`).
      cache: the folder of compiled results. workers: compilations at a time.
      progress: called with ``"start"`` or ``"done"``, what is compiled in words, and the program.

    Raises:
      DoesNotFitError: not one request fits any slice; the text says what takes the memory.
      UnreachableTargetError: no slice answers as fast as asked; the text says what the fastest reaches.
      PlanError: an impossible length, topology, mesh or dtype.
      CompilationError: the compiler failed for another reason than memory.
    """
    settings = _config(config)
    task = _task(settings, prompt_length, output_length, dtype, by_layer)
    latency = _milliseconds("latency_ms_per_token", latency_ms_per_token)
    first = _milliseconds("time_to_first_token_ms", time_to_first_token_ms)
    for name, value, least in (
        ("max_compiles", max_compiles, 4),
        ("max_meshes", max_meshes, 1),
        ("max_slices", max_slices, 1),
        ("max_concurrency", max_concurrency, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise PlanError(f"{name}={value!r} must be a whole number of at least {least}")
    targets = _targets(topology, view)
    limits = {target: _limit(target, memory_limit_gb) for target in targets}
    fixed = None if mesh is None else _mesh(mesh, targets, task)
    notes: list[str] = []
    costs = {target: _price(target, region, term, prices, notes) for target in targets}
    if compile:
        try:
            find_compiler()
        except CompilerMissingError as error:
            compile = False
            notes.append(f"nothing was compiled, all figures are arithmetic: {error}")
    else:
        notes.append("nothing was compiled: all figures are arithmetic (compile=True asks the TPU compiler)")

    rough = [
        _by_arithmetic(task, target, limits[target], costs[target], fixed, latency, first, max_concurrency)
        for target in targets
    ]
    if not compile:
        options = rough
    else:
        chosen = rough
        if topology is None:
            chosen = _promising(rough)[:max_slices]
            names = ", ".join(option.target.text for option in chosen)
            notes.append(f"of {len(targets)} slices the most promising by arithmetic were compiled: {names}")
        store = ProgramCache(cache)
        options = []
        for option in chosen:
            target = option.target
            meshes = (
                [fixed] if fixed else _ranked(task, target, limits[target], latency, first, max_concurrency)
            )
            searches = [
                MeshSearch(
                    task,
                    target,
                    each,
                    limits[target],
                    max_compiles,
                    max(1, max_concurrency // dict(each)["data"]),
                    store,
                    workers,
                    progress,
                )
                for each in meshes[:max_meshes]
            ]
            options.append(_compiled(searches, target, limits[target], costs[target], latency, first))
    _check(options, task, latency, first)
    return ServingPlan(
        work=task.title,
        options=tuple(sorted(options, key=_order)),
        latency=latency,
        first_token=first,
        weight_bytes=task.weight_bytes,
        cache_bytes_per_request=task.cache_bytes_per_request,
        notes=tuple(dict.fromkeys(notes)),
    )


# ---- one slice ----------------------------------------------------------------------------------------------


def _compiled(
    searches: list[MeshSearch],
    target: Slice,
    limit: int,
    price: Price | None,
    latency: float | None,
    first: float | None,
) -> ServingOption:
    largest: list[ServingPoint] = []
    good: list[ServingPoint] = []
    small: list[ServingPoint] = []
    failures = []
    for each in searches:
        try:
            found = each.largest()
        except CompilationError as error:
            # One mesh that the compiler cannot do is no reason to give up the others.
            failures.append(str(error))
            continue
        if found is None:
            failures.append(_too_large(each))
            continue
        largest.append(found)
        free = latency is None and first is None
        within = each.busiest(found) if free else each.within(found, latency, first)
        if within is not None:
            good.append(within)
        small += [point for point in [each.fastest()] if point is not None]

    def priced(points: list[ServingPoint], key: Any) -> ServingPoint | None:
        return replace(min(points, key=key), price=price) if points else None

    return ServingOption(
        target=target,
        limit_bytes=limit,
        largest=priced(largest, lambda p: -p.concurrency),
        at_target=priced(good, lambda p: -p.tokens_per_second),
        smallest=priced(small, lambda p: (p.seconds_per_token, p.time_to_first_token)),
        compiled=sum(each.compiled for each in searches),
        failure="" if largest else "; ".join(dict.fromkeys(failures)),
    )


def _too_large(search: MeshSearch) -> str:
    known = [m for m in (*search.decoded.values(), *search.prefilled.values()) if not m.fits]
    least = min(known, key=lambda m: (m.rows, m.needed or 0))
    rough = search.task.rough(search.mesh)
    parts = f"weights {rough.weights / 2**30:.2f} GiB, cache of a request {rough.row / 2**30:.3g} GiB"
    said = f"{least.needed / 2**30:.2f} GiB a device" if least.needed else "more than a device has"
    return (
        f"{search.target}: {least.rows * search.data} requests take {said} by the compiler ({parts}), of "
        f"{search.limit / 2**30:.2f} GiB"
    )


def _by_arithmetic(
    task: ServingTask,
    target: Slice,
    limit: int,
    price: Price | None,
    fixed: Mesh | None,
    latency: float | None,
    first: float | None,
    most: int,
) -> ServingOption:
    meshes = [fixed] if fixed else _ranked(task, target, limit, latency, first, most)
    fitting = [(mesh, rows) for mesh in meshes if (rows := _rows(task, mesh, limit, most))]
    if not fitting:
        least = min((task.rough(mesh) for mesh in meshes), key=lambda r: r.hbm_bytes(1))
        parts = f"weights {least.weights / 2**30:.2f} GiB, cache of a request {least.row / 2**30:.3g} GiB"
        failure = (
            f"{target}: one request a device takes {least.hbm_bytes(1) / 2**30:.2f} GiB by arithmetic ({parts}), of "
            f"{limit / 2**30:.2f} GiB"
        )
        return ServingOption(target=target, limit_bytes=limit, failure=failure)
    points = [_rough_point(task, target, mesh, rows, price) for mesh, rows in fitting]
    good = [
        _rough_point(task, target, mesh, rows, price)
        for mesh, most_rows in fitting
        if (rows := _rough_within(task, target, mesh, most_rows, latency, first))
    ]
    smallest = [_rough_point(task, target, mesh, 1, price) for mesh, _ in fitting]
    return ServingOption(
        target=target,
        limit_bytes=limit,
        largest=max(points, key=lambda p: p.concurrency),
        at_target=max(good, key=lambda p: p.tokens_per_second) if good else None,
        smallest=min(smallest, key=lambda p: p.seconds_per_token),
    )


def _rough_point(
    task: ServingTask, target: Slice, mesh: Mesh, rows: int, price: Price | None
) -> ServingPoint:
    rough, data = task.rough(mesh), dict(mesh)["data"]
    held = {"parameters": rough.weights, "cache": rows * rough.row}
    return ServingPoint(
        target=target,
        mesh=mesh,
        concurrency=rows * data,
        group=task.group(rows) * data,
        prompt_length=task.prompt_length,
        output_length=task.output_length,
        decode=task.rough_decode(target, mesh, rows),
        prefill=task.rough_prefill(target, mesh, rows),
        decode_memory={**held, "temporaries": rows * rough.temporaries},
        prefill_memory={**held, "temporaries": rough.prefill_bytes},
        cache_bytes=rows * data * task.cache_bytes_per_request,
        source="analytic",
        price=price,
    )


def _rows(task: ServingTask, mesh: Mesh, limit: int, most: int) -> int:
    return min(task.rough(mesh).capacity(limit), most // dict(mesh)["data"])


def _rough_within(
    task: ServingTask, target: Slice, mesh: Mesh, most: int, latency: float | None, first: float | None
) -> int:
    """The most rows that meet the targets by arithmetic, 0 where none do: by halving, for both grow with the rows."""

    def meets(rows: int) -> bool:
        decode = task.rough_decode(target, mesh, rows).seconds
        prefill = task.rough_prefill(target, mesh, rows).seconds * -(-rows // task.group(rows))
        return (latency is None or decode <= latency) and (first is None or prefill <= first)

    if meets(most):
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


def _ranked(
    task: ServingTask, target: Slice, limit: int, latency: float | None, first: float | None, most: int
) -> list[Mesh]:
    """Meshes, the most promising first: most tokens a second within the targets, then the fastest tokens."""

    def worth(mesh: Mesh) -> tuple[float, float, float]:
        most_rows = _rows(task, mesh, limit, most)
        if most_rows == 0:
            return 2, task.rough(mesh).hbm_bytes(1), 0
        rows = _rough_within(task, target, mesh, most_rows, latency, first)
        if rows == 0:
            return 1, task.rough_decode(target, mesh, 1).seconds, 0
        return 0, -_rough_point(task, target, mesh, rows, None).tokens_per_second, 0

    return sorted(task.meshes(target), key=worth)


# ---- all of them --------------------------------------------------------------------------------------------


def _order(option: ServingOption) -> tuple[float, float]:
    point = option.at_target
    if point is None:
        return (2, 0.0) if option.largest is None else (1, option.largest.seconds_per_token)
    cost = point.usd_per_million_tokens
    if cost is not None:
        return 0, cost
    # Slices without a price come after those with one.
    return 0.5, -point.tokens_per_second / point.target.num_chips


def _promising(options: list[ServingOption]) -> list[ServingOption]:
    """The best of each generation first, then the others; of equals the one with fewer chips."""
    ordered = sorted(options, key=lambda o: (bool(o.failure), *_order(o), o.target.num_chips))
    first: dict[str, ServingOption] = {}
    for option in ordered:
        first.setdefault(option.target.generation, option)
    best = [option for option in ordered if option is first[option.target.generation]]
    rest = [option for option in ordered if option is not first[option.target.generation]]
    return [option for option in (*best, *rest) if not option.failure] or ordered[:1]


def _check(
    options: list[ServingOption], task: ServingTask, latency: float | None, first: float | None
) -> None:
    if any(option.at_target is not None for option in options):
        return
    fitting = [option for option in options if option.largest is not None]
    if not fitting:
        reasons = "\n".join(f"  {option.failure}" for option in options)
        raise DoesNotFitError(
            f"nothing fits: {task.title}\n{reasons}\n"
            f"Weights are {task.weight_bytes / 2**30:.2f} GiB, the cache of a request "
            f"{task.cache_bytes_per_request / 2**30:.3g} GiB, all devices together. More chips, or shorter prompts and "
            "answers would help"
        )
    asked = [
        f"{latency * 1e3:g} ms a token" if latency else "",
        f"{first * 1e3:g} ms to the first token" if first else "",
    ]
    lines = []
    for option in fitting:
        point = option.smallest or option.largest
        if point is not None:
            lines.append(
                f"  {option.target}: {point.seconds_per_token * 1e3:.3g} ms a token, "
                f"{point.time_to_first_token * 1e3:.3g} ms to the first, with {point.concurrency} requests at a time"
            )
    how = "by arithmetic" if all(o.compiled == 0 for o in fitting) else "compiled"
    raise UnreachableTargetError(
        f"no slice reaches {' and '.join(word for word in asked if word)}. The fastest ({how}):\n"
        + "\n".join(lines)
    )


# ---- arguments ----------------------------------------------------------------------------------------------


def _config(config: Any) -> ModularModelConfig:
    if isinstance(config, ModularModelConfig):
        return config
    if isinstance(config, os.PathLike):
        return ModularModelConfig.from_toml(Path(config))
    if isinstance(config, str):
        return ModularModelConfig.from_toml(config)
    raise PlanError(f"config is {type(config).__name__}, expected a ModularModelConfig, its name or path")


def _task(config: ModularModelConfig, prompt: int, output: int, dtype: str, by_layer: bool) -> ServingTask:
    for name, value in (("prompt_length", prompt), ("output_length", output)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LONGEST:
            raise PlanError(f"{name}={value!r} must be a whole number of tokens from 1 to {_LONGEST}")
    most = config.model.max_sequence_length
    if "attention" in config.model.block_kinds and prompt + output > most:
        raise PlanError(
            f"prompt_length={prompt} and output_length={output} are {prompt + output} tokens, but the model reads at "
            f"most model.max_sequence_length={most}: shorten one of them, or plan for a model that reads further"
        )
    if dtype not in ITEM_SIZES:
        raise PlanError(
            f"dtype={dtype!r} must be one of {', '.join(ITEM_SIZES)}.{did_you_mean(str(dtype), tuple(ITEM_SIZES))}"
        )
    if not isinstance(by_layer, bool):
        raise PlanError(f"by_layer={by_layer!r} must be True or False")
    return ServingTask(config, dtype, prompt, output, by_layer)


def _milliseconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise PlanError(f"{name}={value!r} must be a number of milliseconds above 0")
    return value / 1e3


def _targets(topology: Any, view: str | None) -> list[Slice]:
    if topology is None:
        return [parse_slice(name, view if name.startswith("v4") else None) for name in DEFAULT_SLICES]
    if isinstance(topology, str | Slice):
        return [parse_slice(topology, view)]
    if not isinstance(topology, Iterable):
        raise PlanError(f"topology={topology!r} must be a slice such as 'v5e:2x2', or several")
    found = list(dict.fromkeys(parse_slice(each, view) for each in topology))
    if not found:
        raise PlanError("topology names no slice: give at least one, such as 'v5e:2x2'")
    return found


def _mesh(mesh: Any, targets: list[Slice], task: ServingTask) -> Mesh:
    if not isinstance(mesh, Mapping) or set(mesh) != {"data", "model"}:
        raise PlanError(
            f"mesh={mesh!r} must give the sizes of 'data' and 'model', as {{'data': 1, 'model': 4}}"
        )
    found: Mesh = (("data", mesh["data"]), ("model", mesh["model"]))
    for target in targets:
        possible = list(task.meshes(target))
        if found not in possible:
            listed = ", ".join(f"{dict(m)['data']} × {dict(m)['model']}" for m in possible)
            raise PlanError(
                f"mesh={dict(mesh)}: {target} can be divided into data × model = {listed} (model divides the "
                "key-value heads)"
            )
    return found


def _limit(target: Slice, memory_limit_gb: Any) -> int:
    if memory_limit_gb is None:
        return target.usable_hbm_bytes
    if (
        isinstance(memory_limit_gb, bool)
        or not isinstance(memory_limit_gb, int | float)
        or not 0 < memory_limit_gb < 1e6
    ):
        raise PlanError(f"memory_limit_gb={memory_limit_gb!r} must be a number of GiB above 0")
    return min(target.usable_hbm_bytes, int(memory_limit_gb * 2**30))


def _price(target: Slice, region: str | None, term: str, path: Any, notes: list[str]) -> Price | None:
    try:
        return get_price(f"tpu-{target.generation}", region=region, term=term, path=path)
    except UnknownPriceError as error:
        notes.append(f"no price: {error}")
        return None

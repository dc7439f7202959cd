"""``plan_serving``: the cheapest slice within latency targets, and its number of concurrent requests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from capibara.config import ModularModelConfig
from capibara.hardware import Price
from capibara.plan.compiler import ProgramCache, compiler_for
from capibara.plan.errors import CompilationError, CompilerMissingError, DoesNotFitError, PlanError
from capibara.plan.serving.arguments import milliseconds, read_config, read_mesh, read_slices, serving_task
from capibara.plan.serving.arithmetic import by_arithmetic, ranked_meshes
from capibara.plan.serving.capacity import MeshSearch, Progress
from capibara.plan.serving.result import ServingOption, ServingPlan, ServingPoint, UnreachableTargetError
from capibara.plan.serving.task import ServingTask
from capibara.plan.sizes import size_text
from capibara.plan.targets import Target
from capibara.plan.validation import check_counts, compile_remedy, limit_of, price_of

__all__ = ["plan_serving"]


def plan_serving(
    config: ModularModelConfig | str | os.PathLike[str],
    topology: str | Target | Iterable[str | Target] | None = None,
    *,
    prompt_length: int,
    output_length: int,
    latency_ms_per_token: float | None = None,
    time_to_first_token_ms: float | None = None,
    dtype: str = "bfloat16",
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
    """Find a slice's concurrent requests, latency and price; for several slices, the cheapest.

    The model's own steps are compiled: prefill, and decoding with a donated cache. Memory is the compiler's, times are
    predicted from the compiled programs (:mod:`capibara.plan.time`), with greedy sampling on the device and without
    the host. A batch of requests of equal lengths starts together, as the model's cached form requires.

    Args:
      config: a configuration, its name or path.
      topology: one slice or several; by default the usual small ones of every generation, of which the ``max_slices``
        that look cheapest are compiled.
      prompt_length, output_length: tokens of a request and of its answer.
      latency_ms_per_token: maximum milliseconds between two tokens of an answer.
      time_to_first_token_ms: maximum milliseconds until the last request of a batch has its first token.
      dtype: of weights, arithmetic and cache: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
      mesh: ``{"data": 1, "model": 4}``, for one slice; by default the most promising by arithmetic.
      view, memory_limit_gb: as :func:`capibara.plan.plan`.
      compile: whether to compile; otherwise, and without a compiler, the figures are arithmetic and labelled as such.
      max_compiles: maximum number of programs per mesh (at least a few: prefill and decoding at several batch sizes).
      max_meshes, max_slices: number of meshes per slice, and of default slices, to compile.
      max_concurrency: maximum number of concurrent requests to consider (at least one per device of ``data``).
      region, term, prices: which price (see :func:`capibara.hardware.get_price`).
      cache: the folder of compiled results. workers: parallel compilations.
      progress: called with ``"start"`` or ``"done"``, a description of the compilation, and the program.

    Raises:
      DoesNotFitError: not one request fits on any slice; the message says what takes the memory.
      UnreachableTargetError: no slice meets the latency targets; the message gives the fastest.
      PlanError: an invalid length, topology, mesh or dtype.
      CompilationError: the compiler failed for another reason than memory.
    """
    settings = read_config(config)
    task = serving_task(settings, prompt_length, output_length, dtype)
    latency = milliseconds("latency_ms_per_token", latency_ms_per_token)
    first = milliseconds("time_to_first_token_ms", time_to_first_token_ms)
    for name, value, least in (
        ("max_compiles", max_compiles, 4),
        ("max_meshes", max_meshes, 1),
        ("max_slices", max_slices, 1),
        ("max_concurrency", max_concurrency, 1),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise PlanError(f"{name}={value!r} must be an integer of at least {least}")
    if workers is not None:
        check_counts(workers=workers)
    targets = read_slices(topology, view)
    limits = {target: limit_of(target, memory_limit_gb) for target in targets}
    fixed = None if mesh is None else read_mesh(mesh, targets, task)
    notes: list[str] = [note for target in targets for note in target.notes()]
    costs = {target: price_of(target, region, term, prices, notes) for target in targets}
    by_platform = {target.platform: target for target in targets}
    if compile:
        try:
            notes += [note for each in by_platform.values() for note in compiler_for(each).notes()]
        except CompilerMissingError as error:
            compile = False
            notes.append(f"nothing was compiled, all figures are arithmetic: {error}")
    else:
        notes.append(f"nothing was compiled: all figures are arithmetic ({compile_remedy(targets[0])})")

    rough = [
        by_arithmetic(task, target, limits[target], costs[target], fixed, latency, first, max_concurrency)
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
                [fixed]
                if fixed
                else ranked_meshes(task, target, limits[target], latency, first, max_concurrency)
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
    target: Target,
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
            # One mesh that the compiler cannot do is not a reason to give up the others.
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
    parts = f"weights {size_text(rough.weights)}, cache of a request {size_text(rough.row)}"
    said = f"{size_text(least.needed)} a device" if least.needed else "more than a device has"
    return (
        f"{search.target}: {least.rows * search.data} requests take {said} by the compiler ({parts}), of "
        f"{size_text(search.limit)}"
    )


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
            f"Weights are {size_text(task.weight_bytes)}, the cache of a request "
            f"{size_text(task.cache_bytes_per_request)}, all devices together. More chips, or shorter prompts and "
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

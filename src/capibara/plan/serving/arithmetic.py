"""Estimate slices by arithmetic alone, to choose slices and meshes worth compiling."""

from __future__ import annotations

from capibara.hardware import Price
from capibara.plan.serving.result import ServingOption, ServingPoint
from capibara.plan.serving.task import Mesh, ServingTask
from capibara.plan.sizes import size_text
from capibara.plan.targets import Target

__all__ = ["by_arithmetic", "ranked_meshes"]


def by_arithmetic(
    task: ServingTask,
    target: Target,
    limit: int,
    price: Price | None,
    fixed: Mesh | None,
    latency: float | None,
    first: float | None,
    most: int,
) -> ServingOption:
    """The estimates of a slice: the most requests of any mesh, and the most tokens per second within the targets."""
    meshes = [fixed] if fixed else ranked_meshes(task, target, limit, latency, first, most)
    fitting = [(mesh, rows) for mesh in meshes if (rows := _rows(task, mesh, limit, most))]
    if not fitting:
        least = min((task.rough(mesh) for mesh in meshes), key=lambda r: r.hbm_bytes(1))
        parts = f"weights {size_text(least.weights)}, cache of a request {size_text(least.row)}"
        failure = (
            f"{target}: one request a device takes {size_text(least.hbm_bytes(1))} by arithmetic ({parts}), of "
            f"{size_text(limit)}"
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
    task: ServingTask, target: Target, mesh: Mesh, rows: int, price: Price | None
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
    return min(task.rough(mesh).capacity(limit), max(1, most // dict(mesh)["data"]))


def _rough_within(
    task: ServingTask, target: Target, mesh: Mesh, most: int, latency: float | None, first: float | None
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


def ranked_meshes(
    task: ServingTask, target: Target, limit: int, latency: float | None, first: float | None, most: int
) -> list[Mesh]:
    """Meshes, the most promising first: most tokens per second within the targets, then the fastest tokens."""

    def worth(mesh: Mesh) -> tuple[float, float, float]:
        most_rows = _rows(task, mesh, limit, most)
        if most_rows == 0:
            return 2, task.rough(mesh).hbm_bytes(1), 0
        rows = _rough_within(task, target, mesh, most_rows, latency, first)
        if rows == 0:
            return 1, task.rough_decode(target, mesh, 1).seconds, 0
        return 0, -_rough_point(task, target, mesh, rows, None).tokens_per_second, 0

    return sorted(task.meshes(target), key=worth)

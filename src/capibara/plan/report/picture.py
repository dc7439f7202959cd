"""A plan as a figure: memory, time, and the mesh axis of each link."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from capibara.errors import MissingExtraError
from capibara.plan.report.labels import differences, mesh_word, sharding_word
from capibara.plan.sizes import unit_of
from capibara.plan.slices import Slice

if TYPE_CHECKING:
    from capibara.plan.attribution import Attribution
    from capibara.plan.candidate import Candidate
    from capibara.plan.result import Plan

__all__ = ["draw_plan", "figure_of", "link_axes"]

_COLOURS = (
    "tab:blue",
    "tab:orange",
    "tab:green",
    "tab:red",
    "tab:purple",
    "tab:brown",
    "tab:pink",
    "tab:gray",
)
# A picture of more chips than this shows the corner of the grid.
_MOST_CHIPS = 512
_MOST_PARTS = 14

Link = tuple[tuple[int, ...], tuple[int, ...]]


def draw_plan(plan: Plan, stream: BinaryIO) -> None:
    """Write a PNG of the plan's candidates and the best one's mesh.

    Raises:
      MissingExtraError: matplotlib is not installed.
    """
    figure_of(plan).canvas.print_png(stream)


def figure_of(plan: Plan) -> Any:
    """The figure, on its own Agg canvas, without changing pyplot's state."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "plan", "the figure of a plan") from None
    figure = Figure(figsize=(13, 8), layout="constrained")
    FigureCanvasAgg(figure)
    best = plan.best
    # Without a compiled program the order of the devices is not known: there is no mesh to draw. Nor is there a grid
    # where all devices are joined by a switch.
    grid_shown = bool(best.coordinates) and isinstance(plan.target, Slice)
    columns = 2 if grid_shown else 1
    where = plan.where if plan.where is not None and plan.where.seconds else None
    rows = 2 if where is None else 3
    figure.set_figheight(4 * rows)
    grid = figure.add_gridspec(rows, columns, width_ratios=(3, 2)[:columns])
    labels = _labels(plan)
    _bars(figure.add_subplot(grid[0, 0]), plan, labels, "memory")
    _bars(figure.add_subplot(grid[1, 0]), plan, labels, "time")
    if grid_shown:
        _mesh(figure.add_subplot(grid[:2, 1], projection="3d"), best)
    if where is not None:
        _parts(figure.add_subplot(grid[2, :]), where)
    figure.suptitle(f"{plan.work}\non {plan.target}", fontsize=11)
    return figure


def _bars(axes: Any, plan: Plan, labels: Sequence[str], what: str) -> None:
    rows = []
    most = max(candidate.hbm_bytes for candidate in plan.candidates)
    scale, unit = unit_of(max(most, plan.limit_bytes))
    for candidate in plan.candidates:
        if what == "memory":
            rows.append({name: size / scale for name, size in candidate.memory.items()})
        else:
            time = candidate.time
            rows.append({"compute": time.compute, "memory": time.memory, "communication": time.communication})
    names = list(dict.fromkeys(name for row in rows for name in row))
    names.sort(key=lambda name: -max(row.get(name, 0.0) for row in rows))
    places = list(range(len(rows)))[::-1]
    for number, name in enumerate(names):
        left = [sum(row.get(other, 0.0) for other in names[:number]) for row in rows]
        widths = [row.get(name, 0.0) for row in rows]
        axes.barh(places, widths, left=left, color=_COLOURS[number % len(_COLOURS)], label=name, height=0.6)
    axes.set_yticks(places, labels, fontsize=8)
    if what == "memory":
        axes.axvline(plan.limit_bytes / scale, color="black", linestyle="--", linewidth=1)
        axes.set_xlabel(f"{unit} of HBM per device (dashed: the limit, {plan.limit_bytes / scale:.2f})")
    else:
        for place, candidate in zip(places, plan.candidates, strict=True):
            axes.plot(
                [candidate.time.low, candidate.time.high], [place - 0.38] * 2, color="black", linewidth=1
            )
        axes.set_xlabel("predicted seconds per step (line: range)")
    # Above the bars: inside the axes it would cover some of them.
    axes.legend(
        fontsize=8,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(names),
        frameon=False,
        columnspacing=1.2,
        handlelength=1.2,
    )


def _parts(axes: Any, where: Attribution) -> None:
    """The parts of the model that take most, with their shares of the step."""
    shown = where.parts[:_MOST_PARTS]
    places = list(range(len(shown)))[::-1]
    left = [0.0] * len(shown)
    for name, colour in (("compute", 0), ("other", 1), ("communication", 3)):
        widths = [getattr(one, name) for one in shown]
        axes.barh(places, widths, left=left, color=_COLOURS[colour], label=name, height=0.7)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, one in zip(places, shown, strict=True):
        axes.text(
            one.seconds,
            place,
            f" {one.seconds:.3g} s, {one.seconds / where.seconds:.1%}",
            va="center",
            fontsize=8,
        )
    axes.set_yticks(places, [one.name for one in shown], fontsize=8)
    axes.set_xlim(0, 1.18 * max(one.seconds for one in shown))  # room for the numbers
    axes.set_xlabel("predicted seconds per step of the best layout, by part of the model")
    axes.legend(fontsize=8, loc="lower right", frameon=False)


def _labels(plan: Plan) -> list[str]:
    layouts = [candidate.layout for candidate in plan.candidates]
    settings = [candidate.settings for candidate in plan.candidates]
    own = None if plan.own is None else plan.own.candidate
    marks = ["yours: " if candidate is own else "" for candidate in plan.candidates]
    return [
        f"{mark}{mesh_word(layout)}\n{sharding_word(layout)}, remat {layout.remat}, {layout.microbatches} micro"
        + "".join(f"\n{each}" for each in (*flags.split(), *more))
        for mark, layout, flags, more in zip(marks, layouts, differences(layouts), settings, strict=True)
    ]


def link_axes(candidate: Candidate) -> dict[Link, str]:
    """The mesh axis of every link of the grid.

    A link joins two chips that are neighbours on the grid, or the two ends of an axis that closes to a ring. It
    belongs to the only mesh axis along which the devices at its ends differ, or to ``"several"`` if they differ along
    more. Devices that a switch joins have no such links.
    """
    target = candidate.target
    if not isinstance(target, Slice):
        return {}
    sizes = [size for _, size in candidate.layout.mesh]
    names = [axis for axis, _ in candidate.layout.mesh]
    dims = len(target.shape)
    at: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for number, place in enumerate(candidate.coordinates):
        position = []
        for size in reversed(sizes):
            number, index = divmod(number, size)
            position.append(index)
        at.setdefault((*place[:dims],), []).append(tuple(reversed(position)))
    out: dict[Link, str] = {}
    for place, axis in itertools.product(at, range(dims)):
        length = target.shape[axis] if axis < len(target.shape) else 1
        there = list(place)
        there[axis] += 1
        if there[axis] == length:
            if not target.wrap[axis] or length < 3:
                continue
            there[axis] = 0
        other = tuple(there)
        if other not in at:
            continue
        # Devices of one chip share its links: the nearest pair of positions counts.
        differing = min(
            (
                [n for n, (a, b) in enumerate(zip(p, q, strict=True)) if a != b]
                for p in at[place]
                for q in at[other]
            ),
            key=len,
        )
        out[place, other] = names[differing[0]] if len(differing) == 1 else "several"
    return out


def _mesh(axes: Any, best: Candidate) -> None:
    links = link_axes(best)
    names = [axis for axis, size in best.layout.mesh if size > 1]
    colours = dict(zip([*names, "several"], [*_COLOURS[: len(names)], "lightgray"], strict=True))
    places = [(*place, 0, 0, 0)[:3] for place in {place for link in links for place in link} or {(0, 0, 0)}]
    if len(places) > _MOST_CHIPS:
        places = [p for p in places if max(p) < 8]
    shown = set(places)
    axes.scatter(*zip(*places, strict=True), color="black", s=14, depthshade=False)
    seen: set[str] = set()
    for (a, b), name in links.items():
        start, end = (*a, 0, 0, 0)[:3], (*b, 0, 0, 0)[:3]
        if start not in shown or end not in shown:
            continue
        wraps = max(abs(p - q) for p, q in zip(start, end, strict=True)) > 1
        label = None if name in seen or wraps else name
        if wraps:
            # A stub at both ends stands for the cable round the back.
            for here, there in ((start, end), (end, start)):
                stub = [
                    h + (0.3 if h > t else -0.3 if h < t else 0.0) for h, t in zip(here, there, strict=True)
                ]
                axes.plot(*zip(here, stub, strict=True), color=colours[name], linewidth=1.5, linestyle=":")
            continue
        seen.add(name)
        axes.plot(*zip(start, end, strict=True), color=colours[name], linewidth=2, label=label)
    axes.set_axis_off()
    if seen:
        axes.legend(
            fontsize=8,
            loc="upper center",
            bbox_to_anchor=(0.5, 0.0),
            ncols=len(seen),
            title="mesh axis on the links",
        )
    axes.set_title(f"best: {mesh_word(best.layout)} on {best.target.text}", fontsize=10)

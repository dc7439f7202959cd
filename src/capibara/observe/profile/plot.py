"""Draw a profile as PNG and as HTML: what ran when, where the time went, how far operations are from the limits."""

from __future__ import annotations

import base64
import html
import io
import os
from pathlib import Path
from typing import Any

from capibara.errors import MissingExtraError
from capibara.files import replace_file
from capibara.observe.profile.result import Operation, Profile, seconds_text
from capibara.observe.profile.timeline import WHOLE, Timeline

__all__ = ["plot_profile", "write_page"]

_COLOURS = {"compute": "#3b6ea5", "kernel": "#4a9c6d", "copy": "#b58b2a", "collective": "#b0413e"}
# Of the timeline only.
_HOST = {"compiling": "#6a4c93", "tracing": "#b79fd3"}
_IDLE = "#e6e7ea"
_SHOWN = 12


def plot_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Draw the timeline, the longest operations, and the roofline, as a PNG file.

    Of the roofline: Williams et al., doi:10.1145/1498765.1498785.

    Raises:
      MissingExtraError: matplotlib is not installed. OSError: the file cannot be written.
    """
    replace_file(Path(path), _png(profile))


def _png(profile: Profile) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "train", "the figure of a profile") from None

    timeline = profile.timeline
    rows = 0 if timeline is None else len(timeline.tracks)
    heights = ([0.6 + 0.38 * rows] if rows else []) + [3.6, 3.6]
    figure = Figure(figsize=(11, 1.2 + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(_plain(str(profile).split("\n", 1)[0]))
    *above, bars, roof = figure.subplots(len(heights), 1, height_ratios=heights)
    if timeline is not None and above:
        _draw_timeline(above[0], timeline)
    shown = profile.operations[:_SHOWN][::-1]
    bars.barh(
        range(len(shown)),
        [1e3 * one.seconds / profile.devices for one in shown],
        color=[_COLOURS[one.kind] for one in shown],
    )
    bars.set_yticks(range(len(shown)), [_label(one) for one in shown], fontsize=8)
    bars.set_xlabel("time on one device, all runs (ms)")
    bars.set_title("longest operations", fontsize=11, loc="left")
    present = [kind for kind in _COLOURS if kind in {one.kind for one in shown}]
    if present:
        _legend(bars, {kind: _COLOURS[kind] for kind in present})
    products = [one for one in profile.operations if one.flops and one.bytes and one.seconds]
    if products:
        for kind in dict.fromkeys(one.kind for one in products):
            mine = [one for one in products if one.kind == kind]
            roof.scatter(
                [one.flops / one.bytes for one in mine],
                [one.flops / one.seconds for one in mine],
                [20 + 400 * one.seconds / max(p.seconds for p in products) for one in mine],
                color=_COLOURS[kind],
                alpha=0.7,
            )
        if profile.peak_flops and profile.peak_bandwidth:
            ridge = profile.peak_flops / profile.peak_bandwidth
            ends = [min(one.flops / one.bytes for one in products), ridge]
            ends = [min(ends) / 4, ridge, 4 * max(ridge, *(one.flops / one.bytes for one in products))]
            roof.plot(ends, [min(x * profile.peak_bandwidth, profile.peak_flops) for x in ends], "k-")
        roof.set(xscale="log", yscale="log")
        roof.margins(y=0.2)  # circles have a size that the axes do not know of
        present = [kind for kind in _COLOURS if kind in {one.kind for one in products}]
        limit = {"limit": "black"} if profile.peak_flops and profile.peak_bandwidth else {}
        _legend(roof, {**{kind: _COLOURS[kind] for kind in present}, **limit})
    else:
        roof.text(0.5, 0.5, "no matrix product or convolution ran", ha="center", transform=roof.transAxes)
    roof.set(xlabel="FLOP per byte", ylabel="FLOP/s of one device")
    roof.set_title("roofline; a circle is an operation, its area the time", fontsize=11, loc="left")
    for axes in (bars, roof):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


def _draw_timeline(axes: Any, timeline: Timeline) -> None:
    """A row for the host and each device: in each part of the time, the share of each kind."""
    scale, unit = next((pair for pair in _UNITS if timeline.seconds < 1000 / pair[0]), _UNITS[-1])
    edges = [scale * timeline.seconds * one / timeline.bins for one in range(timeline.bins + 1)]
    colours = {**_COLOURS, **_HOST}
    seen = dict.fromkeys(kind for kind in colours for one in timeline.tracks if kind in one.shares)
    for row, track in enumerate(timeline.tracks):
        base = len(timeline.tracks) - 1 - row
        axes.fill_between([edges[0], edges[-1]], base + 0.06, base + 0.94, color=_IDLE, linewidth=0)
        below = [0] * timeline.bins
        for kind, share in track.shares.items():
            top = [low + more for low, more in zip(below, share, strict=True)]
            ends = [[base + 0.06 + 0.88 * one / WHOLE for one in (*side, side[-1])] for side in (below, top)]
            colour = colours.get(kind, "#555555")
            axes.fill_between(edges, *ends, step="post", color=colour, linewidth=0, rasterized=True)
            below = top
    names = [track.name for track in timeline.tracks][::-1]
    axes.set_yticks([row + 0.5 for row in range(len(names))], [_plain(name) for name in names], fontsize=9)
    axes.set(xlim=(0, edges[-1]), ylim=(0, len(names)))
    more = f"; {timeline.left_out} more devices ran" if timeline.left_out else ""
    part = seconds_text(timeline.seconds / timeline.bins)
    axes.set_xlabel(f"time since the region began ({unit}); the height is the share of {part}{more}")
    axes.set_title("timeline", fontsize=11, loc="left")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _legend(axes, {**{kind: colours[kind] for kind in seen}, "idle": _IDLE})


_UNITS = ((1e6, "µs"), (1e3, "ms"), (1.0, "s"))


def _legend(axes: Any, colours: dict[str, str]) -> None:
    """Of kinds, above the axes on the right."""
    from matplotlib.patches import Patch

    axes.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in colours.items()],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(colours),
        frameon=False,
        fontsize=9,
        borderaxespad=0.2,
        handlelength=1.2,
    )


def _label(one: Operation) -> str:
    where = one.source.rpartition("/")[2] or one.path.rpartition("/")[2]
    return _plain(f"{one.name}  {where}"[:60])


def _plain(text: str) -> str:
    """Text that matplotlib does not take for a formula."""
    return text.replace("$", r"\$")


def write_page(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile with its figure and all its operations into one HTML file that loads nothing.

    Raises:
      MissingExtraError: matplotlib is not installed. OSError: the file cannot be written.
    """
    rows = []
    for one in profile.operations:
        rate = f"{one.flops / one.seconds / 1e9:,.1f}" if one.flops and one.seconds else ""
        cells = (
            one.program,
            one.name,
            one.kind,
            f"{1e3 * one.seconds:,.3f}",
            f"{one.count:,}",
            rate,
            one.source or one.path,
        )
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    title = html.escape(profile.name)
    image = base64.b64encode(_png(profile)).decode()
    head = "".join(
        f"<th>{name}</th>" for name in ("program", "operation", "kind", "ms", "runs", "GFLOP/s", "from")
    )
    replace_file(
        Path(path),
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>"
        "body{font:14px system-ui;margin:2em}table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:left;"
        "border-bottom:1px solid #ddd}td:nth-child(n+4):nth-child(-n+6){text-align:right}img{max-width:100%}"
        f"</style><h1>{title}</h1><pre>{html.escape(str(profile))}</pre>"
        f'<img alt="timeline, time of operations, and roofline" src="data:image/png;base64,{image}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></html>",
    )

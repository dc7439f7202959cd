"""Draw a profile: where the time went, and how far each operation is from the machine's limits; as PNG and as HTML."""

from __future__ import annotations

import base64
import html
import io
import os
from pathlib import Path

from capibara.errors import MissingExtraError
from capibara.files import replace_file
from capibara.observe.profile.result import Operation, Profile

__all__ = ["plot_profile", "write_page"]

_COLOURS = {"compute": "#3b6ea5", "kernel": "#4a9c6d", "copy": "#b58b2a", "collective": "#b0413e"}
_SHOWN = 12


def plot_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Draw the longest operations, and the roofline (Williams et al., doi:10.1145/1498765.1498785), as a PNG file.

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

    figure = Figure(figsize=(11, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    bars, roof = figure.subplots(2, 1)
    shown = profile.operations[:_SHOWN][::-1]
    bars.barh(
        range(len(shown)),
        [1e3 * one.seconds / profile.devices for one in shown],
        color=[_COLOURS[one.kind] for one in shown],
    )
    bars.set_yticks(range(len(shown)), [_label(one) for one in shown], fontsize=8)
    bars.set_xlabel("ms on one device, in all")
    bars.set_title(_plain(str(profile).split("\n", 1)[0]))
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
                label=kind,
            )
        if profile.peak_flops and profile.peak_bandwidth:
            ridge = profile.peak_flops / profile.peak_bandwidth
            ends = [min(one.flops / one.bytes for one in products), ridge]
            ends = [min(ends) / 4, ridge, 4 * max(ridge, *(one.flops / one.bytes for one in products))]
            roof.plot(
                ends, [min(x * profile.peak_bandwidth, profile.peak_flops) for x in ends], "k-", label="limit"
            )
        roof.set(xscale="log", yscale="log")
        roof.legend()
    else:
        roof.text(0.5, 0.5, "no matrix product or convolution ran", ha="center", transform=roof.transAxes)
    roof.set(xlabel="FLOP per byte", ylabel="FLOP/s of one device", title="roofline: area is time")
    for axes in (bars, roof):
        axes.grid(alpha=0.3)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()


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
        f'<img alt="time of operations, and roofline" src="data:image/png;base64,{image}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></html>",
    )

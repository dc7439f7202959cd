"""The loss curve of a run as a PNG, drawn from its ``metrics.jsonl``."""

from __future__ import annotations

from pathlib import Path

from capibara.train import extras
from capibara.train.metrics import read_metrics
from capibara.train.rundir import atomic_write

__all__ = ["plot_losses"]


def plot_losses(metrics: Path, image: Path, *, title: str = "") -> bool:
    """Draw training and validation bits per byte over the steps; replace ``image`` atomically.

    Returns:
      Whether there was anything to draw; if not, no file is written.

    Raises:
      MissingExtraError: matplotlib is not installed.
      RunWriteError: the image could not be written.
    """
    figure_class, canvas_class = extras.figure_canvas()
    points: dict[str, tuple[list[int], list[float]]] = {"train": ([], []), "validation": ([], [])}
    for entry in read_metrics(metrics):
        if entry.get("kind") in points and isinstance(entry.get("bits_per_byte"), float):
            steps, values = points[entry["kind"]]
            steps.append(entry["step"])
            values.append(entry["bits_per_byte"])
    if not any(steps for steps, _ in points.values()):
        return False

    # Figure and canvas directly, not pyplot: no global state, no window system.
    figure = figure_class(figsize=(8, 4.5), layout="constrained")
    canvas = canvas_class(figure)
    axes = figure.add_subplot()
    axes.plot(*points["train"], color="tab:blue", linewidth=1.2, label="training")
    if points["validation"][0]:
        last = points["validation"][1][-1]
        axes.plot(*points["validation"], "o-", color="tab:orange", label=f"held out (last {last:.3f})")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("bits per byte")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    atomic_write(image, canvas.print_png)
    return True

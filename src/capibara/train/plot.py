"""The curves of a run as pictures, drawn from its ``metrics.jsonl``."""

from __future__ import annotations

from pathlib import Path

from capibara.errors import ConfigError
from capibara.train import extras
from capibara.train.metrics import read_metrics
from capibara.train.rundir import atomic_write

__all__ = ["PLOT_SUFFIXES", "check_suffix", "plot_losses", "plot_run"]

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


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


def plot_run(metrics: Path, image: Path, *, title: str = "") -> bool:
    """Draw the losses, the norm of the gradients, the learning rate and the speed of a run, each over the steps.

    Args:
      image: its suffix is one of :data:`PLOT_SUFFIXES`. It is replaced atomically.

    Returns:
      Whether there was anything to draw; if not, no file is written.

    Raises:
      ConfigError: another suffix.
      MissingExtraError: matplotlib is not installed.
      RunWriteError: the image could not be written.
    """
    check_suffix(image)
    figure_class, canvas_class = extras.figure_canvas()
    lines = [entry for entry in read_metrics(metrics) if entry.get("kind") in ("train", "validation")]
    if not lines:
        return False
    figure = figure_class(figsize=(10, 7), layout="constrained")
    canvas = canvas_class(figure)
    panels = {
        "bits_per_byte": "bits per byte",
        "grad_norm": "norm of the gradients",
        "learning_rate": "learning rate",
        "tokens_per_second": "tokens a second",
    }
    for axes, (name, label) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for kind, style, words in (("train", "-", "training"), ("validation", "o-", "held out")):
            found = [
                (e["step"], e[name]) for e in lines if e["kind"] == kind and isinstance(e.get(name), float)
            ]
            if found:
                axes.plot(*zip(*found, strict=True), style, linewidth=1.2, label=words)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
        if len(axes.lines) > 1:
            axes.legend()
    figure.suptitle(title)
    atomic_write(image, lambda stream: canvas.print_figure(stream, format=image.suffix[1:].lower()))
    return True


def check_suffix(image: Path) -> None:
    """Whether a picture can be written as its name says.

    Raises:
      ConfigError: it cannot.
    """
    if image.suffix.lower() not in PLOT_SUFFIXES:
        raise ConfigError(f"--plot {str(image)!r}: expected a name that ends in {', '.join(PLOT_SUFFIXES)}")

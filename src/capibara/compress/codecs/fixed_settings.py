"""The settings of the fixed-width codecs, validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compress.codecs.fixed_search import Kind, default_executor
from capibara.compress.codecs.matrices import get_moments
from capibara.compress.errors import CompressError
from capibara.errors import did_you_mean

__all__ = ["Choices", "choices", "feeds_back"]

_KNOWN = (
    "group",
    "axis",
    "coded",
    "step",
    "levels",
    "outliers",
    "hessian",
    "input_axes",
    "damping",
    "executor",
)


@dataclass(frozen=True)
class Choices:
    """Settings with their defaults."""

    group: int
    turned: bool
    coded: bool
    step: float | None
    fitted: bool
    outliers: float
    hessian: np.ndarray | None
    damping: float
    executor: str


def choices(kind: Kind, settings: Mapping[str, Any], shape: tuple[int, ...]) -> Choices:
    """The settings of a tensor.

    Raises:
      CompressError: an unknown setting, or one out of range; the message names it.
    """
    known = [k for k in _KNOWN if k != "step" or kind.bits == 8]
    known = [k for k in known if k != "levels" or kind.name == "nf4"]
    for name in settings:
        if name not in known:
            raise CompressError(
                f"{name}: not a setting of {kind.name}, expected {', '.join(known)}.{did_you_mean(str(name), known)}"
            )

    def number(name: str, default: float | None, low: float, high: float, whole: bool = False) -> Any:
        value: Any = settings.get(name, default)
        if default is None and value is None:
            return None
        kinds: Any = (int, np.integer) if whole else (int, float, np.integer, np.floating)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            what = "an integer" if whole else "a number"
            raise CompressError(f"{name}: got {value!r}, expected {what} from {low} to {high}")
        return int(value) if whole else float(value)

    coded, levels = settings.get("coded", False), settings.get("levels", "fitted")
    if not isinstance(coded, bool):
        raise CompressError(f"coded: got {coded!r}, expected True or False")
    if levels not in ("fitted", "nf4"):
        raise CompressError(f"levels: got {levels!r}, expected 'fitted' or 'nf4'")
    hessian = settings.get("hessian")
    turned = number("axis", -1, -1, 0, True) == 0
    if hessian is not None:
        turned = _input_first(settings, shape)
        hessian = get_moments(hessian, shape[0] if turned else shape[-1])
    if turned and len(shape) < 2:
        raise CompressError(f"axis: got 0 for the shape {shape}, expected two axes or more. Remedy: axis=-1.")
    executor = settings.get("executor")
    executor = default_executor() if executor is None else executor
    if not isinstance(executor, str):
        raise CompressError(f"executor: got {executor!r}, expected 'native', 'numpy', 'torch' or 'jax'")
    return Choices(
        group=number("group", 64 if kind.bits == 8 else 32, 4, 1024, True),
        turned=turned,
        coded=coded,
        step=number("step", None, 1e-30, 1e30),
        fitted=levels == "fitted",
        outliers=number("outliers", 0.0, 0.0, 0.05),
        hessian=hessian,
        damping=number("damping", 0.01, 0.0, 1.0),
        executor=executor,
    )


def feeds_back(axes: Sequence[int], shape: tuple[int, ...]) -> bool:
    """Whether codes can be chosen by the output of a layer whose inputs run along these axes of its weight."""
    return len(shape) == 2 and list(axes) in ([0], [1])


def _input_first(settings: Mapping[str, Any], shape: tuple[int, ...]) -> bool:
    """Whether the layer's input runs along the weight's first axis rather than its last."""
    axes = settings.get("input_axes", [len(shape) - 1])
    axes = [a + len(shape) if a < 0 else a for a in axes] if isinstance(axes, list | tuple) else axes
    if isinstance(axes, list) and feeds_back(axes, shape):
        return axes == [0]
    raise CompressError(
        f"hessian: got the shape {shape} with input_axes {axes!r}; codes are chosen by a layer's output for "
        "matrices whose input is one of their two axes. Remedy: leave hessian out for this tensor."
    )

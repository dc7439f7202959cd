"""The result of merging, and bounds on the change of the outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compress.errors import CompressError

__all__ = ["LayerReport", "Merged"]


@dataclass(frozen=True)
class LayerReport:
    """The report of one layer.

    Attributes:
      index: its index among the network's steps or modules.
      neurons: before (channels, in a convolution).
      kept: after.
      hausdorff_bounds: float [m], for each output of the next layer: a bound on the sum of the Hausdorff distances of
        its two zonotopes, and on its error in units of ``‖(x, 1)‖``, where x is the input of a neuron of the merged
        layer.
      sphere_error: the relative root mean squared error of the layer pair over all directions of ``(x, 1)``.
      data_error: the same over the data, after the fit; ``None`` without data. It includes the changes of the
        previous layers.
    """

    index: int
    neurons: int
    kept: int
    hausdorff_bounds: np.ndarray
    sphere_error: float
    data_error: float | None

    def __str__(self) -> str:
        data = "" if self.data_error is None else f", on data {self.data_error:.2g}"
        return (
            f"layer {self.index}: {self.neurons} → {self.kept} neurons, Hausdorff bound "
            f"{self.hausdorff_bounds.max():.3g}, relative error over all directions {self.sphere_error:.2g}{data}"
        )


@dataclass(frozen=True)
class Merged:
    """A merged network and its errors.

    Attributes:
      network: of the same kind as the input.
      layers: a report for each hidden layer that could be merged.
      norms: for each dense layer, in order, the spectral norm and the length of the bias before merging, and the same
        after merging; ``None`` unless there are only dense layers and activations.
    """

    network: Any
    layers: tuple[LayerReport, ...]
    norms: tuple[tuple[int, float, float, float, float], ...] | None

    def error_bound(self, radius: float) -> float:
        """Bound the Euclidean distance to the original outputs, over inputs no longer than ``radius``.

        It holds for every input and is therefore loose: the bounds of the layers add up, each times the norms of the
        following layers.

        Raises:
          CompressError: the network has other layers than dense ones and activations; their bounds are per window.
        """
        if self.norms is None:
            raise CompressError(
                "error_bound: only for networks of dense layers and ReLU. Remedy: layers[i].hausdorff_bounds."
            )
        if not 0 <= radius < math.inf:
            raise CompressError(f"radius: got {radius!r}, expected a finite number, at least 0")
        reports = {report.index: report for report in self.layers}
        total, reach = 0.0, float(radius)
        for place, (index, _, _, norm, shift) in enumerate(self.norms):
            if index in reports:
                made = float(np.linalg.norm(reports[index].hausdorff_bounds)) * math.hypot(reach, 1)
                total += made * math.prod(entry[1] for entry in self.norms[place + 2 :])
            reach = norm * reach + shift
        return total

    def __str__(self) -> str:
        return "\n".join(str(layer) for layer in self.layers)

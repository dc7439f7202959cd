"""What merging did, and how far it can have moved the outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compress.errors import CompressError

__all__ = ["LayerReport", "Merged"]


@dataclass(frozen=True)
class LayerReport:
    """What happened to one layer.

    Attributes:
      index: which of the network's steps or modules it is, counted from 0.
      neurons: before (channels, in a convolution).
      kept: after.
      hausdorff_bounds: float [m], for each output of the next layer: the sum of the Hausdorff distances of its two
        zonotopes is at most this, and so is its error in units of ``‖(x, 1)‖``, where x is what a neuron of the merged
        layer reads.
      sphere_error: the relative root mean square error of the layer pair over all directions of ``(x, 1)``.
      data_error: the same over the data, after the fit; ``None`` without data. This one includes what the layers before
        changed.
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
    """A network with fewer neurons, and what it cost.

    Attributes:
      network: of the kind that was given.
      layers: a report for each hidden layer that could be merged.
      norms: of each dense layer, in order, spectral norm and length of the bias before merging, and the same for the
        merged one; ``None`` if there is anything but dense layers and activations.
    """

    network: Any
    layers: tuple[LayerReport, ...]
    norms: tuple[tuple[int, float, float, float, float], ...] | None

    def error_bound(self, radius: float) -> float:
        """How far (in Euclidean length) the outputs can be from the network's, over inputs no longer than ``radius``.

        It holds for every input and is therefore loose: the bounds of the layers add up, each times the norms of the
        layers behind it.

        Raises:
          CompressError: a network with more than dense layers and activations, whose bounds are of single windows.
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

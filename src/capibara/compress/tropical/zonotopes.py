"""ReLU networks as max-plus rational maps, and the zonotopes in which their neurons are edges.

In the max-plus algebra a sum is a maximum and a product is a sum, so ``max_k (a_k · x + b_k)`` is a polynomial: its
monomials are affine functions, and as a function it is the support function of the polytope spanned by the points
``(a_k, b_k)``, taken at ``z = (x, 1)``. A neuron ``c · relu(w · x + b)`` with ``c > 0`` is the polynomial of the
segment from 0 to ``c (w, b)``. Adding polynomials adds their polytopes (Minkowski), and a sum of segments is a
zonotope. So an output of a layer pair, ``Σ_i c_i relu(w_i · x + b_i)``, is the difference of two support functions,
those of the zonotopes of the neurons with ``c_i > 0`` and with ``c_i < 0``: a max-plus rational function.

Two such functions differ at ``x`` by at most the Hausdorff distances of their zonotopes times ``‖(x, 1)‖``, because the
Hausdorff distance of convex bodies is the largest difference of their support functions over the unit sphere. Fewer
neurons that span nearly the same zonotopes are nearly the same function.

Sources: L. Zhang, G. Naitzat and L.-H. Lim, "Tropical geometry of deep neural networks", ICML 2018; P. Misiakos,
G. Smyrnis, G. Retsinas and P. Maragos, "Neural network approximation based on Hausdorff distance of tropical
zonotopes", ICLR 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from capibara.compress.errors import CompressError

__all__ = ["RationalMap", "Zonotope"]

_MOST = 16


@dataclass(frozen=True)
class Zonotope:
    """The Minkowski sum of the segments from 0 to each generator, plus an offset.

    Attributes:
      generators: float [n, d].
      offset: float [d].
    """

    generators: np.ndarray
    offset: np.ndarray

    def support(self, directions: np.ndarray) -> np.ndarray:
        """The support function, float [q], at directions [q, d]: the polynomial's value at directions ``(x, 1)``."""
        return np.maximum(directions @ self.generators.T, 0).sum(1) + directions @ self.offset

    def monomials(self) -> np.ndarray:
        """The points [2ⁿ, d] whose hull is the zonotope: the polynomial's monomials, each a gradient and a constant.

        Raises:
          CompressError: more than 16 generators.
        """
        if (count := len(self.generators)) > _MOST:
            raise CompressError(
                f"generators: {count}, which make 2^{count} monomials; at most {_MOST} are written out. "
                "Remedy: support() evaluates the polynomial without them."
            )
        points = self.offset[None]
        for generator in self.generators:
            points = np.concatenate([points, points + generator])
        return points

    def distance_at(self, other: Zonotope, directions: np.ndarray) -> float:
        """The largest difference of the support functions over the directions; at most the Hausdorff distance."""
        lengths = np.linalg.norm(directions, axis=1)
        kept = lengths > 0
        gaps = np.abs(self.support(directions[kept]) - other.support(directions[kept])) / lengths[kept]
        return float(gaps.max(initial=0))


@dataclass(frozen=True)
class RationalMap:
    """``x ↦ readout @ relu(weight @ x + bias) + shift`` as a quotient of max-plus polynomials, one per output.

    Attributes:
      weight: float [n, d], one neuron per row.
      bias: float [n].
      readout: float [m, n].
      shift: float [m].
    """

    weight: np.ndarray
    bias: np.ndarray
    readout: np.ndarray
    shift: np.ndarray

    def _part(self, output: int, sign: int) -> Zonotope:
        factors = self.readout[output] * sign
        chosen = factors > 0
        rows = np.concatenate([self.weight[chosen], self.bias[chosen, None]], axis=1)
        offset = np.zeros(rows.shape[1])
        if sign > 0:
            offset[-1] = self.shift[output]
        return Zonotope(rows * factors[chosen, None], offset)

    def numerator(self, output: int) -> Zonotope:
        """The zonotope of the neurons with positive weight in the output, plus its shift."""
        return self._part(output, 1)

    def denominator(self, output: int) -> Zonotope:
        """The zonotope of the neurons with negative weight in the output."""
        return self._part(output, -1)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """The outputs [q, m] at points [q, d], through the polynomials: what the network computes."""
        ones = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        outputs = range(len(self.readout))
        return np.stack(
            [self.numerator(j).support(ones) - self.denominator(j).support(ones) for j in outputs], axis=1
        )

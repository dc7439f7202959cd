"""The Hausdorff bound on the difference between a merged layer and the original.

Take an output of a layer pair. A neuron ``i`` of a group gives it the edge ``c_i v_i``; the group's edge along ``u``
is, up to a remainder ``δ``, the sum of the projections ``c_i a_i u`` with ``a_i = max(0, v_i · u)``. Split into those
parts, the group corresponds edge by edge to its members (parts with ``c_i > 0`` in the numerator's zonotope, the
others in the denominator's: adding the same edge to both changes nothing), and the distance of two sums of segments
is at most the sum of the segments' distances. So the Hausdorff distances of the two zonotopes sum to at most

    Σ_i |c_i| ‖v_i - a_i u‖ + Σ_groups |δ| ‖u‖ + |change of the shift|.

The merged output differs at ``x`` by at most that, times ``‖(x, 1)‖``. The segments' support functions are
``(t + |t|) / 2``, so that for each zonotope half of the distances and half of the length of the differences' sum, as
vectors, is a bound as well: differences within a group mostly cancel. The smaller one is reported.
"""

from __future__ import annotations

import numpy as np

from capibara.compress.tropical.clusters import Groups

__all__ = ["hausdorff_bounds"]


def hausdorff_bounds(
    rows: np.ndarray,
    columns: np.ndarray,
    new_rows: np.ndarray,
    new_columns: np.ndarray,
    shift_change: np.ndarray,
    groups: Groups,
    places: int = 1,
    halves: bool = True,
) -> np.ndarray:
    """The bound of each output, float [m].

    Args:
      rows: [n, d], with the bias at the end where there is one.
      columns: [n, m · places].
      new_rows: [k, d].
      new_columns: [k, m · places].
      shift_change: [m].
      groups: the group of each neuron; a dropped neuron counts with its own length.
      places: the number of positions of a neuron that an output reads.
      halves: whether an output reads one position of each neuron, without pooling. Otherwise positions have different
        inputs, only whole distances add, and the bound is for the longest of their ``(x, 1)``.
    """
    kept = groups.labels >= 0
    joined = np.where(kept, groups.labels, 0)
    along = new_rows[joined]
    norms = np.einsum("nd,nd->n", along, along)
    shares = np.maximum(np.einsum("nd,nd->n", rows, along), 0) / np.where(norms > 0, norms, 1)
    shares = np.where(kept, shares, 0)
    gaps = rows - shares[:, None] * along
    made = np.zeros_like(new_columns)
    np.add.at(made, joined, columns * shares[:, None])
    rest = np.abs(new_columns - made) * np.linalg.norm(new_rows, axis=1)[:, None]
    distances = np.linalg.norm(gaps, axis=1)
    whole = (np.abs(columns) * distances[:, None]).sum(0)
    if halves:
        parts = [np.maximum(columns, 0), np.maximum(-columns, 0)]  # numerator and denominator
        drift = sum(np.linalg.norm(part.T @ gaps, axis=1) for part in parts)
        whole = np.minimum(whole, (whole + drift) / 2)
    total = whole + rest.sum(0)
    return total.reshape(-1, places).sum(1) + np.abs(shift_change)

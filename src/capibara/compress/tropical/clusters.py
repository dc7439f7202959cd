"""Which neurons to merge: k-means over their directions, or over their paths from inputs to outputs.

A neuron is its row ``v = (w, b)`` and its column ``c`` of the next layer. As ``relu(a t) = a relu(t)`` for ``a > 0``,
only the directions of the two and the product of their lengths matter: neurons whose rows have the same direction
merge exactly. Those are merged first. The others are grouped by k-means with weights ``‖v‖ ‖c‖``:

- ``"directions"`` compares the rows' directions: edges of the zonotopes that are nearly parallel;
- ``"paths"`` compares the rows' and the columns' directions together, so that a group's edges lie in the same
  zonotopes of the same outputs (the neural-path k-means of Misiakos and others, with directions and weights instead
  of plain vectors, so that the result does not depend on how a neuron's scale is distributed over its row and
  column).

A group becomes an edge in the direction of its sum, whose length is the sum of its members' projections.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["METHODS", "Groups", "group", "join"]

METHODS = ("paths", "directions")
_RESTARTS, _ITERATIONS = 4, 60


@dataclass(frozen=True)
class Groups:
    """Which neurons become one.

    Attributes:
      labels: the group of each neuron, int [n]; -1 for neurons without effect, which are dropped.
      count: the number of groups.
    """

    labels: np.ndarray
    count: int


def group(
    rows: np.ndarray, columns: np.ndarray, count: int, method: str, seed: int, tolerance: float
) -> Groups:
    """Groups of neurons, at most ``count``.

    Args:
      rows: float64 [n, d], followed by the bias if there is one.
      columns: float64 [n, m].
      count: the number of groups, at least 1.
      method: one of :data:`METHODS`.
      seed: of the random starts.
      tolerance: rows whose directions are at most this far apart are merged first.
    """
    lengths, weights = np.linalg.norm(rows, axis=1), np.linalg.norm(columns, axis=1)
    labels = np.full(len(rows), -1)
    live = np.flatnonzero(lengths * weights > 0)
    if not len(live):
        return Groups(labels, 0)
    rows, columns = rows[live], columns[live]
    directions = rows / lengths[live, None]
    same = _parallel(directions, tolerance)
    exact = Groups(same, int(same.max()) + 1)
    if exact.count <= count:
        labels[live] = same
        return Groups(labels, exact.count)
    rows, columns = join(rows, columns, exact)
    lengths, weights = np.linalg.norm(rows, axis=1), np.linalg.norm(columns, axis=1)
    features = _narrow(rows / np.maximum(lengths, 1e-300)[:, None])
    if method == "paths":
        features = np.concatenate([features, _narrow(columns / np.maximum(weights, 1e-300)[:, None])], axis=1)
    found = _k_means(features, lengths * weights, count, np.random.default_rng(seed))
    _, found = np.unique(found, return_inverse=True)
    labels[live] = found[same]
    return Groups(labels, int(found.max()) + 1)


def join(rows: np.ndarray, columns: np.ndarray, groups: Groups) -> tuple[np.ndarray, np.ndarray]:
    """The rows [k, d], of length 1, and the columns [k, m] of the groups' neurons."""
    members = groups.labels >= 0
    labels = groups.labels[members]
    rows, columns = rows[members], columns[members]
    pull = np.linalg.norm(columns, axis=1)
    merged = np.zeros((groups.count, rows.shape[1]))
    np.add.at(merged, labels, rows * pull[:, None])
    lengths = np.linalg.norm(merged, axis=1)
    for lost in np.flatnonzero(lengths == 0):  # its members cancel: the strongest stands for them
        among = np.flatnonzero(labels == lost)
        merged[lost] = rows[among[np.argmax(pull[among] * np.linalg.norm(rows[among], axis=1))]]
    norms = np.linalg.norm(merged, axis=1)
    # A group of nothing (copies whose columns cancel) keeps a row of nothing.
    merged /= np.where(norms > 0, norms, 1)[:, None]
    shares = np.maximum(np.einsum("nd,nd->n", rows, merged[labels]), 0)
    out = np.zeros((groups.count, columns.shape[1]))
    np.add.at(out, labels, columns * shares[:, None])
    return merged, out


def _parallel(directions: np.ndarray, tolerance: float) -> np.ndarray:
    """Labels of unit vectors, equal where they are within the tolerance of the first of their label."""
    partners: dict[int, list[int]] = {}
    for start in range(0, len(directions), 512):
        cosines = directions[start : start + 512] @ directions.T
        first, second = np.nonzero(cosines > 0.999)
        first += start
        after = first < second
        first, second = first[after], second[after]
        gaps = np.linalg.norm(directions[first] - directions[second], axis=1)
        for i, j in zip(first[gaps <= tolerance].tolist(), second[gaps <= tolerance].tolist(), strict=True):
            partners.setdefault(i, []).append(j)
    labels = np.full(len(directions), -1)
    found = 0
    for i in range(len(directions)):
        if labels[i] < 0:
            labels[[i, *(j for j in partners.get(i, ()) if labels[j] < 0)]] = found
            found += 1
    return labels


def _narrow(vectors: np.ndarray) -> np.ndarray:
    """Vectors with the same distances in no more coordinates than there are vectors."""
    count, width = vectors.shape
    if width <= count:
        return vectors
    values, axes = np.linalg.eigh(vectors @ vectors.T)
    return axes * np.sqrt(np.maximum(values, 0))


def _k_means(points: np.ndarray, weights: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """Labels [n] of weighted k-means, the best of a few k-means++ starts."""
    squares = np.einsum("nd,nd->n", points, points)
    weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(points), 1 / len(points))

    def distances(centres: np.ndarray) -> np.ndarray:
        gaps = squares[:, None] - 2 * points @ centres.T + np.einsum("kd,kd->k", centres, centres)
        return np.maximum(gaps, 0)

    best, best_cost = np.zeros(len(points), int), np.inf
    for _ in range(_RESTARTS):
        chosen = [int(random.choice(len(points), p=weights))]
        gaps = distances(points[chosen])[:, 0]
        while len(chosen) < count:
            odds = gaps * weights
            odds[chosen] = 0
            if not odds.sum() > 0:
                break
            chosen.append(int(random.choice(len(points), p=odds / odds.sum())))
            gaps = np.minimum(gaps, distances(points[chosen[-1:]])[:, 0])
        centres = points[chosen]
        labels = np.full(len(points), -1)
        for _ in range(_ITERATIONS):
            table = distances(centres)
            now = table.argmin(1)
            if np.array_equal(now, labels):
                break
            labels = now
            sums = np.zeros_like(centres)
            np.add.at(sums, labels, points * weights[:, None])
            mass = np.bincount(labels, weights, len(centres))
            full = mass > 0
            centres = np.where(full[:, None], sums / np.where(full, mass, 1)[:, None], centres)
            for empty in np.flatnonzero(~full):  # takes the point that is worst served
                centres[empty] = points[np.argmax(table.min(1) * weights)]
        cost = float((distances(centres).min(1) * weights).sum())
        if cost < best_cost:
            best, best_cost = labels, cost
    return best

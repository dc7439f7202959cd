"""Max-plus products from their definition in NumPy, and operands of every pattern of signs."""

from __future__ import annotations

import numpy as np

__all__ = ["PATTERNS", "oracle", "signed"]

PATTERNS = (
    "any",
    "more rows than a thread takes",
    "negative",
    "negative, with zeros and infinities",
    "negative, but for the last",
    "positive",
    "positive, but for a column",
    "positive, but for a row of the second block",
    "zeros of both signs",
    "both infinities, and NaN of both signs",
)


def oracle(a, b, semiring="max_plus"):
    """Values and lowest indices, term by term; the semiring's zero wins over the other infinity."""
    if semiring == "min_plus":
        value, index = oracle(-a, -b)
        return -value, index
    left, right = a[..., :, :, None], b[..., None, :, :]
    with np.errstate(invalid="ignore"):
        terms = left + right
    nan = np.isnan(left) | np.isnan(right)
    terms = np.where(np.isnan(terms) & ~nan, -np.inf, terms)
    value = np.max(terms, axis=-2, initial=-np.inf)
    if a.shape[-1] == 0:
        return value, np.full(value.shape, -1)
    index = np.argmax(terms, axis=-2)
    return value, np.where(np.isnan(value) | (value == -np.inf), -1, index)


def signed(pattern):
    """Operands of which the native kernel may compare the bits as integers, or may not, or finds out too late."""
    rng = np.random.default_rng(3)
    shapes = ((1301, 5), (5, 40)) if pattern == "more rows than a thread takes" else ((139, 261), (261, 275))
    a, b = (rng.normal(size=shape).astype("float32") for shape in shapes)
    if pattern != "any":
        a, b = np.abs(a), np.abs(b)
    if pattern.startswith("negative"):
        a, b = -a, -b
    if pattern == "negative, with zeros and infinities":
        a[rng.random(a.shape) < 0.3], b[rng.random(b.shape) < 0.3] = -0.0, -0.0
        a[rng.random(a.shape) < 0.3], b[rng.random(b.shape) < 0.3] = 0.0, 0.0
        a[7], b[:, 9], a[rng.random(a.shape) < 0.3] = -np.inf, -np.inf, -np.inf
    if pattern == "negative, but for the last":
        a[-1, -1] = 3
    if pattern == "positive, but for a column":
        b[:, 99] = -100
    if pattern == "positive, but for a row of the second block":
        a[:, 256:] = -100
        a[138] = -np.inf
    if pattern == "zeros of both signs":
        a, b = np.where(rng.random(a.shape) < 0.5, -0.0, 0.0), np.where(rng.random(b.shape) < 0.5, -0.0, 0.0)
    if pattern == "both infinities, and NaN of both signs":
        a[5], b[:, 8], b[30] = np.inf, -np.inf, -np.inf
        a[9, 1], a[10, 3], b[4, 99] = -np.inf, np.nan, -np.nan
    return a.astype("float32"), b.astype("float32")

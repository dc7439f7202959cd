"""Recurrences over a whole sequence, one position after the other."""

from __future__ import annotations

from typing import Any

from capibara.compose.backends.portable.shaping import split
from capibara.compose.backends.portable.space import space

Array = Any


def zero_state(x: Array, size: int) -> Array:
    xp = space(x)
    return xp.full((x.shape[0], size), 0, xp.dtype_of(x), x)


def rnn_scan(x: Array, hidden: Array, w_ih: Array, w_hh: Array, bias: Array) -> tuple[Array, Array]:
    xp = space(x)
    given = xp.matmul(x, w_ih) + bias
    out = []
    for t in range(x.shape[1]):
        hidden = xp.tanh(given[:, t] + xp.matmul(hidden, w_hh))
        out.append(hidden)
    return xp.stack(out, 1), hidden


def lstm_scan(
    x: Array, hidden: Array, cell: Array, w_ih: Array, w_hh: Array, bias: Array
) -> tuple[Array, Array, Array]:
    xp = space(x)
    given = xp.matmul(x, w_ih) + bias
    out = []
    for t in range(x.shape[1]):
        i, f, g, o = split(given[:, t] + xp.matmul(hidden, w_hh), 4, -1)
        cell = xp.sigmoid(f) * cell + xp.sigmoid(i) * xp.tanh(g)
        hidden = xp.sigmoid(o) * xp.tanh(cell)
        out.append(hidden)
    return xp.stack(out, 1), hidden, cell


def gru_scan(
    x: Array, hidden: Array, w_ih: Array, w_hh: Array, bias: Array, bias_h: Array
) -> tuple[Array, Array]:
    xp = space(x)
    given = xp.matmul(x, w_ih) + bias
    out = []
    for t in range(x.shape[1]):
        xr, xz, xn = split(given[:, t], 3, -1)
        hr, hz, hn = split(xp.matmul(hidden, w_hh) + bias_h, 3, -1)
        new = xp.tanh(xn + xp.sigmoid(xr + hr) * hn)
        z = xp.sigmoid(xz + hz)
        hidden = (1 - z) * new + z * hidden
        out.append(hidden)
    return xp.stack(out, 1), hidden


def split_like(x: Array, like: Array) -> tuple[Array, Array]:
    """The first rows of x, as many as ``like`` has, and the others."""
    count = like.shape[0]
    return x[:count], x[count:]

"""Recurrences over a whole sequence: ``x [batch, sequence, in]`` from a hidden state ``[batch, hidden]``.

Gates stand side by side in the weights: input, forget, candidate, output (LSTM); reset, update, candidate (GRU).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["gru_scan", "lstm_scan", "rnn_scan", "split_like", "zero_state"]

Array = jax.Array


def _scan(step: Callable[..., Any], start: Any, x: Array) -> tuple[Any, Array]:
    end, out = lax.scan(step, start, jnp.moveaxis(x, 1, 0))
    return end, jnp.moveaxis(out, 0, 1)


def rnn_scan(x: Array, hidden: Array, w_ih: Array, w_hh: Array, bias: Array) -> tuple[Array, Array]:
    """``h[t] = tanh(x[t] w_ih + h[t-1] w_hh + bias)``: all of them, and the last."""

    def step(h: Array, given: Array) -> tuple[Array, Array]:
        h = jnp.tanh(given + h @ w_hh)
        return h, h

    # What depends on the input alone is one product for the whole sequence.
    end, out = _scan(step, hidden, x @ w_ih + bias)
    return out, end


def lstm_scan(
    x: Array, hidden: Array, cell: Array, w_ih: Array, w_hh: Array, bias: Array
) -> tuple[Array, Array, Array]:
    """Long short-term memory: all hidden states, the last one, the last cell."""

    def step(carry: tuple[Array, Array], given: Array) -> tuple[tuple[Array, Array], Array]:
        h, c = carry
        i, f, g, o = jnp.split(given + h @ w_hh, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    (h, c), out = _scan(step, (hidden, cell), x @ w_ih + bias)
    return out, h, c


def gru_scan(
    x: Array, hidden: Array, w_ih: Array, w_hh: Array, bias: Array, bias_h: Array
) -> tuple[Array, Array]:
    """Gated recurrent unit; the reset gate works on ``h w_hh + bias_h``."""

    def step(h: Array, given: Array) -> tuple[Array, Array]:
        xr, xz, xn = jnp.split(given, 3, axis=-1)
        hr, hz, hn = jnp.split(h @ w_hh + bias_h, 3, axis=-1)
        new = jnp.tanh(xn + jax.nn.sigmoid(xr + hr) * hn)
        z = jax.nn.sigmoid(xz + hz)
        h = (1 - z) * new + z * h
        return h, h

    end, out = _scan(step, hidden, x @ w_ih + bias)
    return out, end


def split_like(x: Array, like: Array) -> tuple[Array, Array]:
    """The first rows of x, as many as ``like`` has, and the others."""
    count = like.shape[0]
    return x[:count], x[count:]


def zero_state(x: Array, size: int) -> Array:
    return jnp.zeros((x.shape[0], size), x.dtype)

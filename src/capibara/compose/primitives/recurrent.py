"""Recurrences over a whole sequence, ``input [batch, sequence, in]``, and what cells of unequal length need."""

from __future__ import annotations

from typing import Any

from capibara.compose.errors import ShapeError
from capibara.compose.logical.arguments import whole
from capibara.compose.logical.block import Primitive
from capibara.compose.logical.shapes import Shape, set_size

__all__ = ["GruScan", "LstmScan", "RnnScan", "SplitLike", "ZeroState"]


def _gates(count: int) -> Any:
    def rule(hidden: Shape, weight: Shape) -> bool:
        h, w = hidden.dims(), weight.dims()
        assert h is not None
        assert w is not None
        if h[-1].size is not None:
            set_size(w[-1], count * h[-1].size)
            return True
        if w[-1].size is not None:
            if w[-1].size % count:
                raise ShapeError(f"{w[-1].size} columns cannot be split into {count} gates")
            set_size(h[-1], w[-1].size // count)
            return True
        return False

    return rule


class _Scan(Primitive):
    def __init__(
        self, op: str, count: int, states: tuple[str, ...], more: tuple[str, ...], name: str | None
    ) -> None:
        state = ("batch hidden", "float")
        gates = "hidden" if count == 1 else "gates"
        super().__init__(
            op,
            {
                "input": ("batch sequence in", "float"),
                **dict.fromkeys(states, state),
                "w_ih": (f"in {gates}", "float"),
                "w_hh": (f"hidden {gates}", "float"),
                "bias": ((gates,), "float"),
                **dict.fromkeys(more, ((gates,), "float")),
            },
            {"output": ("batch sequence hidden", "float"), **{f"last_{s}": state for s in states}},
            constraints=[] if count == 1 else [(_gates(count), ("hidden", "w_hh"))],
            name=name,
        )


class RnnScan(_Scan):
    """``h[t] = tanh(x[t] w_ih + h[t-1] w_hh + bias)`` (Elman, 1990) → ``output`` (every h), ``last_hidden``.

    ``input [batch, sequence, in]``, ``hidden [batch, hidden]``, ``w_ih [in, hidden]``, ``w_hh [hidden, hidden]``.
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("rnn_scan", 1, ("hidden",), (), name)


class LstmScan(_Scan):
    """Long short-term memory (Hochreiter and Schmidhuber, 1997) → ``output``, ``last_hidden``, ``last_cell``.

    ``w_ih [in, 4 hidden]``, ``w_hh [hidden, 4 hidden]``, ``bias [4 hidden]``: input, forget, candidate and output
    gate side by side.
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("lstm_scan", 4, ("hidden", "cell"), (), name)


class GruScan(_Scan):
    """Gated recurrent unit (Cho et al., 2014) → ``output``, ``last_hidden``.

    ``w_ih [in, 3 hidden]``, ``w_hh [hidden, 3 hidden]``, ``bias``, ``bias_h [3 hidden]``: reset, update and
    candidate side by side; the reset gate works on ``h w_hh + bias_h``.
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("gru_scan", 3, ("hidden",), ("bias_h",), name)


class SplitLike(Primitive):
    """Rows in two parts: ``input [m, *b]``, ``like [n, *c]`` → ``output [n, *b]`` and the others, ``rest``."""

    def __init__(self, *, name: str | None = None) -> None:
        def rule(rows: Shape, first: Shape, rest: Shape) -> bool:
            m, n, other = (s.resolve()[0][0] for s in (rows, first, rest))
            if m.size is not None and n.size is not None:
                if n.size > m.size:
                    raise ShapeError(f"{n.size} rows cannot be taken from {m.size}")
                set_size(other, m.size - n.size)
                return True
            if other.size is not None and n.size is not None:
                set_size(m, n.size + other.size)
                return True
            if other.size is not None and m.size is not None:
                set_size(n, m.size - other.size)
                return True
            return False

        super().__init__(
            "split_like",
            {"input": ("m *b", "T"), "like": ("n *c", None)},
            {"output": ("n *b", "T"), "rest": ("r *b", "T")},
            constraints=[(rule, ("input", "output", "rest"))],
            name=name,
        )


class ZeroState(Primitive):
    """A state to start with: ``input [batch, *b]`` → ``output [batch, size]``, zeros."""

    def __init__(self, size: int, *, name: str | None = None) -> None:
        whole("size", size)
        super().__init__(
            "zero_state",
            {"input": ("batch *b", "float")},
            {"output": (("batch", size), "float")},
            {"size": size},
            name=name,
        )

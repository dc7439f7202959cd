"""Broadcasting as a rule between shapes that may not be known yet.

``numpy.broadcast_shapes`` needs sizes; this needs only what is known so far, and says as much of the result as follows
from it. See :class:`~capibara.compose.logical.shapes.Constraint`.
"""

from __future__ import annotations

from collections.abc import Sequence

from capibara.compose.errors import ShapeError
from capibara.compose.logical.shapes import Dim, Shape, unify

__all__ = ["broadcast_rule"]


def broadcast_rule(left: Shape, right: Shape, out: Shape) -> bool:
    """``out = numpy.broadcast_shapes(left, right)``, as far as it is known."""
    pl, rl, sl = left.resolve()
    pr, rr, sr = right.resolve()
    if rl is None and rr is None:
        return _broadcast_fixed(pl + sl, pr + sr, out)
    if rl is not None and rl is rr and len(sl) == len(sr) and len(pl) == len(pr):
        # The same unknown dimensions on both sides broadcast to themselves.
        po, _, so = out.resolve()
        have = (
            [*po[: len(pl)], *so[len(so) - len(sl) :]] if len(po) >= len(pl) and len(so) >= len(sl) else None
        )
        dims, settled = _broadcast_row([*pl, *sl], [*pr, *sr], have)
        unify(out, Shape([*dims[: len(pl)], rl, *dims[len(pl) :]]))
        return settled
    if rl is None or rr is None:
        fixed, prefix, rest, suffix = (pl + sl, pr, rr, sr) if rl is None else (pr + sr, pl, rl, sl)
        assert rest is not None
        if len(fixed) <= len(suffix):
            cut = len(suffix) - len(fixed)
            po, ro, so = out.resolve()
            tail = so if ro is not None else po + so
            have = tail[len(tail) - len(fixed) :] if len(tail) >= len(fixed) else None
            dims, settled = _broadcast_row(fixed, suffix[cut:], have)
            unify(out, Shape([*prefix, rest, *suffix[:cut], *dims]))
            return settled
    return False


def _broadcast_dim(x: Dim, y: Dim) -> Dim | None:
    x, y = x.find(), y.find()
    if x is y or y.size == 1:
        return x
    if x.size == 1:
        return y
    if x.size is not None and y.size is not None and x.size != y.size:
        raise ShapeError(f"{x.size} does not broadcast with {y.size}")
    if x.size is not None and x.size == y.size:
        return x
    if x.size is not None or y.size is not None:
        return x if x.size is not None else y  # the unknown one is either 1 or the same
    return None


def _broadcast_row(
    left: Sequence[Dim], right: Sequence[Dim], out: Sequence[Dim] | None
) -> tuple[list[Dim], bool]:
    """Broadcast two rows of equal length; also whether every size of the result is certain.

    A size that depends on one still unknown (unknown against unknown, each may be 1) must not be merged with either
    side: it is the result's own dimension, taken from ``out`` or, the first time, fresh. The constraint comes back
    when one of them is learned.
    """
    dims: list[Dim] = []
    settled = True
    for i, (x, y) in enumerate(zip(left, right, strict=True)):
        dim = _broadcast_dim(x, y)
        pair = (x.find().size, y.find().size)
        settled = settled and (x.find() is y.find() or 1 in pair or None not in pair)
        dims.append(dim if dim is not None else Dim() if out is None else out[i])
    return dims, settled


def _broadcast_fixed(left: list[Dim], right: list[Dim], out: Shape) -> bool:
    if len(left) < len(right):
        left, right = right, left
    cut = len(left) - len(right)
    known = out.dims()
    have = known[cut:] if known is not None and len(known) == len(left) else None
    dims, settled = _broadcast_row(left[cut:], right, have)
    unify(out, Shape([*left[:cut], *dims]))
    return settled

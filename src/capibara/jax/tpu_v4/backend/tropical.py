"""``TpuV4TropicalOps``: :mod:`capibara.ops.tropical` under its documented name."""

from __future__ import annotations

from capibara.ops import tropical

__all__ = ["TpuV4TropicalOps"]


class TpuV4TropicalOps:
    """Tropical arithmetic, each method a function of :mod:`capibara.ops.tropical` with its arguments.

    They run on every platform; the name says which one they were written for.
    """

    matmul = staticmethod(tropical.matmul)
    matvec = staticmethod(tropical.matvec)
    conv1d = staticmethod(tropical.conv1d)
    conv2d = staticmethod(tropical.conv2d)
    pool = staticmethod(tropical.pool)
    scan = staticmethod(tropical.scan)
    polyval = staticmethod(tropical.polyval)
    closure = staticmethod(tropical.closure)
    shortest_paths = staticmethod(tropical.shortest_paths)

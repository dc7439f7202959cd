"""A layout over several slices of the same kind: copies of one slice's, with the batch divided between them."""

from __future__ import annotations

from dataclasses import replace

from capibara.errors import ConfigError
from capibara.sharding.layout import Layout

__all__ = ["across_slices"]


def across_slices(layout: Layout, count: int) -> Layout:
    """The layout of ``count`` slices, each of which has ``layout``.

    Each slice has all parameters, sharded over its own devices only, and its share of the rows: the new mesh begins
    with an axis ``data`` over the slices, and what was ``data`` inside a slice is ``fsdp``. So only gradients cross the
    network between slices.

    Raises:
      ConfigError: the layout has an axis ``data`` and an axis ``fsdp`` with more than one device each: parameters
        sharded over both would cross it, too.
    """
    if count == 1:
        return layout
    sizes = layout.axis_sizes
    inside = sizes.get("data", 1)
    if inside > 1 and sizes.get("fsdp", 1) > 1:
        raise ConfigError(
            f"layout: over several slices, the mesh {sizes} of one of them can have one of the axes data and fsdp"
        )
    rest = [
        (axis, size) for axis, size in layout.mesh if axis != "data" and not (axis == "fsdp" and inside > 1)
    ]
    if "data" in sizes and "fsdp" not in dict(rest):
        at = [axis for axis, _ in layout.mesh].index("data")
        rest.insert(at, ("fsdp", inside))
    return replace(layout, mesh=(("data", count), *rest))

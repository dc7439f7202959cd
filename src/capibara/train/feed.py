"""Where a trainer's batches come from: arrays in memory, any iterable, or a data source of Capibara's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

import jax
import numpy as np

from capibara.sharding import Layout
from capibara.train.errors import DataError
from capibara.train.placement import Placement
from capibara.train.step import microbatch

__all__ = ["Feeder", "batches_of", "rows_of", "to_arrays"]


def to_arrays(batch: Any) -> Any:
    """A batch as nested dicts of arrays: ``(inputs, targets)`` becomes a dict of these.

    Raises:
      DataError: something in it is not an array.
    """
    if isinstance(batch, tuple | list) and not _is_rows(batch):
        if not 1 <= len(batch) <= 3:
            raise DataError(
                f"batch: got {len(batch)} arrays, expected (inputs, targets) or (inputs, targets, weights). Give "
                "several inputs as a dict."
            )
        batch = dict(zip(("inputs", "targets", "weights"), batch, strict=False))
    if isinstance(batch, Mapping):
        return {
            key: to_arrays(value) if isinstance(value, Mapping) else _array(key, value)
            for key, value in batch.items()
        }
    return _array("batch", batch)


def _is_rows(batch: Any) -> bool:
    """Whether a list holds numbers or rows of them, and not arrays."""
    return (
        isinstance(batch, list)
        and bool(batch)
        and not any(hasattr(x, "shape") or isinstance(x, Mapping) for x in batch)
    )


def _array(name: Any, value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"batch: {name!r} is not an array: {error}.") from None
    if (
        array.dtype.kind not in "biuf"
        and not np.issubdtype(array.dtype, np.number)
        and array.dtype.kind != "V"
    ):
        raise DataError(
            f"batch: {name!r} has dtype {array.dtype}, expected numbers. Turn text into token ids first."
        )
    return array


def rows_of(batch: Any) -> int:
    """The number of rows of a batch: of the first dimension, which all its arrays share.

    Raises:
      DataError: they differ, or there is none.
    """
    found = jax.tree_util.tree_leaves_with_path(batch)
    sizes = {
        jax.tree_util.keystr(path, simple=True, separator=".") or "batch": tuple(leaf.shape)
        for path, leaf in found
    }
    if not sizes or not all(sizes.values()) or len({shape[0] for shape in sizes.values()}) > 1:
        said = ", ".join(f"{name} {shape}" for name, shape in sizes.items()) or "nothing"
        raise DataError(f"batch: got {said}; expected arrays whose first dimension is the same: the rows.")
    return next(iter(sizes.values()))[0]


def batches_of(
    data: Any,
    *,
    epochs: int = 1,
    steps: int | None = None,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    seed: int = 0,
    first: int = 0,
    shuffle: bool = True,
) -> Iterator[Any]:
    """The batches of some passes over data.

    Args:
      data: a :class:`~capibara.train.protocols.DataSource` or :class:`~capibara.train.protocols.Batches`; an iterable
        of batches; or, with ``batch_size``, arrays in memory, which are shuffled anew in each epoch. The last batch of
        an epoch has the rows that are left.
      epochs: passes. steps: how many batches will be trained on, instead: of arrays and iterables then come passes
        without end, since some batches may be left out.
      batch_size, sequence_length, seed: of data sources and arrays in memory.
      first: the number of the first batch of a data source: a run that continues has had those before. Arrays begin
        with the order of the next epoch that has not begun by then.
      shuffle: whether arrays are.

    Raises:
      DataError: the data is of another kind, has no end and no ``steps`` are given, or cannot be read once more.
    """
    for name, value in (("epochs", epochs), ("steps", steps), ("batch_size", batch_size)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise DataError(f"{name}: got {value!r}, expected an integer of at least 1.")
    if callable(getattr(data, "batches", None)):
        if batch_size is None or sequence_length is None:
            raise DataError(f"{type(data).__name__}: give batch_size= and sequence_length=.")
        data = data.batches(batch_size=batch_size, sequence_length=sequence_length, seed=seed)
    if callable(getattr(data, "batch", None)):
        if steps is None:
            windows = getattr(data, "windows_per_epoch", None)
            if windows is None:
                raise DataError(f"steps: {type(data).__name__} has no end. Give the number of steps.")
            steps = epochs * max(1, windows // data.batch_size)
        return (data.batch(first + n) for n in range(steps))
    if batch_size is not None:
        passes = epochs if steps is None else None
        return _of_arrays(to_arrays(data), passes, batch_size, seed if shuffle else None, first)
    if isinstance(data, tuple) or hasattr(data, "shape") or isinstance(data, Mapping):
        raise DataError(
            f"data: got a {type(data).__name__} of arrays. Give batch_size= to train on its rows, or an iterable of "
            "batches: [(inputs, targets), …]."
        )
    if not isinstance(data, Iterable):
        raise DataError(
            f"data: got {type(data).__name__}, expected an iterable of batches, arrays in memory with batch_size=, or "
            "a data source such as load_corpus([...])."
        )
    return _of_iterable(data, epochs if steps is None else None)


def _of_arrays(
    arrays: Any, epochs: int | None, batch_size: int, seed: int | None, first: int
) -> Iterator[Any]:
    """Passes over rows; without a number of them endless, without a seed in their order."""
    rows = rows_of(arrays)
    if not rows or (seed is not None and rows < batch_size):
        raise DataError(f"batch_size={batch_size} is more than the {rows} rows that there are.")
    begun = -(-first // max(1, rows // batch_size))
    for epoch in count() if epochs is None else range(epochs):
        order = np.arange(rows)
        if seed is not None:
            order = np.random.default_rng((seed, begun + epoch)).permutation(rows)
        for start in range(0, rows, batch_size):
            chosen = order[start : start + batch_size]
            yield jax.tree.map(lambda array, chosen=chosen: np.asarray(array)[chosen], arrays)


def _of_iterable(data: Iterable[Any], epochs: int | None) -> Iterator[Any]:
    """Passes over an iterable; without a number of them endless, if it can be read again."""
    epoch = 0
    while epochs is None or epoch < epochs:
        empty = True
        source = iter(data)
        for batch in source:
            empty = False
            yield batch
        if empty and epoch and source is data:
            raise DataError(
                f"epochs: the data is an iterator ({type(data).__name__}), which can be read once, and ended after "
                f"epoch {epoch}. Give a list, or an object whose __iter__ begins anew."
            )
        if empty:
            raise DataError("data: there is not one batch in it.")
        epoch += 1


class Feeder:
    """Puts batches on the devices of a placement.

    Args:
      placement: the devices. layout: how many microbatches and data axes there are.
    """

    def __init__(self, placement: Placement, layout: Layout) -> None:
        self._placement, self._parts = placement, layout.microbatches
        self._devices = math.prod(layout.axis_sizes.get(axis, 1) for axis in ("data", "fsdp", "expert"))

    def divides(self, rows: int) -> bool:
        """Whether each device gets as many rows of each microbatch as the others."""
        return rows > 0 and rows % (self._devices * self._parts) == 0

    def put(self, arrays: Any, parts: int | None = None) -> Any:
        """Arrays ``[rows, …]`` as ``[parts, rows / parts, …]`` on the devices, the rows over the data axes.

        Args:
          parts: by default the layout's microbatches. With another number, rows that do not divide are replicated.

        Raises:
          DataError: the rows are not a multiple of microbatches × devices.
        """
        rows = rows_of(arrays)
        if parts is None and not self.divides(rows):
            raise DataError(
                f"batch: got {rows} rows, expected a multiple of {self._parts} microbatches × {self._devices} devices "
                f"along the data axes = {self._parts * self._devices}"
            )
        return jax.tree.map(self._put_one, microbatch(arrays, parts or self._parts))

    def _put_one(self, array: Any) -> jax.Array:
        mesh = self._placement.mesh
        if mesh is None:
            return jax.device_put(array, self._placement.replicated)
        names = (None, "batch", *[None] * (array.ndim - 2))
        spec = self._placement.rules.spec(names, mesh, array.shape, kind="activations")
        where = jax.sharding.NamedSharding(mesh, spec)
        if jax.process_count() == 1:
            return jax.device_put(array, where)
        return jax.make_array_from_callback(array.shape, where, lambda index: np.asarray(array[index]))

"""Sequences of different lengths, one array a time step: what unrolled networks read and give.

Rows are sorted by length, longest first; step ``t`` holds the rows that have a step ``t``, ``[rows, 1, features]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["pack_data_into_time_slots", "unpack_time_slot_data"]


def pack_data_into_time_slots(
    data: Sequence[Sequence[Any]],
    backend: Any,
    lengths: Any = None,
    key: Sequence[str] = ("input",),
    index: int = 0,
    return_indices: bool = False,
    sorted_data: bool = False,
) -> tuple[Any, ...]:
    """Step ``t`` of every sequence side by side, as ``{"input0": …, "input1": …}``.

    Args:
        data: for each sample a tuple of sequences ``[length, features]``.
        backend: makes the arrays. lengths: of the sequences; they are asked for their own.
        key: its first entry is the beginning of the names. index: which sequence of each sample.
        return_indices: also return where each sorted sample was.
        sorted_data: the samples are sorted already.

    Returns:
        ``(slots, samples as sorted)``, or ``(indices, slots, samples)``.
    """
    del lengths
    order = list(range(len(data)))
    if not sorted_data:
        order.sort(key=lambda i: -data[i][index].shape[0])
    ordered = [data[i] for i in order]
    sequences = [sample[index] for sample in ordered]
    slots: dict[str, Any] = {}
    for step in range(sequences[0].shape[0]):
        rows = [s[step : step + 1] for s in sequences if s.shape[0] > step]
        slots[f"{key[0]}{step}"] = backend.stack(rows, axis=0)
    return (tuple(order), slots, ordered) if return_indices else (slots, ordered)


def unpack_time_slot_data(
    backend: Any,
    data: Mapping[str, Any],
    max_length: int,
    max_size: int,
    output_dim: int,
    key: str = "decoder_out",
    indices: Sequence[int] | None = None,
) -> Any:
    """The opposite: ``[max_size, steps, output_dim]``, with zeros where a row has no such step.

    Args:
        backend: makes the array. data: arrays by name and step. max_length: steps at most. max_size: rows.
        output_dim: features. key: the beginning of the names.
        indices: what :func:`pack_data_into_time_slots` returned, to put the rows back where they were.
    """
    steps = []
    for step in range(max_length):
        slot = data.get(f"{key}{step}")
        if slot is None:
            continue
        rows = backend.reshape(slot, (slot.shape[0], 1, output_dim))
        missing = max_size - slot.shape[0]
        if missing:
            rows = backend.concat([rows, backend.zeros(missing, 1, output_dim)], axis=0)
        steps.append(rows)
    result = backend.concat(steps, axis=1)
    if indices is None:
        return result
    return result[backend.array([place for place, _ in sorted(enumerate(indices), key=lambda pair: pair[1])])]

"""Traces of GPUs: which run of a program an event belongs to, and which operation in a CUDA graph.

Each event has the scope in which the host started it. An operation that is started by itself has a scope of its own,
with all its kernels (a product sets a counter in memory first, for instance). XLA puts most operations into CUDA graphs
(it calls them command buffers) that it starts as one: all their events have the graph's scope and name. There the
kernels' own names say the operation for what XLA generated, and their order for what it did not: products of cuBLAS,
NCCL's exchanges, copies, and kernels that XLA uses again for operations with the same code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from capibara.observe.profile.events import EventTable

__all__ = ["GpuEvents", "align_kernels", "gpu_events"]

# A graph's events by the program's operations: above this, only names say what is what.
_MOST_CELLS = 200_000_000
_NUMBERED = re.compile(r"([._]\d+)+$")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_]")
_MEMORY = ("memset", "memcpy")
_MOVES = re.compile(r"^(wrapped_)?(copy|slice|dynamic[-_](update[-_])?slice)")

# How well an event goes with an operation.
_OWN, _SAME_CODE, _BY_KIND = 10.0, 4.0, 3.0
_PASSED_OVER = 1e-4


@dataclass(frozen=True)
class GpuEvents:
    """What is known of a trace's events on GPUs, beside what is put into their rows.

    Attributes:
      here: of each row, whether it is a GPU's.
      first: of each row, whether it is the first of an operation that runs; True of others than GPUs'.
      unnamed: (program, text) of kernels in CUDA graphs whose operation is not known.
      unclear: programs of which the trace does not say when a run began.
      in_graphs: programs of which operations ran in CUDA graphs.
    """

    here: np.ndarray
    first: np.ndarray
    unnamed: frozenset[tuple[int, int]]
    unclear: frozenset[int]
    in_graphs: frozenset[int]


def gpu_events(
    table: EventTable,
    rows: np.ndarray,
    operations: Mapping[int, Mapping[str, str]],
    trips: Mapping[int, Mapping[str, int | None]],
) -> GpuEvents | None:
    """Fill ``run`` and, in CUDA graphs, ``op`` of the rows; None where there is no GPU.

    Args:
      table: the trace's; texts may be added.
      rows: of it, each with its program; changed in place.
      operations: program number → names of its operations in the order in which they run, and the kind of each.
      trips: program number → how often each runs in one run of the program, where that is known.
    """
    here = np.array([plane.startswith("/device:GPU:") for plane, _ in table.lines] or [False])
    if not len(rows) or not here.any():
        return None
    here = here[rows["line"]]
    mine = np.flatnonzero(here)
    rows["run"][mine] = _outermost(table.scopes, rows["flow"][mine])
    _end_copies(table, rows, mine)
    unclear = np.unique(rows["program"][mine][rows["flow"][mine] == 0])
    graphs = _in_graphs(table, rows, mine, operations)
    outside = mine if not graphs else mine[~np.isin(mine, np.concatenate(list(graphs.values())))]
    first = np.ones(len(rows), bool)
    first[outside] = _first_of_scopes(rows, outside)
    unnamed: set[tuple[int, int]] = set()
    numbers = {text: number for number, text in enumerate(table.texts)}
    for (program, _), members in graphs.items():
        # What was started by itself is in no graph, and what runs more often or less often is in another one.
        alone = {
            table.texts[op] for op in np.unique(rows["op"][outside][rows["program"][outside] == program])
        }
        often = _starts_in_a_run(rows, members)
        counts = trips.get(program, {})
        schedule = [
            (name, kind)
            for name, kind in operations[program].items()
            if name not in alone and (often is None or counts.get(name) in (None, often))
        ]
        unnamed |= _named(table, rows, members, schedule, numbers, first, program)
    return GpuEvents(
        here,
        first,
        frozenset(unnamed),
        frozenset(unclear.tolist()),
        frozenset(program for program, _ in graphs),
    )


def _end_copies(table: EventTable, rows: np.ndarray, mine: np.ndarray) -> None:
    """End copies where the next work of their stream begins, at the latest.

    Work of a stream runs in its order. Of copies within a device, whose program then waits for the host, the end was
    recorded only when the host went on, milliseconds late.
    """
    copies = np.array([_of_memory(text) for text in table.texts] or [False])
    mine = mine[np.lexsort((rows["start_ps"][mine], rows["line"][mine]))]
    before, after = mine[:-1], mine[1:]
    late = copies[rows["name"][before]] & (rows["line"][before] == rows["line"][after])
    before, after = before[late], after[late]
    between = rows["start_ps"][after] - rows["start_ps"][before]
    rows["duration_ps"][before] = np.minimum(rows["duration_ps"][before], between)


def _outermost(scopes: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The outermost scope of each of some."""
    scopes = np.unique(scopes[scopes["id"] != scopes["outer"]])
    if not len(scopes):
        return start
    different, place = np.unique(start, return_inverse=True)
    for _ in range(64):  # loops in loops; there is no circle in a trace that is one
        at = np.minimum(np.searchsorted(scopes["id"], different), len(scopes) - 1)
        inner = scopes["id"][at] == different
        if not inner.any():
            break
        different = np.where(inner, scopes["outer"][at], different)
    return different[place]


def _first_of_scopes(rows: np.ndarray, mine: np.ndarray) -> np.ndarray:
    """Of rows, whether each is the first of its scope on its device."""
    order = np.lexsort((rows["start_ps"][mine], rows["flow"][mine], rows["device"][mine], rows["op"][mine]))
    sorted_rows = mine[order]
    first = np.ones(len(mine), bool)
    same = np.ones(max(0, len(mine) - 1), bool)
    for key in ("flow", "device", "op"):
        values = rows[key][sorted_rows]
        same &= values[1:] == values[:-1]
    same &= rows["flow"][sorted_rows][1:] != 0  # where no scope is said, each counts
    first[order[1:]] = ~same
    return first


def _starts_in_a_run(rows: np.ndarray, members: np.ndarray) -> int | None:
    """How often one graph is started in each run; None if not equally often."""
    scopes, place = np.unique(rows["flow"][members], return_index=True)
    # A scope is of one run on one device.
    counts = np.unique(rows["run"][members][place], return_counts=True)[1]
    return int(counts[0]) if len(scopes) and (counts == counts[0]).all() else None


def _in_graphs(
    table: EventTable, rows: np.ndarray, mine: np.ndarray, operations: Mapping[int, Mapping[str, str]]
) -> dict[tuple[int, int], np.ndarray]:
    """Rows whose operation is none of the program's, for it is a CUDA graph: by program and graph."""
    width = len(table.texts) + 1
    programs, program_of = np.unique(rows["program"][mine], return_inverse=True)
    pair_of = program_of.astype(np.int64) * width + rows["op"][mine]
    found = {}
    for pair in np.unique(pair_of).tolist():
        program, op = programs[pair // width].item(), pair % width
        known = operations.get(program, {})
        if known and table.texts[op] not in known:
            found[program, op] = mine[pair_of == pair]
    return found


def _named(
    table: EventTable,
    rows: np.ndarray,
    members: np.ndarray,
    schedule: Sequence[tuple[str, str]],
    numbers: dict[str, int],
    first: np.ndarray,
    program: int,
) -> set[tuple[int, int]]:
    """Name the operations of one graph's events; the (program, text) of those that stay without one."""
    members = members[np.lexsort((rows["start_ps"][members], rows["flow"][members], rows["device"][members]))]
    starts = np.flatnonzero((np.diff(rows["flow"][members]) != 0) | (np.diff(rows["device"][members]) != 0))
    seen: dict[bytes, tuple[np.ndarray, np.ndarray]] = {}
    unnamed: set[tuple[int, int]] = set()
    for launch in np.split(members, starts + 1):
        kernels = rows["name"][launch]
        key = kernels.tobytes()
        if key not in seen:
            names = [table.texts[number] for number in kernels.tolist()]
            places, begins = align_kernels(names, schedule)
            texts = []
            for name, place in zip(names, places, strict=True):
                text = name if place < 0 else schedule[place][0]
                if text not in numbers:
                    numbers[text] = len(table.texts)
                    table.texts.append(text)
                texts.append(numbers[text])
                if place < 0:
                    unnamed.add((program, numbers[text]))
            seen[key] = np.array(texts, np.int32), np.array(begins, bool)
        rows["op"][launch], first[launch] = seen[key]
    return unnamed


def align_kernels(names: Sequence[str], schedule: Sequence[tuple[str, str]]) -> tuple[list[int], list[bool]]:
    """Find the operation of each kernel that a CUDA graph ran.

    The kernels and the operations are two sequences in the same order: of all ways to pair them that keep the order,
    that in which most go together is chosen, by dynamic programming (Needleman and Wunsch, 1970).

    Args:
      names: of kernels, in the order in which they began.
      schedule: name and kind of the program's operations, in their order.

    Returns:
      Of each kernel the place of its operation in the schedule (-1: unknown), and whether it is its first kernel.
    """
    own = {_NOT_IN_NAMES.sub("_", name): place for place, (name, _) in enumerate(schedule)}
    families: dict[str, list[int]] = {}
    for place, (name, _) in enumerate(schedule):
        families.setdefault(_family(name), []).append(place)
    moves = [place for place, (name, kind) in enumerate(schedule) if kind == "copy" or _MOVES.match(name)]
    calls, exchanges = (
        [place for place, (_, kind) in enumerate(schedule) if kind == this]
        for this in ("kernel", "collective")
    )
    names = [name.strip() for name in names]
    library = [name not in own and _family(name) not in families for name in names]

    def fits(at: int) -> Iterable[tuple[int, float]]:
        name = names[at]
        lower = name.lower()
        if lower.startswith("memset"):
            return ()
        found = dict.fromkeys(families.get(_family(name), ()), _SAME_CODE)
        if name in own:
            found[own[name]] = _OWN
        elif lower.startswith(_MEMORY):
            found |= dict.fromkeys(moves, _BY_KIND)
        elif library[at]:
            found |= dict.fromkeys(exchanges if name.startswith("nccl") else calls, _BY_KIND)
        return found.items()

    places = _paired(len(names), len(schedule), fits)
    if places is None:
        places = [own.get(name, -1) for name in names]
    for at, name in enumerate(names):
        if places[at] < 0 and name in own:  # a loop within the graph, for instance
            places[at] = own[name]
    begins = [True] * len(names)
    # A product is more than one kernel at times, and counters in memory are set for it before.
    for at in range(1, len(names)):
        if (
            places[at] < 0
            and library[at]
            and places[at - 1] >= 0
            and library[at - 1]
            and not _of_memory(names[at])
        ):
            places[at], begins[at] = places[at - 1], False
    for at in range(len(names) - 2, -1, -1):
        if names[at].lower().startswith("memset") and places[at + 1] >= 0:
            places[at], begins[at], begins[at + 1] = places[at + 1], begins[at + 1], False
    return places, begins


def _paired(rows: int, columns: int, fits: object) -> list[int] | None:
    """The column of each row (-1: none), ascending, so that the sum of what fits is largest; None if it is too much."""
    if rows * columns > _MOST_CELLS:
        return None
    best = np.zeros(columns + 1)
    taken = np.zeros((rows, columns + 1), bool)
    came = np.zeros((rows, columns + 1), np.int32)
    slope = _PASSED_OVER * np.arange(columns + 1)
    for row in range(rows):
        with_row = best.copy()
        for column, score in fits(row):  # type: ignore[operator]
            paired = best[column] + score
            if paired > with_row[column + 1]:
                with_row[column + 1], taken[row, column + 1] = paired, True
        # Or of an earlier column, all between passed over.
        leaning = with_row + slope
        highest = np.maximum.accumulate(leaning)
        came[row] = np.maximum.accumulate(np.where(leaning >= highest, np.arange(columns + 1), 0))
        best = highest - slope
    places = [-1] * rows
    column = int(np.argmax(best))
    for row in range(rows - 1, -1, -1):
        column = int(came[row, column])
        if taken[row, column]:
            places[row] = column - 1
            column -= 1
    return places


def _family(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", _NUMBERED.sub("", name))


def _of_memory(name: str) -> bool:
    return name.lower().startswith(_MEMORY)

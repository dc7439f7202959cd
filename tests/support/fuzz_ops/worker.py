"""Runs families of some operations in this process; prints a line of JSON for each: ``python -m fuzz_ops.worker``.

The process needs eight devices: :mod:`fuzz_ops.__main__` starts it with them.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from capibara.errors import CapibaraError
from fuzz_ops.case import Ambiguous, Family, draw
from fuzz_ops.plant import plant
from fuzz_ops.table import OPERATIONS
from fuzz_ops.ways import NEED, WAYS, Problem, precision

__all__ = ["DRAWS", "family_of", "fuzz", "run_family", "ways_of"]

# A draw costs a hundredth of what a family's programs do.
DRAWS = 60


def family_of(name: str, seed: int, number: int) -> tuple[Any, np.random.Generator]:
    """The family of that number, and the randomness that its values come from."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode()), number])
    return OPERATIONS[name](rng), rng


def run_family(
    family: Any, rng: np.random.Generator, draws: int = DRAWS, skip: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """For each way how many problems ran, how many were refused, and what was wrong with them."""
    if not isinstance(family, Family):
        yield from family.run(rng, draws)
        return
    with precision(family), np.errstate(all="ignore"):
        problems: list[Problem] = []
        for _ in range(6 * draws):
            if len(problems) == draws:
                break
            try:
                mood, arrays = draw(family, rng)
                problems.append(Problem(family, arrays, rng, mood))
            except Ambiguous:
                continue
        for way, function in WAYS.items():
            if not problems or not _fits(family, way):
                continue
            # Drawn in any case: what a way finds does not hang on which others run.
            own = np.random.default_rng(rng.integers(2**32))
            if way not in skip:
                yield run_way(way, function(family, problems, own), draws)


def _fits(family: Any, way: str) -> bool:
    need = NEED.get(way)
    return way not in family.refused and (need is None or bool(getattr(family, need)))


def ways_of(name: str, seed: int) -> set[str]:
    """The ways that some family of an operation is checked in; the first few need not have them all."""
    families = [family_of(name, seed, number)[0] for number in range(20)]
    return {way for family in families for way in WAYS if _fits(family, way)}


def run_way(way: str, found: Iterator[tuple[int, str | None]], draws: int) -> dict[str, Any]:
    """Count a way's problems. A refusal by a clear error is counted as one; any other exception is wrong."""
    row: dict[str, Any] = {"way": way, "problems": 0, "wrong": [], "refused": 0}
    try:
        for count, wrong in found:
            row["problems"] += count
            if wrong:
                row["wrong"].append(wrong)
    except NotImplementedError as error:
        if not isinstance(error, CapibaraError):
            raise
        row.update(refused=draws, why=str(error))
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        row["problems"] += 1
        row["wrong"].append(
            f"{type(error).__name__}: {error} ({last.filename.rpartition('/')[2]}:{last.lineno})"[:1500]
        )
    return row


def fuzz(
    name: str,
    problems: int,
    seed: int,
    *,
    seconds: float | None = None,
    numbers: list[int] | None = None,
    draws: int = DRAWS,
    fault: str | None = None,
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """Run families of an operation until each way has had so many problems, or the time is up.

    ``fault``: one of :data:`fuzz_ops.plant.FAULTS`, to see it found.
    """
    end = None if seconds is None else time.monotonic() + seconds
    count: Counter[str] = Counter()
    number = 0
    ways_wanted = ways_of(name, seed)
    while numbers is not None or min(count[way] for way in ways_wanted) < problems:
        if numbers is not None:
            if number == len(numbers):
                break
            which = numbers[number]
        else:
            which = number
        number += 1
        if (end is not None and time.monotonic() > end) or number >= 4 * problems / draws:
            break
        start = time.monotonic()
        family, rng = family_of(name, seed, which)
        family = family if fault is None else plant(family, fault)
        # A way that has had its problems waits for those that fit fewer families, as second derivatives do.
        done = () if numbers is not None else [way for way, had in count.items() if had >= problems]
        ways = list(run_family(family, rng, draws, done))
        count.update({row["way"]: row["problems"] for row in ways if row["problems"]})
        tell(
            {
                "op": name,
                "family": which,
                "label": family.label,
                "ways": ways,
                "seconds": time.monotonic() - start,
            }
        )
        if number % 5 == 0:
            # Programs of families that are done are of no more use.
            jax.clear_caches()
            gc.collect()
    jax.clear_caches()
    gc.collect()


def _say(name: str, row: dict[str, Any]) -> None:
    print("ROW" + json.dumps({**row, "op": name}), flush=True)


def main() -> None:
    options = json.loads(sys.argv[1])
    names = options.pop("operations")
    if not names:
        print("OPERATIONS" + json.dumps(list(OPERATIONS)))
    for each in names:
        # "name!fault" has a fault planted.
        name, _, fault = each.partition("!")
        fuzz(name, **options, fault=fault or None, tell=partial(_say, each))


if __name__ == "__main__":
    main()

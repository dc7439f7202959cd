"""What one execution of a compiled program does on one device, as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from capibara.plan.errors import PlanError

__all__ = ["Collective", "Kernel", "Piece", "ProgramFacts"]

_FORMAT = 1


@dataclass(frozen=True)
class Piece:
    """A fusion, copy or other operation that the schedule runs as one.

    Attributes:
      name: the instruction's name in the program.
      opcode: what it is (``"fusion"``, ``"copy-start"`` …).
      op_name: the path in the JAX program that it came from.
      trips: how often it runs in one execution of the program.
      cycles: the compiler's own estimate for one run, None where it states none.
      flops: of matrix products and convolutions in one run (a multiply-add is two).
      hbm_bytes: read from and written to the main memory in one run, with the padding of tiles.
      host_bytes: copied to or from the host's memory in one run.
      asynchronous: a copy between memories, which other work goes on beside.
      dtype: element type of the operands of its largest matrix product, or empty.
    """

    name: str
    opcode: str
    op_name: str
    trips: int
    cycles: int | None
    flops: int
    hbm_bytes: int
    host_bytes: int = 0
    asynchronous: bool = False
    dtype: str = ""


@dataclass(frozen=True)
class Collective:
    """An exchange between devices.

    Attributes:
      kind: ``"all-gather"``, ``"reduce-scatter"``, ``"all-reduce"``, ``"all-to-all"``, ``"collective-permute"``,
        ``"collective-broadcast"``.
      bytes: the whole array of one exchange as one device has it: after an all-gather, before a reduce-scatter.
      groups: devices that exchange with one another, as positions in the mesh; pairs from → to of a permute.
      group_size: devices in a group (2 for pairs).
      trips: how often it runs in one execution of the program.
      asynchronous: whether other work is scheduled between its start and its end.
      cycles_hidden: the compiler's cycles of that work.
      op_name: the path in the JAX program that it came from.
      name: the instruction's name in the program.
      algorithm: what the compiler calls the form it chose (``"3DAllGatherOnMajorDim"``), or empty.
      ring_dims: along how many axes of the torus that form works at once; 0 when the text does not say.
    """

    kind: str
    bytes: int
    groups: tuple[tuple[int, ...], ...]
    group_size: int
    trips: int
    asynchronous: bool
    cycles_hidden: int
    op_name: str
    name: str = ""
    algorithm: str = ""
    ring_dims: int = 0


@dataclass(frozen=True)
class Kernel:
    """A call of code that XLA did not write, such as a Pallas kernel.

    Attributes:
      target: what is called (``"tpu_custom_call"``).
      trips: how often it runs in one execution of the program.
      flops: of one run, as the kernel's own cost estimate states; None when it states none.
      bytes: of one run, from the cost estimate, or else of operands and results in main memory.
      op_name: the path in the JAX program that it came from.
      name: the instruction's or the kernel's name.
      cycles: of one run, when the compiler states them.
    """

    target: str
    trips: int
    flops: int | None
    bytes: int
    op_name: str
    name: str = ""
    cycles: int | None = None


@dataclass(frozen=True)
class ProgramFacts:
    """One execution on one device.

    Attributes:
      name: the module's name.
      num_devices: devices that the program runs on.
      flops: of all matrix products and convolutions, loops multiplied out, kernels' own statements included.
      hbm_bytes: moved from and to main memory, likewise.
      cycles: sum of the compiler's estimates × trips (pieces without an estimate are not in it).
      pieces: operations on the device itself.
      collectives: exchanges between devices.
      kernels: calls of foreign code.
      schedule: the order of execution: ``("piece" | "collective" | "kernel", index)``, ``("start" | "done", index)`` of
        an asynchronous collective, ``("copy" | "copied", index)`` of an asynchronous copy (an index into ``pieces``),
        ``("loop", trips, (…))``.
      unknown: what could not be told from the text, in words.
    """

    name: str
    num_devices: int
    flops: int
    hbm_bytes: int
    cycles: int
    pieces: tuple[Piece, ...]
    collectives: tuple[Collective, ...]
    kernels: tuple[Kernel, ...]
    schedule: tuple[Any, ...]
    unknown: tuple[str, ...]

    def to_json(self) -> str:
        """As JSON text that :meth:`from_json` reads back. Groups that several collectives have are written once."""
        tables: dict[tuple[tuple[int, ...], ...], int] = {}
        collectives = [
            {**vars(item), "groups": tables.setdefault(item.groups, len(tables))} for item in self.collectives
        ]
        data = {
            **vars(self),
            "format": _FORMAT,
            "pieces": [vars(piece) for piece in self.pieces],
            "collectives": collectives,
            "kernels": [vars(kernel) for kernel in self.kernels],
            "groups": list(tables),
        }
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> ProgramFacts:
        """Read what :meth:`to_json` wrote.

        Raises:
          PlanError: it is something else.
        """
        try:
            data = json.loads(text)
            if data.pop("format") != _FORMAT:
                raise PlanError(f"program facts of another format than {_FORMAT}: compile the program again")
            data["pieces"] = tuple(Piece(**piece) for piece in data["pieces"])
            tables = [tuple(map(tuple, groups)) for groups in data.pop("groups")]
            data["collectives"] = tuple(
                Collective(**{**item, "groups": tables[item["groups"]]}) for item in data["collectives"]
            )
            data["kernels"] = tuple(Kernel(**kernel) for kernel in data["kernels"])
            data["schedule"] = _events(data["schedule"])
            data["unknown"] = tuple(data["unknown"])
            return cls(**data)
        except (LookupError, TypeError, AttributeError, json.JSONDecodeError, RecursionError) as error:
            raise PlanError(
                f"text is not program facts as written by ProgramFacts.to_json(): {error}"
            ) from error


def _events(items: list[Any]) -> tuple[Any, ...]:
    return tuple(
        ("loop", item[1], _events(item[2])) if item[0] == "loop" else (item[0], item[1]) for item in items
    )

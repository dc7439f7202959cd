"""Several processes that train one model: who they are, and how they agree.

Each runs the same program. Arrays are global: each process holds the parts on its own devices, and XLA inserts the
communication. So every process has to start the same computations in the same order, and whatever only one of them
can know (a signal, its clock, what is on the disk) has to be agreed on first:

- what process 0 alone does (reading the folder of a run, writing files) is done in :meth:`Processes.first_does`, which
  gives its result, or its error, to all;
- what any of them may want at any time, such as to stop, is put to the vote in every step (:class:`Ballots`).
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import capibara.errors
from capibara.errors import CapibaraError
from capibara.launch import described_by_platform, heartbeat_seconds, read_membership
from capibara.train import errors
from capibara.train.errors import ProcessesError

__all__ = ["Ballots", "Processes", "by_process", "error_of", "join_processes"]

_T = TypeVar("_T")

_SHUTDOWN = 60  # seconds that a process which is done waits for the others
_SHARED = 10.0  # seconds until a file of process 0 has to be seen by the others


def join_processes() -> Processes:
    """Join the other processes that the environment describes (:mod:`capibara.launch.environment`), if any.

    It has to be called before JAX is used. A process that belongs to a group already, as Ray's do, stays in it.

    Equivalent JAX: ``jax.distributed.initialize(coordinator_address, num_processes, process_id)``.

    Raises:
      ConfigError: the environment's variables are incomplete or invalid (:func:`capibara.launch.heartbeat_seconds`
        too).
      ProcessesError: the others cannot be reached, or JAX is running already.
    """
    if jax.distributed.is_initialized():
        return Processes.here()
    place = read_membership(os.environ)
    if place is None and not described_by_platform(os.environ):
        return Processes(1, 0)
    if place is not None and place.count == 1:
        return Processes(1, 0)
    options: dict[str, Any] = {
        "shutdown_timeout_seconds": _SHUTDOWN,
        "heartbeat_timeout_seconds": heartbeat_seconds(os.environ),
    }
    where = "the processes that the platform describes"
    if place is not None:
        options |= {
            "coordinator_address": place.coordinator,
            "num_processes": place.count,
            "process_id": place.index,
        }
        where = f"{place.count} processes at {place.coordinator} as process {place.index}"
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        raise ProcessesError(
            f"could not join {where}: {str(error).strip().splitlines()[0]:.300}. Check that process 0 runs and can be "
            "reached, that each process has its own number, and that nothing used JAX before"
        ) from error
    return Processes.here()


@dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Attributes:
      count: how many.
      index: the number of this one, from 0; process 0 writes the files of a run and shows its progress.
    """

    count: int
    index: int

    @classmethod
    def here(cls) -> Processes:
        """Those that JAX runs in; it starts if it has not yet."""
        return cls(jax.process_count(), jax.process_index())

    @property
    def first(self) -> bool:
        """Whether this is process 0."""
        return self.index == 0

    def first_does(self, action: Callable[[], _T]) -> _T:
        """Run a function in process 0; all processes get its result, JSON values, or raise its error.

        Every process has to call it. What one process alone gets is what ``action`` gives.

        Raises:
          CapibaraError: what ``action`` raises in process 0; another error is a ProcessesError in the other processes.
        """
        if self.count == 1:
            return action()
        failure: Exception | None = None
        answer: dict[str, Any] = {}
        if self.first:
            try:
                answer = {"value": action()}
            except Exception as error:
                failure = error
                answer = {"error": type(error).__name__, "text": str(error)}
        answer = self._broadcast(answer)
        if failure is not None:
            raise failure
        if "error" in answer:
            raise error_of(answer["error"], answer["text"])
        return answer["value"]

    def all_say(self, value: Any) -> list[Any]:
        """What every process gives, JSON values, in the processes' order; each has to call it."""
        if self.count == 1:
            return [value]
        content = np.frombuffer(json.dumps(value).encode(), np.uint8)
        sizes = np.ravel(multihost_utils.process_allgather(np.int32(content.size)))
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: content.size] = content
        together = np.asarray(multihost_utils.process_allgather(padded)).reshape(self.count, -1)
        return [json.loads(row[:size].tobytes()) for row, size in zip(together, sizes, strict=True)]

    def all_do(self, action: Callable[[], _T]) -> list[_T]:
        """Run a function in every process; all get the results, JSON values in the processes' order, or raise an error.

        Raises:
          CapibaraError: what ``action`` raises in a process; see :meth:`first_does`.
        """
        failure: Exception | None = None
        mine: dict[str, Any] = {}
        try:
            mine = {"value": action()}
        except Exception as error:
            failure = error
            mine = {"error": type(error).__name__, "text": str(error)}
        said = self.all_say(mine)
        if failure is not None:
            raise failure
        for index, one in enumerate(said):
            if "error" in one:
                raise error_of(one["error"], one["text"], index)
        return [one["value"] for one in said]

    def barrier(self, name: str) -> None:
        """Return once every process has come here."""
        if self.count > 1:
            multihost_utils.sync_global_devices(name)

    def orbax_options(self, path: Path) -> Any:
        """How Orbax lets the processes wait for one another while they write into a folder."""
        from capibara.train import extras

        return extras.orbax().options.MultiprocessingOptions()

    def check_shared(self, folder: Path) -> None:
        """Refuse a folder that is another one for other processes: checkpoints are written by all of them.

        Raises:
          ProcessesError: in every process; it names those that do not see a file that process 0 wrote there.
        """
        if self.count == 1:
            return

        def write() -> str:
            token = folder / f".{secrets.token_hex(8)}.tmp"  # like those that the next run removes
            token.touch()
            return token.name

        token = folder / self.first_does(write)
        deadline = time.monotonic() + _SHARED
        while not (seen := token.exists()) and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                os.listdir(folder)  # NFS then asks its server
            time.sleep(0.1)
        said = self.all_say(seen)
        if self.first:
            token.unlink(missing_ok=True)
        if blind := [index for index, sees in enumerate(said) if not sees]:
            raise ProcessesError(
                f"checkpoint.directory: {_numbered(blind)} of {self.count} do not see what process 0 writes to "
                f"{str(folder)!r}. Choose a folder that all machines share (--directory), such as one on NFS or a "
                "mounted bucket"
            )

    def _broadcast(self, value: dict[str, Any]) -> dict[str, Any]:
        # Two steps, because all have to know the length.
        content = np.frombuffer(json.dumps(value).encode() if self.first else b"", np.uint8)
        size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size), is_source=self.first))
        if not self.first:
            content = np.zeros(size, np.uint8)
        sent = np.asarray(multihost_utils.broadcast_one_to_all(content, is_source=self.first))
        return json.loads(sent.astype(np.uint8).tobytes())


class Ballots:
    """A vote of all processes in every step, which nobody waits for: its outcome is read some steps later.

    The processes' integers are compared on the devices, in a program of its own that is queued before a step's; the
    largest is read once the steps of ``delay`` votes ago are done, as the loop's losses are.

    Args:
      processes: all of them call :meth:`vote` equally often.
      delay: how many votes later an outcome is read.
      devices: those of the steps, of each process equally many: collective operations of programs on other devices
        would run at the same time as theirs, which Gloo mixes up. By default all.
    """

    def __init__(self, processes: Processes, delay: int, devices: Sequence[Any] | None = None) -> None:
        self._delay, self._cast = delay, deque[jax.Array]()
        self._count = processes.count
        if processes.count > 1:
            rows = np.array(by_process(jax.devices() if devices is None else devices))
            mesh = Mesh(rows, ("process", "device"))
            self._own = NamedSharding(mesh, PartitionSpec("process"))
            self._most = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def vote(self, value: int) -> int:
        """Cast an integer from 0; the largest that any process cast ``delay`` votes ago, or 0 before that.

        With one process it is ``value``.
        """
        if self._count == 1:
            return value
        mine = np.array([value], np.int32)
        everyone = jax.make_array_from_process_local_data(self._own, mine, (self._count,))
        self._cast.append(self._most(everyone))
        if len(self._cast) <= self._delay:
            return 0
        return int(jax.device_get(self._cast.popleft()))

    def settle(self) -> None:
        """Wait for the votes whose outcome nobody has read."""
        jax.block_until_ready(list(self._cast))


def by_process(devices: Any) -> list[list[Any]]:
    """Devices of each process, in the processes' order."""
    groups: dict[int, list[Any]] = {}
    for device in devices:
        groups.setdefault(getattr(device, "process_index", 0), []).append(device)
    return [groups[index] for index in sorted(groups)]


def _numbered(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (" …" if len(numbers) > 8 else "")
    return f"process{'' if len(numbers) == 1 else 'es'} {shown}"


def error_of(name: str, text: str, index: int = 0) -> CapibaraError:
    """The error of another process, of its own class if that is one of Capibara's."""
    for module in (errors, capibara.errors):
        kind = getattr(module, name, None)
        if isinstance(kind, type) and issubclass(kind, CapibaraError) and name in module.__all__:
            try:
                return kind(text)
            except TypeError:  # it takes more than a text
                break
    return ProcessesError(f"process {index} failed: {name}: {text}")

"""What processes say to one another beside their training, without any device.

Programs with collective operations have to start in the same order in all processes, which is the order of the training
thread. A thread that runs beside it may start none: it agrees with those of the other processes through the key-value
store of the coordinator, which ``jax.distributed.initialize`` starts in process 0.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from capibara.jax_versions import coordinator_client
from capibara.train.errors import ProcessesError
from capibara.train.processes import Processes, error_of

__all__ = ["Exchange"]

_T = TypeVar("_T")

_POLL_MS = 500


@dataclass(frozen=True)
class Exchange(Processes):
    """The processes of a run, as one thread of each of them sees them.

    Attributes:
      token: the same in all processes, and another one for each use.
      given_up: set when nobody waits for the thread any more; it then ends.
    """

    token: str = ""
    given_up: threading.Event = field(default_factory=threading.Event, compare=False)
    _rounds: Iterator[int] = field(default_factory=itertools.count, compare=False, repr=False)

    @classmethod
    def between(cls, processes: Processes, token: str) -> Exchange | None:
        """One between these processes; None if there is no coordinator that could carry it."""
        if processes.count > 1 and coordinator_client() is None:
            return None
        return cls(processes.count, processes.index, token)

    def all_say(self, value: Any) -> list[Any]:
        """See :meth:`Processes.all_say`."""
        if self.count == 1:
            return [value]
        place = f"{self._place}{next(self._rounds)}/"
        self._tell(f"{place}{self.index}", value)
        return [self._hear(f"{place}{index}", index) for index in range(self.count)]

    def all_do(self, action: Callable[[], _T]) -> list[_T]:
        """See :meth:`Processes.all_do`; a process that waits for others elsewhere hears of a failure, too."""
        with self._telling():
            return super().all_do(action)

    def barrier(self, name: str) -> None:
        """Return once every process has come here."""
        self.all_say(name)

    def failure(self) -> Exception | None:
        """What another process says has failed; None if none says so. It does not wait."""
        if self.count == 1:
            return None
        for index in range(self.count):
            if index != self.index and (text := self._look(f"{self._place}failed/{index}")) is not None:
                said = json.loads(text)
                return error_of(said["error"], said["text"], index)
        return None

    def tell_failure(self, error: BaseException) -> None:
        """Let the others know, whatever they wait for."""
        if self.count > 1:
            with contextlib.suppress(Exception):  # nobody may be there any more
                said = {"error": type(error).__name__, "text": str(error)}
                self._tell(f"{self._place}failed/{self.index}", said)

    def forget(self) -> None:
        """Remove what was said, once every process has heard it."""
        if self.count > 1 and self.first:
            with contextlib.suppress(Exception):
                self._client.key_value_delete(self._place)

    def orbax_options(self, path: Path) -> Any:
        """Orbax takes the coordinator's barriers where processes are named; each has to have a name of its own."""
        if self.count == 1:
            return super().orbax_options(path)
        from capibara.train import extras

        return extras.orbax().options.MultiprocessingOptions(
            active_processes=set(range(self.count)),
            barrier_sync_key_prefix=f"{self._place}{path.name}",
        )

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.tell_failure(error)
            raise

    def _broadcast(self, value: dict[str, Any]) -> dict[str, Any]:
        place = f"{self._place}{next(self._rounds)}/0"
        if self.first:
            self._tell(place, value)
            return value
        return self._hear(place, 0)

    @property
    def _place(self) -> str:
        return f"capibara/{self.token}/"

    @property
    def _client(self) -> Any:
        client = coordinator_client()
        if client is None:
            raise ProcessesError("the processes are no longer connected")
        return client

    def _tell(self, key: str, value: Any) -> None:
        self._client.key_value_set(key, json.dumps(value))

    def _look(self, key: str) -> str | None:
        try:
            return self._client.key_value_try_get(key)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise ProcessesError(f"process 0 cannot be reached: {str(error)[:300]}") from error

    def _hear(self, key: str, index: int) -> Any:
        while not self.given_up.is_set():
            try:
                return json.loads(self._client.blocking_key_value_get(key, _POLL_MS))
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error) and "NOT_FOUND" not in str(error):
                    raise ProcessesError(f"process 0 cannot be reached: {str(error)[:300]}") from error
            if (failed := self.failure()) is not None:
                raise failed
            time.sleep(0)
        raise ProcessesError(f"process {index} did not answer in time")

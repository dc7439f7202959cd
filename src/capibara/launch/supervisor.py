"""One program as several processes of this machine, from a free port to the last of them.

The processes belong together: when one fails, the others wait for it in a collective operation for ever. So the first
failure ends them all, and it is the first that is reported, not what followed from it. Signals that the launcher gets
are passed on, and the processes decide when to stop; each leads a process group of its own, so that a terminal's Ctrl-C
reaches it once and nothing that it started is left. Should the launcher itself be killed, the kernel kills them
(``PR_SET_PDEATHSIG``).

One thread does all of it: output, signals and ends of processes are waited for in one place.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from capibara.errors import ConfigError, printable
from capibara.launch.devices import device_variables
from capibara.launch.environment import FEWEST, HEARTBEAT, Membership
from capibara.launch.memory import empty_memory, held_memory, memory_variables
from capibara.launch.slots import Slots

__all__ = ["launch_processes"]

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INVALID = 2  # the exit code for invalid input, which stays invalid
_SOON = 60.0  # seconds after its start in which a failure counts as one of the slot
_RESTARTS = 10  # of a group that may go on with fewer
# Seconds until processes give up one of them that stands still. One that ends the launcher sees at once; and those of a
# machine that was suspended, or of frozen containers, stood still together.
_PATIENCE = 600
_POLL = 0.5  # seconds: should a signal of a child's end be lost
_LONGEST = 1 << 16  # bytes of a line that are waited for
# What a process runs before its program: it asks the kernel to be killed when its parent is gone, or ends if it is.
# A function between fork and exec would do, too, but not in programs with threads, such as all that have started JAX.
_DIE_WITH_PARENT = """
import os, sys
if sys.platform.startswith("linux"):
    import ctypes
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
# JAX's collective operations on CPU print this for every new group of devices.
_NOISE = re.compile(rb"\[Gloo\] Rank \d+ is connected to")


@dataclass
class _Process:
    index: int
    popen: subprocess.Popen[bytes]
    log: IO[bytes] | None
    partial: dict[int, bytes] = field(default_factory=dict)
    last: dict[int, str] = field(default_factory=dict)

    @property
    def last_line(self) -> str:
        """What it said last, on standard error if it did."""
        return self.last.get(2) or self.last.get(1) or ""


def launch_processes(
    command: Sequence[str],
    count: int,
    *,
    devices: int | None = None,
    logs: str | os.PathLike[str] | None = None,
    grace: float = 3.0,
    restarts: int | None = None,
    min_processes: int | None = None,
    replacements: int = 1,
    retry: float = 300.0,
    environment: Mapping[str, str] | None = None,
    out: BinaryIO | None = None,
    err: BinaryIO | None = None,
) -> int:
    """Run a command as several processes of this machine that find one another, and wait for all of them.

    Their lines are passed on with the number of the process in front. If one fails, the others are ended: with SIGTERM,
    and with SIGKILL after ``grace`` seconds. SIGINT, SIGTERM and SIGHUP are passed on to all. Each signal goes to the
    processes and what they started; what goes on when they have ended by it has ``grace`` seconds. Call it in the
    main thread.

    Args:
      command: program and arguments.
      count: number of processes.
      devices: emulated CPU devices of each process; None: the devices that JAX finds.
      logs: a folder for the output of each process, ``process-0.log`` …; None: none.
      grace: seconds.
      restarts: how often all are started again after a failure, unless its exit code is 2 (invalid input); by default
        10 times with ``min_processes``, otherwise never. A failed trial of a process that could not be replaced before
        is not counted. With restarts each process has some memory that the one in its place finds again
        (:mod:`capibara.launch.memory`).
      min_processes: go on with fewer, a divisor of ``count`` and at least so many, when a process cannot be replaced;
        by default with all or none. Where too few would be left, all are tried again, as long as there are restarts.
      replacements: how often in a row a process is replaced that fails within a minute of its start; then the group
        goes on without it (:class:`capibara.launch.slots.Slots`).
      retry: seconds after which a process that could not be replaced is tried again: all are stopped with SIGTERM, and
        started with it. Twice as long after each time in vain.
      environment: of the processes; by default this one's. out, err: where their lines go; by default this process's
        standard output and standard error.

    Returns:
      0; or of the first process that failed its exit code, 128 + n if signal n ended it; or 128 + n after a signal n
      that was passed on. The last line on ``err`` names the process and its last words.

    Raises:
      ConfigError: an argument is out of range, or the command or the folder cannot be used.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("launch_processes handles signals: call it in the main thread")
    for name, value in (("count", count), ("devices", 1 if devices is None else devices)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 4096:
            raise ConfigError(f"{name}={value!r}: expected an integer from 1 to 4096")
    if not command:
        raise ConfigError("command: got none, expected a program and its arguments")
    if shutil.which(command[0]) is None:
        raise ConfigError(f"command: got {command[0]!r:.200}, expected a program that can be run")
    if isinstance(grace, bool) or not 0 <= grace <= 86400:
        raise ConfigError(f"grace={grace!r}: expected seconds, from 0 to 86400")
    if restarts is None:
        restarts = 0 if min_processes is None else _RESTARTS
    for name, value in (("restarts", restarts), ("replacements", replacements)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{name}={value!r}: expected an integer from 0")
    if isinstance(retry, bool) or not 0 < retry <= 86400:
        raise ConfigError(f"retry={retry!r}: expected seconds above 0, up to 86400")
    fewest = count if min_processes is None else min_processes
    if isinstance(fewest, bool) or not isinstance(fewest, int) or not 1 <= fewest <= count:
        raise ConfigError(f"min_processes={min_processes!r}: expected an integer from 1 to count={count}")
    base = dict(os.environ if environment is None else environment)
    own = device_variables(base, count, devices)
    base["PYTHONUNBUFFERED"] = "1"
    base[HEARTBEAT] = base.get(HEARTBEAT) or str(_PATIENCE)
    group = _Group({1: out or sys.stdout.buffer, 2: err or sys.stderr.buffer}, grace)
    if fewest < count:
        base[FEWEST] = str(fewest)
    slots = Slots(count, fewest, replacements=replacements, soon=_SOON, retry=retry)
    attempt, again = 0, False
    last: tuple[int, ...] = ()
    with group.signals(), held_memory(count if restarts else 0) as held:
        while True:
            begun = time.monotonic()
            chosen = slots.chosen(begun)
            if last not in ((), chosen):  # copies of a group of other processes are of no use to this one
                empty_memory(held)
            last = chosen
            with _reserved_port() as port, group.ending():
                base["JAX_COORDINATOR_BIND_ADDRESS"] = f"127.0.0.1:{port}"  # not for other machines
                for index, slot in enumerate(chosen):
                    place = Membership(f"127.0.0.1:{port}", len(chosen), index)
                    files = held[slot] if held else ()
                    variables = {**base, **own[slot], **place.variables(), **memory_variables(files)}
                    group.start(command, index, variables, logs, again=again, files=files)
                code = group.wait(None if fewest == count else slots.grows_at(begun))
            again, now = True, time.monotonic()
            if group.stopped_to_grow:
                group.say(
                    f"starting all again, with {len(slots.chosen(now))} processes instead of {len(chosen)}"
                )
                continue
            if not group.worth_another_try:
                return code
            slot, ran = 0, 0.0
            if fewest < count:
                assert group.culprit is not None
                slot, ran = chosen[group.culprit], group.failed_at - begun
            words = "starting all again"
            # That a slot is still broken is found out as often as it is tried: the group need not end by it.
            if not slots.on_trial(slot, after=ran):
                if attempt == restarts:
                    return code
                attempt += 1
                words += f" ({attempt} of at most {restarts} times)"
            if fewest < count and slots.failed(slot, after=ran, now=now):
                left = slots.chosen(now)
                who = f"process {group.culprit} of {len(chosen)}"
                cause = f"{who} cannot be replaced: it failed {ran:.0f} s after its start"
                if not left:
                    # Two failures in a row may have been two that have nothing to do with the slot. A group that
                    # cannot become smaller goes on as one without min_processes does: as long as it may be restarted.
                    slots.all_again()
                    left = slots.chosen(now)
                    cause += f", and no divisor of {count} from min_processes={fewest} on would be left"
                words += f", with {len(left)} of {count} processes; {cause}"
            group.say(words)


class _Group:
    def __init__(self, streams: Mapping[int, BinaryIO], grace: float) -> None:
        self.processes: list[_Process] = []
        self._streams, self._grace = streams, grace
        self._selector = selectors.DefaultSelector()
        self._passed_on: list[int] = []
        self._failed: _Process | None = None
        self._failure: int | None = None
        self._kill_at: float | None = None
        self._grows = False
        self.failed_at = 0.0

    def start(
        self,
        command: Sequence[str],
        index: int,
        environment: dict[str, str],
        logs: Any,
        *,
        again: bool,
        files: tuple[int, ...] = (),
    ) -> None:
        log = None
        try:
            if logs is not None:
                Path(logs).mkdir(parents=True, exist_ok=True)
                log = open(Path(logs) / f"process-{index}.log", "ab" if again else "wb")  # noqa: SIM115 - closed by close()
            popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                pass_fds=files,
            )
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            if log is not None:
                log.close()
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(
                f"could not start process {index}: {reason}. Check the command and the folder of logs="
            ) from error
        process = _Process(index, popen, log)
        self.processes.append(process)
        for number, pipe in ((1, popen.stdout), (2, popen.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, (process, number))

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Signals wake the selector instead of interrupting anything."""
        read, write = os.pipe()
        for end in (read, write):
            os.set_blocking(end, False)
        numbers = (*_PASSED_ON, signal.SIGCHLD)
        # What the one who started this ignores (nohup: SIGHUP) stays so.
        handled = [
            one for one in numbers if signal.getsignal(one) is not signal.SIG_IGN or one == signal.SIGCHLD
        ]
        before = {number: signal.signal(number, lambda *_: None) for number in handled}
        old = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        self._selector.register(read, selectors.EVENT_READ, None)
        try:
            yield
        finally:
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            self._selector.close()
            os.close(read)
            os.close(write)

    def wait(self, grow_at: float | None = None) -> int:
        """Wait for all of them; the exit code of the group.

        Args:
          grow_at: stop them then, as there could be more of them.
        """
        while self._some_run():
            if grow_at is not None and time.monotonic() >= grow_at and not (self._failed or self._passed_on):
                self._grows, grow_at = True, None
                self._signal(signal.SIGTERM)
            for key, _ in self._selector.select(_POLL):
                if key.data is None:
                    for number in os.read(key.fd, 4096):
                        if number != signal.SIGCHLD:
                            self._pass_on(number)
                else:
                    self._read(key)
            self._look_for_failures()
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._signal(signal.SIGKILL)
        self._look_for_failures()
        self._drain()
        return self._outcome()

    def _some_run(self) -> bool:
        if any(process.popen.poll() is None for process in self.processes):
            return True
        # A shell that runs a script ends at once by a signal, and what the script started is still saving.
        if not (self._passed_on or self._failed or self._grows) or not any(map(_group_runs, self.processes)):
            return False
        now = time.monotonic()
        if self._kill_at is None:
            self._kill_at = now + self._grace
        return now < self._kill_at

    @property
    def stopped_to_grow(self) -> bool:
        """Whether they were stopped because there could be more of them, and for no other reason."""
        return self._grows and self._failure is None and not self._passed_on

    @property
    def culprit(self) -> int | None:
        """The number of the process that failed first."""
        return None if self._failed is None else self._failed.index

    @property
    def worth_another_try(self) -> bool:
        """Whether a process failed of something that may be different the next time."""
        asked = {
            128 + number for number in _PASSED_ON
        }  # to stop, by somebody who sent a signal to one process
        return self._failure is not None and self._failure not in {_INVALID, *asked} and not self._passed_on

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """In the end what is still there is ended, with everything that the processes started."""
        self._failed, self._kill_at, self._failure, self._grows = None, None, None, False
        try:
            yield
        finally:
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.popen.pid, signal.SIGKILL)
                process.popen.wait()
                for stream in (process.popen.stdout, process.popen.stderr, process.log):
                    if stream is not None:
                        with contextlib.suppress(KeyError, ValueError):
                            self._selector.unregister(stream)
                        stream.close()
            self.processes = []

    def _pass_on(self, number: int) -> None:
        self._passed_on.append(number)
        if self._grows and len(self._passed_on) == 1:
            return  # they are asked already: a second signal would let them end without saving
        # Asked for the third time: not to be waited for any longer.
        self._signal(signal.SIGKILL if len(self._passed_on) > 2 else number)

    def _signal(self, number: int) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.popen.pid, number)

    def _look_for_failures(self) -> None:
        if self._failed is not None:
            return
        expected = {0, *(code for number in self._passed_on for code in (-number, 128 + number))}
        if self._grows:
            expected |= {-signal.SIGTERM, 128 + signal.SIGTERM}
        if len(self._passed_on) > 1:
            expected.add(128 + signal.SIGINT)  # of a program that does not wait for its end any longer
        if len(self._passed_on) > 2:
            expected.add(-signal.SIGKILL)
        failed = [
            p for p in self.processes if p.popen.poll() is not None and p.popen.returncode not in expected
        ]
        if not failed:
            return
        # One that a signal ended is a cause; others may already have failed of it, or JAX has aborted them.
        self._failed = min(
            failed, key=lambda p: (p.popen.returncode > 0, p.popen.returncode == -signal.SIGABRT, p.index)
        )
        self.failed_at = time.monotonic()
        self._signal(signal.SIGTERM)
        self._kill_at = time.monotonic() + self._grace

    def _read(self, key: selectors.SelectorKey) -> None:
        process, number = key.data
        try:
            content = os.read(key.fd, 1 << 16)
        except BlockingIOError:
            return
        if not content:
            self._selector.unregister(key.fileobj)
            if rest := process.partial.pop(number, b""):
                self._line(process, number, rest + b"\n")
            return
        if process.log is not None:
            process.log.write(content)
            process.log.flush()
        lines = (process.partial.pop(number, b"") + content).split(b"\n")
        for line in lines[:-1]:
            self._line(process, number, line + b"\n")
        if len(lines[-1]) > _LONGEST:
            self._line(process, number, lines[-1] + b"\n")
        elif lines[-1]:
            process.partial[number] = lines[-1]

    def _line(self, process: _Process, number: int, line: bytes) -> None:
        if _NOISE.match(line):  # it is in the logs
            return
        if text := line.decode(errors="replace").strip():
            process.last[number] = text
        stream = self._streams[number]
        stream.write(f"[{process.index}] ".encode() + line)
        stream.flush()

    def _drain(self) -> None:
        """What the processes wrote before they ended; something that they started may still hold a pipe open."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.popen.pid, signal.SIGKILL)
        end = time.monotonic() + 1.0
        while pipes := [key for key in self._selector.get_map().values() if key.data is not None]:
            self._selector.select(0.05)
            for key in pipes:
                self._read(key)
            if time.monotonic() > end:
                return

    def _outcome(self) -> int:
        if self._failed is not None:
            code, who = (
                self._failed.popen.returncode,
                f"process {self._failed.index} of {len(self.processes)}",
            )
            if code < 0:
                how = f"was ended by {_name(-code)}"
            elif code - 128 in _PASSED_ON:  # it got the signal from somebody else, and ended in order
                how = f"was stopped by {_name(code - 128)}"
            else:
                how = f"failed with exit code {code}"
            # A signal leaves no words of its own; what was said before it is not its cause.
            words = (
                f": {printable(self._failed.last_line, 500)}" if code > 0 and self._failed.last_line else ""
            )
            self.say(f"{who} {how}; the others were stopped{words}")
            self._failure = failure = 128 - code if code < 0 else code
            return failure
        if self._passed_on and any(process.popen.returncode for process in self.processes):
            self.say(f"stopped by {_name(self._passed_on[0])}")
            return 128 + self._passed_on[0]
        return 0

    def say(self, text: str) -> None:
        """Write a line of the launcher's own."""
        self._streams[2].write(f"capibara launch: {text}\n".encode())
        self._streams[2].flush()


def _group_runs(process: _Process) -> bool:
    """Whether anything that it started, or itself, is still there."""
    try:
        os.killpg(process.popen.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user, or on macOS a zombie
        return process.popen.poll() is None
    return True


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextlib.contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port of this machine that stays this group's until its end.

    The socket does not listen, and lets the one of process 0 have the same port (``SO_REUSEPORT``).
    """
    with socket.socket() as holder:
        if hasattr(socket, "SO_REUSEPORT"):
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]

"""Run a function in a fork of this process that takes no device.

JAX starts all of its backends when a device is first requested, and a GPU or TPU backend holds its devices
until the process ends. Exporting a function requests a device for any target platform, and a
Python function cannot be sent to a process that was not forked. So a process without a started backend,
which may need its devices later or leave them to others, is forked; the copy has the function, is restricted to
the CPU, and sends back the result. A process with started backends already holds its devices, and has
threads that a fork would lack: it does the work itself, which takes no further devices.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from capibara.plan.errors import PlanError

__all__ = ["backends_started", "can_copy", "isolated"]

Result = tuple[dict[str, Any], bytes]
_HEAD = 16


def backends_started() -> bool:
    """Whether this process has started JAX's backends, and so holds its devices."""
    import jax

    # JAX has no public question for it, but a setting that it refuses to change from then on.
    now = jax.config.values["jax_num_cpu_devices"]
    try:
        # One is what there is without the setting, should another thread start JAX just now.
        jax.config.update("jax_num_cpu_devices", 2 if now == 1 else 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", now)
    return False


def can_copy() -> bool:
    """Whether a process can be copied here: on Linux. Elsewhere there is no TPU compiler either."""
    return sys.platform == "linux" and hasattr(os, "fork")


def isolated(function: Callable[[], Result], *, what: str, timeout: float = 1800.0) -> Result:
    """Call a function, which returns plain data and bytes, without taking an accelerator in this process.

    Args:
      function: returns JSON data and bytes. Its other effects are lost with the fork.
      what: description for error messages.
      timeout: time limit of the fork in seconds.

    Raises:
      PlanError: one that the function raised; or the copy ended otherwise, or took too long.
    """
    if not can_copy() or backends_started():
        return function()
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Of other threads, which the copy lacks: none of them is JAX's before a backend is started.
        warnings.simplefilter("ignore", DeprecationWarning)
        copy = os.fork()
    if copy == 0:
        os.close(reading)
        _in_the_copy(function, writing)
    os.close(writing)
    data = None
    try:
        data = _read(reading, time.monotonic() + timeout)
    finally:
        os.close(reading)
        if data is None:
            os.kill(copy, signal.SIGKILL)
        _, status = os.waitpid(copy, 0)
    if data is None:
        raise PlanError(f"{what} took longer than {timeout:.0f} s and was stopped")
    length = int(data[:_HEAD] or b"0", 16)
    if len(data) < _HEAD + length or not length:
        raise PlanError(f"{what} ended its process ({os.waitstatus_to_exitcode(status)}) without a result")
    found = json.loads(data[_HEAD : _HEAD + length])
    if "error" in found:
        raise PlanError(found["error"])
    return found["result"], data[_HEAD + length :]


def _in_the_copy(function: Callable[[], Result], writing: int) -> None:
    """Does the work, sends what comes of it, and ends this process without what belongs to the first one."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        import jax

        jax.config.update("jax_platforms", "cpu")
        try:
            result, data = function()
            head = {"result": result}
        except PlanError as error:
            head, data = {"error": str(error)}, b""
        except BaseException:
            head, data = {"error": traceback.format_exc()}, b""
        words = json.dumps(head).encode()
        with os.fdopen(writing, "wb") as stream:
            stream.write(f"{len(words):0{_HEAD}x}".encode() + words)
            stream.write(data)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    finally:
        os._exit(1)


def _read(stream: int, until: float) -> bytes | None:
    """All that comes, or None where it does not end in time."""
    found = bytearray()
    while True:
        ready, _, _ = select.select([stream], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return None
        some = os.read(stream, 1 << 20)
        if not some:
            return bytes(found)
        found += some

"""What an error that ends a verb says, and the exit code that it gives."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from typing import NoReturn

from capibara.cli._signals import INTERRUPTED, Terminated
from capibara.errors import CapibaraError

__all__ = ["leave", "report_error"]

_FAILED = 1
_INVALID = 2  # invalid input: after it a launcher does not try again
_BROKEN_PIPE = 141


def report_error(error: BaseException) -> int | None:
    """Print what there is to say; the exit code, or None for an error that Python is to report itself."""
    if isinstance(error, Terminated):
        print("capibara: terminated", file=sys.stderr)
        return int(str(error.code))
    if isinstance(error, SystemExit):  # argparse, after it has printed what there is to say
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 2
    if isinstance(error, BrokenPipeError):
        # The reader (`| head`) has what it wanted. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    if isinstance(error, CapibaraError):
        print(f"capibara: {error}", file=sys.stderr)
        return _FAILED if _may_pass(error) else _INVALID
    if isinstance(error, KeyboardInterrupt):
        print("capibara: interrupted", file=sys.stderr)
        return INTERRUPTED
    return None


def _may_pass(error: CapibaraError) -> bool:
    """Whether it is of the disk or of another process: the same command may succeed the next time."""
    errors = sys.modules.get("capibara.train.errors")  # only what is imported already can have raised one
    return errors is not None and isinstance(error, errors.ProcessesError | errors.RunWriteError)


def leave(error: BaseException) -> NoReturn:
    """End this process at once, with its temporary files removed: nothing that Python does at exit is waited for."""
    from capibara.files import remove_temporaries

    if (code := report_error(error)) is None:
        traceback.print_exception(error)
        code = 1
    remove_temporaries()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)

"""What an error that ends a verb says, and the exit code that it gives."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import traceback
from typing import NoReturn

from capibara.cli._signals import INTERRUPTED, Terminated
from capibara.errors import CapibaraError

__all__ = ["leave", "report_error"]

_FAILED = 1
_INVALID = 2  # invalid input: after it a launcher does not try again
_BROKEN_PIPE = 141
# Of a path that was given, and of the machine: the remedy. Others are faults of the program, with a traceback.
_OF_PATHS = {
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "give a path whose links end at a file or a folder",
    errno.ENOTDIR: "a file stands where a folder is needed: give another path",
    errno.EISDIR: "a folder stands where a file is needed: give another path",
}
_OF_THE_MACHINE = {
    errno.ENOSPC: "free some space, or write to another disk",
    errno.EDQUOT: "free some space, or write to another disk",
    errno.EROFS: "write to another disk",
    errno.EACCES: "change its permissions, or give another path",
    errno.EPERM: "change its permissions, or give another path",
    errno.EIO: "the disk fails: use another one",
}
_LONGEST = 120


def report_error(error: BaseException) -> int | None:
    """Print what there is to say; the exit code, or None for an error that Python is to report itself."""
    if isinstance(error, Terminated):
        _say("terminated")
        return int(str(error.code))
    if isinstance(error, SystemExit):  # argparse, after it has printed what there is to say
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 2
    if isinstance(error, BrokenPipeError):
        # The reader (`| head`) has what it wanted. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    if isinstance(error, CapibaraError):
        _say(str(error))
        return _FAILED if _may_pass(error) else _INVALID
    if isinstance(error, OSError) and (remedy := _remedy(error)):
        if error.filename is None:  # Python would fail once more when it flushes at exit
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _say(f"{_place(error)}: {error.strerror}; {remedy}")
        return _INVALID if error.errno in _OF_PATHS else _FAILED
    if isinstance(error, KeyboardInterrupt):
        _say("interrupted")
        return INTERRUPTED
    return None


def _say(words: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # where that fails too, the exit code is left
        print(f"capibara: {words}", file=sys.stderr)


def _remedy(error: OSError) -> str | None:
    if error.filename is None and not _of_the_output(error):
        return None  # of a file, a socket …: where, only the traceback says
    return (_OF_PATHS | _OF_THE_MACHINE).get(error.errno or 0)


def _of_the_output(error: OSError) -> bool:
    """Whether it came from writing the standard output. What could not be written is there still, unless unbuffered."""
    try:
        sys.stdout.flush()
        output = sys.stdout.fileno()
        kind = os.fstat(output).st_mode
        if stat.S_ISCHR(kind) and not os.isatty(output):
            os.write(output, b"\n")  # /dev/full, or /dev/null
    except (OSError, ValueError) as again:
        return getattr(again, "errno", None) == error.errno
    return stat.S_ISREG(kind) and os.statvfs(output).f_bavail == 0


def _place(error: OSError) -> str:
    name = error.filename if error.filename2 is None else error.filename2  # of a renaming, where to
    if name is None:
        return "the output"
    name = os.fsdecode(name) if isinstance(name, str | bytes) else str(name)
    return repr(name if len(name) <= _LONGEST else f"{name[:_LONGEST]}…")


def _may_pass(error: CapibaraError) -> bool:
    """Whether it is of the disk or of another process: the same command may succeed the next time."""
    errors = sys.modules.get("capibara.train.errors")  # only what is imported already can have raised one
    return errors is not None and isinstance(error, errors.ProcessesError | errors.RunWriteError)


def leave(error: BaseException) -> NoReturn:
    """End this process at once, with its temporary files removed: nothing that Python does at exit is waited for."""
    from capibara.files import remove_temporaries

    code = _FAILED
    try:
        if (reported := report_error(error)) is None:
            traceback.print_exception(error)
        else:
            code = reported
        remove_temporaries()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)

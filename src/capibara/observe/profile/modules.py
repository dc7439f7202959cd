"""Which of the loaded programs a trace means by a number.

XLA numbers programs where it compiles them. On GPUs and TPUs that is in a plugin, and the loaded programs are copies
with numbers of their own. Their traces hold the programs, too: one is found by what it consists of.
"""

from __future__ import annotations

import hashlib
import mmap
import re
from pathlib import Path

from capibara.observe.errors import ProfileError
from capibara.observe.profile.protobuf import protobuf_fields

__all__ = ["module_digest", "module_name", "module_number", "traced_modules"]

_PLANE = b"/host:metadata"
_NAME = re.compile(rb"^.*\((\d{1,18})\)$", re.DOTALL)

# Numbers of fields, in tsl/profiler/protobuf/xplane.proto and xla/service/hlo.proto.
_PLANES, _PLANE_NAME, _PLANE_EVENTS = 1, 2, 4
_ENTRY_VALUE, _EVENT_NAME, _EVENT_STATS, _STAT_BYTES = 2, 2, 5, 6
_HLO_MODULE = 1
_MODULE_NAME, _MODULE_COMPUTATIONS, _MODULE_NUMBER = 1, 3, 5
_COMPUTATION_INSTRUCTIONS = 2
_INSTRUCTION_SHAPE = 3
_SHAPE_TUPLE = 4


def module_number(proto: bytes | memoryview) -> int:
    """XLA's number of a serialized ``HloModuleProto`` (0 where it is left out).

    Raises:
      ProfileError: it is none.
    """
    for field, value in protobuf_fields(proto):
        if field == _MODULE_NUMBER and isinstance(value, int):
            return value
    return 0


def module_name(proto: bytes | memoryview) -> str:
    """The name of a serialized ``HloModuleProto``.

    Raises:
      ProfileError: it is none.
    """
    return next((bytes(name).decode(errors="replace") for name in _messages(proto, _MODULE_NAME)), "")


def module_digest(proto: bytes | memoryview) -> bytes:
    """A digest of the names, opcodes and shapes of all instructions of a serialized ``HloModuleProto``.

    Raises:
      ProfileError: it is none.
    """
    digest = hashlib.blake2b(digest_size=16)
    for computation in _messages(proto, _MODULE_COMPUTATIONS):
        for instruction in _messages(computation, _COMPUTATION_INSTRUCTIONS):
            for field, value in protobuf_fields(instruction):
                if field == _INSTRUCTION_SHAPE and isinstance(value, memoryview):
                    _shape(value, digest)
                elif field < _INSTRUCTION_SHAPE and isinstance(value, memoryview):  # name, opcode
                    digest.update(b"%d:%d;" % (field, len(value)))
                    digest.update(value)
    return digest.digest()


def _shape(proto: memoryview, digest: hashlib.blake2b, depth: int = 0) -> None:
    """Element type and dimensions; layouts, which come after them, are not told by all in the same way."""
    if depth > 16:
        raise ProfileError("a shape of more than 16 tuples within one another")
    for field, value in protobuf_fields(proto):
        if field == _SHAPE_TUPLE and isinstance(value, memoryview):
            _shape(value, digest, depth + 1)
        elif field < _SHAPE_TUPLE:
            digest.update(b"%d=" % field + (b"%d" % value if isinstance(value, int) else bytes(value)))


def traced_modules(path: Path) -> dict[int, memoryview]:
    """The serialized ``HloModuleProto`` of each number, of a ``*.xplane.pb`` file.

    Raises:
      ProfileError: the file is damaged.
    """
    with open(path, "rb") as stream:
        if not path.stat().st_size:
            return {}
        data = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    found = {}
    for plane in _messages(data, _PLANES):
        if _PLANE not in _messages(plane, _PLANE_NAME):
            continue
        for entry in _messages(plane, _PLANE_EVENTS):
            for event in _messages(entry, _ENTRY_VALUE):
                named = next((_NAME.match(name) for name in _messages(event, _EVENT_NAME)), None)
                for stat in _messages(event, _EVENT_STATS) if named else ():
                    for program in _messages(stat, _STAT_BYTES):
                        for module in _messages(program, _HLO_MODULE):
                            found[int(named[1])] = module  # type: ignore[index]
    return found


def _messages(proto: bytes | memoryview, number: int) -> list[memoryview]:
    return [
        value for field, value in protobuf_fields(proto) if field == number and isinstance(value, memoryview)
    ]

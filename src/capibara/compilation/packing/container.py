"""The file of a packed program.

All integers little-endian::

    magic "\\x89CAPROG\\n" · version u32 · length of the header u32          16 bytes
    header: UTF-8 JSON
    program, compressed with zlib
    SHA-256 of everything before                                            32 bytes

The header is an object of strings and integers: the function's name, its inputs, the environment, the digest of the
function's StableHLO, sizes of the program stored and inflated, and the inflated program's SHA-256. Sizes are checked
before anything is inflated, and at most that many bytes are.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capibara.compilation.errors import PackedProgramError
from capibara.errors import printable
from capibara.files import read_bounded, replace_file

__all__ = ["PackedProgram", "read_packed", "read_trusted", "require_own", "write_packed"]

_MAGIC = b"\x89CAPROG\n"
_VERSION = 1
_HEAD = struct.Struct("<8sII")
_DIGEST = 32
_MOST_FILE = 2 << 30
_MOST_HEADER = 1 << 20
_MOST_PROGRAM = 8 << 30
_TEXTS = ("function", "stablehlo", "sha256")
_SIZES = ("stored_bytes", "bytes")


@dataclass(frozen=True)
class PackedProgram:
    """What a file says of its program.

    Attributes:
      function: its name.
      inputs: one text for each array, such as ``"params['w']: float32[768,16]"``.
      environment: what must be the same where it runs.
      stablehlo: SHA-256 of the function's StableHLO.
      bytes: of the program.
      sha256: of the whole file; give it to :func:`load_program` on the other machine.
    """

    function: str
    inputs: tuple[str, ...]
    environment: dict[str, str]
    stablehlo: str
    bytes: int
    sha256: str
    _program: bytes = field(repr=False, default=b"", compare=False)

    def __str__(self) -> str:
        place = self.environment
        return (
            f"{printable(self.function)}({printable(', '.join(self.inputs[:4]))}"
            f"{', …' if len(self.inputs) > 4 else ''}) for {printable(place.get('topology', ''), 80)}, "
            f"jax {printable(place.get('jax', ''))}, {self.bytes:,} bytes"
        )


def write_packed(
    path: str | os.PathLike[str],
    *,
    function: str,
    inputs: tuple[str, ...],
    environment: dict[str, str],
    stablehlo: str,
    program: bytes,
) -> PackedProgram:
    """Write a program to a file, in one step.

    Raises:
      OSError: the file cannot be written.
    """
    stored = zlib.compress(program, 1)
    header = json.dumps(
        {
            "function": function,
            "inputs": list(inputs),
            "environment": environment,
            "stablehlo": stablehlo,
            "stored_bytes": len(stored),
            "bytes": len(program),
            "sha256": hashlib.sha256(program).hexdigest(),
        },
        ensure_ascii=False,
    ).encode()
    content = _HEAD.pack(_MAGIC, _VERSION, len(header)) + header + stored
    content += hashlib.sha256(content).digest()
    replace_file(path, content, durable=True)
    digest = hashlib.sha256(content).hexdigest()
    return PackedProgram(function, inputs, environment, stablehlo, len(program), digest, program)


def read_packed(path: str | os.PathLike[str]) -> PackedProgram:
    """Read and verify a file. Nothing in it is run.

    Raises:
      PackedProgramError: it is not such a file, or it is damaged.
      OSError: it cannot be read, is not a regular file, or has more than 2 GiB.
    """
    content = read_bounded(path, _MOST_FILE)
    return _parsed(Path(path).name, content, hashlib.sha256(content).hexdigest())


def require_own(name: str) -> Callable[[os.stat_result], None]:
    """What raises a PackedProgramError, of what the system says of a file, if somebody else can have written it."""

    def own(status: os.stat_result) -> None:
        if status.st_uid not in (0, os.geteuid()) or stat.S_IMODE(status.st_mode) & 0o022:
            raise PackedProgramError(
                f"{name}: belongs to someone else, or others may write to it, and it is code that would be run. "
                "Give its SHA-256 (sha256=…), known from where it was written; or: chmod go-w."
            )

    return own


def read_trusted(path: str | os.PathLike[str], sha256: str | None) -> PackedProgram:
    """As :func:`read_packed`, of a file that has this digest; or without one, that nobody else can have written.

    Nothing in the file is looked at before that is known, and it is asked of the file that was opened: the name may be
    given to another one at any time.

    Raises:
      PackedProgramError: the file is not to be trusted, or as for :func:`read_packed`.
      OSError: it cannot be read.
    """
    name = Path(path).name
    content = read_bounded(path, _MOST_FILE, check=require_own(name) if sha256 is None else None)
    digest = hashlib.sha256(content).hexdigest()
    if sha256 is not None and sha256.lower() != digest:
        raise PackedProgramError(f"{name}: has the SHA-256 {digest}, expected {sha256:.80}.")
    return _parsed(name, content, digest)


def _parsed(name: str, content: bytes, digest: str) -> PackedProgram:
    if len(content) < _HEAD.size + _DIGEST or not content.startswith(_MAGIC):
        raise PackedProgramError(f"{name}: not a packed program. Make one with pack_program.")
    _, version, length = _HEAD.unpack_from(content)
    if version != _VERSION:
        raise PackedProgramError(
            f"{name}: has version {version}, expected {_VERSION}. Pack the program again."
        )
    body = memoryview(content)[:-_DIGEST]
    if hashlib.sha256(body).digest() != content[-_DIGEST:]:
        raise PackedProgramError(f"{name}: is damaged (its digest differs). Copy it again.")
    if length > _MOST_HEADER or _HEAD.size + length > len(body):
        raise _bad(name, "the length of its header")
    try:
        header = json.loads(bytes(body[_HEAD.size : _HEAD.size + length]))
    except (ValueError, RecursionError):
        raise _bad(name, "its header") from None
    checked = _checked(name, header)
    stored = bytes(body[_HEAD.size + length :])
    if len(stored) != checked["stored_bytes"]:
        raise _bad(name, "stored_bytes")
    inflate = zlib.decompressobj()
    try:
        program = inflate.decompress(stored, checked["bytes"] + 1)
    except zlib.error:
        raise _bad(name, "its program") from None
    if len(program) != checked["bytes"] or hashlib.sha256(program).hexdigest() != checked["sha256"]:
        raise _bad(name, "the size or digest of its program")
    return PackedProgram(
        checked["function"],
        tuple(checked["inputs"]),
        checked["environment"],
        checked["stablehlo"],
        checked["bytes"],
        digest,
        program,
    )


def _checked(name: str, header: Any) -> dict[str, Any]:
    if not isinstance(header, dict):
        raise _bad(name, "its header")
    for key in _TEXTS:
        if not isinstance(header.get(key), str):
            raise _bad(name, key)
    for key in _SIZES:
        if type(header.get(key)) is not int or not 0 <= header[key] <= _MOST_PROGRAM:
            raise _bad(name, key)
    inputs, environment = header.get("inputs"), header.get("environment")
    if not isinstance(inputs, list) or not all(isinstance(one, str) for one in inputs):
        raise _bad(name, "inputs")
    if not isinstance(environment, dict) or not all(isinstance(one, str) for one in environment.values()):
        raise _bad(name, "environment")
    return header


def _bad(name: str, what: str) -> PackedProgramError:
    return PackedProgramError(f"{name}: {what} is invalid. Pack the program again.")

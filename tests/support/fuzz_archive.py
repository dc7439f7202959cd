"""A fuzzer of what is read from outside: archives and safetensors files. ``make fuzz``, or with ``--seconds N``.

Inputs are small archives of every codec, mutated: bits, bytes, runs, numbers of the index, pieces of another input.
Checksums are put right again most times, so that damage reaches the decoders behind them. An input that executes a line
of ``capibara.compress`` that none did before is kept and mutated further. Compiled code cannot be watched like that; it
decodes the same inputs as NumPy does, and must agree with it.

Allowed are an ``ArchiveError``, or tensors of the sizes that were declared. Anything else (another exception, a crash,
more than 20 seconds or 3 GiB) is a finding: the input is written to ``--findings``, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np

from capibara.compress import formats
from capibara.compress.codecs import lossless
from capibara.compress.codecs.executors import get_executor
from capibara.compress.codecs.protocol import CODECS
from capibara.compress.container import Archive, ArchiveWriter, writer
from capibara.compress.container.index import END, FOOTER, HEADER
from capibara.compress.errors import ArchiveError, CompressError, DamagedError
from capibara.compress.safetensors_file import SafetensorsFile, write_safetensors
from capibara.native.loading import open_library

WATCHED = str(Path(formats.__file__).parent)
MOST_READ = 64 << 20  # bytes of a tensor that is decoded; larger claims are only looked at
ALLOWED_MEMORY = 3 << 30


def seeds(folder: Path) -> Iterator[bytes]:
    """Small files of every codec and format."""
    rng = np.random.default_rng(0)
    for name in ("F32", "BF16", "F16", "F64", "I8", "I64", "U16", "F8_E4M3", "BOOL"):
        form = formats.get_format(name)
        for shape in ((5, 40), (70,), (), (0, 3), (3, 3, 4)):
            count = int(np.prod(shape))
            wide = rng.normal(size=count) * np.exp(rng.normal(size=count))
            bits = formats.from_float(wide, form) if form.is_float else (wide * 9).astype(np.int64)
            bits = bits.astype(form.unsigned)
            path = folder / "seed"
            with ArchiveWriter(path, {"a": "b"}) as archive:
                archive.add("lossless", bits, form, shape)
                archive.add_tied("tied", "lossless")
                for codec, how in CODECS.items():
                    if codec not in ("lossless", "uniform", "exponent") and len(shape) != 2:
                        continue  # they are for matrices
                    candidates = getattr(how, "candidates", lambda form, shape: [{}, {"step": 0.1}])
                    with contextlib.suppress(CompressError):
                        for i, settings in enumerate(candidates(form, shape)[:3]):
                            archive.add(f"{codec}{i}", bits, form, shape, codec=codec, settings=settings)
                if form.is_float and shape == (5, 40):
                    known = {"hessian": np.diag(10.0 ** -np.arange(40)), "input_axes": [1]}
                    archive.add("inputs", bits, form, shape, codec="uniform", settings={"step": 0.1, **known})
            yield path.read_bytes()
            if len(shape) > 1 and count:
                with mock.patch.object(writer, "CHUNK", 10), ArchiveWriter(path) as archive:
                    archive.add("cut", bits, form, shape)
                    archive.add_tied("tied", "cut")
                yield path.read_bytes()
            write_safetensors(path, {"x": (form, shape)}, lambda _, bits=bits: bits)
            yield path.read_bytes()


def _version(data: bytearray) -> int:
    """What the header says: the footer has to say the same."""
    return int.from_bytes(data[8:12], "little")


def repair(data: bytearray) -> None:
    """Checksums and places that fit what the file says now, where that is still a file at all."""
    if len(data) < HEADER.size + FOOTER.size or data[-8:] != END:
        return
    offset, _, _, _, _ = FOOTER.unpack(data[-FOOTER.size :])
    text = bytes(data[offset : len(data) - FOOTER.size])
    try:
        index = json.loads(text)
        for tensor in index["tensors"]:
            for chunk in tensor.get("chunks", ()):
                chunk[3] = zlib.crc32(data[chunk[1] : chunk[1] + chunk[2]])
        text = json.dumps(index, separators=(",", ":")).encode()
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        pass
    offset = min(offset, len(data))
    data[offset:] = text + FOOTER.pack(offset, len(text), zlib.crc32(text), _version(data), END)


NUMBERS = (
    0,
    1,
    2,
    7,
    31,
    255,
    256,
    4095,
    1 << 16,
    1 << 18,
    1 << 24,
    1 << 31,
    1 << 40,
    1 << 48,
    (1 << 62) - 1,
    1 << 63,
    -1,
)


def mutate_index(data: bytearray, dice: random.Random) -> None:
    """Another number, text or structure somewhere in the index."""
    if len(data) < FOOTER.size or data[-8:] != END:
        return
    offset = FOOTER.unpack(data[-FOOTER.size :])[0]
    try:
        index = json.loads(data[offset : len(data) - FOOTER.size])
    except (ValueError, RecursionError):
        return
    places: list[tuple[Any, Any]] = []
    stack = [index]
    while stack:
        one = stack.pop()
        for key in one if isinstance(one, dict) else range(len(one)):
            places.append((one, key))
            if isinstance(one[key], dict | list):
                stack.append(one[key])
    if not places:
        return
    where, key = dice.choice(places)
    values: tuple[Any, ...] = (
        *NUMBERS,
        0.5,
        True,
        None,
        "",
        "lossless",
        "F32",
        "tied",
        [],
        {},
        [[]],
        "x" * 5000,
    )
    if isinstance(where[key], int) and dice.random() < 0.7:
        where[key] = dice.choice([where[key] + 1, where[key] - 1, where[key] * 2, *NUMBERS])
    elif dice.random() < 0.5 and len(CODECS):
        where[key] = dice.choice([*CODECS, *formats.FORMATS])
    else:
        where[key] = dice.choice(values)
    text = json.dumps(index, separators=(",", ":")).encode()
    data[offset:] = text + FOOTER.pack(offset, len(text), zlib.crc32(text), _version(data), END)


def mutate(data: bytes, other: bytes, dice: random.Random) -> bytes:
    """One to eight changes."""
    out = bytearray(data)
    for _ in range(1 << dice.randrange(4)):
        if not out:
            break
        kind, at = dice.randrange(8), dice.randrange(len(out))
        if kind <= 1:
            out[at] ^= 1 << dice.randrange(8)
        elif kind == 2:
            out[at] = dice.choice((0, 1, 127, 128, 255, dice.randrange(256)))
        elif kind == 3:
            size = dice.choice((2, 4, 8))
            out[at : at + size] = (dice.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
        elif kind == 4:
            del out[at : at + dice.choice((1, 2, 16, len(out)))]
        elif kind == 5:
            begin = dice.randrange(len(other))
            out[at:at] = other[begin : begin + dice.choice((1, 4, 64))]
        elif kind == 6:
            out[at : at + 8] = out[dice.randrange(len(out)) :][:8]
        else:
            mutate_index(out, dice)
    if dice.random() < 0.85:
        repair(out)
    return bytes(out)


def read(path: Path, data: bytes) -> None:
    """Read everything that there is; raises what is not allowed."""
    path.write_bytes(data)
    with contextlib.suppress(ArchiveError), Archive(path) as archive:
        for entry in archive:
            if entry.original_bytes > MOST_READ:
                continue
            with contextlib.suppress(ArchiveError):
                bits = archive.read(entry.name)
                if bits.shape != entry.shape or bits.dtype != entry.format.unsigned:
                    raise AssertionError(f"{entry.name}: {bits.shape} of {bits.dtype}")
                if entry.shape:
                    archive.read(entry.name, slice(1, 2))
            with contextlib.suppress(ArchiveError):
                if entry.codec == "lossless":
                    for shape, payload in archive.payloads(entry.name):
                        compare(payload, entry.format, shape)
    with contextlib.suppress(ArchiveError), SafetensorsFile(path) as file:
        for name in file.tensors:
            file.read(name)


def compare(payload: memoryview, form: formats.NumberFormat, shape: tuple[int, ...]) -> None:
    """NumPy and compiled code must come to the same, be it an error."""
    found = []
    for name in ("numpy", "native") if open_library()[0] is not None else ("numpy",):
        try:
            found.append(lossless.decode(payload, form, shape, get_executor(name)).tobytes())
        except DamagedError:
            found.append(None)
    if any(one != found[0] for one in found):
        raise AssertionError("compiled code and NumPy decode differently")


class Coverage:
    """Lines of the package that were executed; Python 3.12 has a cheaper way than tracing, which this uses there."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self._new = 0
        self._monitoring = getattr(sys, "monitoring", None)

    def _see(self, code: Any, line: int) -> None:
        place = (code.co_filename, line)
        if place not in self.lines:
            self.lines.add(place)
            self._new += 1

    def _line(self, code: Any, line: int) -> Any:
        if code.co_filename.startswith(WATCHED):
            self._see(code, line)
        # Each line is reported once: whether it is new is all that is asked.
        return self._monitoring.DISABLE if self._monitoring else None

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(WATCHED):
            return None
        if event == "line":
            self._see(frame.f_code, frame.f_lineno)
        return self._trace

    def new(self, work: Callable[[], None]) -> int:
        """How many lines ``work`` executed that nothing did before."""
        self._new = 0
        if (monitoring := self._monitoring) is not None:
            tool = monitoring.COVERAGE_ID
            monitoring.use_tool_id(tool, "fuzz")
            monitoring.register_callback(tool, monitoring.events.LINE, self._line)
            monitoring.set_events(tool, monitoring.events.LINE)
            try:
                work()
            finally:
                monitoring.set_events(tool, 0)
                monitoring.free_tool_id(tool)
        else:
            threading.settrace(self._trace)
            sys.settrace(self._trace)
            try:
                work()
            finally:
                sys.settrace(None)
                threading.settrace(None)  # type: ignore[arg-type]
        return self._new


def fuzz(seconds: float, seed: int, findings: Path, most: int | None = None) -> int:
    """Run; returns how many findings there were."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ALLOWED_MEMORY, hard))

    def too_long(*_: object) -> None:
        raise AssertionError("reading takes more than 20 seconds")

    before = signal.signal(signal.SIGALRM, too_long)
    dice, coverage, found, runs = random.Random(seed), Coverage(), 0, 0
    try:
        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "input"
            corpus = list(seeds(Path(name)))
            for one in corpus:
                coverage.new(lambda one=one: read(path, one))
            begin = len(coverage.lines)
            end = time.monotonic() + seconds
            while time.monotonic() < end and (most is None or runs < most):
                data = mutate(dice.choice(corpus), dice.choice(corpus), dice)
                runs += 1
                signal.alarm(20)
                try:
                    if coverage.new(lambda data=data: read(path, data)):
                        corpus.append(data)
                except Exception as error:
                    found += 1
                    findings.mkdir(parents=True, exist_ok=True)
                    where = findings / f"{zlib.crc32(data):08x}.bin"
                    where.write_bytes(data)
                    print(f"{where}: {type(error).__name__}: {error}"[:500], flush=True)
                finally:
                    signal.alarm(0)
            print(
                f"{runs} inputs, {len(coverage.lines)} lines ({begin} by the seeds), {len(corpus)} kept, "
                f"{found} findings"
            )
    finally:
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz the readers of archives and safetensors files.")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--replay", type=Path, help="read this one input, with its traceback")
    args = parser.parse_args()
    if args.replay is not None:
        with tempfile.TemporaryDirectory() as name:
            read(Path(name) / "input", args.replay.read_bytes())
        return 0
    return 1 if fuzz(args.seconds, args.seed, args.findings) else 0


if __name__ == "__main__":
    sys.exit(main())

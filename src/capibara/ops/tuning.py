"""Measured parameters: how an operation declares them, and how a call finds them.

Block sizes, chunk sizes and the choice between implementations affect the speed of an operation and nothing else. A
heuristic chooses them, unless ``capibara tune`` has measured something faster on this kind of device
(:mod:`capibara.ops.tuning_cache`). Measurements are looked up when a call becomes a problem (:meth:`Op.prepare`) and
are part of the problem from then on: the backward pass uses the parameters of the forward pass, and a cache of traced
or compiled functions never confuses two choices. The file is read once, at the first look-up, so that a process uses
the same parameters throughout.

Measurements apply only to programs that run here: programs lowered for another platform, or exported
(:func:`portable`), use the heuristics. So do programs of several processes, which must not differ between them,
unless the folder is given (:func:`use_tuning` or ``CAPIBARA_TUNING_DIR``); all processes must then see the same
folder.

To take part, an operation declares three things:

* a field ``tuned: Tuned | None = None`` in its problem;
* ``tunables={"block_size": (64, 128, 256)}`` of an :class:`Implementation`: fields of the problem (None: the
  heuristic decides), and the values they may take;
* ``tuning=Tuning(…)`` of the :class:`Op`: its specs, their arrays, and which problems are equivalent.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from capibara import __version__
from capibara.ops import tuning_cache
from capibara.ops.errors import OpTypeError
from capibara.ops.tuning_cache import CacheError, Device, Entry, TuningWarning

if TYPE_CHECKING:
    import numpy as np

    from capibara.ops.registry import Op

__all__ = [
    "Tuned",
    "Tuning",
    "bucket_key",
    "describe_tuning",
    "forced",
    "local_device",
    "lookup",
    "lowering_platform",
    "tuning_facts",
    "tuning_file",
    "use_tuning",
]


@dataclass(frozen=True)
class Tuned:
    """The measurements for a problem, hashable; valid only on ``platform``.

    Attributes:
      platform: Where it was measured.
      fastest: The implementation to try first; None keeps the order of preference.
      parameters: Pairs of an implementation and its parameters, pairs of a name and a value.
    """

    platform: str
    fastest: str | None = None
    parameters: tuple[tuple[str, tuple[tuple[str, int | str], ...]], ...] = ()

    def of(self, implementation: str) -> dict[str, int | str]:
        """The measured parameters of an implementation."""
        return dict(dict(self.parameters).get(implementation, ()))


@dataclass(frozen=True)
class Tuning:
    """How an operation is tuned.

    Attributes:
      specs: Returns the operation's specs: dataclasses with ``name`` and ``tags``, whose numeric fields ``capibara
        tune OP field=value`` can replace.
      arguments: ``(spec, random generator) → (positional arguments, keyword arguments)`` of the public function.
        NumPy arrays of floats are cast to the dtype that is tuned.
      bucket: The sizes and options of a problem that decide which parameters are fast; integers are rounded up to
        powers of two. None: problems like this one (say, with a block size given by the caller) are not tuned.
      differentiable: Also time and check the gradient of the floating-point arguments.
      tolerance: Largest error relative to the oracle's largest value that rounding explains, by dtype.
    """

    specs: Callable[[], Sequence[Any]]
    arguments: Callable[[Any, np.random.Generator], tuple[tuple[Any, ...], dict[str, Any]]]
    bucket: Callable[[Any], Mapping[str, int | str] | None]
    differentiable: bool = True
    tolerance: Mapping[str, float] | None = None


def lowering_platform() -> str:
    """The name of the default backend's platform in lowering: ``"cuda"`` or ``"rocm"`` where JAX says ``"gpu"``."""
    platform = jax.default_backend()
    if platform != "gpu":
        return platform
    return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"


def local_device() -> Device:
    """The kind of the default device."""
    platform = lowering_platform()
    if platform != "cpu":
        return Device(platform, jax.devices()[0].device_kind)
    from capibara.hardware.processor import cpu_name

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Device(platform, f"{cpu_name()}, {cores} cores")


def bucket_key(op: str, problem: Any, bucket: Mapping[str, int | str]) -> str:
    """The key of an entry: operation, dtype and range of shapes."""
    parts = [f"{name}={_up(v) if isinstance(v, int) else v}" for name, v in bucket.items()]
    return f"{op}|{problem.dtype}|{','.join(parts)}"


def _up(n: int) -> int:
    return 0 if n <= 0 else 1 << (n - 1).bit_length()


class _Table:
    """The entries of this process' device, read once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.folder: Path | None = None  # given by use_tuning
        self.entries: dict[str, Entry] | None = None
        self.platform = ""

    def all(self) -> Mapping[str, Entry]:
        with self.lock:
            if self.entries is None:
                self._read()
            return self.entries or {}

    def get(self, key: str) -> tuple[str, Entry] | None:
        entry = self.all().get(key)
        return None if entry is None else (self.platform, entry)

    def _read(self) -> None:
        self.entries = {}  # whatever happens below: the file is looked at once
        given = self.folder is not None or os.environ.get("CAPIBARA_TUNING_DIR")
        try:
            if jax.process_count() > 1 and not given:
                return
            path, device = tuning_file(self.folder)
        except RuntimeError:
            # JAX has no backend here. What only lowers for another platform does not need one; what computes will say.
            return
        except CacheError as error:
            warnings.warn(f"measurements are ignored: {error}", TuningWarning, stacklevel=2)
            return
        self.platform = device.platform
        if path is not None:
            self.entries = tuning_cache.read(path, device)


_table = _Table()
_forced: contextvars.ContextVar[Mapping[str, Tuned | None] | None] = contextvars.ContextVar(
    "forced", default=None
)


def tuning_file(folder: str | os.PathLike[str] | None = None) -> tuple[Path | None, Device]:
    """The file of the default device in ``folder`` (by default the user's), and the device.

    The path is None if the environment disables measurements.
    """
    device = local_device()
    base = tuning_cache.cache_folder() if folder is None else Path(folder).expanduser() / __version__
    return None if base is None else tuning_cache.cache_file(base, device), device


def describe_tuning() -> dict[str, Any]:
    """The measurements that this process uses, ready for JSON.

    Keys: ``file`` (None if they are disabled), ``device``, ``entries`` (the number of kinds of problems), ``faster``
    (for how many of them the heuristics are replaced), ``jax`` (the versions they were made with) and ``jax_here``.
    """
    entries = _table.all()
    try:
        path, device = tuning_file(_table.folder)
    except CacheError:
        path, device = None, local_device()
    return {
        "file": None if path is None else str(path),
        "device": device.kind,
        "entries": len(entries),
        "faster": sum(1 for each in entries.values() if each.fastest or each.parameters),
        "jax": sorted({each.jax for each in entries.values()}),
        "jax_here": jax.__version__,
    }


def tuning_facts() -> str:
    """All measurements that operations are traced with here, as text that is another one where they are others."""
    return repr((sorted(_table.all().items()), sorted((_forced.get() or {}).items())))


def use_tuning(folder: str | os.PathLike[str] | None = None) -> None:
    """Read the measurements of this device again, from ``folder`` or, by default, the folder set in the environment.

    Applies to functions traced from now on: a function that ``jax.jit`` has compiled keeps its parameters.

    Args:
      folder: As in ``capibara tune --cache``. In a program of several processes, all must see the same folder.

    Raises:
      OpTypeError: ``folder`` is not a path.
    """
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise OpTypeError(f"use_tuning: folder must be a path or None, got {folder!r}")
    with _table.lock:
        _table.folder = None if folder is None else Path(folder)
        _table.entries = None


@contextlib.contextmanager
def forced(op: str, tuned: Tuned | None) -> Iterator[None]:
    """While the context lasts, problems of ``op`` get ``tuned`` (None: the heuristics), whatever was measured."""
    token = _forced.set({**(_forced.get() or {}), op: tuned})
    try:
        yield
    finally:
        _forced.reset(token)


def lookup(op: Op, problem: Any) -> Tuned | None:
    """The measurements for ``problem`` on this device, restricted to what ``op`` declares."""
    assert op.tuning is not None
    given = _forced.get() or {}
    if op.name in given:
        return given[op.name]
    bucket = op.tuning.bucket(problem)
    if bucket is None:
        return None
    found = _table.get(bucket_key(op.name, problem, bucket))
    return None if found is None else declared(op, *found)


def declared(op: Op, platform: str, entry: Entry) -> Tuned | None:
    """The part of an entry that names implementations, parameters and values of ``op``; None if it is empty."""
    parameters = []
    for name, chosen in entry.parameters.items():
        tunables = op.tunables(name)
        if chosen and all(value in tunables.get(parameter, ()) for parameter, value in chosen.items()):
            parameters.append((name, tuple(sorted(chosen.items()))))
    fastest = entry.fastest if entry.fastest in op.implementations else None
    if fastest is None and not parameters:
        return None
    return Tuned(platform, fastest, tuple(sorted(parameters)))

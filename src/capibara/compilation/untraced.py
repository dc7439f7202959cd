"""Programs that an earlier process compiled, without tracing them again.

JAX's persistent cache knows a program by what it was lowered to, so each start traces and lowers it before the cache
can say that it is there: of a model with many layers most of the time of a start. Here a program is known by what
tracing and compiling depend on: what the caller says of it, its arguments, every source file of this package, the
versions of JAX, its settings and flags, measurements, and the processor.

The files are machine code, as those of JAX's cache are, and what ``jax.experimental.serialize_executable`` says about
it: reading one is running it. So they are in the folder of :mod:`~capibara.compilation.persistent_cache`, which belongs
to the user alone. Where JAX was given another folder, there are none.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

import capibara
from capibara.compilation.cache_entries import compress, decompress
from capibara.compilation.packing.environment import environment_of
from capibara.compilation.persistent_cache import CacheSession, shared_session
from capibara.files import digest_of_files, entries_below, replace_file
from capibara.jax_versions import process_settings, trace_context, watch_program_keys
from capibara.native import library
from capibara.ops.tuning import tuning_facts
from capibara.startup import FLAGS, PACKAGE, STARTED, package_folder

__all__ = ["UntracedPrograms"]

_SOURCES = Path(capibara.__file__).parent
_CODE, _MOST_CODE = "sources", 256
_MOST_BYTES = 256 << 20
_DIGEST = hashlib.sha256().digest_size
# Of the process: where programs are kept, and what is said about them.
_VARIABLES = ("CAPIBARA_NATIVE", "XLA_FLAGS")
_WITHOUT_EFFECT = ("jax_compilation_cache", "jax_persistent_cache", "jax_raise_persistent", "jax_log")


class UntracedPrograms:
    """The programs of one thing, such as an engine, on one CPU device.

    Args:
      session: of the folder. facts: all that the thing's functions depend on beside their arguments and their code;
        JSON can write it. code: a digest of all sources.
    """

    def __init__(self, session: CacheSession, facts: Mapping[str, Any], code: str) -> None:
        self._session = session
        self._facts = json.dumps([dict(facts), code, _surroundings()], sort_keys=True)
        self._refused: set[str] = set()  # keys of programs that JAX cannot write

    @classmethod
    def here(cls, facts: Mapping[str, Any]) -> UntracedPrograms | None:
        """Those of the folder that is in use; ``None``: there is no such folder, or not one CPU device alone."""
        session = shared_session()
        if session is None or jax.default_backend() != "cpu" or jax.device_count() != 1:
            return None
        flags = os.environ.get("XLA_FLAGS", "")
        # A file of flags may change, and XLA may have read others than those that are there now.
        if flags != FLAGS or not all(flag.startswith("--") for flag in flags.split()):
            return None
        try:
            changed, sources = _sources()
            # What this process has imported may be the former one.
            if process_settings() is None or changed > STARTED or package_folder() != PACKAGE:
                return None
            return cls(session, facts, _code(session.folder, sources))
        except OSError:  # of a source that cannot be read
            return None

    def get(self, name: str, arguments: tuple[Any, ...], outputs: Any) -> jax.stages.Compiled | None:
        """A program; ``None``: it is not there, or JAX cannot read it.

        Args:
          name: of it, one for each function. arguments: arrays or descriptions of them.
          outputs: a tree as it gives one; where it has arrays or descriptions of them, with their shapes.
        """
        from jax.experimental import serialize_executable

        key = self._key(name, arguments, outputs)
        path = self._session.own_path(key)
        try:
            with open(path, "rb") as file:
                data = file.read(_MOST_BYTES)
            content = decompress(data)
            if not content:
                self._refused.add(key)
                return None
            digest, code = content[:_DIGEST], content[_DIGEST:]
            if hashlib.sha256(code).digest() != digest:
                raise ValueError("damaged")
            made = serialize_executable.deserialize_and_load(
                code,
                jax.tree.structure((arguments, {})),
                jax.tree.structure(outputs),
                execution_devices=jax.devices()[:1],
            )
        except FileNotFoundError:
            found = None
        except Exception:  # of what can be wrong with a program nothing is documented; it is made anew
            found = None
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        else:
            found = made
        self._session.used(path, found is not None)
        return found

    def make(
        self,
        name: str,
        arguments: tuple[Any, ...],
        outputs: Any,
        lower: Callable[[], jax.stages.Lowered],
    ) -> jax.stages.Compiled:
        """Compile a program, and keep it for later processes.

        Args:
          name, arguments, outputs: as for :meth:`get`.
          lower: lowers the function for these arguments; each time anew, as if JAX had never seen it.

        Raises:
          ValueError: its outputs have another structure.
        """
        key = self._key(name, arguments, outputs)
        if key in self._refused:
            return lower().compile()
        compiled, seen = self._compiled(lower())
        if any(seen.values()):
            # From JAX's cache: what XLA reads on a CPU it cannot write again, for functions are missing then.
            for theirs in seen:
                with contextlib.suppress(OSError):
                    self._session.path(theirs).unlink(missing_ok=True)
            compiled, seen = self._compiled(lower())
        if list(seen.values()) == [False]:
            content = compress(self._written(name, arguments, outputs, compiled))
            if len(content) <= _MOST_BYTES:
                with contextlib.suppress(OSError):  # of a full disk, which is no reason not to go on
                    replace_file(self._session.own_path(key), content, clean=True)
        return compiled

    @staticmethod
    def _compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, dict[str, bool]]:
        """A program, and under which keys JAX looked for it in its cache: whether it was there."""
        seen: dict[str, bool] = {}
        with watch_program_keys(seen.__setitem__):
            return lowered.compile(), seen

    @staticmethod
    def _written(name: str, arguments: tuple[Any, ...], outputs: Any, compiled: jax.stages.Compiled) -> bytes:
        """A program as bytes, after their digest; none if JAX cannot write it."""
        from jax.experimental import serialize_executable

        try:
            code, inside, outside = serialize_executable.serialize(compiled)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError):  # as JAX says so
            return b""
        for given, own in (((arguments, {}), inside), (outputs, outside)):
            if jax.tree.structure(given) != own:
                raise ValueError(f"{name}: expected {own}, got {jax.tree.structure(given)}")
        return hashlib.sha256(code).digest() + code

    def _key(self, name: str, arguments: tuple[Any, ...], outputs: Any) -> str:
        leaves, tree = jax.tree.flatten((arguments, outputs))
        # Of a function without arguments all that there may be to tell is the shapes that it gives.
        kinds = [f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "shape") else "" for leaf in leaves]
        # Of this thread; without what is another object in each process.
        context = [text for text in map(repr, trace_context()) if " at 0x" not in text]
        text = json.dumps([name, str(tree), kinds, context, self._facts])
        return hashlib.sha256(text.encode()).hexdigest()


def _surroundings() -> dict[str, Any]:
    """All of this process that programs depend on."""
    settings = process_settings() or {}
    return {
        **environment_of(jax.devices()[:1], {}),
        "native": library.problem() or library.isa(),  # and its functions are there for XLA to find
        "settings": {k: v for k, v in sorted(settings.items()) if not k.startswith(_WITHOUT_EFFECT)},
        "variables": {name: os.environ.get(name, "") for name in _VARIABLES},
        "measured": tuning_facts(),
    }


def _sources() -> tuple[float, str]:
    """When a source was changed last, or put in its place, and a digest of what the system says of each."""
    last, digest = 0.0, hashlib.sha256(os.fspath(_SOURCES).encode())
    for entry in entries_below(_SOURCES, (".py",)):
        status = entry.stat()
        last = max(last, status.st_mtime, status.st_ctime)
        facts = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        digest.update(f"{entry.path}\0{facts}\0".encode(errors="surrogateescape"))
    return last, digest.hexdigest()


@functools.cache
def _code(folder: Path, sources: str) -> str:
    """The digest of all sources. To read them takes some hundredths of a second, so it is kept in the folder, too.

    Args:
      sources: as :func:`_sources` gives it. Where nobody can write, in an image of a file system, other files may have
        the same facts.
    """
    if not hasattr(os, "statvfs") or os.statvfs(_SOURCES).f_flag & os.ST_RDONLY:
        return digest_of_files(_SOURCES)
    path = folder / _CODE
    with contextlib.suppress(OSError, UnicodeDecodeError), open(path, "rb") as file:
        before, _, found = file.read(_MOST_CODE).decode("ascii").partition(" ")
        if before == sources and re.fullmatch("[0-9a-f]{64}", found):
            return found
    found = digest_of_files(_SOURCES)
    with contextlib.suppress(OSError):  # of a full disk
        replace_file(path, f"{sources} {found}".encode(), clean=True)
    return found

"""What differs between the versions of JAX that Capibara supports, in one file; and which versions those are.

Importing this module does not import JAX: ``import capibara`` asks it whether the JAX that is installed is supported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

from capibara.errors import CapibaraError

__all__ = [
    "INSTALL",
    "MEMORY_FRACTIONS",
    "RANGE",
    "SUPPORTED",
    "CompiledCall",
    "HeldJaxpr",
    "UnsupportedJaxError",
    "UnsupportedJaxWarning",
    "backends_started",
    "call_being_compiled",
    "coordinator_client",
    "find_package",
    "installed_version",
    "libtpu_problem",
    "loaded_programs",
    "memory_fraction",
    "outside_transformations",
    "process_settings",
    "require_supported_jax",
    "required_libtpu",
    "scan_counts",
    "stop_profile",
    "trace_context",
    "varying_axes",
    "version_problem",
    "watch_program_keys",
    "wrap_traces",
]

# From the first, up to but not including the second. `dependencies` in pyproject.toml says the same: a test compares.
SUPPORTED = ((0, 10), (0, 13))
RANGE = "{}.{} <= JAX < {}.{}".format(*SUPPORTED[0], *SUPPORTED[1])
INSTALL = "pip install 'jax>={}.{},<{}.{}'".format(*SUPPORTED[0], *SUPPORTED[1])

MEMORY_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""JAX's environment variables for the part of a GPU's memory that it takes when it starts: the name that it wants, and
the deprecated one."""


class UnsupportedJaxError(CapibaraError, ImportError):
    """The installed JAX is older than what Capibara needs."""


class UnsupportedJaxWarning(UserWarning):
    """The installed JAX is not one of those that Capibara is tested with."""


def find_package(name: str) -> ModuleSpec | None:
    """Where a package would be imported from; None where there is none, or a finder refuses to say."""
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # blocked on purpose; put there by hand, without a spec
        return None


def installed_version() -> str | None:
    """The version of the installed JAX, which is not imported for it; None where there is none."""
    if (module := sys.modules.get("jax")) is not None:
        return getattr(module, "__version__", None)
    spec = find_package("jax")
    if spec is None or spec.origin is None:
        return None
    # The folder's name says it. importlib.metadata, which can do more, takes longer to import than all the rest here.
    beside = [
        re.fullmatch(r"jax-(.+)\.dist-info", name)
        for name in os.listdir(os.path.dirname(os.path.dirname(spec.origin)))
    ]
    if len(found := [match[1] for match in beside if match]) == 1:
        return found[0]
    from importlib import metadata

    try:
        return metadata.version("jax")
    except metadata.PackageNotFoundError:  # a source tree on the import path
        return None


def version_problem(version: str | None) -> tuple[str, str]:
    """What is wrong with a version of JAX: ``"old"``, ``"new"`` or ``""``, and a sentence that names the remedy."""
    found = re.match(r"(\d+)\.(\d+)", version or "")
    if found is None:
        return "", ""
    here = int(found[1]), int(found[2])
    if here < SUPPORTED[0]:
        return "old", f"JAX {version} is not supported: Capibara needs {RANGE}. Install it with: {INSTALL}"
    if here >= SUPPORTED[1]:
        newer = f"JAX {version} is newer than what Capibara is tested with, {RANGE}."
        return "new", f"{newer} If something fails, install a tested version: {INSTALL}"
    return "", ""


def require_supported_jax() -> None:
    """Called where a package that computes with JAX is imported.

    Raises:
      UnsupportedJaxError: the installed JAX is too old. A newer one is a warning, at ``import capibara``.
    """
    kind, text = version_problem(installed_version())
    if kind == "old":
        raise UnsupportedJaxError(text, name="jax")


def required_libtpu() -> str | None:
    """The version of ``libtpu`` that the installed JAX pins in its extra ``tpu``, such as ``"0.0.42.*"``; or None."""
    from importlib import metadata

    try:
        requirements = metadata.requires("jax") or ()
    except metadata.PackageNotFoundError:
        return None
    found = (re.match(r"libtpu\s*==\s*([\w.*]+)", text) for text in requirements)
    return next((match[1] for match in found if match), None)


def libtpu_problem(version: str) -> str:
    """Why an installed ``libtpu`` is not the one for the installed JAX, and the remedy; empty where it is."""
    wanted = required_libtpu()
    if (
        wanted is None
        or not version[:1].isdecimal()
        or f"{version}.".startswith(wanted.removesuffix("*").removesuffix(".") + ".")
    ):
        return ""
    return (
        f"libtpu {version} is installed, and JAX {installed_version()} is made for libtpu {wanted}. "
        f"Install it with: pip install 'libtpu=={wanted}'"
    )


class HeldJaxpr:
    """A jaxpr as a parameter of a primitive of our own, which is called like a function: ``held(*arrays)``.

    JAX 0.12 asks a primitive that has a jaxpr among its parameters for a rule (``to_lojax``) that cannot be given
    with public names. What it cannot see it does not ask for; the rules of the primitive call the function.
    """

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr

    @property
    def out_avals(self) -> Sequence[Any]:
        """The types of the results."""
        return self.jaxpr.out_avals

    @property
    def eqns(self) -> Sequence[Any]:
        """Its equations."""
        return self.jaxpr.eqns

    @property
    def consts(self) -> Sequence[Any]:
        """The arrays that it holds."""
        return self.jaxpr.consts

    def __call__(self, *arrays: Any) -> list[Any]:
        from jax.extend.core import jaxpr_as_fun

        return jaxpr_as_fun(self.jaxpr)(*arrays)


def memory_fraction() -> tuple[str, str] | None:
    """The one of :data:`MEMORY_FRACTIONS` that is set, and what it says; None where neither is.

    Raises:
      CapibaraError: both are, with which JAX starts no GPU.
    """
    said = [(name, os.environ[name]) for name in MEMORY_FRACTIONS if os.environ.get(name)]
    if len(said) > 1:
        raise CapibaraError(
            f"{' and '.join(f'{name}={value[:40]!r}' for name, value in said)}: JAX takes only one. Unset "
            f"{MEMORY_FRACTIONS[1]}, which it has deprecated"
        )
    return said[0] if said else None


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many of the inputs of a ``scan`` equation are constants, and how many are its carry.

    JAX 0.12 no longer has them as parameters (``num_consts``, ``num_carry``). In every version an array that is
    scanned has one axis more outside the body than in it, and constants and the carry do not.
    """
    body = eqn.params["jaxpr"].jaxpr
    carry = _same_rank(eqn.outvars, body.outvars)
    return _same_rank(eqn.invars, body.invars) - carry, carry


def _same_rank(outside: Any, inside: Any) -> int:
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in zip(outside, inside, strict=True))


def varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes over which an array of this type varies inside ``jax.shard_map``; none elsewhere."""
    kind = getattr(aval, "mat", None)
    return frozenset() if kind is None else kind.varying


_contexts = 0  # of the first call


def trace_context() -> tuple[Any, ...]:
    """The settings and contexts of this thread that JAX itself selects programs by; empty where it does not tell.

    There are dozens, others in each version, and JAX has no public function that returns them. A module of JAX that is
    imported later may add some at the end, with their defaults: those are left out, so that importing changes nothing.
    """
    global _contexts
    try:
        from jax._src import config

        found = config.trace_context()
        hash(found)
    except (ImportError, AttributeError, TypeError):
        return ()
    found = found if isinstance(found, tuple) else (found,)
    if not _contexts:
        _contexts = len(found)
    return found[:_contexts]


def process_settings() -> dict[str, str] | None:
    """All settings of JAX that are set for the whole process, as text; ``None`` where it does not tell."""
    import jax

    found = getattr(jax.config, "values", None)
    return {name: repr(value) for name, value in found.items()} if isinstance(found, dict) else None


def outside_transformations() -> bool:
    """Whether nothing is being traced in this thread: no ``jit``, ``grad``, ``vmap`` is around the caller.

    Arguments need not tell: a function may close over a traced value.
    """
    try:
        from jax._src import core

        return bool(core.trace_state_clean())
    except (ImportError, AttributeError):
        return True


def coordinator_client() -> Any | None:
    """The client of the key-value store of ``jax.distributed``; None where there is none, or it is not found.

    JAX has no public function for it: its own and Orbax's barriers without devices take it from here.
    """
    try:
        from jax._src import distributed

        client = distributed.global_state.client
    except (ImportError, AttributeError):
        return None
    needed = ("blocking_key_value_get", "key_value_delete", "key_value_set", "key_value_try_get")
    return client if all(hasattr(client, name) for name in needed) else None


class _ProgramKeys(logging.Filter):
    """Reads the keys of programs from what JAX logs, and lets through what was let through without it."""

    _LOGGER = "jax._src.compiler"

    def __init__(self) -> None:
        super().__init__()
        self._watchers: list[tuple[int | None, Callable[[str, bool], object]]] = []
        self._lock = threading.Lock()
        self._level = self._let_through = logging.NOTSET
        self._disabled = False

    def filter(self, record: logging.LogRecord) -> bool:
        words = str(record.msg).lower()
        hit, miss = "compilation cache hit" in words, "compilation cache miss" in words
        if (hit or miss) and isinstance(record.args, tuple) and len(record.args) == 2:
            for thread, watcher in list(self._watchers):
                if thread in (None, record.thread):
                    watcher(str(record.args[1]), hit)
        return not self._disabled and record.levelno >= self._let_through and self._wanted(record.levelno)

    @staticmethod
    def _wanted(level: int) -> bool:
        return level > logging.root.manager.disable  # of logging.disable()

    def add(self, watcher: tuple[int | None, Callable[[str, bool], object]]) -> None:
        with self._lock:
            self._watchers.append(watcher)
            if len(self._watchers) == 1:
                logger = logging.getLogger(self._LOGGER)
                self._level, self._let_through = logger.level, logger.getEffectiveLevel()
                logger.addFilter(self)
                logger.setLevel(logging.DEBUG)
                # Programs may have disabled this logger or all of them: records are made all the same, and end here.
                self._disabled, logger.disabled = logger.disabled, False
                vars(logger)["isEnabledFor"] = lambda _: True

    def remove(self, watcher: tuple[int | None, Callable[[str, bool], object]]) -> None:
        with self._lock:
            self._watchers.remove(watcher)
            if not self._watchers:
                logger = logging.getLogger(self._LOGGER)
                logger.removeFilter(self)
                logger.setLevel(self._level)
                logger.disabled = self._disabled
                vars(logger).pop("isEnabledFor", None)


_program_keys = _ProgramKeys()


@contextlib.contextmanager
def watch_program_keys(
    watcher: Callable[[str, bool], object], *, every_thread: bool = False
) -> Iterator[None]:
    """Tell the key of each program that JAX looks for in its persistent compilation cache.

    The file of a program is named after its key. JAX has no public function that tells it; every supported version
    logs it, for a miss before the program is compiled.

    Args:
      watcher: called with the key and whether there was such a program. What it raises comes out of the compilation,
        which has not begun then.
      every_thread: also programs that other threads compile.
    """
    entry = (None if every_thread else threading.get_ident(), watcher)
    _program_keys.add(entry)
    try:
        yield
    finally:
        _program_keys.remove(entry)


def loaded_programs(platform: str | None = None) -> list[Any]:
    """Compiled programs that this process holds, as the runtime lists them.

    JAX has no public function for it. Each has ``hlo_modules()``, ``get_compiled_memory_stats()`` and
    ``local_devices()`` in every supported version.

    Args:
      platform: of which backend (``"cpu"``); the default one if None.
    """
    import jax

    return list(jax.local_devices(backend=platform)[0].client.live_executables())


class CompiledCall(NamedTuple):
    """A call of a jitted function for which a program is compiled.

    Attributes:
      function: that was jitted. args, kwargs: of the call.
      static_argnums, static_argnames: which of them are static.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]


def call_being_compiled() -> CompiledCall | None:
    """The call for which this thread is compiling a program, asked within a listener of ``jax.monitoring``.

    JAX does not tell it: it is read from the stack, where every supported version has the same function. None if it is
    not there, or if the program is compiled ahead of time (``.lower(…).compile()``), without a call.
    """
    frame = sys._getframe(1)
    while frame is not None:
        place = frame.f_globals.get("__name__"), frame.f_code.co_name
        if place == ("jax._src.stages", "compile"):
            return None
        if place == ("jax._src.pjit", "cache_miss"):
            names = frame.f_locals
            try:
                info = names["jit_info"]
                return CompiledCall(
                    names["fun"],
                    tuple(names["args"]),
                    dict(names["kwargs"]),
                    tuple(info.static_argnums),
                    tuple(info.static_argnames),
                )
            except (LookupError, AttributeError, TypeError):
                return None
        frame = frame.f_back
    return None


def backends_started() -> bool:
    """Whether JAX has started its backends: asking for devices would start them, and take the accelerators.

    JAX has no public function for it. False if JAX was not imported, or no longer says it here.
    """
    if "jax" not in sys.modules:
        return False
    try:
        from jax._src import xla_bridge

        return bool(xla_bridge.backends_are_initialized())
    except (ImportError, AttributeError):
        return False


def stop_profile() -> None:
    """``jax.profiler.stop_trace``; a trace that could not be written is over, too.

    Up to JAX 0.11 its session stays, and no other one can begin. JAX has no public function that drops it.

    Raises:
      RuntimeError: the trace cannot be written, or none is being taken.
    """
    import jax

    try:
        jax.profiler.stop_trace()
    except jax.errors.JaxRuntimeError:
        with contextlib.suppress(ImportError, AttributeError):
            from jax._src import profiler

            profiler._profile_state.reset()
        raise


def wrap_traces(
    start: Callable[[Callable[[], Any], str, Any], Any], stop: Callable[[Callable[[], Any]], Any]
) -> None:
    """Let two functions stand around what begins and what ends a trace of ``jax.profiler``, from now on.

    JAX 0.12 has a class for it, ``ProfileSession``, through which its functions go.

    Args:
      start: called with a function that begins the trace, the folder that was asked for (empty: none) and the
        ``ProfileOptions`` (or None). Returns the function's result.
      stop: called with a function that ends it; likewise. It raises RuntimeError where no trace is being taken.
    """
    import jax.profiler as profiler

    session = getattr(profiler, "ProfileSession", None)
    if session is not None:
        begins, ends = session.start, session.stop

        @functools.wraps(begins)
        def started(self: Any) -> Any:
            return start(lambda: begins(self), self.log_dir or "", self.profiler_options)

        @functools.wraps(ends)
        def stopped(self: Any) -> Any:
            return stop(lambda: ends(self))

        session.start, session.stop = started, stopped
        return
    begin, end, trace = profiler.start_trace, profiler.stop_trace, profiler.trace

    @functools.wraps(begin)
    def start_trace(
        log_dir: Any,
        create_perfetto_link: bool = False,
        create_perfetto_trace: bool = False,
        profiler_options: Any = None,
    ) -> Any:
        given = create_perfetto_link, create_perfetto_trace, profiler_options
        return start(lambda: begin(log_dir, *given), str(log_dir), profiler_options)

    @functools.wraps(end)
    def stop_trace() -> Any:
        return stop(end)

    @functools.wraps(trace)
    @contextlib.contextmanager
    def traced(*args: Any, **kwargs: Any) -> Iterator[None]:
        start_trace(*args, **kwargs)
        try:
            yield
        finally:
            stop_trace()

    profiler.start_trace, profiler.stop_trace, profiler.trace = start_trace, stop_trace, traced

"""Runs the Python of README.md and docs/ as tests, so that no page shows code that does not work.

Each page is one program: its blocks run in order and share their names. It runs in an empty folder of its own,
so that a page may write files.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import sys
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE
from typing import Any

import hypothesis
import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

# What was measured on the machine that runs the tests must not decide what they test.
os.environ.setdefault("CAPIBARA_TUNING", "0")
# Tests assert no time: on a busy machine any example can be slow.
hypothesis.settings.register_profile("capibara", deadline=None)
hypothesis.settings.load_profile("capibara")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker has one processor: threads of libraries that wait for work by spinning would take the others'.
    for threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(threads, "1")

_FOLDER = "__folder_of_the_page__"


def _enter(namespace: dict[str, Any]) -> None:
    folder = tempfile.TemporaryDirectory(prefix="capibara-page-", ignore_cleanup_errors=True)
    namespace[_FOLDER] = os.getcwd(), folder
    os.chdir(folder.name)


def _leave(namespace: dict[str, Any]) -> None:
    before, folder = namespace.pop(_FOLDER)
    os.chdir(before)
    folder.cleanup()


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(doctest_optionflags=ELLIPSIS | NORMALIZE_WHITESPACE), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    setup=_enter,
    teardown=_leave,
).pytest()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # Tracing makes many objects that stay for a while, and JAX has work of its own at each search for garbage: together
    # an eighth of the tests' time. Each file ends with a search, and so does a test that leaves much memory.
    gc.disable()
    # A shell lets what it starts in the background ignore interrupts, and so would the processes that tests interrupt.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # The blocks of a page need each other: with `-n` a whole file has to go to one worker.
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist = "loadfile"
    if (folder := os.environ.get("CAPIBARA_TEST_PROGRAMS")) and "PYTEST_XDIST_WORKER" in os.environ:
        _keep_compiled(os.path.join(folder, os.environ["PYTEST_XDIST_WORKER"]))
        _share_contexts()


def _keep_compiled(folder: str) -> None:
    """Let JAX keep compiled programs in ``folder``; not those of processes that tests start.

    JAX writes an entry in place, so that another process may read half of it, and one that is killed leaves half of it.
    """
    import jax

    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


_PROGRAMS_A_CONTEXT = 500


def _share_contexts() -> None:
    """Let programs share an MLIR context. JAX makes one for each, which takes a fifth of a small program's time.

    A context keeps the types and constants of its programs, so that it is replaced after a while. JAX has no setting
    for this; where its function is not found under this name, nothing changes.
    """
    try:
        from jax._src.interpreters import mlir
    except ImportError:
        return
    make: Callable[[], Any] | None = getattr(mlir, "make_ir_context", None)
    if make is None:
        return
    shared: list[Any] = [None, 0]

    def make_ir_context() -> Any:
        # One that is made while another program is lowered would put its module into that one's.
        if threading.current_thread() is not threading.main_thread() or _lowering(getattr(mlir, "ir", None)):
            return make()
        if shared[1] % _PROGRAMS_A_CONTEXT == 0:
            shared[0] = make()
        shared[1] += 1
        return shared[0]

    mlir.make_ir_context = make_ir_context


def _lowering(ir: Any) -> bool:
    """Whether this thread is in the middle of a program."""
    try:
        return ir is not None and ir.Context.current is not None
    except ValueError:
        return False


# Files whose tests wait for a compiler or for processes of their own. They are few tests each and take longest, so that
# one of them left for the end would run while the other worker has nothing to do.
_SLOW_FILES = re.compile(
    r"_for_[tg]pu|_for_h100|base_install|compose_examples|test_onnx|sharding|from_torch|mithril|on_a_mesh|layouts|test_kill"
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The files that take longest come first, then those with most tests (with ``--no-loadscope-reorder``)."""
    _thin(items)
    if (share := float(os.environ.get("CAPIBARA_TEST_SAMPLE", "1"))) > 1:
        _sample(config, items, share)
    tests = Counter(item.path for item in items)
    items.sort(
        key=lambda item: (_SLOW_FILES.search(item.path.name) is None, -tests[item.path], str(item.path))
    )


def _thin(items: list[pytest.Item]) -> None:
    """Mark slow what ``thin(n)`` leaves to `make test-all`: all but each ``n``-th case of a test, from the first on."""
    cases: Counter[str] = Counter()
    for item in items:
        thinned = item.get_closest_marker("thin")
        if thinned is None or item.get_closest_marker("slow") is not None:
            continue
        test = item.nodeid.partition("[")[0]
        if cases[test] % thinned.args[0]:
            item.add_marker(pytest.mark.slow)
        cases[test] += 1


def _sample(config: pytest.Config, items: list[pytest.Item], share: float) -> None:
    """Keep about one of ``share`` tests, the same in each process; of pages, and of slow files, all tests or none."""
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        file = item.nodeid.partition("::")[0]
        whole = file.endswith(".md") or _SLOW_FILES.search(item.path.name) is not None
        keep = zlib.crc32((file if whole else item.nodeid).encode()) < 2**32 / share
        (kept if keep else dropped).append(item)
    config.hook.pytest_deselected(items=dropped)
    items[:] = kept


_SUPPORT = os.path.join("tests", "support", "")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Each test draws numbers of its own: not other ones because another test ran before it, or none did."""
    if (numpy := sys.modules.get("numpy")) is None:
        return
    fresh: Any = None
    modules = [m for m in list(sys.modules.values()) if _SUPPORT in (getattr(m, "__file__", None) or "")]
    for module in {id(m): m for m in [getattr(item, "module", None), *modules]}.values():
        for value in list(vars(module).values()) if module else ():
            if isinstance(value, numpy.random.Generator) and isinstance(
                value.bit_generator, numpy.random.PCG64
            ):
                fresh = fresh or numpy.random.PCG64(zlib.crc32(item.nodeid.encode())).state
                value.bit_generator.state = fresh


_MOST_MEMORY = 1_700_000_000  # bytes of a process
_after_the_last_drop = 0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """JAX keeps what it traced and compiled. When that has become much it is dropped."""
    global _after_the_last_drop
    memory = _memory()
    if memory > max(_MOST_MEMORY, _after_the_last_drop + _MOST_MEMORY // 4) and "jax" in sys.modules:
        gc.unfreeze()
        sys.modules["jax"].clear_caches()
        gc.collect()
        _give_back()
        _after_the_last_drop = _memory()


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_not_searched_for_garbage() -> Iterator[None]:
    """Which takes its time after a thousand tests."""
    yield
    gc.collect()
    gc.freeze()


def _memory() -> int:
    """Bytes of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _give_back() -> None:
    """Freed memory goes back to the system; glibc keeps it otherwise."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


@pytest.fixture(scope="module")
def without_the_persistent_cache() -> Iterator[None]:
    """Profiles are exact where JAX compiles: of two like programs from its cache nobody knows which ran."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    jax.clear_caches()
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    compilation_cache.reset_cache()

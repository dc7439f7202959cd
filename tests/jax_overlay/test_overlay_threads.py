"""Importing through the overlay from several threads: one module each, and nobody waits for ever.

Python holds one global lock while it asks finders and one lock a module while it loads. A finder that waits
for a module would hold the first while it waits for the second, and the thread that loads the module needs
the first again for its next import: a deadlock that Python does not detect.

Where a test needs a certain order of events, a package that stands in for JAX waits at the critical line.
"""

from __future__ import annotations

from pathlib import Path

import pytest

# A process that hangs says where every thread stands and ends, long before the fixture's own limit.
WATCHED = "import faulthandler; faulthandler.dump_traceback_later(100, exit=True)\n"

WAITING = """
import sys, threading, time

def wait_until_importing(thread):
    # True once the thread waits for a lock of the import system.
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        frame = sys._current_frames().get(thread.ident)
        if frame is not None and "importlib._bootstrap" in frame.f_code.co_filename:
            time.sleep(0.05)
            if sys._current_frames().get(thread.ident) is frame:
                return True
        time.sleep(0.005)
    return False
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path of the fresh interpreter with packages named ``jax`` and ``jaxlib``."""
    files = {
        "jaxlib/__init__.py": "",
        "jax/__init__.py": "import pause; pause.here('jax'); import jax.nn, jax.numpy\n",
        "jax/nn.py": "import pause; pause.here('jax.nn'); import colorsys\ndef relu(): return 'relu'\n",
        "jax/numpy.py": "",
        "jax/_src/__init__.py": "import sys\nwhole = 'nn' in vars(sys.modules['jax'])\n",
        "jax/_src/core.py": "import sys\nwhole = 'nn' in vars(sys.modules['jax'])\n",
        "pause.py": "here = lambda name: None\n",
    }
    for name, text in files.items():
        file = tmp_path / "stand_in" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stand_in"))
    return tmp_path / "stand_in"


@pytest.mark.parametrize(
    ("statement", "result"),
    [
        ("import capibara.jax.nn; out = capibara.jax.nn.relu()", "relu"),
        ("from capibara.jax.nn import relu; out = relu()", "relu"),
        ("from capibara.jax import nn; out = nn.relu()", "relu"),
        ("import capibara.jax.numpy as jnp; out = jnp.__overlay_base__.__name__", "jax.numpy"),
        # JAX's parts only after JAX: its import cycles do not work when entered at the side.
        ("import capibara.jax._src as module; out = module.whole", True),
        ("import capibara.jax._src.core as module; out = module.whole", True),
    ],
)
def test_asking_for_a_part_while_another_thread_is_importing_jax(
    fresh_python, stand_in: Path, statement: str, result: object
):
    assert fresh_python(
        WATCHED.replace("100", "40")
        + WAITING
        + f"""
import json, pause
import jaxlib
began, found = threading.Event(), []

def first():
    import capibara.jax

def second():
    began.wait(20)
    scope = {{}}
    try:
        exec({statement!r}, scope)
        found.append(scope["out"])
    except BaseException as error:
        found.append(repr(error))

importer, other = threading.Thread(target=first), threading.Thread(target=second)

def here(name):
    if name == "jax":
        began.set()
        found.append(wait_until_importing(other))

pause.here = here
other.start(); importer.start()
importer.join(); other.join()
print(json.dumps(found))
"""
    ) == [True, result]


@pytest.mark.parametrize(
    "statement",
    [
        "from capibara.jax.nn import relu",
        "from capibara.jax.nn import *",
        "import capibara.jax.nn as nn; relu = nn.relu",
        "from capibara.jax import nn; relu = nn.relu",
        "import importlib; relu = importlib.import_module('capibara.jax.nn').relu",
    ],
)
def test_a_second_importer_that_came_before_the_alias_stood(fresh_python, stand_in: Path, statement: str):
    """The import statement may hold the object that the import system made and the loader then replaces."""
    (stand_in / "jax" / "__init__.py").write_text("import jax.numpy\n", encoding="utf-8")
    assert fresh_python(
        WATCHED.replace("100", "40")
        + WAITING
        + f"""
import json, pause
import capibara.jax
began, found = threading.Event(), []

def first():
    import capibara.jax.nn

def second():
    began.wait(20)
    scope = {{}}
    try:
        exec({statement!r}, scope)
        found.append(scope["relu"] is sys.modules["jax.nn"].relu)
    except BaseException as error:
        found.append(repr(error))

importer, other = threading.Thread(target=first), threading.Thread(target=second)

def here(name):
    began.set()
    found.append(wait_until_importing(other))

pause.here = here
other.start(); importer.start()
importer.join(); other.join()
real = sys.modules["jax.nn"]
print(json.dumps([*found, sys.modules["capibara.jax.nn"] is real, real.__spec__.name]))
"""
    ) == [True, True, True, "jax.nn"]


def test_finding_a_module_imports_nothing_of_jax(fresh_python, stand_in: Path):
    """The finder alone, as the import system calls it while JAX has only begun to be imported."""
    assert fresh_python(
        """
        import json, sys
        import capibara.jax
        for name in [name for name in sys.modules if name.split(".")[0] == "jax"]:
            del sys.modules[name]
        finder = sys.meta_path[0]
        specs = [finder.find_spec("capibara.jax." + name) for name in ("nn", "nope", "nn.nope", "_src.core")]
        print(json.dumps([[spec and [spec.name, type(spec.loader).__name__] for spec in specs],
                          [name for name in sys.modules if name.split(".")[0] == "jax"]]))
        """
    ) == [
        [["capibara.jax.nn", "AliasLoader"], None, None, ["capibara.jax._src.core", "SourceFileLoader"]],
        [],
    ]


def test_threads_importing_at_once(fresh_python):
    """Eight threads, half through JAX and half through the overlay, get one module and no deadlock.

    One name at a time, after JAX itself: JAX's own import cycles fail when several of its modules are
    imported first from different threads, with or without Capibara.
    """
    assert fresh_python(
        WATCHED
        + """
import importlib, json, sys, threading
import capibara.jax
sys.setswitchinterval(1e-5)
errors, same = [], []
def work(start, found, name):
    start.wait()
    try:
        found.append(importlib.import_module(name))
    except BaseException as error:
        errors.append(repr(error))
for name in ("experimental.sparse", "experimental.pallas", "experimental.ode", "experimental.jet"):
    assert "jax." + name not in sys.modules
    start, found = threading.Barrier(8), []
    names = ["jax." + name, "capibara.jax." + name] * 4
    threads = [threading.Thread(target=work, args=(start, found, n)) for n in names]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    same.append([len(found), len(set(map(id, found)))])
print(json.dumps([errors, same]))
"""
    ) == [[], [[8, 1]] * 4]


def test_threads_making_the_first_import_together(fresh_python):
    assert fresh_python(
        WATCHED
        + """
import json, sys, threading
sys.setswitchinterval(1e-5)
start, errors = threading.Barrier(12), []
def work(line):
    start.wait()
    try:
        exec(line, {})
    except BaseException as error:
        errors.append(repr(error))
lines = ["import jax", "import capibara.jax", "import capibara.jax.numpy as j; j.dot",
         "from capibara.jax import nn, pjit, config, numpy",
         "import capibara.jax.scipy.linalg", "import capibara.jax._src.core"] * 2
threads = [threading.Thread(target=work, args=(line,)) for line in lines]
for thread in threads: thread.start()
for thread in threads: thread.join()
finders = sum(type(f).__name__ == "AliasFinder" for f in sys.meta_path)
print(json.dumps([errors, finders, type(sys.meta_path[0]).__name__]))
"""
    ) == [[], 1, "AliasFinder"]

"""Programs of earlier processes that are not traced again: found or not, damaged, and of what JAX cannot write."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import serialize_executable
from own_cache import own_cache

from capibara.compilation import persistent_cache, untraced
from capibara.compilation.cache_entries import compress
from capibara.compilation.persistent_cache import keep_compiled
from capibara.compilation.untraced import UntracedPrograms
from capibara.files import digest_of_files
from capibara.ops import tuning_cache, use_tuning
from capibara.ops.tuning import Tuned, forced, tuning_file
from capibara.startup import FLAGS, STARTED

X = np.arange(12, dtype=np.float32).reshape(3, 4)
OUTPUTS = {"sum": 0, "turned": 0}


def function(x: jax.Array) -> dict[str, jax.Array]:
    return {"turned": jnp.sin(x).T, "sum": (x @ x.T).sum()}


def lower() -> jax.stages.Lowered:
    def fresh(x: jax.Array) -> dict[str, jax.Array]:
        return function(x)

    return jax.jit(fresh).lower(X)


def never() -> jax.stages.Lowered:
    raise AssertionError("traced")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with (
        own_cache(tmp_path / "home", monkeypatch),
        keep_compiled(pytest.fail, min_seconds=0.0) as folder,
    ):
        assert folder is not None
        yield folder


def here(**facts: Any) -> UntracedPrograms:
    found = UntracedPrograms.here(facts)
    assert found is not None
    return found


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*-untraced"))


def check(program: Any) -> None:
    """It computes what NumPy does."""
    found = program(X)
    assert set(found) == set(OUTPUTS)
    np.testing.assert_allclose(found["turned"], np.sin(X).T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["sum"], (X @ X.T).sum(), rtol=1e-5)


def test_a_program_is_made_once(folder: Path) -> None:
    assert here(a=1).get("f", (X,), OUTPUTS) is None
    check(here(a=1).make("f", (X,), OUTPUTS, lower))
    found = here(a=1).get("f", (X,), OUTPUTS)
    check(found)
    described = (jax.ShapeDtypeStruct(X.shape, X.dtype),)
    check(here(a=1).get("f", described, OUTPUTS))
    assert len(files(folder)) == 1
    assert found is not None
    with pytest.raises(TypeError, match=r"float32\[3,4\]|called with"):
        found(X[:2])


def test_another_process_reads_it(folder: Path) -> None:
    """Both are new ones: settings that other tests left in this one are among what a program depends on."""
    script = f"""
import jax, numpy as np
import jax.numpy as jnp
from capibara.compilation.persistent_cache import keep_compiled
from capibara.compilation.untraced import UntracedPrograms
X = np.arange(12, dtype=np.float32).reshape(3, 4)
def f(x):
    return {{"turned": jnp.sin(x).T, "sum": (x @ x.T).sum()}}
with keep_compiled(print, min_seconds=0.0):
    programs = UntracedPrograms.here({{"a": 1}})
    found = programs.get("f", (X,), {OUTPUTS!r})
    made = found is None
    if made:
        found = programs.make("f", (X,), {OUTPUTS!r}, lambda: jax.jit(f).lower(X))
print(made, float(found(X)["sum"]))
"""
    for made in ("True", "False"):
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stderr
        first, total = found.stdout.split()
        assert (first, float(total)) == (made, pytest.approx(float((X @ X.T).sum())))


@pytest.mark.parametrize(
    "other",
    [
        lambda: here(a=2).get("f", (X,), OUTPUTS),
        lambda: here(a=1).get("g", (X,), OUTPUTS),
        lambda: here(a=1).get("f", (X.T,), OUTPUTS),
        lambda: here(a=1).get("f", (X.astype(np.int32),), OUTPUTS),
        lambda: here(a=1).get("f", ({"x": X},), OUTPUTS),
        lambda: here(a=1).get("f", (X,), OUTPUTS | {"more": 0}),
        lambda: here(a=1).get("f", (X,), OUTPUTS | {"turned": X}),
    ],
    ids=["facts", "name", "shape", "dtype", "tree", "outputs", "shape of outputs"],
)
def test_another_program_is_not_found(folder: Path, other: Callable[[], Any]) -> None:
    here(a=1).make("f", (X,), OUTPUTS, lower)
    assert other() is None
    assert len(files(folder)) == 1  # which is not there for nothing


def test_what_programs_depend_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here(a=1).make("f", (X,), OUTPUTS, lower)
    with monkeypatch.context() as changed:
        changed.setenv("CAPIBARA_NATIVE", "0")
        assert here(a=1).get("f", (X,), OUTPUTS) is None
    with monkeypatch.context() as changed:
        changed.setattr("capibara.compilation.untraced._code", lambda *_: "another version")
        assert here(a=1).get("f", (X,), OUTPUTS) is None
    before = jax.config.jax_default_matmul_precision  # pyright: ignore
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert here(a=1).get("f", (X,), OUTPUTS) is None
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    check(here(a=1).get("f", (X,), OUTPUTS))


def test_settings_of_a_thread(folder: Path) -> None:
    with jax.default_prng_impl("rbg"):
        here(a=1).make("f", (X,), OUTPUTS, lower)
        assert here(a=1).get("f", (X,), OUTPUTS) is not None
    assert here(a=1).get("f", (X,), OUTPUTS) is None


def test_flags(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(flags: str) -> None:
        monkeypatch.setenv("XLA_FLAGS", flags)
        monkeypatch.setattr(untraced, "FLAGS", flags)

    one, other = "--xla_backend_optimization_level=0", "--xla_backend_optimization_level=3"
    start(f"{one} {other}")
    here(a=1).make("f", (X,), OUTPUTS, lower)
    start(f"{other} {one}")  # the last one counts
    assert here(a=1).get("f", (X,), OUTPUTS) is None
    start("/a/file/of/flags")
    assert UntracedPrograms.here({}) is None


def test_flags_that_are_no_longer_those_that_xla_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", f"{FLAGS} --xla_cpu_enable_fast_math=true")
    assert UntracedPrograms.here({}) is None
    monkeypatch.setenv("XLA_FLAGS", FLAGS)
    assert UntracedPrograms.here({}) is not None


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_a_damaged_file_is_made_anew(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        own_cache(tmp_path_factory.mktemp("home"), monkeypatch),
        keep_compiled(pytest.fail, min_seconds=0.0) as folder,
    ):
        assert folder is not None
        here(a=1).make("f", (X,), OUTPUTS, lower)
        (path,) = files(folder)
        whole = path.read_bytes()
        at = int(data.draw(st.floats(0, 1, exclude_max=True)) * len(whole))  # which is not always as long
        if data.draw(st.booleans()):
            path.write_bytes(whole[:at])
        else:
            flipped = bytearray(whole)
            flipped[at] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(flipped)
        found = here(a=1).get("f", (X,), OUTPUTS)
        if found is None:
            assert not files(folder)
            found = here(a=1).make("f", (X,), OUTPUTS, lower)
            assert files(folder) == [path]
        check(found)  # a bit of the compression's header may say nothing


@pytest.mark.parametrize("content", [b"", b"nothing", compress(b"x" * 100)])
def test_what_is_not_a_program_is_removed(folder: Path, content: bytes) -> None:
    here(a=1).make("f", (X,), OUTPUTS, lower)
    (path,) = files(folder)
    path.write_bytes(content)
    assert here(a=1).get("f", (X,), OUTPUTS) is None
    assert not path.exists()


def test_a_program_of_jaxs_cache_is_compiled_once_more(folder: Path) -> None:
    """Written from what XLA read, it would lack its functions."""
    check(here(a=1).make("f", (X,), OUTPUTS, lower))
    files(folder)[0].unlink()
    jax.clear_caches()
    check(here(a=1).make("f", (X,), OUTPUTS, lower))
    check(here(a=1).get("f", (X,), OUTPUTS))


def test_what_jax_cannot_write_stays_in_its_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> Any:
        raise ValueError("Compilation does not support serialization")

    monkeypatch.setattr(serialize_executable, "serialize", refuse)
    check(here(a=1).make("f", (X,), OUTPUTS, lower))
    theirs = {path.name: path.stat().st_mtime_ns for path in folder.glob("jit_*-cache")}
    assert theirs
    for _ in range(2):
        jax.clear_caches()
        again = here(a=1)
        assert again.get("f", (X,), OUTPUTS) is None
        check(again.make("f", (X,), OUTPUTS, lower))
        assert {path.name: path.stat().st_mtime_ns for path in folder.glob("jit_*-cache")} == theirs


def test_other_variables_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here(a=1).make("f", (X,), OUTPUTS, lower)
    monkeypatch.setenv("CAPIBARA_API_KEYS", "another")
    check(here(a=1).get("f", (X,), OUTPUTS))


def test_sources_that_changed_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was imported may be the former ones."""
    monkeypatch.setattr("capibara.compilation.untraced.STARTED", 1e9)
    assert UntracedPrograms.here({}) is None


def test_another_release_in_its_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to the package leads to another folder now, none of whose files has changed since."""
    assert UntracedPrograms.here({}) is not None
    monkeypatch.setattr(untraced, "package_folder", lambda: (0, 0))
    assert UntracedPrograms.here({}) is None


def test_sources_are_read_once_as_long_as_they_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here(a=1).make("f", (X,), OUTPUTS, lower)
    last, sources = untraced._sources()
    assert last < STARTED
    code = digest_of_files(untraced._SOURCES)
    assert (folder / "sources").read_text() == f"{sources} {code}"
    read: list[Any] = []
    monkeypatch.setattr(
        untraced, "digest_of_files", lambda *given: (read.append(given), digest_of_files(*given))[1]
    )
    untraced._code.cache_clear()  # as in another process
    check(here(a=1).get("f", (X,), OUTPUTS))
    assert not read
    # One file has another size, or time.
    monkeypatch.setattr(untraced, "_sources", lambda: (last, "5" * 64))
    check(here(a=1).get("f", (X,), OUTPUTS))
    assert len(read) == 1
    assert (folder / "sources").read_text() == f"{'5' * 64} {code}"
    monkeypatch.setattr(untraced, "digest_of_files", lambda *_: "6" * 64)
    monkeypatch.setattr(untraced, "_sources", lambda: (last, "7" * 64))
    assert here(a=1).get("f", (X,), OUTPUTS) is None


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"{} none", b"{}", b"{} ../../x", b"{} " + b"0" * 100_000]
)
def test_a_digest_of_sources_that_is_damaged(folder: Path, content: bytes) -> None:
    here(a=1).make("f", (X,), OUTPUTS, lower)
    _, sources = untraced._sources()
    (folder / "sources").write_bytes(content.replace(b"{}", sources.encode()))
    untraced._code.cache_clear()
    check(here(a=1).get("f", (X,), OUTPUTS))
    assert (folder / "sources").read_text() == f"{sources} {digest_of_files(untraced._SOURCES)}"


def test_what_the_system_says_of_sources_changes_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untraced, "_SOURCES", tmp_path)
    (tmp_path / "room").mkdir()
    path = tmp_path / "room" / "a.py"
    path.write_text("1")
    seen = {untraced._sources()[1]}
    before = path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # some file systems count in hundredths of a second
        path.write_text("2")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # as reproducible archives have them
    seen.add(untraced._sources()[1])
    (tmp_path / "b.py").write_text("")
    seen.add(untraced._sources()[1])
    (tmp_path / "b.py").rename(tmp_path / "room" / "b.py")
    seen.add(untraced._sources()[1])
    assert len(seen) == 4


def test_a_source_that_was_replaced_by_an_older_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this process has imported is not what its digest would be taken of."""
    here(a=1)
    monkeypatch.setattr(untraced, "_SOURCES", tmp_path)
    (tmp_path / "a.py").write_text("1")
    os.utime(tmp_path / "a.py", (1e9, 1e9))
    assert UntracedPrograms.here({"a": 1}) is None


def test_files_that_nobody_can_write_are_read_each_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In images of file systems other files may have the same times, sizes and numbers."""
    here(a=1).make("f", (X,), OUTPUTS, lower)
    (folder / "sources").write_text(f"{untraced._sources()[1]} {'6' * 64}")
    untraced._code.cache_clear()
    assert here(a=1).get("f", (X,), OUTPUTS) is None
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    untraced._code.cache_clear()
    check(here(a=1).get("f", (X,), OUTPUTS))
    monkeypatch.delattr(os, "statvfs")  # as on Windows
    untraced._code.cache_clear()
    check(here(a=1).get("f", (X,), OUTPUTS))


def test_measurements_that_operations_are_traced_with(folder: Path, tmp_path: Path) -> None:
    here(a=1).make("f", (X,), OUTPUTS, lower)
    with forced("linear_recurrence", Tuned("cpu", "xla")):
        assert here(a=1).get("f", (X,), OUTPUTS) is None
    path, device = tuning_file(tmp_path)
    assert path is not None
    tuning_cache.write(path, device, {"linear_recurrence|float32|length=64": tuning_cache.Entry("xla")})
    try:
        use_tuning(tmp_path)
        assert here(a=1).get("f", (X,), OUTPUTS) is None
    finally:
        use_tuning(None)
    check(here(a=1).get("f", (X,), OUTPUTS))


def test_what_cannot_be_read_is_a_miss(folder: Path) -> None:
    made = here(a=1)
    made.make("f", (X,), OUTPUTS, lower)
    (path,) = files(folder)
    path.unlink()
    path.mkdir()
    assert made.get("f", (X,), OUTPUTS) is None


def test_they_make_room_as_others_do(folder: Path) -> None:
    here(a=1).make("f", (X,), OUTPUTS, lower)
    assert files(folder)
    persistent_cache._shrink(folder, 0)
    assert not files(folder)


def test_outputs_of_another_structure(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"f: expected .*turned.*, got .*other"):
        here(a=1).make("f", (X,), {"other": 0}, lower)
    assert not files(folder)


def test_a_full_disk_stops_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("capibara.compilation.untraced.replace_file", full)
    check(here(a=1).make("f", (X,), OUTPUTS, lower))
    assert not files(folder)


def test_there_are_none_in_a_folder_that_jax_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_cache(tmp_path / "home", monkeypatch):
        assert UntracedPrograms.here({}) is None
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "theirs"))
        with keep_compiled(pytest.fail) as folder:
            assert folder == tmp_path / "theirs"
            assert UntracedPrograms.here({}) is None

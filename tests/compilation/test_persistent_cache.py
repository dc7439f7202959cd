"""Compiled programs kept from one start to the next: hits, size, settings, and folders that are not fit."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from own_cache import SETTINGS, own_cache
from tiny_run import QUICK_COMPILE, TEXT, TINY

from capibara.compilation import count_compilations, persistent_cache
from capibara.compilation.persistent_cache import keep_compiled
from capibara.jax_versions import watch_program_keys
from capibara.train import read_losses


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with own_cache(tmp_path / "home", monkeypatch) as folder:
        yield folder


def settings() -> list[Any]:
    return [getattr(jax.config, name) for name in SETTINGS]


def never(text: str) -> None:
    raise AssertionError(text)


def compiles(number: float) -> dict[str, int]:
    """Compile and run a program of its own for each number; how often it was read, and had to be compiled."""
    counts = {"hits": 0, "misses": 0}

    def count(event: str, **_: Any) -> None:
        for name in counts:
            counts[name] += event == f"/jax/compilation_cache/cache_{name}"

    jax.monitoring.register_event_listener(count)
    try:
        jax.clear_caches()
        assert float(jax.jit(lambda x: x * number + 1)(jnp.float32(2.0))) == pytest.approx(2 * number + 1)
    finally:
        jax.monitoring.unregister_event_listener(count)
    return counts


def entries(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*-cache")}


def test_a_program_is_compiled_once(folder: Path) -> None:
    before = settings()
    with keep_compiled(never):
        assert settings() == [str(folder), 0.0]
        first = compiles(3.25)
    assert settings() == before
    assert first["misses"] > 0 == first["hits"]
    kept = entries(folder)
    assert kept
    with keep_compiled(never):
        assert compiles(3.25) == {"hits": first["misses"], "misses": 0}
    assert entries(folder) == kept
    assert {path.name for path in folder.iterdir()} == set(kept)  # no session is left
    # Outside of the context nothing is read or written.
    assert compiles(3.25) == {"hits": 0, "misses": 0}
    assert compiles(4.5)["hits"] == 0
    assert entries(folder) == kept


def test_settings_come_back_after_an_error(folder: Path) -> None:
    before = settings()
    with pytest.raises(ZeroDivisionError), keep_compiled(never):
        raise ZeroDivisionError
    assert settings() == before
    assert not list(folder.iterdir())


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_the_folder_belongs_to_the_user_alone(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with keep_compiled(never):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.relative_to(Path(os.environ["XDG_CACHE_HOME"])).parts[:2] == ("capibara", "xla")


@pytest.mark.parametrize("how", ["a file is in the way", "others may write", "not a home"])
def test_what_cannot_be_used_is_a_note(folder: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "a file is in the way":
        folder.parent.parent.mkdir(parents=True)
        folder.parent.write_text("")
    elif how == "others may write":
        folder.mkdir(parents=True)
        folder.chmod(0o770)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    notes: list[str] = []
    before = settings()
    with keep_compiled(notes.append):
        assert settings() == before
        assert compiles(5.5)["hits"] == 0
    (note,) = notes
    assert note.startswith("compiled programs are not kept for the next start: ")
    assert not entries(folder)


def test_a_folder_that_jax_was_told_stays(folder: Path, tmp_path: Path) -> None:
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "told"))
    with keep_compiled(never):
        assert settings()[0] == str(tmp_path / "told")
    assert not folder.exists()


def test_switched_off(folder: Path) -> None:
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        with keep_compiled(never):
            assert settings()[0] is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not folder.exists()


def test_a_threshold_of_the_users_own_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "7")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 7.0)
    with keep_compiled(never):
        assert settings() == [str(folder), 7.0]


def test_a_broken_program_is_compiled_anew_without_a_word(folder: Path) -> None:
    with keep_compiled(never):
        compiles(6.5)
    for path in folder.glob("*-cache"):
        path.write_bytes(path.read_bytes()[:-20])
    with keep_compiled(never):
        assert compiles(6.5)["misses"] > 0
    # What this process wrote, and JAX could not write over, is gone; the next one writes it whole.
    assert not entries(folder)
    with keep_compiled(never):
        compiles(6.5)
    with keep_compiled(never):
        assert compiles(6.5)["misses"] == 0


def test_what_a_killed_process_left_is_looked_at(folder: Path) -> None:
    whole, other = zlib.compress(b"x" * 1000), zlib.compress(b"old")[:-3]
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    (folder / "old-cache").write_bytes(other)
    os.utime(folder / "old-cache", (1, 1))
    (folder / "session-dead").write_text("")
    (folder / "whole-cache").write_bytes(whole)
    (folder / "part-cache").write_bytes(whole[:-1])
    (folder / "empty-cache").write_bytes(b"")
    with keep_compiled(never):
        sessions = [path.name for path in folder.glob("session-*")]
        assert len(sessions) == 1
        assert "session-dead" not in sessions
        assert set(entries(folder)) == {"old-cache", "whole-cache"}  # the old one is none of its time


def test_a_process_that_lives_is_left_alone(folder: Path) -> None:
    with keep_compiled(never):
        (mine,) = folder.glob("session-*")
        script = (
            "import sys; from capibara.compilation.persistent_cache import keep_compiled\n"
            "with keep_compiled(print): pass"
        )
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == ""
        assert list(folder.glob("session-*")) == [mine]


def test_the_oldest_programs_make_room(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persistent_cache, "MAX_BYTES", 250)
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o700)
    for age, name in enumerate("abcd"):
        (folder / f"{name}-cache").write_bytes(b"\x78" + b"x" * 99)
        then = time.time() - 1000 * age
        os.utime(folder / f"{name}-cache", (then, then))
    (folder / "something else").write_bytes(b"x" * 1000)
    with keep_compiled(never):
        assert set(entries(folder)) == {"a-cache", "b-cache"}
    assert (folder / "something else").exists()


def one_program(number: float) -> bool:
    """Compile and run one program, another for each number; whether it was read from disk."""
    x = np.float32(2)
    jax.clear_caches()
    with count_compilations() as counts:
        assert float(np.asarray(jax.jit(lambda x: x * number + 1)(x))) == pytest.approx(2 * number + 1)
    assert counts.programs == 1
    return counts.hits == 1


def test_what_was_used_stays_and_the_rest_makes_room(folder: Path) -> None:
    with keep_compiled(never):
        written: list[str] = []
        for number in (1.5, 2.5, 3.5):
            one_program(number)
            written += sorted(entries(folder).keys() - set(written))
    names = dict(zip((1.5, 2.5, 3.5), written, strict=True))
    for age, number in enumerate((3.5, 2.5, 1.5)):
        os.utime(folder / names[number], (1000 - age, 1000 - age))
    sizes = {name: (folder / name).stat().st_size for name in names.values()}
    with keep_compiled(never):
        assert one_program(1.5)  # the oldest, used now
    with keep_compiled(never, max_bytes=sizes[names[1.5]] + sizes[names[3.5]]):
        assert set(entries(folder)) == {names[1.5], names[3.5]}


def test_the_size_holds_while_a_process_runs(folder: Path) -> None:
    with keep_compiled(never):
        one_program(0.5)
    (size,) = (path.stat().st_size for path in folder.glob("*-cache"))
    with keep_compiled(never, max_bytes=3 * size + 20):
        for number in range(10):
            one_program(number + 0.25)
            # The newest is added after room was made.
            assert len(entries(folder)) <= 4
    assert len(entries(folder)) == 3


def test_threads_share_the_folder_and_the_last_one_restores_the_settings(folder: Path) -> None:
    before = settings()
    with keep_compiled(never) as outer:
        with keep_compiled(never, folder=folder / "other") as inner:
            assert inner == outer == folder
        assert settings() == [str(folder), 0.0]
        assert len(list(folder.glob("session-*"))) == 1
    assert settings() == before
    assert not list(folder.glob("session-*"))


def test_keys_are_watched_without_a_line_in_the_log(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[str, bool]] = []
    logger = logging.getLogger("jax._src.compiler")
    before = logger.level, list(logger.filters)
    with keep_compiled(never), watch_program_keys(lambda key, found: seen.append((key, found))):
        one_program(7.75)
        one_program(7.75)
    assert [found for _, found in seen] == [False, True]
    assert {f"{key}-cache" for key, _ in seen} == set(entries(folder))
    assert (logger.level, list(logger.filters)) == before
    assert caplog.records == []


@pytest.mark.parametrize("how", ["all", "this one"])
def test_keys_are_watched_where_logging_is_disabled(caplog: pytest.LogCaptureFixture, how: str) -> None:
    seen: list[str] = []
    logger = logging.getLogger("jax._src.compiler")
    logger.disabled = how == "this one"
    logging.disable(logging.CRITICAL if how == "all" else logging.NOTSET)
    try:
        with watch_program_keys(lambda key, _: seen.append(key)):
            logger.warning("persistent compilation cache hit for %s with key %s", "f", "k")
            logging.getLogger("another").warning("not disabled")
        assert not logger.isEnabledFor(logging.CRITICAL)
        assert logger.disabled == (how == "this one")
    finally:
        logging.disable(logging.NOTSET)
        logger.disabled = False
    assert seen == ["k"]
    assert [record.message for record in caplog.records] == ([] if how == "all" else ["not disabled"])


@pytest.mark.parametrize(("mode", "good"), [(0o1777, True), (0o755, True), (0o777, False), (0o770, False)])
def test_a_folder_below_one_that_all_may_write_to(folder: Path, mode: int, good: bool) -> None:
    folder.parent.mkdir(parents=True)
    folder.parent.chmod(mode)
    notes: list[str] = []
    with keep_compiled(notes.append) as used:
        assert used == (folder if good else None)
    assert len(notes) == (not good)


def test_a_folder_below_one_of_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def status(owner: int, mode: int) -> os.stat_result:
        return os.stat_result([0o040000 | mode, 0, 0, 1, owner, 0, 0, 0, 0, 0])

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    private = persistent_cache._is_private
    assert private(status(0, 0o755), itself=False)
    assert private(status(0, 0o1777), itself=False)
    assert not private(status(0, 0o755), itself=True)
    assert not private(status(1001, 0o755), itself=False)
    assert not private(status(1000, 0o1777), itself=True)


@pytest.mark.slow
def test_the_command_starts_from_what_it_kept_and_trains_the_same(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    entry = Path(__file__).parent.parent / "support" / "tiny_cli.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK_COMPILE,
        "XDG_CACHE_HOME": str(tmp_path / "home"),
        "MPLCONFIGDIR": os.environ.get("MPLCONFIGDIR", str(Path.home() / ".cache" / "matplotlib")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def train(name: str) -> tuple[dict[int, float], dict[str, int]]:
        arguments = ["train", str(tmp_path / "text.txt"), *TINY, "--directory", str(tmp_path / name)]
        done = subprocess.run(
            [sys.executable, "-W", "error", str(entry), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        # Nothing about the machine, the cache or anything else on the terminal.
        assert done.stderr == ""
        (folder,) = (tmp_path / "home" / "capibara" / "xla").iterdir()
        return read_losses(tmp_path / name / "metrics.jsonl"), entries(folder)

    losses, kept = train("first")
    again, kept_again = train("second")
    assert any(name.startswith("jit_step") for name in kept)
    assert kept_again == kept
    assert again == losses

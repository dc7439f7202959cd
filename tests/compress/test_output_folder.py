"""Folders of archives: all of it or nothing, also after errors, kills and signals; and going on where one ended."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from capibara.cli import main
from capibara.compress import ArchiveWriter, CompressError
from capibara.compress.archive_files import compress_files, decompress_files, plan_compress, plan_decompress
from capibara.compress.formats import FORMATS
from capibara.compress.output_folder import OutputFolder
from capibara.compress.safetensors_file import write_safetensors
from capibara.files import NewFile, replace_file


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("a", "b", "sub/c"):
        bits = rng.normal(size=4096).astype("<f4").view("<u4")
        write_safetensors(
            folder / f"{name}.safetensors", {"w": (FORMATS["F32"], (64, 64))}, lambda _, bits=bits: bits
        )
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_and_back(model: Path, tmp_path: Path) -> None:
    for _ in range(2):  # the second time the folders are there
        compress_files(plan_compress(model, tmp_path / "small"))
        decompress_files(plan_decompress(tmp_path / "small", tmp_path / "back"))
    assert everything(tmp_path / "back") == everything(model)
    assert sorted(os.listdir(tmp_path)) == ["back", "model", "small"]


@pytest.mark.parametrize("there", [False, True])
def test_of_a_folder_that_fails_nothing_is_left(model: Path, tmp_path: Path, there: bool) -> None:
    compress_files(plan_compress(model, tmp_path / "small"))
    path = tmp_path / "small" / "sub" / "c.capi"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    if there:
        (tmp_path / "back").mkdir()
        (tmp_path / "back" / "own.txt").write_text("mine")
    assert main(["decompress", str(tmp_path / "small"), str(tmp_path / "back")]) == 2
    assert sorted(os.listdir(tmp_path)) == sorted(["model", "small"] + ["back"] * there)
    if there:
        assert everything(tmp_path / "back") == {"own.txt": b"mine"}


def test_resuming_takes_what_was_finished(model: Path, tmp_path: Path, monkeypatch) -> None:
    small = tmp_path / "small"
    compress_files(plan_compress(model, small))
    whole = (small / "sub" / "c.capi").read_bytes()
    damaged = bytearray(whole)
    damaged[100] ^= 1
    (small / "sub" / "c.capi").write_bytes(damaged)
    back = tmp_path / "back"
    assert main(["decompress", "--resume", str(small), str(back)]) == 2
    assert not back.exists()
    hidden = tmp_path / ".back.capibara-unfinished"
    assert {"a.safetensors", "b.safetensors"} <= set(os.listdir(hidden))
    (small / "sub" / "c.capi").write_bytes(whole)
    os.utime(small / "sub" / "c.capi", ns=(0, 0))
    # It is another source now: nothing of what was made is trusted.
    written: list[str] = []
    from capibara.compress import archive_files

    real = archive_files._write_original

    def spy(archive, place, progress):
        written.append(place.name)
        return real(archive, place, progress)

    monkeypatch.setattr(archive_files, "_write_original", spy)

    def fail(archive, place, progress):
        if place.name == "c.safetensors":
            raise OSError(errno.ENOSPC, "full")
        return spy(archive, place, progress)

    monkeypatch.setattr(archive_files, "_write_original", fail)
    assert main(["decompress", "--resume", str(small), str(back)]) == 2
    assert written == ["a.safetensors", "b.safetensors"]
    monkeypatch.setattr(archive_files, "_write_original", spy)
    seen: list[str] = []
    decompress_files(plan_decompress(small, back), resume=True, progress=lambda name, size: seen.append(name))
    assert written == ["a.safetensors", "b.safetensors", "c.safetensors"]
    assert len(seen) == 3
    assert everything(back) == everything(model)
    assert not hidden.exists()


def test_resumed_archives_report_what_the_others_do(model: Path, tmp_path: Path, monkeypatch) -> None:
    want = compress_files(plan_compress(model, tmp_path / "want"), ratio=4)
    from capibara.compress import archive_files, writing

    real = writing.add_tensors

    def fail(archive, *rest):
        if archive.path.name == "c.capi":
            raise KeyboardInterrupt
        return real(archive, *rest)

    monkeypatch.setattr(archive_files, "add_tensors", fail)
    jobs = plan_compress(model, tmp_path / "small")
    with pytest.raises(KeyboardInterrupt):
        compress_files(jobs, ratio=4, resume=True)
    monkeypatch.setattr(archive_files, "add_tensors", real)
    found = compress_files(jobs, ratio=4, resume=True)
    assert [(w.entries, w.errors, w.error) for w in found] == [(w.entries, w.errors, w.error) for w in want]
    assert everything(tmp_path / "small") == everything(tmp_path / "want")


def test_resuming_with_other_settings_begins_anew(model: Path, tmp_path: Path) -> None:
    with contextlib.suppress(RuntimeError), OutputFolder(tmp_path / "out", ["int8"], resume=True) as folder:
        place, finished = folder.place(tmp_path / "out" / "x")
        assert not finished
        place.write_text("of int8")
        folder.finish(tmp_path / "out" / "x")
        raise RuntimeError
    with OutputFolder(tmp_path / "out", ["int8"], resume=True) as folder:
        assert folder.place(tmp_path / "out" / "x")[1]
        with pytest.raises(CompressError, match="another process is writing"):
            OutputFolder(tmp_path / "out", ["int8"]).__enter__()
        os.unlink(folder.place(tmp_path / "out" / "x")[0])
        (folder.place(tmp_path / "out" / "y")[0]).write_text("y")
    assert everything(tmp_path / "out") == {"y": b"y"}
    with OutputFolder(tmp_path / "out", ["int4"], resume=True) as folder:
        assert not folder.place(tmp_path / "out" / "x")[1]


@pytest.mark.parametrize("notes", [b"", b"[" * 100_000, b'{"made_from": 1, "finished": 3}', b"\xff", b"3"])
def test_notes_that_are_damaged_are_not_used(tmp_path: Path, notes: bytes) -> None:
    hidden = tmp_path / ".out.capibara-unfinished"
    hidden.mkdir()
    (hidden / "capibara-finished.json").write_bytes(notes)
    (hidden / "x").write_text("old")
    with OutputFolder(tmp_path / "out", 1, resume=True) as folder:
        assert not folder.place(tmp_path / "out" / "x")[1]
    assert everything(tmp_path / "out") == {}


@pytest.mark.parametrize("resume", [False, True])
def test_a_link_in_the_place_of_the_hidden_folder_is_not_followed(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter").write_text("dear")
    (tmp_path / ".out.capibara-unfinished").symlink_to("mine")
    with pytest.raises(CompressError, match="is a link"):
        OutputFolder(tmp_path / "out", 1, resume=resume).__enter__()
    assert everything(tmp_path / "mine") == {"letter": b"dear"}


def test_two_folders_with_the_same_long_beginning(tmp_path: Path) -> None:
    name = "a-model-with-a-long-name-of-its-own-and-more"
    with OutputFolder(tmp_path / f"{name}-1", 1) as first, OutputFolder(tmp_path / f"{name}-2", 1) as second:
        for folder, place in ((first, f"{name}-1"), (second, f"{name}-2")):
            folder.place(tmp_path / place / "x")[0].write_text(place)
    assert {k: v.decode() for k, v in everything(tmp_path).items()} == {
        f"{name}-1/x": f"{name}-1",
        f"{name}-2/x": f"{name}-2",
    }


def test_a_folder_that_is_there_needs_no_place_beside_it(tmp_path: Path, monkeypatch) -> None:
    # What is beside it may be another file system (the place where a volume is mounted), or another user's.
    out = tmp_path / "volume"
    out.mkdir()
    real = os.replace

    def replace(source, target):
        if out in Path(source).parents and out in Path(target).parents:
            return real(source, target)
        raise OSError(errno.EXDEV, "Invalid cross-device link", source, None, target)

    monkeypatch.setattr(os, "replace", replace)
    with OutputFolder(out, 1) as folder:
        assert os.listdir(tmp_path) == ["volume"]
        replace_file(folder.place(out / "sub" / "x")[0], "x")
    assert everything(out) == {"sub/x": b"x"}
    assert os.listdir(out) == ["sub"]


def test_what_a_kill_left_of_the_notes_is_not_in_the_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with contextlib.suppress(RuntimeError), OutputFolder(out, 1, resume=True) as folder:
        folder.place(out / "x")[0].write_text("x")
        folder.finish(out / "x")
        raise RuntimeError
    (tmp_path / ".out.capibara-unfinished" / ".capibara-finished.json.0123456789ab.tmp").write_text("{")
    with OutputFolder(out, 1, resume=True) as folder:
        folder.place(out / "y")[0].write_text("y")
        folder.finish(out / "y")
    assert everything(out) == {"x": b"x", "y": b"y"}


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch) -> None:
    def flock(descriptor, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with OutputFolder(tmp_path / "out", 1) as folder:
        replace_file(folder.place(tmp_path / "out" / "x")[0], "x", clean=True)
    assert everything(tmp_path) == {"out/x": b"x"}
    (tmp_path / "out" / ".capibara-unfinished").mkdir()
    with pytest.raises(CompressError, match="no locks"):
        OutputFolder(tmp_path / "out", 1).__enter__()


def test_a_new_file_that_another_process_took_for_an_abandoned_one(tmp_path: Path, monkeypatch) -> None:
    from capibara import files

    real, seen = files.locked, []

    def late(descriptor):
        if not seen:  # the other one was quicker
            seen.append([os.unlink(p) for p in tmp_path.iterdir()])
        return real(descriptor)

    monkeypatch.setattr(files, "locked", late)
    replace_file(tmp_path / "a", "a")
    assert len(seen) == 1
    assert everything(tmp_path) == {"a": b"a"}


@pytest.mark.parametrize("wrong", ["a.capi/", "sub"])
def test_what_cannot_be_written_is_told_before_the_work(model: Path, tmp_path: Path, wrong: str) -> None:
    small = tmp_path / "small"
    small.mkdir()
    (small / wrong).mkdir() if wrong.endswith("/") else (small / wrong).write_text("mine")
    with pytest.raises(CompressError, match="cannot be written"):
        plan_compress(model, small)
    assert everything(small) == ({} if wrong.endswith("/") else {"sub": b"mine"})


def test_unfinished_folders_are_no_part_of_a_model(model: Path, tmp_path: Path) -> None:
    hidden = model / ".capibara-unfinished"
    hidden.mkdir()
    (hidden / "a.safetensors").write_text("half")
    compress_files(plan_compress(model, tmp_path / "small"))
    assert sorted(everything(tmp_path / "small")) == ["a.capi", "b.capi", "config.json", "sub/c.capi"]


def test_a_single_file_cannot_be_resumed(model: Path, tmp_path: Path, capsys) -> None:
    argv = ["compress", "--resume", str(model / "a.safetensors"), str(tmp_path / "a.capi")]
    assert main(argv) == 2
    assert "resume: applies to folders only" in capsys.readouterr().err


def test_what_a_kill_left_is_removed_by_the_next_run(tmp_path: Path) -> None:
    code = f"""
import os, signal
from capibara.compress import ArchiveWriter
from capibara.compress.output_folder import OutputFolder
from pathlib import Path
folder = OutputFolder(Path({str(tmp_path)!r}) / "out", 1).__enter__()
folder.place(Path({str(tmp_path)!r}) / "out" / "x")[0].write_text("half")
writer = ArchiveWriter({str(tmp_path / "a.capi")!r}).__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    left = os.listdir(tmp_path)
    assert len(left) == 2
    assert all(name.startswith(".") for name in left)
    with ArchiveWriter(tmp_path / "a.capi"), OutputFolder(tmp_path / "out", 1):
        pass
    assert sorted(os.listdir(tmp_path)) == ["a.capi", "out"]
    assert everything(tmp_path / "out") == {}


def test_files_that_live_processes_write_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / ".a.0123456789ab.tmp.mine").write_text("mine")
    with NewFile(tmp_path / "a") as first:
        code = f"from capibara.files import replace_file; replace_file({str(tmp_path / 'a')!r}, b'2', clean=True)"
        subprocess.run([sys.executable, "-c", code], check=True)
        first.stream.write(b"1")
        assert len(os.listdir(tmp_path)) == 3
    assert everything(tmp_path) == {".a.0123456789ab.tmp.mine": b"mine", "a": b"1"}


def test_a_full_disk_names_the_place(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with (
            pytest.raises(OSError, match=r"a\.capi'$") as caught,
            ArchiveWriter(tmp_path / "a.capi") as archive,
        ):
            bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
            archive.add("x", bits, FORMATS["U32"], bits.shape)
        assert caught.value.errno == errno.EFBIG
        with pytest.raises(OSError, match=r"b'$"):
            replace_file(tmp_path / "b", bytes(2 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert os.listdir(tmp_path) == []


def _signalled(argv: list[str], number: int, delay: float) -> tuple[int, str]:
    """A verb in a process of its own, a signal after so many seconds; its exit code and what it said."""
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from capibara.cli import main; sys.exit(main())"
    )
    process = subprocess.Popen([sys.executable, "-c", code, *argv], stderr=subprocess.PIPE, text=True)
    time.sleep(delay)
    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, err


def _many(tmp_path: Path, count: int, files: int) -> None:
    """Signals at ``count`` moments from start to end; ``files`` safetensors files take a while."""
    rng = np.random.default_rng(0)
    source = tmp_path / "model"
    source.mkdir()
    for i in range(files):
        bits = rng.normal(size=1 << 18).astype("<f4").view("<u4")
        write_safetensors(
            source / f"{i}.safetensors", {"w": (FORMATS["F32"], (512, 512))}, lambda _, bits=bits: bits
        )
    compress_files(plan_compress(source, tmp_path / "small"))
    begun = time.perf_counter()
    code, _ = _signalled(["compress", str(source), str(tmp_path / "out")], 0, 0)
    assert code == 0
    whole = time.perf_counter() - begun
    subprocess.run(["rm", "-r", str(tmp_path / "out")], check=True)
    for i in range(count):
        number = (signal.SIGINT, signal.SIGTERM)[i % 2]
        verb, given = (("compress", "model"), ("decompress", "small"))[i // 2 % 2]
        code, err = _signalled(
            [verb, str(tmp_path / given), str(tmp_path / "out")], number, whole * (0.1 + i / count)
        )
        left = set(os.listdir(tmp_path)) - {"model", "small"}
        if code == 0 or (left == {"out"}):
            assert left == {"out"}, (code, err, left)
            subprocess.run(["rm", "-r", str(tmp_path / "out")], check=True)
        else:
            # Before the verb has begun Python ends as it always does.
            assert code in (128 + number, -number, 1 if "KeyboardInterrupt" in err else 130), (code, err)
            assert not left, (code, err, left)


def test_signals_at_some_phases_leave_nothing(tmp_path: Path) -> None:
    _many(tmp_path, 4, 8)


@pytest.mark.slow
def test_signals_at_every_phase_leave_nothing(tmp_path: Path) -> None:
    _many(tmp_path, 200, 40)

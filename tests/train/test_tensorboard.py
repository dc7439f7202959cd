"""The files for TensorBoard: read back by their format, and equal to what ``metrics.jsonl`` says."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus

from capibara.errors import MissingExtraError
from capibara.train import RunWriteError, extras, read_metrics, train
from capibara.train.tensorboard import EventFiles

event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2")


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    crc = _crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def events(folder: Path) -> Iterator[Any]:
    """Of all files, each record of length, checksum, message, checksum (TensorFlow's TFRecord)."""
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            assert struct.unpack("<I", data[8:12])[0] == _masked(data[:8])
            message = data[12 : 12 + length]
            assert struct.unpack("<I", data[12 + length : 16 + length])[0] == _masked(message)
            yield event_pb2.Event.FromString(message)
            data = data[16 + length :]


def scalars(folder: Path) -> dict[tuple[str, int], float]:
    """Of each figure the last one, without those of steps that a later file begins before."""
    found: dict[tuple[str, int], float] = {}
    for event in events(folder):
        if event.HasField("session_log") and event.step:
            found = {key: value for key, value in found.items() if key[1] < event.step}
        for value in event.summary.value:
            found[value.tag, event.step] = value.simple_value
    return found


def test_they_say_what_the_metrics_say_also_after_resuming(tmp_path: Path) -> None:
    for steps in (6, 12):
        config = tiny_config(
            tmp_path, "train.tensorboard=true", f"train.steps={steps}", "optimizer.schedule=constant"
        )
        train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
    expected = {
        (f"{line['kind']}/{name}", line["step"]): value
        for line in read_metrics(tmp_path / "metrics.jsonl")
        for name, value in line.items()
        if isinstance(value, int | float) and name != "step"
    }
    found = scalars(tmp_path / "tensorboard")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=1e-6)
    assert {"train/loss", "train/grad_norm", "train/learning_rate", "train/passes", "train/memory"} <= {
        name for name, _ in found
    }


def test_without_the_package_nothing_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise MissingExtraError("tensorboardX", "train", "train.tensorboard=true")

    monkeypatch.setattr(extras, "tensorboard", missing)
    config = tiny_config(tmp_path, "train.tensorboard=true")
    with pytest.raises(MissingExtraError, match="tensorboardX"):
        train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunWriteError, match=r"train\.tensorboard=false"):
        EventFiles(tmp_path / "file" / "tensorboard")


def test_two_files_of_one_moment(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        files = EventFiles(tmp_path, resume_step=step - 1)
        files.write(
            {"kind": "train", "step": step, "loss": float(step), "losses": [1.0], "json": None, "b": True}
        )
        files.close()
    assert len(list(tmp_path.iterdir())) == 3
    assert scalars(tmp_path) == {("train/loss", step): float(step) for step in (1, 2, 3)}


def test_what_was_written_is_there_after_sync(tmp_path: Path) -> None:
    files = EventFiles(tmp_path)
    files.write({"kind": "train", "step": 4, "loss": 2.5})
    files.sync()
    assert scalars(tmp_path) == {("train/loss", 4): 2.5}
    files.close()


@pytest.mark.parametrize("call", ["write", "sync", "close"])
def test_a_full_disk_is_a_clear_error_at_once(tmp_path: Path, call: str) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    files = EventFiles(tmp_path)
    files.close()
    for name in ("write_event", "flush", "close"):
        setattr(files._file, name, full)
    arguments = [{"kind": "train", "step": 1, "loss": 1.0}] if call == "write" else []
    for _ in range(20):
        with pytest.raises(RunWriteError, match="No space left on device"):
            getattr(files, call)(*arguments)

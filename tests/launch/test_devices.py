"""Which devices each process of a group gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from capibara.errors import ConfigError
from capibara.launch.devices import device_variables


def system(folder: Path, *names: str) -> str:
    (folder / "dev").mkdir()
    for name in names:
        (folder / "dev" / name).touch()
    return str(folder)


GPUS = [f"nvidia{number}" for number in (0, 1, 2, 3, 10, 11)]


@pytest.mark.parametrize(
    ("count", "given", "expected"),
    [
        (1, {}, [None]),
        (2, {}, ["0,1,2", "3,10,11"]),
        (3, {}, ["0,1", "2,3", "10,11"]),
        (2, {"CUDA_VISIBLE_DEVICES": "5,GPU-abc"}, ["5", "GPU-abc"]),
        (2, {"CUDA_VISIBLE_DEVICES": ""}, [None, None]),
        (2, {"CUDA_VISIBLE_DEVICES": "-1"}, [None, None]),
        (5, {"JAX_PLATFORMS": "cpu"}, [None] * 5),
    ],
)
def test_gpus_are_shared(
    tmp_path: Path, count: int, given: dict[str, str], expected: list[str | None]
) -> None:
    found = device_variables(given, count, None, system(tmp_path, "null", "nvidiactl", "nvidia-uvm", *GPUS))
    assert [one.get("CUDA_VISIBLE_DEVICES") for one in found] == expected


def test_what_cannot_be_shared_is_refused(tmp_path: Path) -> None:
    gpus = system(tmp_path, *GPUS)
    with pytest.raises(ConfigError, match=r"count=4: 6 GPUs .*--devices 1"):
        device_variables({}, 4, None, gpus)
    (tmp_path / "dev" / "accel0").touch()
    with pytest.raises(ConfigError, match=r"count=2: the chips of a TPU host belong to one process"):
        device_variables({}, 2, None, gpus)
    assert device_variables({}, 1, None, gpus) == [{}]


def test_emulated_devices_are_of_the_cpu(tmp_path: Path) -> None:
    found = device_variables({"XLA_FLAGS": "--one=1"}, 2, 3, system(tmp_path, *GPUS, "accel0"))
    flags = "--one=1 --xla_force_host_platform_device_count=3"
    assert found == [{"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}] * 2


def test_no_folder_of_devices(tmp_path: Path) -> None:
    assert device_variables({}, 2, None, str(tmp_path)) == [{}, {}]

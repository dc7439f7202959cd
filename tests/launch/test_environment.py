"""Which process of a group this one is."""

from __future__ import annotations

from pathlib import Path

import pytest

from capibara.errors import ConfigError
from capibara.launch import Membership, described_by_platform, heartbeat_seconds, read_membership


@pytest.mark.parametrize("address", ["127.0.0.1:1", "job-0.job:8476", "[fe80::1]:65535"])
def test_variables_come_back(address: str) -> None:
    place = Membership(address, 4, 3)
    assert read_membership({"HOME": "/", **place.variables()}) == place
    jax = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
    assert read_membership(jax) == place
    assert read_membership({**jax, **Membership("here:1", 2, 0).variables()}) == Membership("here:1", 2, 0)


def test_no_variables_are_one_process() -> None:
    assert read_membership({}) is None
    assert read_membership({"CAPIBARA_PROCESS_ID": "", "PATH": "/bin"}) is None
    assert read_membership({"JAX_COORDINATOR_ADDRESS": "host:1"}) is None  # JAX finds the rest


def test_places_without_an_address_are_refused() -> None:
    numbers = {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "1"}
    with pytest.raises(ConfigError, match="but not JAX_COORDINATOR_ADDRESS"):
        read_membership(numbers)
    assert read_membership({**numbers, **SLURM}) is None  # which tells it


GOOD = Membership("host:1", 2, 1).variables()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"CAPIBARA_COORDINATOR": ""}, "but not CAPIBARA_COORDINATOR"),
        ({"CAPIBARA_PROCESS_ID": ""}, "but not CAPIBARA_PROCESS_ID"),
        ({"CAPIBARA_COORDINATOR": "host"}, "expected host:port"),
        ({"CAPIBARA_COORDINATOR": "ho st:1"}, "expected host:port"),
        ({"CAPIBARA_NUM_PROCESSES": "0"}, "expected the number of processes"),
        ({"CAPIBARA_NUM_PROCESSES": "two"}, "expected the number of processes"),
        ({"CAPIBARA_PROCESS_ID": "2"}, "0 to 1"),
        ({"CAPIBARA_PROCESS_ID": "-1"}, "0 to 1"),
        ({"CAPIBARA_PROCESS_ID": "1\x1b[0m"}, r"1\x1b[0m"),
    ],
)
def test_wrong_variables_are_refused(change: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_membership({**GOOD, **change})
    assert words in str(error.value)


def test_how_long_a_silent_process_counts_as_alive() -> None:
    assert heartbeat_seconds({}) == 20
    assert heartbeat_seconds({"CAPIBARA_HEARTBEAT_SECONDS": "600"}) == 600
    for text in ("4", "0", "-5", "1e2", "100000", "x"):
        with pytest.raises(ConfigError, match=r"CAPIBARA_HEARTBEAT_SECONDS=.*an integer from 5 to 86400"):
            heartbeat_seconds({"CAPIBARA_HEARTBEAT_SECONDS": text})


SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
}
MPI = {"OMPI_MCA_orte_hnp_uri": "1.0;tcp://10.0.0.1:1", "OMPI_COMM_WORLD_SIZE": "2"}
GKE = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}


@pytest.mark.parametrize(
    ("environment", "tpu", "expected"),
    [
        ({}, False, False),
        ({"JAX_COORDINATOR_ADDRESS": "host:1"}, False, True),
        (SLURM, False, True),
        ({**SLURM, "SLURM_NTASKS": "1"}, False, False),
        # The shell of salloc and the script of sbatch: no task of a step.
        ({name: value for name, value in SLURM.items() if name != "SLURM_STEP_NODELIST"}, False, False),
        (MPI, False, True),
        ({**MPI, "OMPI_COMM_WORLD_SIZE": "1"}, False, False),
        (GKE, False, False),
        (GKE, True, True),
        ({**GKE, "TPU_WORKER_HOSTNAMES": "localhost"}, True, False),
        ({**GKE, "TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, True, True),
        ({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, True, True),
        ({}, True, True),  # a Cloud TPU machine: JAX reads its metadata
        ({"TPU_SKIP_MDS_QUERY": "1"}, True, False),
    ],
)
def test_platforms(tmp_path: Path, environment: dict[str, str], tpu: bool, expected: bool) -> None:
    if tpu:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev/accel0").touch()
    assert described_by_platform(environment, str(tmp_path)) == expected

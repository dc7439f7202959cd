"""Which process of a group this one is: what its environment says.

A launcher gives each process three variables; ``capibara train`` reads them before JAX starts::

    CAPIBARA_COORDINATOR=10.0.0.1:1234     where process 0 can be reached by the others
    CAPIBARA_NUM_PROCESSES=4
    CAPIBARA_PROCESS_ID=0                  0 to 3

``JAX_COORDINATOR_ADDRESS``, ``JAX_NUM_PROCESSES`` and ``JAX_PROCESS_ID`` mean the same. Without either, JAX asks the
platform that starts the processes: GKE and Cloud TPU, Slurm, Open MPI (:func:`described_by_platform`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from capibara.errors import ConfigError
from capibara.startup import has_tpu

__all__ = [
    "FEWEST",
    "HEARTBEAT",
    "Membership",
    "described_by_platform",
    "heartbeat_seconds",
    "may_be_fewer",
    "read_membership",
]

_NAMES = (
    ("CAPIBARA_COORDINATOR", "CAPIBARA_NUM_PROCESSES", "CAPIBARA_PROCESS_ID"),
    ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
)


FEWEST = "CAPIBARA_MIN_PROCESSES"
"""Set by a launcher that may start fewer processes than it was asked for: how many at least."""

HEARTBEAT = "CAPIBARA_HEARTBEAT_SECONDS"
"""After how many seconds without a sign of life a process counts as dead, which ends the others."""

# Between machines nothing else tells of a process that was killed: the others would wait for it in a collective
# operation, or in a barrier of a checkpoint. JAX's own 100 s are more than a restart takes.
_HEARTBEAT = 20


@dataclass(frozen=True)
class Membership:
    """A process's place in a group of processes.

    Attributes:
      coordinator: ``host:port`` of process 0.
      count: number of processes.
      index: the number of this one, from 0.
    """

    coordinator: str
    count: int
    index: int

    def variables(self) -> dict[str, str]:
        """The environment variables that :func:`read_membership` reads."""
        return dict(zip(_NAMES[0], (self.coordinator, str(self.count), str(self.index)), strict=True))


def read_membership(environment: Mapping[str, str]) -> Membership | None:
    """Read a process's place from its environment variables; None if they do not give one.

    Raises:
      ConfigError: some of the variables of a kind are set and others are missing, or a value is invalid.
    """
    for names in _NAMES:
        given = {name: environment[name] for name in names if environment.get(name)}
        if not given:
            continue
        # JAX takes the others from the platform; without that or an address each process would train alone.
        by_jax = names[0] == "JAX_COORDINATOR_ADDRESS" and len(given) < len(names)
        if by_jax and (names[0] in given or described_by_platform(environment)):
            continue
        if missing := [name for name in names if name not in given]:
            raise ConfigError(
                f"the environment has {', '.join(given)}, but not {', '.join(missing)}. Set all three of "
                f"{', '.join(names)} for each process, or none of them to train in one process"
            )
        address, count, index = (given[name] for name in names)
        if not re.fullmatch(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:\[\]]+):[0-9]{1,5}", address):
            raise ConfigError(f"{names[0]}={address!r:.200}: expected host:port of process 0")
        numbers = [int(text) if re.fullmatch(r"[0-9]{1,6}", text) else -1 for text in (count, index)]
        if numbers[0] < 1:
            raise ConfigError(f"{names[1]}={count!r:.200}: expected the number of processes, from 1")
        if not 0 <= numbers[1] < numbers[0]:
            raise ConfigError(
                f"{names[2]}={index!r:.200}: expected the number of this process, 0 to {numbers[0] - 1}"
            )
        return Membership(address, numbers[0], numbers[1])
    return None


def may_be_fewer(environment: Mapping[str, str]) -> bool:
    """Whether the launcher of this process may have started fewer processes than the settings were made for."""
    return bool(environment.get(FEWEST))


def heartbeat_seconds(environment: Mapping[str, str]) -> int:
    """After how many seconds without a sign of life the other processes give one up: 20, or what the environment says.

    Raises:
      ConfigError: the variable is not an integer from 5 to 86400.
    """
    text = environment.get(HEARTBEAT) or str(_HEARTBEAT)
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 5 <= int(text) <= 86400:
        raise ConfigError(f"{HEARTBEAT}={text!r:.200}: expected seconds, an integer from 5 to 86400")
    return int(text)


def described_by_platform(environment: Mapping[str, str], system: str = "/") -> bool:
    """Whether the platform that started this process says that it belongs to several.

    ``jax.distributed.initialize()`` without arguments then finds the others.

    Args:
      environment: variables, such as ``os.environ``.
      system: the root of the file system in which a TPU's device files are looked for.
    """
    if environment.get("JAX_COORDINATOR_ADDRESS"):
        return True
    # The batch script of Slurm has tasks, too, but is not one of them: only a step has SLURM_STEP_NODELIST.
    slurm = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID")
    if all(environment.get(name) for name in slurm) and _above_one(environment.get("SLURM_NTASKS")):
        return True
    if environment.get("OMPI_MCA_orte_hnp_uri") and _above_one(environment.get("OMPI_COMM_WORLD_SIZE")):
        return True
    if not has_tpu(system):
        return False
    # GKE has them in the environment, a Cloud TPU machine in its metadata.
    hosts = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    slices = environment.get("MEGASCALE_NUM_SLICES")
    if "KUBERNETES_SERVICE_HOST" in environment or hosts:
        return "," in hosts or _above_one(slices)
    return "TPU_SKIP_MDS_QUERY" not in environment


def _above_one(text: str | None) -> bool:
    return text is not None and text.isdecimal() and int(text) > 1

"""Starting one program as several processes: on this machine, on a cluster, or by an engine that is there already."""

from __future__ import annotations

from capibara.launch.environment import (
    Membership,
    described_by_platform,
    heartbeat_seconds,
    may_be_fewer,
    read_membership,
)
from capibara.launch.jobset import jobset_manifest, to_yaml
from capibara.launch.memory import read_memory
from capibara.launch.supervisor import launch_processes

__all__ = [
    "Membership",
    "described_by_platform",
    "heartbeat_seconds",
    "jobset_manifest",
    "launch_processes",
    "may_be_fewer",
    "read_membership",
    "read_memory",
    "to_yaml",
]

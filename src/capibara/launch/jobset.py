"""A manifest for Kubernetes that starts a command as one process on each host of a TPU slice, or on several CPU nodes.

A JobSet (``jobset.x-k8s.io/v1alpha2``, https://jobset.sigs.k8s.io) is a group of jobs that start, fail and start again
together: what a training run needs, whose processes cannot go on without one another. Here it has one job, whose pods
are the processes. On GKE a node selector places them on a slice, one pod to a host, and GKE tells each of them which
host it is (:func:`capibara.launch.described_by_platform`); elsewhere the manifest does, with the names and numbers of
pods.

The manifest is a plain dict; :func:`to_yaml` writes it for ``kubectl apply -f``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from capibara.errors import ConfigError
from capibara.hardware import get_chip, parse_topology

__all__ = ["jobset_manifest", "to_yaml"]

_JOB = "train"
# What YAML reads as something else than text, in any case.
_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "y", "n"})
_PORT = 8476
_INDEX = "batch.kubernetes.io/job-completion-index"
# A pod is called NAME-train-0-INDEX-abcde, and names have at most 63 characters.
_LONGEST_NAME = 40


def jobset_manifest(
    name: str,
    command: Sequence[str],
    *,
    image: str,
    topology: str | None = None,
    processes: int | None = None,
    volumes: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
    namespace: str | None = None,
    service_account: str | None = None,
    spot: bool = False,
    max_restarts: int = 10,
    grace_seconds: int = 120,
) -> dict[str, Any]:
    """Describe a run as a JobSet.

    Args:
      name: of the JobSet; lowercase letters, digits and dashes.
      command: program and arguments of every process.
      image: the container image, in which Capibara is installed.
      topology: a TPU slice of GKE, such as ``"v5e:4x4"``; None: CPU nodes.
      processes: without a topology, how many. With one it follows from it: one for each host.
      volumes: path → persistent volume claim. The folder of the run has to be on one, which all pods share.
      environment: variables of the processes.
      namespace, service_account: of the pods; None: the defaults.
      spot: run on spot nodes of GKE, which may be taken away.
      max_restarts: how often all pods are started again after one has failed.
      grace_seconds: from SIGTERM to SIGKILL: enough to save a checkpoint.

    Raises:
      ConfigError: an argument is invalid; TopologyError: the topology is unknown.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"jobset: got the name {name!r:.80}, expected at most {_LONGEST_NAME} lowercase letters, digits and "
            "dashes, a letter first"
        )
    if not command or not image or any(character.isspace() for character in image):
        raise ConfigError(f"jobset: got command={list(command)!r:.80}, image={image!r:.80}; both are needed")
    for what, number in (("max_restarts", max_restarts), ("grace_seconds", grace_seconds)):
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**31:
            raise ConfigError(f"jobset: {what}={number!r}: expected an integer from 0")
    if wrong := [key for key in environment or {} if not re.fullmatch(r"[-._a-zA-Z][-._a-zA-Z0-9]*", key)]:
        raise ConfigError(f"jobset: environment: got {wrong[0]!r:.80}, expected a variable's name")
    variables: list[dict[str, Any]] = [
        {"name": key, "value": value} for key, value in sorted((environment or {}).items())
    ]
    selector: dict[str, str] = {}
    container: dict[str, Any] = {"name": _JOB, "image": image, "command": list(command)}
    if topology is None:
        if isinstance(processes, bool) or not isinstance(processes, int) or not 1 <= processes <= 4096:
            raise ConfigError(f"jobset: processes={processes!r}: expected an integer from 1, or a topology")
        count = processes
        variables += [
            {"name": "CAPIBARA_COORDINATOR", "value": f"{name}-{_JOB}-0-0.{name}:{_PORT}"},
            {"name": "CAPIBARA_NUM_PROCESSES", "value": str(count)},
            {
                "name": "CAPIBARA_PROCESS_ID",
                "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{_INDEX}']"}},
            },
        ]
    else:
        if processes is not None:
            raise ConfigError(
                "jobset: with a topology the number of processes is that of its hosts. Leave it out"
            )
        count, chips, selector = _hosts(topology)
        container["resources"] = {kind: {"google.com/tpu": str(chips)} for kind in ("requests", "limits")}
    if variables:
        container["env"] = variables
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_seconds,
        "containers": [container],
    }
    if spot:
        selector["cloud.google.com/gke-spot"] = "true"
        pod["tolerations"] = [
            {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
        ]
    if selector:
        pod["nodeSelector"] = selector
    if service_account is not None:
        pod["serviceAccountName"] = service_account
    if volumes:
        if wrong := [path for path in volumes if not path.startswith("/") or ":" in path]:
            raise ConfigError(
                f"jobset: volumes: got the path {wrong[0]!r:.80}, expected an absolute one without ':'"
            )
        numbered = [(f"volume-{n}", path, claim) for n, (path, claim) in enumerate(volumes.items())]
        container["volumeMounts"] = [{"name": own, "mountPath": path} for own, path, _ in numbered]
        pod["volumes"] = [
            {"name": own, "persistentVolumeClaim": {"claimName": claim}} for own, _, claim in numbered
        ]
    job = {
        "parallelism": count,
        "completions": count,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    metadata: dict[str, Any] = {"name": name}
    if namespace is not None:
        metadata["namespace"] = namespace
    if topology is not None:
        # All pods on the nodes of one slice, which are one node pool.
        metadata["annotations"] = {
            "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
        }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": max_restarts},
            "replicatedJobs": [{"name": _JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _hosts(text: str) -> tuple[int, int, dict[str, str]]:
    """Of a slice the number of hosts, the chips of each, and the labels of its nodes."""
    topology = parse_topology(text)
    if topology.generation is None or len(topology.shape) < 2:
        raise ConfigError(
            f"jobset: topology={text!r:.80}: GKE needs a generation and a grid, such as v5e:4x4 or v4:2x2x4"
        )
    chip = get_chip(topology.generation)
    if chip.gke_accelerator is None or chip.chips_per_host is None or chip.most_chips_on_one_host is None:
        raise ConfigError(
            f"jobset: topology={text!r:.80}: GKE has no {chip.title}. Expected v4, v5e, v5p, v6e or v7x"
        )
    dims = 2 if topology.generation in ("v5e", "v6e") else 3
    if len(topology.shape) != dims:
        raise ConfigError(f"jobset: topology={text!r:.80}: a slice of {topology.generation} has {dims} axes")
    chips = topology.num_chips
    each = chips if chips <= chip.most_chips_on_one_host else chip.chips_per_host
    if chips % each:
        raise ConfigError(
            f"jobset: topology={text!r:.80}: {chips} chips are not a multiple of {each}, those of a host"
        )
    grid = "x".join(map(str, topology.shape))
    labels = {"gke-tpu-accelerator": chip.gke_accelerator, "gke-tpu-topology": grid}
    return chips // each, each, {f"cloud.google.com/{key}": value for key, value in labels.items()}


def _scalar(value: Any) -> str:
    # Not as JSON escapes them: YAML knows no pairs of surrogates.
    text = json.dumps(value, ensure_ascii=False)
    return re.sub(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]", lambda one: f"\\u{ord(one[0]):04x}", text)


def to_yaml(value: Any, indent: int = 0) -> str:
    """YAML of a manifest: dicts and lists in blocks, scalars as JSON writes them, which YAML 1.2 reads."""
    space = "  " * indent
    if isinstance(value, dict) and value:
        return "".join(f"{space}{_key(key)}:{_nested(one, indent)}" for key, one in value.items())
    if isinstance(value, list) and value:
        lines = []
        for one in value:
            text = (
                to_yaml(one, indent + 1)
                if isinstance(one, dict | list) and one
                else f"{space}  {_scalar(one)}\n"
            )
            lines.append(f"{space}- {text[len(space) + 2 :]}")
        return "".join(lines)
    return f"{space}{_scalar(value)}\n"


def _nested(value: Any, indent: int) -> str:
    if isinstance(value, dict | list) and value:
        return "\n" + to_yaml(value, indent + 1)
    return f" {_scalar(value)}\n"


def _key(key: str) -> str:
    plain = re.fullmatch(r"[A-Za-z][-A-Za-z0-9_./]*", key) and key.lower() not in _WORDS
    return key if plain else _scalar(key)

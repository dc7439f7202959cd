"""The manifest has the structure that the published schemas ask for, and says what was asked for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from capibara.cli import main
from capibara.errors import CapibaraError
from capibara.hardware import get_chip, list_chips
from capibara.launch import jobset_manifest, read_membership, to_yaml

# What these manifests use of the schema that JobSet publishes (config/components/crd in kubernetes-sigs/jobset,
# v1alpha2), which has batch/v1 and core/v1 in it. A dict has these keys and no others, those with "!" always; a list
# has elements of this kind; a dict of one key "*" has any keys.
STRING, INTEGER, BOOLEAN = str, int, bool
NAMES = {"*": STRING}
POD = {
    "restartPolicy!": STRING,
    "terminationGracePeriodSeconds": INTEGER,
    "nodeSelector": NAMES,
    "serviceAccountName": STRING,
    "tolerations": [{"key": STRING, "operator": STRING, "value": STRING, "effect": STRING}],
    "volumes": [{"name!": STRING, "persistentVolumeClaim": {"claimName!": STRING, "readOnly": BOOLEAN}}],
    "containers!": [
        {
            "name!": STRING,
            "image": STRING,
            "command": [STRING],
            "env": [{"name!": STRING, "value": STRING, "valueFrom": {"fieldRef": {"fieldPath!": STRING}}}],
            "resources": {"requests": NAMES, "limits": NAMES},
            "volumeMounts": [{"name!": STRING, "mountPath!": STRING}],
        }
    ],
}
JOB = {
    "parallelism": INTEGER,
    "completions": INTEGER,
    "completionMode": STRING,
    "backoffLimit": INTEGER,
    "template!": {"spec": POD},
}
JOBSET = {
    "apiVersion": STRING,
    "kind": STRING,
    "metadata": {"name": STRING, "namespace": STRING, "annotations": NAMES},
    "spec": {
        "network": {"enableDNSHostnames": BOOLEAN, "publishNotReadyAddresses": BOOLEAN},
        "failurePolicy": {"maxRestarts": INTEGER},
        "replicatedJobs": [{"name!": STRING, "replicas": INTEGER, "template!": {"spec": JOB}}],
    },
}


def check(value: Any, schema: Any, path: str = "") -> None:
    if isinstance(schema, dict):
        assert isinstance(value, dict), path
        if "*" in schema:
            for key, one in value.items():
                check(one, schema["*"], f"{path}.{key}")
            return
        known = {key.rstrip("!"): one for key, one in schema.items()}
        assert value.keys() <= known.keys(), path
        assert {key[:-1] for key in schema if key.endswith("!")} <= value.keys(), path
        for key, one in value.items():
            check(one, known[key], f"{path}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), path
        for number, one in enumerate(value):
            check(one, schema[0], f"{path}[{number}]")
    else:
        assert type(value) is schema, path


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


EVERYTHING: dict[str, Any] = {
    "image": "registry/capibara:1",
    "volumes": {"/runs": "runs", "/data": "texts"},
    "environment": {"B": "2", "A": "x=y"},
    "namespace": "team",
    "service_account": "trainer",
    "spot": True,
    "max_restarts": 3,
}


# Hosts and chips by the tables of the Cloud TPU documentation.
@pytest.mark.parametrize(
    ("topology", "hosts", "chips", "accelerator"),
    [
        ("v4:2x2x1", 1, 4, "tpu-v4-podslice"),
        ("v4:2x2x4", 4, 4, "tpu-v4-podslice"),
        ("v5e:1x1", 1, 1, "tpu-v5-lite-podslice"),
        ("v5e:2x4", 1, 8, "tpu-v5-lite-podslice"),
        ("v5e:4x4", 4, 4, "tpu-v5-lite-podslice"),
        ("v5p:4x4x4", 16, 4, "tpu-v5p-slice"),
        ("v6e:16x16", 64, 4, "tpu-v6e-slice"),
        ("tpu7x:2x2x2", 2, 4, "tpu7x"),
    ],
)
def test_one_pod_on_each_host_of_a_slice(topology: str, hosts: int, chips: int, accelerator: str) -> None:
    manifest = jobset_manifest("run", ["capibara", "train"], topology=topology, **EVERYTHING)
    check(manifest, JOBSET)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["parallelism"], job["completions"], job["backoffLimit"]) == (hosts, hosts, 0)
    assert job["completionMode"] == "Indexed"
    pod = pod_of(manifest)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology.partition(":")[2],
        "cloud.google.com/gke-spot": "true",
    }
    (container,) = pod["containers"]
    assert (
        container["resources"]["limits"]
        == container["resources"]["requests"]
        == {"google.com/tpu": str(chips)}
    )
    assert container["env"] == [{"name": "A", "value": "x=y"}, {"name": "B", "value": "2"}]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    claims = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]}
    assert {mounts[name]: claim for name, claim in claims.items()} == EVERYTHING["volumes"]
    assert manifest["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }


def test_pods_without_tpus_are_told_their_place() -> None:
    manifest = jobset_manifest("run", ["capibara", "train"], image="i", processes=3)
    check(manifest, JOBSET)
    assert "annotations" not in manifest["metadata"]
    assert "nodeSelector" not in pod_of(manifest)
    (container,) = pod_of(manifest)["containers"]
    given = {one["name"]: one.get("value") for one in container["env"]}
    source = next(one["valueFrom"] for one in container["env"] if "valueFrom" in one)
    assert (
        source["fieldRef"]["fieldPath"] == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    )
    place = read_membership({**given, "CAPIBARA_PROCESS_ID": "2"})  # as Kubernetes fills it in
    assert place is not None
    assert (place.count, place.index) == (3, 2)
    # NAME of the set, of the job, of its replica, of the pod; the set's own name is the network's.
    assert place.coordinator == "run-train-0-0.run:8476"


def test_every_tpu_that_gke_has_is_in_the_catalogue() -> None:
    named = {chip.name for chip in list_chips() if chip.gke_accelerator}
    assert named == {"tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x"}
    assert len({get_chip(name).gke_accelerator for name in named}) == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "Run"}, "'Run'"),
        ({"name": "1run"}, "a letter first"),
        ({"name": "r" * 41}, "at most 40"),
        ({"command": []}, "command=[]"),
        ({"image": ""}, "image=''"),
        ({"image": "a b"}, "image='a b'"),
        ({"topology": "4x4"}, "needs a generation"),
        ({"topology": "v5e-16"}, "needs a generation and a grid"),
        ({"topology": "v3:4x4"}, "no Google TPU v3"),
        ({"topology": "v4:4x4"}, "3 axes"),
        ({"topology": "v5e:2x2x2"}, "2 axes"),
        ({"topology": "v4:1x1x5"}, "not a multiple of 4"),
        ({"topology": None}, "processes=None"),
        ({"topology": None, "processes": 0}, "processes=0"),
        ({"processes": 2}, "Leave it out"),
        ({"volumes": {"runs": "claim"}}, "absolute"),
        ({"environment": {"A B": "c"}}, "'A B'"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"grace_seconds": True}, "grace_seconds=True"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], words: str) -> None:
    arguments = {"name": "run", "command": ["x"], "image": "i", "topology": "v5e:4x4", **change}
    with pytest.raises(CapibaraError) as error:
        jobset_manifest(arguments.pop("name"), arguments.pop("command"), **arguments)
    assert words in str(error.value)


def test_the_command_line_writes_what_the_function_gives(capsys: pytest.CaptureFixture[str]) -> None:
    yaml = pytest.importorskip("yaml")
    line = (
        "launch --jobset run --image registry/capibara:1 --topology v5e:4x4 --volume runs:/runs --volume texts:/data "
        "--env B=2 --env A=x=y --namespace team --service-account trainer --spot --restarts 3 -- train /data --fresh"
    )
    assert main(line.split()) == 0
    wanted = jobset_manifest(
        "run", ["capibara", "train", "/data", "--fresh"], topology="v5e:4x4", **EVERYTHING
    )
    assert yaml.safe_load(capsys.readouterr().out) == wanted
    assert main(line.replace("--spot", "--spot --grace 600").split()) == 0
    longer = yaml.safe_load(capsys.readouterr().out)
    assert "terminationGracePeriodSeconds: 600" in to_yaml(longer)
    assert "terminationGracePeriodSeconds: 120" in to_yaml(wanted)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--jobset run -n 2 -- train", "--image: got none"),
        ("--jobset run -n 2 --image i --devices 2 -- train", "--devices"),
        ("--jobset run -n 2 --image i --volume runs -- train", "--volume: got 'runs'"),
        ("--jobset run -n 2 --image i --grace 0.5 -- train", "--grace: got 0.5"),
        ("--jobset run -n 2 --image i --grace -1 -- train", "grace_seconds=-1"),
        ("--jobset run -n 2 --image i --env A -- train", "--env: got 'A'"),
        ("-n 2 --topology v5e:4x4 -- train", "--topology is for a manifest"),
        ("-n 2 --service-account a -- train", "--service-account is for a manifest"),
    ],
)
def test_wrong_command_lines_are_refused(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *line.split()]) == 2
    assert words in capsys.readouterr().err


TEXT = st.text(st.characters(codec="utf-8"))
KEYS = st.from_regex(r"[a-z][a-zA-Z0-9./-]{0,20}", fullmatch=True) | TEXT
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**31), 2**31) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=12,
)


@given(VALUES)
@example({"NULL": None, "on": [{"y": {}}, []], "a": {"b": [[1], []]}})
def test_yaml_is_read_back(value: Any) -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load(to_yaml(value)) == value

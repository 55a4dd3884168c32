"""Manifests for Kubernetes say what the queues and jobs say, in fields that Kueue and KubeRay have."""

import json
import os
import re
from pathlib import Path

import pytest
import yaml
from ray.serve.config import gRPCOptions

from rayrec.jobs.job import Job, Size
from rayrec.jobs.kubernetes import (
    HEAD_GROUP,
    NODE_GROUP_LABEL,
    NODE_LABEL,
    KubernetesConfig,
    check_alone,
    job_manifests,
    job_name,
    queue_manifests,
    service_manifests,
    write_manifests,
)
from rayrec.jobs.ledger import Command, Ledger
from rayrec.jobs.queues import QueuesConfig
from rayrec.pipelines.cluster.placement import ActorGroup, Node
from rayrec.platform.errors import InputError
from rayrec.serve.config.serve import ServeConfig
from rayrec.serve.on_ray.rpc import grpc_options
from tests.cli.commands import answer, refused

CRDS = os.environ.get("RAYREC_CRD_FOLDER")

QUEUES = QueuesConfig.parse(
    {
        "cohorts": [
            {"name": "research", "parent": "all", "quotas": {"GPU": {"nominal": 2, "lending_limit": 1}}},
            {"name": "all", "weight": 2},
        ],
        "queues": [
            {
                "name": "team-a",
                "cohort": "research",
                "cells": [{"resources": {"GPU": 8, "CPU": 64}, "count": 2, "within": "rack"}],
                "quotas": {"GPU": {"borrowing_limit": 8, "lending_limit": 4}},
                "preemption": {"borrow_within_cohort": "LowerPriority", "max_priority_threshold": 5},
            },
            {"name": "team-b", "cohort": "research", "quotas": {"NPU": {"nominal": 4}}, "weight": 0.5},
            {"name": "alone", "quotas": {"CPU": {"nominal": 2.5}}},
        ],
    }
)
SETTINGS = KubernetesConfig(
    namespace="models", volume_claim="runs", memory_per_cpu="4Gi", node_labels={"pool": "h100"}
)


def group(stage, count, **resources):
    return ActorGroup(stage, f"placement.{stage}", count, resources, {})


def training(**changes):
    sizes = tuple(
        Size(
            (
                group("parameter_server", 2, CPU=1.0),
                group("trainer", trainers, CPU=4.0, GPU=1.0, disk=2.0),
            ),
            trainers / 4,
        )
        for trainers in (4, 3, 2)
    )
    return Job(
        **{"id": "Run_7", "queue": "team-a", "sizes": sizes, "submitted_at": 0.0, "kind": "train"} | changes
    )


TRAIN = Command(
    ("train", "configs/a b.yaml"), {"HF_HOME": "/shared/hf"}, "/shared/code", is_rayrec=True, run="/shared/r"
)
SERVICE = training(id="front", kind="service", sizes=(Size((group("replica", 3, CPU=2.0),)),), priority=-3)


def named(manifests, kind):
    return {each["metadata"]["name"]: each for each in manifests if each["kind"] == kind}


def all_manifests():
    job = job_manifests(training(priority=10), TRAIN, SETTINGS)
    plain = training(id="1+1", kind="other", sizes=(Size((group("command", 1, CPU=0.5),)),), queue="alone")
    program = Command(("python", "x.py"), holds_resources=True)
    other = job_manifests(plain, program, KubernetesConfig())
    service = service_manifests(SERVICE, {"run": "/shared/r", "port": 9000, "num_replicas": 3}, SETTINGS)
    return [*queue_manifests(QUEUES, SETTINGS), *job, *other, *service]


def test_queues_have_what_the_ledger_says():
    manifests = queue_manifests(QUEUES, SETTINGS)
    assert [each["kind"] for each in manifests] == [
        "ResourceFlavor",
        *["Cohort"] * 2,
        *["ClusterQueue"] * 3,
        *["LocalQueue"] * 3,
    ]
    spec = named(manifests, "ClusterQueue")["team-a"]["spec"]
    assert spec["cohortName"] == "research"
    assert spec["preemption"] == {
        "reclaimWithinCohort": "Any",
        "withinClusterQueue": "LowerPriority",
        "borrowWithinCohort": {"policy": "LowerPriority", "maxPriorityThreshold": 5},
    }
    (only,) = spec["resourceGroups"]
    (flavor,) = only["flavors"]
    assert {each["name"]: each for each in flavor["resources"]} == {
        "nvidia.com/gpu": {
            "name": "nvidia.com/gpu",
            "nominalQuota": "16",
            "borrowingLimit": "8",
            "lendingLimit": "4",
        },
        "cpu": {"name": "cpu", "nominalQuota": "128"},
        # NPUs of another queue of the cohort are not there: what a queue does not name, it may not borrow.
        # Kueue refuses jobs that ask for a resource without a quota.
        "memory": {
            "name": "memory",
            "nominalQuota": "1000000Gi",
            "borrowingLimit": "0",
            "lendingLimit": "0",
        },
    }
    assert only["coveredResources"] == [each["name"] for each in flavor["resources"]]
    alone = named(manifests, "ClusterQueue")["alone"]["spec"]
    assert "cohortName" not in alone
    assert alone["resourceGroups"][0]["flavors"][0]["resources"] == [
        {"name": "cpu", "nominalQuota": "2.5"},
        {"name": "memory", "nominalQuota": "1000000Gi"},
    ]
    assert named(manifests, "ClusterQueue")["team-b"]["spec"]["fairSharing"] == {"weight": "0.5"}
    cohort = named(manifests, "Cohort")["research"]["spec"]
    assert cohort["parentName"] == "all"
    assert cohort["resourceGroups"][0]["flavors"][0]["resources"] == [
        {"name": "nvidia.com/gpu", "nominalQuota": "2", "lendingLimit": "1"}
    ]
    local = named(manifests, "LocalQueue")["team-a"]
    assert (local["metadata"]["namespace"], local["spec"]) == ("models", {"clusterQueue": "team-a"})


def test_a_training_is_a_gang_of_pods_that_goes_on_where_it_was():
    priority, job = job_manifests(training(priority=10), TRAIN, SETTINGS)
    assert (priority["metadata"]["name"], priority["value"]) == ("rayrec-10", 10)
    assert job["metadata"] == {
        "name": job_name("Run_7"),
        "namespace": "models",
        "labels": {
            "kueue.x-k8s.io/queue-name": "team-a",
            "kueue.x-k8s.io/priority-class": "rayrec-10",
        },
    }
    spec = job["spec"]
    assert spec["suspend"] is True
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["entrypoint"] == (
        "cd /shared/code && python -m rayrec train 'configs/a b.yaml' --set pipeline.num_trainers=4 "
        "--run /shared/r --resume-if-begun"
    )
    assert yaml.safe_load(spec["runtimeEnvYAML"]) == {"env_vars": {"HF_HOME": "/shared/hf"}}
    servers, trainers = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert (servers["groupName"], servers["replicas"]) == ("parameter-server", 2)
    assert (trainers["replicas"], trainers["minReplicas"], trainers["maxReplicas"]) == (4, 4, 4)
    assert trainers["rayStartParams"] == {"resources": "'{\"disk\": 2}'"}
    assert trainers["labels"] == {NODE_LABEL: "team-a"}
    pod = trainers["template"]["spec"]
    (container,) = pod["containers"]
    asked = {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"}
    assert container["resources"] == {"requests": asked, "limits": asked}
    assert container["volumeMounts"] == [{"name": "shared", "mountPath": "/shared"}]
    assert pod["volumes"] == [{"name": "shared", "persistentVolumeClaim": {"claimName": "runs"}}]
    assert pod["nodeSelector"] == {"pool": "h100"}


def test_the_command_is_handed_to_ray_as_it_is():
    """KubeRay's default is a shell in a pod of its own, which would run what is behind `&&` itself."""
    _, job = job_manifests(training(), TRAIN, SETTINGS)
    assert " && " in job["spec"]["entrypoint"]
    assert job["spec"]["submissionMode"] == "HTTPMode"


def test_a_program_runs_in_the_pod_that_has_what_it_asks_for():
    asked = group("command", 1, CPU=2.0, GPU=1.0, NPU=2.0, disk=0.5, memory=0.0)
    program = training(kind="other", sizes=(Size((asked,)),))

    _, job = job_manifests(program, Command(("python", "x.py"), holds_resources=True), SETTINGS)
    assert (job["spec"]["entrypointNumCpus"], job["spec"]["entrypointNumGpus"]) == (2.0, 1.0)
    assert json.loads(job["spec"]["entrypointResources"]) == {"NPU": 2.0, "disk": 0.5}

    _, of_actors = job_manifests(program, Command(("python", "x.py")), SETTINGS)
    assert not [key for key in of_actors["spec"] if key.startswith("entrypoint") and key != "entrypoint"]


def test_what_kuberay_does_not_find_in_limits_ray_is_told():
    sizes = (Size((group("trainer", 2, CPU=1.0, NPU=8.0),)),)
    _, job = job_manifests(training(sizes=sizes), TRAIN, KubernetesConfig())
    (trainers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert trainers["rayStartParams"] == {"resources": "'{\"NPU\": 8}'"}
    (container,) = trainers["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"cpu": "1", "huawei.com/Ascend910": "8"}


@pytest.mark.parametrize("job_id", ["a" * 80, "7", "-x.y_Z-", "A" * 35 + "-b"])
def test_names_are_such_as_kuberay_takes(job_id):
    _, job = job_manifests(training(id=job_id), TRAIN, SETTINGS)
    name = job["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
    assert len(name) <= 47


def test_a_service_is_the_application_with_its_settings():
    arguments = {"run": "/shared/r", "port": 9000, "num_replicas": 3}
    _, service = service_manifests(SERVICE, arguments, SETTINGS)
    assert service["kind"] == "RayService"
    assert service["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "rayrec-minus-3"
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert serve["http_options"] == {"host": "0.0.0.0", "port": 9000}
    (application,) = serve["applications"]
    assert application["args"] == arguments
    module, name = application["import_path"].split(":")
    assert callable(getattr(__import__(module, fromlist=[name]), name))
    assert "grpc_options" not in serve


def test_a_service_over_grpc_tells_serve_its_calls():
    arguments = {"run": "/shared/r", "grpc_port": 9001}
    _, service = service_manifests(SERVICE, arguments, SETTINGS)
    options = gRPCOptions(**yaml.safe_load(service["spec"]["serveConfigV2"])["grpc_options"])
    ours = grpc_options(ServeConfig(grpc_port=9001))
    assert options == ours


# A small check of what is used, which needs no schemas. Those are 2.5 MB.
QUANTITY = re.compile(r"^\d+(\.\d+)?([kMGTPE]i?)?$")
NAME = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
FIELDS = {
    "ResourceFlavor": ({"nodeLabels"}, set()),
    "Cohort": ({"parentName", "resourceGroups", "fairSharing"}, set()),
    "LocalQueue": ({"clusterQueue"}, {"clusterQueue"}),
    "ClusterQueue": (
        {
            "cohortName",
            "fairSharing",
            "namespaceSelector",
            "preemption",
            "queueingStrategy",
            "resourceGroups",
        },
        {"resourceGroups"},
    ),
    "RayJob": (
        {
            "suspend",
            "entrypoint",
            "entrypointNumCpus",
            "entrypointNumGpus",
            "entrypointResources",
            "submissionMode",
            "shutdownAfterJobFinishes",
            "backoffLimit",
            "runtimeEnvYAML",
            "rayClusterSpec",
        },
        {"entrypoint", "rayClusterSpec"},
    ),
    "RayService": ({"suspend", "serveConfigV2", "rayClusterConfig"}, {"serveConfigV2", "rayClusterConfig"}),
}


def problems_of(manifest):
    """What a server of Kubernetes would refuse, as far as fields are concerned that are used here."""
    kind, metadata = manifest["kind"], manifest["metadata"]
    version = "ray.io/v1" if kind.startswith("Ray") else "kueue.x-k8s.io/v1beta2"
    if manifest["apiVersion"] != version:
        yield "version"
    if not NAME.match(metadata["name"]) or len(metadata["name"]) > 63:
        yield "name"
    has_namespace = kind in ("LocalQueue", "RayJob", "RayService")
    if ("namespace" in metadata) != has_namespace:
        yield "namespace"
    if kind == "WorkloadPriorityClass":
        if not isinstance(manifest["value"], int):
            yield "value"
        return
    may, must = FIELDS[kind]
    spec = manifest["spec"]
    if not must <= set(spec) <= may:
        yield "fields"
    for group in spec.get("resourceGroups", ()):
        for flavor in group["flavors"]:
            if [each["name"] for each in flavor["resources"]] != group["coveredResources"]:
                yield "covered resources"
            for each in flavor["resources"]:
                quantities = [value for key, value in each.items() if key != "name"]
                if not all(isinstance(value, str) and QUANTITY.match(value) for value in quantities):
                    yield "quantity"
                if "borrowingLimit" in each and not (spec.get("cohortName") or spec.get("parentName")):
                    yield "borrowing"
    cluster = spec.get("rayClusterSpec") or spec.get("rayClusterConfig")
    if cluster is None:
        return
    if len(cluster["workerGroupSpecs"]) > 17:
        yield "groups"
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        if "labels" in group["rayStartParams"]:  # KubeRay wants them beside it
            yield "labels"
        if not all(isinstance(value, str) for value in group["rayStartParams"].values()):
            yield "start parameters"
        for container in group["template"]["spec"]["containers"]:
            if container["resources"]["requests"] != container["resources"]["limits"]:
                yield "resources"  # as extended resources have to be, and as Ray counts CPUs
    for group in cluster["workerGroupSpecs"]:
        if not {"groupName", "minReplicas", "maxReplicas", "template"} <= set(group):
            yield "group"
        if not NAME.match(group["groupName"]):
            yield "group name"


def test_only_fields_that_there_are_are_used():
    manifests = all_manifests()
    assert {each["kind"] for each in manifests} == {*FIELDS, "WorkloadPriorityClass"}
    assert [(each["kind"], list(problems_of(each))) for each in manifests if list(problems_of(each))] == []


@pytest.mark.parametrize(
    ("kind", "change", "problem"),
    [
        ("ClusterQueue", {"cohort": "x"}, "fields"),  # its name in v1beta1
        ("LocalQueue", {"clusterQueue": None, "cluster": "x"}, "fields"),
        ("RayJob", {"clusterSelector": {}}, "fields"),
    ],
)
def test_the_small_check_notices_fields_that_there_are_not(kind, change, problem):
    manifest = next(each for each in all_manifests() if each["kind"] == kind)
    spec = {key: value for key, value in (manifest["spec"] | change).items() if value is not None}
    assert problem in list(problems_of(manifest | {"spec": spec}))


@pytest.mark.skipif(CRDS is None, reason="RAYREC_CRD_FOLDER does not name a folder with published schemas")
@pytest.mark.parametrize(
    "manifest", all_manifests(), ids=lambda each: f"{each['kind']}-{each['metadata']['name']}"
)
def test_published_schemas_take_the_manifests(manifest):
    """Set RAYREC_CRD_FOLDER to a folder with config/components/crd/bases/*.yaml of kubernetes-sigs/kueue and
    helm-chart/kuberay-operator/crds/*.yaml of ray-project/kuberay.

    It was run on 2026-11-26 with Kueue at ff69552e (v0.20.0-devel, 377 commits after its tag, 2026-08-22) and
    KubeRay at feeaf72f (v1.7.0-rc.0, 5 commits after its tag, 2026-08-19).
    """
    jsonschema = pytest.importorskip("jsonschema")
    errors = jsonschema.Draft202012Validator(schema_of(manifest, Path(CRDS))).iter_errors(manifest)
    assert [f"{error.json_path}: {error.message[:200]}" for error in errors] == []


@pytest.mark.skipif(CRDS is None, reason="RAYREC_CRD_FOLDER does not name a folder with published schemas")
def test_published_schemas_refuse_the_name_that_a_field_had_before():
    jsonschema = pytest.importorskip("jsonschema")
    manifest = next(each for each in all_manifests() if each["kind"] == "ClusterQueue")
    manifest = manifest | {"spec": manifest["spec"] | {"cohort": "x"}}
    errors = jsonschema.Draft202012Validator(schema_of(manifest, Path(CRDS))).iter_errors(manifest)
    assert any("'cohort' was unexpected" in error.message for error in errors)


def schema_of(manifest, folder):
    """The schema of a kind, which refuses what it does not name: a server of Kubernetes would drop it."""
    group, version = manifest["apiVersion"].split("/")
    for path in sorted(folder.rglob("*.yaml")):
        if not path.name.startswith(f"{group}_"):
            continue
        definition = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        if definition["spec"]["names"]["kind"] == manifest["kind"]:
            (found,) = (each for each in definition["spec"]["versions"] if each["name"] == version)
            return closed(found["schema"]["openAPIV3Schema"])
    raise AssertionError(f"{folder}: no schema of {manifest['kind']}")


def closed(schema):
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    changed = {key: closed(value) for key, value in schema.items()}
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not is_open:
        changed["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        changed.pop("type", None)
    return changed


@pytest.mark.parametrize(
    ("job", "command", "settings", "sentence"),
    [
        (training(id="---"), TRAIN, SETTINGS, "no name of Kubernetes can be made"),
        (SERVICE, TRAIN, SETTINGS, "a service is no RayJob"),
        (
            training(sizes=(Size((group("trainer", 1, GPU=0.5),)),)),
            TRAIN,
            SETTINGS,
            "each of its trainer asks for 0.5 GPU, and Kubernetes gives whole cards; ask for 1 or none",
        ),
        (
            training(),
            Command(("train",), working_dir="gcs://package.zip", run="/r"),
            SETTINGS,
            "the package gcs://package.zip, which is Ray's",
        ),
        (
            training(),
            TRAIN,
            KubernetesConfig(resources={"CPU": "cpu"}),
            "Kubernetes has no name for Ray's resource 'GPU'",
        ),
        (
            training(
                sizes=(Size(tuple(group(f"trainer{n}" if n else "trainer", 1, CPU=1) for n in range(18))),)
            ),
            TRAIN,
            SETTINGS,
            "18 stages, and Kueue admits at most 17 groups",
        ),
    ],
)
def test_what_kubernetes_cannot_have_is_refused(job, command, settings, sentence):
    with pytest.raises(InputError, match=re.escape(sentence)):
        job_manifests(job, command, settings)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"namespace": "Team A"}, "expected lower-case letters"),
        ({"memory_per_cpu": "4 GB"}, "memory_per_cpu"),
        ({"images": "x"}, "images"),
    ],
)
def test_settings_that_are_none_are_refused(settings, sentence):
    with pytest.raises(InputError, match=sentence):
        KubernetesConfig.parse(settings)


def test_manifests_are_not_mixed_with_others(tmp_path):
    write_manifests(tmp_path, {"queues": [{"a": 1}, {"b": 2}]})
    write_manifests(tmp_path, {"queues": [{"a": 1}, {"b": 2}]})
    assert list(yaml.safe_load_all((tmp_path / "queues.yaml").read_text())) == [{"a": 1}, {"b": 2}]
    with pytest.raises(InputError, match=r"has queues\.yaml, which is none of these"):
        write_manifests(tmp_path, {"other": []})


IN_A_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "RAY_CLUSTER_NAME": "c"}


def test_no_two_jobs_have_one_name():
    long = "a-run-with-a-name-that-is-longer-than-kubernetes-takes"
    ids = [f"{long}-0a1b2c", f"{long}-0a1b2d", "a.b", "a-b", "A-b", "1", "job-1"]
    names = [job_name(each) for each in ids]
    assert len(set(names)) == len(ids)
    assert all(re.fullmatch(r"[a-z]([a-z0-9-]{0,41}[a-z0-9])?", each) for each in names)
    assert job_name("a-b") == "a-b"


def test_a_cluster_that_kueue_has_admitted_is_refused():
    nodes = [Node("1", "10.0.0.1", {NODE_LABEL: "team-a", NODE_GROUP_LABEL: HEAD_GROUP}, {}, {})]
    with pytest.raises(InputError, match="its queue is 'team-a'"):
        check_alone(nodes, {"RAYREC_WITHOUT_KUEUE": "1"})


@pytest.mark.parametrize(
    ("labels", "environment"),
    [({NODE_GROUP_LABEL: HEAD_GROUP}, {}), ({}, IN_A_POD)],
)
def test_a_cluster_of_kuberay_is_refused_until_somebody_says_that_there_is_no_kueue(labels, environment):
    nodes = [Node("1", "10.0.0.1", labels, {}, {})]
    with pytest.raises(InputError, match="this Ray cluster is KubeRay's"):
        check_alone(nodes, environment)
    check_alone(nodes, environment | {"RAYREC_WITHOUT_KUEUE": "1"})


@pytest.mark.parametrize(
    ("labels", "environment"),
    [
        ({}, {}),
        ({NODE_GROUP_LABEL: "ray.head.default"}, {}),  # Ray's own autoscaler on machines
        ({}, {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}),  # in a pod, with a cluster elsewhere
        ({}, {"RAY_CLUSTER_NAME": "c"}),
    ],
)
def test_other_clusters_are_taken(labels, environment):
    check_alone([Node("1", "10.0.0.1", labels, {}, {})], environment)


def test_the_command_writes_queues_and_jobs_that_are_not_over(tmp_path):
    path = tmp_path / "jobs.db"
    Ledger(path).close()
    assert "there is no queue" in refused("queue", "manifests", "--kueue", tmp_path / "out", "--ledger", path)
    ledger = Ledger(path)
    argv = ("serve", "runs/a", "--max-replicas", "3", "--admission", "limits.yaml", "--port", "9000")
    (tmp_path / "limits.yaml").write_text("service: {concurrency: 5}\n")
    with ledger.change():
        for queue in QUEUES.queues:
            ledger.put_queue(queue)
        for cohort in QUEUES.cohorts:
            ledger.put_cohort(cohort)
        ledger.add(training(), TRAIN)
        ledger.add(SERVICE, Command(argv, working_dir=str(tmp_path), is_rayrec=True))
        ledger.add(training(id="over"), TRAIN)
        ledger.cancel("over", 1.0)
    written = answer("queue", "manifests", "--kueue", tmp_path / "out", "--ledger", path)
    assert sorted(written["files"]) == ["job-Run_7.yaml", "job-front.yaml", "queues.yaml"]
    _, service = yaml.safe_load_all((tmp_path / "out" / "job-front.yaml").read_text())
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    run = application["args"].pop("run")
    assert run == str(tmp_path / "runs" / "a")
    served = ServeConfig.parse(application["args"])
    assert (served.num_replicas, served.host, served.port) == (3, "0.0.0.0", 9000)
    assert served.admission.service.concurrency == 5
    assert not served.is_scaled

    (tmp_path / "limits.yaml").unlink()
    line = refused("queue", "manifests", "--kueue", tmp_path / "out", "--ledger", path)
    assert line.startswith(f"rayrec: job front: {tmp_path / 'limits.yaml'}: no such config file")
    json.dumps(application)

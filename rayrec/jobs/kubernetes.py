"""The same queues and jobs for Kubernetes: manifests for Kueue, which admits, and KubeRay, which runs.

    queues ─► ResourceFlavor, Cohort, ClusterQueue, LocalQueue      kueue.x-k8s.io/v1beta2
    jobs ───► WorkloadPriorityClass
         ├──► RayJob: a Ray cluster of its own for each, with a group of pods for every stage    ray.io/v1
         └──► RayService, of `rayrec serve`

Where Kueue admits, `rayrec queue run` does not: two queues would each give away what the other one has (see
`check_alone`). What Kueue has no words for is lost: cells are the sum of their resources, a training does not
shrink (Kueue stops all of it, and it begins again at its last snapshot), and there is no backfill by time.

Fields are those of the published schemas of Kueue 0.20 and KubeRay 1.7, against which a test holds them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, field_validator

from rayrec.jobs.job import Job
from rayrec.jobs.ledger import Command
from rayrec.jobs.queues import NAME, QueueConfig, QueuesConfig, ResourceQuota
from rayrec.jobs.runner import arguments_of
from rayrec.pipelines.cluster.placement import ActorGroup, Node
from rayrec.platform.config import Config
from rayrec.platform.devices import ACCELERATOR_RESOURCES, HOST
from rayrec.platform.errors import InputError

Manifest = dict[str, Any]

KUEUE, KUBERAY = "kueue.x-k8s.io/v1beta2", "ray.io/v1"
GRPC_SERVICER = "rayrec.serve.rpc.handlers.add_to_serve"
"""Tells Ray Serve's servers which calls there are."""
QUEUE_LABEL, PRIORITY_LABEL = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
NODE_LABEL = "rayrec.io/kueue-queue"
"""That nodes of Ray carry which these manifests make: the queue of Kueue that has admitted them. Kueue's own
label would make its integration of pods count them a second time."""
NODE_GROUP_LABEL, HEAD_GROUP = "ray.io/node-group", "headgroup"
"""KubeRay names the group of every pod in an environment variable, of which Ray makes this label."""
KUBERAY_VARIABLES = ("KUBERNETES_SERVICE_HOST", "RAY_CLUSTER_NAME")
"""Of every container in a pod, and of every container of KubeRay's."""
WITHOUT_KUEUE = "RAYREC_WITHOUT_KUEUE"
UNCOUNTED = "1000000"
"""Quota of what a queue does not count: Kueue refuses jobs that ask for a resource without a quota."""
PODS = "cpu", "memory"
MOST_GROUPS = 17
"""Groups of workers, in one workload of Kueue."""
MOST_OF_NAME, DIGITS = 43, 8
"""Characters of a job's name, of which KubeRay takes 47, and of the hash of an id that was changed for it."""
VOLUME = "shared"
QUANTITY = r"^\d+(\.\d+)?([kMGTPE]i?)?$"


class KubernetesConfig(Config):
    """What manifests need to know that the ledger does not."""

    namespace: str = "default"
    """Of jobs and their queues."""
    image: str = "rayrec:latest"
    """With Ray and rayrec, the same for all pods of a job."""
    ray_version: str = "2.60.0"
    """In the image."""
    python: str = "python"
    """Interpreter in the image."""
    head_cpus: float = Field(default=2.0, gt=0)
    """Of the head's pod, on which the command runs and no actor."""
    head_memory: str = Field(default="8Gi", pattern=QUANTITY)
    memory_per_cpu: str | None = Field(default=None, pattern=QUANTITY)
    """Of workers' pods; None: no pod of theirs says it."""
    volume_claim: str | None = None
    """PersistentVolumeClaim with data and runs, which all pods mount (ReadWriteMany). Without it, a job that
    was stopped has no snapshot to go on from."""
    mount_path: str = "/shared"
    service_account: str | None = None
    flavor: str = "default"
    """Name of the ResourceFlavor."""
    node_labels: dict[str, str] = Field(default_factory=dict)
    """Of the nodes of Kubernetes that the flavor stands for; none: of all."""
    resources: dict[str, str] = Field(
        default_factory=lambda: {"CPU": "cpu", "GPU": "nvidia.com/gpu", "NPU": "huawei.com/Ascend910"}
    )
    """Ray's name of a resource to that of Kubernetes."""

    @field_validator("namespace", "flavor")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not NAME.fullmatch(value):
            raise ValueError(f"expected lower-case letters, digits and '-', at most 63, got {value!r}")
        return value

    def resource(self, name: str) -> str:
        """
        Raises:
            InputError: Kubernetes has no name for it.
        """
        if name not in self.resources:
            raise InputError(
                f"resources: Kubernetes has no name for Ray's resource {name!r}; add it, as in "
                f"resources: {{{name}: example.com/{name.lower()}}}"
            )
        return self.resources[name]


def queue_manifests(queues: QueuesConfig, settings: KubernetesConfig) -> list[Manifest]:
    """A flavor, and the cohorts and queues, in the order in which they are to be made."""
    flavor: Manifest = {"nodeLabels": settings.node_labels} if settings.node_labels else {}
    found = [_object(KUEUE, "ResourceFlavor", settings.flavor, flavor)]
    for cohort in queues.cohorts:
        spec: Manifest = {} if cohort.parent is None else {"parentName": cohort.parent}
        if cohort.quotas:
            quotas = {settings.resource(name): each for name, each in cohort.quotas.items()}
            may_lend = cohort.parent is not None
            spec["resourceGroups"] = [_group(settings.flavor, quotas, may_lend)]
        found.append(_object(KUEUE, "Cohort", cohort.name, spec | _fair_sharing(cohort.weight)))
    for queue in queues.queues:
        found.append(_object(KUEUE, "ClusterQueue", queue.name, _cluster_queue(queue, settings)))
    for queue in queues.queues:
        found.append(
            _object(KUEUE, "LocalQueue", queue.name, {"clusterQueue": queue.name}, settings.namespace)
        )
    return found


def job_manifests(job: Job, command: Command, settings: KubernetesConfig) -> list[Manifest]:
    """A job as Ray's cluster of its own, with the first of its sizes, and its priority.

    Raises:
        InputError: it asks for something that Kubernetes cannot give, or is a service (`service_manifests`).
    """
    if job.kind == "service":
        raise InputError(f"job {job.id}: a service is no RayJob; give its settings to service_manifests")
    spec: Manifest = {
        # Kueue starts it. Without Kueue it would start at once, whatever the queues say.
        "suspend": True,
        "entrypoint": _entrypoint(job, command, settings),
        # The operator hands it to Ray. KubeRay's default is a shell in a pod of its own, which takes
        # `cd … && …` apart and runs the second half itself (kuberay's issue 3802).
        "submissionMode": "HTTPMode",
        **(_held(job) if command.holds_resources else {}),
        # Kueue refuses others: the cluster would hold what the queue has given.
        "shutdownAfterJobFinishes": True,
        "backoffLimit": command.retries,
        "rayClusterSpec": _cluster(job, settings),
    }
    if command.env:
        spec["runtimeEnvYAML"] = yaml.safe_dump({"env_vars": dict(command.env)})
    return [
        _priority(job),
        _queued(_object(KUBERAY, "RayJob", job_name(job.id), spec, settings.namespace), job),
    ]


def service_manifests(job: Job, arguments: Mapping[str, Any], settings: KubernetesConfig) -> list[Manifest]:
    """A service as RayService.

    Args:
        arguments: of `rayrec.serve.on_ray.serving.from_arguments`: the run, and settings that differ.
    """
    application = {
        "name": "rayrec",
        "import_path": "rayrec.serve.on_ray.serving:from_arguments",
        "route_prefix": "/",
        "args": dict(arguments),
    }
    config: Manifest = {"http_options": {"host": "0.0.0.0", "port": arguments.get("port", 8000)}}
    if (grpc_port := arguments.get("grpc_port")) is not None:
        config["grpc_options"] = {
            "port": grpc_port,
            "grpc_servicer_functions": [GRPC_SERVICER],
            "enable_reflection": False,
        }
    spec: Manifest = {
        "suspend": True,
        "serveConfigV2": yaml.safe_dump({**config, "applications": [application]}),
        "rayClusterConfig": _cluster(job, settings),
    }
    service = _object(KUBERAY, "RayService", job_name(job.id), spec, settings.namespace)
    return [_priority(job), _queued(service, job)]


def write_manifests(folder: Path, files: Mapping[str, Sequence[Manifest]]) -> list[Path]:
    """Write a file of YAML documents for each name.

    Raises:
        InputError: the folder has other files of YAML, which would be applied with these.
    """
    folder.mkdir(parents=True, exist_ok=True)
    others = sorted(path.name for path in folder.glob("*.yaml") if path.stem not in files)
    if others:
        raise InputError(
            f"{folder}: has {others[0]}, which is none of these manifests, and `kubectl apply -f {folder}` "
            "would apply it, too; name an empty folder"
        )
    paths = []
    for name, manifests in files.items():
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump_all(manifests, sort_keys=False))
        paths.append(path)
    return paths


def check_alone(nodes: Sequence[Node], environment: Mapping[str, str] = os.environ) -> None:
    """Refuse to admit jobs to a cluster to which Kueue does.

    Nodes that KubeRay has made do not say whether Kueue has admitted them, unless they come of the manifests
    above; so clusters of KubeRay are refused until somebody says that there is no Kueue.

    Args:
        nodes: of the Ray cluster.
        environment: of this process, which may run in one of its pods.

    Raises:
        InputError: Kueue admits there, or may.
    """
    queue = next((node.labels[NODE_LABEL] for node in nodes if NODE_LABEL in node.labels), None)
    if queue is not None:
        raise InputError(
            f"Kueue has admitted this Ray cluster (its queue is {queue!r}), and two queues on one cluster "
            "would give the same cards away twice; submit with `kubectl apply` what `rayrec queue manifests "
            "--kueue` writes"
        )
    is_kuberay = any(node.labels.get(NODE_GROUP_LABEL) == HEAD_GROUP for node in nodes)
    is_pod = all(environment.get(name) for name in KUBERAY_VARIABLES)
    if (is_kuberay or is_pod) and environment.get(WITHOUT_KUEUE) != "1":
        raise InputError(
            "this Ray cluster is KubeRay's, and Kueue may admit jobs to it, too; use `rayrec queue manifests "
            f"--kueue`, or set {WITHOUT_KUEUE}=1 if there is no Kueue"
        )


def _object(version: str, kind: str, name: str, spec: Manifest, namespace: str | None = None) -> Manifest:
    metadata = {"name": name} | ({} if namespace is None else {"namespace": namespace})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _cluster_queue(queue: QueueConfig, settings: KubernetesConfig) -> Manifest:
    may_borrow = queue.cohort is not None
    # Cards that it does not name are refused to it here, and by Kueue where there is no quota of them.
    quotas = {settings.resource(name): each for name, each in queue.all_quotas.items()}
    uncounted = [name for name in PODS if name not in quotas]
    group = _group(settings.flavor, quotas, may_borrow)
    group["coveredResources"] += uncounted
    for name in uncounted:
        # What is not counted is not lent: others may count it.
        limits = {"borrowingLimit": "0", "lendingLimit": "0"} if may_borrow else {}
        quantity = UNCOUNTED if name == "cpu" else f"{UNCOUNTED}Gi"
        group["flavors"][0]["resources"].append({"name": name, "nominalQuota": quantity, **limits})
    preemption = queue.preemption
    taken: Manifest = {
        "reclaimWithinCohort": preemption.reclaim_within_cohort,
        "withinClusterQueue": preemption.within_queue,
    }
    if preemption.borrow_within_cohort != "Never":
        borrowing: Manifest = {"policy": preemption.borrow_within_cohort}
        if preemption.max_priority_threshold is not None:
            borrowing["maxPriorityThreshold"] = preemption.max_priority_threshold
        taken["borrowWithinCohort"] = borrowing
    return {
        **({"cohortName": queue.cohort} if may_borrow else {}),
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.namespace}},
        "queueingStrategy": "BestEffortFIFO",
        "preemption": taken,
        "resourceGroups": [group],
        **_fair_sharing(queue.weight),
    }


def _group(flavor: str, quotas: Mapping[str, ResourceQuota], may_borrow: bool) -> Manifest:
    resources = []
    for name, quota in quotas.items():
        resource = {"name": name, "nominalQuota": _quantity(quota.nominal)}
        limits = {"borrowingLimit": quota.borrowing_limit, "lendingLimit": quota.lending_limit}
        given = {key: _quantity(each) for key, each in limits.items() if each is not None}
        resources.append(resource | (given if may_borrow else {}))
    return {"coveredResources": list(quotas), "flavors": [{"name": flavor, "resources": resources}]}


def _fair_sharing(weight: float) -> Manifest:
    return {} if weight == 1 else {"fairSharing": {"weight": _quantity(weight)}}


def _quantity(count: float) -> str:
    """Of Kubernetes, which counts thousandths."""
    return f"{count:.3f}".rstrip("0").rstrip(".")


def job_name(job_id: str) -> str:
    """Of an object of Kubernetes, short enough for what KubeRay makes of it, and different for each job."""
    name = re.sub(r"[^a-z0-9-]+", "-", job_id.lower()).strip("-")
    if not name:
        raise InputError(f"job {job_id!r}: no name of Kubernetes can be made of its id; submit it with --id")
    name = name if name[0].isalpha() else f"job-{name}"
    if name == job_id and len(name) <= MOST_OF_NAME:
        return name
    digest = hashlib.sha256(job_id.encode()).hexdigest()[:DIGITS]
    return f"{name[: MOST_OF_NAME - DIGITS - 1].strip('-')}-{digest}"


def _priority_name(priority: int) -> str:
    return f"rayrec-{'minus-' if priority < 0 else ''}{abs(priority)}"


def _priority(job: Job) -> Manifest:
    return {
        "apiVersion": KUEUE,
        "kind": "WorkloadPriorityClass",
        "metadata": {"name": _priority_name(job.priority)},
        "value": job.priority,
        "description": f"Priority {job.priority} of rayrec submit.",
    }


def _queued(manifest: Manifest, job: Job) -> Manifest:
    labels = {QUEUE_LABEL: job.queue, PRIORITY_LABEL: _priority_name(job.priority)}
    return {**manifest, "metadata": {**manifest["metadata"], "labels": labels}}


def _entrypoint(job: Job, command: Command, settings: KubernetesConfig) -> str:
    line = shlex.join(arguments_of(job, command, job.sizes[0], settings.python))
    if command.working_dir is None:
        return line
    if "://" in command.working_dir:
        raise InputError(
            f"job {job.id}: its working directory is the package {command.working_dir}, which is Ray's; "
            "submit it with a --working-dir that all pods see"
        )
    return f"cd {shlex.quote(command.working_dir)} && {line}"


def _held(job: Job) -> Manifest:
    """What the command itself takes. So it runs on the pod that has it, and not on the head."""
    (group,) = job.sizes[0].groups
    names = {HOST.ray_resource: "entrypointNumCpus", "GPU": "entrypointNumGpus"}
    asked = {name: count for name, count in sorted(group.resources.items()) if count}
    held: Manifest = {names[name]: count for name, count in asked.items() if name in names}
    others = {name: count for name, count in asked.items() if name not in names}
    return held | ({"entrypointResources": json.dumps(others)} if others else {})


def _cluster(job: Job, settings: KubernetesConfig) -> Manifest:
    """A head that runs the command, and one group of pods for each stage, a pod for each actor."""
    groups = [group for group in job.sizes[0].groups if group.count]
    if len(groups) > MOST_GROUPS:
        raise InputError(
            f"job {job.id}: it has {len(groups)} stages, and Kueue admits at most {MOST_GROUPS} groups of "
            "pods"
        )
    labels = {NODE_LABEL: job.queue}
    head = {"cpu": _quantity(settings.head_cpus), "memory": settings.head_memory}
    return {
        "rayVersion": settings.ray_version,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "labels": labels,
            "template": _pod("ray-head", head, settings),
        },
        "workerGroupSpecs": [
            {
                "groupName": group.stage.replace("_", "-"),
                "replicas": group.count,
                "minReplicas": group.count,
                "maxReplicas": group.count,
                "rayStartParams": {
                    name: text for name, text in _ray_start(group).items() if text is not None
                },
                "labels": labels,
                "template": _pod("ray-worker", dict(_requests(job, group, settings)), settings),
            }
            for group in groups
        ],
    }


def _ray_start(group: ActorGroup) -> dict[str, str | None]:
    """CPUs and GPUs are what the pod's limits say."""
    others = {
        name: count
        for name, count in group.resources.items()
        if name not in (HOST.ray_resource, "GPU") and count
    }
    text = None
    if others:  # in a shell, within quotes
        text = "'{" + ", ".join(f'"{name}": {count:g}' for name, count in sorted(others.items())) + "}'"
    return {"resources": text}


def _requests(job: Job, group: ActorGroup, settings: KubernetesConfig) -> Iterator[tuple[str, str]]:
    """Of the pod of one actor."""
    cpus = group.resources.get(HOST.ray_resource, 0.0)
    # Ray counts whole CPUs of a pod, and its own processes need some.
    whole = max(1, int(cpus + 0.999))
    yield "cpu", str(whole)
    if settings.memory_per_cpu is not None:
        number, unit = re.fullmatch(r"([\d.]+)(.*)", settings.memory_per_cpu).groups()  # type: ignore[union-attr]
        yield "memory", f"{_quantity(float(number) * whole)}{unit}"
    for name, count in sorted(group.resources.items()):
        if name not in ACCELERATOR_RESOURCES or not count:
            continue
        if count != int(count):
            raise InputError(
                f"job {job.id}: each of its {group.name} asks for {count:g} {name}, and Kubernetes gives "
                f"whole cards; ask for {int(count) + 1} or none"
            )
        yield settings.resource(name), str(int(count))


def _pod(container: str, resources: Mapping[str, str], settings: KubernetesConfig) -> Manifest:
    spec: Manifest = {
        "containers": [
            {
                "name": container,
                "image": settings.image,
                "resources": {"requests": dict(resources), "limits": dict(resources)},
            }
        ]
    }
    if settings.node_labels:
        spec["nodeSelector"] = settings.node_labels
    if settings.service_account is not None:
        spec["serviceAccountName"] = settings.service_account
    if settings.volume_claim is not None:
        spec["containers"][0]["volumeMounts"] = [{"name": VOLUME, "mountPath": settings.mount_path}]
        spec["volumes"] = [{"name": VOLUME, "persistentVolumeClaim": {"claimName": settings.volume_claim}}]
    return {"spec": spec}

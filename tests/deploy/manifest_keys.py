"""Keys that the kinds in deploy/kubernetes have, as their references document them, down to what tests can check else.

A dict has the keys of an object, a list of one the items of a list, ``ANY`` what is free (labels, resources by name),
``POD`` the template of a pod, which the schemas of Kubernetes itself describe, and a type or a set a value. A key that
is not here is taken for a misspelling, so this lists what the manifests use and its neighbours.
"""

from __future__ import annotations

from typing import Any

ANY, POD = object(), object()
NAME = str
NUMBER = (int, str)

_METADATA = {"name": NAME, "namespace": NAME, "labels": ANY, "annotations": ANY}
_POD_FAILURE_POLICY = {
    "rules": [
        {
            "action": {"FailJob", "Ignore", "Count", "FailIndex"},
            "onPodConditions": [{"type": {"DisruptionTarget"}, "status": {"True", "False"}}],
            "onExitCodes": {"operator": {"In", "NotIn"}, "values": [int], "containerName": NAME},
        }
    ]
}
_JOB = {
    "completionMode": {"Indexed", "NonIndexed"},
    "completions": int,
    "parallelism": int,
    "backoffLimit": int,
    "activeDeadlineSeconds": int,
    "ttlSecondsAfterFinished": int,
    "podFailurePolicy": _POD_FAILURE_POLICY,
    "template": POD,
}
_FAILURE_POLICY = {
    "maxRestarts": int,
    "restartStrategy": {"Recreate", "BlockingRecreate"},
    "rules": [
        {
            "name": NAME,
            "action": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
            "onJobFailureReasons": [{"PodFailurePolicy", "BackoffLimitExceeded", "DeadlineExceeded"}],
            "targetReplicatedJobs": [NAME],
        }
    ],
}
_JOBSET_SPEC = {
    "network": {"subdomain": NAME, "enableDNSHostnames": bool, "publishNotReadyAddresses": bool},
    "failurePolicy": _FAILURE_POLICY,
    "replicatedJobs": [{"name": NAME, "replicas": int, "template": {"metadata": _METADATA, "spec": _JOB}}],
    "suspend": bool,
    "ttlSecondsAfterFinished": int,
}
_RAY_START = {"rayStartParams": ANY, "template": POD}
_QUOTA = {"name": NAME, "nominalQuota": NUMBER, "borrowingLimit": NUMBER, "lendingLimit": NUMBER}

KINDS: dict[tuple[str, str], dict[str, Any]] = {
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): {
        "mlPolicy": {"numNodes": int, "torch": {}},
        "template": {"metadata": _METADATA, "spec": _JOBSET_SPEC},
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {
        "runtimeRef": {
            "apiGroup": {"trainer.kubeflow.org"}, "kind": {"TrainingRuntime", "ClusterTrainingRuntime"}, "name": NAME,
        },
        "trainer": {
            "image": str, "command": [str], "args": [str], "env": [ANY], "numNodes": int, "numProcPerNode": int,
            "resourcesPerNode": ANY,
        },
        "suspend": bool,
        "activeDeadlineSeconds": int,
    },
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): _JOBSET_SPEC,
    ("ray.io/v1", "RayJob"): {
        "entrypoint": str,
        "shutdownAfterJobFinishes": bool,
        "ttlSecondsAfterFinished": int,
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "suspend": bool,
        "submissionMode": {"K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"},
        "rayClusterSpec": {
            "rayVersion": str,
            "headGroupSpec": _RAY_START,
            "workerGroupSpecs": [
                {**_RAY_START, "groupName": NAME, "replicas": int, "minReplicas": int, "maxReplicas": int}
            ],
        },
    },
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        "selector": {"matchLabels": ANY},
        "namespaceSelector": {"matchNames": [NAME], "any": bool},
        "podMetricsEndpoints": [
            {
                "port": str,
                "path": str,
                "interval": str,
                "scrapeTimeout": str,
                "scheme": {"http", "https"},
                "authorization": {"type": str, "credentials": {"name": NAME, "key": str, "optional": bool}},
            }
        ],
    },
    ("kueue.x-k8s.io/v1beta1", "ResourceFlavor"): {"nodeLabels": ANY, "tolerations": [ANY]},
    ("kueue.x-k8s.io/v1beta1", "LocalQueue"): {"clusterQueue": NAME},
    ("kueue.x-k8s.io/v1beta1", "ClusterQueue"): {
        "namespaceSelector": ANY,
        "cohort": NAME,
        "preemption": {
            "withinClusterQueue": {"Never", "LowerPriority", "LowerOrNewerEqualPriority"},
            "reclaimWithinCohort": {"Never", "LowerPriority", "Any"},
        },
        "resourceGroups": [
            {"coveredResources": [str], "flavors": [{"name": NAME, "resources": [_QUOTA]}]}
        ],
    },
}  # fmt: skip


def find_flaws(value: Any, shape: Any, place: str = "") -> list[str]:
    """List what of a manifest is not as ``shape`` says, by place; what stands in pods is not looked at."""
    if shape is ANY or shape is POD:
        return []
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{place}: {value!r} is no object"]
        unknown = [f"{place}.{key}: unknown" for key in value if key not in shape]
        return unknown + [
            flaw for key in value if key in shape for flaw in find_flaws(value[key], shape[key], f"{place}.{key}")
        ]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{place}: {value!r} is no list"]
        return [flaw for n, item in enumerate(value) for flaw in find_flaws(item, shape[0], f"{place}[{n}]")]
    if isinstance(shape, set):
        return [] if value in shape else [f"{place}: {value!r} is none of {sorted(shape)}"]
    is_right = isinstance(value, shape) and (shape is bool or not isinstance(value, bool))
    return [] if is_right else [f"{place}: {value!r} has the wrong type"]

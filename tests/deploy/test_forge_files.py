"""Workflows, issue templates and pre-commit: what they run and ask for is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from devtools import extras
from penstock.cli import COMMANDS

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", line)]


def read(path: Path) -> dict[str, Any]:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_may_only_read_and_ends(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in workflow["jobs"].values())
    assert "secrets." not in path.read_text()
    for step in (step for job in workflow["jobs"].values() for step in job["steps"]):
        assert "${{" not in step.get("run", ""), "what others choose goes through env"
        if str(step.get("uses", "")).startswith("actions/checkout"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_names_is_there(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"\b(?:tests/test_\w+\.py|deploy/[\w/]+|\.ci/run|constraints\.txt)", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"run: penstock (\w+)", text):
        assert name in COMMANDS
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"run: make (\w+)", text)) <= set(targets)


def test_workflows_try_every_python_and_every_extra() -> None:
    tests, release = (read(ROOT / ".github" / "workflows" / f"{name}.yml") for name in ("tests", "release"))
    assert tests["jobs"]["quick"]["strategy"]["matrix"]["python"] == PYTHONS
    assert release["jobs"]["install"]["strategy"]["matrix"]["python"] == PYTHONS
    assert any(step.get("run", "").startswith("make extras") for step in tests["jobs"]["extras"]["steps"])
    assert set(extras.IMPORTS) == set(PROJECT["optional-dependencies"])


def test_only_the_job_that_publishes_gets_a_token() -> None:
    jobs = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["needs"] == "install"


def test_issues_ask_for_the_output_of_commands_that_exist() -> None:
    asked = {path.name: set(re.findall(r"`penstock (\w+)", path.read_text())) for path in TEMPLATES}
    assert asked["bug.yml"] >= {"doctor", "inspect", "state"}
    assert set().union(*asked.values()) <= set(COMMANDS)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_a_template_has_the_parts_that_the_forge_reads(path: Path) -> None:
    template = read(path)
    assert set(template) == {"name", "description", "labels", "body"}
    names = [part["id"] for part in template["body"]]
    assert len(set(names)) == len(names)
    for part in template["body"]:
        assert set(part) <= {"type", "id", "attributes", "validations"}
        assert set(part["attributes"]) <= {"label", "description", "render", "placeholder"}


def test_pre_commit_lints_as_the_constraints_do() -> None:
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"]
    (ruff,) = [each for each in hooks if "ruff" in each["repo"]]
    pinned = re.search(r"^ruff==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert ruff["rev"] == f"v{pinned[1]}"


def test_an_extra_is_flawed_where_it_takes_long_or_brings_another_torch() -> None:
    report = {
        "install": [{"metadata": {"name": name, "version": "1"}} for name in ("penstock", "nvidia_ml_py", "rich")]
    }
    good = extras.resolved_of(report, 3.0)
    assert good.versions == {"nvidia-ml-py": "1", "rich": "1"}
    assert extras.flaws_of(good) == []
    report["install"].append({"metadata": {"name": "nvidia-cublas", "version": "13"}})
    report["install"].append({"metadata": {"name": "torch", "version": "2.14.1"}})
    assert extras.flaws_of(extras.resolved_of(report, 75.0)) == [
        "took 75 s, more than 60",
        "would install nvidia-cublas 13, torch 2.14.1",
    ]

"""deploy/slurm/train.sbatch under a real Slurm: stopped, requeued, gone on with, and each sample delivered once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launch import ranks_environment
from slurm_cluster import Cluster, need_slurm, running_cluster, write_torchrun
from tar_rows import write_shards

from penstock import audit

pytestmark = pytest.mark.slow

BATCH_FILE = Path(__file__).parents[2] / "deploy" / "slurm" / "train.sbatch"
SAMPLES, EPOCHS = 240, 4
RECIPE = f"""\
model = {{ use = "slurm_recipe:Line" }}
loss = {{ use = "slurm_recipe:slow_loss" }}
optimizer = {{ use = "torch.optim:SGD", args = {{ lr = 0.1 }} }}

[data]
use = "penstock:DistributedDataLoader"
args = {{ source = "shards", global_batch_size = 6, last_batch = "partial", with_ids = true, audit_dir = "audit" }}

[trainer]
epochs = {EPOCHS}
device = "cpu"
precision = {{ dtype = "fp32" }}
stall_timeout_s = 60.0
report = {{ every = 1 }}
"""

TORCHRUN = f'exec {sys.executable} -m torch.distributed.run "$@"'
# Stands for a torchrun: fails on SIGTERM, as that does when its ranks have saved, on the second node a second later
# than on the first; and ends when it is started again.
STOPPABLE = """\
trap 'sleep $SLURM_NODEID; echo saved; exit 1' TERM
[ -z "$SLURM_RESTART_COUNT" ] || exit 0
echo begun
for _ in $(seq 300); do sleep 0.1; done
"""
# Later than this Slurm would wait, by its KillWait and KillOnBadExit, once the first node has ended.
SLOW_ON_ONE = STOPPABLE.replace("$SLURM_NODEID", "$((6 * SLURM_NODEID))")
ENDS_IN_TIME = "trap 'exit 0' TERM; echo begun; for _ in $(seq 300); do sleep 0.1; done"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    need_slurm()
    with running_cluster(tmp_path_factory.mktemp("slurm")) as started:
        yield started


class Job:
    """A job of the batch file in a folder of its own."""

    def __init__(self, cluster: Cluster, folder: Path, torchrun: str, *overrides: str, nodes: str = "2") -> None:
        self._cluster, self._folder = cluster, folder
        (folder / "recipe.toml").write_text(RECIPE)
        ranks = ranks_environment()
        tests = BATCH_FILE.parents[2] / "tests"
        path = [ranks["PYTHONPATH"], str(tests / "deploy"), str(tests / "trainer")]
        done = subprocess.run(
            [
                *("sbatch", "--parsable", f"--nodes={nodes}", "--gpus-per-node=1", "--output=job.log", BATCH_FILE),
                *("recipe.toml", *overrides),
            ],
            cwd=folder,
            env={**ranks, **cluster.naming, "PATH": write_torchrun(folder, torchrun), "PYTHONPATH": ":".join(path)},
            capture_output=True,
            text=True,
            check=True,
        )
        self.number = done.stdout.strip()

    def look(self, name: str) -> str:
        """What the controller knows of it: ``JobState``, ``Restarts``."""
        words = self._cluster.ask("scontrol", "--oneliner", "show", "job", self.number).split()
        return dict(word.partition("=")[::2] for word in words).get(name, "")

    def log(self) -> str:
        path = self._folder / "job.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def newest_step(self) -> int:
        """The newest step that was reported."""
        path = self._folder / "penstock-run" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def wait_for(self, what: str, condition: Callable[[], bool]) -> None:
        """Fails at once where the job has failed."""

        def is_so() -> bool:
            return condition() or self.look("JobState") == "FAILED"

        self._cluster.wait_for(what, is_so, more=self.log)
        assert condition(), f"the job failed before {what}\n{self.log()[-6000:]}"


def accounts(folder: Path) -> tuple[list[int], list[tuple[int, int, int]]]:
    """The world sizes of the starts, and of each epoch what was delivered, missing and duplicated."""
    report = audit(folder / "audit")
    found = [(account.delivered, account.missing, account.duplicated) for account in report.epochs]
    return [size for size, _, _ in report.attempts], found


@pytest.mark.full
def test_a_job_that_is_stopped_saves_and_is_requeued_and_each_sample_comes_exactly_once(
    cluster: Cluster, tmp_path: Path
) -> None:
    write_shards(tmp_path / "shards", samples=SAMPLES)
    job = Job(cluster, tmp_path, TORCHRUN, "--trainer.checkpoint.every_steps=1000")
    job.wait_for("training", lambda: job.newest_step() >= 7)
    cluster.ask("scancel", "--signal=TERM", job.number)  # as Slurm does before a time limit and at preemption
    job.wait_for("requeueing", lambda: job.look("Restarts") == "1")
    stopped_at = job.newest_step()
    (tmp_path / "hurry").touch()
    job.wait_for("the end", lambda: job.look("JobState") == "COMPLETED")

    # No scheduled save was due: the run went on from the one that SIGTERM asked for.
    assert 7 <= stopped_at < EPOCHS * SAMPLES // 6
    assert f"step {stopped_at}  stopped by SIGTERM: a new start resumes at step {stopped_at}" in job.log()
    assert job.look("Restarts") == "1"
    assert accounts(tmp_path) == ([2, 2], [(SAMPLES, 0, 0)] * EPOCHS)
    assert [account.replayed for account in audit(tmp_path / "audit").epochs] == [0] * EPOCHS


@pytest.mark.full
def test_a_job_that_loses_a_node_is_requeued_and_ends_on_the_other_one(cluster: Cluster, tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", samples=SAMPLES)
    job = Job(cluster, tmp_path, TORCHRUN, "--trainer.checkpoint.every_steps=5", nodes="1-2")
    job.wait_for("training", lambda: job.newest_step() >= 12)
    cluster.kill_node("n2")
    try:
        job.wait_for("requeueing", lambda: job.look("Restarts") == "1")
        (tmp_path / "hurry").touch()
        job.wait_for("the end", lambda: job.look("JobState") == "COMPLETED")
    finally:
        cluster.start_node("n2")
    assert job.look("Restarts") == "1"
    assert accounts(tmp_path) == ([2, 1], [(SAMPLES, 0, 0)] * EPOCHS)


@pytest.mark.parametrize(
    ("torchrun", "scancel", "state", "restarts"),
    [
        ("exit 3", None, "FAILED", "0"),
        (SLOW_ON_ONE, "--signal=TERM", "COMPLETED", "1"),
        (STOPPABLE, "--signal=TERM --batch", "COMPLETED", "1"),
        (ENDS_IN_TIME, "--signal=TERM", "COMPLETED", "0"),
        (STOPPABLE, "", "CANCELLED", "0"),
    ],
    ids=["failed", "stopped, one node late", "stopped by the batch shell", "ended meanwhile", "cancelled"],
)
def test_only_a_job_that_was_stopped_before_its_end_is_requeued(
    cluster: Cluster, tmp_path: Path, torchrun: str, scancel: str | None, state: str, restarts: str
) -> None:
    job = Job(cluster, tmp_path, torchrun)
    if scancel is not None:
        job.wait_for("both nodes", lambda: job.log().count("begun") == 2)
        cluster.ask("scancel", *scancel.split(), job.number)
    cluster.wait_for("the end", lambda: job.look("JobState") == state, more=job.log)
    assert job.look("Restarts") == restarts, job.log()
    assert job.log().count("saved") == (2 if "saved" in torchrun else 0)

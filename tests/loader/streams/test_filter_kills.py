"""A run that drops samples, killed and resumed on other numbers of processes: the audit finds each sample once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tar_dataset import write_tars
from torchrun import run_ranks

from penstock import audit

WORKER = Path(__file__).with_name("kill_worker.py")
NEVER = -1


@pytest.mark.full
@pytest.mark.timeout(400)
def test_kills_and_other_numbers_of_ranks_deliver_or_drop_each_sample_once(tmp_path: Path) -> None:
    samples = write_tars(tmp_path / "data", [60, 100, 40, 94, 77])
    for world_size, kill_at in ((3, 7), (2, 18), (4, NEVER)):
        run = run_ranks(world_size, WORKER, tmp_path / "data", tmp_path, kill_at)
        assert (run.returncode == 0) == (kill_at == NEVER), run.stderr[-3000:]
    check(tmp_path, samples, [3, 2, 4])


@pytest.mark.full
@pytest.mark.timeout(400)
def test_ranks_with_and_without_a_process_agree_and_survive_its_kill(tmp_path: Path) -> None:
    samples = write_tars(tmp_path / "data", [60, 100, 40, 94, 77])
    for places, kill_at in (("threads", "process"), 7), (("process",), 18), (("process", "threads"), NEVER):
        run = run_ranks(2, WORKER, tmp_path / "data", tmp_path, kill_at, *places)
        assert (run.returncode == 0) == (kill_at == NEVER), run.stderr[-3000:]
        assert ("was killed by SIGKILL" in run.stderr) == (kill_at != NEVER)
    check(tmp_path, samples, [2, 2, 2])


def check(folder: Path, samples: int, world_sizes: list[int]) -> None:
    report = audit(folder / "audit")
    assert report.is_exact
    assert [world_size for world_size, _, _ in report.attempts] == world_sizes
    dropped = -(-samples // 3)
    assert [(each.dropped, each.delivered, each.left) for each in report.epochs] == [
        (dropped, samples - dropped, 0)
    ] * 2
    assert sum(each.replayed for each in report.epochs) > 0

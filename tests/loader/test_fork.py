"""A process that forks: the child is told what to do, and nothing of the parent suffers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tar_dataset import write_tars

from penstock.loader import audit
from penstock.storage.files import lock_file

SCRIPT = Path(__file__).with_name("forking_script.py")


@pytest.mark.slow
@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_forked_child_is_refused_at_once_and_its_end_leaves_the_parent_its_epoch(
    tmp_path: Path, processes: str
) -> None:
    samples = write_tars(tmp_path / "data", [37, 5, 80, 64])
    command = [sys.executable, SCRIPT, str(tmp_path / "data"), str(tmp_path / "audit"), processes]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    told = {name: value for line in run.stdout.splitlines() for name, value in json.loads(line).items()}
    assert (run.returncode, told.get("child")) == (0, 0), run.stdout + run.stderr
    assert told.pop("close") == "done"
    assert (told.pop("batches"), told.pop("child")) == (-(-samples // 16) - 1, 0)
    assert len(told) == 9
    for what, said in told.items():
        assert said.startswith("refused: the loader was made in process"), what
        assert "method spawn or forkserver, and make a loader in each" in said
    assert run.stderr == ""
    (epoch,) = audit(tmp_path / "audit").epochs
    assert (epoch.missing, epoch.duplicated) == (0, 0)


@pytest.mark.slow
def test_a_lock_that_was_held_at_a_fork_is_free_when_the_parent_lets_go(tmp_path: Path) -> None:
    ends, theirs = os.pipe()
    with lock_file(tmp_path / "lock", wait_s=0) as held:
        assert held
        child = os.fork()
        if child == 0:
            os.close(theirs)
            os.read(ends, 1)  # until the parent closes its end
            os._exit(0)
    try:
        with lock_file(tmp_path / "lock", wait_s=30) as held:
            assert held
    finally:
        os.close(theirs)
        os.close(ends)
        os.waitpid(child, 0)

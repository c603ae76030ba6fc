from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from free_port import free_port

from penstock.trainer import World, close_world, open_world


@pytest.fixture
def world(settled_imports: None) -> Iterator[World]:
    """A world of one, closed afterwards."""
    yield open_world(device="cpu")
    close_world()


@pytest.fixture
def unused_tcp_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def ranks_folder(run_folder: Path) -> Path:
    """What four real ranks wrote: one launch for all the tests that look at it, whichever worker runs them."""
    from launch_ranks import run_ranks
    from rank_program import train_all

    folder = run_folder / "ranks"
    with (run_folder / "ranks.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            run_ranks(train_all, 4, folder, timeout_s=270)
            (folder / "whole").touch()
    return folder

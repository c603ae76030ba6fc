from __future__ import annotations

import fcntl
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.trainer import World, close_world, open_world


@pytest.fixture
def world(settled_imports: None) -> Iterator[World]:
    """A world of one, closed afterwards."""
    yield open_world(device="cpu")
    close_world()


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def ranks_folder(run_folder: Path) -> Path:
    """What four real ranks wrote: one launch for all the tests that look at it, whichever worker runs them."""
    from launch import run_ranks

    folder = run_folder / "ranks"
    with (run_folder / "ranks.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            done = run_ranks(Path(__file__).with_name("rank_program.py"), 4, str(folder), timeout_s=270)
            assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-6000:]
            (folder / "whole").touch()
    return folder

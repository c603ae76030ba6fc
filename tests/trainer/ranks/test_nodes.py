"""Nodes join and leave under torchrun's own agents: training continues from the newest checkpoint, each sample once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launch import ranks_environment
from tar_rows import read_starts, write_shards

from penstock import audit

SAMPLES, EPOCHS = 240, 8


class Nodes:
    """torchrun's agents of one run, as many nodes on this machine."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._port = port
        self.agents: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        log = (self._folder / f"agent-{len(self.agents)}.log").open("wb")
        with log:
            agent = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
                    *("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self._port}", "--rdzv-id=nodes"),
                    "--rdzv-conf=last_call_timeout=1,join_timeout=30,keep_alive_interval=1,keep_alive_max_attempt=3",
                    *("--max-restarts=3", str(Path(__file__).parents[1] / "nodes_run.py"), str(self._folder)),
                ],
                env={**ranks_environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
                stdout=log,
                stderr=log,
            )
        self.agents.append(agent)
        return agent

    def wait_for(self, what: str, condition: Callable[[], bool], timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen\n{self.read_logs()}"
            time.sleep(0.05)

    def read_logs(self) -> str:
        logs = [path.read_text(errors="replace")[-3000:] for path in sorted(self._folder.glob("agent-*.log"))]
        return "\n----\n".join([*logs, repr(read_starts(self._folder))])


@contextmanager
def running(folder: Path, port: int) -> Iterator[Nodes]:
    write_shards(folder / "shards", samples=SAMPLES)
    nodes = Nodes(folder, port)
    try:
        yield nodes
    finally:
        for agent in nodes.agents:
            agent.kill()
            agent.wait()
        for _, _, _, worker in read_starts(folder):
            kill_worker(worker)


def kill_worker(process: int) -> None:
    try:
        if b"nodes_run.py" in Path(f"/proc/{process}/cmdline").read_bytes():
            os.kill(process, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        pass


def newest_step(folder: Path) -> int:
    return max((int(path.name[5:]) for path in folder.glob("run/checkpoints/step-*[0-9]")), default=0)


@pytest.mark.full
@pytest.mark.parametrize("leaves_by", [signal.SIGKILL, signal.SIGTERM])
def test_nodes_join_and_leave_and_each_sample_comes_exactly_once(
    tmp_path: Path, unused_tcp_port: int, leaves_by: signal.Signals
) -> None:
    with running(tmp_path, unused_tcp_port) as nodes:
        first = nodes.start()
        nodes.wait_for("a checkpoint of one node", lambda: newest_step(tmp_path) >= 5)
        second = nodes.start()
        nodes.wait_for("two nodes", lambda: read_starts(tmp_path)[-1][1] == 2)
        joined_at = read_starts(tmp_path)[-1][2]
        nodes.wait_for("a checkpoint of two nodes", lambda: newest_step(tmp_path) > joined_at)

        second.send_signal(leaves_by)
        if leaves_by is signal.SIGKILL:
            kill_worker(next(start[3] for start in reversed(read_starts(tmp_path)) if start[0] == 1))
        nodes.wait_for("one node again", lambda: read_starts(tmp_path)[-1][1] == 1)
        (tmp_path / "hurry").touch()
        assert first.wait(timeout=120) == 0, nodes.read_logs()
        second.wait(timeout=60)

        starts = read_starts(tmp_path)
        assert [size for rank, size, _, _ in starts if rank == 0] == [1, 2, 1]
        begun_at = [step for rank, _, step, _ in starts if rank == 0]
        assert begun_at[0] == 0
        assert 5 <= begun_at[1] < begun_at[2]
    report = audit(tmp_path / "audit")
    assert [size for size, _, _ in report.attempts] == [1, 2, 1]
    assert [(account.delivered, account.missing, account.duplicated) for account in report.epochs] == [
        (SAMPLES, 0, 0)
    ] * EPOCHS


@pytest.mark.full
def test_a_rank_that_dies_on_one_node_is_started_again_with_those_of_the_others(
    tmp_path: Path, unused_tcp_port: int
) -> None:
    """torchrun counts restarts for each node by itself, and only that of the dead rank counts this one."""
    with running(tmp_path, unused_tcp_port) as nodes:
        agents = [nodes.start(), nodes.start()]
        nodes.wait_for("a checkpoint of two nodes", lambda: newest_step(tmp_path) >= 5 and is_of_two(tmp_path))
        begun = len(read_starts(tmp_path))
        kill_worker(read_starts(tmp_path)[-1][3])
        nodes.wait_for("two new ranks", lambda: len(read_starts(tmp_path)) == begun + 2)
        (tmp_path / "hurry").touch()
        assert [agent.wait(timeout=120) for agent in agents] == [0, 0], nodes.read_logs()
    report = audit(tmp_path / "audit")
    assert [size for size, _, _ in report.attempts][-2:] == [2, 2]
    assert [(account.delivered, account.missing, account.duplicated) for account in report.epochs] == [
        (SAMPLES, 0, 0)
    ] * EPOCHS


def is_of_two(folder: Path) -> bool:
    """Whether two nodes train: the first may have begun alone."""
    starts = read_starts(folder)
    return starts[-1][1] == 2 and newest_step(folder) > starts[-1][2]

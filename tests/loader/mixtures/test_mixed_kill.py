"""Real processes: a run of a mixture that is killed and goes on with other ranks, batches and weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from mixed_rows import write_rows
from started_process import started_process

from penstock import audit

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("mixing_script.py")
SIZES = {"a": 90, "b": 70}


@contextmanager
def started(
    folder: Path, world_size: int, batch_size: int, weight: float, steps: int
) -> Iterator[list[subprocess.Popen[str]]]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with ExitStack() as stack:
        arguments = ((folder, rank, world_size, batch_size, weight, steps) for rank in range(world_size))
        yield [
            stack.enter_context(started_process([sys.executable, SCRIPT, *map(str, words)], env=environment))
            for words in arguments
        ]


def test_a_killed_run_goes_on_with_other_ranks_and_weights_and_counts_every_sample(tmp_path):
    for number, (name, size) in enumerate(SIZES.items()):
        write_rows(tmp_path / name, [size // 2, size // 2], 1000 * number)
    with started(tmp_path, 2, 6, 3.0, 1_000_000) as ranks:
        until = time.monotonic() + 120
        while not all((tmp_path / f"reached-{rank}").exists() for rank in range(2)):
            assert all(rank.poll() is None for rank in ranks)
            assert time.monotonic() < until
            time.sleep(0.01)
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
        assert [rank.wait() for rank in ranks] == [-signal.SIGKILL] * 2
    saved = json.loads((tmp_path / "state.json").read_text())
    with started(tmp_path, 3, 5, 0.5, 40) as others:
        assert [rank.wait(120) for rank in others] == [0, 0, 0]
    report = audit(tmp_path / "audit")
    assert report.is_exact
    assert report.mixture is not None
    end = json.loads((tmp_path / "end.json").read_text())
    first, then = ([source["taken"] for source in state["sources"]] for state in (saved, end))
    assert [source.delivered for source in report.mixture.sources] == then
    assert sum(then) - sum(first) == 40 * 15
    assert abs((then[0] - first[0]) - 200) <= 2  # 0.5 to 1 of 600
    assert abs(first[0] - 0.75 * sum(first)) <= 2

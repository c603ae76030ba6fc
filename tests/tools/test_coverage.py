"""Batches that no rank, or not every rank, logged are found in every kind of stream, at any time of an epoch."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import DistributedDataLoader, Mixture, Source, audit, pack
from penstock.cli import run
from penstock.tools.coverage import Standing, count_lost
from penstock.tools.delivery_records import Delivered

NONE = np.empty(0, np.int64)


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), min_size=1, max_size=8),
    st.data(),
)
def test_what_is_lost_is_counted_position_by_position(batches: list[tuple[int, int]], data: st.DataObject) -> None:
    """Batches of so many positions times ranks, of which some ranks' records are taken away."""
    start, standing, expected, last = 0, [], 0, 0
    whole = []
    for attempt, (size, world) in enumerate(batches):
        stop = start + size * world
        kept = data.draw(st.sets(st.integers(0, world - 1)))
        standing += [Standing(attempt, rank, world, Delivered(0, start, stop, NONE)) for rank in kept]
        whole.append((stop, size * (world - len(kept)), bool(kept)))
        start = stop
    first = next((number for number, (_, _, is_kept) in enumerate(whole) if is_kept), len(whole))
    last = max((number for number, (_, _, is_kept) in enumerate(whole) if is_kept), default=-1)
    expected = sum(lost for _, lost, _ in whole[first : last + 1])
    assert sum(count_lost(standing).values()) == expected


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("sources")
    for name, first in (("a", 0), ("b", 1000)):
        pack(({"n": first + i} for i in range(1000)), folder / name, format="parquet", progress=False)
    return str(folder / "a"), str(folder / "b")


def mix(sources: tuple[str, str]) -> Mixture:
    return Mixture({"a": Source(sources[0]), "b": Source(sources[1])}, stop="never")


def take(passing: Iterator[Any], batches: int) -> None:
    for _ in range(batches):
        next(passing)


@pytest.mark.slow
def test_a_resume_of_a_mixture_that_skips_is_found(sources: tuple[str, str], tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    with DistributedDataLoader(mix(sources), batch_size=50, seed=0, audit_dir=logs) as loader:
        passing = iter(loader)
        take(passing, 10)
        state = loader.state_dict()
        take(passing, 4)
        later = loader.state_dict()
    with DistributedDataLoader(mix(sources), batch_size=50, seed=0, audit_dir=logs) as loader:
        loader.load_state_dict(state)
        take(iter(loader), 2)
    report = audit(logs)
    assert report.is_exact
    assert report.mixture is not None
    assert report.mixture.lost == 0
    other = tmp_path / "other"
    with DistributedDataLoader(mix(sources), batch_size=50, seed=0, audit_dir=other) as loader:
        take(iter(loader), 10)
    with DistributedDataLoader(mix(sources), batch_size=50, seed=0, audit_dir=other) as loader:
        loader.load_state_dict(later)
        take(iter(loader), 2)
    report = audit(other)
    assert not report.is_exact
    assert report.mixture is not None
    assert report.mixture.lost == 200


def test_a_skip_excuses_no_loss_of_another_place(sources: tuple[str, str], tmp_path: Path) -> None:
    with DistributedDataLoader(mix(sources), batch_size=50, seed=0, audit_dir=tmp_path) as loader:
        passing = iter(loader)
        take(passing, 4)
        loader.skip_batches(4)
        take(passing, 2)
        gone = loader.state_dict()
        gone_at = gone["consumed"]
    assert audit(tmp_path).is_exact
    with DistributedDataLoader(mix(sources), batch_size=50, seed=0) as loader:
        loader.load_state_dict(gone)
        take(iter(loader), 4)
        ahead = loader.state_dict()
    assert ahead["consumed"] == gone_at + 200
    with DistributedDataLoader(mix(sources), batch_size=50, seed=0, audit_dir=tmp_path) as loader:
        loader.load_state_dict(ahead)
        take(iter(loader), 60)
    report = audit(tmp_path)
    assert report.mixture is not None
    assert report.mixture.lost == 200
    assert not report.is_exact


RANK = """
import sys
import torch.distributed as dist
from penstock import DistributedDataLoader, Packing
dist.init_process_group("gloo")
source, logs = sys.argv[1:]
with DistributedDataLoader(source, batch_size=2, seed=0, packing=Packing(seq_len=64), audit_dir=logs) as loader:
    passing = iter(loader)
    for _ in range(8):
        next(passing)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_rank_of_a_packed_run_whose_log_is_gone_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, logs = tmp_path / "data", tmp_path / "logs"
    rng = np.random.default_rng(0)
    pack(({"tokens": rng.integers(1, 99, rng.integers(5, 60)).tolist()} for _ in range(2000)), data, format="parquet")
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    subprocess.run([*launcher, str(program), str(data), str(logs)], check=True, timeout=240)
    assert audit(logs).is_exact
    (of_rank_one,) = logs.glob("*-rank00001-*")
    of_rank_one.unlink()
    report = audit(logs)
    assert not report.is_exact
    assert report.epochs[0].missing == 16  # half of 8 batches of 4
    assert run(["audit", str(logs)]) == 1
    assert "missing" in capsys.readouterr().out


@pytest.mark.parametrize("steps", [5, 11], ids=["in mid-epoch", "at an epoch's end"])
def test_a_look_at_a_batch_before_a_state_is_loaded_makes_nothing_missing(tmp_path: Path, steps: int) -> None:
    pack([{"n": number} for number in range(110)], tmp_path / "rows", format="parquet")

    def start(state: dict[str, Any] | None, looks: int, steps: int) -> dict[str, Any]:
        with DistributedDataLoader(tmp_path / "rows", batch_size=10, audit_dir=tmp_path / "audit") as loader:
            for _ in range(looks):
                next(iter(loader))
            if state is not None:
                loader.load_state_dict(state)
            for _ in itertools.islice(loader, steps):
                pass
            return loader.state_dict()

    state = start(None, 0, steps)
    later = start(state, 2, 4)
    report = audit(tmp_path / "audit")
    assert report.is_exact
    assert sum(epoch.delivered for epoch in report.epochs) == 10 * (steps + 4)
    assert sum(epoch.replayed for epoch in report.epochs) == 20
    resumed = [(1, 0, 50)] if steps == 5 else []
    assert report.attempts == [(1, 0, 0), *2 * [(1, 0, 0)], *resumed]  # the first one's, two looks, and from the state
    del later["checksum"]
    start({**later, "epoch": 3, "consumed": 50}, 1, 4)  # to which no log leads
    assert not audit(tmp_path / "audit").is_exact

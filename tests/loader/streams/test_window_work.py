"""Work that makes what it likes of whole windows has the same promises as a filter, without knowing of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streams_ranks import ThreadRanks
from tar_dataset import write_tars

from penstock.loader import assembly
from penstock.loader.decoding.gather import Rows
from penstock.loader.order.spans import ChunkRows
from penstock.loader.streams.work import FilterWork, Yield

NONE = np.empty(0, np.int64)


@dataclass
class Runs:
    """Joins a window's samples to runs whose lengths are 1, 2, 3, 1, ...; what is left of a window is a shorter run."""

    of_rows: FilterWork
    whole_windows = True
    gives_samples = True

    def start(self, groups: Sequence[ChunkRows], count: int, epoch: int) -> Any:
        rows = self.of_rows.gather(groups, count)
        cuts = np.cumsum(list(itertools.islice(itertools.cycle([1, 2, 3]), count)))
        stops = np.append(cuts[cuts < count], count)
        samples = [{"run": ids.tolist()} for ids in np.split(rows.ids, stops[:-1])]
        return Made(rows.ids, Yield(rows.ids, stops - 1, NONE, NONE, samples, nbytes=8 * count))

    def gather(self, groups: Sequence[ChunkRows], count: int) -> Rows:
        raise AssertionError("outputs are samples")


@dataclass
class Made:
    ids: Any
    found: Yield

    def result(self) -> Yield:
        return self.found

    def cancel(self) -> None:
        pass


@pytest.fixture
def runs_of_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    write_tars(tmp_path, [37, 5, 80, 1, 64, 23, 90, 12])
    monkeypatch.setattr(assembly, "FilterWork", lambda *args, **options: Runs(FilterWork(*args, **options)))
    return str(tmp_path)


@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_outputs_of_whole_windows_are_the_same_on_any_ranks_and_across_resumes(runs_of_ids: str, lanes: int) -> None:
    options: dict[str, Any] = {
        "global_batch_size": 12, "lanes": lanes, "last_batch": "partial", "transform": dict, "may_drop": True,
        "piece": 0, "window": 2,
    }  # fmt: skip

    def run(world_size: int, state: Any, most: int | None) -> tuple[list[list[Any]], Any]:
        def work(loader: Any) -> Any:
            if state is not None:
                loader.load_state_dict(state)
            return [batch["run"] for batch in itertools.islice(loader, most)], loader.state_dict()

        results = ThreadRanks(world_size, runs_of_ids, **options).run(work)
        shares, states = zip(*results, strict=True)
        assert all(each == states[0] for each in states)
        return [list(itertools.chain(*step)) for step in zip(*shares, strict=True)], states[0]

    whole, _ = run(1, None, None)
    assert sorted(i for batch in whole for run in batch for i in run) == list(range(312))
    legs: list[list[Any]] = []
    state = None
    for world_size, most in ((3, 2), (2, 4), (4, 3), (2, None)):
        batches, state = run(world_size, state, most)
        legs += batches
    assert legs == whole

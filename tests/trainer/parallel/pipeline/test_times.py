"""A rank's times in a pipeline, as they are taken for the bubble; and values that a rehearsal has not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from penstock.trainer import TrainerConfigError
from penstock.trainer.parallel.pipeline import times
from penstock.trainer.parallel.pipeline.ghosts import ghost_of
from penstock.trainer.parallel.pipeline.times import Times
from penstock.trainer.steps.totals import Totals


def test_times_are_those_of_whole_schedules_and_are_taken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 4.0, 9.0, 10.0, 20.0, 21.0, 22.0, 25.0])
    monkeypatch.setattr(times, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    own = Times(torch.device("cpu"))
    own.begin()
    with own.computing():
        pass
    with own.computing():
        pass
    own.end()
    own.begin()
    assert own.take() == (10.0, 7.0)
    with own.computing():
        pass
    assert own.take() == (0.0, 0.0)  # that one is not over
    own.end()
    assert own.take() == (5.0, 1.0)


def test_totals_have_times_behind_the_marks_of_all_stages() -> None:
    plain, marks = [float(number) for number in range(8)], [1.0, 1.0, 2.0, 4.0, 3.0, 9.0, 4.0, 16.0]
    found = Totals.read([*plain, *marks, 40.0, 30.0])
    assert (found.scheduled, found.computed) == (40.0, 30.0)
    assert [one.total for one in found.orders] == [1.0, 3.0]
    assert [one.total for one in found.settings] == [2.0, 4.0]
    without = Totals.read([*plain, *marks[:4]])
    assert (without.scheduled, without.computed, len(without.orders)) == (0.0, 0.0, 1)


@pytest.mark.parametrize(("is_elsewhere", "why"), [(True, "another stage"), (False, "shapes alone at first")])
def test_a_list_of_values_that_are_not_there_is_refused_by_name(is_elsewhere: bool, why: str) -> None:
    with pytest.raises(TrainerConfigError, match=rf"what router returned are needed by tolist\(\), and .*{why}"):
        ghost_of(torch.ones(2), "router", is_elsewhere=is_elsewhere).tolist()

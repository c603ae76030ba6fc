"""Where a loader stands: epochs that end and begin, and states that fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_manifest import make_manifest

from penstock.loader.errors import ConfigError, PartitionError, StateMismatchError
from penstock.loader.order.plan import Share
from penstock.loader.sampler.dataset import DatasetSchedule
from penstock.loader.sampler.sampler import Sampler

MANIFEST = make_manifest([[30, 20], [50]])  # 100 samples


def make_sampler(**options: Any) -> Sampler:
    defaults: dict[str, Any] = {
        "seed": 3,
        "shuffle": True,
        "lanes": "auto",
        "window": "auto",
        "piece": "auto",
        "share": Share(0, 1, 30),
        "last_batch": "partial",
    }
    return Sampler(DatasetSchedule(MANIFEST, **{**defaults, **options}))


@pytest.mark.parametrize(("last_batch", "steps"), [("drop", 3), ("pad", 4), ("partial", 4)])
def test_batches_are_counted_from_the_position_on(last_batch: str, steps: int) -> None:
    sampler = make_sampler(last_batch=last_batch)
    assert [sampler.steps_per_epoch, sampler.steps_left] == [steps, steps]
    sampler.advance(0, 60)
    assert [sampler.steps_per_epoch, sampler.steps_left] == [steps, steps - 2]


def test_after_the_last_batch_the_epoch_stays_and_the_next_one_is_upcoming() -> None:
    sampler = make_sampler(last_batch="drop")
    sampler.advance(0, 90)
    assert (sampler.epoch, sampler.steps_left) == (0, 0)
    assert sampler.upcoming == (1, 0)
    assert (sampler.to_state().epoch, sampler.to_state().consumed) == (1, 0)


def test_a_state_at_an_epochs_end_is_the_next_epochs_beginning() -> None:
    sampler = make_sampler()
    sampler.advance(4, 99)
    state = sampler.to_state()
    for consumed, at in ((100, (5, 0)), (99, (4, 99))):
        sampler.load(replace(state, consumed=consumed))
        assert (sampler.epoch, sampler.consumed) == at


def test_a_pass_begins_at_its_epochs_beginning_or_where_a_state_was_loaded() -> None:
    sampler = make_sampler(last_batch="drop")
    assert not sampler.begin_pass()
    sampler.advance(0, 30)
    state = sampler.to_state()
    assert sampler.begin_pass(), "what was read ahead is not of use"
    assert (sampler.epoch, sampler.consumed) == (0, 0)
    sampler.load(state)
    for _ in range(2):
        assert not sampler.begin_pass()
        assert (sampler.epoch, sampler.consumed) == (0, 30)
    sampler.advance(0, 90)
    assert not sampler.begin_pass()
    assert (sampler.epoch, sampler.consumed) == (1, 0)


def test_a_state_is_taken_over_by_a_loader_of_another_batch_size() -> None:
    sampler = make_sampler()
    sampler.advance(2, 60)
    other = make_sampler(share=Share(0, 1, 7), last_batch="drop")
    other.load(other.check_state(sampler.to_state().to_dict()))
    assert (other.epoch, other.consumed, other.steps_left) == (2, 60, 5)


def test_checking_a_state_changes_nothing() -> None:
    sampler = make_sampler()
    state = make_sampler(share=Share(0, 64, 64)).to_state()
    assert sampler.check_state(state.to_dict()) == state
    assert sampler.order.lanes == 16
    sampler.load(state)
    assert sampler.order.lanes == 256


@pytest.mark.parametrize("fixed", [{"lanes": 32}, {"window": 7}, {"piece": 0}, {"piece": 2}])
def test_a_state_of_another_order_than_those_given_is_refused(fixed: dict[str, int]) -> None:
    state = make_sampler().to_state().to_dict()
    with pytest.raises(StateMismatchError, match=f"{next(iter(fixed.values()))} here"):
        make_sampler(**fixed).check_state(state)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lanes": 0},
        {"lanes": -4},
        {"lanes": 12},
        {"lanes": "many"},
        {"window": 0},
        {"window": "wide"},
        {"piece": -1},
        {"piece": "fine"},
    ],
)
def test_orders_that_cannot_be_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}="):
        make_sampler(**wrong)


def test_an_epoch_without_a_batch_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"101 is above the data set's 100 samples \(world_size=4\)"):
        make_sampler(share=Share(0, 4, 101), last_batch="drop")
    assert make_sampler(share=Share(0, 1, 101), last_batch="pad").steps_per_epoch == 1

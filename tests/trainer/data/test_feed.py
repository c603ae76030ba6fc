"""The feed: microbatches in groups, epochs one after another, a position that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import DistributedDataLoader, pack
from penstock.trainer import ArrayLoader, TrainerError, World
from penstock.trainer.data.feed import Feed

CPU, META = torch.device("cpu"), torch.device("meta")


def alone(device: torch.device) -> World:
    place = {"rank": 0, "local_rank": 0, "node_rank": 0, "world_size": 1, "local_world_size": 1, "num_nodes": 1}
    return World(**place, device=device, backend="gloo")


def rows(count: int = 10, **options: Any) -> ArrayLoader:
    options = {"batch_size": 2, "shuffle": False, "rank": 0, "world_size": 1, **options}
    return ArrayLoader({"n": torch.arange(count)}, **options)


def take(feed: Feed, epoch: int = 0) -> list[list[int]]:
    return [batch["n"].tolist() for batch in feed.take(epoch)]


class Loader:
    """A loader without state, which notes the epochs that it is told of."""

    def __init__(self, batches: int) -> None:
        self.epochs: list[int] = []
        self.closed = 0
        self._batches = batches

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        try:
            for index in range(self._batches):
                yield {"n": torch.tensor([index])}
        finally:
            self.closed += 1


def test_microbatches_come_in_groups_fewer_at_the_epochs_end_and_none_after_it() -> None:
    feed = Feed(rows(), accumulate=2, world=alone(CPU))
    assert [take(feed) for _ in range(4)] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]], []]
    assert take(feed, 1) == [[0, 1], [2, 3]]


def test_batches_are_moved_to_the_device_whatever_they_are_made_of() -> None:
    batch = {"x": torch.ones(2), "names": ["a", "b"], "pair": (torch.zeros(1), [torch.ones(3)])}
    (moved,) = Feed([batch], accumulate=1, world=alone(META)).take(0)
    assert moved["x"].device == moved["pair"][0].device == moved["pair"][1][0].device == META
    assert moved["names"] == ["a", "b"]
    assert isinstance(moved["pair"], tuple)
    (kept,) = Feed([batch], accumulate=1, world=alone(CPU)).take(0)
    assert kept["x"] is batch["x"], "copied without need"


def test_the_loaders_position_after_a_step_is_that_of_the_steps_last_batch() -> None:
    loader = rows()
    feed = Feed(loader, accumulate=2, world=alone(CPU))
    take(feed)
    assert loader.state_dict()["consumed"] == 4


@pytest.mark.parametrize("steps", range(8))
def test_a_resumed_feed_continues_with_the_next_batch_and_ends_each_epoch_once(steps: int) -> None:
    """Three steps and an end, twice: a state is taken after each of them."""

    def run(feed: Feed, count: int) -> list[list[list[int]]]:
        return [take(feed) for _ in range(count)]

    whole = run(Feed(rows(last_batch="partial", shuffle=True), accumulate=2, world=alone(CPU)), 12)
    first = Feed(rows(last_batch="partial", shuffle=True), accumulate=2, world=alone(CPU))
    done = run(first, steps)
    second = Feed(rows(last_batch="partial", shuffle=True), accumulate=2, world=alone(CPU))
    second.load_state_dict(first.state_dict())
    assert done + run(second, 12 - steps) == whole


def test_a_loader_without_state_is_told_each_epoch_and_starts_anew() -> None:
    loader = Loader(3)
    feed = Feed(loader, accumulate=2, world=alone(CPU))
    assert not feed.is_exact
    assert [take(feed, epoch) for epoch in (0, 0, 0, 1, 1, 1)] == [[[0], [1]], [[2]], []] * 2
    assert loader.epochs == [0, 1]
    assert feed.state_dict() == {"loader": None}
    feed.load_state_dict({"loader": None})
    assert take(feed, 5) == [[0], [1]]


def test_a_state_of_a_loader_with_state_is_no_harm_to_one_without() -> None:
    exact = Feed(rows(), accumulate=1, world=alone(CPU))
    take(exact)
    feed = Feed(Loader(2), accumulate=1, world=alone(CPU))
    feed.load_state_dict(exact.state_dict())
    assert take(feed) == [[0]]


def test_a_loader_that_never_has_a_batch_is_an_error_that_names_it() -> None:
    feed = Feed(Loader(0), accumulate=1, world=alone(CPU))
    assert feed.take(0) == [], "the rest of an epoch may be empty"
    with pytest.raises(TrainerError, match=r"epoch 1: loader=Loader gave no batch"):
        feed.take(1)


def test_the_loaders_own_error_comes_through_with_its_name() -> None:
    class Broken(Loader):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            yield {"n": torch.tensor([0])}
            raise OSError("shard train-7.tar cannot be read")

    feed = Feed(Broken(2), accumulate=1, world=alone(CPU))
    assert take(feed) == [[0]]
    with pytest.raises(OSError, match=r"train-7\.tar"):
        feed.take(0)


def test_a_feed_dropped_midway_closes_the_loaders_iteration() -> None:
    loader = Loader(3)
    feed = Feed(loader, accumulate=1, world=alone(CPU))
    take(feed)
    assert loader.closed == 0
    del feed
    assert loader.closed == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_skipped_steps_are_as_if_drawn_and_dropped_and_a_resumed_feed_goes_on_after_them(steps: int) -> None:
    feed = Feed(rows(12), accumulate=2, world=alone(CPU))  # three steps an epoch
    assert take(feed) == [[0, 1], [2, 3]]
    ended = feed.skip(steps, 0)
    again = Feed(rows(12), accumulate=2, world=alone(CPU))
    again.load_state_dict(feed.state_dict())
    following = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]][(1 + steps) % 3]
    assert ended == (1 + steps) // 3
    assert take(feed, ended) == take(again, ended) == following


def test_batches_of_a_loader_that_drops_samples_are_drawn_and_dropped(tmp_path: Path) -> None:
    pack(({"n": i} for i in range(40)), tmp_path / "rows", format="parquet")
    options: dict[str, Any] = {"batch_size": 2, "keep": lambda sample: sample["n"] % 2 == 0, "rank": 0, "world_size": 1}
    with DistributedDataLoader(tmp_path / "rows", **options) as loader:  # ten batches an epoch
        whole = [batch["n"].tolist() for _ in range(2) for batch in loader]
    with DistributedDataLoader(tmp_path / "rows", **options) as loader:
        feed = Feed(loader, accumulate=1, world=alone(CPU))
        feed.expect(None, lambda given, length: None, lambda epoch, taken: False)
        assert take(feed) == whole[:1]
        assert (feed.skip(3, 0), take(feed)) == (0, whole[4:5])
        assert (feed.skip(7, 0), take(feed, 1)) == (1, whole[12:13])


def test_batches_of_a_loader_that_cannot_skip_are_drawn_each_with_a_sign_of_life() -> None:
    loader = Loader(batches=4)
    feed = Feed(loader, accumulate=2, world=alone(CPU))
    drawn: list[None] = []
    feed.take(0)
    assert feed.skip(4, 0, lambda: drawn.append(None)) == 2
    assert len(drawn) == 4 + 2, "the ends of two epochs are looked at too"
    assert loader.epochs == [0, 1, 2]

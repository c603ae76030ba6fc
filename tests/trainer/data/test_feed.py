"""The feed: microbatches in groups, epochs one after another, a position that can be resumed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import DistributedDataLoader, TokenBudget, open_manifest, pack
from penstock.loader import CostExpression, index_costs, write_costs
from penstock.trainer import ArrayLoader, Mesh, TrainerError, World
from penstock.trainer.data.feed import Feed

CPU, META = torch.device("cpu"), torch.device("meta")


def alone(device: torch.device) -> Mesh:
    place = {"rank": 0, "local_rank": 0, "node_rank": 0, "world_size": 1, "local_world_size": 1, "num_nodes": 1}
    return Mesh(World(**place, device=device, backend="gloo"))


def rows(count: int = 10, **options: Any) -> ArrayLoader:
    options = {"batch_size": 2, "shuffle": False, "rank": 0, "world_size": 1, **options}
    return ArrayLoader({"n": torch.arange(count)}, **options)


@contextmanager
def closing_if(loader: Any) -> Iterator[Any]:
    yield loader
    if hasattr(loader, "close"):
        loader.close()


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
    feed = Feed(rows(), accumulate=2, mesh=alone(CPU))
    assert [take(feed) for _ in range(4)] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]], []]
    assert take(feed, 1) == [[0, 1], [2, 3]]


def test_batches_are_moved_to_the_device_whatever_they_are_made_of() -> None:
    batch = {"x": torch.ones(2), "names": ["a", "b"], "pair": (torch.zeros(1), [torch.ones(3)])}
    (moved,) = Feed([batch], accumulate=1, mesh=alone(META)).take(0)
    assert moved["x"].device == moved["pair"][0].device == moved["pair"][1][0].device == META
    assert moved["names"] == ["a", "b"]
    assert isinstance(moved["pair"], tuple)
    (kept,) = Feed([batch], accumulate=1, mesh=alone(CPU)).take(0)
    assert kept["x"] is batch["x"], "copied without need"


def test_the_loaders_position_after_a_step_is_that_of_the_steps_last_batch() -> None:
    loader = rows()
    feed = Feed(loader, accumulate=2, mesh=alone(CPU))
    take(feed)
    assert loader.state_dict()["consumed"] == 4


@pytest.mark.parametrize("steps", range(8))
def test_a_resumed_feed_continues_with_the_next_batch_and_ends_each_epoch_once(steps: int) -> None:
    """Three steps and an end, twice: a state is taken after each of them."""

    def run(feed: Feed, count: int) -> list[list[list[int]]]:
        return [take(feed) for _ in range(count)]

    whole = run(Feed(rows(last_batch="partial", shuffle=True), accumulate=2, mesh=alone(CPU)), 12)
    first = Feed(rows(last_batch="partial", shuffle=True), accumulate=2, mesh=alone(CPU))
    done = run(first, steps)
    second = Feed(rows(last_batch="partial", shuffle=True), accumulate=2, mesh=alone(CPU))
    second.load_state_dict(first.state_dict())
    assert done + run(second, 12 - steps) == whole


def test_a_loader_without_state_is_told_each_epoch_and_starts_anew() -> None:
    loader = Loader(3)
    feed = Feed(loader, accumulate=2, mesh=alone(CPU))
    assert not feed.is_exact
    assert [take(feed, epoch) for epoch in (0, 0, 0, 1, 1, 1)] == [[[0], [1]], [[2]], []] * 2
    assert loader.epochs == [0, 1]
    assert feed.state_dict() == {"loader": None}
    feed.load_state_dict({"loader": None})
    assert take(feed, 5) == [[0], [1]]


def test_a_state_of_a_loader_with_state_is_no_harm_to_one_without() -> None:
    exact = Feed(rows(), accumulate=1, mesh=alone(CPU))
    take(exact)
    feed = Feed(Loader(2), accumulate=1, mesh=alone(CPU))
    feed.load_state_dict(exact.state_dict())
    assert take(feed) == [[0]]


def test_a_loader_that_never_has_a_batch_is_an_error_that_names_it() -> None:
    feed = Feed(Loader(0), accumulate=1, mesh=alone(CPU))
    assert feed.take(0) == [], "the rest of an epoch may be empty"
    with pytest.raises(TrainerError, match=r"epoch 1: loader=Loader gave no batch"):
        feed.take(1)


def test_the_loaders_own_error_comes_through_with_its_name() -> None:
    class Broken(Loader):
        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            yield {"n": torch.tensor([0])}
            raise OSError("shard train-7.tar cannot be read")

    feed = Feed(Broken(2), accumulate=1, mesh=alone(CPU))
    assert take(feed) == [[0]]
    with pytest.raises(OSError, match=r"train-7\.tar"):
        feed.take(0)


def test_a_feed_dropped_midway_closes_the_loaders_iteration() -> None:
    loader = Loader(3)
    feed = Feed(loader, accumulate=1, mesh=alone(CPU))
    take(feed)
    assert loader.closed == 0
    del feed
    assert loader.closed == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_skipped_steps_are_as_if_drawn_and_dropped_and_a_resumed_feed_goes_on_after_them(steps: int) -> None:
    feed = Feed(rows(12), accumulate=2, mesh=alone(CPU))  # three steps an epoch
    assert take(feed) == [[0, 1], [2, 3]]
    ended = feed.skip(steps, 0)
    again = Feed(rows(12), accumulate=2, mesh=alone(CPU))
    again.load_state_dict(feed.state_dict())
    following = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]][(1 + steps) % 3]
    assert ended == (1 + steps) // 3
    assert take(feed, ended) == take(again, ended) == following


class Counted:
    """Epochs of these many batches, the last of which is repeated; as a user writes it, with what is asked for."""

    def __init__(self, *epochs: int) -> None:
        self._epochs = epochs
        self.epoch, self._at = 0, 0

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self._go_on()
        epoch = self.epoch
        while self._at < self._batches:
            self._at += 1
            yield {"n": torch.tensor([epoch, self._at - 1])}
        self._go_on()

    def skip_batches(self, count: int) -> None:
        for _ in range(count):
            self._go_on()
            self._at += 1
        self._go_on()

    @property
    def _batches(self) -> int:
        return self._epochs[min(self.epoch, len(self._epochs) - 1)]

    def _go_on(self) -> None:
        if self._at == self._batches:
            self.epoch, self._at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self._at = state["epoch"], state["at"]


class Sized(Counted):
    def __len__(self) -> int:
        return self._batches


class SaysWhatIsLeft(Counted):
    @property
    def steps_left(self) -> int:
        return self._batches - self._at


def drawn_steps(epochs: list[list[list[int]]], accumulate: int) -> list[tuple[int, list[list[int]]]]:
    """Each step's epoch and batches, as one draws them."""
    return [
        (epoch, batches[start : start + accumulate])
        for epoch, batches in enumerate(epochs)
        for start in range(0, len(batches), accumulate)
    ]


@pytest.fixture(scope="module")
def ten_batches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ten")
    pack(({"n": i, "cost": 1 + i % 5} for i in range(20)), folder / "rows", format="parquet")
    manifest, expression = open_manifest(str(folder / "rows"), progress=False), CostExpression.parse("cost")
    write_costs(manifest, expression, index_costs(manifest, expression, progress=False))
    return folder / "rows"


@pytest.mark.parametrize("accumulate", [1, 3, 4, 10, 16])
@pytest.mark.parametrize("kind", ["arrays", "loader", "tokens", "counted", "sized", "left", "uneven"])
def test_skipped_steps_end_with_their_epoch_whatever_accumulates_and_whatever_the_loader_says(
    ten_batches: Path, kind: str, accumulate: int
) -> None:
    counted = {"counted": Counted, "sized": Sized, "left": SaysWhatIsLeft, "uneven": SaysWhatIsLeft}

    def make() -> Any:
        if kind == "arrays":
            return rows(20, shuffle=True)
        if kind in counted:
            return counted[kind](*((10, 4, 7, 1, 5) if kind == "uneven" else (10,)))
        options: dict[str, Any] = {"batch_size": 2, "columns": ["n"], "rank": 0, "world_size": 1}
        if kind == "tokens":  # epochs of different numbers of batches
            options = {**options, "batch_tokens": TokenBudget(tokens=10, index="cost")}
            del options["batch_size"]
        return DistributedDataLoader(ten_batches, **options)

    def values(batch: dict[str, torch.Tensor]) -> list[int]:
        return batch["n"].tolist()

    with closing_if(make()) as loader:
        epochs = [[values(batch) for batch in loader] for _ in range(9)]
    whole = drawn_steps(epochs, accumulate)
    for done, steps in ((1, 1), (1, 2), (3, 1), (2, 5)):
        with closing_if(make()) as loader, closing_if(make()) as other:
            feed = Feed(loader, accumulate=accumulate, mesh=alone(CPU))
            found = [feed.take(0) for _ in range(done + whole[done - 1][0])]
            assert [list(map(values, one)) for one in found if one] == [step for _, step in whole[:done]]
            epoch = whole[done - 1][0]
            assert feed.skip(steps, epoch) == whole[done + steps][0] - epoch
            again = Feed(other, accumulate=accumulate, mesh=alone(CPU))
            again.load_state_dict(feed.state_dict())
            for one in (feed, again):
                assert list(map(values, one.take(whole[done + steps][0]))) == whole[done + steps][1]


def test_batches_of_a_loader_that_drops_samples_are_drawn_and_dropped(tmp_path: Path) -> None:
    pack(({"n": i} for i in range(40)), tmp_path / "rows", format="parquet")
    options: dict[str, Any] = {"batch_size": 2, "keep": lambda sample: sample["n"] % 2 == 0, "rank": 0, "world_size": 1}
    with DistributedDataLoader(tmp_path / "rows", **options) as loader:  # ten batches an epoch
        whole = [batch["n"].tolist() for _ in range(2) for batch in loader]
    with DistributedDataLoader(tmp_path / "rows", **options) as loader:
        feed = Feed(loader, accumulate=1, mesh=alone(CPU))
        feed.expect(None, lambda given, length: None, lambda epoch, taken: False)
        assert take(feed) == whole[:1]
        assert (feed.skip(3, 0), take(feed)) == (0, whole[4:5])
        assert (feed.skip(7, 0), take(feed, 1)) == (1, whole[12:13])


def test_batches_of_a_loader_that_cannot_skip_are_drawn_each_with_a_sign_of_life() -> None:
    loader = Loader(batches=4)
    feed = Feed(loader, accumulate=2, mesh=alone(CPU))
    drawn: list[None] = []
    feed.take(0)
    assert feed.skip(4, 0, lambda: drawn.append(None)) == 2
    assert len(drawn) == 4 + 2, "the ends of two epochs are looked at too"
    assert loader.epochs == [0, 1, 2]

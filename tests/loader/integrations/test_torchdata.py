"""Graphs of torchdata's nodes over the loader resume exactly, also what their threads had in hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_rows import once_an_epoch, write_rows

from penstock import DistributedDataLoader

pytestmark = pytest.mark.slow
BATCH, STEPS = 10, 12


@pytest.fixture
def rows(tmp_path: Path) -> str:
    pytest.importorskip("torchdata", reason="install penstock[integrations]")
    write_rows(tmp_path / "rows")
    return str(tmp_path / "rows")


def open_loader(rows: str, **options: Any) -> DistributedDataLoader[dict[str, Any]]:
    return DistributedDataLoader(rows, **{"batch_size": BATCH, "with_ids": True, "rank": 0, "world_size": 1, **options})


def open_graph(loader: DistributedDataLoader[Any], kind: str) -> Any:
    from torchdata.nodes import BaseNode, Loader, ParallelMapper, Prefetcher

    from penstock.loader.integrations import LoaderNode

    source: BaseNode[Any] = LoaderNode(loader)
    if kind == "prefetched":
        source = Prefetcher(ParallelMapper(source, to_ids, num_workers=2, method="thread"), prefetch_factor=3)
    return Loader(source)


def to_ids(batch: dict[str, Any]) -> dict[str, Any]:
    return {"__id__": batch["__id__"]}


def ids(batches: Any) -> list[list[int]]:
    return [batch["__id__"].tolist() for batch in batches]


@pytest.mark.parametrize("kind", ["alone", "prefetched"])
def test_a_graph_delivers_what_the_loader_does_and_resumes_at_every_step(rows: str, kind: str) -> None:
    with open_loader(rows) as loader:
        unbroken = ids(loader) + ids(loader)
    with open_loader(rows) as loader:
        graph, states = open_graph(loader, kind), []
        seen = []
        for _ in range(2):
            for batch in graph:
                seen += ids([batch])
                states.append(graph.state_dict())
        assert seen == unbroken
    for step in (1, 5, 11, 12, 13, 23):
        with open_loader(rows) as loader:
            graph = open_graph(loader, kind)
            graph.load_state_dict(states[step - 1])
            rest = ids(graph)
            if step < STEPS:
                rest += ids(graph)
            assert rest == unbroken[step:]


def test_a_graphs_state_continues_on_another_number_of_ranks(rows: str) -> None:
    with (
        open_loader(rows, batch_size=5, world_size=2) as first,
        open_loader(rows, batch_size=5, rank=1, world_size=2) as second,
    ):
        graphs = [open_graph(loader, "prefetched") for loader in (first, second)]
        passes: list[Iterator[Any]] = [iter(graph) for graph in graphs]
        seen = [[i for one in passes for i in next(one)["__id__"].tolist()] for _ in range(7)]
        state = graphs[0].state_dict()
    with open_loader(rows) as loader:
        graph = open_graph(loader, "prefetched")
        graph.load_state_dict(state)
        assert once_an_epoch(seen + ids(graph), 1)


@pytest.mark.parametrize("left_at", [1, 9, 12])
def test_a_pass_left_early_is_followed_by_the_next_epoch_however_far_the_threads_are(rows: str, left_at: int) -> None:
    with open_loader(rows) as loader:
        unbroken = ids(loader) + ids(loader)
    with open_loader(rows) as loader:
        graph = open_graph(loader, "prefetched")
        for step, _ in enumerate(graph, start=1):
            if step == left_at:
                break
        assert ids(graph) == unbroken[STEPS:]


def test_sources_that_are_drawn_from_end_where_they_did_also_when_resumed_behind_their_last_batch(rows: str) -> None:
    from torchdata.nodes import Loader, MultiNodeWeightedSampler, StopCriteria

    from penstock.loader.integrations import LoaderNode

    def draw(state: Any = None) -> tuple[list[list[int]], list[Any]]:
        with open_loader(rows) as long, open_loader(rows, batch_size=2 * BATCH, seed=9) as short:
            sources = {"long": LoaderNode(long), "short": LoaderNode(short)}
            weights = {"long": 0.5, "short": 0.5}
            stop = StopCriteria.ALL_DATASETS_EXHAUSTED
            graph = Loader(MultiNodeWeightedSampler(sources, weights, stop_criteria=stop))
            if state is not None:
                graph.load_state_dict(state)
            seen, states = [], []
            for batch in graph:
                seen += ids([batch])
                states.append(graph.state_dict())
        return seen, states

    whole, states = draw()
    assert len(whole) == STEPS + STEPS // 2
    for step in range(8, len(whole)):
        assert draw(states[step - 1])[0] == whole[step:]


def test_a_state_without_the_epoch_of_its_pass_is_the_loaders(rows: str) -> None:
    with open_loader(rows) as loader:
        unbroken = ids(loader)
        loader.set_epoch(0)
        graph = open_graph(loader, "alone")
        for step, _ in enumerate(graph, start=1):
            if step == 5:
                break
        state = graph.state_dict()
        root = next(value for value in state.values() if isinstance(value, dict) and "pass_epoch" in value)
        bare = {name: value["loader"] if value is root else value for name, value in state.items()}
        graph = open_graph(loader, "alone")
        graph.load_state_dict(bare)
        assert ids(graph) == unbroken[5:]


def loop(loader: Any, steps: int, state: Any = None) -> tuple[list[list[int]], Any]:
    """Code as it is written for torchdata's ``StatefulDataLoader``."""
    if state is not None:
        loader.load_state_dict(state)
    seen: list[list[int]] = []
    while True:
        for batch in loader:
            seen.append(batch["__id__"].tolist())
            if len(seen) == steps:
                return seen, loader.state_dict()


@pytest.mark.filterwarnings("ignore:.*set_vital")  # torchdata calls it
@pytest.mark.parametrize("stop", [5, 12, 17])
def test_code_for_a_stateful_data_loader_works_with_the_loader_itself(rows: str, stop: int) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    samples = [{"__id__": i} for i in range(120)]

    def theirs() -> Any:
        return StatefulDataLoader(samples, batch_size=BATCH)

    def ours() -> Any:
        return open_loader(rows, shuffle=False)

    for make in (theirs, ours):
        unbroken, _ = loop(make(), 30)
        before, state = loop(make(), stop)
        after, _ = loop(make(), 30 - stop, state)
        assert before + after == unbroken, make

from __future__ import annotations

import pytest

from penstock.trainer import TrainerConfigError
from penstock.trainer.parallel.pipeline.orders import (
    SCHEDULES,
    Action,
    Order,
    count_stages,
    make_flush,
    make_order,
    place_stages,
)


def orders() -> list[tuple[str, int, int]]:
    return [(schedule, ranks, parts) for schedule in SCHEDULES for ranks in (2, 4) for parts in (8, 16)]


def play(order: Order, parts: int) -> None:
    """Run the actions of all ranks, each as soon as what it needs is there, and fail where none can go on."""
    stages = len(order.rank_of)
    left = [list(one) for one in order.actions]
    sent: set[tuple[str, int, int]] = set()
    done: set[tuple[str, int, int]] = set()

    def can(rank: int, one: Action) -> bool:
        if one.kind.startswith("RECV"):
            return (one.kind[-1], one.stage, one.part) in sent
        peer = one.stage - 1 if one.kind == "F" else one.stage + 1
        if one.kind in ("F", "B", "I") and 0 <= peer < stages:
            if order.rank_of[peer] == rank:
                return (one.kind if one.kind == "F" else "B", peer, one.part) in done
            return (f"RECV_{'F' if one.kind == 'F' else 'B'}", one.stage, one.part) in done
        return True

    while any(left):
        moved = False
        for rank, row in enumerate(left):
            while row and can(rank, row[0]):
                one = row.pop(0)
                moved = True
                if one.kind.startswith("SEND"):
                    sent.add((one.kind[-1], one.stage + (1 if one.kind == "SEND_F" else -1), one.part))
                done.add(("B" if one.kind == "I" else one.kind, one.stage, one.part))
        assert moved, "the ranks wait for each other"
    assert {one for one in done if one[0] == "B"} == {("B", at, part) for at in range(stages) for part in range(parts)}


@pytest.mark.parametrize(("schedule", "ranks", "parts"), orders())
def test_every_schedule_comes_to_its_end_with_each_part_once(schedule: str, ranks: int, parts: int) -> None:
    stages = count_stages(schedule, ranks, 0)
    order = make_order(schedule, ranks, stages, parts)
    play(order, parts)
    counted = [one for row in order.actions for one in row if one.kind in ("F", "B", "I")]
    assert len(counted) == len(set(counted)) == 2 * stages * parts


@pytest.mark.parametrize("parts", [1, 3])
def test_short_batches_flow_through_any_placement(parts: int) -> None:
    for rank_of in ((0, 1), (0, 1, 0, 1), (1, 0, 0, 1), (0, 1, 2, 3)):
        play(make_flush(rank_of, parts), parts)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("ranks", "parts"), [(2, 2), (2, 8), (4, 8)])
def test_the_bubble_is_that_of_the_formula(schedule: str, ranks: int, parts: int) -> None:
    order = make_order(schedule, ranks, ranks, parts)
    assert order.idle_share() == pytest.approx((ranks - 1) / (parts + ranks - 1))


def test_zero_bubbles_wait_less() -> None:
    shares = {name: make_order(name, 4, count_stages(name, 4, 0), 16).idle_share() for name in SCHEDULES}
    assert shares["ZBVZeroBubble"] < shares["Interleaved1F1B"] < shares["1F1B"]


def test_the_last_rank_has_the_last_stage() -> None:
    for schedule in SCHEDULES:
        stages = count_stages(schedule, 4, 0)
        placed = place_stages(schedule, 4, stages)
        assert placed[-1] == 3
        assert sorted(set(placed)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("schedule", "parts", "words"),
    [
        ("1F1b", 8, "did you mean '1F1B'"),
        ("ZeroBubble", 8, "parallel.schedule='ZeroBubble' is not known"),
        ("1F1B", 3, "parallel.microbatches=3 is less than the 4 stages.*use 4 or more"),
        ("DualPipeV", 4, "parallel.microbatches=4 is less than the 8 stages"),
        ("Interleaved1F1B", 9, "parallel.microbatches=9 does not fill rounds.*use 8 or 12"),
    ],
)
def test_what_a_schedule_cannot_do_is_refused(schedule: str, parts: int, words: str) -> None:
    with pytest.raises(TrainerConfigError, match=words):
        make_order(schedule, 4, count_stages(schedule, 4, 0), parts)


def test_a_number_of_stages_that_a_schedule_cannot_place_is_refused() -> None:
    with pytest.raises(TrainerConfigError, match=r"parallel.stages gives 3 stages.*parallel.pp=2 ranks needs 2"):
        count_stages("1F1B", 2, 3)
    with pytest.raises(TrainerConfigError, match="a multiple of 2"):
        count_stages("LoopedBFS", 2, 3)

"""A rank that falls silent is missed by the one before it, and by nobody who was away itself."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from penstock.loader.ranks.peers import SIGN_S, Seen, Signs, judge, look_on
from penstock.storage.store_link import SILENT_S


def exchange_all(ranks: list[Signs], store: dist.Store, now_s: float) -> list[str]:
    found = [rank.exchange(store, now_s) for rank in ranks]
    return [f"{one.rank} {one.text}" for one in found if one is not None]


def live(ranks: list[Signs], store: dist.Store, start_s: float, seconds: float) -> list[str]:
    told: list[str] = []
    for tick in range(int(seconds / SIGN_S)):
        told += exchange_all(ranks, store, start_s + tick * SIGN_S)
    return told


def test_ranks_that_give_signs_are_not_missed_and_one_that_leaves_is_not_either() -> None:
    store = dist.HashStore()
    ranks = [Signs(rank, 4, 0.0) for rank in range(4)]
    assert live(ranks, store, 0.0, 10 * SILENT_S) == []
    ranks.pop(2).leave(store)
    assert live(ranks, store, 10 * SILENT_S, 10 * SILENT_S) == []


def test_of_a_host_that_is_cut_off_the_first_rank_is_named_with_its_host_in_two_minutes() -> None:
    store = dist.HashStore()
    ranks = [Signs(rank, 6, 0.0) for rank in range(6)]
    live(ranks, store, 0.0, 60.0)
    told = live([ranks[0], ranks[1], ranks[5]], store, 60.0, SILENT_S - SIGN_S)
    assert told == []
    told = live([ranks[0], ranks[1], ranks[5]], store, 60.0 + SILENT_S - SIGN_S, 4 * SIGN_S)
    assert told
    assert {one.split()[0] for one in told} == {"2"}
    assert "no sign of life for 12" in told[0]
    assert "down or cut off; start again without that host" in told[0]


def test_who_was_suspended_itself_gives_the_others_as_long_again() -> None:
    seen = look_on(None, 1, "7 node-1", 0.0, 0.0)
    seen = look_on(seen, 1, "7 node-1", 2 * SILENT_S, SIGN_S)
    assert judge(seen, 2 * SILENT_S) is None
    assert judge(seen, 3 * SILENT_S + 1) is not None


@pytest.mark.parametrize("silent_s", [SILENT_S - 1, SILENT_S + 1])
def test_a_silence_is_an_error_from_a_length_on(silent_s: float) -> None:
    found = judge(Seen(3, "9 node-2", 100.0), 100.0 + silent_s)
    assert (found is None) == (silent_s < SILENT_S)
    assert found is None or (found.rank == 3 and "its host, node-2, is down" in found.text)

"""The judgement over heartbeats: who is the cause."""

from __future__ import annotations

from typing import Any

from penstock.trainer.watch.heartbeat import Beat, Sighting, State, describe_lost_store, judge


def sight(phase: str, in_phase_s: float, *, silent_s: float = 0.1, timeout_s: float = 10.0, **fields: Any) -> Sighting:
    """A rank seen at time 100 that had been in its phase for ``in_phase_s`` by then."""
    beat = Beat(phase=phase, timeout_s=timeout_s, since_s=in_phase_s - silent_s, **fields)
    return Sighting(beat=beat, changed_at_s=100.0 - silent_s)


def cause(*sightings: Sighting) -> str | None:
    return judge(dict(enumerate(sightings)), 100.0, 10.0)


def test_ranks_that_go_on_are_left_alone() -> None:
    assert cause(sight("backward", 6.0), sight("fetch", 6.9), sight("forward", 0.0)) is None


def test_the_rank_that_keeps_the_others_waiting_is_named_with_what_it_does() -> None:
    sentence = cause(
        sight("backward", 7.4, details={"step": 3}, count=9),
        sight("fetch", 7.2, details={"step": 3, "shard": "a.tar"}, count=8),
    )
    assert sentence is not None
    assert sentence.startswith(
        "rank 1 is stalled in fetch (step=3, shard=a.tar) for 7.2 s. The others: rank 0 in backward"
    )


def test_the_victims_being_overdue_first_does_not_make_them_the_cause() -> None:
    assert cause(sight("backward", 7.4, count=9), sight("fetch", 6.0, count=8)) is None


def test_among_ranks_in_collectives_the_one_furthest_behind_is_named() -> None:
    sentence = cause(
        sight("backward", 7.5, details={"step": 4}, count=9),
        sight("forward", 7.5, details={"step": 4}, count=8),
        sight("forward", 7.5, details={"step": 5}, count=7),
    )
    assert sentence is not None
    assert sentence.startswith("rank 1 is stalled in forward (step=4)")


def test_ranks_that_all_wait_in_the_same_place_are_all_named() -> None:
    sentence = cause(sight("collective", 8.0, count=2), sight("collective", 8.0, count=2))
    assert sentence is not None
    assert "rank 0 is stalled in collective" in sentence
    assert "rank 1 is stalled in collective" in sentence


def test_of_ranks_in_the_same_place_one_that_is_cut_off_is_named_and_not_those_that_wait_for_it() -> None:
    sentence = cause(
        sight("backward", 7.5, details={"step": 4}, count=9),
        sight("backward", 7.5, details={"step": 4}, count=9, silent_s=6.9, host="node-7"),
    )
    assert sentence is not None
    assert sentence.startswith("rank 1 has sent no heartbeat for 6.9 s (its process is dead, stopped or starved, or ")
    assert "or its host, node-7, is down or cut off), last seen in backward (step=4)" in sentence
    assert "The others: rank 0 in backward" in sentence


def test_a_phase_with_a_longer_timeout_also_holds_back_those_who_wait_for_it() -> None:
    assert cause(sight("backward", 9.9), sight("compile", 50.0, timeout_s=100.0)) is None
    sentence = cause(sight("backward", 71.0), sight("compile", 71.0, timeout_s=100.0))
    assert sentence is not None
    assert sentence.startswith("rank 1 is stalled in compile")


def test_who_waited_for_a_rank_in_such_a_phase_starts_anew_when_it_ends() -> None:
    after = {0: sight("backward", 50.0, count=9), 1: sight("backward", 1.0, count=9)}
    assert judge(after, 100.0, 10.0, excused_at_s=99.0) is None
    assert judge(after, 100.0, 10.0, excused_at_s=92.0) is not None


def test_ranks_that_all_hang_in_a_phase_with_a_longer_timeout_are_stopped_after_that() -> None:
    hanging = {rank: sight("checkpoint", 65.0, timeout_s=100.0) for rank in range(2)}
    assert judge(hanging, 100.0, 10.0, excused_at_s=100.0) is None
    assert judge(hanging, 106.0, 10.0, excused_at_s=106.0) is not None


def test_a_rank_on_its_own_for_too_long_is_named_though_others_are_behind() -> None:
    sentence = cause(sight("fetch", 1.0, details={"step": 2}), sight("forward", 8.6, details={"step": 7}))
    assert sentence is not None
    assert sentence.startswith("rank 1 is stalled in forward (step=7)")


def test_silence_is_judged_before_slowness_and_sooner_when_a_collective_broke() -> None:
    sentence = cause(sight("backward", 8.0), sight("fetch", 8.0, silent_s=7.5))
    assert sentence is not None
    assert sentence.startswith("rank 1 has sent no heartbeat for 7.5 s")
    assert cause(sight("backward", 2.5), sight("fetch", 2.5, silent_s=2.5)) is None
    sentence = cause(sight("backward", 2.5, state=State.BROKEN_OFF), sight("fetch", 2.5, silent_s=2.5))
    assert sentence is not None
    assert sentence.startswith("rank 1 has sent no heartbeat for 2.5 s")


def test_a_failure_is_named_with_its_error_and_the_done_are_not_missed() -> None:
    sentence = cause(
        sight("stop", 99.0, silent_s=99.0, state=State.CLOSED),
        sight("forward", 1.0, state=State.FAILED, error="ValueError: no such label"),
    )
    assert sentence == "rank 1 failed in forward after 1 s: ValueError: no such label. The others: rank 0 done"
    at_once = cause(sight("reduce", 0.0), sight("forward", 0.04, state=State.FAILED, error="ValueError: no such label"))
    assert at_once is not None
    assert at_once.startswith("rank 1 failed in forward: ValueError: no such label. The others: rank 0 in reduce")
    assert cause(sight("stop", 99.0, silent_s=99.0, state=State.CLOSED), sight("forward", 1.0)) is None


def test_a_broken_collective_that_nothing_explains_is_told_in_the_end() -> None:
    broken = {"state": State.BROKEN_OFF, "error": "RuntimeError: gloo"}
    assert cause(sight("backward", 1.0, broken_s=4.0, **broken), sight("backward", 1.0)) is None
    sentence = cause(sight("backward", 1.0, broken_s=6.0, **broken), sight("backward", 1.0))
    assert sentence is not None
    assert sentence.startswith("a collective failed on rank 0 in backward for 1.0 s: RuntimeError: gloo")


def test_a_death_is_named_in_seconds_whatever_the_timeout() -> None:
    broken = sight("backward", 6.0, state=State.BROKEN_OFF, error="RuntimeError: gloo", timeout_s=600.0)
    for silent_s, is_judged in ((4.5, False), (5.5, True)):
        dead = sight("backward", 6.0, silent_s=silent_s, timeout_s=600.0)
        sentence = judge({0: broken, 1: dead}, 100.0, 600.0)
        assert (sentence is not None) == is_judged
        assert sentence is None or sentence.startswith("rank 1 has sent no heartbeat for 5.5 s")


def test_a_rank_never_heard_of_is_named() -> None:
    sentence = judge({0: sight("start", 1.0), 1: Sighting(beat=None, changed_at_s=92.0)}, 100.0, 10.0)
    assert sentence is not None
    assert sentence.startswith("rank 1 has not been heard of for 8.0 s since the start")


def test_of_many_ranks_a_few_are_named_and_the_rest_counted() -> None:
    sentence = cause(sight("fetch", 8.0), *(sight("backward", 8.0) for _ in range(20)))
    assert sentence is not None
    assert sentence.endswith("; 12 more")


def test_a_beat_survives_the_store() -> None:
    beat = Beat(
        phase="fetch", details={"shard": "a"}, count=3, state=State.FAILED, error="x", timeout_s=1.0, sequence=7
    )
    assert Beat.from_text(beat.to_text().encode()) == beat


def test_a_store_that_another_agent_hosts_is_not_taken_for_rank_0s() -> None:
    def lost(*, has_store: bool, is_here: bool = False) -> str:
        first = sight("forward", 3.0, host="node-3", has_store=has_store)
        return describe_lost_store(first, 100.0, "is gone", place="10.0.0.9:29400", is_here=is_here)

    assert lost(has_store=True) == (
        "the key-value store at 10.0.0.9:29400 on rank 0's node is gone: rank 0 or its node (node-3) is dead or "
        "stopped or cut off from this one, last seen in forward for 3.0 s"
    )
    assert lost(has_store=False) == (
        "the key-value store at 10.0.0.9:29400 is gone: its host, where another torchrun agent keeps it, is dead "
        "or stopped or cut off from this one; rank 0, on node-3, was last seen in forward for 3.0 s"
    )
    assert "cut off" not in lost(has_store=True, is_here=True)


def test_a_store_that_is_lost_before_rank_0_was_seen_is_told_by_its_place_alone() -> None:
    unseen = Sighting(beat=None, changed_at_s=0.0)
    sentence = describe_lost_store(unseen, 100.0, "has not answered for 9.0 s", place="", is_here=False)
    assert sentence.startswith(
        "the key-value store on rank 0's node has not answered for 9.0 s: rank 0 or its node is "
    )

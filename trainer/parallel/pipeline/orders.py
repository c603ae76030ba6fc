"""Order of forwards and backwards on each rank: torch's schedules by name, as tables of actions."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from ...errors import TrainerConfigError
from ...options import suggest

ONE_STAGE = ("GPipe", "1F1B")
"""Schedules with one stage a rank."""

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
"""Schedules with two stages a rank: of p ranks, the last has the first stage and the last, the one before it the next
ones inwards. Of losses the last rank knows, whatever the schedule."""

LOOPED = ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS")
"""Schedules with several stages a rank: of p ranks, rank r has stages r, r + p, r + 2p, ..."""

SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
"""Schedules that run the backward of inputs and that of weights apart."""

SCHEDULES = (*ONE_STAGE, *LOOPED, *V_SHAPED)

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
"""Forward; backward of both inputs and weights; of inputs alone; of weights alone; messages before and after them."""

_COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@dataclass(frozen=True)
class Action:
    """One thing that a rank does: with which of its stages, and which part of the batch."""

    kind: Kind
    stage: int
    part: int


@dataclass(frozen=True, kw_only=True)
class Order:
    """Actions of each rank of a pipeline, in order; ``rank_of`` has the rank of each stage."""

    actions: list[list[Action]]
    rank_of: tuple[int, ...]

    def idle_share(self) -> float:
        """The share of all ranks' time in which they wait: the bubble, where a backward takes two forwards' time.

        All stages take as long, and messages no time. For GPipe and 1F1B this is (p - 1) / (m + p - 1).
        """
        stages = len(self.rank_of)
        done: dict[tuple[str, int, int], float] = {}
        times = [0.0] * len(self.actions)
        left = [[one for one in actions if one.kind in _COST] for actions in self.actions]
        busy = sum(_COST[one.kind] for actions in left for one in actions)
        while any(left):
            for rank, actions in enumerate(left):
                while actions and (ready := _ready_at(actions[0], stages, done)) is not None:
                    one = actions.pop(0)
                    times[rank] = max(times[rank], ready) + _COST[one.kind]
                    done["B" if one.kind == "I" else one.kind, one.stage, one.part] = times[rank]
        return 1.0 - busy / (max(times) * len(times))


def _ready_at(action: Action, stages: int, done: dict[tuple[str, int, int], float]) -> float | None:
    """Time at which what the action needs from other stages is there, or None while it is not."""
    if action.kind == "F":
        return done.get(("F", action.stage - 1, action.part)) if action.stage else 0.0
    if action.kind == "W":
        return 0.0  # after its own stage's, which this rank has done
    if action.stage == stages - 1:
        return done.get(("F", action.stage, action.part))
    return done.get(("B", action.stage + 1, action.part))


def check_schedule(name: str) -> None:
    """Refuse a schedule that does not exist."""
    if name not in SCHEDULES:
        raise TrainerConfigError(f"parallel.schedule={name!r} is not known; {suggest(name, SCHEDULES)}")


def count_stages(schedule: str, ranks: int, named: int) -> int:
    """Number of stages: those that are ``named``, or as many as the schedule needs where none are.

    Raises:
        TrainerConfigError: a number that the schedule, or the ranks, cannot have.
    """
    check_schedule(schedule)
    usual = ranks if schedule in ONE_STAGE else 2 * ranks
    if not named:
        return usual
    wrong = named % ranks if schedule in LOOPED else named != usual
    if wrong:
        wanted = f"a multiple of {ranks}" if schedule in LOOPED else str(usual)
        raise TrainerConfigError(
            f"parallel.stages gives {named} stages, and parallel.schedule={schedule!r} on parallel.pp={ranks} ranks "
            f"needs {wanted}; name that many, or leave parallel.stages out"
        )
    return named


def place_stages(schedule: str, ranks: int, stages: int) -> tuple[int, ...]:
    """The rank of each stage."""
    if schedule in V_SHAPED:
        return tuple(ranks - 1 - min(stage, stages - 1 - stage) for stage in range(stages))
    return tuple(stage % ranks for stage in range(stages))


def make_order(schedule: str, ranks: int, stages: int, parts: int) -> Order:
    """The table of a schedule for ``parts`` parts of a batch.

    Raises:
        TrainerConfigError: the schedule cannot have that many parts.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    check_schedule(schedule)
    rank_of = place_stages(schedule, ranks, stages)
    if schedule in ("1F1B", "DualPipeV") and parts < stages:
        raise TrainerConfigError(
            f"parallel.microbatches={parts} is less than the {stages} stages, and parallel.schedule={schedule!r} needs "
            f"one for each; use {stages} or more, or parallel.schedule='GPipe'"
        )
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and parts % max(1, parts // ranks):
        most = parts // ranks * ranks
        raise TrainerConfigError(
            f"parallel.microbatches={parts} does not fill rounds of parallel.pp={ranks}, which "
            f"parallel.schedule={schedule!r} needs; use {most} or {most + ranks}"
        )
    if schedule == "1F1B":  # whose table in torch is for display: its last rank begins with the second part
        return Order(
            actions=_with_messages([_one_by_one(r, ranks, parts) for r in range(ranks)], rank_of), rank_of=rank_of
        )
    made = get_schedule_class(schedule)
    own = [_stub(stage, ranks, stages) for stage in range(stages) if rank_of[stage] == rank_of[0]]
    argument: Any = own if issubclass(made, PipelineScheduleMulti) else own[0]
    table = made(argument, n_microbatches=parts, scale_grads=False).pipeline_order
    actions = [_compute(table[rank]) for rank in (reversed(range(ranks)) if schedule in V_SHAPED else range(ranks))]
    return Order(actions=_with_messages(actions, rank_of), rank_of=rank_of)


def make_flush(rank_of: tuple[int, ...], parts: int) -> Order:
    """All forwards, then all backwards: for as many parts as there are, wherever the stages lie."""
    ranks, stages = max(rank_of) + 1, range(len(rank_of))
    actions = [
        [Action("F", stage, part) for stage in stages if rank_of[stage] == rank for part in range(parts)]
        + [Action("B", stage, part) for stage in reversed(stages) if rank_of[stage] == rank for part in range(parts)]
        for rank in range(ranks)
    ]
    return Order(actions=_with_messages(actions, rank_of), rank_of=rank_of)


def _one_by_one(rank: int, ranks: int, parts: int) -> list[Action]:
    """One forward, one backward, after forwards of as many parts as stages follow (Narayanan et al. 2019)."""
    ahead = min(parts, ranks - 1 - rank)
    row = [Action("F", rank, part) for part in range(ahead)]
    for part in range(parts):
        row += [Action("F", rank, part + ahead)] if part + ahead < parts else []
        row.append(Action("B", rank, part))
    return row


def _stub(stage: int, ranks: int, stages: int) -> Any:
    """Attributes of a stage that torch's schedules read when they make their tables."""
    return SimpleNamespace(
        stage_index=stage,
        num_stages=stages,
        group_size=ranks,
        group_rank=0,
        is_first=stage == 0,
        is_last=stage == stages - 1,
        submod=None,
        has_backward=True,
    )


def _compute(table: list[Any]) -> list[Action]:
    """The computing actions of a row of torch's table, without waits, messages, and hints for FSDP."""
    single = [one for entry in table if entry is not None for one in entry.sub_actions or (entry,)]
    kinds = [(one.computation_type.value, one) for one in single]
    return [Action(kind, one.stage_index, one.microbatch_index) for kind, one in kinds if kind in _COST]


def _with_messages(actions: list[list[Action]], rank_of: tuple[int, ...]) -> list[list[Action]]:
    """Put a message after each action whose result another rank needs, on both ranks in one order, free of deadlock.

    Ranks advance in turn, as in ``torch.distributed.pipelining``: a message is received as soon as it is sent, so that
    what comes before it on the receiver never waits for what comes after it on the sender.
    """
    stages = len(rank_of)
    left = [list(one) for one in actions]
    made: list[list[Action]] = [[] for _ in actions]
    done: dict[tuple[str, int, int], float] = {}
    while any(left):
        moved = False
        for rank, row in enumerate(left):
            if not row or _ready_at(row[0], stages, done) is None:
                continue
            one = row.pop(0)
            moved = True
            made[rank].append(one)
            done["B" if one.kind == "I" else one.kind, one.stage, one.part] = 0.0
            if one.kind == "W":
                continue
            peer, letter = (one.stage + 1, "F") if one.kind == "F" else (one.stage - 1, "B")
            if 0 <= peer < stages and rank_of[peer] != rank:
                made[rank].append(Action(f"SEND_{letter}", one.stage, one.part))  # type: ignore[arg-type]
                made[rank_of[peer]].append(Action(f"RECV_{letter}", peer, one.part))  # type: ignore[arg-type]
        assert moved, "a schedule waits for itself"
    return made

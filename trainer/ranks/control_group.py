"""Agreement between ranks: all take what one decides, and what fails on one fails on all with the same error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch.distributed as dist

from ..errors import CheckpointError, WorldError
from .world import World

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    """Failure of the work on one rank, as text, because not every exception can be pickled."""

    kind: type[CheckpointError]
    text: str


class ControlGroup:
    """All ranks, for one thread, over a gloo group of its own so that it never meets another thread's collectives.

    Making it is a collective; so are all its methods, which one thread calls in the same order on every rank.
    """

    def __init__(self, world: World) -> None:
        if not dist.is_initialized():
            raise WorldError("there is no process group yet; call open_world() first")
        self.rank = world.rank
        self.world_size = world.world_size
        self.group: dist.ProcessGroup | None = cast("dist.ProcessGroup", dist.new_group(backend="gloo"))

    def decide(self, what: str, work: Callable[[], T]) -> T:
        """Return what ``work`` returns on rank 0, the only rank that calls it.

        Raises:
            CheckpointError: on every rank, if the work failed on rank 0.
        """
        box: list[T | _Failure | None] = [_attempt(work) if self.rank == 0 else None]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        outcome = box[0]
        if isinstance(outcome, _Failure):
            raise outcome.kind(f"{what}: {outcome.text}")
        return cast(T, outcome)

    def gather(self, what: str, work: Callable[[], T]) -> list[T]:
        """Call ``work`` on every rank and return all results on every rank, in rank order.

        Raises:
            CheckpointError: on every rank, if the work failed on any; the message names which and why.
        """
        outcomes: list[T | _Failure | None] = [None] * self.world_size
        dist.all_gather_object(outcomes, _attempt(work), group=self.group)
        failures = [(rank, one) for rank, one in enumerate(outcomes) if isinstance(one, _Failure)]
        if failures:
            kind, text = failures[0][1].kind, failures[0][1].text
            if {one.text for _, one in failures} == {text} and len(failures) == self.world_size:
                raise kind(f"{what}: {text}")
            more = f" (and {len(failures) - 3} more ranks)" if len(failures) > 3 else ""
            raise kind(f"{what}: {'; '.join(f'rank {rank}: {one.text}' for rank, one in failures[:3])}{more}")
        return cast("list[T]", outcomes)

    def close(self) -> None:
        """Leave the group; closing twice is allowed."""
        group, self.group = self.group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _attempt(work: Callable[[], T]) -> T | _Failure:
    try:
        return work()
    except CheckpointError as exc:
        return _Failure(type(exc), str(exc))
    except Exception as exc:  # noqa: BLE001 - it is raised again, on every rank
        return _Failure(CheckpointError, f"{type(exc).__name__}: {exc}")

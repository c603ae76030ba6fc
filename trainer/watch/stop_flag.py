"""Being stopped and started again: a signal becomes a flag that all ranks see at the same step.

Under ``torchrun --nnodes=a:b`` nodes may come and go. Set ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` for that:
without it a newcomer waits 60 s for a store that the workers of the last round took with them, and fails. Each change
of membership restarts the processes, so training goes on from the newest checkpoint, on the ranks that are there then.
A node that is asked to leave by SIGTERM stops all ranks with a checkpoint; those of the other nodes then end with an
exit code that makes torchrun start them again.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Self

import torch
import torch.distributed as dist

from ..errors import TrainerConfigError
from ..ranks.world import World

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """Which start this is: ``count`` restarts after failures lie behind, of ``limit``; both 0 without torchrun."""

    run_id: str
    count: int
    limit: int


def read_restarts() -> Restarts:
    """Read torchrun's counters from the environment; a change of membership is no failure and is not counted."""
    return Restarts(
        run_id=os.environ.get("TORCHELASTIC_RUN_ID", ""),
        count=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        limit=int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")),
    )


class StopFlag:
    """Set by the first SIGTERM or SIGINT that this process gets; a second SIGINT interrupts at once, as ever.

    Made and closed in the main thread; ``close`` gives the signals back to whom they were taken from. All mutable
    state: the reason, the vote under way, and the handlers before.
    """

    def __init__(self, world: World) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise TrainerConfigError("signals can be caught in the main thread only; start training there")
        self._world = world
        self._vote = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._signal: signal.Signals | None = None
        self._before = {number: signal.signal(number, self._catch) for number in _SIGNALS}

    @property
    def reason(self) -> str | None:
        """The name of the signal that this process got, or None."""
        return None if self._signal is None else self._signal.name

    def set(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask all ranks to stop, as if the signal had come."""
        self._signal = number

    def agree(self) -> bool:
        """Whether any rank was asked to stop by its last call of this; a collective that costs next to nothing.

        The ranks' answers travel while the step computes: each call takes the result of the vote that the call before
        it began, and begins the next. So all ranks get the same answer at the same call, one call late.
        """
        if self._world.world_size == 1:
            return self._signal is not None
        stop = False
        if self._work is not None:
            self._work.wait()
            stop = bool(self._vote.item())
        self._vote = torch.tensor([int(self._signal is not None)], dtype=torch.int32)
        # The vote is of the CPU, which every backend's group carries through gloo, so it never waits for the device.
        self._work = dist.all_reduce(self._vote, op=dist.ReduceOp.MAX, async_op=True)
        return stop

    def agree_now(self) -> bool:
        """Whether any rank has been asked to stop; a collective that waits for all ranks."""
        if self._world.world_size == 1:
            return self._signal is not None
        self._finish_vote()
        vote = torch.tensor([int(self._signal is not None)], dtype=torch.int32)
        dist.all_reduce(vote, op=dist.ReduceOp.MAX)
        return bool(vote.item())

    def close(self) -> None:
        """Give the signals back; closing twice is allowed."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)
        self._work = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal is signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number)

    def _finish_vote(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()

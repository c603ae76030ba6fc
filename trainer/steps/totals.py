"""Sum a step's numbers over the ranks, and read them on the host without waiting for later work on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..ranks.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Sum of the marks of a stage's ranks, and of their squares, which add up to more than equal ones would."""

    total: float
    squares: float


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over all ranks and microbatches of one step; each sample is in ``loss``, ``count`` and ``rows`` once."""

    loss: float
    count: float
    rows: float
    stop: float
    trace: float
    epoch: float
    epoch_squares: float
    late: float
    """Ranks whose gradients of the step before were not finite, where that was not read in time."""

    scheduled: float
    computed: float
    """Seconds of the pipelines' schedules, and of what ranks computed in them, where there are pipelines."""

    orders: tuple[Marks, ...]
    settings: tuple[Marks, ...]
    """By part of the mesh; so are ``orders``."""

    learner_counts: tuple[float, ...]
    """``count`` by learner; of one learner, all."""

    @classmethod
    def read(cls, values: Sequence[float], learners: int = 1) -> Totals:
        """The totals that ``StepTotals`` exchanged."""
        counts: Sequence[float] = ()
        if learners > 1:
            values, counts = values[:-learners], values[-learners:]
        plain, rest = dict(zip(_NAMES, values, strict=False)), values[len(_NAMES) :]
        end = len(rest) - len(rest) % len(_MARKS)
        marks, (scheduled, computed) = rest[:end], rest[end:] or (0.0, 0.0)
        found = [Marks(total=total, squares=squares) for total, squares in zip(marks[::2], marks[1::2], strict=True)]
        return cls(
            **plain,
            scheduled=scheduled,
            computed=computed,
            orders=tuple(found[::2]),
            settings=tuple(found[1::2]),
            learner_counts=tuple(counts or (plain["count"],)),
        )


_NAMES = ("loss", "count", "rows", "stop", "trace", "epoch", "epoch_squares", "late")
_MARKS = ("order", "order_squares", "settings", "settings_squares")
_TIMES = ("scheduled", "computed")  # where there are pipelines; behind the marks of all parts


class StepTotals:
    """Adds up a step's numbers in float64; each step has its own.

    A device's tensors are added there, and nothing waits for them; numbers, and the CPU's tensors, on the host. Losses
    that are not finite make the sum of losses so. Of the ranks of a replica those count that the mesh says.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        names = [*_NAMES, *(f"{name} {part}" for part in range(mesh.parts) for name in _MARKS)]
        self._times: tuple[str, ...] = _TIMES if mesh.sizes.pp > 1 else ()
        names += self._times
        if mesh.learners > 1:
            names += [f"count {learner}" for learner in range(mesh.learners)]
        self._on_host = dict.fromkeys(names, 0.0)
        self._on_device: Tensor | None = None
        self._by_name: dict[str, Tensor] = {}
        device = mesh.world.device
        if device.type != "cpu":
            self._on_device = torch.zeros(len(names), dtype=torch.float64, device=device)
            self._by_name = dict(zip(names, self._on_device.unbind(), strict=True))

    def add(self, loss: Tensor, count: Tensor | float) -> None:
        """Add the sum of a microbatch's losses, or of a part of it, and their count."""
        if self._mesh.counts:
            self._add("loss", loss)
            self._add("count", count)
            if self._mesh.learners > 1:
                self._add(f"count {self._mesh.learner}", count)

    def add_rows(self, rows: Tensor | int) -> None:
        """Add the rows of a microbatch."""
        if self._mesh.counts_rows:
            self._add("rows", rows)

    def own_count(self) -> Tensor:
        """This rank's count so far, of no dimension."""
        return self._collect()[_NAMES.index("count")].clone()

    def exchange(
        self,
        *,
        stop: bool,
        trace: bool,
        order: tuple[float, float],
        epoch: int,
        settings: int,
        late: Tensor | None,
        times: tuple[float, float] = (0.0, 0.0),
    ) -> Reading:
        """Add a step's own numbers, then sum over all ranks while the caller continues.

        ``times`` are seconds of the schedules of a pipeline that are over, and of what was computed in them.
        """
        once = {"stop": stop, "trace": trace, "epoch": epoch, "epoch_squares": epoch * epoch}
        marks = zip(_MARKS, (*order, settings, settings * settings), strict=True)
        for name, amount in (*once.items(), *((f"{name} {self._mesh.part}", mark) for name, mark in marks)):
            self._add(name, amount)
        for name, seconds in zip(self._times, times, strict=False):
            self._add(name, seconds)
        if late is not None:
            self._add("late", late)
        values = self._collect()
        work = dist.all_reduce(values, async_op=True) if self._mesh.world.world_size > 1 else None
        return Reading(values, work)

    def _add(self, name: str, amount: Tensor | float) -> None:
        if isinstance(amount, Tensor) and (amount.ndim or amount.requires_grad):
            amount = amount.detach().reshape(())  # one number of whatever shape, as the host takes it
        if isinstance(amount, Tensor) and self._by_name:
            self._by_name[name].add_(amount)
        else:
            self._on_host[name] += float(amount)

    def _collect(self) -> Tensor:
        """(names,) float64 on the world's device: all that was added."""
        if self._on_device is None:
            return torch.tensor(list(self._on_host.values()), dtype=torch.float64)
        for name, amount in self._on_host.items():
            if amount:  # a number as an argument is not copied to the device as a tensor would be
                self._by_name[name].add_(amount)
                self._on_host[name] = 0.0
        return self._on_device


class Reading:
    """Values on their way to the host: they are copied on a stream of their own, after ``work`` and nothing else.

    So a backward that was queued meanwhile runs while the host waits, and the device does not run dry.
    """

    def __init__(self, values: Tensor, work: dist.Work | None = None) -> None:
        self._values, self._work = values, work
        self._copied: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._begin_copy()

    def wait(self) -> list[float]:
        """The values, once they are known."""
        if self._copied is not None:
            self._copied.synchronize()
        elif self._work is not None:
            self._work.wait()
        found: list[float] = self._values.reshape(-1).tolist()
        return found

    def _begin_copy(self) -> None:
        device = self._values.device
        made_on, own = torch.cuda.current_stream(device), _reading_stream(device)
        own.wait_stream(made_on)
        with torch.cuda.stream(own):
            if self._work is not None:
                self._work.wait()  # for NCCL this makes the stream wait, not the host
            host = torch.empty_like(self._values, device="cpu", pin_memory=True)
            host.copy_(self._values, non_blocking=True)
            # blocking: the host sleeps until then instead of spinning on a core that could decode.
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record()
        self._values.record_stream(own)
        self._values = host


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _reading_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _streams[device]

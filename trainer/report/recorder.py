"""Records for the observers: averages over the steps since the last record, notes, evaluations, the end."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..compression.compression import CompressionStats
from ..errors import TrainerError
from ..ranks.mesh import Mesh
from ..steps.step import StepResult
from ..stopwatch import Stopwatch
from .config import ReportConfig
from .flops import Compute, FlopCount, device_name
from .memory import measure_gpu, measure_memory
from .observers import open_observers
from .progress import Pace, Progress, Summary, Window
from .records import Callbacks, Observer, StepRecord, TemporaryObserverError, Values, deliver
from .status.loader_numbers import LoaderNumbers
from .status.rank_status import RankStatus, State
from .status.writer import StatusWriter, describe_error

logger = logging.getLogger(__name__)
# The phases whose seconds go into a record of this kind.
_TIMED = {"evaluate": ("evaluate", "evaluation fetch"), "checkpoint": ("checkpoint",), "rewind": ("rewind",)}


class Recorder:
    """Collects steps on every rank and passes them to the observers, which only rank 0 has; ``open`` is a collective.

    All mutable state: the window of steps since the last record, the pace of all, the mean loss of the window before,
    what a sample costs to compute, the seconds of evaluations and saves that were recorded, what writes this rank's
    status, whether observers are being called, and whether they are closed.
    """

    def __init__(
        self, progress: Progress, stopwatch: Stopwatch, total_steps: int | None, loader: object = None
    ) -> None:
        self._loader = LoaderNumbers(loader)
        self._status: StatusWriter | None = None
        self._observers: Sequence[Observer | Callbacks] = ()
        self._progress = progress
        self._stopwatch = stopwatch
        self._total_steps = total_steps
        self._window, self._pace = Window(stopwatch), Pace()
        self._reported_seconds: dict[str, float] = {}
        self._device = torch.device("cpu")
        self.loss = math.nan
        self.flops: FlopCount | None = None
        self._compute: Compute | None = None
        self._is_telling = self._is_closed = False

    def open(self, given: Sequence[Observer | Callbacks], config: ReportConfig, output_dir: Path, mesh: Mesh) -> None:
        """Pass records to the given observers and those of the config from now on, and close them; a collective.

        Raises:
            TrainerError: on every rank, if one of the config's observers could not be opened.
        """
        problem: list[TrainerError | None] = [None]
        world = mesh.world
        self._device = world.device
        if world.is_first:
            try:
                self._observers = [*given, *open_observers(config, output_dir, self._total_steps, self._list_ranks)]
            except TrainerError as exc:
                problem = [exc]
        if world.world_size > 1:
            dist.broadcast_object_list(problem, src=0)
        if problem[0] is not None:
            raise problem[0]
        if config.status_s is not None:
            self._status = StatusWriter(
                world,
                mesh.sizes,
                self._progress,
                self._stopwatch,
                LoaderNumbers(self._loader.loader),
                output_dir=output_dir,
                every_s=config.status_s,
                total_steps=self._total_steps,
            )

    def start(self, mesh: Mesh, model: nn.Module, settings: Values) -> None:
        """Record that training begins, or begins again, on these ranks; and start timing the steps."""
        self._set_state("training")
        world, sizes = mesh.world, mesh.sizes.to_dict()
        self.record(
            "start",
            {
                "world_size": world.world_size,
                **({"mesh": ", ".join(f"{name} {size}" for name, size in sizes.items())} if sizes else {}),
                "num_nodes": world.num_nodes,
                "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
                "device": device_name(world.device),
                "host": socket.gethostname(),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "total_steps": self._total_steps,
                "peak_flops": None if self.flops is None else self.flops.peak,
                "torch": torch.__version__,
                **settings,
            },
        )
        self._window, self._pace = Window(self._stopwatch), Pace()
        if self._status is not None:
            self._status.begin_steps()

    def settle_flops(self, batch: Any) -> None:
        """Before the first step: settle what a sample costs to compute. A collective where the loss is one."""
        flops, self.flops = self.flops, None
        if flops is None or not flops.is_wanted:
            return
        with self._stopwatch.phase("count flops"):
            self._compute, notes = flops.settle(batch)
        for text in notes:
            self.note(text)

    def add(self, result: StepResult) -> None:
        """Count a step that has just been counted as progress, and tell those who want to hear of each."""
        self._window.add(result)
        if self._status is not None:
            self._status.end_step()
        listening = [one for one in self._observers if isinstance(one, Callbacks)]
        if listening:
            record = StepRecord(self._progress.step, self._progress.epoch, result)
            self._tell(listening, lambda observer: observer.on_step(record))  # type: ignore[union-attr]

    def record_steps(self, values: Values, numbers: Values) -> None:
        """Record the steps since the last record, if there are any, with ``values`` besides their averages.

        ``numbers`` are those of the model's modules, which stand behind others of the same name.
        """
        window = self._window
        if not window.steps:
            return  # the time since then belongs to the next record
        self._window = Window(self._stopwatch)
        self.loss = window.loss
        progress = self._progress
        self._pace.add(window.steps, window.seconds)
        eta_s = (self._total_steps - progress.step) * self._pace.seconds_per_step if self._total_steps else None
        self.record(
            "train",
            {
                **numbers,
                "epoch": progress.epoch,
                **window.describe(self._compute),
                **(self._measure() if self._observers else {}),
                "eta_s": eta_s,
                "updates": progress.updates,
                "samples": progress.samples,
                "overflows": progress.overflows,
                "non_finite": progress.non_finite,
                **values,
            },
        )

    def _measure(self) -> dict[str, Any]:
        """Measure everything beside the steps: memory, device, disk and network, the loader, how far ranks differ."""
        gpu = {f"device_{name}": value for name, value in measure_gpu(self._device).items()}
        newest = None if self._status is None else self._status.newest
        traffic = {} if newest is None else newest.traffic
        return {**measure_memory(self._device), **gpu, **traffic, **self._loader.record(), **self._describe_ranks()}

    def _describe_ranks(self) -> dict[str, Any]:
        """Describe rank 0's last view of all ranks' statuses; empty where it is alone."""
        found = None if self._status is None else self._status.survey
        if found is None or found.world_size < 2:
            return {}
        slowest = {} if found.slowest is None else {"slowest_rank": found.slowest, "slowest_in": found.skew_phase}
        return {"bound": found.bound, "skew_s": found.skew_s or 0.0, "stale_ranks": len(found.stale), **slowest}

    def _list_ranks(self) -> Sequence[RankStatus]:
        return () if self._status is None else self._status.seen

    def _set_state(self, state: State) -> None:
        if self._status is not None:
            self._status.state = state

    def note(self, text: str) -> None:
        """Record a sentence for people to read."""
        self.record("note", {"note": text})

    def record(self, kind: str, values: Values) -> None:
        if kind in _TIMED:
            values = {**values, "seconds": values.get("seconds", self._take_seconds(kind))}
        step = self._progress.step
        self._tell(self._observers, lambda observer: deliver(observer, kind, step, values))

    def _take_seconds(self, kind: str) -> float:
        """Seconds of this kind's phases since its last record."""
        spent = sum(self._stopwatch.seconds.get(name, 0.0) for name in _TIMED[kind])
        before, self._reported_seconds[kind] = self._reported_seconds.get(kind, 0.0), spent
        return spent - before

    def refuse(self, call: str, *, closed: bool = False) -> None:
        """Refuse a call of all ranks that an observer makes, and with ``closed`` one that comes after ``close``.

        Raises:
            TrainerError: it is such a call.
        """
        if self._is_telling:
            raise TrainerError(
                f"an observer calls {call}(): it hears of records on rank 0 alone and in the midst of training, where "
                f"the other ranks would not join in; call {call}() on all ranks, when train() has returned"
            )
        if closed and self._is_closed:
            raise TrainerError(f"{call}() comes after close(): its records would go nowhere; make a new trainer")

    def _tell(self, observers: Sequence[Observer | Callbacks], call: Callable[[Observer | Callbacks], None]) -> None:
        failures, passing = [], []
        before, self._is_telling = self._is_telling, True
        try:
            for observer in observers:
                try:
                    call(observer)
                except TemporaryObserverError as exc:
                    passing.append(str(exc))
                except Exception as exc:  # noqa: BLE001 - an observer must not end the run
                    failures.append((observer, exc))
        finally:
            self._is_telling = before
        for text in passing:
            logger.warning("%s", text)
            self.note(text)
        if failures:
            self._drop(failures)

    def finish(
        self,
        seconds: float,
        *,
        stopped_by: str,
        resumes_at: int | None,
        by_others: bool,
        metrics: Mapping[str, float],
        sent: CompressionStats,
    ) -> Summary:
        """Record the end of a run of ``seconds`` and sum it up; ``stopped_by`` names a signal, or is empty."""
        self._set_state("idle")
        if self._status is not None:
            self._status.stopped_by, self._status.resumes_at = stopped_by, resumes_at
        progress = self._progress
        summary = Summary(
            **progress.counts(),
            steps=progress.step,
            epochs=progress.epoch,
            loss=self.loss,
            metrics=dict(metrics),
            stopped_early=bool(stopped_by),
            stopped_by_others=by_others,
            seconds=seconds,
            phase_seconds=dict(self._stopwatch.seconds),
            wire_bytes=sent.wire_bytes,
            plain_bytes=sent.plain_bytes,
        )
        self.record(
            "end",
            {
                **metrics,  # of which one may be called "loss", too
                "loss": summary.loss,
                "seconds": seconds,
                "samples": summary.samples,
                "epoch": summary.epochs,
                "wire_bytes": summary.wire_bytes,
                "plain_bytes": summary.plain_bytes,
                **({"stopped_by": stopped_by, "resumes_at": resumes_at} if stopped_by else {}),
            },
        )
        return summary

    def close(self, error: BaseException | None = None) -> None:
        """Close the observers, and tell the rank's end, or what ended it; closing twice is allowed."""
        self._is_closed = True
        if isinstance(error, SystemExit) and not error.code:
            error = None  # whoever leaves like this has not failed
        if error is not None:
            self.record("failure", {"error": describe_error(error)})
        status, self._status = self._status, None
        if status is not None:
            status.close(error)
        observers, self._observers = self._observers, ()
        for observer in observers:
            try:
                observer.close()
            except Exception as exc:  # noqa: BLE001 - as above
                logger.warning("%s", _describe(observer, exc, "raised when it was closed"))

    def _drop(self, failures: Sequence[tuple[Observer | Callbacks, Exception]]) -> None:
        """Go on without the observers that raised, and tell the others; each note makes the list shorter."""
        dropped = [observer for observer, _ in failures]
        self._observers = [one for one in self._observers if not any(one is gone for gone in dropped)]
        for observer, error in failures:
            with suppress(Exception):
                observer.close()
            text = _describe(observer, error, "raised and gets no more records")
            logger.warning("%s", text)
            self.note(text)


def _describe(observer: Observer | Callbacks, error: Exception, when: str) -> str:
    return f"observer {type(observer).__name__} {when}: {type(error).__name__}: {error}"

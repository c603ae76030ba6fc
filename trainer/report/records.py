"""Records that observers receive, typed, and the two forms that an observer may have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Protocol, TypeVar

from ..errors import TrainerError
from ..steps.step import Outcome, StepResult

Value = float | int | str | None
Values = Mapping[str, Value]
AnyValue = TypeVar("AnyValue")


class TemporaryObserverError(TrainerError):
    """Raised by an observer that missed a record but can continue: it stays, and its message is noted."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Record of an event after ``step`` steps; ``values`` is all that was recorded, flat, in plain numbers and text."""

    kind: ClassVar[str] = ""

    step: int
    values: Values = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class StartRecord(Record):
    """``train`` begins, or begins again after a restart."""

    kind: ClassVar[str] = "start"

    world_size: int
    mesh: str | None = None
    """Ranks by dimension, ``dp 2, tp 2``, where each replica of the model lies on several."""
    num_nodes: int
    restarts: int
    """How often torchrun has started the ranks again."""
    device: str
    parameters: int
    total_steps: int | None = None
    peak_flops: float | None = None
    """FLOP/s of one device, where they are known."""


@dataclass(frozen=True, kw_only=True)
class ResumeRecord(Record):
    """Weights, optimizer and position were restored from the checkpoint of ``step``."""

    kind: ClassVar[str] = "resume"

    world_size: int


@dataclass(frozen=True, kw_only=True)
class TrainRecord(Record):
    """Averages over the last ``steps`` steps; times and memory are rank 0's.

    ``values`` has more where it was measured:

    - ``updates``, ``overflows``, ``non_finite``, ``loss_scale``, ``wire_bytes``: the state of training, over restarts.
    - ``eta_s``: seconds left, with evaluations and saves.
    - ``seconds_fetch``, ``seconds_forward``, ``seconds_backward``, ``seconds_reduce``, ``seconds_optimizer``, ...:
      seconds in each phase; the rest of ``seconds`` is the loop. On CUDA events time them that nothing waits for, so
      the last steps before a record may count in the next one.
    - ``device_memory_bytes``, ``device_memory_reserved_bytes``, ``device_memory_peak_bytes``: on CUDA, held by tensors,
      reserved by torch, most held by tensors.
    - ``host_memory_bytes``, ``host_memory_peak_bytes``: resident memory of the process, now and at its peak.
    - ``device_utilisation``, ``device_power_w``: by NVML, with ``nvidia-ml-py``.
    - ``disk_read_bytes_per_s``, ``disk_written_bytes_per_s``: of the process; ``network_received_bytes_per_s``,
      ``network_sent_bytes_per_s``: of its host or container.
    - ``loader_bottleneck``, ``loader_ready_batches``, ``loader_fetched_bytes``, ...: metrics of penstock's loader since
      the last record.
    - ``bound``, ``skew_s``, ``slowest_rank``, ``slowest_in``, ``stale_ranks``: on several ranks, what bounds the run;
      seconds a step that the slowest takes more than the others; which rank and phase; how many are silent.
    - ``bubble``, ``bubble_formula``: with ``parallel.pp``, the share of their schedules in which ranks idled,
      and that of the schedule's arithmetic (a backward as long as two forwards, equal stages, messages without time).
    - ``expert_load_max``, ``expert_load_min``: tokens of the busiest expert and of the idlest one, as multiples of an
      even share.
    - ``outer_norm``, ``outer_bytes``, ``outer_wait_s``: with DiLoCo, norm of the last outer gradient, bytes that rank 0
      sent to other learners over all restarts (in ``wire_bytes``, too), seconds that it waited for them since the last
      record; over servers of all learners.
    - names of modules: numbers that ``describe_step()`` of a module returns after each update, a mapping of names to
      floats or tensors of one number. Over modules and steps, the largest of names with ``_max`` at their end, the
      least of ``_min``, the mean of others.
    """

    kind: ClassVar[str] = "train"

    steps: int
    seconds: float
    epoch: int
    """Epochs done: 0 in the first."""
    loss: float
    samples: int
    """Of all ranks and restarts."""
    samples_per_s: float
    """Of all ranks."""
    rate: float | None = None
    tokens_per_s: float | None = None
    """Units of the loss's count, of all ranks, if it counts more than samples."""
    flops_per_s: float | None = None
    """Of one device."""
    mfu: float | None = None
    """Share of the device's peak that forward and backward use."""
    data_wait_share: float | None = None
    """Share of ``seconds`` that was spent in fetch."""
    gradient_norm: float | None = None
    """Of the last step, before clipping. With local SGD rank 0's own, with DiLoCo its learner's."""
    gradient_norm_max: float | None = None
    """The largest of the steps'."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord(Record):
    """One evaluation: ``values`` are its metrics and ``seconds``."""

    kind: ClassVar[str] = "evaluate"

    seconds: float


@dataclass(frozen=True, kw_only=True)
class CheckpointRecord(Record):
    """A save: ``state`` is "written", or "being written" in the background."""

    kind: ClassVar[str] = "checkpoint"

    state: str
    seconds: float
    """For which training waited."""


@dataclass(frozen=True, kw_only=True)
class RewindRecord(Record):
    """Training goes back from ``step`` to ``to_step``, whose next steps have numbers that were there before."""

    kind: ClassVar[str] = "rewind"

    to_step: int
    first_spike_step: int
    discarded_steps: int
    skipped_batches: int
    """Global batches left out besides those of the discarded steps, which do not come again."""
    rewinds: int
    """How many there were with this one, counted over restarts."""
    why: str
    seconds: float
    """For which training waited until the weights were restored."""


@dataclass(frozen=True, kw_only=True)
class NoteRecord(Record):
    """A sentence for people to read."""

    kind: ClassVar[str] = "note"

    note: str


@dataclass(frozen=True, kw_only=True)
class EndRecord(Record):
    """``train`` returns; ``values`` has the last evaluation's metrics too. A run that fails has no such record."""

    kind: ClassVar[str] = "end"

    loss: float
    seconds: float
    samples: int
    epoch: int | None = None
    """Epochs that are done."""
    stopped_by: str | None = None
    """The signal that ended training before its end, such as "SIGTERM"."""
    resumes_at: int | None = None
    """The step at which a new start resumes; None where no checkpoints are kept."""


@dataclass(frozen=True, kw_only=True)
class FailureRecord(Record):
    """An error ended the run; comes as the trainer is closed, in place of an ``EndRecord``."""

    kind: ClassVar[str] = "failure"

    error: str
    """Its type and its message. One that another rank caused names that rank."""


class StepRecord:
    """One step, as it ends. What it holds may still be on the device: reading ``loss`` or the norm may wait for it."""

    kind: ClassVar[str] = "step"

    def __init__(self, step: int, epoch: int, result: StepResult) -> None:
        self.step = step
        self.epoch = epoch
        self._result = result

    @property
    def loss(self) -> float:
        return float(self._result.loss)

    @property
    def samples(self) -> int:
        """Rows of the global batch, without padding."""
        return int(self._result.rows)

    @property
    def gradient_norm(self) -> float | None:
        """The gradients' global norm before clipping, where it is taken."""
        norm = self._result.gradient_norm
        return None if norm is None else float(norm)

    @property
    def outcome(self) -> Outcome:
        return self._result.outcome


class Observer(Protocol):
    """Receives every record as flat values: for what writes or sends them. See ``Callbacks`` for typed ones.

    The training loop calls it on rank 0, in the main thread; it must not wait for other ranks. One that raises is
    closed and left out for the rest of the run, which the others are told in a note, unless it raises a
    TemporaryObserverError.
    """

    def record(self, kind: str, step: int, values: Values) -> None:
        """Record ``values`` at ``step``.

        ``kind`` is "start", "resume", "train", "evaluate", "checkpoint", "rewind", "note", "end" or "failure". After a
        rewind ``step`` is an earlier one.
        """
        ...

    def close(self) -> None:
        """Flush and release what is held; called once."""
        ...


class Callbacks:
    """An observer in typed calls: override what you want to hear of. Called and dropped as every ``Observer`` is."""

    def on_start(self, record: StartRecord) -> None:
        """``train`` begins."""

    def on_resume(self, record: ResumeRecord) -> None:
        """The run continues from a checkpoint; comes before ``on_start``."""

    def on_step(self, record: StepRecord) -> None:
        """A step has ended. Comes every step: reading its loss each time may cost a wait for the device."""

    def on_train(self, record: TrainRecord) -> None:
        """``report.every`` steps have ended; here are their averages."""

    def on_evaluate(self, record: EvaluationRecord) -> None:
        """An evaluation has ended."""

    def on_checkpoint(self, record: CheckpointRecord) -> None:
        """A checkpoint was saved."""

    def on_rewind(self, record: RewindRecord) -> None:
        """Training goes back to an earlier step, after a loss spike."""

    def on_note(self, record: NoteRecord) -> None:
        """There is something that people should read."""

    def on_end(self, record: EndRecord) -> None:
        """``train`` returns."""

    def on_failure(self, record: FailureRecord) -> None:
        """An error ended the run."""

    def close(self) -> None:
        """Flush and release what is held; called once."""


RECORDS: Mapping[str, type[Record]] = {
    one.kind: one
    for one in (
        StartRecord,
        ResumeRecord,
        TrainRecord,
        EvaluationRecord,
        CheckpointRecord,
        RewindRecord,
        NoteRecord,
        EndRecord,
        FailureRecord,
    )
}


def make_record(kind: str, step: int, values: Values) -> Record | None:
    """The typed record of these values: its fields are those of the same names, None where a value lacks."""
    form = RECORDS.get(kind)
    if form is None:
        return None
    own: dict[str, Any] = {
        one.name: values.get(one.name, None if one.default is MISSING else one.default)
        for one in fields(form)
        if one.name not in ("step", "values")
    }
    return form(step=step, values=values, **own)


def spell(values: Mapping[str, AnyValue], form: Callable[[str], str]) -> dict[str, AnyValue]:
    """The values by names of another form; of names that look alike in it, the later have underscores behind them."""
    found: dict[str, AnyValue] = {}
    for name, value in values.items():
        spelt = form(name)
        while spelt in found:
            spelt += "_"
        found[spelt] = value
    return found


def deliver(observer: Observer | Callbacks, kind: str, step: int, values: Values) -> None:
    """Hand a record to an observer of either form; callbacks hear of kinds that have a type."""
    if not isinstance(observer, Callbacks):
        observer.record(kind, step, values)
    elif (record := make_record(kind, step, values)) is not None:
        getattr(observer, f"on_{kind}")(record)

"""The next settings of a running pipeline, from its waits, by a function of state and measurement; and its thread.

A change is a trial: its goal is measured before and after, and a change without gain is taken back and
not tried again for a while, which doubles each time, or until batches come at quite another rate. So on constant input
settings come to rest, and where something else becomes the limit they follow.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from ...storage.threads.interruptible import Event
    from .tuning import PipelineOptions, TuningChoice


Knob = Literal["fetch_threads", "decode_threads", "read_ahead_bytes", "all"]

LITTLE, MUCH = 0.02, 0.05  # shares of the time that the training loop waits: between the two nothing is changed
GAIN = 0.05  # by which a stage has to get faster for a change to be kept
_STARVED = 0.1  # the share of the time that the assembler waits for chunks, above which fetching bounds it
_BUSY = 0.75  # of a stage's threads, above which they bound it
_CORES_BUSY = 0.95
_SPARE = 1.5  # threads that a stage keeps, relative to those that are busy
_QUIET_TICKS = 5  # without waits, before threads are given back
_BLAME_TICKS = 16  # after threads were given back, while waits are blamed on that
_HOLD_TICKS, _LONGEST_HOLD = 32, 512
_OTHER_RATE = 2.0  # times as fast, or as slow, as when a change was useless: now it may help
_SMOOTHING = 0.25  # of that rate: batches come in bursts
_TRIAL_TICKS = 3  # one to settle, and two in which a change may show its gain
_CHUNKS, _DECODING = "chunks", "decoding"
_NAMES = {"fetch_threads": "fetch_threads", "decode_threads": "threads", "read_ahead_bytes": "read_ahead"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Chunks that are fetched and samples that are decoded at a time; bytes of chunks, and of batches, held ahead."""

    fetch_threads: int
    decode_threads: int
    read_ahead_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The range of the settings. ``least`` and ``most`` are equal for a setting that must not change.

    ``chunk_bytes`` are those of a chunk, about; ``cores`` those that the process may use.
    """

    least: Settings
    most: Settings
    chunk_bytes: int
    cores: int

    def clamp(self, settings: Settings) -> Settings:
        return Settings(**{knob: self.clip(knob, getattr(settings, knob)) for knob in _NAMES})

    def clip(self, knob: str, value: int) -> int:
        least: int = getattr(self.least, knob)
        most: int = getattr(self.most, knob)
        return max(least, min(value, most))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One tick, some seconds of a pipeline with settings that did not change.

    Attributes:
        waited: the share of the time that the training loop waited for batches.
        chunk_waited: the share that the assembler waited for chunks.
        fetching, decoding: how many threads did so, on average.
        cores: how many cores the process used, on average.
        fetched_bytes_per_s, decoded_rows_per_s, batches_per_s: the resulting rates.
        evicted_chunks: chunks that will be read again because memory is short.
    """

    waited: float
    chunk_waited: float
    fetching: float
    decoding: float
    cores: float
    fetched_bytes_per_s: float
    decoded_rows_per_s: float
    batches_per_s: float
    evicted_chunks: int = 0


@dataclass(frozen=True, slots=True)
class Trial:
    """A change on trial: its goal, and the rate that it has to raise."""

    knob: Knob
    before: Settings
    rate_name: str
    rate: float
    stage: str = ""
    ticks: int = 0
    seen: float = 0.0  # the highest rate since the change


@dataclass(frozen=True, slots=True)
class TakenBack:
    """A change without gain, to be compared with the pipeline without it."""

    trial: Trial
    settings: Settings
    is_settled: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """A pause before a change is tried again: until which tick, how often it failed, and the batches/s then."""

    until: int = 0
    times: int = 0
    rate: float = 0.0

    def again(self, tick: int, rate: float) -> Hold:
        return Hold(tick + min(_LONGEST_HOLD, _HOLD_TICKS << self.times), min(self.times + 1, 16), rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The controller's state. ``reason`` is its last decision, in words; ``changes`` counts those of settings.

    ``rate``: batches/s, smoothed over some ticks; None before the first.
    """

    settings: Settings
    reason: str = "nothing is measured yet"
    changes: int = 0
    tick: int = 0
    rate: float | None = None
    quiet: int = 0
    busiest: tuple[float, float] = (0.0, 0.0)  # (decoding, fetching) of the quiet ticks
    trial: Trial | None = None
    taken_back: TakenBack | None = None
    given_back: tuple[Knob, Settings, int] | None = None  # what, the settings before, and the tick
    holds: Mapping[str, Hold] = field(default_factory=dict)

    def is_held(self, name: str) -> bool:
        return self.tick < self.holds.get(name, Hold()).until

    def hold(self, name: str) -> Mapping[str, Hold]:
        return {**self.holds, name: self.holds.get(name, Hold()).again(self.tick, self.rate or 0.0)}

    def is_as_then(self, name: str) -> bool:
        """Return whether batches come about as fast as when the change was put on hold."""
        then, now = self.holds.get(name, Hold()).rate, self.rate or 0.0
        return max(then, now) < _OTHER_RATE * min(then, now)


def step(state: State, measured: Measured, bounds: Bounds) -> State:
    """Compute the next state, whose settings are those of the next tick: always within ``bounds``."""
    rate = measured.batches_per_s
    smoothed = rate if state.rate is None else state.rate + _SMOOTHING * (rate - state.rate)
    state = replace(state, tick=state.tick + 1, rate=smoothed)
    if state.trial is not None:
        seen = max(state.trial.seen, getattr(measured, state.trial.rate_name)) if state.trial.ticks else 0.0
        trial = replace(state.trial, ticks=state.trial.ticks + 1, seen=seen)
        if trial.ticks == 1:  # samples fetched and decoded before the change are still handed out
            return replace(state, trial=trial)
        if not _is_of_use(state.settings, trial, measured):
            return replace(state, trial=trial) if trial.ticks < _TRIAL_TICKS else _take_back(state, trial, measured)
        state = replace(state, trial=None, holds=_release(state, f"raise {trial.knob}"))
    if state.taken_back is not None:
        back = state.taken_back
        if not back.is_settled:
            return replace(state, taken_back=replace(back, is_settled=True))
        state = replace(state, taken_back=None)
        now = getattr(measured, back.trial.rate_name)
        if measured.waited >= MUCH and back.trial.seen > now and back.trial.seen >= (1 + GAIN) * now:
            return _try_again(state, back, measured)
    if measured.waited <= LITTLE:
        return _keeps_up(state, measured, bounds)
    state = replace(state, quiet=0, busiest=(0.0, 0.0))
    if measured.waited < MUCH:
        return state
    if state.given_back is not None:
        knob, before, since = state.given_back
        state = replace(state, given_back=None)
        if state.tick - since <= _BLAME_TICKS:
            why = f"the training loop waited {measured.waited:.0%} of the time without them"
            return _change(replace(state, holds=state.hold(f"lower {knob}")), knob, before, why)
    return _raise(state, measured, bounds)


def _is_of_use(settings: Settings, trial: Trial, measured: Measured) -> bool:
    rate: float = getattr(measured, trial.rate_name)
    return measured.waited < MUCH or _has_moved(settings, trial, measured) or rate >= (1 + GAIN) * trial.rate


def _take_back(state: State, trial: Trial, measured: Measured) -> State:
    gain = getattr(measured, trial.rate_name) / trial.rate - 1 if trial.rate else 0.0
    back = TakenBack(trial, state.settings)
    state = replace(state, trial=None, taken_back=back, holds=state.hold(f"raise {trial.knob}"))
    return _change(state, trial.knob, trial.before, f"more changed the rate by {gain:+.0%}")


def _try_again(state: State, back: TakenBack, measured: Measured) -> State:
    """Try the change again: the pipeline is slower still without it, so another load of the machine hid its gain."""
    trial = replace(back.trial, rate=getattr(measured, back.trial.rate_name), ticks=0, seen=0.0)
    state = replace(state, trial=trial, holds=_release(state, f"raise {trial.knob}"))
    return _change(state, trial.knob, back.settings, f"the rate without it was {trial.rate / back.trial.seen - 1:+.0%}")


def _release(state: State, name: str) -> Mapping[str, Hold]:
    return {known: hold for known, hold in state.holds.items() if known != name}


def _has_moved(settings: Settings, trial: Trial, measured: Measured) -> bool:
    """Return whether a stage other than the one on trial is the limit now."""
    if trial.stage == _CHUNKS:
        return measured.chunk_waited < _STARVED
    return trial.stage == _DECODING and measured.decoding < _BUSY * settings.decode_threads


def _keeps_up(state: State, measured: Measured, bounds: Bounds) -> State:
    """Give back threads with little to do, once the loop has not waited for some ticks."""
    busiest = max(state.busiest[0], measured.decoding), max(state.busiest[1], measured.fetching)
    state = replace(state, quiet=state.quiet + 1, busiest=busiest)
    if state.quiet < _QUIET_TICKS:
        return state
    busy: dict[Knob, float] = {"decode_threads": busiest[0], "fetch_threads": busiest[1]}
    for knob, threads in busy.items():
        now = getattr(state.settings, knob)
        wanted = bounds.clip(knob, math.ceil(_SPARE * threads) + 1)
        if wanted < now and not state.is_held(f"lower {knob}"):
            state = replace(state, quiet=0, busiest=(0.0, 0.0), given_back=(knob, state.settings, state.tick))
            why = f"the training loop is the limit, and {threads:.1f} of {now} were busy"
            return _change(state, knob, replace(state.settings, **{knob: wanted}), why)
    return replace(state, reason="at rest: the training loop is the limit")


def _raise(state: State, measured: Measured, bounds: Bounds) -> State:
    """Give more to the stage that the loop waits for, on trial."""
    if measured.cores >= _CORES_BUSY * bounds.cores:
        return replace(state, reason=f"at rest: {measured.cores:.1f} of {bounds.cores} cores are in use")
    for knob, stage, rate_name in _wanted(state.settings, measured):
        settings = _more(state.settings, knob, bounds, decodes=measured.decoding > 0)
        name = f"raise {knob}"
        if settings == state.settings or (state.is_held(name) and state.is_as_then(name)):
            continue
        trial = Trial(knob, state.settings, rate_name, getattr(measured, rate_name), stage)
        why = f"the training loop waited {measured.waited:.0%} of the time{stage and ', for '}{stage}"
        return _change(replace(state, trial=trial), knob, settings, why)
    if _is_short_of_memory(measured):
        return replace(state, reason="at rest: the chunks that are needed at once do not fit into memory_limit")
    return replace(
        state, reason=f"at rest: the training loop waits {measured.waited:.0%} of the time, and no setting helps"
    )


def _wanted(settings: Settings, measured: Measured) -> Iterator[tuple[Knob, str, str]]:
    """Yield (what to raise, for which stage, by which rate to judge it), the most promising first.

    All together come last: of two stages that are about as fast, neither gains alone.
    """
    fetch: list[tuple[Knob, str, str]] = []
    is_short = _is_short_of_memory(measured)
    if is_short:
        fetch = [("fetch_threads", "", "batches_per_s")]  # more bytes come in any case
    elif measured.chunk_waited >= _STARVED:
        fetch = [
            ("fetch_threads", _CHUNKS, "fetched_bytes_per_s"),
            ("read_ahead_bytes", _CHUNKS, "fetched_bytes_per_s"),
        ]
        if measured.fetching < _BUSY * settings.fetch_threads:
            fetch.reverse()  # threads that wait for room fetch no more if there are more of them
    decode: list[tuple[Knob, str, str]] = []
    if measured.decoding >= _BUSY * settings.decode_threads:
        # Rows that are copied late are none that are decoded.
        rate_name = "decoded_rows_per_s" if measured.decoded_rows_per_s else "batches_per_s"
        decode = [("decode_threads", _DECODING, rate_name)]
    yield from (*fetch, *decode) if measured.chunk_waited > 0.5 else (*decode, *fetch)
    if is_short:
        return
    if not decode and not fetch and measured.decoding > _STARVED:
        yield "read_ahead_bytes", "slow samples", "batches_per_s"  # batches that wait even out those that take long
    yield "all", "", "batches_per_s"


def _is_short_of_memory(measured: Measured) -> bool:
    """Return whether the loop waits because chunks fetched ahead are dropped before their use, and fetched again."""
    return measured.evicted_chunks > 0 and measured.chunk_waited >= _STARVED


def _more(settings: Settings, knob: Knob, bounds: Bounds, *, decodes: bool = True) -> Settings:
    """Take the next larger settings. Threads that fetch need room for what they fetch."""
    if knob == "all":
        settings = _more(settings, "fetch_threads", bounds)
        return _more(settings, "decode_threads", bounds) if decodes else settings
    if knob == "decode_threads":
        return bounds.clamp(replace(settings, decode_threads=2 * settings.decode_threads))
    if knob == "fetch_threads" and settings.fetch_threads < bounds.most.fetch_threads:
        threads = bounds.clip(knob, 2 * settings.fetch_threads)
        room = max(settings.read_ahead_bytes, 2 * threads * bounds.chunk_bytes)
        return bounds.clamp(replace(settings, fetch_threads=threads, read_ahead_bytes=room))
    if knob == "read_ahead_bytes":
        room = max(4 * settings.read_ahead_bytes, 2 * settings.fetch_threads * bounds.chunk_bytes)
        return bounds.clamp(replace(settings, read_ahead_bytes=room))
    return settings


def _change(state: State, knob: Knob, settings: Settings, why: str) -> State:
    if settings == state.settings:
        return state
    knobs = list(_NAMES) if knob == "all" else [knob]
    changes = [(each, getattr(state.settings, each), getattr(settings, each)) for each in knobs]
    shown = [f"{_NAMES[each]} {_show(each, old)} to {_show(each, new)}" for each, old, new in changes if old != new]
    reason = f"{', '.join(shown)}: {why}"
    return replace(state, settings=settings, changes=state.changes + 1, reason=reason)


def _show(knob: str, value: int) -> str:
    if knob != "read_ahead_bytes":
        return str(value)
    return f"{value / 2**20:,.0f} MiB" if value >= 1 << 20 else f"{value / 2**10:,.0f} KiB"


TICK_S = 1.0
_LONGEST_TICK_S = 30.0
_WAITING_TICK_S = 2.0  # where the loop only waits: so 1 fetch thread becomes 64 within 30 s, two ticks a doubling
_FEWEST_BATCHES = 4
_FEWEST_FETCH_THREADS = 2  # that are left when threads are given back


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """Totals of a pipeline so far; seconds of threads are summed over them."""

    at_s: float
    process_s: float
    waited_s: float
    chunk_waited_s: float
    fetching_s: float
    decoding_s: float
    fetched_bytes: int
    decoded_rows: int
    batches: int
    evicted_chunks: int


class Tunable(Protocol):
    """A pipeline that can be measured and changed."""

    def sums(self) -> Sums: ...

    def apply(self, settings: Settings) -> None: ...


def measure(before: Sums, now: Sums) -> Measured:
    """Measure the pipeline between two moments; ``now`` is the later one."""
    seconds = max(now.at_s - before.at_s, 1e-9)
    return Measured(
        waited=min(1.0, (now.waited_s - before.waited_s) / seconds),
        chunk_waited=min(1.0, (now.chunk_waited_s - before.chunk_waited_s) / seconds),
        fetching=(now.fetching_s - before.fetching_s) / seconds,
        decoding=(now.decoding_s - before.decoding_s) / seconds,
        cores=(now.process_s - before.process_s) / seconds,
        fetched_bytes_per_s=(now.fetched_bytes - before.fetched_bytes) / seconds,
        decoded_rows_per_s=(now.decoded_rows - before.decoded_rows) / seconds,
        batches_per_s=(now.batches - before.batches) / seconds,
        evicted_chunks=now.evicted_chunks - before.evicted_chunks,
    )


class Tuner:
    """Tunes a loader's pipelines, one after another; results of one carry over to the next.

    Mutable state: the controller's, replaced as a whole by the tuning thread, and between pipelines by the training
    loop's.
    """

    def __init__(self, choice: TuningChoice) -> None:
        self._choice = choice
        self._bounds: Bounds | None = None
        self._state: State | None = None

    @property
    def is_on(self) -> bool:
        """Return whether there is anything to change."""
        return self._bounds is not None and self._bounds.least != self._bounds.most

    @property
    def changes(self) -> int:
        return 0 if self._state is None else self._state.changes

    @property
    def reason(self) -> str:
        """The last decision, in words."""
        if not self.is_on:
            return "off" if self._choice.autotune is False else "every setting is given"
        return "" if self._state is None else self._state.reason

    def begin(self, options: PipelineOptions, chunk_bytes: int) -> PipelineOptions:
        """Choose the options with which a pipeline begins. Called before its thread runs."""
        start = Settings(
            fetch_threads=options.fetch_threads,
            decode_threads=options.decode_threads,
            read_ahead_bytes=options.read_ahead_bytes,
        )
        choice = self._choice
        least = Settings(
            fetch_threads=min(start.fetch_threads, _FEWEST_FETCH_THREADS),
            decode_threads=1,
            read_ahead_bytes=1,
        )
        in_memory = math.ceil(options.chunk_budget_bytes / max(1, chunk_bytes))  # further threads would wait for room
        most = Settings(
            fetch_threads=max(start.fetch_threads, min(options.most_fetch_threads, in_memory)),
            decode_threads=choice.cores,
            read_ahead_bytes=options.chunk_budget_bytes,
        )
        kept = {name: getattr(start, name) for name in choice.kept}
        self._bounds = Bounds(
            least=replace(least, **kept),
            most=replace(most, **kept),
            chunk_bytes=chunk_bytes,
            cores=choice.cores_of_node,
        )
        settings = self._bounds.clamp(start if self._state is None else self._state.settings)
        known = self._state or State(settings=settings)
        self._state = replace(known, settings=settings, trial=None, taken_back=None, given_back=None)
        return replace(options, **asdict(settings))

    def run(self, pipeline: Tunable, stopping: Event) -> None:
        """Tune until the pipeline stops. An error here ends the tuning, not the training."""
        before = pipeline.sums()
        while not stopping.wait(TICK_S):
            now = pipeline.sums()
            if not _is_over(before, now):
                continue
            assert self._state is not None
            assert self._bounds is not None
            decided = step(self._state, measure(before, now), self._bounds)
            is_changed, self._state = decided.settings != self._state.settings, decided
            if is_changed:
                try:
                    pipeline.apply(decided.settings)
                except RuntimeError as exc:
                    self._state = replace(decided, reason=f"ended: {exc}")
                    return
                now = pipeline.sums()
            before = now


def _is_over(before: Sums, now: Sums) -> bool:
    """Return whether the interval suffices to judge by; a loop that is away (evaluates, say) gives none."""
    seconds = now.at_s - before.at_s
    waits = now.waited_s - before.waited_s > seconds / 2
    return (
        now.batches - before.batches >= _FEWEST_BATCHES
        or (seconds >= _WAITING_TICK_S and waits)
        or (seconds >= _LONGEST_TICK_S and now.batches > before.batches)
    )

"""A position in a run of a mixture, as JSON keeps it: a few numbers a source, whatever the number of lanes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import ConfigError, StateMismatchError
from .costs.buckets import BucketedOrder
from .mixture import MOST_SAMPLES, Cursor, Lap, WeightChange
from .outputs import Cursors, pack_integers, unpack_integers
from .plan import Order
from .state import check_seal, is_bucket, seal

_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class SourceStream:
    """A source was at ``start`` when the mixture's epoch began, and is ``here``, its lanes at ``cursors``.

    ``kind`` says what is done to samples, as far as states know: {"kind": "filter"}, or for packing also which settings
    and how many samples are packed together.
    """

    kind: Mapping[str, Any]
    start: Lap
    here: Lap
    cursors: Cursors

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        laps = {"start": [self.start.epoch, self.start.outputs], "here": [self.here.epoch, self.here.outputs]}
        if not self.here.outputs:
            return {**self.kind, **laps}
        offsets, outputs = pack_integers(self.cursors.offsets), pack_integers(self.cursors.outputs)
        return {**self.kind, **laps, "offsets": offsets, "outputs": outputs}

    @staticmethod
    def from_dict(state: Mapping[str, Any], *, name: str, lane_sizes: Any) -> SourceStream:
        """Read what ``to_dict`` returned, of a source whose lanes have these inputs, (lanes,) int64.

        Raises:
            StateMismatchError: it is damaged.
        """
        lanes = len(lane_sizes)
        try:
            start, here = _lap(state["start"]), _lap(state["here"])
            if start > here:
                raise ValueError(f"it is at {here} of what began at {start}")
            cursors = Cursors.at_start(lanes)
            if here.outputs:
                offsets, outputs = (unpack_integers(state[name], lanes) for name in ("offsets", "outputs"))
                cursors = Cursors(offsets, outputs, outputs)
                fits = (offsets >= 0) & (offsets <= lane_sizes) & (outputs >= 0)
                if "unit" in state:
                    fits &= (offsets % state["unit"] == 0) | (offsets == lane_sizes)
                else:
                    fits &= (outputs <= offsets) & (here.outputs <= int(lane_sizes.sum()))
                if not np.all(fits) or int(outputs.sum()) > here.outputs:
                    raise ValueError("its cursors contradict each other")
        except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError, zlib.error) as exc:
            raise StateMismatchError(f"a damaged loader state of a mixture: source {name!r}: {exc}") from exc
        kind = {name: value for name, value in state.items() if name in ("kind", "packing", "unit")}
        return SourceStream(kind, start, here, cursors)


def _lap(given: Any) -> Lap:
    epoch, outputs = given
    if type(epoch) is not int or type(outputs) is not int or not (0 <= epoch < _MOST and 0 <= outputs < _MOST):
        raise ValueError(f"{given!r} where an epoch and a number of outputs belong")
    return Lap(epoch, outputs)


VERSION = 5
_MOST_SOURCES = 1 << 13
_PASS = "pass what DistributedDataLoader.state_dict() returned"


@dataclass(frozen=True, kw_only=True)
class SourceState:
    """State of one source: ``taken`` samples of its endless sequence, ``start`` of them before the mixture's epoch.

    ``fingerprint``, ``num_samples`` and ``selection`` say which samples one of its epochs has; ``seed``, ``window`` and
    ``piece`` are those of its order, and ``bucket`` its buckets, if any. ``stream``, of a source whose samples are
    dropped or packed: see ``SourceStream``.
    """

    name: str
    fingerprint: str
    num_samples: int
    selection: Mapping[str, Any]
    seed: int
    window: int
    piece: int
    start: int
    taken: int
    stream: Mapping[str, Any] = field(default_factory=dict)
    bucket: Mapping[str, Any] = field(default_factory=dict)

    def begin_epoch(self) -> SourceState:
        """The same where an epoch of the mixture begins here."""
        stream = {**self.stream, "start": self.stream["here"]} if self.stream else {}
        return replace(self, start=self.taken, stream=stream)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; without ``stream`` and ``bucket`` where there is nothing in them."""
        return {name: value for name, value in asdict(self).items() if name not in ("stream", "bucket") or value}


@dataclass(frozen=True, kw_only=True)
class MixtureState:
    """A run of a mixture at ``consumed`` samples of ``epoch``.

    ``start`` is (samples, steps) of the run before the epoch, ``here`` the same before the next batch. ``given`` are
    the weights of the mixture that the loader was made of, ``changes`` those in force, with what ``set_weights``
    changed: by the positions from which on they hold, one a source. ``parted`` are sources that the mixture no longer
    has.
    """

    seed: int
    shuffle: bool
    lanes: int
    epoch: int
    start: tuple[int, int]
    here: tuple[int, int]
    given: tuple[WeightChange, ...]
    changes: tuple[WeightChange, ...]
    sources: tuple[SourceState, ...]
    parted: tuple[SourceState, ...] = ()

    @property
    def consumed(self) -> int:
        return self.here[0] - self.start[0]

    def order_of(self, source: SourceState) -> Order:
        """The order of one source."""
        plain: dict[str, Any] = {"seed": source.seed, "shuffle": self.shuffle, "lanes": self.lanes}
        plain |= {"window": source.window, "piece": source.piece}
        return BucketedOrder(**plain, **source.bucket) if source.bucket else Order(**plain)

    def cursor(self, taken: Sequence[int]) -> Cursor:
        """The run's cursor before the next batch, with the samples ``taken`` of each source here."""
        return Cursor(*self.here, tuple(taken))

    def to_dict(self) -> dict[str, Any]:
        """The state for JSON, with a checksum of all other entries."""
        entries = {
            "version": VERSION,
            "epoch": self.epoch,
            "consumed": self.consumed,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "lanes": self.lanes,
            "mixture": {
                "start": list(self.start),
                "here": list(self.here),
                "given": _dump(self.given),
                "changes": _dump(self.changes),
            },
            "sources": [source.to_dict() for source in self.sources],
            "parted": [source.to_dict() for source in self.parted],
        }
        return seal(entries)

    @staticmethod
    def from_dict(state: Mapping[str, Any]) -> MixtureState:
        """Read what ``to_dict`` returned.

        Raises:
            StateMismatchError: it is no state of a mixture, of another version, or damaged; says in what.
        """
        if not isinstance(state, Mapping):
            raise StateMismatchError(f"a loader state is a dict, not {type(state).__name__}; {_PASS}")
        version = state.get("version", 1)
        if version != VERSION:
            raise StateMismatchError(
                f"a loader state of version {version!r}, and a mixture's has version {VERSION}: it is of a loader of "
                "another kind. To continue a data set inside a mixture, begin the mixture anew"
            )
        try:
            loaded = _read(state)
            _check(loaded)
            if state["consumed"] != loaded.consumed:
                raise ValueError(f"consumed={state['consumed']!r} where {loaded.consumed} fits its cursors")
        except (LookupError, TypeError, ValueError, ConfigError, AttributeError) as exc:
            what = f"lacks {exc}" if isinstance(exc, KeyError) else str(exc)
            raise StateMismatchError(f"a damaged loader state of a mixture: {what}; {_PASS}") from exc
        check_seal(state, loaded.to_dict())
        return loaded


def _dump(changes: Sequence[WeightChange]) -> list[list[Any]]:
    return [[change.position, list(change.weights)] for change in changes]


def _read(state: Mapping[str, Any]) -> MixtureState:
    mixture = state["mixture"]
    if len(state["sources"]) > _MOST_SOURCES or len(state["parted"]) > _MOST_SOURCES:
        raise ValueError("too many sources")
    return MixtureState(
        seed=_whole(state["seed"], 1 << 64),
        shuffle=_typed(state["shuffle"], bool),
        lanes=_whole(state["lanes"]),
        epoch=_whole(state["epoch"]),
        start=_pair(mixture["start"]),
        here=_pair(mixture["here"]),
        given=_load(mixture["given"]),
        changes=_load(mixture["changes"]),
        sources=tuple(map(_source, state["sources"])),
        parted=tuple(map(_source, state["parted"])),
    )


def _check(state: MixtureState) -> None:
    """Raise ValueError where a state's parts do not fit each other."""
    count = len(state.sources)
    if not count or len({source.name for source in state.sources}) < count:
        raise ValueError("its sources have no names of their own")
    for changes in (state.given, state.changes):
        positions = [change.position for change in changes]
        if not positions or positions[0] > state.start[0] or positions != sorted(set(positions)):
            raise ValueError(f"weights change at {positions}")
        if any(len(change.weights) != count or not sum(change.weights) for change in changes):
            raise ValueError("weights that are not one a source")
    if any(low > high for low, high in zip(state.start, state.here, strict=True)):
        raise ValueError(f"it is at {state.here} of an epoch that began at {state.start}")
    for source in (*state.sources, *state.parted):
        state.order_of(source)
        if not 0 <= source.start <= source.taken or not source.num_samples:
            raise ValueError(f"source {source.name!r}: {source.start} of {source.taken} samples")
    everything = (*state.sources, *state.parted)
    counted = sum(source.start for source in everything), sum(source.taken for source in everything)
    if counted != (state.start[0], state.here[0]):
        raise ValueError(f"its sources have {counted[1]} samples, and it is at {state.here[0]}")


def _source(given: Mapping[str, Any]) -> SourceState:
    return SourceState(
        name=_typed(given["name"], str),
        fingerprint=_typed(given["fingerprint"], str),
        selection=_typed(given["selection"], dict),
        seed=_whole(given["seed"], 1 << 64),
        stream=_typed(given.get("stream", {}), dict),
        bucket=_bucket(given.get("bucket", {})),
        **{name: _whole(given[name]) for name in ("num_samples", "window", "piece", "start", "taken")},
    )


def _bucket(given: Any) -> dict[str, Any]:
    if given and not is_bucket(given):
        raise ValueError(f"bucket={given!r}")
    bucket: dict[str, Any] = _typed(given, dict)
    return bucket


def _load(given: Sequence[Any]) -> tuple[WeightChange, ...]:
    changes = []
    for position, weights in given:
        if any(type(weight) not in (int, float) or not 0 <= weight < float("inf") for weight in weights):
            raise ValueError(f"weights {weights!r}")
        changes.append(WeightChange(_whole(position), tuple(map(float, weights))))
    return tuple(changes)


def _pair(given: Sequence[Any]) -> tuple[int, int]:
    first, second = given
    return _whole(first), _whole(second)


def _whole(value: Any, most: int = MOST_SAMPLES) -> int:
    if type(value) is not int or not 0 <= value < most:
        raise ValueError(f"{value!r} where a number of samples belongs")
    return value


def _typed(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{value!r} where a {kind.__name__} belongs")
    return value

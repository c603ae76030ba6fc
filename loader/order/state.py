"""A position in a run: small, JSON-able, the same on every rank, and independent of the number of ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import ConfigError, StateMismatchError
from .costs.buckets import BucketedOrder
from .plan import Order

CHECKSUM = "checksum"
_DIGITS = 16


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with the checksum of all that is in it, which is JSON-able."""
    # Positions may be numpy's numbers.
    text = json.dumps(state, sort_keys=True, separators=(",", ":"), default=int)
    return {**state, CHECKSUM: hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}


def unseal(state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy without the checksum, to be changed."""
    return {name: value for name, value in state.items() if name != CHECKSUM}


def check_seal(state: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Compare the checksum of a state, if it has one, with that of what was read from it, as ``seal`` returned it.

    Raises:
        StateMismatchError: they differ.
    """
    if CHECKSUM in state and state[CHECKSUM] != loaded[CHECKSUM]:
        raise StateMismatchError(
            f"a damaged loader state: its checksum is {str(state[CHECKSUM])[:40]!r}, and its numbers have "
            f"{loaded[CHECKSUM]!r}: one of them was changed after state_dict() returned it. Load the state as it was "
            f"saved; to move one, use `penstock state skip`. A state without {CHECKSUM!r} is loaded as it is"
        )


# A state without pieces is of version 1, which every penstock reads. One with pieces, or with a selection of samples,
# must not be read by a penstock that does not know these.
_VERSION, _VERSION_OF_PIECES, _VERSION_OF_SELECTIONS, _VERSION_OF_STREAMS, _VERSION_OF_BUCKETS = 1, 2, 3, 4, 6
_VERSIONS = (_VERSION, _VERSION_OF_PIECES, _VERSION_OF_SELECTIONS, _VERSION_OF_STREAMS, _VERSION_OF_BUCKETS)
FILTER, PACKING = "filter", "packing"  # kinds of streams; of the second outputs may be more than samples
_MOST_EPOCHS = 1 << 62  # logs keep them as int64
_SHOWN = 8  # names of what is no state
_PASS = "pass what DistributedDataLoader.state_dict() returned"


@dataclass(frozen=True, kw_only=True)
class LoaderState:
    """The first ``consumed`` positions of ``epoch`` have been handed out, in the order that the other fields fix.

    ``fingerprint`` and ``num_samples`` are the manifest's. ``selection`` says which of its samples an epoch has, empty
    for all (``Selection.to_dict``), ``bucket`` how they are bucketed, empty if not (``BucketedOrder.bucket``).
    ``stream`` is not empty where samples are dropped: then positions are places among what is left, and it holds where
    the lanes stand (``Cursors.to_dict``); such an order has no buckets.
    """

    fingerprint: str
    num_samples: int
    seed: int
    shuffle: bool
    lanes: int
    window: int
    epoch: int
    consumed: int
    piece: int = 0
    selection: Mapping[str, Any] = field(default_factory=dict)
    bucket: Mapping[str, Any] = field(default_factory=dict)
    stream: Mapping[str, Any] = field(default_factory=dict)

    @property
    def order(self) -> Order:
        """The order. Raises ConfigError if there is none with these numbers."""
        plain = self._plain_order
        if not self.bucket:
            return plain
        try:
            return BucketedOrder(**asdict(plain), **self.bucket)
        except TypeError as exc:
            raise ConfigError(f"bucket={dict(self.bucket)}: not the fields of one") from exc

    @property
    def _plain_order(self) -> Order:
        return Order(seed=self.seed, shuffle=self.shuffle, lanes=self.lanes, window=self.window, piece=self.piece)

    def to_dict(self) -> dict[str, Any]:
        """The state for JSON, with a checksum of all other entries."""
        return seal(self._entries())

    def _entries(self) -> dict[str, Any]:
        state = asdict(self)
        piece, selection, bucket, stream = (state.pop(name) for name in ("piece", "selection", "bucket", "stream"))
        if bucket:
            more = {"piece": piece, "selection": dict(selection), "bucket": dict(bucket)}
            return {**state, **more, "version": _VERSION_OF_BUCKETS}
        if stream:
            more = {"piece": piece, "selection": dict(selection), "stream": dict(stream)}
            return {**state, **more, "version": _VERSION_OF_STREAMS}
        if selection:
            return {**state, "piece": piece, "selection": dict(selection), "version": _VERSION_OF_SELECTIONS}
        return {**state, "version": _VERSION} if not piece else {**state, "piece": piece, "version": _VERSION_OF_PIECES}

    @staticmethod
    def from_dict(state: Mapping[str, Any]) -> LoaderState:
        """Read what ``to_dict`` returned.

        Raises:
            StateMismatchError: it is no such state, has another version, or was changed; names the fields that are
                wrong. States of versions of penstock that wrote no checksum are read without one.
        """
        if not isinstance(state, Mapping):
            raise StateMismatchError(f"a loader state is a dict, not {type(state).__name__}; {_PASS}")
        version = state.get("version", _VERSION)
        if version not in _VERSIONS:
            *some, last = _VERSIONS
            mixed = "; version 5 is of a mixture, and only loads into a mixture" if version == 5 else ""
            raise StateMismatchError(
                f"a loader state of version {version!r}, this loader reads versions {', '.join(map(str, some))} and "
                f"{last}{mixed}; {_PASS}"
            )
        kinds = {
            "fingerprint": str,
            "num_samples": int,
            "seed": int,
            "shuffle": bool,
            "lanes": int,
            "window": int,
            "epoch": int,
            "consumed": int,
            **({"piece": int} if version >= _VERSION_OF_PIECES else {}),
            **({"selection": dict} if version >= _VERSION_OF_SELECTIONS else {}),
            **({"bucket": dict} if version == _VERSION_OF_BUCKETS else {}),
            **({"stream": dict} if version == _VERSION_OF_STREAMS else {}),
        }
        missing = [name for name in (*kinds, "version") if name not in state]
        if missing:
            has = f"it has: {', '.join(map(str, list(state)[:_SHOWN]))}" if state else "it is empty"
            raise StateMismatchError(f"not a loader state; missing: {', '.join(missing)}; {has}; {_PASS}")
        wrong = [name for name, kind in kinds.items() if type(state.get(name)) is not kind]
        if wrong:
            raise StateMismatchError(f"a damaged loader state: {', '.join(wrong)} of the wrong type")
        if version == _VERSION_OF_BUCKETS and not is_bucket(state["bucket"]):
            raise StateMismatchError(f"a damaged loader state: bucket={state['bucket']}")
        loaded = LoaderState(**{name: state[name] for name in kinds})
        try:
            _ = loaded.order
        except ConfigError as exc:
            raise StateMismatchError(f"a damaged loader state: {exc}") from exc
        most = _MOST_EPOCHS if loaded.stream.get("kind") == PACKING else loaded.num_samples
        if not 0 <= loaded.epoch < _MOST_EPOCHS or not 0 <= loaded.consumed <= most or loaded.piece < 0:
            raise StateMismatchError(
                f"a damaged loader state: epoch={loaded.epoch}, consumed={loaded.consumed} "
                f"of {loaded.num_samples} samples, piece={loaded.piece}"
            )
        check_seal(state, loaded.to_dict())
        return loaded

    def check(self, *, fingerprint: str, num_samples: int, **order: object) -> None:
        """Raise unless the state belongs to this data set and these order parameters (None: any value).

        Raises:
            StateMismatchError: names each thing that differs, with both values.
        """
        here = {"fingerprint": fingerprint, "num_samples": num_samples, **order}
        differing = [
            f"{_LABELS.get(name, name)}: {_show(getattr(self, name))} in the state, {_show(value)} here"
            for name, value in here.items()
            if value is not None and getattr(self, name) != value
        ]
        if differing:
            raise StateMismatchError(
                "the state belongs to another run's order and cannot be resumed here; " + "; ".join(differing)
            )


_LABELS = {
    "fingerprint": "data set (fingerprint)",
    "num_samples": "data set (samples)",
    "selection": "subset= and weights=",
}


def is_bucket(value: Mapping[str, Any]) -> bool:
    kinds = {"index": str, "costs": str, "run": int, "pool": int}
    return set(value) == set(kinds) and all(type(value[name]) is kind for name, kind in kinds.items())


def _show(value: object) -> str:
    return "none" if value == {} else repr(value)

"""The shards of a run on Ray, as its driver has them: started, filled, asked together, and moved between."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ...storage.resolve import open_store
from ..checkpoint.remote.layout import list_stored
from ..errors import ServerError, ShardUnreachableError
from ..server.checkpoints import read_buckets, read_saved
from ..server.messages import Request
from ..server.moving import Transition
from ..server.parcels import Parcels
from ..server.placement import Placement, moves
from ..server.shard import ServerConfig
from . import shard_actor
from .calls import wait_for

_START_S = 180.0
_CALL_S = 120.0
_AT_ONCE = 256
_NAME_S = 30.0  # until the name of an actor that was ended is free


class Fleet:
    """Shards, and the placement of buckets on them; the ``Carrier`` of buckets that move. For the driver's thread.

    ``ask`` calls the coordinator until it answers. All mutable state: the actors by name, the placement as the
    coordinator has it, the move that goes on, with the time of its last progress, shards that are given up, and those
    that have not heard of it.
    """

    def __init__(
        self,
        ray: Any,
        config: ServerConfig,
        *,
        weights: Mapping[str, float],
        replicas: int,
        place: str,
        ask: Callable[..., Any],
    ) -> None:
        self._ray, self._config, self._token = ray, config, config.token
        self._replicas, self._place, self._ask = replicas, place, ask
        self._used = frozenset(config.schema.buckets().tolist())
        self.actors: dict[str, Any] = {}
        self.placement = Placement(weights)
        self._transition: Transition | None = None
        self._progressed_s = 0.0
        self._lost: set[str] = set()
        self._to_hear: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The shards that buckets are to lie on."""
        return list(self.placement.weights)

    # Shards that begin and end

    def start(self, names: Collection[str], weights: Mapping[str, float], *, cpus: int = 1) -> None:
        """Start shards, which wait to be filled; ``weights`` are those of all that there will be."""
        make = shard_actor.make_actor_class()
        for name in names:
            settings = shard_actor.ShardSettings(
                name=name, config=self._config, weights=weights, replicas=self._replicas, place=self._place
            )
            options = {"name": name, "num_cpus": cpus, "scheduling_strategy": "SPREAD"}
            self.actors[name] = self._create(make.options(**options), settings)

    def _create(self, made: Any, settings: shard_actor.ShardSettings) -> Any:
        deadline = time.monotonic() + _NAME_S
        while True:
            try:
                return made.remote(settings)
            except ValueError:  # one of this name is ending
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def fill(self, name: str, *, step: int | None, notices: Sequence[Request] | None = None) -> str:
        """Have a shard hold its buckets, and answer for them; returns where they are from, in words.

        ``step`` is the checkpoint that the run goes on from, and ``notices`` who takes part, if not as the coordinator
        knows.

        Raises:
            ShardUnreachableError: it gave no answer; call it again.
        """
        filling = shard_actor.Filling(
            weights=self.placement.weights,
            elsewhere=self.placement.elsewhere,
            peers=sorted(self.actors),
            awaited=frozenset() if self._transition is None else self._transition.awaited(name),
            notices=self._ask("recall_notices") if notices is None else notices,
            step=step,
        )
        origin: str = wait_for(self.actors[name].fill.remote(self._token, filling), name, timeout_s=_START_S)
        return origin

    def end(self, names: Collection[str]) -> None:
        """End shards, for good."""
        for name in list(names):
            with suppress(Exception):  # it may be gone already
                self._ray.kill(self.actors.pop(name), no_restart=True)

    def call_all(self, method: str, *values: Any) -> list[Any]:
        """Call all shards at once, and wait for all.

        Raises:
            ShardUnreachableError: one gave no answer.
        """
        asked = {name: getattr(one, method).remote(self._token, *values) for name, one in self.actors.items()}
        return [wait_for(reply, name, timeout_s=_CALL_S) for name, reply in asked.items()]

    # Buckets that move

    @property
    def is_moving(self) -> bool:
        """Return whether buckets, or copies of them, are not yet where they are to be."""
        return self._transition is not None

    @property
    def is_between(self) -> bool:
        """Return whether some buckets are on no shard."""
        return self._transition is not None and self._transition.is_between

    def begin_move(self, weights: Mapping[str, float], *, cpus: int = 1) -> None:
        """Begin to move buckets to shards of these names and weights; new ones start, and are to be filled."""
        self.start(sorted(weights.keys() - self.actors.keys()), weights, cpus=cpus)
        self._ask("place", dict(weights))
        on_their_way = moves(self.placement, Placement(weights))
        self.placement = Placement(weights, {move.bucket: move.source for move in on_their_way})
        self._transition = Transition(self.placement, self._used, self)
        self._progressed_s = time.monotonic()

    def give_up(self, name: str) -> bool:
        """End a shard that does not come back, and begin to move its buckets; returns whether that is possible.

        They are taken from the copies of other shards, and otherwise from the newest checkpoint; workers send again
        what that lacks.
        """
        weights = {shard: weight for shard, weight in self.placement.weights.items() if shard != name}
        if self.is_moving or name not in self.placement.weights or len(weights) < self._replicas:
            return False
        self._lost.add(name)
        self._to_hear = set(weights)  # that copies cannot be there
        self.end([name])  # so that it answers nobody any more
        self.begin_move(weights)
        return True

    def move_on(self, seconds: float) -> int | None:
        """Move for so long at most; returns how many buckets have moved once all have, and ends shards without any.

        Raises:
            ShardUnreachableError: there was no progress for minutes.
        """
        transition = self._transition
        until = time.monotonic() + seconds
        while transition is not None and time.monotonic() < until:
            try:
                for name in sorted(self._to_hear):
                    self._call(name, "place", self.placement.weights)
                    self._to_hear.discard(name)
                transition.step()
            except ShardUnreachableError as exc:  # it may be starting anew
                if time.monotonic() - self._progressed_s > _START_S:
                    raise ShardUnreachableError(
                        f"buckets cannot be moved, since {exc}; start the run again, from its newest checkpoint"
                    ) from exc
                return None
            self._progressed_s = time.monotonic()
            if transition.is_done:
                self._transition = None
                self._lost.clear()
                self.end(self.actors.keys() - self.placement.weights.keys())
                return transition.moved
        return None

    def depart(self, source: str, numbers: Collection[int]) -> Parcels:
        if source in self._lost:
            return self._recover(source, list(numbers)[:_AT_ONCE])
        parcels: Parcels = self._call(source, "depart", list(numbers))
        return parcels

    def _recover(self, source: str, numbers: Sequence[int]) -> Parcels:
        """Find buckets of a shard that is given up: in copies, in a checkpoint, or nowhere.

        Raises:
            ShardUnreachableError: a shard that may have copies gave no answer.
        """
        found: dict[int, bytes] = {}
        for name, actor in self.actors.items() if self._replicas == 2 else ():
            copies = wait_for(actor.copies_of.remote(source, self._token), name, timeout_s=_CALL_S)
            found |= {number: copies[number] for number in numbers if number in copies}
        left = set(numbers) - found.keys()
        store = open_store(self._place)
        try:
            step = next(iter(list_stored(store)), None)
            if left and step is not None:
                saved = read_saved(store, step)
                found |= {number: data for number in left for _, data in read_buckets(store, saved, [number])}
        finally:
            store.close()
        return Parcels(buckets=found, absent=frozenset(numbers) - found.keys())

    def note(self, numbers: Collection[int]) -> None:
        self._ask("arrived", sorted(numbers))
        self.placement = self.placement.after(numbers)

    def arrive(self, target: str, parcels: Parcels) -> None:
        self._call(target, "arrive", parcels)

    def forget(self, source: str, numbers: Collection[int]) -> None:
        if source not in self._lost:
            self._call(source, "forget", sorted(numbers))

    def settle(self, shard: str, placement: Placement) -> int:
        left: int = 0 if shard in self._lost else self._call(shard, "settle", placement.weights)
        return left

    def _call(self, name: str, method: str, *values: Any) -> Any:
        if name not in self.actors:
            raise ServerError(f"there is no {name} in this run")
        return wait_for(getattr(self.actors[name], method).remote(self._token, *values), name, timeout_s=_CALL_S)

"""A shard: buckets, and the rules by which requests change them. It neither waits, nor reads a clock, nor does I/O."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from ...storage.suggestions import unknown_choice
from ..errors import NoQuorumError, NotHeldError, NotJoinedError, ServerRefusedError, TrainerConfigError
from . import placement, snapshots
from .bucket import Gradients, Mask, Numbers, Piece, Reduction, as_update, merge
from .holding import HeldBucket, Holding, mask_of
from .messages import (
    PROTOCOL,
    READER,
    Advance,
    Advanced,
    Ask,
    Create,
    Header,
    Join,
    Joined,
    Leave,
    Outcome,
    PieceKey,
    Pull,
    Pulled,
    Push,
    Pushed,
    Reply,
    Request,
)
from .optimizers import Optimizer, RowWiseAdagrad
from .payloads import CodecConfig, Payload, decode, encode
from .placement import buckets_of_rows
from .policies import AnyPolicy
from .schema import Schema


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """All that the shards of a run agree on."""

    run: str
    schema: Schema
    policy: AnyPolicy
    dense: Optimizer
    rows: Optimizer
    reduction: Reduction = "mean"
    """How gradients that are merged become one."""
    scales_by_staleness: bool = False
    """Divide the rate by 1 + the versions that a push is behind (Zhang et al. 2015)."""
    token: str = ""

    def __post_init__(self) -> None:
        if self.reduction not in ("sum", "mean"):
            raise TrainerConfigError(unknown_choice("reduction", self.reduction, ("sum", "mean")))
        if isinstance(self.dense, RowWiseAdagrad):
            raise TrainerConfigError("row-wise Adagrad is for rows of tables; use Sgd or AdamW for dense tensors")

    def __repr__(self) -> str:
        return f"ServerConfig(run={self.run!r}, policy={self.policy!r})"  # no token


class Shard:
    """Some of the buckets of a run. All mutable state: what it holds, the members, and who was forgotten.

    ``members`` are the workers that others may have to wait for, with their incarnations and the clocks at which they
    joined. ``fenced`` are the incarnations of workers that were forgotten. Of ``buckets`` those are held that can hold
    something. A reply may share the memory of values, which stay as they are while anybody has it.
    """

    def __init__(
        self, name: str, config: ServerConfig, buckets: Collection[int] = (), *, is_replicated: bool = False
    ) -> None:
        self.name, self.config = name, config
        self.members: dict[str, tuple[int, int]] = {}
        self.fenced: dict[str, int] = {}
        self._is_replicated = is_replicated
        self._holding = Holding(
            config.schema, config.dense, config.rows, scales_by_staleness=config.scales_by_staleness
        )
        self.hold_empty(sorted(set(buckets) & set(config.schema.buckets().tolist())))

    @property
    def buckets(self) -> Mapping[int, HeldBucket]:
        """The buckets that it holds, by number."""
        return MappingProxyType(self._holding.buckets)

    @property
    def clocks(self) -> dict[str, int]:
        """The least clock of each worker in any bucket."""
        return self._holding.ledger.slowest(self._holding.numbers)

    @property
    def num_rows(self) -> int:
        """The number of rows that it holds."""
        return sum(int(table.counts.sum()) for table in self._holding.tables.values())

    @property
    def num_values(self) -> int:
        """The number of elements of dense tensors that it holds."""
        return sum(piece.values.numel() for bucket in self.buckets.values() for piece in bucket.pieces.values())

    @property
    def num_bytes(self) -> int:
        """The bytes of all values and of their optimizers' state."""
        pieces = [piece for bucket in self.buckets.values() for piece in bucket.pieces.values()]
        dense = sum(tensor.nbytes for piece in pieces for tensor in (piece.values, *piece.state.values()))
        return dense + sum(table.num_bytes for table in self._holding.tables.values())

    @property
    def version(self) -> int:
        """The version of the bucket with the most updates."""
        return int(self._holding.ledger.versions.max())

    def changes(self, numbers: Numbers) -> Numbers:
        """The changes (n,) of buckets (n,), which it holds."""
        return self._holding.ledger.changes[numbers]

    def handle(self, request: Request, now: float) -> Reply:
        """Answer a request that came at ``now``, in seconds of any steady clock.

        Raises:
            ServerRefusedError: the request is not for this server, or cannot be right; nothing of it was applied.
            NoQuorumError: what is asked for waits for workers that did not come.
        """
        self._check_header(request.header)
        if isinstance(request, Join):
            return self._join(request)
        if isinstance(request, Leave):
            self._leave(request, now)
            return None
        if not (isinstance(request, Pull) and request.header.incarnation == READER):
            self._check_member(request.header)
        if isinstance(request, Create):
            self._create(request)
            return None
        if isinstance(request, Push):
            return self._push(request, now)
        if isinstance(request, Ask):
            return self._answer_ask(request)
        if isinstance(request, Advance):
            return self._advance(request, now)
        return self._pull(request, now)

    def tick(self, now: float) -> None:
        """Close the rounds whose time is over."""
        self._close_rounds(self._holding.ledger.is_held, now)

    # Membership

    def _check_header(self, header: Header) -> None:
        config = self.config
        if not hmac.compare_digest(header.token.encode(), config.token.encode()):
            raise ServerRefusedError(f"{self.name}: worker {header.worker!r} has not the token of run {config.run!r}")
        for name, given, held in (
            ("protocol", header.protocol, PROTOCOL),
            ("run", header.run, config.run),
            ("schema", header.schema, config.schema.digest),
        ):
            if given != held:
                raise ServerRefusedError(
                    f"{self.name}: worker {header.worker!r} is of {name} {given!r} and this server of {held!r}; "
                    f"start both from one version, run and model"
                )

    def _check_member(self, header: Header) -> None:
        incarnation = self.members.get(header.worker, (-1, 0))[0]
        if incarnation != header.incarnation:
            held = f"incarnation {incarnation} has joined" if incarnation >= 0 else "it has not joined"
            raise NotJoinedError(
                f"{self.name}: worker {header.worker!r}, incarnation {header.incarnation}: {held}; join first"
            )

    def _join(self, request: Join) -> Joined:
        worker, incarnation = request.header.worker, request.header.incarnation
        held, clock = self.members.get(worker, (-1, 0))
        if incarnation < held or incarnation <= self.fenced.get(worker, -1):
            raise NotJoinedError(
                f"{self.name}: worker {worker!r}, incarnation {incarnation}, was replaced or given up; start it anew "
                f"with an incarnation above {max(held, self.fenced.get(worker, -1))}"
            )
        if incarnation == held:
            clock = max(clock, request.clock)
        else:
            others = (one for name, one in self.clocks.items() if name != worker)
            clock = max(request.clock, min(others, default=0))
        self.members[worker] = (incarnation, clock)
        self._holding.ledger.admit(worker, incarnation, clock, self._holding.numbers)
        return Joined(clock=clock)

    def _leave(self, request: Leave, now: float) -> None:
        """Forget a worker, up to the incarnation that the header names if it is of this worker."""
        worker = request.worker
        held = self.members.get(worker, (-1, 0))[0]
        incarnation = request.header.incarnation if request.header.worker == worker else held
        if incarnation >= 0:
            self.fenced[worker] = max(incarnation, self.fenced.get(worker, -1))
        if not 0 <= held <= incarnation:
            return
        del self.members[worker]
        self._holding.ledger.forget(worker, self._holding.numbers)
        self._close_rounds(self._holding.ledger.is_held, now)

    # First values

    def _create(self, request: Create) -> None:
        new: list[tuple[PieceKey, Tensor]] = []
        for key, payload in request.pieces.items():
            values = self._decode_piece(key, payload)
            if key not in self._held(self._holding.bucket_of[key]).pieces:
                new.append((key, values.clone()))
        for key, values in new:
            self._holding.create(key, Piece(values, self.config.dense.new_state(values)))

    def _held(self, number: int) -> HeldBucket:
        bucket = self.buckets.get(number)
        if bucket is None:
            raise NotHeldError(f"{self.name} does not hold bucket {number}; ask for the placement again")
        return bucket

    def _decode_piece(self, key: PieceKey, payload: Payload) -> Tensor:
        size = self.config.schema.tensor(key[0]).piece_size(key[1])
        if payload.shape != (size,):
            raise ServerRefusedError(
                f"{self.name}: piece {key[1]} of {key[0]!r} has shape {(size,)}, and {payload.shape} was pushed"
            )
        return self._decode(payload, f"piece {key[1]} of {key[0]!r}").reshape(1, size)

    def _decode(self, payload: Payload, what: str) -> Tensor:
        try:
            return decode(payload)
        except ServerRefusedError as exc:
            raise ServerRefusedError(f"{self.name}: {what}: {exc}") from exc

    # Pushes

    def _push(self, request: Push, now: float) -> Pushed:
        header, numbers, sequences = request.header, request.buckets, request.sequences
        if not 0 < request.weight < float("inf"):
            raise ServerRefusedError(f"{self.name}: a push has weight {request.weight}; it must be above 0 and finite")
        self._check_parts(request)
        ledger = self._holding.ledger
        is_held = ledger.is_held[numbers]
        last = ledger.last_sequences(header.worker, header.incarnation, numbers)
        outcomes = np.where(is_held, np.where(sequences <= last, Outcome.DUPLICATE, Outcome.GAP), Outcome.MOVED)
        is_next = is_held & (sequences == last + 1)
        gradients = self._gradients(request, is_next, now)
        if gradients is not None:  # all are valid: nothing fails from here on
            ledger.settle(request.settled)
            ledger.take_sequences(header.worker, header.incarnation, numbers[is_next], sequences[is_next])
            is_new = ledger.count_unit(request.unit, gradients.buckets)  # another worker's of the same batch may count
            outcomes[is_next] = np.where(is_new, Outcome.APPLIED, Outcome.DUPLICATE)
            self._take(gradients.only(mask_of(gradients.buckets[is_new]), self._holding.bucket_of), now)
        return self._answer(header, numbers, outcomes)

    def _take(self, gradients: Gradients | None, now: float) -> None:
        """Apply gradients, or keep them until their round closes."""
        if gradients is None:
            return
        if self.config.policy.merges == "no":
            self._holding.apply(as_update(gradients))
        else:
            self._holding.pending.append(gradients.own())
            self._close_rounds(mask_of(gradients.buckets), now)

    def _answer_ask(self, request: Ask) -> Pushed:
        self._check_numbers(request.buckets)
        is_held = self._holding.ledger.is_held[request.buckets]
        return self._answer(request.header, request.buckets, np.where(is_held, Outcome.DUPLICATE, Outcome.MOVED))

    def _answer(self, header: Header, numbers: Numbers, outcomes: Numbers) -> Pushed:
        ledger = self._holding.ledger
        last = ledger.last_sequences(header.worker, header.incarnation, numbers)
        is_lasting = self._is_replicated
        durables = last if is_lasting else ledger.durable_sequences(header.worker, header.incarnation, numbers)
        return Pushed(
            buckets=numbers,
            outcomes=outcomes.astype(np.int8),
            sequences=last,
            durables=durables,
            versions=ledger.versions[numbers],
        )

    def _check_numbers(self, numbers: Numbers) -> None:
        is_right = numbers.ndim == 1 and numbers.dtype == np.int64
        if not is_right or (len(numbers) and not 0 <= numbers.min() <= numbers.max() < placement.BUCKETS):
            raise ServerRefusedError(f"{self.name}: buckets must be int64 (n,), from 0 to {placement.BUCKETS - 1}")

    def _check_parts(self, request: Push) -> None:
        self._check_numbers(request.buckets)
        for name, numbers in (("sequences", request.sequences), ("bases", request.bases)):
            if numbers.shape != request.buckets.shape or numbers.dtype != np.int64:
                raise ServerRefusedError(f"{self.name}: a push of {len(request.buckets)} parts needs as many {name}")
        if not _is_ascending(request.buckets):
            raise ServerRefusedError(f"{self.name}: the buckets of a push must be ascending and distinct")

    def _gradients(self, request: Push, is_next: Mask, now: float) -> Gradients | None:
        """Decode the parts that are next, and check all of them; None if there is none."""
        worker, numbers, ledger = request.header.worker, request.buckets, self._holding.ledger
        new = numbers[is_next]
        if not len(new):
            return None
        clock = int(ledger.clocks_of(worker, new).max(initial=0))
        if self.config.policy.merges == "by clock" and request.step < clock:
            raise ServerRefusedError(
                f"{self.name}: worker {worker!r} pushes for step {request.step} after it said that "
                f"{clock} steps are finished; push before advancing"
            )
        is_named, is_wanted = mask_of(numbers), mask_of(new)
        pieces = {}
        for key, payload in request.pieces.items():
            number = self._find_piece(key)
            if not is_named[number]:
                raise ServerRefusedError(f"{self.name}: the push has no part for bucket {number}, of which {key} is")
            if not is_wanted[number]:
                continue
            pieces[key] = self._decode_piece(key, payload)
            if key not in self.buckets[number].pieces:
                raise ServerRefusedError(
                    f"{self.name}: bucket {number} has no piece {key[1]} of {key[0]!r}; create it first"
                )
        rows = {}
        for table, (ids, payload) in request.rows.items():
            of_rows = self._check_ids(table, ids, is_named)
            width = self.config.schema.table(table).width
            if payload.shape != (len(ids), width):
                raise ServerRefusedError(
                    f"{self.name}: rows of {table!r} have shape {(len(ids), width)}, and {payload.shape} was pushed"
                )
            chosen = is_wanted[of_rows]
            if chosen.any():
                values = self._decode(payload, f"rows of {table!r}")
                if not chosen.all():
                    ids, of_rows, values = ids[chosen], of_rows[chosen], values[torch.from_numpy(chosen)]
                rows[table] = ids, of_rows, values
        bases = request.bases[is_next]
        versions = ledger.versions[new]  # after a failover a bucket may be of an older one than a worker has seen
        return Gradients(
            worker=worker,
            step=request.step,
            weight=request.weight,
            rate=request.rate,
            arrived=now,
            buckets=new,
            bases=np.where((bases >= 0) & (bases <= versions), bases, versions),
            pieces=pieces,
            rows=rows,
        )

    def _find_piece(self, key: PieceKey) -> int:
        """The bucket of a piece that the schema has."""
        self.config.schema.tensor(key[0]).piece_size(key[1])
        return self._holding.bucket_of[key]

    def _check_ids(self, table: str, ids: Numbers, is_named: Mask) -> Numbers:
        """Return the bucket of each id of a push."""
        self.config.schema.table(table)
        if ids.ndim != 1 or ids.dtype != np.int64 or not _is_ascending(ids):
            raise ServerRefusedError(f"{self.name}: ids of {table!r} must be int64 (n,), ascending and distinct")
        numbers = buckets_of_rows(table, ids)
        if not is_named[numbers].all():
            raise ServerRefusedError(
                f"{self.name}: some of the {len(ids)} ids of {table!r} are of buckets that the push has no part for"
            )
        return numbers

    # Clocks and rounds

    def _advance(self, request: Advance, now: float) -> Advanced:
        worker, numbers, ledger = request.header.worker, request.buckets, self._holding.ledger
        self._check_numbers(numbers)
        is_held = ledger.is_held[numbers]
        last = ledger.last_sequences(worker, request.header.incarnation, numbers)
        is_behind = is_held & (last < request.counts)
        advanced = ledger.advance(worker, request.clock, numbers[is_held & ~is_behind])
        self._close_rounds(mask_of(advanced), now)
        behind = dict(zip(numbers[is_behind].tolist(), last[is_behind].tolist(), strict=True))
        return Advanced(behind=behind, moved=tuple(numbers[~is_held].tolist()))

    def _close_rounds(self, is_touched: Mask, now: float) -> None:
        """Close the rounds of these buckets that may be closed."""
        pending = self._holding.pending
        if not pending:
            return
        if self.config.policy.merges == "by clock":
            least = self._holding.ledger.least_clocks()
            for step in sorted({one.step for one in pending}):
                is_ready = is_touched & (least > step)
                if is_ready.any():
                    places = [place for place, one in enumerate(self._holding.pending) if one.step == step]
                    took_part = [name for name, (_, joined) in self.members.items() if joined <= step]
                    self._close([(is_ready, places)], took_part)
            return
        closings = [
            (mask_of(numbers), list(firsts.values()))
            for numbers, firsts in self._open_quorums(is_touched)
            if self._verdict(firsts, now) == "close"
        ]
        if closings:
            self._close(closings)
            self._close_rounds(is_touched, now)

    def _close(self, closings: list[tuple[Mask, list[int]]], took_part: Collection[str] = ()) -> None:
        for several in self._holding.take_pending(closings):
            if several:
                merged = merge(several, self.config.reduction, self._holding.bucket_of, took_part)
                self._holding.apply(merged)

    def _open_quorums(self, is_touched: Mask) -> list[tuple[list[int], dict[str, int]]]:
        """Group the buckets that gradients wait in: those with the same pushes, by worker the place of its first."""
        places: dict[int, list[int]] = {}
        for place, one in enumerate(self._holding.pending):
            for number in one.buckets[is_touched[one.buckets]].tolist():
                places.setdefault(number, []).append(place)
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, found in sorted(places.items()):
            groups.setdefault(tuple(found), []).append(number)
        pending = self._holding.pending
        return [
            (numbers, {pending[place].worker: place for place in reversed(found)}) for found, numbers in groups.items()
        ]

    def _verdict(self, firsts: Mapping[str, int], now: float) -> str:
        policy = self.config.policy
        if policy.merges != "by quorum":
            return "open"
        arrivals = {worker: self._holding.pending[place].arrived for worker, place in firsts.items()}
        return policy.verdict(arrivals, self.members, now)

    # Pulls

    def _pull(self, request: Pull, now: float) -> Pulled:
        ledger = self._holding.ledger
        numbers = {table: buckets_of_rows(table, ids) for table, (ids, _) in request.rows.items()}
        self._check_numbers(np.array([*request.buckets], np.int64))
        is_wanted = mask_of(np.concatenate([np.array([*request.buckets], np.int64), *numbers.values()]))
        moved = np.flatnonzero(is_wanted & ~ledger.is_held)
        if len(moved):
            return Pulled(moved=tuple(moved.tolist()))
        self._close_rounds(is_wanted, now)
        self._check_quorums(is_wanted, now)
        slow = self.config.policy.slow_workers(ledger.slowest(np.flatnonzero(is_wanted)), request.clock)
        if slow:
            return Pulled(waiting_for=tuple(sorted(slow)))
        newer = [number for number, known in request.buckets.items() if ledger.versions[number] != known]
        return Pulled(
            versions={number: int(ledger.versions[number]) for number in newer},
            pieces={
                key: piece.hand_out() if request.codec.codec == "fp32" else encode(piece.values[0], request.codec)
                for number in newer
                for key, piece in self.buckets[number].pieces.items()
            },
            rows={table: self._rows(table, ids, known, request.codec) for table, (ids, known) in request.rows.items()},
        )

    def _check_quorums(self, is_wanted: Mask, now: float) -> None:
        if self.config.policy.merges != "by quorum":
            return
        for numbers, firsts in self._open_quorums(is_wanted):
            if self._verdict(firsts, now) == "failed":
                raise NoQuorumError(
                    f"{self.name}: {len(firsts)} of the {getattr(self.config.policy, 'least', '?')} workers of a "
                    f"quorum pushed to bucket {numbers[0]} in time; start more workers, or lower the quorum"
                )

    def _rows(self, table: str, ids: Numbers, known: Numbers, codec: CodecConfig) -> tuple[Numbers, Numbers, Payload]:
        """Gather rows of another version than is known; a row never pushed to is made, and not kept."""
        spec, held = self.config.schema.table(table), self._holding.tables[table]
        places = held.places(ids)
        is_held = places >= 0
        versions = np.zeros(len(ids), np.int64)
        versions[is_held] = held.versions[places[is_held]]
        is_new = versions != known
        ids, versions, places, is_held = ids[is_new], versions[is_new], places[is_new], is_held[is_new]
        if is_held.all():
            return ids, versions, encode(held.values[torch.from_numpy(places)], codec)
        values = torch.empty(len(ids), spec.width)
        values[torch.from_numpy(is_held)] = held.values[torch.from_numpy(places[is_held])]
        values[torch.from_numpy(~is_held)] = spec.first_rows(ids[~is_held])
        return ids, versions, encode(values, codec)

    # Snapshots, and buckets that come and go

    def snapshot(self, number: int) -> bytes:
        """Write a bucket as bytes.

        Raises:
            ServerRefusedError: the shard does not hold it.
        """
        config = self.config
        return snapshots.snapshot(self._held(number), self.fenced, run=config.run, schema=config.schema.digest)

    def sequences(self, number: int) -> Mapping[str, tuple[int, int]]:
        """Return what to hand to ``confirm`` once a snapshot that is taken now is safe."""
        return self._held(number).sequences

    def confirm(self, number: int, sequences: Mapping[str, tuple[int, int]]) -> None:
        """Note that a snapshot with these sequences is where a lost shard would be restored from."""
        for worker, (incarnation, sequence) in sequences.items():
            self._holding.ledger.confirm(number, worker, incarnation, sequence)

    def durable(self, number: int) -> dict[str, tuple[int, int]]:
        """Return the last sequence of each worker's incarnation that a checkpoint of a bucket holds."""
        found = self._holding.ledger.durable_in(number)
        return {worker: found[worker] for worker in self._held(number).sequences if worker in found}

    def adopt(self, data: bytes, *, place: str = "a snapshot") -> int:
        """Hold the bucket of a snapshot from now on, with the members that it knows; returns its number.

        Raises:
            ServerRefusedError: the snapshot is damaged, or of another run or model.
        """
        bucket = snapshots.restore(data, run=self.config.run, schema=self.config.schema.digest, place=place)
        at, ledger = np.array([bucket.number], np.int64), self._holding.ledger
        for worker, incarnation in bucket.fenced.items():
            self.fenced[worker] = max(incarnation, self.fenced.get(worker, -1))
        self._holding.put(bucket)
        known = dict(bucket.sequences)
        for worker, (incarnation, _) in bucket.sequences.items():
            held = self.members.get(worker, (-1, 0))[0]
            if incarnation <= self.fenced.get(worker, -1):
                ledger.forget(worker, at)
                del known[worker]
            elif held < incarnation:
                self.members[worker] = (incarnation, bucket.clocks[worker])
        for worker, (incarnation, clock) in self.members.items():
            if worker not in known or known[worker][0] != incarnation:
                ledger.admit(worker, incarnation, clock, at)
        self.confirm(bucket.number, self.sequences(bucket.number))
        return bucket.number

    def hold_empty(self, numbers: Collection[int]) -> None:
        """Hold buckets that have nothing yet."""
        for number in numbers:
            self._holding.hold(number)
        at = np.array([*numbers], np.int64)
        for worker, (incarnation, clock) in self.members.items():
            self._holding.ledger.admit(worker, incarnation, clock, at)

    def release(self, number: int) -> bytes:
        """Stop holding a bucket, and return its snapshot."""
        data = self.snapshot(number)
        self.drop(number)
        return data

    def drop(self, number: int) -> None:
        """Hold a bucket no longer."""
        self._holding.drop(number)


def _is_ascending(numbers: Numbers) -> bool:
    return not bool((numbers[1:] <= numbers[:-1]).any())

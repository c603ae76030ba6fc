"""A shard: buckets, and the rules by which requests change them. It neither waits, nor reads a clock, nor does I/O."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...storage.suggestions import unknown_choice
from ..errors import NoQuorumError, NotHeldError, NotJoinedError, ServerRefusedError, TrainerConfigError
from . import snapshots
from .bucket import Bucket, Gradients, Piece, Reduction, RowBlock, merge
from .messages import (
    PROTOCOL,
    READER,
    Ack,
    Advance,
    Advanced,
    Create,
    Header,
    Join,
    Joined,
    Leave,
    Part,
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
from .placement import bucket_of_piece, buckets_of_rows
from .policies import AnyPolicy
from .schema import Schema, TableSpec


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
    """Some of the buckets of a run. All mutable state: the buckets, the members, and which sequences are durable.

    ``members`` are the workers that others may have to wait for, with their incarnations and the clocks at which they
    joined. ``fenced`` are the incarnations of workers that were forgotten. Of ``buckets`` those are held that can hold
    something. With ``shares_memory`` a reply shares the memory of values until the next request, which is right only
    where the transport has copied it by then.
    """

    def __init__(
        self,
        name: str,
        config: ServerConfig,
        buckets: Collection[int] = (),
        *,
        is_replicated: bool = False,
        shares_memory: bool = False,
    ) -> None:
        self.name, self.config = name, config
        used = config.schema.buckets().tolist()
        self.buckets = {number: Bucket(number) for number in sorted(set(buckets) & set(used))}
        self.members: dict[str, tuple[int, int]] = {}
        self.fenced: dict[str, int] = {}
        self._is_replicated, self._shares_memory = is_replicated, shares_memory
        self._durable: dict[tuple[int, str], tuple[int, int]] = {}
        self._specs: dict[str, TableSpec] = {spec.name: spec for spec in config.schema.tables}

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
        if isinstance(request, Advance):
            return self._advance(request, now)
        return self._pull(request, now)

    def tick(self, now: float) -> None:
        """Close the rounds whose time is over."""
        for bucket in self.buckets.values():
            self._close_rounds(bucket, now)

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
            clocks = [one for bucket in self.buckets.values() for name, one in bucket.clocks.items() if name != worker]
            clock = max(request.clock, min(clocks, default=0))
        self.members[worker] = (incarnation, clock)
        for bucket in self.buckets.values():
            self._admit(bucket, worker)
        return Joined(clock=clock)

    def _admit(self, bucket: Bucket, worker: str) -> None:
        """Count a member in a bucket from its clock on, its sequences anew if it was another incarnation's."""
        incarnation, clock = self.members[worker]
        before = bucket.sequences.get(worker, (-1, 0))[0], bucket.clocks.get(worker)
        if before[0] != incarnation:
            bucket.sequences[worker] = (incarnation, 0)
        bucket.clocks[worker] = max(clock, bucket.clocks.get(worker, 0))
        if before != (incarnation, bucket.clocks[worker]):
            bucket.changes += 1

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
        for bucket in self.buckets.values():
            self._forget(bucket, worker, incarnation)
            self._close_rounds(bucket, now)

    @staticmethod
    def _forget(bucket: Bucket, worker: str, incarnation: int) -> None:
        bucket.fenced[worker] = max(incarnation, bucket.fenced.get(worker, -1))
        bucket.clocks.pop(worker, None)
        bucket.sequences.pop(worker, None)
        bucket.changes += 1

    # First values

    def _create(self, request: Create) -> None:
        new: list[tuple[Bucket, PieceKey, Tensor]] = []
        for key, payload in request.pieces.items():
            bucket = self._held(bucket_of_piece(*key))
            values = self._decode_piece(key, payload)
            if key not in bucket.pieces:
                new.append((bucket, key, values.clone()))
        for bucket, key, values in new:
            bucket.pieces[key] = Piece(values=values, state=self.config.dense.new_state(values))
            bucket.changes += 1

    def _held(self, number: int) -> Bucket:
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
        header = request.header
        if not 0 < request.weight < float("inf"):
            raise ServerRefusedError(f"{self.name}: a push has weight {request.weight}; it must be above 0 and finite")
        acks: dict[int, Ack] = {}
        new: list[tuple[Bucket, Part, Gradients]] = []
        ahead: dict[int, int] = {}
        for part in request.parts:
            bucket = self.buckets.get(part.bucket)
            if bucket is None:
                acks[part.bucket] = Ack(outcome="moved")
                continue
            last = ahead.get(part.bucket, bucket.last_sequence(header.worker, header.incarnation))
            if part.sequence <= last:
                acks[part.bucket] = self._ack("duplicate", bucket, header)
            elif part.sequence > last + 1:
                acks[part.bucket] = self._ack("gap", bucket, header)
            else:
                new.append((bucket, part, self._gradients(request, part, bucket, now)))
                ahead[part.bucket] = part.sequence
        for bucket, part, gradients in new:  # all are valid: nothing fails from here on
            bucket.sequences[header.worker] = (header.incarnation, part.sequence)
            bucket.changes += 1
            if not bucket.count_unit(request.unit, request.settled):  # another worker's of the same batch do
                acks[part.bucket] = self._ack("duplicate", bucket, header)
                continue
            if self.config.policy.merges == "no":
                self._apply(bucket, gradients)
            else:
                bucket.pending.append(_own(gradients))
                self._close_rounds(bucket, now)
            acks[part.bucket] = self._ack("applied", bucket, header)
        return Pushed(acks=acks)

    def _ack(self, outcome: str, bucket: Bucket, header: Header) -> Ack:
        last = bucket.last_sequence(header.worker, header.incarnation)
        incarnation, durable = self._durable.get((bucket.number, header.worker), (header.incarnation, 0))
        if self._is_replicated:
            durable = last
        elif incarnation != header.incarnation:
            durable = 0
        return Ack(outcome=outcome, sequence=last, durable=durable, version=bucket.version)  # type: ignore[arg-type]

    def _gradients(self, request: Push, part: Part, bucket: Bucket, now: float) -> Gradients:
        """Decode a part and check all of it against the bucket."""
        clock = bucket.clocks[request.header.worker]
        if self.config.policy.merges == "by clock" and request.step < clock:
            raise ServerRefusedError(
                f"{self.name}: worker {request.header.worker!r} pushes for step {request.step} after it said that "
                f"{clock} steps are finished; push before advancing"
            )
        if not 0 <= part.base <= bucket.version:
            # After a failover a bucket may be of an older version than a worker has seen.
            part_base = bucket.version
        else:
            part_base = part.base
        pieces = {}
        for key, payload in part.pieces.items():
            pieces[key] = self._decode_piece(key, payload)
            if bucket_of_piece(*key) != part.bucket or key not in bucket.pieces:
                raise ServerRefusedError(
                    f"{self.name}: bucket {part.bucket} has no piece {key[1]} of {key[0]!r}; create it first"
                )
        rows = {}
        for table, (ids, payload) in part.rows.items():
            self._check_ids(table, ids, part.bucket)
            width = self.config.schema.table(table).width
            if payload.shape != (len(ids), width):
                raise ServerRefusedError(
                    f"{self.name}: rows of {table!r} have shape {(len(ids), width)}, and {payload.shape} was pushed"
                )
            if len(ids):
                rows[table] = ids, self._decode(payload, f"rows of {table!r}")
        return Gradients(
            worker=request.header.worker,
            step=request.step,
            base=part_base,
            weight=request.weight,
            rate=request.rate,
            arrived=now,
            pieces=pieces,
            rows=rows,
        )

    def _check_ids(self, table: str, ids: NDArray[np.int64], bucket: int) -> None:
        if ids.ndim != 1 or ids.dtype != np.int64 or bool((ids[1:] <= ids[:-1]).any()):
            raise ServerRefusedError(f"{self.name}: ids of {table!r} must be int64 (n,), ascending and distinct")
        if len(ids) and bool((buckets_of_rows(table, ids) != bucket).any()):
            raise ServerRefusedError(f"{self.name}: some of the {len(ids)} ids of {table!r} are not of bucket {bucket}")

    def _apply(self, bucket: Bucket, gradients: Gradients) -> None:
        scale = 1 / (1 + bucket.version - gradients.base) if self.config.scales_by_staleness else 1.0
        bucket.apply(gradients, self._specs, self.config.dense, self.config.rows, scale)

    # Clocks and rounds

    def _advance(self, request: Advance, now: float) -> Advanced:
        worker, incarnation = request.header.worker, request.header.incarnation
        behind: dict[int, int] = {}
        moved: list[int] = []
        for number, count in zip(request.buckets.tolist(), request.counts.tolist(), strict=True):
            bucket = self.buckets.get(number)
            if bucket is None:
                moved.append(number)
                continue
            last = bucket.last_sequence(worker, incarnation)
            if last < count:
                behind[number] = last
            elif bucket.clocks[worker] < request.clock:
                bucket.clocks[worker] = request.clock
                bucket.changes += 1
                self._close_rounds(bucket, now)
        return Advanced(behind=behind, moved=tuple(moved))

    def _close_rounds(self, bucket: Bucket, now: float) -> None:
        if self.config.policy.merges == "by clock":
            least = min(bucket.clocks.values(), default=None)
            ready = sorted({one.step for one in bucket.pending if least is None or one.step < least})
            for step in ready:
                pushed = {one.worker for one in bucket.pending if one.step == step}
                took_part = {name for name, (_, joined) in self.members.items() if joined <= step}
                self._close(bucket, lambda one, step=step: one.step == step, len(took_part - pushed))  # type: ignore[misc]
        elif self._verdict(bucket, now) == "close":
            firsts = {id(one) for one in {one.worker: one for one in reversed(bucket.pending)}.values()}
            self._close(bucket, lambda one: id(one) in firsts)
            self._close_rounds(bucket, now)

    def _close(self, bucket: Bucket, belongs: Callable[[Gradients], bool], absent: int = 0) -> None:
        chosen = [one for one in bucket.pending if belongs(one)]
        bucket.pending = [one for one in bucket.pending if not belongs(one)]
        self._apply(bucket, merge(chosen, self.config.reduction, absent))

    def _verdict(self, bucket: Bucket, now: float) -> str:
        policy = self.config.policy
        if policy.merges != "by quorum":
            return "open"
        arrivals: dict[str, float] = {}
        for one in bucket.pending:
            arrivals.setdefault(one.worker, one.arrived)
        return policy.verdict(arrivals, self.members, now)

    # Pulls

    def _pull(self, request: Pull, now: float) -> Pulled:
        by_bucket = {table: buckets_of_rows(table, ids) for table, (ids, _) in request.rows.items()}
        wanted = set(request.buckets).union(*(set(found.tolist()) for found in by_bucket.values()))
        moved = tuple(sorted(wanted - set(self.buckets)))
        if moved:
            return Pulled(moved=moved)
        slow: set[str] = set()
        for number in sorted(wanted):
            bucket = self.buckets[number]
            self._close_rounds(bucket, now)
            slow.update(self.config.policy.slow_workers(bucket.clocks, request.clock))
            if self._verdict(bucket, now) == "failed":
                raise NoQuorumError(
                    f"{self.name}: {len({one.worker for one in bucket.pending})} of the "
                    f"{getattr(self.config.policy, 'least', '?')} workers of a quorum pushed to "
                    f"bucket {number} in time; start more workers, or lower the quorum"
                )
        if slow:
            return Pulled(waiting_for=tuple(sorted(slow)))
        is_shared = self._shares_memory or request.codec.codec != "fp32"
        newer = [number for number, known in request.buckets.items() if self.buckets[number].version != known]
        return Pulled(
            versions={number: self.buckets[number].version for number in newer},
            pieces={
                key: encode(piece.values[0] if is_shared else piece.values[0].clone(), request.codec)
                for number in newer
                for key, piece in self.buckets[number].pieces.items()
            },
            rows={
                table: self._rows(table, ids, known, by_bucket[table], request.codec)
                for table, (ids, known) in request.rows.items()
            },
        )

    def _rows(
        self,
        table: str,
        ids: NDArray[np.int64],
        known: NDArray[np.int64],
        numbers: NDArray[np.int64],
        codec: CodecConfig,
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Payload]:
        """Gather rows that are newer than known; a row never pushed to is made, and not kept."""
        spec = self.config.schema.table(table)
        versions = np.zeros(len(ids), np.int64)
        values = torch.empty(len(ids), spec.width)
        is_new = np.ones(len(ids), bool)
        for number in np.unique(numbers).tolist():
            block: RowBlock | None = self.buckets[number].tables.get(table)
            if block is None:
                continue
            at = np.flatnonzero(numbers == number)
            places = block.places(ids[at])
            at, places = at[places >= 0], places[places >= 0]
            versions[at], is_new[at] = block.versions[places], False
            values[torch.from_numpy(at)] = block.values[torch.from_numpy(places)]
        if is_new.any():
            values[torch.from_numpy(is_new)] = spec.first_rows(ids[is_new])
        kept = versions != known
        return ids[kept], versions[kept], encode(values[torch.from_numpy(kept)], codec)

    # Snapshots, and buckets that come and go

    def snapshot(self, number: int) -> bytes:
        """Write a bucket as bytes.

        Raises:
            ServerRefusedError: the shard does not hold it.
        """
        return snapshots.snapshot(self._held(number), run=self.config.run, schema=self.config.schema.digest)

    def sequences(self, number: int) -> Mapping[str, tuple[int, int]]:
        """Return what to hand to ``confirm`` once a snapshot that is taken now is safe."""
        return dict(self._held(number).sequences)

    def confirm(self, number: int, sequences: Mapping[str, tuple[int, int]]) -> None:
        """Note that a snapshot with these sequences is where a lost shard would be restored from."""
        for worker, pair in sequences.items():
            self._durable[number, worker] = pair

    def durable(self, number: int) -> dict[str, tuple[int, int]]:
        """Return the last sequence of each worker's incarnation that a checkpoint of a bucket holds."""
        workers = self._held(number).sequences
        return {one: self._durable[number, one] for one in workers if (number, one) in self._durable}

    def adopt(self, data: bytes, *, place: str = "a snapshot") -> int:
        """Hold the bucket of a snapshot from now on, with the members that it knows; returns its number.

        Raises:
            ServerRefusedError: the snapshot is damaged, or of another run or model.
        """
        bucket = snapshots.restore(data, run=self.config.run, schema=self.config.schema.digest, place=place)
        for worker, incarnation in bucket.fenced.items():
            self.fenced[worker] = max(incarnation, self.fenced.get(worker, -1))
        for worker, (incarnation, _) in list(bucket.sequences.items()):
            held = self.members.get(worker, (-1, 0))[0]
            if incarnation <= self.fenced.get(worker, -1):
                self._forget(bucket, worker, incarnation)
            elif worker in bucket.clocks and held < incarnation:
                self.members[worker] = (incarnation, bucket.clocks[worker])
        self.buckets[bucket.number] = bucket
        for worker in self.members:
            if worker not in bucket.clocks or bucket.sequences[worker][0] != self.members[worker][0]:
                self._admit(bucket, worker)
        self.confirm(bucket.number, bucket.sequences)
        return bucket.number

    def hold_empty(self, numbers: Collection[int]) -> None:
        """Hold buckets that have nothing yet."""
        for number in numbers:
            self.buckets[number] = Bucket(number)
            for worker in self.members:
                self._admit(self.buckets[number], worker)

    def release(self, number: int) -> bytes:
        """Stop holding a bucket, and return its snapshot."""
        data = self.snapshot(number)
        del self.buckets[number]
        return data


def _own(gradients: Gradients) -> Gradients:
    """Copy gradients that are kept beyond the request whose memory they share."""
    return Gradients(
        worker=gradients.worker,
        step=gradients.step,
        base=gradients.base,
        weight=gradients.weight,
        rate=gradients.rate,
        arrived=gradients.arrived,
        pieces={key: tensor.clone() for key, tensor in gradients.pieces.items()},
        rows={table: (ids.copy(), values.clone()) for table, (ids, values) in gradients.rows.items()},
    )

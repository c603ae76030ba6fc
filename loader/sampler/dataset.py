"""The schedule of one data set, whose epochs are cut by their own batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import PartitionError, StateMismatchError
from ..order.costs.buckets import Bucket, BucketedOrder, add_buckets, check_bucket, plan_epoch
from ..order.costs.steps import BudgetSteps, EvenSteps, Steps
from ..order.outputs import Cursors
from ..order.plan import Choice, Order, Share, choose_order, lane_offsets, lane_sizes, lane_turns, require_steps
from ..order.spans import EpochCourse, SourceOrder
from ..order.state import FILTER, PACKING, LoaderState
from .schedule import Place, Schedule

if TYPE_CHECKING:
    from ..dataset.manifest import Manifest
    from ..order.costs.costs import SampleCosts
    from ..order.selecting import Selection
    from ..ranks.ledger import Ledgers


class DatasetSchedule(Schedule):
    """The order of one data set, and the cuts of its epochs into batches.

    Where samples are dropped or packed, ranks share progress in ``ledgers``, and ``stream_kind`` is what states
    record of it; ``only_skips``: nothing is dropped but bad samples, so that states of a loader without drops fit.

    Raises:
        ConfigError: no order has such a seed, number of lanes, window or piece.
        PartitionError: an epoch has no batch.
    """

    subject = "a loader that drops or packs samples"

    def __init__(
        self,
        manifest: Manifest,
        *,
        seed: int,
        shuffle: bool,
        lanes: Choice,
        window: Choice,
        piece: Choice,
        share: Share,
        last_batch: str,
        selection: Selection | None = None,
        bucket: Bucket | None = None,
        bucket_costs: Sequence[SampleCosts] | None = None,
        ledgers: Ledgers | None = None,
        stream_kind: Mapping[str, Any] | None = None,
        only_skips: bool = False,
    ) -> None:
        self._manifest = manifest
        self._of = selection
        self._bucket = bucket
        self._bucket_costs = None if bucket_costs is None else bucket_costs[0]
        self._selection = {} if selection is None else selection.to_dict()
        self._num_samples = manifest.num_samples if selection is None else selection.num_samples
        counts = manifest.samples if selection is None else selection.counts
        self._last_batch = last_batch
        self._cut: tuple[object, BudgetSteps] | None = None
        # What "auto" chose is no condition on a state that is loaded later: its own are taken over.
        self._fixed = {
            name: None if choice == "auto" else choice
            for name, choice in (("lanes", lanes), ("window", window), ("piece", piece))
        }
        order = choose_order(
            seed=seed,
            shuffle=shuffle,
            lanes=lanes,
            window=window,
            piece=piece,
            world_size=share.world_size,
            chunk_samples=counts[counts > 0],
            chunk_memory=manifest.memory[counts > 0],
        )
        self._order: Order = order if bucket is None else self._with_buckets(order, bucket, share)
        self._kind = stream_kind or {}
        self._only_skips = only_skips
        if ledgers is not None:
            from .unsized import Unsized

            self.unsized = Unsized(ledgers, [self._kind], lambda: self.orders, is_mixed=False)
        self.check_share(share)
        self.share = share

    @property
    def order(self) -> Order:
        return self._order

    @property
    def orders(self) -> Sequence[SourceOrder]:
        samples, costs = self._manifest.samples, self._bucket_costs
        return [SourceOrder(chunk_samples=samples, order=self._order, selection=self._of, bucket_costs=costs)]

    def course(self, epoch: int, consumed: int) -> EpochCourse:
        return EpochCourse(epoch, consumed)

    def _with_buckets(self, order: Order, bucket: Bucket, share: Share) -> BucketedOrder:
        assert self._bucket_costs is not None
        window = order.window * (order.piece or self._num_samples / self._manifest.num_chunks)
        return add_buckets(
            order, bucket, self._bucket_costs, global_batch_size=share.global_batch_size, window_samples=window
        )

    # -- epochs ---------------------------------------------------------------------------------------------------

    def check_share(self, share: Share) -> None:
        if self._kind.get("kind") == PACKING:  # few samples may make many sequences
            return
        if share.budget is None:
            require_steps(self._num_samples, share.global_batch_size, self._last_batch, world_size=share.world_size)
        elif not self._steps(0, share).ahead(0, 1):
            raise PartitionError(
                f"batch_tokens: all {self._num_samples:,} samples are less than a batch of {share.budget.tokens:,} "
                "tokens, and last_batch='drop' leaves nothing; give fewer tokens, or last_batch='partial'"
            )

    def steps(self, epoch: int) -> Steps:
        return self._steps(epoch, self.share)

    def _steps(self, epoch: int, share: Share) -> Steps:
        if share.budget is None:
            return EvenSteps(self._num_samples, share.global_batch_size, self._last_batch)
        key = (epoch, self._order, share.budget)
        if self._cut is None or self._cut[0] != key:
            plan = plan_epoch(self._manifest.samples, self._order, epoch, self._of, self._bucket_costs)
            self._cut = key, BudgetSteps(plan, share.budget, self._last_batch)
        return self._cut[1]

    def rest_at(self, epoch: int, consumed: int) -> int:
        return 0 if self.steps(epoch).ahead(consumed, 1) else self._num_samples - consumed

    def check_epoch(self, epoch: int) -> None:
        """Check nothing: every epoch begins at its position 0."""

    def go_to(self, epoch: int, consumed: int, *, is_back: bool) -> None:
        """Do nothing, as in ``check_epoch``."""

    # -- states ---------------------------------------------------------------------------------------------------

    def to_state(self, epoch: int, consumed: int) -> LoaderState:
        from ..order.mixture import Lap

        stream: Mapping[str, Any] = {}
        if self.unsized is not None:
            stream = {**self._kind, **self.unsized.cursors_at(0, Lap(epoch, consumed)).to_dict()}
        order = self._order
        return LoaderState(
            fingerprint=self._manifest.fingerprint,
            num_samples=self._manifest.num_samples,
            seed=order.seed,
            shuffle=order.shuffle,
            lanes=order.lanes,
            window=order.window,
            piece=order.piece,
            epoch=epoch,
            consumed=consumed,
            selection=self._selection,
            bucket=order.bucket if isinstance(order, BucketedOrder) else {},
            stream=stream,
        )

    def check_state(self, state: Mapping[str, Any]) -> LoaderState:
        loaded = LoaderState.from_dict(state)
        loaded.check(
            fingerprint=self._manifest.fingerprint,
            num_samples=self._manifest.num_samples,
            seed=self._order.seed,
            shuffle=self._order.shuffle,
            **self._fixed,
            selection=self._selection,
        )
        check_bucket(self._bucket, self._order, loaded.bucket, loaded.lanes)
        if self.unsized is None:
            _refuse_stream(loaded)
        else:
            _check_stream(loaded, self._kind, only_skips=self._only_skips)
        if loaded.consumed > self._num_samples and loaded.stream.get("kind") != PACKING:
            raise StateMismatchError(
                f"a damaged loader state: consumed={loaded.consumed} of {self._num_samples} samples of the subset"
            )
        if self.unsized is not None and _is_alike(loaded, self._kind):
            _read_cursors(loaded, self._kind, self._num_samples)
        return loaded

    def load(self, state: LoaderState) -> tuple[Place, Sequence[str]]:
        from ..order.mixture import Lap

        self._order = state.order
        if self.unsized is not None:
            cursors: dict[int, Cursors] = {}
            if _is_alike(state, self._kind):
                cursors[0] = _read_cursors(state, self._kind, self._num_samples)
            elif state.consumed:
                cursors[0] = Cursors.of_all(state.consumed, state.lanes)
            start, here = Lap(state.epoch), Lap(state.epoch, state.consumed)
            self.unsized.load(state.epoch, (start,), (here,), cursors)
        return (state.epoch, state.consumed), ()


def _refuse_stream(loaded: LoaderState) -> None:
    """Raise StateMismatchError where a state is amid an epoch with dropped samples, which this loader does not drop."""
    if loaded.stream and loaded.consumed:
        raise StateMismatchError(
            "the state is inside an epoch of a loader with keep=, may_drop=, packing= or on_error='skip', and this "
            "one drops nothing and packs nothing; give it the same, or start from its next epoch with set_epoch. "
            "on_error='skip' with max_errors=0 drops nothing from here on"
        )


def _is_alike(loaded: LoaderState, kind: Mapping[str, Any]) -> bool:
    """Return whether the cursors of a state mean the same to a loader of this kind."""
    return bool(loaded.stream) and {name: loaded.stream.get(name) for name in kind} == kind


def _check_stream(loaded: LoaderState, kind: Mapping[str, Any], *, only_skips: bool) -> None:
    """Raise StateMismatchError where a state is amid an epoch whose samples are dropped or packed differently."""
    if loaded.consumed and not loaded.stream and not only_skips:
        raise StateMismatchError(
            "the state is inside an epoch of a loader that drops nothing and packs nothing, and this one does; "
            "load it there, or start from its next epoch with set_epoch (on_error='skip' alone can begin here)"
        )
    if not loaded.stream:
        return
    of_state = loaded.stream.get("kind")
    if of_state not in (FILTER, PACKING):
        raise StateMismatchError(f"a damaged loader state: stream of kind {of_state!r}")
    if not loaded.consumed or _is_alike(loaded, kind):
        return
    if of_state != kind["kind"]:
        has, here = ("packs", "does not") if of_state == PACKING else ("does not pack", "does")
        raise StateMismatchError(
            f"the state is inside an epoch of a loader that {has} documents, and this one {here}; give it the "
            "same packing=, or start from its next epoch with set_epoch"
        )
    raise StateMismatchError(
        "the state is inside an epoch of a loader that packs documents otherwise (seq_len, method, tokenizer, eos "
        "or another setting of Packing, which decides what sequences there are); give it the same packing=, or "
        "start from its next epoch with set_epoch"
    )


def _read_cursors(loaded: LoaderState, kind: Mapping[str, Any], num_samples: int) -> Cursors:
    """Read the cursors of a state. Raises StateMismatchError where they are damaged."""
    lanes, unit = loaded.lanes, kind.get("unit")
    cursors = Cursors.from_dict(loaded.stream, lanes=lanes, consumed=loaded.consumed, one_each=unit is None)
    due = lane_offsets(np.array(loaded.consumed, np.int64), lane_turns(lanes))
    sizes = lane_sizes(num_samples, lanes)
    left = cursors.offsets <= sizes
    if unit is None:
        left &= cursors.taken - cursors.outputs <= sizes - cursors.offsets
    else:
        left &= cursors.offsets % unit == 0
    if not left.all() or not (cursors.in_tail or (cursors.taken == due).all()):
        raise StateMismatchError("a damaged loader state: its cursors point past the ends of lanes")
    return cursors

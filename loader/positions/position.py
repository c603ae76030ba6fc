"""Where a loader is in its run: its order, its epoch, and how much of the epoch is consumed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from ..dataset.manifest import Manifest
from ..errors import PartitionError, StateMismatchError
from ..order.auto import Choice, choose_order
from ..order.costs.buckets import Bucket, BucketedOrder, add_buckets, plan_epoch, size_in_lanes
from ..order.costs.costs import SampleCosts
from ..order.costs.steps import BudgetSteps, EvenSteps, Steps, skip_steps
from ..order.courses import EpochCourse
from ..order.cursors import Cursors
from ..order.plan import Order, Share, require_steps
from ..order.selecting.selection import Selection
from ..order.spans import Course, SourceOrder
from ..order.state import PACKING, LoaderState
from ..pipeline.delivery_queue import Delivery

Tell = Callable[[int, int, int], None]  # gets positions of an epoch: (epoch, start, stop)


def tell_nobody(epoch: int, start: int, stop: int) -> None:
    pass


class State(Protocol):
    """What a position is saved as."""

    def to_dict(self) -> dict[str, Any]: ...


class RunPosition(ABC):
    """The first sample of a run that has not been handed out.

    The first ``consumed`` positions of ``epoch`` have been handed out. Where no batch is left of an epoch, ``epoch``
    stays what it is until the next one begins, so that it is the epoch of the last batch; ``upcoming`` tells where that
    next batch is. ``share`` is what is cut out of global batches, ``is_loaded`` says that no batch was handed out since
    a state was loaded, ``times_set`` how often an epoch was set. Used by the training loop's thread only.
    """

    drops_samples = False

    def __init__(self, share: Share) -> None:
        self.epoch, self.consumed = 0, 0
        self.is_loaded = False
        self.times_set = 0
        self.check_share(share)
        self.share = share

    @property
    @abstractmethod
    def order(self) -> Order:
        """What decides the order of samples, beside the data."""

    @property
    @abstractmethod
    def orders(self) -> Sequence[SourceOrder]:
        """The order of each source."""

    @abstractmethod
    def course(self, epoch: int, consumed: int) -> Course:
        """What the run takes from a position on, which is the upcoming one or the beginning of an epoch."""

    @abstractmethod
    def check_share(self, share: Share) -> None:
        """Raise PartitionError if an epoch has no batch with this share."""

    @abstractmethod
    def _steps(self, epoch: int) -> Steps:
        """The batches of an epoch."""

    @abstractmethod
    def to_state(self) -> State:
        """The upcoming position with what makes it good for another loader."""

    @abstractmethod
    def check_state(self, state: Mapping[str, Any]) -> Any:
        """Read a state that is to be continued here.

        Raises:
            StateMismatchError: the state is of another data set, seed or order, or damaged; names what differs.
        """

    @abstractmethod
    def load(self, state: Any, tell: Tell = tell_nobody) -> None:
        """Take over the order and position of a state that ``check_state`` returned; ``tell`` as of ``skip_end``."""

    def change_share(self, share: Share, tell: Tell = tell_nobody) -> None:
        """From the upcoming batch on, cut global batches as ``share`` says, which ``check_share`` has seen.

        ``tell`` as of ``skip_end``, of what only the new batches do not fit into.
        """
        self.skip_end()  # of what had no batch left before
        self.share = share
        self.skip_end(tell)

    @property
    def steps_per_epoch(self) -> int:
        """Batches of a whole epoch; of ``batch_tokens`` each epoch has a number of its own, which takes a scan.

        Raises:
            TypeError: only reading tells, or the epoch never ends.
        """
        return self._steps(self.epoch).count(0)

    @property
    def steps_left(self) -> int:
        """Batches from here to the epoch's end. Raises TypeError where ``steps_per_epoch`` does."""
        return self._steps(self.epoch).count(self.consumed)

    @property
    def upcoming(self) -> tuple[int, int]:
        """Where the next batch is, as (epoch, consumed): here, or at the beginning of the next epoch."""
        has_more = self._steps(self.epoch).ahead(self.consumed, 1)
        return (self.epoch, self.consumed) if has_more else (self.epoch + 1, 0)

    def _rest_at(self, epoch: int, consumed: int) -> int:
        """Samples of an epoch that are left at a position and fill no batch, where arithmetic tells."""
        return 0

    @property
    def tail(self) -> int:
        """Samples of the epoch that are left here and dropped, because they fill no batch of ``batch_tokens``."""
        return 0 if self.share.budget is None else self._rest_at(self.epoch, self.consumed)

    def follows(self, item: Delivery) -> bool:
        """Whether a delivery, a batch or the end of an epoch, is the one that comes next here."""
        return self.upcoming == ((item.epoch + 1, 0) if item.is_end else (item.epoch, item.start))

    def advance(self, epoch: int, consumed: int) -> None:
        """Note that a batch was handed out, up to position ``consumed`` of ``epoch``."""
        self.epoch, self.consumed, self.is_loaded = epoch, consumed, False

    def take(self, item: Delivery) -> None:
        """Note that a delivery was taken: a batch was handed out, or an epoch has ended."""
        self.advance(*((item.epoch + 1, 0) if item.is_end else (item.epoch, item.stop)))

    def save(self) -> tuple[Any, ...]:
        """Where it is, for ``restore``."""
        return self.epoch, self.consumed, self.is_loaded

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Go back to where it was when ``save`` returned this."""
        self.epoch, self.consumed, self.is_loaded = saved

    def cursors(self) -> Cursors | None:
        """Where each lane stands, where that is not arithmetic."""
        return None

    @property
    def pass_start(self) -> tuple[int, int]:
        """Where a pass would begin now, as (epoch, consumed)."""
        return (self.epoch, self.consumed) if self.is_loaded else (self.upcoming[0], 0)

    def begin_pass(self) -> bool:
        """Go to where a pass begins: to the upcoming epoch's beginning, or nowhere if a state was just loaded.

        Returns whether that is another place than the upcoming one, so that what was read ahead is of no use.
        """
        moved = self.upcoming != self.pass_start
        self.epoch, self.consumed = self.pass_start
        return moved

    def set_epoch(self, epoch: int) -> bool:
        """Go to an epoch's beginning, unless a state just loaded is inside it; returns what ``begin_pass`` returns."""
        if self.is_loaded and epoch == self.epoch:
            return False
        moved = self.upcoming != (epoch, 0)
        self.epoch, self.consumed, self.is_loaded = epoch, 0, False
        self.times_set += 1
        return moved

    def skip_end(self, tell: Tell = tell_nobody) -> None:
        """Go to the next epoch's beginning if no batch is left here.

        ``tell`` gets what is left and fills none, where arithmetic tells, as (epoch, start, stop).
        """
        self._tell_rest(self.epoch, self.consumed, tell)
        self.epoch, self.consumed = self.upcoming

    def _tell_rest(self, epoch: int, consumed: int, tell: Tell) -> None:
        if rest := self._rest_at(epoch, consumed):
            tell(epoch, consumed, consumed + rest)

    def skip(self, steps: int, tell: Tell, tell_rest: Tell = tell_nobody) -> None:
        """Go to where a loaded state would be that is ``steps`` batches on, through the ends of epochs.

        ``tell`` gets the positions passed over as (epoch, start, stop), ``tell_rest`` what fills no batch at the end
        of an epoch; if one raises, this stays where it was.
        """
        ended = partial(self._tell_rest, tell=tell_rest)
        self.epoch, self.consumed = skip_steps(*self.upcoming, steps, self._steps, tell, ended)
        self.is_loaded = True


class Position(RunPosition):
    """The position of a loader of one data set, and its order.

    Raises:
        ConfigError: no order has such a seed, number of lanes, window or piece.
        PartitionError: an epoch has no batch.
    """

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
        bucket_costs: SampleCosts | None = None,
    ) -> None:
        self._manifest = manifest
        self._of = selection
        self._bucket = bucket
        self._bucket_costs = bucket_costs
        self._selection = {} if selection is None else selection.to_dict()
        self._num_samples = manifest.num_samples if selection is None else selection.num_samples
        counts = manifest.samples if selection is None else selection.counts
        self._last_batch = last_batch
        self._cut: tuple[object, BudgetSteps] | None = None
        # What "auto" chose is no condition on a state that is loaded later: its own are taken over.
        self._fixed_lanes = None if lanes == "auto" else lanes
        self._fixed_window = None if window == "auto" else window
        self._fixed_piece = None if piece == "auto" else piece
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
        super().__init__(share)

    @property
    def order(self) -> Order:
        return self._order

    @property
    def orders(self) -> Sequence[SourceOrder]:
        samples, costs = self._manifest.samples, self._bucket_costs
        return [SourceOrder(chunk_samples=samples, order=self.order, selection=self._of, bucket_costs=costs)]

    def course(self, epoch: int, consumed: int) -> EpochCourse:
        return EpochCourse(epoch, consumed)

    def _with_buckets(self, order: Order, bucket: Bucket, share: Share) -> BucketedOrder:
        assert self._bucket_costs is not None
        window = order.window * (order.piece or self._num_samples / self._manifest.num_chunks)
        return add_buckets(
            order, bucket, self._bucket_costs, global_batch_size=share.global_batch_size, window_samples=window
        )

    def check_share(self, share: Share) -> None:
        if share.budget is None:
            require_steps(self._num_samples, share.global_batch_size, self._last_batch, world_size=share.world_size)
        elif not self._steps(0, share).ahead(0, 1):
            raise PartitionError(
                f"batch_tokens: all {self._num_samples:,} samples are less than a batch of {share.budget.tokens:,} "
                "tokens, and last_batch='drop' leaves nothing; give fewer tokens, or last_batch='partial'"
            )

    def _steps(self, epoch: int, share: Share | None = None) -> Steps:
        share = share or self.share
        if share.budget is None:
            return EvenSteps(self._num_samples, share.global_batch_size, self._last_batch)
        key = (epoch, self.order, share.budget)
        if self._cut is None or self._cut[0] != key:
            plan = plan_epoch(self._manifest.samples, self.order, epoch, self._of, self._bucket_costs)
            self._cut = key, BudgetSteps(plan, share.budget, self._last_batch)
        return self._cut[1]

    def _rest_at(self, epoch: int, consumed: int) -> int:
        return 0 if self._steps(epoch).ahead(consumed, 1) else self._num_samples - consumed

    def to_state(self) -> LoaderState:
        """The upcoming position with what makes it good for another loader: the data set's identity and the order."""
        return self._state({})

    def _state(self, stream: Mapping[str, Any]) -> LoaderState:
        epoch, consumed = self.upcoming
        return LoaderState(
            fingerprint=self._manifest.fingerprint,
            num_samples=self._manifest.num_samples,
            seed=self.order.seed,
            shuffle=self.order.shuffle,
            lanes=self.order.lanes,
            window=self.order.window,
            piece=self.order.piece,
            epoch=epoch,
            consumed=consumed,
            selection=self._selection,
            bucket=self.order.bucket if isinstance(self.order, BucketedOrder) else {},
            stream=stream,
        )

    def check_state(self, state: Mapping[str, Any]) -> LoaderState:
        """Read a state that is to be continued here.

        Raises:
            StateMismatchError: the state is of another data set, seed or order, or damaged; names what differs.
        """
        loaded = LoaderState.from_dict(state)
        loaded.check(
            fingerprint=self._manifest.fingerprint,
            num_samples=self._manifest.num_samples,
            seed=self.order.seed,
            shuffle=self.order.shuffle,
            lanes=self._fixed_lanes,
            window=self._fixed_window,
            piece=self._fixed_piece,
            selection=self._selection,
        )
        self._check_bucket(loaded)
        self._check_stream(loaded)
        if loaded.consumed > self._num_samples and loaded.stream.get("kind") != PACKING:
            raise StateMismatchError(
                f"a damaged loader state: consumed={loaded.consumed} of {self._num_samples} samples of the subset"
            )
        return loaded

    def _check_bucket(self, loaded: LoaderState) -> None:
        """Raise StateMismatchError unless the state's buckets are those of this loader, where it was told."""
        here = self.order.bucket if isinstance(self.order, BucketedOrder) else {}
        if bool(here) != bool(loaded.bucket):
            raise StateMismatchError(
                "the state belongs to another run's order and cannot be resumed here; bucket=: "
                f"{loaded.bucket or 'none'} in the state, {here or 'none'} here"
            )
        if not here or self._bucket is None:
            return
        # Both were told in samples; the lanes, and what was not told, are the state's.
        sizes = size_in_lanes(self._bucket, loaded.lanes, global_batch_size=loaded.bucket["run"] * loaded.lanes)
        told = dict(zip(("run", "pool"), sizes, strict=True))
        here |= {name: told[name] if getattr(self._bucket, name) != "auto" else loaded.bucket[name] for name in told}
        if loaded.bucket != here:
            raise StateMismatchError(
                f"the state belongs to another run's order and cannot be resumed here; bucket=: {loaded.bucket} in the "
                f"state, {here} here (run and pool are samples of a lane, costs is the index's checksum)"
            )

    def _check_stream(self, loaded: LoaderState) -> None:
        """Raise StateMismatchError where one of the two drops samples, and it matters."""
        if loaded.stream and loaded.consumed:
            raise StateMismatchError(
                "the state is inside an epoch of a loader with keep=, may_drop=, packing= or on_error='skip', and this "
                "one drops nothing and packs nothing; give it the same, or start from its next epoch with set_epoch. "
                "on_error='skip' with max_errors=0 drops nothing from here on"
            )

    def load(self, state: LoaderState, tell: Tell = tell_nobody) -> None:
        self._order = state.order
        self.epoch, self.consumed, self.is_loaded = state.epoch, state.consumed, True
        self.skip_end(tell)

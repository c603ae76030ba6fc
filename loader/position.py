"""Where a loader is in its run: its order, its epoch, and how much of the epoch is consumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .dataset.manifest import Manifest
from .errors import StateMismatchError
from .order.auto import Choice, choose_order
from .order.plan import count_steps, require_steps
from .order.selection import Selection
from .order.state import LoaderState


class Position:
    """The order of a loader, and the first sample of it that has not been handed out.

    The first ``consumed`` positions of ``epoch`` have been handed out. Where no batch is left of an epoch, ``epoch``
    stays what it is until the next one begins, so that it is the epoch of the last batch; ``upcoming`` tells where that
    next batch is. ``is_loaded`` says that no batch was handed out since a state was loaded, ``times_set`` how often an
    epoch was set. Used by the training loop's thread only.

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
        world_size: int,
        global_batch_size: int,
        last_batch: str,
        selection: Selection | None = None,
    ) -> None:
        self._manifest = manifest
        self._selection = {} if selection is None else selection.to_dict()
        self._num_samples = manifest.num_samples if selection is None else selection.num_samples
        counts = manifest.samples if selection is None else selection.counts
        self._global_batch_size = global_batch_size
        self._last_batch = last_batch
        # What "auto" chose is no condition on a state that is loaded later: its own are taken over.
        self._fixed_lanes = None if lanes == "auto" else lanes
        self._fixed_window = None if window == "auto" else window
        self._fixed_piece = None if piece == "auto" else piece
        self.order = choose_order(
            seed=seed,
            shuffle=shuffle,
            lanes=lanes,
            window=window,
            piece=piece,
            world_size=world_size,
            chunk_samples=counts[counts > 0],
            chunk_memory=manifest.memory[counts > 0],
        )
        self.steps_per_epoch = require_steps(self._num_samples, global_batch_size, last_batch, world_size=world_size)
        self.epoch, self.consumed = 0, 0
        self.is_loaded = False
        self.times_set = 0

    @property
    def steps_left(self) -> int:
        """Batches from here to the epoch's end."""
        return count_steps(self._num_samples, self.consumed, self._global_batch_size, self._last_batch)

    @property
    def upcoming(self) -> tuple[int, int]:
        """Where the next batch is, as (epoch, consumed): here, or at the beginning of the next epoch."""
        return (self.epoch, self.consumed) if self.steps_left else (self.epoch + 1, 0)

    def advance(self, epoch: int, consumed: int) -> None:
        """Note that a batch was handed out, up to position ``consumed`` of ``epoch``."""
        self.epoch, self.consumed, self.is_loaded = epoch, consumed, False

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

    def skip_end(self) -> None:
        """Go to the next epoch's beginning if no batch is left here."""
        self.epoch, self.consumed = self.upcoming

    def skip(self, steps: int, tell: Callable[[int, int, int], None]) -> None:
        """Go to where a loaded state would be that is ``steps`` batches on, through the ends of epochs.

        ``tell`` gets the positions passed over as (epoch, start, stop); if it raises, this stays where it was. What
        ``last_batch="drop"`` drops is not among them.
        """
        samples, size = self._num_samples, self._global_batch_size
        epoch, consumed = self.upcoming
        while steps:
            left = count_steps(samples, consumed, size, self._last_batch)
            taken = min(steps, left)
            stop = min(consumed + taken * size, samples)
            tell(epoch, consumed, stop)
            steps -= taken
            epoch, consumed = (epoch, stop) if taken < left else (epoch + 1, 0)
        self.epoch, self.consumed, self.is_loaded = epoch, consumed, True

    def to_state(self) -> LoaderState:
        """The upcoming position with what makes it good for another loader: the data set's identity and the order."""
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
        if loaded.consumed > self._num_samples:
            raise StateMismatchError(
                f"a damaged loader state: consumed={loaded.consumed} of {self._num_samples} samples of the subset"
            )
        return loaded

    def load(self, state: LoaderState) -> None:
        """Take over the order and position of a state that ``check_state`` returned."""
        self.order = state.order
        self.epoch, self.consumed, self.is_loaded = state.epoch, state.consumed, True
        self.skip_end()
